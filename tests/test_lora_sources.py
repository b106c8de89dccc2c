"""Every form of source to both targets: what comes out, spelled out by plain loops, and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
    ALPHA,
    BIT_FOR_BIT,
    DOUBLED,
    ENCODINGS,
    EXPERTS,
    HIDDEN,
    INTER,
    LAYERS,
    NUMBERED,
    PROJECTIONS,
    RANK,
    Logical,
    Separate,
    assert_equal,
    attention,
    encode,
    encode_alone,
    encode_cubes,
    encode_experts,
    expert_name,
    load,
    look,
    spell_out,
    stack_blocks,
    stacked_name,
)

from tasks.lora.check import check_conversion
from tasks.lora.convert import convert_adapter, digest_adapter
from tasks.lora.plan import PlanKind, plan_control, plan_conversion
from tasks.lora.sources import SourceForm
from tasks.lora.target import TargetFormat

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A source, and what both targets must hold of it."""

    tensors: Tensors
    experts: Tensors
    stacked: Tensors
    form: SourceForm
    config: dict[str, Any]
    warning: str = ""


def zeros(shapes: dict[str, tuple[int, int]]) -> Tensors:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def absent_experts(*names: str) -> Tensors:
    """Zero pairs of every expert, in their own shapes."""
    shapes = {}
    for layer, e, name in itertools.product(range(LAYERS), range(EXPERTS), names):
        inside, out = (INTER, HIDDEN) if name == "down_proj" else (HIDDEN, INTER)
        shapes[expert_name(layer, e, name, "A")] = (RANK, inside)
        shapes[expert_name(layer, e, name, "B")] = (out, RANK)
    return zeros(shapes)


def absent_stacked(parameter: str) -> Tensors:
    inside, out = (INTER, HIDDEN) if parameter == "down_proj" else (HIDDEN, 2 * INTER)
    shapes = {}
    for layer in range(LAYERS):
        shapes[stacked_name(layer, parameter, "A")] = (EXPERTS * RANK, inside)
        shapes[stacked_name(layer, parameter, "B")] = (out, EXPERTS * RANK)
    return zeros(shapes)


def pick(tensors: Tensors, parameter: str) -> Tensors:
    """One parameter's stacked pairs."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if ("base_layer" in name) is (parameter == "gate_up_proj")
    }


def only(meant: Separate, *names: str) -> Separate:
    """The same adapter without its other projections."""
    part = copy.copy(meant)
    part.a = {key: value for key, value in meant.a.items() if key[1] in names}
    part.b = {key: value for key, value in meant.b.items() if key[1] in names}
    return part


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    logical, meant, uneven = Logical(), Separate(), Separate({"gate_proj": 2, "up_proj": 4, "down_proj": 5})
    for packing, orientation in ENCODINGS:
        style = {"packing": packing, "orientation": orientation}
        stated = {"packing": packing}
        found[f"stacked {packing} {orientation}"] = Case(
            encode(logical, **style), spell_out(logical), encode(logical), SourceForm.STACKED, stated
        )
        found[f"block-diagonal {packing} {orientation}"] = Case(
            encode(stack_blocks(meant), **style),
            encode_experts(meant),
            encode(stack_blocks(meant)),
            SourceForm.STACKED,
            stated | DOUBLED,
        )
        found[f"block-diagonal alone {packing} {orientation}"] = Case(
            encode_alone(stack_blocks(meant), "gate_up_proj", **style),
            encode_experts(only(meant, "gate_proj", "up_proj")) | absent_experts("down_proj"),
            pick(encode(stack_blocks(meant)), "gate_up_proj") | absent_stacked("down_proj"),
            SourceForm.STACKED,
            stated | DOUBLED,
            "down_proj were not trained, only gate_proj and up_proj",
        )
        for parameter, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            others = [name for name in PROJECTIONS if name not in names]
            kept = [name for name in spell_out(logical) if any(f".{own}." in name for own in names)]
            other = "down_proj" if parameter == "gate_up_proj" else "gate_up_proj"
            found[f"{parameter} alone {packing} {orientation}"] = Case(
                encode_alone(logical, parameter, **style),
                {name: spell_out(logical)[name] for name in kept} | absent_experts(*others),
                pick(encode(logical), parameter) | absent_stacked(other),
                SourceForm.STACKED,
                stated | {"target_parameters": [f"mlp.experts.{parameter}"]},
                f"{' and '.join(others)} were not trained, only {' and '.join(names)}",
            )
    for name, encoder in (
        ("per-expert", encode_experts),
        ("3-d numbered", encode_cubes),
        ("3-d named", lambda meant: encode_cubes(meant, numbered=False)),
    ):
        form = SourceForm.PER_EXPERT if name == "per-expert" else SourceForm.CUBE
        found[name] = Case(encoder(meant), encode_experts(meant), encode(stack_blocks(meant)), form, {})
        spelling = NUMBERED if "numbered" in name else {own: own for own in PROJECTIONS}
        ranks = {spelling[own]: rank for own, rank in uneven.ranks.items()}
        patterns = {"r": 5, "rank_pattern": ranks, "alpha_pattern": ranks}
        found[f"{name} of three ranks"] = Case(
            encoder(uneven), encode_experts(uneven), encode(stack_blocks(uneven)), form, patterns
        )
        gate_and_up = only(meant, "gate_proj", "up_proj")
        found[f"{name} without down"] = Case(
            encoder(gate_and_up),
            encode_experts(gate_and_up) | absent_experts("down_proj"),
            pick(encode(stack_blocks(meant)), "gate_up_proj") | absent_stacked("down_proj"),
            form,
            {},
            "down_proj were not trained, only gate_proj and up_proj",
        )
        found[f"{name} of down alone"] = Case(
            encoder(only(meant, "down_proj")),
            encode_experts(only(meant, "down_proj")) | absent_experts("gate_proj", "up_proj"),
            pick(encode(stack_blocks(meant)), "down_proj") | absent_stacked("gate_up_proj"),
            form,
            {},
            "gate_proj and up_proj were not trained, only down_proj",
        )
        up_and_down = only(meant, "up_proj", "down_proj")
        found[f"{name} without gate"] = Case(
            encoder(up_and_down),
            encode_experts(up_and_down) | absent_experts("gate_proj"),
            pick(encode(stack_blocks(meant)), "down_proj") | up_alone(meant),
            form,
            {},
            "gate_proj were not trained, only up_proj and down_proj",
        )
    for factors in (("A",), ("B",), ("A", "B")):
        own = Separate(shared=tuple((name, factor) for name in PROJECTIONS[:2] for factor in factors))
        found[f"3-d with shared {'and'.join(factors)}"] = Case(
            encode_cubes(own), encode_experts(own), encode(stack_blocks(own)), SourceForm.CUBE, {}
        )
    return found


def up_alone(meant: Separate) -> Tensors:
    """A stacked gate_up whose gate rows are zero: up needs no components beside gate's."""
    tensors = absent_stacked("gate_up_proj")
    for layer, e in itertools.product(range(LAYERS), range(EXPERTS)):
        a, b = meant.of(layer, "up_proj", e)
        for j in range(RANK):
            tensors[stacked_name(layer, "gate_up_proj", "A")][e * RANK + j] = a[j]
            tensors[stacked_name(layer, "gate_up_proj", "B")][INTER:, j * EXPERTS + e] = b[:, j]
    return tensors


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_every_form_becomes_both_targets(tmp_path: Path, name: str) -> None:
    """unsloth#6930, Automodel#3592, sglang#32406, Megatron-Bridge#5588, SkyRL#1852: whatever the form, one meaning."""
    case = CASES[name]
    others = attention(rank=case.config.get("r", RANK))
    found = look(tmp_path / "source", case.tensors | others, **case.config)
    assert found.layout.form is case.form
    assert found.layout.block_diagonal is name.startswith("block")
    said = [warning for warning in found.warnings if "not trained, only" in warning]
    assert len(said) == bool(case.warning)
    assert case.warning in "".join(said)
    for format, expected in (
        (TargetFormat.PER_EXPERT, case.experts),
        (TargetFormat.STACKED, case.stacked),
    ):
        plan = plan_conversion(found.layout, format)
        made = convert_adapter(found.files, plan, tmp_path / format)
        assert (made.format, made.pairs) == (format, LAYERS * EXPERTS * 3)
        assert_equal(load(tmp_path / format), expected | others)
        report = check_conversion(found.files, tmp_path / format, found.layout, format)
        assert report.passed, [check for check in report.checks if not check.passed]
        assert digest_adapter(found.files, plan) == made.files


@pytest.mark.parametrize(("name", "format"), list(zip(CASES, itertools.cycle(BIT_FOR_BIT), strict=False)))
def test_every_control_gives_every_trained_expert_another_delta(
    tmp_path: Path, name: str, format: TargetFormat
) -> None:
    case = CASES[name]
    found = look(tmp_path / "source", case.tensors, **case.config)
    plan = plan_control(found.layout, format)
    displaced = case.form is not SourceForm.STACKED
    assert plan.kind is (PlanKind.DISPLACED_EXPERTS if displaced else PlanKind.OTHER_PACKING)
    convert_adapter(found.files, plan, tmp_path / "control")
    made = deltas(load(tmp_path / "control"))
    right = deltas(case.experts)
    for key, delta in right.items():
        same = torch.equal(made[key], delta)
        untrained = not delta.any()
        shared = name.endswith("AandB") and "down_proj" not in key
        assert same is (untrained or shared), key
    report = check_conversion(found.files, tmp_path / "control", found.layout, format)
    failed = [check.name for check in report.checks if not check.passed]
    assert failed in (["deltas", "round_trip"], ["zeros", "deltas", "round_trip"])


def deltas(tensors: Tensors) -> dict[tuple[int, int, str], torch.Tensor]:
    """B @ A of every expert and projection, from a file of either target, in float64."""
    found = {}
    for layer, e, name in itertools.product(range(LAYERS), range(EXPERTS), PROJECTIONS):
        if expert_name(layer, e, name, "A") in tensors:
            a, b = (tensors[expert_name(layer, e, name, factor)].double() for factor in "AB")
        else:
            parameter = "down_proj" if name == "down_proj" else "gate_up_proj"
            stacked_a, stacked_b = (
                tensors[stacked_name(layer, parameter, factor)].double() for factor in "AB"
            )
            rank = len(stacked_a) // EXPERTS
            a = torch.stack([stacked_a[e * rank + j] for j in range(rank)])
            b = torch.stack([stacked_b[:, j * EXPERTS + e] for j in range(rank)], dim=1)
            row = INTER if name == "up_proj" else 0
            b = b if name == "down_proj" else b[row : row + INTER]
        found[layer, e, name] = b @ a
    return found


# Ranks and scalings


def scalings(folder: Path) -> Callable[[str], tuple[int, float]]:
    """Rank and scaling by module, as PEFT and vLLM 0.32 read a config: the first key that matches counts."""
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))

    def read(module: str) -> tuple[int, float]:
        def match(field: str, otherwise: float) -> float:
            for key, value in config.get(field, {}).items():
                if re.match(rf"(.*\.)?({key})$", module):
                    return float(value)
            return otherwise

        rank = int(match("rank_pattern", config["r"]))
        alpha = match("alpha_pattern", config["lora_alpha"])
        return rank, alpha / (math.sqrt(rank) if config["use_rslora"] else rank)

    return read


def uneven_stack() -> Logical:
    """gate_up of rank 3 beside down of rank 2."""
    logical, other = Logical(rank=3), Logical(rank=2, seed=5)
    for layer in logical.layers:
        logical.a[layer, "down_proj"] = other.a[layer, "down_proj"]
        logical.b[layer, "down_proj"] = other.b[layer, "down_proj"]
    return logical


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(("packing", "orientation"), ENCODINGS)
def test_every_module_keeps_its_own_rank_and_scaling(
    tmp_path: Path, packing: str, orientation: str, rslora: bool
) -> None:
    """vllm-omni#6565, peft#2195: patterns that are ignored scale wrongly, and nothing says so."""
    logical = uneven_stack()
    others = {key: tensor for key, tensor in attention().items() if "k_proj" not in key}
    others |= {key: tensor for key, tensor in attention(rank=4).items() if "k_proj" in key}
    found = look(
        tmp_path / "source",
        encode(logical, packing=packing, orientation=orientation) | others,
        packing=packing,
        use_rslora=rslora,
        lora_alpha=6,
        rank_pattern={"down_proj": 2, "k_proj": 4},
        alpha_pattern={"experts.down_proj": 5, "0.self_attn.k_proj": 16, "q_proj": 12},
    )

    def expect(rank: int, alpha: float) -> tuple[int, float]:
        return rank, alpha / (math.sqrt(rank) if rslora else rank)

    layers = [f"model.layers.{number}" for number in range(LAYERS)]
    expected = {}
    for place, layer in enumerate(layers):
        expected[f"{layer}.self_attn.q_proj"] = expect(3, 12)
        expected[f"{layer}.self_attn.k_proj"] = expect(4, 6 if place else 16)
        expected[f"{layer}.self_attn.v_proj"] = expected[f"{layer}.mlp.gate"] = expect(3, 6)
    gate_up, down = expect(3, 6), expect(2, 5)
    singles = {
        f"{layer}.mlp.experts.{e}.{name}": down if name == "down_proj" else gate_up
        for layer, e, name in itertools.product(layers, range(EXPERTS), PROJECTIONS)
    }
    stacks = {
        f"{layer}.mlp.experts.{name}": value
        for layer, (name, value) in itertools.product(
            layers, (("gate_up_proj", gate_up), ("down_proj", down))
        )
    }
    for format, own in ((TargetFormat.PER_EXPERT, singles), (TargetFormat.STACKED, stacks)):
        made = convert_adapter(found.files, plan_conversion(found.layout, format), tmp_path / format)
        assert (made.rank, made.max_lora_rank) == (4, 8)
        read = scalings(tmp_path / format)
        for name, (rank, scaling) in (expected | own).items():
            assert read(name) == (rank, pytest.approx(scaling, rel=1e-15)), name
        assert check_conversion(found.files, tmp_path / format, found.layout, format).passed


def test_rslora_divides_by_the_root(tmp_path: Path) -> None:
    """ludwig#3948: rsLoRA at rank 4 is alpha / 2, not alpha / 4."""
    found = look(
        tmp_path / "source",
        encode(Logical(rank=4)),
        r=4,
        lora_alpha=6,
        use_rslora=True,
    )
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    read = scalings(tmp_path / "made")
    assert read("model.layers.0.mlp.experts.2.up_proj") == (4, 3.0)


def test_stacked_target_of_separate_projections_keeps_their_scaling(tmp_path: Path) -> None:
    """Twice the rank needs twice the alpha."""
    found = look(tmp_path / "source", encode_experts(Separate()))
    made = convert_adapter(
        found.files, plan_conversion(found.layout, TargetFormat.STACKED), tmp_path / "made"
    )
    read = scalings(tmp_path / "made")
    assert made.rank == 2 * RANK
    assert read("model.layers.1.mlp.experts.gate_up_proj") == (2 * RANK, ALPHA / RANK)
    assert read("model.layers.1.mlp.experts.down_proj") == (RANK, ALPHA / RANK)


def test_zeros_need_no_rank_of_their_own(tmp_path: Path) -> None:
    found = look(
        tmp_path / "source",
        encode_alone(Logical(rank=2), "down_proj"),
        rank_pattern={"experts.down_proj": 2},
        alpha_pattern={"down_proj": 3},
    )
    for format in BIT_FOR_BIT:
        convert_adapter(found.files, plan_conversion(found.layout, format), tmp_path / format)
        read = scalings(tmp_path / format)
        stem = "model.layers.0.mlp.experts" + (".3" if format is TargetFormat.PER_EXPERT else "")
        other = "up_proj" if format is TargetFormat.PER_EXPERT else "gate_up_proj"
        assert read(f"{stem}.{other}") == read(f"{stem}.down_proj") == (2, 1.5)


def test_what_all_experts_share_cannot_be_displaced_and_is_warned_of(tmp_path: Path) -> None:
    meant = Separate(shared=(("gate_proj", "A"), ("gate_proj", "B"), ("up_proj", "A")))
    found = look(tmp_path / "source", encode_cubes(meant))
    [warning] = [text for text in found.warnings if "share both factors" in text]
    assert "of gate_proj" in warning
