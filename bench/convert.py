"""Converting an adapter of the published size, beside `cp` of the result and a script as people write it by hand.

Every figure of a format is taken in the same run, in turns, from a warm page cache, with fsync on both sides:
`cp --reflink=never` of the converted file, then the conversion in a process of its own (its peak memory is that
process's ru_maxrss). Ratios are medians of ratios within a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from operator import truediv
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.full_size import write_full_size
from bench.machine import describe_machine

HELP = "conversion and inspection of a 30B-shaped adapter, beside cp and a hand-written script"
RESULT = Path(__file__).resolve().parent / "results" / "convert.json"
FORMATS = ("per-expert", "stacked", "slots")


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures; the top level holds the worst of the formats."""
    parser = argparse.ArgumentParser(prog="./run bench convert", description=HELP)
    parser.add_argument("--turns", type=int, default=5, help="how often everything is measured")
    parser.add_argument("--folder", type=Path, help="where to write (5 GB); a temporary one if left out")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-convert-") as scratch:
        figures = _measure(Path(scratch), options.turns)
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table(
        "",
        "seconds",
        "cp of its output",
        "ratio",
        "peak MB",
        title="median of the turns",
        title_justify="left",
    )
    for name, one in figures["formats"].items():
        table.add_row(name, *(str(one[key]) for key in ("wall_s", "cp_s", "ratio_to_cp", "peak_mb")))
    hand = figures["by_hand"]
    table.add_row("by hand", str(hand["wall_s"]), "", str(hand["ratio_to_cp"]), str(hand["peak_mb"]))
    out = Console(highlight=False)
    out.print(table)
    found = figures["inspect"]
    out.print(
        f"inspect {found['inspect_s']} s, with --header-only {found['header_only_s']} s, whole processes"
    )


def _measure(scratch: Path, turns: int) -> dict[str, Any]:
    source = scratch / "source"
    _say("writing the adapter (1.29 GB) …")
    write_full_size(source)
    formats = {name: _measure_format(scratch, source, name, turns) for name in FORMATS}
    _say("hand-written script …")
    by_hand = _by_hand(scratch, source)
    inspected = _measure_inspection(source, turns)
    worst = max(formats.values(), key=lambda figures: float(figures["ratio_to_cp"]))
    return {
        **{name: worst[name] for name in ("ratio_to_cp", "wall_s", "cp_s", "gb_in", "gb_out")},
        "peak_mb": max(int(figures["peak_mb"]) for figures in formats.values()),
        "formats": formats,
        "by_hand": by_hand | {"ratio_to_cp": round(by_hand["wall_s"] / formats["per-expert"]["cp_s"], 2)},
        "inspect": inspected,
        "turns": turns,
        "machine": describe_machine(),
    }


def _measure_format(scratch: Path, source: Path, name: str, turns: int) -> dict[str, Any]:
    made, copy = scratch / "made", scratch / "copy"
    seconds: list[float] = []
    copies: list[float] = []
    processes: list[float] = []
    peaks: list[int] = []
    _convert(source, made, name)
    [weights] = made.glob("*.safetensors")
    for turn in range(turns):
        _say(f"{name}: turn {turn + 1} of {turns} …")
        _settle(source / "adapter_model.safetensors", weights)
        copies.append(_copy(weights, copy))
        copy.unlink()
        shutil.rmtree(made)
        _settle(source / "adapter_model.safetensors")
        started = time.perf_counter()
        figures = _convert(source, made, name)
        processes.append(time.perf_counter() - started)
        seconds.append(figures["seconds"])
        peaks.append(figures["peak_mb"])
    out = weights.stat().st_size
    shutil.rmtree(made)
    return {
        "ratio_to_cp": round(statistics.median(map(truediv, seconds, copies)), 3),
        "wall_s": round(statistics.median(seconds), 3),
        "cp_s": round(statistics.median(copies), 3),
        "process_s": round(statistics.median(processes), 3),
        "peak_mb": max(peaks),
        "gb_in": round((source / "adapter_model.safetensors").stat().st_size / 1e9, 3),
        "gb_out": round(out / 1e9, 3),
    }


def _settle(*files: Path) -> None:
    """Nothing left to write, and these files in the page cache."""
    os.sync()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def _copy(source: Path, destination: Path) -> float:
    """Seconds for `cp` and its fsync."""
    started = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", str(source), str(destination)], check=True)
    with destination.open("rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - started


def _convert(source: Path, made: Path, name: str) -> dict[str, Any]:
    return _child(["--convert", str(source), str(made), name])


def _by_hand(scratch: Path, source: Path) -> dict[str, Any]:
    made = scratch / "by-hand.safetensors"
    _settle(source / "adapter_model.safetensors")
    figures = _child(["--by-hand", str(source), str(made)])
    made.unlink()
    return {"wall_s": round(figures["seconds"], 3), "peak_mb": figures["peak_mb"]}


def _measure_inspection(source: Path, turns: int) -> dict[str, Any]:
    """Seconds of the whole `roster inspect` process, with all data read and with headers alone."""
    roster = str(Path(sys.executable).with_name("roster"))
    command = [roster, "inspect", str(source), "--base", str(source / "base.json"), "--json"]
    seconds: dict[str, list[float]] = {"inspect_s": [], "header_only_s": []}
    for turn in range(turns):
        _say(f"inspect: turn {turn + 1} of {turns} …")
        _settle(source / "adapter_model.safetensors")
        for name, extra in (("inspect_s", []), ("header_only_s", ["--header-only"])):
            started = time.perf_counter()
            subprocess.run(
                [*command, *extra], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            seconds[name].append(time.perf_counter() - started)
    return {name: round(statistics.median(values), 3) for name, values in seconds.items()}


def _child(arguments: list[str]) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "bench.convert", *arguments], stdout=subprocess.PIPE, check=True, text=True
    )
    figures: dict[str, Any] = json.loads(ran.stdout)
    return figures


def _convert_here(source: Path, made: Path, name: str) -> None:
    """In the child: planning and converting, imports and reading the header left out."""
    from tasks.lora.base import read_base_config
    from tasks.lora.convert import convert_adapter
    from tasks.lora.inspect import inspect_adapter
    from tasks.lora.plan import plan_conversion
    from tasks.lora.target import TargetFormat

    base = read_base_config(source / "base.json", label="30b")
    found = inspect_adapter(source, base, label="author/full", header_only=True)
    started = time.perf_counter()
    convert_adapter(found.files, plan_conversion(found.layout, TargetFormat(name)), made)
    _report(started)


def _by_hand_here(source: Path, made: Path) -> None:
    """In the child: load everything, slice, clone, save, as the usual script does."""
    from safetensors.torch import load_file, save_file

    from bench.full_size import EXPERTS, INTER, RANK

    started = time.perf_counter()
    stored = load_file(source / "adapter_model.safetensors")
    tensors = {}
    for name, a in stored.items():
        if ".lora_A." not in name:
            continue
        b = stored[name.replace(".lora_A.", ".lora_B.")]
        inner = ".base_layer." in name
        prefix = name.partition(".base_layer." if inner else ".lora_A.")[0]
        parts = b.reshape(b.shape[0], RANK, EXPERTS)
        for expert in range(EXPERTS):
            own_a = a[expert * RANK : (expert + 1) * RANK]
            own_b = parts[:, :, expert]
            named = {"gate_proj": own_b[:INTER], "up_proj": own_b[INTER:]} if inner else {"down_proj": own_b}
            for projection, share in named.items():
                tensors[f"{prefix}.{expert}.{projection}.lora_A.weight"] = own_a.clone()
                tensors[f"{prefix}.{expert}.{projection}.lora_B.weight"] = share.clone().contiguous()
    save_file(tensors, made, metadata={"format": "pt"})
    with made.open("rb") as file:
        os.fsync(file.fileno())
    _report(started)


def _report(started: float) -> None:
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    sys.stdout.write(json.dumps({"seconds": seconds, "peak_mb": peak}))


def _say(line: str) -> None:
    sys.stderr.write(f"bench convert: {line}\n")


if __name__ == "__main__":
    if sys.argv[1] == "--convert":
        _convert_here(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        _by_hand_here(Path(sys.argv[2]), Path(sys.argv[3]))
