"""Paired differences in bits per byte, with seeded bootstrap intervals over units."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.bpb.errors import SubjectsInvalid
from tasks.bpb.measure import BASE, BASE_AGAIN, OWN, Measurement


@dataclass(frozen=True, slots=True)
class Difference:
    """BPB of subject `label` minus BPB of what it is compared with, and the interval of that difference."""

    label: str
    mean: float
    lower: float
    upper: float


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
    table: Table, pairs: Sequence[tuple[str, str]], *, confidence: float, resamples: int
) -> tuple[Difference, ...]:
    """For each pair (subject, compared with) the difference in BPB over the same units.

    The table must not be empty. All pairs share the same resamples of units; the seed comes from the units'
    ids and bytes.
    """
    byte_counts = np.asarray(table.unit_bytes, dtype=np.float64)
    gaps = np.stack([np.subtract(table.bits_of(one), table.bits_of(other)) for one, other in pairs])
    drawn = _resampled_ratios(gaps, byte_counts, resamples=resamples, seed=_seed(table))
    tail = (1 - confidence) / 2
    bounds = np.quantile(drawn, (tail, 1 - tail), axis=1)
    return tuple(
        Difference(one, math.fsum(gaps[row]) / table.byte_count, float(bounds[0, row]), float(bounds[1, row]))
        for row, (one, _) in enumerate(pairs)
    )


def _resampled_ratios(
    gaps: npt.NDArray[np.float64], byte_counts: npt.NDArray[np.float64], *, resamples: int, seed: int
) -> npt.NDArray[np.float64]:
    """Sum of gaps / sum of bytes in each resample: gaps (pairs, units), result (pairs, resamples)."""
    generator = np.random.default_rng(seed)
    units = len(byte_counts)
    ratios = np.empty((len(gaps), resamples))
    for draw in range(resamples):
        # One draw at a time: all at once would hold resamples x units numbers.
        times = np.bincount(generator.integers(0, units, units), minlength=units)
        # A matrix product would round a row differently according to the rows beside it.
        ratios[:, draw] = (gaps * times).sum(axis=1) / (byte_counts * times).sum()
    return ratios


def _seed(table: Table) -> int:
    lines = "".join(f"{name}\t{size}\n" for name, size in zip(table.unit_ids, table.unit_bytes, strict=True))
    return int.from_bytes(hashlib.sha256(lines.encode()).digest()[:8])
