"""Bootstrap intervals against closed forms."""

from __future__ import annotations

import math
import random

import pytest

from tasks.bpb.bootstrap import Difference, Table, compare


def table(gaps: list[float], sizes: list[int]) -> Table:
    own = tuple(2.0 * size for size in sizes)
    base = tuple(bits + gap for bits, gap in zip(own, gaps, strict=True))
    names = tuple(f"u{number:04}" for number in range(len(sizes)))
    return Table(("base", "own"), names, tuple(sizes), (base, own), 0)


def interval(
    gaps: list[float], sizes: list[int], *, confidence: float = 0.95, resamples: int = 2000
) -> Difference:
    (difference,) = compare(table(gaps, sizes), [("base", "own")], confidence=confidence, resamples=resamples)
    return difference


@pytest.mark.parametrize(("confidence", "z"), [(0.95, 1.959964), (0.8, 1.281552)])
def test_interval_agrees_with_the_normal_approximation_of_a_ratio(confidence: float, z: float) -> None:
    draw = random.Random(11)
    sizes = [draw.randint(100, 900) for _ in range(500)]
    gaps = [size * draw.gauss(0.03, 0.08) for size in sizes]
    ratio = sum(gaps) / sum(sizes)
    deviation = math.sqrt(
        sum((gap - ratio * size) ** 2 for gap, size in zip(gaps, sizes, strict=True))
    ) / sum(sizes)
    found = interval(gaps, sizes, confidence=confidence, resamples=4000)
    assert found.mean == pytest.approx(ratio, rel=1e-9)
    assert found.lower == pytest.approx(ratio - z * deviation, abs=0.1 * z * deviation)
    assert found.upper == pytest.approx(ratio + z * deviation, abs=0.1 * z * deviation)


def test_three_units_by_enumeration() -> None:
    """With three units the 27 resamples can be listed, and their exact quantiles compared."""
    gaps, sizes = [3.0, -1.0, 8.0], [10, 20, 40]
    ratios = sorted(
        (gaps[a] + gaps[b] + gaps[c]) / (sizes[a] + sizes[b] + sizes[c])
        for a in range(3)
        for b in range(3)
        for c in range(3)
    )
    found = interval(gaps, sizes, confidence=0.6, resamples=20_000)
    # The 20 % and 80 % points lie inside a step of the exact distribution: at rank 5.4 and 21.6 of 27.
    assert found.lower == pytest.approx(ratios[5])
    assert found.upper == pytest.approx(ratios[21])
    assert ratios[5] < ratios[21]


def test_a_constant_difference_has_no_width() -> None:
    sizes = [100, 250, 330, 470]
    found = interval([0.125 * size for size in sizes], sizes)
    assert (found.mean, found.lower, found.upper) == pytest.approx((0.125, 0.125, 0.125))


def test_the_interval_is_a_function_of_the_units() -> None:
    draw = random.Random(5)
    sizes = [draw.randint(100, 900) for _ in range(30)]
    gaps = [size * draw.gauss(0.03, 0.08) for size in sizes]
    assert interval(gaps, sizes) == interval(gaps, sizes)
    more = compare(table(gaps, sizes), [("own", "base"), ("base", "own")], confidence=0.95, resamples=2000)
    assert more[1] == interval(gaps, sizes)
    assert more[0].lower == pytest.approx(-more[1].upper)
