"""Asking Prefect for flow runs, each under a key by which the same request made twice starts one run."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterId,
    FlowRunFilterIdempotencyKey,
    FlowRunFilterNextScheduledStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Crashed, Scheduled

Log = logging.Logger | logging.LoggerAdapter[Any]
SYNC = "sync/sync"
SWEEP = "sweep/sweep"
ONBOARD = "onboard/onboard"
REFUSED = "Refused"
"""How the state of a run begins that found an upload unusable: another run would say the same."""

_FIRST_PAUSE = timedelta(minutes=1)
_LONGEST_PAUSE = timedelta(hours=1)
# A run claims its adapter within seconds of its beginning. What nobody holds after this long has died with its machine,
# although Prefect goes on showing the run as at work.
_CLAIMED_WITHIN = timedelta(minutes=15)
# A worker starts what it has taken within seconds; what is still to be started after this long died with that worker.
_STARTED_WITHIN = timedelta(minutes=2)
# Runs are asked for at once: who asked for one that begins later than this had a clock that was ahead.
_BEGUN_WITHIN = timedelta(minutes=2)
# Who finds the slot of a deployment taken comes again sooner: PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS.
_TURN = timedelta(seconds=10)
_AGAIN = re.compile(r"/again-\d+$")
_PAGE = 200
_LOOKED_AHEAD = 8  # so many runs under one key are looked for at once
_OF_SYNC = DeploymentFilter(name=DeploymentFilterName(any_=[SYNC.partition("/")[2]]))
OF_ONBOARD = DeploymentFilter(name=DeploymentFilterName(any_=[ONBOARD.partition("/")[2]]))
ALIVE = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(not_any_=list(TERMINAL_STATES))))


@dataclass(frozen=True, slots=True)
class Asked:
    """What has been asked for already: keys of requests, and uploads as (author, run) that a run will yet look at.

    `ended` is how many runs under a key have ended, `resting` are those of these keys that are not asked for again now.
    `put_off` are runs that would begin much later, by their uploads: they cover nothing until they are brought forward.
    """

    keys: frozenset[str]
    uploads: frozenset[tuple[str, str]]
    ended: Mapping[str, int]
    resting: frozenset[str]
    put_off: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def covers(self, author: str, run: str, key: str) -> bool:
        """Whether another request would only start a second run beside one that finds the same."""
        return key in self.keys or (author, run) in self.uploads


@dataclass(frozen=True, slots=True)
class OnboardRun:
    """A run of `onboard` as Prefect shows it. `state` is the state's name there, `since` when it began."""

    id: str
    author: str
    run: str
    state: str
    since: datetime
    is_scheduled: bool
    has_ended: bool
    seems_dead: bool  # at work for long: it has died, if nobody holds its adapter


def list_asked(wanted: Collection[str]) -> Asked:
    """The requests for adapters that nobody holds whose run has not begun, or only just, and what became of these keys.

    A run that has not begun, a retried one among them, takes the upload as it is when it does begin. All keys are
    looked up together: to ask for each of them once more takes a sweep longer with every upload that comes to nothing.
    """
    keys: set[str] = set()
    uploads: set[tuple[str, str]] = set()
    put_off: dict[tuple[str, str], str] = {}
    for run in _read_runs(ALIVE):
        if run.state and _has_died(run.state):
            continue
        if run.state and _is_put_off(run.state):
            put_off[_upload_of(run)] = str(run.id)
            continue
        if run.idempotency_key:
            keys.add(_AGAIN.sub("", run.idempotency_key))
        if run.state and run.state.is_scheduled():
            uploads.add(_upload_of(run))
    last = _last_ended(wanted)
    resting = frozenset(key for key, (before, state) in last.items() if _rests(state, before))
    ended = {key: before + 1 for key, (before, _) in last.items()}
    return Asked(frozenset(keys), frozenset(uploads), ended, resting, put_off)


def list_on_their_way() -> list[OnboardRun]:
    """The runs of `onboard` that have not ended."""
    return [_onboard_run(run) for run in _read_runs(ALIVE)]


def list_failed(since: datetime) -> list[OnboardRun]:
    """The runs of `onboard` asked for since then that failed or crashed, the newest first."""
    failed = FlowRunFilterStateType(any_=[StateType.FAILED, StateType.CRASHED])
    wanted = FlowRunFilter(
        state=FlowRunFilterState(type=failed),
        expected_start_time=FlowRunFilterExpectedStartTime(after_=since),
    )
    return [_onboard_run(run) for run in _read_runs(wanted)]


def list_worked_on(since: datetime) -> set[str]:
    """The authors of the runs of `onboard` that are at work, or have ended since then."""
    begun = FlowRunFilterStateType(not_any_=[*TERMINAL_STATES, StateType.SCHEDULED, StateType.PENDING])
    at_work = FlowRunFilter(state=FlowRunFilterState(type=begun))
    ended = FlowRunFilter(end_time=FlowRunFilterEndTime(after_=since))
    return {_upload_of(run)[0] for wanted in (at_work, ended) for run in _read_runs(wanted)}


def find_runs(ids: Iterable[str]) -> dict[str, OnboardRun]:
    """Those of these runs of `onboard` that Prefect still has, by id."""
    wanted = sorted({one for one in ids if _is_uuid(one)})
    found: dict[str, OnboardRun] = {}
    for start in range(0, len(wanted), _PAGE):
        page = FlowRunFilterId(any_=[UUID(one) for one in wanted[start : start + _PAGE]])
        found |= {str(run.id): _onboard_run(run) for run in _read_runs(FlowRunFilter(id=page))}
    return found


def send_again(run: OnboardRun, message: str) -> str | None:
    """Have the very run begin anew, as Retry in the UI does; why Prefect does not let it, None if it does.

    A run that died without Prefect noticing is first marked as what it is.
    """
    flow_run = UUID(run.id)
    with get_client(sync_client=True) as client:
        if not run.has_ended:
            client.set_flow_run_state(flow_run, Crashed(message="it has died: nobody holds its adapter"))
        state: State[Any] = AwaitingRetry(scheduled_time=datetime.now(UTC), message=message)
        answer = client.set_flow_run_state(flow_run, state)
    if answer.status is SetStateStatus.ACCEPT:
        return None
    return str(getattr(answer.details, "reason", None) or answer.status.value)


def bring_forward(run: str) -> None:
    """Have a run that is scheduled for later begin now."""
    message = "the sweep brought it forward: its upload is due, and runs are never asked for in advance"
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(run), Scheduled(scheduled_time=datetime.now(UTC), message=message))


def start_onboard(
    author: str, run: str, *, key: str, message: str, submission: str = "", force: bool = False
) -> str:
    """The id of a run of `onboard` that has not ended: the one under this key, else a new one, at once.

    Raises:
        prefect.exceptions.ObjectNotFound: the deployment is not registered.
    """
    parameters = {"author": author, "run": run, "submission": submission, "force": force}
    ended = 0
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(ONBOARD).id
        while True:
            asked = client.create_flow_run_from_deployment(
                deployment,
                parameters=parameters,
                state=Scheduled(message=message),
                idempotency_key=_nth(key, ended),
            )
            if asked.state is None or not asked.state.is_final():
                return str(asked.id)
            ended += 1


def request_onboard(
    author: str, run: str, *, key: str, submission: str = "", rescore: bool = False, ended: int = 0
) -> bool:
    """Ask for a run of `onboard` for one upload; whether there is one on its way now.

    A run under this key that has ended, although it is asked for again, is followed by another, after a pause that
    doubles with each. One that ended as REFUSED is not. So is one that has been at work for long, but for `rescore`:
    who asks for all else has seen that nobody holds the adapter. `ended`: so many are known to have.
    """
    parameters = {"author": author, "run": run, "submission": submission, "rescore": rescore}
    while True:
        state = _ask(ONBOARD, key=_nth(key, ended), parameters=parameters).state
        if state is None or not (state.is_final() or (_has_died(state) and not rescore)):
            return True
        if _rests(state, ended):
            return False
        ended += 1


def _nth(key: str, ended: int) -> str:
    """The key of the request that follows after so many runs under this one."""
    return f"{key}/again-{ended}" if ended else key


def _rests(state: State, before: int) -> bool:
    """Whether a run that ended in this state, as so many under its key before it, is not followed by another yet."""
    pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * (1 << min(before, 16)))
    return (state.name or "").startswith(REFUSED) or datetime.now(UTC) < state.timestamp + pause


def _last_ended(keys: Collection[str]) -> dict[str, tuple[int, State]]:
    """The last run under each key, if it has ended: how many did before it, and its state."""
    last: dict[str, tuple[int, State]] = {}
    wanted, first = list(keys), 0
    while wanted:
        asked = {_nth(key, n): (key, n) for key in wanted for n in range(first, first + _LOOKED_AHEAD)}
        for start in range(0, len(asked), _PAGE):
            some = FlowRunFilterIdempotencyKey(any_=[*asked][start : start + _PAGE])
            for run in _read_runs(FlowRunFilter(idempotency_key=some)):
                key, before = asked[str(run.idempotency_key)]
                if run.state is not None and (key not in last or before > last[key][0]):
                    last[key] = before, run.state
        first += _LOOKED_AHEAD
        wanted = [key for key in wanted if key in last and last[key][0] == first - 1]
    return {key: one for key, one in last.items() if one[1].is_final()}


def _has_died(state: State) -> bool:
    """Whether a run in this state has died, if nobody holds its adapter."""
    within = _STARTED_WITHIN if state.is_pending() else _CLAIMED_WITHIN
    return (state.is_running() or state.is_pending()) and datetime.now(UTC) >= state.timestamp + within


def _is_put_off(state: State) -> bool:
    """Whether a run in this state would begin much later than it was asked for."""
    begins = state.state_details.scheduled_time
    return state.is_scheduled() and begins is not None and begins > datetime.now(UTC) + _BEGUN_WITHIN


def request_sync(window_seconds: int, log: Log, touched: Sequence[str] | None = None) -> bool:
    """Whether a sync was asked for, at the end of the current window; not where no deployment would run it.

    All who ask within the window share one run. It begins after the last of them has written its ledger, so none is
    missed: where it has begun already (a clock that is behind, an answer that took long), the next window's is asked
    for. Nor is one asked for while an earlier one waits for its turn, as behind one that died: many that wait would
    take the workers' every turn, before all adapters. `touched` are keys of ledgers or of authors' records. The run
    looks at the authors of whoever asked first, and finds out by itself which others have been worked on by runs of
    `onboard` (flows/sync.py). None: it looks at every ledger.
    """
    window = int(datetime.now(UTC).timestamp() // window_seconds) + 1
    kind = "sync-all" if touched is None else "sync"
    parameters = {"touched": None if touched is None else list(touched)}
    if _is_sync_due(datetime.fromtimestamp(window * window_seconds, UTC) + _TURN, whole=touched is None):
        return True
    while True:
        start = datetime.fromtimestamp(window * window_seconds, UTC) + timedelta(milliseconds=100)
        try:
            key = f"{kind}-{window_seconds}-{window}"
            asked = _ask(SYNC, key=key, parameters=parameters, scheduled_time=start)
        except ObjectNotFound:
            log.warning("no deployment %s: run `roster sync`, or `python -m flows.deploy`", SYNC)
            return False
        if asked.state is None or asked.state.is_scheduled() or asked.state.is_pending():
            return True
        window += 1


def _is_sync_due(before: datetime, *, whole: bool) -> bool:
    """Whether a sync, of every ledger if `whole`, is to begin before then, and has not."""
    wanted = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
        next_scheduled_start_time=FlowRunFilterNextScheduledStartTime(before_=before),
    )
    with get_client(sync_client=True) as client:
        due = client.read_flow_runs(deployment_filter=_OF_SYNC, flow_run_filter=wanted, limit=_PAGE)
    return any(not whole or run.parameters.get("touched") is None for run in due)


def _ask(deployment: str, *, key: str, **more: Any) -> FlowRun:
    """The run under this key, as it stands: a new one, or the one that an earlier request made."""
    asked = run_deployment(deployment, timeout=0, as_subflow=False, idempotency_key=key, **more)
    return cast(FlowRun, asked)  # a coroutine only inside an event loop


def _read_runs(wanted: FlowRunFilter) -> Iterator[FlowRun]:
    """The runs of `onboard` that the filter takes, page by page, the newest first."""
    with get_client(sync_client=True) as client:
        offset, read = 0, _PAGE
        while read == _PAGE:
            runs = client.read_flow_runs(
                deployment_filter=OF_ONBOARD,
                flow_run_filter=wanted,
                sort=FlowRunSort.EXPECTED_START_TIME_DESC,
                limit=_PAGE,
                offset=offset,
            )
            yield from runs
            read = len(runs)
            offset += read


def _onboard_run(run: FlowRun) -> OnboardRun:
    author, upload_run = _upload_of(run)
    state = run.state
    return OnboardRun(
        id=str(run.id),
        author=author,
        run=upload_run,
        state=run.state_name or "no state",
        since=state.timestamp if state else run.expected_start_time or datetime.now(UTC),
        is_scheduled=state is None or state.is_scheduled(),
        has_ended=state is not None and state.is_final(),
        seems_dead=state is not None and _has_died(state),
    )


def _upload_of(run: FlowRun) -> tuple[str, str]:
    return str(run.parameters.get("author", "")), str(run.parameters.get("run", ""))


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True
