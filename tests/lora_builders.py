"""Tiny adapters for the layout tests, encoded by plain loops that share no code with the product.

All sizes differ and none is 1; values are unique within a tensor, so that no permutation goes unseen.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.target import TargetFormat

LABEL = "author-17/run-3"
# The formats that hold the source's own numbers; slots hold them as the engine does.
BIT_FOR_BIT = (TargetFormat.PER_EXPERT, TargetFormat.STACKED)
EXPERTS, RANK, HIDDEN, INTER, LAYERS = 4, 3, 10, 7, 2
HEADS, KV_HEADS, HEAD_DIM, VOCAB, DENSE_INTER = 3, 1, 5, 50, 22
ALPHA = 6

PREFIX = "base_model.model.model.layers"
# (packing, orientation) of the four encodings.
ENCODINGS = list(itertools.product(("rank_major", "grouped_by_expert"), ("standard", "swapped")))
# What PEFT writes beside a gate_up_proj of twice the rank.
DOUBLED: dict[str, Any] = {
    "rank_pattern": {"gate_up_proj": 2 * RANK},
    "alpha_pattern": {"gate_up_proj": 2 * ALPHA},
}


def short_id(value: object) -> str:
    """A readable test id: a class's or function's name, or the first characters of anything else."""
    return getattr(value, "__name__", None) or re.sub(r"\W+", " ", str(value))[:30].strip()


def base_fields(**changes: Any) -> dict[str, Any]:
    """The fields of a tiny Qwen3-MoE's config.json, as transformers 5.24 writes them; None removes one."""
    fields = {
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTER,
        "intermediate_size": DENSE_INTER,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    } | changes
    return {name: value for name, value in fields.items() if value is not None}


def make_base(**changes: Any) -> BaseConfig:
    return read_base_config(json.dumps(base_fields(**changes)).encode(), label="tiny-base")


FAMILY = make_base().family


@dataclass
class Logical:
    """What an adapter means, whatever its encoding: (experts, rank, in) and (experts, out, rank) by layer."""

    rank: int = RANK
    experts: int = EXPERTS
    hidden: int = HIDDEN
    inter: int = INTER
    layers: tuple[int, ...] = tuple(range(LAYERS))
    dtype: torch.dtype = torch.float32
    seed: int = 0
    a: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    b: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        for layer in self.layers:
            for parameter, inside, out in (
                ("gate_up_proj", self.hidden, 2 * self.inter),
                ("down_proj", self.inter, self.hidden),
            ):
                self.a[layer, parameter] = self._unique((self.experts, self.rank, inside), generator)
                self.b[layer, parameter] = self._unique((self.experts, out, self.rank), generator)

    def _unique(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Distinct numbers, none zero: every 128th of an octave from 1/64 up, shuffled, half of them negative."""
        count = int(torch.tensor(shape).prod())
        numbers = (2.0 ** (torch.arange(count) // 128 - 6)) * (1 + torch.arange(count) % 128 / 128)
        signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
        return (numbers * signs)[torch.randperm(count, generator=generator)].to(self.dtype).reshape(shape)


def encode(
    logical: Logical,
    *,
    packing: str | dict[str, str] = "rank_major",
    orientation: str = "standard",
) -> dict[str, torch.Tensor]:
    """The stacked tensors of one of the four encodings, filled number by number."""
    tensors: dict[str, torch.Tensor] = {}
    for (layer, parameter), a in logical.a.items():
        b = logical.b[layer, parameter]
        experts, rank, inside = a.shape
        out = b.shape[1]
        swapped = orientation == "swapped"
        stored_a = torch.zeros(experts * rank, out if swapped else inside, dtype=logical.dtype)
        stored_b = torch.zeros(inside if swapped else out, experts * rank, dtype=logical.dtype)
        style = packing if isinstance(packing, str) else packing[parameter]
        for e in range(experts):
            for j in range(rank):
                column = j * experts + e if style == "rank_major" else e * rank + j
                stored_a[e * rank + j, :] = b[e, :, j] if swapped else a[e, j, :]
                stored_b[:, column] = a[e, j, :] if swapped else b[e, :, j]
        tensors[stacked_name(layer, parameter, "A")] = stored_a
        tensors[stacked_name(layer, parameter, "B")] = stored_b
    return tensors


def encode_alone(logical: Logical, parameter: str, **style: Any) -> dict[str, torch.Tensor]:
    """Only one parameter's stacked pair, which PEFT then calls `experts.lora_*`, whichever it is."""
    return {
        name.replace("experts.base_layer.", "experts."): tensor
        for name, tensor in encode(logical, **style).items()
        if ("base_layer" in name) == (parameter == "gate_up_proj")
    }


def mark(**packings: str) -> dict[str, Any]:
    """What unsloth_zoo >= 2026.9.6 writes into the config: each parameter's own packing."""
    return {
        "unsloth_fused_expert_lora": {
            "parameters": {name: {"lora_B_layout": packing} for name, packing in packings.items()}
        }
    }


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
NUMBERED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass
class Separate:
    """What an adapter means whose projections have an A each: by (layer, projection), (experts, rank, in) and so on.

    Every number of the adapter is another whole number, from 1 up. shared: (projection, factor) pairs of which all
    experts have the same one, stored with a first axis of 1.
    """

    ranks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PROJECTIONS, RANK))
    experts: int = EXPERTS
    hidden: int = HIDDEN
    inter: int = INTER
    layers: tuple[int, ...] = tuple(range(LAYERS))
    dtype: torch.dtype = torch.float32
    shared: tuple[tuple[str, str], ...] = ()
    a: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    b: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start = 1
        for layer in self.layers:
            for name, rank in self.ranks.items():
                inside, out = (self.inter, self.hidden) if name == "down_proj" else (self.hidden, self.inter)
                for factor, shape in (("A", (rank, inside)), ("B", (out, rank))):
                    experts = 1 if (name, factor) in self.shared else self.experts
                    count = experts * shape[0] * shape[1]
                    numbers = torch.arange(start, start + count).reshape(experts, *shape).to(self.dtype)
                    start += count
                    (self.a if factor == "A" else self.b)[layer, name] = numbers

    def of(self, layer: int, name: str, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A (rank, in) and B (out, rank) of one expert."""
        a, b = self.a[layer, name], self.b[layer, name]
        return a[expert if len(a) > 1 else 0], b[expert if len(b) > 1 else 0]


def expert_name(layer: int, expert: int, projection: str, factor: str) -> str:
    return f"{PREFIX}.{layer}.mlp.experts.{expert}.{projection}.lora_{factor}.weight"


def stacked_name(layer: int, parameter: str, factor: str) -> str:
    wrapper = "experts.base_layer" if parameter == "gate_up_proj" else "experts"
    return f"{PREFIX}.{layer}.mlp.{wrapper}.lora_{factor}.weight"


def encode_experts(meant: Separate) -> dict[str, torch.Tensor]:
    """One 2-D tensor for each expert, as ms-swift's Megatron backend and prime-rl write them."""
    tensors = {}
    for layer, name in meant.a:
        for e in range(meant.experts):
            a, b = meant.of(layer, name, e)
            tensors[expert_name(layer, e, name, "A")] = a.clone()
            tensors[expert_name(layer, e, name, "B")] = b.clone()
    return tensors


def encode_cubes(meant: Separate, *, numbered: bool = True) -> dict[str, torch.Tensor]:
    """One 3-D tensor for all experts, named w1, w2, w3 as Tinker does, or by projection."""
    tensors = {}
    for (layer, name), a in meant.a.items():
        stem = f"{PREFIX}.{layer}.mlp.experts.{NUMBERED[name] if numbered else name}"
        tensors[f"{stem}.lora_A.weight"] = a.clone()
        tensors[f"{stem}.lora_B.weight"] = meant.b[layer, name].clone()
    return tensors


def spell_out(logical: Logical) -> dict[str, torch.Tensor]:
    """What the per-expert output of a stacked adapter must hold, expert by expert."""
    tensors = {}
    for layer in logical.layers:
        for e in range(logical.experts):
            gate_up, down = (layer, "gate_up_proj"), (layer, "down_proj")
            tensors[expert_name(layer, e, "gate_proj", "A")] = logical.a[gate_up][e]
            tensors[expert_name(layer, e, "up_proj", "A")] = logical.a[gate_up][e]
            tensors[expert_name(layer, e, "gate_proj", "B")] = logical.b[gate_up][e][: logical.inter]
            tensors[expert_name(layer, e, "up_proj", "B")] = logical.b[gate_up][e][logical.inter :]
            tensors[expert_name(layer, e, "down_proj", "A")] = logical.a[down][e]
            tensors[expert_name(layer, e, "down_proj", "B")] = logical.b[down][e]
    return tensors


def stack_blocks(meant: Separate) -> Logical:
    """The same deltas with gate and up in one pair: components 0 to r-1 are gate's, r to 2r-1 are up's.

    So PEFT >= 0.19 loads per-expert files, and so it saves them again.
    """
    gate, up = meant.ranks["gate_proj"], meant.ranks["up_proj"]
    logical = Logical(
        layers=(), experts=meant.experts, hidden=meant.hidden, inter=meant.inter, dtype=meant.dtype
    )
    for layer in meant.layers:
        joined_a = torch.zeros(meant.experts, gate + up, meant.hidden, dtype=meant.dtype)
        joined_b = torch.zeros(meant.experts, 2 * meant.inter, gate + up, dtype=meant.dtype)
        down_a, down_b = [], []
        for e in range(meant.experts):
            for name, first, row in (("gate_proj", 0, 0), ("up_proj", gate, meant.inter)):
                a, b = meant.of(layer, name, e)
                for j in range(len(a)):
                    joined_a[e, first + j] = a[j]
                    joined_b[e, row : row + meant.inter, first + j] = b[:, j]
            a, b = meant.of(layer, "down_proj", e)
            down_a.append(a)
            down_b.append(b)
        logical.a[layer, "gate_up_proj"], logical.b[layer, "gate_up_proj"] = joined_a, joined_b
        logical.a[layer, "down_proj"], logical.b[layer, "down_proj"] = (
            torch.stack(down_a),
            torch.stack(down_b),
        )
    return logical


def attention(
    *, rank: int = RANK, layers: tuple[int, ...] = tuple(range(LAYERS)), dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Factors for the four attention projections and the router of every layer."""
    generator = torch.Generator().manual_seed(99)
    query, key_value = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    sizes = {
        "self_attn.q_proj": (HIDDEN, query),
        "self_attn.k_proj": (HIDDEN, key_value),
        "self_attn.v_proj": (HIDDEN, key_value),
        "self_attn.o_proj": (query, HIDDEN),
        "mlp.gate": (HIDDEN, EXPERTS),
    }
    tensors = {}
    for layer in layers:
        for module, (inside, out) in sizes.items():
            name = f"{PREFIX}.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inside, generator=generator).to(dtype)
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator).to(dtype)
    return tensors


def config_fields(**changes: Any) -> dict[str, Any]:
    """The adapter_config.json that PEFT 0.21 writes, shortened; None stays null."""
    return {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    } | changes


def save_adapter(folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1, **config: Any) -> Path:
    """Save as trainers do: safetensors' own writer and a config beside it, in several files with an index if asked."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    else:
        places: dict[str, str] = {}
        for number in range(shards):
            name = f"adapter_model-{number + 1:05}-of-{shards:05}.safetensors"
            part = {key: tensors[key] for key in list(tensors)[number::shards]}
            save_file(part, folder / name, metadata={"format": "pt"})
            places |= dict.fromkeys(part, name)
        index = {"metadata": {"total_size": 0}, "weight_map": places}
        (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (folder / "adapter_config.json").write_text(json.dumps(config_fields(**config)), "utf-8")
    return folder


def look(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    base: BaseConfig | None = None,
    *,
    packing: str | None = "rank_major",
    **config: Any,
) -> Inspection:
    """Save an adapter and inspect it, its stacked pairs read as `packing` unless that is None."""
    save_adapter(folder, tensors, **{"target_parameters": None, **config})
    forced = None if packing is None else Packing(packing)
    return inspect_adapter(folder, base or make_base(), label=LABEL, forced=forced)


def find_weights(folder: Path) -> Path:
    """The one weight file of a folder, of whatever format."""
    [path] = folder.glob("*.safetensors")
    return path


def load(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(find_weights(folder))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def unpack_wheel(name: str, version: str, folder: Path) -> Path:
    """Download one version of a package and unpack it into a folder of its own, to be put on a process's path.

    Nothing is installed. Without a package index that has it the test fails: it would have nothing to judge by.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", folder, f"{name}=={version}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(
            f"{name} {version} could not be downloaded, so nothing independent judges what it writes. Give pip an "
            f"index that has it (PIP_INDEX_URL), or deselect this test.\n{done.stderr[-1000:]}"
        )
    [wheel] = folder.glob(f"{name}-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / f"{name}-{version}")
    return folder / f"{name}-{version}"
