"""How a score ends, why, and the thresholds by which that is decided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from tasks.bpb.agreement import TOLERANCE
from tasks.bpb.errors import ThresholdsInvalid


class Outcome(StrEnum):
    """How a score ends; the first that any held-out set ends with is that of the whole."""

    STOPPED = "stopped"
    QUARANTINED = "quarantined"
    INCONCLUSIVE = "inconclusive"
    READY = "ready"


class Code(StrEnum):
    """Why a score does not end ready, in the order of precedence among those of one outcome."""

    ENGINE_DRIFT = "engine_drift"
    REFERENCE_INVALID = "reference_invalid"
    NO_EFFECT = "no_effect"
    CONTROL_NOT_WORSE = "control_not_worse"
    NOT_BETTER_THAN_BASE = "not_better_than_base"
    NOT_BETTER_THAN_WRONG = "not_better_than_wrong"
    REFERENCE_MISMATCH = "reference_mismatch"
    TOO_LITTLE_TEXT = "too_little_text"
    MARGIN_UNCLEAR = "margin_unclear"
    NO_OPPONENT_AND_NO_CONTROL = "no_opponent_and_no_control"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a verdict asks for. `floor`, `drift_limit` and `reference_tolerance` are bits per byte; `confidence` is
    two-sided; `min_units`, `min_bytes` and `max_voided_fraction` are of each held-out set.

    Raises:
        ThresholdsInvalid: a value is out of its range, or not a number.
    """

    floor: float = 0.002
    min_units: int = 20
    min_bytes: int = 8000
    noise_factor: float = 2.0
    drift_limit: float = 0.005
    max_voided_fraction: float = 0.05
    confidence: float = 0.95
    resamples: int = 10_000
    reference_tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        """Refuse what would let every adapter pass, or none."""
        ranges = (
            ("floor", self.floor, 0.0, math.inf),
            ("min_units", self.min_units, 2, math.inf),
            ("min_bytes", self.min_bytes, 1, math.inf),
            ("noise_factor", self.noise_factor, 1.0, math.inf),
            ("drift_limit", self.drift_limit, 0.0, math.inf),
            ("max_voided_fraction", self.max_voided_fraction, 0.0, 1.0),
            ("confidence", self.confidence, 0.5, 0.9999),
            ("resamples", self.resamples, 200, math.inf),
            ("reference_tolerance", self.reference_tolerance, 0.0, math.inf),
        )
        for name, value, low, high in ranges:
            if not (low <= value <= high and math.isfinite(value)):
                raise ThresholdsInvalid(name, value, f"a finite number from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True)
class Ruling:
    """An outcome, its codes in their order (none for ready), and the sentence that says why."""

    outcome: Outcome
    codes: tuple[Code, ...]
    reason: str

    @property
    def code(self) -> Code | None:
        """The code that comes first, None for ready."""
        return self.codes[0] if self.codes else None
