"""What lies under uploads/, from one listing: which uploads have a marker, and which are files alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from storage.digests import is_adapter_file
from storage.keys import (
    BEGUN_FILE,
    MARKER_FILE,
    TRAINING_FILE,
    UPLOADS,
    is_upload_name,
    split_upload_key,
    upload_prefix,
)
from storage.objects import ObjectInfo
from storage.s3 import S3Store

_OURS = (MARKER_FILE, BEGUN_FILE)


@dataclass(frozen=True, slots=True)
class UploadFolder:
    """One upload as it is listed. `files` lie right inside it, by name; `folders` are those that lie in it.

    `begun` stands there while `roster submit` sends the files, and stays when it was broken off.
    """

    author: str
    run: str
    marker: ObjectInfo | None
    begun: ObjectInfo | None
    files: dict[str, ObjectInfo]
    folders: tuple[str, ...]
    newest: datetime

    @property
    def own(self) -> dict[str, ObjectInfo]:
        """Return the adapter's own files and the trainer's statement: what makes it the submission that it is."""
        return {n: found for n, found in self.files.items() if is_adapter_file(n) or n == TRAINING_FILE}

    @classmethod
    def of(cls, author: str, run: str, found: dict[str, ObjectInfo]) -> Self:
        """Return the upload made of these objects, by what follows its prefix in their keys."""
        plain = {rest: one for rest, one in found.items() if "/" not in rest and rest not in _OURS}
        folders = tuple(sorted({rest.partition("/")[0] for rest in found if "/" in rest}))
        newest = max(one.last_modified for one in found.values())
        return cls(author, run, found.get(MARKER_FILE), found.get(BEGUN_FILE), plain, folders, newest)


@dataclass(frozen=True, slots=True)
class UploadListing:
    """All uploads: with a marker, without one, and those under names that we must refuse."""

    ready: tuple[UploadFolder, ...]
    unmarked: tuple[UploadFolder, ...]
    misnamed: tuple[UploadFolder, ...]


def list_uploads(store: S3Store) -> UploadListing:
    """Return every upload that has a marker or a file of an adapter's own, in its root or in a folder.

    Raises StoreUnavailable, StoreNotTrusted.
    """
    ready: list[UploadFolder] = []
    unmarked: list[UploadFolder] = []
    misnamed: list[UploadFolder] = []
    for folder in _group(store.list_objects(UPLOADS)):
        if not is_upload_name(folder.author, folder.run):
            misnamed.append(folder)
        else:
            (unmarked if folder.marker is None else ready).append(folder)
    return UploadListing(tuple(ready), tuple(unmarked), tuple(misnamed))


def list_upload(store: S3Store, author: str, run: str) -> UploadFolder | None:
    """Return one upload as it is listed, None if there is nothing of it.

    Raises InvalidName, StoreUnavailable, StoreNotTrusted.
    """
    return next(iter(_group(store.list_objects(upload_prefix(author, run)))), None)


def _group(objects: Iterable[ObjectInfo]) -> list[UploadFolder]:
    found: dict[tuple[str, str], dict[str, ObjectInfo]] = {}
    for one in objects:
        names = split_upload_key(one.key)
        if names is not None:
            found.setdefault(names[:2], {})[names[2]] = one
    return [UploadFolder.of(author, run, files) for (author, run), files in found.items() if _counts(files)]


def _counts(files: Iterable[str]) -> bool:
    return any(rest in _OURS or is_adapter_file(rest.rpartition("/")[2]) for rest in files)
