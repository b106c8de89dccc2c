"""Executing a plan: one source tensor at a time, from the adapter's folder to a new one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from tasks.lora.config import smallest_max_lora_rank
from tasks.lora.files import CONFIG_NAME, WEIGHTS_NAME, AdapterFiles
from tasks.lora.header import format_header
from tasks.lora.layouts import unstack_factor
from tasks.lora.names import Factor
from tasks.lora.plan import ConversionPlan, ExpertTake, PlannedTensor
from tasks.lora.tensors import TensorReader, open_tensors
from tasks.lora.write import Progress, WrittenFile, staged_folder, write_file, write_safetensors

FORMAT = "per-expert"


@dataclass(frozen=True, slots=True)
class ConvertedFiles:
    """What a conversion wrote. pairs: (A, B) pairs of single experts' projections.

    max_lora_rank: the smallest engine setting that serves it.
    """

    files: tuple[WrittenFile, ...]
    pairs: int
    rank: int
    max_lora_rank: int
    dtype: str
    format: str


def convert_adapter(
    source: AdapterFiles, plan: ConversionPlan, destination: Path, progress: Progress | None = None
) -> ConvertedFiles:
    """Write the planned adapter to `destination`, which appears whole or not at all.

    Memory: one source tensor and one rearranged copy of it. Raises DestinationExists, CorruptFile if the
    source shrank meanwhile, and OSError from the disk.
    """
    with staged_folder(destination) as folder, open_tensors(source) as reader:
        weights = write_safetensors(
            folder / WEIGHTS_NAME,
            [tensor.spec for tensor in plan.tensors],
            _list_blocks(reader, plan),
            progress,
        )
        config = write_file(folder / CONFIG_NAME, format_adapter_config(plan))
    return ConvertedFiles(
        files=(config, weights),
        pairs=plan.pairs,
        rank=plan.rank,
        max_lora_rank=smallest_max_lora_rank(plan.rank),
        dtype=plan.dtype,
        format=FORMAT,
    )


def digest_adapter(source: AdapterFiles, plan: ConversionPlan) -> tuple[WrittenFile, ...]:
    """Return the files that `convert_adapter` would write, without writing them.

    Raises CorruptFile if the source shrank meanwhile.
    """
    specs = [tensor.spec for tensor in plan.tensors]
    weights = hashlib.sha256(format_header(specs))
    with open_tensors(source) as reader:
        for block in _list_blocks(reader, plan):
            weights.update(block)
    config = format_adapter_config(plan)
    return (
        WrittenFile(CONFIG_NAME, len(config), hashlib.sha256(config).hexdigest()),
        WrittenFile(WEIGHTS_NAME, plan.predicted_bytes, weights.hexdigest()),
    )


def format_adapter_config(plan: ConversionPlan) -> bytes:
    """Return the adapter_config.json of the output: what vLLM and PEFT need, nothing else.

    The base's name is kept where it is a hub name; a path of the trainer's machine means nothing elsewhere.
    """
    name = plan.base_model
    fields = {
        "base_model_name_or_path": name if name and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) else None,
        "bias": "none",
        "lora_alpha": plan.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": plan.rank,
        "target_modules": list(plan.target_modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": plan.use_rslora,
    }
    return (json.dumps(fields, indent=2) + "\n").encode("utf-8")


def _list_blocks(reader: TensorReader, plan: ConversionPlan) -> Iterator[memoryview]:
    for source, tensors in groupby(plan.tensors, key=lambda tensor: tensor.source):
        stored = reader.read_tensor(source)
        for _, group in groupby(tensors, key=_block_key):
            yield _as_bytes(_take_block(stored, tuple(group), plan.experts))


def _block_key(tensor: PlannedTensor) -> tuple[str, Factor] | None:
    return None if tensor.take is None else (tensor.take.projection, tensor.take.factor)


def _take_block(stored: torch.Tensor, group: tuple[PlannedTensor, ...], experts: int) -> torch.Tensor:
    """Return the tensors of a group, which differ in the expert alone, one after another in memory."""
    takes = [tensor.take for tensor in group if tensor.take is not None]
    if not takes:
        return stored
    each = unstack_factor(
        _cut_projection(stored, takes[0]),
        takes[0].factor,
        experts=experts,
        packing=takes[0].packing,
        orientation=takes[0].orientation,
    )
    order = [take.expert for take in takes]
    return each if order == list(range(experts)) else each[order]


def _cut_projection(stored: torch.Tensor, take: ExpertTake) -> torch.Tensor:
    if take.factor is Factor.A:
        return stored
    axis = 0 if take.orientation.stored(take.factor) is Factor.B else 1
    return stored.narrow(axis, take.rows[0], take.rows[1] - take.rows[0])


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data.cast("B")
