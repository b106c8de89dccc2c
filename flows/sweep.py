"""Starts a run for every upload that needs one and has none: events may be lost, uploads are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.alone import held_briefly
from flows.asking import Log, bring_forward, list_asked, request_onboard
from flows.connect import open_store
from flows.schedule import fill_gap
from flows.settings import load_settings
from flows.telling import aside
from flows.tidying import mark_dead
from tasks.at_rest import MEMORY_FILE
from tasks.inbox import PendingUpload
from tasks.sweeping import list_due


@flow(name="sweep", persist_result=False)
@held_briefly()
def sweep() -> State:
    """Look at every upload once and start what is due, the oldest first.

    No more than `sweep_batch` runs are started or left waiting for a worker at a time.
    """
    log = get_run_logger()
    try:
        return _look(log)
    finally:
        # Last of all, and whatever has failed: clocks that are ahead use up the schedule while this runs.
        with aside(log, "whether another sweep is planned could not be told"):
            if fill_gap():
                log.info("no sweep was planned for the next two minutes: one is asked for")


def _look(log: Log) -> State:
    settings = load_settings()
    now = datetime.now(UTC)
    store = open_store(settings)
    mark_dead(store, settings.dead_after_seconds, log)
    swept = list_due(
        store,
        now=now,
        grace_s=settings.sweep_grace_seconds,
        settle_s=settings.settle_seconds,
        memory=settings.home / MEMORY_FILE,
    )
    on_their_way = 0
    asked = list_asked([one.key for one in swept.due])
    for one in swept.due:
        if on_their_way == settings.sweep_batch:
            break
        if asked.covers(one.author, one.run, one.key):
            on_their_way += 1
            continue
        if (one.author, one.run) in asked.put_off:
            bring_forward(asked.put_off[one.author, one.run])
            log.info("%s/%s: its run was scheduled for later, and is brought forward", one.author, one.run)
            on_their_way += 1
            continue
        if one.key in asked.resting:
            continue
        ended = asked.ended.get(one.key, 0)
        if request_onboard(one.author, one.run, key=one.key, submission=one.submission, ended=ended):
            log.info("%s/%s: %s; a run is on its way", one.author, one.run, one.why)
            on_their_way += 1
    message = f"{len(swept.due)} uploads were due, {on_their_way} runs are on their way; {describe(swept.pending, now)}"
    log.info("%s", message)
    return Completed(name="Started" if on_their_way else "Quiet", message=message)


def describe(pending: Sequence[PendingUpload], now: datetime) -> str:
    """How many uploads have no verdict yet, in which state, and how long the oldest has been there; oldest first."""
    if not pending:
        return "every upload has its verdict"
    oldest = pending[0]
    counts = Counter(one.state.value for one in pending)
    states = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
    age = str(now - oldest.since).partition(".")[0]
    said = "" if oldest.code is None else f", {oldest.code}"
    return (
        f"{len(pending)} have no verdict ({states}), "
        f"the oldest, {oldest.author}/{oldest.run}, for {age} ({oldest.state.value}{said})"
    )
