"""Asking Prefect for flow runs, each under a key by which the same request made twice starts one run."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

Log = logging.Logger | logging.LoggerAdapter[Any]
SYNC = "sync/sync"
ONBOARD = "onboard/onboard"
REFUSED = "Refused"
"""How the state of a run begins that found an upload unusable: another run would say the same."""

_FIRST_PAUSE = timedelta(minutes=1)
_LONGEST_PAUSE = timedelta(hours=1)


def request_onboard(author: str, run: str, *, key: str, submission: str = "", rescore: bool = False) -> bool:
    """Ask for a run of `onboard` for one upload; whether there is one on its way now.

    A run under this key that has ended, although it is asked for again, is followed by another, after a pause that
    doubles with each. One that ended as REFUSED is not.
    """
    parameters = {"author": author, "run": run, "submission": submission, "rescore": rescore}
    ended = 0
    while True:
        asked = _ask(ONBOARD, key=f"{key}/again-{ended}" if ended else key, parameters=parameters)
        state = asked.state
        if state is None or not state.is_final():
            return True
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * (1 << min(ended, 16)))
        if (state.name or "").startswith(REFUSED) or datetime.now(UTC) < state.timestamp + pause:
            return False
        ended += 1


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
