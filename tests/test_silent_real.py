"""What the real vLLM takes without a word and serves as something else; and that we stop each before it is loaded.

Reports: https://github.com/vllm-project/vllm/issues/34186 (names), https://github.com/vllm-project/vllm/issues/41754
(experts), https://github.com/vllm-project/vllm/issues/55193 (target filter).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_builders import REPOSITORY, RunningEngine, json_from_engine, running_engine
from family_builders import merged, prompts, save_adapter, save_base, token_logprobs
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from roster.serving_engine import EngineInfo
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineFlagMissing
from tasks.directories import KnownBase, convert_directory
from tasks.engine_fit import check_engine, needs_of_record
from tasks.errors import EngineUnfit
from tasks.lora.base import read_base_config
from tasks.lora.errors import AdapterError, BaseMismatch, UnexpectedTensor, UnresolvedKeys
from tasks.lora.resolve import check_resolved, find_unresolved
from tasks.served import find_engine_gap, list_witnesses, served_by_engine

pytestmark = pytest.mark.real

WEIGHTS = "adapter_model.safetensors"
Tensors = dict[str, torch.Tensor]
Logprobs = list[tuple[float | None, ...]]
LIMITS = {"max_loras": 3, "max_lora_rank": 8, "max_cpu_loras": 12}
RIGHT = "experts-1"
EXPERTS_ALONE = "experts-4"
NARROW = 29


@dataclass(frozen=True)
class World:
    """A tiny Qwen3-MoE, adapters of it, and what merged models predict of `prompts`."""

    folder: Path
    prompts: list[list[int]]
    references: dict[str, list[list[float]]]

    @property
    def base(self) -> KnownBase:
        return KnownBase(read_base_config(self.folder / "base", label="tiny"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("silent")
    said = json_from_engine(REPOSITORY / "tests" / "engine_world.py", folder)
    return World(folder, said["prompts"], said["references"])


@pytest.fixture(scope="module")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with running_engine(
        world.folder / "base", tmp_path_factory.mktemp("engine"), more=(), **LIMITS
    ) as running:
        yield running


def spoil(source: Path, destination: Path, change: Callable[[Tensors], Tensors]) -> Path:
    destination.mkdir()
    save_file(change(load_file(source / WEIGHTS)), destination / WEIGHTS)
    (destination / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    return destination


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        found = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        assert not found.keys() & tensors.keys()
        return found

    return change


def as_transformers_5(tensors: Tensors) -> Tensors:
    for engines, trainers in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        tensors = {name.replace(f".{engines}.", f".{trainers}."): t for name, t in tensors.items()}
    return renamed(".block_sparse_moe.", ".mlp.")(tensors)


def in_absent_layers(tensors: Tensors) -> Tensors:
    for layer in (0, 1, 2):
        tensors = {
            name.replace(f".layers.{layer}.", f".layers.{layer + 40}."): t for name, t in tensors.items()
        }
    return tensors


def narrowed(tensors: Tensors) -> Tensors:
    """What was trained on a base of fewer dimensions: the experts' A has fewer columns."""
    return {
        name: tensor[:, :NARROW].contiguous() if is_read_from_hidden(name) else tensor
        for name, tensor in tensors.items()
    }


def in_a_corner(tensors: Tensors) -> Tensors:
    """The same with zeros for the columns that are not there."""
    for name, tensor in tensors.items():
        if is_read_from_hidden(name):
            tensor[:, NARROW:] = 0
    return tensors


def is_read_from_hidden(name: str) -> bool:
    return ".experts." in name and name.endswith(("gate_proj.lora_A.weight", "up_proj.lora_A.weight"))


def names_in(directory: Path) -> list[str]:
    with safe_open(directory / WEIGHTS, "pt") as file:
        return list(file.keys())


def score(engine: Engine, model: str, prompts: list[list[int]]) -> Logprobs:
    """One prompt at a time: in a batch the last bit of a sum depends on what else is in it."""
    return [engine.logprobs(model, [prompt])[0] for prompt in prompts]


def furthest(found: Logprobs, expected: list[list[float]]) -> float:
    return max(
        abs(ours - theirs)
        for prompt, reference in zip(found, expected, strict=True)
        for ours, theirs in zip(prompt[1:], reference, strict=True)
        if ours is not None
    )


def published(server: RunningEngine) -> EngineInfo:
    return EngineInfo.model_validate_json(server.engine_json.read_bytes())


def test_an_adapter_that_is_right_is_applied(server: RunningEngine, world: World) -> None:
    """Without this, an engine that applies nothing would pass for a silent one."""
    with Engine(server.url, timeout_s=60) as engine:
        engine.load("right", str(world.folder / RIGHT), is_3d=False)
        found = score(engine, "right", world.prompts)
        assert furthest(found, world.references[RIGHT]) < 1e-4
        assert furthest(found, world.references["base"]) > 0.1
        assert furthest(score(engine, "tiny", world.prompts), world.references["base"]) < 1e-4
    names = names_in(world.folder / RIGHT)
    assert find_unresolved(names, served_by_engine(published(server)), world.base.config.family) == ()


@pytest.mark.parametrize(
    ("fault", "change", "refusal"),
    [
        (
            "prefix",
            renamed("base_model.model.model.layers.", "base_model.model.language_model.model.layers."),
            UnexpectedTensor,
        ),
        ("layers", in_absent_layers, BaseMismatch),
    ],
)
def test_names_that_lead_nowhere_load_and_serve_exactly_the_base(
    server: RunningEngine,
    world: World,
    tmp_path: Path,
    fault: str,
    change: Callable[[Tensors], Tensors],
    refusal: type[AdapterError],
) -> None:
    wrong = spoil(world.folder / RIGHT, tmp_path / fault, change)
    with Engine(server.url, timeout_s=60) as engine:
        engine.load(fault, str(wrong), is_3d=False)
        assert fault in engine.served_models()
        assert score(engine, fault, world.prompts) == score(engine, "tiny", world.prompts)
    with pytest.raises(refusal) as caught:
        convert_directory(
            wrong, tmp_path / "out", world.base, packing=None, format="per-expert", progress=None
        )
    assert fault in str(caught.value) and "layers." in str(caught.value)
    assert not (tmp_path / "out").exists()
    config = world.base.config
    names = names_in(wrong)
    witnesses = list_witnesses(published(server), config)
    assert len(find_unresolved(names, witnesses[0], config.family)) == len(names), (
        "and each of its keys is found"
    )
    with pytest.raises(UnresolvedKeys, match=f"{len(names)} of {len(names)} keys that lead nowhere"):
        check_resolved(fault, names, witnesses, config.family)


def test_narrower_tensors_load_into_a_corner(server: RunningEngine, world: World, tmp_path: Path) -> None:
    wrong = spoil(world.folder / RIGHT, tmp_path / "narrow", narrowed)
    padded = spoil(world.folder / RIGHT, tmp_path / "padded", in_a_corner)
    with Engine(server.url, timeout_s=60) as engine:
        engine.load("narrow", str(wrong), is_3d=False)
        engine.load("padded", str(padded), is_3d=False)
        found = score(engine, "narrow", world.prompts)
        assert found == score(engine, "padded", world.prompts), "as if the rest were zero"
        assert furthest(found, world.references["base"]) > 0.1
        assert furthest(found, world.references[RIGHT]) > 0.1
    with pytest.raises(BaseMismatch) as caught:
        convert_directory(
            wrong, tmp_path / "out", world.base, packing=None, format="per-expert", progress=None
        )
    said = str(caught.value)
    assert said.startswith("narrow: ") and "gate_proj.lora_A.weight" in said
    assert f"{NARROW}" in said and "40" in said
    assert not (tmp_path / "out").exists()


def test_the_refusal_of_stacked_experts_is_told_as_the_engines_setting(
    server: RunningEngine, world: World, tmp_path: Path
) -> None:
    made = convert_directory(
        world.folder / RIGHT, tmp_path / "stacked", world.base, packing=None, format="stacked", progress=None
    )
    with (
        Engine(server.url, timeout_s=60) as engine,
        pytest.raises(EngineFlagMissing) as caught,
    ):
        engine.load("stacked", str(tmp_path / "stacked"), is_3d=True)
    theirs, ours = caught.value.message, str(caught.value)
    assert "contains fused 3D MoE weights for 'model.layers.0.mlp.experts'" in theirs
    assert "but the model uses a 2D MoE LoRA wrapper. Start the engine with" in theirs
    assert theirs in ours and "not the adapter" in ours
    assert "--enable-mixed-moe-lora-format" in ours and "roster convert … --format per-expert" in ours
    # And before anything is loaded, from what the engine says of itself.
    needs = needs_of_record("ada/run-1", made | {"control": {"rank": made["rank"]}})
    assert needs.mixed_format
    with pytest.raises(EngineUnfit) as unfit:
        check_engine(published(server), "tiny", "tiny", [needs])
    said = str(unfit.value)
    assert "--enable-mixed-moe-lora-format: expected given, found missing" in said
    assert "--target-format per-expert" in said


def test_a_filter_on_the_server_makes_an_adapter_inert(world: World, tmp_path: Path) -> None:
    filtered = ("--lora-target-modules", "o_proj", "qkv_proj")
    adapter, config = world.folder / EXPERTS_ALONE, world.base.config
    with (
        running_engine(world.folder / "base", tmp_path, more=filtered, **LIMITS) as server,
        Engine(server.url, timeout_s=60) as engine,
    ):
        engine.load("inert", str(adapter), is_3d=False)
        assert score(engine, "inert", world.prompts) == score(engine, "tiny", world.prompts)
        info = published(server)
    assert furthest_apart(world.references[EXPERTS_ALONE], world.references["base"]) > 0.1
    names = names_in(adapter)
    check_resolved("inert", names, list_witnesses(info, config), config.family)
    gap = find_engine_gap(names, info, config)
    assert gap is not None and gap.setting == "--lora-target-modules"
    said = str(EngineUnfit("tiny", gap.setting, gap.expected, gap.found, gap.advice))
    assert f"{len(names)} of {len(names)} keys" in said and f"{len(names)} of routed_experts" in said


def furthest_apart(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_mixtral_experts_under_the_names_of_transformers_5_serve_exactly_the_base(tmp_path: Path) -> None:
    """As PEFT saves them, and per expert; converted by us they are applied."""
    save_base("mixtral", tmp_path / "base")
    save_adapter("mixtral", ("routed_experts",), tmp_path / "trained")
    base = KnownBase(read_base_config(tmp_path / "base", label="mixtral"))
    convert_directory(
        tmp_path / "trained",
        tmp_path / "made",
        base,
        packing="rank_major",
        format="per-expert",
        progress=None,
    )
    spoil(tmp_path / "made", tmp_path / "single", as_transformers_5)
    task: dict[str, Any] = {
        "model": str(tmp_path / "base"),
        "adapters": {
            "trained": {"path": str(tmp_path / "trained"), "is_3d": True},
            "single": {"path": str(tmp_path / "single"), "is_3d": False},
            "made": {"path": str(tmp_path / "made"), "is_3d": False},
        },
        "mixed": True,
        "dtype": "float32",
        "prompts": prompts(),
        "generated": 1,
    }
    (tmp_path / "task.json").write_text(json.dumps(task))
    told = {"ADAPTER_ROSTER_ENGINE_JSON": str(tmp_path / "engine.json")}
    said = json_from_engine(REPOSITORY / "tests" / "family_engine.py", tmp_path / "task.json", env=told)
    assert said["refused"] == {}, "not a word"
    length = [len(prompt) - 1 for prompt in prompts()]
    rows = {
        name: [row["logprobs"][:n] for row, n in zip(found, length, strict=True)]
        for name, found in said["rows"].items()
    }
    assert rows["trained"] == rows["base"] and rows["single"] == rows["base"]
    model = merged("mixtral", ("routed_experts",))
    expected = [token_logprobs(model, prompt) for prompt in prompts()]
    assert furthest_apart(rows["made"], expected) < 1e-4 and furthest_apart(rows["made"], rows["base"]) > 0.1

    info = EngineInfo.model_validate_json((tmp_path / "engine.json").read_bytes())
    witnesses = list_witnesses(info, base.config)
    check_resolved("made", names_in(tmp_path / "made"), witnesses, base.config.family)
    for name in ("trained", "single"):
        with pytest.raises(UnresolvedKeys, match=r"mlp\.experts"):
            check_resolved(name, names_in(tmp_path / name), witnesses, base.config.family)
