"""Sweeps go on: one that is killed keeps the next ones out for a minute, and a schedule that was used up is filled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.flow_engine import run_flow
from prefect.states import Pending
from store_builders import memory_store

import flows.sweep
import flows.sync
from flows.sweep import sweep
from flows.sync import sync
from storage.errors import StoreUnavailable
from storage.s3 import S3Store

pytestmark = pytest.mark.real
MINUTE = timedelta(minutes=1)
SWEEPS = DeploymentFilter(name=DeploymentFilterName(any_=["sweep"]))


@pytest.fixture
def store(deployed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    with memory_store() as store:
        monkeypatch.setattr(flows.sweep, "open_store", lambda settings: store)
        monkeypatch.setattr(flows.sync, "open_store", lambda settings: store)
        forget_planned()
        yield store
        forget_planned()


def planned() -> list[FlowRun]:
    """The sweeps that are to come, the first one first."""
    scheduled = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
    )
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(deployment_filter=SWEEPS, flow_run_filter=scheduled)
    return sorted(found, key=begins)


def begins(run: FlowRun) -> datetime:
    assert run.expected_start_time is not None
    return run.expected_start_time


def forget_planned() -> None:
    with get_client(sync_client=True) as client:
        for run in planned():
            client.delete_flow_run(run.id)


def plan(at: datetime, name: str = "sweep") -> FlowRun:
    run = run_deployment(f"{name}/{name}", scheduled_time=at, timeout=0, as_subflow=False)
    assert isinstance(run, FlowRun)
    return run


def play(at: datetime, flow: Any = sweep) -> FlowRun:
    """A run that was planned for then, as a worker would have it done; how it ended."""
    run = plan(at, flow.name)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Pending())
        run_flow(flow, flow_run=client.read_flow_run(run.id), return_type="state")
        return client.read_flow_run(run.id)


@pytest.mark.parametrize(
    ("flow", "part"), [(sweep, "flows.sweep.list_due"), (sync, "flows.sync.sync_catalog")]
)
def test_one_that_is_killed_keeps_no_other_out_for_longer_than_a_minute(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, flow: Any, part: str
) -> None:
    renewed: list[tuple[UUID, float]] = []
    real = SyncPrefectClient.renew_concurrency_lease

    def renew(self: SyncPrefectClient, lease_id: UUID, lease_duration: float) -> Any:
        answer = real(self, lease_id, lease_duration)
        renewed.append((lease_id, lease_duration))
        return answer

    def wait(*_: Any, **__: Any) -> Any:
        time.sleep(3)
        raise StoreUnavailable("list", "uploads/", "it is down")

    monkeypatch.setattr(SyncPrefectClient, "renew_concurrency_lease", renew)
    monkeypatch.setattr(part, wait)
    assert play(datetime.now(UTC), flow).state_name == "Failed"
    assert len({lease for lease, _ in renewed}) == 1
    durations = [duration for _, duration in renewed]
    assert sorted(durations) == [60, 60, 300], "the engine's own renewal is still what it was"
    assert durations[-1] == 60, "and does not have the last word"


@pytest.mark.parametrize("fails", [False, True])
def test_a_gap_in_the_schedule_is_filled(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """A clock that was ahead has used up what was planned, also where the sweep itself fails."""

    def broken(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("list", "uploads/", "it is down")

    if fails:
        monkeypatch.setattr(flows.sweep, "list_due", broken)
    now = datetime.now(UTC)
    after = plan(now + 5 * MINUTE)
    assert play(now).state_name == ("Failed" if fails else "Quiet")
    first, last = planned()
    assert begins(first) == now + MINUTE and last.id == after.id
    # Asked again by another one of the same minute, it is the same run.
    assert play(now).state_name == ("Failed" if fails else "Quiet")
    assert [run.id for run in planned()] == [first.id, after.id]


def test_where_the_schedule_goes_on_nothing_is_added(store: S3Store) -> None:
    now = datetime.now(UTC)
    following = plan(now + 2 * MINUTE)
    assert play(now).state_name == "Quiet"
    assert [run.id for run in planned()] == [following.id]


def test_a_schedule_that_is_paused_stays_so(store: S3Store) -> None:
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("sweep/sweep")
        client.pause_deployment(deployment.id)
        try:
            assert play(datetime.now(UTC)).state_name == "Quiet"
            assert planned() == []
        finally:
            client.resume_deployment(deployment.id)
