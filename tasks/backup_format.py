"""What a backup is on disk: a list of objects, each one's bytes under their sha256, and a last word that it is whole.

`backup.json` is written last. Until then `objects.part.jsonl` tells what has been copied, so that a backup goes on
where it was broken off.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from storage.documents import Document, RootDocument, Sha256, UtcTime, decode_document, encode_document
from storage.errors import InvalidDocument
from tasks.lifecycle_errors import BackupRefused

INFO, LIST, JOURNAL, OBJECTS = "backup.json", "objects.jsonl", "objects.part.jsonl", "objects"


class SavedObject(Document):
    """One object of a backup.

    `etag` is what the store called it then, `noted` the sha256 that its writer had put beside it, None where there was
    none.
    """

    key: Annotated[str, Field(min_length=1)]
    etag: str
    bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256
    noted: Sha256 | None


class BackupInfo(RootDocument):
    """`backup.json`: the backup is whole. `list_sha256` is of the file `objects.jsonl`.

    `missing`: keys that the roster named and that were not in the store. `damaged`: objects whose bytes were not those
    that their writer had noted.
    """

    bucket: str
    begun_at: UtcTime
    finished_at: UtcTime
    with_uploads: bool
    objects: int
    bytes: int
    list_sha256: Sha256
    missing: tuple[str, ...]
    damaged: tuple[str, ...]


def object_path(folder: Path, sha256: str) -> Path:
    """Where the bytes of this digest lie."""
    return folder / OBJECTS / sha256[:2] / sha256


def read_journal(folder: Path) -> dict[str, SavedObject]:
    """What was copied before a backup was broken off, by key; a line that was broken off itself is left out."""
    try:
        lines = (folder / JOURNAL).read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    found: dict[str, SavedObject] = {}
    for line in lines:
        try:
            saved = SavedObject.model_validate_json(line)
        except ValidationError:
            continue
        found[saved.key] = saved
    return found


def write_whole(folder: Path, saved: Iterable[SavedObject], info: BackupInfo) -> BackupInfo:
    """Write the list, then the last word, each durable before the next; return that, with the list's digest.

    Raises OSError.
    """
    body = b"".join(one.model_dump_json().encode() + b"\n" for one in saved)
    whole = info.model_copy(update={"list_sha256": hashlib.sha256(body).hexdigest()})
    os.sync()  # every object's bytes, before anything says that they are there
    _write(folder / LIST, body)
    _write(folder / INFO, encode_document(INFO, whole))
    (folder / JOURNAL).unlink(missing_ok=True)
    return whole


def read_backup(folder: Path) -> tuple[BackupInfo, tuple[SavedObject, ...]]:
    """The last word of a backup and its list.

    Raises:
        BackupRefused: it is none, is not whole, or its list is another.
        OSError.
    """
    try:
        info = decode_document(INFO, (folder / INFO).read_bytes(), BackupInfo)
        body = (folder / LIST).read_bytes()
    except FileNotFoundError:
        if (folder / JOURNAL).exists():
            found, advice = "one that was broken off", f"Finish it: `roster backup {folder}`."
        else:
            found, advice = "none", "Name the folder that `roster backup` wrote."
        raise BackupRefused(str(folder), "a whole backup", found, advice) from None
    except InvalidDocument as error:
        raise BackupRefused(str(folder), "a whole backup", str(error), "Use another copy of it.") from error
    digest = hashlib.sha256(body).hexdigest()
    if digest != info.list_sha256:
        found = f"a list with sha256 {digest} in place of {info.list_sha256}"
        raise BackupRefused(str(folder), "a whole backup", found, "Use another copy of it.")
    try:
        return info, tuple(decode_document(LIST, line, SavedObject) for line in body.splitlines())
    except InvalidDocument as error:
        raise BackupRefused(str(folder), "a whole backup", str(error), "Use another copy of it.") from error


def _write(path: Path, body: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
