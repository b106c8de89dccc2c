"""The pairs of one checkpoint as different files would hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.training import Checkpoint, Run, StoredPair, join_columns, split_columns
from tasks.lora.layouts import Packing

REFACTORED = "from an SVD, bfloat16"


@dataclass(frozen=True, slots=True)
class Form:
    """One way of writing the deltas. packing: the true one."""

    name: str
    packing: Packing
    pairs: tuple[StoredPair, ...]


def list_forms(run: Run, checkpoint: Checkpoint) -> Iterator[Form]:
    """The checkpoint as trained, rounded, in the other packing, and refactored."""
    experts, packing, pairs = run.sizes.experts, run.packing, checkpoint.pairs
    yield Form("float32", packing, pairs)
    yield Form("bfloat16", packing, tuple(_round(pair) for pair in pairs))
    yield Form("repacked", packing.other, tuple(repack(pair, experts, packing) for pair in pairs))
    # Trainers that refactor leave the singular values in one factor, or their roots in both.
    balanced = checkpoint.step % 2 == 0
    refactored = (_refactor(pair, experts, packing, balanced=balanced) for pair in pairs)
    yield Form(REFACTORED, packing, tuple(_round(pair) for pair in refactored))


def repack(pair: StoredPair, experts: int, packing: Packing) -> StoredPair:
    """The same deltas in the other packing."""
    b = join_columns(split_columns(pair.b, experts, packing), packing.other)
    return StoredPair(pair.layer, pair.parameter, pair.a, b.contiguous())


def _round(pair: StoredPair) -> StoredPair:
    return StoredPair(pair.layer, pair.parameter, pair.a.bfloat16(), pair.b.bfloat16())


def _refactor(pair: StoredPair, experts: int, packing: Packing, *, balanced: bool) -> StoredPair:
    a, b = pair.a.reshape(experts, -1, pair.a.shape[1]), split_columns(pair.b, experts, packing)
    left, values, right = torch.linalg.svd((b @ a).double(), full_matrices=False)
    rank = a.shape[1]
    left, values, right = left[:, :, :rank], values[:, :rank], right[:, :rank]
    in_a = values.sqrt() if balanced else torch.ones_like(values)
    new_a = (right * in_a[:, :, None]).reshape(pair.a.shape[0], -1)
    new_b = join_columns(left * (values / in_a.clamp_min(1e-30))[:, None, :], packing)
    return StoredPair(pair.layer, pair.parameter, new_a.float(), new_b.float().contiguous())
