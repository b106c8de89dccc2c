"""Ledger to catalog and roster; one at a time, asked for by verdicts and by a schedule."""

from __future__ import annotations

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.asking import Log, request_onboard
from flows.connect import open_store
from flows.settings import load_settings
from tasks.cataloguing import Synced, SyncLimits, sync_catalog


@flow(name="sync", persist_result=False)
def sync() -> State:
    """Bring the catalog up to date, publish the roster, and have thinly proven adapters scored again."""
    log = get_run_logger()
    settings = load_settings()
    limits = SyncLimits(settings.max_opponents, settings.max_drop)
    synced = sync_catalog(open_store(settings), settings.catalog_path, limits)
    _request_rescores(synced, log)
    report = synced.report
    version = synced.roster.version if synced.roster else 0
    message = (
        f"{report.added} new, {report.changed} changed of {report.total} ledgers; roster version {version}"
        f"{' published' if synced.published else ' unchanged'}"
    )
    log.info("%s", message)
    return Completed(name="Published" if synced.published else "Unchanged", message=message)


def _request_rescores(synced: Synced, log: Log) -> None:
    """An adapter judged before others were ready meets them now; once for each number of them."""
    for thin in synced.thin:
        if thin.run is None:
            continue
        log.info(
            "%s: scored against %d wrong adapters, %d exist now", thin.author, thin.opponents, thin.wanted
        )
        key = f"rescore-{thin.adapter_digest}-{thin.wanted}"
        request_onboard(thin.author, thin.run, key=key, rescore=True)
