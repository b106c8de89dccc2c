"""Many small objects at once: read by object_store, whose Rust code takes a fifth of the CPU time of botocore's Python.

It is asked once and never believed when it fails: whatever it could not do, the client of storage/s3.py does anew, with
all its attempts, and that one's answer counts, be it an error or none. So what a store's faults lead to is decided in
one place, and where object_store cannot reach the store at all, reading is slow as before, and works.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError
from obstore.store import S3Store as NativeStore

from storage.objects import ObjectInfo, StoredObject
from storage.s3 import S3Store

_CONNECT_S = 5
_ANSWER_S = 30
_PAGE = 1000  # of a listing of more than one page our own client follows every step, with guards
_MOST_FAILURES = 3  # in a row; it is not asked any more then


class BulkReader:
    """`get` and `list_objects` of a bucket as S3Store has them, answers and errors alike. Threads may share it.

    What `upload_file` notes beside an object's bytes, their sha256, is left out.
    """

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._native = _open(store)
        self._failures = 0

    def get(self, key: str) -> StoredObject:
        """Return a small object with its bytes.

        Raises ObjectNotFound, StoreUnavailable.
        """
        if self._native is not None and self._failures < _MOST_FAILURES:
            try:
                answer = self._native.get(key)
                body, meta = answer.bytes().to_bytes(), answer.meta
            except FileNotFoundError:
                pass
            except BaseError:
                self._failures += 1
            else:
                self._failures = 0
                if (etag := meta["e_tag"]) is not None:
                    return StoredObject(ObjectInfo(key, etag, len(body), meta["last_modified"]), body)
        return self._store.get(key)

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object under a prefix that ends with a slash.

        Raises StoreUnavailable, StoreNotTrusted.
        """
        found = self._list(prefix)
        yield from self._store.list_objects(prefix) if found is None else found

    def _list(self, prefix: str) -> list[ObjectInfo] | None:
        """Return what lies there; None where object_store cannot tell, or there is more than a page."""
        if self._native is None or self._failures >= _MOST_FAILURES:
            return None
        try:
            page = self._native.list(prefix, chunk_size=_PAGE).collect()
        except BaseError:
            self._failures += 1
            return None
        self._failures = 0
        infos = [
            ObjectInfo(one["path"], one["e_tag"], one["size"], one["last_modified"])
            for one in page
            if one["e_tag"] is not None
        ]
        return infos if len(infos) == len(page) < _PAGE else None


def _open(store: S3Store) -> NativeStore | None:
    """Return object_store's client of a bucket; None where there is nothing to make it from."""
    session = store.session
    if session is None or session.get_credentials() is None:
        return None
    return NativeStore(
        store.bucket,
        endpoint=store.endpoint,
        region=store.region,
        credential_provider=Boto3CredentialProvider(session),
        virtual_hosted_style_request=False,
        client_options={
            "allow_http": True,
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "timeout": timedelta(seconds=_ANSWER_S),
        },
        retry_config={"max_retries": 0},
    )
