"""Inspecting an adapter: what it is, what is trained, and every way in which it does not fit its base."""

from __future__ import annotations

import pickle  # noqa: TID251 - errors cross process borders this way
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

from tasks.lora import errors
from tasks.lora.errors import (
    AdapterError,
    BaseMismatch,
    DestinationExists,
    ExpertsUntrained,
    LayoutConflict,
    MissingTensor,
    MixedForms,
    NoExpertKeys,
    NonFinite,
    RankUnsupported,
    ShapeMismatch,
    UnexpectedTensor,
    UnsupportedSourceFormat,
)
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.trainers import TrainingStatement

Tensors = dict[str, torch.Tensor]
INNER, OUTER = f"{PREFIX}.1.mlp.experts.base_layer", f"{PREFIX}.1.mlp.experts"


def look(tmp_path: Path, tensors: Tensors, *, header_only: bool = False, **config: Any) -> Inspection:
    source = save_adapter(tmp_path / "source", tensors, **config)
    return inspect_adapter(source, make_base(), label=LABEL, header_only=header_only)


@pytest.mark.parametrize("orientation", Orientation)
def test_everything_that_is_said(tmp_path: Path, orientation: Orientation) -> None:
    found = look(tmp_path, encode(Logical(), orientation=orientation) | attention())
    assert (found.label, found.family, found.base, found.format) == (
        LABEL,
        "qwen3_moe",
        "tiny-base",
        "stacked",
    )
    assert (found.layers, found.experts, found.pairs) == (LAYERS, EXPERTS, LAYERS * EXPERTS * 3)
    assert found.orientation is orientation
    assert [(item.parameter, item.value, item.decided_by) for item in found.packing] == [
        ("gate_up_proj", "rank_major", "provisional"),
        ("down_proj", "rank_major", "provisional"),
    ]
    assert [(item.name, item.keys, item.trained_fraction) for item in found.classes] == [
        ("routed_experts", 8, 1.0),
        ("router", 4, 1.0),
        ("attention", 16, 1.0),
    ]
    assert dict(found.ranks) == {"routed_experts": RANK, "router": RANK, "attention": RANK}
    assert len(found.warnings) == 2
    assert all("provisional" in warning for warning in found.warnings)


def test_headers_alone_leave_fractions_open(tmp_path: Path) -> None:
    found = look(tmp_path, encode(Logical()) | attention(), header_only=True)
    assert [item.trained_fraction for item in found.classes] == [None, None, None]


def test_forced_and_stated_packings_arrive(tmp_path: Path) -> None:
    source = save_adapter(tmp_path / "source", encode(Logical()))
    training = TrainingStatement(layouts=(("down_proj", "grouped_by_expert"),))
    found = inspect_adapter(source, make_base(), label=LABEL, training=training)
    assert [item.value for item in found.packing] == ["rank_major", "grouped_by_expert"]
    forced = inspect_adapter(source, make_base(), label=LABEL, training=training, forced=Packing.RANK_MAJOR)
    assert [item.value for item in forced.packing] == ["rank_major", "rank_major"]
    assert any("but training says grouped_by_expert" in warning for warning in forced.warnings)


def test_strangers_in_the_folder_and_rank_1_are_warned_of(tmp_path: Path) -> None:
    tensors = encode(Logical(rank=1))
    save_adapter(tmp_path / "source", tensors, r=1)
    (tmp_path / "source" / "training_args.bin").write_bytes(b"x")
    found = inspect_adapter(tmp_path / "source", make_base(), label=LABEL)
    assert any("training_args.bin" in warning for warning in found.warnings)
    assert any(warning.startswith("rank 1") for warning in found.warnings)


@pytest.mark.parametrize(
    ("hidden", "training", "warned"),
    [
        (14, TrainingStatement("unsloth_zoo", "2026.9.7"), True),
        (14, TrainingStatement("unsloth_zoo", "2026.9.8"), False),
        (14, TrainingStatement("peft", "0.21.2"), False),
        (14, None, True),
        (10, None, False),
    ],
)
def test_squares_that_unsloth_trains_otherwise_than_it_merges(
    tmp_path: Path, hidden: int, training: TrainingStatement | None, warned: bool
) -> None:
    """unsloth_zoo 2026.9.5 to 2026.9.7: forward and merge take a parameter with in = out differently."""
    mark = {"parameters": {"gate_up_proj": {"lora_B_layout": "rank_major"}}}
    source = save_adapter(tmp_path / "source", encode(Logical(hidden=hidden)), unsloth_fused_expert_lora=mark)
    found = inspect_adapter(source, make_base(hidden_size=hidden), label=LABEL, training=training)
    said = [warning for warning in found.warnings if "unsloth_zoo up to 2026.9.7" in warning]
    assert [warning.partition(":")[0] for warning in said] == ["gate_up_proj has in = out = 14"] * warned


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(names)}


def added(**changes: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name.replace("__", "."): value for name, value in changes.items()}


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


def exchange(name: str) -> str:
    if ".experts.base_layer." in name:
        return name.replace(".experts.base_layer.", ".experts.")
    return name.replace(".experts.lora", ".experts.base_layer.lora")


@pytest.mark.parametrize(
    ("change", "error", "where", "found"),
    [
        pytest.param(
            without(f"{INNER}.lora_B"),
            MissingTensor,
            f"{INNER}.lora_B.weight",
            "no such tensor",
            id="one factor",
        ),
        pytest.param(
            without(INNER), MissingTensor, f"{INNER}.lora_A.weight", "no such tensor", id="one layer's pair"
        ),
        pytest.param(
            # sglang#32406: only one of the two projections in the file, though the config names both.
            without(f"{PREFIX}.0.mlp.experts.base", f"{PREFIX}.1.mlp.experts.base"),
            MissingTensor,
            "the experts' gate_up_proj",
            f"one pair, {PREFIX}.0.mlp.experts.lora_A.weight, which fits down_proj",
            id="only one of two projections",
        ),
        pytest.param(
            without(f"{PREFIX}.0.self_attn.q_proj.lora_A"),
            MissingTensor,
            f"{PREFIX}.0.self_attn.q_proj.lora_A.weight",
            "no such tensor",
            id="half of an attention pair",
        ),
        pytest.param(
            # unsloth#3405: experts never targeted.
            without(f"{PREFIX}.0.mlp.experts", f"{PREFIX}.1.mlp.experts"),
            NoExpertKeys,
            "adapter_model.safetensors",
            "only attention, router",
            id="no experts",
        ),
        pytest.param(
            renamed(lambda name: name.replace("layers.1.", "layers.2.")),
            BaseMismatch,
            f"{PREFIX}.2.mlp.experts.base_layer.lora_A.weight",
            "layer 2",
            id="a layer that the base does not have",
        ),
        pytest.param(
            renamed(exchange),
            LayoutConflict,
            f"{PREFIX}.0.mlp.experts.base_layer.lora_A.weight",
            "fit the layer's other parameter",
            id="the two pairs' names exchanged",
        ),
        pytest.param(
            lambda tensors: (
                tensors | {f"{PREFIX}.0.mlp.experts.0.up_proj.lora_A.weight": torch.ones(RANK, HIDDEN)}
            ),
            MixedForms,
            f"{PREFIX}.0.mlp.experts.base_layer.lora_A.weight",
            "stacked ones",
            id="per-expert and stacked in one file",
        ),
        pytest.param(
            lambda tensors: tensors | {f"{INNER}.lora_A.weight": torch.ones(EXPERTS, RANK, HIDDEN)},
            UnsupportedSourceFormat,
            f"{INNER}.lora_A.weight",
            "shape (4, 3, 10)",
            id="three dimensions",
        ),
        pytest.param(
            lambda tensors: (
                tensors | {f"{PREFIX}.0.mlp.shared_expert.up_proj.lora_A.weight": torch.ones(RANK, HIDDEN)}
            ),
            UnexpectedTensor,
            f"{PREFIX}.0.mlp.shared_expert.up_proj.lora_A.weight",
            "no module of this family",
            id="a module of another family",
        ),
        pytest.param(
            lambda tensors: tensors | {f"{PREFIX}.0.mlp.gate_proj.lora_A.weight": torch.ones(RANK, HIDDEN)},
            BaseMismatch,
            f"{PREFIX}.0.mlp.gate_proj.lora_A.weight",
            "layer 0, which is not one",
            id="an ordinary MLP where the base has experts",
        ),
        pytest.param(
            lambda tensors: tensors | {f"{PREFIX}.0.self_attn.k_proj.lora_B.weight": torch.ones(6, RANK)},
            BaseMismatch,
            f"{PREFIX}.0.self_attn.k_proj.lora_B.weight",
            "shape (6, 3)",
            id="attention of another base",
        ),
        pytest.param(
            lambda tensors: tensors | {f"{PREFIX}.0.self_attn.k_proj.lora_B.weight": torch.ones(5, RANK + 1)},
            ShapeMismatch,
            f"{PREFIX}.0.self_attn.k_proj.lora_B.weight",
            "shape (5, 4)",
            id="attention of another rank",
        ),
    ],
)
def test_misfits(
    tmp_path: Path, change: Callable[[Tensors], Tensors], error: type[AdapterError], where: str, found: str
) -> None:
    with pytest.raises(error) as caught:
        look(tmp_path, change(encode(Logical()) | attention()))
    assert (caught.value.adapter, caught.value.where) == (LABEL, where)
    assert found in caught.value.found
    assert caught.value.expected
    assert caught.value.advice


@pytest.mark.parametrize(
    ("changes", "error", "found"),
    [
        ({"hidden_size": 12}, BaseMismatch, "lora_A (12, 10)"),
        ({"moe_intermediate_size": 8}, BaseMismatch, "lora_B (14, 12)"),
        ({"num_local_experts": 6}, BaseMismatch, "12 rows: 4 experts of rank 3, or rank 2 for 6 experts"),
        ({"num_hidden_layers": 1}, BaseMismatch, "layer 1"),
        ({"num_hidden_layers": 3}, MissingTensor, "no such tensor"),
        ({"mlp_only_layers": [1]}, BaseMismatch, "layer 1, which is not one"),
    ],
)
def test_wrong_base(tmp_path: Path, changes: dict[str, Any], error: type[AdapterError], found: str) -> None:
    tensors = encode(Logical())
    if "hidden_size" in changes:
        tensors |= {name: tensor for name, tensor in attention().items() if "o_proj" in name}
    source = save_adapter(tmp_path / "source", tensors)
    with pytest.raises(error) as caught:
        inspect_adapter(source, make_base(**changes), label=LABEL)
    assert found in caught.value.found


def test_rank_that_does_not_divide(tmp_path: Path) -> None:
    with pytest.raises(RankUnsupported, match=r"found 12 rows; expected 4 experts \* rank 5 = 20 rows"):
        look(tmp_path, encode(Logical()), r=5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nonfinite_values_are_counted(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    """ainode#186: adapters full of NaN recorded as success."""
    tensors = encode(Logical(dtype=dtype))
    tensors[f"{OUTER}.lora_A.weight"][1, 2:4] = value
    with pytest.raises(NonFinite, match=rf"{OUTER}.lora_A.weight: found 2 NaN or infinite of 84"):
        look(tmp_path, tensors)
    look(tmp_path, tensors, header_only=True)


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("orientation", Orientation)
def test_experts_that_never_moved(tmp_path: Path, orientation: Orientation, zero: float) -> None:
    """unsloth-zoo#606, peft#1402: attention trained, every expert's lora_B still zero."""
    tensors = encode(Logical(), orientation=orientation) | attention()
    for name in tensors:
        if ".experts." in name and "lora_B" in name:
            tensors[name].fill_(zero)
    with pytest.raises(
        ExpertsUntrained, match=r"found all 24 deltas zero; expected routed experts that moved"
    ):
        look(tmp_path, tensors)


@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("packing", Packing)
def test_experts_that_saw_no_tokens_are_normal(
    tmp_path: Path, packing: Packing, orientation: Orientation
) -> None:
    """One expert of one layer untouched: a fraction below 1, no fault; found under the right packing only."""
    logical = Logical()
    for parameter in ("gate_up_proj", "down_proj"):
        factors = logical.b if orientation is Orientation.STANDARD else logical.a
        factors[1, parameter][2] = 0.0
    tensors = encode(logical, packing=packing, orientation=orientation)
    source = save_adapter(tmp_path / "source", tensors)
    fractions = {
        forced: inspect_adapter(source, make_base(), label=LABEL, forced=forced).classes[0].trained_fraction
        for forced in Packing
    }
    assert fractions[packing] == 7 / 8
    assert fractions[packing.other] == 1.0


@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_projection_that_never_moved_is_flagged(
    tmp_path: Path, projection: str, orientation: Orientation
) -> None:
    logical = Logical()
    for layer in range(LAYERS):
        if projection == "down_proj":
            logical.b[layer, "down_proj"].zero_()
        else:
            share = slice(0, INTER) if projection == "gate_proj" else slice(INTER, 2 * INTER)
            logical.b[layer, "gate_up_proj"][:, share] = 0.0
    found = look(tmp_path, encode(logical, orientation=orientation))
    assert found.classes[0].trained_fraction == pytest.approx(2 / 3)
    assert found.warnings[-1] == f"no expert's {projection} was trained: all its deltas are zero"


def all_errors() -> list[type[AdapterError]]:
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, AdapterError) and kind is not AdapterError
    ]


@pytest.mark.parametrize("kind", all_errors())
def test_errors_keep_their_facts_in_a_pickle(kind: type[AdapterError]) -> None:
    error = pickle.loads(pickle.dumps(kind(LABEL, "here", "this", "that")))
    assert type(error) is kind
    assert (error.adapter, error.where, error.expected, error.found) == (LABEL, "here", "this", "that")
    assert error.advice == kind.ADVICE != ""
    assert str(error) == f"{LABEL}: here: found that; expected this. {kind.ADVICE}"
    assert pickle.loads(pickle.dumps(kind(LABEL, "here", "this", "that", "Do so."))).advice == "Do so."


def test_destination_error_pickles() -> None:
    error = pickle.loads(pickle.dumps(DestinationExists(Path("/a"))))
    assert error.destination == Path("/a")
