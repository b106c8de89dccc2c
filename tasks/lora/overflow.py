"""Whether finite factors stay finite in the type that the engine computes in.

The engine turns both factors into that type, multiplies lora_B by the scaling there, and adds what they make.
Source: vLLM 0.32 lora/lora_model.py (`.to(dtype)`), lora/lora_weights.py (`optimize`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasks.lora.served_rounding import find_rounding
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.bfloat16}
"""By what the base's config says. Source: vLLM 0.32 config/model.py, _resolve_auto_dtype: float32 is served as the
first type that the platform supports, bfloat16."""

MOST_OVERFLOWS = 64
"""After so many of an adapter, no more are looked for."""


@dataclass(frozen=True, slots=True)
class ServingRange:
    """The numbers that the engine can hold. known: whether the base's config says so."""

    dtype: torch.dtype
    known: bool

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return torch.finfo(self.dtype).max

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}, up to {self.largest:.6g}{'' if self.known else ', as the base names no dtype'}"


def find_range(layout: AdapterLayout, format: TargetFormat) -> ServingRange:
    """Return what the engine can hold: by the dtype that the base's config.json names; none is taken for bfloat16.

    Slots are written in the dtype that the base is served in, which an operator can have chosen.
    """
    named = layout.base.dtype
    rounding = find_rounding(layout, format)
    dtype = _DTYPES.get(named or "", torch.bfloat16) if rounding is None else rounding.dtype
    return ServingRange(dtype, named in _DTYPES or layout.base.engine_dtype is not None)


def find_suspects(a: torch.Tensor, b: torch.Tensor, scaling: float, largest: float) -> torch.Tensor:
    """Return of which experts a bound does not show that all is in range.

    a, b: (experts, rank), float64: the largest magnitude in each row of A and in each column of B. No number of the
    delta is larger than the sum of their products times the scaling.
    """
    bound = scaling * (a * b).sum(dim=1)
    factors = torch.maximum(a.amax(dim=1), max(scaling, 1.0) * b.amax(dim=1))
    return ~(torch.maximum(bound, factors) <= largest)


def find_peak(a: torch.Tensor, b: torch.Tensor, scaling: float, largest: float) -> float:
    """Return the largest magnitude in A, B, scaling·B and the delta of one expert; 0 where all is within `largest`.

    a: (rank, in). b: (rank, out), B transposed. Factors that are not finite themselves give 0: they are another
    fault. The product is left out where the lengths of the columns show that it is small enough.
    """
    a, b = a.double(), b.double()
    if not bool(a.isfinite().all() and b.isfinite().all()):
        return 0.0
    peak = max(float(a.abs().amax()), max(scaling, 1.0) * float(b.abs().amax()))
    if scaling * float(a.norm(dim=0).amax()) * float(b.norm(dim=0).amax()) > largest:
        peak = max(peak, scaling * float((b.T @ a).abs().amax()))
    return peak if peak > largest else 0.0
