"""Where every key of an adapter leads: for what an engine published, and for what is kept of its class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from family_inventories import NAMES, load_inventory
from lora_builders import EXPERTS, FAMILY, LAYERS, make_base

from roster.serving_engine import EngineInfo
from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.errors import UnresolvedKeys
from tasks.lora.family import TensorClass
from tasks.lora.names import ExpertKey, Factor, ModuleKey, StackedKey, format_served_key
from tasks.lora.resolve import (
    ServedModules,
    check_resolved,
    classify_name,
    count_classes,
    find_lost,
    find_unresolved,
)
from tasks.lora.snapshots import (
    Snapshots,
    StackedExperts,
    format_snapshots,
    load_snapshot,
    merge_entries,
    read_snapshots,
    snapshot_entry,
)
from tasks.served import find_engine_gap, list_witnesses, served_by_engine

VLLM = "0.32.0"
EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "engine.json"
SNAPSHOTS = Path(__file__).parent.parent / "tasks" / "lora" / "served" / f"vllm-{VLLM}.json"
QKV, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
BASE = make_base()


def kept(architecture: str, layers: int = LAYERS, experts: int = EXPERTS) -> ServedModules:
    found = load_snapshot(architecture, VLLM, layers=layers, experts=experts)
    assert found is not None
    return found


def engine(**changes: object) -> EngineInfo:
    return EngineInfo.model_validate(json.loads(EXAMPLE.read_text()) | changes)


def keys(*modules: str) -> list[str]:
    return [f"base_model.model.{module}.lora_{factor}.weight" for module in modules for factor in "AB"]


def experts(module: str, names: tuple[str, ...] = GATED, count: int = EXPERTS) -> list[str]:
    return keys(*(f"{module}.{expert}.{name}" for expert in range(count) for name in names))


def attention(decoder: str, block: str = "self_attn") -> list[str]:
    return keys(*(f"{decoder}layers.{n}.{block}.{name}" for n in range(LAYERS) for name in (*QKV, "o_proj")))


def routed(decoder: str, inside: str, names: tuple[str, ...] = GATED) -> list[str]:
    return [key for n in range(LAYERS) for key in experts(f"{decoder}layers.{n}.{inside}", names)]


def stacked(decoder: str, inside: str) -> list[str]:
    modules = [f"{decoder}layers.{n}.{inside}" for n in range(LAYERS)]
    return keys(*modules, *(f"{module}.base_layer" for module in modules))


RIGHT = [*attention("model."), *routed("model.", "mlp.experts"), *keys("model.layers.1.mlp.gate")]


def unresolved(names: list[str], served: ServedModules) -> dict[str, str]:
    return {one.name: one.why for one in find_unresolved(names, served, FAMILY)}


def dropped_by_vllm(names: list[str], served: ServedModules) -> set[str]:
    """What is left over when vLLM has asked for all it asks for, step by step as it does; the oracle."""
    loras = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in names}
    packed: dict[str, list[str]] = {}
    for module in served.modules:
        parent, _, last = module.rpartition(".")
        for packing, names_of_parts in served.packed:
            if packing == last:
                packed[module] = [f"{parent}.{part}" if parent else part for part in names_of_parts]
    for module, count in served.expert_modules:
        packed[module] = [f"{module}.{e}.{name}" for e in range(count) for name in served.projections]
    asked: set[str] = set()
    for parts in packed.values():
        asked.update(loras.intersection(parts))
    for module in served.modules - packed.keys():
        asked.update(loras.intersection([module]))
    if served.stacked:
        for module, _ in served.expert_modules:
            asked.update(loras.intersection([module, f"{module}.base_layer"]))
    for module in served.ineffective:
        asked -= {module, *packed.get(module, ())}
    return {
        name for name in names if name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] not in asked
    }


# Right adapters and wrong ones, by the public reports they come from.


@pytest.mark.parametrize("told", ["engine", "snapshot"])
def test_a_right_adapter_resolves(told: str) -> None:
    served = served_by_engine(engine()) if told == "engine" else kept("Qwen3MoeForCausalLM")
    assert unresolved(RIGHT, served) == {} == dict.fromkeys(dropped_by_vllm(RIGHT, served))
    check_resolved("elm/run-1", RIGHT, [served], FAMILY)


@pytest.mark.parametrize(
    ("architecture", "right", "wrong"),
    [
        ("Qwen3MoeForCausalLM", "model.", "language_model.model."),
        ("Qwen3MoeForCausalLM", "model.", "model.language_model."),
        ("Qwen3_5MoeForConditionalGeneration", "language_model.model.", "model."),
        ("Qwen3_5MoeForConditionalGeneration", "language_model.model.", "model.language_model."),
        ("Gemma4ForConditionalGeneration", "language_model.model.", "model."),
    ],
)
def test_another_prefix_leads_nowhere(architecture: str, right: str, wrong: str) -> None:
    """vllm-project/vllm#34186: keys of the text model on a class that nests it load, and change nothing."""
    served = kept(architecture)
    inside = "experts" if architecture.startswith("Gemma4") else "mlp.experts"
    assert unresolved([*attention(right), *routed(right, inside)], served) == {}
    names = [*attention(wrong), *routed(wrong, inside)]
    assert unresolved(names, served) == dict.fromkeys(names, "no such module")
    assert dropped_by_vllm(names, served) == set(names)


def test_experts_lost_behind_good_attention_are_counted_by_class() -> None:
    """vllm-project/vllm#41754: expert keys with another path are dropped, while attention applies and hides it."""
    served = kept("Qwen3MoeForCausalLM")
    lost = routed("model.", "mlp.moe.experts")
    names = [*attention("model."), *lost]
    found = find_unresolved(names, served, FAMILY)
    assert [one.name for one in found] == lost and {one.kind for one in found} == {None}
    assert dropped_by_vllm(names, served) == set(lost)
    with pytest.raises(UnresolvedKeys) as caught:
        check_resolved("elm/run-1", names, [served], FAMILY)
    total = 2 * LAYERS * (EXPERTS * 3 + 4)
    for fact in (
        "elm/run-1: base_model.model.model.layers.0.mlp.moe.experts.0.gate_proj.lora_A.weight",
        f"{len(lost)} of {total} keys that lead nowhere: {len(lost)} of unknown",
        "modules of Qwen3MoeForCausalLM (snapshot of vLLM 0.32.0",
        "This vLLM cannot serve those factors",
    ):
        assert fact in str(caught.value)


def test_a_misspelt_inner_factor_is_seen() -> None:
    """vLLM's own check of names (vllm/lora/lora_model.py) passes over every key with `base_layer` in it."""
    served = kept("Qwen3MoeForCausalLM")
    right = stacked("model.", "mlp.experts")
    [wrong] = keys("model.layers.0.mlp.expertz.base_layer")[:1]
    assert unresolved([*right, wrong], served) == {wrong: "no such module"}
    assert dropped_by_vllm([*right, wrong], served) == {wrong}


def narrowed(*left: str) -> EngineInfo:
    """The same engine, started with --lora-target-modules for these."""
    modules = [name for name in engine().lora_modules if name.endswith(left)]
    counts = {name: count for name, count in engine().expert_modules.items() if name in modules}
    return engine(lora_modules=modules, expert_modules=counts)


@pytest.mark.parametrize(
    ("left", "classes"),
    [
        (("o_proj", "qkv_proj", "gate"), {TensorClass.ROUTED_EXPERTS}),
        (("experts",), {TensorClass.ATTENTION, TensorClass.ROUTER}),
    ],
)
def test_a_filter_on_the_server_is_the_servers_fault(
    left: tuple[str, ...], classes: set[TensorClass]
) -> None:
    """vllm-project/vllm#55193: what --lora-target-modules leaves out is loaded, and inert."""
    assert find_engine_gap(RIGHT, engine(), BASE) is None
    info = narrowed(*left)
    lost = find_unresolved(RIGHT, served_by_engine(info), FAMILY)
    assert {one.kind for one in lost} == classes
    assert dropped_by_vllm(RIGHT, served_by_engine(info)) == {one.name for one in lost}
    gap = find_engine_gap(RIGHT, info, BASE)
    assert gap is not None and gap.setting == "--lora-target-modules"
    assert f"{len(lost)} of {len(RIGHT)} keys that lead nowhere" in gap.found and lost[0].name in gap.found
    check_resolved("elm/run-1", RIGHT, list_witnesses(info, BASE), FAMILY)


def test_what_neither_engine_nor_snapshot_has_is_the_adapters_fault() -> None:
    info, stray = narrowed("experts"), keys("model.layers.0.mlp.shared_expert.up_proj")
    witnesses = list_witnesses(info, BASE)
    assert [one.name for one in find_lost([*RIGHT, *stray], witnesses, FAMILY)] == stray
    with pytest.raises(UnresolvedKeys, match=f"engine {info.engine_id}.*snapshot of vLLM {VLLM}"):
        check_resolved("elm/run-1", [*RIGHT, *stray], witnesses, FAMILY)
    gap = find_engine_gap([*RIGHT, *stray], info, BASE)
    assert gap is not None and "shared_expert" not in gap.found


@pytest.mark.parametrize(
    ("changes", "setting", "found"),
    [
        (
            {"architecture": "TransformersMoEForCausalLM"},
            "the model's class",
            "TransformersMoEForCausalLM: 24 of",
        ),
        ({"vllm_version": "0.33.0"}, "vLLM", "0.33.0: 24 of"),
    ],
)
def test_an_engine_of_another_kind_is_named(changes: dict[str, str], setting: str, found: str) -> None:
    """Whose second layer's experts have another name."""
    modules = [name.replace(".1.mlp.experts", ".1.mlp.routed") for name in engine().lora_modules]
    counts = {f"model.layers.{n}.mlp.{name}": EXPERTS for n, name in enumerate(("experts", "routed"))}
    info = engine(lora_modules=modules, expert_modules=counts, **changes)
    gap = find_engine_gap(routed("model.", "mlp.experts"), info, BASE)
    assert gap is not None and (gap.setting, gap.found.split(" 48")[0]) == (setting, found)


def test_modules_that_this_engine_does_not_apply_are_no_filter() -> None:
    """Routers that a runner computes by itself, say; the class that is kept applies them."""
    idle = "model.layers.1.mlp.gate"
    info = narrowed("o_proj", "experts", "gate").model_copy(update={"ineffective_modules": (idle,)})
    gap = find_engine_gap(RIGHT, info, BASE)
    assert gap is not None and gap.advice and gap.setting == "ineffective_modules"
    assert gap.found.startswith("2 of 66 keys that lead nowhere: 2 of router (")
    assert f"{idle}.lora_A.weight: loaded by the engine, and not applied" in gap.found
    check_resolved("elm/run-1", RIGHT, list_witnesses(info, BASE), FAMILY)


def test_a_filter_by_full_names_is_no_other_model() -> None:
    """vllm/lora/utils.py, is_in_target_modules: --lora-target-modules takes full names, too."""
    modules = ["model.layers.0.mlp.experts", "model.layers.1.self_attn.qkv_proj"]
    info = engine(lora_modules=modules, expert_modules={modules[0]: EXPERTS})
    gap = find_engine_gap(RIGHT, info, BASE)
    assert gap is not None and gap.setting == "--lora-target-modules"


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    ("layers", "count", "found"),
    [
        ((0, 1), 3, "3 experts in each of the layers 0 to 1"),
        ((0, 1), 8, "8 experts in each of the layers 0 to 1"),
        ((0,), EXPERTS, "4 experts in each of the layers 0"),
        ((0, 1, 2, 4), EXPERTS, "4 experts in each of the layers 0 to 2, 4"),
    ],
)
def test_an_engine_that_serves_another_model_is_named(
    layers: tuple[int, ...], count: int, found: str, missing: bool
) -> None:
    """Of the same class: what is missing is no setting, and where nothing is missing it is no less wrong."""
    counts = {f"model.layers.{n}.mlp.experts": count for n in layers}
    info = engine(lora_modules=[*counts, "model.layers.0.self_attn.qkv_proj"], expert_modules=counts)
    names = RIGHT if missing else experts("model.layers.0.mlp.experts", count=2)
    assert bool(find_unresolved(names, served_by_engine(info), FAMILY)) is missing
    gap = find_engine_gap(names, info, BASE)
    assert gap is not None and gap.advice
    assert (gap.setting, gap.expected, gap.found) == (
        "the model",
        "4 experts in each of the layers 0 to 1",
        found,
    )


def test_one_stage_of_a_pipeline_is_no_witness() -> None:
    """The process that publishes holds the layers of the first stage only."""
    first = [name for name in engine().lora_modules if "layers.1." not in name]
    info = engine(lora_modules=first, expert_modules={"model.layers.0.mlp.experts": EXPERTS})
    assert find_engine_gap(RIGHT, info, BASE) is not None and len(list_witnesses(info, BASE)) == 2
    piped = info.model_copy(update={"pipeline_parallel_size": 2})
    assert find_engine_gap(RIGHT, piped, BASE) is None
    assert [one.origin for one in list_witnesses(piped, BASE)] == [kept("Qwen3MoeForCausalLM").origin]


# The rules one by one.


def expect(served: ServedModules, right: list[str], wrong: list[str], why: str) -> None:
    assert right and wrong
    assert unresolved([*right, *wrong], served) == dict.fromkeys(wrong, why)
    assert dropped_by_vllm([*right, *wrong], served) == set(wrong)


def test_layers_that_do_not_exist() -> None:
    served = kept("Qwen3MoeForCausalLM")
    last, beyond = (f"model.layers.{n}.mlp.experts" for n in (LAYERS - 1, LAYERS))
    expect(served, experts(last), experts(beyond), "no such module")
    expect(served, keys("model.layers.1.mlp.gate"), keys("model.layers.01.mlp.gate"), "no such module")


def test_experts_that_do_not_exist() -> None:
    served = kept("Qwen3MoeForCausalLM")
    module = "model.layers.0.mlp.experts"
    expect(served, experts(module), keys(f"{module}.{EXPERTS}.up_proj"), f"{EXPERTS} experts")
    expect(served, experts(module), keys(f"{module}.03.up_proj"), "no such module")


def test_projections_go_by_the_engines_names() -> None:
    """Seen live: a Mixtral adapter under transformers-5 names loads and answers exactly as the base does."""
    served = kept("MiniMaxM2ForCausalLM")
    right = routed("model.", "block_sparse_moe.experts", ("w1", "w2", "w3"))
    expect(served, right, routed("model.", "block_sparse_moe.experts"), "projections are called w1, w2, w3")
    expect(served, right, routed("model.", "mlp.experts"), "no such module")


def test_parts_and_not_the_packed_module() -> None:
    served = kept("Qwen3MoeForCausalLM")
    expect(served, attention("model."), keys("model.layers.0.self_attn.qkv_proj"), "no such module")
    expect(served, attention("model."), keys("self_attn.q_proj", "q_proj"), "no such module")


def test_dense_parts_are_addressed_only_where_the_engine_packs_them() -> None:
    """The class packs gate and up of its dense layers only where config.json lists some in mlp_only_layers."""
    dense = keys("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    served = kept("Qwen3MoeForCausalLM")
    assert unresolved(dense, served) == {}
    unpacked = replace(served, packed=(("qkv_proj", QKV),))
    expect(unpacked, attention("model."), dense, "no such module")


def test_stacked_experts_only_where_they_are_taken() -> None:
    plain, mixed = served_by_engine(engine()), served_by_engine(engine(stacked_experts=True))
    names = stacked("model.", "mlp.experts")
    assert unresolved(names, mixed) == {} == unresolved(RIGHT, mixed)
    expect(plain, RIGHT, names, "no stacked experts taken")


def test_single_experts_only_where_they_are_taken() -> None:
    """vllm-project/vllm#38520: a class of stacked experts takes none by themselves, without the mixed format."""
    native = served_by_engine(engine(native_3d=True, stacked_experts=True, expert_projections=()))
    names = routed("model.", "mlp.experts")
    expect(native, stacked("model.", "mlp.experts"), names, "stacked experts alone taken")


def test_experts_without_a_gate_take_no_stacked_ones() -> None:
    served = kept("NemotronHForCausalLM")
    right = routed("model.", "mixer.experts", ("up_proj", "down_proj"))
    expect(served, right, stacked("model.", "mixer.experts"), "no stacked experts taken")


def test_modules_that_are_wrapped_and_not_applied() -> None:
    """Latent attention (MLA) folds kv_b_proj's weight into others when it is loaded, without the adapter's part."""
    served, why = kept("DeepseekV3ForCausalLM"), "loaded by the engine, and not applied"
    right = keys("model.layers.0.self_attn.q_b_proj", "model.layers.1.self_attn.o_proj")
    expect(served, right, keys("model.layers.0.self_attn.kv_b_proj"), why)
    module = "model.layers.0.mlp.experts"
    deaf = replace(served_by_engine(engine()), ineffective=frozenset([module]))
    expect(deaf, attention("model."), experts(module), why)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate.lora_C.weight",
        "lora_A.weight",
    ],
)
def test_what_is_no_factor_is_said(name: str) -> None:
    [found] = find_unresolved([name], kept("Qwen3MoeForCausalLM"), FAMILY)
    assert (found.kind, found.why) == (None, "not the name of a factor")


# Every family.


def every_key(base: BaseConfig, *, stacked: bool) -> list[str]:
    """The name of each factor that an output for this base can have."""
    found: list[StackedKey | ExpertKey | ModuleKey] = []
    for layer in range(base.layers):
        for factor in Factor:
            if layer in base.sparse_layers:
                for parameter in base.family.parameters:
                    if stacked:
                        found.append(StackedKey(layer, parameter.name, factor))
                    for name in parameter.projections:
                        found += [ExpertKey(layer, expert, name, factor) for expert in range(base.experts)]
            for module in base.family.modules:
                if base.has(layer, module.layers):
                    found.append(ModuleKey(layer, module.sources[0], module.kind, factor))
    return [format_served_key(key, base) for key in found]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_a_row_gives_is_one_that_its_classes_ask_for(name: str) -> None:
    """The rows were read in vLLM's source, the snapshots come from engines that ran, or from another reading."""
    inventory = load_inventory(name)
    for each in read_base_config(inventory.encoded, label=name).family.served:
        config = inventory.config | {"architectures": [each.architecture]}
        base = read_base_config(json.dumps(config).encode(), label=name)
        served = kept(each.architecture, base.layers, base.experts)
        names = every_key(base, stacked=served.stacked)
        found = unresolved(names, served)
        assert not found, each.architecture
        assert dropped_by_vllm(names, served) == set(found)
        moved = [key.replace(base.served.decoder, f"{base.served.decoder}text.", 1) for key in names]
        assert set(unresolved(moved, served)) == set(moved)


@pytest.mark.parametrize("name", NAMES)
def test_classes_are_counted_as_they_are_told_one_by_one(name: str) -> None:
    base = read_base_config(load_inventory(name).encoded, label=name)
    odd = keys("model.layers.01.mlp.gate", "model.layers.0.12.13")
    names = [key for stacked in (False, True) for key in [*every_key(base, stacked=stacked), *odd]]
    counts: dict[str, int] = {}
    for key in names:
        kind = classify_name(key, base.family)
        counts[kind.value if kind else "unknown"] = counts.get(kind.value if kind else "unknown", 0) + 1
    assert count_classes(names, base.family) == tuple(counts.items())
    assert counts["unknown"] == 8 and counts["routed_experts"] > base.experts


# Snapshots.


def test_digests_differ_with_everything_but_the_origin() -> None:
    served = served_by_engine(engine())
    changed = [
        replace(served, architecture="X"),
        replace(served, modules=served.modules - {"lm_head"}),
        replace(served, ineffective=frozenset(["lm_head"])),
        replace(served, packed=()),
        replace(served, expert_modules=served.expert_modules[:1]),
        replace(served, projections=("w1", "w2", "w3")),
        replace(served, stacked=True),
    ]
    assert replace(served, origin="elsewhere").digest == served.digest
    assert len({one.digest for one in [served, *changed]}) == len(changed) + 1


def of_layers(count: int) -> EngineInfo:
    return engine(
        lora_modules=[
            f"model.layers.{n}.{name}" for n in range(count) for name in ("mlp.experts", "mlp.gate")
        ],
        expert_modules={f"model.layers.{n}.mlp.experts": EXPERTS for n in range(count)},
    )


def test_a_snapshot_is_the_same_for_any_number_of_layers_and_gives_them_back() -> None:
    entries = [snapshot_entry(served_by_engine(of_layers(n)), native_3d=False, origin="run") for n in (2, 13)]
    assert entries[0] == entries[1] and entries[0].stacked is StackedExperts.MIXED
    assert entries[0].modules == ("model.layers.{layer}.mlp.experts", "model.layers.{layer}.mlp.gate")
    assert format_snapshots(VLLM, {"B": entries[0], "A": entries[1]}) == format_snapshots(
        VLLM, {"A": entries[0], "B": entries[1]}
    )


def test_a_snapshot_knows_what_a_class_takes() -> None:
    served = served_by_engine(of_layers(2))
    two = replace(served, projections=("up_proj", "down_proj"))
    assert snapshot_entry(two, native_3d=False, origin="run").stacked is None
    assert snapshot_entry(served, native_3d=True, origin="run").stacked is StackedExperts.NATIVE
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM: .*--enable-mixed-moe-lora-format"):
        snapshot_entry(replace(served, projections=()), native_3d=True, origin="run")


def test_entries_of_one_class_on_two_bases_are_merged() -> None:
    first, second = (
        snapshot_entry(served_by_engine(of_layers(2)), native_3d=False, origin="run") for _ in "12"
    )
    more = second.model_copy(
        update={
            "modules": (*second.modules, "model.layers.{layer}.mlp.gate_up_proj"),
            "origin": "read: x.py, X",
        }
        | {
            "packed": {"gate_up_proj": ("gate_proj", "up_proj")},
            "ineffective": ("model.layers.{layer}.mlp.gate",),
        }
    )
    merged = merge_entries(first, more)
    assert merged.origin == "run" and set(merged.modules) == set(more.modules) > set(first.modules)
    assert merged.ineffective == more.ineffective and merged.packed == {**first.packed, **more.packed}
    assert merge_entries(merged, first) == merged != first
    with pytest.raises(ValueError, match="stacked of a class: mixed is kept, native was found"):
        merge_entries(first, first.model_copy(update={"stacked": StackedExperts.NATIVE}))


def test_what_is_not_kept_is_none() -> None:
    assert load_snapshot("Qwen3MoeForCausalLM", "0.1.0", layers=LAYERS, experts=EXPERTS) is None
    assert load_snapshot("NoSuchClass", VLLM, layers=LAYERS, experts=EXPERTS) is None
    assert list_witnesses(None, replace(BASE, served=replace(BASE.served, architecture="NoSuchClass"))) == ()


def test_the_file_is_as_it_would_be_written_and_makes_sense() -> None:
    snapshots = read_snapshots(VLLM)
    assert snapshots is not None and snapshots.vllm == VLLM
    assert format_snapshots(VLLM, snapshots.classes) == SNAPSHOTS.read_text()
    for name, entry in snapshots.classes.items():
        assert entry.origin.startswith(("run", "read: ")), name
        assert set(entry.expert_modules) | set(entry.ineffective) <= set(entry.modules), name
        packed = {module.rpartition(".")[2] for module in entry.modules}
        assert {"qkv_proj": QKV}.items() <= entry.packed.items() or "q_proj" in packed, name
        assert all("{layer}" in module for module in entry.expert_modules), name
    with pytest.raises(ValueError, match="surprise"):
        Snapshots.model_validate_json(SNAPSHOTS.read_text().replace('"vllm"', '"surprise": 1,\n "vllm"', 1))
