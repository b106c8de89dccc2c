"""Whether an object store keeps the promises that the ledger rests on."""

from __future__ import annotations

from contextlib import suppress
from uuid import uuid4

from storage.errors import PreconditionFailed, StoreNotTrusted
from storage.s3 import S3Store


def probe_store(store: S3Store) -> None:
    """Return if the store can be trusted with the ledger: it reads what was put and keeps conditions.

    Raises StoreNotTrusted, StoreUnavailable.
    """
    key = f"_probe/{uuid4().hex}"
    first = store.put(key, b"first")
    try:
        _expect(store, store.get(key).body == b"first", "reading back what was just put")
        _expect_refused(store, key, "an If-None-Match put over an object must be refused", if_none_match=True)
        store.put(key, b"second", if_match=first)
        _expect_refused(store, key, "a put with a stale If-Match must be refused", if_match=first)
        _expect(store, store.get(key).body == b"second", "reading back what was just swapped in")
    except PreconditionFailed as error:
        raise StoreNotTrusted(
            store.endpoint, "a put whose condition holds must be accepted", "refused"
        ) from error
    finally:
        store.delete(key)


def _expect(store: S3Store, holds: bool, probe: str) -> None:
    if not holds:
        raise StoreNotTrusted(store.endpoint, probe, "other bytes")


def _expect_refused(
    store: S3Store, key: str, probe: str, *, if_none_match: bool = False, if_match: str | None = None
) -> None:
    with suppress(PreconditionFailed):
        store.put(key, b"must be refused", if_none_match=if_none_match, if_match=if_match)
        raise StoreNotTrusted(store.endpoint, probe, "it was accepted")
