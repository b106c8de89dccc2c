"""Executing a plan: one block at a time, from the adapter's folder to a new one."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, groupby
from pathlib import Path

import torch

from tasks.lora.blocks import Piece, PlannedBlock
from tasks.lora.config import smallest_max_lora_rank
from tasks.lora.files import CONFIG_NAME, AdapterFiles
from tasks.lora.header import ITEM_BYTES, TensorEntry
from tasks.lora.plan import ConversionPlan
from tasks.lora.rearrange import one_thread, rearrange
from tasks.lora.round_block import round_block
from tasks.lora.target import TargetFormat, format_target_config
from tasks.lora.tensors import TensorReader, open_tensors
from tasks.lora.views import whole
from tasks.lora.write import (
    HELD_BLOCKS,
    Progress,
    WrittenFile,
    digest_safetensors,
    staged_folder,
    write_file,
    write_safetensors,
)

_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class ConvertedFiles:
    """What a conversion wrote. pairs: (A, B) pairs of single experts' projections.

    rank: the largest. max_lora_rank: the smallest engine setting that serves it.
    """

    files: tuple[WrittenFile, ...]
    pairs: int
    rank: int
    max_lora_rank: int
    dtype: str
    format: TargetFormat


def convert_adapter(
    source: AdapterFiles, plan: ConversionPlan, destination: Path, progress: Progress | None = None
) -> ConvertedFiles:
    """Write the planned adapter to `destination`, which appears whole or not at all.

    Memory: a few times the largest source tensor and the largest block. Raises DestinationExists, CorruptFile if the
    source shrank meanwhile, NonFinite where a finite number is none in the dtype that slots are served in, and OSError
    from the disk.
    """
    with (
        staged_folder(destination) as folder,
        open_tensors(source) as reader,
        one_thread(),
        closing(_make_blocks(reader, plan)) as blocks,
    ):
        weights = write_safetensors(
            folder / plan.weights_name, plan.header, blocks, plan.predicted_bytes, progress
        )
        config = write_file(folder / CONFIG_NAME, _format_config(plan))
    return ConvertedFiles(
        files=(config, weights),
        pairs=plan.pairs,
        rank=plan.rank,
        max_lora_rank=smallest_max_lora_rank(plan.rank),
        dtype=plan.dtype,
        format=plan.format,
    )


def digest_adapter(source: AdapterFiles, plan: ConversionPlan) -> tuple[WrittenFile, ...]:
    """Return the files that `convert_adapter` would write, without writing them.

    Raises like `convert_adapter`, but for what is about the destination.
    """
    with open_tensors(source) as reader, one_thread(), closing(_make_blocks(reader, plan)) as blocks:
        weights = digest_safetensors(plan.header, blocks)
    config = _format_config(plan)
    return (
        WrittenFile(CONFIG_NAME, len(config), hashlib.sha256(config).hexdigest()),
        WrittenFile(plan.weights_name, plan.predicted_bytes, weights),
    )


def _format_config(plan: ConversionPlan) -> bytes:
    return format_target_config(plan.modules, format=plan.format, base_model=plan.base_model)


def _make_blocks(reader: TensorReader, plan: ConversionPlan) -> Generator[memoryview]:
    """Yield each block's bytes, in memory that is left alone while HELD_BLOCKS blocks are held."""
    largest = max(max(block.group.data_bytes, block.stored_bytes) for block in plan.blocks)
    pieces = [piece for block in plan.blocks for piece in block.pieces]
    scratch = bytearray(largest)
    staging = bytearray(largest if any(piece.place is not None for piece in pieces) else 0)
    exact = bytearray(largest if any(block.is_rounded for block in plan.blocks) else 0)
    memories = cycle([bytearray(largest) for _ in range(HELD_BLOCKS + 1)])
    held: tuple[TensorEntry, ...] = ()
    with closing(_read_ahead(reader, plan)) as reads:
        for block in plan.blocks:
            if _is_copy(block):
                if block.pieces[0].sources != held:
                    stored, held = next(reads), block.pieces[0].sources
                whole_block = stored
                if block.is_rounded:
                    whole_block = next(memories)
                    round_block(block, stored, whole_block, plan.adapter)
                yield memoryview(whole_block)[: block.group.data_bytes]
                continue
            memory = next(memories)
            data = _cast(exact if block.is_rounded else memory, block.stored_dtype, block.stored_bytes)
            if not block.pieces or block.pieces[0].place is not None:
                data.zero_()
            for piece in block.pieces:
                if piece.sources != held:
                    stored, held = next(reads), piece.sources
                source = _cast(stored, block.stored_dtype, _stored_bytes(piece))
                size = piece.view.size * source.itemsize
                parts = _cast(scratch, block.stored_dtype, size)
                if piece.place is None:
                    rearrange(source, piece.view, data, parts)
                else:
                    rows, place = _cast(staging, block.stored_dtype, size), piece.place
                    rearrange(source, piece.view, rows, parts)
                    data.as_strided(place.shape, place.strides, place.offset).copy_(rows.view(place.shape))
            if block.is_rounded:
                round_block(block, exact, memory, plan.adapter)
            yield memoryview(memory)[: block.group.data_bytes]


def _is_copy(block: PlannedBlock) -> bool:
    """Return whether the block is what one piece's sources hold, in their order."""
    if len(block.pieces) != 1 or block.pieces[0].place is not None:
        return False
    return block.pieces[0].view == whole(*block.pieces[0].view.shape)


def _read_ahead(reader: TensorReader, plan: ConversionPlan) -> Generator[bytearray]:
    """Yield the bytes of each run of pieces with the same sources; meanwhile a second thread reads the next.

    Blocks may point into this memory; it is left alone while HELD_BLOCKS of them are held.
    """
    pieces = [piece for block in plan.blocks for piece in block.pieces]
    runs = [next(run) for _, run in groupby(pieces, key=lambda piece: piece.sources)]
    size = max(map(_stored_bytes, runs))
    # The oldest held block may point into one; those after it and the one in the making can use up more; one is read.
    count = 1 + HELD_BLOCKS * max(len(block.pieces) for block in plan.blocks) + 1
    buffers = [bytearray(size) for _ in range(count)]
    with ThreadPoolExecutor(1) as helper:
        coming = helper.submit(_read_all, reader, runs[0].sources, memoryview(buffers[0]))
        for place, following in enumerate([*runs[1:], None]):
            coming.result()
            if following is not None:
                other = memoryview(buffers[(place + 1) % len(buffers)])
                coming = helper.submit(_read_all, reader, following.sources, other)
            yield buffers[place % len(buffers)]


def _read_all(reader: TensorReader, sources: tuple[TensorEntry, ...], buffer: memoryview) -> None:
    for entry in sources:
        size = entry.end - entry.begin
        reader.read_into(entry, buffer[:size])
        buffer = buffer[size:]


def _stored_bytes(piece: Piece) -> int:
    return len(piece.sources) * (piece.sources[0].end - piece.sources[0].begin)


def _cast(buffer: bytearray, dtype: str, size: int) -> torch.Tensor:
    """Return the first bytes of a buffer as integers as wide as the dtype, so that all bits survive every copy."""
    return torch.frombuffer(buffer, dtype=_INTEGERS[ITEM_BYTES[dtype]], count=size // ITEM_BYTES[dtype])
