"""Every family that transformers can build here: what PEFT trained on it is what we write for its engine.

The models, the adapters and the deltas are transformers' and PEFT's own; only how a fused parameter holds gate and up
is told here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from family_builders import ALPHA, BASICS, FAMILIES, RANK, adapt
from lora_builders import LABEL, load
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from safetensors.torch import load_file, save_file

from tasks.lora.base import read_base_config
from tasks.lora.check import check_conversion
from tasks.lora.convert import convert_adapter
from tasks.lora.inspect import inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.plan import plan_conversion

pytestmark = pytest.mark.real

# What a fused parameter's output rows are. Source: transformers, `_apply_gate` in models/gpt_oss/modeling_gpt_oss.py
# and `chunk(2, dim=-1)` in the others' experts.
TURNS = ("gpt_oss",)
# (experts, in, out); PEFT gives every delta in the shape of its parameter.
TRANSPOSED = ("gpt_oss", "llama4")
# Modules that the engine does not serve as they are trained: an adapter with them is refused.
LEFT_OUT = {
    "deepseek_v2": ("self_attn.kv_b_proj",),
    "deepseek_v3": ("self_attn.kv_b_proj",),
    "nemotron_h": ("mixer.gate",),
    "llama4": ("self_attn.q_proj", "self_attn.k_proj"),
}
CALLED = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
CALLED |= {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
EXPERT = re.compile(r"\.layers\.(\d+)\..*?experts\.(\d+)\.(\w+)\.lora_A\.weight")

Deltas = dict[tuple[int, int, str], torch.Tensor]


def list_trained(name: str, adapted: torch.nn.Module) -> tuple[Deltas, list[tuple[int, torch.Tensor]]]:
    """What PEFT adds: to each expert's projections by (layer, expert, projection), and by layer to other modules."""
    experts: Deltas = {}
    others = []
    for path, module in adapted.named_modules():
        if not isinstance(module, LoraLayer) or path.endswith(LEFT_OUT.get(name, ())):
            continue
        layer = int(path.split(".layers.")[1].split(".")[0])
        delta = module.get_delta_weight("default").detach()
        if not isinstance(module, ParamWrapper) or module.num_experts == 1:
            others.append((layer, delta))
            continue
        for e, own in enumerate(delta.transpose(1, 2) if name in TRANSPOSED else delta):
            parts = {module.parameter_name: own}
            if module.parameter_name == "gate_up_proj":
                middle = len(own) // 2
                gate, up = (own[0::2], own[1::2]) if name in TURNS else (own[:middle], own[middle:])
                parts = {"gate_proj": gate, "up_proj": up}
            experts |= {(layer, e, projection): part for projection, part in parts.items()}
    return experts, others


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_what_peft_trained_is_what_is_served(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    getattr(transformers, family.config)(**{**BASICS, **family.settings}).save_pretrained(tmp_path / "base")
    adapted = adapt(name, family.parts)
    adapted.save_pretrained(tmp_path / "source")
    weights = tmp_path / "source" / "adapter_model.safetensors"
    left = tuple(f"{module}.lora_" for module in LEFT_OUT.get(name, ()))
    kept = {
        stored: tensor for stored, tensor in load_file(weights).items() if not any(map(stored.count, left))
    }
    save_file(kept, weights)
    base = read_base_config(tmp_path / "base", label="tiny-base")
    found = inspect_adapter(tmp_path / "source", base, label=LABEL, forced=Packing.RANK_MAJOR)
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    assert check_conversion(found.files, tmp_path / "made", found.layout).passed

    experts, others = list_trained(name, adapted)
    served: Deltas = {}
    made = load(tmp_path / "made")
    for stored, a in made.items():
        if "lora_A" not in stored:
            continue
        delta = ALPHA / RANK * made[stored.replace("lora_A", "lora_B")] @ a
        expert = EXPERT.search(stored)
        if expert is not None:
            served[int(expert[1]), int(expert[2]), CALLED[expert[3]]] = delta
            continue
        twin = stored.replace("v_proj", "k_proj")
        if stored not in kept and twin in kept:  # where k_proj gives the values, too, it is served as both
            assert all(
                torch.equal(made[key], kept[key.replace("v_proj", "k_proj")])
                for key in (stored, stored.replace("lora_A", "lora_B"))
            )
            continue
        layer = int(stored.split(".layers.")[1].split(".")[0])
        same = [
            place
            for place, (number, own) in enumerate(others)
            if number == layer and own.shape == delta.shape and torch.allclose(own, delta, atol=1e-5)
        ]
        assert len(same) == 1, stored
        del others[same[0]]
    assert not others
    assert served.keys() == experts.keys() and served
    for key, delta in experts.items():
        assert torch.allclose(served[key], delta, atol=1e-5) and delta.abs().max() > 0.01, key
