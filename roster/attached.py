"""A catalog file as a reader has it open.

Readers attach the file to an in-memory instance instead of connecting to its path: a second connect to one
path in one process answers with the database opened first, even when the file has been replaced since.
Source: measured with DuckDB 2.0.1.
"""

import hashlib
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import gettempdir

import duckdb

from roster.errors import CatalogDamaged, CatalogHeld, CatalogMissing, CatalogSchemaMismatch, QueryRefused
from roster.rows import QueryResult
from roster.swap import write_ahead

MADE_OF = ("tables.sql", "views.sql", "comments.sql")
"""What an empty catalog is made by, in this order."""

_FILLED_BY = ("load.sql", "serve.sql")


def sql_text(name: str) -> str:
    """Return one of the files of SQL beside this module."""
    return files("roster").joinpath(name).read_text(encoding="utf-8")


def schema_version() -> str:
    """Return what marks a catalog file as ours: the start of the sha256 over all that decides what is in it.

    Taken from the text, so that no change of a table, a view or a reading can be forgotten.
    """
    return hashlib.sha256("".join(map(sql_text, MADE_OF + _FILLED_BY)).encode()).hexdigest()[:16]


def attach(path: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection that can read the file at `path` as it is now, and nothing else.

    Raises CatalogMissing, CatalogHeld, CatalogDamaged, CatalogSchemaMismatch.
    """
    if not path.is_file():
        raise CatalogMissing(path)
    if write_ahead(path).exists():
        raise CatalogDamaged(path, f"{write_ahead(path).name}, which another program's writes left beside it")
    connection = duckdb.connect(":memory:")
    try:
        quoted = str(path).replace("'", "''")
        connection.execute(f"ATTACH '{quoted}' AS catalog (READ_ONLY)")
        connection.execute("USE catalog; DETACH memory")
        # What has no room in memory goes there, and not into the folder that somebody asks from.
        connection.execute(
            "SET temp_directory = ?", [str(Path(gettempdir()) / f"roster-catalog-{os.getpid()}")]
        )
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
        found = next(iter(connection.execute("SELECT schema_version FROM meta").fetchall()), None)
    except duckdb.CatalogException as error:
        connection.close()
        raise CatalogSchemaMismatch(path, "none", schema_version()) from error
    except duckdb.Error as error:
        connection.close()
        if is_lock_refused(error):
            raise CatalogHeld(path, str(error)) from error
        raise CatalogDamaged(path, str(error)) from error
    if found is None or found[0] != schema_version():
        connection.close()
        raise CatalogSchemaMismatch(path, str(found and found[0]), schema_version())
    return connection


def is_lock_refused(error: duckdb.Error) -> bool:
    """Whether DuckDB did not get the lock of a file. Source: measured with DuckDB 2.0.1."""
    return "Could not set lock" in str(error)


class Attached:
    """The catalog as it was when it was opened, for a CatalogReader."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = attach(path)

    def rows(self, query: str, parameters: Sequence[str]) -> list[tuple[object, ...]]:
        """Return the rows of one of our own queries. Raises CatalogDamaged."""
        try:
            return self._connection.execute(query, list(parameters)).fetchall()
        except duckdb.Error as error:
            raise CatalogDamaged(self._path, str(error)) from error

    def columns(self, query: str, parameters: Sequence[str]) -> list[list[object]]:
        """Return what one of our own queries finds by columns, in half the time of `rows`. Raises CatalogDamaged.

        Only for columns of text, truth values, INTEGER, BIGINT and DOUBLE.
        """
        try:
            found = self._connection.execute(query, list(parameters)).fetchnumpy()
        except duckdb.Error as error:
            raise CatalogDamaged(self._path, str(error)) from error
        return [column.tolist() for column in found.values()]

    def ask(self, query: str) -> QueryResult:
        """Return the answer to a query of the user's own. Raises QueryRefused."""
        try:
            statements = self._connection.extract_statements(query)
            if len(statements) != 1:
                raise QueryRefused(query, f"{len(statements)} statements")
            if statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
                raise QueryRefused(query, f"a statement of type {statements[0].type.name}")
            answer = self._connection.execute(statements[0])
            columns = tuple(column[0] for column in answer.description or ())
            return QueryResult(columns, tuple(answer.fetchall()))
        except duckdb.Error as error:
            raise QueryRefused(query, str(error)) from error

    def relation(self, name: str) -> duckdb.DuckDBPyRelation:
        """Return a view or table, unread. Raises QueryRefused."""
        try:
            return self._connection.table(name)
        except duckdb.Error as error:
            raise QueryRefused(name, str(error)) from error

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()
