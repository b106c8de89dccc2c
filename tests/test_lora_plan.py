"""The plan of a conversion: golden texts, canonical order, and no tensor library needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lora_builders import EXPERTS, LABEL, LAYERS, Logical, attention, encode, make_base, save_adapter

from tasks.lora.inspect import inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.names import Factor
from tasks.lora.plan import ConversionPlan, PlanKind, plan_control, plan_conversion

GOLDEN = Path(__file__).parent / "golden"


def plan(
    tmp_path: Path, tensors: dict[str, torch.Tensor], *, forced: Packing | None = None, **config: object
) -> ConversionPlan:
    source = save_adapter(tmp_path / "source", tensors, **config)
    return plan_conversion(
        inspect_adapter(source, make_base(), label=LABEL, forced=forced, header_only=True).layout
    )


def router() -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in attention(layers=(1,)).items() if "mlp.gate" in name}


@pytest.mark.parametrize(
    ("name", "packing", "orientation", "control"),
    [
        ("plan_rank_major_standard", "rank_major", "standard", False),
        ("plan_grouped_swapped", "grouped_by_expert", "swapped", False),
        ("plan_grouped_swapped_control", "grouped_by_expert", "swapped", True),
    ],
)
def test_golden_plan(tmp_path: Path, name: str, packing: str, orientation: str, control: bool) -> None:
    """The file is read and judged by people; a change of it is a change of what is written."""
    tensors = encode(Logical(), packing=packing, orientation=orientation) | router()
    found = plan(tmp_path, tensors, forced=Packing(packing))
    found = plan_control(found) if control else found
    assert str(found) + "\n" == (GOLDEN / f"{name}.txt").read_text("utf-8")


@pytest.mark.parametrize("orientation", ["standard", "swapped"])
def test_golden_plan_of_displaced_experts(tmp_path: Path, orientation: str) -> None:
    found = plan(tmp_path, encode(Logical(rank=1), orientation=orientation), r=1)
    control = plan_control(found)
    assert control.kind is PlanKind.DISPLACED_EXPERTS
    moved = [
        (old.take.expert, new.take.expert)
        for old, new in zip(found.tensors, control.tensors, strict=True)
        if old.take and new.take and old.take.factor is Factor.B
    ]
    assert set(moved) == {(e, (e - 1) % EXPERTS) for e in range(EXPERTS)}
    assert all(
        old == new
        for old, new in zip(found.tensors, control.tensors, strict=True)
        if old.take and old.take.factor is Factor.A
    )


def test_order_does_not_depend_on_the_source(tmp_path: Path) -> None:
    """Layer 10 comes after layer 2, whatever the file's order; wider dtypes come first."""
    tensors = encode(Logical(layers=tuple(range(11)), dtype=torch.bfloat16))
    tensors |= {name: tensor for name, tensor in attention(layers=(3,)).items() if "q_proj" in name}
    source = save_adapter(tmp_path / "source", tensors)
    base = make_base(num_hidden_layers=11)
    found = plan_conversion(inspect_adapter(source, base, label=LABEL, header_only=True).layout)
    names = [tensor.spec.name for tensor in found.tensors]
    assert [name.split("self_attn.")[1] for name in names[:2]] == [
        "q_proj.lora_A.weight",
        "q_proj.lora_B.weight",
    ]
    layers = [int(name.split(".")[4]) for name in names[2:]]
    assert layers == sorted(layers)
    assert found.dtype == "BF16,F32"


def test_every_expert_once_and_every_source_read_once(tmp_path: Path) -> None:
    found = plan(tmp_path, encode(Logical()) | attention())
    names = [tensor.spec.name for tensor in found.tensors]
    assert len(names) == len(set(names)) == LAYERS * (EXPERTS * 3 * 2 + 10)
    assert found.pairs == LAYERS * EXPERTS * 3
    sources = [tensor.source.name for tensor in found.tensors]
    runs = [name for place, name in enumerate(sources) if place == 0 or sources[place - 1] != name]
    assert len(runs) == len(set(runs))


def test_planning_needs_no_torch() -> None:
    code = "import sys; import tasks.lora.plan, tasks.lora.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
