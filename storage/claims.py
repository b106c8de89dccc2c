"""Writing a ledger: compare-and-swap, under an expiring claim, from any number of machines."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from storage.documents import put_document, read_document, utc_now
from storage.errors import (
    BaseConflict,
    ClaimHeld,
    ClaimLost,
    InvalidDocument,
    LedgerBusy,
    ObjectNotFound,
    PreconditionFailed,
    StoreUnavailable,
)
from storage.keys import LEDGERS, ledger_key, ledger_prefix, parse_author_record_key, parse_ledger_key
from storage.ledger import TERMINAL, Claim, Ledger, Outcome, Step, StepKind, SubmissionRef
from storage.objects import ObjectInfo
from storage.s3 import S3Store

if TYPE_CHECKING:
    from storage.bulk import BulkReader

LONGEST_CLAIM = timedelta(minutes=10)
"""A claim is never made for longer."""

_WRITES = 100
_LONGEST_PAUSE = 0.2
_RENEWALS_PER_CLAIM = 3


class LedgerHandle:
    """One ledger in one worker's hands. Every change is written with If-Match and, on a race, applied anew.

    Threads may share it. `holder` names of claims must be unique per process that works: two processes of one
    name would both be let in.
    """

    def __init__(self, store: S3Store, document: Ledger, etag: str, now: Callable[[], datetime]) -> None:
        self.key = ledger_key(document.author, document.adapter_digest)
        self._store = store
        self._document = document
        self._etag = etag
        self._now = now
        self._holder: str | None = None
        self._lock = threading.Lock()

    @property
    def document(self) -> Ledger:
        """Return the ledger as last read or written here."""
        return self._document

    def finished(self, kind: StepKind, step_key: str) -> Step | None:
        """Return the latest step of this kind and key that ended for good, None if there is none."""
        steps = (
            step for step in reversed(self._document.steps) if (step.kind, step.step_key) == (kind, step_key)
        )
        return next((step for step in steps if step.outcome in TERMINAL), None)

    def next_attempt(self, kind: StepKind, step_key: str) -> int:
        """Return the number of the next attempt at a step, from 1."""
        steps = (step for step in self._document.steps if (step.kind, step.step_key) == (kind, step_key))
        return 1 + max((step.attempt for step in steps), default=0)

    def claim(self, holder: str, seconds: float) -> None:
        """Take the adapter for this holder for so long, over a claim that has run out.

        Raises ClaimHeld while someone else's claim holds, LedgerBusy, StoreUnavailable.
        """

        def take(ledger: Ledger) -> Ledger:
            held = ledger.claim
            if held is not None and held.holder != holder and is_held(self._store, ledger, self._now()):
                raise ClaimHeld(self.key, held.holder, held.expires_at)
            return ledger.with_claim(self._claim_of(holder, seconds))

        with self._lock:
            self._read()
            self._change(take)
            self._holder = holder

    def renew(self, seconds: float) -> None:
        """Move the end of this holder's claim to `seconds` from now.

        Raises ClaimLost, LedgerBusy, StoreUnavailable.
        """
        with self._lock:
            self._change(lambda ledger: ledger.with_claim(self._claim_of(self._own(ledger), seconds)))

    def release(self) -> None:
        """Give the claim back; one that is no longer ours is left alone.

        Raises LedgerBusy, StoreUnavailable.
        """
        with self._lock:
            self._change(lambda ledger: ledger.with_claim(None) if self._is_own(ledger) else ledger)
            self._holder = None

    def append(self, step: Step) -> Step:
        """Write one more step and return it; a terminal verdict step becomes the ledger's verdict.

        A claim that ran out, but that nobody took over, still counts: the swap itself shuts others out.

        Raises ClaimLost if the claim is not this holder's, LedgerBusy, InvalidDocument, StoreUnavailable.
        """

        def add(ledger: Ledger) -> Ledger:
            self._own(ledger)
            return ledger.with_step(step)

        with self._lock:
            self._change(add)
        return step

    def add_submission(self, submission: SubmissionRef, base: str) -> None:
        """Note that one more upload brought this adapter; needs no claim.

        A submission for another base corrects a mistyped one, but never carries a ready verdict over.

        Raises BaseConflict, LedgerBusy, StoreUnavailable.
        """

        def add(ledger: Ledger) -> Ledger:
            added = ledger.with_submission(submission, base)
            if added.base != ledger.base and ledger.verdict and ledger.verdict.outcome is Outcome.READY:
                raise BaseConflict(self.key, ledger.base, base)
            return added

        with self._lock:
            self._change(add)

    @contextmanager
    def keep_claim(self, seconds: float) -> Iterator[None]:
        """Keep this holder's claim alive in the background, renewing it to `seconds` at a third of that time.

        A claim that gets lost ends the renewing, and the next `append` raises ClaimLost; a store that does
        not answer is tried again at the next turn. Leaving the block does not release the claim.

        Raises ClaimLost on entry if there is no claim to keep.
        """
        self.renew(seconds)
        done = threading.Event()

        def keep() -> None:
            while not done.wait(seconds / _RENEWALS_PER_CLAIM):
                try:
                    self.renew(seconds)
                except (StoreUnavailable, LedgerBusy):
                    continue
                except (ClaimLost, ObjectNotFound):
                    return

        keeper = threading.Thread(target=keep, name=f"claim {self.key}", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join()

    def _claim_of(self, holder: str, seconds: float) -> Claim:
        end = math.ceil(self._now().timestamp() + seconds)
        return Claim(holder=holder, expires_at=datetime.fromtimestamp(end, UTC))

    def _is_own(self, ledger: Ledger) -> bool:
        return self._holder is not None and ledger.claim is not None and ledger.claim.holder == self._holder

    def _own(self, ledger: Ledger) -> str:
        """Return this holder if the ledger says it has the claim."""
        found = None if ledger.claim is None else ledger.claim.holder
        if self._holder is None or found != self._holder:
            raise ClaimLost(self.key, self._holder or "nobody", found)
        return self._holder

    def _read(self) -> None:
        self._document, self._etag = _read(self._store, self.key)

    def _change(self, revise: Callable[[Ledger], Ledger]) -> None:
        """Write what `revise` makes of the ledger; it is asked again when someone else wrote meanwhile."""
        for race in range(1, _WRITES + 1):
            revised = revise(self._document)
            if revised == self._document:
                return
            try:
                self._etag = put_document(self._store, self.key, revised, if_match=self._etag)
            except PreconditionFailed:
                time.sleep(random.uniform(0, min(_LONGEST_PAUSE, 0.01 * race)))
                self._read()
            else:
                self._document = revised
                return
        raise LedgerBusy(self.key, _WRITES)


def open_ledger(
    store: S3Store,
    author: str,
    adapter_digest: str,
    base: str,
    submission: SubmissionRef,
    *,
    now: Callable[[], datetime] = utc_now,
) -> LedgerHandle:
    """Return the handle of an adapter's ledger, created if need be, with this submission in it.

    Raises InvalidName, InvalidDocument, BaseConflict, LedgerBusy, StoreUnavailable.
    """
    key = ledger_key(author, adapter_digest)
    fresh = Ledger(author=author, adapter_digest=adapter_digest, base=base, submissions=(submission,))
    try:
        document, etag = _read(store, key)
    except ObjectNotFound:
        try:
            return LedgerHandle(store, fresh, put_document(store, key, fresh, if_none_match=True), now)
        except PreconditionFailed:
            document, etag = _read(store, key)
    handle = LedgerHandle(store, document, etag, now)
    handle.add_submission(submission, base)
    return handle


def is_held(store: S3Store, ledger: Ledger, now: datetime) -> bool:
    """Tell whether somebody is at work on an adapter: its claim has not run out, and can be believed.

    One that ends later than the longest claim would was made by a clock that is ahead, and a run that was killed
    meanwhile would keep its adapter for as long. It counts while the store has seen the ledger written within the
    longest claim's time: whoever is at work writes it three times as often.

    Raises StoreUnavailable.
    """
    if ledger.claim is None or ledger.claim.expires_at <= now:
        return False
    if ledger.claim.expires_at <= now + LONGEST_CLAIM:
        return True
    found = store.head(ledger_key(ledger.author, ledger.adapter_digest))
    return found is not None and now < found.last_modified + LONGEST_CLAIM


def read_ledger(store: S3Store, author: str, adapter_digest: str) -> tuple[Ledger, str]:
    """Return an adapter's ledger and its ETag.

    Raises InvalidName, ObjectNotFound, InvalidDocument, StoreUnavailable.
    """
    return _read(store, ledger_key(author, adapter_digest))


def list_ledgers(store: S3Store) -> Iterator[ObjectInfo]:
    """Yield every adapter's ledger as the store lists it; `parse_ledger_key` tells whose it is.

    Raises StoreUnavailable, StoreNotTrusted.
    """
    return (found for found in store.list_objects(LEDGERS) if parse_ledger_key(found.key) is not None)


def list_records(store: S3Store | BulkReader, author: str | None = None) -> Iterator[ObjectInfo]:
    """Yield every adapter's ledger and every author's record as the store lists them, of one author or of all.

    Raises InvalidName, StoreUnavailable, StoreNotTrusted.
    """
    for found in store.list_objects(LEDGERS if author is None else ledger_prefix(author)):
        if parse_ledger_key(found.key) is not None or parse_author_record_key(found.key) is not None:
            yield found


def _read(store: S3Store, key: str) -> tuple[Ledger, str]:
    document, etag = read_document(store, key, Ledger)
    if ledger_key(document.author, document.adapter_digest) != key:
        raise InvalidDocument(key, f"it is the ledger of {document.author}, {document.adapter_digest}")
    return document, etag
