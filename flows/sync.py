"""Ledger to catalog and roster; one at a time, asked for by verdicts and by a schedule."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed

from flows.connect import open_store, sync_limits
from flows.settings import load_settings
from tasks.cataloguing import Synced, sync_catalog

Log = logging.Logger | logging.LoggerAdapter[Any]
SYNC = "sync/sync"
ONBOARD = "onboard/onboard"


@flow(name="sync", persist_result=False)
def sync() -> State:
    """Bring the catalog up to date, publish the roster, and have thinly proven adapters scored again."""
    log = get_run_logger()
    settings = load_settings()
    synced = sync_catalog(open_store(settings), settings.catalog_path, sync_limits(settings))
    _request_rescores(synced, log)
    report = synced.report
    version = synced.roster.version if synced.roster else 0
    message = (
        f"{report.added} new, {report.changed} changed of {report.total} ledgers; roster version {version}"
        f"{' published' if synced.published else ' unchanged'}"
    )
    log.info("%s", message)
    return Completed(name="Published" if synced.published else "Unchanged", message=message)


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


def _request_rescores(synced: Synced, log: Log) -> None:
    """An adapter judged before others were ready meets them now; once for each number of them."""
    for thin in synced.thin:
        if thin.run is None:
            continue
        log.info(
            "%s: scored against %d wrong adapters, %d exist now", thin.author, thin.opponents, thin.wanted
        )
        run_deployment(
            ONBOARD,
            parameters={"author": thin.author, "run": thin.run, "rescore": True},
            timeout=0,
            as_subflow=False,
            idempotency_key=f"rescore-{thin.adapter_digest}-{thin.wanted}",
        )
