"""The catalog: one local DuckDB file, a projection of the ledger that can be rebuilt at any time.

This module and `attached`, its reading side, are the only doors to duckdb. A writer never touches the file that
readers have open: it works on a copy beside it and swaps the copy in with os.replace. So a reader is never blocked
and never sees half a sync, and a writer killed at any moment leaves the old file as it was.
"""

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb

from roster.attached import MADE_OF, Attached, attach, is_lock_refused, schema_version, sql_text
from roster.errors import (
    CatalogChanged,
    CatalogDamaged,
    CatalogHeld,
    CatalogMissing,
    CatalogNotLocal,
    CatalogSchemaMismatch,
    CatalogWriteFailed,
)
from roster.incoming import BaseText, EngineText, Known, LedgerText, SyncReport
from roster.lock import sync_lock
from roster.reader import CatalogReader
from roster.swap import (
    FileMark,
    beside,
    file_sha256,
    mark_of,
    noted_sum,
    remove_leftovers,
    set_aside,
    swap_in,
    write_ahead,
)

_BATCH = 500  # ledgers that are taken in together: some 15 MB of text
_FEW = 500  # authors of whom it is worked out alone who is served
_COMMON = """
SELECT base, etag FROM bases UNION ALL SELECT base, etag FROM engines UNION ALL SELECT kind, version FROM step_versions
UNION ALL SELECT key, etag FROM unreadable WHERE NOT starts_with(key, 'ledger/')
UNION ALL SELECT schema_version, max_opponents || ' ' || serve_stale FROM meta ORDER BY ALL"""
_MACHINE_FAULTS = (
    duckdb.IOException,
    duckdb.FatalException,
    duckdb.InternalException,
    duckdb.SerializationException,
    duckdb.OutOfMemoryException,
)


class Catalog:
    """The writer's side of the catalog file at `path`. Holds nothing open between calls."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def known_etags(self, authors: Collection[str] | None = None) -> Known:
        """Return ledger key → ETag of every object under `ledger/` that the catalog has, or of these authors'.

        Without a mark where the file is missing, damaged or of another schema: then the caller reads the whole
        ledger, and `apply` builds a new file. For all authors every byte of the file is verified; for some only
        where it was written since the last sync. Another program that holds it for writing is no hindrance.
        """
        wanted = None if authors is None else frozenset(authors)
        mark = mark_of(self.path)
        try:
            try:
                etags = self._etags_of(self.path, wanted, trusted=self._is_whole(mark, look=wanted is None))
            except CatalogHeld:
                with beside(self.path) as copy:
                    shutil.copyfile(self.path, copy)
                    etags = self._etags_of(copy, wanted, trusted=False)
        except (CatalogMissing, CatalogDamaged, CatalogSchemaMismatch):
            return Known({}, wanted, None)
        return Known(etags, wanted, mark)

    def apply(
        self,
        ledgers: Iterable[LedgerText],
        bases: Sequence[BaseText],
        engines: Sequence[EngineText],
        *,
        known: Known | None,
        removed: Sequence[str],
        step_versions: Mapping[str, str],
        max_opponents: int,
        serve_stale: bool,
        synced_at: str,
        wait_s: float = 0,
    ) -> SyncReport:
        """Return what changed, after swapping in a catalog with `ledgers` in and the keys `removed` out.

        `known` is what `known_etags` said when the caller began: `ledgers` (authors' records among them) are the
        changes since. A catalog that has other ledgers by now is left alone. `known=None` builds a new file of
        `ledgers` alone, whatever is there. They are asked for one after the other, while the lock is held, and never
        kept together in memory: what their iterator raises ends the sync, and the old file stands.

        `bases` and `engines` are all there are, each time. `step_versions` maps each step kind to its current code
        version, `max_opponents` is how many wrong adapters a score uses at most, `serve_stale` whether verdicts of
        another version of the code are served, `synced_at` is now (ISO 8601, UTC). Another sync is waited for
        `wait_s` seconds.

        Raises CatalogBusy, CatalogNotLocal, CatalogChanged, CatalogWriteFailed, and OSError (disk full).
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with sync_lock(self.path, wait_s):
            remove_leftovers(self.path)
            with beside(self.path) as fresh:
                etags = {} if known is None else known.etags
                rebuilt = self._begin(fresh, known)
                gone = [key for key in dict.fromkeys(removed) if key in etags]
                try:
                    if rebuilt is not None:
                        fresh.write_bytes(_empty_catalog())
                    with duckdb.connect(str(fresh)) as connection:
                        connection.execute("BEGIN")
                        before = _common(connection)
                        incoming = _load(connection, ledgers, bases, engines, gone)
                        _describe(connection, step_versions, max_opponents, serve_stale, synced_at)
                        alike = rebuilt is None and before == _common(connection)
                        _serve(connection, {*incoming, *gone} if alike else None)
                        connection.execute("COMMIT; CHECKPOINT")
                        (total,) = connection.execute("SELECT count(*) FROM ledgers").fetchall()[0]
                        unreadable = connection.execute(
                            "SELECT key || ': ' || reason FROM unreadable ORDER BY 1"
                        )
                        refused = tuple(text for (text,) in unreadable.fetchall())
                except _MACHINE_FAULTS as error:
                    if is_lock_refused(error):  # nobody else has a file of that name
                        raise CatalogNotLocal(self.path, str(error)) from error
                    raise CatalogWriteFailed(self.path, str(error)) from error
                swap_in(fresh, self.path)
        return SyncReport(
            added=sum(key not in etags for key in incoming),
            changed=sum(key in etags for key in incoming),
            removed=sum(key not in incoming for key in gone),
            total=total,
            rebuilt=rebuilt,
            unreadable=refused,
        )

    def _is_whole(self, mark: FileMark | None, *, look: bool) -> bool:
        """Whether the file of this mark is, byte for byte, what a sync wrote; `look`: by reading it now."""
        noted = None if mark is None else noted_sum(self.path, mark)
        return noted is not None and (not look or file_sha256(self.path) == noted)

    def _etags_of(self, path: Path, authors: frozenset[str] | None, *, trusted: bool) -> dict[str, str]:
        """Return the ETags; where the file is not `trusted`, after reading all of it through DuckDB."""
        connection = attach(path)
        try:
            if not trusted:
                _read_whole(connection)
            return _etags(connection, authors)
        except duckdb.Error as error:
            raise CatalogDamaged(path, str(error)) from error
        finally:
            connection.close()

    def _begin(self, fresh: Path, known: Known | None) -> str | None:
        """Copy the catalog to `fresh`; return why a new one is built there instead (None: it is not).

        Raises CatalogChanged.
        """
        if known is None:
            return "a rebuild was asked for"
        if (
            known.mark is not None
            and known.mark == mark_of(self.path)
            and not write_ahead(self.path).exists()
        ):
            shutil.copyfile(self.path, fresh)
            return None
        reason = None
        etags: Mapping[str, str] = {}
        try:
            if not self.path.is_file():
                raise CatalogMissing(self.path)
            if write_ahead(self.path).exists():
                raise CatalogDamaged(self.path, f"writes of another program in {write_ahead(self.path).name}")
            shutil.copyfile(self.path, fresh)
            etags = self._etags_of(fresh, known.authors, trusted=False)
        except CatalogMissing:
            reason = "there was no catalog"
        except CatalogSchemaMismatch as error:
            fresh.unlink()
            reason = f"it had schema {error.found}, expected {error.expected}"
        except CatalogDamaged as error:
            fresh.unlink(missing_ok=True)
            reason = f"it was damaged ({error.found}); set aside as {set_aside(self.path).name}"
        if etags != known.etags or (reason is not None and known.mark is not None):
            raise CatalogChanged(self.path, sorted(key for key, _ in etags.items() ^ known.etags.items()))
        return reason


@cache
def _empty_catalog() -> bytes:
    """Return a catalog file with nothing in it. Making one takes as long as a small sync, so once is enough."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "empty.duckdb"
        with duckdb.connect(str(path)) as connection:
            connection.execute("BEGIN")
            for text in MADE_OF:
                connection.execute(sql_text(text))
            connection.execute("COMMIT; CHECKPOINT")
        return path.read_bytes()


def _read_whole(connection: duckdb.DuckDBPyConnection) -> None:
    """Read every block: DuckDB notices damage only where it reads."""
    tables = connection.execute("SELECT table_name FROM duckdb_tables() WHERE NOT temporary").fetchall()
    for (table,) in tables:
        connection.execute(f"SELECT bit_xor(hash(t)) FROM {table} t").fetchall()


def _etags(connection: duckdb.DuckDBPyConnection, authors: frozenset[str] | None) -> dict[str, str]:
    chosen = "" if authors is None else "WHERE split_part(key, '/', 2) IN (SELECT unnest(?::VARCHAR[]))"
    rows = connection.execute(
        "SELECT key, etag FROM (SELECT key, etag FROM ledgers UNION ALL SELECT key, etag FROM author_records "
        f"UNION ALL SELECT key, etag FROM unreadable WHERE key LIKE 'ledger/%') {chosen}",
        [] if authors is None else [sorted(authors)],
    ).fetchall()
    return dict(rows)


def _load(
    connection: duckdb.DuckDBPyConnection,
    ledgers: Iterable[LedgerText],
    bases: Sequence[BaseText],
    engines: Sequence[EngineText],
    gone: Sequence[str],
) -> set[str]:
    """Take in what changed; return the keys of the ledgers taken in."""
    connection.execute("CREATE TEMP TABLE incoming (key VARCHAR, etag VARCHAR, body VARCHAR)")
    connection.execute("CREATE TEMP TABLE incoming_bases (base VARCHAR, etag VARCHAR, body VARCHAR)")
    connection.execute(
        "CREATE TEMP TABLE incoming_engines (base VARCHAR, etag VARCHAR, engine_id VARCHAR, body VARCHAR)"
    )
    connection.execute("CREATE TEMP TABLE gone (key VARCHAR)")
    _fill(
        connection,
        "incoming_bases",
        [x.base for x in bases],
        [x.etag for x in bases],
        [x.body for x in bases],
    )
    _fill(
        connection,
        "incoming_engines",
        [x.base for x in engines],
        [x.etag for x in engines],
        [x.engine_id for x in engines],
        [x.body for x in engines],
    )
    _fill(connection, "gone", gone)
    load, taken = sql_text("load.sql"), set[str]()
    for batch in _batches(ledgers):
        connection.execute("DELETE FROM incoming")
        some = list(batch.values())
        _fill(connection, "incoming", [x.key for x in some], [x.etag for x in some], [x.body for x in some])
        connection.execute(load)
        connection.execute("DELETE FROM gone")
        taken |= batch.keys()
    return taken


def _fill(connection: duckdb.DuckDBPyConnection, table: str, *columns: Sequence[str | None]) -> None:
    lists = ", ".join("unnest(?::VARCHAR[])" for _ in columns)
    connection.execute(f"INSERT INTO {table} SELECT {lists}", list(map(list, columns)))


def _batches(ledgers: Iterable[LedgerText]) -> Iterator[dict[str, LedgerText]]:
    """Yield some ledgers at a time, by key; at least one batch, which may be empty."""
    rest = iter(ledgers)
    yield {ledger.key: ledger for ledger in islice(rest, _BATCH)}
    while batch := {ledger.key: ledger for ledger in islice(rest, _BATCH)}:
        yield batch


def _describe(
    connection: duckdb.DuckDBPyConnection,
    step_versions: Mapping[str, str],
    max_opponents: int,
    serve_stale: bool,
    synced_at: str,
) -> None:
    connection.execute("DELETE FROM meta; DELETE FROM step_versions")
    connection.execute(
        "INSERT INTO meta (schema_version, synced_at, max_opponents, serve_stale) VALUES (?, ?, ?, ?)",
        [schema_version(), synced_at, max_opponents, serve_stale],
    )
    connection.execute(
        "INSERT INTO step_versions SELECT unnest(?::VARCHAR[]), unnest(?::VARCHAR[])",
        [list(step_versions), list(step_versions.values())],
    )


def _common(connection: duckdb.DuckDBPyConnection) -> list[tuple[object, ...]]:
    """Return all that an author's place in the roster depends on beside the author's own objects."""
    return connection.execute(_COMMON).fetchall()


def _serve(connection: duckdb.DuckDBPyConnection, keys: Collection[str] | None) -> None:
    """Work out anew who is served: of the authors of these keys, which may be many, or of all for None."""
    authors = None if keys is None else sorted({key.split("/")[1] for key in keys})
    if authors is None or len(authors) > _FEW:
        connection.execute(sql_text("serve.sql").format(chosen="true"))
    elif authors:
        # Written out, since DuckDB looks at all ledgers first where the names come from a table or a list.
        chosen = f"author IN ({', '.join('?' * len(authors))})"
        for statement in connection.extract_statements(sql_text("serve.sql").format(chosen=chosen)):
            connection.execute(statement, authors)


def open_catalog(path: Path) -> CatalogReader:
    """Return a reader of the catalog at `path` as it is now; later syncs do not change what it sees.

    Raises CatalogMissing, CatalogSchemaMismatch, CatalogDamaged, CatalogHeld.
    """
    return CatalogReader(Attached(path))
