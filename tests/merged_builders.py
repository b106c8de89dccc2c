"""Tiny base weights, and the checkpoints that merging adapters into them gives, by plain loops."""

from __future__ import annotations

from pathlib import Path

import torch
from lora_builders import ALPHA, EXPERTS, HIDDEN, INTER, LAYERS, RANK, VOCAB, Logical, attention
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
SCALING = ALPHA / RANK
EMBEDDING = "model.embed_tokens.weight"


def single(layer: int, expert: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"


def fused(layer: int, parameter: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{parameter}"


def base_weights(
    dtype: torch.dtype = torch.float32, *, hidden: int = HIDDEN, inter: int = INTER, size: float = 0.5
) -> Tensors:
    """The base's weights as transformers 4 names them, of the modules that the tests' adapters train."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return (size * torch.randn(shape, generator=generator)).to(dtype)

    weights = {EMBEDDING: draw(VOCAB, hidden)}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            weights[single(layer, expert, "gate_proj")] = draw(inter, hidden)
            weights[single(layer, expert, "up_proj")] = draw(inter, hidden)
            weights[single(layer, expert, "down_proj")] = draw(hidden, inter)
    for name, factor in attention().items():
        if "lora_B" in name:
            weights[module_of(name)] = draw(len(factor), hidden if "o_proj" not in name else 15)
    return weights


def module_of(name: str) -> str:
    """The weight that an ordinary factor changes."""
    return name.removeprefix("base_model.model.").replace(".lora_A.", ".").replace(".lora_B.", ".")


def merge(base: Tensors, logical: Logical | None, others: Tensors | None = None, **change: float) -> Tensors:
    """Base + scaling·B·A, number by number in float64, rounded once to the base's dtype; `base` stays as it is."""
    merged, scaling = {name: weight.clone() for name, weight in base.items()}, change.get("scaling", SCALING)
    for (layer, parameter), a in (logical.a if logical else {}).items():
        assert logical is not None
        for expert in range(len(a)):
            delta = torch.zeros(logical.b[layer, parameter].shape[1], a.shape[2], dtype=torch.float64)
            for j in range(a.shape[1]):
                column = logical.b[layer, parameter][expert, :, j].double()
                delta += scaling * column[:, None] * a[expert, j].double()[None, :]
            names = ["down_proj"] if parameter == "down_proj" else ["gate_proj", "up_proj"]
            for name, part in zip(names, delta.chunk(len(names)), strict=True):
                weight = merged[single(layer, expert, name)]
                merged[single(layer, expert, name)] = (weight.double() + part).to(weight.dtype)
    for name, a in (others or {}).items():
        if "lora_A" in name:
            weight, b = merged[module_of(name)], (others or {})[name.replace("lora_A", "lora_B")]
            merged[module_of(name)] = (weight.double() + scaling * b.double() @ a.double()).to(weight.dtype)
    return merged


def fuse(weights: Tensors, *, transposed: bool = False) -> Tensors:
    """The same with all experts of a parameter in one tensor, as transformers 5 holds them in memory."""
    rest = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for layer in range(LAYERS):
        down, gate_up = [], []
        for expert in range(EXPERTS):
            gate, up = (weights[single(layer, expert, name)] for name in ("gate_proj", "up_proj"))
            gate_up.append(torch.cat([gate, up]))
            down.append(weights[single(layer, expert, "down_proj")])
        for parameter, stack in (("gate_up_proj", gate_up), ("down_proj", down)):
            whole = torch.stack(stack)
            rest[fused(layer, parameter)] = (whole.transpose(1, 2) if transposed else whole).contiguous()
    return rest


def save(folder: Path, weights: Tensors) -> Path:
    folder.mkdir(parents=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder
