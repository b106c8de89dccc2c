"""What adapters cost a server: speed, memory, first load, swap and hit, at 0 (no LoRA), 1, 2, 4, 8 and 16 slots.

Each point is a server of its own, started as the product starts it, in whatever environment the engine has: vLLM for a
GPU or for a CPU. At each but the first the same 17 adapters are registered and kept in the host's memory, so that the
points differ by their slots alone. A swap is a request of one token for an adapter that is in no slot, a hit one for an
adapter that is; both are whole requests. Where other work shares the cores, compare tokens of a CPU second.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.machine import describe_machine
from bench.process_trees import measure_tree
from demo.base import train_tokenizer
from flows.guard import list_descendants
from flows.settings import base_environment, load_settings
from flows.up import engine_python
from roster.capacity import Layout, slot_elements
from roster.serving_engine import EngineInfo, engine_command, engine_environment
from tasks.bpb.engine import Engine
from tasks.capacity_plan import POINTS
from tasks.lora.base import read_base_config
from tasks.planning import list_wrapped

HELP = "speed, memory, first load, swap and hit of a server with 0, 1, 2, 4, 8 and 16 adapter slots"
RESULT = Path(__file__).resolve().parent / "results" / "serving.json"
MODEL = "tiny"
ADAPTERS = max(POINTS) + 1
"""One more than the most slots: asked for one after another, each is always the one that was used longest ago."""
LAYERS, EXPERTS, HIDDEN, INTER, RANK = 8, 16, 256, 128, 64
CONTEXT = 256
KV_BYTES = 1 << 28
STREAMS = 16
PAIRS = 24
"""Swaps, each with a hit right after it, so that both meet the same other work on the machine; at least."""
FLOAT32 = 4
_SPEEDS = ("tokens_per_s", "tokens_per_cpu_s", "tokens_per_s_of_streams")
_TIMES = ("first_load_s", "load_s", "swap_s", "hit_s")
MOST_APART = 0.1
"""Measured and computed bytes of a slot differ by less than this share of it."""


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures."""
    parser = argparse.ArgumentParser(prog="./run bench serving", description=HELP)
    parser.add_argument("--turns", type=int, default=3, help="how often speed is measured at each point")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each request for speed generates")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of a CPU engine")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as scratch:
        figures = _measure(Path(scratch), options.turns, options.tokens, options.threads)
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    out = Console(highlight=False)
    table = Table(
        *("max_loras", "tokens/s", "of a CPU second", f"of {STREAMS} streams", "memory MiB"),
        *("first load s", "next loads s", "swap s", "hit s"),
        title=figures["engine"],
        title_justify="left",
    )
    for point in figures["points"]:
        memory = round(point["memory_bytes"] / 2**20)
        cells = [
            point["max_loras"],
            *(point[name] for name in _SPEEDS),
            memory,
            *(point[name] for name in _TIMES),
        ]
        table.add_row(*("" if cell is None else str(cell) for cell in cells))
    out.print(table)
    if figures["load"] > figures["machine"]["cores"]:
        out.print(
            f"{figures['load']} processes wanted the {figures['machine']['cores']} cores: seconds are too many"
        )
    out.print(
        f"a slot: {figures['slot_bytes']:,} bytes computed, {figures['slot_bytes_measured']:,} measured from memory"
    )


def _measure(scratch: Path, turns: int, tokens: int, threads: int) -> dict[str, Any]:
    _say("writing the model and the adapter …")
    _write_model(scratch / "model")
    _write_adapter(scratch / "adapter")
    points = []
    info: EngineInfo | None = None
    for slots in POINTS:
        with _server(scratch, slots, threads) as (url, process):
            points.append(_measure_point(url, process, scratch, slots, turns, tokens))
        if slots:
            info = EngineInfo.model_validate_json((scratch / "engine.json").read_bytes())
        _say(f"max_loras {slots}: {points[-1]}")
    if info is None:
        raise RuntimeError("no server told what it is")
    base = read_base_config(scratch / "model", label=MODEL)
    computed = FLOAT32 * slot_elements(list_wrapped(base).shapes, RANK, Layout())
    few, many = points[1], points[-1]
    growth = (many["memory_bytes"] - few["memory_bytes"]) / (many["max_loras"] - few["max_loras"])
    return {
        "engine": f"{info.distribution} {info.vllm_version} on {info.device}, {info.dtype}, max_lora_rank {RANK}",
        "points": points,
        "adapter_bytes": (scratch / "adapter" / "adapter_model.safetensors").stat().st_size,
        "slot_bytes": computed,
        "slot_bytes_measured": round(growth),
        "machine": describe_machine(),
        "load": round(os.getloadavg()[2], 1),
        "passed": abs(growth - computed) < MOST_APART * computed,
    }


def _measure_point(
    url: str, process: subprocess.Popen[bytes], scratch: Path, slots: int, turns: int, tokens: int
) -> dict[str, Any]:
    """One server: load everything, let every slot be used, then measure."""
    names = [f"a{number}" for number in range(ADAPTERS)] if slots else []
    loads = []
    with Engine(url, timeout_s=600) as engine:
        # The same file under each name: the server reads and keeps it as often as it is told to.
        for name in names:
            started = time.perf_counter()
            engine.load(name, str(scratch / "adapter"), is_3d=False)
            loads.append(time.perf_counter() - started)
    for name in names or [MODEL]:
        _generate(url, name, 2)
    # So many in turn that each is read from the host's memory: the slots hold the others. Then it is in a slot.
    swaps: list[float] = []
    hits: list[float] = []
    used = names[0] if names else MODEL
    for name in islice(cycle(names[: slots + 1] or [MODEL]), max(PAIRS, 2 * (slots + 1))):
        for seconds in (swaps, hits):
            started = time.perf_counter()
            _generate(url, name, 1)
            seconds.append(time.perf_counter() - started)
    before = measure_tree(process.pid).cpu_s
    alone = [tokens / _time(lambda: _generate(url, used, tokens)) for _ in range(turns)]
    busy_s = measure_tree(process.pid).cpu_s - before
    streams = list(islice(cycle(names[:slots] or [MODEL]), STREAMS))
    together = [STREAMS * tokens / _time(lambda: _generate_all(url, streams, tokens)) for _ in range(turns)]
    return {
        "max_loras": slots,
        "tokens_per_s": round(statistics.median(alone), 1),
        "tokens_per_cpu_s": round(turns * tokens / busy_s, 1),
        "tokens_per_s_of_streams": round(statistics.median(together), 1),
        "memory_bytes": _memory(process.pid),
        "first_load_s": round(loads[0], 3) if loads else None,
        "load_s": round(statistics.median(loads[1:]), 3) if loads else None,
        "swap_s": round(statistics.median(swaps), 4) if slots else None,
        "hit_s": round(statistics.median(hits), 4),
    }


def _generate_all(url: str, names: Sequence[str], tokens: int) -> None:
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: _generate(url, name, tokens), names))


def _generate(url: str, name: str, tokens: int) -> None:
    """One request of so many tokens. Raises RuntimeError where they are not all there."""
    body = {"model": name, "prompt": [5, 7, 11], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    connection = HTTPConnection(url.removeprefix("http://"), timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != HTTPStatus.OK or json.loads(content)["usage"]["completion_tokens"] != tokens:
        raise RuntimeError(content.decode(errors="replace"))


def _time(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _memory(process: int) -> int:
    """Bytes in use: of the accelerators, where there are any, else of this machine's by the server's processes.

    Files are left out, such as libraries, which are counted in parts where other processes use them too.
    """
    with suppress(FileNotFoundError):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        asked = subprocess.run(query, capture_output=True, text=True, check=True)
        return sum(map(int, asked.stdout.split())) << 20
    pids = [process, *list_descendants(process)]
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8") for pid in pids]
    lines = [line for rollup in rollups for line in rollup.splitlines() if line.startswith("Pss_Anon:")]
    return sum(int(line.split()[1]) for line in lines) << 10


@contextmanager
def _server(scratch: Path, slots: int, threads: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server as the product starts it, gone at the end with all its children; of no slots without LoRA."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = engine_command(
        engine_python(load_settings()),
        scratch / "model",
        MODEL,
        port,
        max_model_len=CONTEXT,
        max_loras=max(slots, 1),
        max_lora_rank=RANK,
        max_cpu_loras=ADAPTERS,
        kv_cache_memory_bytes=KV_BYTES,
    )
    if not slots:
        start = command.index("--enable-lora")
        end = command.index("--max-cpu-loras") + 2
        command = (*command[:start], *command[end:])
    environment = base_environment() | engine_environment(
        threads=threads, engine_json=scratch / "engine.json"
    )
    log = scratch / "engine.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        with Engine(url, timeout_s=5) as engine:
            while not engine.is_healthy():
                if process.poll() is not None:
                    raise RuntimeError(log.read_text(errors="replace")[-3_000:])
                time.sleep(0.3)
        yield url, process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def _write_model(folder: Path) -> None:
    """A random model, large enough that a slot can be seen in a server's memory."""
    tokenizer = train_tokenizer(f"text number {n}, of {n * n} and {n * 7919 % 10007}" for n in range(3_000))
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * INTER,
        moe_intermediate_size=INTER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # type: ignore[call-arg]
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_adapter(folder: Path) -> None:
    """Factors for every expert of every layer, per expert, as the product writes them."""
    folder.mkdir()
    sizes = {"gate_proj": (HIDDEN, INTER), "up_proj": (HIDDEN, INTER), "down_proj": (INTER, HIDDEN)}
    tensors = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for projection, (in_size, out_size) in sizes.items():
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{projection}"
                tensors[f"{name}.lora_A.weight"] = 0.02 * torch.randn(RANK, in_size)
                tensors[f"{name}.lora_B.weight"] = 0.02 * torch.randn(out_size, RANK)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
