"""Deciding verdicts again from the scores that are there."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter, validators

from flows.cli.output import AsJson, emit, note, table

if TYPE_CHECKING:
    from flows.settings import Settings
    from tasks.rejudging import Rejudged

_WHOSE = Group("Whose verdicts (authors or --all)", validator=validators.LimitedChoice(1, 1))
_SHOWN_DIGITS = 12


def rejudge(
    *authors: Annotated[str, Parameter(group=_WHOSE)],
    every: Annotated[bool, Parameter(name="--all", group=_WHOSE, negative="", show_default=False)] = False,
    dry_run: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: AsJson = False,
) -> None:
    """Decide verdicts again from the scores in the ledger, by the thresholds that are set now. No engine is asked.

    For when a threshold (ROSTER_FLOOR_BPB, ROSTER_MIN_UNITS, …) or the rules have changed. Each new verdict is
    recorded with its thresholds, and a sync is asked for. An adapter whose run is not at its end, or was refused before
    it was scored, is left alone. An adapter that is no longer ready leaves the roster with the next sync.

    ```
    roster rejudge --all --dry-run
    ```

    Parameters
    ----------
    authors:
        Whose adapters: all that were judged.
    every:
        The adapters of every author.
    dry_run:
        Say what would change, and record nothing.
    """
    from flows.cli.progress import part_progress
    from flows.connect import open_store, verdict_thresholds, worker_name
    from flows.settings import connect_prefect, load_settings
    from tasks.rejudging import list_adapters, rejudge_adapter

    settings = load_settings()
    connect_prefect(settings)
    store = open_store(settings)
    thresholds = verdict_thresholds(settings)
    adapters = list_adapters(store, authors)
    found: list[Rejudged] = []
    with part_progress("deciding") as progress:
        for done, (author, digest) in enumerate(adapters, start=1):
            found.append(
                rejudge_adapter(
                    store,
                    author,
                    digest,
                    thresholds,
                    dry_run=dry_run,
                    worker=worker_name(),
                    claim_seconds=settings.claim_seconds,
                )
            )
            progress(done, len(adapters))
    recorded = sum(one.is_recorded for one in found)
    synced = _ask_sync(settings) if recorded else None
    document = {
        "dry_run": dry_run,
        "thresholds": asdict(thresholds),
        "adapters": [asdict(one) | {"is_changed": one.is_changed} for one in found],
        "recorded": recorded,
        "sync_asked": synced,
    }
    emit(document, as_json=json, show=lambda: _show(found, dry_run=dry_run))
    if synced is False:
        note("no sync could be asked for: run `roster sync`")


def _ask_sync(settings: Settings) -> bool:
    """Have the roster follow; False where no Prefect server takes it."""
    if not settings.prefect_api_url:
        return False
    from prefect.client.orchestration import get_client

    from flows.asking import request_sync

    with get_client(sync_client=True) as client:
        if client.api_healthcheck() is not None:
            return False
    request_sync(settings.sync_window_seconds, logging.getLogger(__name__))
    return True


def _show(found: list[Rejudged], *, dry_run: bool) -> None:
    changed = [one for one in found if one.is_changed]
    rows = [
        (one.author, one.adapter_digest[:_SHOWN_DIGITS], one.base, one.before, one.after, one.reason)
        for one in changed
    ]
    table(("author", "adapter", "base", "before", "after", "why"), rows, empty="no verdict changes")
    for one in found:
        if one.after is None:
            note(f"{one.author} {one.adapter_digest[:_SHOWN_DIGITS]} is left as it is: {one.reason}")
        elif one.is_changed and not one.is_due and not one.is_recorded:
            note(f"{one.author} {one.adapter_digest[:_SHOWN_DIGITS]}: its verdict stays; score it again")
    count = sum(one.is_due for one in found) if dry_run else sum(one.is_recorded for one in found)
    said = "would be recorded" if dry_run else "recorded"
    note(f"{len(found)} adapters, {len(changed)} with another verdict, {count} verdicts {said}")
