"""Collecting garbage: prefixes of converted adapters and controls that nothing refers to, and that nobody will take up;
uploads in parts that were begun and never completed, which nobody sees, but which the store keeps.

What refers to a prefix: the published roster and the last ones before it; a ledger whose verdict is ready, or that has
no verdict yet; a pin; any run that is at work on the author, since it may be about to find its adapter staged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import uuid4

from roster.serving import Manifest, Roster
from storage.author_record import AuthorRecord, find_standing, read_author_record
from storage.claims import LedgerHandle, is_held, read_ledger
from storage.documents import read_document, utc_now
from storage.errors import ClaimHeld, InvalidDocument, ObjectNotFound
from storage.keys import (
    CONTROLS,
    MANIFEST_FILE,
    ROSTER_HISTORY,
    SERVING,
    ledger_prefix,
    manifest_key,
    parse_ledger_key,
    parse_staged_key,
    roster_key,
)
from storage.ledger import Ledger, Outcome
from storage.multipart import PendingUpload
from storage.objects import ObjectInfo
from storage.purge import is_purged
from storage.s3 import S3Store

KEPT_ROSTERS = 20
"""So many published rosters before the present one keep what they name: servers may still read one of them."""

PENDING_AGE = timedelta(days=1)
"""An upload in parts that was begun so long ago is nobody's any more: a retry goes on with one within minutes."""

_THREADS = 16
_CLAIM_SECONDS = 120.0
# Well within the claim, which is not renewed: what is not removed by then is left to the next time.
_WORK_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Staged:
    """A prefix of a converted adapter or of a control, with all that lies under it."""

    prefix: str
    author: str
    output_digest: str
    objects: tuple[ObjectInfo, ...]

    @property
    def bytes(self) -> int:
        """The bytes under it."""
        return sum(one.bytes for one in self.objects)

    @property
    def newest(self) -> datetime:
        """When the last object was put there."""
        return max(one.last_modified for one in self.objects)


@dataclass(frozen=True, slots=True)
class Collected:
    """What was removed, and what was left although nothing had referred to it before: the prefix, and why.

    `aborted`: the uploads in parts that were taken away.
    """

    removed: tuple[Staged, ...]
    left: tuple[tuple[str, str], ...]
    aborted: tuple[PendingUpload, ...] = ()


def list_unreferenced(store: S3Store, *, older_than: timedelta, now: datetime) -> list[Staged]:
    """Every prefix that nothing refers to and in which nothing was put within `older_than`, by author.

    Raises:
        InvalidDocument: a published roster cannot be read.
        StoreUnavailable, StoreNotTrusted.
    """
    # The prefixes first: what is published or taken up meanwhile is seen by what is read after.
    aged = [one for one in _list_staged(store) if now - one.newest >= older_than]
    published = _of_current(store) | _of_history(store)
    candidates = [one for one in aged if (one.author, one.output_digest) not in published]
    authors = sorted({one.author for one in candidates})
    with ThreadPoolExecutor(_THREADS) as pool:
        referred = dict(zip(authors, pool.map(lambda one: _read_referred(store, one), authors), strict=True))
    return [one for one in candidates if referred[one.author].why_kept(one) is None]


def list_abandoned(store: S3Store, now: datetime) -> list[PendingUpload]:
    """Every upload in parts, anywhere in the bucket, that was begun longer than `PENDING_AGE` ago and not completed.

    Raises:
        StoreUnavailable: the store did not tell.
    """
    return [one for one in store.list_pending("") if now - one.begun >= PENDING_AGE]


def collect(
    store: S3Store, found: Sequence[Staged], *, worker: str, clock: Callable[[], float] = time.monotonic
) -> Collected:
    """Remove these prefixes, each manifest first, unless something refers to them by now, and abandoned uploads.

    While an author's prefixes go, all ledgers of the author are claimed, so that no run finds its adapter staged and
    then without files; a run that begins meanwhile ends as Elsewhere, and the sweep takes the upload up again.

    Raises:
        InvalidDocument: a published roster cannot be read.
        LedgerBusy, StoreUnavailable, StoreNotTrusted.
    """
    abandoned = list_abandoned(store, utc_now())
    for upload in abandoned:
        store.abort_upload(upload)
    removed: list[Staged] = []
    left: list[tuple[str, str]] = []
    history = _of_history(store)
    for author in sorted({one.author for one in found}):
        holder = f"{worker} gc {uuid4().hex[:8]}"
        with ExitStack() as claims:
            begun = clock()
            fault = _claim_ledgers(store, author, holder, claims)
            # Read once more: a run that begins now finds the claims, one that has begun is seen here.
            referred = _Referred(fault) if fault else _read_referred(store, author, own=holder)
            published = history | _of_current(store)
            for one in (one for one in found if one.author == author):
                why = referred.why_kept(one)
                if (one.author, one.output_digest) in published:
                    why = "a published roster names it"
                elif clock() - begun > _WORK_SECONDS:
                    why = "this author took too long; the next `roster gc` goes on"
                if why is None:
                    why = _find_by_name(store, one)
                if why is not None:
                    left.append((one.prefix, why))
                    continue
                _remove(store, one)
                removed.append(one)
    return Collected(tuple(removed), tuple(left), tuple(abandoned))


@dataclass(frozen=True, slots=True)
class _Referred:
    """What of an author is referred to: everything, where there is a `fault`, else these output digests."""

    fault: str | None
    outputs: frozenset[str] = frozenset()

    def why_kept(self, one: Staged) -> str | None:
        return self.fault or ("a ledger refers to it" if one.output_digest in self.outputs else None)


def _list_staged(store: S3Store) -> list[Staged]:
    found: dict[tuple[str, str, str], list[ObjectInfo]] = {}
    for root in (SERVING, CONTROLS):
        for one in store.list_objects(root):
            parsed = parse_staged_key(one.key)
            if parsed is not None:
                found.setdefault(parsed, []).append(one)
    return [
        Staged(prefix, author, digest, tuple(objects)) for (author, digest, prefix), objects in found.items()
    ]


def _of_current(store: S3Store) -> frozenset[tuple[str, str]]:
    """Author and output digest of all that the published roster names."""
    try:
        return _named(store, roster_key())
    except ObjectNotFound:
        return frozenset()


def _of_history(store: S3Store) -> frozenset[tuple[str, str]]:
    """The same of the last rosters before it."""
    keys = sorted(found.key for found in store.list_objects(ROSTER_HISTORY))[-KEPT_ROSTERS:]
    with ThreadPoolExecutor(_THREADS) as pool:
        return frozenset[tuple[str, str]]().union(*pool.map(lambda key: _named(store, key), keys))


def _named(store: S3Store, key: str) -> frozenset[tuple[str, str]]:
    roster, _ = read_document(store, key, Roster)
    return frozenset(
        (author, entry.output_digest)
        for base in roster.bases.values()
        for author, entry in base.authors.items()
    )


def _read_referred(store: S3Store, author: str, own: str | None = None) -> _Referred:
    """What the author's ledgers and pins refer to; claims of `own` do not count as somebody's at work."""
    outputs: set[str] = set()
    now = utc_now()
    try:
        pinned = _list_pinned(read_author_record(store, author))
        for ledger, _ in _read_ledgers(store, author):
            claim = ledger.claim
            if claim is not None and claim.holder != own and is_held(store, ledger, now):
                return _Referred(f"{claim.holder} is at work on {author}")
            outputs |= _referred_by(ledger, is_pinned=ledger.adapter_digest in pinned)
    except (InvalidDocument, ObjectNotFound) as error:
        return _Referred(str(error))
    return _Referred(None, frozenset(outputs))


def _find_by_name(store: S3Store, one: Staged) -> str | None:
    """Why a prefix is kept to which no ledger refers that a listing has shown: the one that its manifest names does.

    A listing may be older than the objects; what is removed here does not come back.
    """
    try:
        manifest = read_document(store, manifest_key(one.prefix), Manifest)[0]
    except (ObjectNotFound, InvalidDocument):
        return None  # a killed run left it so; nobody can be served from it
    try:
        ledger = read_ledger(store, one.author, manifest.adapter_digest)[0]
        pinned = _list_pinned(read_author_record(store, one.author))
    except ObjectNotFound:
        return None
    except InvalidDocument as error:
        return str(error)
    referred = _referred_by(ledger, is_pinned=ledger.adapter_digest in pinned)
    return "a ledger refers to it that was not listed" if one.output_digest in referred else None


def _list_pinned(record: AuthorRecord) -> set[str | None]:
    """The adapter digests that are pinned on any base."""
    pins = (find_standing(record, base).pinned for base in {event.base for event in record.events})
    return {pin.adapter_digest for pin in pins if pin is not None}


def _referred_by(ledger: Ledger, *, is_pinned: bool) -> set[str]:
    """The output digests for whose sake a ledger needs their files: none, once it is refused for good, or purged."""
    verdict = ledger.verdict
    if is_purged(ledger):
        return set()
    if verdict is None or verdict != ledger.steps[-1] or is_pinned:
        return set(_list_outputs(ledger))
    return {str(verdict.result.get("output_digest"))} if verdict.outcome is Outcome.READY else set()


def _list_outputs(ledger: Ledger) -> Iterator[str]:
    for step in ledger.steps:
        control = step.result.get("control")
        for record in (step.result, control):
            if isinstance(record, dict) and "output_digest" in record:
                yield str(record["output_digest"])


def _claim_ledgers(store: S3Store, author: str, holder: str, claims: ExitStack) -> str | None:
    """Claim every ledger of an author until `claims` closes; why that cannot be, None once it is done."""
    try:
        for ledger, etag in _read_ledgers(store, author):
            handle = LedgerHandle(store, ledger, etag, utc_now)
            handle.claim(holder, _CLAIM_SECONDS)
            claims.callback(handle.release)
    except (ClaimHeld, InvalidDocument, ObjectNotFound) as error:
        return str(error)
    return None


def _read_ledgers(store: S3Store, author: str) -> Iterator[tuple[Ledger, str]]:
    for found in store.list_objects(ledger_prefix(author)):
        name = parse_ledger_key(found.key)
        if name is not None:
            yield read_ledger(store, *name)


def _remove(store: S3Store, one: Staged) -> None:
    """Remove what lies under a prefix; without its manifest it is no adapter that anybody would serve."""
    for found in sorted(one.objects, key=lambda each: not each.key.endswith(f"/{MANIFEST_FILE}")):
        store.delete(found.key)
