"""Verdicts over several held-out sets: an adapter has to pass on each, and how often the rules are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from verdict_builders import GOOD, build, change_bits

from tasks.bpb.agreement import Reference, ReferenceSet
from tasks.bpb.heldout import HeldoutUnits, Unit, merge_sets, places_of_set
from tasks.bpb.measure import Measurement, SubjectBits, UnitBytes, VoidedUnit
from tasks.bpb.rulings import Code, Outcome, Thresholds
from tasks.bpb.verdict import Verdict, decide

pytestmark = pytest.mark.real

ASH, BIRCH = "ash/main", "birch/letters"
FLOOR = Thresholds().floor
BAD = GOOD | {"own": 2.5}
UNCLEAR = GOOD | {"wrong:eve": 2.207}


def join(parts: Mapping[str, Measurement]) -> Measurement:
    """The measurements of several sets as one, ids as `merge_sets` makes them; all must have the same subjects."""
    first = next(iter(parts.values()))
    return replace(
        first,
        units=tuple(
            UnitBytes(f"{name}:{unit.id}", unit.byte_count)
            for name, part in parts.items()
            for unit in part.units
        ),
        voided=tuple(
            VoidedUnit(f"{name}:{one.id}", one.reason, one.subject)
            for name, part in parts.items()
            for one in part.voided
        ),
        scores=tuple(
            SubjectBits(
                column.label,
                tuple(bits for part in parts.values() for bits in part.scores[place].bits),
            )
            for place, column in enumerate(first.scores)
        ),
    )


def ruled(parts: Mapping[str, Measurement], **more: object) -> Verdict:
    return decide(
        join(parts),
        opponents_available=True,
        thresholds=Thresholds(),
        heldout=tuple(parts),
        **more,  # type: ignore[arg-type]
    )


def inert(measurement: Measurement) -> Measurement:
    base = next(column.bits for column in measurement.scores if column.label == "base")
    return change_bits(measurement, "own", lambda number, _: base[number])


DRIFTED = build(GOOD | {"base_again": 2.366})
SHORT = build(GOOD, units=12)
NAN = replace(build(GOOD), voided=(VoidedUnit("v0", "token 1 has the value nan", "own"),))


@pytest.mark.parametrize(
    ("second", "outcome", "codes"),
    [
        pytest.param(build(GOOD), Outcome.READY, [], id="good on both"),
        pytest.param(build(UNCLEAR), Outcome.INCONCLUSIVE, [Code.MARGIN_UNCLEAR], id="unclear on one"),
        pytest.param(SHORT, Outcome.INCONCLUSIVE, [Code.TOO_LITTLE_TEXT], id="too little of one"),
        pytest.param(NAN, Outcome.INCONCLUSIVE, [Code.TOO_LITTLE_TEXT], id="breaks on one"),
        pytest.param(
            build(BAD),
            Outcome.QUARANTINED,
            [Code.CONTROL_NOT_WORSE, Code.NOT_BETTER_THAN_BASE, Code.NOT_BETTER_THAN_WRONG],
            id="bad on one",
        ),
        pytest.param(
            inert(build(GOOD)),
            Outcome.QUARANTINED,
            [Code.NO_EFFECT, Code.NOT_BETTER_THAN_BASE],
            id="inert on one",
        ),
        pytest.param(DRIFTED, Outcome.STOPPED, [Code.ENGINE_DRIFT], id="the engine drifts in one"),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_the_worst_set_decides_and_is_named(
    second: Measurement, outcome: Outcome, codes: list[Code], is_first: bool
) -> None:
    parts = {ASH: build(GOOD, units=60), BIRCH: second}
    verdict = ruled(dict(reversed(parts.items())) if is_first else parts)
    assert (verdict.outcome, list(verdict.codes)) == (outcome, codes)
    assert verdict.code == (codes[0] if codes else None)
    by_name = {one.name: one for one in verdict.sets}
    assert by_name[ASH].ruling.outcome is Outcome.READY
    assert (by_name[BIRCH].ruling.outcome, list(by_name[BIRCH].ruling.codes)) == (outcome, codes)
    if codes:
        assert verdict.reason.startswith(f"on {BIRCH} ")
        assert verdict.reason.endswith(by_name[BIRCH].ruling.reason)
    else:
        assert verdict.reason.startswith(f"on each of 2 held-out sets; on {ASH}, the closest, own scores ")
    for one in verdict.sets:
        assert any(note.startswith(f"{one.name} by itself: {one.ruling.outcome}") for note in verdict.notes)


def test_both_together_would_hide_the_set_that_fails() -> None:
    """The trap: of much text of one author and little of the other, the mean is good."""
    parts = {ASH: build(GOOD, units=200), BIRCH: build(BAD, units=30)}
    together = decide(join(parts), opponents_available=True, thresholds=Thresholds())
    assert together.outcome is Outcome.READY
    verdict = ruled(parts)
    assert verdict.code is Code.CONTROL_NOT_WORSE
    assert [one.bpb for one in verdict.bpb] == [one.bpb for one in together.bpb], "figures are of all units"
    assert (verdict.units, verdict.byte_count) == (together.units, together.byte_count)


@pytest.mark.parametrize(
    ("first", "second", "outcome", "codes"),
    [
        pytest.param(SHORT, build(BAD), Outcome.QUARANTINED, Code.CONTROL_NOT_WORSE, id="short, bad"),
        pytest.param(SHORT, build(UNCLEAR), Outcome.INCONCLUSIVE, Code.TOO_LITTLE_TEXT, id="short, unclear"),
        pytest.param(build(BAD), DRIFTED, Outcome.STOPPED, Code.ENGINE_DRIFT, id="bad, drifted"),
        pytest.param(build(BAD), inert(build(GOOD)), Outcome.QUARANTINED, Code.NO_EFFECT, id="bad, inert"),
        pytest.param(
            build(UNCLEAR), build(BAD), Outcome.QUARANTINED, Code.CONTROL_NOT_WORSE, id="unclear, bad"
        ),
    ],
)
def test_precedence_is_over_all_sets(
    first: Measurement, second: Measurement, outcome: Outcome, codes: Code
) -> None:
    for parts in ({ASH: first, BIRCH: second}, {BIRCH: second, ASH: first}):
        verdict = ruled(parts)
        assert (verdict.outcome, verdict.code) == (outcome, codes)
        assert list(verdict.codes) == [code for code in Code if code in verdict.codes]


def test_figures_of_a_set_are_those_of_its_units_alone() -> None:
    parts = {ASH: build(GOOD, units=30), BIRCH: build(GOOD | {"own": 2.1}, units=50)}
    for name, found in zip(parts, ruled(parts).sets, strict=True):
        part = parts[name]
        size = sum(unit.byte_count for unit in part.units)
        assert (found.name, found.figures.units, found.figures.byte_count) == (name, len(part.units), size)
        by_hand = {column.label: sum(column.bits) / size for column in part.scores}
        assert {one.label: one.bpb for one in found.figures.bpb} == pytest.approx(by_hand)
        assert found.figures.margin == pytest.approx(by_hand["wrong:eve"] - by_hand["own"])
        assert found.figures.interval is not None


def test_one_set_is_judged_as_without_a_name() -> None:
    measurement = build(UNCLEAR)
    plain = decide(measurement, opponents_available=True, thresholds=Thresholds())
    named = decide(measurement, opponents_available=True, thresholds=Thresholds(), heldout=(ASH,))
    assert replace(named, sets=()) == plain and plain.sets == ()
    [only] = named.sets
    assert (only.name, only.ruling.codes, only.ruling.reason) == (ASH, named.codes, named.reason)


def test_units_that_no_set_has_pass_nothing() -> None:
    verdict = decide(build(GOOD), opponents_available=True, thresholds=Thresholds(), heldout=(ASH, BIRCH))
    assert (verdict.outcome, verdict.code) == (Outcome.INCONCLUSIVE, Code.TOO_LITTLE_TEXT)


def test_a_reference_is_held_against_its_own_set() -> None:
    parts = {ASH: build(GOOD, units=30), BIRCH: build(GOOD, units=50)}
    size = sum(unit.byte_count for unit in parts[BIRCH].units)
    own, base = (
        sum(next(column.bits for column in parts[BIRCH].scores if column.label == label)) / size
        for label in ("own", "base")
    )
    right = ReferenceSet(BIRCH, own, base, 50, size)

    def stated(**changes: float) -> Verdict:
        reference = Reference((replace(right, **changes),), is_same_measure=True)  # type: ignore[arg-type]
        return ruled(parts, reference=reference)

    assert stated().outcome is Outcome.READY
    mismatch = stated(own=own + 0.01)
    assert mismatch.codes == (Code.REFERENCE_MISMATCH,)
    assert [one.ruling.code for one in mismatch.sets] == [None, Code.REFERENCE_MISMATCH]
    assert mismatch.reason.startswith(f"on {BIRCH} own scores "), "the set is named once"
    assert stated(base=base + 0.01).codes == (Code.REFERENCE_INVALID,)


def test_units_belong_to_the_set_whose_name_they_carry() -> None:
    sets = [
        HeldoutUnits(name, (Unit("1", "one"), Unit("b:2", "two"))) for name in ("ash/a", "ash/ab", "ash/a:b")
    ]
    ids, names = [unit.id for unit in merge_sets(sets)], [one.name for one in sets]
    assert [places_of_set(ids, name, names) for name in names] == [[0], [2, 3], [1, 4, 5]]
    assert places_of_set(ids, "elm/x", names) == []
    assert places_of_set(["1", "b:2"], "ash/a", ["ash/a"]) == [0, 1], "of one set alone ids stay as they are"


def test_comparisons_are_counted_over_all_sets_and_widen_the_ceilings_alone() -> None:
    part = build(GOOD, spread=0.2)
    one, three = ruled({ASH: part}), ruled({ASH: part, BIRCH: part, "elm/x": part})
    assert (one.comparisons, three.comparisons) == (4, 12)
    alone = {found.label: found for found in one.sets[0].figures.differences}
    for found in three.sets[0].figures.differences:
        before = alone[found.label]
        assert found.mean == before.mean and found.lower == pytest.approx(before.lower, rel=0.05)
        assert before.upper < before.ceiling < found.ceiling


def test_what_would_fail_alone_and_not_as_one_of_many_is_unclear_and_said() -> None:
    close = build(GOOD | {"wrong:eve": 2.1998})
    one = {column.label: column for column in close.scores}
    alone = replace(close, scores=tuple(one[label] for label in ("base", "own", "base_again", "wrong:eve")))
    many = ruled({f"ash/{n}": close for n in range(8)})
    found = next(one for one in many.sets[0].figures.differences if one.label == "wrong:eve")
    assert found.upper <= FLOOR < found.ceiling
    assert ruled({ASH: alone}).code is Code.NOT_BETTER_THAN_WRONG
    assert (many.outcome, many.code) == (Outcome.INCONCLUSIVE, Code.MARGIN_UNCLEAR)
    assert any("as one of 32 comparisons its upper end counts as" in note for note in many.notes)


# --- how often the rules are wrong ---

TRIALS, UNITS = 150, 24
# Wide tails, which few resamples fill well enough: one in ten, each way.
TAILS = Thresholds(confidence=0.8, resamples=600)


def drawn(draw: np.random.Generator, gaps: Mapping[str, float], trial: int) -> Measurement:
    """Units on which every subject's true difference to own is the given one, around which it varies by 0.05."""
    sizes = draw.integers(300, 700, UNITS)
    own = 2.0 * sizes
    bits = {"own": own, "base": own, "base_again": own}
    shared = draw.standard_normal(UNITS)
    for label, gap in gaps.items():
        varied = 0.05 * (draw.standard_normal(UNITS) + 0.5 * shared)
        bits[label] = own + sizes * (gap + varied)
    bits["base_again"] = bits["base"]
    return Measurement(
        units=tuple(UnitBytes(f"{trial}-{n:02}", int(size)) for n, size in enumerate(sizes)),
        voided=(),
        scores=tuple(SubjectBits(label, tuple(map(float, values))) for label, values in bits.items()),
        tokens=1,
        seconds=1.0,
    )


def share(outcome: Outcome, gaps: Mapping[str, float], sets: int) -> tuple[float, float]:
    """How often a verdict ends so, and how often one of its uncorrected upper bounds is at or below the floor."""
    draw = np.random.default_rng(29)
    ended = uncorrected = 0
    for trial in range(TRIALS):
        names = tuple(f"ash/{n}" for n in range(sets))
        joined = join({name: drawn(draw, gaps, trial) for name in names})
        verdict = decide(joined, opponents_available=True, thresholds=TAILS, heldout=names)
        ended += verdict.outcome is outcome
        uncorrected += any(one.upper <= FLOOR for part in verdict.sets for one in part.figures.differences)
    return ended / TRIALS, uncorrected / TRIALS


def test_a_good_adapter_is_not_quarantined_the_oftener_the_more_it_is_compared() -> None:
    """Every difference is exactly at the floor, as bad as a good adapter can be: 12 comparisons on two sets."""
    gaps = {"base": FLOOR, "control": FLOOR, **{f"wrong:{n}": FLOOR for n in range(4)}}
    quarantined, uncorrected = share(Outcome.QUARANTINED, gaps, 2)
    assert 0.02 < quarantined <= 0.16 < 0.4 < uncorrected


def test_ready_keeps_its_level_whatever_it_is_compared_with() -> None:
    """One difference is at the floor and all others are clear: no bound needs to be corrected for ready."""
    gaps = {"base": 0.3, "control": 0.3, **{f"wrong:{n}": 0.3 for n in range(3)}, "wrong:close": FLOOR}
    ready, _ = share(Outcome.READY, gaps, 1)
    assert 0.04 < ready <= 0.16
    both, _ = share(Outcome.READY, gaps, 2)
    assert both <= ready, "a second set makes it no easier"
