"""How soon a run is at work: from the event, and from a sweep, to the beginning of the first step.

With the long-lived runner (flows/forking.py) and with Prefect's own process worker, each beside Prefect's smallest
flow, started by an event in the same way. The first step is a run's first task: `intake` of an upload. From a sweep
means from when it is at work; to get there from its schedule takes as long as any run (`sweep_asked_to_start_s` holds
both). Every upload is sent when nothing else is at work; no sweep begins by its schedule meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import describe_machine
from bench.prefect_runs import (
    SWEEP,
    ask,
    deploy_hello,
    emit_hello,
    pause_sweeps,
    read_run,
    wait_for_first_step,
    wait_until_idle,
)
from bench.process_trees import Usage, find_child, measure_tree
from bench.tiny_world import World, living, scripted_engine
from flows.events import announce_upload

HELP = "event to first step and sweep to first step, beside Prefect's smallest flow"
RESULT = Path(__file__).resolve().parent / "results" / "trigger.json"
# Each kind of worker: its goal in seconds, and a part of its command line.
KINDS = {"long_lived_runner": (3.0, "flows.forking"), "process_worker": (10.0, "worker start")}
_PATIENCE_S = 300.0  # machines are busy at times
_SAMPLE_S = 0.1


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures; those at the top are the long-lived runner's."""
    parser = argparse.ArgumentParser(prog="./run bench trigger [--json]", description=HELP)
    parser.add_argument("--turns", type=int, default=7, help="how often each is measured")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind of worker")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    kinds = {kind: _measure_kind(kind, options.turns) for kind in options.kind or KINDS}
    first = next(iter(kinds.values()))
    figures = {
        "event_to_start_s": first["event_to_start_s"]["median"],
        "sweep_to_start_s": first["sweep_to_start_s"]["median"],
        "passed": all(one["passed"] for one in kinds.values()),
        "kinds": kinds,
        "turns": options.turns,
        "machine": describe_machine(),
    }
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table("seconds", "median", "largest", "goal", title=f"{figures['turns']} turns")
    for kind, one in figures["kinds"].items():
        for name in ("event_to_start_s", "sweep_to_start_s", "sweep_asked_to_start_s", "hello_to_start_s"):
            goal = str(one["goal_s"]) if name in {"event_to_start_s", "sweep_to_start_s"} else ""
            table.add_row(f"{kind} {name}", str(one[name]["median"]), str(one[name]["max"]), goal)
    out = Console(highlight=False)
    out.print(table)
    for kind, one in figures["kinds"].items():
        out.print(
            f"{kind}: {one['idle_mib']} MiB idle, {one['run_mib']} MiB and {one['run_cpu_s']} s of CPU a run"
        )


def _measure_kind(kind: str, turns: int) -> dict[str, Any]:
    def say(line: str) -> None:
        sys.stderr.write(f"{kind}: {line}\n")

    goal_s, part = KINDS[kind]
    variables = {"ROSTER_SWEEP_GRACE_SECONDS": "0", "ROSTER_SYNC_WINDOW_SECONDS": "1"}
    with living(warm=kind == "long_lived_runner", say=say, variables=variables) as world:
        pause_sweeps()
        deploy_hello()
        authors = (f"author-{number}" for number in count())
        with scripted_engine(world.store):
            _after_event(world, next(authors))  # the first of all warms the server up
            events = _repeat(turns, say, "event", lambda: _after_event(world, next(authors)))
            hellos = _repeat(turns, say, "hello", lambda: _after_hello(next(authors)))
            sweeps = [_after_sweep(world, next(authors)) for _ in range(turns)]
            say(f"sweep: {sweeps}")
            root = find_child(world.services.pid, part)
            idle, cost = measure_tree(root), _cost(root, turns, lambda: _after_event(world, next(authors)))
    figures: dict[str, Any] = {
        "event_to_start_s": _summarize(events),
        "sweep_to_start_s": _summarize([at_work for _, at_work in sweeps]),
        "sweep_asked_to_start_s": _summarize([asked for asked, _ in sweeps]),
        "hello_to_start_s": _summarize(hellos),
        "goal_s": goal_s,
        "idle_mib": idle.memory_mib,
        "run_mib": round(cost.memory_mib - idle.memory_mib, 1),
        "run_cpu_s": cost.cpu_s,
    }
    reached = max(figures[name]["median"] for name in ("event_to_start_s", "sweep_to_start_s"))
    return {**figures, "passed": reached <= goal_s}


def _after_event(world: World, author: str) -> float:
    upload = world.submit(author)
    wait_until_idle(within_s=_PATIENCE_S)
    sent = _now()
    if not announce_upload(world.settings, upload):
        message = "the Prefect server does not take the event"
        raise RuntimeError(message)
    _, begun = wait_for_first_step("author", author, within_s=_PATIENCE_S)
    wait_until_idle(within_s=_PATIENCE_S)
    return (begun - sent).total_seconds()


def _after_hello(number: str) -> float:
    wait_until_idle(within_s=_PATIENCE_S)
    sent = _now()
    emit_hello(number)
    _, begun = wait_for_first_step("number", number, within_s=_PATIENCE_S)
    return (begun - sent).total_seconds()


def _after_sweep(world: World, author: str) -> tuple[float, float]:
    """Seconds to the first step from when the sweep was asked for, and from when it was at work."""
    world.submit(author)
    wait_until_idle(within_s=_PATIENCE_S)
    asked = _now()
    sweep = ask(SWEEP)
    _, begun = wait_for_first_step("author", author, within_s=_PATIENCE_S)
    wait_until_idle(within_s=_PATIENCE_S)
    at_work = read_run(sweep).start_time or asked
    return round((begun - asked).total_seconds(), 2), round((begun - at_work).total_seconds(), 2)


def _repeat(turns: int, say: Callable[[str], None], what: str, once: Callable[[], float]) -> list[float]:
    seconds: list[float] = []
    for _ in range(turns):
        seconds.append(round(once(), 2))
        say(f"{what}: {seconds[-1]}")  # each at once, so that one broken off is not in vain
    return seconds


def _cost(root: int, turns: int, once: Callable[[], float]) -> Usage:
    """The most memory that the tree held, and CPU seconds a turn beyond what it uses while idle."""
    pause_s = 5.0
    before = measure_tree(root).cpu_s
    time.sleep(pause_s)
    idle_rate = (measure_tree(root).cpu_s - before) / pause_s
    most, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(_SAMPLE_S):
            most = max(most, measure_tree(root).memory_mib)

    watcher = threading.Thread(target=watch)
    started, begun = measure_tree(root).cpu_s, time.monotonic()
    watcher.start()
    try:
        for _ in range(turns):
            once()
    finally:
        done.set()
        watcher.join()
    used = measure_tree(root).cpu_s - started - idle_rate * (time.monotonic() - begun)
    return Usage(memory_mib=most, cpu_s=round(used / turns, 2), processes=0)


def _summarize(seconds: list[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(seconds), 2),
        "max": round(max(seconds), 2),
        "all": [round(one, 2) for one in seconds],
    }


def _now() -> datetime:
    return datetime.now(UTC)
