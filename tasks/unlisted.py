"""What a listing of the ledger hid: looked for by name, for every author whose place in the roster would change."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from roster.reader import CatalogReader
from roster.serving import Manifest, Roster
from storage.documents import read_document
from storage.errors import InvalidDocument, ObjectNotFound
from storage.keys import author_record_key, ledger_key, manifest_key, serving_prefix
from storage.s3 import S3Store

_KNOWN = "SELECT key, etag, author, output_digest FROM ledgers"
_OTHERS = "SELECT key, etag FROM author_records UNION ALL SELECT key, etag FROM unreadable"


def find_unlisted(
    store: S3Store,
    reader: CatalogReader,
    previous: Roster | None,
    new: Roster,
    read: Collection[str],
    helpers: ThreadPoolExecutor,
) -> frozenset[str]:
    """The keys under ledger/ that the store has and the catalog has not, or has as they were before.

    Only of authors who would get, lose or change their adapter, and leaving out the keys that were `read` just now:
    a listing may be older than the ledgers themselves, and nobody is served or not for the sake of one that is.

    Raises StoreUnavailable.
    """
    if previous is None:
        return frozenset()
    before, after = _digests(previous), _digests(new)
    moved = {place for place in before.keys() | after.keys() if before.get(place) != after.get(place)}
    authors = {author for _, author in moved}
    if not authors:
        return frozenset()
    rows = [row for row in reader.sql(_KNOWN).rows if row[2] in authors]
    known = {str(key): str(etag) for key, etag, *_ in [*rows, *reader.sql(_OTHERS).rows]}
    outputs = {(str(author), str(digest)) for _, _, author, digest in rows}
    lost = [(author, before[base, author]) for base, author in moved if (base, author) in before]
    made = helpers.map(lambda one: _ledger_of(store, *one), [one for one in lost if one not in outputs])
    keys = {str(row[0]) for row in rows} | {author_record_key(one) for one in authors} | {*filter(None, made)}
    asked = sorted(keys.difference(read))
    found = zip(asked, helpers.map(store.head, asked), strict=True)
    return frozenset(key for key, info in found if info is not None and info.etag != known.get(key))


def _digests(roster: Roster) -> dict[tuple[str, str], str]:
    return {
        (base, author): one.output_digest
        for base, entry in roster.bases.items()
        for author, one in entry.authors.items()
    }


def _ledger_of(store: S3Store, author: str, output_digest: str) -> str | None:
    """The key of the ledger that a served adapter is from; None where what is served is gone."""
    try:
        key = manifest_key(serving_prefix(author, output_digest))
        return ledger_key(author, read_document(store, key, Manifest)[0].adapter_digest)
    except (ObjectNotFound, InvalidDocument):
        return None
