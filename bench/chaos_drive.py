"""The driver of the chaos bench: adapters on their way, one fault after another, an operator, and an end of it."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime

from bench.chaos_boundaries import BOUNDARIES, Traps
from bench.chaos_calm import wait_until_settled
from bench.chaos_events import EVENTS
from bench.chaos_faults import CLASSES
from bench.chaos_processes import restart, revive
from bench.chaos_store import KINDS, StoreTraps, count_faults, plan_faults
from bench.chaos_world import World, patiently
from flows.retrying import Way, carry_out, plan_failed

_IN_FLIGHT = (4, 6)
_TRAINED_EACH = 5  # of so many adapters one is for vLLM, while there are some
_SENDING = frozenset({*EVENTS, "disk_full"})  # these send an adapter themselves
_TRAPS = 3  # boundaries at a time that kill whoever comes there
_STORE_TRAPS = 2  # kinds of the store's faults at a time that the next request meets
_OPERATOR_S = 10.0  # between two looks of the operator
_TURN_S = 0.5


class Driver:
    """Brings about the faults that are wanted of each class, first those of which there were fewest."""

    def __init__(self, world: World, wanted: Mapping[str, int], adapters: int) -> None:
        self.world, self.wanted, self.adapters = world, wanted, adapters
        self.tried: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._traps = Traps(world)
        self._store_traps = StoreTraps(world)
        self._operator = Operator(world)
        self._in_flight = world.rng.randint(*_IN_FLIGHT)

    def faults(self) -> dict[str, int]:
        """How many there were of each class that is wanted; of the store's, what its proxy has counted."""
        done = self._done + self._traps.killed
        met = count_faults(self.world)
        # Who is killed at a request is reset there, which is not what that class is about.
        met["s3_reset"] = max(0, met["s3_reset"] - self._traps.killed.total() - self.tried["kill_sync"])
        return {name: met[name] if name in KINDS else done[name] for name in self.wanted}

    def missing(self) -> dict[str, int]:
        """How many are missing of each class that has not its number, and of the adapters."""
        faults = self.faults()
        left = {name: count - faults[name] for name, count in self.wanted.items() if faults[name] < count}
        sent = self.adapters - len(self.world.sent)
        return left | ({"adapters": sent} if sent > 0 else {})

    def drive(self, within_s: float) -> None:
        """Go on until each class has its number and so have the adapters, but no longer than that."""
        world = self.world
        deadline = time.monotonic() + within_s
        if any(name in KINDS for name in self.wanted):
            world.proxy.start_faults(plan_faults(world.rng.randrange(10**6), max(self.wanted.values())))
        while (missing := self.missing()) and time.monotonic() < deadline:
            self._operator.turn()
            self._set_traps(missing)
            classes = [name for name in missing if name in CLASSES and name not in BOUNDARIES]
            others = [name for name in classes if name not in _SENDING]
            if len(world.open_adapters()) < self._in_flight:
                self._send([name for name in classes if name in _SENDING])
            elif others:
                self._bring_about(others)
            else:
                time.sleep(_TURN_S)
        self._traps.keep(())
        self._store_traps.keep(())
        world.proxy.stop_faults()

    def _send(self, classes: list[str]) -> None:
        """One more adapter: one for vLLM, else by a fault that sends one, while some are missing."""
        world = self.world
        self._in_flight = world.rng.randint(*_IN_FLIGHT)
        one = world.submit_trained() if len(world.sent) % _TRAINED_EACH == 0 else None
        if one is None and classes:
            self._bring_about(classes)
        else:
            say(f"sent {(one or world.submit()).label}, missing {sum(self.missing().values())}")

    def _set_traps(self, missing: Mapping[str, int]) -> None:
        """Boundaries and the store's faults come about by themselves, beside all else: somebody always goes by."""
        for traps, classes, most in (
            (self._traps, BOUNDARIES, _TRAPS),
            (self._store_traps, KINDS, _STORE_TRAPS),
        ):
            kept = [name for name in sorted(traps.armed) if name in missing]
            others = [name for name in missing if name in classes and name not in kept]
            new = self.world.rng.sample(others, min(len(others), max(0, most - len(kept))))
            self.tried.update(new)
            traps.keep([*kept, *new])

    def _bring_about(self, classes: list[str]) -> None:
        faults = self.faults()
        behind = {name: faults[name] + self.tried[name] / 2 for name in classes}
        chosen = self.world.rng.choice([name for name in classes if behind[name] <= min(behind.values()) + 1])
        self.tried[chosen] += 1
        begun = time.monotonic()
        happened = CLASSES[chosen](self.world)
        self._done[chosen] += happened
        left = self.missing()
        say(
            f"{chosen}{'' if happened else ' did not happen'} ({time.monotonic() - begun:.1f} s); "
            f"{len(self.world.sent)} sent, {len(self.world.open_adapters())} open, missing {sum(left.values())}"
        )


class Operator:
    """Somebody who does `roster retry --failed` now and then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._next = time.monotonic() + _OPERATOR_S

    def turn(self) -> None:
        """Have what failed done again, if it is time; what hinders that is told, and tried again later."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _OPERATOR_S
        try:
            planned = plan_failed(
                self._world.store, now=datetime.now(UTC), settle_s=600, codes=(), base=None, force=False
            )
            done = carry_out(planned, "the operator of the chaos bench")
        except Exception as error:  # noqa: BLE001 - of whatever kind: a service that is down
            say(f"the operator could not retry: {error!r}"[:300])
            return
        retried = [one.subject.label for one in done if one.way is not Way.LEFT]
        if retried:
            say(f"the operator retried {', '.join(retried)}")


def settle(world: World, within_s: float) -> list[str]:
    """Everything runs, and nothing is done to it any more; the labels of uploads that have no ending even so."""
    topology = world.topology
    for name, instances in topology.instances.items():
        for number, instance in enumerate(instances):
            if "FAKETIME_TIMESTAMP_FILE" in instance.env:
                topology.move_clock(name, 0, number)
    revive(world)
    for name in topology.long_running:
        for number, instance in enumerate(topology.instances[name]):
            if not instance.is_healthy():
                restart(world, name, number)
    try:
        wait_until_settled(world, within_s=within_s, turn=Operator(world).turn)
    except TimeoutError as error:
        say(str(error))
    return [one.label for one in patiently(world.open_adapters)]


def say(line: str) -> None:
    """Tell of the progress."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()
