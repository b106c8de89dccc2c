"""Adapters whose numbers tell their packing, as training leaves them, and adapters whose numbers tell nothing.

A trainer starts B at zero, so that what it learns of an expert is the image of that expert's own gradient: with
gradient G (out, in) a first step leaves B = -lr G A^T. Here G is two directions of the expert's own, and noise.
"""

from __future__ import annotations

from typing import Any

import torch
from lora_builders import Logical

EXPERTS, RANK, HIDDEN, INTER, LAYERS = 8, 5, 26, 18, 3
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTER,
    "num_local_experts": EXPERTS,
    "num_hidden_layers": LAYERS,
}
"""The changes to a tiny base's config.json that make it fit these adapters."""


def blank(seed: int) -> Logical:
    """Factors of distinct numbers without any structure."""
    return Logical(
        rank=RANK, experts=EXPERTS, hidden=HIDDEN, inter=INTER, layers=tuple(range(LAYERS)), seed=seed
    )


def trained(seed: int, *parameters: str) -> Logical:
    """The same with B as one training step leaves it, in these stacked parameters."""
    logical = blank(seed)
    generator = torch.Generator().manual_seed(seed)
    for (layer, parameter), a in logical.a.items():
        if parameter not in parameters:
            continue
        experts, _, inside = a.shape
        out = logical.b[layer, parameter].shape[1]
        for expert in range(experts):
            left = torch.randn(out, 2, generator=generator)
            gradient = left @ torch.randn(2, inside, generator=generator)
            gradient += 0.1 * torch.randn(out, inside, generator=generator)
            logical.b[layer, parameter][expert] = gradient @ a[expert].T
    return logical
