"""Verdicts: one row per outcome and code, what noise and NaN do, and the words of the reasons."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from verdict_builders import GOOD, build, change_bits, copy_bits, without

from tasks.bpb.errors import SubjectsInvalid, ThresholdsInvalid
from tasks.bpb.measure import Measurement, SubjectBits, VoidedUnit
from tasks.bpb.rulings import Code, Outcome, Thresholds
from tasks.bpb.verdict import Verdict, decide
from tasks.bpb.wording import ControlKind


def ruled(
    measurement: Measurement, *, opponents: bool = True, thresholds: Thresholds | None = None
) -> Verdict:
    return decide(
        measurement,
        opponents_available=opponents,
        thresholds=thresholds or Thresholds(),
        control_kind=ControlKind.OTHER_PACKING,
    )


# --- one row per outcome and code ---


@pytest.mark.parametrize(
    ("measurement", "outcome", "codes"),
    [
        pytest.param(build(GOOD), Outcome.READY, [], id="ready"),
        pytest.param(build(without("wrong:bob", "wrong:eve")), Outcome.READY, [], id="control alone"),
        pytest.param(build(without("control")), Outcome.READY, [], id="opponents alone"),
        pytest.param(
            copy_bits(build(GOOD), "base", "own"),
            Outcome.QUARANTINED,
            [Code.NO_EFFECT, Code.NOT_BETTER_THAN_BASE],
            id="own is base to the last bit, although better than every wrong one",
        ),
        pytest.param(
            copy_bits(build(GOOD | {"base_again": 2.358}), "base_again", "own"),
            Outcome.QUARANTINED,
            [Code.NO_EFFECT],
            id="own is base as it was scored again",
        ),
        pytest.param(
            build(GOOD | {"own": 2.366, "control": 2.205}),
            Outcome.QUARANTINED,
            [Code.CONTROL_NOT_WORSE, Code.NOT_BETTER_THAN_BASE],
            id="converted in the wrong packing",
        ),
        pytest.param(
            build(GOOD | {"own": 2.336, "control": 2.215}),
            Outcome.QUARANTINED,
            [Code.CONTROL_NOT_WORSE],
            id="wrong packing, carried over base by attention",
        ),
        pytest.param(
            build(GOOD | {"control": 2.205}, spread=0.001),
            Outcome.QUARANTINED,
            [Code.CONTROL_NOT_WORSE],
            id="experts make no difference",
        ),
        pytest.param(
            build(GOOD | {"base": 2.19, "base_again": 2.19}),
            Outcome.QUARANTINED,
            [Code.NOT_BETTER_THAN_BASE],
            id="worse than base",
        ),
        pytest.param(
            build(GOOD | {"wrong:eve": 2.2}),
            Outcome.QUARANTINED,
            [Code.NOT_BETTER_THAN_WRONG],
            id="one wrong adapter is better",
        ),
        pytest.param(
            build(GOOD | {"own": 2.5}),
            Outcome.QUARANTINED,
            [Code.CONTROL_NOT_WORSE, Code.NOT_BETTER_THAN_BASE, Code.NOT_BETTER_THAN_WRONG],
            id="worse than everything, in the order of precedence",
        ),
        pytest.param(
            build(GOOD, units=19, mean_bytes=900), Outcome.INCONCLUSIVE, [Code.TOO_LITTLE_TEXT], id="19 units"
        ),
        pytest.param(build(GOOD, units=20, mean_bytes=420), Outcome.READY, [], id="20 units, 8.3 kB"),
        pytest.param(
            build(GOOD, units=20, mean_bytes=380), Outcome.INCONCLUSIVE, [Code.TOO_LITTLE_TEXT], id="7.6 kB"
        ),
        pytest.param(
            copy_bits(build(GOOD, units=19, mean_bytes=900), "base", "own"),
            Outcome.INCONCLUSIVE,
            [Code.TOO_LITTLE_TEXT],
            id="no effect on too little text",
        ),
        pytest.param(
            build(GOOD | {"wrong:eve": 2.208}, spread=0.04),
            Outcome.INCONCLUSIVE,
            [Code.MARGIN_UNCLEAR],
            id="an interval straddles the floor",
        ),
        pytest.param(
            build(GOOD | {"wrong:eve": 2.2071}, spread=0.003),
            Outcome.INCONCLUSIVE,
            [Code.MARGIN_UNCLEAR],
            id="better for sure, but not for sure by the floor",
        ),
        pytest.param(
            build(without("control", "wrong:bob", "wrong:eve")),
            Outcome.INCONCLUSIVE,
            [Code.NO_OPPONENT_AND_NO_CONTROL],
            id="nothing to compare with",
        ),
        pytest.param(
            build(GOOD | {"base_again": 2.362}), Outcome.STOPPED, [Code.ENGINE_DRIFT], id="base drifts up"
        ),
        pytest.param(
            build(GOOD | {"base_again": 2.350}, units=3),
            Outcome.STOPPED,
            [Code.ENGINE_DRIFT],
            id="base drifts down",
        ),
        pytest.param(
            replace(build(GOOD), units=(), scores=tuple(SubjectBits(label, ()) for label in GOOD)),
            Outcome.INCONCLUSIVE,
            [Code.TOO_LITTLE_TEXT],
            id="no unit at all",
        ),
    ],
)
def test_outcome_and_codes(measurement: Measurement, outcome: Outcome, codes: list[Code]) -> None:
    verdict = ruled(measurement)
    assert (verdict.outcome, list(verdict.codes)) == (outcome, codes)
    assert verdict.code == (codes[0] if codes else None)
    assert verdict.reason
    assert "\n" not in verdict.reason


def test_every_code_has_a_row() -> None:
    rows = test_outcome_and_codes.pytestmark[0].args[1]  # type: ignore[attr-defined]
    by_reference = {Code.REFERENCE_INVALID, Code.REFERENCE_MISMATCH}  # tests/test_bpb_agreement.py
    assert {row.values[2][0] for row in rows if row.values[2]} == set(Code) - by_reference
    assert {row.values[1] for row in rows} == set(Outcome)


# --- figures ---


def test_figures_are_sums_over_sums() -> None:
    measurement = build(GOOD)
    verdict = ruled(measurement)
    total = sum(unit.byte_count for unit in measurement.units)
    by_hand = {column.label: sum(column.bits) / total for column in measurement.scores}
    assert {one.label: one.bpb for one in verdict.bpb} == pytest.approx(by_hand)
    differences = {one.label: one for one in verdict.differences}
    assert set(differences) == {"base", "control", "wrong:bob", "wrong:eve"}
    for label, difference in differences.items():
        assert difference.mean == pytest.approx(by_hand[label] - by_hand["own"])
        assert difference.lower < difference.mean < difference.upper
    closest = differences["wrong:eve"]
    assert (verdict.margin, verdict.interval) == (closest.mean, (closest.lower, closest.upper))
    assert (verdict.units, verdict.byte_count, verdict.noise) == (40, total, 0.0)


def test_sums_are_not_means_of_means() -> None:
    """nousnet#134: a mean over texts would let short texts weigh like long ones."""
    measurement = build(GOOD)
    sizes = [unit.byte_count for unit in measurement.units]
    own = next(column.bits for column in measurement.scores if column.label == "own")
    mean_of_means = sum(bits / size for bits, size in zip(own, sizes, strict=True)) / len(own)
    bpb = {one.label: one.bpb for one in ruled(measurement).bpb}["own"]
    assert abs(bpb - mean_of_means) > 1e-4


def test_the_order_of_units_and_subjects_decides_nothing() -> None:
    measurement = build(GOOD, spread=0.05)
    order = random.Random(7).sample(range(40), 40)
    shuffled = replace(
        measurement,
        units=tuple(measurement.units[number] for number in order),
        scores=tuple(
            SubjectBits(column.label, tuple(column.bits[number] for number in order))
            for column in measurement.scores[::-1]
        ),
    )
    first, second = ruled(measurement), ruled(shuffled)
    assert sorted(first.differences, key=lambda one: one.label) == sorted(
        second.differences, key=lambda one: one.label
    )
    assert sorted(first.bpb, key=lambda one: one.label) == sorted(second.bpb, key=lambda one: one.label)
    assert first.reason == second.reason
    assert ruled(measurement) == first


# --- noise ---


def noisy(measurement: Measurement, size: float) -> Measurement:
    """Base again, up or down by `size` bits per byte from unit to unit, on the whole by about `size` / 10."""
    draw = random.Random(3)
    sizes = [unit.byte_count for unit in measurement.units]
    return change_bits(
        measurement, "base_again", lambda n, bits: bits + sizes[n] * size * draw.uniform(-1, 1)
    )


def test_a_margin_below_the_repeat_noise_is_inconclusive() -> None:
    """vllm#7779, #51187: noise 0.002, margin 0.001. Without noise that margin is surely below the floor."""
    bpb = GOOD | {"wrong:eve": GOOD["own"] + 0.001}
    quiet = build(bpb, spread=0.0001)
    assert ruled(quiet).codes == (Code.NOT_BETTER_THAN_WRONG,)
    loud = build(bpb | {"base_again": GOOD["base"] + 0.002}, spread=0.0001)
    verdict = ruled(loud)
    assert (verdict.outcome, verdict.codes) == (Outcome.INCONCLUSIVE, (Code.MARGIN_UNCLEAR,))
    assert verdict.noise == pytest.approx(0.002, abs=2e-4)


def test_a_margin_above_the_floor_but_within_twice_the_noise_is_inconclusive() -> None:
    bpb = GOOD | {"wrong:eve": GOOD["own"] + 0.006}
    assert ruled(build(bpb, spread=0.0001)).outcome is Outcome.READY
    loud = build(bpb | {"base_again": GOOD["base"] - 0.004}, spread=0.0001)
    verdict = ruled(loud)
    assert verdict.codes == (Code.MARGIN_UNCLEAR,)
    assert "above 0.0080" in verdict.reason


def test_noise_is_seen_even_where_it_cancels_in_the_mean() -> None:
    quiet = build(GOOD)
    loud = noisy(quiet, 0.05)
    (again,) = (one.bpb for one in ruled(loud).bpb if one.label == "base_again")
    verdict = ruled(loud)
    assert verdict.noise is not None
    assert abs(again - GOOD["base"]) < 0.05
    assert verdict.noise > 0.005
    assert any("repeat noise" in note for note in verdict.notes)
    assert ruled(quiet).noise == 0.0


def test_a_clear_failure_stays_a_failure_under_noise() -> None:
    wrong_packing = build(GOOD | {"own": 2.359, "control": 2.205, "base_again": 2.358})
    assert ruled(wrong_packing).code is Code.CONTROL_NOT_WORSE


# --- NaN, voided units ---


@pytest.mark.parametrize("label", list(GOOD))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_passes_nothing(label: str, value: float) -> None:
    """ainode#186, vllm#10234: NaN makes `<=` false; skipped, it makes a bad adapter look good."""
    everywhere = ruled(change_bits(build(GOOD), label, lambda number, bits: value))
    assert (everywhere.outcome, everywhere.codes) == (Outcome.INCONCLUSIVE, (Code.TOO_LITTLE_TEXT,))
    on_three = ruled(change_bits(build(GOOD), label, lambda number, bits: value if number < 3 else bits))
    assert (on_three.outcome, on_three.codes) == (Outcome.INCONCLUSIVE, (Code.TOO_LITTLE_TEXT,))
    on_two = ruled(change_bits(build(GOOD), label, lambda number, bits: value if number < 2 else bits))
    assert (on_two.outcome, on_two.units) == (Outcome.READY, 38)
    assert "2 units were left out" in on_two.notes


def test_units_lost_by_the_adapter_cannot_flatter_it() -> None:
    voided = (VoidedUnit("v0", "token 5 has the value nan", "own"),)
    verdict = ruled(replace(build(GOOD), voided=voided))
    assert verdict.codes == (Code.TOO_LITTLE_TEXT,)
    assert "own gave no usable score for 1 of 41 units (v0: token 5 has the value nan)" in verdict.reason


def test_units_lost_by_others_are_few_or_too_many() -> None:
    voided = tuple(VoidedUnit(f"v{number}", "token 5 has the value nan", "control") for number in range(3))
    assert ruled(replace(build(GOOD), voided=voided[:2])).outcome is Outcome.READY
    verdict = ruled(replace(build(GOOD), voided=voided))
    assert verdict.codes == (Code.TOO_LITTLE_TEXT,)
    assert "3 of 43 units got no usable score (v0, control: token 5 has the value nan)" in verdict.reason


def test_units_without_text_do_not_count_against_the_adapter() -> None:
    voided = tuple(VoidedUnit(f"v{number}", "has no text") for number in range(30))
    verdict = ruled(replace(build(GOOD), voided=voided))
    assert verdict.outcome is Outcome.READY
    assert "30 units were left out" in verdict.notes


# --- words ---


def test_the_reason_for_a_wrong_packing_shows_both_scores() -> None:
    measurement = build(GOOD | {"own": 2.359, "control": 2.205}, spread=0.0)
    scores = {one.label: f"{one.bpb:.4f}" for one in ruled(measurement).bpb}
    assert ruled(measurement).reason == (
        f"read with the other packing it scores {scores['control']}, as declared {scores['own']} "
        f"(bits per byte; base {scores['base']}): the declared packing is wrong"
    )
    assert scores["control"] < scores["own"]


@pytest.mark.parametrize("kind", [ControlKind.OTHER_PACKING, ControlKind.DISPLACED_EXPERTS])
def test_a_control_that_is_less_bad_than_own_names_no_cause(kind: ControlKind) -> None:
    """Another author's adapter is worse than base under both readings, so neither is the right one."""
    measurement = build(GOOD | {"own": 2.527, "control": 2.47}, spread=0.0)
    scores = {one.label: one.bpb for one in ruled(measurement).bpb}
    assert scores["base"] < scores["control"] < scores["own"]
    verdict = decide(measurement, opponents_available=True, thresholds=Thresholds(), control_kind=kind)
    assert verdict.code is Code.CONTROL_NOT_WORSE
    assert verdict.reason.endswith("neither is of use for these texts")


@pytest.mark.parametrize(
    ("kind", "control", "says"),
    [
        (ControlKind.OTHER_PACKING, 2.205, "its experts make no difference"),
        (ControlKind.DISPLACED_EXPERTS, 2.205, "its experts make no difference"),
        (ControlKind.DISPLACED_EXPERTS, 2.1, "with each expert displaced by one it scores"),
        (ControlKind.DISPLACED_EXPERTS, 2.1, "its experts are in the wrong places"),
        (None, 2.1, "its control scores"),
    ],
)
def test_the_reason_names_what_the_control_is(kind: ControlKind | None, control: float, says: str) -> None:
    measurement = build(GOOD | {"control": control}, spread=0.0001)
    verdict = decide(measurement, opponents_available=True, thresholds=Thresholds(), control_kind=kind)
    assert verdict.code is Code.CONTROL_NOT_WORSE
    assert says in verdict.reason


def test_notes_say_what_carries_the_verdict() -> None:
    alone = build(without("wrong:bob", "wrong:eve"))
    first = ruled(alone, opponents=False)
    assert first.notes == ("no opponent yet: the control carries the verdict",)
    assert (first.margin, first.interval) == (None, None)
    barred = ruled(alone, opponents=True)
    assert "may not be used" in barred.notes[0]
    assert ruled(build(without("control"))).notes == ("no control: the opponents carry the verdict",)
    assert ruled(build(GOOD)).notes == ()


# --- what cannot be judged ---


@pytest.mark.parametrize("label", ["base", "own", "base_again"])
def test_a_missing_subject_is_refused(label: str) -> None:
    with pytest.raises(SubjectsInvalid, match="base, own and base_again are not there once each"):
        ruled(build(without(label)))


def test_a_figure_too_few_is_refused() -> None:
    measurement = build(GOOD)
    short = replace(measurement, units=measurement.units[1:])
    with pytest.raises(SubjectsInvalid, match="has not 39 figures"):
        ruled(short)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("floor", math.nan),
        ("floor", -0.1),
        ("min_units", 1),
        ("min_bytes", 0),
        ("noise_factor", math.nan),
        ("drift_limit", math.inf),
        ("max_voided_fraction", 1.1),
        ("confidence", 95.0),
        ("resamples", 10),
        ("reference_tolerance", math.nan),
    ],
)
def test_thresholds_that_decide_nothing_are_refused(name: str, value: float) -> None:
    with pytest.raises(ThresholdsInvalid) as caught:
        Thresholds(**{name: value})  # type: ignore[arg-type]
    assert (caught.value.name, str(caught.value.value)) == (name, str(value))
    assert f"threshold {name}: expected a finite number from" in str(caught.value)
    assert f"found {value}. Correct the setting." in str(caught.value)
