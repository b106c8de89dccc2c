"""How the catalog file is made, changed and replaced, under readers, rivals, damage and kills."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import duckdb
import pytest
from catalog_builders import NOON, TINY, python, sync
from ledger_builders import STEP_VERSIONS, Document, base_text, halted, key_of, ready_ledger, text

from roster.catalog import Catalog, open_catalog, schema_version
from roster.errors import (
    CatalogBusy,
    CatalogChanged,
    CatalogDamaged,
    CatalogHeld,
    CatalogMissing,
    CatalogNotLocal,
    CatalogSchemaMismatch,
    CatalogWriteFailed,
)
from roster.incoming import Known, LedgerText, SyncReport

ANNA, BERTA, CARLA = (ready_ledger(name) for name in ("anna", "berta", "carla"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "catalog's.duckdb"


def served(path: Path) -> list[str]:
    with open_catalog(path) as reader:
        return [row.author for row in reader.ready()]


def leftovers(path: Path) -> list[str]:
    return sorted(
        found.name
        for found in path.parent.iterdir()
        if found.name.removeprefix(path.name) not in ("", ".lock", ".sum")
    )


def test_first_sync_builds_and_the_next_takes_only_changes(path: Path) -> None:
    first = sync(path, [ANNA, BERTA])
    assert (first.added, first.changed, first.removed, first.total) == (2, 0, 0, 2)
    assert first.rebuilt == "there was no catalog"
    changed = {**BERTA, "steps": [*BERTA["steps"], halted("scored", "stopped", "engine_drift", minute=9)]}
    second = sync(path, [changed, CARLA], removed=[key_of(ANNA), "ledger/nobody/x.json"])
    assert (second.added, second.changed, second.removed, second.total) == (1, 1, 1, 2)
    assert second.rebuilt is None
    assert Catalog(path).known_etags().etags == {key_of(doc): text(doc).etag for doc in (changed, CARLA)}
    assert served(path) == ["berta", "carla"]
    with open_catalog(path) as reader:
        for table, column in (("submissions", "key"), ("steps", "key"), ("figures", "key")):
            keys = reader.sql(f"SELECT DISTINCT {column} FROM {table} ORDER BY 1").rows
            assert keys == tuple(sorted((key_of(doc),) for doc in (changed, CARLA))), table
        assert reader.sql("SELECT count(*) FROM steps").rows == ((8 + 7,),)
        assert reader.synced_at() == NOON
    assert leftovers(path) == []


def test_incremental_and_rebuilt_catalogs_are_the_same(path: Path) -> None:
    documents = [ready_ledger(f"author-{n}", number=n) for n in range(3)]
    for document in documents:
        sync(path, [halted_once(document)])
        sync(path, [document])
    rebuilt = path.with_name("rebuilt.duckdb")
    sync(rebuilt, documents)
    for table in (
        "ledgers",
        "submissions",
        "steps",
        "figures",
        "bases",
        "meta",
        "step_versions",
        "ready",
        "scores",
    ):
        rows = []
        for file in (path, rebuilt):
            with open_catalog(file) as reader:
                rows.append(reader.sql(f"SELECT * FROM {table} ORDER BY ALL").rows)
        assert rows[0] == rows[1] and rows[0], table


def halted_once(document: Document) -> Document:
    return {**document, "steps": [*document["steps"][:3], halted("staged", "stopped", "disk_full", minute=3)]}


@pytest.mark.parametrize("batch", [1, 500])
def test_a_document_twice_in_one_sync_counts_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    # https://github.com/duckdb/duckdb/issues/6738: the same key twice in one transaction, here also in two statements.
    monkeypatch.setattr("roster.catalog._BATCH", batch)
    assert sync(path, [halted_once(ANNA), ANNA]).added == 1
    assert served(path) == ["anna"]
    with open_catalog(path) as reader:
        assert reader.sql("SELECT count(*) FROM steps").rows == ((len(ANNA["steps"]),),)


@pytest.mark.parametrize("damage", ["garbage", "cut short", "empty", "flipped"])
def test_a_damaged_file_is_set_aside_and_built_anew(path: Path, damage: str) -> None:
    everyone = [ready_ledger(f"author-{n}") for n in range(40)]
    sync(path, everyone)
    whole = path.read_bytes()
    # A byte in the middle of a block of text: opening the file does not meet it, only reading everything does.
    place = whole.index(b'"aliases"')
    hurt = {
        "garbage": os.urandom(9999),
        "cut short": whole[: len(whole) // 2],
        "empty": b"",
        "flipped": whole[:place] + b"X" + whole[place + 1 :],
    }[damage]
    path.write_bytes(hurt)
    assert Catalog(path).known_etags().mark is None
    if damage != "flipped":
        with pytest.raises(CatalogDamaged, match="roster rebuild") as caught:
            open_catalog(path)
        assert str(path) in str(caught.value) and "found: " in str(caught.value)
    report = sync(path, everyone)
    assert report.rebuilt is not None and "damaged" in report.rebuilt
    assert len(served(path)) == 40
    assert path.with_name(path.name + ".damaged").read_bytes() == hurt


def apply(path: Path, known: Known | None) -> SyncReport:
    """Take in CARLA, the caller having seen the catalog as `known`."""
    return Catalog(path).apply(
        [text(CARLA)],
        TINY,
        [],
        known=known,
        removed=[],
        step_versions=STEP_VERSIONS,
        max_opponents=3,
        serve_stale=True,
        synced_at=NOON,
    )


def test_a_rebuild_can_be_asked_for(path: Path) -> None:
    sync(path, [ANNA, BERTA])
    report = apply(path, None)
    assert report.rebuilt == "a rebuild was asked for"
    assert (report.added, report.total, served(path)) == (1, 1, ["carla"])


def test_a_file_of_another_schema_is_built_anew(path: Path) -> None:
    sync(path, [ANNA])
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE meta SET schema_version = 'older'")
    assert Catalog(path).known_etags().mark is None
    with pytest.raises(CatalogSchemaMismatch) as caught:
        open_catalog(path)
    message = str(caught.value)
    assert (
        str(path) in message
        and "found older" in message
        and schema_version() in message
        and "sync" in message
    )
    report = sync(path, [ANNA, BERTA])
    assert report.rebuilt == f"it had schema older, expected {schema_version()}"
    assert served(path) == ["anna", "berta"]


def test_somebody_elses_database_is_no_catalog(path: Path) -> None:
    path.parent.mkdir()
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE mine (x INTEGER)")
    with pytest.raises(CatalogSchemaMismatch, match="found none"):
        open_catalog(path)


def test_no_catalog_says_how_to_make_one(path: Path) -> None:
    with pytest.raises(CatalogMissing) as caught:
        open_catalog(path)
    assert str(path) in str(caught.value) and "roster sync" in str(caught.value)
    assert Catalog(path).known_etags().mark is None


# https://github.com/duckdb/duckdb/issues/24103: read-only open with a write-ahead log beside the file.
def test_another_programs_write_ahead_log_is_set_aside(path: Path) -> None:
    sync(path, [ANNA])
    log = path.with_name(path.name + ".wal")
    log.write_bytes(b"left by a killed client")
    with pytest.raises(CatalogDamaged, match=re.escape(log.name)):
        open_catalog(path)
    report = sync(path, [ANNA, BERTA])
    assert report.rebuilt is not None and log.name in report.rebuilt
    assert served(path) == ["anna", "berta"]
    assert log.with_name(log.name + ".damaged").read_bytes() == b"left by a killed client"
    log.write_bytes(b"left again")
    assert apply(path, None).total == 1
    assert served(path) == ["carla"]


def test_a_sync_on_an_outdated_view_of_the_catalog_writes_nothing(path: Path) -> None:
    sync(path, [ANNA])
    known = Catalog(path).known_etags()
    sync(path, [BERTA])
    before = path.read_bytes()
    with pytest.raises(CatalogChanged) as caught:
        apply(path, known)
    assert caught.value.keys == (key_of(BERTA),)
    assert (
        str(path) in str(caught.value)
        and key_of(BERTA) in str(caught.value)
        and "sync again" in str(caught.value)
    )
    assert path.read_bytes() == before and leftovers(path) == []


def test_a_catalog_lost_in_the_middle_of_a_sync_is_not_rebuilt_from_a_part(path: Path) -> None:
    sync(path, [ANNA, BERTA])
    known = Catalog(path).known_etags()
    path.unlink()
    with pytest.raises(CatalogChanged):
        apply(path, known)
    assert not path.exists()


def test_objects_that_cannot_be_read_are_named_and_harm_nobody(path: Path) -> None:
    other, fritz = ready_ledger("dora"), ready_ledger("fritz")
    odd = [
        LedgerText("ledger/e/1.json", "e1", "{ not json"),
        LedgerText("ledger/e/2.json", "e2", json.dumps({**other, "schema": 2})),
        LedgerText("ledger/e/3.json", "e3", json.dumps(other)),
        LedgerText("ledger/e/4.json", "e4", "[1, 2]"),
        LedgerText(
            key_of(other), "e5", json.dumps({**other, "steps": [{"kind": "danced", "outcome": "done"}]})
        ),
        LedgerText("ledger/Eva/6.json", "e6", json.dumps({**other, "author": "Eva"})),
        LedgerText(key_of(fritz), "e7", json.dumps({**fritz, "steps": {"a": 1}})),
    ]
    report = sync(path, [ANNA, *odd], bases=[base_text("tiny"), base_text("odd", served_model=None)])
    assert len(report.unreadable) == 8
    for text_of, fault in zip(
        report.unreadable,
        [
            "served_model",
            "spelt",
            "danced|kind",
            "not JSON",
            "schema is 2",
            "about dora",
            "no schema",
            "not a list",
        ],
        strict=True,
    ):
        assert re.search(fault, text_of), text_of
    assert served(path) == ["anna"]
    assert set(Catalog(path).known_etags().etags) == {key_of(ANNA), *(ledger.key for ledger in odd)}
    with open_catalog(path) as reader:
        assert sum(problem.problem == "unreadable" for problem in reader.problems()) == 8
    assert sync(path, [other]).unreadable == report.unreadable[1:2] + report.unreadable[3:]
    assert served(path) == ["anna", "dora"]


def test_bases_are_replaced_as_a_whole(path: Path) -> None:
    sync(path, [ANNA], bases=[base_text("tiny"), base_text("other")])
    sync(path, [], bases=[base_text("tiny", served_model="renamed")])
    with open_catalog(path) as reader:
        assert [(row.base, row.served_model) for row in reader.bases()] == [("tiny", "renamed")]
        assert reader.ready()[0].served_model == "renamed"


# duckdb#17158, #1119: a reader must not stop the writer, nor the writer a reader.
def test_readers_stay_open_over_syncs_and_see_what_they_opened(path: Path) -> None:
    sync(path, [ANNA])
    with open_catalog(path) as old, open_catalog(path) as older:
        sync(path, [BERTA])
        assert [row.author for row in old.ready()] == ["anna"]
        assert served(path) == ["anna", "berta"]
        sync(path, [CARLA])
        assert served(path) == ["anna", "berta", "carla"]
        assert [row.author for row in older.ready()] == ["anna"]


PAUSED = """
import sys, time
from pathlib import Path
import roster.catalog as catalog
from catalog_builders import sync
from ledger_builders import ready_ledger
place = sys.argv[2]
plain = getattr(catalog, place) if hasattr(catalog, place) else getattr(catalog.Catalog, place)
def paused(*arguments, **more):
    if place == "_begin":
        result = plain(*arguments, **more)
    print("there", flush=True)
    sys.stdin.readline()
    return result if place == "_begin" else plain(*arguments, **more)
setattr(catalog if hasattr(catalog, place) else catalog.Catalog, place, paused)
sync(Path(sys.argv[1]), [ready_ledger("berta"), ready_ledger("carla")])
"""

READ = """
import sys
from pathlib import Path
from roster.catalog import open_catalog
print(*(row.author for row in open_catalog(Path(sys.argv[1])).ready()))
"""


def test_nobody_waits_for_a_sync_that_is_under_way(path: Path) -> None:
    sync(path, [ANNA])
    with python(PAUSED, str(path), "_describe") as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "there\n"
        assert served(path) == ["anna"]
        with python(READ, str(path)) as reader:
            assert reader.communicate()[0].split() == ["anna"]
        with pytest.raises(CatalogBusy) as caught:
            sync(path, [CARLA])
        assert caught.value.holder == writer.pid
        assert str(path) in str(caught.value) and f"process {writer.pid}" in str(caught.value)
        writer.communicate("go on\n")
        assert writer.returncode == 0
    assert served(path) == ["anna", "berta", "carla"]


# duckdb#15836 and #18732: what a kill leaves behind must never stand between us and the next start.
@pytest.mark.parametrize("place", ["_begin", "_load", "_describe", "swap_in"])
def test_a_sync_killed_at_any_moment_leaves_the_old_catalog(path: Path, place: str) -> None:
    sync(path, [ANNA])
    before = path.read_bytes()
    with python(PAUSED, str(path), place) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "there\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert path.read_bytes() == before
    assert leftovers(path) != []
    assert served(path) == ["anna"]
    report = sync(path, [BERTA])
    assert (report.rebuilt, report.total) == (None, 2)
    assert leftovers(path) == []


HOLD = """
import sys, duckdb
with duckdb.connect(sys.argv[1]) as connection:
    print("there", flush=True)
    sys.stdin.readline()
"""


# https://github.com/duckdb/duckdb/issues/17158: an analyst's client, open for writing as is its default.
def test_another_program_with_the_file_open_for_writing_stops_no_sync(path: Path) -> None:
    sync(path, [ANNA])
    with python(HOLD, str(path)) as client:
        assert client.stdout is not None and client.stdout.readline() == "there\n"
        with pytest.raises(CatalogHeld) as caught:
            open_catalog(path)
        assert str(path) in str(caught.value) and str(client.pid) in str(caught.value)
        assert "-readonly" in str(caught.value)
        assert sync(path, [BERTA]).rebuilt is None
        assert served(path) == ["anna", "berta"]
        client.communicate("go\n")
    assert served(path) == ["anna", "berta"]


# https://github.com/duckdb/duckdb/issues/13017: network file systems without locks.
def test_a_disk_without_locks_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("roster.lock.fcntl.flock", refuse)
    with pytest.raises(CatalogNotLocal, match="local disk") as caught:
        sync(path, [ANNA])
    assert str(path) in str(caught.value) and "Operation not supported" in str(caught.value)


# https://github.com/duckdb/duckdb/issues/25015: a fatal error makes a connection useless.
def test_a_failed_write_leaves_the_old_catalog(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync(path, [ANNA])

    def fail(*_: object) -> None:
        raise duckdb.FatalException("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("roster.catalog._describe", fail)
        with pytest.raises(CatalogWriteFailed) as caught:
            sync(path, [BERTA])
    assert str(path) in str(caught.value) and "no space left" in str(caught.value)
    assert leftovers(path) == [] and served(path) == ["anna"]
    assert sync(path, [BERTA]).total == 2


def test_three_hundred_ledgers_are_quick(path: Path) -> None:
    documents = [ready_ledger(f"author-{n}", number=n) for n in range(300)]
    started = time.monotonic()
    report = sync(path, documents)
    built = time.monotonic() - started
    changed = {**documents[7], "steps": documents[7]["steps"][:4]}
    started = time.monotonic()
    sync(path, [changed])
    took = time.monotonic() - started
    assert report.added == 300 and len(served(path)) == 299
    assert built < 10 and took < 5, (built, took)


def test_the_catalog_is_one_file_that_can_be_copied(path: Path, tmp_path: Path) -> None:
    sync(path, [ANNA, BERTA])
    elsewhere = tmp_path / "elsewhere.duckdb"
    shutil.copyfile(path, elsewhere)
    assert served(elsewhere) == ["anna", "berta"]
