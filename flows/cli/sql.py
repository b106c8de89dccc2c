"""The user's own questions to the catalog, and what can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from cyclopts import CycloptsError, Parameter

from flows.cli.catalog_file import open_for_reading
from flows.cli.output import AsJson, emit, note, say, table

if TYPE_CHECKING:
    from roster.reader import CatalogReader
    from roster.rows import ColumnRow


def sql(
    query: str | None = None,
    /,
    *,
    schema: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: AsJson = False,
) -> None:
    """Ask the catalog in SQL. It can read the catalog and nothing else.

    Views: ready, authors, adapters, verdicts, scores, layouts, evidence, checks, history, waiting, problems, stale, and
    more: --schema lists them all.

    ```
    roster sql "SELECT author, own, base_bpb FROM ready ORDER BY own"
    ```

    Parameters
    ----------
    query:
        One statement, such as "SELECT author, own FROM ready ORDER BY own"; with --schema the name of a view or table.
    schema:
        List what can be asked: every view and table with what it holds, or the columns of the one that is named.
    """
    if query is None and not schema:
        raise CycloptsError(
            msg="a query is missing; --schema lists what can be asked.", command_chain=("sql",)
        )
    with open_for_reading() as reader:
        if schema:
            _schema(reader, query, json=json)
            return
        answer = reader.sql(query or "")
    columns = _distinct(answer.columns)
    rows = [dict(zip(columns, row, strict=True)) for row in answer.rows]
    emit(
        {"columns": columns, "rows": rows},
        as_json=json,
        show=lambda: table(columns, answer.rows, empty="no rows"),
    )


def _schema(reader: CatalogReader, name: str | None, *, json: bool) -> None:
    from roster.errors import UnknownView

    listed = [(view, list(rows)) for view, rows in groupby(reader.schema(), key=lambda row: row.view)]
    views = [(view, rows) for view, rows in listed if name in (None, view)]
    if not views:
        raise UnknownView(str(name), [view for view, _ in listed])
    document = {
        "views": [
            {
                "name": view,
                "comment": rows[0].view_comment,
                "columns": [{"name": r.column, "type": r.type, "comment": r.comment} for r in rows],
            }
            for view, rows in views
        ]
    }
    emit(document, as_json=json, show=lambda: _show(views, whole=name is not None))


def _show(views: Sequence[tuple[str, Sequence[ColumnRow]]], *, whole: bool) -> None:
    if not whole:
        shown = [(view, rows[0].view_comment) for view, rows in views]
        table(("view or table", "holds"), shown, empty="the catalog is empty")
        note("the columns of one: roster sql --schema NAME")
        return
    for view, rows in views:
        say(f"{view}: {rows[0].view_comment}")
        table(("column", "type", "holds"), [(r.column, r.type, r.comment) for r in rows], empty="no columns")


def _distinct(columns: Sequence[str]) -> list[str]:
    """Column names of which none is lost in a dictionary: a repeated one gets a number, as DuckDB does in tables."""
    names: list[str] = []
    for column in columns:
        name, number = column, 0
        while name in names or (number and name in columns):
            number += 1
            name = f"{column}_{number}"
        names.append(name)
    return names
