"""What operators do about an author, written to the author's record: hold, release, retire, pin, unpin."""

from __future__ import annotations

from dataclasses import dataclass

from roster.errors import UnknownAuthor
from roster.serving import Roster
from storage.author_record import (
    AuthorAct,
    AuthorEvent,
    AuthorRecord,
    Standing,
    append_author_event,
    find_standing,
)
from storage.bases import read_base
from storage.claims import read_ledger
from storage.documents import read_document, utc_now
from storage.errors import ObjectNotFound
from storage.keys import (
    HELDOUT,
    LEDGERS,
    UPLOADS,
    check_author,
    check_base,
    ledger_prefix,
    parse_ledger_key,
    roster_key,
)
from storage.ledger import Ledger, Outcome
from storage.s3 import S3Store
from tasks.lifecycle_errors import AdapterNotNamed, PinRefused

LEAST_DIGITS = 8
"""So many digits of an adapter digest are asked for at least."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the published roster serves of an author on a base."""

    base: str
    output_digest: str


@dataclass(frozen=True, slots=True)
class Acted:
    """An author's record after an act; `event` is None where nothing was in force that it would have undone."""

    record: AuthorRecord
    event: AuthorEvent | None


def act(store: S3Store, author: str, done: AuthorAct, *, base: str | None, who: str, why: str) -> Acted:
    """Hold, release, retire or unpin an author: on one base, or with None on every one.

    A release or an unpin where nothing is held, retired or pinned writes nothing.

    Raises:
        UnknownAuthor: nothing of the author is in the store.
        UnknownBase: a base to hold or to retire on is not registered.
        InvalidName, InvalidDocument, LedgerBusy, StoreUnavailable.
    """
    if base is not None:
        # A hold of a mistyped base would hold nobody; a release of one says by itself that it undoes nothing.
        if done in (AuthorAct.HOLD, AuthorAct.RETIRE):
            read_base(store, base)
        check_base(base)
    check_known(store, author)
    event = AuthorEvent(act=done, base=base, adapter_digest=None, who=who, at=utc_now(), why=why)
    return _append(store, author, event)


def pin(store: S3Store, author: str, digest: str, *, who: str, why: str) -> Acted:
    """Serve this adapter alone of its base; `digest` is the adapter's, or how it begins.

    Raises:
        UnknownAuthor: nothing of the author is in the store.
        AdapterNotNamed: no adapter of the author, or more than one, begins so.
        PinRefused: its verdict is not ready.
        InvalidName, InvalidDocument, LedgerBusy, StoreUnavailable.
    """
    check_known(store, author)
    whole = find_adapter(store, author, digest)
    ledger, _ = read_ledger(store, author, whole)
    verdict = ledger.verdict
    if verdict is None or verdict.outcome is not Outcome.READY:
        raise PinRefused(author, whole, _state(ledger))
    event = AuthorEvent(
        act=AuthorAct.PIN, base=ledger.base, adapter_digest=whole, who=who, at=utc_now(), why=why
    )
    return _append(store, author, event)


def find_adapter(store: S3Store, author: str, digest: str) -> str:
    """The adapter digest of an author that begins so.

    Raises:
        AdapterNotNamed: there is none, or more than one, or fewer than LEAST_DIGITS are given.
        InvalidName, StoreUnavailable, StoreNotTrusted.
    """
    parsed = (parse_ledger_key(found.key) for found in store.list_objects(ledger_prefix(author)))
    known = sorted(name[1] for name in parsed if name is not None)
    found = [one for one in known if one.startswith(digest.lower())]
    if len(digest) < LEAST_DIGITS or len(found) != 1:
        raise AdapterNotNamed(author, digest, found or known)
    return found[0]


def check_known(store: S3Store, author: str) -> None:
    """Return if there is an upload, a held-out set or a ledger of the author, or a record of acts.

    Raises:
        UnknownAuthor: there is none.
        InvalidName, StoreUnavailable, StoreNotTrusted.
    """
    check_author(author)
    roots = (LEDGERS, UPLOADS, HELDOUT)
    if not any(True for root in roots for _ in store.list_objects(f"{root}{author}/")):
        known = {name for root in roots for name in store.list_folders(root)}
        raise UnknownAuthor(author, sorted(known))


def find_served(store: S3Store, author: str) -> tuple[Served, ...]:
    """What the published roster serves of the author, one for each base.

    Raises:
        InvalidDocument, StoreUnavailable.
    """
    try:
        roster, _ = read_document(store, roster_key(), Roster)
    except ObjectNotFound:
        return ()
    found = ((base, entry.authors.get(author)) for base, entry in sorted(roster.bases.items()))
    return tuple(Served(base, one.output_digest) for base, one in found if one is not None)


def _append(store: S3Store, author: str, event: AuthorEvent) -> Acted:
    undoes = event.act in (AuthorAct.RELEASE, AuthorAct.UNPIN)

    def decide(record: AuthorRecord) -> AuthorEvent | None:
        return None if undoes and not _undoes_something(record, event) else event

    record = append_author_event(store, author, decide)
    return Acted(record, event if event in record.events else None)


def _undoes_something(record: AuthorRecord, event: AuthorEvent) -> bool:
    bases = {known.base for known in record.events} if event.base is None else {event.base}
    return any(_is_in_force(find_standing(record, base), event.act) for base in bases)


def _is_in_force(standing: Standing, undone_by: AuthorAct) -> bool:
    if undone_by is AuthorAct.UNPIN:
        return standing.pinned is not None
    return standing.held is not None or standing.retired is not None


def _state(ledger: Ledger) -> str:
    last = ledger.verdict or (ledger.steps[-1] if ledger.steps else None)
    if last is None:
        return "no verdict yet"
    code = f" ({last.result['code']})" if last.result.get("code") else ""
    words = f"{last.kind.value} {last.outcome.value}{code}"
    return words if ledger.verdict is not None else f"no verdict yet, its last step is {words}"
