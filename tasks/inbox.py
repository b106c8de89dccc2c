"""Every upload that has no verdict yet, and what became of it: one look at the store, for sweeps and for people."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from storage.author_record import AuthorRecord, check_taken_up, read_author_record
from storage.claims import is_held, read_ledger
from storage.documents import read_document
from storage.errors import AuthorRetired, BaseUndecided, InvalidDocument, ObjectNotFound, PreconditionFailed
from storage.keys import MARKER_FILE, TRAINING_FILE, is_upload_name, ledger_key
from storage.ledger import Ledger, Outcome, Step
from storage.listing import UploadFolder, list_uploads
from storage.s3 import S3Store
from storage.settled import (
    find_stated_base,
    is_recopied,
    settled_submission,
    unfinished_fault,
    unsettled_fault,
)
from storage.uploads import UploadMarker
from tasks.at_rest import AtRest
from tasks.intake import AdapterWaits, IntakeRefused, take_upload
from tasks.outcomes import Code, is_transient, rule

READERS = 16
"""How many threads read from the store at once; its client keeps 32 connections."""


class UploadState(StrEnum):
    """What an upload without a verdict is at."""

    SETTLING = "settling"  # files without a marker, changed a short while ago
    INCOMPLETE = (
        "incomplete"  # a marker whose files are not there as it says; files without one, no whole adapter
    )
    NEW = "new"  # complete, and no run has taken it up
    CLAIMED = "claimed"  # a run holds it
    WAITING = "waiting"  # its last step waits; or its files are settled, and its base is unknown
    STOPPED = "stopped"  # its last step stopped
    DIED = "died"  # its ledger ends without a verdict, and nobody holds it
    RETIRED = "retired"  # an operator retired its author: it is passed over
    UNREADABLE = (
        "unreadable"  # a marker that is none, a name that we do not take, a ledger that cannot be read
    )


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An upload that has no verdict on its latest submission.

    `submission` is empty where no marker can be read. `since` is when it was submitted, by the store's clock where the
    trainer's is ahead. `code` and `reason` are of the last step, or say what is missing. `changed_at` and `flow_run`
    are of the last step, `holder` and `expires_at` of the claim that holds. `steps` is how many the ledger has.
    """

    author: str
    run: str
    submission: str
    state: UploadState
    since: datetime
    adapter_digest: str | None = None
    base: str | None = None
    code: str | None = None
    reason: str | None = None
    changed_at: datetime | None = None
    flow_run: str | None = None
    holder: str | None = None
    expires_at: datetime | None = None
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A pending upload with what was read of it.

    `why` is why it needs a run: None where it needs none, or nothing could begin. `token` changes with what is there to
    be taken up: the submission or, for want of a marker that can be read, the files themselves. `ledger` is there where
    it knows this submission.
    """

    upload: PendingUpload
    why: str | None
    token: str
    ledger: Ledger | None = None


def list_pending(
    store: S3Store, *, now: datetime, settle_s: int, memory: Path | None = None
) -> list[PendingUpload]:
    """Every upload that has no verdict on its latest submission, the oldest first.

    Files without a marker count as settled when none changed within `settle_s` seconds. With a file as `memory`, those
    found there with a verdict are read again only when something of them has changed (`tasks.at_rest`).

    Raises:
        StoreUnavailable, StoreNotTrusted.
    """
    return [one.upload for one in look_over(store, now=now, settle_s=settle_s, memory=memory)]


def look_over(store: S3Store, *, now: datetime, settle_s: int, memory: Path | None = None) -> list[Sighting]:
    """Every pending upload with why it needs a run, the oldest first; see `list_pending`.

    Listings, then the marker and the ledger of each upload that is not known to be at rest, by several threads at once.

    Raises:
        StoreUnavailable, StoreNotTrusted.
    """
    listing = list_uploads(store)
    rest = AtRest({}, {}) if memory is None else AtRest.read(store, memory)
    folders = [one for one in (*listing.ready, *listing.unmarked) if not rest.is_known(one)]

    def look(folder: UploadFolder) -> Sighting | str:
        return _look(store, folder, now=now, settle_s=settle_s)

    seen = [_misnamed(folder, now, settle_s) for folder in listing.misnamed]
    with ThreadPoolExecutor(READERS) as pool:
        for folder, found in zip(folders, pool.map(look, folders), strict=True):
            if isinstance(found, Sighting):
                seen.append(found)
            else:
                rest.note(folder, found)
        seen = _with_retired(store, seen, pool)
    if memory is not None:
        rest.write(memory)
    return sorted(seen, key=lambda one: (one.upload.since, one.upload.author, one.upload.run))


def _with_retired(store: S3Store, seen: list[Sighting], pool: ThreadPoolExecutor) -> list[Sighting]:
    """The same with the uploads of retired authors as such, unless a run is at them."""
    authors = sorted({one.upload.author for one in seen if is_upload_name(one.upload.author, one.upload.run)})

    def read(author: str) -> AuthorRecord | None:
        try:
            return read_author_record(store, author)
        except InvalidDocument:
            return None  # a run says so

    records = dict(zip(authors, pool.map(read, authors), strict=True))

    def told(one: Sighting) -> Sighting:
        record = records.get(one.upload.author)
        if record is None or one.upload.state is UploadState.CLAIMED:
            return one
        try:
            check_taken_up(record, one.upload.base)
        except AuthorRetired as error:
            code = Code.AUTHOR_RETIRED.value
            upload = replace(one.upload, state=UploadState.RETIRED, code=code, reason=str(error))
            return replace(one, upload=upload, why=None)
        return one

    return [told(one) for one in seen]


def _look(store: S3Store, folder: UploadFolder, *, now: datetime, settle_s: int) -> Sighting | str:
    """What an upload is at, or the key of the ledger in which its verdict stands."""
    if folder.marker is None:
        return _unmarked(store, folder, now, settle_s)
    try:
        marker, _ = read_document(store, folder.marker.key, UploadMarker)
    except ObjectNotFound:  # being replaced
        return _unmarked(store, folder, now, settle_s)
    except InvalidDocument as error:
        return _unreadable(folder, str(error), "its marker is none of this upload")
    if (marker.author, marker.run) != (folder.author, folder.run):
        reason = f"{MARKER_FILE} is the marker of {marker.author}/{marker.run}: submit this upload under its own name"
        return _unreadable(folder, reason, "its marker is none of this upload")
    if is_recopied(folder, marker):
        return _unmarked(store, folder, now, settle_s)
    return _marked(store, folder, marker, folder.marker.last_modified, now)


def _marked(
    store: S3Store, folder: UploadFolder, marker: UploadMarker, put_at: datetime, now: datetime
) -> Sighting | str:
    digest = marker.adapter_digest
    # A trainer's clock may be hours ahead, or tell another zone's time.
    since = min(marker.submitted_at, put_at)
    fault: str | None = None
    try:
        ledger: Ledger | None = read_ledger(store, marker.author, digest)[0]
    except ObjectNotFound:
        ledger = None
    except InvalidDocument as error:
        ledger, fault = None, str(error)
    known = ledger is not None and any(ref.submission == marker.submission for ref in ledger.submissions)

    def seen(
        state: UploadState,
        why: str | None,
        *,
        code: str | None = None,
        reason: str | None = None,
        last: Step | None = None,
    ) -> Sighting:
        claim = ledger.claim if ledger is not None and state is UploadState.CLAIMED else None
        upload = PendingUpload(
            author=marker.author,
            run=marker.run,
            submission=marker.submission,
            state=state,
            since=since,
            adapter_digest=digest,
            base=marker.base,
            code=code,
            reason=reason,
            changed_at=last.finished_at if last else None,
            flow_run=last.flow_run if last else None,
            holder=claim.holder if claim else None,
            expires_at=claim.expires_at if claim else None,
            steps=len(ledger.steps) if ledger is not None and known else 0,
        )
        return Sighting(upload, why, marker.submission, ledger if known else None)

    if fault is not None:
        return seen(UploadState.UNREADABLE, None, code=Code.INTERNAL, reason=fault)
    if ledger is None or not known:
        missing = _missing(store, folder, marker)
        if missing is not None:
            return seen(UploadState.INCOMPLETE, None, code=Code.INCOMPLETE_UPLOAD, reason=missing)
        return seen(UploadState.NEW, "no run has taken it up")
    last = ledger.steps[-1] if ledger.steps else None
    told = {name: str(last.result[name]) for name in ("code", "reason") if last and last.result.get(name)}
    code, reason = told.get("code"), told.get("reason")
    if is_held(store, ledger, now):
        return seen(UploadState.CLAIMED, None, code=code, reason=reason, last=last)
    if any(ref.submission > marker.submission for ref in ledger.submissions):
        return ledger_key(marker.author, digest)  # history: the last submission of an adapter decides
    if last is not None and last == ledger.verdict:
        if not _is_about(last, marker):
            return seen(UploadState.NEW, "it was submitted again while a run was at it")
        newest = max((found.last_modified for found in folder.own.values()), default=last.finished_at)
        if is_transient(last.result) and newest >= last.finished_at:  # which is told to the second
            return seen(UploadState.NEW, "its files came anew since they were refused")
        return ledger_key(marker.author, digest)
    if last is not None and last.outcome is Outcome.WAITING:
        return seen(UploadState.WAITING, "its wait may be over", code=code, reason=reason, last=last)
    if last is not None and last.outcome is Outcome.STOPPED:
        return seen(UploadState.STOPPED, "it was stopped", code=code, reason=reason, last=last)
    return seen(UploadState.DIED, "its run died", last=last)


def _unmarked(store: S3Store, folder: UploadFolder, now: datetime, settle_s: int) -> Sighting:
    """Files without a marker that counts: still settling, no whole adapter, of no known base, or to be taken up."""

    def seen(
        state: UploadState, why: str | None, code: Code | None, reason: str | None, base: str | None = None
    ) -> Sighting:
        upload = PendingUpload(
            folder.author, folder.run, "", state, folder.newest, base=base, code=code, reason=reason
        )
        return Sighting(upload, why, settled_submission(folder) if folder.own else "")

    fault = unsettled_fault(folder, now=now, settle_s=settle_s)
    if fault is not None:
        return seen(UploadState.SETTLING, None, Code.INCOMPLETE_UPLOAD, fault)
    fault = unfinished_fault(store, folder)
    if fault is not None:
        return seen(UploadState.INCOMPLETE, None, Code.INCOMPLETE_UPLOAD, fault)
    try:
        base = find_stated_base(store, folder)
    except BaseUndecided as error:
        return seen(UploadState.WAITING, None, Code.UNKNOWN_BASE, str(error))
    except InvalidDocument as error:
        return seen(UploadState.STOPPED, None, Code(rule(error).code), str(error))
    except (ObjectNotFound, PreconditionFailed) as error:
        return seen(UploadState.SETTLING, None, Code.INCOMPLETE_UPLOAD, f"{error.key} was replaced just now")
    return seen(UploadState.NEW, "its files are settled, and have no marker", None, None, base)


def _misnamed(folder: UploadFolder, now: datetime, settle_s: int) -> Sighting:
    fault = unsettled_fault(folder, now=now, settle_s=settle_s) if folder.marker is None else None
    if fault is not None:
        upload = PendingUpload(
            folder.author, folder.run, "", UploadState.SETTLING, folder.newest, reason=fault
        )
        return Sighting(upload, None, "")
    reason = f"{folder.author}/{folder.run} is no name that we take; see docs/store.md, and submit it under another"
    return _unreadable(folder, reason, "its name is none that we take")


def _unreadable(folder: UploadFolder, reason: str, why: str) -> Sighting:
    """A run that ends as refused, and so is not repeated: else nobody would be told of it."""
    upload = PendingUpload(
        folder.author, folder.run, "", UploadState.UNREADABLE, folder.newest, reason=reason
    )
    if folder.marker is not None:
        return Sighting(upload, why, folder.marker.etag.strip(chr(34)))
    return Sighting(upload, why, settled_submission(folder) if folder.own else "files")


def _missing(store: S3Store, folder: UploadFolder, marker: UploadMarker) -> str | None:
    """What an upload that no run knows waits for. A listing may lag: what it leaves out is asked for by name."""
    there = all(
        file.name in folder.files and folder.files[file.name].bytes == file.bytes for file in marker.files
    )
    if there and all(file.name != TRAINING_FILE for file in marker.files):
        return None
    try:
        take_upload(store, marker.author, marker.run)
    except AdapterWaits as waits:
        return waits.reason
    except IntakeRefused:
        return None  # a run says so
    return None


def _is_about(verdict: Step, marker: UploadMarker) -> bool:
    """Whether a verdict is about what this upload states: its base, its training.json."""
    stated = {file.name: file.sha256 for file in marker.files}.get(TRAINING_FILE, "none")
    return (verdict.inputs.get("base"), verdict.inputs.get("training")) == (marker.base, stated)
