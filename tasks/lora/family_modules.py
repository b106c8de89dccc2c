"""What recurs in the rows of families.py: sizes by the fields that hold them, and modules by the handful.

`at` is where in a decoder layer a module stands, such as "self_attn".
"""

from __future__ import annotations

from dataclasses import replace

from tasks.lora.family import (
    ExpertParameter,
    LayerKind,
    LinearModule,
    MinimumVersion,
    Proof,
    ServedClass,
    Size,
    TensorClass,
    UnservedModule,
    size_of,
)

HIDDEN = size_of("hidden_size")
INTERMEDIATE = size_of("intermediate_size")
MOE_INTERMEDIATE = size_of("moe_intermediate_size")
HEADS = size_of("num_attention_heads")
QUERY = HEADS * size_of("head_dim")
KEY_VALUE = size_of("num_key_value_heads") * size_of("head_dim")
EXPERTS = size_of("num_experts", "num_local_experts")
NUMBERED = ("w1", "w3", "w2")

_ONE = Size(((1,),))
_CANONICAL = ("gate_proj", "up_proj", "down_proj")


def layer(at: str, name: str) -> str:
    """Return the template of a module of a layer."""
    return f"layers.{{layer}}.{at}.{name}"


def linear(
    at: str,
    name: str,
    kind: TensorClass,
    layers: LayerKind,
    in_size: Size,
    out_size: Size,
    *,
    served: str | None = None,
    older: tuple[str, ...] = (),
    parameter: str | None = None,
) -> LinearModule:
    """Return a module; `served` and `older` are templates, where the engine or earlier transformers differ."""
    source = layer(at, name)
    return LinearModule((source, *older), served or source, kind, layers, in_size, out_size, parameter)


def attention(
    at: str = "self_attn",
    *,
    layers: LayerKind = LayerKind.ALL,
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    query: Size = QUERY,
    key_value: Size = KEY_VALUE,
    served: str | None = None,
    gated: bool = False,
) -> tuple[LinearModule, ...]:
    """Return the projections of an attention; `served` is where the engine has it, gated: q_proj holds a gate too."""
    sizes = {
        "q_proj": (HIDDEN, 2 * query if gated else query),
        "k_proj": (HIDDEN, key_value),
        "v_proj": (HIDDEN, key_value),
        "o_proj": (query, HIDDEN),
    }
    return tuple(
        linear(at, name, TensorClass.ATTENTION, layers, *sizes[name], served=layer(served or at, name))
        for name in names
    )


def keys_as_values(key_value: Size) -> tuple[LinearModule, ...]:
    """Return k_proj of an attention that takes its keys for the values; the engine has a v_proj all the same."""
    layers, also = LayerKind.KEYS_AS_VALUES, (layer("self_attn", "v_proj"),)
    [keys] = attention(layers=layers, names=("k_proj",), key_value=key_value)
    return (replace(keys, also_served=also),)


def router(
    at: str, name: str, experts: Size, *, served: str | None = None, older: tuple[str, ...] = ()
) -> tuple[LinearModule, ...]:
    """Return a router that is a bare parameter `weight` in transformers 5, so that PEFT targets that."""
    kind, layers = TensorClass.ROUTER, LayerKind.SPARSE
    return (linear(at, name, kind, layers, HIDDEN, experts, served=served, older=older, parameter="weight"),)


def gated_mlp(at: str, kind: TensorClass, layers: LayerKind, size: Size) -> tuple[LinearModule, ...]:
    """Return gate, up and down of a dense layer or of shared experts, `size` wide."""
    return (
        linear(at, "gate_proj", kind, layers, HIDDEN, size),
        linear(at, "up_proj", kind, layers, HIDDEN, size),
        linear(at, "down_proj", kind, layers, size, HIDDEN),
    )


def plain_mlp(at: str, kind: TensorClass, layers: LayerKind, size: Size) -> tuple[LinearModule, ...]:
    """Return up and down of a layer without a gate."""
    return gated_mlp(at, kind, layers, size)[1:]


def dense_mlp(
    at: str, size: Size = INTERMEDIATE, *, layers: LayerKind = LayerKind.DENSE
) -> tuple[LinearModule, ...]:
    """Return what the layers without experts have in their place."""
    return gated_mlp(at, TensorClass.OTHER, layers, size)


def shared_experts(at: str, size: Size) -> tuple[LinearModule, ...]:
    """Return the shared experts, which are one gated MLP."""
    return gated_mlp(at, TensorClass.SHARED_EXPERTS, LayerKind.SPARSE, size)


def shared_expert_with_gate(size: Size) -> tuple[LinearModule, ...]:
    """Return one shared expert with a gate of one number, as the Qwens have it."""
    gate = linear("mlp", "shared_expert_gate", TensorClass.SHARED_EXPERTS, LayerKind.SPARSE, HIDDEN, _ONE)
    return (*shared_experts("mlp.shared_expert", size), gate)


def delta_net() -> tuple[LinearModule, ...]:
    """Return what a gated delta net has that takes LoRA, with its projections apart."""
    heads, (queries_keys_values, gates) = size_of("linear_num_value_heads"), _delta_net_sizes()
    return (
        _delta("in_proj_qkv", HIDDEN, queries_keys_values),
        _delta("in_proj_z", HIDDEN, gates),
        _delta("in_proj_b", HIDDEN, heads),
        _delta("in_proj_a", HIDDEN, heads),
        _delta("out_proj", gates, HIDDEN),
    )


def fused_delta_net() -> tuple[LinearModule, ...]:
    """Return the same of one that has its projections in two, interleaved by head.

    vLLM holds each as it is stored. Source: vLLM model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py.
    """
    queries_keys_values, gates = _delta_net_sizes()
    return (
        _delta("in_proj_qkvz", HIDDEN, queries_keys_values + gates),
        _delta("in_proj_ba", HIDDEN, 2 * size_of("linear_num_value_heads")),
        _delta("out_proj", gates, HIDDEN),
    )


def _delta_net_sizes() -> tuple[Size, Size]:
    keys = size_of("linear_num_key_heads") * size_of("linear_key_head_dim")
    values = size_of("linear_num_value_heads") * size_of("linear_value_head_dim")
    return 2 * keys + values, values


def _delta(name: str, in_size: Size, out_size: Size) -> LinearModule:
    kind, layers = TensorClass.ATTENTION, LayerKind.LINEAR_ATTENTION
    return linear("linear_attn", name, kind, layers, in_size, out_size)


def latent_attention() -> tuple[LinearModule, ...]:
    """Return multi-head latent attention's projections but kv_b_proj.

    Models with a q_lora_rank have q_a_proj and q_b_proj, the others q_proj.
    """
    latent, rotary, query_latent = (
        size_of("kv_lora_rank"),
        size_of("qk_rope_head_dim"),
        size_of("q_lora_rank"),
    )
    query = HEADS * (size_of("qk_nope_head_dim") + rotary)
    sizes = {
        "q_a_proj": (HIDDEN, query_latent),
        "q_b_proj": (query_latent, query),
        "q_proj": (HIDDEN, query),
        "kv_a_proj_with_mqa": (HIDDEN, latent + rotary),
        "o_proj": (HEADS * size_of("v_head_dim"), HIDDEN),
    }
    layers = {
        "q_a_proj": LayerKind.LATENT_QUERIES,
        "q_b_proj": LayerKind.LATENT_QUERIES,
        "q_proj": LayerKind.DIRECT_QUERIES,
    }
    return tuple(
        linear("self_attn", name, TensorClass.ATTENTION, layers.get(name, LayerKind.ALL), *pair)
        for name, pair in sizes.items()
    )


def gated_experts(
    size: Size, *, served: tuple[str, str, str] = _CANONICAL, interleaved: bool = False
) -> tuple[ExpertParameter, ...]:
    """Return gate and up in one parameter, registered first, and down; `served`: gate, up, down in per-expert files.

    Source: PEFT 0.21.2 tuners/lora/layer.py ParamWrapper (nesting: what is registered first ends up inside).
    """
    return (
        ExpertParameter(
            "gate_up_proj",
            "base_layer.",
            HIDDEN,
            2 * size,
            projections=_CANONICAL[:2],
            served=served[:2],
            numbered=NUMBERED[:2],
            interleaved=interleaved,
        ),
        ExpertParameter(
            "down_proj",
            "",
            size,
            HIDDEN,
            projections=_CANONICAL[2:],
            served=served[2:],
            numbered=NUMBERED[2:],
        ),
    )


def plain_experts(size: Size) -> tuple[ExpertParameter, ...]:
    """Return up, registered first, and down of experts without a gate, each a parameter of its own."""
    up, down = _CANONICAL[1:2], _CANONICAL[2:]
    return (
        ExpertParameter(up[0], "base_layer.", HIDDEN, size, up, up, NUMBERED[:1]),
        ExpertParameter(down[0], "", size, HIDDEN, down, down, NUMBERED[2:]),
    )


def served_class(
    architecture: str,
    file: str,
    proof: Proof,
    per_expert: tuple[str, int],
    stacked: tuple[str, int] | None,
    *,
    decoder: str = "model.",
    native_3d: bool = False,
) -> ServedClass:
    """Return a class of vLLM's folder of models.

    per_expert, stacked: the first release whose source serves that format right, and the number of vLLM's own report
    of what went wrong before; None where no release does.
    """
    minimum = tuple(
        MinimumVersion(format, found[0], f"vllm-project/vllm#{found[1]}")
        for format, found in (("per-expert", per_expert), ("stacked", stacked))
        if found is not None
    )
    source = f"vllm/model_executor/models/{file}.py"
    return ServedClass(architecture, decoder, native_3d, source, proof, minimum)


def unserved(at: str, names: tuple[str, ...], why: str) -> tuple[UnservedModule, ...]:
    """Return modules that trainers have and the engine does not serve."""
    return tuple(UnservedModule(layer(at, name), why) for name in names)
