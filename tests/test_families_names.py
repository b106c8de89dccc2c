"""Every family's names: one meaning each, both ways, and where vLLM's own renaming leaves them."""

from __future__ import annotations

from typing import Any

import pytest
from family_inventories import NAMES, Inventory, load_inventory
from hypothesis import given
from hypothesis import strategies as st
from lora_builders import LABEL

from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.errors import UnexpectedTensor
from tasks.lora.families import FAMILIES
from tasks.lora.family import Family
from tasks.lora.names import (
    CubeKey,
    ExpertKey,
    Factor,
    ModuleKey,
    ParsedKey,
    StackedKey,
    format_key,
    format_served_expert_keys,
    format_served_key,
    parse_key,
)

PREFIX = "base_model.model."

# hf_to_vllm_mapper of each class without its stacked maps and without what maps to nothing, as vLLM's own
# get_rename_mapper leaves it for LoRA: (substrings, prefixes, suffixes), taken in this order. Classes that are not
# here have none, or only stacked ones. Source: vLLM 0.32 model_executor/models/{utils,qwen3_5,qwen3_vl,mixtral,
# gpt_oss,gemma4,gemma4_mm,nemotron_h}.py; lora/worker_manager.py, _load_adapter.
Maps = tuple[dict[str, str], dict[str, str], dict[str, str]]
_VISION: Maps = (
    {},
    {
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
    },
    {},
)
MAPPERS: dict[str, Maps] = {
    "Qwen3_5MoeForCausalLM": ({}, {"model.language_model.": "model."}, {}),
    "Qwen3_5MoeForConditionalGeneration": _VISION,
    "Qwen3VLMoeForConditionalGeneration": _VISION,
    "MixtralForCausalLM": ({".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}, {}, {}),
    "GptOssForCausalLM": (
        {".self_attn.": ".attn."},
        {},
        {
            ".embed_tokens.weight": ".embedding.weight",
            ".gate_up_proj_blocks": ".w13_weight",
            ".down_proj_blocks": ".w2_weight",
            ".gate_up_proj_scales": ".w13_weight_scale",
            ".down_proj_scales": ".w2_weight_scale",
            ".gate_up_proj": ".w13_weight",
            ".down_proj": ".w2_weight",
            ".gate_up_proj_bias": ".w13_bias",
            ".down_proj_bias": ".w2_bias",
            ".gate_up_proj.weight": ".w13_weight",
            ".gate_up_proj.weight_scale": ".w13_weight_scale",
            ".gate_up_proj.bias": ".w13_bias",
            ".gate_up_proj.input_scale": ".w13_input_scale",
            ".down_proj.weight": ".w2_weight",
            ".down_proj.weight_scale": ".w2_weight_scale",
            ".down_proj.bias": ".w2_bias",
            ".down_proj.input_scale": ".w2_input_scale",
        },
    ),
    "Gemma4ForCausalLM": ({}, {"model.language_model.": "model."}, {}),
    "Gemma4ForConditionalGeneration": (
        {},
        {
            "model.vision_tower": "vision_tower",
            "model.embed_vision": "embed_vision",
            "model.audio_tower.": "audio_tower.",
            "model.embed_audio.": "embed_audio.",
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model": "language_model.model",
        },
        {},
    ),
    "NemotronHForCausalLM": ({"A_log": "A", "embeddings": "embed_tokens"}, {"backbone": "model"}, {}),
}


def map_name(name: str, architecture: str) -> str:
    """What vLLM makes of a name when it loads an adapter. Source: vLLM 0.32 lora/utils.py, WeightsMapper."""
    found = name.removeprefix(PREFIX)
    substrings, prefixes, suffixes = MAPPERS.get(architecture, ({}, {}, {}))
    for old, new in substrings.items():
        found = found.replace(old, new, 1)
    for old, new in prefixes.items():
        if found.startswith(old):
            found = found.replace(old, new, 1)
    for old, new in suffixes.items():
        if found.endswith(old):
            found = found.removesuffix(old) + new
    return PREFIX + found


def read(inventory: Inventory) -> BaseConfig:
    return read_base_config(inventory.encoded, label="tiny-base")


def every_key(base: BaseConfig) -> list[StackedKey | ExpertKey | ModuleKey]:
    """Each factor that an adapter of this base can have, read from the row by plain loops."""
    keys: list[StackedKey | ExpertKey | ModuleKey] = []
    for layer in range(base.layers):
        for factor in Factor:
            if layer in base.sparse_layers:
                for parameter in base.family.parameters:
                    keys.append(StackedKey(layer, parameter.name, factor))
                    for name in parameter.projections:
                        keys += [ExpertKey(layer, expert, name, factor) for expert in range(base.experts)]
            for module in base.family.modules:
                if base.has(layer, module.layers):
                    keys.append(ModuleKey(layer, module.sources[0], module.kind, factor))
    return keys


@pytest.mark.parametrize("name", NAMES)
def test_names_and_their_meanings_round_trip(name: str) -> None:
    base = read(load_inventory(name))
    for key in every_key(base):
        assert parse_key(format_key(key, base.family), base.family, LABEL) == key
        assert parse_key(format_served_key(key, base), base.family, LABEL) == key
    for parameter in base.family.parameters:
        for projection in parameter.projections:
            keys = format_served_expert_keys(base.sparse_layers[0], projection, Factor.B, base)
            assert keys == [
                format_served_key(ExpertKey(base.sparse_layers[0], expert, projection, Factor.B), base)
                for expert in range(base.experts)
            ]
            cube = CubeKey(base.sparse_layers[0], projection, Factor.A)
            assert parse_key(format_key(cube, base.family), base.family, LABEL) == cube


rows = st.sampled_from([(family, template) for family in FAMILIES for template in family.modules])
numbers = st.integers(min_value=0, max_value=999_999)


@given(rows, numbers, numbers, st.sampled_from(list(Factor)), st.data())
def test_names_of_any_layer_and_expert_round_trip(
    row: tuple[Family, Any], layer: int, expert: int, factor: Factor, data: st.DataObject
) -> None:
    family, module = row
    projection = data.draw(st.sampled_from([name for item in family.parameters for name in item.projections]))
    keys: tuple[ParsedKey, ...] = (
        ModuleKey(layer, module.sources[0], module.kind, factor),
        ExpertKey(layer, expert, projection, factor),
        CubeKey(layer, projection, factor),
        *(StackedKey(layer, item.name, factor) for item in family.parameters),
    )
    for key in keys:
        assert parse_key(format_key(key, family), family, LABEL) == key


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_name_has_two_meanings(family: Family) -> None:
    """Every spelling of every template, by plain loops: what one name means stands once, and is what is read."""
    meanings: dict[str, ParsedKey] = {}

    def claim(path: str, key: ParsedKey) -> None:
        for decoder in {*family.decoders, *(served.decoder for served in family.served)}:
            name = f"{PREFIX}{decoder}{path.format(layer=5)}.lora_A.weight"
            assert meanings.setdefault(name, key) == key
            assert parse_key(name, family, LABEL) == key

    for experts in {family.experts, family.served_experts}:
        for parameter in family.parameters:
            claim(f"{experts}.{parameter.wrapper}".rstrip("."), StackedKey(5, parameter.name, Factor.A))
            for spelt in (parameter.projections, parameter.served, parameter.numbered):
                for name, projection in zip(spelt, parameter.projections, strict=True):
                    claim(f"{experts}.3.{name}", ExpertKey(5, 3, projection, Factor.A))
                    claim(f"{experts}.{name}", CubeKey(5, projection, Factor.A))
    for module in family.modules:
        for template in {*module.sources, module.served}:
            claim(template, ModuleKey(5, module.sources[0], module.kind, Factor.A))
    for refused in family.unserved:
        with pytest.raises(UnexpectedTensor):
            parse_key(
                f"{PREFIX}{family.decoders[0]}{refused.source.format(layer=5)}.lora_A.weight", family, LABEL
            )


@pytest.mark.parametrize("name", NAMES)
def test_served_names_pass_through_the_engines_own_map(name: str) -> None:
    """vLLM renames what it loads; an output's name must already be what comes out of that."""
    base = read(load_inventory(name))
    for key in every_key(base):
        served = format_served_key(key, base)
        assert map_name(served, base.served.architecture) == served


@pytest.mark.parametrize(
    ("name", "stored", "mapped"),
    [
        ("qwen3_5_moe", "model.language_model.layers.3.mlp.gate", "language_model.model.layers.3.mlp.gate"),
        ("qwen3_5_moe_text", "model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate"),
        ("qwen3_vl_moe", "model.language_model.layers.2.mlp.gate", "language_model.model.layers.2.mlp.gate"),
        ("gemma4", "model.language_model.layers.0.router.proj", "language_model.model.layers.0.router.proj"),
        ("gpt_oss", "model.layers.0.self_attn.o_proj", "model.layers.0.attn.o_proj"),
        ("nemotron_h", "backbone.layers.2.mixer.q_proj", "model.layers.2.mixer.q_proj"),
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.experts.2.up_proj",
            "model.layers.0.block_sparse_moe.experts.2.w3",
        ),
        # These go past the engine: no map of its own leads from the trainer's name to the one it knows.
        ("mixtral", "model.layers.0.mlp.gate", None),
        ("minimax_m2", "model.layers.0.mlp.experts.2.gate_proj", None),
        ("granitemoe", "model.layers.0.block_sparse_moe.router", None),
    ],
)  # fmt: skip
def test_renaming_agrees_with_the_engines_own_map(name: str, stored: str, mapped: str | None) -> None:
    """Where the engine has a map for a trainer's name, ours leads to the same; where it has none, ours is needed."""
    base = read(load_inventory(name))
    stored = f"{PREFIX}{stored}.lora_A.weight"
    key = parse_key(stored, base.family, LABEL)
    assert not isinstance(key, CubeKey)
    served = format_served_key(key, base)
    assert served != stored
    if mapped is None:
        assert map_name(stored, base.served.architecture) == stored
    else:
        assert served == map_name(stored, base.served.architecture) == f"{PREFIX}{mapped}.lora_A.weight"
