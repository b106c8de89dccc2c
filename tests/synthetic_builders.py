"""Model families that do not exist, one for each way in which real ones differ from the first that was served.

Each is a whole row; what differs is in it alone. Tests spell names and sizes themselves.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from lora_builders import EXPERTS, FAMILY, HEAD_DIM, base_fields

from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.family import (
    ExpertParameter,
    Family,
    LayerKind,
    LinearModule,
    Proof,
    ServedClass,
    StoredAs,
    TensorClass,
    size_of,
)
from tasks.lora.layer_rules import AfterDenseLayers, WordLayers

_HIDDEN = size_of("hidden_size")
_INTER = size_of("moe_intermediate_size")


def read_base_of(*families: Family, whole: dict[str, Any] | None = None, **changes: Any) -> BaseConfig:
    """A tiny base of the first family, its config.json read as if the table held these rows and no others.

    whole: the config.json, in place of a changed tiny one.
    """

    def find(model_type: str) -> Family | None:
        return next((family for family in families if model_type in family.model_types), None)

    fields = base_fields(**{"model_type": families[0].model_types[0], **changes}) if whole is None else whole
    with patch("tasks.lora.base.find_family", find), patch("tasks.lora.base.FAMILIES", families):
        return read_base_config(json.dumps(fields).encode(), label="tiny-base")


def _serve(architecture: str, decoder: str, *, native_3d: bool = False) -> ServedClass:
    return ServedClass(architecture, decoder, native_3d, "no file", Proof.READ)


# Gate and up take turns row by row, the engine calls them w1 and w3, and stores parameters (experts, in, out).
INTERLEAVED = replace(
    FAMILY,
    model_types=("made_interleaved",),
    served=(_serve("MadeInterleavedForCausalLM", "model.", native_3d=True),),
    parameters=(
        replace(FAMILY.parameters[0], served=("w1", "w3"), interleaved=True),
        replace(FAMILY.parameters[1], served=("w2",)),
    ),
    stored=StoredAs.IN_OUT,
)

# No gate: one projection a parameter. Older trainers call the decoder by another name.
UNGATED = replace(
    FAMILY,
    model_types=("made_ungated",),
    decoders=("model.", "backbone."),
    served=(_serve("MadeUngatedForCausalLM", "model."),),
    experts="layers.{layer}.mixer.experts",
    served_experts="layers.{layer}.mixer.experts",
    parameters=(
        ExpertParameter("up_proj", "base_layer.", _HIDDEN, _INTER, ("up_proj",), ("up_proj",), ("w1",)),
        ExpertParameter("down_proj", "", _INTER, _HIDDEN, ("down_proj",), ("down_proj",), ("w2",)),
    ),
    modules=(
        LinearModule(
            ("layers.{layer}.mixer.q_proj",),
            "layers.{layer}.mixer.q_proj",
            TensorClass.ATTENTION,
            LayerKind.FULL_ATTENTION,
            _HIDDEN,
            size_of("num_attention_heads") * size_of("head_dim"),
        ),
    ),
    expert_count=size_of("n_routed_experts"),
    sparse=WordLayers(("layers_block_type", "hybrid_override_pattern"), ("moe", "E")),
    layer_kinds=(
        (
            LayerKind.FULL_ATTENTION,
            WordLayers(("layers_block_type", "hybrid_override_pattern"), ("full_attention", "*")),
        ),
    ),
    layer_lists=("layers_block_type", "hybrid_override_pattern"),
)
UNGATED_FIELDS: dict[str, Any] = {
    "num_local_experts": None,
    "n_routed_experts": EXPERTS,
    "num_hidden_layers": None,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
}

# The engine calls everything otherwise, by class; attention has other sizes in other layers; the first is dense.
RENAMED = replace(
    FAMILY,
    model_types=("made_renamed", "made_renamed_text"),
    decoders=("model.language_model.", "model."),
    served=(
        _serve("MadeRenamedForCausalLM", "model."),
        _serve("MadeRenamedForConditionalGeneration", "language_model.model."),
    ),
    served_experts="layers.{layer}.block_sparse_moe.experts",
    parameters=(
        replace(FAMILY.parameters[0], served=("w1", "w3")),
        replace(FAMILY.parameters[1], served=("w2",)),
    ),
    modules=(
        LinearModule(
            ("layers.{layer}.self_attn.q_proj",),
            "layers.{layer}.self_attn.q_proj",
            TensorClass.ATTENTION,
            LayerKind.SLIDING_ATTENTION,
            _HIDDEN,
            size_of("num_attention_heads") * size_of("head_dim"),
        ),
        LinearModule(
            ("layers.{layer}.self_attn.q_proj",),
            "layers.{layer}.self_attn.q_proj",
            TensorClass.ATTENTION,
            LayerKind.FULL_ATTENTION,
            _HIDDEN,
            size_of("num_attention_heads") * size_of("global_head_dim"),
        ),
        LinearModule(
            ("layers.{layer}.mlp.gate", "layers.{layer}.moe.gate"),
            "layers.{layer}.block_sparse_moe.gate",
            TensorClass.ROUTER,
            LayerKind.SPARSE,
            _HIDDEN,
            FAMILY.expert_count,
            parameter="weight",
        ),
        LinearModule(
            ("layers.{layer}.mlp.shared_expert.up_proj",),
            "layers.{layer}.shared_mlp.up_proj",
            TensorClass.SHARED_EXPERTS,
            LayerKind.SPARSE,
            _HIDDEN,
            size_of("num_shared_experts") * _INTER,
        ),
    ),
    sparse=AfterDenseLayers("first_k_dense_replace", "moe_layer_freq"),
    layer_kinds=(
        (LayerKind.SLIDING_ATTENTION, WordLayers(("layer_types",), ("sliding_attention",))),
        (LayerKind.FULL_ATTENTION, WordLayers(("layer_types",), ("full_attention",))),
    ),
)
RENAMED_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "global_head_dim": HEAD_DIM + 4,
    "num_shared_experts": 2,
}
