"""The published roster: roster/current.json, each of its versions in roster/history/, and which one was seen here."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from roster.garbage import no_collection
from roster.serving import Roster
from storage.documents import read_document
from storage.errors import ObjectNotFound, PreconditionFailed
from storage.keys import roster_history_key, roster_key
from storage.s3 import S3Store


def read_roster(store: S3Store) -> tuple[Roster | None, str | None]:
    """The published roster and its ETag; both None where there is none yet.

    Raises:
        InvalidDocument, StoreUnavailable: it cannot be read.
    """
    try:
        with no_collection():
            return read_document(store, roster_key(), Roster)
    except ObjectNotFound:
        return None, None


def find_roster(store: S3Store) -> str | None:
    """The ETag of the published roster, None where there is none yet. Raises StoreUnavailable."""
    found = store.head(roster_key())
    return None if found is None else found.etag


def put_roster(store: S3Store, new: Roster, previous: Roster | None, etag: str | None) -> str:
    """The new roster's ETag, after it took the place of the `previous` one of this ETag, and went into the history.

    Raises:
        PreconditionFailed: somebody else published meanwhile; nothing was changed.
        StoreUnavailable: the store did not do it.
    """
    if previous is not None:
        keep_version(store, previous)
    body = _encode(new)
    published = store.put(roster_key(), body, if_match=etag, if_none_match=etag is None)
    with suppress(PreconditionFailed):  # somebody has made it good already
        store.put(roster_history_key(new.version), body, if_none_match=True)
    return published


def keep_version(store: S3Store, roster: Roster) -> None:
    """Put a published roster into the history, if it is not there: whoever published it may have been killed before."""
    key = roster_history_key(roster.version)
    if store.head(key) is None:
        with suppress(PreconditionFailed):  # a version is written once
            store.put(key, _encode(roster), if_none_match=True)


def note_seen(catalog: Path, etag: str | None) -> None:
    """Note beside the catalog that it holds all that went into the roster of this ETag (None: there is no roster)."""
    note = _note_of(catalog)
    fresh = note.with_name(note.name + ".new")
    fresh.write_text(etag or "", encoding="utf-8")
    fresh.replace(note)


def was_seen(catalog: Path, etag: str | None) -> bool:
    """Whether the catalog is known to hold all that went into the roster of this ETag."""
    try:
        return _note_of(catalog).read_text(encoding="utf-8") == (etag or "")
    except FileNotFoundError:
        return False


def _encode(roster: Roster) -> bytes:
    """The roster as all our documents are written; pydantic does it ten times as fast as json for so long a one."""
    return (roster.model_dump_json(indent=2) + "\n").encode()


def _note_of(catalog: Path) -> Path:
    return catalog.with_name(catalog.name + ".roster")
