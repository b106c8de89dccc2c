"""Putting a backup into a bucket, in an order in which nothing half is ever served or taken up."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from storage.author_record import AuthorAct, find_standing, read_author_record
from storage.digests import sha256_file
from storage.errors import InvalidDocument, ObjectNotFound, PreconditionFailed
from storage.keys import (
    CONTROLS,
    HELDOUT,
    LEDGERS,
    MANIFEST_FILE,
    MARKER_FILE,
    RESTORING,
    ROSTER,
    SERVING,
    UPLOADS,
    is_author,
    parse_author_record_key,
    roster_key,
)
from storage.objects import ObjectInfo
from storage.progress import Progress, Tally
from storage.s3 import S3Store
from tasks.backup_format import BackupInfo, SavedObject, object_path, read_backup
from tasks.lifecycle_errors import BackupDamaged, RestoreRefused

_THREADS = 16
_LARGE = 64 << 20  # bytes; a larger object goes up in parts, and its sha256 is noted beside it


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did: so many objects put, so many there before with the same bytes.

    `kept`: keys under which the store holds other bytes, which stay. `purged`: authors whose files the backup has, and
    whose record in the store says that they were purged.
    """

    info: BackupInfo
    put: int
    same: int
    kept: tuple[str, ...]
    purged: tuple[str, ...]


def restore(
    store: S3Store, folder: Path, *, into_existing: bool, progress: Progress = lambda done, total: None
) -> Restored:
    """Put every object of a backup into the bucket, or go on with that where it was broken off.

    First what others refer to, then manifests, what operators did about authors, ledgers, markers of uploads, and the
    published roster last. Nothing in the store is ever written over. `progress` is told of bytes.

    Raises:
        BackupRefused: the folder holds no whole backup.
        BackupDamaged: a file of it holds other bytes than its list says; what was put until then stays.
        RestoreRefused: the store holds something else, and `into_existing` was not said.
        StoreUnavailable, StoreNotTrusted, OSError.
    """
    info, saved = read_backup(folder)
    store.ensure_bucket()
    there = {found.key: found for found in store.list_objects("")}
    is_marked = _begin(store, info, there, into_existing=into_existing)

    seen = Tally(info.bytes, progress)

    def put(one: SavedObject) -> bool | None:
        done = _put(store, folder, one, there.get(one.key))
        seen(one.bytes)
        return done

    put_count = same = 0
    kept: list[str] = []
    waves: dict[int, list[SavedObject]] = {}
    for one in saved:
        waves.setdefault(_wave(one.key), []).append(one)
    with ThreadPoolExecutor(_THREADS) as pool:
        for _, wave in sorted(waves.items()):
            for one, done in zip(wave, pool.map(put, wave), strict=True):
                put_count += done is True
                same += done is False
                if done is None:
                    kept.append(one.key)
        purged = tuple(sorted(filter(None, pool.map(lambda one: _purged(store, one), _list_authors(saved)))))
    if is_marked:
        store.delete(RESTORING)
    return Restored(info, put_count, same, tuple(kept), purged)


def _begin(store: S3Store, info: BackupInfo, there: dict[str, ObjectInfo], *, into_existing: bool) -> bool:
    """Mark an empty bucket as being restored into, so that this very restore may go on; whether its mark is there.

    Raises RestoreRefused for any other that is in use.
    """
    if RESTORING in there and store.get(RESTORING).body.decode(errors="replace") == info.list_sha256:
        return True
    if there and not into_existing:
        raise RestoreRefused(store.bucket, f"{len(there)} objects, such as {min(there)}")
    if there:
        return False
    store.put(RESTORING, info.list_sha256.encode())
    return True


def _list_authors(saved: Iterable[SavedObject]) -> set[str]:
    """The authors of whom a backup has more than what a purge leaves."""
    owned = (UPLOADS, SERVING, CONTROLS, HELDOUT)
    names = (one.key.split("/")[1] for one in saved if one.key.startswith(owned))
    return {name for name in names if is_author(name)}


def _purged(store: S3Store, author: str) -> str | None:
    """The author, if the record in the store says purged; a record that cannot be read says nothing."""
    try:
        retired = find_standing(read_author_record(store, author), None).retired
    except InvalidDocument:
        return None
    return author if retired is not None and retired.act is AuthorAct.PURGE else None


def _wave(key: str) -> int:
    """When an object is put: what finds others comes after these."""
    if key == roster_key():
        return 6
    if key.startswith(ROSTER):
        return 5
    if key.startswith(UPLOADS) and key.endswith(f"/{MARKER_FILE}"):
        return 4
    if key.startswith(LEDGERS):
        return 2 if parse_author_record_key(key) is not None else 3
    return 1 if key.startswith((SERVING, CONTROLS)) and key.endswith(f"/{MANIFEST_FILE}") else 0


def _put(store: S3Store, folder: Path, one: SavedObject, known: ObjectInfo | None) -> bool | None:
    """Whether the object was put; False where it was there, None where another is."""
    if known is not None:
        return False if _is_same(store, one) else None
    path = object_path(folder, one.sha256)
    try:
        found = sha256_file(path)
    except FileNotFoundError:
        raise BackupDamaged(str(folder), one.key, f"the file {one.sha256}", "none") from None
    if found.sha256 != one.sha256:
        raise BackupDamaged(str(folder), one.key, f"sha256 {one.sha256}", found.sha256)
    if one.noted is not None or one.bytes > _LARGE:
        # In parts it cannot be put on condition that nothing is there: asked once more, it is not hours since.
        if store.head(one.key) is not None:
            return False if _is_same(store, one) else None
        store.upload_file(path, one.key, sha256=one.noted or one.sha256)
        return True
    try:
        store.put(one.key, path.read_bytes(), if_none_match=True)
    except PreconditionFailed:
        return False if _is_same(store, one) else None
    return True


def _is_same(store: S3Store, one: SavedObject) -> bool:
    info = store.head(one.key)
    if info is None or info.bytes != one.bytes:
        return False
    if info.sha256 is not None:
        return info.sha256 == (one.noted or one.sha256)
    try:
        return store.digest_object(one.key, if_match=info.etag) == one.sha256
    except (ObjectNotFound, PreconditionFailed):
        return False  # someone writes it just now
