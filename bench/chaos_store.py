"""Faults of the chaos bench: everything that can happen to a request on its way to the store and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.chaos_world import World
from bench.tiny_world import kept_with_tests

_RATE = 0.004  # of the requests that a kind applies to
_PLANS: Any = kept_with_tests("fault_plans")
KINDS: dict[str, Any] = {f"s3_{kind.value}": kind for kind in _PLANS.FaultKind}


def plan_faults(seed: int, limit: int) -> Any:
    """What the proxy does all the time by itself: each kind now and then, at most `limit` times."""
    return _PLANS.FaultPlan(seed, dict.fromkeys(_PLANS.FaultKind, _RATE), limit)


def count_faults(world: World) -> dict[str, int]:
    """How often each kind has happened so far, by the fault's name."""
    return {name: int(world.proxy.met[kind]) for name, kind in KINDS.items()}


class StoreTraps:
    """Kinds of faults that the next request that can meet them meets, whatever happens elsewhere meanwhile."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._armed: dict[str, tuple[Any, int]] = {}  # with how often it had happened before

    def keep(self, names: Iterable[str]) -> None:
        """Have these and no others, each until it has happened once more."""
        wanted = set(names)
        for name in self.armed - wanted:
            self._world.proxy.withdraw(self._armed.pop(name)[0])
        for name in sorted(wanted - self.armed):
            self._armed[name] = (_arm(self._world, KINDS[name]), count_faults(self._world)[name])

    @property
    def armed(self) -> set[str]:
        """The kinds that have not happened since."""
        met = count_faults(self._world)
        self._armed = {name: one for name, one in self._armed.items() if met[name] == one[1]}
        return set(self._armed)


def _arm(world: World, kind: Any) -> Any:
    return world.proxy.one(
        kind,
        carried_out=kind in _PLANS.MAY_BE_CARRIED_OUT and world.rng.random() < 0.5,
        share=world.rng.choice((0.0, 0.5)),
    )
