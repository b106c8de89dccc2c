"""Long steps tell how far they have come: rarely, in numbers people read, and short ones not at all."""

from __future__ import annotations

import logging
import re
import shutil
import time
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline_builders import Desk

import tasks.conversion
import tasks.job
import tasks.progress
from tasks.lora.convert import convert_adapter
from tasks.progress import Counted, ProgressLines


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(caplog: pytest.LogCaptureFixture, unit: Counted, calls: list[tuple[float, int, int]]) -> list[str]:
    """The lines of a piece of work, from (seconds since it began, done, in all)."""
    clock = Clock()
    progress = ProgressLines(logging.getLogger("progress"), "alder/run-1: converting", unit, clock=clock)
    with caplog.at_level(logging.INFO):
        for seconds, done, total in calls:
            clock.now = 100.0 + seconds
            progress(done, total)
    return caplog.messages


def test_a_long_step_has_a_line_each_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    calls = [(n / 10, n * 10_000_000, 4_000_000_000) for n in range(1, 401)]
    assert lines(caplog, Counted.BYTES, calls) == [
        "alder/run-1: converting: 1,000 of 4,000 MB (25%), about 30 s left",
        "alder/run-1: converting: 2,000 of 4,000 MB (50%), about 20 s left",
        "alder/run-1: converting: 3,000 of 4,000 MB (75%), about 10 s left",
    ]


def test_a_short_one_has_none(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, Counted.PARTS, [(n, n, 9) for n in range(1, 10)]) == []
    assert lines(caplog, Counted.PARTS, [(50, 9, 9), (90, 0, 0)]) == [], "what is over has no more to tell"


def test_counts_minutes_and_hours(caplog: pytest.LogCaptureFixture) -> None:
    calls = [(20.0, 256, 2_560), (60.0, 260, 100_000)]
    assert lines(caplog, Counted.PROMPTS, calls) == [
        "alder/run-1: converting: 256 of 2,560 prompts (10%), about 3 min left",
        "alder/run-1: converting: 260 of 100,000 prompts (0%), about 6.4 h left",
    ]


def test_a_count_that_begins_anew_is_reckoned_anew(caplog: pytest.LogCaptureFixture) -> None:
    """A check counts the parts of one comparison after another with the same object."""
    calls = [(9.0, 90, 100), (30.0, 1, 100), (41.0, 2, 100)]
    assert lines(caplog, Counted.PARTS, calls) == [
        "alder/run-1: converting: 1 of 100 parts (1%)",
        "alder/run-1: converting: 2 of 100 parts (2%), about 9 min left",
    ]


def test_every_long_step_of_a_run_tells(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks.progress, "EVERY_S", -1.0)
    caplog.set_level(logging.INFO)
    desk.heldout("alder", units=300, length=40)
    desk.submit("alder", desk.adapter("alder"))
    assert desk.run("alder").name == "Ready"

    def told() -> set[str]:
        return {line.partition(": ")[2].partition(":")[0] for line in caplog.messages if "%)" in line}

    assert {"alder/run-1"} == {line.partition(":")[0] for line in caplog.messages if "%)" in line}
    assert {"downloading", "converting", "uploading", "checking"} <= told()
    assert told() & {"scoring own", "scoring base"}
    assert desk.ready("birch").name == "Ready"
    desk.sync()
    caplog.clear()
    shutil.rmtree(desk.settings.work_path)
    desk.run("alder", rescore=True)
    assert {"downloading", "converting"} <= told(), "what is not on this machine is converted again"
    assert any(one.startswith("downloading birch@") for one in told()), "and its opponent is fetched"


def test_every_step_tells_how_long_its_work_took(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In fractions of a second, which the ledger does not keep, and once it is on the record."""
    caplog.set_level(logging.INFO)
    passed = {"slow": 0.0}

    def slowly(*given: Any, **more: Any) -> Any:
        passed["slow"] += 2.25  # own and control: twice
        return convert_adapter(*given, **more)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed["slow"])
    monkeypatch.setattr(tasks.job, "time", clock)
    monkeypatch.setattr(tasks.conversion, "convert_adapter", slowly)
    assert desk.ready("alder").name == "Ready"
    told = re.compile(r"alder/run-1: (\w+) (\w+) after (\d+\.\d{3}) s")
    took = {
        found[1]: (found[2], float(found[3])) for line in caplog.messages if (found := told.fullmatch(line))
    }
    kinds = ("inspected", "converted", "checked", "staged", "opponents", "scored", "verdict")
    assert [*took] == [*kinds]
    assert {kind for kind, (outcome, _) in took.items() if outcome != "done"} == {"verdict"}
    assert took["verdict"][0] == "ready"
    assert took["converted"][1] >= 4.5 > took["inspected"][1]
    caplog.clear()
    desk.run("alder")
    assert not any(map(told.fullmatch, caplog.messages)), "nothing was done"
