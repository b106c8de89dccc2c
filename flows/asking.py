"""Asking Prefect for flow runs, each under a key by which the same request made twice starts one run."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

Log = logging.Logger | logging.LoggerAdapter[Any]
SYNC = "sync/sync"
ONBOARD = "onboard/onboard"
REFUSED = "Refused"
"""How the state of a run begins that found an upload unusable: another run would say the same."""

_FIRST_PAUSE = timedelta(minutes=1)
_LONGEST_PAUSE = timedelta(hours=1)
# A run claims its adapter within seconds of its beginning. What nobody holds after this long has died with its machine,
# although Prefect goes on showing the run as at work.
_CLAIMED_WITHIN = timedelta(minutes=15)
_AGAIN = re.compile(r"/again-\d+$")
_PAGE = 200


def list_asked() -> set[str]:
    """The keys of all requests for an adapter that nobody holds whose run has not begun, or only just."""
    onboard = DeploymentFilter(name=DeploymentFilterName(any_=[ONBOARD.partition("/")[2]]))
    ended = FlowRunFilterStateType(not_any_=list(TERMINAL_STATES))
    alive = FlowRunFilter(state=FlowRunFilterState(type=ended))
    keys: set[str] = set()
    read = _PAGE
    with get_client(sync_client=True) as client:
        offset = 0
        while read == _PAGE:
            runs = client.read_flow_runs(
                deployment_filter=onboard, flow_run_filter=alive, limit=_PAGE, offset=offset
            )
            keys.update(
                _AGAIN.sub("", run.idempotency_key)
                for run in runs
                if run.idempotency_key and not (run.state and _has_died(run.state))
            )
            read = len(runs)
            offset += read
    return keys


def request_onboard(author: str, run: str, *, key: str, submission: str = "", rescore: bool = False) -> bool:
    """Ask for a run of `onboard` for one upload; whether there is one on its way now.

    A run under this key that has ended, although it is asked for again, is followed by another, after a pause that
    doubles with each. One that ended as REFUSED is not. So is one that has been at work for long, but for `rescore`:
    who asks for all else has seen that nobody holds the adapter.
    """
    parameters = {"author": author, "run": run, "submission": submission, "rescore": rescore}
    ended = 0
    while True:
        asked = _ask(ONBOARD, key=f"{key}/again-{ended}" if ended else key, parameters=parameters)
        state = asked.state
        if state is None or not (state.is_final() or (_has_died(state) and not rescore)):
            return True
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * (1 << min(ended, 16)))
        if (state.name or "").startswith(REFUSED) or datetime.now(UTC) < state.timestamp + pause:
            return False
        ended += 1


def _has_died(state: State) -> bool:
    """Whether a run in this state has died, if nobody holds its adapter."""
    has_begun = state.is_running() or state.is_pending()
    return has_begun and datetime.now(UTC) >= state.timestamp + _CLAIMED_WITHIN


def request_sync(window_seconds: int, log: Log) -> None:
    """Ask for a sync at the end of the current window; all who ask within it share one run.

    That run begins after the last of them has written its ledger, and reads whatever changed, so none is missed:
    where it has begun already (a clock that is behind, an answer that took long), the next window's is asked for.
    """
    window = int(datetime.now(UTC).timestamp() // window_seconds) + 1
    while True:
        start = datetime.fromtimestamp(window * window_seconds, UTC) + timedelta(milliseconds=100)
        try:
            asked = _ask(SYNC, key=f"sync-{window_seconds}-{window}", scheduled_time=start)
        except ObjectNotFound:
            log.warning("no deployment %s: run `roster sync`, or `python -m flows.deploy`", SYNC)
            return
        if asked.state is None or asked.state.is_scheduled() or asked.state.is_pending():
            return
        window += 1


def _ask(deployment: str, *, key: str, **more: Any) -> FlowRun:
    """The run under this key, as it stands: a new one, or the one that an earlier request made."""
    asked = run_deployment(deployment, timeout=0, as_subflow=False, idempotency_key=key, **more)
    return cast(FlowRun, asked)  # a coroutine only inside an event loop
