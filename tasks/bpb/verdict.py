"""What the bits of one measurement say about an adapter: ready, quarantined, inconclusive or stopped.

BPB of a subject = its bits over all units / the bytes of all units. A difference is the BPB of another
subject minus own's on the same units, so that above 0 means own is better. Its interval is the studentized
bootstrap over units of (sum of bit differences / sum of bytes); all differences share one set of resamples,
seeded by the units themselves, so that a verdict is a function of its measurement.

The rules, for the units of each held-out set by itself; the first that applies decides. Every comparison is false
for NaN, so NaN passes nothing.

1. Base again differs from base by more than drift_limit: stopped, engine_drift.
2. Own itself voided a unit, or somebody's scores voided more than max_voided_fraction of the units, or fewer than
   min_units units or min_bytes bytes were scored: inconclusive, too_little_text.
3. The trainer gave scores of its own (agreement.py), and on the set our base is more than reference_tolerance away from
   the trainer's base: stopped, reference_invalid. Either measurement is at fault, and none may judge.
4. Own equals base to the last bit on every unit: quarantined, no_effect.
5. A difference *holds* if its lower bound is above the floor and above noise_factor x the repeat noise. It
   *fails* if its ceiling is at or below the floor - noise_factor x the repeat noise; the ceiling is its upper
   bound, corrected for the number of comparisons (rule 10). The repeat noise is the largest |difference| within
   the percentile interval of base again - base. If any difference fails: quarantined, with control_not_worse,
   not_better_than_base, not_better_than_wrong. If on the set own is more than reference_tolerance away from the
   trainer's own, or nearer to its base: quarantined, reference_mismatch.
6. Neither control nor opponent was scored: inconclusive, no_opponent_and_no_control.
7. Any difference does not hold: inconclusive, margin_unclear.
8. Else ready.

9. Of several sets the worst outcome is that of the whole, in the order stopped, quarantined, inconclusive, ready;
   the codes are those of all sets that end so, in their order of precedence.
10. Ready asks that every lower bound holds, so each at its own level keeps the level of the whole. A quarantine asks
    for any one failure, so the ceilings share the upper tail: each has (1 - confidence) / 2 / the number of
    comparisons on all sets (Bonferroni). For whether there is a quarantine, Holm's procedure says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.bpb.agreement import Agreement, Reference, compare_reference
from tasks.bpb.bootstrap import Difference, tabulate
from tasks.bpb.measure import CONTROL, Measurement
from tasks.bpb.rules import Case, compared_labels, make_case, rule_case
from tasks.bpb.rulings import Code, Outcome, Ruling, Thresholds
from tasks.bpb.verdict_sets import SetVerdict, SubjectBpb, figures_of, join_sets, say_set, split_sets
from tasks.bpb.wording import ControlKind, say_agreement, say_uncorrected

METHOD = "studentized bootstrap over units, seeded by them; ceilings by Bonferroni over all comparisons"
"""How the intervals and the error rates are come by, as a verdict records it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome, its codes (the first is `code`) and every figure it rests on, in bits per byte.

    The figures are over all units together (`Figures` says what they are); `sets` has those of each held-out set, which
    decide. `comparisons` were made on all sets. `agreements` are with the trainer's own scores, where it gave any that
    could be compared.
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
    sets: tuple[SetVerdict, ...]
    comparisons: int
    agreements: tuple[Agreement, ...]
    thresholds: Thresholds
    notes: tuple[str, ...]


def decide(
    measurement: Measurement,
    *,
    opponents_available: bool,
    thresholds: Thresholds,
    heldout: Sequence[str] = (),
    control_kind: ControlKind | None = None,
    reference: Reference | None = None,
) -> Verdict:
    """The verdict on one measurement, by the rules above.

    `opponents_available` says whether adapters of other authors are ready, scored here or not; it words a
    note. `heldout` are the names of the sets that were scored, as `merge_sets` had them; without any the units are
    one set without a name, and no reference is compared. `control_kind` words the reason. `reference` are the trainer's
    own scores, if it gave any.

    Raises:
        SubjectsInvalid: base, own or base_again is missing, or a subject has not one figure for each unit.
    """
    table = tabulate(measurement)
    comparisons = len(compared_labels(table)) * max(1, len(heldout))
    agreements, reference_notes = compare_reference(table, reference, heldout) if reference else ((), ())

    def case_of(part: Measurement, names: Sequence[str]) -> Case:
        return make_case(
            part,
            thresholds,
            comparisons=comparisons,
            control_kind=control_kind,
            agreements=tuple(one for one in agreements if one.name in names),
        )

    whole = case_of(measurement, heldout)
    if len(heldout) > 1:
        parts = zip(heldout, split_sets(measurement, heldout), strict=True)
        cases = [(name, case_of(part, (name,))) for name, part in parts]
        sets = tuple(SetVerdict(name, rule_case(case), figures_of(case)) for name, case in cases)
        ruling = join_sets(sets)
    else:
        cases = [("", whole)]
        ruling = rule_case(whole)
        sets = tuple(SetVerdict(name, ruling, figures_of(whole)) for name in heldout)
    figures = figures_of(whole)
    return Verdict(
        outcome=ruling.outcome,
        code=ruling.code,
        codes=ruling.codes,
        reason=ruling.reason,
        bpb=figures.bpb,
        differences=figures.differences,
        margin=figures.margin,
        interval=figures.interval,
        noise=figures.noise,
        units=figures.units,
        byte_count=figures.byte_count,
        sets=sets,
        comparisons=comparisons,
        agreements=agreements,
        thresholds=thresholds,
        notes=(*_notes(whole, opponents_available), *_uncorrected(cases, ruling, comparisons))
        + tuple(say_agreement(one) for one in agreements)
        + reference_notes
        + (tuple(say_set(one) for one in sets) if len(sets) > 1 else ()),
    )


def _notes(case: Case, opponents_available: bool) -> tuple[str, ...]:
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


def _uncorrected(cases: Sequence[tuple[str, Case]], ruling: Ruling, comparisons: int) -> tuple[str, ...]:
    """What would have failed as the only comparison, where no quarantine came of it."""
    if ruling.code is not Code.MARGIN_UNCLEAR:
        return ()
    return tuple(
        say_uncorrected(name, one, comparisons)
        for name, case in cases
        for one in case.differences
        if one.upper <= case.thresholds.floor - case.allowance
    )
