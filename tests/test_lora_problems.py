"""All that is wrong with one adapter in one answer: in the fixed order, each kind once, no mere consequences."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - errors cross process borders this way
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
    EXPERTS,
    HIDDEN,
    LABEL,
    LAYERS,
    PREFIX,
    RANK,
    VOCAB,
    Logical,
    Separate,
    attention,
    encode,
    encode_alone,
    encode_experts,
    expert_name,
    look,
    make_base,
    save_adapter,
    stacked_name,
)
from safetensors.torch import load_file, save_file

from tasks.directories import KnownBase, inspect_directory
from tasks.lora.check import check_conversion
from tasks.lora.checks import raise_for
from tasks.lora.convert import convert_adapter
from tasks.lora.errors import (
    AdapterError,
    BaseMismatch,
    CorruptFile,
    DeltaMismatch,
    InvalidConfig,
    LayoutConflict,
    MalformedKey,
    MissingConfig,
    MissingTensor,
    MissingWeights,
    NoExpertKeys,
    NonFinite,
    OrientationUndecided,
    RankUnsupported,
    RoundTripMismatch,
    ShapeMismatch,
    UnexpectedTensor,
    UnsupportedConfig,
    UnsupportedDtype,
    UnsupportedSourceFormat,
)
from tasks.lora.inspect import inspect_adapter
from tasks.lora.plan import plan_conversion
from tasks.outcomes import refusal

Tensors = dict[str, torch.Tensor]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def refuse(folder: Path, **asked: Any) -> list[AdapterError]:
    with pytest.raises(AdapterError) as caught:
        inspect_adapter(folder, make_base(), label=LABEL, **asked)
    return [caught.value, *caught.value.others]


def refuse_tensors(tmp_path: Path, tensors: Tensors, **config: Any) -> list[AdapterError]:
    with pytest.raises(AdapterError) as caught:
        look(tmp_path / "source", tensors, **config)
    return [caught.value, *caught.value.others]


def told(errors: list[AdapterError]) -> list[tuple[type[AdapterError], str, str]]:
    return [(type(error), error.where, error.found) for error in errors]


def with_magnitudes(tensors: Tensors) -> Tensors:
    """DoRA: one vector for each attention projection."""
    vectors = {
        name.replace("lora_A", "lora_magnitude_vector"): torch.arange(5.0)
        for name in tensors
        if "self_attn" in name and "lora_A" in name
    }
    assert len(vectors) == 4 * LAYERS
    return tensors | vectors


def test_config_names_and_numbers_are_told_together(tmp_path: Path) -> None:
    """vllm#6983: DoRA shows in the config and in its keys; neither hides what else is wrong."""
    tensors = with_magnitudes(encode(Logical()) | attention())
    tensors |= {f"base_model.model.lm_head.lora_{factor}.weight": torch.ones(RANK, 7) for factor in "AB"}
    tensors["base_model.model.extra_state"] = torch.ones(2, 3)
    tensors[stacked_name(1, "down_proj", "A")][5, 2] = float("nan")
    errors = refuse_tensors(tmp_path, tensors, use_dora=True, bias="all", modules_to_save=["lm_head"], r=RANK)
    assert told(errors) == [
        (UnsupportedConfig, f"{CONFIG}: bias", "'all'"),
        (UnsupportedConfig, f"{CONFIG}: use_dora", "True"),
        (UnsupportedConfig, f"{CONFIG}: modules_to_save", "['lm_head']"),
        (MalformedKey, "base_model.model.extra_state", "the ending 'model.extra_state'"),
        (
            UnsupportedConfig,
            "base_model.model.lm_head.lora_A.weight",
            "weights for lm_head or the embeddings (the first of 2)",
        ),
        (
            UnsupportedConfig,
            f"{PREFIX}.0.self_attn.k_proj.lora_magnitude_vector.weight",
            f"DoRA's magnitudes (the first of {4 * LAYERS})",
        ),
        (NonFinite, stacked_name(1, "down_proj", "A"), "1 NaN or infinite of 84"),
    ]
    assert refusal(errors[0])["codes"] == ["unsupported_config", "malformed_key", "non_finite"]


def test_a_file_that_cannot_be_read_does_not_hide_the_config(tmp_path: Path) -> None:
    save_adapter(tmp_path, encode(Logical()), use_dora=True, r=513)
    (tmp_path / WEIGHTS).write_bytes(b"<html>")
    errors = refuse(tmp_path)
    assert [type(error) for error in errors] == [CorruptFile, UnsupportedConfig, RankUnsupported]
    assert refusal(errors[0])["codes"] == ["corrupt_or_partial", "unsupported_config", "rank_unsupported"]


def test_a_config_that_cannot_be_read_does_not_hide_the_names(tmp_path: Path) -> None:
    tensors = with_magnitudes(encode(Logical()) | attention()) | {
        f"{PREFIX}.{LAYERS + 3}.self_attn.q_proj.lora_A.weight": torch.ones(RANK, HIDDEN)
    }
    save_adapter(tmp_path, tensors, r="3", lora_alpha=-1, alpha_pattern={"q_proj": 0, "k_proj": "x"})
    errors = refuse(tmp_path)
    assert told(errors)[:4] == [
        (InvalidConfig, f"{CONFIG}: r", "'3'"),
        (InvalidConfig, f"{CONFIG}: lora_alpha", "-1"),
        (InvalidConfig, f"{CONFIG}: alpha_pattern.q_proj", "0"),
        (
            UnsupportedConfig,
            f"{PREFIX}.0.self_attn.k_proj.lora_magnitude_vector.weight",
            f"DoRA's magnitudes (the first of {4 * LAYERS})",
        ),
    ]
    assert told(errors)[4:] == [
        (BaseMismatch, f"{PREFIX}.{LAYERS + 3}.self_attn.q_proj.lora_A.weight", f"layer {LAYERS + 3}")
    ]
    assert refusal(errors[0])["codes"] == ["unsupported_config", "base_mismatch"]


def test_an_empty_folder_lacks_both_files_under_one_code(tmp_path: Path) -> None:
    errors = refuse(tmp_path)
    assert [type(error) for error in errors] == [MissingWeights, MissingConfig]
    assert refusal(errors[0])["codes"] == ["corrupt_or_partial"]


def test_each_kind_of_misfit_is_told_once_with_its_count(tmp_path: Path) -> None:
    """And the numbers, of which one is NaN, are not looked at: nobody knows what they mean."""
    tensors = encode_experts(Separate())
    tensors[expert_name(1, 0, "gate_proj", "A")][2, 3] = float("nan")
    for expert in range(EXPERTS):
        del tensors[expert_name(1, expert, "down_proj", "B")]
    for expert in (1, 3):
        name = expert_name(0, expert, "gate_proj", "A")
        tensors[name] = tensors[name][: RANK - 1].clone()
    for expert in (0, 1, 2):
        name = expert_name(0, expert, "up_proj", "B")
        tensors[name] = tensors[name][:-2].clone()
    name = expert_name(1, 2, "up_proj", "A")
    tensors[name] = tensors[name].bfloat16()
    errors = refuse_tensors(tmp_path, tensors)
    assert told(errors) == [
        (ShapeMismatch, expert_name(0, 1, "gate_proj", "A"), f"shape (2, {HIDDEN}) (the first of 2)"),
        (BaseMismatch, expert_name(0, 0, "up_proj", "B"), "shape (5, 3) (the first of 3)"),
        (UnsupportedDtype, name, "BF16"),
        (MissingTensor, expert_name(1, 0, "down_proj", "B"), f"no such tensor (the first of {EXPERTS})"),
    ]
    assert all(error.advice and error.expected for error in errors)


def test_consequences_are_not_told(tmp_path: Path) -> None:
    """What seems to be missing may be what was not understood; and what lacks is then no news."""
    tensors = encode_experts(Separate())
    misspelt = {name.replace("3.gate_proj", "3.gate_prj"): tensor for name, tensor in tensors.items()}
    misspelt_errors = refuse_tensors(tmp_path / "a", misspelt)
    assert told(misspelt_errors) == [
        (
            UnexpectedTensor,
            f"{PREFIX}.0.mlp.experts.3.gate_prj.lora_A.weight",
            f"a name that no module of this family has (the first of {2 * LAYERS})",
        )
    ]
    renamed = {name.replace("experts", "expertz"): tensor for name, tensor in tensors.items()}
    assert [type(error) for error in refuse_tensors(tmp_path / "b", renamed)] == [UnexpectedTensor]
    flat = tensors | {
        name: tensor.flatten() for name, tensor in tensors.items() if "0.mlp.experts.2." in name
    }
    assert [type(error) for error in refuse_tensors(tmp_path / "c", flat)] == [UnsupportedSourceFormat]
    # Each of them is told where it is true.
    few = {name: tensor for name, tensor in tensors.items() if "3.gate_proj" not in name}
    assert [type(error) for error in refuse_tensors(tmp_path / "d", few)] == [MissingTensor]
    modules = with_magnitudes(attention())
    errors = refuse_tensors(tmp_path / "e", modules)
    assert [type(error) for error in errors] == [UnsupportedConfig, NoExpertKeys]
    assert errors[1].found == "only attention, router"


def test_every_parameter_with_a_contradiction_is_counted(tmp_path: Path) -> None:
    """Layout before numbers: what the marker says wrongly of two parameters, and the NaN beside."""
    tensors = encode(Logical())
    tensors[stacked_name(0, "gate_up_proj", "B")][3, 1] = float("inf")
    parameters = {name: {"lora_B_layout": "sideways"} for name in ("gate_up_proj", "down_proj")}
    save_adapter(tmp_path, tensors, unsloth_fused_expert_lora={"parameters": parameters})
    errors = refuse(tmp_path)
    assert [type(error) for error in errors] == [InvalidConfig, InvalidConfig, NonFinite]
    assert {error.where.split(".")[-2] for error in errors[:2]} == set(parameters)
    assert refusal(errors[0])["codes"] == ["unsupported_config", "non_finite"]


def test_patterns_that_take_minutes_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be paired for want of scalings is looked at by name all the same."""
    monkeypatch.setattr("tasks.lora.config.MOST_TRIES", 1_000)
    tensors = with_magnitudes(encode(Logical()) | attention())
    errors = refuse_tensors(tmp_path, tensors, alpha_pattern={".*q.*proj": 5}, rank_pattern={"q_proj": RANK})
    names = len(tensors)
    assert [type(error) for error in errors] == [UnsupportedConfig, InvalidConfig]
    assert (errors[1].where, errors[1].found) == (f"{CONFIG}: alpha_pattern", "1602 ways")
    assert errors[1].expected.startswith(
        f"patterns that match {names} names in at most {1_000 // names} ways each"
    )


def test_every_tensor_that_is_not_finite_is_counted(tmp_path: Path) -> None:
    """ainode#186: all of them, reported as a success. The first in the order of layers, the experts before others."""
    experts, others = encode(Logical()), attention()
    for name in (*list(experts)[1:], *others):
        (experts | others)[name].view(-1)[0] = float("nan")
    [error] = refuse_tensors(tmp_path, experts | others)
    gate_up, down = (stacked_name(0, parameter, "B") for parameter in ("gate_up_proj", "down_proj"))
    down_a = stacked_name(0, "down_proj", "A")
    assert error.where in (gate_up, down_a)
    assert error.found.startswith("1 NaN or infinite of 168; some too in ")
    bad = len(experts) - 1 + len(others)
    assert error.found.endswith(f" and {bad - 4} more") and down in error.found


def test_a_statement_that_cannot_be_read_does_not_hide_the_rest(tmp_path: Path) -> None:
    """But for what it might have decided."""
    source = save_adapter(tmp_path / "kestrel", with_magnitudes(attention()), use_dora=True)
    (source / "training.json").write_text("{", "utf-8")
    with pytest.raises(CorruptFile) as caught:
        inspect_directory(source, KnownBase(make_base()), packing=None, header_only=False)
    errors = [caught.value, *caught.value.others]
    assert [type(error) for error in errors] == [
        CorruptFile,
        UnsupportedConfig,
        UnsupportedConfig,
        NoExpertKeys,
    ]
    assert (errors[0].adapter, errors[0].where) == ("kestrel", "training.json")
    assert errors[1].where == f"{CONFIG}: use_dora" and str(tmp_path) not in str(errors[0])
    # The lone square pair is told by nothing but the version that training.json may have stated.
    square = save_adapter(
        tmp_path / "square",
        encode_alone(Logical(hidden=7), "down_proj"),
        peft_version=None,
        target_parameters=["mlp.experts.down_proj"],
    )
    with pytest.raises(OrientationUndecided):
        inspect_directory(square, KnownBase(make_base(hidden_size=7)), packing=None, header_only=True)
    (square / "training.json").write_text("[]", "utf-8")
    with pytest.raises(CorruptFile) as caught:
        inspect_directory(square, KnownBase(make_base(hidden_size=7)), packing=None, header_only=True)
    assert caught.value.others == ()
    # Two damaged files are two problems.
    (square / WEIGHTS).write_bytes(b"<html>")
    with pytest.raises(CorruptFile) as caught:
        inspect_directory(square, KnownBase(make_base()), packing=None, header_only=True)
    assert [error.where for error in (caught.value, *caught.value.others)] == ["training.json", WEIGHTS]


def test_the_ledger_is_told_of_every_problem_and_of_no_more_than_fit(tmp_path: Path) -> None:
    errors = refuse_tensors(tmp_path, encode(Logical()), use_dora=True, bias="all", r=513)
    record = refusal(errors[0])
    assert len(errors) > 3
    assert [problem["where"] for problem in record["problems"]] == [error.where for error in errors]
    assert [problem["message"] for problem in record["problems"]] == [str(error) for error in errors]
    codes = [problem["code"] for problem in record["problems"]]
    assert codes[:3] == ["unsupported_config", "unsupported_config", "rank_unsupported"]
    assert record["problems"][0] == {
        "code": record["code"],
        "where": record["where"],
        "message": record["reason"],
    }
    many = NonFinite(LABEL, "x" * 5_000, "y", "z")
    many.others = tuple(NonFinite(LABEL, f"{place}", "y", "z") for place in range(500))
    told = refusal(many)["problems"]
    assert len(told) == 20 and len(told[0]["message"]) == 1_000


def test_exchanged_names_and_a_lone_module(tmp_path: Path) -> None:
    tensors = encode(Logical())
    for layer in range(LAYERS):
        for factor in "AB":
            one, two = (stacked_name(layer, name, factor) for name in ("gate_up_proj", "down_proj"))
            tensors[one], tensors[two] = tensors[two], tensors[one]
    lone = f"{PREFIX}.1.self_attn.q_proj.lora_A.weight"
    tensors[lone] = attention()[lone]
    errors = refuse_tensors(tmp_path, tensors)
    assert [type(error) for error in errors] == [LayoutConflict, MissingTensor]
    assert errors[1].where == lone.replace("lora_A", "lora_B")


def test_every_failed_check_is_told(tmp_path: Path) -> None:
    found = look(tmp_path / "source", encode(Logical()))
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    weights = tmp_path / "made" / WEIGHTS
    tensors = load_file(weights)
    lost = expert_name(1, 2, "up_proj", "B")
    del tensors[lost]
    tensors[expert_name(0, 1, "up_proj", "B")][3, 1] = float("nan")
    save_file(tensors, weights)
    report = check_conversion(found.files, tmp_path / "made", found.layout)
    with pytest.raises(MissingTensor) as caught:
        raise_for(report)
    failed = [check.name for check in report.checks if not check.passed]
    assert failed == ["coverage", "size", "finite", "deltas", "round_trip"]
    errors = [caught.value, *caught.value.others]
    assert [type(error) for error in errors] == [
        MissingTensor,
        RoundTripMismatch,
        NonFinite,
        DeltaMismatch,
        RoundTripMismatch,
    ]
    assert refusal(errors[0])["codes"] == ["missing_tensor", "delta_mismatch", "non_finite"]
    assert errors[0].where == lost


def test_all_of_it_crosses_process_borders(tmp_path: Path) -> None:
    first, *others = refuse_tensors(tmp_path, encode(Logical()), use_dora=True, bias="all")
    again = pickle.loads(pickle.dumps(first))
    assert len(others) == 1
    assert [str(error) for error in (again, *again.others)] == [str(first), str(others[0])]
    assert refusal(again) == refusal(first)
    assert json.loads(json.dumps(refusal(again)))["codes"] == ["unsupported_config"]


def test_a_good_adapter_has_no_problems_and_many_bad_names_take_no_time(tmp_path: Path) -> None:
    look(tmp_path / "good", encode(Logical()) | attention())
    names = (
        f"{start}.0.mlp.x{number}.lora_A.weight" for number in range(VOCAB * 50) for start in (PREFIX, CONFIG)
    )
    strange = {name: torch.ones(2, 3) for name in names}
    errors = refuse_tensors(tmp_path / "bad", encode(Logical()) | strange)
    assert len(errors) == 1
    assert errors[0].found.endswith(f"(the first of {VOCAB * 100})")
    assert len(str(errors[0])) < 500
