"""Families whose experts, names or layers differ from Qwen3-MoE's: read, converted and checked.

The rows are made up, one for each difference (synthetic_builders.py); what they mean is told here by plain loops.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lora_builders import (
    ALPHA,
    ENCODINGS,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTER,
    LABEL,
    RANK,
    Logical,
    Separate,
    assert_equal,
    load,
    look,
)
from synthetic_builders import (
    INTERLEAVED,
    RENAMED,
    RENAMED_FIELDS,
    UNGATED,
    UNGATED_FIELDS,
    read_base_of,
)

from tasks.lora.base import BaseConfig
from tasks.lora.check import check_conversion
from tasks.lora.convert import convert_adapter, digest_adapter
from tasks.lora.errors import BaseMismatch, MissingTensor, RoleUndecided
from tasks.lora.inspect import Inspection
from tasks.lora.plan import PlanKind, plan_control, plan_conversion
from tasks.lora.target import TargetFormat

pytestmark = pytest.mark.real

PER_EXPERT, STACKED = TargetFormat.PER_EXPERT, TargetFormat.STACKED
Tensors = dict[str, torch.Tensor]

INTERLEAVED_BASE = read_base_of(INTERLEAVED)
UNGATED_BASE = read_base_of(UNGATED, **UNGATED_FIELDS)
RENAMED_BASE = read_base_of(RENAMED, **RENAMED_FIELDS, architectures=["MadeRenamedForConditionalGeneration"])
FUSED = {"gate_up_proj": (HIDDEN, 2 * INTER), "down_proj": (INTER, HIDDEN)}
SINGLE = {"up_proj": (HIDDEN, INTER), "down_proj": (INTER, HIDDEN)}
ENGINE = "base_model.model.model.layers.{}.mlp.experts"
BACKBONE = "base_model.model.backbone.layers.{}.mixer.experts"
MIXER = "base_model.model.model.layers.{}.mixer.experts"
INNER = ("gate_up_proj", "up_proj")


def mean(base: BaseConfig, sizes: dict[str, tuple[int, int]]) -> Logical:
    """What a stacked adapter means: A (experts, rank, in) and B (experts, out, rank), every number another one."""
    meant = Logical(layers=())
    generator = torch.Generator().manual_seed(3)
    for layer, (parameter, (inside, out)) in itertools.product(base.sparse_layers, sizes.items()):
        meant.a[layer, parameter] = meant._unique((EXPERTS, RANK, inside), generator)
        meant.b[layer, parameter] = meant._unique((EXPERTS, out, RANK), generator)
    return meant


def stack(meant: Logical, stem: str, packing: str = "rank_major", orientation: str = "standard") -> Tensors:
    """One of the four encodings under the names that `stem` begins, number by number."""
    tensors: Tensors = {}
    for layer, parameter in meant.a:
        a, b = meant.a[layer, parameter], meant.b[layer, parameter]
        if orientation == "swapped":
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        experts, rank, inside = a.shape
        stored_a = torch.zeros(experts * rank, inside)
        stored_b = torch.zeros(b.shape[1], experts * rank)
        for e, j in itertools.product(range(experts), range(rank)):
            stored_a[e * rank + j] = a[e, j]
            stored_b[:, j * experts + e if packing == "rank_major" else e * rank + j] = b[e, :, j]
        name = stem.format(layer) + (".base_layer" if parameter in INNER else "")
        tensors |= {f"{name}.lora_A.weight": stored_a, f"{name}.lora_B.weight": stored_b}
    return tensors


def spell(meant: Logical, stem: str) -> Tensors:
    """The per-expert tensors of a family whose gate and up take turns, or which has no gate."""
    tensors: Tensors = {}
    for (layer, parameter), e in itertools.product(meant.a, range(EXPERTS)):
        a, b = meant.a[layer, parameter][e], meant.b[layer, parameter][e]
        rows = {"gate_up_proj": ("w1", "w3"), "up_proj": ("up_proj",)}.get(parameter)
        if rows is None:
            rows = ("down_proj",) if "mixer" in stem else ("w2",)
        held: dict[str, list[torch.Tensor]] = {name: [] for name in rows}
        for row in range(len(b)):
            held[rows[row % len(rows)]].append(b[row])
        for name, lines in held.items():
            tensors[f"{stem.format(layer)}.{e}.{name}.lora_A.weight"] = a
            tensors[f"{stem.format(layer)}.{e}.{name}.lora_B.weight"] = torch.stack(lines)
    return tensors


def convert(found: Inspection, folder: Path, format: TargetFormat) -> Tensors:
    """Convert and check; the control, checked to be another adapter, is made of the same numbers."""
    plan = plan_conversion(found.layout, format)
    convert_adapter(found.files, plan, folder)
    report = check_conversion(found.files, folder, found.layout, format)
    assert report.passed, [check for check in report.checks if not check.passed]
    own, control = (
        digest_adapter(found.files, each)[1].sha256 for each in (plan, plan_control(found.layout, format))
    )
    assert own != control
    return load(folder)


def list_failed(found: Inspection, folder: Path, format: TargetFormat) -> list[str]:
    report = check_conversion(found.files, folder, found.layout, format)
    return [check.name.value for check in report.checks if not check.passed]


# Gate and up that take turns


def test_interleaved_encodings_become_the_same_bytes(tmp_path: Path) -> None:
    """vllm#42242, mlx-lm#1338: even rows of B are gate's and odd rows up's; halves have the same shapes."""
    meant = mean(INTERLEAVED_BASE, FUSED)
    digests, controls = set(), set()
    for packing, orientation in ENCODINGS:
        folder = tmp_path / f"{packing}-{orientation}"
        tensors = stack(meant, ENGINE, packing, orientation)
        found = look(folder / "source", tensors, INTERLEAVED_BASE, packing=packing)
        assert found.orientation == orientation
        digests.add(
            tuple(
                digest_adapter(found.files, plan_conversion(found.layout, each))[1].sha256
                for each in TargetFormat
            )
        )
        controls |= {digest_adapter(found.files, plan_control(found.layout))[1].sha256}
        assert_equal(convert(found, folder / "made", PER_EXPERT), spell(meant, ENGINE))
        assert_equal(convert(found, folder / "stacked", STACKED), stack(meant, ENGINE))
    assert len(digests) == 1
    assert controls.isdisjoint(*digests)


@pytest.mark.parametrize("orientation", ["standard", "swapped"])
def test_halves_would_be_another_adapter(tmp_path: Path, orientation: str) -> None:
    meant = mean(INTERLEAVED_BASE, FUSED)
    found = look(tmp_path / "source", stack(meant, ENGINE, orientation=orientation), INTERLEAVED_BASE)
    fused, down = INTERLEAVED.parameters
    halved = replace(INTERLEAVED, parameters=(replace(fused, interleaved=False), down))
    mistaken = replace(found.layout, family=halved)
    convert_adapter(found.files, plan_conversion(mistaken), tmp_path / "made")
    made, right = load(tmp_path / "made"), spell(meant, ENGINE)
    assert {name: tensor.shape for name, tensor in made.items()} == {
        name: tensor.shape for name, tensor in right.items()
    }
    for layer, e, name in itertools.product((0, 1), range(EXPERTS), ("w1", "w3")):
        stem = f"{ENGINE.format(layer)}.{e}.{name}.lora_"
        deltas = [each[f"{stem}B.weight"] @ each[f"{stem}A.weight"] for each in (made, right)]
        assert not torch.allclose(*deltas)
    assert list_failed(found, tmp_path / "made", PER_EXPERT) == ["deltas", "round_trip"]


def stack_turns(meant: Separate) -> Logical:
    """Gate and up with components of their own, their rows taking turns, as one stacked pair."""
    gate, up = meant.ranks["gate_proj"], meant.ranks["up_proj"]
    joined = Logical(layers=())
    for layer in meant.layers:
        a = torch.zeros(EXPERTS, gate + up, HIDDEN)
        b = torch.zeros(EXPERTS, 2 * INTER, gate + up)
        for e, (place, name) in itertools.product(range(EXPERTS), enumerate(("gate_proj", "up_proj"))):
            own_a, own_b = meant.of(layer, name, e)
            first = place * gate
            for j in range(len(own_a)):
                a[e, first + j] = own_a[j]
                for row in range(INTER):
                    b[e, 2 * row + place, first + j] = own_b[row, j]
        joined.a[layer, "gate_up_proj"], joined.b[layer, "gate_up_proj"] = a, b
        down = [meant.of(layer, "down_proj", e) for e in range(EXPERTS)]
        joined.a[layer, "down_proj"] = torch.stack([each[0] for each in down])
        joined.b[layer, "down_proj"] = torch.stack([each[1] for each in down])
    return joined


def name_experts(meant: Separate) -> Tensors:
    tensors: Tensors = {}
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for (layer, name), e in itertools.product(meant.a, range(EXPERTS)):
        a, b = meant.of(layer, name, e)
        stem = f"{ENGINE.format(layer)}.{e}.{names[name]}"
        tensors |= {f"{stem}.lora_A.weight": a.clone(), f"{stem}.lora_B.weight": b.clone()}
    return tensors


@pytest.mark.parametrize("ranks", [(3, 3), (2, 3)], ids=["alike", "apart"])
@pytest.mark.parametrize("form", ["experts", "cubes"])
def test_projections_of_their_own_are_stacked_in_turns(
    tmp_path: Path, ranks: tuple[int, int], form: str
) -> None:
    meant = Separate(ranks={"gate_proj": ranks[0], "up_proj": ranks[1], "down_proj": RANK})
    experts = name_experts(meant)
    tensors = experts
    if form == "cubes":
        names = {"gate_proj": "w1", "up_proj": "up_proj", "down_proj": "down_proj"}
        tensors = {
            f"{ENGINE.format(layer)}.{names[name]}.lora_{factor}.weight": each
            for factor, held in (("A", meant.a), ("B", meant.b))
            for (layer, name), each in held.items()
        }
    patterns = {name: ranks[0] for name in ("w1", "gate_proj")}
    found = look(tmp_path / "source", tensors, INTERLEAVED_BASE, packing=None, rank_pattern=patterns)
    assert_equal(convert(found, tmp_path / "made", PER_EXPERT), experts)
    if ranks[0] == ranks[1]:  # of other ranks the scalings differ
        assert_equal(convert(found, tmp_path / "stacked", STACKED), stack(stack_turns(meant), ENGINE))


@pytest.mark.parametrize(("packing", "orientation"), ENCODINGS)
def test_blocks_in_turns_are_found(tmp_path: Path, packing: str, orientation: str) -> None:
    """A pair in which gate and up have components of their own comes apart at their own rank."""
    meant = Separate()
    tensors = stack(stack_turns(meant), ENGINE, packing, orientation)
    doubled = {"rank_pattern": {"gate_up_proj": 2 * RANK}, "alpha_pattern": {"gate_up_proj": 2 * ALPHA}}
    found = look(tmp_path / "source", tensors, INTERLEAVED_BASE, packing=packing, **doubled)
    assert found.layout.block_diagonal
    assert_equal(convert(found, tmp_path / "made", PER_EXPERT), name_experts(meant))
    assert_equal(convert(found, tmp_path / "stacked", STACKED), stack(stack_turns(meant), ENGINE))


def test_projection_that_was_not_trained_is_found_in_turns(tmp_path: Path) -> None:
    meant = mean(INTERLEAVED_BASE, FUSED)
    for layer in (0, 1):
        meant.b[layer, "gate_up_proj"][:, 1::2] = 0
    for orientation in ("standard", "swapped"):
        tensors = stack(meant, ENGINE, orientation=orientation)
        found = look(tmp_path / orientation, tensors, INTERLEAVED_BASE)
        assert [text for text in found.warnings if "trained" in text] == [
            "no expert's up_proj was trained: all its deltas are zero"
        ]


# Experts without a gate


@pytest.mark.parametrize("stem", [MIXER, BACKBONE], ids=["model", "backbone"])
def test_ungated_encodings_become_the_same_bytes(tmp_path: Path, stem: str) -> None:
    """unsloth#4476, vllm#47088: up and down alone, under either name of the decoder; no gate is made up."""
    meant = mean(UNGATED_BASE, SINGLE)
    digests = set()
    for packing, orientation in ENCODINGS:
        folder = tmp_path / f"{packing}-{orientation}"
        tensors = stack(meant, stem, packing, orientation)
        found = look(folder / "source", tensors, UNGATED_BASE, packing=packing)
        assert (found.orientation, found.pairs, found.layers) == (orientation, 2 * EXPERTS * 2, 2)
        digests.add(
            tuple(
                digest_adapter(found.files, plan_conversion(found.layout, each))[1].sha256
                for each in TargetFormat
            )
        )
    assert len(digests) == 1
    assert_equal(convert(found, tmp_path / "made", PER_EXPERT), spell(meant, MIXER))
    assert_equal(convert(found, tmp_path / "stacked", STACKED), stack(meant, MIXER))
    config = json.loads((tmp_path / "made" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "up_proj"]


def find_scaling(folder: Path, name: str) -> float:
    """What PEFT and vLLM give a name: the first key that ends it, else the default."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank, alpha = (
        next(
            (value for key, value in config.get(field, {}).items() if re.match(rf"(.*\.)?({key})$", name)),
            plain,
        )
        for field, plain in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"]))
    )
    return float(alpha / rank)


def test_scalings_of_ungated_parameters(tmp_path: Path) -> None:
    """vLLM asks for the inner parameter as gate_up_proj in every family (peft_helper.py); PEFT asks for up_proj."""
    tensors = stack(mean(UNGATED_BASE, SINGLE), BACKBONE)
    patterns = {"backbone.layers.3.mixer.experts.up_proj": 12, "model.layers.1.mixer.experts.up_proj": 9}
    found = look(tmp_path / "source", tensors, UNGATED_BASE, alpha_pattern=patterns)
    scalings = {(pair.layer, pair.parameter): pair.scale.scaling for pair in found.layout.pairs}
    assert scalings == {(1, "up_proj"): 2, (1, "down_proj"): 2, (3, "up_proj"): 4, (3, "down_proj"): 2}
    convert(found, tmp_path / "made", PER_EXPERT)
    convert(found, tmp_path / "stacked", STACKED)
    for layer, scaling in ((1, 2.0), (3, 4.0)):
        stem = f"model.layers.{layer}.mixer.experts"
        for name, expected in (("up_proj", scaling), ("gate_up_proj", scaling), ("down_proj", 2.0)):
            assert find_scaling(tmp_path / "stacked", f"{stem}.{name}") == expected
        for name, expected in (("up_proj", scaling), ("down_proj", 2.0)):
            assert find_scaling(tmp_path / "made", f"{stem}.2.{name}") == expected
            assert find_scaling(tmp_path / "made", f"{stem}.{name}") == expected
    config = json.loads((tmp_path / "stacked" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mixer.experts.down_proj", "mixer.experts.up_proj"]
    assert sorted(config["unsloth_fused_expert_lora"]["parameters"]) == ["down_proj", "up_proj"]


def test_lone_ungated_pair(tmp_path: Path) -> None:
    """Without a gate up standard and down swapped have one shape; what was trained is then for the config to say."""
    meant = mean(UNGATED_BASE, {"up_proj": SINGLE["up_proj"]})
    tensors = {name.replace(".base_layer", ""): each for name, each in stack(meant, MIXER).items()}
    with pytest.raises(RoleUndecided):
        look(tmp_path / "open", tensors, UNGATED_BASE)
    found = look(tmp_path / "up", tensors, UNGATED_BASE, target_parameters=["mixer.experts.up_proj"])
    assert found.layout.absent == ("down_proj",)
    made = convert(found, tmp_path / "made", PER_EXPERT)
    expected = spell(meant, MIXER)
    assert_equal({name: each for name, each in made.items() if "up_proj" in name}, expected)
    zeros = [each for name, each in made.items() if "down_proj" in name]
    assert len(zeros) == 2 * 2 * EXPERTS and not any(each.any() for each in zeros)


def test_layer_that_misses_its_experts(tmp_path: Path) -> None:
    tensors = stack(mean(UNGATED_BASE, SINGLE), BACKBONE)
    del tensors[f"{BACKBONE.format(3)}.lora_B.weight"]
    with pytest.raises(MissingTensor) as caught:
        look(tmp_path, tensors, UNGATED_BASE)
    assert caught.value.where == f"{MIXER.format(3)}.lora_B.weight"


# Names, sizes and layers of their own

TRAINER = "base_model.model.model.language_model.layers"
SERVED = "base_model.model.language_model.model.layers"
WIDE = HEAD_DIM + 4


def name_modules(trainer: bool) -> Iterator[tuple[str, int, int]]:
    """Every other module of the renamed family: its name, in and out."""
    stem = TRAINER if trainer else SERVED
    for layer, head_dim in enumerate((HEAD_DIM, WIDE, HEAD_DIM)):
        yield f"{stem}.{layer}.self_attn.q_proj", HIDDEN, HEADS * head_dim
    for layer in (1, 2):
        yield f"{stem}.{layer}.{'mlp' if trainer else 'block_sparse_moe'}.gate", HIDDEN, EXPERTS
        yield (
            f"{stem}.{layer}.{'mlp.shared_expert' if trainer else 'shared_mlp'}.up_proj",
            HIDDEN,
            2 * INTER,
        )


def fill_modules(trainer: bool, rank: int = RANK) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    tensors: Tensors = {}
    for name, inside, out in name_modules(trainer):
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inside, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    return tensors


def halve(meant: Logical) -> Tensors:
    """The per-expert tensors as the renamed family's engine takes them."""
    tensors: Tensors = {}
    for (layer, parameter), e in itertools.product(meant.a, range(EXPERTS)):
        a, b = meant.a[layer, parameter][e], meant.b[layer, parameter][e]
        stem = f"{SERVED}.{layer}.block_sparse_moe.experts.{e}"
        parts = {"w2": b} if parameter == "down_proj" else {"w1": b[:INTER], "w3": b[INTER:]}
        for name, part in parts.items():
            tensors[f"{stem}.{name}.lora_A.weight"] = a.clone()
            tensors[f"{stem}.{name}.lora_B.weight"] = part.clone()
    return tensors


def test_everything_is_written_under_the_engines_names(tmp_path: Path) -> None:
    """vllm#34186, vllm#39278: a name of the trainer's would be loaded and never used, without a word."""
    meant = mean(RENAMED_BASE, FUSED)
    tensors = stack(meant, f"{TRAINER}.{{}}.mlp.experts") | fill_modules(trainer=True)
    found = look(tmp_path / "source", tensors, RENAMED_BASE)
    assert {item.name.value: item.keys for item in found.classes} == {
        "routed_experts": 8,
        "attention": 6,
        "router": 4,
        "shared_experts": 4,
    }
    made = convert(found, tmp_path / "made", PER_EXPERT)
    assert_equal(made, halve(meant) | fill_modules(trainer=False))
    stacked = convert(found, tmp_path / "stacked", STACKED)
    assert_equal(
        stacked, stack(meant, f"{SERVED}.{{}}.block_sparse_moe.experts") | fill_modules(trainer=False)
    )
    config = json.loads((tmp_path / "made" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["gate", "q_proj", "up_proj", "w1", "w2", "w3"]
    config = json.loads((tmp_path / "stacked" / "adapter_config.json").read_text())
    assert config["target_parameters"] == [
        "mlp.experts.down_proj",
        "mlp.experts.gate_up_proj",
        "mlp.gate.weight",
    ]
    text = replace(found.layout, base=read_base_of(RENAMED, **RENAMED_FIELDS))
    names = [tensor.name for tensor in plan_conversion(text).tensors]
    assert sorted(names) == sorted(name.replace("language_model.model", "model") for name in made)


def test_output_of_an_engine_is_read_again(tmp_path: Path) -> None:
    meant = mean(RENAMED_BASE, FUSED)
    served = halve(meant) | fill_modules(trainer=False)
    found = look(tmp_path / "source", served, RENAMED_BASE, packing=None)
    assert_equal(convert(found, tmp_path / "made", PER_EXPERT), served)
    assert plan_control(found.layout).kind is PlanKind.DISPLACED_EXPERTS


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"model.language_model.layers.1.mlp.experts.gate_up_proj": 12}, {(1, "gate_up_proj"): 4.0}),
        ({"mlp.experts.down_proj": 9}, {(1, "down_proj"): 3.0, (2, "down_proj"): 3.0}),
        # What the engine calls them means nothing to the trainer's PEFT.
        ({"block_sparse_moe.experts.down_proj": 9, "w1": 9, r"language_model.model.layers.1\..*": 9}, {}),
    ],
)
def test_scales_are_those_of_the_trainers_names(
    tmp_path: Path, patterns: dict[str, int], expected: dict[tuple[int, str], float]
) -> None:
    tensors = stack(mean(RENAMED_BASE, FUSED), f"{TRAINER}.{{}}.mlp.experts")
    found = look(tmp_path / "source", tensors, RENAMED_BASE, alpha_pattern=patterns)
    scalings = {(pair.layer, pair.parameter): pair.scale.scaling for pair in found.layout.pairs}
    plain = dict.fromkeys(itertools.product((1, 2), FUSED), ALPHA / RANK)
    assert scalings == plain | expected
    for format in TargetFormat:
        convert(found, tmp_path / format, format)


def test_scales_of_older_names(tmp_path: Path) -> None:
    """Per-expert files of an older trainer, whose patterns hold its own names."""
    served = halve(mean(RENAMED_BASE, FUSED))
    renamed = {
        name.replace(SERVED, "base_model.model.model.layers").replace("block_sparse_moe", "mlp"): each
        for name, each in served.items()
    }
    patterns = {r"model\.layers\.1\.mlp\.experts\.\d\.w1": 12, "block_sparse_moe.experts.0.w2": 9}
    found = look(tmp_path / "source", renamed, RENAMED_BASE, packing=None, alpha_pattern=patterns)
    scalings = {(pair.layer, pair.parameter): pair.scale.scaling for pair in found.layout.pairs}
    plain = dict.fromkeys(itertools.product((1, 2), ("gate_proj", "up_proj", "down_proj")), 2.0)
    assert scalings == plain | {(1, "gate_proj"): 4.0}
    assert_equal(convert(found, tmp_path / "made", PER_EXPERT), served)


def test_router_by_its_weight(tmp_path: Path) -> None:
    """target_parameters name the router's weight; PEFT then asks its patterns for that, under the trainer's name."""
    tensors = stack(mean(RENAMED_BASE, FUSED), f"{TRAINER}.{{}}.mlp.experts") | fill_modules(trainer=True)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    found = look(
        tmp_path, tensors, RENAMED_BASE, target_parameters=targets, alpha_pattern={"mlp.gate.weight": 9}
    )
    scalings = {module.key.kind.value: module.scale.scaling for module in found.layout.modules}
    assert scalings == {"router": 3.0, "attention": 2.0, "shared_experts": 2.0}


@pytest.mark.parametrize(
    ("change", "expected", "found"),
    [
        # Attention of one kind's size in a layer of the other.
        (
            {f"{TRAINER}.1.self_attn.q_proj.lora_B.weight": torch.ones(HEADS * HEAD_DIM, RANK)},
            f"{HEADS * WIDE} along the other axis",
            f"shape ({HEADS * HEAD_DIM}, {RANK})",
        ),
        (
            {f"{TRAINER}.0.mlp.gate.lora_A.weight": torch.ones(RANK, HIDDEN)},
            "a layer with routed experts",
            "layer 0, which is not one",
        ),
        (
            {f"{TRAINER}.0.mlp.experts.lora_A.weight": torch.ones(EXPERTS * RANK, INTER)},
            "a layer with routed experts",
            "layer 0, which is not one",
        ),
        (
            {f"{TRAINER}.3.self_attn.q_proj.lora_A.weight": torch.ones(RANK, HIDDEN)},
            "layers 0 to 2, as the base has",
            "layer 3",
        ),
    ],
    ids=["size", "router", "experts", "layer"],
)
def test_modules_must_fit_their_layer(tmp_path: Path, change: Tensors, expected: str, found: str) -> None:
    tensors = stack(mean(RENAMED_BASE, FUSED), f"{TRAINER}.{{}}.mlp.experts") | fill_modules(trainer=True)
    with pytest.raises(BaseMismatch) as caught:
        look(tmp_path, tensors | change, RENAMED_BASE)
    error = caught.value
    assert (error.adapter, error.where) == (LABEL, next(iter(change)))
    assert (error.expected, error.found) == (expected, found)
    assert error.advice


def test_module_of_another_kind_of_layer(tmp_path: Path) -> None:
    """Attention where the base has none."""
    name = "base_model.model.backbone.layers.3.mixer.q_proj.lora_A.weight"
    tensors = stack(mean(UNGATED_BASE, SINGLE), BACKBONE) | {name: torch.ones(RANK, HIDDEN)}
    with pytest.raises(BaseMismatch) as caught:
        look(tmp_path, tensors, UNGATED_BASE)
    error = caught.value
    assert (error.where, error.expected) == (name, "a layer of full attention")
    assert error.found == "layer 3, which is not one"
