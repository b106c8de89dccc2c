"""What the engine makes of a factor: its cast, its scaling, and how far both can move a delta.

Written for the checks, and apart from the conversion's own step (round_block.py): on whole factors, in torch's words
for what vLLM does. Source: vLLM 0.32 lora/lora_model.py (`tensor.to(dtype=dtype)`), lora/lora_weights.py (`lora_b *=
scaling`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tasks.lora.slots import find_served_dtype
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat
from tasks.lora.tensors import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class ServedRounding:
    """The dtype in which the engine holds both factors."""

    dtype: torch.dtype

    def round(self, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return a factor as the engine holds it. scaling: of B; 1 for A, which is not scaled."""
        held = values.to(self.dtype)
        return held if scaling == 1 else held * scaling

    def bound(self, a: torch.Tensor, b: torch.Tensor, sizes: tuple[int, int], scaling: float) -> torch.Tensor:
        """Return how far rounding can move each expert's delta, (E,) in float64, in the Frobenius norm.

        a: (E, r), the lengths of A's lines. b: (E, r), those of scaling·B's. sizes: of the lines of A and of B. With u
        half of the dtype's eps and q half of the distance of its smallest numbers: a number of A is off by u of itself
        and q at most, one of scaling·B, rounded twice, by 2u + u² of itself and q for each rounding. The delta is a sum
        of outer products b·aᵀ, each of the norm |b|·|a|: (b + db)(a + da)ᵀ is off by |b||da| + |db||a| + |db||da|.
        """
        limits = torch.finfo(self.dtype)
        u = limits.eps / 2
        q = limits.smallest_normal * u
        of_a, of_b = (math.sqrt(size) for size in sizes)
        da = u * a + q * of_a
        db = (2 * u + u * u) * b + (1 + u) * (abs(scaling) + 1) * q * of_b
        return (b * da + db * a + db * da).sum(dim=-1)


def find_rounding(layout: AdapterLayout, format: TargetFormat) -> ServedRounding | None:
    """Return what an output of this format did to the source's numbers; None where they are the source's own."""
    if format is not TargetFormat.SLOTS:
        return None
    return ServedRounding(TORCH_DTYPES[find_served_dtype(layout.base)])
