"""Modules that only some configs of a family have, and forms that a class never takes: refused, by name.

What transformers has is told by its own configurations; what vLLM 0.32 wraps is cited where it is not the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_inventories import RANK, load_inventory, stacked_adapter
from lora_builders import LABEL, look, save_adapter
from store_builders import memory_store
from transformers import Gemma4TextConfig

from storage.s3 import S3Store
from tasks.directories import KnownBase, convert_directory, migrate_directory
from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.errors import BaseMismatch, UnsupportedConfig
from tasks.lora.family import LayerKind
from tasks.submission import add_base

Tensors = dict[str, torch.Tensor]


def adjust(name: str, **fields: Any) -> BaseConfig:
    """The tiny base of an inventory, some fields changed."""
    config = load_inventory(name).config | fields
    return read_base_config(json.dumps(config).encode(), label="tiny-base")


def whole(name: str, *without: str) -> Tensors:
    """An adapter of all that an inventory has, but for modules of these ends."""
    tensors = stacked_adapter(load_inventory(name), without=without)
    generator = torch.Generator().manual_seed(1)
    return {key: torch.randn(each.shape, generator=generator) for key, each in tensors.items()}


def pair(module: str, inside: int, out: int) -> Tensors:
    stem = f"base_model.model.{module}"
    return {
        f"{stem}.lora_A.weight": torch.ones(RANK, inside),
        f"{stem}.lora_B.weight": torch.ones(out, RANK),
    }


def drop(tensors: Tensors, *parts: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


def refuse(folder: Path, tensors: Tensors, base: BaseConfig) -> BaseMismatch:
    with pytest.raises(BaseMismatch) as caught:
        look(folder, tensors, base, r=RANK)
    assert caught.value.adapter == LABEL and caught.value.advice
    return caught.value


# Queries of latent attention


@pytest.mark.parametrize(
    ("name", "module", "size", "kind"),
    [
        ("deepseek_v3", "q_proj", 60, "direct queries"),
        ("deepseek_v2", "q_a_proj", 13, "latent queries"),
    ],
)
def test_queries_are_computed_in_one_way(
    tmp_path: Path, name: str, module: str, size: int, kind: str
) -> None:
    """The snapshots have both ways, for bases of one class differ in it: neither they nor vLLM would say a word."""
    base, tensors = adjust(name), whole(name, ".kv_b_proj", ".gate")
    look(tmp_path / "right", tensors, base, r=RANK)
    name = f"model.layers.1.self_attn.{module}"
    error = refuse(tmp_path / "wrong", tensors | pair(name, 30, size), base)
    assert error.where == f"base_model.model.{name}.lora_A.weight"
    assert (error.expected, error.found) == (
        f"a layer of {kind}",
        "layer 1, which is not one (the first of 2)",
    )


# Dense layers


@pytest.mark.parametrize(("listed", "served"), [(None, False), ([], False), ([0], True)])
def test_dense_layers_take_adapters_where_they_are_listed(
    tmp_path: Path, listed: list[int] | None, served: bool
) -> None:
    """vLLM models/qwen3_moe.py: gate_up_proj has parts only with mlp_only_layers, and is not wrapped without."""
    base = adjust("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=listed, num_hidden_layers=4)
    assert base.sparse_layers == (1, 3) and base.has(0, LayerKind.DENSE)
    assert base.has(0, LayerKind.LISTED_DENSE) is served
    assert not base.has(1, LayerKind.LISTED_DENSE)
    inventory = load_inventory("qwen3_moe")
    shapes = {item.name.rpartition(".")[2]: item.shape for item in inventory.experts}
    experts, twice, hidden = shapes["gate_up_proj"]
    tensors: Tensors = {}
    for layer in base.sparse_layers:
        stem = f"base_model.model.model.layers.{layer}.mlp.experts"
        tensors |= {
            f"{stem}.base_layer.lora_A.weight": torch.ones(experts * RANK, hidden),
            f"{stem}.base_layer.lora_B.weight": torch.ones(twice, experts * RANK),
            f"{stem}.lora_A.weight": torch.ones(experts * RANK, twice // 2),
            f"{stem}.lora_B.weight": torch.ones(hidden, experts * RANK),
        }
    tensors |= pair("model.layers.2.mlp.up_proj", hidden, inventory.config["intermediate_size"])
    if served:
        assert len(look(tmp_path, tensors, base, r=RANK).layout.modules) == 2
        return
    error = refuse(tmp_path, tensors, base)
    assert error.where == "base_model.model.model.layers.2.mlp.up_proj.lora_A.weight"
    assert error.expected == (
        "a layer without routed experts, of a base that lists such (the engine leaves others bare)"
    )
    assert error.found == "layer 2, which is not one (the first of 2)"


# Keys and values of earlier layers

TYPES = ["sliding_attention", "full_attention"] * 3


@pytest.mark.parametrize("shared", [0, 1, 2, 4])
@pytest.mark.parametrize("keys_as_values", [False, True])
def test_layers_that_share_keys_have_none_of_their_own(shared: int, keys_as_values: bool) -> None:
    fields = {"num_hidden_layers": 6, "layer_types": TYPES, "num_kv_shared_layers": shared}
    config = Gemma4TextConfig(**fields, attention_k_eq_v=keys_as_values)
    own = {layer for layer, mode in enumerate(config.kv_sharing_modes) if mode != "reuse"}
    base = adjust("gemma4_text", **fields, attention_k_eq_v=keys_as_values)
    with_keys = (LayerKind.SLIDING_KEYS, LayerKind.SEPARATE_VALUES, LayerKind.KEYS_AS_VALUES)
    for layer in range(6):
        assert any(base.has(layer, kind) for kind in with_keys) is (layer in own)
        assert base.has(layer, LayerKind.SLIDING_ATTENTION) is (layer % 2 == 0)
        assert base.has(layer, LayerKind.FULL_ATTENTION) is (layer % 2 == 1)
    full = LayerKind.KEYS_AS_VALUES if keys_as_values else LayerKind.SEPARATE_VALUES
    assert base.has(1, full)


@pytest.mark.parametrize(
    ("module", "out", "kinds"),
    [
        ("k_proj", 32, "keys of its own or a layer of separate values or a layer of keys as values"),
        ("v_proj", 32, "keys of its own or a layer of separate values"),
    ],
)
def test_keys_of_a_layer_that_shares_them_are_refused(
    tmp_path: Path, module: str, out: int, kinds: str
) -> None:
    """vLLM has a bare q_proj there; without an engine every other part of qkv_proj would have passed, too."""
    types = ["sliding_attention", "full_attention", "full_attention"]
    base = adjust("gemma4_text", layer_types=types, num_kv_shared_layers=1)
    tensors = whole("gemma4_text")
    tensors = drop(tensors, "self_attn") | pair("model.layers.2.self_attn.q_proj", 30, 96)
    look(tmp_path / "right", tensors, base, r=RANK)
    name = f"model.layers.2.self_attn.{module}"
    error = refuse(tmp_path / "wrong", tensors | pair(name, 30, out), base)
    assert error.where == f"base_model.model.{name}.lora_A.weight"
    assert error.expected == f"a layer of sliding attention with {kinds}"


# Experts without a gate, stacked


def test_a_form_that_no_release_serves_is_refused(tmp_path: Path) -> None:
    """vllm-project/vllm#47088: stacked experts without a gate are cut in half, as if they had one."""
    base = adjust("nemotron_h")
    tensors = whole("nemotron_h", "mixer.gate")
    source = save_adapter(tmp_path / "elm", tensors, r=RANK, lora_B_layout="rank_major")
    known, made = KnownBase(base), tmp_path / "made"
    with pytest.raises(UnsupportedConfig) as caught:
        convert_directory(source, made, known, packing=None, format="stacked", progress=None)
    error = caught.value
    assert (error.adapter, error.where) == ("elm", "target format")
    assert error.expected == "a format that NemotronHForCausalLM serves right"
    assert error.found == "stacked, which no known vLLM release does"
    assert error.advice == "Convert to per-expert or slots." and not made.exists()
    done = convert_directory(source, made, known, packing=None, format="per-expert", progress=None)
    assert done["minimum_vllm"]["version"] == "0.15.0"
    slots = convert_directory(source, tmp_path / "slots", known, packing=None, format="slots", progress=None)
    assert slots["minimum_vllm"] == done["minimum_vllm"]
    # Other tools take it; the engine is not asked.
    migrate_directory(source, tmp_path / "again", known, packing=None, stamp=False, progress=None)
    assert (tmp_path / "again" / "adapter_model.safetensors").exists()


def test_a_base_is_not_registered_for_a_form_that_no_release_serves(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(load_inventory("nemotron_h").encoded)

    def register(store: S3Store, format: str | None) -> str:
        done = add_base(
            store,
            "tiny",
            config=config,
            weights=None,
            engine_url=None,
            served_model="tiny",
            aliases=(),
            progress=lambda done, total: None,
            target_format=format,
        )
        return done.document.target_format.value

    with memory_store() as store:
        with pytest.raises(
            UnsupportedConfig, match=r"base tiny: target format: found stacked.*per-expert or slots\."
        ):
            register(store, "stacked")
        assert register(store, None) == "per-expert"
        # What was said of another base under this name does not slip through.
        config.write_bytes(load_inventory("qwen3_moe").encoded)
        assert register(store, "stacked") == "stacked"
        config.write_bytes(load_inventory("nemotron_h").encoded)
        with pytest.raises(UnsupportedConfig):
            register(store, None)


# Shared experts


def test_a_base_that_counts_no_shared_experts_has_none(tmp_path: Path) -> None:
    """Factors for them mean another base, and no fault of this one's config.json."""
    base = adjust("ernie4_5_moe", moe_num_shared_experts=0)
    tensors = whole("ernie4_5_moe", ".gate")
    look(tmp_path / "right", drop(tensors, "shared_experts"), base, r=RANK)
    error = refuse(tmp_path / "wrong", tensors, base)
    assert ".mlp.shared_experts.down_proj.lora_A.weight" in error.where
    assert error.expected == "0 along the other axis"
