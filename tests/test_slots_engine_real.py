"""The format slots on a real vLLM: the same slots and the same scores as the same adapter per expert, and refusals.

The slots files are made by plain torch (slots_builders). One engine serves both formats side by side, a server takes
them over HTTP and at its start, two engines of a class that is stacked by nature; vLLM without our plugin, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_builders import REPOSITORY, json_from_engine, run_in_engine, running_engine
from family_builders import prompts, save_adapter, save_base
from slots_builders import save_slots

from roster.engine_plugin.settings import SLOTS_LOG_LINE
from roster.serving_engine import EngineInfo
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineRefused
from tasks.directories import KnownBase, convert_directory
from tasks.lora.base import read_base_config

pytestmark = pytest.mark.real

TESTS = REPOSITORY / "tests"
ADAPTERS = ("experts-1", "experts-2", "attention", "experts-4")
BROKEN = {
    "no projection": "model.layers.1.mlp.experts, gate_proj: expected one tensor lora_A and one lora_B, found neither",
    "no factor": "layers.1.mlp.experts, down_proj: expected one tensor lora_A and one lora_B",
    "no layer": "layers.1.mlp.experts, gate_proj: expected one tensor lora_A and one lora_B, found neither",
    "another layer": "layers.7",
    "another projection": "experts.w1.lora_A.weight: expected routed experts of the engine's",
    "one expert fewer": "expected (4, 3, 40), found (3, 3, 40)",
    "exchanged axes": "expected rank 3, as adapter_config.json says, found rank 40",
    "another size": "expected (4, 40, 3), found (4, 39, 3)",
    "another size of attention": "q_proj.lora_A.weight: expected (3, 40), found (3, 39)",
    "another rank": "gate_proj.lora_A.weight: expected rank 3, as adapter_config.json says, found rank 2",
    "another dtype": "the LoRA dtype: expected the server's, float32, found bfloat16 in the file",
    "mixed dtypes": "expected one dtype, of BF16, F16, F32, found F16, F32",
    "one axis": "q_proj.lora_A.weight: expected (rank, in), (out, rank)",
    "another module": "p_proj.lora_A.weight: expected a module that the engine takes",
    "another name": "q_proj.bias: expected a name that ends in",
    "single expert": "experts.2.up_proj.lora_A.weight: expected a module that the engine takes",
    "nothing": "found no tensor",
    "no metadata": "__metadata__: expected {'format': 'adapter-roster slots', 'version': '1'}, found {}",
    "another version": "'version': '2'",
    "scaling": "expected scaling 1, found scaling 2",
    "too large a rank": "LoRA rank 9 is greater than max_lora_rank 8",
    "cut": "expected a whole safetensors file",
    "empty": "expected a whole safetensors file",
    "both files": "expected one file of weights",
    "no config": "No adapter found",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def said(directory: Path) -> dict[str, Any]:
    target = directory / "engine.json"
    env = {"ADAPTER_ROSTER_ENGINE_JSON": str(target)}
    found: dict[str, Any] = json_from_engine(TESTS / "engine_slots_format.py", directory / "world", env=env)
    return found | {"info": EngineInfo.model_validate_json(target.read_bytes())}


def mean_gap(first: list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_slots_hold_what_they_hold_of_the_per_expert_adapter(said: dict[str, Any], adapter: str) -> None:
    """To the bit, though the scaling is 5/3 and was multiplied elsewhere; of every wrapped module."""
    found = said["compared"][adapter]
    assert found["equal"] and found["modules"] == 52
    assert found["filled_experts"] == (0 if adapter == "attention" else 18)
    assert found["filled"] > found["filled_experts"] or adapter == "experts-4"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_scores_are_those_of_the_per_expert_adapter(said: dict[str, Any], adapter: str) -> None:
    """In one batch with it and with the base, whose row stays what it is alone."""
    found = said["compared"][adapter]
    base, single, stacked = found["rows"]
    assert stacked == pytest.approx(single, abs=1e-5) and len(stacked) > 20
    assert base == pytest.approx(found["alone"], abs=1e-4)
    assert mean_gap(base, stacked) > 0.5


def test_an_adapter_comes_back_into_a_slot_as_it_was(said: dict[str, Any]) -> None:
    assert said["swapped"] == {"out": True, "same": True, "gap": 0.0}


def test_a_file_put_in_its_place_changes_nothing_of_a_loaded_adapter(said: dict[str, Any]) -> None:
    """Renamed into place, as our cache does; vLLM's slots are filled from the mapping of the old one."""
    assert said["replaced"] == {"same": True}


def test_each_malformed_file_is_refused_and_the_engine_lives(said: dict[str, Any]) -> None:
    assert said["refused"].keys() == BROKEN.keys()
    for name, says in BROKEN.items():
        assert says in said["refused"][name], (name, said["refused"][name])
    assert said["answers"]["after"] == said["answers"]["before"]


def test_an_unknown_vllm_gets_single_experts_and_the_same_numbers(said: dict[str, Any]) -> None:
    assert said["split"]["known"] == [True, True, False, False]
    assert said["split"]["same"] and said["split"]["gap"] == 0
    assert "'version': '2'" in said["split"]["refused"]


def test_experts_are_pinned_where_memory_can_be(said: dict[str, Any]) -> None:
    """By a stand-in for pinning, which copies: no factor of experts is left in the mapped file."""
    assert said["pinned"] == {"factors": 18, "of_them": 18}


def test_engine_json_says_that_slots_are_taken(said: dict[str, Any]) -> None:
    assert said["info"].slots_version == 1


def test_other_ways_of_serving_pack_what_vllm_packs(tmp_path: Path) -> None:
    """Without a gate, over two processes' experts, under names that the class changes; vLLM's packing is the oracle."""
    found = json_from_engine(TESTS / "engine_slots_manager.py", tmp_path)
    kinds = [(kind, f"rank {rank} of 2") for kind in ("gated", "without a gate") for rank in (0, 1)]
    whole = [(kind, "all experts") for kind in ("gated", "without a gate")]
    assert {", ".join(name) for name in kinds + whole} | {"first stage"} == found.keys()
    for name, one in found.items():
        assert one["equal"] and one["left"] == [], name
        assert one["experts"] == ([2] if "of 2" in name else [4]), name
        assert one["pairs"] == (6 if name == "first stage" else 12), name


def test_a_server_takes_them_at_its_start_and_over_http(said: dict[str, Any], directory: Path) -> None:
    world = directory / "world"
    (directory / "server").mkdir()
    module = json.dumps({"name": "ada", "path": str(world / "experts-1-slots"), "base_model_name": "tiny"})
    flags = {"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4}
    more = ("--lora-modules", module)
    with (
        running_engine(world / "base", directory / "server", more=more, **flags) as server,
        Engine(server.url, timeout_s=60) as engine,
    ):
        engine.load("bea", str(world / "experts-1-slots"), is_3d=False)
        engine.load("cyd", str(world / "experts-1"), is_3d=False)
        rows = {name: engine.logprobs(name, [prompts()[0]])[0][1:] for name in ("ada", "bea", "cyd", "tiny")}
        assert rows["ada"] == rows["bea"] == pytest.approx(rows["cyd"], abs=1e-5)
        for broken in ("no projection", "cut"):
            with pytest.raises(EngineRefused, match=f"dan.*{BROKEN[broken]}"):
                engine.load("dan", str(world / "broken" / broken), is_3d=False)
        assert engine.is_healthy() and engine.logprobs("tiny", [prompts()[0]])[0][1:] == rows["tiny"]
        assert mean_gap(rows["ada"], rows["tiny"]) > 0.5
    assert SLOTS_LOG_LINE in server.log.read_text()


def test_vllm_without_the_plugin_refuses_loudly(said: dict[str, Any], directory: Path) -> None:
    task = directory / "stock.json"
    folder = str(directory / "world" / "experts-1-slots")
    task.write_text(
        json.dumps(
            {
                "model": str(directory / "world" / "base"),
                "dtype": "float32",
                "adapters": {"ada": {"path": folder, "is_3d": False}},
                "mixed": False,
                "prompts": [prompts()[0]],
                "generated": 1,
            }
        )
    )
    target = directory / "stock-engine.json"
    env = {
        "VLLM_PLUGINS": "adapter_roster_cpu_moe,adapter_roster_publish",
        "ADAPTER_ROSTER_ENGINE_JSON": str(target),
    }
    found = json_from_engine(TESTS / "family_engine.py", task, env=env)
    assert found["rows"].keys() == {"base"} and "doesn't contain tensors" in found["refused"]["ada"]
    assert EngineInfo.model_validate_json(target.read_bytes()).slots_version is None


def test_a_class_that_is_stacked_by_nature_takes_them_in_mixed_mode_only(tmp_path: Path) -> None:
    save_base("gpt_oss", tmp_path / "base")
    save_adapter("gpt_oss", ("routed_experts", "attention"), tmp_path / "trained")
    base = KnownBase(read_base_config(tmp_path / "base", label="gpt_oss"))
    single = tmp_path / "single"
    convert_directory(
        tmp_path / "trained", single, base, packing="rank_major", format="per-expert", progress=None
    )
    slots = save_slots(single, tmp_path / "slots")
    folders = {"single": single, "slots": slots}
    found = {}
    for mixed in (True, False):
        task = {
            "model": str(tmp_path / "base"),
            "dtype": "float32",
            "adapters": {name: {"path": str(path), "is_3d": False} for name, path in folders.items()},
            "mixed": mixed,
            "prompts": prompts(),
            "generated": 2,
        }
        (tmp_path / "task.json").write_text(json.dumps(task))
        found[mixed] = json_from_engine(TESTS / "family_engine.py", tmp_path / "task.json")
    assert found[True]["refused"] == {}
    base_rows, single_rows, slots_rows = (found[True]["rows"][name] for name in ("base", "single", "slots"))
    for ours, theirs in zip(slots_rows, single_rows, strict=True):
        assert ours["ids"] == theirs["ids"] and ours["logprobs"] == pytest.approx(
            theirs["logprobs"], abs=1e-5
        )
    assert mean_gap(base_rows[0]["logprobs"][:10], slots_rows[0]["logprobs"][:10]) > 0.1
    assert found[False]["refused"].keys() == {"single", "slots"}
    assert "--enable-mixed-moe-lora-format" in found[False]["refused"]["slots"]


def test_a_loader_that_lost_its_parts_is_said_when_the_engine_starts() -> None:
    code = (
        "import vllm; vllm.__version__ = '0.33.0'\n"
        "from vllm.lora.lora_model import LoRAModel\n"
        "from roster.engine_plugin import slots\n"
        "slots.register(); print(slots.is_active())\n"
        "LoRAModel.from_local_checkpoint = classmethod(lambda cls, path: None)\n"
        "slots.register()"
    )
    done = run_in_engine("-c", code, env={"VLLM_PLUGINS": ""})
    assert "True" in done.stdout and "vLLM 0.33.0 is none that the plugin" in done.stdout + done.stderr
    assert done.returncode != 0 and "LoRAModel.from_local_checkpoint should have the parts" in done.stderr
