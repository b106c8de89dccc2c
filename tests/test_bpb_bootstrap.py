"""Bootstrap intervals against closed forms and enumeration, and how often they miss."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from tasks.bpb.bootstrap import Difference, Table, compare, repeat_noise


def table(gaps: list[float], sizes: list[int]) -> Table:
    own = tuple(2.0 * size for size in sizes)
    base = tuple(bits + gap for bits, gap in zip(own, gaps, strict=True))
    names = tuple(f"u{number:04}" for number in range(len(sizes)))
    return Table(("base", "own", "base_again"), names, tuple(sizes), (base, own, own), 0)


def interval(
    gaps: list[float],
    sizes: list[int],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    comparisons: int = 1,
) -> Difference:
    (difference,) = compare(
        table(gaps, sizes),
        [("base", "own")],
        confidence=confidence,
        resamples=resamples,
        comparisons=comparisons,
    )
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


def test_four_units_by_enumeration() -> None:
    """With four units the 256 resamples can be listed, each with its own standard error, and their quantiles taken."""
    gaps, sizes = [3.0, -1.0, 8.0, 2.0], [10, 20, 40, 25]

    def ratio_and_error(drawn: tuple[int, ...]) -> tuple[float, float]:
        total = sum(sizes[n] for n in drawn)
        ratio = sum(gaps[n] for n in drawn) / total
        squares = sum((gaps[n] - ratio * sizes[n]) ** 2 for n in drawn)
        return ratio, math.sqrt(4 / 3 * squares) / total

    mean, error = ratio_and_error((0, 1, 2, 3))
    studentized = sorted(
        (ratio - mean) / max(other, 0.1 * error)
        for ratio, other in map(ratio_and_error, itertools.product(range(4), repeat=4))
    )
    found = interval(gaps, sizes, confidence=0.6, resamples=50_000, comparisons=4)
    # Tails of 20 % and, for the ceiling, 5 %: at ranks 51.2, 204.8 and 12.8 of 256, each inside a step.
    assert found.mean == pytest.approx(mean)
    assert found.lower == pytest.approx(mean - studentized[204] * error)
    assert found.upper == pytest.approx(mean - studentized[51] * error)
    assert found.ceiling == pytest.approx(mean - studentized[12] * error)
    assert found.lower < found.mean < found.upper < found.ceiling


def test_a_constant_difference_has_no_width() -> None:
    sizes = [100, 250, 330, 470]
    found = interval([0.125 * size for size in sizes], sizes)
    assert (found.mean, found.lower, found.upper) == pytest.approx((0.125, 0.125, 0.125))


def test_one_unit_alone_has_no_width() -> None:
    found = interval([30.0], [100])
    assert (found.mean, found.lower, found.upper, found.ceiling) == (0.3, 0.3, 0.3, 0.3)


def test_a_difference_on_one_unit_of_many_is_doubtful_and_finite() -> None:
    """A third of the resamples hold none of it, and have no standard error of their own."""
    sizes = [200] * 40
    found = interval([60.0] + [0.0] * 39, sizes)
    assert found.mean == pytest.approx(60 / 8000)
    assert found.lower <= 0.0 < found.mean < found.upper <= 12 * found.mean


def test_the_interval_is_a_function_of_the_units() -> None:
    draw = random.Random(5)
    sizes = [draw.randint(100, 900) for _ in range(30)]
    gaps = [size * draw.gauss(0.03, 0.08) for size in sizes]
    assert interval(gaps, sizes) == interval(gaps, sizes)
    more = compare(
        table(gaps, sizes),
        [("own", "base"), ("base", "own")],
        confidence=0.95,
        resamples=2000,
        comparisons=1,
    )
    assert more[1] == interval(gaps, sizes)
    assert more[0].lower == pytest.approx(-more[1].upper)


def test_many_units_are_resampled_in_pieces() -> None:
    draw = random.Random(6)
    sizes = [draw.randint(100, 900) for _ in range(3000)]
    gaps = [size * draw.gauss(0.03, 0.08) for size in sizes]
    found = interval(gaps, sizes, resamples=400)
    spread = 0.08 * math.sqrt(sum(size**2 for size in sizes)) / sum(sizes)
    assert found.upper - found.lower == pytest.approx(2 * 1.96 * spread, rel=0.15)


def test_repeat_noise_is_the_larger_end_of_a_percentile_interval() -> None:
    """Base moves on 4 of 40 units: percentiles of the binomial of how often these are drawn, by hand."""
    gaps, sizes = [25.0] * 4 + [0.0] * 36, [100] * 40
    mean, noise = repeat_noise(table(gaps, sizes), confidence=0.95, resamples=4000)
    assert mean == pytest.approx(-100 / 4000)
    chances = [math.comb(40, k) * 0.1**k * 0.9 ** (40 - k) for k in range(41)]
    most = next(k for k in range(41) if sum(chances[: k + 1]) >= 0.975)
    assert noise == pytest.approx(most * 25 / 4000)


# --- how often an interval misses ---


def test_bounds_miss_about_as_often_as_they_say_where_gains_are_lopsided() -> None:
    """Few texts that gain much, or lose much: percentile bounds miss 2.5 % four times over with 20 units."""
    draw = np.random.default_rng(17)
    sizes, trials = [400] * 20, 600
    above = below = percentile_below = 0
    for _ in range(trials):
        gaps = 400 * 0.05 * (draw.exponential(size=20) - 1)  # the truth is 0
        found = interval(list(gaps), sizes, resamples=1000)
        above += found.lower > 0
        below += found.upper < 0
        resampled = draw.choice(gaps, (1000, 20)).mean(axis=1)
        percentile_below += np.quantile(resampled, 0.975) < 0
    assert above / trials < 0.035
    assert below / trials < 0.075 < percentile_below / trials
