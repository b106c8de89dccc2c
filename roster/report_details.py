"""Everything the catalog knows of every author, packed for a page that opens it on demand.

DuckDB writes the rows as JSON text itself, a text for each adapter and kind, so that thirty thousand adapters are no
million Python objects.
"""

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roster.reader import CatalogReader
from roster.report_names import Names

_AUTHORS = 64
"""So many authors share a block: opening one of them unpacks half a megabyte, whatever the size of the roster."""

SUBMITTED_AT = r"nullif(regexp_extract({0}, '^\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ'), '')"
"""The time in a submission's name, as SQL."""

_EMPTY = "[]"


@dataclass(frozen=True, slots=True)
class Column:
    """A column on the page: its name there, and the SQL that gives it."""

    name: str
    sql: str


def _plain(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, f'"{name}"') for name in names)


def _figures(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, f'round("{name}", 6)') for name in names)


@dataclass(frozen=True, slots=True)
class DetailTable:
    """A view on the page. `private` columns hold people's words, or tell whose an adapter is.

    anonymous: what takes the place of a public column of the same name where nobody is named. most: so many rows of an
    adapter, the first of the order; None: all.
    """

    name: str
    view: str
    public: tuple[Column, ...]
    private: tuple[Column, ...]
    order: str
    anonymous: tuple[Column, ...] = ()
    most: int | None = None

    def columns(self, *, anonymous: bool) -> tuple[Column, ...]:
        """Return the columns in their order on the page."""
        if not anonymous:
            return (*self.public, *self.private)
        instead = {column.name: column for column in self.anonymous}
        return tuple(instead.get(column.name, column) for column in self.public)

    def query(self, keys: str, base: str | None, *, anonymous: bool) -> str:
        """Return the query for `keys` and all rows that share them, as JSON text: a list of lists."""
        row = f"json_array({', '.join(column.sql for column in self.columns(anonymous=anonymous))})"
        last = "" if self.most is None else self.most
        return (
            f"SELECT {keys}, '[' || array_to_string(list(row ORDER BY {self.order})[1:{last}], ',') || ']' "
            f"FROM (SELECT *, {row}::VARCHAR AS row FROM {self.view} WHERE {only_base(base)}) GROUP BY {keys}"
        )


ADAPTERS = DetailTable(
    "adapters",
    "adapters",
    (
        *_plain("base", "submissions", "state", "code", "last_step", "last_at", "stale", "format", "rank"),
        Column("submitted", SUBMITTED_AT.format("submission")),
    ),
    _plain("adapter_digest", "run", "reason", "output_digest", "uri"),
    "adapter_digest",
)
PARTS = (
    DetailTable(
        "scores",
        "scores",
        (*_plain("subject"), *_figures("bpb", "difference", "difference_lower", "difference_upper")),
        _plain("problem"),
        "bpb, subject",
        anonymous=(
            Column(
                "subject",
                "CASE WHEN subject NOT LIKE 'wrong:%' THEN subject ELSE 'wrong:other ' || row_number() OVER "
                "(PARTITION BY author, adapter_digest, subject LIKE 'wrong:%' ORDER BY bpb) END",
            ),
        ),
    ),
    DetailTable(
        "evidence",
        "evidence",
        _plain("parameter", "value", "decided_by", "source", "says", "strength", "agrees"),
        _plain("detail"),
        "parameter, number",
    ),
    DetailTable("checks", "checks", _plain("name", "passed"), _plain("detail"), "number"),
    DetailTable(
        "verdicts",
        "verdicts",
        (
            *_plain("outcome", "code", "codes", "measured_at", "latest"),
            *_figures("own", "base_bpb", "margin"),
        ),
        _plain("reason", "messages", "bad_numbers"),
        "position DESC",
    ),
    DetailTable("faults", "unservable", _plain("code"), _plain("reason"), "code"),
    DetailTable(
        "steps",
        "history",
        _plain("position", "kind", "attempt", "outcome", "code", "finished_at", "seconds"),
        _plain("reason", "worker"),
        "position DESC",
        most=40,  # a stopped adapter is tried again every hour
    ),
)
"""What a page has of each adapter besides its own row, in this order."""

OF_AUTHOR = (
    DetailTable("events", "author_acts", _plain("act", "base", "at"), _plain("who", "why"), "position DESC"),
    DetailTable(
        "times",
        "author_times",
        (*_plain("base", "runs", "steps", "seconds", "seconds_to_ready"), *_figures("engine_seconds")),
        (),
        "base",
    ),
)
"""What a page has of each author besides the adapters, in this order."""


def pack_details(
    reader: CatalogReader, base: str | None, authors: Sequence[str], names: Names
) -> Iterator[str]:
    """Give one block for every 64 of `authors`, in their order, packed.

    A block is a list of [name, adapters, then one list of rows for each of OF_AUTHOR]; an adapter, newest submission
    first, is its own row, whether it is served, then one list of rows for each of PARTS.
    """
    adapters = _read_adapters(reader, base, anonymous=names.anonymous)
    of_author = [
        {
            str(author): str(rows)
            for author, rows in reader.sql(table.query("author", base, anonymous=names.anonymous)).rows
        }
        for table in OF_AUTHOR
    ]
    for start in range(0, len(authors), _AUTHORS):
        entries = (
            f"[{json.dumps(names.name(author))},[{','.join(adapters.get(author, ()))}],"
            f"{','.join(rows.get(author, _EMPTY) for rows in of_author)}]"
            for author in authors[start : start + _AUTHORS]
        )
        yield pack(f"[{','.join(entries)}]")


def block_of(position: int) -> int:
    """Return which block has the author at this position."""
    return position // _AUTHORS


def pack(text: str) -> str:
    """Return a text deflated, as base64 text."""
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode("ascii")


def only_base(base: str | None, column: str = "base") -> str:
    """Return the SQL condition for rows of one base, and those of every base; or for all rows."""
    return "true" if base is None else f"coalesce({column}, {_literal(base)}) = {_literal(base)}"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _read_adapters(reader: CatalogReader, base: str | None, *, anonymous: bool) -> dict[str, list[str]]:
    keys = "author, adapter_digest"
    parts = [
        {
            (author, digest): str(rows)
            for author, digest, rows in reader.sql(table.query(keys, base, anonymous=anonymous)).rows
        }
        for table in PARTS
    ]
    served = {(row.author, row.adapter_digest) for row in reader.ready(base)}
    newest_first = (
        "SELECT author, adapter_digest FROM adapters ORDER BY submission DESC NULLS LAST, adapter_digest DESC"
    )
    own = {
        (author, digest): str(rows)
        for author, digest, rows in reader.sql(ADAPTERS.query(keys, base, anonymous=anonymous)).rows
    }
    adapters: dict[str, list[str]] = {}
    for author, digest in reader.sql(newest_first).rows:
        key = (author, digest)
        if key in own:
            row = own[key][1:-2]  # of the list's only list, without its end
            whole = (row, "true" if key in served else "false", *(rows.get(key, _EMPTY) for rows in parts))
            adapters.setdefault(str(author), []).append(",".join(whole) + "]")
    return adapters
