"""Which of two readings of one adapter the scores favour: beyond doubt, or neither.

The measurement holds one reading as `own` and the other as `control`. A reading wins where the whole interval of the
difference lies on its side, by more than the floor and by more than noise_factor x the repeat noise: the very rule by
which a difference holds in a verdict (verdict.py, rule 4), asked of both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.bpb.bootstrap import Difference
from tasks.bpb.measure import BASE, CONTROL, OWN
from tasks.bpb.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Readings:
    """Both readings' scores in bits per byte. `winner` is OWN or CONTROL, None where neither wins.

    `difference` is control minus own, so that above 0 own is better; `bar` is what the interval has to clear.
    """

    winner: str | None
    own: float
    control: float
    base: float
    difference: Difference
    bar: float
    units: int


def compare_readings(verdict: Verdict) -> Readings:
    """What a measurement of base, own and control says about the two readings.

    `verdict` is the verdict on that measurement: it has the differences and the thresholds. It must not be one of
    too little text or of a drifted engine, which compare nothing. Every comparison is false for NaN.
    """
    bpb = {one.label: one.bpb for one in verdict.bpb}
    difference = next(one for one in verdict.differences if one.label == CONTROL)
    floor, noise = verdict.thresholds.floor, verdict.thresholds.noise_factor * (verdict.noise or 0.0)

    def is_beyond(bound: float) -> bool:
        return bound > floor and bound > noise

    winner = OWN if is_beyond(difference.lower) else CONTROL if is_beyond(-difference.upper) else None
    return Readings(
        winner=winner,
        own=bpb[OWN],
        control=bpb[CONTROL],
        base=bpb[BASE],
        difference=difference,
        bar=max(floor, noise),
        units=verdict.units,
    )
