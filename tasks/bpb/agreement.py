"""Our scores against the trainer's own of the same held-out text: the same adapter must score the same.

A reference gives, for each held-out set, own and base in bits per byte. Base against base comes first: it validates
the comparison itself, since no adapter is in it. A set is compared where it was scored here on as many units and bytes
as the trainer scored; other units have another mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.bpb.bootstrap import Table
from tasks.bpb.heldout import places_of_set
from tasks.bpb.measure import BASE, OWN

TOLERANCE = 1e-3
"""Bits per byte by which two right measurements of one text may differ."""


@dataclass(frozen=True, slots=True)
class ReferenceSet:
    """What the trainer measured on one held-out set, in bits per byte. name: `<author>/<set>`."""

    name: str
    own: float
    base: float
    units: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class Reference:
    """The trainer's own scores. is_same_measure: whether they were taken exactly as ours, by their measure_id."""

    sets: tuple[ReferenceSet, ...]
    is_same_measure: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """Ours beside the trainer's on one held-out set, in bits per byte."""

    name: str
    own: float
    base: float
    reference_own: float
    reference_base: float

    @property
    def base_gap(self) -> float:
        """Our base less the trainer's."""
        return self.base - self.reference_base

    @property
    def own_gap(self) -> float:
        """Our own less the trainer's."""
        return self.own - self.reference_own

    def is_valid(self, tolerance: float) -> bool:
        """Whether both measure the base alike; not so for NaN."""
        return abs(self.base_gap) <= tolerance and math.isfinite(self.reference_own)

    def agrees(self, tolerance: float) -> bool:
        """Whether own scores as in training: within the tolerance, and no nearer to the trainer's base."""
        return abs(self.own_gap) <= tolerance and abs(self.own_gap) <= abs(self.own - self.reference_base)


def compare_reference(
    table: Table, reference: Reference, heldout: Sequence[str]
) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    """Return what can be compared, by name, and what has to be said of the rest, one sentence each.

    `heldout` are the names of all sets that were scored here.
    """
    found: list[Agreement] = []
    notes: list[str] = []
    for one in sorted(reference.sets, key=lambda one: one.name):
        places = places_of_set(table.unit_ids, one.name, heldout)
        byte_count = sum(table.unit_bytes[place] for place in places)
        if not places:
            notes.append(f"the trainer's scores of {one.name} were not compared: none of it was scored here")
        elif (len(places), byte_count) != (one.units, one.byte_count):
            notes.append(
                f"the trainer's scores of {one.name} were not compared: they are of {one.units} units with "
                f"{one.byte_count} bytes, ours of {len(places)} with {byte_count}"
            )
        else:
            own, base = (
                math.fsum(table.bits_of(label)[place] for place in places) / byte_count
                for label in (OWN, BASE)
            )
            found.append(Agreement(one.name, own, base, one.own, one.base))
    if found and not reference.is_same_measure:
        notes.append(
            "the trainer's scores have another measure_id, and were compared as their units and bytes are ours"
        )
    return tuple(found), tuple(notes)
