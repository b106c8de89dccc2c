"""How long the catalog takes at ten thousand authors: made anew, looked through, brought up to date, and asked.

The store is a SeaweedFS server on loopback, on the same cores. Its ledgers are those of `bench/catalog_world.py`: as
the pipeline writes them, some 35 kB each. Beside the seconds on the wall stand the CPU seconds of this process and of
the server, since a machine that does something else meanwhile changes the first and hardly the second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.catalog_world import (
    Access,
    Patterns,
    add_bases,
    author_name,
    fill_store,
    make_ledger,
    write_patterns,
)
from bench.machine import describe_machine
from bench.tiny_world import kept_with_tests
from roster.catalog import open_catalog
from storage.s3 import S3Store
from tasks.cataloguing import SyncLimits, sync_catalog
from tasks.reporting import write_report

HELP = "rebuild, listing, fast sync, questions and report of a catalog of ten thousand authors"
RESULT = Path(__file__).resolve().parent / "results" / "catalog.json"
LIMITS = SyncLimits(max_opponents=4, max_drop=1.0)
# What each may take at 10,000 authors of 3 versions on 2 cores; seconds, or where the name says so milliseconds.
GOALS = {
    "rebuild_s": 90.0,
    "listing_s": 6.0,
    "incremental_s": 1.0,
    "ready_ms": 50.0,
    "show_ms": 50.0,
    "report_s": 10.0,
}
_TURNS = 5
_TICKS_PER_S = 100


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds on the wall, CPU seconds here, and CPU seconds of the store's server."""

    wall_s: float
    cpu_s: float
    server_s: float

    def figures(self) -> dict[str, float]:
        """They as a JSON object."""
        return {
            "wall_s": round(self.wall_s, 3),
            "cpu_s": round(self.cpu_s, 3),
            "server_s": round(self.server_s, 2),
        }


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures; `passed` says whether all goals were reached, at their full size only."""
    parser = argparse.ArgumentParser(prog="./run bench catalog [--json]", description=HELP)
    parser.add_argument("--authors", type=int, default=10_000)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--touched", type=int, default=100, help="ledgers that change before a fast sync")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    _say("sending patterns through the pipeline")
    patterns = write_patterns()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        kept_with_tests("store_builders").start_seaweedfs(Path(folder)) as server,
    ):
        access = Access(server.endpoint, server.access_key, server.secret_key, "ledgers")
        store = server.open(access.bucket)
        add_bases(store)
        _say("filling the store")
        size = fill_store(access, patterns, range(options.authors), options.versions)
        clock = Clock(server.process.pid)
        figures = _measure(clock, store, Path(folder) / "home" / "catalog.duckdb", patterns, options)
    figures |= {
        "ledgers": options.authors * options.versions,
        "ledger_bytes": size,
        "machine": describe_machine(),
    }
    reached = {name: figures[name] <= goal for name, goal in GOALS.items()}
    figures["goals"] = GOALS
    figures["passed"] = all(reached.values()) or options.authors < 10_000
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    about = (
        f"{figures['verdicts']} verdicts, {figures['ledgers']} ledgers, {figures['ledger_bytes'] >> 20} MiB"
    )
    table = Table("", "measured", "goal", "CPU s", "server CPU s", title=about)
    for name, goal in figures["goals"].items():
        spent = figures["spent"].get(name, {})
        table.add_row(
            name, str(figures[name]), str(goal), str(spent.get("cpu_s", "")), str(spent.get("server_s", ""))
        )
    Console(highlight=False).print(table)


@dataclass(frozen=True, slots=True)
class Clock:
    """Measures one piece of work, of this process and of the server with this id."""

    server: int

    def time(self, work: Callable[[], Any]) -> Spent:
        """What the work took."""
        server, cpu, wall = self._server_s(), time.process_time(), time.monotonic()
        work()
        return Spent(time.monotonic() - wall, time.process_time() - cpu, self._server_s() - server)

    def median(self, work: Callable[[], Any]) -> Spent:
        """What it took in the median of some turns."""
        turns = [self.time(work) for _ in range(_TURNS)]
        return sorted(turns, key=lambda spent: spent.wall_s)[_TURNS // 2]

    def _server_s(self) -> float:
        fields = Path(f"/proc/{self.server}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _measure(
    clock: Clock, store: S3Store, path: Path, patterns: Patterns, options: argparse.Namespace
) -> dict[str, Any]:
    spent: dict[str, Spent] = {}
    _say("rebuild")
    spent["rebuild_s"] = clock.time(lambda: sync_catalog(store, path, LIMITS, rebuild=True))
    _say(f"rebuild: {spent['rebuild_s']}; listing")
    spent["listing_s"] = clock.median(lambda: sync_catalog(store, path, LIMITS))
    _say(f"listing: {spent['listing_s']}; fast sync")
    turns = []
    for turn in range(1, _TURNS + 1):
        touched = _touch(store, patterns, options, turn)
        turns.append(clock.time(partial(_sync_touched, store, path, touched)))
    spent["incremental_s"] = sorted(turns, key=lambda one: one.wall_s)[_TURNS // 2]
    _say(f"fast sync: {turns}")
    with open_catalog(path) as reader:
        [(verdicts,)] = reader.sql("SELECT count(*) FROM verdicts").rows
        spent["ready_ms"] = clock.median(reader.ready)
        authors = iter(author_name(number * 7) for number in range(_TURNS))
        spent["show_ms"] = clock.median(lambda: reader.show(next(authors)))
        _say("report")
        spent["report_s"] = clock.time(
            lambda: write_report(reader, path.with_name("report.html"), store=None)
        )
    return {
        "verdicts": verdicts,
        **{name: _figure(name, one) for name, one in spent.items()},
        "incremental_all_s": [round(one.wall_s, 3) for one in turns],
        "incremental_mean_cpu_s": round(statistics.mean(one.cpu_s for one in turns), 3),
        "catalog_bytes": path.stat().st_size,
        "spent": {name: one.figures() for name, one in spent.items()},
    }


def _touch(store: S3Store, patterns: Patterns, options: argparse.Namespace, turn: int) -> Sequence[str]:
    """Score as many adapters anew, each of another author; the keys of their ledgers."""
    keys = []
    step = max(1, options.authors // options.touched)
    for number in range(turn, options.authors, step)[: options.touched]:
        key, body = make_ledger(patterns, number, options.versions - 1, options.versions, turn)
        store.put(key, body)
        keys.append(key)
    return keys


def _sync_touched(store: S3Store, path: Path, touched: Sequence[str]) -> None:
    synced = sync_catalog(store, path, LIMITS, touched=touched)
    if synced.whole or synced.report.changed != len(touched) or not synced.published:
        message = f"this was no fast sync of {len(touched)} ledgers that publishes: {synced.report}"
        raise RuntimeError(message)


def _figure(name: str, spent: Spent) -> float:
    return round(spent.wall_s * 1000, 1) if name.endswith("_ms") else round(spent.wall_s, 3)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
