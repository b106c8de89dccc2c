"""Faults of the chaos bench: a run is killed at the boundary of a step, when it puts that step on the record.

Before: the store never hears of it. After: the store has it, but the run does not know. The proxy before the store sees
the moment; the claim in the ledger that is put says which process it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from threading import Lock
from typing import Any

from pydantic import ValidationError

from bench.chaos_adapters import is_scored
from bench.chaos_processes import kill, list_runs, wait_until
from bench.chaos_world import World, holder_pid
from bench.tiny_world import kept_with_tests
from storage.claims import read_ledger
from storage.errors import ObjectNotFound, StorageError
from storage.ledger import Ledger, StepKind

_WITHIN_S = 25.0  # until a run is at this step
_LONGEST_CLAIM = timedelta(minutes=5)  # by a clock that is right
_MOST_SENT = 3  # to have one that comes so far
_NAMES = {
    f"boundary_{kind.value}_{when}": (kind, when == "after")
    for kind in StepKind
    for when in ("before", "after")
}


@dataclass(slots=True)
class Traps:
    """Boundaries at which the next run that comes there is killed, whatever happens elsewhere meanwhile.

    killed: how many were, by the fault's name. A trap that has caught one is gone.
    """

    world: World
    killed: Counter[str] = field(default_factory=Counter)
    _armed: dict[str, Any] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def arm(self, name: str) -> None:
        """Kill the next run that comes to the boundary of this name, one of `BOUNDARIES`."""
        kind, is_after = _NAMES[name]
        reset = kept_with_tests("fault_proxy").FaultKind.RESET
        with self._lock:
            if name in self._armed:
                return
            self._armed[name] = self.world.proxy.one(
                reset,
                method="PUT",
                key_part="/ledger/",
                carried_out=is_after,
                fits=partial(self._fits, kind),
                when_met=partial(self._kill, name),
            )

    def keep(self, names: Iterable[str]) -> None:
        """Have traps at these boundaries and no others."""
        wanted = set(names)
        for name in self.armed - wanted:
            self.withdraw(name)
        for name in wanted:
            self.arm(name)

    def withdraw(self, name: str) -> None:
        """Take a trap away, if it is there."""
        with self._lock:
            fault = self._armed.pop(name, None)
        if fault is not None:
            self.world.proxy.withdraw(fault)

    @property
    def armed(self) -> set[str]:
        """The boundaries with a trap."""
        with self._lock:
            return set(self._armed)

    def _fits(self, kind: StepKind, body: bytes) -> bool:
        """Whether this is a ledger with a step of this kind that the store does not have yet, put by a run of ours."""
        ledger = _parse(body)
        if ledger is None or not ledger.steps or ledger.steps[-1].kind is not kind:
            return False
        if holder_pid(ledger) not in {one.pid for one in list_runs(self.world.topology)}:
            return False
        # A run that is killed while its clock is ahead leaves a claim that lasts as long as the clock was ahead.
        if ledger.claim is None or ledger.claim.expires_at > datetime.now(UTC) + _LONGEST_CLAIM:
            return False
        try:
            known = read_ledger(self.world.store, ledger.author, ledger.adapter_digest)[0].steps
        except ObjectNotFound:
            known = ()
        except StorageError:
            return False
        return len(ledger.steps) > len(known)

    def _kill(self, name: str, body: bytes) -> None:
        ledger = _parse(body)
        pid = None if ledger is None else holder_pid(ledger)
        happened = pid is not None and kill(self.world, pid)
        with self._lock:
            self._armed.pop(name, None)
            self.killed[name] += happened


def _parse(body: bytes) -> Ledger | None:
    try:
        return Ledger.model_validate_json(body)
    except ValidationError:
        return None  # an author's record, which is kept among the ledgers


def _at_boundary(name: str, world: World) -> bool:
    """One of `BOUNDARIES`, waited for; an adapter that comes so far is sent if none is on its way."""
    traps = Traps(world)
    traps.arm(name)
    sent = 0
    while sent < _MOST_SENT and not any(is_scored(one.kind) for one in world.open_adapters()):
        world.submit()
        sent += 1
    wait_until(lambda: name not in traps.armed, _WITHIN_S)
    traps.withdraw(name)
    return traps.killed[name] > 0


BOUNDARIES: dict[str, Callable[[World], bool]] = {name: partial(_at_boundary, name) for name in _NAMES}
