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
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Run:
    """A flow run of an author's adapter: the name of its last state, and the time at which it ended, if it did."""

    author: str
    state: str
    failed: bool
    ended: float | None


@dataclass(frozen=True, slots=True)
class Played:
    """A backlog that is through. begun: a time. runs: those of its authors. said: how often logs told of what."""

    begun: float
    adapters: int
    announced: int
    runs: tuple[Run, ...]
    looks: tuple[Look, ...]
    said: Mapping[str, int]

    @property
    def ended_ready(self) -> list[Run]:
        """The runs that found their adapter ready; of some adapters there are two, as opponents came later."""
        return [run for run in self.runs if run.state == "Ready"]

    @property
    def all_ready(self) -> bool:
        """Whether every adapter is ready, no run failed, and no log tells of a lock, a busy server or a restart."""
        ready = {run.author for run in self.ended_ready}
        silent = not (any(self.said.values()) or any(run.failed for run in self.runs))
        return len(ready) == self.adapters and silent

    def outcome(self, ends: Sequence[float]) -> dict[str, Any]:
        """The figures that do not tell of pace or memory; `ends` are times, the last one last."""
        return {
            "adapters": self.adapters,
            "ready": len({run.author for run in self.ended_ready}),
            "announced": self.announced,
            "wall_s": round(ends[-1] - self.begun, 1) if ends else None,
            "states": dict(Counter(run.state for run in self.runs)),
            "database_is_locked": self.said["locked"],
            "http_503": self.said["busy"],
            "restarts": self.said["restarts"],
            "looks": [asdict(look) for look in self.looks[:: -(-len(self.looks) // _KEPT) or 1]],
        }


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures."""
    parser = argparse.ArgumentParser(prog="./run bench backlog [--json]", description=HELP)
    parser.add_argument("--adapters", type=int, default=500, help="how many; the goal is for 500")
    parser.add_argument("--workers", type=int, default=2, help="runs at once")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    figures = _figures(play_alone(options.adapters, options.workers))
    figures |= {"workers": options.workers, "machine": describe_machine()}
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def play_alone(adapters: int, workers: int) -> Played:
    """What `play` returns, of services that are started for it and ended after it."""
    # One sync for all verdicts of ten seconds; uploads older than a minute are the sweep's, as they are by default.
    with (
        living(warm=True, say=_say, variables={}, workers=workers) as world,
        scripted_engine(world.store),
    ):
        return play(world, adapters)


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


def play(world: World, adapters: int) -> Played:
    """Upload and announce so many adapters, watch until none is left to do, and read what became of them."""
    begun = time.time()
    authors = [f"author-{number:04d}" for number in range(adapters)]

    def send(author: str) -> bool:
        return announce_upload(world.settings, world.submit(author))

    with ThreadPoolExecutor(1) as sender:
        sent = [sender.submit(send, author) for author in authors]
        looks = _watch(world, begun, adapters, lambda: all(one.done() for one in sent))
        announced = sum(one.result() for one in sent)
    return Played(begun, adapters, announced, _list_ours(set(authors)), tuple(looks), _count_in_logs(world))


def _list_ours(authors: set[str]) -> tuple[Run, ...]:
    return tuple(
        Run(
            author=run.parameters["author"],
            state=run.state_name or "",
            failed=has_failed(run),
            ended=run.end_time.timestamp() if run.end_time else None,
        )
        for run in list_runs()
        if run.parameters.get("author") in authors
    )


def _figures(played: Played) -> dict[str, Any]:
    ends = sorted(run.ended for run in played.ended_ready if run.ended is not None)
    batches = _seconds_each(played.begun, ends)
    memory = _compare(played.looks)
    figures = {
        **played.outcome(ends),
        "adapters_an_hour": round(3600 * len(ends) / (ends[-1] - played.begun)) if ends else 0,
        "seconds_each_by_batch": batches,
        "memory_mib": memory,
    }
    # A short backlog shows neither: the first fifty warm everything up, the store's caches for one.
    short = len(batches) < 3
    steady = short or batches[-1] <= 1.25 * batches[1]
    flat = short or all(part["late"] <= 1.25 * part["early"] for part in memory.values())
    return {**figures, "steady": steady, "flat": flat, "passed": played.all_ready and steady and flat}


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


def _compare(looks: Sequence[Look]) -> dict[str, dict[str, float]]:
    """The median of the second tenth of the looks beside that of the last but one, when all were at work."""
    tenth = max(1, len(looks) // 10)
    early, late = looks[tenth : 2 * tenth] or looks[:1], looks[-2 * tenth : -tenth] or looks[-1:]
    return {
        part: {
            "early": middle([look.memory_mib[part] for look in early]),
            "late": middle([look.memory_mib[part] for look in late]),
            "most": max(look.memory_mib[part] for look in looks),
        }
        for part in PARTS
    }


def middle(values: Sequence[float]) -> float:
    """The median, or the upper of two."""
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
