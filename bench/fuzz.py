"""Does everything that is wrong with an adapter end in one of our own errors?

Changes tiny valid adapters at random, by structure and by byte, and sends each through what the product does with a
folder. Inputs run in processes of their own, whose memory is limited; one that hangs or dies is counted, and replaced.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.fuzz_trial import Outcome, try_input
from bench.machine import describe_machine

RESULT = Path(__file__).resolve().parent / "results" / "fuzz.json"
# A file system in memory: what is asked here does not hang on the disk, and 10,000 conversions wear none out.
_MEMORY = Path("/dev/shm")
_LIMIT_S = 5.0
# What a process may take beyond what it has when torch is loaded; threads reserve address space, too.
_LIMIT_BYTES = 4 << 30
_GRACE_S = 10.0
_SHOWN = 20


@dataclass(slots=True)
class Counts:
    """What is counted of all inputs; those that went through and those refused by one of our errors make up the rest.

    slowest, largest: the seeds of slowest_s and peak_mb. by_kind: inputs by what was changed in them; several kinds in
    one input count each. by_code: ruled errors by the step that raised them.
    """

    inputs: int = 0
    successes: int = 0
    clean_errors: int = 0
    conversions: int = 0
    peak_mb: int = 0
    slowest_s: float = 0.0
    slowest: int = 0
    largest: int = 0
    strange: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)
    by_code: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one input."""
        self.inputs += 1
        self.conversions += outcome.converted
        if outcome.peak_mb > self.peak_mb:
            self.peak_mb, self.largest = outcome.peak_mb, outcome.seed
        self.by_kind.update(set(outcome.kinds) or {"unchanged"})
        self.by_code.update(outcome.codes)
        if outcome.seconds > self.slowest_s:
            self.slowest_s, self.slowest = outcome.seconds, outcome.seed
        told = f"--only {outcome.seed}: {outcome.adapter}; {', '.join(outcome.kinds) or 'unchanged'}"
        if outcome.leftovers:
            self.left.append(f"{told}: left {', '.join(outcome.leftovers)}")
        if outcome.strange:
            self.strange.append(f"{told}: {outcome.strange[0]}")
        elif outcome.converted == 2:
            self.successes += 1
        else:
            self.clean_errors += 1


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures; they did not pass if any input ended in a strange error or left something behind."""
    options = _read_options(arguments)
    seeds = [options.only] if options.only is not None else range(options.seed, options.seed + options.inputs)
    began = time.monotonic()
    counts = Counts()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    folder = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fuzz.", dir=folder) as scratch:
        for outcome in _try_all(list(seeds), Path(scratch), min(options.processes, len(seeds))):
            known = len(counts.strange) + len(counts.left)
            counts.add(outcome)
            for line in (counts.strange + counts.left)[known:] if known < _SHOWN else ():
                console.print(line)
            if counts.inputs % 1000 == 0:
                console.print(
                    f"[{time.monotonic() - began:4.0f} s] {counts.inputs} inputs, {counts.successes} converted, "
                    f"{counts.clean_errors} refused, {len(counts.strange)} strange"
                )
            if options.only is not None:
                console.print("\n".join(outcome.codes))
    figures = _list_figures(counts, seconds=time.monotonic() - began)
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as tables."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"{figures['inputs']} inputs in {figures['seconds']} s: {figures['successes']} converted, "
        f"{figures['clean_errors']} refused, {figures['strange_errors']} strange, "
        f"{figures['leftovers']} left something; at most {figures['peak_mb']} MB and {figures['slowest_s']} s"
    )
    for key in ("by_kind", "by_code"):
        table = Table(key.replace("_", " "), "inputs")
        for name, count in figures[key].items():
            table.add_row(name, str(count))
        console.print(table)
    for line in figures["strange"] + figures["left"]:
        console.print(line)


def _read_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run bench fuzz [--json]", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="how many (10000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="the first input's seed; the next have the next (0)"
    )
    parser.add_argument(
        "--only", type=int, metavar="SEED", help="this one input, and what each step said of it"
    )
    parser.add_argument("--processes", type=int, default=2, help="how many at once (2)")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    return parser.parse_args(arguments)


@dataclass(slots=True)
class _Worker:
    """A process that tries seeds one after another. left: those it has not answered yet, the first is under way."""

    process: BaseProcess
    answers: Connection
    left: list[int]
    heard: float


def _try_all(seeds: list[int], scratch: Path, processes: int) -> Iterator[Outcome]:
    """Yield the outcome of every seed, in the order in which they come."""
    workers = [_start(seeds[number::processes], scratch) for number in range(processes)]
    try:
        while workers:
            ready = wait([worker.answers for worker in workers], timeout=1.0)
            for worker in list(workers):
                outcome = None
                if worker.answers in ready:
                    outcome = _hear(worker)
                elif time.monotonic() - worker.heard < _LIMIT_S + _GRACE_S:
                    continue
                if outcome is None:
                    worker.process.kill()
                    worker.process.join()
                    workers.remove(worker)
                    if not worker.left:
                        continue
                    fault = f"its process had to be ended, or ended itself: {worker.process.exitcode}"
                    outcome = Outcome(worker.left.pop(0), strange=[fault])
                    if worker.left:
                        workers.append(_start(worker.left, scratch))
                yield outcome
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def _hear(worker: _Worker) -> Outcome | None:
    """Return what a process says, or None where it has ended."""
    try:
        outcome: Outcome = worker.answers.recv()
    except EOFError:
        return None
    worker.heard = time.monotonic()
    worker.left.remove(outcome.seed)
    return outcome


def _start(seeds: list[int], scratch: Path) -> _Worker:
    context = multiprocessing.get_context("spawn")
    answers, questions = context.Pipe(duplex=False)
    folder = Path(tempfile.mkdtemp(dir=scratch))
    process = context.Process(target=_work, args=(seeds, folder, questions), daemon=True)
    process.start()
    questions.close()
    # It imports torch first, which takes seconds.
    return _Worker(process, answers, list(seeds), time.monotonic() + 60)


def _work(seeds: list[int], scratch: Path, answers: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; whoever started this one ends it
    import torch

    torch.set_num_threads(1)
    try_input(seeds[0], scratch, 600.0)  # what is imported or compiled once is no input's own time
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + _LIMIT_BYTES, pages + _LIMIT_BYTES))
    for seed in seeds:
        answers.send(try_input(seed, scratch, _LIMIT_S))


def _list_figures(counts: Counts, *, seconds: float) -> dict[str, Any]:
    return {
        "bench": "fuzz",
        "passed": not counts.strange and not counts.left,
        "inputs": counts.inputs,
        "successes": counts.successes,
        "clean_errors": counts.clean_errors,
        "strange_errors": len(counts.strange),
        "leftovers": len(counts.left),
        "peak_mb": counts.peak_mb,
        "largest": counts.largest,
        "slowest_s": round(counts.slowest_s, 2),
        "slowest": counts.slowest,
        "conversions": counts.conversions,
        "seconds": round(seconds),
        "by_kind": dict(counts.by_kind.most_common()),
        "by_code": dict(counts.by_code.most_common()),
        "strange": counts.strange[:_SHOWN],
        "left": counts.left[:_SHOWN],
        "machine": describe_machine(),
    }
