"""Is every damage to a conversion, and to what is decided about an adapter, named by something?

Damages converted adapters of several families in every way that we could think of, and has them checked; damages, lies
about and reads wrong adapters that were trained for a moment, and sends them the way of an upload to its scores.
Correct conversions must pass it all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from bench.machine import describe_machine
from bench.mutation_adapters import list_families
from bench.mutation_correct import convert_random, convert_trained
from bench.mutation_decisions import DECISIONS, list_correct, spoil_upload
from bench.mutation_training import FAMILIES, World, train_world
from bench.mutation_trial import HOSTS, Counts, KindCount, PlannedHost, damage_planned
from bench.mutation_uploads import Judge

RESULT = Path(__file__).resolve().parent / "results" / "mutations.json"
# A file system in memory: thousands of small folders wear no disk out.
_MEMORY = Path("/dev/shm")
_SHOWN = 40


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures; they did not pass if anything went unnamed, or a correct conversion did not pass."""
    options = _read_options(arguments)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[{time.monotonic() - started:4.0f} s] {line}")

    counts, tasks = Counts(), _list_tasks(options.part)
    memory = _MEMORY if _MEMORY.is_dir() else None
    say(f"seed {options.seed}, {len(tasks)} parts")
    with tempfile.TemporaryDirectory(prefix="mutations.", dir=memory) as scratch:
        perform = partial(_perform, scratch=Path(scratch), seed=options.seed)
        # Leaving the pool ends its processes, done or not, before their files are removed.
        with multiprocessing.get_context("spawn").Pool(options.processes, _prepare_process) as pool:
            for told, found in pool.imap_unordered(perform, tasks):
                counts.merge(found)
                say(f"{told}: {_tell(counts)}")
    figures = _list_figures(counts, seed=options.seed, seconds=time.monotonic() - started)
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as tables."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"{figures['mutations']} mutations of {figures['kinds']} kinds, {figures['families']} families: "
        f"{figures['caught']} named; at depth quick {figures['caught_quick']} of {figures['quick_mutations']}; "
        f"{figures['correct_conversions']} correct conversions, {figures['false_alarms']} false alarms; "
        f"seed {figures['seed']}, {figures['seconds']} s"
    )
    for part in ("output", "decision"):
        table = Table(f"damage to {part}s", "tried", "named", "quick", "by (its first name)", "by quick")
        for kind, row in figures["table"].items():
            if row["part"] == part:
                quick = f"{row['quick_caught']}" if row["by_quick"] else ""
                table.add_row(
                    kind,
                    str(row["trials"]),
                    str(row["caught"]),
                    quick,
                    _join(row["by"]),
                    _join(row["by_quick"]),
                )
        console.print(table)
    for key in ("missed", "quick_missed", "unexpected", "incorrect", "alarms"):
        for line in figures[key]:
            console.print(f"{key.replace('_', ' ')}: {line}")


def _read_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run bench mutations [--json]", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(1_000_000), help="of all that is random (any)"
    )
    parser.add_argument(
        "--part",
        nargs="+",
        choices=("output", "correct", "decision"),
        default=["output", "correct", "decision"],
        help="only some parts",
    )
    parser.add_argument("--processes", type=int, default=2, help="how many at once (2)")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    return parser.parse_args(arguments)


def _list_tasks(parts: Sequence[str]) -> list[tuple[str, str | PlannedHost]]:
    """What is done by one process at a time, the longest first."""
    tasks: list[tuple[str, str | PlannedHost]] = []
    if "decision" in parts:
        tasks += [("decision", family) for family in FAMILIES]
    if "output" in parts:
        tasks += [("output", planned) for planned in HOSTS]
    if "correct" in parts:
        tasks += [("correct", family) for family in list_families()]
    return tasks


def _prepare_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; whoever started this one ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    # Transformers and PEFT warn about tiny models, over and over.
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")


def _perform(task: tuple[str, str | PlannedHost], *, scratch: Path, seed: int) -> tuple[str, Counts]:
    part, what = task
    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        if isinstance(what, PlannedHost):
            return f"damage to outputs, {what}", damage_planned(what, folder, seed)
        if part == "correct":
            return f"correct conversions, {what}", convert_random(what, folder, seed)
        return f"decisions, {what}", try_world(train_world(what, seed=seed), folder, seed)
    finally:
        shutil.rmtree(folder)


def try_world(world: World, folder: Path, seed: int) -> Counts:
    """Everything that is tried on trained adapters of one family."""
    counts, judge = Counts(), Judge(world, folder)
    convert_trained(world, folder, counts)
    for told, upload in list_correct(world, judge):
        counts.correct += 1
        named = judge.name(upload)
        if named:
            counts.false_alarms.append(f"{world.family}, {told}, from upload to scores: {', '.join(named)}")
    counts.families.add(world.family)
    for number, decision in enumerate(DECISIONS):
        rng = Random(f"{seed} {world.family} {decision.kind}")
        spoiled = spoil_upload(decision, world, judge, number % len(world.authors), rng)
        if spoiled is not None:
            kind = counts.kinds.setdefault(decision.kind, KindCount("decision", decision.expected))
            counts.add(kind, f"{decision.kind}: {world.family}", judge.name(spoiled), float("inf"), None)
    return counts


def _list_figures(counts: Counts, *, seed: int, seconds: float) -> dict[str, Any]:
    kinds = counts.kinds
    table = {name: _list_kind(kind) for name, kind in kinds.items()}

    def total(value: Callable[[KindCount], int]) -> int:
        return sum(map(value, kinds.values()))

    faults = (counts.missed, counts.quick_missed, counts.incorrect, counts.false_alarms)
    return {
        "bench": "mutations",
        "passed": not any(faults),
        "kinds": len(kinds),
        "kinds_output": sum(kind.part == "output" for kind in kinds.values()),
        "kinds_decision": sum(kind.part == "decision" for kind in kinds.values()),
        "families": len(counts.families),
        "mutations": total(lambda kind: kind.trials),
        "caught": total(lambda kind: kind.caught),
        "quick_mutations": sum(kind.trials for kind in kinds.values() if kind.part == "output"),
        "quick_due": total(lambda kind: kind.quick_due),
        "caught_quick": total(lambda kind: kind.quick_caught),
        "correct_conversions": counts.correct,
        "correct_families": len(counts.correct_families),
        "undecided": counts.undecided,
        "false_alarms": len(counts.false_alarms),
        "missed": counts.missed[:_SHOWN],
        "quick_missed": counts.quick_missed[:_SHOWN],
        "unexpected": counts.unexpected[:_SHOWN],
        "incorrect": counts.incorrect[:_SHOWN],
        "alarms": counts.false_alarms[:_SHOWN],
        "seed": seed,
        "seconds": round(seconds),
        "table": table,
        "machine": describe_machine(),
    }


def _list_kind(kind: KindCount) -> dict[str, Any]:
    return {
        "part": kind.part,
        "expected": list(kind.expected),
        "trials": kind.trials,
        "caught": kind.caught,
        "quick_due": kind.quick_due,
        "quick_caught": kind.quick_caught,
        "by": dict(kind.by.most_common()),
        "by_quick": dict(kind.by_quick.most_common()),
    }


def _tell(counts: Counts) -> str:
    tried = sum(kind.trials for kind in counts.kinds.values())
    return (
        f"{tried} mutations, {len(counts.missed)} unnamed, {len(counts.quick_missed)} at depth quick; "
        f"{counts.correct} correct, {len(counts.false_alarms)} false alarms"
    )


def _join(by: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in by.items())
