"""What a sync hands to the catalog, and what the catalog says of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from roster.swap import FileMark


@dataclass(frozen=True, slots=True)
class LedgerText:
    """An adapter's ledger, or an author's record, as read from the store: its key, its ETag and its JSON text."""

    key: str
    etag: str
    body: str


@dataclass(frozen=True, slots=True)
class BaseText:
    """A registered base as read from the store: its name, and the ETag and JSON text of its base.json."""

    base: str
    etag: str
    body: str


@dataclass(frozen=True, slots=True)
class EngineText:
    """The engine.json of a base as read from the store; `engine_id` is None where it is none that we can read."""

    base: str
    etag: str
    engine_id: str | None
    body: str


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one sync did to the catalog, in counts of ledger objects.

    `rebuilt` says why the file was built anew; None: it was not. `unreadable` names the objects of the whole
    catalog that hold no document we can read, with the reason.
    """

    added: int
    changed: int
    removed: int
    total: int
    rebuilt: str | None
    unreadable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """What the catalog had when a sync began: ledger key → ETag of every object under `ledger/`, readable or not.

    `authors`: of these alone; None: of all. `mark` is the file that said so, None where there is none to go on with.
    """

    etags: Mapping[str, str]
    authors: frozenset[str] | None
    mark: FileMark | None
