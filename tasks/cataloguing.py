"""Sync: from the ledgers in the store to this machine's catalog, and from its `ready` view to the roster."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from pydantic import ValidationError

from roster.catalog import Catalog, open_catalog
from roster.errors import CatalogChanged
from roster.garbage import no_collection
from roster.incoming import BaseText, EngineText, LedgerText, SyncReport
from roster.reader import CatalogReader
from roster.rows import ThinRow
from roster.serving import Roster, build_roster, check_drop
from roster.serving_engine import EngineInfo
from storage.bases import list_bases
from storage.bulk import BulkReader
from storage.claims import list_records
from storage.documents import format_time, utc_now
from storage.errors import InvalidName, LedgerBusy, ObjectNotFound, PreconditionFailed
from storage.keys import (
    base_document_key,
    check_author,
    engine_key,
    parse_author_record_key,
    parse_ledger_key,
    roster_key,
)
from storage.listing import list_uploads
from storage.s3 import S3Store
from storage.snapshot import publish_snapshot
from tasks.job import STEP_VERSIONS
from tasks.roster_feed import find_roster, keep_version, note_seen, put_roster, read_roster, was_seen
from tasks.unlisted import find_unlisted

_HELPERS = 16  # threads that wait for the store
_AHEAD = 1000  # ledgers that are asked for before the catalog takes them
_SWAPS = 5
_LOCK_WAIT_S = 60.0
_SUBMITTED = "SELECT author, submissions.run FROM submissions JOIN ledgers USING (key)"
_BUSY = "SELECT DISTINCT base FROM authors WHERE newest_state = 'in_progress'"
# Everything in the catalog but when it was synced: all else in it follows from these.
_CONTENT = """
SELECT bit_xor(hash(part)) FROM (
    SELECT (key, etag) AS part FROM ledgers UNION ALL SELECT (key, etag) FROM author_records
    UNION ALL SELECT (key, etag) FROM unreadable UNION ALL SELECT (base, etag) FROM bases
    UNION ALL SELECT (base, etag) FROM engines UNION ALL SELECT (kind, version) FROM step_versions
    UNION ALL SELECT (schema_version, max_opponents || ' ' || serve_stale) FROM meta
)"""
_ACTED_UPON = "SELECT author, base FROM author_states WHERE held OR retired OR pinned_digest IS NOT NULL"


@dataclass(frozen=True, slots=True)
class SyncLimits:
    """`max_opponents`: wrong adapters per score; `max_drop`: the share of the roster one sync may drop, 1 for any.

    `serve_stale`: whether an adapter stays served whose verdict another version of the code made.
    """

    max_opponents: int
    max_drop: float
    serve_stale: bool = True


@dataclass(frozen=True, slots=True)
class Synced:
    """What a sync did, the roster that is published now, and the adapters that have met too few opponents.

    `whole`: whether it looked at every ledger, rather than those of some authors. `thin` leaves out bases on which
    adapters are still on their way, and is empty while uploads wait for their first run: scoring again waits until
    they have arrived.
    """

    report: SyncReport
    roster: Roster | None
    published: bool
    whole: bool
    thin: tuple[ThinRow, ...]


def sync_catalog(
    store: S3Store,
    path: Path,
    limits: SyncLimits,
    *,
    touched: Sequence[str] | None = None,
    rebuild: bool = False,
) -> Synced:
    """Bring the catalog at `path` up to date, then publish its `ready` view as roster/current.json.

    `touched` are keys of ledgers or of authors' records: only what lies in the ledger of these authors is looked at.
    That counts only while nobody else publishes: where the published roster is not the one that this catalog has
    seen, or where there is no catalog to go on with, everything is listed all the same. `rebuild` makes the file
    anew from the whole ledger.

    Raises:
        CatalogBusy: another sync runs on this machine, for more than a minute.
        InvalidName: a touched key is of no ledger and of no author's record.
        RosterDrop: too many authors would be dropped at once; the published roster stays as it is.
        StoreUnavailable, LedgerBusy: the store did not do it.
    """
    authors = None if touched is None or rebuild else frozenset(map(_author_of, touched))
    # What is looked up by name, too, since a listing may be older.
    named = frozenset(touched or ())
    with ThreadPoolExecutor(_HELPERS) as helpers:
        for swap in range(_SWAPS):
            # The roster first: if it is still this one when ours goes in, nobody published what we have not read.
            etag = find_roster(store)
            if authors is not None and not was_seen(path, etag):
                authors = None
            # What a sync of some authors makes is little, and for the most part the roster.
            with no_collection() if authors is not None else nullcontext():
                reading = helpers.submit(read_roster, store)
                refreshed = _refresh(
                    store, path, limits, authors, named, reading, helpers, rebuild=rebuild and swap == 0
                )
                previous, etag_read = reading.result()
                if refreshed is None:
                    authors = None
                    continue
                if etag_read != etag:
                    continue
                report, read = refreshed
                publishing: Future[str] | None = None
                with open_catalog(path) as reader:
                    new = _next_roster(reader, previous)
                    if new is not None and new is not previous:
                        unlisted = find_unlisted(store, reader, previous, new, read, helpers)
                        if not unlisted <= named:
                            named |= unlisted
                            continue
                        _check_drop(reader, limits, previous, new)
                        publishing = helpers.submit(put_roster, store, new, previous, etag)
                    elif new is not None and authors is None:
                        keep_version(store, new)
                    thin = _list_thin(store, reader)
                try:
                    note_seen(path, etag if publishing is None else publishing.result())
                except PreconditionFailed:
                    continue
                return Synced(report, new, new is not previous, authors is None, thin)
    raise LedgerBusy(roster_key(), _SWAPS)


def publish_catalog(store: S3Store, path: Path) -> bool:
    """Whether the catalog at `path` was put into the store: it is where it says more than the one published there.

    Raises:
        CatalogMissing, CatalogDamaged, StoreUnavailable: it was not.
    """
    with open_catalog(path) as reader:
        content = str(reader.sql(_CONTENT).rows[0][0])
    return publish_snapshot(store, path, content)


def _next_roster(reader: CatalogReader, previous: Roster | None) -> Roster | None:
    """The roster that the catalog asks for: the very `previous` one if it says the same, None if there is none yet."""
    ready = reader.ready()
    if previous is None and not ready:
        return None
    with no_collection():
        return build_roster(ready, reader.bases(), previous=previous, generated_at=format_time(utc_now()))


def _check_drop(reader: CatalogReader, limits: SyncLimits, previous: Roster | None, new: Roster) -> None:
    excused = {(str(base), str(author)) for author, base in reader.sql(_ACTED_UPON).rows}
    check_drop(previous, new, limits.max_drop, excused=excused)


def _refresh(
    store: S3Store,
    path: Path,
    limits: SyncLimits,
    authors: frozenset[str] | None,
    named: frozenset[str],
    reading: Future[tuple[Roster | None, str | None]],
    helpers: ThreadPoolExecutor,
    *,
    rebuild: bool,
) -> tuple[SyncReport, frozenset[str]] | None:
    """What a sync of these authors (None: of all) did, and the keys that it read; None: once more, of all of them.

    A listing may be older than the objects. So what is `named` is looked up where it says that nothing changed there,
    and so are the bases of the published roster, which is being read.
    """
    catalog, bulk = Catalog(path), BulkReader(store)
    lists = [
        helpers.submit(lambda author: list(list_records(bulk, author)), author)
        for author in (sorted(authors) if authors is not None else [None])
    ]
    known = None if rebuild else catalog.known_etags(authors)
    listed = {found.key: found.etag for one in lists for found in one.result()}
    if authors is not None and (known is None or known.mark is None):
        return None
    before = {} if known is None else known.etags
    same = [key for key in named if listed.get(key) == before.get(key)]
    for key, now in zip(same, helpers.map(store.head, same), strict=True):
        if now is not None:
            listed[key] = now.etag
    changed = [key for key, etag in listed.items() if before.get(key) != etag]
    published = reading.result()[0]
    bases = sorted({*list_bases(store), *(published.bases if published is not None else ())})
    # A ledger is never deleted; one that a listing leaves out is gone only if the store says so by name.
    removed = [key for key in before if key not in listed and store.head(key) is None]
    try:
        report = catalog.apply(
            _read_ledgers(bulk, changed, helpers),
            _read_bases(store, bases),
            _read_engines(store, bases),
            known=known,
            removed=removed,
            step_versions={str(kind): version for kind, version in STEP_VERSIONS.items()},
            max_opponents=limits.max_opponents,
            serve_stale=limits.serve_stale,
            synced_at=format_time(utc_now()),
            wait_s=_LOCK_WAIT_S,
        )
    except CatalogChanged:
        return None  # another sync of this machine came between
    return report, frozenset(changed)


def _author_of(key: str) -> str:
    found = parse_ledger_key(key)
    author = parse_author_record_key(key) if found is None else found[0]
    if author is None:
        raise InvalidName("touched ledger", key, "the key of a ledger, or of an author's record")
    return check_author(author)


def _read_ledgers(
    store: BulkReader, keys: Iterable[str], helpers: ThreadPoolExecutor
) -> Iterator[LedgerText]:
    """The ledgers as they are now; one that went away after it was listed is left to the next sync."""
    asked: deque[Future[LedgerText | None]] = deque()

    def read(key: str) -> LedgerText | None:
        try:
            found = store.get(key)
        except ObjectNotFound:
            return None
        return LedgerText(key, found.info.etag, _text(found.body))

    try:
        for key in keys:
            asked.append(helpers.submit(read, key))
            if len(asked) == _AHEAD and (ledger := asked.popleft().result()) is not None:
                yield ledger
        while asked:
            if (ledger := asked.popleft().result()) is not None:
                yield ledger
    finally:
        for future in asked:
            future.cancel()


def _read_bases(store: S3Store, names: Iterable[str]) -> list[BaseText]:
    """The registered bases of these names; one that is gone is left out."""
    texts = []
    for name in names:
        try:
            found = store.get(base_document_key(name))
        except ObjectNotFound:
            continue
        texts.append(BaseText(name, found.info.etag, _text(found.body)))
    return texts


def _read_engines(store: S3Store, names: Iterable[str]) -> list[EngineText]:
    """What the engines of these bases say of themselves, where they do."""
    texts = []
    for name in names:
        try:
            found = store.get(engine_key(name))
        except ObjectNotFound:
            continue
        try:
            engine_id = EngineInfo.model_validate_json(found.body).engine_id
        except ValidationError:
            engine_id = None
        texts.append(EngineText(name, found.info.etag, engine_id, _text(found.body)))
    return texts


def _list_thin(store: S3Store, reader: CatalogReader) -> tuple[ThinRow, ...]:
    busy = {base for (base,) in reader.sql(_BUSY).rows}
    thin = tuple(row for row in reader.thin_verdicts() if row.base not in busy)
    if not thin:
        return ()
    known = {(author, run) for author, run in reader.sql(_SUBMITTED).rows}
    return () if _has_queued(store, known) else thin


def _has_queued(store: S3Store, known: set[tuple[object, object]]) -> bool:
    """Whether an upload of the last hour has no ledger yet, because no run has begun with it."""
    recent = utc_now() - timedelta(hours=1)
    return any(
        (upload.author, upload.run) not in known and upload.newest > recent
        for upload in list_uploads(store).ready
    )


def _text(body: bytes) -> str:
    """An object as text; the catalog lists what is no document of ours, whatever its bytes."""
    return body.decode(errors="replace")
