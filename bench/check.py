"""The checks of a conversion of the published size: how long they take, in how much memory, and what probes miss.

Quick: everything that the depth checks, from the source's layout on; what else a process needs (imports, the layout)
is told beside it. Full: all 18,432 deltas from both sides. Each runs in a process of its own from a warm page cache;
its peak memory is that process's. CPU seconds are told too, as other work on the cores lengthens the others.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.check_trials import Sizes, run_trials
from bench.full_size import write_full_size
from bench.machine import describe_machine

HELP = "quick and full checks of a 30B-shaped conversion, and seeded damage that the quick one must not miss"
RESULT = Path(__file__).resolve().parent / "results" / "check.json"
FORMATS = ("per-expert", "stacked")
TRIALS = Sizes(layers=6, experts=128, rank=16, hidden=256, inter=96)


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures; those of quick are the worse of the two formats'."""
    parser = argparse.ArgumentParser(prog="./run bench check", description=HELP)
    parser.add_argument("--turns", type=int, default=3, help="how often the quick check is measured")
    parser.add_argument("--seeds", type=int, default=5, help="how many damaged adapters of 2,160 trials each")
    parser.add_argument("--device", default="cpu", help="where the full check makes the deltas: cpu or cuda")
    parser.add_argument("--folder", type=Path, help="where to write (5 GB); a temporary one if left out")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-check-") as scratch:
        figures = _measure(Path(scratch), options.turns, options.seeds, options.device)
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table(
        *("", "seconds", "of CPU", "whole process", "peak MB"), title="18,432 pairs", title_justify="left"
    )
    for name, one in figures["formats"].items():
        table.add_row(
            f"quick, {name}", *(str(one[key]) for key in ("seconds", "cpu_s", "process_s", "peak_mb"))
        )
    full = figures["full"]
    table.add_row(
        f"full, {full['device']}", *(str(full[key]) for key in ("seconds", "cpu_s", "process_s", "peak_mb"))
    )
    out = Console(highlight=False)
    out.print(table)
    trials = figures["trials"]
    out.print(
        f"{trials['trials']} damages of {trials['smallest']:.3g} and more: {trials['missed']} missed (at most "
        f"{trials['miss_probability']:.1g} each, as stated), {trials['false_alarms']} false alarms"
    )


def _measure(scratch: Path, turns: int, seeds: int, device: str) -> dict[str, Any]:
    _say(f"{seeds} damaged adapters …")
    trials = run_trials(scratch, TRIALS, range(seeds))
    source = scratch / "source"
    _say("writing the adapter (1.29 GB) and its conversions …")
    write_full_size(source)
    for name in FORMATS:
        _child("--convert", source, scratch / name, name)
    formats = {name: _measure_quick(source, scratch / name, name, turns) for name in FORMATS}
    _say(f"full, on {device} …")
    full = _child("--full", source, scratch / FORMATS[0], FORMATS[0], device)
    worst = max(formats.values(), key=lambda figures: float(figures["seconds"]))
    return {
        "quick_s": worst["seconds"],
        "quick_cpu_s": worst["cpu_s"],
        "quick_peak_mb": max(int(one["peak_mb"]) for one in formats.values()),
        "full_s": full["seconds"],
        "full_peak_mb": full["peak_mb"],
        "passed": not trials.missed and not trials.false_alarms and full["passed"],
        "formats": formats,
        "full": full | {"device": device},
        "trials": asdict(trials),
        "turns": turns,
        "machine": describe_machine(),
    }


def _measure_quick(source: Path, made: Path, name: str, turns: int) -> dict[str, Any]:
    ran = []
    for turn in range(turns):
        _say(f"quick, {name}: turn {turn + 1} of {turns} …")
        ran.append(_child("--quick", source, made, name))
    medians = {
        key: round(statistics.median(float(one[key]) for one in ran), 3)
        for key in ("seconds", "cpu_s", "probes_s", "process_s")
    }
    return medians | {"peak_mb": max(int(one["peak_mb"]) for one in ran)}


def _child(*arguments: object) -> dict[str, Any]:
    for path in (part for part in arguments if isinstance(part, Path) and part.is_dir()):
        _warm(path / "adapter_model.safetensors")
    started = time.perf_counter()
    command = [sys.executable, "-m", "bench.check", *map(str, arguments)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    figures: dict[str, Any] = json.loads(ran.stdout)
    return figures | {"process_s": round(time.perf_counter() - started, 3)}


def _warm(file: Path) -> None:
    with file.open("rb", buffering=0) as opened:
        while opened.read(1 << 24):
            pass


def _run_here(mode: str, source: Path, made: Path, name: str, device: str) -> dict[str, Any]:
    """In the child: one conversion or check; imports and the layout come before the clock starts."""
    from tasks.lora.base import read_base_config
    from tasks.lora.check import check_conversion
    from tasks.lora.checks import Depth
    from tasks.lora.convert import convert_adapter
    from tasks.lora.deltas import compare_deltas
    from tasks.lora.files import open_adapter
    from tasks.lora.inspect import inspect_adapter
    from tasks.lora.plan import plan_conversion
    from tasks.lora.probes import probe_deltas
    from tasks.lora.target import TargetFormat
    from tasks.served import list_witnesses

    format, base = TargetFormat(name), read_base_config(source / "base.json", label="30b")
    found = inspect_adapter(source, base, label="author/full", header_only=True)
    served = list_witnesses(None, base)
    if mode == "--convert":
        convert_adapter(found.files, plan_conversion(found.layout, format), made)
        return {}
    figures: dict[str, Any] = {}
    started, used = time.perf_counter(), time.process_time()
    if mode == "--quick":
        report = check_conversion(found.files, made, found.layout, format, served, depth=Depth.QUICK)
        figures["passed"] = report.passed
    else:
        output = open_adapter(made, label="made")
        full = compare_deltas(found.files, output, found.layout, format, device=device, progress=_show)
        figures |= {"passed": not full.differing and full.pairs == 18_432, "pairs": full.pairs}
    figures["seconds"] = round(time.perf_counter() - started, 3)
    figures["cpu_s"] = round(time.process_time() - used, 3)
    figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if mode == "--quick":
        output = open_adapter(made, label="made")
        started = time.perf_counter()
        probe_deltas(found.files, output, found.layout, format)
        figures["probes_s"] = round(time.perf_counter() - started, 3)
    return figures


def _show(done: int, total: int) -> None:
    if done % 12 == 0 or done == total:
        _say(f"{done} of {total} parameters …")


def _say(line: str) -> None:
    sys.stderr.write(f"bench check: {line}\n")


if __name__ == "__main__":
    where = [Path(argument) for argument in sys.argv[2:4]]
    device = sys.argv[5] if len(sys.argv) > 5 else "cpu"
    sys.stdout.write(json.dumps(_run_here(sys.argv[1], where[0], where[1], sys.argv[4], device)))
