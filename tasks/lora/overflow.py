"""Whether finite factors stay finite in the type that the engine computes in.

The engine turns both factors into that type, multiplies lora_B by the scaling there, and adds what they make.
Source: vLLM 0.32 lora/lora_model.py (`.to(dtype)`), lora/lora_weights.py (`optimize`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


def find_range(named: str | None) -> ServingRange:
    """Return what the engine can hold of a base whose config.json names this dtype; None is taken for bfloat16."""
    return ServingRange(_DTYPES.get(named or "", torch.bfloat16), named in _DTYPES)


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
