"""What the numbers of an adapter show: its packing, what was trained, block diagonals; and each is read once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
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

from tasks.lora import survey
from tasks.lora.base import BaseConfig
from tasks.lora.errors import ExpertsUntrained, InvalidConfig, LayoutConflict, NonFinite, PackingUndecided
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.packing import PolicyStatement, ScoresStatement
from tasks.lora.tensors import TensorReader
from tasks.lora.trainers import TrainingStatement

G, R = Packing.GROUPED_BY_EXPERT, Packing.RANK_MAJOR
Tensors = dict[str, torch.Tensor]

# Large enough for its tensors to tell: 64 components.
SIZES = {"experts": 16, "rank": 4, "hidden": 24, "inter": 20}
PARAMETERS = ("gate_up_proj", "down_proj")


def big_base() -> BaseConfig:
    return make_base(
        num_local_experts=SIZES["experts"], hidden_size=SIZES["hidden"], moe_intermediate_size=SIZES["inter"]
    )


def trained(orientation: str = "standard") -> Logical:
    """Factors as training leaves them: what is stored as lora_B, started at zero, has few directions per expert."""
    logical = Logical(**SIZES)
    generator = torch.Generator().manual_seed(3)
    started_at_zero = logical.b if orientation == "standard" else logical.a
    for key, factor in started_at_zero.items():
        length = factor.shape[1] if orientation == "standard" else factor.shape[2]
        directions = torch.randn(SIZES["experts"], length, 1, generator=generator)
        weights = torch.randn(SIZES["experts"], 1, SIZES["rank"], generator=generator)
        noise = torch.randn(SIZES["experts"], length, SIZES["rank"], generator=generator)
        columns = directions @ weights + 0.2 * noise
        started_at_zero[key] = columns if orientation == "standard" else columns.transpose(1, 2).contiguous()
    return logical


def look(tmp_path: Path, tensors: Tensors, base: BaseConfig | None = None, **given: Any) -> Inspection:
    inspect_arguments = {"forced", "training", "policy", "scores", "provisional", "header_only"}
    asked = {name: value for name, value in given.items() if name in inspect_arguments}
    config = {name: value for name, value in given.items() if name not in inspect_arguments}
    if base is None:
        base, config = big_base(), {"r": SIZES["rank"]} | config
    return inspect_adapter(save_adapter(tmp_path / "source", tensors, **config), base, label=LABEL, **asked)


@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("packing", Packing)
def test_tensors_decide_where_nothing_is_stated(
    tmp_path: Path, packing: Packing, orientation: Orientation
) -> None:
    tensors = encode(trained(orientation), packing=packing, orientation=orientation)
    found = look(tmp_path, tensors)
    assert [(item.parameter, item.value, item.decided_by) for item in found.packing] == [
        (parameter, packing, "tensors") for parameter in PARAMETERS
    ]
    assert found.orientation is orientation
    assert not found.undecided
    assert found.layout.packing == found.packing
    assert found.layout.packing_of("down_proj", 1) is packing
    assert found.warnings == ()
    unread = look(tmp_path, tensors, header_only=True)
    assert [(item.value, item.decided_by) for item in unread.packing] == [(R, "provisional")] * 2
    assert unread.undecided


def test_parameters_are_told_apart(tmp_path: Path) -> None:
    packing = {"gate_up_proj": "grouped_by_expert", "down_proj": "rank_major"}
    found = look(tmp_path, encode(trained(), packing=packing))
    assert [(item.parameter, item.value) for item in found.packing] == list(packing.items())


def test_noise_is_left_to_scores(tmp_path: Path) -> None:
    logical = Logical(**SIZES)
    found = look(tmp_path, encode(logical))
    assert [(item.value, item.decided_by, item.undecided) for item in found.packing] == [
        (R, "provisional", True)
    ] * 2
    assert [warning.split(":")[0] for warning in found.warnings] == [
        f"the packing of {parameter}" for parameter in PARAMETERS
    ]
    unread = look(tmp_path, encode(logical), header_only=True)
    for each, why in (
        (found, "nothing tells it"),
        (unread, "nothing states it, and the tensors were not read"),
    ):
        assert all(warning.endswith(f": rank_major is provisional: {why}") for warning in each.warnings)
    other = look(tmp_path, encode(logical), provisional=G)
    assert [(item.value, item.decided_by, item.undecided) for item in other.packing] == [
        (G, "provisional", True)
    ] * 2
    told = ScoresStatement(tuple((parameter, G) for parameter in PARAMETERS), "0.1 bits per byte apart")
    scored = look(tmp_path, encode(logical), scores=told)
    assert [(item.value, item.decided_by) for item in scored.packing] == [(G, "scores")] * 2
    assert not scored.undecided


def test_every_piece_of_evidence_is_listed(tmp_path: Path) -> None:
    found = look(
        tmp_path,
        encode(trained(), packing=G),
        training=TrainingStatement("unsloth_zoo", "2026.9.6", "grouped_by_expert"),
        policy=PolicyStatement("rank_major", (), "bases/b/policy.json"),
        lora_B_layout="grouped_by_expert",
    )
    for decision in found.packing:
        assert [(item.source, item.says, item.strength) for item in decision.evidence] == [
            ("marker", G, "explicit"),
            ("training", G, "explicit"),
            ("training", R, "default"),
            ("policy", R, "rule"),
            ("tensors", G, "measured"),
            ("peft_version", R, "prior"),
        ]
    assert [warning.split(" but ")[1].split(":")[0] for warning in found.warnings] == [
        "training says rank_major",
        "policy says rank_major",
    ] * 2


def test_tensors_that_abstain_are_listed_with_their_numbers(tmp_path: Path) -> None:
    found = look(tmp_path, encode(Logical(**SIZES)), lora_B_layout="grouped_by_expert")
    for decision in found.packing:
        assert (decision.value, decision.decided_by) == (G, "marker")
        [tensors] = [item for item in decision.evidence if item.source == "tensors"]
        assert (tensors.says, tensors.strength) == (None, "none")
        assert "z " in tensors.detail


@pytest.mark.parametrize(
    "given",
    [
        # unsloth_zoo 2026.9.6 to 2026.9.9 stamp rank_major on an older adapter that they save again.
        {"lora_B_layout": "rank_major"},
        {"training": TrainingStatement("peft", "0.21.2")},
        {"policy": PolicyStatement("rank_major", (), "policy.json")},
    ],
    ids=["marker", "trainer", "policy"],
)
def test_false_statement_is_caught_in_the_tensors(tmp_path: Path, given: dict[str, Any]) -> None:
    """unslothai/unsloth#6930: same shapes, equal norms, never an error, and the wrong adapter."""
    tensors = encode(trained(), packing=G)
    with pytest.raises(LayoutConflict) as caught:
        look(tmp_path, tensors, **given)
    error = caught.value
    assert (error.adapter, error.where) == (LABEL, "the packing of gate_up_proj")
    assert "tensors that are rank_major, as" in error.expected
    assert "tensors that are grouped_by_expert: z " in error.found
    assert f"pooled over {LAYERS} tensors" in error.found
    assert "force grouped_by_expert" in error.advice
    assert look(tmp_path, encode(trained(), packing=R), **given).packing[0].value is R
    assert [item.value for item in look(tmp_path, tensors, forced=G, **given).packing] == [G, G]
    overruled = look(tmp_path, tensors, forced=R, **given)
    assert [item.value for item in overruled.packing] == [R, R]
    assert any("but tensors says grouped_by_expert" in warning for warning in overruled.warnings)


def test_single_layer_in_the_other_packing_is_named(tmp_path: Path) -> None:
    logical = Logical(**SIZES, layers=tuple(range(5)))
    logical.b.update(trained_layers(5).b)
    tensors = encode(logical, packing=G)
    other = encode(logical, packing=R)
    name = f"{PREFIX}.3.mlp.experts.lora_B.weight"
    tensors[name] = other[name]
    base = make_base(num_local_experts=16, hidden_size=24, moe_intermediate_size=20, num_hidden_layers=5)
    with pytest.raises(LayoutConflict) as caught:
        look(tmp_path, tensors, base, r=4, lora_B_layout="grouped_by_expert")
    assert caught.value.where == name
    assert "a tensor that is rank_major: z " in caught.value.found


def trained_layers(count: int) -> Logical:
    whole = Logical(**SIZES, layers=tuple(range(count)))
    pattern = trained()
    for layer in range(count):
        for parameter in PARAMETERS:
            whole.b[layer, parameter] = pattern.b[layer % LAYERS, parameter] * (layer + 1)
    return whole


def nested(said: str) -> dict[str, Any]:
    return {"parameters": {parameter: {"lora_B_layout": said} for parameter in PARAMETERS}}


def test_mixed_marker_leaves_each_layer_to_its_tensor(tmp_path: Path) -> None:
    """unsloth_zoo from 2026.9.6 on writes "mixed" where a parameter's layers differ."""
    logical = trained()
    tensors = encode(logical, packing=G)
    tensors |= {name: value for name, value in encode(logical, packing=R).items() if ".layers.1." in name}
    found = look(tmp_path, tensors, unsloth_fused_expert_lora=nested("mixed"))
    for decision in found.packing:
        assert (decision.value, decision.decided_by) == (None, "tensors")
        assert decision.by_layer == ((0, G), (1, R))
        assert found.layout.packing_of(decision.parameter, 1) is R
    with pytest.raises(PackingUndecided, match="no tensor was read"):
        look(tmp_path, tensors, unsloth_fused_expert_lora=nested("mixed"), header_only=True)
    with pytest.raises(PackingUndecided, match=r"layers.0.mlp.experts.base_layer.lora_B.weight z "):
        look(tmp_path, encode(Logical(**SIZES)), unsloth_fused_expert_lora=nested("mixed"))


def test_rank_1_is_not_discriminating(tmp_path: Path) -> None:
    found = look(tmp_path, encode(Logical(rank=1)), make_base(), r=1)
    for decision in found.packing:
        assert (decision.value, decision.decided_by, decision.undecided) == (R, "provisional", False)
        [tensors] = [item for item in decision.evidence if item.source == "tensors"]
        assert (tensors.says, tensors.strength) == (None, "none")
        assert tensors.detail.startswith("not discriminating")


def test_parameter_of_zeros_leaves_nothing_to_decide(tmp_path: Path) -> None:
    """peft#1402, unsloth-zoo#606: only one of two targeted projections moved."""
    logical = trained()
    for layer in range(LAYERS):
        logical.b[layer, "gate_up_proj"].zero_()
    found = look(tmp_path, encode(logical, packing=G))
    assert [(item.value, item.decided_by, item.undecided) for item in found.packing] == [
        (R, "provisional", False),
        (G, "tensors", False),
    ]
    assert list(found.warnings) == [
        f"no expert's {name} was trained: all its deltas are zero" for name in ("gate_proj", "up_proj")
    ]


# The other two ways in which experts are stored.


def per_expert(logical: Logical) -> Tensors:
    tensors: Tensors = {}
    for (layer, parameter), a in logical.a.items():
        names = ("gate_proj", "up_proj") if parameter == "gate_up_proj" else ("down_proj",)
        for expert in range(logical.experts):
            shares = logical.b[layer, parameter][expert].chunk(len(names))
            for name, share in zip(names, shares, strict=True):
                where = f"{PREFIX}.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{where}.lora_A.weight"] = a[expert].clone()
                tensors[f"{where}.lora_B.weight"] = share.clone()
    return tensors


def cubes(logical: Logical) -> Tensors:
    """As Tinker names them."""
    tensors: Tensors = {}
    for (layer, parameter), a in logical.a.items():
        names = ("w1", "w3") if parameter == "gate_up_proj" else ("w2",)
        for name, share in zip(names, logical.b[layer, parameter].chunk(len(names), dim=1), strict=True):
            where = f"{PREFIX}.{layer}.mlp.experts.{name}"
            tensors[f"{where}.lora_A.weight"] = a.clone()
            tensors[f"{where}.lora_B.weight"] = share.clone()
    return tensors


FORMS = {"stacked": encode, "per-expert": per_expert, "3-d": cubes}
PAIRS = LAYERS * 4 * 3


@pytest.mark.parametrize("form", FORMS)
def test_what_was_trained_in_each_form(tmp_path: Path, form: str) -> None:
    logical = Logical()
    logical.b[0, "down_proj"][2] = 0.0  # no tokens came to this expert
    logical.b[1, "gate_up_proj"][0, :7] = 0.0  # gate's half
    logical.a[1, "gate_up_proj"][3] = 0.0  # gate and up share A
    tensors = FORMS[form](logical) | attention()
    tensors[f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"].zero_()
    tensors[f"{PREFIX}.1.mlp.gate.lora_B.weight"].zero_()
    tensors[f"{PREFIX}.0.mlp.gate.lora_B.weight"].zero_()
    found = look(tmp_path, tensors, make_base(), lora_B_layout="rank_major" if form == "stacked" else None)
    assert (found.format, found.pairs) == (form, PAIRS)
    assert len(found.packing) == (2 if form == "stacked" else 0)
    fractions = {item.name: item.trained_fraction for item in found.classes}
    assert fractions == {"routed_experts": (PAIRS - 4) / PAIRS, "attention": 7 / 8, "router": 0.0}
    assert sum(item.keys for item in found.classes) == len(tensors)
    assert [warning for warning in found.warnings if "trained" in warning] == ["no router factor was trained"]


def test_factors_that_meet_in_no_component_make_no_delta(tmp_path: Path) -> None:
    logical = Logical()
    logical.a[0, "down_proj"][1, 0] = 0.0
    logical.b[0, "down_proj"][1, :, 1:] = 0.0
    found = look(tmp_path, encode(logical), make_base())
    assert found.classes[0].trained_fraction == (PAIRS - 1) / PAIRS


@pytest.mark.parametrize("form", FORMS)
def test_nothing_trained_in_each_form(tmp_path: Path, form: str) -> None:
    logical = Logical()
    for factor in logical.b.values():
        factor.zero_()
    with pytest.raises(ExpertsUntrained, match=rf"found all {PAIRS} deltas zero"):
        look(tmp_path, FORMS[form](logical), make_base())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_first_nonfinite_tensor_of_each_form_is_named(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    """ainode#186. Of several, the first in the order of layers."""
    tensors = FORMS[form](Logical(dtype=dtype)) | attention()
    names = [name for name in tensors if ".layers.1." in name and ".experts." in name]
    for name in names:
        flat = tensors[name].view(-1)
        flat[3], flat[-1] = float("nan"), float("-inf")
    tensors[f"{PREFIX}.0.mlp.gate.lora_A.weight"][0, 0] = float("inf")
    with pytest.raises(NonFinite, match="found 2 NaN or infinite of") as caught:
        look(tmp_path, tensors, make_base())
    assert (caught.value.adapter, caught.value.where) == (LABEL, names[0])


def test_useless_marker_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    tensors = encode(Logical())
    tensors[f"{PREFIX}.0.mlp.experts.lora_B.weight"][0, 0] = float("nan")
    with pytest.raises(InvalidConfig, match="lora_B_layout: found 'striped'"):
        look(tmp_path, tensors, make_base(), lora_B_layout="striped")


def test_factor_that_experts_share(tmp_path: Path) -> None:
    """Tinker and Megatron-Bridge's shared outer factor: first axis 1."""
    tensors = cubes(Logical())
    for layer in range(LAYERS):
        for name, factor in (("w1", "A"), ("w3", "A"), ("w2", "B")):
            key = f"{PREFIX}.{layer}.mlp.experts.{name}.lora_{factor}.weight"
            tensors[key] = tensors[key][:1].clone()
    tensors[f"{PREFIX}.1.mlp.experts.w1.lora_B.weight"][2] = 0.0
    found = look(tmp_path, tensors, make_base())
    assert found.classes[0].trained_fraction == (PAIRS - 1) / PAIRS


@pytest.mark.parametrize("form", FORMS)
def test_each_tensor_is_read_once(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    original = TensorReader.read_into

    def read_into(reader: TensorReader, entry: Any, buffer: memoryview) -> None:
        read[entry.name] += 1
        original(reader, entry, buffer)

    monkeypatch.setattr(TensorReader, "read_into", read_into)
    tensors = FORMS[form](Logical()) | attention()
    look(tmp_path, tensors, make_base())
    assert read == Counter(tensors.keys())


def test_tensors_larger_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row and column of the last block count as much as the first."""
    monkeypatch.setattr(survey, "_BLOCK", 25)
    logical = Logical()
    for layer in range(LAYERS):
        kept = logical.b[layer, "down_proj"][:, -1].clone()
        logical.b[layer, "down_proj"].zero_()
        logical.b[layer, "down_proj"][1, -1] = kept[1]
    tensors = encode(logical)
    assert look(tmp_path, tensors, make_base()).classes[0].trained_fraction == (8 + 8 + 2) / 24
    tensors[f"{PREFIX}.1.mlp.experts.lora_B.weight"][-1, -1] = float("nan")
    with pytest.raises(NonFinite, match="found 1 NaN or infinite of 120"):
        look(tmp_path, tensors, make_base())


# PEFT's per-expert files, saved again: gate in the first half of the components, up in the second.


def block_diagonal(orientation: str, packing: str, rank: int = 2 * RANK) -> Tensors:
    """B of gate and up with exact zeros off its two blocks; components 0 to r-1 are gate's."""
    logical = Logical(rank=rank)
    for layer in range(LAYERS):
        b = logical.b[layer, "gate_up_proj"]
        b[:, :7, rank // 2 :] = 0.0
        b[:, 7:, : rank // 2] = 0.0
    return encode(logical, packing=packing, orientation=orientation)


@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("packing", Packing)
def test_block_diagonal_is_found_under_its_own_packing(
    tmp_path: Path, packing: Packing, orientation: Orientation
) -> None:
    tensors = block_diagonal(orientation, packing)
    found = look(tmp_path, tensors, make_base(), r=2 * RANK, forced=packing)
    assert found.layout.block_diagonal
    gate_up = found.layout.pairs[0]
    assert (gate_up.rank, found.layout.rank_of(gate_up)) == (2 * RANK, RANK)
    assert found.classes[0].trained_fraction == 1.0
    if orientation == "standard":  # swapped, the halves lie along lora_A, whose experts no packing moves
        assert not look(
            tmp_path, tensors, make_base(), r=2 * RANK, forced=packing.other
        ).layout.block_diagonal


def nonzero_off_the_diagonal(tensors: Tensors) -> None:
    tensors[f"{PREFIX}.1.mlp.experts.base_layer.lora_B.weight"][0, -1] = 1e-30


def untrained_gate(tensors: Tensors) -> None:
    for layer in range(LAYERS):
        tensors[f"{PREFIX}.{layer}.mlp.experts.base_layer.lora_B.weight"][:7] = 0.0


@pytest.mark.parametrize("change", [nonzero_off_the_diagonal, untrained_gate])
def test_almost_block_diagonal_is_not(tmp_path: Path, change: Any) -> None:
    tensors = block_diagonal("standard", "rank_major")
    assert look(tmp_path, tensors, make_base(), r=2 * RANK, forced=R).layout.block_diagonal
    change(tensors)
    assert not look(tmp_path, tensors, make_base(), r=2 * RANK, forced=R).layout.block_diagonal


def test_odd_rank_is_not_block_diagonal(tmp_path: Path) -> None:
    tensors = block_diagonal("standard", "rank_major", rank=5)
    assert not look(tmp_path, tensors, make_base(), r=5, forced=R).layout.block_diagonal


def test_headers_alone_show_no_block_diagonal(tmp_path: Path) -> None:
    tensors = block_diagonal("standard", "rank_major")
    assert not look(tmp_path, tensors, make_base(), r=2 * RANK, header_only=True).layout.block_diagonal


def test_ranks_are_those_of_each_class(tmp_path: Path) -> None:
    tensors = encode(Logical()) | attention(rank=5)
    name = f"{PREFIX}.0.self_attn.q_proj"
    tensors[f"{name}.lora_A.weight"] = torch.ones(2, 10)
    tensors[f"{name}.lora_B.weight"] = torch.ones(15, 2)
    found = look(
        tmp_path,
        tensors,
        make_base(),
        rank_pattern={
            r"model.layers.0.self_attn.q_proj": 2,
            r"(layers.1.self_attn.q|k|v|o)_proj": 5,
            r"gate(\.weight)?": 5,
        },
        header_only=True,
    )
    assert dict(found.ranks) == {"routed_experts": 3, "router": 5, "attention": 5}
    assert "attention has several ranks: 2, 5" in found.warnings
