"""The catalog file as it is published in the store, for readers on machines that do not sync."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from storage.digests import sha256_file
from storage.documents import RootDocument, Sha256, put_document, read_document
from storage.errors import InvalidDocument, ObjectNotFound, PreconditionFailed, StoreUnavailable
from storage.keys import snapshot_info_key, snapshot_key
from storage.objects import ObjectInfo
from storage.s3 import S3Store

_TRIES = 3


class SnapshotContent(RootDocument):
    """`roster/catalog.json`: what the published catalog file of this sha256 says, `content` without when it was synced.

    It spares the one who publishes a file that says nothing new. Who fetches the file goes by its own sha256.
    """

    sha256: Sha256
    content: str


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The published file: its sha256, its size, when it was put, and whether it had to be fetched now."""

    sha256: str
    bytes: int
    published_at: datetime
    is_new: bool


def publish_snapshot(store: S3Store, path: Path, content: str) -> bool:
    """Put the file at `path` into the store unless what is there has the same `content`; tell whether it was put.

    The file may be replaced meanwhile: what is sent is the one that lies there now.

    Raises StoreUnavailable, OSError.
    """
    published = store.head(snapshot_key())
    if published is not None and _content_of(store) == (published.sha256, content):
        return False
    kept = path.with_name(path.name + ".sent")
    kept.unlink(missing_ok=True)  # of one who was killed
    os.link(path, kept)
    try:
        digest = sha256_file(kept).sha256
        store.upload_file(kept, snapshot_key(), sha256=digest)
    finally:
        kept.unlink(missing_ok=True)
    put_document(store, snapshot_info_key(), SnapshotContent(sha256=digest, content=content))
    return True


def fetch_snapshot(store: S3Store, into: Path) -> SnapshotInfo:
    """Put the published catalog file at `into`, whole or not at all; one that lies there already is left alone.

    Its sha256 is verified, of the one that lies there too. Raises ObjectNotFound where none is published,
    StoreUnavailable, OSError.
    """
    for _ in range(_TRIES):
        published = store.head(snapshot_key())
        if published is None:
            raise ObjectNotFound(snapshot_key())
        if into.is_file() and _is(into, published):
            return SnapshotInfo(str(published.sha256), published.bytes, published.last_modified, is_new=False)
        fetched = into.with_name(f"{into.name}.new-{uuid4().hex}")
        try:
            with suppress(PreconditionFailed):  # another one was published meanwhile
                digest = store.download_file(snapshot_key(), fetched, if_match=published.etag)
                if digest.sha256 == published.sha256:
                    fetched.replace(into)
                    return SnapshotInfo(digest.sha256, digest.bytes, published.last_modified, is_new=True)
        finally:
            fetched.unlink(missing_ok=True)
    raise StoreUnavailable("download", snapshot_key(), "what came is not what the store says it holds")


def _content_of(store: S3Store) -> tuple[str, str] | None:
    try:
        told, _ = read_document(store, snapshot_info_key(), SnapshotContent)
    except (ObjectNotFound, InvalidDocument):
        return None
    return told.sha256, told.content


def _is(path: Path, published: ObjectInfo) -> bool:
    return path.stat().st_size == published.bytes and sha256_file(path).sha256 == published.sha256
