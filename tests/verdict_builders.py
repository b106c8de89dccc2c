"""Measurements with given scores, for the tests of verdicts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from tasks.bpb.measure import Measurement, SubjectBits, UnitBytes

GOOD = {
    "base": 2.356,
    "own": 2.205,
    "control": 2.359,
    "wrong:bob": 2.41,
    "wrong:eve": 2.38,
    "base_again": 2.356,
}


def build(
    bpb: Mapping[str, float],
    *,
    units: int = 40,
    mean_bytes: int = 400,
    spread: float = 0.02,
    exact: tuple[str, ...] = ("base", "base_again"),
) -> Measurement:
    """Units of different length; each subject but the `exact` ones varies around its BPB by `spread`."""
    sizes = [mean_bytes - 100 + (37 * number) % 200 for number in range(units)]
    columns = []
    for label, mean in bpb.items():
        draw = random.Random(label)
        bits = tuple(
            size * (mean + 0.3 * math.sin(number) + (0 if label in exact else spread * draw.uniform(-1, 1)))
            for number, size in enumerate(sizes)
        )
        columns.append(SubjectBits(label, bits))
    return Measurement(
        units=tuple(UnitBytes(f"u{number}", size) for number, size in enumerate(sizes)),
        voided=(),
        scores=tuple(columns),
        tokens=1000,
        seconds=1.0,
    )


def without(*labels: str) -> dict[str, float]:
    return {label: bpb for label, bpb in GOOD.items() if label not in labels}


def change_bits(measurement: Measurement, label: str, change: Callable[[int, float], float]) -> Measurement:
    columns = tuple(
        SubjectBits(label, tuple(change(number, bits) for number, bits in enumerate(column.bits)))
        if column.label == label
        else column
        for column in measurement.scores
    )
    return replace(measurement, scores=columns)


def copy_bits(measurement: Measurement, source: str, target: str) -> Measurement:
    bits = next(column.bits for column in measurement.scores if column.label == source)
    return change_bits(measurement, target, lambda number, _: bits[number])
