"""Asking Prefect for flow runs, each under a key by which the same request made twice starts one run."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

Log = logging.Logger | logging.LoggerAdapter[Any]
SYNC = "sync/sync"
ONBOARD = "onboard/onboard"


def request_onboard(author: str, run: str, *, key: str, submission: str = "", rescore: bool = False) -> None:
    """Ask for a run of `onboard` for one upload."""
    run_deployment(
        ONBOARD,
        parameters={"author": author, "run": run, "submission": submission, "rescore": rescore},
        timeout=0,
        as_subflow=False,
        idempotency_key=key,
    )


def request_sync(window_seconds: int, log: Log) -> None:
    """Ask for a sync at the end of the current window; all who ask within it share one run.

    That run begins after the last of them has written its ledger, and reads whatever changed, so none is missed.
    """
    now = datetime.now(UTC).timestamp()
    window = int(now // window_seconds) + 1
    try:
        run_deployment(
            SYNC,
            timeout=0,
            as_subflow=False,
            scheduled_time=datetime.fromtimestamp(window * window_seconds, UTC) + timedelta(milliseconds=100),
            idempotency_key=f"sync-{window_seconds}-{window}",
        )
    except ObjectNotFound:
        log.warning("no deployment %s: run `roster sync`, or `python -m flows.deploy`", SYNC)
