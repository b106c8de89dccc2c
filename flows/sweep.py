"""Starts a run for every upload that needs one and has none: events may be lost, uploads are not."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.asking import request_onboard
from flows.connect import open_store
from flows.settings import load_settings
from tasks.sweeping import list_due


@flow(name="sweep", persist_result=False)
def sweep() -> State:
    """Look at every upload once and start what is due, the oldest first, a bounded number at a time."""
    log = get_run_logger()
    settings = load_settings()
    now = datetime.now(UTC)
    due = list_due(open_store(settings), now=now, grace_s=settings.sweep_grace_seconds)
    for one in due[: settings.sweep_batch]:
        log.info("%s/%s: %s; starting a run", one.author, one.run, one.why)
        request_onboard(one.author, one.run, key=one.key, submission=one.submission)
    oldest = f"; the oldest was submitted {now - due[0].since} ago" if due else ""
    message = f"{len(due)} uploads were due{oldest}"
    log.info("%s", message)
    return Completed(name="Started" if due else "Quiet", message=message)
