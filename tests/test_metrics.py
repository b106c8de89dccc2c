"""`roster metrics`: what Prometheus reads, and the count of services that had to be started again."""

from __future__ import annotations

import stat
import threading
from dataclasses import replace
from pathlib import Path

import catalog_builders
import ledger_builders
import pytest
from cli_builders import Roster
from prometheus_client.parser import text_string_to_metric_families
from store_builders import memory_store
from supervised_builders import child, shell

from flows.embedded_restarts import RESTARTS_FILE, count_restart, read_restarts
from flows.services import StateUnreadableError
from flows.supervisor import ChildFailedError, Supervisor
from roster.rows import OutcomeRow, StepTimeRow
from tasks.inbox import UploadState
from tasks.metrics import (
    CatalogFigures,
    EngineFigures,
    Figures,
    PrefectFigures,
    StoreFigures,
    format_metrics,
)

FIGURES = Figures(
    store=StoreFigures(
        uploads={UploadState.NEW: 3, UploadState.STOPPED: 2},
        oldest_s={UploadState.NEW: 905.5, UploadState.STOPPED: 60.0},
        engines=(EngineFigures("tiny", True, False), EngineFigures("big", False, True)),
        roster_version=17,
    ),
    catalog=CatalogFigures(
        outcomes=(OutcomeRow("tiny", "quarantined", "non_finite", 4), OutcomeRow("tiny", "ready", "", 9)),
        step_times=(StepTimeRow("converted", "done", 13, 65), StepTimeRow("scored", "stopped", 2, 7)),
        roster_size={"tiny": 8},
        sync_age_s=12.25,
    ),
    prefect=PrefectFigures(workers_alive=2, runs={"Running": 1, "AwaitingRetry": 5}, queued={"default": 6}),
    restarts={"engine-tiny": 3, "worker": 1},
)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str) -> Samples:
    """The samples by name and labels, as Prometheus's own parser reads them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_every_figure_is_told() -> None:
    samples = read(format_metrics(FIGURES))
    assert of(samples, "roster_uploads", state="new") == 3
    assert of(samples, "roster_uploads", state="died") == 0
    assert of(samples, "roster_oldest_unprocessed_upload_seconds", state="new") == 905.5
    assert of(samples, "roster_oldest_unprocessed_upload_seconds", state="claimed") == 0
    assert [of(samples, "roster_engine_up", base=base) for base in ("tiny", "big")] == [1, 0]
    assert [of(samples, "roster_engine_qualified", base=base) for base in ("tiny", "big")] == [0, 1]
    assert of(samples, "roster_version") == 17
    assert of(samples, "roster_adapters", base="tiny", outcome="quarantined", code="non_finite") == 4
    assert of(samples, "roster_adapters", base="tiny", outcome="ready", code="") == 9
    assert of(samples, "roster_size", base="tiny") == 8
    assert of(samples, "roster_sync_age_seconds") == 12.25
    assert of(samples, "roster_step_seconds_count", kind="converted", outcome="done") == 13
    assert of(samples, "roster_step_seconds_sum", kind="converted", outcome="done") == 65
    assert of(samples, "roster_workers_alive") == 2
    assert of(samples, "roster_runs", state="AwaitingRetry") == 5
    assert of(samples, "roster_runs_queued", queue="default") == 6
    assert of(samples, "roster_service_restarts_total", service="engine-tiny") == 3
    assert {of(samples, "roster_source_up", source=part) for part in ("store", "catalog", "prefect")} == {1}


def test_a_part_that_is_down_has_no_figures_and_says_so() -> None:
    """A figure that is left at its last value, or at 0, would look like a quiet night."""
    samples = read(format_metrics(replace(FIGURES, store=None, prefect=None)))
    ups = [of(samples, "roster_source_up", source=part) for part in ("store", "catalog", "prefect")]
    assert ups == [0, 1, 0]
    names = {name for name, _ in samples}
    assert not names & {"roster_uploads", "roster_workers_alive", "roster_version", "roster_engine_up"}
    assert "roster_size" in names


def test_names_from_strangers_do_not_break_the_text() -> None:
    odd = 'a"b\\c\nroster_workers_alive 99'
    catalog = CatalogFigures((OutcomeRow(odd, "ready", "", 1),), (), {odd: 1}, 0.0)
    samples = read(format_metrics(replace(FIGURES, catalog=catalog)))
    assert of(samples, "roster_size", base=odd) == 1
    assert of(samples, "roster_workers_alive") == 2


@pytest.fixture
def roster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Roster:
    monkeypatch.setenv("ROSTER_HOME", str(tmp_path / "home"))
    return Roster(capsys, tmp_path / "home")


def fill(home: Path) -> None:
    home.mkdir()
    refused = [ledger_builders.inspected(), ledger_builders.refused("checked", "non_finite", minute=1)]
    rue = ledger_builders.ledger("rue", "a", refused, runs={"r1": 3})
    documents = [ledger_builders.ready_ledger("ash"), rue]
    catalog_builders.sync(home / "catalog.duckdb", documents)


def test_the_command_tells_what_store_and_catalog_hold(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(roster.home)
    count_restart(roster.home, "store", "signal SIGKILL")
    with memory_store() as store:
        monkeypatch.setattr("flows.connect.open_store_hurried", lambda settings: store)
        store.put("uploads/fir/r1/adapter_config.json", b"{}")
        printed = roster("metrics")
        output = tmp_path / "roster.prom"
        output.write_text("old")
        assert roster("metrics", "--output", output).code == 0
        assert roster("metrics", "--json").document["output"] is None
    assert printed.code == 0
    samples = read(printed.out)
    assert of(samples, "roster_uploads", state="settling") == 1
    assert of(samples, "roster_size", base="tiny") == 1
    assert of(samples, "roster_adapters", base="tiny", outcome="quarantined", code="non_finite") == 1
    assert of(samples, "roster_step_seconds_count", kind="checked", outcome="quarantined") == 1
    assert of(samples, "roster_service_restarts_total", service="store") == 1
    assert of(samples, "roster_source_up", source="prefect") == 0
    assert read(output.read_text()).keys() == samples.keys()
    assert stat.S_IMODE(output.stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".roster")] == []


def test_what_is_down_is_written_all_the_same(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(roster.home)
    monkeypatch.setattr("flows.standing._look_at_store", lambda *_: (None, "the store is away"))
    output = tmp_path / "roster.prom"
    ran = roster("metrics", "--output", output)
    assert ran.code == 3
    assert "the store is away" in ran.err
    samples = read(output.read_text())
    assert of(samples, "roster_source_up", source="store") == 0
    assert of(samples, "roster_size", base="tiny") == 1
    assert roster("metrics", "--output", tmp_path / "nosuch" / "roster.prom").code == 2


def test_restarts_are_counted_over_all_runs(tmp_path: Path) -> None:
    assert read_restarts(tmp_path) == {}
    for status in ("exit status 1", "signal SIGKILL"):
        count_restart(tmp_path, "engine-tiny", status)
    count_restart(tmp_path, "worker", "exit status 3")
    counts = read_restarts(tmp_path)
    assert {name: (one.count, one.last_status) for name, one in counts.items()} == {
        "engine-tiny": (2, "signal SIGKILL"),
        "worker": (1, "exit status 3"),
    }
    (tmp_path / RESTARTS_FILE).write_text("{")
    with pytest.raises(
        StateUnreadableError, match=r"restarts\.json does not hold what the embedded services"
    ):
        read_restarts(tmp_path)
    count_restart(tmp_path, "store", "exit status 1")  # services do not end for want of a count
    assert list(read_restarts(tmp_path)) == ["store"]


def test_the_supervisor_tells_of_each_restart(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    supervisor = Supervisor(
        [child("frail", tmp_path, *shell("exit 7"), ready=lambda: False, restarts=2)],
        announce=lambda line: None,
        mark=str(tmp_path),
        restarted=lambda name, status: told.append((name, status)),
        first_backoff_s=0.01,
    )
    with pytest.raises(ChildFailedError):
        supervisor.start(threading.Event())
    assert told == [("frail", "ended with exit status 7")] * 2
