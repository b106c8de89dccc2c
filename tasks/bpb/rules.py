"""The rules of a verdict on the units of one held-out set; `tasks.bpb.verdict` numbers and explains them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tasks.bpb.agreement import Agreement
from tasks.bpb.bootstrap import Difference, Table, compare, repeat_noise, tabulate
from tasks.bpb.measure import BASE, BASE_AGAIN, CONTROL, OWN, WRONG_PREFIX, Measurement, VoidedUnit
from tasks.bpb.rulings import Code, Outcome, Ruling, Thresholds
from tasks.bpb.wording import (
    ControlKind,
    say_control_not_worse,
    say_drift,
    say_no_effect,
    say_not_better,
    say_nothing_to_compare,
    say_own_voided,
    say_ready,
    say_reference_invalid,
    say_reference_mismatch,
    say_too_little,
    say_unclear,
    say_voided,
)


@dataclass(frozen=True, slots=True)
class Case:
    """Everything the rules look at: one measurement's figures, in bits per byte.

    `repeat` is base again less base, None without units; `noise` is the repeat noise.
    """

    table: Table
    differences: tuple[Difference, ...]
    repeat: float | None
    noise: float
    voided: tuple[VoidedUnit, ...]
    control_kind: ControlKind | None
    thresholds: Thresholds
    agreements: tuple[Agreement, ...]

    @property
    def allowance(self) -> float:
        """What the engine's own noise may account for."""
        return self.thresholds.noise_factor * self.noise

    @property
    def bar(self) -> float:
        """What the lower bound of a difference has to be above."""
        return max(self.thresholds.floor, self.allowance)

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences to wrong adapters."""
        return tuple(one for one in self.differences if one.label.startswith(WRONG_PREFIX))

    def holds(self, difference: Difference) -> bool:
        """Whether own is better beyond doubt."""
        return difference.lower > self.thresholds.floor and difference.lower > self.allowance

    def fails(self, difference: Difference) -> bool:
        """Whether own is not better, beyond doubt even though many comparisons are made."""
        return difference.ceiling <= self.thresholds.floor - self.allowance


def compared_labels(table: Table) -> tuple[str, ...]:
    """The subjects that own is compared with."""
    return tuple(label for label in table.labels if label not in (OWN, BASE_AGAIN))


def make_case(
    measurement: Measurement,
    thresholds: Thresholds,
    *,
    comparisons: int,
    control_kind: ControlKind | None,
    agreements: tuple[Agreement, ...],
) -> Case:
    """The figures of a measurement. `comparisons`: how many comparisons the whole verdict makes.

    Raises:
        SubjectsInvalid: base, own or base_again is missing, or a subject has not one figure for each unit.
    """
    table = tabulate(measurement)
    differences: tuple[Difference, ...] = ()
    repeat: float | None = None
    noise = 0.0
    if table.unit_ids:
        confidence, resamples = thresholds.confidence, thresholds.resamples
        pairs = [(label, OWN) for label in compared_labels(table)]
        differences = compare(
            table, pairs, confidence=confidence, resamples=resamples, comparisons=comparisons
        )
        repeat, noise = repeat_noise(table, confidence=confidence, resamples=resamples)
    return Case(
        table=table,
        differences=differences,
        repeat=repeat,
        noise=noise,
        voided=measurement.voided,
        control_kind=control_kind,
        thresholds=thresholds,
        agreements=agreements,
    )


def rule_case(case: Case) -> Ruling:
    """What the first rule that applies says."""
    return next(found for rule in _RULES if (found := rule(case)) is not None)


def _rule_drift(case: Case) -> Ruling | None:
    limit = case.thresholds.drift_limit
    if case.repeat is None or abs(case.repeat) <= limit:
        return None
    return Ruling(Outcome.STOPPED, (Code.ENGINE_DRIFT,), say_drift(case.table, limit))


def _rule_text(case: Case) -> Ruling | None:
    limits, units = case.thresholds, len(case.table.unit_ids)
    own = [unit for unit in case.voided if unit.subject == OWN]
    voided = [f"{unit.id}, {unit.subject}: {unit.reason}" for unit in case.voided if unit.subject is not None]
    lost = len(voided) + case.table.dropped
    if own:
        reason = say_own_voided(len(own), units + lost, f"{own[0].id}: {own[0].reason}")
    elif lost > limits.max_voided_fraction * (units + lost):
        first = voided[0] if voided else "a score is not finite"
        reason = say_voided(lost, units + lost, limits.max_voided_fraction, first)
    elif units < limits.min_units or case.table.byte_count < limits.min_bytes:
        reason = say_too_little(case.table, limits.min_units, limits.min_bytes)
    else:
        return None
    return Ruling(Outcome.INCONCLUSIVE, (Code.TOO_LITTLE_TEXT,), reason)


def _rule_reference(case: Case) -> Ruling | None:
    tolerance = case.thresholds.reference_tolerance
    invalid = [one for one in case.agreements if not one.is_valid(tolerance)]
    if not invalid:
        return None
    return Ruling(Outcome.STOPPED, (Code.REFERENCE_INVALID,), say_reference_invalid(invalid[0], tolerance))


def _rule_quarantine(case: Case) -> Ruling | None:
    table, floor = case.table, case.thresholds.floor
    failing = {one.label: one for one in case.differences if case.fails(one)}
    wrong = [one for one in case.wrong if one.label in failing]
    reasons: dict[Code, str] = {}
    if table.bits_of(OWN) in (table.bits_of(BASE), table.bits_of(BASE_AGAIN)):
        reasons[Code.NO_EFFECT] = say_no_effect(table)
    if CONTROL in failing:
        is_better = failing[CONTROL].upper < -case.allowance
        is_of_use = table.bpb_of(BASE) - table.bpb_of(CONTROL) > floor
        reasons[Code.CONTROL_NOT_WORSE] = say_control_not_worse(
            table, is_control_better=is_better, is_control_of_use=is_of_use, kind=case.control_kind
        )
    if BASE in failing:
        reasons[Code.NOT_BETTER_THAN_BASE] = say_not_better(table, failing[BASE], floor)
    if wrong:
        worst = min(wrong, key=lambda one: one.mean)
        reasons[Code.NOT_BETTER_THAN_WRONG] = say_not_better(table, worst, floor)
    tolerance = case.thresholds.reference_tolerance
    differing = [one for one in case.agreements if not one.agrees(tolerance)]
    if differing:
        reasons[Code.REFERENCE_MISMATCH] = say_reference_mismatch(differing[0], tolerance)
    if not reasons:
        return None
    return Ruling(Outcome.QUARANTINED, tuple(reasons), next(iter(reasons.values())))


def _rule_nothing_to_compare(case: Case) -> Ruling | None:
    if case.wrong or CONTROL in case.table.labels:
        return None
    return Ruling(Outcome.INCONCLUSIVE, (Code.NO_OPPONENT_AND_NO_CONTROL,), say_nothing_to_compare())


def _rule_unclear(case: Case) -> Ruling | None:
    unclear = [one for one in case.differences if not case.holds(one)]
    if not unclear:
        return None
    worst = min(unclear, key=lambda one: one.lower)
    return Ruling(Outcome.INCONCLUSIVE, (Code.MARGIN_UNCLEAR,), say_unclear(worst, case.bar))


def _rule_ready(case: Case) -> Ruling:
    smallest = min(case.differences, key=lambda one: one.mean)
    return Ruling(Outcome.READY, (), say_ready(case.table, smallest, len(case.differences)))


_RULES: tuple[Callable[[Case], Ruling | None], ...] = (
    _rule_drift,
    _rule_text,
    _rule_reference,
    _rule_quarantine,
    _rule_nothing_to_compare,
    _rule_unclear,
    _rule_ready,
)
