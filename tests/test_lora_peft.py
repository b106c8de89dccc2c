"""PEFT itself as the judge: what it trains and saves, converted, must act as it did under PEFT."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lora_builders import LABEL, unpack_wheel
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tasks.lora.base import read_base_config
from tasks.lora.check import check_conversion
from tasks.lora.config import effective_scaling
from tasks.lora.convert import convert_adapter
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.plan import plan_control, plan_conversion

EXPERTS, RANK, LAYERS = 4, 3, 2
TOKENS = torch.tensor([[3, 41, 7, 22, 9, 17, 30, 2], [11, 5, 48, 26, 33, 8, 1, 19]])


def build_model() -> Qwen3MoeForCausalLM:
    """The same random numbers at each call."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=12,
        moe_intermediate_size=7,
        intermediate_size=22,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    made = Qwen3MoeForCausalLM(config).eval()
    made.set_experts_implementation("eager")  # the default wants sizes that divide by 4
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.4)
    return made


@pytest.fixture(scope="module")
def model() -> Iterator[Qwen3MoeForCausalLM]:
    yield build_model()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def train(model: Qwen3MoeForCausalLM, folder: Path, *, router: bool, rslora: bool) -> torch.Tensor:
    """Save a PEFT adapter with every factor random, and return PEFT's own logits with it."""
    torch.manual_seed(1)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(
        r=RANK,
        lora_alpha=5,
        use_rslora=rslora,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=[*parameters, "mlp.gate.weight"] if router else parameters,
    )
    adapted = get_peft_model(copy.deepcopy(model), config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(folder)
    model.config.save_pretrained(folder.parent / "base")
    return logits(adapted)


def look(folder: Path, forced: Packing | None = None) -> Inspection:
    base = read_base_config(folder.parent / "base", label="tiny")
    return inspect_adapter(folder, base, label=LABEL, forced=forced)


def merge(model: Qwen3MoeForCausalLM, converted: Path, scaling: float) -> Qwen3MoeForCausalLM:
    """The base with scaling * B @ A written into each weight, by the engine's names alone."""
    merged = copy.deepcopy(model)
    weights = dict(merged.named_parameters())
    factors = load_file(converted / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in factors.items():
            if ".lora_A." not in name:
                continue
            delta = scaling * factors[name.replace(".lora_A.", ".lora_B.")] @ a
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            if ".experts." not in module:
                weights[f"{module}.weight"] += delta
                continue
            experts, _, rest = module.partition(".experts.")
            expert, projection = rest.split(".")
            if projection == "down_proj":
                weights[f"{experts}.experts.down_proj"][int(expert)] += delta
            else:
                gate_up = weights[f"{experts}.experts.gate_up_proj"][int(expert)]
                rows = slice(0, 7) if projection == "gate_proj" else slice(7, 14)
                gate_up[rows] += delta
    return merged


@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
def test_merged_deltas_act_as_under_peft(tmp_path: Path, model: Qwen3MoeForCausalLM, rslora: bool) -> None:
    expected = train(model, tmp_path / "adapter", router=True, rslora=rslora)
    found = look(tmp_path / "adapter")
    assert [kind.name for kind in found.classes] == ["routed_experts", "router", "attention"]
    plan = plan_conversion(found.layout)
    convert_adapter(found.files, plan, tmp_path / "made")
    convert_adapter(found.files, plan_control(plan), tmp_path / "control")
    assert check_conversion(found.files, tmp_path / "made", found.layout).passed
    scaling = effective_scaling(found.layout.config)
    merged = logits(merge(model, tmp_path / "made", scaling))
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
    effect = (expected - logits(model)).abs().max()
    assert effect > 1
    control = logits(merge(model, tmp_path / "control", scaling))
    assert (control - expected).abs().max() > 0.1 * effect


def test_peft_loads_the_output(tmp_path: Path, model: Qwen3MoeForCausalLM) -> None:
    """PEFT from 0.19 on fuses per-expert files back into transformers' stacked parameters.

    Without rsLoRA: PEFT then doubles rank and alpha, which keeps alpha / r but not alpha / sqrt(r).
    """
    expected = train(model, tmp_path / "adapter", router=False, rslora=False)
    found = look(tmp_path / "adapter")
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    loaded = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "made").eval()
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    wrong = look(tmp_path / "adapter", Packing.GROUPED_BY_EXPERT)
    convert_adapter(wrong.files, plan_conversion(wrong.layout), tmp_path / "wrong")
    misread = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "wrong").eval()
    assert (logits(misread) - expected).abs().max() > 0.1


OLD_PEFT = """
import sys
from pathlib import Path
import peft, test_lora_peft as here
from safetensors.torch import save_file
expected = here.train(here.build_model(), Path(sys.argv[1]), router=True, rslora=False)
save_file({"logits": expected}, sys.argv[2])
print(peft.__version__)
"""


@pytest.mark.real
def test_swapped_files_of_an_older_peft(tmp_path: Path, model: Qwen3MoeForCausalLM) -> None:
    """PEFT 0.18.1 takes a parameter's two sizes the other way round, and its files show it."""
    package = unpack_wheel("peft", "0.18.1", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", OLD_PEFT, tmp_path / "adapter", tmp_path / "logits"],
        env=os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "0.18.1"
    expected = load_file(tmp_path / "logits")["logits"]
    found = look(tmp_path / "adapter")
    assert found.orientation == "swapped"
    plan = plan_conversion(found.layout)
    convert_adapter(found.files, plan, tmp_path / "made")
    convert_adapter(found.files, plan_control(plan), tmp_path / "control")
    scaling = effective_scaling(found.layout.config)
    torch.testing.assert_close(
        logits(merge(model, tmp_path / "made", scaling)), expected, rtol=1e-4, atol=1e-4
    )
    effect = (expected - logits(model)).abs().max()
    assert effect > 1
    assert (logits(merge(model, tmp_path / "control", scaling)) - expected).abs().max() > 0.1 * effect
