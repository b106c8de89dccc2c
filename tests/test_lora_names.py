"""Tensor names: parsing and formatting are inverses, and what is not understood is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_builders import LABEL

from tasks.lora.errors import AdapterError, MalformedKey, UnexpectedTensor, UnsupportedConfig
from tasks.lora.families import FAMILIES, TensorClass
from tasks.lora.names import ExpertKey, Factor, ModuleKey, ParsedKey, StackedKey, format_key, parse_key

FAMILY = FAMILIES[0]
LAYER = "base_model.model.model.layers"

numbers = st.integers(min_value=0, max_value=999_999)
factors = st.sampled_from(Factor)
keys = st.one_of(
    st.builds(StackedKey, numbers, st.sampled_from([item.name for item in FAMILY.parameters]), factors),
    st.builds(
        ExpertKey,
        numbers,
        numbers,
        st.sampled_from([name for item in FAMILY.parameters for name in item.projections]),
        factors,
    ),
    st.builds(
        lambda layer, module, factor: ModuleKey(layer, module.template, module.kind, factor),
        numbers,
        st.sampled_from(FAMILY.modules),
        factors,
    ),
)


@given(keys)
def test_parsing_undoes_formatting(key: ParsedKey) -> None:
    assert parse_key(format_key(key, FAMILY), FAMILY, LABEL) == key


@given(
    st.text(max_size=80)
    | st.from_regex(r"base_model\.model\.model\.layers\.[0-9]+\.[a-z_.]+\.lora_[AB]\.weight")
)
def test_whatever_is_parsed_is_formatted_back(text: str) -> None:
    """No two spellings of one key: what would be written is what was read."""
    try:
        key = parse_key(text, FAMILY, LABEL)
    except AdapterError:
        return
    assert format_key(key, FAMILY) == text


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (
            f"{LAYER}.3.mlp.experts.base_layer.lora_A.weight",
            StackedKey(3, "gate_up_proj", Factor.A),
        ),
        (f"{LAYER}.3.mlp.experts.lora_B.weight", StackedKey(3, "down_proj", Factor.B)),
        (
            f"{LAYER}.47.mlp.experts.127.up_proj.lora_B.weight",
            ExpertKey(47, 127, "up_proj", Factor.B),
        ),
        (
            f"{LAYER}.0.self_attn.q_proj.lora_A.weight",
            ModuleKey(0, "model.layers.{layer}.self_attn.q_proj", TensorClass.ATTENTION, Factor.A),
        ),
        (
            f"{LAYER}.0.mlp.gate.lora_A.weight",
            ModuleKey(0, "model.layers.{layer}.mlp.gate", TensorClass.ROUTER, Factor.A),
        ),
        (
            f"{LAYER}.0.mlp.gate_proj.lora_A.weight",
            ModuleKey(0, "model.layers.{layer}.mlp.gate_proj", TensorClass.OTHER, Factor.A),
        ),
    ],
)
def test_names_as_programs_write_them(key: str, expected: ParsedKey) -> None:
    assert parse_key(key, FAMILY, LABEL) == expected
    assert format_key(expected, FAMILY) == key


@pytest.mark.parametrize(
    ("key", "error", "found"),
    [
        # vLLM skips every key with base_layer in it, so a misspelt one would be lost without a word.
        (f"{LAYER}.0.mlp.expertz.base_layer.lora_A.weight", UnexpectedTensor, "no module of this family"),
        (f"{LAYER}.0.mlp.shared_expert.up_proj.lora_A.weight", UnexpectedTensor, "no module of this family"),
        (f"{LAYER}.0.mlp.experts.0.w1.lora_A.weight", UnexpectedTensor, "no module of this family"),
        (f"{LAYER}.00.mlp.experts.lora_A.weight", UnexpectedTensor, "no module of this family"),
        (
            "base_model.model.model.language_model.layers.0.mlp.experts.lora_A.weight",
            UnexpectedTensor,
            "no module",
        ),
        (f"{LAYER}.0.mlp.experts.lora_A.default.weight", MalformedKey, "adapter name 'default'"),
        ("model.layers.0.mlp.experts.lora_A.weight", MalformedKey, "'model'"),
        (f"{LAYER}.0.mlp.experts.lora_C.weight", MalformedKey, "'lora_C.weight'"),
        (f"{LAYER}.0.mlp.experts.gate_up_proj", MalformedKey, "'experts.gate_up_proj'"),
        # vllm#6983: DoRA by its keys alone, whatever the config says.
        (f"{LAYER}.0.self_attn.q_proj.lora_magnitude_vector.weight", UnsupportedConfig, "DoRA"),
        (f"{LAYER}.0.self_attn.q_proj.lora_B.bias", UnsupportedConfig, "bias"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", UnsupportedConfig, "embedding"),
        # Automodel#2022, #3462: vLLM's prompt log-probabilities leave lm_head's LoRA out.
        ("base_model.model.lm_head.lora_A.weight", UnsupportedConfig, "lm_head"),
        ("base_model.model.lm_head.weight", UnsupportedConfig, "lm_head"),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            UnsupportedConfig,
            "token",
        ),
    ],
)
def test_other_names_are_refused(key: str, error: type[AdapterError], found: str) -> None:
    with pytest.raises(error) as caught:
        parse_key(key, FAMILY, LABEL)
    assert str(caught.value).startswith(f"{LABEL}: {key}: found ")
    assert found in caught.value.found


def test_long_names_are_cut_in_messages() -> None:
    with pytest.raises(MalformedKey) as caught:
        parse_key("x" * 1_000_000, FAMILY, LABEL)
    assert len(str(caught.value)) < 1000
