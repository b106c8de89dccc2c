"""Adapters and bases of a chosen size for the services of bench/tiny_world.py, and how long their runs' steps took.

The engine answers from a script, and may hold each answer, as one does that computes. Every adapter has a base of its
own, so that no run meets opponents whom another has not, and numbers of its own by its lora_alpha.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from bench.full_size import BASE_FIELDS, write_full_size
from bench.prefect_runs import list_runs, read_log, read_run, read_taken
from bench.tiny_world import World, kept_with_tests
from flows.events import announce_upload
from storage.heldout import register_heldout
from storage.uploads import Upload
from tasks.submission import submit_adapter

READY = "Ready"
VERDICT = "verdict"
_UNITS = 24
_POLL_S = 0.1
_LOGS_WITHIN_S = 60.0
# As tasks/job.py tells of a step that is on the record.
_TOOK = re.compile(r": (?P<step>\w+) \w+ after (?P<seconds>[\d.]+) s$")
_BEGAN = re.compile(r": \w+ …$")


@dataclass(frozen=True, slots=True)
class Ended:
    """A run of `onboard` that has ended: when it did what (times), and the seconds of each of its steps by name."""

    taken: float
    started: float
    ended: float
    first_step: float
    steps: dict[str, float]
    verdict: float

    @property
    def wall_s(self) -> float:
        """Seconds from its start to its end."""
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class Sized:
    """Services with an engine from a script, and an adapter of the chosen size to be submitted by many."""

    world: World
    source: Path
    sizes: dict[str, Any]
    engine: Any
    layers: int
    experts: int

    def submit(self, number: int) -> Upload:
        """Put an author's text and adapter into the store, and register its base; no event is sent."""
        author, base = f"author-{number}", base_name(number)
        kept_with_tests("pipeline_builders").add_tiny_base(
            self.world.store, base, url=self.engine.url, **self.sizes
        )
        file = self.source.parent / f"{author}.jsonl"
        file.write_text("".join(_unit(author, unit) for unit in range(_UNITS)), encoding="utf-8")
        register_heldout(self.world.store, author, "main", file)
        folder = self.source.parent / author
        folder.mkdir()
        weights = "adapter_model.safetensors"
        (folder / weights).hardlink_to(self.source / weights)
        config = json.loads((self.source / "adapter_config.json").read_bytes())
        alpha = {"lora_alpha": config["lora_alpha"] + number}
        (folder / "adapter_config.json").write_text(json.dumps(config | alpha), encoding="utf-8")
        return submit_adapter(
            self.world.store,
            folder,
            author=author,
            base=base,
            run="run-1",
            trainer=None,
            reference=None,
            heldout=(),
            progress=lambda done, total: None,
        )

    def announce(self, upload: Upload) -> None:
        """Send the event that starts its run."""
        announce_upload(self.world.settings, upload)

    def forget(self, number: int) -> None:
        """Remove what an author's run has left on the disk of this machine; the store keeps its part."""
        shutil.rmtree(self.world.settings.work_path / "served" / base_name(number), ignore_errors=True)


@contextmanager
def sized(world: World, layers: int, experts: int, numbers: Sequence[int]) -> Iterator[Sized]:
    """Write the adapter, and start an engine that serves a base for each of these numbers."""
    source = world.home.parent / "source"
    write_full_size(source, layers, experts)
    changes = BASE_FIELDS | {"num_hidden_layers": layers, "num_local_experts": experts}
    del changes["num_experts"]
    with _held_engine(tuple(map(base_name, numbers))) as engine:
        yield Sized(world, source, changes, engine, layers, experts)


def base_name(number: int) -> str:
    """The base of the adapter with this number."""
    return f"base-{number}"


def wait_for_ready(authors: Sequence[str], *, within_s: float) -> list[Ended]:
    """The runs of these authors' adapters, in their order, once all have ended.

    Raises:
        TimeoutError: some have not ended in time.
        RuntimeError: one ended otherwise than ready.
    """
    deadline = time.monotonic() + within_s
    while True:
        runs = {run.parameters.get("author"): run for run in list_runs(newest=50)}
        over = [runs[author] for author in authors if author in runs and _is_over(runs[author])]
        if len(over) == len(authors):
            return [_describe(run) for run in over]
        if time.monotonic() > deadline:
            message = f"of {', '.join(authors)} only {len(over)} ended within {within_s:.0f} s"
            raise TimeoutError(message)
        time.sleep(_POLL_S)


def _is_over(run: Any) -> bool:
    return bool(run.state is not None and run.state.is_final())


def _describe(run: Any) -> Ended:
    if run.state_name != READY:
        message = f"{run.name} ended as {run.state_name}: {run.state.message if run.state else ''}"
        raise RuntimeError(message)
    run = read_run(run.id)
    lines = _wait_for_log(run.id)
    steps: dict[str, float] = {}
    ends: dict[str, datetime] = {}
    for moment, line in lines:
        if (told := _TOOK.search(line)) is not None:
            step = told["step"]
            steps[step] = steps.get(step, 0.0) + float(told["seconds"])
            ends[step] = moment
    began = min(moment for moment, line in lines if _BEGAN.search(line))
    assert run.start_time is not None and run.end_time is not None
    return Ended(
        taken=read_taken(run.id).timestamp(),
        started=run.start_time.timestamp(),
        ended=run.end_time.timestamp(),
        first_step=began.timestamp(),
        steps=steps,
        verdict=ends[VERDICT].timestamp(),
    )


def _wait_for_log(run: UUID) -> list[tuple[datetime, str]]:
    """The run's log, once the verdict is in it: the last lines come a moment after the run's end.

    Raises:
        TimeoutError: they do not come.
    """
    deadline = time.monotonic() + _LOGS_WITHIN_S
    while time.monotonic() < deadline:
        lines = read_log(run)
        if any(told["step"] == VERDICT for _, line in lines if (told := _TOOK.search(line))):
            return lines
        time.sleep(_POLL_S)
    message = f"the log of run {run} lacks its verdict"
    raise TimeoutError(message)


@contextmanager
def _held_engine(bases: tuple[str, ...]) -> Iterator[Any]:
    """The scripted engine of the tests, which waits `hold_s` seconds before each answer to a request for scores."""
    builders = kept_with_tests("pipeline_builders")
    scripted = kept_with_tests("scripted_server").ScriptedServer

    class HeldServer(scripted):  # type: ignore[misc, valid-type]
        hold_s = 0.0
        asked = 0

        def answer(self, path: str, body: dict[str, Any]) -> Any:
            if path == "/v1/completions":
                self.asked += 1
                time.sleep(self.hold_s)
            return super().answer(path, body)

    def score(name: str, author: str) -> float:
        if name.startswith(f"{author}@"):
            return float(builders.OWN_BPB)
        return float(builders.CONTROL_BPB if name.startswith(f"{author}~control@") else builders.OTHER_BPB)

    with HeldServer(bases, builders.BASE_BPB, score, {}) as engine:
        yield engine


def _unit(author: str, number: int) -> str:
    text = f"{author} wrote text {number}. " + chr(97 + number % 26) * 330
    return json.dumps({"id": f"u{number}", "text": text}) + "\n"
