"""Checking a conversion: every fault is found, named, and becomes its own error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
    EXPERTS,
    HIDDEN,
    INTER,
    LABEL,
    LAYERS,
    PREFIX,
    RANK,
    Logical,
    attention,
    encode,
    make_base,
    save_adapter,
)
from safetensors.torch import load_file, save_file

from tasks.lora.check import check_conversion
from tasks.lora.checks import CheckName, CheckReport, raise_for
from tasks.lora.convert import convert_adapter
from tasks.lora.errors import (
    AdapterError,
    CorruptFile,
    DeltaMismatch,
    ExpertsUntrained,
    MissingTensor,
    NonFinite,
)
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.plan import plan_control, plan_conversion

Tensors = dict[str, torch.Tensor]
EXPERT_0, EXPERT_1 = (f"{PREFIX}.1.mlp.experts.{expert}" for expert in (0, 1))


def prepare(
    tmp_path: Path, *, packing: str = "rank_major", orientation: str = "standard", **config: Any
) -> Inspection:
    tensors = encode(Logical(), packing=packing, orientation=orientation) | attention()
    source = save_adapter(tmp_path / "source", tensors, **config)
    return inspect_adapter(source, make_base(), label=LABEL, forced=Packing(packing))


def check(found: Inspection, converted: Path, change: Callable[[Tensors], Any] | None = None) -> CheckReport:
    """Convert, change what was written, check."""
    convert_adapter(found.files, plan_conversion(found.layout), converted)
    if change is not None:
        weights = converted / "adapter_model.safetensors"
        tensors = load_file(weights)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights)
    return check_conversion(found.files, converted, found.layout)


def failed(report: CheckReport) -> list[str]:
    return [check.name for check in report.checks if not check.passed]


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("orientation", ["standard", "swapped"])
def test_right_conversion_passes_with_its_figures(tmp_path: Path, packing: str, orientation: str) -> None:
    report = check(prepare(tmp_path, packing=packing, orientation=orientation), tmp_path / "made")
    assert report.passed
    raise_for(report)
    assert [check.name for check in report.checks] == [name for name in CheckName if name != "merged"]
    figures = {check.name: dict(check.figures) for check in report.checks}
    assert figures["coverage"]["pairs"] == LAYERS * EXPERTS * 3
    numbers = LAYERS * (
        3 * EXPERTS * RANK * (HIDDEN + INTER) + RANK * (10 + 15 + 2 * (10 + 5) + 15 + 10 + 10 + 4)
    )
    assert figures["size"]["bytes"] == 4 * numbers
    assert figures["trained"] == {"routed_experts": 1.0, "attention": 1.0, "router": 1.0, "still_layers": 0}
    assert figures["round_trip"] == {"tensors": 28, "compared": 28, "differing": 0}
    modules = LAYERS * (3 * EXPERTS + 5)
    assert figures["scaling"] == {
        "scaling": 2.0,
        "expected": 2.0,
        "modules": modules,
        "differing": 0,
        "largest_relative_difference": 0,
    }
    assert figures["zeros"] == {"nonzero": 0}


def swap(first: str, second: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def put(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][0, 0] = value

    return change


def zero_b(tensors: Tensors) -> None:
    for name in tensors:
        if ".experts." in name and "lora_B" in name:
            tensors[name].zero_()


@pytest.mark.parametrize(
    ("change", "failures", "error", "where"),
    [
        pytest.param(
            lambda tensors: tensors.pop(f"{EXPERT_1}.up_proj.lora_B.weight"),
            ["coverage", "size", "deltas", "round_trip"],
            MissingTensor,
            f"{EXPERT_1}.up_proj.lora_B.weight",
            id="an expert is missing",
        ),
        pytest.param(
            lambda tensors: tensors.update(
                {f"{PREFIX}.2.mlp.experts.0.up_proj.lora_A.weight": torch.ones(RANK, HIDDEN)}
            ),
            ["coverage", "size"],
            MissingTensor,
            f"{PREFIX}.2.mlp.experts.0.up_proj.lora_A.weight",
            id="a layer too many",
        ),
        pytest.param(
            lambda tensors: tensors.update(
                {f"{EXPERT_1}.up_proj.lora_A.weight": tensors[f"{EXPERT_1}.up_proj.lora_A.weight"][:, :-1]}
            ),
            ["coverage", "size", "deltas", "round_trip"],
            MissingTensor,
            f"{EXPERT_1}.up_proj.lora_A.weight",
            id="a narrower tensor",
        ),
        pytest.param(
            # unsloth-zoo#941: gate and up have equal shapes.
            swap(f"{EXPERT_1}.gate_proj.lora_B.weight", f"{EXPERT_1}.up_proj.lora_B.weight"),
            ["gate_up", "deltas", "round_trip"],
            DeltaMismatch,
            f"{PREFIX}.1.mlp.experts.base_layer.lora_B.weight",
            id="gate and up exchanged",
        ),
        pytest.param(
            swap(f"{EXPERT_1}.down_proj.lora_A.weight", f"{PREFIX}.1.mlp.experts.2.down_proj.lora_A.weight"),
            ["deltas", "round_trip"],
            DeltaMismatch,
            f"{PREFIX}.1.mlp.experts.lora_A.weight",
            id="two experts exchanged",
        ),
        pytest.param(
            swap(f"{EXPERT_1}.down_proj.lora_B.weight", f"{PREFIX}.0.mlp.experts.1.down_proj.lora_B.weight"),
            ["deltas", "round_trip"],
            DeltaMismatch,
            f"{PREFIX}.0.mlp.experts.lora_B.weight",
            id="two layers exchanged",
        ),
        pytest.param(
            put(f"{EXPERT_1}.up_proj.lora_A.weight", 3.5),
            ["shared_a", "deltas"],
            DeltaMismatch,
            "layer 1 gate_up_proj",
            id="another A for up",
        ),
        pytest.param(
            put(f"{PREFIX}.0.self_attn.q_proj.lora_A.weight", 3.5),
            ["deltas", "round_trip"],
            DeltaMismatch,
            f"{PREFIX}.0.self_attn.q_proj.lora_A.weight",
            id="one number of attention",
        ),
        pytest.param(
            put(f"{EXPERT_1}.down_proj.lora_B.weight", float("nan")),
            ["finite", "deltas", "round_trip"],
            NonFinite,
            f"{EXPERT_1}.down_proj.lora_B.weight",
            id="nan",
        ),
        pytest.param(
            put(f"{PREFIX}.1.mlp.gate.lora_A.weight", float("-inf")),
            ["finite", "deltas", "round_trip"],
            NonFinite,
            f"{PREFIX}.1.mlp.gate.lora_A.weight",
            id="infinity",
        ),
        pytest.param(
            zero_b,
            ["trained", "deltas", "round_trip"],
            ExpertsUntrained,
            "check trained",
            id="every expert's B zero",
        ),
    ],
)
def test_faults_are_found(
    tmp_path: Path,
    change: Callable[[Tensors], Any],
    failures: list[str],
    error: type[AdapterError],
    where: str,
) -> None:
    report = check(prepare(tmp_path), tmp_path / "made", change)
    assert failed(report) == failures
    assert not report.passed
    with pytest.raises(error) as caught:
        raise_for(report)
    assert caught.value.adapter == LABEL
    # The same fault, seen by several checks; where the tensor of the file is, only the last of them says.
    assert where in [check.where or f"check {check.name}" for check in report.checks if not check.passed]
    assert caught.value.expected
    assert caught.value.found
    assert caught.value.advice


def test_nan_of_the_source_never_makes_a_comparison_pass(tmp_path: Path) -> None:
    """miles#2733, diffusers#5316: NaN != NaN must not hide a difference, nor show one that is not there."""
    found = prepare(tmp_path)
    weights = tmp_path / "source" / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors[f"{PREFIX}.0.mlp.experts.lora_B.weight"][2, 3] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    report = check(found, tmp_path / "made")
    assert failed(report) == ["finite"]
    assert "1 NaN or infinite values in 1 tensors" in next(c.detail for c in report.checks if not c.passed)


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("orientation", ["standard", "swapped"])
def test_square_factor_read_the_other_way_is_found(tmp_path: Path, packing: str, orientation: str) -> None:
    """With E * r = H a transposed factor has the same shape; the conversion that read it so must not pass."""
    base = make_base(hidden_size=32, moe_intermediate_size=12, num_local_experts=8)
    tensors = encode(
        Logical(rank=4, experts=8, hidden=32, inter=12), packing=packing, orientation=orientation
    )
    square = [name for name, tensor in tensors.items() if tensor.shape == (32, 32)]
    assert len(square) == 2 * LAYERS
    source = save_adapter(tmp_path / "source", tensors, r=4)
    found = inspect_adapter(source, base, label=LABEL, forced=Packing(packing))
    for number, name in enumerate(square):
        turned = tensors | {name: tensors[name].T.contiguous()}
        other = save_adapter(tmp_path / f"turned-{number}", turned, r=4)
        misread = inspect_adapter(other, base, label=LABEL, forced=Packing(packing))
        convert_adapter(misread.files, plan_conversion(misread.layout), tmp_path / f"made-{number}")
        report = check_conversion(found.files, tmp_path / f"made-{number}", found.layout)
        assert failed(report) == ["deltas", "round_trip"]
        assert next(check.where for check in report.checks if check.name == "round_trip") == name


def test_control_fails_the_round_trip(tmp_path: Path) -> None:
    """The check is not blind to the packing: the other reading does not give the source back."""
    found = prepare(tmp_path)
    convert_adapter(found.files, plan_control(found.layout), tmp_path / "control")
    assert failed(check_conversion(found.files, tmp_path / "control", found.layout)) == [
        "deltas",
        "round_trip",
    ]


@pytest.mark.parametrize("field", ["lora_alpha", "use_rslora"])
def test_other_scaling_is_found(tmp_path: Path, field: str) -> None:
    found = prepare(tmp_path)
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    path = tmp_path / "made" / "adapter_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | {field: 12 if field == "lora_alpha" else True}), "utf-8")
    report = check_conversion(found.files, tmp_path / "made", found.layout)
    assert failed(report) == ["scaling", "deltas"]
    with pytest.raises(DeltaMismatch, match="source 2 at rank 3"):
        raise_for(report)


def test_truncated_output_is_a_corrupt_file(tmp_path: Path) -> None:
    found = prepare(tmp_path)
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    path = tmp_path / "made" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFile):
        check_conversion(found.files, tmp_path / "made", found.layout)
