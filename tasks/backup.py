"""Copying a bucket into a folder: whole, verified, and gone on with after a kill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

from roster.serving import Roster
from storage.documents import decode_document, utc_now
from storage.errors import InvalidDocument, ObjectNotFound, PreconditionFailed
from storage.keys import LEDGERS, RESTORING, ROSTER, UPLOADS, manifest_key, roster_key, serving_prefix
from storage.objects import ObjectInfo
from storage.progress import Progress, Tally
from storage.s3 import S3Store
from tasks.backup_format import (
    INFO,
    JOURNAL,
    OBJECTS,
    BackupInfo,
    SavedObject,
    object_path,
    read_journal,
    write_whole,
)
from tasks.lifecycle_errors import BackupRefused

_THREADS = 16
_TRIES = 5
# What the roster and the ledgers refer to is listed after these were copied; if it is gone by then, they are copied
# anew.
_PASSES = 3
_REFERRING = (ROSTER, LEDGERS)
_PROBES = "_probe/"


@dataclass(frozen=True, slots=True)
class BackedUp:
    """A finished backup: its last word, and how many objects this call copied, the rest being there before."""

    info: BackupInfo
    copied: int


def back_up(
    store: S3Store, folder: Path, *, with_uploads: bool, progress: Progress = lambda done, total: None
) -> BackedUp:
    """Copy every object of the bucket into a folder, or go on with that where it was broken off.

    Without `with_uploads` what trainers uploaded stays out: what is served, proven and recorded does not need it.
    `progress` is told of bytes, those among them that were there before.

    Raises:
        BackupRefused: the folder holds a whole backup, or something else.
        StoreUnavailable, StoreNotTrusted, OSError.
    """
    begun_at = utc_now()
    _check_folder(folder)
    (folder / OBJECTS).mkdir(parents=True, exist_ok=True)
    for left in (folder / OBJECTS).glob("*.incoming*"):  # `.part` of a download that was killed too
        left.unlink()
    wanted = partial(_is_wanted, with_uploads=with_uploads)
    total = sum(found.bytes for found in store.list_objects("") if wanted(found.key))
    copy = _Copy(store, folder, Tally(total, progress))
    missing: tuple[str, ...] = ()
    for _ in range(_PASSES):
        for prefix in _REFERRING:
            copy.run(store.list_objects(prefix))
        others = (found for found in store.list_objects("") if wanted(found.key))
        copy.run(found for found in others if not found.key.startswith(_REFERRING))
        missing = copy.list_missing()
        if not missing:
            break
    saved = sorted(copy.saved.values(), key=lambda one: one.key)
    info = BackupInfo(
        bucket=store.bucket,
        begun_at=begun_at,
        finished_at=utc_now(),
        with_uploads=with_uploads,
        objects=len(saved),
        bytes=sum(one.bytes for one in saved),
        list_sha256="0" * 64,
        missing=missing,
        damaged=tuple(one.key for one in saved if one.noted not in (None, one.sha256)),
    )
    return BackedUp(write_whole(folder, saved, info), copy.copied)


class _Copy:
    """One call's copying: what is saved by key, of which some since before."""

    def __init__(self, store: S3Store, folder: Path, seen: Callable[[int], None]) -> None:
        self._store, self._folder, self._seen = store, folder, seen
        self._before = read_journal(folder)
        self.saved: dict[str, SavedObject] = {}
        self.copied = 0

    def run(self, listed: Iterable[ObjectInfo]) -> None:
        """Save these objects as they are now; one that goes away meanwhile is left out."""
        with ThreadPoolExecutor(_THREADS) as pool, (self._folder / JOURNAL).open("ab") as journal:
            journal.write(b"\n")  # after a line that was broken off
            for saved in pool.map(self._save, listed):
                if saved is None:
                    continue
                if self._before.get(saved.key) != saved:
                    journal.write(saved.model_dump_json().encode() + b"\n")
                    journal.flush()
                    self.copied += 1
                self._seen(saved.bytes)
                self._before[saved.key] = self.saved[saved.key] = saved

    def list_missing(self) -> tuple[str, ...]:
        """The manifests that the saved roster names and that are not saved."""
        current = self.saved.get(roster_key())
        if current is None:
            return ()
        try:
            body = object_path(self._folder, current.sha256).read_bytes()
            roster = decode_document(roster_key(), body, Roster)
        except InvalidDocument:
            return ()
        named = (
            manifest_key(serving_prefix(author, one.output_digest))
            for base in roster.bases.values()
            for author, one in base.authors.items()
        )
        return tuple(sorted(key for key in named if key not in self.saved))

    def _save(self, found: ObjectInfo) -> SavedObject | None:
        before = self._before.get(found.key)
        if before is not None and before.etag == found.etag and self._holds(before):
            return before
        incoming = self._folder / OBJECTS / f"{uuid4().hex}.incoming"
        for _ in range(_TRIES):
            info = self._store.head(found.key)
            if info is None:
                return None
            try:
                got = self._store.download_file(found.key, incoming, if_match=info.etag)
            except (PreconditionFailed, ObjectNotFound):
                continue  # written anew, or removed, since it was asked for
            path = object_path(self._folder, got.sha256)
            path.parent.mkdir(exist_ok=True)
            incoming.replace(path)
            return SavedObject(
                key=found.key,
                etag=info.etag,
                bytes=got.bytes,
                sha256=got.sha256,
                noted=info.sha256,
            )
        raise BackupRefused(
            str(self._folder),
            f"to copy {found.key}",
            f"that it changed {_TRIES} times meanwhile",
            "Do it again when less is written.",
        )

    def _holds(self, saved: SavedObject) -> bool:
        path = object_path(self._folder, saved.sha256)
        return path.is_file() and path.stat().st_size == saved.bytes


def _is_wanted(key: str, *, with_uploads: bool) -> bool:
    if key.startswith(_PROBES) or key == RESTORING:
        return False
    return with_uploads or not key.startswith(UPLOADS)


def _check_folder(folder: Path) -> None:
    if (folder / INFO).exists():
        raise BackupRefused(
            str(folder), "a new folder", "a whole backup", "Name another folder, or move this one away."
        )
    ours = {JOURNAL, OBJECTS}
    others = sorted(one.name for one in folder.iterdir() if one.name not in ours) if folder.exists() else []
    begun = (folder / JOURNAL).exists()
    left = [name for name in others if not (begun and name.startswith((".", "objects")))]
    if left:
        raise BackupRefused(str(folder), "a new or empty folder", left[0], "Name another folder.")
