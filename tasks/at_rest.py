"""Uploads that have their verdict, remembered on this machine's disk, so that a look need not read them again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from storage.claims import list_ledgers
from storage.listing import UploadFolder
from storage.s3 import S3Store

MEMORY_FILE = "at-rest.json"
_NOTES = TypeAdapter(dict[str, tuple[str, str]])


class AtRest:
    """Which uploads need no look, by what the store listed of them and of their ledger when one was taken.

    Nothing but listings is asked for an upload whose files, marker and ledger are listed as they were then. The
    file may be lost or deleted at any time: the next look reads everything once more.
    """

    def __init__(self, notes: Mapping[str, tuple[str, str]], ledgers: Mapping[str, str]) -> None:
        """Keep the notes of earlier looks, and the ETag of every ledger as it is listed now."""
        self._before, self._ledgers = notes, ledgers
        self._now: dict[str, tuple[str, str]] = {}

    @classmethod
    def read(cls, store: S3Store, path: Path) -> Self:
        """What was noted in a file, nothing if there is none or it cannot be read.

        List the uploads before, and read their ledgers after: a change in between is then seen by the next look.

        Raises:
            StoreUnavailable, StoreNotTrusted.
        """
        notes: dict[str, tuple[str, str]] = {}
        with suppress(OSError, ValidationError):
            notes = _NOTES.validate_json(path.read_bytes())
        return cls(notes, {found.key: found.etag for found in list_ledgers(store)})

    def is_known(self, folder: UploadFolder) -> bool:
        """Whether nothing of this upload has changed since it was noted; it is then noted again."""
        note = self._before.get(f"{folder.author}/{folder.run}")
        if note is None or note[1] != self._token(folder, note[0]):
            return False
        self._now[f"{folder.author}/{folder.run}"] = note
        return True

    def note(self, folder: UploadFolder, ledger: str) -> None:
        """Remember an upload whose verdict stands in the ledger of this key."""
        self._now[f"{folder.author}/{folder.run}"] = (ledger, self._token(folder, ledger))

    def write(self, path: Path) -> None:
        """Put the notes of this look in the place of the file; a disk that is full only costs the next look time."""
        if self._now == self._before:
            return
        part = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(_NOTES.dump_json(self._now))
            part.replace(path)
        part.unlink(missing_ok=True)

    def _token(self, folder: UploadFolder, ledger: str) -> str:
        marker = "none" if folder.marker is None else folder.marker.etag
        # The times too: files that come anew with the same bytes end a refusal for what went wrong on their way.
        lines = [
            f"{name} {found.etag} {found.last_modified}\n" for name, found in sorted(folder.files.items())
        ]
        listed = "".join([f"{ledger} {self._ledgers.get(ledger, 'none')}\n{marker}\n", *lines])
        return hashlib.sha256(listed.encode("utf-8", "surrogatepass")).hexdigest()
