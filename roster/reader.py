"""What can be asked of the catalog, as typed rows. The views hold the rules; nothing is decided here."""

from collections.abc import Sequence
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from roster.errors import UnknownAuthor
from roster.garbage import no_collection
from roster.rows import (
    AdapterRow,
    AdapterStory,
    AuthorRow,
    AuthorStory,
    AuthorTimesRow,
    BaseRow,
    CheckRow,
    ColumnRow,
    EventRow,
    EvidenceRow,
    FaultRow,
    LayoutRow,
    OutcomeRow,
    ProblemRow,
    QueryResult,
    ReadyRow,
    ScoreRow,
    StaleRow,
    StateRow,
    StepRow,
    StepTimeRow,
    ThinRow,
    VerdictRow,
    WaitingRow,
)

if TYPE_CHECKING:
    from duckdb import DuckDBPyRelation

Row = TypeVar("Row")


class Snapshot(Protocol):
    """One unchanging state of the catalog."""

    def rows(self, query: str, parameters: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return the rows of a query of ours."""

    def columns(self, query: str, parameters: Sequence[str]) -> list[list[Any]]:
        """Return what a query of ours finds, a list of plain values for each column: for many rows at once."""

    def ask(self, query: str) -> QueryResult:
        """Return the answer to a query of the user's."""

    def relation(self, name: str) -> "DuckDBPyRelation":
        """Return a view or table to go on with."""

    def close(self) -> None:
        """Let go of the file."""


class CatalogReader:
    """A read-only view of one state of the catalog. A context manager; not to be shared between threads."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __enter__(self) -> Self:
        """Return the reader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._snapshot.close()

    def ready(self, base: str | None = None) -> list[ReadyRow]:
        """Return what is served, on one base or on all, by base and author."""
        return self._list(ReadyRow, "ready", "base, author", base=base)

    def bases(self) -> list[BaseRow]:
        """Return the registered bases by name."""
        return self._list(BaseRow, "bases", "base")

    def authors(self, base: str | None = None, state: str | None = None) -> list[AuthorRow]:
        """Return every author on every base by name, or those on one base, or in one state (AuthorRow.state)."""
        return self._list(AuthorRow, "authors", "author, base", base=base, state=state)

    def states(self, author: str | None = None) -> list[StateRow]:
        """Return what is in force by operators' acts, of all authors or one: held, retired, pinned."""
        return self._list(StateRow, "author_states", "author, base", author=author)

    def events(self, author: str | None = None) -> list[EventRow]:
        """Return what operators did about all authors or one, the first act first."""
        return self._list(EventRow, "author_acts", "author, position", author=author)

    def times(self, author: str | None = None, base: str | None = None) -> list[AuthorTimesRow]:
        """Return what the adapters of each author on each base have cost, in seconds."""
        return self._list(AuthorTimesRow, "author_times", "author, base", author=author, base=base)

    def history(self, author: str, limit: int | None = None) -> list[StepRow]:
        """Return the steps of all of an author's adapters, the newest first, at most `limit`.

        Raises UnknownAuthor.
        """
        newest_first = "finished_at DESC NULLS LAST, adapter_digest DESC, position DESC"
        order = newest_first if limit is None else f"{newest_first} LIMIT {int(limit)}"
        steps = self._list(StepRow, "history", order, author=author)
        if not steps and not self._snapshot.rows("SELECT 1 FROM ledgers WHERE author = ?", [author]):
            raise self._unknown(author)
        return steps

    def waiting(self, base: str | None = None) -> list[WaitingRow]:
        """Return the adapters that will be taken up again, the longest waiting first."""
        return self._list(WaitingRow, "waiting", "since, author, adapter_digest", base=base)

    def problems(self, base: str | None = None) -> list[ProblemRow]:
        """Return what a person should look at, the newest first; of one base, or all and what is of none."""
        return self._list(
            ProblemRow, "problems", "since DESC NULLS LAST, author, adapter_digest, code", base=base
        )

    def stale(self) -> list[StaleRow]:
        """Return what is out of date behind latest verdicts: steps of another version of the code, engines."""
        return self._list(StaleRow, "stale", "author, adapter_digest, kind")

    def thin_verdicts(self) -> list[ThinRow]:
        """Return the served adapters that should be scored again because there are more opponents now."""
        return self._list(ThinRow, "thin_verdicts", "base, author")

    def outcomes(self) -> list[OutcomeRow]:
        """Return how many adapters are in which state for which code, by base."""
        return self._list(
            OutcomeRow,
            "(SELECT base, state, coalesce(code, '') AS code, count(*)::INTEGER AS adapters FROM ledgers GROUP BY ALL)",
            "base, state, code",
        )

    def step_times(self) -> list[StepTimeRow]:
        """Return how many steps ended with which outcome and how long they took together, by kind."""
        return self._list(
            StepTimeRow,
            "(SELECT kind, outcome, count(*)::INTEGER AS steps, coalesce(sum(seconds), 0)::BIGINT AS seconds"
            " FROM history GROUP BY ALL)",
            "kind, outcome",
        )

    def synced_at(self) -> str:
        """Return when the catalog was last synced (ISO 8601, UTC)."""
        return str(self._snapshot.rows("SELECT synced_at FROM meta", [])[0][0])

    def show(self, author: str) -> AuthorStory:
        """Return all that is known of `author`, the adapter with the highest submission first.

        Raises UnknownAuthor.
        """
        adapters, faults = self._adapters(author)
        if not adapters:
            raise self._unknown(author)
        served = self._snapshot.rows("SELECT adapter_digest FROM ready WHERE author = ?", [author])
        steps = self._list(StepRow, "history", "position", author=author)
        verdicts = self._list(VerdictRow, "verdicts", "position", author=author)
        layouts = {
            row.adapter_digest: row
            for row in self._list(LayoutRow, "layouts", "adapter_digest", author=author)
        }
        evidence = self._list(EvidenceRow, "evidence", "parameter, number", author=author)
        checks = self._list(CheckRow, "checks", "number", author=author)
        scores = self._list(ScoreRow, "scores", "subject", author=author)
        return AuthorStory(
            author,
            tuple(
                AdapterStory(
                    adapter=adapter,
                    served=(adapter.adapter_digest,) in served,
                    steps=tuple(row for row in steps if row.adapter_digest == adapter.adapter_digest),
                    verdicts=tuple(row for row in verdicts if row.adapter_digest == adapter.adapter_digest),
                    layout=layouts.get(adapter.adapter_digest),
                    evidence=tuple(row for row in evidence if row.adapter_digest == adapter.adapter_digest),
                    checks=tuple(row for row in checks if row.adapter_digest == adapter.adapter_digest),
                    faults=tuple(row for row in faults if row.adapter_digest == adapter.adapter_digest),
                    scores=tuple(row for row in scores if row.adapter_digest == adapter.adapter_digest),
                )
                for adapter in adapters
            ),
        )

    def sql(self, query: str) -> QueryResult:
        """Return the answer to one reading statement. It can neither write, nor reach a file or the network.

        Raises QueryRefused.
        """
        return self._snapshot.ask(query)

    def relation(self, name: str) -> "DuckDBPyRelation":
        """Return a view or table as a DuckDB relation: to filter, to join, to turn into a table of Arrow or pandas.

        It reads from this reader's file and ends with it. Raises QueryRefused where there is no such view.
        """
        return self._snapshot.relation(name)

    def schema(self) -> list[ColumnRow]:
        """Return every column of every view and table, views first, by name."""
        return [ColumnRow(*values) for values in self._snapshot.rows(_SCHEMA, [])]

    def _adapters(self, author: str) -> tuple[list[AdapterRow], list[FaultRow]]:
        """Return an author's adapters, the highest submission first, and what keeps ready ones from being served."""
        rows = self._snapshot.rows(
            f"SELECT {_names(AdapterRow)}, coalesce(faults, []) FROM adapters WHERE author = ?"
            " ORDER BY submission DESC NULLS LAST, adapter_digest DESC",
            [author],
        )
        adapters = [AdapterRow(*values) for *values, _ in rows]
        return adapters, [
            FaultRow(adapter.adapter_digest, fault["code"], fault["reason"])
            for adapter, (*_, faults) in zip(adapters, rows, strict=True)
            for fault in sorted(faults, key=itemgetter("code"))
        ]

    def _unknown(self, author: str) -> UnknownAuthor:
        known = self._snapshot.rows("SELECT DISTINCT author FROM ledgers ORDER BY author", [])
        return UnknownAuthor(author, [name for (name,) in known])

    def _list(self, row: type[Row], source: str, order: str, **equal: str | None) -> list[Row]:
        """Return the rows of a view where these columns have these values; None: any value."""
        asked = {column: value for column, value in equal.items() if value is not None}
        where = " AND ".join(f"{column} = ?" for column in asked) or "true"
        query = f"SELECT {_names(row)} FROM {source} WHERE {where} ORDER BY {order}"
        with no_collection():
            if issubclass(row, tuple):
                columns = self._snapshot.columns(query, list(asked.values()))
                return list(map(row._make, zip(*columns, strict=True)))  # type: ignore[attr-defined]
            return [row(*values) for values in self._snapshot.rows(query, list(asked.values()))]


def _names(row: type[object]) -> str:
    """Return the columns of a row class as SQL takes them."""
    return ", ".join(f'"{name}"' for name in row.__annotations__)


_SCHEMA = """
SELECT c.table_name, coalesce(o.comment, ''), c.column_name, c.data_type, coalesce(c.comment, '')
FROM duckdb_columns() c
JOIN (
    SELECT 0 AS rank, view_name AS name, comment FROM duckdb_views() WHERE NOT internal
    UNION ALL SELECT 1, table_name, comment FROM duckdb_tables() WHERE NOT internal
) o ON o.name = c.table_name
WHERE NOT c.internal
ORDER BY o.rank, o.name, c.column_index
"""
