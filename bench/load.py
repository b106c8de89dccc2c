"""How long an adapter takes from its folder into a slot of vLLM: per expert, stacked, and as its slots hold it.

One vLLM with four layers of the shape of Qwen3-30B-A3B (random weights), one adapter of rank 16 on attention and all
experts in bfloat16, in each format, loaded in turn, so that each meets the same other work on the machine. Beside it
the bare copy of a registered adapter into a slot, which no load can do without; and a load of a file that is not in
memory, beside reading its bytes. `per_expert_unscaled` has alpha = rank, so that vLLM has nothing to multiply.

Ratios are medians over the turns' own ratios; those of CPU seconds (`cpu_…`) say the same where cores are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from bench.machine import describe_machine
from bench.tiny_world import kept_with_tests
from flows.settings import base_environment, load_settings
from flows.up import engine_python
from roster.serving_engine import engine_environment

HELP = "seconds from an adapter's folder into a slot: per expert, stacked, slots, and the bare copy"
RESULT = Path(__file__).resolve().parent / "results" / "load.json"
SCRIPT = Path(__file__).resolve().parent / "load_in_process.py"
LAYERS, EXPERTS, HIDDEN, INTER, RANK = 4, 128, 2048, 768, 16
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
ATTENTION = {
    "q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "o_proj": (HEADS * HEAD_DIM, HIDDEN),
}
PROJECTIONS = {"gate_proj": (HIDDEN, INTER), "up_proj": (HIDDEN, INTER), "down_proj": (INTER, HIDDEN)}
PREFIX = "base_model.model.model.layers"
LEAST_RATIO, MOST_OF_COPY = 4.0, 2.0

Tensors = dict[str, torch.Tensor]


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures."""
    parser = argparse.ArgumentParser(prog="./run bench load", description=HELP)
    parser.add_argument("--turns", type=int, default=7, help="how often each is loaded")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-load-") as scratch:
        figures = _measure(Path(scratch), options.turns)
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    out = Console(highlight=False)
    title = f"{figures['adapter_bytes']:,} bytes, {LAYERS} layers of {EXPERTS} experts, rank {RANK}, bfloat16"
    table = Table("what", "s", "CPU s", title=title, title_justify="left")
    for name in ("per_expert", "per_expert_unscaled", "stacked", "slots", "copy"):
        table.add_row(
            name.replace("_", " "), *(f"{figures[key]:.4f}" for key in (f"{name}_s", f"{name}_cpu_s"))
        )
    out.print(table)
    out.print(
        f"slots: {figures['ratio']:.1f} times as fast as per expert ({figures['cpu_ratio']:.1f} in CPU time), "
        f"{figures['ratio_to_copy']:.2f} of the bare copy ({figures['cpu_ratio_to_copy']:.2f})"
    )
    out.print(
        f"not in memory: {figures['cold_slots_s']:.3f} s; its bytes read: {figures['cold_read_s']:.3f} s"
    )


def _measure(scratch: Path, turns: int) -> dict[str, Any]:
    print("writing the adapters …", file=sys.stderr, flush=True)
    _write_config(scratch / "model")
    single = _write_single(scratch / "per_expert", alpha=2 * RANK)
    _write_single(scratch / "per_expert_unscaled", alpha=RANK)
    _write_stacked(scratch / "stacked")
    slots: Path = kept_with_tests("slots_builders").save_slots(single, scratch / "slots", torch.bfloat16)
    weights = slots / "adapter_slots.safetensors"
    names = ("per_expert", "per_expert_unscaled", "stacked", "slots")
    settings = {
        "engine": {
            "model": str(scratch / "model"),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 64,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 1 << 26,
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": RANK,
            "max_cpu_loras": 2,
            "enable_mixed_moe_lora_format": True,
        },
        "adapters": {name: {"path": str(scratch / name), "is_3d": name == "stacked"} for name in names},
        "cold": str(weights),
        "turns": turns,
    }
    found = _run_engine(settings, scratch)
    cold = found.pop("cold")
    size = weights.stat().st_size
    figures: dict[str, Any] = {"adapter_bytes": size}
    for column, suffix in enumerate(("s", "cpu_s")):
        for name, times in found.items():
            figures[f"{name}_{suffix}"] = round(statistics.median(one[column] for one in times), 4)
    for column, prefix in enumerate(("", "cpu_")):
        figures[f"{prefix}ratio"] = _compare(found["per_expert"], found["slots"], column)
        figures[f"{prefix}ratio_to_copy"] = _compare(found["slots"], found["copy"], column)
    figures["cold_slots_s"] = round(statistics.median(one[0] for one in cold), 4)
    figures["cold_read_s"] = round(statistics.median(one[1] for one in cold), 4)
    figures["cold_bytes"] = min(one[2] for one in cold)
    if figures["cold_bytes"] < size:
        raise RuntimeError(f"of {size} bytes only {figures['cold_bytes']} came from the disk")
    passed = figures["cpu_ratio"] >= LEAST_RATIO and figures["cpu_ratio_to_copy"] <= MOST_OF_COPY
    load = round(os.getloadavg()[1], 1)
    return {**figures, "turns": turns, "machine": describe_machine(), "load": load, "passed": passed}


def _compare(first: list[list[float]], second: list[list[float]], column: int) -> float:
    ratios = [a[column] / b[column] for a, b in zip(first, second, strict=True)]
    return round(statistics.median(ratios), 2)


def _run_engine(settings: dict[str, Any], scratch: Path) -> dict[str, Any]:
    environment = engine_environment(threads=1, engine_json=scratch / "engine.json")
    log = scratch / "engine.log"
    with log.open("wb") as sink:
        done = subprocess.run(
            [engine_python(load_settings()), SCRIPT],
            input=json.dumps(settings),
            env=base_environment() | environment,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(log.read_text(errors="replace")[-3_000:])
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("@"))
    found: dict[str, Any] = json.loads(line[1:])
    return found


def _write_config(folder: Path) -> None:
    """config.json alone: vLLM makes the weights up."""
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=6144,
        moe_intermediate_size=INTER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,  # type: ignore[call-arg]
        num_experts=EXPERTS,
        num_experts_per_tok=8,
        max_position_embeddings=128,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)


def _write_single(folder: Path, *, alpha: int) -> Path:
    tensors = _draw_attention()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, sizes in PROJECTIONS.items():
                tensors |= _draw(f"{PREFIX}.{layer}.mlp.experts.{expert}.{name}", *sizes)
    return _write(folder, tensors, alpha)


def _write_stacked(folder: Path) -> Path:
    """As PEFT stacks them, gate and up in one with one A; the numbers are others."""
    tensors = _draw_attention()
    for layer in range(LAYERS):
        module = f"{PREFIX}.{layer}.mlp.experts"
        tensors |= _draw(f"{module}.base_layer", HIDDEN, 2 * INTER, RANK * EXPERTS)
        tensors |= _draw(module, INTER, HIDDEN, RANK * EXPERTS)
    return _write(folder, tensors, 2 * RANK)


def _draw_attention() -> Tensors:
    tensors: Tensors = {}
    for layer in range(LAYERS):
        for name, sizes in ATTENTION.items():
            tensors |= _draw(f"{PREFIX}.{layer}.self_attn.{name}", *sizes)
    return tensors


def _draw(module: str, in_size: int, out_size: int, rank: int = RANK) -> Tensors:
    return {
        f"{module}.lora_A.weight": torch.randn(rank, in_size).bfloat16(),
        f"{module}.lora_B.weight": torch.randn(out_size, rank).bfloat16(),
    }


def _write(folder: Path, tensors: Tensors, alpha: int) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": alpha,
        "target_modules": [*ATTENTION, *PROJECTIONS],
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder
