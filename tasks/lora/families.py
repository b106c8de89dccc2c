"""The model families: one row of facts each, and no family's name anywhere else.

Templates hold `{layer}`, and `{expert}` and `{projection}` where experts stand; parsing and formatting are
both made from them (names.py). A new family is a new row; a need no row has yet is a new field.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TensorClass(StrEnum):
    """What a LoRA factor belongs to."""

    ROUTED_EXPERTS = "routed_experts"
    SHARED_EXPERTS = "shared_experts"
    ATTENTION = "attention"
    ROUTER = "router"
    OTHER = "other"


class Size(StrEnum):
    """A dimension of the base model, by name; the numbers stand in its config.json alone."""

    HIDDEN = "hidden"
    EXPERT_INTERMEDIATE = "expert intermediate"
    GATE_AND_UP = "2 * expert intermediate"
    DENSE_INTERMEDIATE = "dense intermediate"
    EXPERTS = "experts"
    QUERY = "heads * head_dim"
    KEY_VALUE = "key-value heads * head_dim"


class LayerKind(StrEnum):
    """Which layers of a model have a module."""

    ALL = "all"
    SPARSE = "sparse"
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A stacked parameter of the experts module, and the projections it holds.

    wrapper: what PEFT puts between the experts module and the factor, with its dot. projections: in the
    order in which they lie along the parameter's output rows, in equal shares. numbered: what some trainers
    call them where all experts of one projection are a tensor of three dimensions, in the same order.
    """

    name: str
    wrapper: str
    in_size: Size
    out_size: Size
    projections: tuple[str, ...]
    numbered: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinearModule:
    """A module whose factors are served under the name they are saved under."""

    template: str
    kind: TensorClass
    layers: LayerKind
    in_size: Size
    out_size: Size


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture calls its parts, on the trainer's side and on the engine's.

    experts: the stacked module. expert: one projection of one expert, as the engine names it.
    *_fields: where its config.json keeps a size; of several, those present must agree.
    patched_by_unsloth: unsloth_zoo <= 2026.9.5 runs this family's experts with its own forward.
    native_3d: vLLM takes stacked experts of this family as they are, and per-expert ones only in mixed mode.
    """

    name: str
    experts: str
    expert: str
    parameters: tuple[ExpertParameter, ...]
    modules: tuple[LinearModule, ...]
    expert_count_fields: tuple[str, ...]
    expert_intermediate_field: str
    dense_intermediate_field: str
    sparse_step_field: str
    dense_layers_field: str
    patched_by_unsloth: bool
    native_3d: bool


# Source: transformers 5.24 models/qwen3_moe/{configuration,modeling}_qwen3_moe.py (sizes, which layers are
# sparse, halves for gate and up); PEFT 0.21.2 tuners/lora/layer.py ParamWrapper (nesting: the parameter that
# is registered first ends up under base_layer); vLLM 0.32 models/qwen3_moe.py (per-expert names).
_QWEN3_MOE = Family(
    name="qwen3_moe",
    experts="model.layers.{layer}.mlp.experts",
    expert="model.layers.{layer}.mlp.experts.{expert}.{projection}",
    parameters=(
        ExpertParameter(
            "gate_up_proj",
            "base_layer.",
            Size.HIDDEN,
            Size.GATE_AND_UP,
            ("gate_proj", "up_proj"),
            ("w1", "w3"),
        ),
        ExpertParameter("down_proj", "", Size.EXPERT_INTERMEDIATE, Size.HIDDEN, ("down_proj",), ("w2",)),
    ),
    modules=(
        LinearModule(
            "model.layers.{layer}.self_attn.q_proj",
            TensorClass.ATTENTION,
            LayerKind.ALL,
            Size.HIDDEN,
            Size.QUERY,
        ),
        LinearModule(
            "model.layers.{layer}.self_attn.k_proj",
            TensorClass.ATTENTION,
            LayerKind.ALL,
            Size.HIDDEN,
            Size.KEY_VALUE,
        ),
        LinearModule(
            "model.layers.{layer}.self_attn.v_proj",
            TensorClass.ATTENTION,
            LayerKind.ALL,
            Size.HIDDEN,
            Size.KEY_VALUE,
        ),
        LinearModule(
            "model.layers.{layer}.self_attn.o_proj",
            TensorClass.ATTENTION,
            LayerKind.ALL,
            Size.QUERY,
            Size.HIDDEN,
        ),
        LinearModule(
            "model.layers.{layer}.mlp.gate", TensorClass.ROUTER, LayerKind.SPARSE, Size.HIDDEN, Size.EXPERTS
        ),
        LinearModule(
            "model.layers.{layer}.mlp.gate_proj",
            TensorClass.OTHER,
            LayerKind.DENSE,
            Size.HIDDEN,
            Size.DENSE_INTERMEDIATE,
        ),
        LinearModule(
            "model.layers.{layer}.mlp.up_proj",
            TensorClass.OTHER,
            LayerKind.DENSE,
            Size.HIDDEN,
            Size.DENSE_INTERMEDIATE,
        ),
        LinearModule(
            "model.layers.{layer}.mlp.down_proj",
            TensorClass.OTHER,
            LayerKind.DENSE,
            Size.DENSE_INTERMEDIATE,
            Size.HIDDEN,
        ),
    ),
    expert_count_fields=("num_experts", "num_local_experts"),
    expert_intermediate_field="moe_intermediate_size",
    dense_intermediate_field="intermediate_size",
    sparse_step_field="decoder_sparse_step",
    dense_layers_field="mlp_only_layers",
    patched_by_unsloth=True,
    native_3d=False,
)

FAMILIES: tuple[Family, ...] = (_QWEN3_MOE,)


def find_family(model_type: str) -> Family | None:
    """Return the row for a config.json's model_type, or None."""
    return next((family for family in FAMILIES if family.name == model_type), None)
