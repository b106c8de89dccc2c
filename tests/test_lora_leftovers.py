"""What trainers leave in good files that changes nothing: a base's name, empty fields, wide numbers, one A for two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
    LABEL,
    Logical,
    assert_equal,
    attention,
    base_fields,
    encode,
    load,
    make_base,
    save_adapter,
    spell_out,
)

from tasks.lora.convert import ConvertedFiles, convert_adapter
from tasks.lora.errors import InvalidConfig
from tasks.lora.inspect import inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.plan import ConversionPlan, plan_conversion


def convert(
    folder: Path, tensors: dict[str, torch.Tensor], **config: Any
) -> tuple[ConversionPlan, ConvertedFiles]:
    """Save an adapter below the folder and convert it there, into `made`."""
    source = save_adapter(folder / "source", tensors, **config)
    found = inspect_adapter(source, make_base(), label=LABEL, forced=Packing.RANK_MAJOR)
    plan = plan_conversion(found.layout)
    return plan, convert_adapter(found.files, plan, folder / "made")


def test_what_a_config_calls_its_base_decides_nothing(tmp_path: Path) -> None:
    """lorax#315, #51, TGI#2143, vllm#12106: null, a path, a quantised twin, another model; nothing is looked up."""
    trap = tmp_path / "base"
    trap.mkdir()
    (trap / "config.json").write_text(json.dumps(base_fields(hidden_size=12)))
    names = [None, str(trap), "/home/someone/models/x", "maker/tiny-bnb-4bit", "other/model", "", "../../etc"]
    digests = set()
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        _, made = convert(folder, encode(Logical()), base_model_name_or_path=name)
        digests.add(made.files[1].sha256)
        written = json.loads((folder / "made" / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert written == (name if name in ("maker/tiny-bnb-4bit", "other/model") else None)
    assert len(digests) == 1
    with pytest.raises(InvalidConfig, match=r"adapter_config\.json: base_model_name_or_path: found 7"):
        convert(tmp_path / "number", encode(Logical()), base_model_name_or_path=7)


def test_empty_fields_of_newer_programs_are_not_handed_on(tmp_path: Path) -> None:
    """peft#2275, unsloth#6819: an older PEFT refuses a config with fields that it does not know."""
    empty: list[Any] = [None, False, [], {}]
    fields = {f"future_{number}": value for number, value in enumerate(empty * 5)}
    convert(tmp_path, encode(Logical()), **fields)
    written = json.loads((tmp_path / "made" / "adapter_config.json").read_text())
    assert not fields.keys() & written.keys()
    assert {"r", "lora_alpha", "target_modules", "peft_type"} <= written.keys()


def test_numbers_that_a_narrower_dtype_would_round_are_kept(tmp_path: Path) -> None:
    """peft#2421, unsloth#3091, torchtune#1101: float32 factors arrive bit for bit, beside others in bfloat16."""
    logical, others = Logical(), attention(dtype=torch.bfloat16)
    for side in (logical.a, logical.b):
        for place, value in side.items():
            side[place] = value * (1 + 2.0**-20)
    convert(tmp_path, encode(logical) | others)
    assert_equal(load(tmp_path / "made"), spell_out(logical) | others)
    assert not any(torch.equal(one.bfloat16().float(), one) for one in spell_out(logical).values())


def test_a_factor_that_gate_and_up_share_is_written_for_each(tmp_path: Path) -> None:
    """transformers#27613, safetensors#98, Megatron-Bridge#919: shared storage neither crashes nor comes out empty."""
    logical = Logical()
    plan, made = convert(tmp_path, encode(logical))
    expected = spell_out(logical)
    total = sum(tensor.nelement() * tensor.element_size() for tensor in expected.values())
    path = tmp_path / "made" / "adapter_model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert plan.predicted_bytes == made.files[1].bytes == path.stat().st_size == header + total
    found = load(tmp_path / "made")
    assert_equal(found, expected)
    stem = "base_model.model.model.layers.1.mlp.experts.2"
    gate, up = (found[f"{stem}.{name}.lora_A.weight"] for name in ("gate_proj", "up_proj"))
    assert torch.equal(gate, up) and gate.any() and gate.data_ptr() != up.data_ptr()
