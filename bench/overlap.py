"""Two adapters at once beside two one after the other: what does a worker's second slot bring?

The engine holds its answers until scoring takes about as long as converting. Scores never overlap each other, as they
are taken under the engine's lease; all else may, on the same cores. One after the other means a worker with one slot
(limit 1), overlapped one with two (limit 2), each the long-lived runner; no sweep and no sync runs meanwhile. From the
start of the first run to the end of the last. `ratio_at_best` is what two slots could bring to a pair, were nothing
slower beside something else. A pair has nothing to do beside its first preparation and its last score; a stream of more
adapters than slots tells what a roster gains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.full_size import EXPERTS, LAYERS
from bench.machine import describe_machine
from bench.prefect_runs import pause_sweeps, wait_until_idle
from bench.sized_world import Ended, Sized, sized, wait_for_ready
from bench.tiny_world import living

HELP = "two adapters overlapped beside one after the other, where scoring takes as long as converting"
RESULT = Path(__file__).resolve().parent / "results" / "overlap.json"
GOAL = 1.4
_AT_ONCE = 2  # requests for scores that a run has out, see tasks/bpb/engine.py
_PATIENCE_S = 1_200.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What ran with one number of slots: pairs of adapters, and a stream of several sent at once."""

    pairs: Sequence[Sequence[Ended]]
    stream: Sequence[Ended]


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures."""
    parser = argparse.ArgumentParser(
        prog="./run bench overlap [--json]",
        description=f"{HELP}. It starts a store, a Prefect server and a worker of its own, first with one slot, then "
        "with two, sends --turns pairs of adapters and then --stream at once through each, and ends them all. At the "
        "published size it writes some 5 GB for each adapter.",
        epilog="A quick look: ./run bench overlap --layers 4 --experts 16 --turns 1 --stream 3",
    )
    parser.add_argument("--turns", type=int, default=3, help="pairs of adapters, with each number of slots")
    parser.add_argument("--stream", type=int, default=6, help="adapters sent at once after the pairs")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the adapter's base")
    parser.add_argument("--experts", type=int, default=EXPERTS, help="of each layer")
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    size = (options.layers, options.experts)
    hold_s, one_by_one = _measure(1, None, options.turns, options.stream, *size)
    _, overlapped = _measure(2, hold_s, options.turns, options.stream, *size)
    figures = compare(one_by_one, overlapped)
    figures |= {"layers": options.layers, "experts": options.experts, "machine": describe_machine()}
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    title = f"two adapters of {figures['layers']} layers, {figures['experts']} experts; medians"
    table = Table("", "one after the other", "overlapped", title=title)
    rows = (
        ("wall_s", "both, seconds"),
        ("convert_s", "converting"),
        ("score_s", "scoring"),
        ("stream_s", f"a stream of {figures['stream_adapters']}, seconds each"),
    )
    for name, about in rows:
        table.add_row(about, *(str(one[name]) for one in figures["slots"].values()))
    out = Console(highlight=False)
    out.print(table)
    out.print(f"a pair {figures['ratio']} times as fast; at best {figures['ratio_at_best']}, goal {GOAL}")
    out.print(f"a stream {figures['stream_ratio']} times as fast")


def compare(one_by_one: Measured, overlapped: Measured) -> dict[str, Any]:
    """The figures of what ran with one slot and with two."""
    slots = {"1": _describe(one_by_one), "2": _describe(overlapped)}
    before, after = slots["1"]["wall_s"], slots["2"]["wall_s"]
    alone = [run for pair in one_by_one.pairs for run in pair]
    wall, score = _median([run.wall_s for run in alone]), _median([run.steps["scored"] for run in alone])
    return {
        "one_after_the_other_s": before,
        "overlapped_s": after,
        "ratio": round(before / after, 3),
        # Both runs begin together, and one score waits for the other.
        "ratio_at_best": round(before / (wall + score), 3),
        "stream_adapters": len(one_by_one.stream),
        "stream_one_slot_s": slots["1"]["stream_s"],
        "stream_two_slots_s": slots["2"]["stream_s"],
        "stream_ratio": round(slots["1"]["stream_s"] / slots["2"]["stream_s"], 3),
        "convert_s": slots["1"]["convert_s"],
        "score_s": slots["1"]["score_s"],
        "slots": slots,
        "passed": before / after >= GOAL,
    }


def _measure(
    slots: int, hold_s: float | None, turns: int, stream: int, layers: int, experts: int
) -> tuple[float, Measured]:
    """How long the engine held an answer, and what ran; the first run of all decides about the former if None."""

    def say(line: str) -> None:
        sys.stderr.write(f"{slots} at once: {line}\n")

    # Syncs, which take a slot too, come when all is over.
    variables = {"ROSTER_SYNC_WINDOW_SECONDS": "3600"}
    numbers = range(1 + 2 * turns + stream)
    with living(warm=True, say=say, variables=variables, workers=slots) as world:
        pause_sweeps()
        with sized(world, layers, experts, numbers) as place:
            [first] = _send(place, [0])
            if hold_s is None:
                hold_s = first.steps["converted"] * _AT_ONCE / place.engine.asked
            place.engine.hold_s = hold_s
            pairs = []
            for turn in range(turns):
                pairs.append(_send(place, [1 + 2 * turn, 2 + 2 * turn]))
                say(f"pair {turn + 1}: {_wall(pairs[-1]):.2f} s")
            streamed = _send(place, numbers[1 + 2 * turns :])
            say(f"a stream of {stream}: {_wall(streamed):.2f} s")
    return hold_s, Measured(pairs, streamed)


def _send(place: Sized, numbers: Sequence[int]) -> list[Ended]:
    uploads = [place.submit(number) for number in numbers]
    wait_until_idle(within_s=_PATIENCE_S)
    for upload in uploads:
        place.announce(upload)
    ended = wait_for_ready([f"author-{number}" for number in numbers], within_s=_PATIENCE_S)
    for number in numbers:
        place.forget(number)
    return ended


def _wall(runs: Sequence[Ended]) -> float:
    return max(run.ended for run in runs) - min(run.started for run in runs)


def _describe(measured: Measured) -> dict[str, Any]:
    runs = [run for pair in measured.pairs for run in pair]
    return {
        "wall_s": _median(list(map(_wall, measured.pairs))),
        "all": [round(_wall(pair), 3) for pair in measured.pairs],
        "stream_s": round(_wall(measured.stream) / len(measured.stream), 3),
        "convert_s": _median([run.steps["converted"] for run in runs]),
        "score_s": _median([run.steps["scored"] for run in runs]),
        "steps": {step: _median([run.steps[step] for run in runs]) for step in runs[0].steps},
    }


def _median(seconds: list[float]) -> float:
    return round(statistics.median(seconds), 3)
