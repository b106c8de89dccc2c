"""What names, files and shapes tell: spelling, orientation, and which parameter a lone pair belongs to."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lora_builders import (
    ENCODINGS,
    FAMILY,
    HIDDEN,
    INTER,
    LABEL,
    PREFIX,
    Logical,
    assert_equal,
    attention,
    encode,
    encode_alone,
    load,
    look,
    make_base,
    save_adapter,
    spell_out,
)
from synthetic_builders import INTERLEAVED, read_base_of

from tasks.lora.check import check_conversion
from tasks.lora.convert import convert_adapter, digest_adapter
from tasks.lora.errors import (
    LayoutConflict,
    MissingTensor,
    OrientationUndecided,
    RoleUndecided,
)
from tasks.lora.header import TensorEntry
from tasks.lora.inspect import inspect_adapter
from tasks.lora.layouts import Orientation
from tasks.lora.plan import plan_control, plan_conversion
from tasks.lora.roles import decide_role
from tasks.lora.target import TargetFormat
from tasks.lora.trainers import TrainingStatement

# Names and files


def test_names_and_shards_make_no_difference(tmp_path: Path) -> None:
    """What torch.compile, an adapter's name or a missing prefix leave behind, and a file cut in three."""
    plain = encode(Logical()) | attention()
    renamed = {
        "default": {
            re.sub(r"\.(lora_[AB])\.", r".\1.default.", name): value for name, value in plain.items()
        },
        "compiled": {name.replace(".layers.", "._orig_mod.layers."): value for name, value in plain.items()},
        "bare": {name.removeprefix("base_model.model."): value for name, value in plain.items()},
    }
    found = {name: look(tmp_path / name, tensors) for name, tensors in renamed.items()}
    found["plain"] = look(tmp_path / "plain", plain)
    save_adapter(tmp_path / "shards", plain, shards=3)
    found["shards"] = inspect_adapter(tmp_path / "shards", make_base(), label=LABEL)
    assert len(found["shards"].files.weights) == 3
    for format in TargetFormat:
        digests = {
            name: digest_adapter(item.files, plan_conversion(item.layout, format))[1].sha256
            for name, item in found.items()
        }
        assert len(set(digests.values())) == 1, digests
    for name, item in found.items():
        convert_adapter(item.files, plan_conversion(item.layout), tmp_path / f"{name}-made")
        assert load(tmp_path / f"{name}-made").keys() == (spell_out(Logical()) | attention()).keys()
        assert check_conversion(item.files, tmp_path / f"{name}-made", item.layout).passed


# Orientation


@pytest.mark.parametrize(
    ("hidden", "inter", "experts", "rank"),
    [(8, 3, 4, 2), (6, 3, 4, 2), (4, 4, 4, 2), (8, 3, 4, 4)],
    ids=["H != 2I", "H = 2I", "H = I", "E = r"],
)
def test_legal_encodings_become_the_same_bytes(
    tmp_path: Path, hidden: int, inter: int, experts: int, rank: int
) -> None:
    """vllm#41384, vllm#52194, Automodel#3592, unsloth#5410, peft#3112: one adapter, four shapes of file."""
    logical = Logical(rank=rank, experts=experts, hidden=hidden, inter=inter)
    base = make_base(hidden_size=hidden, moe_intermediate_size=inter, num_local_experts=experts)
    digests = set()
    for packing, orientation in ENCODINGS:
        tensors = encode(logical, packing=packing, orientation=orientation)
        found = look(
            tmp_path / f"{packing}-{orientation}", tensors, base, r=rank, lora_alpha=4, packing=packing
        )
        assert found.orientation == orientation
        digests.add(
            tuple(
                digest_adapter(found.files, plan_conversion(found.layout, format))[1].sha256
                for format in TargetFormat
            )
        )
        control = digest_adapter(found.files, plan_control(found.layout))[1].sha256
        assert control not in {sha for pair in digests for sha in pair}
    assert len(digests) == 1
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    assert_equal(load(tmp_path / "made"), spell_out(logical))


LONE = {"gate_up_proj": (6, 3), "down_proj": (4, 4)}


@pytest.mark.parametrize("parameter", LONE)
@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("where", ["config", "training"])
def test_lone_square_pair_is_decided_by_the_version_of_peft(
    tmp_path: Path, parameter: str, orientation: Orientation, where: str
) -> None:
    hidden, inter = LONE[parameter]
    version = "0.21.2" if orientation is Orientation.STANDARD else "0.18.1"
    logical = Logical(rank=2, hidden=hidden, inter=inter)
    base = make_base(hidden_size=hidden, moe_intermediate_size=inter)
    save_adapter(
        tmp_path / "source",
        encode_alone(logical, parameter, orientation=orientation.value),
        r=2,
        target_parameters=[f"mlp.experts.{parameter}"],
        peft_version=version if where == "config" else None,
    )
    training = TrainingStatement(peft_version=version) if where == "training" else None
    found = inspect_adapter(tmp_path / "source", base, label=LABEL, training=training)
    assert found.orientation is orientation
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    made = load(tmp_path / "made")
    for name, tensor in spell_out(logical).items():
        if ("down_proj" in name) is (parameter == "down_proj"):
            assert torch.equal(made[name], tensor), name


@pytest.mark.parametrize("parameter", LONE)
@pytest.mark.parametrize("version", [None, "0.99.0"])
def test_lone_square_pair_of_an_unknown_version_is_refused(
    tmp_path: Path, parameter: str, version: str | None
) -> None:
    hidden, inter = LONE[parameter]
    base = make_base(hidden_size=hidden, moe_intermediate_size=inter)
    tensors = encode_alone(Logical(rank=2, hidden=hidden, inter=inter), parameter)
    with pytest.raises(OrientationUndecided) as caught:
        look(tmp_path / "source", tensors, base, r=2, peft_version=version)
    assert caught.value.where == f"{PREFIX}.0.mlp.experts.lora_A.weight"
    assert "in = out" in caught.value.found
    assert "version of PEFT" in caught.value.expected
    assert caught.value.advice.startswith("Train gate_up_proj and down_proj together")


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "0.21.2"])
def test_lone_square_pair_of_a_parameter_that_some_transformers_mark(tmp_path: Path, version: str) -> None:
    """peft#3112: from 0.19.0 on PEFT asks for a mark that the trainer's transformers may not have set."""
    base = read_base_of(INTERLEAVED, hidden_size=4, moe_intermediate_size=4)
    tensors = encode_alone(Logical(rank=2, hidden=4, inter=4), "down_proj")
    if version == "0.18.1":
        found = look(tmp_path / "source", tensors, base, r=2, peft_version=version)
        assert found.orientation is Orientation.STANDARD
        return
    with pytest.raises(OrientationUndecided) as caught:
        look(tmp_path / "source", tensors, base, r=2, peft_version=version)
    assert (caught.value.adapter, caught.value.found) == (LABEL, "in = out = 4, and no such version")
    assert caught.value.where == f"{PREFIX}.0.mlp.experts.lora_A.weight"
    assert caught.value.expected.endswith("a version of PEFT that writes such a pair in one way")
    assert caught.value.advice.endswith("or save one tensor per expert.")


def test_layers_that_disagree_are_refused(tmp_path: Path) -> None:
    first, second = Logical(layers=(0,)), Logical(layers=(1,))
    with pytest.raises(LayoutConflict, match="swapped pair"):
        look(tmp_path / "source", encode(first) | encode(second, orientation="swapped"))


# Roles


def test_names_of_both_pairs_exchanged_are_refused(tmp_path: Path) -> None:
    """unsloth#6930: a base that registers down first would exchange the roles; shapes must confirm the names."""
    tensors = {
        name.replace("experts.lora", "experts.base_layer.lora")
        if "base_layer" not in name
        else name.replace("base_layer.", ""): tensor
        for name, tensor in encode(Logical()).items()
    }
    with pytest.raises(LayoutConflict, match="fit the layer's other parameter"):
        look(tmp_path / "source", tensors)


@pytest.mark.parametrize("orientation", Orientation)
def test_shapes_against_target_parameters_are_refused(tmp_path: Path, orientation: Orientation) -> None:
    tensors = encode_alone(Logical(), "gate_up_proj", orientation=orientation.value)
    with pytest.raises(LayoutConflict) as caught:
        look(tmp_path / "source", tensors, target_parameters=["mlp.experts.down_proj"])
    assert caught.value.where == f"{PREFIX}.0.mlp.experts.lora_A.weight"
    assert "down_proj, which target_parameters name" in caught.value.expected
    assert "fit gate_up_proj" in caught.value.found
    assert "target_parameters" in caught.value.advice


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_pair_that_target_parameters_promise_is_missed(tmp_path: Path, parameter: str) -> None:
    tensors = encode_alone(Logical(), parameter)
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    other = "down_proj" if parameter == "gate_up_proj" else "gate_up_proj"
    with pytest.raises(MissingTensor, match=f"the experts' {other}: found one pair.*which fits {parameter}"):
        look(tmp_path / "source", tensors, target_parameters=both)


def entry(name: str, *shape: int) -> TensorEntry:
    return TensorEntry(name, "F32", shape, 0, 4 * math.prod(shape))


def test_role_that_shapes_leave_open() -> None:
    """Without a gate, up standard and down swapped have one shape: only target_parameters tell."""
    up, down = FAMILY.parameters
    family = replace(
        FAMILY,
        parameters=(replace(up, name="up_proj", out_size=down.in_size, projections=("up_proj",)), down),
    )
    pair = (entry("a", 12, HIDDEN), entry("b", INTER, 12))

    def decide(*targets: str) -> str:
        return decide_role(*pair, family=family, base=make_base(), targets=targets, adapter=LABEL).name

    assert decide("mlp.experts.up_proj") == "up_proj"
    assert decide("mlp.experts.down_proj") == "down_proj"
    for targets in ((), ("mlp.experts.up_proj", "mlp.experts.down_proj")):
        with pytest.raises(RoleUndecided) as caught:
            decide(*targets)
        assert (caught.value.adapter, caught.value.where) == (LABEL, "a")
        assert "target_parameters" in caught.value.expected
        assert "fit up_proj and down_proj" in caught.value.found
        assert caught.value.advice
