"""Verdicts where the trainer gave scores of its own: base against base first, then own against own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from verdict_builders import GOOD, build, copy_bits, without

from tasks.bpb.agreement import Reference, ReferenceSet
from tasks.bpb.measure import BASE, OWN, Measurement, UnitBytes
from tasks.bpb.rulings import Code, Outcome, Thresholds
from tasks.bpb.verdict import Verdict, decide

NAME = "ash/main"
TOLERANCE = Thresholds().reference_tolerance


def measured(measurement: Measurement, label: str, front: str = "") -> tuple[float, int, int]:
    """Bits per byte, units and bytes of the units whose ids begin with `front`: sums over sums, by a plain loop."""
    [column] = [column for column in measurement.scores if column.label == label]
    bits = size = count = 0.0
    for unit, value in zip(measurement.units, column.bits, strict=True):
        if unit.id.startswith(front):
            bits, size, count = bits + value, size + unit.byte_count, count + 1
    return bits / size, int(count), int(size)


def reference(
    measurement: Measurement,
    *,
    own: float = 0.0,
    base: float = 0.0,
    units: int = 0,
    byte_count: int = 0,
    same: bool = True,
) -> Reference:
    """The measurement's own scores on its one set, as the trainer's, each moved by this much."""
    own_bpb, count, size = measured(measurement, OWN)
    base_bpb, _, _ = measured(measurement, BASE)
    stated = ReferenceSet(NAME, own_bpb + own, base_bpb + base, count + units, size + byte_count)
    return Reference((stated,), is_same_measure=same)


def ruled(
    measurement: Measurement, stated: Reference | None, *, heldout: tuple[str, ...] = (NAME,), **limits: float
) -> Verdict:
    thresholds = Thresholds(**limits)  # type: ignore[arg-type]
    return decide(
        measurement, opponents_available=True, thresholds=thresholds, heldout=heldout, reference=stated
    )


@pytest.mark.parametrize(
    ("own", "base", "outcome", "codes"),
    [
        pytest.param(0.0, 0.0, Outcome.READY, [], id="both as in training"),
        pytest.param(0.9e-3, -0.9e-3, Outcome.READY, [], id="within the tolerance"),
        pytest.param(-0.9e-3, 0.9e-3, Outcome.READY, [], id="within it on the other side"),
        pytest.param(1.1e-3, 0.0, Outcome.QUARANTINED, [Code.REFERENCE_MISMATCH], id="own was worse"),
        pytest.param(-1.1e-3, 0.0, Outcome.QUARANTINED, [Code.REFERENCE_MISMATCH], id="own was better"),
        pytest.param(-0.038, 0.0, Outcome.QUARANTINED, [Code.REFERENCE_MISMATCH], id="gate and up exchanged"),
        pytest.param(0.0, 1.1e-3, Outcome.STOPPED, [Code.REFERENCE_INVALID], id="another base"),
        pytest.param(0.0, -1.1e-3, Outcome.STOPPED, [Code.REFERENCE_INVALID], id="another base, better"),
        pytest.param(0.5, 0.5, Outcome.STOPPED, [Code.REFERENCE_INVALID], id="another measure altogether"),
        pytest.param(math.nan, 0.0, Outcome.STOPPED, [Code.REFERENCE_INVALID], id="own is no number"),
        pytest.param(0.0, math.nan, Outcome.STOPPED, [Code.REFERENCE_INVALID], id="base is no number"),
        pytest.param(math.inf, 0.0, Outcome.STOPPED, [Code.REFERENCE_INVALID], id="own is infinite"),
    ],
)
def test_outcome_and_codes(own: float, base: float, outcome: Outcome, codes: list[Code]) -> None:
    measurement = build(GOOD)
    verdict = ruled(measurement, reference(measurement, own=own, base=base))
    assert (verdict.outcome, list(verdict.codes)) == (outcome, codes)
    [found] = verdict.agreements
    assert (found.name, found.own, found.base) == (
        NAME,
        pytest.approx(measured(measurement, OWN)[0], abs=1e-12),
        pytest.approx(measured(measurement, BASE)[0], abs=1e-12),
    )
    assert any(note.startswith(f"the trainer's scores of {NAME}: own ") for note in verdict.notes)
    assert "\n" not in verdict.reason


def test_without_a_reference_nothing_is_said_of_one() -> None:
    verdict = ruled(build(GOOD), None)
    assert (verdict.outcome, verdict.agreements, verdict.notes) == (Outcome.READY, (), ())


def test_the_tolerance_is_a_threshold_and_stored() -> None:
    measurement = build(GOOD)
    stated = reference(measurement, own=0.004, base=0.004)
    assert ruled(measurement, stated).code is Code.REFERENCE_INVALID
    wider = ruled(measurement, stated, reference_tolerance=0.005)
    assert (wider.outcome, wider.thresholds.reference_tolerance) == (Outcome.READY, 0.005)


def test_own_must_not_be_nearer_to_the_trainers_base() -> None:
    """With a tolerance wider than the gain, the bare base would agree with any adapter."""
    measurement = build(GOOD)
    gain = measured(measurement, BASE)[0] - measured(measurement, OWN)[0]
    stated = reference(measurement, own=-0.8 * gain, base=-0.3 * gain)
    verdict = ruled(measurement, stated, reference_tolerance=gain)
    assert abs(verdict.agreements[0].own_gap) < gain and verdict.agreements[0].is_valid(gain)
    assert verdict.code is Code.REFERENCE_MISMATCH


def test_a_mismatch_comes_after_what_explains_it() -> None:
    measurement = build(GOOD | {"own": 2.366, "control": 2.205})
    trained = build(GOOD)
    verdict = ruled(measurement, reference(trained))
    assert verdict.codes == (
        Code.CONTROL_NOT_WORSE,
        Code.NOT_BETTER_THAN_BASE,
        Code.REFERENCE_MISMATCH,
    )


def test_a_doubtful_measurement_judges_nothing_not_even_no_effect() -> None:
    measurement = copy_bits(build(GOOD), BASE, OWN)
    assert ruled(measurement, reference(measurement)).code is Code.NO_EFFECT
    assert ruled(measurement, reference(measurement, base=0.01)).code is Code.REFERENCE_INVALID


def test_too_little_text_comes_before_the_reference() -> None:
    few = build(GOOD, units=5)
    assert ruled(few, reference(few, base=1.0)).code is Code.TOO_LITTLE_TEXT


def test_an_unclear_margin_does_not_hide_a_mismatch() -> None:
    unclear = build(GOOD | {"wrong:eve": 2.208}, spread=0.04)
    assert ruled(unclear, reference(unclear)).code is Code.MARGIN_UNCLEAR
    assert ruled(unclear, reference(unclear, own=0.01)).code is Code.REFERENCE_MISMATCH


@pytest.mark.parametrize("change", [{"units": 1}, {"units": -1}, {"byte_count": 1}])
@pytest.mark.parametrize("same", [True, False])
def test_another_text_is_not_compared_and_said(change: dict[str, int], same: bool) -> None:
    measurement = build(GOOD)
    verdict = ruled(measurement, reference(measurement, own=1.0, base=1.0, same=same, **change))
    assert (verdict.outcome, verdict.agreements) == (Outcome.READY, ())
    _, units, size = measured(measurement, OWN)
    stated = f"of {units + change.get('units', 0)} units with {size + change.get('byte_count', 0)} bytes"
    assert verdict.notes == (
        f"the trainer's scores of {NAME} were not compared: they are {stated}, ours of {units} with {size}",
    )


def test_a_set_that_was_not_scored_here_is_not_compared_and_said() -> None:
    measurement = build(GOOD)
    verdict = ruled(measurement, reference(measurement, own=1.0), heldout=("ash/other",))
    assert (verdict.outcome, verdict.agreements) == (Outcome.READY, ())
    assert verdict.notes == (f"the trainer's scores of {NAME} were not compared: none of it was scored here",)


def test_another_measure_of_the_same_units_is_compared_and_said() -> None:
    measurement = build(GOOD)
    assert ruled(measurement, reference(measurement, own=0.1, same=False)).code is Code.REFERENCE_MISMATCH
    verdict = ruled(measurement, reference(measurement, same=False))
    assert verdict.outcome is Outcome.READY
    assert "another measure_id" in verdict.notes[-1]


def test_each_set_is_compared_by_itself() -> None:
    """Faults of two sets would cancel in the sum over both."""
    whole = build(GOOD, units=80)
    names = ("ash/letters", "ash/main")
    units = tuple(
        UnitBytes(f"{names[number % 3 == 0]}:{unit.id}", unit.byte_count)
        for number, unit in enumerate(whole.units)
    )
    measurement = replace(whole, units=units)
    sets = []
    for name in names:
        own, count, size = measured(measurement, OWN, name)
        base, _, _ = measured(measurement, BASE, name)
        sets.append(ReferenceSet(name, own, base, count, size))
    assert sets[0].units != sets[1].units
    both = Reference(tuple(sets), is_same_measure=True)
    assert ruled(measurement, both, heldout=names).outcome is Outcome.READY
    wrong = [replace(sets[0], own=sets[0].own + 0.02), replace(sets[1], own=sets[1].own - 0.03)]
    verdict = ruled(measurement, replace(both, sets=tuple(wrong)), heldout=names)
    assert verdict.code is Code.REFERENCE_MISMATCH
    assert [one.name for one in verdict.agreements] == list(names)
    assert "on ash/letters own scores" in verdict.reason


def test_the_reasons_show_both_measurements_and_what_to_do() -> None:
    measurement = build(without("wrong:bob"))
    own, base = (measured(measurement, label)[0] for label in (OWN, BASE))
    invalid = ruled(measurement, reference(measurement, base=0.25)).reason
    assert f"on {NAME} base scores {base:.4f} bits per byte here and {base + 0.25:.4f} in training" in invalid
    assert "they may differ by 0.001" in invalid and "compare the texts" in invalid
    mismatch = ruled(measurement, reference(measurement, own=0.25)).reason
    assert f"own scores {own:.4f} bits per byte here and {own + 0.25:.4f} in training" in mismatch
    assert f"({base:.4f}, here {base:.4f})" in mismatch
    assert "what is served is not what was trained" in mismatch
