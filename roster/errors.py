"""What can go wrong with the catalog and the roster. Errors keep their facts as attributes, and pickle."""

import re
from collections.abc import Sequence
from pathlib import Path


class RosterError(Exception):
    """The base of every error of this package."""


class CatalogUnreadable(RosterError):
    """Base of those that say why there is no catalog to read; each has the `path`."""


class CatalogMissing(CatalogUnreadable):
    """There is no catalog file at `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        """Return the file that was expected, and how to make it."""
        return (
            f"catalog {self.path}: expected a file, found none; run `roster sync` to build it from the ledger"
        )


class CatalogSchemaMismatch(CatalogUnreadable):
    """The catalog at `path` was built by another version of the code, with the schema `found`."""

    def __init__(self, path: Path, found: str, expected: str) -> None:
        super().__init__(path, found, expected)
        self.path, self.found, self.expected = path, found, expected

    def __str__(self) -> str:
        """Return both schemas, and how to rebuild."""
        return (
            f"catalog {self.path}: expected schema {self.expected}, found {self.found}; "
            "run `roster sync`, which builds it anew from the ledger"
        )


class CatalogDamaged(CatalogUnreadable):
    """The catalog at `path` cannot be read: `found` says what DuckDB met."""

    def __init__(self, path: Path, found: str) -> None:
        super().__init__(path, found)
        self.path, self.found = path, found

    def __str__(self) -> str:
        """Return what was met, and how to rebuild."""
        return (
            f"catalog {self.path}: expected a readable DuckDB file, found: {self.found}; "
            "run `roster rebuild`: nothing is lost, the ledger holds the truth"
        )


class CatalogHeld(CatalogUnreadable):
    """Another program has the catalog at `path` open for writing: `found` is DuckDB's message."""

    def __init__(self, path: Path, found: str) -> None:
        super().__init__(path, found)
        self.path, self.found = path, found

    def __str__(self) -> str:
        """Return who holds the file, and how to look at it without holding it."""
        advice = "close that program, and open the catalog with `duckdb -readonly` or `roster sql`"
        if re.search(r"\bPID 0\b", self.found):
            advice = (
                "no process that can be seen from here holds it: a program in another container or on another "
                "machine does, or the disk has no working locks. Keep the catalog on a local disk of one machine"
            )
        return f"catalog {self.path}: expected no writer, found: {self.found}; {advice}"


class CatalogBusy(RosterError):
    """Another sync is at work on the catalog at `path`; `holder` is its process id, if known."""

    def __init__(self, path: Path, holder: int | None) -> None:
        super().__init__(path, holder)
        self.path, self.holder = path, holder

    def __str__(self) -> str:
        """Return the process that syncs, and what to do."""
        who = "an unnamed process" if self.holder is None else f"process {self.holder}"
        return (
            f"catalog {self.path}: expected to be the only sync, found {who} at it; "
            "try again when it has ended (its lock goes with the process, so there is nothing to remove)"
        )


class CatalogChanged(RosterError):
    """The catalog at `path` is not what known_etags() said; `keys` are the ledgers that differ."""

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        super().__init__(path, tuple(keys))
        self.path, self.keys = path, tuple(keys)

    def __str__(self) -> str:
        """Return how many ledgers differ, one by name, and what to do."""
        return (
            f"catalog {self.path}: expected the ledgers it held when this sync began, found "
            f"{len(self.keys)} that differ{''.join(f', such as {key}' for key in self.keys[:1])}: "
            "another sync or a loss came between. "
            "Nothing was written; sync again"
        )


class CatalogNotLocal(RosterError):
    """The file system of `path` refuses file locks: `found` is the system's message."""

    def __init__(self, path: Path, found: str) -> None:
        super().__init__(path, found)
        self.path, self.found = path, found

    def __str__(self) -> str:
        """Return the refusal, and where a catalog belongs."""
        return (
            f"catalog {self.path}: expected a disk with file locks, found: {self.found}; "
            "keep the catalog on a local disk (it can be rebuilt anywhere from the ledger)"
        )


class CatalogWriteFailed(RosterError):
    """DuckDB could not write the new catalog for `path`: `found` is its message. The old file stands."""

    def __init__(self, path: Path, found: str) -> None:
        super().__init__(path, found)
        self.path, self.found = path, found

    def __str__(self) -> str:
        """Return what DuckDB met, what stands, and what to do."""
        return (
            f"catalog {self.path}: expected to write the new file beside it, found: {self.found}; "
            "the old catalog stands; look at the disk's free space, then sync again, or run `roster rebuild`"
        )


class QueryRefused(RosterError):
    """A query of the user's own was not run or failed: `found` says why."""

    def __init__(self, query: str, found: str) -> None:
        super().__init__(query, found)
        self.query, self.found = query, found

    def __str__(self) -> str:
        """Return the query's beginning, why it was refused, and what is allowed."""
        return (
            f"query {self.query[:80]!r}: expected one reading statement, found: {self.found}; "
            '`roster sql "show tables"` lists what can be asked'
        )


class UnknownView(RosterError):
    """The catalog has no view or table of that name; `known` are those it has."""

    def __init__(self, view: str, known: Sequence[str]) -> None:
        super().__init__(view, tuple(known))
        self.view, self.known = view, tuple(known)

    def __str__(self) -> str:
        """Return the name, those there are, and what to do."""
        return (
            f"catalog: {self.view}: expected the name of a view or table, found none such; there are "
            f"{', '.join(self.known)}; `roster sql --schema` says what each holds"
        )


class UnknownAuthor(RosterError):
    """The catalog has no adapter of `author`; `known` are the authors it has."""

    def __init__(self, author: str, known: Sequence[str]) -> None:
        super().__init__(author, tuple(known))
        self.author, self.known = author, tuple(known)

    def __str__(self) -> str:
        """Return the authors there are, and what to do."""
        some = ", ".join(self.known[:10]) or "none"
        more = f" and {len(self.known) - 10} more" if len(self.known) > 10 else ""
        return (
            f"author {self.author}: expected one of the catalog's authors, found no adapter; "
            f"it has {some}{more}. "
            "If the upload is new, run `roster sync`; if it never started, `roster status`"
        )


class UnknownBase(RosterError):
    """A ready adapter of `author` is for `base`, which is not among the registered `known` ones."""

    def __init__(self, author: str, base: str, known: Sequence[str]) -> None:
        super().__init__(author, base, tuple(known))
        self.author, self.base, self.known = author, base, tuple(known)

    def __str__(self) -> str:
        """Return the bases there are, and how to register one."""
        return (
            f"{self.author}: its adapter is for base {self.base}, "
            f"expected one of {', '.join(self.known) or 'none'}; "
            f"register it with `roster base add {self.base} --config DIR`"
        )


class RankNotServeable(RosterError):
    """No legal max_lora_rank of vLLM is large enough for the `rank` of an adapter of `author`."""

    def __init__(self, author: str, rank: int, largest: int) -> None:
        super().__init__(author, rank, largest)
        self.author, self.rank, self.largest = author, rank, largest

    def __str__(self) -> str:
        """Return both ranks, and what to do."""
        return (
            f"{self.author}: its adapter has rank {self.rank}, expected at most {self.largest}, the largest "
            "max_lora_rank of vLLM; train it with a smaller rank"
        )


class RosterDrop(RosterError):
    """The new roster would drop too many authors at once.

    `dropped` names them as `<base>/<author>`, `before` is how many are served, `limit` is the number of
    authors that a sync may drop without asking.
    """

    def __init__(self, dropped: Sequence[str], before: int, limit: int) -> None:
        super().__init__(tuple(dropped), before, limit)
        self.dropped, self.before, self.limit = tuple(dropped), before, limit

    def __str__(self) -> str:
        """Return who would go, how many may, and how to allow it."""
        return (
            f"roster/current.json: expected to drop at most {self.limit} of {self.before} authors, found "
            f"{len(self.dropped)} to be dropped: {', '.join(self.dropped)}. The old roster stands. "
            "Look at `roster why` for one of them; if it is right, run `roster sync --allow-drop`"
        )


class PlanImpossible(RosterError):
    """Sizes or settings that vLLM would not start with, or memory in which nothing fits; the message says all."""
