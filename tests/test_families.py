"""Every family's row against transformers' own classes, and as plans that people judge.

tests/golden/families/*.txt are made again with UPDATE_GOLDENS=1; a change of one is a change of what is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from family_inventories import (
    FOLDER,
    NAMES,
    Inventory,
    Parameter,
    load_inventory,
    stacked_adapter,
)
from lora_builders import LABEL, save_adapter

from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.errors import UnexpectedTensor
from tasks.lora.families import FAMILIES, find_family
from tasks.lora.family import LayerKind, StoredAs, TensorClass
from tasks.lora.inspect import inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.names import PREFIX, Factor, ModuleKey, find_module, parse_key
from tasks.lora.plan import ConversionPlan, plan_conversion
from tasks.lora.target import TargetFormat

# Which layers of each inventory have routed experts, read from its config.json by hand.
SPARSE = {
    "qwen2_moe": (1,),
    "qwen3_moe": (0, 2),
    "qwen3_next": (0, 1, 3),
    "qwen3_5_moe": (0, 1, 2, 3),
    "qwen3_5_moe_text": (0, 1, 2, 3),
    "qwen3_vl_moe": (0, 2),
    "mixtral": (0, 1, 2),
    "olmoe": (0, 1, 2),
    "deepseek_v2": (1, 2),
    "deepseek_v3": (1, 2),
    "glm4_moe": (1, 2),
    "gpt_oss": (0, 1, 2),
    "gemma4": (0, 1, 2),
    "gemma4_text": (0, 1, 2),
    "granitemoe": (0, 1, 2),
    "llama4": (0, 3),
    "llama4_text": (0, 3),
    "ernie4_5_moe": (1, 2, 3),
    "minimax_m2": (0, 1, 2),
    "nemotron_h": (1, 4),
}

# What transformers has and the engine does not serve as it was trained, by the end of its name.
REFUSED = {
    "deepseek_v2": ("kv_b_proj",),
    "deepseek_v3": ("kv_b_proj",),
    "llama4": ("self_attn.q_proj", "self_attn.k_proj"),
    "llama4_text": ("self_attn.q_proj", "self_attn.k_proj"),
    "nemotron_h": ("mixer.gate",),
    "qwen3_vl_moe": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


@dataclass(frozen=True)
class Engine:
    """What a class of vLLM 0.32 calls its parts, read from its source by hand. renamed: trainer's end to engine's."""

    decoder: str = "model."
    experts: str = "mlp.experts"
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    renamed: tuple[tuple[str, str], ...] = ()


NUMBERED, WRAPPED = ("w1", "w3", "w2"), "language_model.model."
BLOCK = Engine(
    experts="block_sparse_moe.experts",
    projections=NUMBERED,
    renamed=(("mlp.gate", "block_sparse_moe.gate"),),
)
# Those that are not here have transformers' own names.
ENGINES = {
    "qwen3_5_moe": Engine(WRAPPED),
    "qwen3_vl_moe": Engine(WRAPPED),
    "mixtral": BLOCK,
    "minimax_m2": BLOCK,
    "gpt_oss": Engine(projections=NUMBERED, renamed=(("self_attn.", "attn."),)),
    "gemma4": Engine(WRAPPED, "experts"),
    "gemma4_text": Engine(experts="experts"),
    "granitemoe": Engine(experts="block_sparse_moe.experts", renamed=(("moe.router", "moe.gate"),)),
    "llama4": Engine(WRAPPED, "feed_forward.experts"),
    "llama4_text": Engine(experts="feed_forward.experts"),
    "nemotron_h": Engine(experts="mixer.experts", projections=("up_proj", "down_proj")),
}


def read(inventory: Inventory) -> BaseConfig:
    return read_base_config(inventory.encoded, label="tiny-base")


def test_every_family_has_an_inventory() -> None:
    assert set(SPARSE) == set(NAMES)
    assert {find_family(load_inventory(name).config["model_type"]) for name in NAMES} == set(FAMILIES)
    assert {read(load_inventory(name)).served for name in NAMES} == {
        served for family in FAMILIES for served in family.served
    }


def test_no_name_is_claimed_twice() -> None:
    for names in (
        [name for family in FAMILIES for name in family.model_types],
        [served.architecture for family in FAMILIES for served in family.served],
    ):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_layers_are_those_of_transformers(name: str) -> None:
    """All that the real class has, in the layers in which it has it and of its shape, and nothing else."""
    inventory = load_inventory(name)
    base = read(inventory)
    family = base.family
    assert base.sparse_layers == SPARSE[name]
    assert [item.name.rpartition(".")[2] for item in inventory.experts] == [
        item.name for item in family.parameters
    ]
    assert family.parameters[0].wrapper == "base_layer."
    assert family.parameters[1].wrapper == ""
    for item, row in zip(inventory.experts, family.parameters, strict=True):
        assert item.name == f"{family.decoders[0]}{family.experts}.{row.name}" or name.endswith("_text")
        sizes = (base.size(row.out_size), base.size(row.in_size))
        stored = sizes if family.stored is StoredAs.OUT_IN else sizes[::-1]
        assert item.shape == (base.experts, *stored)
        assert item.transposed is (family.stored is StoredAs.IN_OUT)
        assert item.layers == SPARSE[name]
    assert spell_out_inventory(inventory, REFUSED.get(name, ())) == spell_out_row(inventory, base)


def spell_out_inventory(inventory: Inventory, refused: tuple[str, ...]) -> dict[str, object]:
    """Each module by layer, its shape and whether it is a bare parameter, but for what no row can have."""
    found: dict[str, object] = {}
    for item in inventory.others:
        if item.name.endswith(refused):
            continue
        for layer in item.layers:
            found[item.name.format(layer=layer)] = (*item.shape, item.kind == "bare")
    return found


def has_its_keys_as_values(inventory: Inventory, item: Parameter, layer: int) -> bool:
    return (
        inventory.text.get("attention_k_eq_v", False)
        and inventory.text["layer_types"][layer] == "full_attention"
        and item.name.endswith("k_proj")
    )


def spell_out_row(inventory: Inventory, base: BaseConfig) -> dict[str, object]:
    decoder = inventory.experts[0].name.partition("layers.")[0]
    found: dict[str, object] = {}
    for layer in range(base.layers):
        for module in base.family.modules:
            if base.has(layer, module.layers) and not module.sources[0].endswith(inventory.absent):
                name = f"{decoder}{module.sources[0]}".format(layer=layer)
                shape = (base.size(module.out_size), base.size(module.in_size))
                found[name] = (*shape, module.parameter == "weight")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_golden_plan(name: str, tmp_path: Path) -> None:
    """An adapter of all that the family has: what is written for the engine, name by name."""
    inventory = load_inventory(name)
    plans = [plan_everything(inventory, format, tmp_path) for format in TargetFormat]
    found = "\n".join(line for plan in plans for line in abridge(plan, inventory))
    golden = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(found + "\n", "utf-8")
    assert found + "\n" == golden.read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_outputs_have_the_engines_names(name: str, tmp_path: Path) -> None:
    inventory, engine = load_inventory(name), ENGINES.get(name, Engine())
    for format in TargetFormat:
        plan = plan_everything(inventory, format, tmp_path)
        expected = {
            f"{PREFIX}{engine.decoder}layers.{layer}.{end}.lora_{factor}.weight"
            for layer, end in list_engine_modules(inventory, engine, format)
            for factor in "AB"
        }
        assert {tensor.name for tensor in plan.tensors} == expected


def list_engine_modules(
    inventory: Inventory, engine: Engine, format: TargetFormat
) -> Iterator[tuple[int, str]]:
    """Each module by its layer and the end of its name."""
    experts = inventory.experts[0].shape[0]
    for layer in SPARSE[inventory.name]:
        if format is TargetFormat.STACKED:
            yield from ((layer, engine.experts), (layer, f"{engine.experts}.base_layer"))
            continue
        if format is TargetFormat.SLOTS:
            yield from ((layer, f"{engine.experts}.{name}") for name in engine.projections)
            continue
        for expert in range(experts):
            yield from ((layer, f"{engine.experts}.{expert}.{name}") for name in engine.projections)
    for item in inventory.others:
        if item.name.endswith(REFUSED.get(inventory.name, ())):
            continue
        end = item.name.partition(".layers.{layer}.")[2]
        for trainers, engines in engine.renamed:
            end = (
                end.replace(trainers, engines) if end.endswith(trainers) or end.startswith(trainers) else end
            )
        for layer in item.layers:
            yield layer, end
            if has_its_keys_as_values(inventory, item, layer):
                yield layer, end.replace("k_proj", "v_proj")


def plan_everything(inventory: Inventory, format: TargetFormat, folder: Path) -> ConversionPlan:
    tensors = stacked_adapter(inventory, without=REFUSED.get(inventory.name, ()))
    source = save_adapter(folder / "source", tensors, target_parameters=None)
    forced = Packing.RANK_MAJOR
    found = inspect_adapter(source, read(inventory), label=LABEL, forced=forced, header_only=True)
    return plan_conversion(found.layout, format)


def abridge(plan: ConversionPlan, inventory: Inventory) -> Iterator[str]:
    """The plan's first line; of one layer of each kind all names and shapes, and how those of experts are put together.

    Of stacked output and of slots the experts alone, since the rest is as it is, but for its numbers in slots.
    """
    first, *lines = str(plan).splitlines()
    yield first
    kinds: dict[frozenset[Parameter], int] = {}
    for layer in range(1 + max(layer for item in inventory.parameters for layer in item.layers)):
        kinds.setdefault(frozenset(item for item in inventory.parameters if layer in item.layers), layer)
    shown = False
    for line in lines:
        if not line.startswith(" "):
            of_layer = any(f".layers.{layer}." in line for layer in kinds.values())
            shown = of_layer and (plan.format is TargetFormat.PER_EXPERT or ".experts." in line)
        if shown and (not line.startswith(" ") or ".experts." in line):
            yield line


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_the_engine_would_not_serve_as_trained_is_refused(name: str) -> None:
    inventory = load_inventory(name)
    family = read(inventory).family
    for end in REFUSED[name]:
        [item] = [item for item in inventory.others if item.name.endswith(end)]
        key = f"{PREFIX}{item.name.format(layer=item.layers[0])}.lora_A.weight"
        with pytest.raises(UnexpectedTensor) as caught:
            parse_key(key, family, LABEL)
        assert (caught.value.adapter, caught.value.where) == (LABEL, key)
        assert "vLLM" in caught.value.found
        assert caught.value.expected == "a module that the engine serves as trained"
        assert caught.value.advice == "Train without this module, or serve the merged model."


def test_what_each_row_serves() -> None:
    """The classes of tensors, so that one that is lost from a row is missed."""
    served = {family.name: {module.kind for module in family.modules} for family in FAMILIES}
    attention, router = TensorClass.ATTENTION, TensorClass.ROUTER
    shared, other = TensorClass.SHARED_EXPERTS, TensorClass.OTHER
    everything = {attention, router, shared, other}
    assert served == {
        "qwen2_moe": everything,
        "qwen3_moe": {attention, router, other},
        "qwen3_next": everything,
        "qwen3_5_moe": {attention, router, shared},
        "qwen3_vl_moe": {attention, router},
        "mixtral": {attention, router},
        "olmoe": {attention, router},
        "deepseek_v2": everything,
        "deepseek_v3": everything,
        "glm4_moe": everything,
        "gpt_oss": {attention, router},
        "gemma4": {attention, router, other},
        "granitemoe": {attention, router},
        "llama4": everything,
        "ernie4_5_moe": everything,
        "minimax_m2": {attention, router},
        "nemotron_h": {attention, shared, other},
    }


def test_modules_of_one_layer_do_not_overlap() -> None:
    """Two rows of one template differ in their layers, so that one of them is meant."""
    for name in NAMES:
        base = read(load_inventory(name))
        for layer in range(base.layers):
            found = [item.sources[0] for item in base.family.modules if base.has(layer, item.layers)]
            assert len(found) == len(set(found))
            for template in found:
                key = ModuleKey(layer, template, TensorClass.OTHER, Factor.A)
                assert find_module(key, base).sources[0] == template
        also = {name for item in base.family.modules for name in item.also_served}
        assert also <= {item.served for item in base.family.modules}, "no key of an output is unknown"
        assert {LayerKind.ALL, LayerKind.SPARSE, LayerKind.DENSE} <= dict(base.kinds).keys()
