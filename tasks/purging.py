"""Purging an author: out of the roster first, then every file, and what stays of the ledgers is the audit trail.

Each part finds by itself what is left to be done, so that a purge that was broken off goes on when it is called again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from storage.author_record import AuthorAct, AuthorEvent, AuthorRecord, append_author_event
from storage.claims import is_held, read_ledger
from storage.documents import read_document, utc_now
from storage.errors import InvalidDocument, ObjectNotFound
from storage.keys import (
    CONTROLS,
    MANIFEST_FILE,
    MARKER_FILE,
    MATRICES,
    SERVING,
    UPLOADS,
    heldout_prefix,
    ledger_prefix,
    parse_ledger_key,
    parse_matrix_key,
)
from storage.ledger import Claim, Ledger
from storage.matrices import MatrixDocument, MatrixSamples
from storage.objects import ObjectInfo
from storage.purge import is_reduced, purge_ledger
from storage.s3 import S3Store
from tasks.acts import check_known, find_served
from tasks.lifecycle_errors import RosterNamesAuthor

_THREADS = 16
# Whatever a run still writes that lost its claim: looked for so often.
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Part:
    """Objects of one kind that a purge removes."""

    name: str
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PurgePlan:
    """What there is to purge of an author.

    `parts` are removed, `ledgers` reduced. `served` names the bases on which the roster serves the author, `holders`
    the runs that are at work. `unreadable` are ledgers that are none, which stay as they are.
    """

    author: str
    parts: tuple[Part, ...]
    ledgers: int
    served: tuple[str, ...]
    holders: tuple[str, ...]
    unreadable: tuple[str, ...]

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be removed or reduced."""
        return not (self.ledgers or self.served or any(part.objects for part in self.parts))


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge removed and reduced. `interrupted` are the runs that lost their claim by it.

    `left`: keys that came anew each time they were removed. `unreadable`: as in PurgePlan.
    """

    parts: tuple[Part, ...]
    ledgers: int
    interrupted: tuple[str, ...]
    left: tuple[str, ...]
    unreadable: tuple[str, ...]


def plan_purge(store: S3Store, author: str) -> PurgePlan:
    """What a purge of this author would remove and reduce now.

    Raises:
        UnknownAuthor: nothing of the author is in the store.
        InvalidName, InvalidDocument, StoreUnavailable, StoreNotTrusted.
    """
    check_known(store, author)
    ledgers, unreadable = _read_ledgers(store, author)
    parts = tuple(_count(name, found) for name, found in _list_parts(store, author))
    now = utc_now()
    return PurgePlan(
        author=author,
        parts=parts,
        ledgers=sum(not is_reduced(ledger) for ledger in ledgers),
        served=tuple(one.base for one in find_served(store, author)),
        holders=tuple(one.claim.holder for one in ledgers if one.claim and is_held(store, one, now)),
        unreadable=unreadable,
    )


def purge_author(
    store: S3Store,
    author: str,
    *,
    who: str,
    why: str,
    sync: Callable[[], None],
    say: Callable[[str], None],
) -> Purged:
    """Take an author out of the roster, remove every file of theirs, and reduce their ledgers.

    `sync` publishes a roster as the store's records say; nothing is removed until one without the author stands there.
    `say` is told what was done, in a line for each part.

    Raises:
        UnknownAuthor: nothing of the author is in the store.
        RosterNamesAuthor: the roster still has the author after `sync`.
        InvalidName, InvalidDocument, LedgerBusy, StoreUnavailable, StoreNotTrusted, and what `sync` raises.
    """
    check_known(store, author)
    event = _record(store, author, who, why)
    say(f"{author}: purged on the record; nothing of theirs is taken up or served from the next roster on")
    # Before the sync: a run that is at work stops at its next write, and does not stage behind our back.
    reduced, interrupted, unreadable = _reduce_ledgers(store, author, event.at)
    say(f"{author}: {reduced} ledgers reduced to digests, outcomes and reasons")
    sync()
    served = find_served(store, author)
    if served:
        raise RosterNamesAuthor(author, [one.base for one in served])
    removed: dict[str, list[ObjectInfo]] = {}
    for _ in range(_ROUNDS):
        if not _remove_parts(store, author, removed):
            break
    for name, found in removed.items():
        part = _count(name, found)
        say(f"{author}: {part.objects} objects ({part.bytes} bytes) of {name} removed")
    more, late, _ = _reduce_ledgers(store, author, event.at)
    if find_served(store, author):
        # Another machine's sync had read a ledger before it was reduced, and published only now.
        sync()
    left = tuple(one.key for _, found in _list_parts(store, author) for one in found)
    parts = tuple(_count(name, found) for name, found in removed.items())
    return Purged(parts, reduced + more, (*interrupted, *late), left, unreadable)


def _record(store: S3Store, author: str, who: str, why: str) -> AuthorEvent:
    """The purge on the author's record: the last act, if it is one that was broken off, else a new one."""
    event = AuthorEvent(act=AuthorAct.PURGE, base=None, adapter_digest=None, who=who, at=utc_now(), why=why)

    def decide(record: AuthorRecord) -> AuthorEvent | None:
        return None if record.events and record.events[-1].act is AuthorAct.PURGE else event

    return append_author_event(store, author, decide).events[-1]


def _reduce_ledgers(
    store: S3Store, author: str, purged_at: datetime
) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """How many ledgers were reduced, whose claims that broke, and which cannot be read."""
    ledgers, unreadable = _read_ledgers(store, author)
    due = [ledger for ledger in ledgers if not is_reduced(ledger)]

    def reduce(ledger: Ledger) -> Claim | None:
        return purge_ledger(store, author, ledger.adapter_digest, purged_at)

    now = utc_now()
    with ThreadPoolExecutor(_THREADS) as pool:
        claims = [claim for claim in pool.map(reduce, due) if claim is not None]
    return len(due), tuple(claim.holder for claim in claims if claim.expires_at > now), unreadable


def _read_ledgers(store: S3Store, author: str) -> tuple[list[Ledger], tuple[str, ...]]:
    ledgers: list[Ledger] = []
    unreadable: list[str] = []
    for found in store.list_objects(ledger_prefix(author)):
        name = parse_ledger_key(found.key)
        if name is None:
            continue
        try:
            ledgers.append(read_ledger(store, *name)[0])
        except InvalidDocument as error:
            unreadable.append(str(error))
    return ledgers, tuple(unreadable)


def _remove_parts(store: S3Store, author: str, removed: dict[str, list[ObjectInfo]]) -> bool:
    """Remove what there is now, and note it; whether there was anything. Files that are half sent go with it."""
    anything = False
    for prefix in (SERVING, CONTROLS, UPLOADS):
        for pending in store.list_pending(f"{prefix}{author}/"):
            store.abort_upload(pending)
    for name, found in _list_parts(store, author):
        _remove(store, found)
        removed.setdefault(name, []).extend(found)
        anything = anything or bool(found)
    return anything


def _list_parts(store: S3Store, author: str) -> Iterator[tuple[str, list[ObjectInfo]]]:
    """Each part with its objects, in the order in which they go.

    The matrix before the held-out sets: by their digests alone the cells of a text are known.
    """
    yield "serving", list(store.list_objects(f"{SERVING}{author}/"))
    yield "control", list(store.list_objects(f"{CONTROLS}{author}/"))
    yield "uploads", list(store.list_objects(f"{UPLOADS}{author}/"))
    yield "matrices", _list_measured(store, author)
    yield "heldout", list(store.list_objects(heldout_prefix(author)))


def _list_measured(store: S3Store, author: str) -> list[ObjectInfo]:
    """Cells of the author's adapters and on their texts, and what any adapter wrote that is theirs or quotes them.

    An adapter that serves several authors is prompted by texts of each, and what it wrote stands beside the prompt.
    """
    listed = [(found, parse_matrix_key(found.key)) for found in store.list_objects(MATRICES)]
    if not listed:
        return []
    outputs = {str(digest) for digest in _outputs(store, author)}
    texts = _texts(store, author, (found.key for found, parsed in listed if parsed and parsed.is_document))

    def is_theirs(key: str) -> bool:
        try:
            samples, _ = read_document(store, key, MatrixSamples)
        except (ObjectNotFound, InvalidDocument):
            return False
        quotes = any(sample.unit.startswith(f"{author}/") for sample in samples.samples)
        return quotes or samples.output_digest in outputs

    with ThreadPoolExecutor(_THREADS) as pool:
        samples = [found for found, parsed in listed if parsed is not None and parsed.is_samples]
        theirs = list(pool.map(is_theirs, [found.key for found in samples]))
    cells = [
        found
        for found, parsed in listed
        if parsed is not None and (parsed.text in texts or parsed.output_digest in outputs)
    ]
    return cells + [found for found, is_one in zip(samples, theirs, strict=True) if is_one]


def _outputs(store: S3Store, author: str) -> Iterator[object]:
    """The output digests that the author's ledgers name; a reduced ledger keeps them."""
    for ledger in _read_ledgers(store, author)[0]:
        yield from (step.result["output_digest"] for step in ledger.steps if "output_digest" in step.result)


def _texts(store: S3Store, author: str, matrices: Iterable[str]) -> set[str]:
    """Digests of the author's held-out sets: of those that are there, and of those that a matrix names."""
    found: set[str] = set()
    for one in store.list_objects(heldout_prefix(author)):
        with suppress(ObjectNotFound):  # another purge of this author removed it
            found.add(hashlib.sha256(store.get(one.key).body).hexdigest())
    for key in matrices:
        try:
            matrix, _ = read_document(store, key, MatrixDocument)
        except (ObjectNotFound, InvalidDocument):
            continue
        found |= {text.text for text in matrix.texts if text.ref.startswith(f"{author}/")}
    return found


def _remove(store: S3Store, found: list[ObjectInfo]) -> None:
    """Remove objects, those first by which others find the rest: nothing half is then taken for whole."""
    first = [one.key for one in found if one.key.endswith((f"/{MANIFEST_FILE}", f"/{MARKER_FILE}"))]
    rest = [one.key for one in found if one.key not in set(first)]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(store.delete, first))
        list(pool.map(store.delete, rest))


def _count(name: str, found: list[ObjectInfo]) -> Part:
    return Part(name, len(found), sum(one.bytes for one in found))
