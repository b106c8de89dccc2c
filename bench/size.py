"""What an adapter costs against its size: inspection, conversion, quick check at 2 to 96 layers, 8 to 512 experts.

Each size is measured in a process of its own, from a warm page cache, `cp` of the converted file in the same turn
beside it. Linear means: one straight line per part, over all sizes, whatever makes them large; how far the points lie
from it is told. Imports are left out, they are the same for every size.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.full_size import write_full_size
from bench.machine import describe_machine
from bench.plot import format_plot

HELP = "inspection, conversion and quick check against the adapter's size, 2 to 96 layers, 8 to 512 experts"
RESULT = Path(__file__).resolve().parent / "results" / "size.json"
PLOT = Path(__file__).resolve().parent.parent / "docs" / "cost-against-size.svg"
# (layers, experts): larger by layers, larger by experts, and the published size among both.
SIZES = ((2, 128), (12, 128), (24, 128), (48, 128), (96, 128), (24, 8), (24, 32), (12, 256), (12, 512))
PARTS = ("inspect_s", "convert_s", "check_s", "cp_s")
# A line explains so much of a part's differences, or it is no line.
_LEAST_EXPLAINED = 0.98


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures."""
    parser = argparse.ArgumentParser(prog="./run bench size [--json]", description=HELP)
    parser.add_argument("--turns", type=int, default=3, help="how often each size is measured")
    parser.add_argument("--layers", type=int, default=96, help="leave out what has more layers")
    parser.add_argument("--experts", type=int, default=512, help="leave out what has more experts")
    parser.add_argument("--folder", type=Path, help="where to write (6 GB); a temporary one if left out")
    parser.add_argument(
        "--save",
        action="store_true",
        help=f"put the figures into bench/results/{RESULT.name}, the plot into docs/",
    )
    options = parser.parse_args(arguments)
    sizes = [one for one in SIZES if one[0] <= options.layers and one[1] <= options.experts]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-size-") as scratch:
        points = [_measure(Path(scratch) / "one", *size, options.turns) for size in sizes]
    lines = {part: fit_line([(one["gb_in"], one[part]) for one in points]) for part in PARTS}
    figures = {
        "points": points,
        "lines": lines,
        "passed": all(line["explained"] >= _LEAST_EXPLAINED for line in lines.values()),
        "turns": options.turns,
        "machine": describe_machine(),
    }
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        PLOT.write_text(draw(figures), encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table(
        *("layers", "experts", "GB in", "inspect s", "convert s", "quick check s", "cp s", "peak MB")
    )
    for one in figures["points"]:
        names = ("layers", "experts", "gb_in", *PARTS, "peak_mb")
        table.add_row(*(str(one[name]) for name in names))
    out = Console(highlight=False)
    out.print(table)
    for part, line in figures["lines"].items():
        out.print(
            f"{part}: {line['intercept_s']} s and {line['s_per_gb']} s a GB; a line explains "
            f"{100 * line['explained']:.1f} % of the differences"
        )


def draw(figures: dict[str, Any]) -> str:
    """The plot of saved figures, an SVG document."""
    names = {
        "inspect_s": "inspect",
        "convert_s": "convert",
        "check_s": "quick check",
        "cp_s": "cp of the output",
    }
    series = {
        name: (
            [(one["gb_in"], one[part]) for one in figures["points"]],
            (figures["lines"][part]["intercept_s"], figures["lines"][part]["s_per_gb"]),
        )
        for part, name in names.items()
    }
    return format_plot(series, x="GB of the adapter as uploaded", y="seconds")


def fit_line(points: list[tuple[float, float]]) -> dict[str, float]:
    """The line of least squares through (GB, seconds), and the share of the variance that it explains."""
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    explained = statistics.correlation(*zip(*points, strict=True)) ** 2
    return {"intercept_s": round(intercept, 3), "s_per_gb": round(slope, 3), "explained": round(explained, 4)}


def _measure(folder: Path, layers: int, experts: int, turns: int) -> dict[str, Any]:
    source, made = folder / "source", folder / "made"
    _say(f"{layers} layers, {experts} experts …")
    write_full_size(source, layers, experts)
    ran = [_child(source, made) for _ in range(turns)]
    size = (source / "adapter_model.safetensors").stat().st_size
    shutil.rmtree(folder)
    medians = {part: round(statistics.median(float(one[part]) for one in ran), 3) for part in PARTS}
    shape = {"layers": layers, "experts": experts, "gb_in": round(size / 1e9, 4)}
    return shape | medians | {"peak_mb": max(int(one["peak_mb"]) for one in ran)}


def _child(source: Path, made: Path) -> dict[str, Any]:
    os.sync()
    command = [sys.executable, "-m", "bench.size", str(source), str(made)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    figures: dict[str, Any] = json.loads(ran.stdout)
    weights, copy = made / "adapter_model.safetensors", made / "copy"
    os.sync()
    started = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", str(weights), str(copy)], check=True)
    with copy.open("rb") as file:
        os.fsync(file.fileno())
    figures["cp_s"] = time.perf_counter() - started
    shutil.rmtree(made)
    return figures


def _run_here(source: Path, made: Path) -> dict[str, Any]:
    """In the child: all three, one after another; imports come before the clock starts."""
    from tasks.lora.base import read_base_config
    from tasks.lora.check import check_conversion
    from tasks.lora.checks import Depth
    from tasks.lora.convert import convert_adapter
    from tasks.lora.inspect import inspect_adapter
    from tasks.lora.plan import plan_conversion
    from tasks.lora.target import TargetFormat
    from tasks.served import list_witnesses

    base = read_base_config(source / "base.json", label="size")
    served, format = list_witnesses(None, base), TargetFormat.PER_EXPERT
    marks = [time.perf_counter()]
    found = inspect_adapter(source, base, label="author/size")
    marks.append(time.perf_counter())
    convert_adapter(found.files, plan_conversion(found.layout, format), made)
    marks.append(time.perf_counter())
    report = check_conversion(found.files, made, found.layout, format, served, depth=Depth.QUICK)
    marks.append(time.perf_counter())
    if not report.passed:
        raise RuntimeError(f"the conversion of {source} did not pass its check")
    seconds = [after - before for before, after in pairwise(marks)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return dict(zip(("inspect_s", "convert_s", "check_s"), seconds, strict=True)) | {"peak_mb": peak}


def _say(line: str) -> None:
    sys.stderr.write(f"bench size: {line}\n")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_run_here(Path(sys.argv[1]), Path(sys.argv[2]))))
