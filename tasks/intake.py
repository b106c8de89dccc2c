"""Taking an upload in: complete, its base known, its held-out text there, and claimed by this run alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.author_record import check_taken_up, read_author_record
from storage.bases import Base, read_base
from storage.claims import LedgerHandle, open_ledger
from storage.digests import step_key
from storage.documents import utc_now
from storage.errors import (
    AuthorRetired,
    BaseConflict,
    BaseUndecided,
    ClaimHeld,
    HeldoutMissing,
    InvalidDocument,
    InvalidName,
    LedgerBusy,
    ObjectNotFound,
    StoreUnavailable,
    UnknownBase,
    UploadChanged,
    UploadIncomplete,
)
from storage.heldout import HeldoutSet, list_heldout, read_heldout
from storage.keys import parse_heldout_ref
from storage.ledger import Outcome, Step, StepKind, SubmissionRef
from storage.policy import Policy, find_policy
from storage.s3 import S3Store
from storage.settled import adopt_upload
from storage.uploads import Upload, read_upload
from tasks.disk import RunDisk, trim_folders
from tasks.job import STEP_VERSIONS, Job, JobLimits
from tasks.outcomes import Code, rule

RESCORED = frozenset({StepKind.OPPONENTS, StepKind.SCORED, StepKind.VERDICT})
# Converted adapters that stay on a worker's disk when a run ends, for each base.
_KEPT = 16
# Uploads that do, of runs that were killed or stopped before their check was done.
_KEPT_SOURCES = 2
Log = logging.Logger | logging.LoggerAdapter[Any]


class AdapterWaits(Exception):
    """Something this adapter needs is not there yet; the sweep takes it again when it is."""

    def __init__(self, label: str, code: Code, reason: str) -> None:
        """Keep which adapter waits for what."""
        self.label, self.code, self.reason = label, code, reason
        super().__init__(label, code, reason)

    def __str__(self) -> str:
        """Name the adapter and what it waits for."""
        return f"{self.label} waits: {self.reason}"


class AdapterStopped(Exception):
    """A document that is an operator's to mend keeps this adapter from being taken up; tried again after pauses."""

    def __init__(self, label: str, code: Code, reason: str) -> None:
        """Keep which adapter, and why."""
        self.label, self.code, self.reason = label, code, reason
        super().__init__(label, code, reason)

    def __str__(self) -> str:
        """Name the adapter and the reason."""
        return f"{self.label}: {self.reason}"


class AdapterBusy(Exception):
    """Another run holds this adapter's claim."""

    def __init__(self, label: str, holder: str, expires_at: datetime) -> None:
        """Keep who holds it and until when."""
        self.label, self.holder, self.expires_at = label, holder, expires_at
        super().__init__(label, holder, expires_at)

    def __str__(self) -> str:
        """Name the holder, and when its claim ends if it has died."""
        return (
            f"{self.label}: {self.holder} is working on it; "
            f"if that run has died, its claim ends at {self.expires_at:%H:%M:%S} UTC and the sweep takes over"
        )


class IntakeRefused(Exception):
    """An upload cannot be taken up as it is, and has no ledger of its own to say so."""

    def __init__(self, label: str, code: str, reason: str) -> None:
        """Keep which upload, and why."""
        self.label, self.code, self.reason = label, code, reason
        super().__init__(label, code, reason)

    def __str__(self) -> str:
        """Name the upload and the reason."""
        return f"{self.label}: {self.reason}"


class Superseded(Exception):
    """The same adapter was submitted again since, and that submission is the one that counts."""

    def __init__(self, label: str, submission: str, latest: str) -> None:
        """Keep both submissions."""
        self.label, self.submission, self.latest = label, submission, latest
        super().__init__(label, submission, latest)

    def __str__(self) -> str:
        """Name both."""
        return (
            f"{self.label}: submission {self.submission} of this adapter was followed by {self.latest}, "
            "whose run decides"
        )


@dataclass(frozen=True, slots=True)
class Hindrance:
    """Why nothing can begin with a complete upload: what it waits for, or a document that an operator has to mend."""

    outcome: Outcome
    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class Needs:
    """What an upload is judged with; `policy` is the operator's, where one applies to this base."""

    base: Base
    policy: Policy | None
    heldout: tuple[HeldoutSet, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """A complete upload with what it needs, or with what keeps it from being begun with."""

    upload: Upload
    needs: Needs | Hindrance


@task(name="intake", persist_result=False, cache_policy=NO_CACHE)
def intake(store: S3Store, author: str, run: str, settle_s: int) -> Taken:
    """An upload with what it refers to, see `take_in`; files that came without a marker are given theirs first.

    Raises:
        AdapterWaits: also where such files changed within `settle_s` seconds, are no whole adapter, or name no base.
        AdapterStopped: the document of a base, among which theirs is looked for, cannot be read.
        IntakeRefused: see `take_in`.
    """
    label = f"{author}/{run}"
    try:
        adopt_upload(store, author, run, settle_s=settle_s, now=utc_now())
    except (UploadIncomplete, UploadChanged, BaseUndecided) as error:
        raise AdapterWaits(label, Code(rule(error).code), str(error)) from error
    except InvalidName as error:
        raise IntakeRefused(label, Code.AMBIGUOUS_UPLOAD.value, str(error)) from error
    except InvalidDocument as error:
        raise AdapterStopped(label, Code(rule(error).code), str(error)) from error
    return take_in(store, author, run)


def take_in(store: S3Store, author: str, run: str) -> Taken:
    """A complete upload with its base, the operator's policy and its held-out text, or with what is amiss with these.

    Raises:
        AdapterWaits: the upload is not complete yet (nothing to record: it has no digest).
        IntakeRefused: it cannot be read as an upload.
    """
    upload = take_upload(store, author, run)
    try:
        check_taken_up(read_author_record(store, author), upload.marker.base)
        base = read_base(store, upload.marker.base)
        needs = Needs(base, find_policy(store, base.name), _read_heldout(store, upload))
    except (AuthorRetired, UnknownBase, HeldoutMissing, InvalidDocument) as error:
        return Taken(upload, _hindrance(error))
    return Taken(upload, needs)


def _hindrance(error: Exception) -> Hindrance:
    ruling = rule(error)
    return Hindrance(ruling.outcome, Code(ruling.code), str(error))


def take_upload(store: S3Store, author: str, run: str) -> Upload:
    """A complete upload by itself.

    Raises:
        AdapterWaits: it is not complete yet.
        IntakeRefused: it cannot be read as an upload.
    """
    label = f"{author}/{run}"
    try:
        return read_upload(store, author, run)
    except UploadIncomplete as error:
        raise AdapterWaits(label, Code.INCOMPLETE_UPLOAD, str(error)) from error
    except InvalidName as error:
        raise IntakeRefused(label, Code.AMBIGUOUS_UPLOAD.value, str(error)) from error
    except InvalidDocument as error:
        # Its marker: a file of the upload's, unlike the operator's documents that are read later.
        raise IntakeRefused(label, Code.CORRUPT_OR_PARTIAL.value, str(error)) from error


@contextmanager
def claimed_job(
    store: S3Store,
    taken: Taken,
    limits: JobLimits,
    *,
    worker: str,
    flow_run: str,
    force: bool,
    rescore: bool,
    log: Log,
) -> Iterator[Job]:
    """A job whose ledger this run has claimed, renewed until the block ends.

    However the block ends, the claim is given back, the run's own files go, and the disk is trimmed.

    Raises:
        IntakeRefused: the ledger cannot be used, or is ready for another base.
        Superseded: the adapter was submitted again since.
        AdapterBusy: another run holds the claim.
        AdapterWaits, AdapterStopped: the author is retired, or base or held-out text is missing or cannot be used; the
            ledger has it.
    """
    marker = taken.upload.marker
    label = f"{marker.author}/{marker.run}"
    ledger = _open_ledger(store, taken.upload, label)
    _claim(ledger, label, worker, flow_run, limits.claim_seconds, log)
    disk = RunDisk(limits.work_path)
    try:
        latest = max(known.submission for known in ledger.document.submissions)
        if marker.submission < latest:
            raise Superseded(label, marker.submission, latest)
        needs = _still_takes(store, taken)
        if isinstance(needs, Hindrance):
            raise _hinder(ledger, label, needs, worker, flow_run)
        with ledger.keep_claim(limits.claim_seconds):
            yield Job(
                store=store,
                upload=taken.upload,
                base=needs.base,
                policy=needs.policy,
                heldout=needs.heldout,
                ledger=ledger,
                limits=limits,
                disk=disk,
                forced=frozenset(StepKind) if force else RESCORED if rescore else frozenset(),
                worker=worker,
                flow_run=flow_run,
                log=log,
            )
    finally:
        disk.close()
        trim_folders(list((limits.work_path / "served" / marker.base).glob("*/*")), _KEPT)
        trim_folders(list((limits.work_path / "sources").glob("*")), _KEPT_SOURCES)
        _release(ledger, label, log)


def _open_ledger(store: S3Store, upload: Upload, label: str) -> LedgerHandle:
    marker = upload.marker
    submission = SubmissionRef(run=marker.run, submission=marker.submission)
    try:
        return open_ledger(store, marker.author, upload.adapter_digest, marker.base, submission)
    except (BaseConflict, InvalidDocument) as error:
        raise IntakeRefused(label, rule(error).code.value, str(error)) from error


def _claim(ledger: LedgerHandle, label: str, worker: str, flow_run: str, seconds: float, log: Log) -> None:
    """Claim the adapter; over this flow run's own claim from before a Retry, once that has run out.

    Whoever clicks Retry on a run that was just killed means this run, not the sweep's next. That the process before
    is dead is not taken for granted: one that was called dead by mistake renews its claim, and goes on alone.

    Raises AdapterBusy.
    """
    # A Retry in Prefect keeps the flow run's id, and a container its process ids: the holder needs more.
    holder = f"{worker} {flow_run} {uuid4().hex[:8]}"
    try:
        ledger.claim(holder, seconds)
    except ClaimHeld as held:
        left = (held.expires_at - utc_now()).total_seconds()
        if flow_run not in held.holder.split() or left > seconds + 1:
            raise AdapterBusy(label, held.holder, held.expires_at) from held
        log.info("%s: waiting %.0f s for the claim of this run's earlier process to run out", label, left)
        time.sleep(max(0.0, left) + 0.1)
        try:
            ledger.claim(holder, seconds)
        except ClaimHeld as renewed:
            raise AdapterBusy(label, renewed.holder, renewed.expires_at) from renewed


def _still_takes(store: S3Store, taken: Taken) -> Needs | Hindrance:
    """What the upload is judged with, unless its author was retired since it was taken in.

    Asked once more under the claim: a purge breaks the claims that it finds after it has retired the author, so that no
    run goes on beside it.
    """
    marker = taken.upload.marker
    try:
        check_taken_up(read_author_record(store, marker.author), marker.base)
    except (AuthorRetired, InvalidDocument) as error:
        return _hindrance(error)
    return taken.needs


def _release(ledger: LedgerHandle, label: str, log: Log) -> None:
    """Give the claim back; where that fails it runs out by itself, and what the run has found stands."""
    try:
        ledger.release()
    except (StoreUnavailable, LedgerBusy, ObjectNotFound, InvalidDocument) as error:
        log.warning("%s: the claim could not be given back and has to run out: %s", label, error)


def _read_heldout(store: S3Store, upload: Upload) -> tuple[HeldoutSet, ...]:
    """The sets that training.json names, and all those of each author that it serves and names no set of."""
    training = upload.training
    refs = [parse_heldout_ref(ref) for ref in training.heldout] if training else []
    served = training.authors if training else ()
    if not refs and not served:
        served = (upload.marker.author,)
    named = {owner for owner, _ in refs}
    for owner in served:
        if owner not in named:
            names = list_heldout(store, owner)
            if not names:
                raise HeldoutMissing(owner, "main", ())
            refs += [(owner, name) for name in names]
    return tuple(read_heldout(store, owner, name) for owner, name in dict.fromkeys(refs))


def _hinder(
    ledger: LedgerHandle, label: str, hindrance: Hindrance, worker: str, flow_run: str
) -> AdapterWaits | AdapterStopped:
    """Put on the record why nothing could begin; a later run with the cause gone has another step key."""
    code = hindrance.code.value
    kind = StepKind.INSPECTED
    inputs = {"adapter": ledger.document.adapter_digest, "base": ledger.document.base, "waits_for": code}
    key = step_key({"kind": kind.value, "version": STEP_VERSIONS[kind], **inputs})
    now = utc_now()
    step = Step(
        kind=kind,
        step_key=key,
        attempt=ledger.next_attempt(kind, key),
        code_version=STEP_VERSIONS[kind],
        inputs=inputs,
        outcome=hindrance.outcome,
        result={"code": code, "codes": [code], "reason": hindrance.reason, "where": None},
        started_at=now,
        finished_at=now,
        worker=worker,
        flow_run=flow_run,
    )
    ledger.append(step)
    ends = AdapterWaits if hindrance.outcome is Outcome.WAITING else AdapterStopped
    return ends(label, hindrance.code, hindrance.reason)
