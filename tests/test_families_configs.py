"""config.json of every family, as older transformers wrote it, and without the name of its class."""

from __future__ import annotations

import json
from typing import Any

import pytest
from family_inventories import NAMES, Inventory, load_inventory

from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.errors import InvalidBaseConfig


def read(inventory: Inventory) -> BaseConfig:
    return read_base_config(inventory.encoded, label="tiny-base")


# What transformers 4, and 5 before some changes, wrote in place of 5.24's fields; None takes one out.
OLDER: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"layer_types": None},
    "qwen3_moe": {"num_local_experts": None, "num_experts": 4},
    "qwen3_next": {"layer_types": None, "full_attention_interval": 4},
    "qwen3_5_moe": {"layer_types": None, "full_attention_interval": 4},
    "qwen3_vl_moe": {"num_local_experts": None, "num_experts": 4},
    "deepseek_v2": {"head_dim": None, "moe_layer_freq": 1},
    "deepseek_v3": {"head_dim": None, "ep_size": 1},
    "gemma4": {"per_layer_config": None, "global_head_dim": 16, "num_global_key_value_heads": 3},
    "gemma4_text": {"per_layer_config": None, "global_head_dim": 16},
    "granitemoe": {"head_dim": None},
    "ernie4_5_moe": {"use_moe": True},
    "nemotron_h": {"layers_block_type": None, "hybrid_override_pattern": "ME*-E", "num_hidden_layers": 5},
}


@pytest.mark.parametrize("name", sorted(OLDER))
def test_older_spellings_of_a_config_mean_the_same(name: str) -> None:
    inventory = load_inventory(name)
    config = json.loads(inventory.encoded)
    part = config.get("text_config", config)
    for field, value in OLDER[name].items():
        if value is None:
            part.pop(field, None)
        else:
            part[field] = value
    older, newer = read_base_config(json.dumps(config).encode(), label="tiny-base"), read(inventory)
    assert (older.family, older.served, older.layers) == (newer.family, newer.served, newer.layers)
    assert dict(older.kinds) == dict(newer.kinds)
    for module in older.family.modules:
        for layer in range(older.layers):
            if older.has(layer, module.layers) and not module.sources[0].endswith(inventory.absent):
                assert older.size(module.out_size) == newer.size(module.out_size)
                assert older.size(module.in_size) == newer.size(module.in_size)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("named", [None, [], "nothing"])
def test_class_of_a_config_that_names_none(name: str, named: object) -> None:
    """By whether there is a text part: the class for text, or the one around it."""
    inventory = load_inventory(name)
    config = {**inventory.config, "architectures": named}
    if named == "nothing":
        del config["architectures"]
    base = read_base_config(json.dumps(config).encode(), label="tiny-base")
    assert base.served.architecture == inventory.architecture


@pytest.mark.parametrize("name", [name for name in NAMES if "text_config" in load_inventory(name).config])
def test_text_part_alone_means_the_family(name: str) -> None:
    inventory = load_inventory(name)
    base = read_base_config(json.dumps(inventory.text).encode(), label="tiny-base")
    assert base.family is read(inventory).family
    assert base.served is base.family.served[0]


@pytest.mark.parametrize(
    ("field", "value", "where", "found"),
    [
        (
            "per_layer_config",
            {"1": {"head_dim": 16}, "2": {"head_dim": 24}},
            "global_head_dim or per_layer_config.*.head_dim",
            '"per_layer_config.1.head_dim": 16, "per_layer_config.2.head_dim": 24',
        ),
        (
            "per_layer_config",
            {"2": {"head_dim": "wide"}},
            "per_layer_config.2.head_dim",
            "'wide'",
        ),
        ("attention_k_eq_v", "yes", "attention_k_eq_v", "'yes'"),
    ],
)
def test_sizes_by_layer_and_flags_are_held_to_be_such(
    field: str, value: object, where: str, found: str
) -> None:
    inventory = load_inventory("gemma4_text")
    with pytest.raises(InvalidBaseConfig) as caught:
        read_base_config(json.dumps({**inventory.config, field: value}).encode(), label="tiny-base")
    assert (caught.value.adapter, caught.value.where) == ("tiny-base", f"config.json: {where}")
    assert found in caught.value.found


@pytest.mark.parametrize("null", [True, False])
def test_number_of_heads_that_no_layer_has_of_its_own(null: bool) -> None:
    """Source: transformers models/gemma4/configuration_gemma4.py, Gemma4TextConfig.__post_init__."""
    inventory = load_inventory("gemma4")
    [keys] = [module for module in read(inventory).family.modules if module.also_served]
    assert read(inventory).size(keys.out_size) == 3 * 16, "of its own, and others have 2"
    config = json.loads(inventory.encoded)
    config["text_config"]["per_layer_config"] = {"2": {"head_dim": 16}}
    if null:
        config["text_config"]["num_global_key_value_heads"] = None
    base = read_base_config(json.dumps(config).encode(), label="tiny-base")
    assert base.size(keys.out_size) == 2 * 16
    del config["text_config"]["num_key_value_heads"]
    base = read_base_config(json.dumps(config).encode(), label="tiny-base")
    with pytest.raises(InvalidBaseConfig) as caught:
        base.size(keys.out_size)
    names = "num_global_key_value_heads or per_layer_config.*.num_key_value_heads or num_key_value_heads"
    assert (caught.value.where, caught.value.found) == (f"config.json: {names}", "nothing")
