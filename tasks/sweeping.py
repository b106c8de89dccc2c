"""What no event has started: new uploads, waits whose cause is gone, stops whose pause is over, runs that died."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from storage.claims import read_ledger
from storage.digests import FileDigest, directory_digest, is_adapter_file
from storage.documents import read_document
from storage.errors import InvalidDocument, ObjectNotFound
from storage.keys import TRAINING_FILE, marker_key
from storage.ledger import Ledger, Outcome, Step
from storage.s3 import S3Store
from storage.uploads import UploadMarker, list_uploads
from tasks.intake import AdapterWaits, IntakeRefused, take_in

_FIRST_PAUSE = timedelta(minutes=1)
_LONGEST_PAUSE = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Due:
    """An upload that a flow run should be started for; the same `key` never starts two."""

    author: str
    run: str
    submission: str
    key: str
    why: str
    since: datetime


def list_due(store: S3Store, *, now: datetime, grace_s: int) -> list[Due]:
    """Every upload that needs a run and has none, the oldest first.

    Uploads younger than `grace_s` seconds are left to their event. An upload whose ledger cannot be read is left
    out; the catalog shows it.

    Raises:
        StoreUnavailable, StoreNotTrusted.
    """
    due = []
    for marker in _markers(store):
        try:
            ledger = _ledger(store, marker)
        except InvalidDocument:
            continue
        why = reason_to_run(marker, ledger, now=now, grace_s=grace_s)
        if why is None or _still_waits(store, marker, ledger):
            continue
        attempt = "" if ledger is None or not _knows(ledger, marker) else f"/{len(ledger.steps)}"
        key = f"{marker.author}/{marker.run}/{marker.submission}{attempt}"
        due.append(Due(marker.author, marker.run, marker.submission, key, why, marker.submitted_at))
    return sorted(due, key=lambda one: (one.since, one.key))


def reason_to_run(marker: UploadMarker, ledger: Ledger | None, *, now: datetime, grace_s: int) -> str | None:
    """Why this upload needs a run now, None if it does not."""
    if ledger is None or not _knows(ledger, marker):
        young = now - marker.submitted_at < timedelta(seconds=grace_s)
        return None if young else "no run has taken it up"
    if ledger.claim is not None and ledger.claim.expires_at > now:
        return None
    if any(known.submission > marker.submission for known in ledger.submissions):
        return None  # history: the last submission of an adapter decides
    last = ledger.steps[-1] if ledger.steps else None
    if last is None:
        return "its run died"
    if last == ledger.verdict:
        return None if _is_about(last, marker) else "it was submitted again while a run was at it"
    if last.outcome is Outcome.WAITING:
        return "its wait may be over"
    if last.outcome is Outcome.STOPPED:
        return "it was stopped" if now >= last.finished_at + _pause(ledger.steps) else None
    return "its run died"


def _pause(steps: tuple[Step, ...]) -> timedelta:
    """Doubles with every stop in a row."""
    stops = 0
    for step in reversed(steps):
        if step.outcome is not Outcome.STOPPED:
            break
        stops += 1
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * (1 << min(stops - 1, 16)))


def _is_about(verdict: Step, marker: UploadMarker) -> bool:
    """Whether a verdict is about what this upload states: its base, its training.json."""
    stated = {file.name: file.sha256 for file in marker.files}.get(TRAINING_FILE, "none")
    return (verdict.inputs.get("base"), verdict.inputs.get("training")) == (marker.base, stated)


def _knows(ledger: Ledger, marker: UploadMarker) -> bool:
    return any(known.submission == marker.submission for known in ledger.submissions)


def _markers(store: S3Store) -> Iterator[UploadMarker]:
    for upload in list_uploads(store).ready:
        try:
            marker, _ = read_document(store, marker_key(upload.author, upload.run), UploadMarker)
        except (ObjectNotFound, InvalidDocument):
            # Being replaced, or no marker of ours: a run of its own would say no more than `roster submit` does.
            continue
        yield marker


def _ledger(store: S3Store, marker: UploadMarker) -> Ledger | None:
    own = [
        FileDigest(file.name, file.bytes, file.sha256) for file in marker.files if is_adapter_file(file.name)
    ]
    try:
        return read_ledger(store, marker.author, directory_digest(own))[0]
    except ObjectNotFound:
        return None


def _still_waits(store: S3Store, marker: UploadMarker, ledger: Ledger | None) -> bool:
    """Whether a run would only say once more what it waits for."""
    last = ledger.steps[-1] if ledger is not None and ledger.steps else None
    if last is not None and last.outcome is not Outcome.WAITING:
        return False
    recorded = None if last is None else last.result.get("code")
    try:
        missing = take_in(store, marker.author, marker.run).waits_for
    except AdapterWaits:
        return True
    except IntakeRefused:
        return False
    return missing is not None and missing[0].value == recorded
