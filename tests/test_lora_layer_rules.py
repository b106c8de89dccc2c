"""Which layers have experts, and which attention, as transformers' own configurations and models say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic_builders import RENAMED, RENAMED_FIELDS, UNGATED, UNGATED_FIELDS, read_base_of
from transformers import Ernie4_5_MoeConfig, Llama4TextConfig, NemotronHConfig, Qwen3NextConfig

from tasks.lora.errors import InvalidBaseConfig
from tasks.lora.family import LayerKind, LayerRule
from tasks.lora.layer_rules import (
    AfterDenseLayers,
    EveryLayer,
    FlaggedLayers,
    ListedLayers,
    RangedLayers,
    SteppedLayers,
    UnsharedLayers,
    WordLayers,
)

STEPPED = SteppedLayers("decoder_sparse_step", "mlp_only_layers")
AFTER = AfterDenseLayers("first_k_dense_replace", "moe_layer_freq")
LISTED = ListedLayers("moe_layers", "interleave_moe_layer_step")
RANGED = RangedLayers("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
WORDS = WordLayers(("layers_block_type", "hybrid_override_pattern"), ("moe", "E"))
FULL = WordLayers(("layer_types",), ("full_attention",), "full_attention_interval")
FULL_TYPES = WordLayers(("layer_types",), ("full_attention",))
OWN = UnsharedLayers("num_kv_shared_layers", EveryLayer())
LINEAR = WordLayers(("layer_types",), ("linear_attention",), "full_attention_interval", others=True)


def list_layers(rule: LayerRule, layers: int, **fields: Any) -> tuple[int, ...]:
    """What a rule makes of a config.json's fields, read as those of any base are."""
    family = replace(RENAMED, sparse=rule, layer_kinds=(), modules=())
    return read_base_of(family, num_hidden_layers=layers, **fields).sparse_layers


@pytest.mark.parametrize(
    ("rule", "layers", "fields", "expected"),
    [
        (EveryLayer(), 3, {}, (0, 1, 2)),
        (STEPPED, 5, {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        (STEPPED, 3, {"decoder_sparse_step": None, "mlp_only_layers": None}, (0, 1, 2)),
        (AFTER, 5, {"first_k_dense_replace": 3}, (3, 4)),
        (AFTER, 4, {"first_k_dense_replace": 0}, (0, 1, 2, 3)),
        (AFTER, 7, {"first_k_dense_replace": 1, "moe_layer_freq": 3}, (3, 6)),
        (AFTER, 5, {"first_k_dense_replace": 1, "moe_layer_freq": [1, 0, 1, 0, 1]}, (2, 4)),
        (LISTED, 6, {"moe_layers": [5, 1]}, (1, 5)),
        (LISTED, 6, {"interleave_moe_layer_step": 2}, (1, 3, 5)),
        (LISTED, 6, {"moe_layers": [1], "interleave_moe_layer_step": 2}, (1,)),
        (RANGED, 5, {"moe_layer_start_index": 1, "moe_layer_end_index": -1}, (1, 2, 3, 4)),
        (RANGED, 5, {"moe_layer_start_index": 1}, (1, 2, 3, 4)),
        (
            RANGED,
            8,
            {"moe_layer_start_index": 2, "moe_layer_end_index": 6, "moe_layer_interval": 2},
            (3, 5),
        ),
        # Of text and images: the first entry is the text's.
        (RANGED, 5, {"moe_layer_start_index": [1, 2], "moe_layer_end_index": [3, 4]}, (1, 2, 3)),
        (WORDS, 4, {"layers_block_type": ["moe", "mlp", "linear_attention", "moe"]}, (0, 3)),
        (WORDS, 5, {"hybrid_override_pattern": "M-*EE"}, (3, 4)),
        (OWN, 4, {"num_kv_shared_layers": 3}, (0,)),
        (OWN, 4, {"num_kv_shared_layers": None}, (0, 1, 2, 3)),
        (FULL, 4, {"full_attention_interval": 2}, (1, 3)),
        (LINEAR, 4, {"full_attention_interval": 2}, (0, 2)),
        # The list goes before the number.
        (
            FULL,
            2,
            {"full_attention_interval": 2, "layer_types": ["full_attention", "linear_attention"]},
            (0,),
        ),
    ],
)
def test_layers_of_a_rule(
    rule: LayerRule, layers: int, fields: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert list_layers(rule, layers, **fields) == expected


@pytest.mark.parametrize(
    ("rule", "layers", "fields", "where", "found"),
    [
        (STEPPED, 3, {"decoder_sparse_step": 0}, "decoder_sparse_step", "0"),
        (STEPPED, 3, {"decoder_sparse_step": "2"}, "decoder_sparse_step", "'2'"),
        (STEPPED, 3, {"mlp_only_layers": [True]}, "mlp_only_layers", "[True]"),
        (STEPPED, 2, {"mlp_only_layers": [0, 1]}, "decoder_sparse_step and mlp_only_layers", "none"),
        (AFTER, 3, {}, "first_k_dense_replace", "nothing"),
        (AFTER, 3, {"first_k_dense_replace": -1}, "first_k_dense_replace", "-1"),
        (AFTER, 3, {"first_k_dense_replace": True}, "first_k_dense_replace", "True"),
        (AFTER, 3, {"first_k_dense_replace": 1, "moe_layer_freq": [1, 1]}, "moe_layer_freq", "2"),
        (AFTER, 3, {"first_k_dense_replace": 1, "moe_layer_freq": 0}, "moe_layer_freq", "0"),
        (AFTER, 3, {"first_k_dense_replace": 3}, "first_k_dense_replace and moe_layer_freq", "none"),
        (LISTED, 3, {"moe_layers": [1, 3]}, "moe_layers", "(1, 3)"),
        (LISTED, 3, {"moe_layers": []}, "moe_layers and interleave_moe_layer_step", "none"),
        (RANGED, 3, {}, "moe_layer_start_index", "nothing"),
        (WORDS, 3, {}, "layers_block_type or hybrid_override_pattern", "nothing"),
        (WORDS, 3, {"hybrid_override_pattern": "ME"}, "hybrid_override_pattern", "2"),
        (WORDS, 3, {"layers_block_type": ["moe", 1, "moe"]}, "layers_block_type", "['moe', 1, 'moe']"),
        (OWN, 3, {"num_kv_shared_layers": 4}, "num_kv_shared_layers", "4"),
        (OWN, 3, {"num_kv_shared_layers": -1}, "num_kv_shared_layers", "-1"),
        (OWN, 3, {"num_kv_shared_layers": "1"}, "num_kv_shared_layers", "'1'"),
        (FULL, 3, {}, "full_attention_interval", "nothing"),
        (FULL, 3, {"full_attention_interval": 0}, "full_attention_interval", "0"),
    ],
)
def test_rules_that_cannot_be_followed(
    rule: LayerRule, layers: int, fields: dict[str, Any], where: str, found: str
) -> None:
    with pytest.raises(InvalidBaseConfig) as caught:
        list_layers(rule, layers, **fields)
    error = caught.value
    assert (error.adapter, error.where, error.found) == ("tiny-base", f"config.json: {where}", found)
    assert error.expected and error.advice


@pytest.mark.parametrize(
    ("given", "flagged"),
    [({}, False), ({"k_eq_v": False}, False), ({"k_eq_v": None}, False), ({"k_eq_v": True}, True)],
)
def test_layers_by_a_flag(given: dict[str, Any], flagged: bool) -> None:
    kinds = {LayerKind.SEPARATE_VALUES: False, LayerKind.KEYS_AS_VALUES: True}
    rules = tuple((kind, FlaggedLayers("k_eq_v", value, FULL_TYPES)) for kind, value in kinds.items())
    family = replace(RENAMED, layer_kinds=rules, modules=())
    base = read_base_of(family, **RENAMED_FIELDS, **given)
    for kind, value in kinds.items():
        expected = [1] if value is flagged else []
        assert [layer for layer in range(3) if base.has(layer, kind)] == expected
    with pytest.raises(InvalidBaseConfig) as caught:
        read_base_of(family, **RENAMED_FIELDS, k_eq_v="yes")
    assert (caught.value.where, caught.value.found) == ("config.json: k_eq_v", "'yes'")


def test_rules_agree_with_the_configurations_of_transformers() -> None:
    """What transformers derives from the same fields, or writes of them."""
    next_config = Qwen3NextConfig(num_hidden_layers=9, full_attention_interval=4)
    for rule, word in ((FULL, "full_attention"), (LINEAR, "linear_attention")):
        expected = tuple(layer for layer, kind in enumerate(next_config.layer_types) if kind == word)
        assert expected and list_layers(rule, 9, full_attention_interval=4) == expected
        assert list_layers(rule, 9, layer_types=next_config.layer_types) == expected
    llama = Llama4TextConfig(num_hidden_layers=7, interleave_moe_layer_step=3)
    assert list_layers(LISTED, 7, interleave_moe_layer_step=3) == tuple(llama.moe_layers) == (2, 5)
    ernie = Ernie4_5_MoeConfig(num_hidden_layers=6, moe_layer_start_index=2)
    assert list_layers(RANGED, 6, moe_layer_start_index=2, moe_layer_end_index=-1) == tuple(
        range(2, ernie.moe_layer_end_index + 1)
    )
    nemotron = NemotronHConfig(hybrid_override_pattern="M-E*E")
    expected = tuple(layer for layer, kind in enumerate(nemotron.layers_block_type) if kind == "moe")
    assert list_layers(WORDS, 5, layers_block_type=nemotron.layers_block_type) == expected == (2, 4)
    assert list_layers(WORDS, 5, hybrid_override_pattern="M-E*E") == expected


def test_layers_may_be_counted_by_their_words() -> None:
    """transformers 5 writes no num_hidden_layers for nemotron_h, and does not heed one."""
    base = read_base_of(UNGATED, **UNGATED_FIELDS)
    assert (base.layers, base.sparse_layers) == (4, (1, 3))
    assert read_base_of(UNGATED, **UNGATED_FIELDS | {"num_hidden_layers": 9}) == base
    letters = {"layers_block_type": None, "hybrid_override_pattern": "ME*E"}
    assert read_base_of(UNGATED, **UNGATED_FIELDS | letters) == base


def test_kinds_of_layers() -> None:
    base = read_base_of(RENAMED, **RENAMED_FIELDS)
    kinds = {
        LayerKind.ALL: [0, 1, 2],
        LayerKind.DENSE: [0],
        LayerKind.SPARSE: [1, 2],
        LayerKind.SLIDING_ATTENTION: [0, 2],
        LayerKind.FULL_ATTENTION: [1],
    }
    assert {kind: [layer for layer in range(4) if base.has(layer, kind)] for kind in kinds} == kinds
    with pytest.raises(KeyError):
        base.has(0, LayerKind.LINEAR_ATTENTION)
