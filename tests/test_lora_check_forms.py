"""Checking every form of source and both targets: every fault is found by the check that should find it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
    BIT_FOR_BIT,
    DOUBLED,
    EXPERTS,
    INTER,
    LAYERS,
    PREFIX,
    Logical,
    Separate,
    attention,
    encode,
    encode_alone,
    encode_cubes,
    encode_experts,
    look,
    stack_blocks,
)
from safetensors.torch import load_file, save_file

from tasks.lora.blocks import Piece, PlannedBlock
from tasks.lora.check import check_conversion
from tasks.lora.checks import CheckReport, raise_for
from tasks.lora.convert import convert_adapter
from tasks.lora.errors import (
    DeltaMismatch,
)
from tasks.lora.files import SLOTS_METADATA
from tasks.lora.header import PLAIN_METADATA, format_header
from tasks.lora.inspect import Inspection
from tasks.lora.plan import plan_conversion
from tasks.lora.target import TargetFormat
from tasks.lora.views import whole

Tensors = dict[str, torch.Tensor]
EXPERT_0, EXPERT_1 = (f"{PREFIX}.1.mlp.experts.{expert}" for expert in (0, 1))


def failed(report: CheckReport) -> list[str]:
    return [check.name for check in report.checks if not check.passed]


def swap(first: str, second: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def put(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][0, 0] = value

    return change


def prepare_stacked(tmp_path: Path) -> Inspection:
    tensors = encode(Logical(), packing="grouped_by_expert", orientation="swapped") | attention()
    return look(tmp_path / "source", tensors, packing="grouped_by_expert")


def prepare_blocks(tmp_path: Path) -> Inspection:
    """PEFT's re-save: gate and up in components of their own."""
    return look(tmp_path / "source", encode(stack_blocks(Separate())), **DOUBLED)


def prepare_experts(tmp_path: Path) -> Inspection:
    return look(tmp_path / "source", encode_experts(Separate()) | attention())


def prepare_cubes(tmp_path: Path) -> Inspection:
    meant = Separate(shared=(("gate_proj", "A"), ("up_proj", "A"), ("down_proj", "B")))
    return look(tmp_path / "source", encode_cubes(meant))


def prepare_down(tmp_path: Path) -> Inspection:
    tensors = encode_alone(Logical(), "down_proj")
    return look(tmp_path / "source", tensors, target_parameters=["mlp.experts.down_proj"])


def exchange_rows(name: str, first: range, second: range) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        old = tensors[name].clone()
        tensors[name][list(first)], tensors[name][list(second)] = old[list(second)], old[list(first)]

    return change


def exchange_columns(name: str, first: range, second: range) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        old = tensors[name].clone()
        tensors[name][:, list(first)], tensors[name][:, list(second)] = (
            old[:, list(second)],
            old[:, list(first)],
        )

    return change


def regroup(name: str) -> Callable[[Tensors], None]:
    """The stacked target in the other packing."""

    def change(tensors: Tensors) -> None:
        old = tensors[name].clone()
        rank = old.shape[1] // EXPERTS
        for e in range(EXPERTS):
            for j in range(rank):
                tensors[name][:, e * rank + j] = old[:, j * EXPERTS + e]

    return change


OUTER, INNER = (f"{PREFIX}.1.mlp.{wrapper}.lora" for wrapper in ("experts", "experts.base_layer"))
Prepare = Callable[[Path], Inspection]


@pytest.mark.parametrize(
    ("prepare_source", "format", "change", "failures", "where"),
    [
        pytest.param(
            prepare_stacked,
            "stacked",
            put(f"{INNER}_A.weight", 3.5),
            ["deltas", "round_trip"],
            f"{INNER}_B.weight",
            id="stacked: one number of A, stored in B",
        ),
        pytest.param(
            prepare_stacked,
            "stacked",
            exchange_rows(f"{OUTER}_A.weight", range(3), range(6, 9)),
            ["deltas", "round_trip"],
            f"{OUTER}_B.weight",
            id="stacked: A of two experts exchanged",
        ),
        pytest.param(
            prepare_stacked,
            "stacked",
            exchange_columns(f"{OUTER}_B.weight", range(0, 12, 4), range(2, 12, 4)),
            ["deltas", "round_trip"],
            f"{OUTER}_A.weight",
            id="stacked: B of two experts exchanged",
        ),
        pytest.param(
            prepare_stacked,
            "stacked",
            exchange_rows(f"{INNER}_B.weight", range(INTER), range(INTER, 2 * INTER)),
            ["gate_up", "deltas", "round_trip"],
            f"{INNER}_A.weight",
            id="stacked: gate and up exchanged",
        ),
        pytest.param(
            prepare_stacked,
            "stacked",
            regroup(f"{INNER}_B.weight"),
            ["deltas", "round_trip"],
            f"{INNER}_A.weight",
            id="stacked: grouped instead of rank-major",
        ),
        pytest.param(
            prepare_stacked,
            "stacked",
            put(f"{PREFIX}.0.mlp.gate.lora_B.weight", 3.5),
            ["deltas", "round_trip"],
            f"{PREFIX}.0.mlp.gate.lora_B.weight",
            id="stacked: one number of the router",
        ),
        pytest.param(
            prepare_stacked,
            "stacked",
            put(f"{OUTER}_B.weight", float("nan")),
            ["finite", "deltas", "round_trip"],
            f"{OUTER}_B.weight",
            id="stacked: nan",
        ),
        pytest.param(
            prepare_stacked,
            "stacked",
            lambda tensors: tensors.pop(f"{OUTER}_B.weight"),
            ["coverage", "size", "deltas", "round_trip"],
            f"{OUTER}_B.weight",
            id="stacked: a tensor is missing",
        ),
        pytest.param(
            prepare_experts,
            "stacked",
            put(f"{INNER}_B.weight", 3.5),
            ["deltas", "round_trip"],
            f"{EXPERT_0}.gate_proj.lora_B.weight",
            id="from experts: one number",
        ),
        pytest.param(
            prepare_experts,
            "stacked",
            lambda tensors: tensors[f"{INNER}_B.weight"][INTER].fill_(1),
            ["zeros", "deltas", "round_trip"],
            f"{INNER}_B.weight",
            id="from experts: numbers between gate and up",
        ),
        pytest.param(
            prepare_experts,
            "stacked",
            exchange_rows(f"{INNER}_A.weight", range(3), range(3, 6)),
            ["deltas", "round_trip"],
            f"{EXPERT_0}.gate_proj.lora_A.weight",
            id="from experts: A of gate and up exchanged",
        ),
        pytest.param(
            prepare_experts,
            "per-expert",
            swap(f"{EXPERT_1}.gate_proj.lora_A.weight", f"{EXPERT_1}.up_proj.lora_A.weight"),
            ["deltas", "round_trip"],
            f"{EXPERT_1}.gate_proj.lora_A.weight",
            id="experts: A of gate and up exchanged",
        ),
        pytest.param(
            prepare_experts,
            "per-expert",
            put(f"{EXPERT_1}.up_proj.lora_B.weight", 3.5),
            ["deltas", "round_trip"],
            f"{EXPERT_1}.up_proj.lora_B.weight",
            id="experts: one number",
        ),
        pytest.param(
            prepare_blocks,
            "per-expert",
            swap(f"{EXPERT_1}.gate_proj.lora_B.weight", f"{EXPERT_1}.up_proj.lora_B.weight"),
            ["deltas", "round_trip"],
            f"{INNER}_B.weight",
            id="block-diagonal: gate and up exchanged",
        ),
        pytest.param(
            prepare_blocks,
            "per-expert",
            put(f"{EXPERT_1}.up_proj.lora_A.weight", 3.5),
            ["deltas", "round_trip"],
            f"{INNER}_A.weight",
            id="block-diagonal: one number of up's own A",
        ),
        pytest.param(
            prepare_cubes,
            "per-expert",
            put(f"{EXPERT_1}.gate_proj.lora_A.weight", 3.5),
            ["deltas", "round_trip"],
            f"{PREFIX}.1.mlp.experts.w1.lora_A.weight",
            id="3-d: one copy of a shared A",
        ),
        pytest.param(
            prepare_cubes,
            "stacked",
            exchange_columns(f"{OUTER}_B.weight", range(0, 4), range(4, 8)),
            ["deltas", "round_trip"],
            f"{PREFIX}.1.mlp.experts.w2.lora_B.weight",
            id="3-d: components exchanged",
        ),
        pytest.param(
            prepare_down,
            "per-expert",
            put(f"{EXPERT_1}.up_proj.lora_B.weight", 1e-30),
            ["zeros"],
            f"{EXPERT_1}.up_proj.lora_B.weight",
            id="one-sided: a zero pair that is not zero",
        ),
        pytest.param(
            prepare_down,
            "stacked",
            put(f"{INNER}_A.weight", 1e-30),
            ["zeros"],
            f"{INNER}_A.weight",
            id="one-sided: a stacked zero pair that is not zero",
        ),
    ],
)
def test_faults_of_every_form_and_target_are_found(
    tmp_path: Path,
    prepare_source: Prepare,
    format: TargetFormat,
    change: Callable[[Tensors], Any],
    failures: list[str],
    where: str,
) -> None:
    format = TargetFormat(format)
    found = prepare_source(tmp_path)
    convert_adapter(found.files, plan_conversion(found.layout, format), tmp_path / "made")
    assert check_conversion(found.files, tmp_path / "made", found.layout, format).passed
    weights = tmp_path / "made" / "adapter_model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights)
    report = check_conversion(found.files, tmp_path / "made", found.layout, format)
    assert failed(report) == failures
    # What `deltas` names is a pair, not a tensor: the others name the tensor.
    named = [
        check.where for check in report.checks if not check.passed and check.name not in ("gate_up", "deltas")
    ]
    assert named[0] == where


@pytest.mark.parametrize("format", TargetFormat)
def test_numbers_that_the_source_has_between_gate_and_up_are_not_dropped(
    tmp_path: Path, format: TargetFormat
) -> None:
    """Block-diagonal by mistake: what a per-expert output leaves out must be zero in the source."""
    tensors = encode(stack_blocks(Separate()))
    tensors[f"{PREFIX}.0.mlp.experts.base_layer.lora_B.weight"][-1, 0] = 5
    found = look(tmp_path / "source", tensors, **DOUBLED)
    assert not found.layout.block_diagonal
    mistaken = replace(found.layout, block_diagonal=True)
    convert_adapter(found.files, plan_conversion(mistaken, format), tmp_path / "made")
    report = check_conversion(found.files, tmp_path / "made", mistaken, format)
    if format is TargetFormat.STACKED:
        # Every number is kept, and served: which is more than the mistaken reading says.
        assert failed(report) == ["deltas"]
    else:
        assert failed(report) == ["round_trip"]
        [check] = [check for check in report.checks if not check.passed]
        assert check.where == f"{PREFIX}.0.mlp.experts.base_layer.lora_B.weight"


@pytest.mark.parametrize("format", TargetFormat)
@pytest.mark.parametrize("form", ["stacked", "per-expert"])
def test_gate_loaded_as_up_is_found(tmp_path: Path, form: str, format: TargetFormat) -> None:
    """unsloth-zoo#941: equal shapes, so nothing fails by itself; here up is the negative of gate."""
    logical, meant = Logical(), Separate()
    for layer in range(LAYERS):
        factor = logical.b[layer, "gate_up_proj"]
        factor[:, INTER:] = -factor[:, :INTER]
        meant.a[layer, "up_proj"] = meant.a[layer, "gate_proj"]
        meant.b[layer, "up_proj"] = -meant.b[layer, "gate_proj"]
    found = look(tmp_path / "source", encode(logical) if form == "stacked" else encode_experts(meant))
    plan = plan_conversion(found.layout, format)
    convert_adapter(found.files, plan, tmp_path / "right")
    assert check_conversion(found.files, tmp_path / "right", found.layout, format).passed
    blocks = tuple(map(exchange_gate_and_up, plan.blocks))
    metadata = SLOTS_METADATA if format is TargetFormat.SLOTS else PLAIN_METADATA
    header = format_header((block.group for block in blocks), metadata)
    exchanged = replace(plan, blocks=blocks, header=header)
    convert_adapter(found.files, exchanged, tmp_path / "wrong")
    assert (tmp_path / "wrong" / "adapter_config.json").read_bytes() == (
        tmp_path / "right" / "adapter_config.json"
    ).read_bytes()
    assert failed(check_conversion(found.files, tmp_path / "wrong", found.layout, format)) == [
        "gate_up",
        "deltas",
        "round_trip",
    ]


def exchange_gate_and_up(block: PlannedBlock) -> PlannedBlock:
    """The block of a converter that takes up for gate."""
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    if ".experts.gate_proj." in block.group.names[0] or ".experts.up_proj." in block.group.names[0]:
        name = re.sub("gate_proj|up_proj", lambda match: names[match[0]], block.group.names[0])
        return replace(block, group=replace(block.group, names=(name,)))
    if len(block.group.names) > 1:
        exchanged_names = (
            re.sub("gate_proj|up_proj", lambda match: names[match[0]], name) for name in block.group.names
        )
        return replace(block, group=replace(block.group, names=tuple(exchanged_names)))
    if len(block.pieces) == 2:
        first, second = block.pieces
        return replace(block, pieces=(replace(first, place=second.place), replace(second, place=first.place)))
    [piece] = block.pieces
    if "base_layer.lora_B" not in block.group.names[0]:
        return block
    rows, half = piece.view.shape[0], piece.view.shape[0] // 2
    place = whole(*piece.view.shape)
    lower, upper = (0, half), (half, rows)
    exchanged = [
        Piece(piece.sources, piece.view.narrow(0, *source), place.narrow(0, *target))
        for source, target in ((lower, upper), (upper, lower))
    ]
    return replace(block, pieces=tuple(exchanged))


@pytest.mark.parametrize("format", BIT_FOR_BIT)
def test_scaling_is_checked_module_by_module(tmp_path: Path, format: TargetFormat) -> None:
    """vllm-omni#6565: one module that a pattern should reach and does not."""
    logical = Logical(rank=4)
    found = look(
        tmp_path / "source",
        encode(logical) | attention(rank=4),
        r=4,
        alpha_pattern={"1.mlp.experts.down_proj": 3},
    )
    convert_adapter(found.files, plan_conversion(found.layout, format), tmp_path / "made")
    assert check_conversion(found.files, tmp_path / "made", found.layout, format).passed
    path = tmp_path / "made" / "adapter_config.json"
    config = json.loads(path.read_text("utf-8"))
    assert config.pop("alpha_pattern")
    path.write_text(json.dumps(config), "utf-8")
    report = check_conversion(found.files, tmp_path / "made", found.layout, format)
    assert failed(report) == ["scaling", "deltas"]
    expert = "" if format is TargetFormat.STACKED else ".0"
    with pytest.raises(DeltaMismatch, match=r"found scaling 1.5 at rank 4, source 0.75 at rank 4") as caught:
        raise_for(report)
    assert caught.value.where == f"model.layers.1.mlp.experts{expert}.down_proj"
