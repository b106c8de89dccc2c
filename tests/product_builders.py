"""What a producer left of one adapter, and what serving makes of our conversion of it, in plain arithmetic."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lora_builders import LABEL
from peft import PeftModel
from producer_builders import SHAPES, VARIANTS, build_model
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

from tasks.lora.base import read_base_config
from tasks.lora.check import check_conversion
from tasks.lora.convert import convert_adapter
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.plan import plan_conversion
from tasks.lora.target import TargetFormat


@dataclass(frozen=True)
class Product:
    """One variant, as the producer's script left it in a folder of its own."""

    folder: Path
    variant: str

    @cached_property
    def theirs(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "theirs.safetensors")

    @property
    def deltas(self) -> dict[str, torch.Tensor]:
        """What the producer's merge adds to each weight, by the name of the module or expert's projection."""
        named = {name: value for name, value in self.theirs.items() if name.startswith("delta.")}
        return {name.removeprefix("delta."): value for name, value in named.items()}

    def build_base(self) -> Qwen3MoeForCausalLM:
        """The model that it was trained on, in float32, where every error is the reading's."""
        variant = VARIANTS[self.variant]
        return build_model(SHAPES[variant.shape], variant.dtype).float()

    def look(self, folder: Path | None = None, **statements: Any) -> Inspection:
        """The adapter as the producer saved it, or what somebody made of it."""
        base = read_base_config(self.folder / "base", label="tiny-base")
        return inspect_adapter(folder or self.folder / "adapter", base, label=LABEL, **statements)

    def measure_logits(self, logits: torch.Tensor) -> float:
        """How far they are from the producer's, as a share of what the adapter does to the base's."""
        effect = self.theirs["float_logits"] - self.theirs["base_logits"]
        return float((logits - self.theirs["float_logits"]).norm() / effect.norm())

    def measure_experts(self, deltas: dict[str, torch.Tensor]) -> float:
        """The relative error of all experts' deltas together."""
        theirs = {name: delta for name, delta in self.deltas.items() if ".experts." in name}
        wrong = torch.stack([(deltas[name] - delta).norm() for name, delta in theirs.items()])
        return float(wrong.norm() / torch.stack([delta.norm() for delta in theirs.values()]).norm())


def convert(found: Inspection, folder: Path, format: TargetFormat = TargetFormat.PER_EXPERT) -> Path:
    convert_adapter(found.files, plan_conversion(found.layout, format), folder)
    assert check_conversion(found.files, folder, found.layout, format).passed
    return folder


def load_by_peft(base: Qwen3MoeForCausalLM, folder: Path) -> PeftModel:
    """The installed PEFT with our files; of what it does not find in them it only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        # PEFT says so of every key for a stacked parameter, whether it used it or not; and the marker is not its own.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        warnings.filterwarnings("ignore", message="Unexpected keyword arguments .*lora_B_layout")
        return PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).eval()


def read_served_deltas(folder: Path) -> dict[str, torch.Tensor]:
    """scaling * B @ A of every module of a per-expert adapter, float32, by the engine's name of the module."""
    config = json.loads((folder / "adapter_config.json").read_text())
    factors = {name: value.float() for name, value in load_file(folder / "adapter_model.safetensors").items()}
    deltas = {}
    for name, a in factors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            deltas[module] = _read_scaling(config, module) * (factors[name.replace("_A.", "_B.")] @ a)
    return deltas


def _read_scaling(config: dict[str, Any], module: str) -> float:
    """alpha / rank as vLLM 0.32 finds them (lora/peft_helper.py), and as nobody can find them otherwise."""
    assert not config["use_rslora"]

    def look_up(pattern: str, default: float) -> float:
        keys = config.get(pattern, {})
        found = [value for key, value in keys.items() if re.match(rf"(.*\.)?({key})$", module)]
        assert len(found) <= 1, f"{pattern} has {len(found)} keys for {module}, and PEFT may sort them"
        return found[0] if found else default

    return look_up("alpha_pattern", config["lora_alpha"]) / look_up("rank_pattern", config["r"])


@torch.no_grad()
def add_deltas(model: Qwen3MoeForCausalLM, deltas: dict[str, torch.Tensor]) -> Qwen3MoeForCausalLM:
    """The model itself, with each delta added to its weight; experts into transformers' stacked parameters."""
    weights = dict(model.named_parameters())
    for module, delta in deltas.items():
        experts, _, rest = module.partition(".experts.")
        if not rest:
            weights[f"{module}.weight"] += delta
            continue
        expert, projection = rest.split(".")
        if projection == "down_proj":
            weights[f"{experts}.experts.down_proj"][int(expert)] += delta
        else:
            begin = 0 if projection == "gate_proj" else len(delta)
            weights[f"{experts}.experts.gate_up_proj"][int(expert)][begin : begin + len(delta)] += delta
    return model
