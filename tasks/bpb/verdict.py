"""What the bits of one measurement say about an adapter: ready, quarantined, inconclusive or stopped.

BPB of a subject = its bits over all units / the bytes of all units. A difference is the BPB of another
subject minus own's on the same units, so that above 0 means own is better. Its interval is the percentile
bootstrap over units of (sum of bit differences / sum of bytes); all differences share one set of resamples,
seeded by the units themselves, so that a verdict is a function of its measurement.

The rules; the first that applies decides. Every comparison is false for NaN, so NaN passes nothing.

1. Base again differs from base by more than drift_limit: stopped, engine_drift.
2. More than max_voided_fraction of the units were voided by somebody's scores, or fewer than min_units units
   or min_bytes bytes were scored: inconclusive, too_little_text.
3. Own equals base to the last bit on every unit: quarantined, no_effect.
4. A difference *holds* if its lower bound is above the floor and above noise_factor x the repeat noise. It
   *fails* if its upper bound is at or below the floor - noise_factor x the repeat noise. The repeat noise is
   the largest |difference| within the interval of base again - base. If any difference fails: quarantined,
   with control_not_worse, not_better_than_base, not_better_than_wrong.
5. Neither control nor opponent was scored: inconclusive, no_opponent_and_no_control.
6. Any difference does not hold: inconclusive, margin_unclear.
7. Else ready.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tasks.bpb.bootstrap import Difference, Table, compare, tabulate
from tasks.bpb.errors import ThresholdsInvalid
from tasks.bpb.measure import BASE, BASE_AGAIN, CONTROL, OWN, WRONG_PREFIX, Measurement, VoidedUnit
from tasks.bpb.wording import (
    ControlKind,
    say_control_not_worse,
    say_drift,
    say_no_effect,
    say_not_better,
    say_nothing_to_compare,
    say_ready,
    say_too_little,
    say_unclear,
    say_voided,
)


class Outcome(StrEnum):
    """How a score ends."""

    READY = "ready"
    QUARANTINED = "quarantined"
    INCONCLUSIVE = "inconclusive"
    STOPPED = "stopped"


class Code(StrEnum):
    """Why a score does not end ready; those of a quarantine in their order of precedence."""

    NO_EFFECT = "no_effect"
    CONTROL_NOT_WORSE = "control_not_worse"
    NOT_BETTER_THAN_BASE = "not_better_than_base"
    NOT_BETTER_THAN_WRONG = "not_better_than_wrong"
    TOO_LITTLE_TEXT = "too_little_text"
    MARGIN_UNCLEAR = "margin_unclear"
    NO_OPPONENT_AND_NO_CONTROL = "no_opponent_and_no_control"
    ENGINE_DRIFT = "engine_drift"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a verdict asks for. `floor` and `drift_limit` are bits per byte; `confidence` is two-sided.

    Raises:
        ThresholdsInvalid: a value is out of its range, or not a number.
    """

    floor: float = 0.002
    min_units: int = 20
    min_bytes: int = 8000
    noise_factor: float = 2.0
    drift_limit: float = 0.005
    max_voided_fraction: float = 0.05
    confidence: float = 0.95
    resamples: int = 2000

    def __post_init__(self) -> None:
        """Refuse what would let every adapter pass, or none."""
        ranges = (
            ("floor", self.floor, 0.0, math.inf),
            ("min_units", self.min_units, 2, math.inf),
            ("min_bytes", self.min_bytes, 1, math.inf),
            ("noise_factor", self.noise_factor, 1.0, math.inf),
            ("drift_limit", self.drift_limit, 0.0, math.inf),
            ("max_voided_fraction", self.max_voided_fraction, 0.0, 1.0),
            ("confidence", self.confidence, 0.5, 0.9999),
            ("resamples", self.resamples, 200, math.inf),
        )
        for name, value, low, high in ranges:
            if not (low <= value <= high and math.isfinite(value)):
                raise ThresholdsInvalid(name, value, f"a finite number from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True)
class SubjectBpb:
    """Bits per byte of one subject over all units."""

    label: str
    bpb: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome, its codes (the first is `code`) and every figure it rests on, in bits per byte.

    `margin` is the smallest difference of a wrong adapter and `interval` the bounds of that difference; both
    are None without wrong adapters. `noise` is the repeat noise. Without any unit `bpb` and `differences` are
    empty and `noise` is None.
    """

    outcome: Outcome
    code: Code | None
    codes: tuple[Code, ...]
    reason: str
    bpb: tuple[SubjectBpb, ...]
    differences: tuple[Difference, ...]
    margin: float | None
    interval: tuple[float, float] | None
    noise: float | None
    units: int
    byte_count: int
    thresholds: Thresholds
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Ruling:
    outcome: Outcome
    codes: tuple[Code, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class _Case:
    """Everything the rules look at."""

    table: Table
    differences: tuple[Difference, ...]
    repeat: Difference | None
    noise: float
    voided: tuple[VoidedUnit, ...]
    control_kind: ControlKind | None
    thresholds: Thresholds

    @property
    def allowance(self) -> float:
        """What the engine's own noise may account for."""
        return self.thresholds.noise_factor * self.noise

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences to wrong adapters."""
        return tuple(one for one in self.differences if one.label.startswith(WRONG_PREFIX))

    def holds(self, difference: Difference) -> bool:
        """Whether own is better beyond doubt."""
        return difference.lower > self.thresholds.floor and difference.lower > self.allowance

    def fails(self, difference: Difference) -> bool:
        """Whether own is not better, beyond doubt."""
        return difference.upper <= self.thresholds.floor - self.allowance


def decide(
    measurement: Measurement,
    *,
    opponents_available: bool,
    thresholds: Thresholds,
    control_kind: ControlKind | None = None,
) -> Verdict:
    """The verdict on one measurement, by the rules above.

    `opponents_available` says whether adapters of other authors are ready, scored here or not; it words a
    note. `control_kind` words the reason.

    Raises:
        SubjectsInvalid: base, own or base_again is missing, or a subject has not one figure for each unit.
    """
    case = _case(measurement, thresholds, control_kind)
    ruling = next(found for rule in _RULES if (found := rule(case)) is not None)
    closest = min(case.wrong, key=lambda difference: difference.mean, default=None)
    table = case.table
    return Verdict(
        outcome=ruling.outcome,
        code=ruling.codes[0] if ruling.codes else None,
        codes=ruling.codes,
        reason=ruling.reason,
        bpb=tuple(SubjectBpb(label, table.bpb_of(label)) for label in table.labels) if table.unit_ids else (),
        differences=case.differences,
        margin=closest.mean if closest else None,
        interval=(closest.lower, closest.upper) if closest else None,
        noise=case.noise if case.repeat else None,
        units=len(table.unit_ids),
        byte_count=table.byte_count,
        thresholds=thresholds,
        notes=_notes(case, opponents_available),
    )


def _case(measurement: Measurement, thresholds: Thresholds, control_kind: ControlKind | None) -> _Case:
    table = tabulate(measurement)
    differences: tuple[Difference, ...] = ()
    repeat: Difference | None = None
    noise = 0.0
    if table.unit_ids:
        pairs = [(label, OWN) for label in table.labels if label not in (OWN, BASE_AGAIN)]
        *others, repeat = compare(
            table,
            [*pairs, (BASE_AGAIN, BASE)],
            confidence=thresholds.confidence,
            resamples=thresholds.resamples,
        )
        differences = tuple(others)
        noise = max(abs(repeat.mean), abs(repeat.lower), abs(repeat.upper))
    return _Case(table, differences, repeat, noise, measurement.voided, control_kind, thresholds)


def _rule_drift(case: _Case) -> _Ruling | None:
    limit = case.thresholds.drift_limit
    if case.repeat is None or abs(case.repeat.mean) <= limit:
        return None
    return _Ruling(Outcome.STOPPED, (Code.ENGINE_DRIFT,), say_drift(case.table, limit))


def _rule_text(case: _Case) -> _Ruling | None:
    limits, units = case.thresholds, len(case.table.unit_ids)
    voided = [f"{unit.id}, {unit.subject}: {unit.reason}" for unit in case.voided if unit.subject is not None]
    lost = len(voided) + case.table.dropped
    if lost > limits.max_voided_fraction * (units + lost):
        first = voided[0] if voided else "a score is not finite"
        reason = say_voided(lost, units + lost, limits.max_voided_fraction, first)
    elif units < limits.min_units or case.table.byte_count < limits.min_bytes:
        reason = say_too_little(case.table, limits.min_units, limits.min_bytes)
    else:
        return None
    return _Ruling(Outcome.INCONCLUSIVE, (Code.TOO_LITTLE_TEXT,), reason)


def _rule_quarantine(case: _Case) -> _Ruling | None:
    table, floor = case.table, case.thresholds.floor
    failing = {one.label: one for one in case.differences if case.fails(one)}
    wrong = [one for one in case.wrong if one.label in failing]
    reasons: dict[Code, str] = {}
    if table.bits_of(OWN) in (table.bits_of(BASE), table.bits_of(BASE_AGAIN)):
        reasons[Code.NO_EFFECT] = say_no_effect(table)
    if CONTROL in failing:
        is_better = failing[CONTROL].upper < -case.allowance
        reasons[Code.CONTROL_NOT_WORSE] = say_control_not_worse(
            table, is_control_better=is_better, kind=case.control_kind
        )
    if BASE in failing:
        reasons[Code.NOT_BETTER_THAN_BASE] = say_not_better(table, failing[BASE], floor)
    if wrong:
        worst = min(wrong, key=lambda one: one.mean)
        reasons[Code.NOT_BETTER_THAN_WRONG] = say_not_better(table, worst, floor)
    if not reasons:
        return None
    return _Ruling(Outcome.QUARANTINED, tuple(reasons), next(iter(reasons.values())))


def _rule_nothing_to_compare(case: _Case) -> _Ruling | None:
    if case.wrong or CONTROL in case.table.labels:
        return None
    return _Ruling(Outcome.INCONCLUSIVE, (Code.NO_OPPONENT_AND_NO_CONTROL,), say_nothing_to_compare())


def _rule_unclear(case: _Case) -> _Ruling | None:
    unclear = [one for one in case.differences if not case.holds(one)]
    if not unclear:
        return None
    worst = min(unclear, key=lambda one: one.lower)
    reason = say_unclear(worst, max(case.thresholds.floor, case.allowance))
    return _Ruling(Outcome.INCONCLUSIVE, (Code.MARGIN_UNCLEAR,), reason)


def _rule_ready(case: _Case) -> _Ruling:
    smallest = min(case.differences, key=lambda one: one.mean)
    return _Ruling(Outcome.READY, (), say_ready(case.table, smallest, len(case.differences)))


_RULES: tuple[Callable[[_Case], _Ruling | None], ...] = (
    _rule_drift,
    _rule_text,
    _rule_quarantine,
    _rule_nothing_to_compare,
    _rule_unclear,
    _rule_ready,
)


def _notes(case: _Case, opponents_available: bool) -> tuple[str, ...]:
    notes = []
    if not case.wrong and opponents_available:
        notes.append("no opponent: those that are ready may not be used; the control carries the verdict")
    elif not case.wrong:
        notes.append("no opponent yet: the control carries the verdict")
    if CONTROL not in case.table.labels:
        notes.append("no control: the opponents carry the verdict")
    left_out = len(case.voided) + case.table.dropped
    if left_out:
        notes.append(f"{left_out} units were left out")
    if case.noise > 0:
        notes.append(f"repeat noise {case.noise:.2g} bits per byte")
    return tuple(notes)
