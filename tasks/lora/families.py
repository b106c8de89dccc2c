"""The model families: one row of facts each, and no family's name anywhere else (family.py says what a row holds).

Read from transformers 5.24, models/<family>/{configuration,modeling}_<family>.py: names, sizes, the order in which
expert parameters are registered, which layers have what. From vLLM 0.32, the file that each served class names: what
it wraps, the names by which adapters address it, hf_to_vllm_mapper, is_3d_moe_weight. What else a fact was read from
stands above its row. `docs/families.md` shows the table; `docs/add-a-family.md` how to add a row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tasks.lora import family_modules as part
from tasks.lora import layer_rules as rule
from tasks.lora.family import Family, LayerKind, Proof, StoredAs, TensorClass, size_of
from tasks.lora.family_modules import EXPERTS, HEADS, HIDDEN, INTERMEDIATE, MOE_INTERMEDIATE, NUMBERED

_ATTENTION, _SHARED, _OTHER = TensorClass.ATTENTION, TensorClass.SHARED_EXPERTS, TensorClass.OTHER
_ALL, _SPARSE, _DENSE, _LISTED = LayerKind.ALL, LayerKind.SPARSE, LayerKind.DENSE, LayerKind.LISTED_DENSE
_FULL, _LINEAR, _SLIDING = LayerKind.FULL_ATTENTION, LayerKind.LINEAR_ATTENTION, LayerKind.SLIDING_ATTENTION

_WRAPPED = "language_model.model."
_RUN, _READ = Proof.RUN, Proof.READ
_engine = part.served_class
_wrapped_engine = partial(part.served_class, decoder=_WRAPPED)
_MLP_EXPERTS = "layers.{layer}.mlp.experts"
_BLOCK_EXPERTS = "layers.{layer}.block_sparse_moe.experts"
_BLOCK_ROUTER = "layers.{layer}.block_sparse_moe.gate"

_STEPPED = rule.SteppedLayers("decoder_sparse_step", "mlp_only_layers")
_AFTER_DENSE = rule.AfterDenseLayers("first_k_dense_replace", "moe_layer_freq")
_SHARED_INTERMEDIATE = size_of("shared_expert_intermediate_size")
_ROUTED = size_of("n_routed_experts")

# What most have; a row that says otherwise counts.
_usual = partial(
    Family, decoders=("model.",), experts=_MLP_EXPERTS, served_experts=_MLP_EXPERTS, stored=StoredAs.OUT_IN
)

# config.json of the first Qwens with delta nets has an interval instead of a list.
_delta_net = partial(rule.WordLayers, ("layer_types",), interval_field="full_attention_interval")
_DELTA_NET_LAYERS = (
    (_FULL, _delta_net(("full_attention",))),
    (_LINEAR, _delta_net(("linear_attention",), others=True)),
)

_QWEN2_MOE = _usual(
    model_types=("qwen2_moe",),
    served=(_engine("Qwen2MoeForCausalLM", "qwen2_moe", _RUN, ("0.14.0", 31339), ("0.22.0", 42242)),),
    parameters=part.gated_experts(MOE_INTERMEDIATE),
    modules=(
        *part.attention(),
        *part.router("mlp", "gate", EXPERTS),
        *part.shared_expert_with_gate(_SHARED_INTERMEDIATE),
        *part.dense_mlp("mlp"),
    ),
    expert_count=EXPERTS,
    sparse=_STEPPED,
    patched_by_unsloth=False,
)

_QWEN3_MOE = _usual(
    model_types=("qwen3_moe",),
    served=(_engine("Qwen3MoeForCausalLM", "qwen3_moe", _RUN, ("0.11.1", 18120), ("0.22.0", 42242)),),
    parameters=part.gated_experts(MOE_INTERMEDIATE),
    modules=(*part.attention(), *part.router("mlp", "gate", EXPERTS), *part.dense_mlp("mlp", layers=_LISTED)),
    expert_count=EXPERTS,
    sparse=_STEPPED,
    layer_kinds=((_LISTED, rule.ListedDenseLayers("mlp_only_layers", _STEPPED)),),
    patched_by_unsloth=True,
)

_QWEN3_NEXT = _usual(
    model_types=("qwen3_next",),
    served=(_engine("Qwen3NextForCausalLM", "qwen3_next", _RUN, ("0.14.0", 31339), ("0.22.0", 42242)),),
    parameters=part.gated_experts(MOE_INTERMEDIATE),
    modules=(
        *part.attention(layers=_FULL, gated=True),
        *part.fused_delta_net(),
        *part.router("mlp", "gate", EXPERTS),
        *part.shared_expert_with_gate(_SHARED_INTERMEDIATE),
        *part.dense_mlp("mlp"),
    ),
    expert_count=EXPERTS,
    sparse=_STEPPED,
    layer_kinds=_DELTA_NET_LAYERS,
    patched_by_unsloth=True,
)

# The class of text alone is not marked as taking stacked experts. Its mapper, and the other's, rewrite the trainer's
# `model.language_model.`; what is served is what they leave as it is.
_QWEN3_5_MOE = _usual(
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    decoders=("model.language_model.", _WRAPPED, "model."),
    served=(
        _engine("Qwen3_5MoeForCausalLM", "qwen3_5", _READ, ("0.19.0", 35286), ("0.22.0", 42242)),
        _wrapped_engine(
            "Qwen3_5MoeForConditionalGeneration",
            "qwen3_5",
            _READ,
            ("0.22.0", 40005),
            ("0.19.0", 35286),
            native_3d=True,
        ),
    ),
    parameters=part.gated_experts(MOE_INTERMEDIATE),
    modules=(
        *part.attention(layers=_FULL, gated=True),
        *part.delta_net(),
        *part.router("mlp", "gate", EXPERTS),
        *part.shared_expert_with_gate(_SHARED_INTERMEDIATE),
    ),
    expert_count=EXPERTS,
    sparse=rule.EveryLayer(),
    layer_kinds=_DELTA_NET_LAYERS,
    patched_by_unsloth=True,
)

# transformers 4 stored (experts, in, out) without a mark; where that matters, the shapes of the factors tell. vLLM's
# class for the text inside, Qwen3MoeLLMForCausalLM, never says what gate_up_proj consists of.
_QWEN3_VL_MOE = _usual(
    model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
    decoders=("model.language_model.", _WRAPPED),
    served=(
        _wrapped_engine(
            "Qwen3VLMoeForConditionalGeneration",
            "qwen3_vl_moe",
            _READ,
            ("0.22.0", 40005),
            ("0.14.0", 31534),
            native_3d=True,
        ),
    ),
    parameters=part.gated_experts(MOE_INTERMEDIATE),
    modules=(*part.attention(), *part.router("mlp", "gate", EXPERTS)),
    unserved=part.unserved(
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        "one of a dense layer, whose gate_up_proj vLLM leaves without adapters",
    ),
    expert_count=EXPERTS,
    sparse=_STEPPED,
    patched_by_unsloth=True,
)

# The engine keeps transformers 4's names, and drops `mlp.experts` and `mlp.gate` without a word.
_MIXTRAL = _usual(
    model_types=("mixtral",),
    served=(_engine("MixtralForCausalLM", "mixtral", _RUN, ("0.11.1", 18120), ("0.22.0", 42242)),),
    served_experts=_BLOCK_EXPERTS,
    parameters=part.gated_experts(INTERMEDIATE, served=NUMBERED),
    modules=(*part.attention(), *part.router("mlp", "gate", EXPERTS, served=_BLOCK_ROUTER)),
    expert_count=EXPERTS,
    sparse=rule.EveryLayer(),
    patched_by_unsloth=True,
)

_OLMOE = _usual(
    model_types=("olmoe",),
    served=(_engine("OlmoeForCausalLM", "olmoe", _RUN, ("0.11.1", 18120), ("0.22.0", 42242)),),
    parameters=part.gated_experts(INTERMEDIATE),
    modules=(*part.attention(), *part.router("mlp", "gate", EXPERTS)),
    expert_count=EXPERTS,
    sparse=rule.EveryLayer(),
    patched_by_unsloth=False,
)

# vLLM layers/attention/mla_attention.py, process_weights_after_loading: W_UK and W_UV are cut out of it once.
_ABSORBED = part.unserved(
    "self_attn", ("kv_b_proj",), "one whose base weight vLLM folds into the attention, without the adapter"
)

_LATENT, _DIRECT = (rule.GivenLayers("q_lora_rank", given) for given in (True, False))
_DEEPSEEK_V2 = _usual(
    model_types=("deepseek_v2",),
    served=(_engine("DeepseekV2ForCausalLM", "deepseek_v2", _RUN, ("0.11.1", 10446), ("0.22.0", 42242)),),
    parameters=part.gated_experts(MOE_INTERMEDIATE),
    modules=(
        *part.latent_attention(),
        *part.router("mlp", "gate", _ROUTED),
        *part.shared_experts("mlp.shared_experts", size_of("n_shared_experts") * MOE_INTERMEDIATE),
        *part.dense_mlp("mlp"),
    ),
    unserved=_ABSORBED,
    expert_count=_ROUTED,
    sparse=_AFTER_DENSE,
    layer_kinds=((LayerKind.LATENT_QUERIES, _LATENT), (LayerKind.DIRECT_QUERIES, _DIRECT)),
    patched_by_unsloth=False,
)

_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2,
    model_types=("deepseek_v3",),
    served=(_engine("DeepseekV3ForCausalLM", "deepseek_v2", _RUN, ("0.11.1", 10446), ("0.22.0", 42242)),),
    patched_by_unsloth=True,
)

_GLM4_MOE = _usual(
    model_types=("glm4_moe",),
    served=(_engine("Glm4MoeForCausalLM", "glm4_moe", _RUN, ("0.11.1", 18120), ("0.22.0", 42242)),),
    parameters=part.gated_experts(MOE_INTERMEDIATE),
    modules=(
        *part.attention(),
        *part.router("mlp", "gate", _ROUTED),
        *part.shared_experts("mlp.shared_experts", size_of("n_shared_experts") * MOE_INTERMEDIATE),
        *part.dense_mlp("mlp"),
    ),
    expert_count=_ROUTED,
    sparse=_AFTER_DENSE,
    patched_by_unsloth=True,
)

# Gate and up take turns row by row (transformers GptOssExperts._apply_gate). The engine calls the attention `attn`.
_GPT_OSS = _usual(
    model_types=("gpt_oss",),
    served=(
        _engine("GptOssForCausalLM", "gpt_oss", _RUN, ("0.22.0", 40005), ("0.14.0", 31534), native_3d=True),
    ),
    parameters=part.gated_experts(INTERMEDIATE, served=NUMBERED, interleaved=True),
    stored=StoredAs.IN_OUT,
    modules=(*part.attention(served="attn"), *part.router("mlp", "router", EXPERTS)),
    expert_count=EXPERTS,
    sparse=rule.EveryLayer(),
    patched_by_unsloth=True,
)

# Experts beside the dense MLP, in every layer. Layers of full attention have heads of another size, and where
# attention_k_eq_v is set no v_proj, but k_proj gives the values, too, with heads of another number. vLLM copies the
# base's k_proj to both places, but not an adapter's. The last layers may have neither, and take those of earlier ones.
_FULL_HEAD = size_of("global_head_dim", "per_layer_config.*.head_dim")
_GLOBAL_HEADS = size_of(
    "num_global_key_value_heads", "per_layer_config.*.num_key_value_heads", otherwise="num_key_value_heads"
)
_FULL_LAYERS = rule.WordLayers(("layer_types",), ("full_attention",))
_SLIDING_LAYERS = rule.WordLayers(("layer_types",), ("sliding_attention",))
_keys = partial(rule.UnsharedLayers, "num_kv_shared_layers")
_GEMMA4 = _usual(
    model_types=("gemma4", "gemma4_text"),
    decoders=("model.language_model.", _WRAPPED, "model."),
    served=(
        _engine("Gemma4ForCausalLM", "gemma4", _RUN, ("0.31.0", 41754), ("0.31.0", 50252)),
        _wrapped_engine(
            "Gemma4ForConditionalGeneration", "gemma4_mm", _READ, ("0.31.0", 41754), ("0.31.0", 50252)
        ),
    ),
    experts="layers.{layer}.experts",
    served_experts="layers.{layer}.experts",
    parameters=part.gated_experts(MOE_INTERMEDIATE),
    modules=(
        *part.attention(layers=_SLIDING, names=("q_proj", "o_proj")),
        *part.attention(layers=LayerKind.SLIDING_KEYS, names=("k_proj", "v_proj")),
        *part.attention(layers=_FULL, names=("q_proj", "o_proj"), query=HEADS * _FULL_HEAD),
        *part.attention(
            layers=LayerKind.SEPARATE_VALUES,
            names=("k_proj", "v_proj"),
            key_value=size_of("num_key_value_heads") * _FULL_HEAD,
        ),
        *part.keys_as_values(_GLOBAL_HEADS * _FULL_HEAD),
        part.linear("router", "proj", TensorClass.ROUTER, _SPARSE, HIDDEN, size_of("num_experts")),
        *part.gated_mlp("mlp", _OTHER, _ALL, INTERMEDIATE),
    ),
    expert_count=size_of("num_experts"),
    sparse=rule.EveryLayer(),
    layer_kinds=(
        (_SLIDING, _SLIDING_LAYERS),
        (LayerKind.SLIDING_KEYS, _keys(_SLIDING_LAYERS)),
        (_FULL, _FULL_LAYERS),
        (LayerKind.SEPARATE_VALUES, rule.FlaggedLayers("attention_k_eq_v", False, _keys(_FULL_LAYERS))),
        (LayerKind.KEYS_AS_VALUES, rule.FlaggedLayers("attention_k_eq_v", True, _keys(_FULL_LAYERS))),
    ),
    patched_by_unsloth=True,
)

# transformers 4 stored its experts as one linear map each, input_linear and output_linear: those have no row.
_GRANITEMOE = _usual(
    model_types=("granitemoe",),
    served=(_engine("GraniteMoeForCausalLM", "granitemoe", _RUN, ("0.25.0", 46247), ("0.25.0", 46247)),),
    experts=_BLOCK_EXPERTS,
    served_experts=_BLOCK_EXPERTS,
    parameters=part.gated_experts(INTERMEDIATE),
    modules=(
        *part.attention(),
        *part.router(
            "block_sparse_moe",
            "router",
            EXPERTS,
            served=_BLOCK_ROUTER,
            older=("layers.{layer}.block_sparse_moe.router.layer",),
        ),
    ),
    expert_count=EXPERTS,
    sparse=rule.EveryLayer(),
    patched_by_unsloth=False,
)

# vLLM models/llama4.py, Llama4ForCausalLM.permute_qk_weight_for_rotary: rows of the base's q_proj and k_proj change
# places at loading, those of an adapter's lora_B do not.
_LLAMA4 = _usual(
    model_types=("llama4", "llama4_text"),
    decoders=(_WRAPPED, "model."),
    served=(
        _engine("Llama4ForCausalLM", "llama4", _RUN, ("0.25.0", 46247), ("0.25.0", 46247)),
        _wrapped_engine(
            "Llama4ForConditionalGeneration", "mllama4", _READ, ("0.11.1", 20650), ("0.22.0", 42242)
        ),
    ),
    experts="layers.{layer}.feed_forward.experts",
    served_experts="layers.{layer}.feed_forward.experts",
    parameters=part.gated_experts(INTERMEDIATE),
    stored=StoredAs.UNMARKED_IN_OUT,
    modules=(
        *part.attention(names=("v_proj", "o_proj")),
        *part.router("feed_forward", "router", EXPERTS),
        *part.shared_experts("feed_forward.shared_expert", INTERMEDIATE),
        *part.dense_mlp("feed_forward", size_of("intermediate_size_mlp")),
    ),
    unserved=part.unserved(
        "self_attn",
        ("q_proj", "k_proj"),
        "one whose base rows vLLM reorders for its rotation, without the adapter's",
    ),
    expert_count=EXPERTS,
    sparse=rule.ListedLayers("moe_layers", "interleave_moe_layer_step"),
    patched_by_unsloth=False,
)

_ERNIE_EXPERTS = size_of("moe_num_experts")
_ERNIE4_5_MOE = _usual(
    model_types=("ernie4_5_moe",),
    served=(_engine("Ernie4_5_MoeForCausalLM", "ernie45_moe", _RUN, ("0.11.1", 18120), ("0.22.0", 42242)),),
    parameters=part.gated_experts(MOE_INTERMEDIATE),
    modules=(
        *part.attention(),
        *part.router("mlp", "gate", _ERNIE_EXPERTS),
        *part.shared_experts("mlp.shared_experts", size_of("moe_num_shared_experts") * MOE_INTERMEDIATE),
        *part.dense_mlp("mlp"),
    ),
    expert_count=_ERNIE_EXPERTS,
    sparse=rule.RangedLayers("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    patched_by_unsloth=True,
)

_MINIMAX_M2 = _usual(
    model_types=("minimax_m2",),
    served=(_engine("MiniMaxM2ForCausalLM", "minimax_m2", _RUN, ("0.15.0", 32736), ("0.22.0", 42242)),),
    served_experts=_BLOCK_EXPERTS,
    parameters=part.gated_experts(INTERMEDIATE, served=NUMBERED),
    modules=(*part.attention(), *part.router("mlp", "gate", EXPERTS, served=_BLOCK_ROUTER)),
    expert_count=EXPERTS,
    sparse=rule.EveryLayer(),
    patched_by_unsloth=False,
)

# Experts without a gate, up registered first. A layer is one thing alone: a mamba mixer, attention, experts or an MLP.
# vLLM lora/model_manager.py: _create_lora_modules leaves the router unwrapped; _convert_3d_to_2d_moe_lora cuts stacked
# experts in half, as if half of up were a gate. Models with a moe_latent_size are refused for their shapes.
_PATTERN = ("layers_block_type", "hybrid_override_pattern")
_MAMBA = size_of("mamba_num_heads") * size_of("mamba_head_dim")
_STATES = 2 * (size_of("n_groups", "mamba_n_groups") * size_of("ssm_state_size"))
_NEMOTRON_H = _usual(
    model_types=("nemotron_h",),
    decoders=("model.", "backbone."),
    served=(_engine("NemotronHForCausalLM", "nemotron_h", _READ, ("0.15.0", 31923), None),),
    experts="layers.{layer}.mixer.experts",
    served_experts="layers.{layer}.mixer.experts",
    parameters=part.plain_experts(MOE_INTERMEDIATE),
    modules=(
        *part.attention("mixer", layers=_FULL),
        part.linear(
            "mixer", "in_proj", _OTHER, _LINEAR, HIDDEN, 2 * _MAMBA + _STATES + size_of("mamba_num_heads")
        ),
        part.linear("mixer", "out_proj", _OTHER, _LINEAR, _MAMBA, HIDDEN),
        *part.plain_mlp(
            "mixer.shared_experts", _SHARED, _SPARSE, size_of("moe_shared_expert_intermediate_size")
        ),
        *part.plain_mlp("mixer", _OTHER, _DENSE, INTERMEDIATE),
    ),
    unserved=part.unserved("mixer", ("gate",), "a router that vLLM leaves without adapters"),
    expert_count=_ROUTED,
    sparse=rule.WordLayers(_PATTERN, ("moe", "E")),
    layer_kinds=(
        (_FULL, rule.WordLayers(_PATTERN, ("full_attention", "attention", "*"))),
        (_LINEAR, rule.WordLayers(_PATTERN, ("linear_attention", "mamba", "M"))),
        (_DENSE, rule.WordLayers(_PATTERN, ("mlp", "-"))),
    ),
    layer_lists=_PATTERN,
    patched_by_unsloth=False,
)

FAMILIES: tuple[Family, ...] = (
    *(_QWEN2_MOE, _QWEN3_MOE, _QWEN3_NEXT, _QWEN3_5_MOE, _QWEN3_VL_MOE),
    *(_MIXTRAL, _OLMOE, _DEEPSEEK_V2, _DEEPSEEK_V3, _GLM4_MOE, _GPT_OSS),
    *(_GEMMA4, _GRANITEMOE, _LLAMA4, _ERNIE4_5_MOE, _MINIMAX_M2, _NEMOTRON_H),
)


def find_family(model_type: str) -> Family | None:
    """Return the row for a config.json's model_type, or None."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
