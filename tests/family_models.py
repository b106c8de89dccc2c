"""The tiny models of the families: what transformers builds them from, and what of them adapters are trained on.

No two sizes that could be exchanged are equal, and none is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

VOCAB = 131
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Part:
    """What an adapter of one class trains: modules by suffix, and parameters by suffix."""

    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


def inside(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


@dataclass(frozen=True)
class TinyFamily:
    """One family: the class of transformers, its configuration, and what is trained of it."""

    model: str
    config: str
    settings: Mapping[str, object]
    parts: Mapping[str, Part]


def stacked(module: str, *parameters: str) -> Part:
    return Part(parameters=inside(module, *(parameters or ("gate_up_proj", "down_proj"))))


Settings = dict[str, object]

BASICS: Settings = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "dtype": "float32",
}

# As DeepSeek's own: with plain rotary embeddings vLLM's CPU build rotates latent attention's queries wrongly.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}

WIDE: Settings = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
PLAIN: Settings = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
DENSE_TOO: Settings = {"num_hidden_layers": 3, "intermediate_size": 72, "moe_intermediate_size": 24}
ROUTED: Settings = {"num_experts": 5, "num_experts_per_tok": 2}
LOCAL: Settings = {"num_local_experts": 5, "num_experts_per_tok": 2}
LATENT: Settings = {
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "rope_parameters": YARN,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 24,
    "intermediate_size": 72,
    "moe_intermediate_size": 28,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

LATENT_PARTS = {"routed_experts": stacked("mlp.experts"), "router": Part(parameters=("mlp.gate.weight",))}
USUAL = {**LATENT_PARTS, "attention": Part(ATTENTION)}
DENSE = {"other": Part(inside("mlp", *GATED))}
SHARED = {"shared_experts": Part(inside("shared_experts", *GATED))}
GATED_SHARED = {"shared_experts": Part((*inside("shared_expert", *GATED), "shared_expert_gate"))}

FAMILIES: dict[str, TinyFamily] = {
    "qwen2_moe": TinyFamily(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**PLAIN, **DENSE_TOO, **ROUTED, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1]},
        {**USUAL, **DENSE, **GATED_SHARED},
    ),
    "qwen3_moe": TinyFamily(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**WIDE, **DENSE_TOO, **ROUTED, "norm_topk_prob": True, "mlp_only_layers": [1]},
        {**USUAL, **DENSE},
    ),
    "qwen3_next": TinyFamily(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **WIDE,
            **DENSE_TOO,
            **ROUTED,
            "shared_expert_intermediate_size": 56,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "mlp_only_layers": [2],
        },
        {
            **USUAL,
            **DENSE,
            **GATED_SHARED,
            "in_proj_qkvz": Part(("in_proj_qkvz",)),
            "in_proj_ba": Part(("in_proj_ba",)),
            "out_proj": Part(("out_proj",)),
        },
    ),
    "mixtral": TinyFamily(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**WIDE, **LOCAL, "num_hidden_layers": 2, "intermediate_size": 24},
        {**USUAL},
    ),
    "olmoe": TinyFamily(
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**PLAIN, **ROUTED, "num_hidden_layers": 2, "intermediate_size": 40},
        {**USUAL},
    ),
    "glm4_moe": TinyFamily(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            **WIDE,
            **DENSE_TOO,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
        {**USUAL, **DENSE, **SHARED},
    ),
    "gpt_oss": TinyFamily(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**WIDE, **LOCAL, "num_hidden_layers": 2, "intermediate_size": 24, "sliding_window": 16},
        {
            "routed_experts": stacked("mlp.experts"),
            "attention": Part(ATTENTION),
            "router": Part(parameters=("mlp.router.weight",)),
        },
    ),
    "granitemoe": TinyFamily(
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        {
            **PLAIN,
            **LOCAL,
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
        {
            "routed_experts": stacked("block_sparse_moe.experts"),
            "attention": Part(ATTENTION),
            "router": Part(parameters=("block_sparse_moe.router.weight",)),
        },
    ),
    "gemma4": TinyFamily(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **WIDE,
            "num_hidden_layers": 2,
            "global_head_dim": 64,
            "intermediate_size": 72,
            "moe_intermediate_size": 24,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
        {
            **DENSE,
            "routed_experts": stacked("experts"),
            "attention": Part(ATTENTION),
            "router": Part(("router.proj",)),
        },
    ),
    "ernie4_5_moe": TinyFamily(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {
            **PLAIN,
            **DENSE_TOO,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        {**USUAL, **DENSE, **SHARED},
    ),
    "deepseek_v2": TinyFamily(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False},
        {**LATENT_PARTS, **DENSE, **SHARED, "attention": Part(("q_proj", "kv_a_proj_with_mqa", "o_proj"))},
    ),
    "deepseek_v3": TinyFamily(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **LATENT,
            "q_lora_rank": 20,
            "num_nextn_predict_layers": 0,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        {
            **LATENT_PARTS,
            **DENSE,
            **SHARED,
            "attention": Part(("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")),
        },
    ),
    "minimax_m2": TinyFamily(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {
            **WIDE,
            **LOCAL,
            "num_hidden_layers": 2,
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "intermediate_size": 24,
        },
        {**USUAL},
    ),
    "llama4": TinyFamily(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **WIDE,
            "num_hidden_layers": 2,
            "intermediate_size": 24,
            "intermediate_size_mlp": 72,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
        {
            "routed_experts": stacked("feed_forward.experts"),
            "attention": Part(("v_proj", "o_proj")),
            "router": Part(("feed_forward.router",)),
            "shared_experts": Part(inside("shared_expert", *GATED)),
            "other": Part(inside("feed_forward", *GATED)),
        },
    ),
    "nemotron_h": TinyFamily(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **WIDE,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "intermediate_size": 72,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 56,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 20,
            "n_groups": 2,
            "chunk_size": 16,
        },
        {
            "routed_experts": stacked("mixer.experts", "up_proj", "down_proj"),
            "attention": Part(ATTENTION),
            "shared_experts": Part(inside("shared_experts", "up_proj", "down_proj")),
            "other": Part(inside("mixer", "up_proj", "down_proj", "in_proj")),
        },
    ),
}
FAMILIES["qwen3_next of full attention"] = replace(
    FAMILIES["qwen3_next"],
    settings={**FAMILIES["qwen3_next"].settings, "layer_types": ["full_attention"] * 3},
    parts={
        name: part
        for name, part in FAMILIES["qwen3_next"].parts.items()
        if name not in ("in_proj_qkvz", "in_proj_ba", "out_proj")
    },
)

# As Gemma 4 26B-A4B: where attention is full there is no v_proj, and k_proj gives the values, too.
FAMILIES["gemma4 without v_proj"] = replace(
    FAMILIES["gemma4"], settings={**FAMILIES["gemma4"].settings, "attention_k_eq_v": True}
)

NOT_RUN = {
    "qwen3_next": "CPU GDN attention requires BF16.",
    "nemotron_h": "is_act_and_mul=False is supported only for CUDA, XPU and ROCm for now",
}
"""What vLLM does not run on a CPU, or not in float32, and what it says then."""
