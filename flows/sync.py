"""Ledger to catalog and roster; one at a time, asked for by verdicts and by a schedule."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.alone import held_briefly
from flows.asking import Log, list_worked_on, request_onboard
from flows.connect import open_store, sync_limits
from flows.settings import load_settings
from roster.catalog import open_catalog
from roster.errors import CatalogUnreadable
from storage.keys import author_record_key, is_author
from tasks.cataloguing import Synced, publish_catalog, sync_catalog

# Clocks differ, and a run ends some time after it has written its ledger.
_SLACK = timedelta(minutes=5)
# For so many authors everything may as well be listed.
_MOST_AUTHORS = 500


@flow(name="sync", persist_result=False)
@held_briefly()
def sync(touched: list[str] | None = None) -> State:
    """Bring the catalog up to date, publish the roster, and have thinly proven adapters scored again.

    `touched` are keys of ledgers or of authors' records: only these authors are looked at, and those whose adapters
    runs have worked on since the last sync. Without, as on the schedule, every ledger is, and the catalog is published.
    """
    log = get_run_logger()
    settings = load_settings()
    store = open_store(settings)
    limits = sync_limits(settings)
    synced = sync_catalog(
        store, settings.catalog_path, limits, touched=_with_worked_on(touched, settings.catalog_path)
    )
    _request_rescores(synced, log)
    if synced.whole and publish_catalog(store, settings.catalog_path):
        log.info("the catalog is published for readers on other machines")
    report = synced.report
    version = synced.roster.version if synced.roster else 0
    message = (
        f"{report.added} new, {report.changed} changed of {report.total} ledgers; roster version {version}"
        f"{' published' if synced.published else ' unchanged'}"
    )
    log.info("%s", message)
    return Completed(name="Published" if synced.published else "Unchanged", message=message)


def _with_worked_on(touched: list[str] | None, catalog: Path) -> list[str] | None:
    """These keys, and for each author that runs have worked on since the last sync one more; None for all there are.

    All who ask for a sync within a window share one run, and it was told only of what the first of them touched.
    """
    if touched is None:
        return None
    try:
        with open_catalog(catalog) as reader:
            last = datetime.fromisoformat(reader.synced_at())
    except CatalogUnreadable:
        return None
    # If it is yet to come, a clock was ahead or is behind, and who was worked on meanwhile cannot be told.
    if not timedelta() <= datetime.now(UTC) - last <= timedelta(days=1):
        return None
    authors = list_worked_on(last - _SLACK)
    if len(authors) > _MOST_AUTHORS:
        return None
    # A run that was asked for by hand may have been told of an author who cannot be.
    return [*touched, *(author_record_key(author) for author in sorted(authors) if is_author(author))]


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
