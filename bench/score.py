"""What scoring over HTTP costs: the pipeline's own way beside a bare loop of requests, and beside vLLM in one process.

One server and one in-process engine of the same settings, on a tiny model, take turns with the same prompts for the
base, four adapters and the base again; an adapter is read from disk in each turn. The pipeline also repeats a prompt
for each (tasks/bpb/measure.py, rule 9), which counts as tokens. Ratios are medians of ratios within a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.machine import describe_machine
from demo.base import new_model, train_tokenizer
from flows.settings import base_environment, load_settings
from flows.up import engine_python
from roster.serving_engine import engine_command, engine_environment
from tasks.bpb.engine import PROMPTS_PER_REQUEST, REQUESTS_AT_ONCE, Engine
from tasks.bpb.measure import BASE, OWN, WRONG_PREFIX, Prepared, PreparedUnit, Subject, measure, score_aside
from tasks.bpb.protocol import BosRule, Window
from tasks.lora.base import read_base_config
from tasks.lora.diagnostic import list_sites, write_diagnostic
from tasks.lora.family import TensorClass
from tasks.lora.target import TargetFormat

HELP = "tokens a second of scoring, beside a bare loop of requests and beside vLLM in one process"
RESULT = Path(__file__).resolve().parent / "results" / "score.json"
SCRIPT = Path(__file__).with_name("score_in_process.py")
MODEL = "tiny"
ADAPTERS = 4
TOKENS_PER_PROMPT = 240
CONTEXT = 256
RANK = 8
KV_BYTES = 1 << 28
# The same for both engines: more prompts are always waiting than run at once.
FLAGS = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
SET_UNITS = 20
MANY = 100
VOCABULARY = 600


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures."""
    parser = argparse.ArgumentParser(prog="./run bench score", description=HELP)
    parser.add_argument("--turns", type=int, default=3, help="how often everything is measured")
    parser.add_argument(
        "--tokens",
        type=int,
        default=200_000,
        help="tokens over the base and the adapters in each turn, at least",
    )
    parser.add_argument("--adapters", type=int, default=MANY, help="adapters scored on one engine")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-score-") as scratch:
        figures = _measure(Path(scratch), options.turns, options.tokens, options.adapters)
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures in sentences."""
    out = Console(highlight=False)
    out.print(
        f"{figures['tokens']:,} tokens a turn: {figures['tokens_per_s']:,} a second, "
        f"{figures['ratio_to_in_process']} times in-process, {figures['ratio_to_bare_loop']} times a bare loop"
    )
    many, matrix = figures["many"], figures["matrix"]
    out.print(
        f"{many['adapters']} adapters on {figures['engine_starts']} engine: {many['seconds_each']} s each"
    )
    out.print(
        f"a matrix of {matrix['adapters']} adapters x {matrix['sets']} sets of {matrix['tokens_per_set']:,} tokens: "
        f"{matrix['tokens']:,} tokens, {matrix['hours']} hours at this speed of this tiny model"
    )


def _measure(scratch: Path, turns: int, tokens: int, many: int) -> dict[str, Any]:
    _say("writing the model and its adapters …")
    model = scratch / "model"
    _write_model(model)
    adapters = [scratch / "adapters" / f"{number}" for number in range(ADAPTERS)]
    for path in adapters:
        _write_adapter(model, path)
    count = -(-tokens // (TOKENS_PER_PROMPT * (ADAPTERS + 1)))
    prepared = _prepare(count)
    (scratch / "prompts.json").write_text(json.dumps([unit.ids for unit in prepared.units]))
    starts: list[int] = []
    with (
        _server(model, scratch, starts) as url,
        _in_process(model, scratch, adapters) as in_process,
        Engine(url, timeout_s=600) as engine,
    ):
        sides: dict[str, Callable[[int], tuple[int, float]]] = {
            "scored": lambda turn: _score(engine, prepared, adapters, turn),
            "bare": lambda turn: _loop_barely(url, prepared, adapters, turn),
            "in_process": lambda turn: (_count(prepared), in_process()),
        }
        speeds = _take_turns(sides, turns)
        many_s = _score_many(engine, prepared, adapters, scratch, many)
        if not engine.is_healthy():
            raise RuntimeError("the engine did not last")
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(speeds["scored"], speeds[name], strict=True)), 3)
        for name in ("in_process", "bare")
    }
    speed = statistics.median(speeds["scored"])
    per_set = SET_UNITS * TOKENS_PER_PROMPT
    matrix_tokens = (MANY + 1) * MANY * per_set
    loads_s = MANY * many_s
    return {
        "tokens": _count(prepared),
        "tokens_per_s": round(speed),
        "ratio_to_in_process": ratios["in_process"],
        "ratio_to_bare_loop": ratios["bare"],
        "engine_starts": len(starts),
        "speeds": {name: [round(value) for value in values] for name, values in speeds.items()},
        "many": {"adapters": many, "seconds_each": round(many_s, 3)},
        "matrix": {
            "adapters": MANY,
            "sets": MANY,
            "tokens_per_set": per_set,
            "tokens": matrix_tokens,
            "hours": round((matrix_tokens / speed + loads_s) / 3600, 2),
        },
        "machine": describe_machine(),
        "passed": ratios["in_process"] >= 0.9 and len(starts) == 1,
    }


def _take_turns(sides: dict[str, Callable[[int], tuple[int, float]]], turns: int) -> dict[str, list[float]]:
    """Tokens a second of each side in each turn; the first turn warms up and does not count."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        order = list(sides)[turn % len(sides) :] + list(sides)[: turn % len(sides)]
        for name in order:
            tokens, seconds = sides[name](turn)
            _say(f"{'warm-up' if turn == 0 else f'turn {turn}'}: {name}: {tokens / seconds:,.0f} tokens/s")
            if turn:
                speeds[name].append(tokens / seconds)
    return speeds


def _score(engine: Engine, prepared: Prepared, adapters: list[Path], turn: int) -> tuple[int, float]:
    """The pipeline's own way."""
    labels = [OWN, *(f"{WRONG_PREFIX}{number}" for number in range(1, len(adapters)))]
    subjects = [Subject(BASE, MODEL, None, False)] + [
        Subject(label, f"scored-{turn}-{label}", str(path), False)
        for label, path in zip(labels, adapters, strict=True)
    ]
    started = time.perf_counter()
    measured = measure(engine, prepared, subjects, lambda label, done, total: None)
    if measured.voided:
        raise RuntimeError(f"a unit was voided: {measured.voided[0].reason}")
    return measured.tokens, time.perf_counter() - started


def _loop_barely(url: str, prepared: Prepared, adapters: list[Path], turn: int) -> tuple[int, float]:
    """The same requests, two at once as the pipeline sends them, and their answers read as JSON: nothing else."""
    prompts = [unit.ids for unit in prepared.units]
    batches = [prompts[n : n + PROMPTS_PER_REQUEST] for n in range(0, len(prompts), PROMPTS_PER_REQUEST)]
    started = time.perf_counter()
    connections = threading.local()
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:

        def post(path: str, body: dict[str, Any]) -> bytes:
            if not hasattr(connections, "one"):
                connections.one = HTTPConnection(url.removeprefix("http://"), timeout=600)
            connections.one.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connections.one.getresponse()
            content: bytes = answer.read()
            if answer.status != HTTPStatus.OK:
                raise RuntimeError(content.decode(errors="replace"))
            return content

        for number, path in enumerate([None, *adapters, None]):
            name = MODEL if path is None else f"bare-{turn}-{number}"
            if path is not None:
                post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
            bodies = [
                {"model": name, "prompt": batch, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
                for batch in batches
            ]
            for content in pool.map(lambda body: post("/v1/completions", body), bodies):
                json.loads(content)
            if path is not None:
                post("/v1/unload_lora_adapter", {"lora_name": name})
    return _count(prepared), time.perf_counter() - started


def _score_many(engine: Engine, prepared: Prepared, adapters: list[Path], scratch: Path, many: int) -> float:
    """Seconds for each of many adapters on the one engine: loading, a text, unloading."""
    few = Prepared(prepared.units[:1], (), prepared.window, prepared.stride, prepared.bos_rule)
    paths = [scratch / "many" / f"{number}" for number in range(many)]
    for number, path in enumerate(paths):
        shutil.copytree(adapters[number % len(adapters)], path)
    started = time.perf_counter()
    for number, path in enumerate(paths):
        subject = Subject(OWN, f"many-{number}", str(path), False)
        score_aside(engine, few, subject, lambda label, done, total: None)
    return (time.perf_counter() - started) / many


def _count(prepared: Prepared) -> int:
    """Tokens of a turn without the repeated prompts: the base twice, each adapter once."""
    return (ADAPTERS + 2) * sum(len(unit.ids) for unit in prepared.units)


def _prepare(count: int) -> Prepared:
    """Texts of random tokens, each in one window."""
    numbers = random.Random(7)
    units = tuple(
        PreparedUnit(
            f"u{number}",
            tuple(numbers.randrange(3, VOCABULARY) for _ in range(TOKENS_PER_PROMPT)),
            (Window(0, TOKENS_PER_PROMPT, 1),),
            4 * TOKENS_PER_PROMPT,
        )
        for number in range(count)
    )
    return Prepared(units, (), CONTEXT - 1, CONTEXT // 2, BosRule.ONE_BOS)


def _write_model(folder: Path) -> None:
    tokenizer = train_tokenizer(f"text number {n}, of {n * n} and {n * 7919 % 10007}" for n in range(3_000))
    new_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_adapter(model: Path, path: Path) -> None:
    base = read_base_config((model / "config.json").read_bytes(), label=MODEL)
    write_diagnostic(
        path,
        list_sites(base, TargetFormat.PER_EXPERT, None),
        format=TargetFormat.PER_EXPERT,
        rank=RANK,
        dtype="F32",
        seed=path.name,
        strengths={TensorClass.ROUTED_EXPERTS: 0.5, TensorClass.ATTENTION: 0.5},
    )


@contextmanager
def _server(model: Path, scratch: Path, starts: list[int]) -> Iterator[str]:
    """A server as the product starts it; its process goes to `starts`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = engine_command(
        engine_python(load_settings()),
        model,
        MODEL,
        port,
        max_model_len=CONTEXT,
        max_loras=1,
        max_lora_rank=RANK,
        max_cpu_loras=2,
        kv_cache_memory_bytes=KV_BYTES,
    )
    more = [part for name, value in FLAGS.items() for part in (f"--{name.replace('_', '-')}", f"{value}")]
    environment = base_environment() | engine_environment(threads=1, engine_json=scratch / "engine.json")
    log = scratch / "engine.log"
    with log.open("wb") as sink, _child([*command, *more], environment, stdout=sink, stderr=sink) as process:
        starts.append(process.pid)
        url = f"http://127.0.0.1:{port}"
        with Engine(url, timeout_s=5) as engine:
            while not engine.is_healthy():
                if process.poll() is not None:
                    raise RuntimeError(log.read_text(errors="replace")[-3_000:])
                time.sleep(0.3)
        _say("the server is ready")
        yield url


@contextmanager
def _in_process(model: Path, scratch: Path, adapters: list[Path]) -> Iterator[Callable[[], float]]:
    """What takes one turn of the engine in one process, in seconds."""
    settings = {
        "engine": {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": CONTEXT,
            "kv_cache_memory_bytes": KV_BYTES,
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": RANK,
            "max_cpu_loras": 2,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            **FLAGS,
        },
        "prompts": str(scratch / "prompts.json"),
        "adapters": [None, *map(str, adapters), None],
        "per_call": PROMPTS_PER_REQUEST * REQUESTS_AT_ONCE,
    }
    environment = base_environment() | engine_environment(threads=1, engine_json=scratch / "in_process.json")
    command = [str(engine_python(load_settings())), str(SCRIPT)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    log = scratch / "in_process.log"
    with log.open("wb") as sink, _child(command, environment, stderr=sink, **pipes) as process:

        def ask(line: str) -> dict[str, Any]:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            for answer in process.stdout:
                if answer.startswith("@"):
                    found: dict[str, Any] = json.loads(answer[1:])
                    return found
            raise RuntimeError(log.read_text(errors="replace")[-3_000:])

        ask(json.dumps(settings))
        _say("the in-process engine is ready")
        yield lambda: float(ask("go")["seconds"])


@contextmanager
def _child(command: list[str], environment: dict[str, str], **more: Any) -> Iterator[Any]:
    """A process that is gone at the end with all its children."""
    process = subprocess.Popen(command, env=environment, start_new_session=True, **more)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
