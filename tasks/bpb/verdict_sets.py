"""A verdict over several held-out sets: an adapter has to pass on each of them.

The sets are judged one by one, by the same rules. An adapter of two authors that is better on the texts of one alone
would pass on both together; the more text that one has, the surer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.bpb.bootstrap import Difference
from tasks.bpb.heldout import places_of_set
from tasks.bpb.measure import Measurement, SubjectBits
from tasks.bpb.rules import Case
from tasks.bpb.rulings import Code, Outcome, Ruling


@dataclass(frozen=True, slots=True)
class SubjectBpb:
    """Bits per byte of one subject over all units."""

    label: str
    bpb: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured on some units, in bits per byte.

    `margin` is the smallest difference of a wrong adapter and `interval` the bounds of that difference; both
    are None without wrong adapters. `noise` is the repeat noise. Without any unit `bpb` and `differences` are empty and
    `noise` is None.
    """

    bpb: tuple[SubjectBpb, ...]
    differences: tuple[Difference, ...]
    margin: float | None
    interval: tuple[float, float] | None
    noise: float | None
    units: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class SetVerdict:
    """What one held-out set says by itself. name: `<author>/<set>`."""

    name: str
    ruling: Ruling
    figures: Figures


def figures_of(case: Case) -> Figures:
    """The figures of a case."""
    table = case.table
    closest = min(case.wrong, key=lambda difference: difference.mean, default=None)
    return Figures(
        bpb=tuple(SubjectBpb(label, table.bpb_of(label)) for label in table.labels) if table.unit_ids else (),
        differences=case.differences,
        margin=closest.mean if closest else None,
        interval=(closest.lower, closest.upper) if closest else None,
        noise=case.noise if case.repeat is not None else None,
        units=len(table.unit_ids),
        byte_count=table.byte_count,
    )


def split_sets(measurement: Measurement, heldout: Sequence[str]) -> tuple[Measurement, ...]:
    """The part of each set, in order: its units and voided units, with all subjects' scores of them.

    tokens and seconds stay those of the whole.
    """
    return tuple(_part_of(measurement, name, heldout) for name in heldout)


def join_sets(verdicts: Sequence[SetVerdict]) -> Ruling:
    """What the sets say together: the worst outcome of any, and the codes of all sets that end so.

    The reason is that of the set with the first code; for ready, that of the set with the smallest difference.
    """
    outcome = next(worst for worst in Outcome if any(one.ruling.outcome is worst for one in verdicts))
    ending = [one for one in verdicts if one.ruling.outcome is outcome]
    codes = tuple(code for code in Code if any(code in one.ruling.codes for one in ending))
    if codes:
        first = next(one for one in ending if one.ruling.code is codes[0])
        return Ruling(outcome, codes, _placed(first))
    closest = min(ending, key=lambda one: min(difference.mean for difference in one.figures.differences))
    count = len(verdicts)
    reason = f"on each of {count} held-out sets; on {closest.name}, the closest, {closest.ruling.reason}"
    return Ruling(outcome, (), reason)


def say_set(one: SetVerdict) -> str:
    """What is noted of each of several sets."""
    codes = ", ".join(one.ruling.codes)
    return f"{one.name} by itself: {one.ruling.outcome}{f' ({codes})' if codes else ''}: {one.ruling.reason}"


def _placed(one: SetVerdict) -> str:
    """A set's reason with its name, which those about a reference begin with already."""
    front = f"on {one.name} "
    return one.ruling.reason if one.ruling.reason.startswith(front) else front + one.ruling.reason


def _part_of(measurement: Measurement, name: str, heldout: Sequence[str]) -> Measurement:
    places = places_of_set([unit.id for unit in measurement.units], name, heldout)
    voided = places_of_set([unit.id for unit in measurement.voided], name, heldout)
    return replace(
        measurement,
        units=tuple(measurement.units[place] for place in places),
        voided=tuple(measurement.voided[place] for place in voided),
        scores=tuple(
            SubjectBits(column.label, tuple(column.bits[place] for place in places))
            for column in measurement.scores
        ),
    )
