"""What no event has started: new uploads, waits whose cause is gone, stops whose pause is over, runs that died."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from storage.ledger import Outcome, Step
from storage.s3 import S3Store
from tasks.inbox import READERS, PendingUpload, Sighting, UploadState, look_over
from tasks.intake import AdapterWaits, Hindrance, IntakeRefused, take_in
from tasks.poison import DEATH

_FIRST_PAUSE = timedelta(minutes=1)
_LONGEST_PAUSE = timedelta(hours=1)
# Longer than the supervisor remembers a failure: an adapter that kills engines must not use up the restarts.
_PAUSE_AFTER_A_DEATH = timedelta(minutes=11)


@dataclass(frozen=True, slots=True)
class Due:
    """An upload that a flow run should be started for; the same `key` never starts two."""

    author: str
    run: str
    submission: str
    key: str
    why: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Swept:
    """What one look found, the oldest first: what needs a run and has none, and everything that has no verdict yet."""

    due: list[Due]
    pending: list[PendingUpload]


def list_due(
    store: S3Store, *, now: datetime, grace_s: int, settle_s: int, memory: Path | None = None
) -> Swept:
    """Every upload that needs a run and has none, among all those without a verdict.

    Uploads younger than `grace_s` seconds are left to their event. Files without a marker are due once they have not
    changed for `settle_s` seconds, are a whole adapter and name a registered base. An upload whose marker cannot be
    read, or whose name we do not take, gets a run that says so, once for each marker. One whose ledger cannot be read
    is left out; the catalog shows it. So are those of retired authors. `memory`: see `tasks.inbox.list_pending`.

    Raises:
        StoreUnavailable, StoreNotTrusted.
    """
    seen = look_over(store, now=now, settle_s=settle_s, memory=memory)

    def is_due(one: Sighting) -> bool:
        if one.why is None or now < _earliest(one, timedelta(seconds=grace_s)):
            return False
        return one.upload.state is not UploadState.WAITING or not _still_waits(store, one)

    with ThreadPoolExecutor(READERS) as pool:
        due = [
            _as_due(one, one.why)
            for one, is_one in zip(seen, pool.map(is_due, seen), strict=True)
            if is_one and one.why
        ]
    return Swept(due, [one.upload for one in seen])


def _as_due(one: Sighting, why: str) -> Due:
    upload = one.upload
    attempt = "" if one.ledger is None else f"/{len(one.ledger.steps)}"
    key = f"{upload.author}/{upload.run}/{one.token}{attempt}"
    return Due(upload.author, upload.run, upload.submission, key, why, upload.since)


def _earliest(one: Sighting, grace: timedelta) -> datetime:
    """When its turn comes: what nobody took up is left to its event for a while, what stopped has a pause."""
    if one.upload.state is UploadState.STOPPED and one.ledger is not None:
        return one.ledger.steps[-1].finished_at + _pause(one.ledger.steps)
    return one.upload.since if one.ledger is not None else one.upload.since + grace


def _pause(steps: tuple[Step, ...]) -> timedelta:
    """Doubles with every stop in a row; longer after one in which the engine died."""
    stops = 0
    for step in reversed(steps):
        if step.outcome is not Outcome.STOPPED:
            break
        stops += 1
    least = _PAUSE_AFTER_A_DEATH if DEATH in steps[-1].result else _FIRST_PAUSE
    return max(least, min(_LONGEST_PAUSE, _FIRST_PAUSE * (1 << min(stops - 1, 16))))


def _still_waits(store: S3Store, one: Sighting) -> bool:
    """Whether a run would only say once more what it waits for."""
    try:
        needs = take_in(store, one.upload.author, one.upload.run).needs
    except AdapterWaits:
        return True
    except IntakeRefused:
        return False
    return isinstance(needs, Hindrance) and needs.code.value == one.upload.code
