"""Adapters in every form with what their deltas are, told by plain loops; and damage to converted files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lora_builders import (
    ALPHA,
    DOUBLED,
    INTER,
    LABEL,
    RANK,
    Logical,
    Separate,
    attention,
    encode,
    encode_alone,
    encode_cubes,
    encode_experts,
    find_weights,
    look,
    stack_blocks,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from synthetic_builders import INTERLEAVED, read_base_of

from tasks.lora.convert import convert_adapter
from tasks.lora.files import AdapterFiles, open_adapter
from tasks.lora.inspect import Inspection
from tasks.lora.plan import plan_conversion
from tasks.lora.target import TargetFormat

Tensors = dict[str, torch.Tensor]
Deltas = dict[tuple[int, str, int], torch.Tensor]
SCALING = ALPHA / RANK


@dataclass(frozen=True)
class Case:
    """An adapter as inspected, and its deltas by (layer, projection, expert), float64; those of modules left out."""

    found: Inspection
    deltas: Deltas


def spell_deltas(logical: Logical, *, interleaved: bool = False) -> Deltas:
    deltas: Deltas = {}
    for (layer, parameter), a in logical.a.items():
        for e in range(logical.experts):
            delta = SCALING * logical.b[layer, parameter][e].double() @ a[e].double()
            if parameter == "down_proj":
                deltas[layer, "down_proj", e] = delta
            elif interleaved:
                deltas[layer, "gate_proj", e], deltas[layer, "up_proj", e] = delta[0::2], delta[1::2]
            else:
                deltas[layer, "gate_proj", e], deltas[layer, "up_proj", e] = delta[:INTER], delta[INTER:]
    return deltas


def spell_separate(meant: Separate) -> Deltas:
    deltas: Deltas = {}
    for layer, name in meant.a:
        for e in range(meant.experts):
            a, b = meant.of(layer, name, e)
            deltas[layer, name, e] = SCALING * b.double() @ a.double()
    return deltas


def stacked_case(folder: Path, packing: str, orientation: str, dtype: torch.dtype = torch.float32) -> Case:
    logical = Logical(dtype=dtype)
    tensors = encode(logical, packing=packing, orientation=orientation) | attention(dtype=dtype)
    return Case(look(folder, tensors, packing=packing), spell_deltas(logical))


def mixed_case(folder: Path) -> Case:
    """The two parameters in different packings."""
    packings = {"gate_up_proj": "grouped_by_expert", "down_proj": "rank_major"}
    logical = Logical()
    found = look(
        folder,
        encode(logical, packing=packings),
        packing=None,
        unsloth_fused_expert_lora={
            "parameters": {name: {"lora_B_layout": packing} for name, packing in packings.items()}
        },
    )
    return Case(found, spell_deltas(logical))


def interleaved_case(folder: Path) -> Case:
    """A family whose gate and up take turns row by row."""
    logical = Logical()
    found = look(folder, encode(logical), read_base_of(INTERLEAVED))
    return Case(found, spell_deltas(logical, interleaved=True))


def experts_case(folder: Path) -> Case:
    meant = Separate()
    return Case(look(folder, encode_experts(meant) | attention()), spell_separate(meant))


def cubes_case(folder: Path) -> Case:
    meant = Separate(shared=(("gate_proj", "A"), ("up_proj", "A"), ("down_proj", "B")))
    return Case(look(folder, encode_cubes(meant)), spell_separate(meant))


def blocks_case(folder: Path) -> Case:
    """PEFT's re-save: gate and up in components of their own."""
    meant = Separate()
    return Case(look(folder, encode(stack_blocks(meant)), **DOUBLED), spell_separate(meant))


def down_case(folder: Path) -> Case:
    """Only down is trained; gate and up are served as zeros."""
    logical = Logical()
    found = look(folder, encode_alone(logical, "down_proj"), target_parameters=["mlp.experts.down_proj"])
    return Case(found, {key: delta for key, delta in spell_deltas(logical).items() if key[1] == "down_proj"})


CASES: dict[str, Callable[[Path], Case]] = {
    "rank_major": lambda folder: stacked_case(folder, "rank_major", "standard"),
    "grouped, swapped, bf16": lambda folder: stacked_case(
        folder, "grouped_by_expert", "swapped", torch.bfloat16
    ),
    "swapped": lambda folder: stacked_case(folder, "rank_major", "swapped"),
    "grouped": lambda folder: stacked_case(folder, "grouped_by_expert", "standard"),
    "mixed": mixed_case,
    "interleaved": interleaved_case,
    "per expert": experts_case,
    "3-d": cubes_case,
    "blocks": blocks_case,
    "down alone": down_case,
}


def convert(case: Case, folder: Path, format: TargetFormat) -> AdapterFiles:
    convert_adapter(case.found.files, plan_conversion(case.found.layout, format), folder)
    return open_adapter(folder, label=LABEL)


def change(folder: Path, edit: Callable[[Tensors], Any]) -> AdapterFiles:
    """The converted adapter with other numbers, written by safetensors' own writer: in another order."""
    weights = find_weights(folder)
    tensors = load_file(weights)
    with safe_open(weights, "pt") as file:
        metadata = file.metadata()
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights, metadata=metadata)
    return open_adapter(folder, label=LABEL)


def change_config(folder: Path, **fields: Any) -> AdapterFiles:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), "utf-8")
    return open_adapter(folder, label=LABEL)
