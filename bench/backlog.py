"""Many adapters at once, through the whole pipeline but for the engine, which answers from a script.

All are uploaded and announced before the first is through; sweeps and syncs go on by their schedules. Steady means
that the last fifty take no longer than the first, that no process grows, and that nobody is told that the server is too
busy: "database is locked" and 503 are looked for in every log.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import describe_machine
from bench.prefect_runs import has_failed, has_onboards_left, list_runs
from bench.process_trees import find_child, measure_tree
from bench.tiny_world import World, living, scripted_engine
from flows.events import announce_upload

HELP = "a backlog of adapters: how many an hour, and whether pace and memory stay as they are"
RESULT = Path(__file__).resolve().parent / "results" / "backlog.json"
# What is watched, each by a part of its command line.
PARTS = {"server": "flows.prefect_server", "worker and runs": "flows.forking", "store": "weed"}
_BATCH = 50
_LOOK_S = 10.0
_KEPT = 50  # looks among the figures, evenly spread
_PATIENCE_S = 60.0  # an adapter
_LOCKED = re.compile(r"database is locked")
# Not the mere number: it is the thousandths of a second in some of the lines.
_BUSY = re.compile(r"Service Unavailable|status code:? 503|HTTP/1\.1\"? 503|Encountered retryable exception")


@dataclass(frozen=True, slots=True)
class Look:
    """Seconds since the start, and the memory in MiB of each part."""

    seconds: float
    memory_mib: dict[str, float]


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures."""
    parser = argparse.ArgumentParser(prog="./run bench backlog [--json]", description=HELP)
    parser.add_argument("--adapters", type=int, default=500, help="how many; the goal is for 500")
    parser.add_argument("--workers", type=int, default=2, help="runs at once")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    # One sync for all verdicts of ten seconds; uploads older than a minute are the sweep's, as they are by default.
    with (
        living(warm=True, say=_say, variables={}, workers=options.workers) as world,
        scripted_engine(world.store),
    ):
        figures = _play(world, options.adapters)
    figures |= {"workers": options.workers, "machine": describe_machine()}
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    out = Console(highlight=False)
    table = Table(f"{_BATCH} adapters, in turn", "seconds each", title=f"{figures['ready']} ready")
    for number, seconds in enumerate(figures["seconds_each_by_batch"], start=1):
        table.add_row(str(number), str(seconds))
    out.print(table)
    for part, memory in figures["memory_mib"].items():
        out.print(f"{part}: {memory['early']} MiB early, {memory['late']} late, {memory['most']} at the most")
    out.print(
        f"locked {figures['database_is_locked']}, busy {figures['http_503']}, states {figures['states']}"
    )


def _play(world: World, adapters: int) -> dict[str, Any]:
    begun = time.time()
    authors = [f"author-{number:04d}" for number in range(adapters)]

    def send(author: str) -> bool:
        return announce_upload(world.settings, world.submit(author))

    with ThreadPoolExecutor(1) as sender:
        sent = [sender.submit(send, author) for author in authors]
        looks = _watch(world, begun, adapters, lambda: all(one.done() for one in sent))
        announced = sum(one.result() for one in sent)
    runs = [run for run in list_runs() if run.parameters.get("author") in set(authors)]
    states = Counter(run.state_name or "" for run in runs)
    ready = {run.parameters["author"] for run in runs if run.state_name == "Ready"}
    ends = sorted(run.end_time.timestamp() for run in runs if run.end_time and run.state_name == "Ready")
    batches = _seconds_each(begun, ends)
    memory = _compare(looks)
    said = _count_in_logs(world)
    figures: dict[str, Any] = {
        "adapters": adapters,
        "ready": len(ready),
        "announced": announced,
        "wall_s": round(ends[-1] - begun, 1) if ends else None,
        "adapters_an_hour": round(3600 * len(ends) / (ends[-1] - begun)) if ends else 0,
        "seconds_each_by_batch": batches,
        "memory_mib": memory,
        "states": dict(states),
        "database_is_locked": said["locked"],
        "http_503": said["busy"],
        "restarts": said["restarts"],
        "looks": [asdict(look) for look in looks[:: -(-len(looks) // _KEPT)]],
    }
    odd = any(map(has_failed, runs))
    silent = not (said["locked"] or said["busy"] or said["restarts"] or odd)
    # A short backlog shows neither: the first fifty warm everything up, the store's caches for one.
    short = len(batches) < 3
    steady = short or batches[-1] <= 1.25 * batches[1]
    flat = short or all(part["late"] <= 1.25 * part["early"] for part in memory.values())
    passed = len(ready) == adapters and silent and steady and flat
    return {**figures, "steady": steady, "flat": flat, "passed": passed}


def _watch(world: World, begun: float, adapters: int, all_sent: Any) -> list[Look]:
    """A look at each part's memory every ten seconds, until nothing is left to do."""
    roots = {part: find_child(world.services.pid, name) for part, name in PARTS.items()}
    looks: list[Look] = []
    quiet = 0
    while quiet < 2:
        time.sleep(_LOOK_S)
        memory = {part: measure_tree(root).memory_mib for part, root in roots.items()}
        looks.append(Look(round(time.time() - begun, 1), memory))
        quiet = quiet + 1 if all_sent() and not has_onboards_left() else 0
        _say(f"{looks[-1].seconds:.0f} s: {memory}")
        if looks[-1].seconds > _PATIENCE_S * adapters:
            _say("out of patience")
            return looks
    return looks


def _seconds_each(begun: float, ends: list[float]) -> list[float]:
    marks = [begun, *ends[_BATCH - 1 :: _BATCH]]
    return [round((after - before) / _BATCH, 2) for before, after in pairwise(marks)]


def _compare(looks: list[Look]) -> dict[str, dict[str, float]]:
    """The median of the second tenth of the looks beside that of the last but one, when all were at work."""
    tenth = max(1, len(looks) // 10)
    early, late = looks[tenth : 2 * tenth] or looks[:1], looks[-2 * tenth : -tenth] or looks[-1:]
    return {
        part: {
            "early": _middle([look.memory_mib[part] for look in early]),
            "late": _middle([look.memory_mib[part] for look in late]),
            "most": max(look.memory_mib[part] for look in looks),
        }
        for part in PARTS
    }


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _count_in_logs(world: World) -> Mapping[str, int]:
    counts = Counter(locked=0, busy=0, restarts=0)
    for log in sorted((world.home / "logs").iterdir()):
        text = log.read_text(errors="replace")
        counts["locked"] += len(_LOCKED.findall(text))
        counts["busy"] += len(_BUSY.findall(text)) if log.name.startswith(("worker", "prefect")) else 0
        counts["restarts"] += text.count("; restart ") if log.name.startswith("supervisor") else 0
    return counts


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
