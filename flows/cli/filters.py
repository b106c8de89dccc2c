"""What narrows a question down: a base, a state, an age."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from roster.reader import CatalogReader

State = Literal[
    "ready",
    "held",
    "retired",
    "purged",
    "unservable",
    "in_progress",
    "waiting",
    "stopped",
    "quarantined",
    "inconclusive",
]
"""What an author or an adapter can be."""


def _check_age(_: object, age: timedelta | None) -> None:
    if age is not None and age <= timedelta(0):
        raise ValueError("expected an age above nothing, such as 7d, 2h or 90m")


OlderThan = Annotated[timedelta | None, Parameter(validator=_check_age)]


def check_base(reader: CatalogReader, base: str | None) -> None:
    """Return if the catalog knows the base, or none is named.

    Raises:
        UnknownBase: it is neither registered nor anyone's.
    """
    from storage.errors import UnknownBase

    if base is None:
        return
    known = [row.base for row in reader.bases()]
    if base not in known and not reader.authors(base):
        raise UnknownBase(base, known)


def is_older(at: str | None, age: timedelta | None) -> bool:
    """Whether a time of the catalog (ISO 8601) is longer ago than `age`; any is, where that is None."""
    if age is None:
        return True
    return at is not None and datetime.now(UTC) - datetime.fromisoformat(at) > age
