"""What the benches ask of Prefect: their own smallest flow as a baseline, and when a run's first step began."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from uuid import UUID, uuid4

import anyio
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort, LogSort
from prefect.deployments import run_deployment
from prefect.events import DeploymentEventTrigger, Event, Resource, get_events_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled
from prefect.types.entrypoint import EntrypointType

from flows.deploy import POOL

HELLO = "bench.hello"
HELLO_DEPLOYMENT = "hello/hello"
SWEEP = "sweep/sweep"
_POLL_S = 0.1
_PAGE = 200


@task(persist_result=False)
def greet() -> None:
    """Do nothing: the first step of the smallest flow."""


@flow(name="hello", persist_result=False)
def hello(number: str) -> None:
    """Prefect's own share of the time: a flow whose only step does nothing."""
    greet()


@contextmanager
def connected(api_url: str, auth: str | None = None) -> Iterator[None]:
    """Talk to this server, with its auth string if it has one."""
    access = {} if auth is None else {PREFECT_API_AUTH_STRING: auth}
    with temporary_settings({PREFECT_API_URL: api_url, **access}):
        yield


def deploy_hello() -> None:
    """Register the smallest flow with a trigger like that of `onboard`."""
    trigger = DeploymentEventTrigger(
        name=f"{HELLO} starts hello",
        expect={HELLO},
        match={"prefect.resource.id": "bench.*"},
        parameters={"number": "{{ event.payload.number }}"},
    )
    deployment = hello.to_deployment(
        name="hello", triggers=[trigger], entrypoint_type=EntrypointType.MODULE_PATH
    )
    deployment.apply(work_pool_name=POOL)  # type: ignore[union-attr]


def emit_hello(number: str) -> None:
    """Send the event that starts the smallest flow."""
    event = Event(
        event=HELLO,
        id=uuid4(),
        resource=Resource({"prefect.resource.id": f"bench.{number}"}),
        payload={"number": number},
    )

    async def emit() -> None:
        async with get_events_client(reconnection_attempts=1) as client:
            await client.emit(event)

    anyio.run(emit)


def pause_sweeps() -> None:
    """No sweep begins by its schedule from now on."""
    with get_client(sync_client=True) as client:
        client.pause_deployment(client.read_deployment_by_name(SWEEP).id)


def ask(deployment: str, *, queue: str | None = None, **parameters: str) -> UUID:
    """Ask for a run of a deployment, in its own work queue or another one; its id."""
    asked = run_deployment(
        deployment, parameters=parameters, timeout=0, as_subflow=False, work_queue_name=queue
    )
    assert isinstance(asked, FlowRun)
    return asked.id


def cancel(run: UUID) -> None:
    """Have a run that has not begun never begin."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, Cancelled())


def wait_for_first_step(parameter: str, value: str, *, within_s: float) -> tuple[FlowRun, datetime]:
    """The run with this parameter, and when its first task began.

    Raises:
        TimeoutError: no such run has begun a task in time.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for run in list_runs(newest=20):
            if run.parameters.get(parameter) == value and (begun := _first_task(run.id)) is not None:
                return run, begun
        time.sleep(_POLL_S)
    message = f"no run with {parameter}={value} began a task within {within_s:.0f} s"
    raise TimeoutError(message)


def wait_until_idle(*, within_s: float) -> None:
    """Return when no run is at work or due within seconds.

    Raises:
        TimeoutError: runs are still at work.
    """
    deadline = time.monotonic() + within_s
    while any(_is_near(run) for run in list_runs(newest=50)):
        if time.monotonic() > deadline:
            message = f"runs are still at work after {within_s:.0f} s"
            raise TimeoutError(message)
        time.sleep(_POLL_S)


def read_run(run: UUID) -> FlowRun:
    """The run as the server knows it now."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run)


def read_taken(run: UUID) -> datetime:
    """When a worker first took this run: it is Pending from then on."""
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(run)
    return min(state.timestamp for state in states if state.is_pending())


def read_log(run: UUID) -> list[tuple[datetime, str]]:
    """The run's first lines of log, up to 200, each with its time."""
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))
    with get_client(sync_client=True) as client:
        logs = client.read_logs(wanted, limit=_PAGE, sort=LogSort.TIMESTAMP_ASC)
    return [(log.timestamp, log.message) for log in logs]


def has_ended(run: UUID) -> bool:
    """Whether this run has come to an end of whatever kind."""
    state = read_run(run).state
    return state is not None and state.is_final()


def list_runs(*, newest: int | None = None) -> list[FlowRun]:
    """The runs, those that are to begin last first; only so many of them if `newest` is given."""
    found: list[FlowRun] = []
    with get_client(sync_client=True) as client:
        while True:
            limit = min(_PAGE, (newest or 10**9) - len(found))
            page = client.read_flow_runs(
                limit=limit, offset=len(found), sort=FlowRunSort.EXPECTED_START_TIME_DESC
            )
            found += page
            if len(page) < limit or len(found) == newest:
                return found


def _first_task(run: UUID) -> datetime | None:
    with get_client(sync_client=True) as client:
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))
    begun = [one.start_time for one in tasks if one.start_time is not None]
    return min(begun, default=None)


def _is_near(run: FlowRun) -> bool:
    state = run.state
    if state is None or state.is_final():
        return False
    if not state.is_scheduled():
        return True
    due = run.next_scheduled_start_time or run.expected_start_time
    return due is not None and due.timestamp() < time.time() + 3


def has_failed(run: FlowRun) -> bool:
    """Whether the run ended as Failed or Crashed, by type: a stop is a failure under a name of its own."""
    return run.state_type in {StateType.FAILED, StateType.CRASHED}


def has_onboards_left(*, pending: bool = True) -> bool:
    """Whether some run of `onboard` has not ended; one whose worker died before it began stays pending for ever."""
    others = list(TERMINAL_STATES) if pending else [*TERMINAL_STATES, StateType.PENDING]
    ended = FlowRunFilterState(type=FlowRunFilterStateType(not_any_=others))
    with get_client(sync_client=True) as client:
        left = client.read_flow_runs(
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=["onboard"])),
            flow_run_filter=FlowRunFilter(state=ended),
            limit=1,
        )
    return bool(left)
