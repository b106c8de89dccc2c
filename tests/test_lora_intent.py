"""What an upload set out to train against what it holds (unsloth#3405, #6936; ms-swift#6173; vllm#47088)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lora_builders import (
    LABEL,
    Logical,
    Separate,
    attention,
    encode,
    encode_cubes,
    encode_experts,
    make_base,
    save_adapter,
)

from storage.training import parse_training
from tasks.lora.errors import AdapterError, IntentUnmet, NoExpertKeys, UnexpectedTensor
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.trainers import TrainingStatement
from tasks.records import training_statement

FORMS: dict[str, Any] = {
    "stacked": lambda: encode(Logical()),
    "per-expert": lambda: encode_experts(Separate()),
    "3-d": lambda: encode_cubes(Separate()),
}


def look(tmp_path: Path, tensors: Any, *intended: str, **config: Any) -> Inspection:
    source = save_adapter(tmp_path / "source", tensors, **config)
    training = TrainingStatement(layout="rank_major", intended=intended)
    return inspect_adapter(source, make_base(), label=LABEL, training=training, header_only=True)


def warnings_of(found: Inspection) -> list[str]:
    return [warning for warning in found.warnings if "intended_targets" in warning]


@pytest.mark.parametrize("form", FORMS)
def test_what_was_intended_and_is_there_needs_no_word(tmp_path: Path, form: str) -> None:
    tensors = FORMS[form]() | attention()
    assert warnings_of(look(tmp_path, tensors, "attention", "router", "routed_experts")) == []
    assert warnings_of(look(tmp_path, tensors)) == [], "nothing is stated"


@pytest.mark.parametrize("form", FORMS)
def test_an_intended_class_without_any_tensor_is_refused(tmp_path: Path, form: str) -> None:
    with pytest.raises(IntentUnmet) as caught:
        look(tmp_path, FORMS[form](), "routed_experts", "attention", "shared_experts", "mlp")
    error = caught.value
    assert (error.adapter, error.where) == (LABEL, "training.json: intended_targets")
    assert error.expected == "tensors of shared_experts and attention, as it says"
    assert error.found == "only routed_experts" and "correct intended_targets" in error.advice
    assert error.others == ()


def test_what_was_not_intended_is_told(tmp_path: Path) -> None:
    found = look(tmp_path, encode(Logical()) | attention(), "routed_experts")
    assert warnings_of(found) == [
        "training.json: intended_targets: there are tensors of attention and router too, which it does not name"
    ]


def test_names_that_are_no_class_are_told_shortly(tmp_path: Path) -> None:
    strange = [f"{place}{'x' * 500}" for place in range(300)]
    found = look(tmp_path, encode(Logical()), "routed_experts", *strange)
    [warning] = warnings_of(found)
    assert "and 295 more is no class of tensors" in warning and len(warning) < 600
    assert "there are routed_experts, shared_experts, attention, router, other" in warning


def test_a_class_whose_names_were_not_understood_is_not_said_to_be_missing(tmp_path: Path) -> None:
    misspelt = {name.replace("self_attn", "self_atn"): tensor for name, tensor in attention().items()}
    tensors = encode(Logical()) | {name: tensor for name, tensor in misspelt.items() if "self_atn" in name}
    with pytest.raises(UnexpectedTensor) as caught:
        look(tmp_path, tensors, "routed_experts", "attention")
    assert caught.value.others == ()


@pytest.mark.parametrize(
    ("intended", "config", "says"),
    [
        (["routed_experts"], {}, ", which intended_targets in training.json name"),
        (
            ["attention"],
            {"target_parameters": ["mlp.experts.gate_up_proj", "self_attn.q"]},
            ", since target_parameters in adapter_config.json has 'mlp.experts.gate_up_proj'",
        ),
        (
            [],
            {"target_modules": ["q_proj", "up_proj"], "target_parameters": None},
            ", since target_modules in adapter_config.json has 'up_proj'",
        ),
        (
            [],
            {"target_modules": [f"model.layers.{place}.mlp.experts.0.w1" for place in range(9)]}
            | {"target_parameters": []},
            ", since target_modules in adapter_config.json has "
            + ", ".join(f"'model.layers.{place}.mlp.experts.0.w1'" for place in range(5))
            + " and 4 more",
        ),
        ([], {"target_modules": "all-linear", "target_parameters": None}, ""),
    ],
)
def test_experts_that_are_missing_are_said_to_have_been_meant(
    tmp_path: Path, intended: list[str], config: dict[str, Any], says: str
) -> None:
    with pytest.raises(NoExpertKeys) as caught:
        look(tmp_path, attention(), *intended, **config)
    assert caught.value.expected == f"factors of routed experts{says}"
    kinds: list[type[AdapterError]] = [type(error) for error in caught.value.others]
    assert kinds == [], "the experts are told once"


def test_an_adapter_that_cannot_be_read_at_all_is_not_asked(tmp_path: Path) -> None:
    source = save_adapter(tmp_path / "source", encode(Logical()), r="x")
    training = TrainingStatement(intended=("attention",))
    with pytest.raises(AdapterError) as caught:
        inspect_adapter(source, make_base(), label=LABEL, training=training)
    assert [type(error).__name__ for error in (caught.value, *caught.value.others)] == [
        "InvalidConfig",
        "IntentUnmet",
    ], "names do not need the config"


def test_training_json_carries_it_to_the_inspection() -> None:
    training, ignored = parse_training("training.json", b'{"intended_targets": ["routed_experts", "router"]}')
    statement = training_statement(training)
    assert statement is not None and ignored == ()
    assert statement.intended == ("routed_experts", "router")
