"""Sync: from the ledgers in the store to this machine's catalog, and from its `ready` view to the roster."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from roster.catalog import Catalog, open_catalog
from roster.rows import BaseText, LedgerText, SyncReport, ThinRow
from roster.serving import Roster, build_roster, check_drop
from storage.bases import list_bases
from storage.claims import list_ledgers
from storage.documents import format_time, put_document, read_document, utc_now
from storage.errors import LedgerBusy, ObjectNotFound, PreconditionFailed
from storage.keys import base_document_key, roster_key
from storage.s3 import S3Store
from storage.uploads import list_uploads
from tasks.job import STEP_VERSIONS

_READERS = 16
_SWAPS = 5
_SUBMITTED = "SELECT author, run FROM submissions JOIN ledgers USING (key)"


@dataclass(frozen=True, slots=True)
class SyncLimits:
    """`max_opponents`: wrong adapters per score; `max_drop`: the share of the roster one sync may drop, 1 for any."""

    max_opponents: int
    max_drop: float


@dataclass(frozen=True, slots=True)
class Synced:
    """What a sync did, the roster that is published now, and the adapters that have met too few opponents.

    `thin` leaves out bases on which adapters are still on their way, and is empty while uploads wait for their first
    run: scoring again waits until they have arrived.
    """

    report: SyncReport
    roster: Roster | None
    published: bool
    thin: tuple[ThinRow, ...]


def sync_catalog(store: S3Store, path: Path, limits: SyncLimits, *, rebuild: bool = False) -> Synced:
    """Bring the catalog at `path` up to date, then publish its `ready` view as roster/current.json.

    `rebuild` makes the file anew from the whole ledger.

    Raises:
        CatalogBusy: another sync runs on this machine.
        RosterDrop: too many authors would be dropped at once; the published roster stays as it is.
        StoreUnavailable, LedgerBusy: the store did not do it.
    """
    for swap in range(_SWAPS):
        # The roster first: if it is still this one when ours goes in, nobody published what we have not read.
        previous, etag = _read_roster(store)
        report = _refresh(store, path, limits, rebuild=rebuild and swap == 0)
        with open_catalog(path) as reader:
            ready, bases = reader.ready(), reader.bases()
            busy = {row.base for row in reader.authors() if row.newest_state == "in_progress"}
            thin = tuple(row for row in reader.thin_verdicts() if row.base not in busy)
            known = {(author, run) for author, run in reader.sql(_SUBMITTED).rows}
        if thin and _has_queued(store, known):
            thin = ()
        if previous is None and not ready:
            return Synced(report, None, False, thin)
        new = build_roster(ready, bases, previous=previous, generated_at=format_time(utc_now()))
        if new is previous:
            return Synced(report, previous, False, thin)
        check_drop(previous, new, limits.max_drop)
        try:
            put_document(store, roster_key(), new, if_match=etag, if_none_match=etag is None)
        except PreconditionFailed:
            continue
        return Synced(report, new, True, thin)
    raise LedgerBusy(roster_key(), _SWAPS)


def _has_queued(store: S3Store, known: set[tuple[object, object]]) -> bool:
    """Whether an upload of the last hour has no ledger yet, because no run has begun with it."""
    recent = utc_now() - timedelta(hours=1)
    return any(
        (upload.author, upload.run) not in known and upload.marker.last_modified > recent
        for upload in list_uploads(store).ready
    )


def _refresh(store: S3Store, path: Path, limits: SyncLimits, *, rebuild: bool) -> SyncReport:
    catalog = Catalog(path)
    known = {} if rebuild else catalog.known_etags()
    listed = {found.key: found.etag for found in list_ledgers(store)}
    changed = [key for key, etag in listed.items() if known.get(key) != etag]
    # A ledger is never deleted; one that a listing leaves out is gone only if the store says so by name.
    removed = [key for key in known if key not in listed and store.head(key) is None]
    return catalog.apply(
        _read_ledgers(store, changed),
        _read_bases(store),
        known=None if rebuild else known,
        removed=removed,
        step_versions={str(kind): version for kind, version in STEP_VERSIONS.items()},
        max_opponents=limits.max_opponents,
        synced_at=format_time(utc_now()),
    )


def _read_ledgers(store: S3Store, keys: Iterable[str]) -> list[LedgerText]:
    """The ledgers as they are now; one that went away after it was listed is left to the next sync."""

    def read(key: str) -> LedgerText | None:
        try:
            found = store.get(key)
        except ObjectNotFound:
            return None
        return LedgerText(key, found.info.etag, _text(found.body))

    with ThreadPoolExecutor(_READERS) as readers:
        return [ledger for ledger in readers.map(read, keys) if ledger is not None]


def _read_bases(store: S3Store) -> list[BaseText]:
    texts = []
    for name in list_bases(store):
        found = store.get(base_document_key(name))
        texts.append(BaseText(name, found.info.etag, _text(found.body)))
    return texts


def _text(body: bytes) -> str:
    """An object as text; the catalog lists what is no document of ours, whatever its bytes."""
    return body.decode(errors="replace")


def _read_roster(store: S3Store) -> tuple[Roster | None, str | None]:
    try:
        return read_document(store, roster_key(), Roster)
    except ObjectNotFound:
        return None, None
