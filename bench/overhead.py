"""What the pipeline itself costs an adapter: a flow run from its start to its end, without the work of its steps.

The work is what the steps inspected (with the download), converted, checked, staged and scored take by themselves; all
else is overhead: taking the upload up, the ledger, Prefect's tasks and states, choosing opponents, the verdict, the
page, tidying up, asking for a sync. With the long-lived runner (flows/forking.py) and with Prefect's process worker,
each beside Prefect's smallest flow. From taken by the worker to started is another matter (bench/trigger.py); it is
among the parts, but not in the sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.full_size import EXPERTS, LAYERS
from bench.machine import describe_machine
from bench.prefect_runs import (
    deploy_hello,
    emit_hello,
    list_runs,
    pause_sweeps,
    wait_for_first_step,
    wait_until_idle,
)
from bench.sized_world import VERDICT, Ended, sized, wait_for_ready
from bench.tiny_world import living

HELP = "what the pipeline itself costs an adapter: a run's time without its steps' work, by parts"
RESULT = Path(__file__).resolve().parent / "results" / "overhead.json"
# Each kind of worker, its goal in seconds, and the name of its figure.
KINDS = {
    "long_lived_runner": (1.0, "runner_overhead_s"),
    "process_worker": (3.0, "process_overhead_s"),
}
WORK = ("inspected", "converted", "checked", "staged", "scored")
_PATIENCE_S = 900.0


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures; `parts` are the long-lived runner's."""
    parser = argparse.ArgumentParser(
        prog="./run bench overhead [--json]",
        description=f"{HELP}. It starts a store, a Prefect server and a worker of its own, sends --turns adapters "
        "through, one after the other, and ends them all. At the published size it writes some 5 GB a turn.",
        epilog="A quick look: ./run bench overhead --layers 2 --experts 4 --turns 1 --kind long_lived_runner",
    )
    parser.add_argument("--turns", type=int, default=5, help="adapters through each kind of worker")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the adapter's base")
    parser.add_argument("--experts", type=int, default=EXPERTS, help="of each layer")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind of worker")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    size = (options.layers, options.experts)
    kinds = {kind: _measure_kind(kind, options.turns, *size) for kind in options.kind or KINDS}
    figures: dict[str, Any] = {"adapters": options.turns * len(kinds)}
    figures |= {KINDS[kind][1]: one["overhead_s"] for kind, one in kinds.items()}
    figures |= {
        "parts": next(iter(kinds.values()))["parts"],
        "kinds": kinds,
        "layers": options.layers,
        "experts": options.experts,
        "passed": all(one["overhead_s"] <= KINDS[kind][0] for kind, one in kinds.items()),
        "machine": describe_machine(),
    }
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    kinds = figures["kinds"]
    title = f"{figures['layers']} layers, {figures['experts']} experts, medians"
    table = Table("seconds", *kinds, title=title)
    for part in next(iter(kinds.values()))["parts"]:
        table.add_row(part, *(str(one["parts"][part]) for one in kinds.values()))
    for name in ("overhead_s", "work_s", "before_start_s", "hello_s"):
        table.add_row(name, *(str(one[name]) for one in kinds.values()))
    table.add_row("goal", *(str(KINDS[kind][0]) for kind in kinds))
    Console(highlight=False).print(table)


def split(run: Ended) -> dict[str, float]:
    """The overhead of a run by parts, in seconds; they add up to its time from start to end without WORK."""
    choosing, judging = run.steps["opponents"], run.steps[VERDICT]
    work = sum(run.steps[step] for step in WORK)
    return {
        "take_up": run.first_step - run.started,
        "opponents": choosing,
        "verdict": judging,
        "between_steps": run.verdict - run.first_step - work - choosing - judging,
        "afterwards": run.ended - run.verdict,
    }


def _measure_kind(kind: str, turns: int, layers: int, experts: int) -> dict[str, Any]:
    def say(line: str) -> None:
        sys.stderr.write(f"{kind}: {line}\n")

    variables = {"ROSTER_SWEEP_GRACE_SECONDS": "0", "ROSTER_SYNC_WINDOW_SECONDS": "1"}
    numbers = range(turns + 1)
    with living(warm=kind == "long_lived_runner", say=say, variables=variables) as world:
        pause_sweeps()
        deploy_hello()
        with sized(world, layers, experts, numbers) as place:
            runs = []
            for number in numbers:
                upload = place.submit(number)
                wait_until_idle(within_s=_PATIENCE_S)
                place.announce(upload)
                runs += wait_for_ready([f"author-{number}"], within_s=_PATIENCE_S)
                place.forget(number)
                say(f"adapter {number}: {runs[-1].wall_s:.2f} s, of it overhead {_overhead(runs[-1]):.2f} s")
            hellos = [_time_hello(number) for number in numbers]
    return _summarize(runs[1:], hellos[1:])  # the first of all warms everything up


def _time_hello(number: int) -> float:
    """Seconds from start to end of Prefect's smallest flow."""
    name = f"hello-{number}"
    wait_until_idle(within_s=_PATIENCE_S)
    emit_hello(name)
    wait_for_first_step("number", name, within_s=_PATIENCE_S)
    wait_until_idle(within_s=_PATIENCE_S)
    run = next(run for run in list_runs(newest=20) if run.parameters.get("number") == name)
    assert run.start_time is not None and run.end_time is not None
    return float((run.end_time - run.start_time).total_seconds())


def _overhead(run: Ended) -> float:
    return run.wall_s - sum(run.steps[step] for step in WORK)


def _summarize(runs: list[Ended], hellos: list[float]) -> dict[str, Any]:
    parts = [split(run) for run in runs]
    return {
        "overhead_s": _median(list(map(_overhead, runs))),
        "all": [round(_overhead(run), 3) for run in runs],
        "parts": {name: _median([one[name] for one in parts]) for name in parts[0]},
        "work_s": _median([sum(run.steps[step] for step in WORK) for run in runs]),
        "steps": {step: _median([run.steps[step] for run in runs]) for step in WORK},
        "before_start_s": _median([run.started - run.taken for run in runs]),
        "hello_s": _median(hellos),
    }


def _median(seconds: list[float]) -> float:
    return round(statistics.median(seconds), 3)
