"""Two readings of one adapter: which one the scores favour, and when they favour neither."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tasks.bpb.measure import BASE, BASE_AGAIN, CONTROL, OWN, Measurement, SubjectBits, UnitBytes
from tasks.bpb.readings import Readings, compare_readings
from tasks.bpb.rulings import Thresholds
from tasks.bpb.verdict import Verdict, decide

UNITS, BYTES = 24, 400
BASE_BITS = [900.0 + 7 * n for n in range(UNITS)]


def judge(own: list[float], control: list[float], *, noise: float = 0.0, **limits: float) -> Verdict:
    """`own` and `control` in bits per byte below base, for each unit; `noise` is what base itself moves."""
    columns = {
        BASE: BASE_BITS,
        OWN: [bits - BYTES * gain for bits, gain in zip(BASE_BITS, own, strict=True)],
        CONTROL: [bits - BYTES * gain for bits, gain in zip(BASE_BITS, control, strict=True)],
        BASE_AGAIN: [bits + BYTES * noise for bits in BASE_BITS],
    }
    measured = Measurement(
        units=tuple(UnitBytes(f"u{n}", BYTES) for n in range(UNITS)),
        voided=(),
        scores=tuple(SubjectBits(label, tuple(bits)) for label, bits in columns.items()),
        tokens=1,
        seconds=1.0,
    )
    thresholds = Thresholds(**limits)  # type: ignore[arg-type]
    return decide(measured, opponents_available=False, thresholds=thresholds)


def compare(own: list[float], control: list[float], **more: float) -> Readings:
    return compare_readings(judge(own, control, **more))


def test_the_better_reading_wins_whichever_it_is() -> None:
    better, worse = [0.3 + 0.001 * n for n in range(UNITS)], [0.01] * UNITS
    first, second = compare(better, worse), compare(worse, better)
    assert (first.winner, second.winner) == (OWN, CONTROL)
    gap = math.fsum(better) / UNITS - 0.01
    assert first.difference.mean == pytest.approx(gap) == pytest.approx(-second.difference.mean)
    assert first.own == pytest.approx(second.control) == pytest.approx(first.base - gap - 0.01)
    assert 0 < first.difference.lower < gap < first.difference.upper


def test_a_difference_that_changes_sides_from_text_to_text_decides_nothing() -> None:
    waver = [0.1 + 0.05 * (-1) ** n for n in range(UNITS)]
    found = compare(waver, [0.1] * UNITS)
    assert found.winner is None and found.difference.lower < 0 < found.difference.upper


@pytest.mark.parametrize(("gap", "winner"), [(0.0019, None), (0.0021, OWN)])
def test_a_reading_has_to_win_by_more_than_the_floor(gap: float, winner: str | None) -> None:
    for own, control, side in ((gap, 0.0, OWN), (0.0, gap, CONTROL)):
        found = compare([0.1 + own] * UNITS, [0.1 + control] * UNITS, floor=0.002)
        assert found.winner == (side if winner else None) and found.bar == 0.002


def test_what_the_engine_itself_moves_decides_nothing() -> None:
    assert compare([0.105] * UNITS, [0.1] * UNITS).winner == OWN
    found = compare([0.105] * UNITS, [0.1] * UNITS, noise=0.003)
    assert found.winner is None and found.bar == pytest.approx(0.006)


def test_what_is_no_number_decides_nothing() -> None:
    better, worse = [0.3] * UNITS, [0.1] * UNITS
    for own, control in ((better, worse), (worse, better)):
        verdict = judge(own, control)
        assert compare_readings(verdict).winner is not None
        spoilt = [replace(verdict, noise=math.nan)]
        spoilt += [
            replace(
                verdict,
                differences=tuple(
                    replace(one, lower=math.nan, upper=math.nan) for one in verdict.differences
                ),
            )
        ]
        assert [compare_readings(each).winner for each in spoilt] == [None, None]


def test_readings_that_do_nothing_decide_nothing() -> None:
    found = compare([0.0] * UNITS, [0.0] * UNITS)
    assert found.winner is None and found.difference.mean == 0.0
