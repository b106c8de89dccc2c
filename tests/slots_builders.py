"""Adapters of the format `slots`, made from per-expert ones by plain torch: cast, scale, stack. No code of the product.

Imported in both environments, so it needs torch and safetensors alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SLOTS, WEIGHTS, CONFIG = "adapter_slots.safetensors", "adapter_model.safetensors", "adapter_config.json"
METADATA = {"format": "adapter-roster slots", "version": "1"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(lora_[AB]\.weight)")

Tensors = dict[str, torch.Tensor]


def stack_experts(tensors: Tensors, alpha: float, dtype: torch.dtype) -> Tensors:
    """The tensors of a per-expert adapter with one alpha and no patterns, as vLLM holds them once it has loaded them.

    As `from_lora_tensors` and `optimize` do: cast, then B times alpha / r in the new dtype.
    """
    stacked: dict[str, dict[int, torch.Tensor]] = {}
    made: Tensors = {}
    for name, tensor in tensors.items():
        cast = tensor.to(dtype).clone()
        if ".lora_B." in name:
            cast *= alpha / tensor.shape[1]
        found = _EXPERT.fullmatch(name)
        if found is None:
            made[name] = cast
        else:
            stacked.setdefault(f"{found[1]}.{found[3]}.{found[4]}", {})[int(found[2])] = cast
    for name, experts in stacked.items():
        made[name] = torch.stack([experts[number] for number in range(len(experts))])
    return made


def save_slots(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a per-expert folder's adapter as a slots folder; returns it."""
    config = json.loads((source / CONFIG).read_text())
    made = stack_experts(load_file(source / WEIGHTS), config["lora_alpha"], dtype)
    return write_slots(target, made, {**config, "lora_alpha": config["r"]})


def write_slots(
    target: Path, tensors: Tensors, config: dict[str, object], metadata: dict[str, str] | None = METADATA
) -> Path:
    """Write these tensors and this adapter_config.json, right or wrong."""
    target.mkdir(parents=True)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, target / SLOTS, metadata
    )
    (target / CONFIG).write_text(json.dumps(config))
    return target


def read_slots(folder: Path) -> tuple[Tensors, dict[str, object]]:
    """The tensors and the adapter_config.json of a slots folder."""
    return load_file(folder / SLOTS), json.loads((folder / CONFIG).read_text())
