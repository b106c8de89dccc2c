"""Uploads as an operator who retries them sees them: pending ones, and those that have their verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from flows.retry_errors import UnknownUpload
from storage.claims import read_ledger
from storage.documents import read_document
from storage.keys import marker_key
from storage.ledger import TERMINAL, Ledger, StepKind
from storage.listing import list_uploads
from storage.s3 import S3Store
from storage.uploads import UploadMarker
from tasks.inbox import Sighting, look_over

SUPERSEDED = "superseded"
"""The state of an upload whose bytes were submitted again since: that submission decides."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An upload as it stands. `state` is an UploadState, SUPERSEDED, or the outcome of its verdict.

    `flow_run` is the run that wrote its ledger's last step, `steps` how many the ledger has, `finished` which kinds of
    steps ended for good.
    """

    author: str
    run: str
    submission: str
    adapter_digest: str | None
    base: str | None
    state: str
    code: str | None
    reason: str | None
    since: datetime
    has_verdict: bool = False
    holder: str | None = None
    flow_run: str | None = None
    steps: int = 0
    finished: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """Author and run, by which Prefect's runs are found."""
        return self.author, self.run

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.author}/{self.run}"


def list_pending_subjects(store: S3Store, *, now: datetime, settle_s: int) -> list[Subject]:
    """Every upload that has no verdict on its latest submission, the oldest first.

    Raises:
        StoreUnavailable, StoreNotTrusted.
    """
    return [_of_sighting(one) for one in look_over(store, now=now, settle_s=settle_s)]


def find_subjects(store: S3Store, targets: Sequence[str], *, now: datetime, settle_s: int) -> list[Subject]:
    """The uploads named as `<author>/<run>`, or as `<author>` for the author's latest; each once.

    Raises:
        UnknownUpload: there is no such upload.
        StoreUnavailable, StoreNotTrusted.
    """
    pending = {one.key: one for one in list_pending_subjects(store, now=now, settle_s=settle_s)}
    listing = list_uploads(store)
    runs: dict[str, set[str]] = {}
    for folder in (*listing.ready, *listing.unmarked, *listing.misnamed):
        runs.setdefault(folder.author, set()).add(folder.run)
    found: dict[tuple[str, str], Subject] = {}
    for target in targets:
        author, _, run = target.partition("/")
        if author not in runs:
            raise UnknownUpload(target, tuple(sorted(runs)))
        if run and run not in runs[author]:
            raise UnknownUpload(target, tuple(f"{author}/{one}" for one in sorted(runs[author])))
        wanted = [run] if run else runs[author]
        subjects = [pending.get((author, one)) or read_judged(store, author, one) for one in wanted]
        latest = max(subjects, key=lambda one: (one.since, one.submission))
        found[latest.key] = latest
    return list(found.values())


def read_judged(store: S3Store, author: str, run: str) -> Subject:
    """An upload that is not pending: its ledger ends in a verdict, or knows a later submission.

    Raises:
        ObjectNotFound: its marker or ledger is gone.
        InvalidDocument, StoreUnavailable.
    """
    marker, _ = read_document(store, marker_key(author, run), UploadMarker)
    digest = marker.adapter_digest
    ledger, _ = read_ledger(store, author, digest)
    later = max(ledger.submissions, key=lambda known: known.submission)
    verdict = ledger.verdict
    code, reason = (verdict.result.get("code"), verdict.result.get("reason")) if verdict else (None, None)
    is_superseded = later.submission > marker.submission
    if is_superseded:
        code, reason = None, f"the same adapter was submitted again: retry {author}/{later.run}"
    return Subject(
        author=author,
        run=run,
        submission=marker.submission,
        adapter_digest=digest,
        base=marker.base,
        state=SUPERSEDED if is_superseded or verdict is None else verdict.outcome,
        code=str(code) if code else None,
        reason=str(reason) if reason else None,
        since=marker.submitted_at,
        has_verdict=not is_superseded,
        steps=len(ledger.steps),
        finished=_finished(ledger),
    )


def _of_sighting(seen: Sighting) -> Subject:
    upload = seen.upload
    return Subject(
        author=upload.author,
        run=upload.run,
        submission=upload.submission,
        adapter_digest=upload.adapter_digest,
        base=upload.base,
        state=upload.state,
        code=upload.code,
        reason=upload.reason,
        since=upload.since,
        holder=upload.holder,
        flow_run=upload.flow_run,
        steps=upload.steps,
        finished=_finished(seen.ledger) if seen.ledger else (),
    )


def _finished(ledger: Ledger) -> tuple[str, ...]:
    done = {step.kind for step in ledger.steps if step.outcome in TERMINAL}
    return tuple(kind.value for kind in StepKind if kind in done)
