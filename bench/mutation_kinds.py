"""What a kind of damage to a converted adapter is, and how a place for it is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bench.mutation_adapters import Host
from bench.mutation_output import Output, Place

# Changes a copy of the host's output; False where it does not apply to such a host.
Change = Callable[[Output, Host, Random], bool]

ROUND_TRIP, GATE_UP, FINITE, IN_RANGE = "round_trip", "gate_up", "finite", "in_range"
TRAINED, DELTAS, COVERAGE, SIZE = "trained", "deltas", "coverage", "size"
# Where numbers changed; shared_a comes before them where gate and up no longer have one A.
EITHER = (DELTAS, ROUND_TRIP, "shared_a")


@dataclass(frozen=True, slots=True)
class Damage:
    """One kind. expected: the checks or codes of which at least one should name it, at depth standard."""

    kind: str
    expected: tuple[str, ...]
    change: Change


def pick(output: Output, rng: Random) -> Place:
    """Return a place at random."""
    return _pick(output, rng, output.projections)


def pick_gated(output: Output, rng: Random) -> tuple[Place, Place] | None:
    """Return gate and up of one expert; None in a family without gates."""
    for parameter in output.base.family.parameters:
        if len(parameter.projections) == 2:
            gate, up = parameter.projections
            place = _pick(output, rng, [gate])
            return place, Place(place.layer, place.expert, up)
    return None


def neighbour(output: Output, place: Place, *, by: int = 1) -> Place:
    """Return the same projection of the expert `by` further on."""
    return Place(place.layer, (place.expert + by) % output.base.experts, place.projection)


def _pick(output: Output, rng: Random, names: list[str]) -> Place:
    return Place(rng.choice(output.layers), rng.randrange(output.base.experts), rng.choice(names))
