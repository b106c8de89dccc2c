"""The plan of a conversion: golden texts, canonical order, and no tensor library needed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lora_builders import (
    EXPERTS,
    LABEL,
    LAYERS,
    Logical,
    Separate,
    attention,
    encode,
    encode_alone,
    encode_cubes,
    encode_experts,
    make_base,
    save_adapter,
)

from tasks.lora.inspect import inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.plan import PlanKind, plan_control, plan_conversion
from tasks.lora.rearrange import rearrange
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat
from tasks.lora.views import View, whole

GOLDEN = Path(__file__).parent / "golden"


def look(
    tmp_path: Path, tensors: dict[str, torch.Tensor], *, forced: Packing | None = None, **config: Any
) -> AdapterLayout:
    source = save_adapter(tmp_path / "source", tensors, **config)
    return inspect_adapter(source, make_base(), label=LABEL, forced=forced, header_only=True).layout


def router() -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in attention(layers=(1,)).items() if "mlp.gate" in name}


@pytest.mark.parametrize(
    ("form", "format", "control"),
    [
        ("grouped_swapped", "per-expert", False),
        ("grouped_swapped", "per-expert", True),
        ("rank_major_standard", "stacked", False),
        ("experts", "stacked", False),
        ("cubes", "per-expert", True),
        ("down_alone", "per-expert", False),
    ],
)
def test_golden_plan(tmp_path: Path, form: str, format: str, control: bool) -> None:
    """The file is read and judged by people; a change of it is a change of what is written."""
    shared = Separate(shared=(("gate_proj", "A"), ("up_proj", "A"), ("down_proj", "B")))
    tensors = {
        "rank_major_standard": encode(Logical()),
        "grouped_swapped": encode(Logical(), packing="grouped_by_expert", orientation="swapped"),
        "down_alone": encode_alone(Logical(), "down_proj"),
        "experts": encode_experts(Separate()),
        "cubes": encode_cubes(shared),
    }[form]
    forced = Packing.GROUPED_BY_EXPERT if "grouped" in form else Packing.RANK_MAJOR
    targets = ["mlp.experts.down_proj"] if form == "down_alone" else None
    layout = look(tmp_path, tensors | router(), forced=forced, target_parameters=targets)
    found = (plan_control if control else plan_conversion)(layout, TargetFormat(format))
    name = f"plan_{form}_{format}{'_control' if control else ''}.txt".replace("-", "_")
    assert str(found) + "\n" == (GOLDEN / name).read_text("utf-8")


def test_rank_1_has_no_other_packing(tmp_path: Path) -> None:
    """Both packings are one: the control moves every expert's B one place on."""
    layout = look(tmp_path, encode(Logical(rank=1)), r=1)
    control = plan_control(layout)
    assert control.kind is PlanKind.DISPLACED_EXPERTS
    assert control.predicted_bytes == plan_conversion(layout).predicted_bytes


def test_one_pair_above_rank_1_has_another_packing(tmp_path: Path) -> None:
    """Then the control is what the other reading would give, so that it can stand for it."""
    logical, wider = Logical(rank=1), Logical(rank=2)
    for layer in logical.layers:
        logical.a[layer, "down_proj"], logical.b[layer, "down_proj"] = (
            wider.a[layer, "down_proj"],
            wider.b[layer, "down_proj"],
        )
    config: dict[str, Any] = {"r": 1, "rank_pattern": {"down_proj": 2}}
    layout = look(tmp_path, encode(logical), forced=Packing.RANK_MAJOR, **config)
    other = look(tmp_path, encode(logical), forced=Packing.GROUPED_BY_EXPERT, **config)
    for format in TargetFormat:
        control, misread = plan_control(layout, format), plan_conversion(other, format)
        assert control.kind is PlanKind.OTHER_PACKING
        assert control.blocks == misread.blocks
        assert control.blocks != plan_conversion(layout, format).blocks


def test_layers_of_different_packings_are_each_reversed(tmp_path: Path) -> None:
    layout = look(tmp_path, encode(Logical()), forced=Packing.RANK_MAJOR)
    mixed = replace(
        layout,
        packing=tuple(
            replace(item, value=None, by_layer=((0, Packing.RANK_MAJOR), (1, Packing.GROUPED_BY_EXPERT)))
            for item in layout.packing
        ),
    )
    grouped = look(tmp_path, encode(Logical()), forced=Packing.GROUPED_BY_EXPERT)
    plans = [plan_conversion(layout), plan_conversion(grouped)]
    for found, first, second in ((plan_conversion(mixed), *plans), (plan_control(mixed), *reversed(plans))):
        half = len(found.blocks) // LAYERS
        assert found.blocks == first.blocks[:half] + second.blocks[half:]


def test_order_does_not_depend_on_the_source(tmp_path: Path) -> None:
    """Layer 10 comes after layer 2, whatever the file's order; wider dtypes come first."""
    tensors = encode(Logical(layers=tuple(range(11)), dtype=torch.bfloat16))
    tensors |= {name: tensor for name, tensor in attention(layers=(3,)).items() if "q_proj" in name}
    source = save_adapter(tmp_path / "source", tensors)
    base = make_base(num_hidden_layers=11)
    found = plan_conversion(inspect_adapter(source, base, label=LABEL, header_only=True).layout)
    names = [tensor.name for tensor in found.tensors]
    assert [name.split("self_attn.")[1] for name in names[:2]] == [
        "q_proj.lora_A.weight",
        "q_proj.lora_B.weight",
    ]
    layers = [int(name.split(".")[4]) for name in names[2:]]
    assert layers == sorted(layers)
    assert found.dtype == "BF16,F32"


@pytest.mark.parametrize("format", TargetFormat)
@pytest.mark.parametrize("form", ["stacked", "experts", "cubes"])
def test_every_expert_once_and_every_source_read_once(
    tmp_path: Path, form: str, format: TargetFormat
) -> None:
    meant = Separate()
    forms = {
        "stacked": encode(Logical()),
        "experts": encode_experts(meant),
        "cubes": encode_cubes(meant),
    }
    tensors = forms[form] | attention()
    found = plan_conversion(look(tmp_path, tensors), format)
    names = [tensor.name for tensor in found.tensors]
    assert len(names) == len(set(names))
    experts = {"per-expert": EXPERTS * 3 * 2, "stacked": 4, "slots": 3 * 2}
    assert len(names) == LAYERS * (experts[format] + 10)
    assert found.pairs == LAYERS * EXPERTS * 3
    reads = [piece.sources for block in found.blocks for piece in block.pieces]
    runs = [sources for place, sources in enumerate(reads) if place == 0 or reads[place - 1] != sources]
    read = [entry.name for sources in runs for entry in sources]
    assert sorted(read) == sorted(tensors)


def test_planning_needs_no_torch() -> None:
    code = "import sys; import tasks.lora.plan, tasks.lora.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Views


@st.composite
def views(draw: st.DrawFn) -> View:
    """A view of row-major memory, its axes permuted and cut; axes of one element included."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    view = whole(*shape).permute(*draw(st.permutations(range(len(shape)))))
    for axis, size in enumerate(view.shape):
        begin = draw(st.integers(0, size - 1))
        view = view.narrow(axis, begin, draw(st.integers(begin + 1, size)))
    return view


def list_places(view: View) -> list[int]:
    """Where each element stands, in the order of the view."""
    return [
        view.offset + sum(index * stride for index, stride in zip(indices, view.strides, strict=True))
        for indices in itertools.product(*map(range, view.shape))
    ]


@given(views())
def test_merged_views_are_the_same_elements_in_the_same_order(view: View) -> None:
    merged = view.merged()
    assert list_places(merged) == list_places(view)
    assert merged.size == view.size == len(list_places(view))
    assert len(merged.shape) <= len(view.shape)
    assert 1 not in merged.shape


@given(views())
def test_rearranging_moves_every_element_to_its_place(view: View) -> None:
    source = torch.arange(1, max(list_places(view)) + 2, dtype=torch.int32)
    out, scratch = torch.zeros(view.size, dtype=torch.int32), torch.zeros(view.size, dtype=torch.int32)
    rearrange(source, view, out, scratch)
    assert out.tolist() == [source[place].item() for place in list_places(view)]


def test_whole_views_are_row_major() -> None:
    assert list_places(whole(2, 3, 4)) == list(range(24))
    assert whole(2, 3, 4).merged() == View(0, (24,), (1,))
