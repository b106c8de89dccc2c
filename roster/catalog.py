"""The catalog: one local DuckDB file, a projection of the ledger that can be rebuilt at any time.

This module is the only door to duckdb. A writer never touches the file that readers have open: it works on a
copy beside it and swaps the copy in with os.replace. So a reader is never blocked and never sees half a sync,
and a writer killed at any moment leaves the old file as it was.

Readers attach the file to an in-memory instance instead of connecting to its path: a second connect to one
path in one process answers with the database opened first, even when the file has been replaced since.
Source: measured with DuckDB 2.0.1.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import duckdb

from roster.errors import (
    CatalogChanged,
    CatalogDamaged,
    CatalogHeld,
    CatalogMissing,
    CatalogSchemaMismatch,
    CatalogWriteFailed,
    QueryRefused,
)
from roster.lock import sync_lock
from roster.reader import CatalogReader
from roster.rows import BaseText, LedgerText, QueryResult, SyncReport

_MACHINE_FAULTS = (
    duckdb.IOException,
    duckdb.FatalException,
    duckdb.InternalException,
    duckdb.SerializationException,
    duckdb.OutOfMemoryException,
)


def _sql(name: str) -> str:
    return files("roster").joinpath(name).read_text(encoding="utf-8")


def schema_version() -> str:
    """Return what marks a catalog file as ours: the start of the sha256 over its tables.sql and views.sql.

    Taken from the text, so that no change of a table or a view can be forgotten.
    """
    return hashlib.sha256((_sql("tables.sql") + _sql("views.sql")).encode()).hexdigest()[:16]


def _flush(path: Path) -> None:
    """Wait until the disk has a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_ahead(path: Path) -> Path:
    return path.with_name(path.name + ".wal")


def _attach(path: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection that can read the file at `path` as it is now, and nothing else.

    Raises CatalogMissing, CatalogHeld, CatalogDamaged, CatalogSchemaMismatch.
    """
    if not path.is_file():
        raise CatalogMissing(path)
    if _write_ahead(path).exists():
        raise CatalogDamaged(
            path, f"{_write_ahead(path).name}, which another program's writes left beside it"
        )
    connection = duckdb.connect(":memory:")
    try:
        quoted = str(path).replace("'", "''")
        connection.execute(f"ATTACH '{quoted}' AS catalog (READ_ONLY)")
        connection.execute("USE catalog; DETACH memory")
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
        found = connection.execute("SELECT schema_version FROM meta").fetchone()
    except duckdb.CatalogException as error:
        connection.close()
        raise CatalogSchemaMismatch(path, "none", schema_version()) from error
    except duckdb.Error as error:
        connection.close()
        if "Could not set lock" in str(error):
            raise CatalogHeld(path, str(error)) from error
        raise CatalogDamaged(path, str(error)) from error
    if found is None or found[0] != schema_version():
        connection.close()
        raise CatalogSchemaMismatch(path, str(found and found[0]), schema_version())
    return connection


_TABLES = ("ledgers", "submissions", "steps", "figures", "bases", "unreadable", "step_versions")


def _read_whole(connection: duckdb.DuckDBPyConnection, path: Path) -> dict[str, str]:
    """Return ledger key → ETag, after reading every block: DuckDB notices damage only where it reads.

    Raises CatalogDamaged.
    """
    try:
        for table in _TABLES:
            connection.execute(f"SELECT bit_xor(hash(t)) FROM {table} t").fetchall()
        return _etags(connection)
    except duckdb.Error as error:
        raise CatalogDamaged(path, str(error)) from error


def _etags(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    rows = connection.execute(
        "SELECT key, etag FROM ledgers "
        "UNION ALL SELECT key, etag FROM unreadable WHERE key NOT LIKE 'bases/%'"
    ).fetchall()
    return dict(rows)


class Catalog:
    """The writer's side of the catalog file at `path`. Holds nothing open between calls."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def known_etags(self) -> dict[str, str]:
        """Return ledger key → ETag of every ledger object the catalog has, readable or not.

        Empty when the file is missing, damaged or of another schema: then the caller reads the whole ledger,
        and `apply` builds a new file. Another program that holds the file for writing is no hindrance.
        """
        try:
            try:
                return self._etags_of(self.path)
            except CatalogHeld:
                with self._beside() as copy:
                    shutil.copyfile(self.path, copy)
                    return self._etags_of(copy)
        except (CatalogMissing, CatalogDamaged, CatalogSchemaMismatch):
            return {}

    def apply(
        self,
        ledgers: Sequence[LedgerText],
        bases: Sequence[BaseText],
        *,
        known: Mapping[str, str] | None,
        removed: Sequence[str],
        step_versions: Mapping[str, str],
        max_opponents: int,
        synced_at: str,
    ) -> SyncReport:
        """Return what changed, after swapping in a catalog with `ledgers` in and the keys `removed` out.

        `known` is what `known_etags` said when the caller began: `ledgers` are the changes since. A catalog
        that is no longer so is left alone. `known=None` builds a new file of `ledgers` alone, whatever is
        there. `bases` are all registered bases each time. `step_versions` maps each step kind to its current
        code version, `max_opponents` is how many wrong adapters a score uses at most, `synced_at` is now (ISO
        8601, UTC).

        Raises CatalogBusy, CatalogNotLocal, CatalogChanged, CatalogWriteFailed, and OSError (disk full).
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with sync_lock(self.path):
            self._remove_leftovers()
            with self._beside() as fresh:
                rebuilt, current = self._begin(fresh, anew=known is None)
                if known is not None and current != known:
                    raise CatalogChanged(self.path, sorted(k for k, _ in current.items() ^ known.items()))
                incoming = {ledger.key: ledger for ledger in ledgers}
                gone = [key for key in dict.fromkeys(removed) if key in current and key not in incoming]
                try:
                    with duckdb.connect(str(fresh)) as connection:
                        if rebuilt is not None:
                            connection.execute(_sql("tables.sql"))
                            connection.execute(_sql("views.sql"))
                        _load(connection, list(incoming.values()), bases, gone)
                        _describe(connection, step_versions, max_opponents, synced_at)
                        connection.execute("COMMIT; CHECKPOINT")
                        (total,) = connection.execute("SELECT count(*) FROM ledgers").fetchall()[0]
                        unreadable = connection.execute(
                            "SELECT key || ': ' || reason FROM unreadable ORDER BY 1"
                        )
                        refused = tuple(text for (text,) in unreadable.fetchall())
                except _MACHINE_FAULTS as error:
                    raise CatalogWriteFailed(self.path, str(error)) from error
                self._swap_in(fresh)
        return SyncReport(
            added=sum(key not in current for key in incoming),
            changed=sum(key in current for key in incoming),
            removed=len(gone),
            total=total,
            rebuilt=rebuilt,
            unreadable=refused,
        )

    def _etags_of(self, path: Path) -> dict[str, str]:
        connection = _attach(path)
        try:
            return _read_whole(connection, path)
        finally:
            connection.close()

    def _begin(self, fresh: Path, *, anew: bool) -> tuple[str | None, dict[str, str]]:
        """Copy the catalog to `fresh`; return why that cannot be done (None: it was), and its ETags."""
        if anew:
            return "a rebuild was asked for", {}
        try:
            if not self.path.is_file():
                raise CatalogMissing(self.path)
            if _write_ahead(self.path).exists():
                raise CatalogDamaged(
                    self.path, f"writes of another program in {_write_ahead(self.path).name}"
                )
            shutil.copyfile(self.path, fresh)
            return None, self._etags_of(fresh)
        except CatalogMissing:
            return "there was no catalog", {}
        except CatalogSchemaMismatch as error:
            fresh.unlink()
            return f"it had schema {error.found}, expected {error.expected}", {}
        except CatalogDamaged as error:
            fresh.unlink(missing_ok=True)
            # A second name, not a move: there is no moment in which readers find nothing.
            aside = self.path.with_name(self.path.name + ".damaged")
            aside.unlink(missing_ok=True)
            os.link(self.path, aside)
            return f"it was damaged ({error.found}); set aside as {aside.name}", {}

    @contextmanager
    def _beside(self) -> Iterator[Path]:
        """Give a name of our own beside the catalog; afterwards nothing is left under it."""
        fresh = self.path.with_name(f"{self.path.name}.new-{uuid.uuid4().hex}")
        try:
            yield fresh
        finally:
            fresh.unlink(missing_ok=True)
            _write_ahead(fresh).unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Remove what killed syncs left; the caller holds the lock, so none of it is in use."""
        for leftover in self.path.parent.glob(self.path.name + ".new-*"):
            leftover.unlink(missing_ok=True)

    def _swap_in(self, fresh: Path) -> None:
        """Put `fresh` in the catalog's place: first onto the disk, then under the name.

        A write-ahead log there is another program's and not of this file: it must not be replayed into it.
        """
        _flush(fresh)
        log = _write_ahead(self.path)
        if log.exists():
            log.replace(log.with_name(log.name + ".damaged"))
        fresh.replace(self.path)
        _flush(self.path.parent)


def _load(
    connection: duckdb.DuckDBPyConnection,
    ledgers: Sequence[LedgerText],
    bases: Sequence[BaseText],
    gone: Sequence[str],
) -> None:
    """Begin a transaction that takes in what changed."""
    connection.execute("BEGIN")
    connection.execute("CREATE TEMP TABLE incoming (key VARCHAR, etag VARCHAR, body VARCHAR)")
    connection.execute("CREATE TEMP TABLE incoming_bases (base VARCHAR, etag VARCHAR, body VARCHAR)")
    connection.execute("CREATE TEMP TABLE gone (key VARCHAR)")
    three = "SELECT unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), unnest(?::VARCHAR[])"
    connection.execute(
        f"INSERT INTO incoming {three}",
        [[x.key for x in ledgers], [x.etag for x in ledgers], [x.body for x in ledgers]],
    )
    connection.execute(
        f"INSERT INTO incoming_bases {three}",
        [[x.base for x in bases], [x.etag for x in bases], [x.body for x in bases]],
    )
    connection.execute("INSERT INTO gone SELECT unnest(?::VARCHAR[])", [list(gone)])
    connection.execute(_sql("load.sql"))


def _describe(
    connection: duckdb.DuckDBPyConnection,
    step_versions: Mapping[str, str],
    max_opponents: int,
    synced_at: str,
) -> None:
    connection.execute("DELETE FROM meta; DELETE FROM step_versions")
    connection.execute("INSERT INTO meta VALUES (?, ?, ?)", [schema_version(), synced_at, max_opponents])
    connection.execute(
        "INSERT INTO step_versions SELECT unnest(?::VARCHAR[]), unnest(?::VARCHAR[])",
        [list(step_versions), list(step_versions.values())],
    )


class _Snapshot:
    """The catalog as it was when it was opened, for a CatalogReader."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = _attach(path)

    def rows(self, query: str, parameters: Sequence[str]) -> list[tuple[object, ...]]:
        """Return the rows of one of our own queries. Raises CatalogDamaged."""
        try:
            return self._connection.execute(query, list(parameters)).fetchall()
        except duckdb.Error as error:
            raise CatalogDamaged(self._path, str(error)) from error

    def ask(self, query: str) -> QueryResult:
        """Return the answer to a query of the user's own. Raises QueryRefused."""
        try:
            statements = self._connection.extract_statements(query)
            if len(statements) != 1:
                raise QueryRefused(query, f"{len(statements)} statements")
            if statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
                raise QueryRefused(query, f"a statement of type {statements[0].type.name}")
            answer = self._connection.execute(statements[0])
            return QueryResult(
                tuple(column[0] for column in answer.description or ()), tuple(answer.fetchall())
            )
        except duckdb.Error as error:
            raise QueryRefused(query, str(error)) from error

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


def open_catalog(path: Path) -> CatalogReader:
    """Return a reader of the catalog at `path` as it is now; later syncs do not change what it sees.

    Raises CatalogMissing, CatalogSchemaMismatch, CatalogDamaged, CatalogHeld.
    """
    return CatalogReader(_Snapshot(path))
