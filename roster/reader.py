"""What can be asked of the catalog, as typed rows. The views hold the rules; nothing is decided here."""

from collections.abc import Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from roster.errors import UnknownAuthor
from roster.rows import (
    AdapterRow,
    AdapterStory,
    AuthorRow,
    AuthorStory,
    BaseRow,
    CheckRow,
    EvidenceRow,
    FaultRow,
    LayoutRow,
    ProblemRow,
    QueryResult,
    ReadyRow,
    ScoreRow,
    StaleRow,
    StepRow,
    ThinRow,
    VerdictRow,
    WaitingRow,
)

Row = TypeVar("Row")


class Snapshot(Protocol):
    """One unchanging state of the catalog."""

    def rows(self, query: str, parameters: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return the rows of a query of ours."""

    def ask(self, query: str) -> QueryResult:
        """Return the answer to a query of the user's."""

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
        if base is None:
            return self._list(ReadyRow, "ready ORDER BY base, author")
        return self._list(ReadyRow, "ready WHERE base = ? ORDER BY base, author", base)

    def bases(self) -> list[BaseRow]:
        """Return the registered bases by name."""
        return self._list(BaseRow, "bases ORDER BY base")

    def authors(self) -> list[AuthorRow]:
        """Return every author on every base, by name."""
        return self._list(AuthorRow, "authors ORDER BY author, base")

    def waiting(self) -> list[WaitingRow]:
        """Return the adapters that will be taken up again, the longest waiting first."""
        return self._list(WaitingRow, "waiting ORDER BY since, author, adapter_digest")

    def problems(self) -> list[ProblemRow]:
        """Return what a person should look at, the newest first."""
        return self._list(ProblemRow, "problems ORDER BY since DESC NULLS LAST, author, adapter_digest, code")

    def stale(self) -> list[StaleRow]:
        """Return the steps behind latest verdicts that another version of the code did."""
        return self._list(StaleRow, "stale ORDER BY author, adapter_digest, kind")

    def thin_verdicts(self) -> list[ThinRow]:
        """Return the served adapters that should be scored again because there are more opponents now."""
        return self._list(ThinRow, "thin_verdicts ORDER BY base, author")

    def synced_at(self) -> str:
        """Return when the catalog was last synced (ISO 8601, UTC)."""
        return str(self._snapshot.rows("SELECT synced_at FROM meta", [])[0][0])

    def show(self, author: str) -> AuthorStory:
        """Return all that is known of `author`, the adapter with the highest submission first.

        Raises UnknownAuthor.
        """
        adapters = self._list(
            AdapterRow,
            "adapters WHERE author = ? ORDER BY submission DESC NULLS LAST, adapter_digest DESC",
            author,
        )
        if not adapters:
            known = self._snapshot.rows("SELECT DISTINCT author FROM ledgers ORDER BY author", [])
            raise UnknownAuthor(author, [name for (name,) in known])
        served = self._snapshot.rows("SELECT adapter_digest FROM ready WHERE author = ?", [author])
        steps = self._list(StepRow, "history WHERE author = ? ORDER BY position", author)
        verdicts = self._list(VerdictRow, "verdicts WHERE author = ? ORDER BY position", author)
        layouts = {
            row.adapter_digest: row for row in self._list(LayoutRow, "layouts WHERE author = ?", author)
        }
        evidence = self._list(EvidenceRow, "evidence WHERE author = ? ORDER BY parameter, number", author)
        checks = self._list(CheckRow, "checks WHERE author = ? ORDER BY number", author)
        faults = self._list(FaultRow, "unservable WHERE author = ? ORDER BY code", author)
        scores = self._list(ScoreRow, "scores WHERE author = ? ORDER BY subject", author)
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

    def _list(self, row: type[Row], view: str, *parameters: str) -> list[Row]:
        names = ", ".join(f'"{field.name}"' for field in fields(row))  # type: ignore[arg-type]
        return [row(*values) for values in self._snapshot.rows(f"SELECT {names} FROM {view}", parameters)]
