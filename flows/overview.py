"""What the Prefect server knows of us, asked for people: pool, queues, workers, runs on their way, engines' leases."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx  # only for the errors that Prefect's client lets through
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
    WorkQueueFilter,
    WorkQueueFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus, WorkQueue
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from flows.asking import ALIVE, OF_ONBOARD
from flows.deploy import POOL
from flows.versions import check_versions

SILENT: tuple[type[Exception], ...] = (httpx.HTTPError,)
"""What Prefect's client raises where the server does not answer, or not as it should."""

ONBOARD = "onboard"
DEPLOYMENTS = (ONBOARD, "sweep", "sync")
LEASE_PREFIX = "engine-"
_SECONDS = 5.0  # for one request; a busy server takes seconds
_RETRIES = 1
_PAGE = 200
_AT_WORK = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker of the pool: whether it is heard from, and when it was last."""

    name: str
    alive: bool
    last_heartbeat: datetime | None


@dataclass(frozen=True, slots=True)
class QueueView:
    """A queue of the pool. `depth`: runs whose time has come and that no worker has taken up."""

    name: str
    paused: bool
    depth: int
    last_polled: datetime | None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run of `onboard` on its way. `state` is its name in the UI, such as AwaitingRetry, `since` when it began.

    `scheduled`: no worker has taken it up; `due`: its time has come. `author` and `run` are None where it has none.
    """

    id: str
    name: str
    author: str | None
    run: str | None
    state: str
    since: datetime
    scheduled: bool
    at_work: bool
    due: bool
    url: str


@dataclass(frozen=True, slots=True)
class LeaseView:
    """The lease of a base's engine: how many slots are taken of how many, and when that last changed."""

    base: str
    name: str
    taken: int
    slots: int
    changed_at: datetime | None


@dataclass(frozen=True, slots=True)
class PrefectView:
    """All of it. `unfit` says how the server's version does not go with ours, None if it does.

    `pool_paused` is None where there is no pool; `missing` are deployments that are not registered, `resting` those
    none of whose schedules is active, each with the id of one. `runs` holds the longest due, 200 at most;
    `on_their_way` counts all. `others_at_work`: a run of matrix, which holds the engine's lease too, is at work.
    """

    unfit: str | None
    pool_paused: bool | None
    missing: tuple[str, ...]
    resting: dict[str, str]
    workers: tuple[WorkerView, ...]
    queues: tuple[QueueView, ...]
    runs: tuple[RunView, ...]
    on_their_way: int
    others_at_work: bool
    leases: tuple[LeaseView, ...]

    @property
    def alive(self) -> tuple[WorkerView, ...]:
        """The workers that are heard from."""
        return tuple(worker for worker in self.workers if worker.alive)


class PrefectSilent(Exception):
    """The Prefect server could not be reached, or did not answer as it should, within seconds."""

    def __init__(self, api_url: str, found: str) -> None:
        """Keep the address and what came instead of an answer."""
        self.api_url = api_url
        self.found = found
        super().__init__(api_url, found)

    def __str__(self) -> str:
        """Name the address, what was found and what to look at."""
        return (
            f"Prefect at {self.api_url}: expected an answer within {_SECONDS:.0f} s, found {self.found}. Runs neither "
            "start nor end without it; look at the server and its log."
        )


def look_at_prefect(api_url: str, *, now: datetime) -> PrefectView:
    """The state of things at a Prefect server, in ten requests or so.

    Raises:
        PrefectSilent: it cannot be reached, or answers late or wrongly.
    """
    hurried = {
        PREFECT_API_URL: api_url,
        PREFECT_API_REQUEST_TIMEOUT: _SECONDS,
        PREFECT_CLIENT_MAX_RETRIES: _RETRIES,
    }
    try:
        with temporary_settings(hurried):
            unfit = check_versions()
            with get_client(sync_client=True) as client:
                return _look(client, api_url, unfit, now)
    except httpx.HTTPStatusError as error:
        raise PrefectSilent(api_url, f"HTTP {error.response.status_code}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ObjectNotFound, ValueError) as error:
        raise PrefectSilent(api_url, f"{type(error).__name__}: {error}") from error


def _look(client: SyncPrefectClient, api_url: str, unfit: str | None, now: datetime) -> PrefectView:
    registered = {found.name: found for found in client.read_deployments(limit=_PAGE)}
    schedules = {name: registered[name].schedules for name in DEPLOYMENTS if name in registered}
    resting = {
        name: str(planned[0].id)
        for name, planned in schedules.items()
        if planned and not any(one.active for one in planned)
    }
    limits = client.read_global_concurrency_limits(limit=_PAGE)
    leases = tuple(
        LeaseView(
            base=limit.name.removeprefix(LEASE_PREFIX),
            name=limit.name,
            taken=limit.active_slots,
            slots=limit.limit,
            changed_at=limit.updated,
        )
        for limit in limits
        if limit.name.startswith(LEASE_PREFIX)
    )
    try:
        paused: bool | None = client.read_work_pool(POOL).is_paused
    except ObjectNotFound:
        paused = None
    has_pool = paused is not None
    workers = client.read_workers_for_work_pool(POOL) if has_pool else []
    queues = client.read_work_queues(work_pool_name=POOL) if has_pool else []
    runs, on_their_way = _read_runs(client)
    return PrefectView(
        unfit=unfit,
        pool_paused=paused,
        missing=tuple(name for name in DEPLOYMENTS if name not in registered),
        resting=resting,
        workers=tuple(
            WorkerView(worker.name, worker.status is WorkerStatus.ONLINE, worker.last_heartbeat_time)
            for worker in workers
        ),
        queues=tuple(
            QueueView(queue.name, queue.is_paused, _depth(client, queue, now), queue.last_polled)
            for queue in queues
        ),
        runs=tuple(_view(run, api_url, now) for run in runs),
        on_their_way=on_their_way,
        others_at_work=_others_at_work(client),
        leases=leases,
    )


def _read_runs(client: SyncPrefectClient) -> tuple[list[FlowRun], int]:
    """The runs of onboard that are on their way, the longest due first, and how many there are in all."""
    wanted: dict[str, Any] = {"deployment_filter": OF_ONBOARD, "flow_run_filter": ALIVE}
    runs = client.read_flow_runs(**wanted, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=_PAGE)
    return runs, len(runs) if len(runs) < _PAGE else client.count_flow_runs(**wanted)


def _depth(client: SyncPrefectClient, queue: WorkQueue, now: datetime) -> int:
    return client.count_flow_runs(
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])),
        work_queue_filter=WorkQueueFilter(name=WorkQueueFilterName(any_=[queue.name])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            expected_start_time=FlowRunFilterExpectedStartTime(before_=now),
        ),
    )


def _others_at_work(client: SyncPrefectClient) -> bool:
    others = DeploymentFilter(name=DeploymentFilterName(any_=["matrix"]))
    at_work = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(_AT_WORK))))
    return client.count_flow_runs(deployment_filter=others, flow_run_filter=at_work) > 0


def _view(run: FlowRun, api_url: str, now: datetime) -> RunView:
    state = run.state
    expected = run.expected_start_time or now
    author, its_run = run.parameters.get("author"), run.parameters.get("run")
    return RunView(
        id=str(run.id),
        name=run.name,
        author=str(author) if author else None,
        run=str(its_run) if its_run else None,
        state=run.state_name or "no state",
        since=state.timestamp if state else expected,
        scheduled=run.state_type is StateType.SCHEDULED,
        at_work=run.state_type in _AT_WORK,
        due=run.state_type is StateType.SCHEDULED and expected <= now,
        url=f"{api_url.rstrip('/').removesuffix('/api')}/runs/flow-run/{run.id}",
    )
