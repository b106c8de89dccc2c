"""Is the packing of trained adapters told right from their tensors?

Trains tiny adapters for real, under both packings and both orientations, and asks at every checkpoint which packing
each parameter has. Answers are counted by parameter, all its layers pooled.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.forms import REFACTORED, Form, list_forms, repack
from bench.machine import describe_machine
from bench.runs import list_quick_runs, list_runs
from bench.training import Checkpoint, Run, Start, StoredPair, train_run
from tasks.lora.correlation import PooledScore, TensorScore, pool_scores, score_tensor
from tasks.lora.layouts import Packing

RESULT = Path(__file__).resolve().parent / "results" / "packing.json"
# Abstentions count against the statistic only where lora_B has so many columns, and started at zero.
_LEAST_COLUMNS = 32


@dataclass(slots=True)
class Tally:
    """How many answers were right, wrong, and withheld."""

    right: int = 0
    wrong: int = 0
    abstained: int = 0

    def add(self, says: Packing | None, truth: Packing) -> None:
        """Count one answer."""
        self.right += says is truth
        self.wrong += says is truth.other
        self.abstained += says is None


@dataclass(slots=True)
class Counts:
    """What is counted of all runs.

    goal: where lora_B starts at zero and has columns enough. tensors: what single tensors name on their own. planted:
    adapters with one layer in the other packing, right if that layer alone is named; planted_goal: those of the goal.
    mistakes: wrong answers in words.
    """

    runs: int = 0
    checkpoints: int = 0
    all: Tally = field(default_factory=Tally)
    goal: Tally = field(default_factory=Tally)
    tensors: Tally = field(default_factory=Tally)
    planted: Tally = field(default_factory=Tally)
    planted_goal: Tally = field(default_factory=Tally)
    by_tuning: dict[str, Tally] = field(default_factory=dict)
    by_setting: dict[str, Tally] = field(default_factory=dict)
    by_file: dict[str, Tally] = field(default_factory=dict)
    by_step: dict[str, Tally] = field(default_factory=dict)
    by_columns: dict[str, Tally] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures; they did not pass if any answer was wrong."""
    options = _read_options(arguments)
    torch.set_num_threads(1)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    started = time.monotonic()
    counts = Counts()
    runs = list_quick_runs() if options.quick else list_runs()
    for number, planned in enumerate(runs, start=1):
        _judge_run(planned, counts)
        console.print(
            f"[{time.monotonic() - started:4.0f} s] {number}/{len(runs)} {planned.setting}: "
            f"E {planned.sizes.experts}, r {planned.rank}, {planned.packing}, {planned.orientation}; "
            f"so far {_say(asdict(counts.all))}"
        )
    figures = _list_figures(counts, quick=options.quick, seconds=time.monotonic() - started)
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as tables."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{figures['runs']} runs, {figures['checkpoints']} checkpoints: {_say(figures)}")
    console.print(f"lora_B starts at zero, E·r at least {_LEAST_COLUMNS}: {_say(figures['goal'])}")
    console.print(f"what single tensors name: {_say(figures['tensors'])}")
    console.print(f"one layer in the other packing: {_say(figures['planted'])}")
    console.print(f"  of these, where it starts at zero and is as large: {_say(figures['planted_goal'])}")
    for key in ("by_tuning", "by_setting", "by_file", "by_step", "by_columns"):
        table = Table(key.replace("_", " "), "right", "wrong", "abstained")
        for name, tally in figures[key].items():
            table.add_row(name, *(str(tally[answer]) for answer in ("right", "wrong", "abstained")))
        console.print(table)
    for line in figures["mistakes"]:
        console.print(f"wrong: {line}")


def _read_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run bench packing [--json]", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few of the runs, under a minute")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    return parser.parse_args(arguments)


def _judge_run(planned: Run, counts: Counts) -> None:
    counts.runs += 1
    for checkpoint in train_run(planned):
        counts.checkpoints += 1
        for form in list_forms(planned, checkpoint):
            for pairs in _by_parameter(form.pairs):
                _judge_parameter(planned, checkpoint.step, form, pairs, counts)
        for pairs in _by_parameter(checkpoint.pairs):
            _judge_planted(planned, checkpoint, pairs, counts)


def _by_parameter(pairs: tuple[StoredPair, ...]) -> list[list[StoredPair]]:
    names = dict.fromkeys(pair.parameter for pair in pairs)
    return [[pair for pair in pairs if pair.parameter == name] for name in names]


def _judge_parameter(planned: Run, step: int, form: Form, pairs: list[StoredPair], counts: Counts) -> None:
    scores = [_score(planned, pair) for pair in pairs]
    pooled = pool_scores(scores)
    for tally in _list_tallies(planned, step, form, pairs, counts):
        tally.add(pooled.says, form.packing)
    for score in scores:
        counts.tensors.add(score.says, form.packing)
    if pooled.says is form.packing.other:
        counts.mistakes.append(_explain(planned, step, form, pooled))


def _list_tallies(
    planned: Run, step: int, form: Form, pairs: list[StoredPair], counts: Counts
) -> list[Tally]:
    """Everywhere an answer about such a parameter is counted."""
    tallies = [
        counts.all,
        counts.by_tuning.setdefault("held back" if planned.held_back else "tuned", Tally()),
        counts.by_setting.setdefault(planned.setting, Tally()),
        counts.by_file.setdefault(form.name, Tally()),
    ]
    if form.name == REFACTORED:
        return tallies
    columns = pairs[0].b.shape[1]
    sizes = f"E·r {columns}: E {planned.sizes.experts}, r {columns // planned.sizes.experts}"
    if planned.start is Start.RANDOM:
        sizes += ", random lora_B"
    tallies.append(counts.by_step.setdefault(f"step {step}", Tally()))
    tallies.append(counts.by_columns.setdefault(sizes, Tally()))
    if _is_of_goal(planned, pairs):
        tallies.append(counts.goal)
    return tallies


def _is_of_goal(planned: Run, pairs: list[StoredPair]) -> bool:
    return planned.start is not Start.RANDOM and pairs[0].b.shape[1] >= _LEAST_COLUMNS


def _judge_planted(planned: Run, checkpoint: Checkpoint, pairs: list[StoredPair], counts: Counts) -> None:
    """One layer is written in the other packing: no other may be named, nor the parameter called what it is."""
    place = checkpoint.step % len(pairs)
    changed = [
        *pairs[:place],
        repack(pairs[place], planned.sizes.experts, planned.packing),
        *pairs[place + 1 :],
    ]
    found = pool_scores([_score(planned, pair) for pair in changed])
    named = {layer for layer, says in found.by_layer if says is planned.packing.other}
    wrong = bool(named - {pairs[place].layer}) or found.says is planned.packing.other
    for tally in [counts.planted, *([counts.planted_goal] if _is_of_goal(planned, pairs) else [])]:
        tally.wrong += wrong
        tally.right += bool(named) and not wrong
        tally.abstained += not named and not wrong


def _score(planned: Run, pair: StoredPair) -> TensorScore:
    return score_tensor(
        pair.a,
        pair.b,
        layer=pair.layer,
        parameter=pair.parameter,
        experts=planned.sizes.experts,
        rank=pair.a.shape[0] // planned.sizes.experts,
    )


def _explain(planned: Run, step: int, form: Form, pooled: PooledScore) -> str:
    return (
        f"{planned.setting}, E {planned.sizes.experts}, r {planned.rank}, seed {planned.seed}, step {step}, "
        f"{form.name}, {form.packing}, {planned.orientation}: {pooled.detail}"
    )


def _list_figures(counts: Counts, *, quick: bool, seconds: float) -> dict[str, Any]:
    figures = asdict(counts)
    answers = figures.pop("all")
    figures["by_columns"] = dict(sorted(figures["by_columns"].items(), key=lambda item: _columns(item[0])))
    return {
        "bench": "packing",
        "passed": not answers["wrong"] and not figures["planted"]["wrong"],
        "quick": quick,
        "runs": figures.pop("runs"),
        "checkpoints": figures.pop("checkpoints"),
        **answers,
        **figures,
        "seconds": round(seconds),
        "machine": describe_machine(),
    }


def _columns(sizes: str) -> int:
    return int(sizes.removeprefix("E·r ").partition(":")[0])


def _say(tally: dict[str, Any]) -> str:
    return f"{tally['right']} right, {tally['wrong']} wrong, {tally['abstained']} abstained"
