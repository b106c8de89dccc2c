"""Sources that are not whole, or cannot become what is asked: each refused with its own error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
    HIDDEN,
    LABEL,
    PREFIX,
    PROJECTIONS,
    RANK,
    Logical,
    Separate,
    encode,
    encode_alone,
    encode_cubes,
    encode_experts,
    look,
)

from tasks.lora.check import check_conversion
from tasks.lora.convert import convert_adapter
from tasks.lora.errors import (
    AdapterError,
    BaseMismatch,
    MissingTensor,
    MixedForms,
    RankUnsupported,
    ShapeMismatch,
    UnsupportedConfig,
    UnsupportedDtype,
    UnsupportedSourceFormat,
)
from tasks.lora.plan import plan_conversion
from tasks.lora.target import TargetFormat

Tensors = dict[str, torch.Tensor]

# What is refused


def without(tensors: Tensors, *parts: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


def changed(tensors: Tensors, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {name: change(tensor).contiguous() if part in name else tensor for name, tensor in tensors.items()}


EXPERT, CUBE = encode_experts(Separate()), encode_cubes(Separate())


@pytest.mark.parametrize(
    ("tensors", "config", "error", "where", "expected", "found"),
    [
        pytest.param(
            without(EXPERT, "1.mlp.experts.3."),
            {},
            MissingTensor,
            f"{PREFIX}.1.mlp.experts.3.gate_proj.lora_A.weight",
            "all 4 experts' gate_proj",
            "no such tensor",
            id="an expert is missing",
        ),
        pytest.param(
            without(EXPERT, "0.mlp.experts.2.up_proj.lora_B"),
            {},
            MissingTensor,
            f"{PREFIX}.0.mlp.experts.2.up_proj.lora_B.weight",
            "all 4 experts' up_proj",
            "no such tensor",
            id="a factor is missing",
        ),
        pytest.param(
            without(EXPERT, "1.mlp.experts"),
            {},
            MissingTensor,
            f"{PREFIX}.1.mlp.experts.0.gate_proj.lora_A.weight",
            "each layer",
            "no such tensor",
            id="a layer is missing",
        ),
        pytest.param(
            without(encode(Logical()), "1.mlp.experts.base_layer"),
            {},
            MissingTensor,
            f"{PREFIX}.1.mlp.experts.base_layer.lora_A.weight",
            "gate_up_proj in each of 2 layers",
            "no such tensor",
            id="a pair in some layers only",
        ),
        pytest.param(
            without(encode_alone(Logical(), "down_proj"), "1.mlp"),
            {},
            MissingTensor,
            f"{PREFIX}.1.mlp.experts.lora_A.weight",
            "down_proj in each of 2 layers",
            "no such tensor",
            id="a lone pair in some layers only",
        ),
        pytest.param(
            without(CUBE, "1.mlp.experts.w3.lora_B"),
            {},
            MissingTensor,
            f"{PREFIX}.1.mlp.experts.up_proj.lora_B.weight",
            "up_proj in each layer",
            "no such tensor",
            id="a 3-d factor is missing",
        ),
        pytest.param(
            EXPERT | {f"{PREFIX}.0.mlp.experts.4.up_proj.lora_A.weight": torch.ones(RANK, HIDDEN)},
            {},
            BaseMismatch,
            f"{PREFIX}.0.mlp.experts.4.up_proj.lora_A.weight",
            "experts 0 to 3",
            "expert 4",
            id="an expert too many",
        ),
        pytest.param(
            EXPERT | encode(Logical()),
            {},
            MixedForms,
            f"{PREFIX}.0.mlp.experts.base_layer.lora_A.weight",
            "per-expert experts throughout",
            "stacked ones",
            id="stacked and per-expert",
        ),
        pytest.param(
            without(EXPERT, "down_proj") | without(CUBE, ".w1.", ".w3."),
            {},
            MixedForms,
            f"{PREFIX}.0.mlp.experts.w2.lora_A.weight",
            "per-expert experts throughout",
            "3-d ones",
            id="per-expert and 3-d",
        ),
        pytest.param(
            changed(EXPERT, "1.mlp.experts.2.down_proj.lora_A", lambda tensor: tensor[:2]),
            {},
            ShapeMismatch,
            f"{PREFIX}.1.mlp.experts.2.down_proj.lora_A.weight",
            "rank 3",
            "shape (2, 7)",
            id="another rank of one expert",
        ),
        pytest.param(
            changed(EXPERT, "1.mlp.experts.2.down_proj.lora_B", lambda tensor: tensor[:-1]),
            {},
            BaseMismatch,
            f"{PREFIX}.1.mlp.experts.2.down_proj.lora_B.weight",
            "10 along the other axis",
            "shape (9, 3)",
            id="a narrower expert",
        ),
        pytest.param(
            changed(EXPERT, "1.mlp.experts.2.down_proj.lora_B", lambda tensor: tensor.bfloat16()),
            {},
            UnsupportedDtype,
            f"{PREFIX}.1.mlp.experts.2.down_proj.lora_B.weight",
            "F32, as",
            "BF16",
            id="another dtype of one expert",
        ),
        pytest.param(
            EXPERT,
            {"alpha_pattern": {"experts.2.up_proj": 9}},
            UnsupportedConfig,
            "adapter_config.json: rank_pattern and alpha_pattern",
            "one rank and alpha for all experts' up_proj of a layer",
            "alpha 9 for model.layers.0.mlp.experts.2.up_proj",
            id="another alpha of one expert",
        ),
        pytest.param(
            changed(CUBE, ".w1.lora_A", lambda tensor: tensor[:3]),
            {},
            BaseMismatch,
            f"{PREFIX}.0.mlp.experts.w1.lora_A.weight",
            "4 experts, or 1",
            "shape (3, 3, 10)",
            id="a 3-d tensor of three experts",
        ),
        pytest.param(
            changed(CUBE, ".w1.lora_A", lambda tensor: tensor.flatten(0, 1)),
            {},
            UnsupportedSourceFormat,
            f"{PREFIX}.0.mlp.experts.w1.lora_A.weight",
            "3 dimensions",
            "shape (12, 10)",
            id="a 3-d name of two dimensions",
        ),
        pytest.param(
            changed(CUBE, ".w2.lora_B", lambda tensor: tensor[..., :2]),
            {},
            ShapeMismatch,
            f"{PREFIX}.0.mlp.experts.w2.lora_B.weight",
            "rank 3",
            "shape (4, 10, 2)",
            id="another rank of a 3-d B",
        ),
        pytest.param(
            encode_experts(Separate(dict.fromkeys(PROJECTIONS, 513), layers=(0, 1))),
            {"rank_pattern": {"down_proj": 513, "up_proj": 513, "gate_proj": 513}},
            RankUnsupported,
            f"{PREFIX}.0.mlp.experts.0.gate_proj.lora_A.weight",
            "at most 512",
            "rank 513",
            id="a rank that no engine serves",
        ),
    ],
)
def test_what_is_not_whole_is_refused(
    tmp_path: Path,
    tensors: Tensors,
    config: dict[str, Any],
    error: type[AdapterError],
    where: str,
    expected: str,
    found: str,
) -> None:
    """sglang#32376, Megatron-Bridge#5588: a missing factor must not become silence or a crash."""
    with pytest.raises(error) as caught:
        look(tmp_path / "source", tensors, **config)
    assert (caught.value.adapter, caught.value.where) == (LABEL, where)
    assert expected in caught.value.expected
    assert found in caught.value.found
    assert caught.value.advice


@pytest.mark.parametrize(
    ("tensors", "config", "error", "expected", "found"),
    [
        (
            EXPERT,
            {"alpha_pattern": {"up_proj": 9}},
            UnsupportedConfig,
            "one scaling for gate_proj and up_proj",
            "2 and 3",
        ),
        (
            changed(EXPERT, "up_proj", lambda tensor: tensor.bfloat16()),
            {},
            UnsupportedDtype,
            "one dtype for gate_proj and up_proj",
            "BF16 and F32",
        ),
        (
            encode_experts(Separate({"gate_proj": 300, "up_proj": 300, "down_proj": 2}, layers=(0, 1))),
            {"r": 300, "rank_pattern": {"down_proj": 2}},
            RankUnsupported,
            "a stacked rank of at most 512",
            "600",
        ),
    ],
    ids=["scalings", "dtypes", "ranks"],
)
def test_gate_and_up_that_cannot_share_a_tensor_are_served_per_expert_only(
    tmp_path: Path,
    tensors: Tensors,
    config: dict[str, Any],
    error: type[AdapterError],
    expected: str,
    found: str,
) -> None:
    source = look(tmp_path / "source", tensors, **config)
    with pytest.raises(error) as caught:
        plan_conversion(source.layout, TargetFormat.STACKED)
    assert caught.value.adapter == LABEL
    assert "0.mlp.experts" in caught.value.where
    assert expected in caught.value.expected
    assert found in caught.value.found
    assert "per-expert format" in caught.value.advice
    convert_adapter(source.files, plan_conversion(source.layout), tmp_path / "made")
    assert check_conversion(source.files, tmp_path / "made", source.layout).passed
