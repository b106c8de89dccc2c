"""Faults of DuckDB that others have reported and that tests/test_catalog_sync.py does not bring about itself."""

import re
import resource
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
import pytest
from catalog_builders import NOON, TINY, sync
from ledger_builders import STEP_VERSIONS, Document, halted, key_of, ready_ledger, text

import roster
from roster.catalog import Catalog, open_catalog
from roster.errors import CatalogBusy, CatalogChanged, CatalogHeld, CatalogNotLocal, CatalogWriteFailed

pytestmark = pytest.mark.real

ANNA = ready_ledger("anna")
LOCK = 'IO Error: Could not set lock on file "c.duckdb": '
NOBODY = (
    LOCK + "Conflicting lock is held in PID 0. See also https://duckdb.org/docs/current/connect/concurrency"
)
SOMEBODY = LOCK + "Conflicting lock is held in /usr/bin/duckdb (PID 4711) by user kim."
NO_LOCKS = (
    LOCK + "File locks are not supported for this file system, cannot open the file in read-write mode."
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "state" / "catalog.duckdb"
    sync(path, [ANNA])
    return path


def served(path: Path) -> list[str]:
    with open_catalog(path) as reader:
        return [row.author for row in reader.ready()]


def others(path: Path) -> set[str]:
    """What lies beside the catalog and is none of its own."""
    return {one.name.removeprefix(path.name) for one in path.parent.iterdir()} - {"", ".lock", ".sum"}


# https://github.com/duckdb/duckdb/issues/15836 and its kind: what a kill leaves must not stand in the next one's way.
def test_what_a_killed_sync_had_moved_out_of_memory_is_removed(path: Path) -> None:
    fresh = path.with_name(path.name + ".new-0123")
    with duckdb.connect(str(fresh)) as connection:
        ((folder,),) = connection.execute("SELECT current_setting('temp_directory')").fetchall()
    assert Path(folder).parent == path.parent and Path(folder).name.startswith(fresh.name)
    Path(folder).mkdir()
    Path(folder, "duckdb_temp_4711_0_owner").write_bytes(b"left")
    assert sync(path, [ready_ledger("berta")]).rebuilt is None
    assert served(path) == ["anna", "berta"] and others(path) == set()


def test_a_large_question_leaves_nothing_where_it_is_asked(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_catalog(path) as reader:
        ((folder,),) = reader.sql("SELECT current_setting('temp_directory')").rows
    assert Path(str(folder)).is_absolute() and tmp_path not in Path(str(folder)).parents


# https://github.com/hitkeep/hitkeep/issues/259: a full disk. Here a file may not grow beyond a limit.
@pytest.mark.parametrize("room", ["none for a copy", "none for what is new"])
def test_a_full_disk_leaves_the_old_catalog(path: Path, room: str) -> None:
    size = path.stat().st_size
    new = [ready_ledger(f"author-{number}") for number in range(120)]
    allowed = size - 1 if room == "none for a copy" else size + (1 << 12)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, limits[1]))
    try:
        with pytest.raises((OSError, CatalogWriteFailed)) as caught:
            sync(path, new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value, CatalogWriteFailed) is (room != "none for a copy")
    assert served(path) == ["anna"] and others(path) == set()
    assert sync(path, new).total == 121


# https://github.com/duckdb/duckdb/issues/12684, /issues/20246, /issues/18732, /issues/25015: upserts, foreign keys,
# second unique indexes, and changes of a schema that is there already.
def test_nothing_in_the_catalog_can_refuse_a_harmless_change(path: Path) -> None:
    with duckdb.connect(str(path), read_only=True) as connection:
        kinds = connection.execute(
            "SELECT DISTINCT constraint_type FROM duckdb_constraints() ORDER BY 1"
        ).fetchall()
        indexes = connection.execute("SELECT index_name FROM duckdb_indexes()").fetchall()
    assert kinds == [("CHECK",), ("NOT NULL",)] and indexes == []
    written = [one.read_text() for one in files(roster).iterdir() if one.name.endswith(".sql")]
    assert len(written) >= 5
    for each in written:
        assert not re.search(
            r"\b(IF NOT EXISTS|ON CONFLICT|OR REPLACE|ALTER TABLE|UPSERT)\b", each, re.IGNORECASE
        )


# https://github.com/duckdb/duckdb/issues/17802 and /issues/20053: two threads write at once.
def test_two_threads_change_one_author(path: Path) -> None:
    first, second = ready_ledger("bo", "one"), ready_ledger("bo", "two", number=2)

    def take_in(document: Document) -> None:
        catalog = Catalog(path)
        while True:
            try:
                catalog.apply(
                    [text(document)],
                    TINY,
                    [],
                    known=catalog.known_etags(),
                    removed=[],
                    step_versions=STEP_VERSIONS,
                    max_opponents=3,
                    serve_stale=True,
                    synced_at=NOON,
                    wait_s=5,
                )
            except (CatalogChanged, CatalogBusy):
                continue
            return

    stopped = {**first, "steps": [*first["steps"], halted("scored", "stopped", "engine_drift", minute=9)]}
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(take_in, [first, second]))
        list(threads.map(take_in, [stopped, ready_ledger("cy")]))
    with open_catalog(path) as reader:
        assert {row.adapter_digest for row in reader.ready()} == {
            *(one["adapter_digest"] for one in (ANNA, second, ready_ledger("cy"))),
        }
        assert reader.sql(f"SELECT state FROM ledgers WHERE key = '{key_of(first)}'").rows == (("stopped",),)


# https://github.com/trinodb/trino/issues/25802 and https://github.com/duckdb/duckdb/issues/13017: locks of a disk that
# is not this machine's alone.
def test_a_lock_of_nobody_here_is_told_apart(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = duckdb.connect
    refusal = ""

    class Refusing:
        """A connection that cannot have a file's lock."""

        def execute(self, *_: object) -> None:
            raise duckdb.IOException(refusal)

        def close(self) -> None:
            """As a connection has it."""

    monkeypatch.setattr(duckdb, "connect", lambda *_: Refusing())
    said = {}
    for refusal in (NOBODY, SOMEBODY):
        with pytest.raises(CatalogHeld) as held:
            open_catalog(path)
        said[refusal] = str(held.value)
        assert str(path) in said[refusal] and refusal in said[refusal]
    assert "on a local disk of one machine" in said[NOBODY] and "close that program" not in said[NOBODY]
    assert "close that program" in said[SOMEBODY] and "local disk" not in said[SOMEBODY]

    def write(name: str, **more: Any) -> Any:
        if name != ":memory:":
            raise duckdb.IOException(NO_LOCKS)
        return connect(name, **more)

    monkeypatch.setattr(duckdb, "connect", write)
    with pytest.raises(CatalogNotLocal, match="keep the catalog on a local disk") as not_local:
        sync(path, [ready_ledger("berta")])
    assert str(path) in str(not_local.value) and "are not supported" in str(not_local.value)
