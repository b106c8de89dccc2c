"""The one step of a conversion that changes numbers: a block turned into the dtype that is served, and scaled in it."""

from __future__ import annotations

import torch

from tasks.lora.blocks import PlannedBlock
from tasks.lora.errors import NonFinite
from tasks.lora.tensors import TORCH_DTYPES

# Numbers that are worked on at a time: what the processor's cache holds is several times faster than memory.
_CHUNK = 1 << 17


def round_block(block: PlannedBlock, source: bytearray, out: bytearray, adapter: str) -> None:
    """Fill the first `block.group.data_bytes` of `out` with the block as it is served.

    source: its numbers in the dtype of the block's sources, in the order of the block. Raises NonFinite where one of
    them is finite, and not so any more.
    """
    stored, served = TORCH_DTYPES[block.stored_dtype], TORCH_DTYPES[block.group.dtype]
    count = block.group.data_bytes // served.itemsize
    exact = torch.frombuffer(source, dtype=stored, count=count)
    rounded = torch.frombuffer(out, dtype=served, count=count)
    for first in range(0, count, _CHUNK):
        old, new = exact[first : first + _CHUNK], rounded[first : first + _CHUNK]
        new.copy_(old)
        if block.scaling != 1:
            new.mul_(block.scaling)
        # NaN is the largest of all; what is not finite is rare enough to be looked at again.
        if not bool(new.abs().amax().isfinite()):
            _require_finite(block, old, new, adapter)


def _require_finite(block: PlannedBlock, old: torch.Tensor, new: torch.Tensor, adapter: str) -> None:
    lost = old[old.isfinite() & ~new.isfinite()]
    if len(lost):
        limits = f"{str(new.dtype).removeprefix('torch.')}, up to {torch.finfo(new.dtype).max:.6g}"
        raise NonFinite(
            adapter,
            block.pieces[0].sources[0].name,
            f"factors that are finite as they are served, in {limits}",
            f"{block.scaling * float(lost.double().abs().amax()):.4g}, with its scaling",
            "Train again, or serve the base in a dtype of a wider range.",
        )
