"""Starts a run for every upload that needs one and has none: events may be lost, uploads are not."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.asking import list_asked, request_onboard
from flows.connect import open_store
from flows.settings import load_settings
from tasks.sweeping import list_due


@flow(name="sweep", persist_result=False)
def sweep() -> State:
    """Look at every upload once and start what is due, the oldest first.

    No more than `sweep_batch` runs are started or left waiting for a worker at a time.
    """
    log = get_run_logger()
    settings = load_settings()
    now = datetime.now(UTC)
    due = list_due(open_store(settings), now=now, grace_s=settings.sweep_grace_seconds)
    asked = list_asked() if due else set()
    on_their_way = 0
    for one in due:
        if on_their_way == settings.sweep_batch:
            break
        if one.key in asked:
            on_their_way += 1
        elif request_onboard(one.author, one.run, key=one.key, submission=one.submission):
            log.info("%s/%s: %s; a run is on its way", one.author, one.run, one.why)
            on_their_way += 1
    oldest = f"; the oldest was submitted {now - due[0].since} ago" if due else ""
    message = f"{len(due)} uploads were due, {on_their_way} runs are on their way{oldest}"
    log.info("%s", message)
    return Completed(name="Started" if on_their_way else "Quiet", message=message)
