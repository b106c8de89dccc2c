"""Paired differences in bits per byte, with seeded bootstrap intervals over units.

The intervals are studentized (bootstrap-t): each resample's deviation from the measured difference is divided by that
resample's own standard error. Where units differ in one direction only, as with a few texts that gain much, this keeps
the level about twice as well as percentiles of the resampled differences do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.bpb.errors import SubjectsInvalid
from tasks.bpb.measure import BASE, BASE_AGAIN, OWN, Measurement

_LEAST_ERROR = 0.1
"""A resample's standard error counts as at least this share of the measurement's: one that happens to hold no unit in
which the two differ has none, and would decide alone."""
_AT_ONCE = 1 << 18
"""Numbers held at once: all resamples together would be resamples x units."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """BPB of subject `label` minus BPB of what it is compared with, and the interval of that difference.

    `ceiling` is the upper bound corrected for the number of comparisons, at or above `upper`.
    """

    label: str
    mean: float
    lower: float
    upper: float
    ceiling: float


@dataclass(frozen=True, slots=True)
class Table:
    """The units on which every subject has a finite score, ordered by id: their order decides nothing.

    `bits` holds one row per label, in float64; `dropped` counts the units left out here.
    """

    labels: tuple[str, ...]
    unit_ids: tuple[str, ...]
    unit_bytes: tuple[int, ...]
    bits: tuple[tuple[float, ...], ...]
    dropped: int

    @property
    def byte_count(self) -> int:
        """The bytes of all units."""
        return sum(self.unit_bytes)

    def bits_of(self, label: str) -> tuple[float, ...]:
        """Bits per unit of one subject."""
        return self.bits[self.labels.index(label)]

    def bpb_of(self, label: str) -> float:
        """Bits per byte of one subject; the table must not be empty."""
        return math.fsum(self.bits_of(label)) / self.byte_count


def tabulate(measurement: Measurement) -> Table:
    """The measurement's usable units as a table.

    Raises:
        SubjectsInvalid: base, own or base_again is missing, a label occurs twice, or a subject has not one
            figure for each unit.
    """
    labels = tuple(column.label for column in measurement.scores)
    if not {BASE, OWN, BASE_AGAIN} <= set(labels) or len(set(labels)) < len(labels):
        raise SubjectsInvalid(labels, "base, own and base_again are not there once each")
    if any(len(column.bits) != len(measurement.units) for column in measurement.scores):
        raise SubjectsInvalid(labels, f"one has not {len(measurement.units)} figures, one for each unit")
    usable = sorted(
        (unit.id, unit.byte_count, index)
        for index, unit in enumerate(measurement.units)
        if unit.byte_count > 0 and all(math.isfinite(column.bits[index]) for column in measurement.scores)
    )
    return Table(
        labels=labels,
        unit_ids=tuple(unit_id for unit_id, _, _ in usable),
        unit_bytes=tuple(byte_count for _, byte_count, _ in usable),
        bits=tuple(tuple(column.bits[index] for _, _, index in usable) for column in measurement.scores),
        dropped=len(measurement.units) - len(usable),
    )


def compare(
    table: Table, pairs: Sequence[tuple[str, str]], *, confidence: float, resamples: int, comparisons: int
) -> tuple[Difference, ...]:
    """For each pair (subject, compared with) the difference in BPB over the same units.

    The table must not be empty. `confidence` is two-sided. `comparisons` is the number of comparisons, here and
    elsewhere, that are decided together: `ceiling` leaves each of them an equal share of the upper tail (Bonferroni).
    All pairs share the same resamples of units; the seed comes from the units' ids and bytes.
    """
    drawn = _resample(table, pairs, resamples)
    tail = (1 - confidence) / 2
    least = _LEAST_ERROR * drawn.error[:, np.newaxis]
    errors = np.maximum(drawn.errors, least)
    studentized = np.divide(drawn.deviations, errors, out=np.zeros_like(errors), where=errors > 0)
    low, high, far = np.quantile(studentized, (1 - tail, tail, tail / comparisons), axis=1)
    return tuple(
        Difference(
            one,
            mean=float(drawn.means[row]),
            lower=float(drawn.means[row] - low[row] * drawn.error[row]),
            upper=float(drawn.means[row] - high[row] * drawn.error[row]),
            ceiling=float(drawn.means[row] - far[row] * drawn.error[row]),
        )
        for row, (one, _) in enumerate(pairs)
    )


def repeat_noise(table: Table, *, confidence: float, resamples: int) -> tuple[float, float]:
    """Base again minus base in BPB, and the largest |difference| within its percentile interval.

    Percentiles, since this describes what the engine did and infers nothing: most units often repeat to the last bit,
    and a standard error of few others says little. The table must not be empty.
    """
    if table.bits_of(BASE_AGAIN) == table.bits_of(BASE):
        return 0.0, 0.0
    drawn = _resample(table, [(BASE_AGAIN, BASE)], resamples)
    tail = (1 - confidence) / 2
    mean = float(drawn.means[0])
    low, high = (mean + float(bound) for bound in np.quantile(drawn.deviations[0], (tail, 1 - tail)))
    return mean, max(abs(mean), abs(low), abs(high))


@dataclass(frozen=True, slots=True)
class _Resampled:
    """means, error: (pairs,), a difference and its standard error. deviations, errors: (pairs, resamples), how far the
    difference of a resample is from the measured one, and its own standard error.
    """

    means: Floats
    error: Floats
    deviations: Floats
    errors: Floats


def _resample(table: Table, pairs: Sequence[tuple[str, str]], resamples: int) -> _Resampled:
    sizes = np.asarray(table.unit_bytes, dtype=np.float64)
    units, total = len(sizes), float(table.byte_count)
    gaps = [np.subtract(table.bits_of(one), table.bits_of(other)) for one, other in pairs]
    means = np.array([math.fsum(gap) / total for gap in gaps])
    # What a unit differs by beyond the mean difference: squares of these lose no digits to the mean's own.
    residuals = [gap - mean * sizes for gap, mean in zip(gaps, means, strict=True)]
    freedom = units / (units - 1) if units > 1 else 0.0
    error = np.array([math.sqrt(freedom * math.fsum(residual**2)) / total for residual in residuals])
    deviations, errors = np.empty((len(pairs), resamples)), np.empty((len(pairs), resamples))
    generator = np.random.default_rng(_seed(table))
    step = max(1, _AT_ONCE // units)
    for begin in range(0, resamples, step):
        times = _draw(generator, min(step, resamples - begin), units)
        place = slice(begin, begin + len(times))
        bytes_drawn, squares = _total(times, sizes), _total(times, sizes**2)
        for row, residual in enumerate(residuals):
            deviation = _total(times, residual) / bytes_drawn
            crossed, own = _total(times, residual * sizes), _total(times, residual**2)
            spread = own - 2 * deviation * crossed + deviation**2 * squares
            deviations[row, place] = deviation
            errors[row, place] = np.sqrt(freedom * np.maximum(spread, 0.0)) / bytes_drawn
    return _Resampled(means, error, deviations, errors)


def _draw(generator: np.random.Generator, count: int, units: int) -> Floats:
    """How often each unit is drawn in each resample: (count, units)."""
    drawn = generator.integers(0, units, (count, units), dtype=np.int32)
    drawn += units * np.arange(count, dtype=np.int32)[:, np.newaxis]
    return np.bincount(drawn.ravel(), minlength=count * units).reshape(count, units).astype(np.float64)


def _total(times: Floats, values: Floats) -> Floats:
    """The sum of the drawn units' values in each resample: (count,).

    Not as a matrix product: that would round one pair differently according to the pairs beside it.
    """
    total: Floats = np.einsum("ij,j->i", times, values)
    return total


def _seed(table: Table) -> int:
    lines = "".join(f"{name}\t{size}\n" for name, size in zip(table.unit_ids, table.unit_bytes, strict=True))
    return int.from_bytes(hashlib.sha256(lines.encode()).digest()[:8])
