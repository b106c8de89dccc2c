"""Faults of the chaos bench: everything that can happen to a request on its way to the store and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.chaos_processes import wait_until
from bench.chaos_world import World
from bench.tiny_world import kept_with_tests

_WITHIN_S = 15.0
_RATE = 0.004  # of the requests that a kind applies to
_PLANS: Any = kept_with_tests("fault_plans")
KINDS: dict[str, Any] = {f"s3_{kind.value}": kind for kind in _PLANS.FaultKind}


def plan_faults(seed: int, limit: int) -> Any:
    """What the proxy does all the time by itself: each kind now and then, at most `limit` times."""
    return _PLANS.FaultPlan(seed, dict.fromkeys(_PLANS.FaultKind, _RATE), limit)


def count_faults(world: World) -> dict[str, int]:
    """How often each kind has happened so far, by the fault's name."""
    return {name: int(world.proxy.met[kind]) for name, kind in KINDS.items()}


def _ask_for(kind: Any, world: World) -> bool:
    """The next request that can meet this kind meets it."""
    before = world.proxy.met[kind]
    fault = world.proxy.one(
        kind,
        carried_out=kind in _PLANS.MAY_BE_CARRIED_OUT and world.rng.random() < 0.5,
        share=world.rng.choice((0.0, 0.5)),
    )
    met = wait_until(lambda: world.proxy.met[kind] > before, _WITHIN_S)
    world.proxy.withdraw(fault)
    return met


STORE_FAULTS: dict[str, Callable[[World], bool]] = {
    name: partial(_ask_for, kind) for name, kind in KINDS.items()
}
