"""What a sync that was asked for looks at: whom the request names, and whom runs have worked on since the last one."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from catalog_builders import sync
from ledger_builders import ready_ledger
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.states import Completed, Crashed, Failed, Pending, Running, Scheduled

import flows.asking
import flows.sync
from flows.asking import list_worked_on, request_sync
from flows.sync import _with_worked_on
from storage.documents import format_time

NAMED = ["ledger/ada/_author.json"]


def synced(folder: Path, ago: timedelta) -> tuple[Path, datetime]:
    last = (datetime.now(UTC) - ago).replace(microsecond=0)
    sync(folder / "catalog.duckdb", [ready_ledger("ada")], synced_at=format_time(last))
    return folder / "catalog.duckdb", last


def test_who_was_worked_on_since_the_last_sync_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, last = synced(tmp_path, timedelta(minutes=7))
    asked: list[datetime] = []

    def worked_on(since: datetime) -> set[str]:
        asked.append(since)
        return {"cy", "bo"}

    monkeypatch.setattr(flows.sync, "list_worked_on", worked_on)
    assert _with_worked_on(NAMED, path) == [*NAMED, "ledger/bo/_author.json", "ledger/cy/_author.json"]
    assert last - timedelta(minutes=10) < asked[0] < last - timedelta(minutes=1), "clocks differ"
    assert _with_worked_on(None, path) is None and len(asked) == 1


@pytest.mark.parametrize("why", ["no catalog", "an old catalog", "a clock was ahead", "too many"])
def test_else_everything_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    path = tmp_path / "catalog.duckdb"
    ago = {"an old catalog": timedelta(days=3), "a clock was ahead": timedelta(hours=-1)}
    if why != "no catalog":
        synced(tmp_path, ago.get(why, timedelta(minutes=1)))
    many = {f"author-{number}" for number in range(600 if why == "too many" else 1)}
    monkeypatch.setattr(flows.sync, "list_worked_on", lambda since: many)
    assert _with_worked_on(NAMED, path) is None


def test_a_request_for_everything_is_not_met_by_one_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def run_deployment(_: str, **options: Any) -> Any:
        asked.append((options["idempotency_key"], options["parameters"]))
        return SimpleNamespace(state=Scheduled())

    monkeypatch.setattr(flows.asking, "run_deployment", run_deployment)
    monkeypatch.setattr(flows.asking, "_is_sync_due", lambda before, whole: False)
    for touched in (NAMED, ["ledger/bo/_author.json"], None):
        request_sync(3600, logging.getLogger(), touched)
    keys = [key for key, _ in asked]
    assert keys[0] == keys[1] != keys[2], "those of one window share a run"
    assert [told["touched"] for _, told in asked] == [NAMED, ["ledger/bo/_author.json"], None]


@pytest.mark.real
def test_while_a_sync_waits_for_its_turn_no_other_is_asked_for(deployed: None) -> None:
    """Behind one that had died nine waited, and took every turn of the workers: no adapter got on for five minutes."""

    def open_syncs() -> list[FlowRun]:
        waits = FlowRunFilterStateType(any_=[StateType.SCHEDULED])
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name("sync/sync").id
            wanted = FlowRunFilter(
                deployment_id=FlowRunFilterDeploymentId(any_=[deployment]),
                state=FlowRunFilterState(type=waits),
            )
            return client.read_flow_runs(flow_run_filter=wanted)

    log, now = logging.getLogger(), datetime.now(UTC)
    planned = len(open_syncs())
    run_deployment("sync/sync", timeout=0, as_subflow=False, scheduled_time=now + timedelta(hours=1))
    assert request_sync(1, log, NAMED)
    [waiting] = [run for run in open_syncs() if run.parameters.get("touched") == NAMED]
    assert len(open_syncs()) == planned + 2, "one that is to begin in an hour is none that waits"
    with get_client(sync_client=True) as client:
        turned_away = Scheduled(name="AwaitingConcurrencySlot", scheduled_time=now + timedelta(seconds=3))
        client.set_flow_run_state(waiting.id, turned_away, force=True)
    time.sleep(1)
    assert request_sync(1, log, ["ledger/bo/_author.json"])
    assert len(open_syncs()) == planned + 2
    assert request_sync(1, log), "of every ledger: that one looks at some"
    assert len(open_syncs()) == planned + 3
    time.sleep(1)
    assert request_sync(1, log)
    assert len(open_syncs()) == planned + 3
    with get_client(sync_client=True) as client:
        for run in open_syncs():
            client.delete_flow_run(run.id)


@pytest.mark.real
def test_prefect_tells_who_was_worked_on(prefect_server: None) -> None:
    """Those at work and those whose run ended since then, of `onboard` alone; nobody whose run has not begun."""
    runs: dict[str, tuple[str, list[State[Any]]]] = {
        "ended-before": ("onboard", [Running(), Completed()]),
        "asleep": ("onboard", []),
        "pending": ("onboard", [Pending()]),
        "at-work": ("onboard", [Running()]),
        "ended-since": ("onboard", [Running(), Completed()]),
        "failed": ("onboard", [Running(), Failed()]),
        "crashed": ("onboard", [Running(), Crashed()]),
        "of-another-flow": ("sync", [Running()]),
    }
    began = since = datetime.now(UTC)
    ids = []
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name="gpu", type="process"))
        for author, (name, states) in runs.items():
            try:
                deployment = client.read_deployment_by_name(f"{name}/{name}").id
            except ObjectNotFound:
                flow = client.create_flow_from_name(name)
                deployment = client.create_deployment(flow, name, work_pool_name="gpu")
            run = client.create_flow_run_from_deployment(
                deployment, parameters={"author": author, "run": "run-1"}
            )
            ids.append(run.id)
            for state in states:
                client.set_flow_run_state(run.id, state, force=True)
            if author == "ended-before":
                since = datetime.now(UTC)
        try:
            found = list_worked_on(since)
            assert found & runs.keys() == {"at-work", "ended-since", "failed", "crashed"}
            assert list_worked_on(began) & runs.keys() - found == {"ended-before"}
        finally:
            for one in ids:
                client.delete_flow_run(one)
