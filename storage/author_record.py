"""What operators did about an author: held, released, retired, pinned, unpinned, purged; and what that means now."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from pydantic import model_validator

from storage.documents import (
    AuthorName,
    BaseName,
    Document,
    RootDocument,
    Sha256,
    UtcTime,
    put_document,
    read_document,
)
from storage.errors import AuthorRetired, InvalidDocument, LedgerBusy, ObjectNotFound, PreconditionFailed
from storage.keys import author_record_key
from storage.s3 import S3Store

_WRITES = 50
_LONGEST_PAUSE = 0.2


class AuthorAct(StrEnum):
    """What an operator did about an author."""

    HOLD = "hold"
    RELEASE = "release"
    RETIRE = "retire"
    PIN = "pin"
    UNPIN = "unpin"
    PURGE = "purge"


REASONED = frozenset({AuthorAct.HOLD, AuthorAct.RETIRE, AuthorAct.PURGE})
"""The acts that need a reason."""


class AuthorEvent(Document):
    """One act; never changed once it is written.

    `base`: None for every base. `adapter_digest`: a pin's alone, which names its base too. `who`: the operator.
    """

    act: AuthorAct
    base: BaseName | None
    adapter_digest: Sha256 | None
    who: str
    at: UtcTime
    why: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        pins = self.act is AuthorAct.PIN
        if pins != (self.adapter_digest is not None) or (pins and self.base is None):
            raise ValueError("a pin names an adapter digest and a base, no other act names a digest")
        if self.act is AuthorAct.PURGE and self.base is not None:
            raise ValueError("a purge is of every base")
        if self.act in REASONED and not self.why.strip():
            raise ValueError(f"{self.act} needs a reason")
        return self


class AuthorRecord(RootDocument):
    """Everything that operators did about an author, the first act first."""

    author: AuthorName
    events: tuple[AuthorEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """What is in force for an author on one base: the act that does each, None where none does.

    `held`: not served. `retired`: not served, and nothing is taken up; a retirement or a purge. `pinned`: of the
    author's adapters this one alone may be served.
    """

    held: AuthorEvent | None = None
    retired: AuthorEvent | None = None
    pinned: AuthorEvent | None = None


def find_standing(record: AuthorRecord, base: str | None) -> Standing:
    """Return what the acts that are of this base, or of every one, come to in their order.

    With None only acts that are of every base count. A purge is a retirement before which nothing counts.
    """
    held: AuthorEvent | None = None
    retired: AuthorEvent | None = None
    pinned: AuthorEvent | None = None
    for event in record.events:
        if event.base not in (None, base):
            continue
        match event.act:
            case AuthorAct.HOLD:
                held = event
            case AuthorAct.RETIRE:
                retired = event
            case AuthorAct.RELEASE:
                held = retired = None
            case AuthorAct.PIN:
                pinned = event
            case AuthorAct.UNPIN:
                pinned = None
            case AuthorAct.PURGE:
                held, retired, pinned = None, event, None
    return Standing(held, retired, pinned)


def read_author_record(store: S3Store, author: str) -> AuthorRecord:
    """Return what operators did about an author: a record without events where nobody did anything.

    Raises InvalidName, InvalidDocument, StoreUnavailable.
    """
    return _read(store, author)[0]


def check_taken_up(record: AuthorRecord, base: str | None) -> None:
    """Return if the author's uploads for this base are taken up.

    Raises AuthorRetired.
    """
    retired = find_standing(record, base).retired
    if retired is not None:
        raise AuthorRetired(record.author, retired.base, retired.act, retired.who, retired.at, retired.why)


def append_author_event(
    store: S3Store, author: str, decide: Callable[[AuthorRecord], AuthorEvent | None]
) -> AuthorRecord:
    """Write one more act, and return the record with it.

    `decide` is given the record as it is now and returns the act, or None where none is needed; it is asked again when
    someone else wrote meanwhile.

    Raises InvalidName, InvalidDocument, LedgerBusy, StoreUnavailable.
    """
    key = author_record_key(author)
    for race in range(1, _WRITES + 1):
        record, etag = _read(store, author)
        event = decide(record)
        if event is None:
            return record
        changed = record.model_copy(update={"events": (*record.events, event)})
        try:
            put_document(store, key, changed, if_match=etag, if_none_match=etag is None)
        except PreconditionFailed:
            time.sleep(random.uniform(0, min(_LONGEST_PAUSE, 0.01 * race)))
            continue
        return changed
    raise LedgerBusy(key, _WRITES)


def _read(store: S3Store, author: str) -> tuple[AuthorRecord, str | None]:
    key = author_record_key(author)
    try:
        record, etag = read_document(store, key, AuthorRecord)
    except ObjectNotFound:
        return AuthorRecord(author=author), None
    if record.author != author:
        raise InvalidDocument(key, f"it is the record of {record.author}")
    return record, etag
