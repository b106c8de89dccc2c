"""Every bench, one after another, each in a process of its own; then the one table of all figures, docs/performance.md.

It takes hours. What fails or is interrupted leaves the other results as they are: go on with --only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import PAGE, format_page, list_rows, read_results

HELP = "all benches with --save, and docs/performance.md made of their results"
# About how many minutes each takes on two cores, from where its last run is on record.
MINUTES = {
    "convert": 3,
    "check": 6,
    "size": 10,
    "load": 3,
    "score": 5,
    "transfer": 3,
    "overhead": 6,
    "overlap": 5,
    "trigger": 10,
    "serving": 15,
    "mutations": 2,
    "fuzz": 7,
    "packing": 20,
    "catalog": 15,
    "chaos": 45,
    "backlog": 90,
    "scale": 100,
}


def run(arguments: list[str]) -> dict[str, Any]:
    """Return how each bench ended, and whether the table says that every goal is reached."""
    parser = argparse.ArgumentParser(prog="./run bench all [--json]", description=HELP)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=MINUTES, help="these alone")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, and for how long")
    parser.add_argument("--table", action="store_true", help="run nothing: write the page from what is saved")
    options = parser.parse_args(arguments)
    chosen = [] if options.table else [name for name in MINUTES if name in (options.only or MINUTES)]
    minutes = sum(MINUTES[name] for name in chosen)
    _say(f"{len(chosen)} benches, about {minutes} minutes: {', '.join(chosen) or 'the table alone'}")
    if options.dry_run:
        return {"benches": {name: {"minutes": MINUTES[name]} for name in chosen}, "minutes": minutes}
    ended = {name: _run_one(name) for name in chosen}
    results = read_results()
    PAGE.write_text(format_page(results), encoding="utf-8")
    rows = [[name, *cells] for name, cells in list_rows(results)]
    return {"benches": ended, "rows": rows, "passed": all(one["rc"] == 0 for one in ended.values())}


def show(figures: dict[str, Any]) -> None:
    """Print the table, or the plan."""
    out = Console(highlight=False)
    if "rows" not in figures:
        for name, one in figures["benches"].items():
            out.print(f"{name:<12}{one['minutes']:>4} min")
        return
    table = Table("bench", "what", "measured", "beside", "goal", "met")
    for row in figures["rows"]:
        table.add_row(*row)
    out.print(table)
    for name, one in figures["benches"].items():
        ending = "done" if one["rc"] == 0 else f"ended with {one['rc']}"
        out.print(f"{name}: {ending} in {one['minutes']} min")


def _run_one(name: str) -> dict[str, Any]:
    _say(f"{name}, about {MINUTES[name]} min …")
    begun = time.monotonic()
    done = subprocess.run(_command(name), stdout=subprocess.PIPE, text=True, check=False)
    return {"rc": done.returncode, "minutes": round((time.monotonic() - begun) / 60, 1)}


def _command(name: str) -> Sequence[str]:
    return [sys.executable, "-m", "bench", name, "--save", "--json"]


def _say(line: str) -> None:
    sys.stderr.write(f"bench all: {line}\n")
    sys.stderr.flush()
