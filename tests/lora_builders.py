"""Tiny adapters for the layout tests, encoded by plain loops that share no code with the product.

All sizes differ and none is 1; values are unique within a tensor, so that no permutation goes unseen.
"""

from __future__ import annotations

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
from safetensors.torch import save_file

from tasks.lora.base import BaseConfig, read_base_config

LABEL = "author-17/run-3"
EXPERTS, RANK, HIDDEN, INTER, LAYERS = 4, 3, 10, 7, 2
HEADS, KV_HEADS, HEAD_DIM, VOCAB, DENSE_INTER = 3, 1, 5, 50, 22
ALPHA = 6

PREFIX = "base_model.model.model.layers"


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
    experts, rank = logical.experts, logical.rank
    for (layer, parameter), a in logical.a.items():
        b = logical.b[layer, parameter]
        inside, out = a.shape[2], b.shape[1]
        swapped = orientation == "swapped"
        stored_a = torch.zeros(experts * rank, out if swapped else inside, dtype=logical.dtype)
        stored_b = torch.zeros(inside if swapped else out, experts * rank, dtype=logical.dtype)
        style = packing if isinstance(packing, str) else packing[parameter]
        for e in range(experts):
            for j in range(rank):
                column = j * experts + e if style == "rank_major" else e * rank + j
                stored_a[e * rank + j, :] = b[e, :, j] if swapped else a[e, j, :]
                stored_b[:, column] = a[e, j, :] if swapped else b[e, :, j]
        wrapper = "experts.base_layer" if parameter == "gate_up_proj" else "experts"
        tensors[f"{PREFIX}.{layer}.mlp.{wrapper}.lora_A.weight"] = stored_a
        tensors[f"{PREFIX}.{layer}.mlp.{wrapper}.lora_B.weight"] = stored_b
    return tensors


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


def save_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Save as trainers do: safetensors' own writer and a config beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config_fields(**config)), "utf-8")
    return folder


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
