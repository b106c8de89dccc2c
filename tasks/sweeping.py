"""What no event has started: new uploads, waits whose cause is gone, stops whose pause is over, runs that died."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from storage.claims import read_ledger
from storage.digests import FileDigest, directory_digest, is_adapter_file
from storage.documents import read_document
from storage.errors import InvalidDocument, ObjectNotFound
from storage.keys import TRAINING_FILE, marker_key
from storage.ledger import Ledger, Outcome, Step
from storage.s3 import S3Store
from storage.uploads import ReadyUpload, UploadMarker, list_uploads
from tasks.intake import AdapterWaits, Hindrance, IntakeRefused, take_in, take_upload
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


def list_due(store: S3Store, *, now: datetime, grace_s: int) -> list[Due]:
    """Every upload that needs a run and has none, the oldest first.

    Uploads younger than `grace_s` seconds are left to their event. One whose marker cannot be read, or whose name we do
    not take, gets a run that says so, once for each marker. An upload whose ledger cannot be read is left out; the
    catalog shows it.

    Raises:
        StoreUnavailable, StoreNotTrusted.
    """
    listing = list_uploads(store)
    unreadable = [(upload, "its name is none that we take") for upload in listing.misnamed]
    due = []
    for upload in listing.ready:
        try:
            marker = _read_marker(store, upload)
        except ObjectNotFound:  # being replaced
            continue
        if marker is None:
            unreadable.append((upload, "its marker is none of this upload"))
            continue
        try:
            ledger = _ledger(store, marker)
        except InvalidDocument:
            continue
        # A trainer's clock may be hours ahead, or tell another zone's time.
        since = min(marker.submitted_at, upload.marker.last_modified)
        why = reason_to_run(marker, ledger, since=since, now=now, grace_s=grace_s)
        if why is None or _still_waits(store, marker, ledger):
            continue
        attempt = "" if ledger is None or not _knows(ledger, marker) else f"/{len(ledger.steps)}"
        key = f"{marker.author}/{marker.run}/{marker.submission}{attempt}"
        due.append(Due(marker.author, marker.run, marker.submission, key, why, since))
    old = now - timedelta(seconds=grace_s)
    due += [_unreadable(upload, why) for upload, why in unreadable if upload.marker.last_modified <= old]
    return sorted(due, key=lambda one: (one.since, one.key))


def reason_to_run(
    marker: UploadMarker, ledger: Ledger | None, *, since: datetime, now: datetime, grace_s: int
) -> str | None:
    """Why this upload, which has been there `since`, needs a run now; None if it does not."""
    if ledger is None or not _knows(ledger, marker):
        young = now - since < timedelta(seconds=grace_s)
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
    """Doubles with every stop in a row; longer after one in which the engine died."""
    stops = 0
    for step in reversed(steps):
        if step.outcome is not Outcome.STOPPED:
            break
        stops += 1
    least = _PAUSE_AFTER_A_DEATH if DEATH in steps[-1].result else _FIRST_PAUSE
    return max(least, min(_LONGEST_PAUSE, _FIRST_PAUSE * (1 << min(stops - 1, 16))))


def _is_about(verdict: Step, marker: UploadMarker) -> bool:
    """Whether a verdict is about what this upload states: its base, its training.json."""
    stated = {file.name: file.sha256 for file in marker.files}.get(TRAINING_FILE, "none")
    return (verdict.inputs.get("base"), verdict.inputs.get("training")) == (marker.base, stated)


def _knows(ledger: Ledger, marker: UploadMarker) -> bool:
    return any(known.submission == marker.submission for known in ledger.submissions)


def _read_marker(store: S3Store, upload: ReadyUpload) -> UploadMarker | None:
    """An upload's marker, None for what is no marker, or that of another upload."""
    try:
        marker, _ = read_document(store, marker_key(upload.author, upload.run), UploadMarker)
    except InvalidDocument:
        return None
    return marker if (marker.author, marker.run) == (upload.author, upload.run) else None


def _unreadable(upload: ReadyUpload, why: str) -> Due:
    """A run that ends as refused, and so is not repeated: else nobody would be told of it."""
    key = f"{upload.author}/{upload.run}/{upload.marker.etag.strip(chr(34))}"
    since = upload.marker.last_modified
    return Due(upload.author, upload.run, "", key, why, since)


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
    last = ledger.steps[-1] if ledger is not None and ledger.steps and _knows(ledger, marker) else None
    if last is not None and last.outcome is not Outcome.WAITING:
        return False
    try:
        if last is None:
            take_upload(store, marker.author, marker.run)
            return False
        needs = take_in(store, marker.author, marker.run).needs
    except AdapterWaits:
        return True
    except IntakeRefused:
        return False
    return isinstance(needs, Hindrance) and needs.code.value == last.result.get("code")
