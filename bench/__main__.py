"""`./run bench NAME`: measurements that take minutes, each one module of this folder.

A bench has run(arguments), which returns its figures (the JSON object) and writes progress to stderr, and
show(figures). Figures that say "passed": false make the exit code 1.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from types import FrameType

# What each measures.
BENCHES = {
    "packing": "is the packing of trained adapters told right from their tensors?",
    "convert": "a conversion of the published size, beside a plain copy and a script written by hand",
    "check": "a check of the published size, quick and full; does the quick one miss a damage?",
    "size": "inspection, conversion and quick check against the adapter's size, 2 to 96 layers, 8 to 512 experts",
    "transfer": "up- and download of a large file, beside one plain boto3 stream each way and cp",
    "fuzz": "does everything that is wrong with an adapter end in an error of our own?",
    "score": "tokens a second of scoring, beside a bare loop of requests and vLLM in one process",
    "load": "an adapter from its folder into a slot: per expert, stacked, slots, and the bare copy",
    "serving": "speed, memory, first load, swap and hit of a server at 0, 1, 2, 4, 8 and 16 adapter slots",
    "trigger": "how soon a run is at work, after an event and after a sweep, beside Prefect's smallest flow",
    "overhead": "what the pipeline itself costs an adapter, by parts, beside Prefect's smallest flow",
    "overlap": "two adapters at once beside one after the other",
    "backlog": "hundreds of adapters at once: do pace and memory stay as they are, is the server ever too busy?",
    "scale": "a thousand adapters through the pipeline: does the last hundred cost what the first did?",
    "catalog": "the catalog at ten thousand authors: made anew, listed, brought up to date, asked, reported",
    "chaos": "does every adapter end as it should, whatever is killed, cut off or filled up meanwhile?",
    "all": "all of these, each saved, and docs/performance.md made of them",
    "mutations": "is every damage to a conversion, and every wrong decision about an adapter, named?",
}

HELP = "\n".join(
    [
        "usage: ./run bench NAME [--json] [options]",
        "",
        *(f"  {name:<10}{about}" for name, about in BENCHES.items()),
        "",
        "--json prints one JSON object as the last line of stdout; ./run bench NAME --help lists the options.",
    ]
)


def main(arguments: list[str]) -> int:
    """Run one bench with the remaining arguments.

    Returns 0, 1 where its figures did not pass, 2 for a name that does not exist, 130 where it was interrupted.
    """
    name, *rest = arguments or ["--help"]
    if name in {"-h", "--help", "help"}:
        print(HELP)
        return 0
    if name not in BENCHES:
        print(f"./run bench has no {name!r}\n\n{HELP}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        bench = importlib.import_module(f"bench.{name}")
        figures = bench.run([argument for argument in rest if argument != "--json"])
    except KeyboardInterrupt:
        print("stopped; nothing is left behind", file=sys.stderr)
        return 130
    if "--json" in rest:
        print(json.dumps(figures))
    else:
        bench.show(figures)
    return 0 if figures.get("passed", True) else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
