"""A thousand adapters through the whole pipeline but for the engine: is the last hundred as cheap as the first?

The services, the scripted engine and the watching are those of the backlog (bench/backlog.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.backlog import PARTS, Look, Played, middle, play_alone
from bench.machine import describe_machine

HELP = "a thousand adapters: does one take longer, or more memory, when there are a thousand?"
RESULT = Path(__file__).resolve().parent / "results" / "scale.json"
_STRETCH = 100
_WARM = 50
_LEAST = 2 * _STRETCH + _WARM
_SLACK = 1.25
_LOOKS = 5  # whose median is the memory at one moment: two runs more or less are a quarter of a gibibyte


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures."""
    parser = argparse.ArgumentParser(prog="./run bench scale [--json]", description=HELP)
    parser.add_argument(
        "--adapters", type=int, default=1000, help=f"how many; fewer than {_LEAST} are not compared"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at once")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    figures = compare(play_alone(options.adapters, options.workers))
    figures |= {"workers": options.workers, "machine": describe_machine()}
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    out = Console(highlight=False)
    title = f"{figures['ready']} of {figures['adapters']} ready in {figures['wall_s']} s"
    table = Table("", "first hundred", "last hundred", title=title)
    for name, about in (("per_adapter_s", "seconds an adapter"), ("rss_mb", "MiB, all parts")):
        first, last = ("first_100", "last_100") if name == "per_adapter_s" else ("first", "last")
        table.add_row(about, str(figures[f"{name}_{first}"]), str(figures[f"{name}_{last}"]))
    for part, memory in figures["memory_mib"].items():
        table.add_row(f"MiB, {part}", str(memory["first"]), str(memory["last"]))
    out.print(table)
    out.print(f"states {figures['states']}, steady {figures['steady']}, flat {figures['flat']}")


def compare(played: Played) -> dict[str, Any]:
    """The figures of a backlog that is through: seconds an adapter and memory, early and at the end.

    An adapter is through when its first run that found it ready has ended. Memory is that of all watched parts, each
    shared page counted once, when the hundredth is through and when the last one is.
    """
    firsts: dict[str, float] = {}
    for run in played.ended_ready:
        if run.ended is not None:
            firsts[run.author] = min(run.ended, firsts.get(run.author, run.ended))
    ends = sorted(firsts.values())
    # The first fifty are not in the first hundred: they find every cache cold and are sent at the same time, so the
    # others beside them would seem quick, and a pace that falls off would pass.
    judged = len(ends) >= _LEAST
    stretch, warm = (_STRETCH, _WARM) if judged else (len(ends) // 3, len(ends) // 6)
    early, late = ends[warm - 1 : warm + stretch] if warm else [], ends[-stretch - 1 :] if warm else []
    first_s, last_s = _each(early), _each(late)
    memory = {
        part: {
            "first": _memory_at(played, ends[:stretch], part),
            "last": _memory_at(played, ends, part),
        }
        for part in PARTS
    }
    first_mb, last_mb = (round(sum(one[when] for one in memory.values()), 1) for when in ("first", "last"))
    steady = not judged or last_s <= _SLACK * first_s
    flat = not judged or last_mb <= _SLACK * first_mb
    return {
        **played.outcome(ends),
        "stretch": stretch,
        "per_adapter_s_first_100": first_s,
        "per_adapter_s_last_100": last_s,
        "rss_mb_first": first_mb,
        "rss_mb_last": last_mb,
        "memory_mib": memory,
        "steady": steady,
        "flat": flat,
        "passed": played.all_ready and steady and flat,
    }


def _each(ends: Sequence[float]) -> float:
    return round((ends[-1] - ends[0]) / (len(ends) - 1), 3) if len(ends) > 1 else 0.0


def _memory_at(played: Played, ends: Sequence[float], part: str) -> float:
    """MiB of a part when the last of these ended: the median of the last looks until then, or the first one."""
    if not ends or not played.looks:
        return 0.0
    until = [look for look in played.looks if look.seconds <= ends[-1] - played.begun]
    looks: Sequence[Look] = until[-_LOOKS:] or played.looks[:1]
    return middle([look.memory_mib[part] for look in looks])
