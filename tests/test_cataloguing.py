"""Sync: the store's ledgers, this machine's catalog and the published roster, with others at work meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_builders import Document, key_of, ready_ledger
from pipeline_builders import add_tiny_base
from store_builders import memory_store

import roster.serving
import tasks.cataloguing
from roster.catalog import open_catalog
from roster.errors import RosterDrop
from roster.serving import Roster
from storage.author_record import AuthorAct, AuthorEvent, append_author_event
from storage.bulk import BulkReader
from storage.claims import list_records
from storage.documents import read_document, utc_now
from storage.errors import InvalidName, ObjectNotFound, StoreUnavailable
from storage.keys import author_record_key, roster_key
from storage.objects import ObjectInfo
from storage.s3 import S3Store
from storage.snapshot import fetch_snapshot
from tasks.cataloguing import Synced, SyncLimits, publish_catalog, sync_catalog

LIMITS = SyncLimits(max_opponents=4, max_drop=0.2)


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as store:
        add_tiny_base(store)
        yield store


def put(store: S3Store, *documents: Document) -> None:
    for document in documents:
        store.put(key_of(document), json.dumps(document).encode())


def sync(store: S3Store, folder: Path, **more: Any) -> Synced:
    return sync_catalog(store, folder / "catalog.duckdb", LIMITS, **more)


def published(store: S3Store) -> Roster:
    return read_document(store, roster_key(), Roster)[0]


def served(store: S3Store) -> set[str]:
    return set(published(store).bases["tiny"].authors)


def test_a_sync_publishes_once_and_then_rests(store: S3Store, tmp_path: Path) -> None:
    assert sync(store, tmp_path).roster is None
    put(store, ready_ledger("ada"), ready_ledger("bo"))
    first = sync(store, tmp_path)
    assert first.published and (first.report.added, first.report.total) == (2, 2)
    assert served(store) == {"ada", "bo"}
    again = sync(store, tmp_path)
    assert not again.published and (again.report.added, again.report.changed) == (0, 0)
    assert published(store).version == 1
    assert sync(store, tmp_path, rebuild=True).report.total == 2 and published(store).version == 1


def test_an_older_look_at_the_ledgers_never_replaces_a_newer_roster(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this machine works on what it has read, another reads more and publishes."""
    put(store, ready_ledger("ada"))
    build = roster.serving.build_roster
    interfered: list[Synced] = []

    def slow(*arguments: Any, **options: Any) -> Roster:
        if not interfered:
            monkeypatch.setattr(tasks.cataloguing, "build_roster", build)
            put(store, ready_ledger("bo"))
            interfered.append(sync(store, tmp_path / "other"))
        return build(*arguments, **options)

    monkeypatch.setattr(tasks.cataloguing, "build_roster", slow)
    mine = sync(store, tmp_path)
    assert interfered[0].published
    assert served(store) == {"ada", "bo"} and not mine.published
    assert mine.roster == published(store)


def test_the_same_between_reading_ledgers_and_reading_the_roster(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is quicker by so much that a swap against the roster as read afterwards would succeed."""
    put(store, ready_ledger("ada"))
    refresh = tasks.cataloguing._refresh

    def slow(*arguments: Any, **options: Any) -> Any:
        report = refresh(*arguments, **options)
        monkeypatch.setattr(tasks.cataloguing, "_refresh", refresh)
        put(store, ready_ledger("bo"))
        sync(store, tmp_path / "other")
        return report

    monkeypatch.setattr(tasks.cataloguing, "_refresh", slow)
    sync(store, tmp_path)
    assert served(store) == {"ada", "bo"}


def test_what_is_no_text_at_all_is_listed_and_stops_nobody(store: S3Store, tmp_path: Path) -> None:
    bad = ready_ledger("bad")
    put(store, ready_ledger("ada"))
    store.put(key_of(bad), b"\xff\xfe\x00 no text")
    synced = sync(store, tmp_path)
    assert served(store) == {"ada"}
    assert len(synced.report.unreadable) == 1 and key_of(bad) in synced.report.unreadable[0]


def test_a_ledger_that_goes_away_after_the_listing_stops_nobody(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, ready_ledger("ada"), ready_ledger("bo"))

    def listing(reader: BulkReader, author: str | None) -> Iterator[ObjectInfo]:
        found = list(list_records(reader, author))
        store.delete(key_of(ready_ledger("bo")))
        return iter(found)

    monkeypatch.setattr(tasks.cataloguing, "list_records", listing)
    sync(store, tmp_path)
    assert served(store) == {"ada"}


def test_a_ledger_that_a_listing_leaves_out_is_not_gone(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, ready_ledger("ada"), ready_ledger("bo"))
    sync(store, tmp_path)
    monkeypatch.setattr(tasks.cataloguing, "list_records", lambda store, author: iter(()))
    assert sync(store, tmp_path).report.removed == 0
    assert served(store) == {"ada", "bo"}


def test_many_authors_are_not_dropped_unasked(store: S3Store, tmp_path: Path) -> None:
    documents = [ready_ledger(name) for name in ("ada", "bo", "cy", "di")]
    put(store, *documents)
    sync(store, tmp_path)
    for document in documents[:3]:
        store.delete(key_of(document))
    with pytest.raises(RosterDrop):
        sync(store, tmp_path)
    assert len(served(store)) == 4
    with open_catalog(tmp_path / "catalog.duckdb") as reader:
        assert len(reader.ready()) == 1, "the catalog is the truth all the same"
    sync_catalog(store, tmp_path / "catalog.duckdb", SyncLimits(max_opponents=4, max_drop=1.0))
    assert served(store) == {"di"}


def act(store: S3Store, author: str, name: AuthorAct, base: str | None = None) -> str:
    event = AuthorEvent(act=name, base=base, adapter_digest=None, who="ines", at=utc_now(), why="asked to")
    append_author_event(store, author, lambda record: event)
    return author_record_key(author)


def test_of_touched_authors_alone_everything_is_read(store: S3Store, tmp_path: Path) -> None:
    put(store, ready_ledger("ada"), ready_ledger("bo"))
    sync(store, tmp_path)
    put(store, ready_ledger("ada", "b", number=2), ready_ledger("cy"))
    act(store, "ada", AuthorAct.HOLD)
    fast = sync(store, tmp_path, touched=[key_of(ready_ledger("ada"))])
    assert not fast.whole and (fast.report.added, fast.report.changed, fast.report.total) == (2, 0, 3)
    assert served(store) == {"bo"}, "held by a record that nobody named"
    act(store, "ada", AuthorAct.RELEASE)
    assert not sync(store, tmp_path, touched=[author_record_key("ada")]).whole
    assert served(store) == {"ada", "bo"}
    rest = sync(store, tmp_path)
    assert rest.whole and rest.report.added == 1 and served(store) == {"ada", "bo", "cy"}
    with pytest.raises(InvalidName, match="uploads/ada/run-1"):
        sync(store, tmp_path, touched=["uploads/ada/run-1/_READY.json"])


def test_a_fast_sync_undoes_nothing_that_another_machine_published(store: S3Store, tmp_path: Path) -> None:
    """The other one held an author of whom this one knows nothing new."""
    put(store, ready_ledger("ada"), ready_ledger("bo"))
    sync(store, tmp_path)
    act(store, "bo", AuthorAct.HOLD)
    sync(store, tmp_path / "other")
    assert served(store) == {"ada"}
    put(store, ready_ledger("cy"))
    assert sync(store, tmp_path, touched=[key_of(ready_ledger("cy"))]).whole
    assert served(store) == {"ada", "cy"}


@pytest.mark.parametrize("loss", ["missing", "damaged"])
def test_a_fast_sync_without_a_catalog_reads_everything(store: S3Store, tmp_path: Path, loss: str) -> None:
    put(store, ready_ledger("ada"), ready_ledger("bo"))
    sync(store, tmp_path)
    catalog = tmp_path / "catalog.duckdb"
    if loss == "missing":
        catalog.unlink()
    else:
        catalog.write_bytes(b"not a catalog")
    again = sync(store, tmp_path, touched=[key_of(ready_ledger("ada"))])
    assert again.whole and again.report.total == 2 and again.report.rebuilt is not None
    assert served(store) == {"ada", "bo"}


def test_every_version_of_the_roster_stays(store: S3Store, tmp_path: Path) -> None:
    kept = []
    for name in ("ada", "bo", "cy"):
        put(store, ready_ledger(name))
        sync(store, tmp_path)
        kept.append(store.get(roster_key()).body)
        store.delete("roster/history/00000002.json")  # as if its publisher had been killed before
    assert sorted(found.key for found in store.list_objects("roster/history/")) == [
        "roster/history/00000001.json",
        "roster/history/00000003.json",
    ]
    put(store, ready_ledger("di"))
    store.delete("roster/history/00000003.json")
    sync(store, tmp_path)
    for version in (1, 3, 4):
        body = store.get(f"roster/history/{version:08d}.json").body
        assert json.loads(body)["version"] == version
        assert body == (*kept, store.get(roster_key()).body)[version - 1]


def test_who_was_held_or_retired_is_not_dropped_by_mistake(store: S3Store, tmp_path: Path) -> None:
    names = ("ada", "bo", "cy", "di", "ed")
    put(store, *map(ready_ledger, names))
    sync(store, tmp_path)
    for name in names[:2]:
        act(store, name, AuthorAct.HOLD)
    for name in names[2:4]:
        act(store, name, AuthorAct.RETIRE)
    assert sync(store, tmp_path).published and served(store) == {"ed"}


def test_readers_elsewhere_fetch_the_published_catalog(store: S3Store, tmp_path: Path) -> None:
    put(store, ready_ledger("ada"))
    sync(store, tmp_path)
    mine, theirs = tmp_path / "catalog.duckdb", tmp_path / "fetched.duckdb"
    with pytest.raises(ObjectNotFound):
        fetch_snapshot(store, theirs)
    assert publish_catalog(store, mine)
    assert fetch_snapshot(store, theirs).is_new and not fetch_snapshot(store, theirs).is_new
    assert theirs.read_bytes() == mine.read_bytes()
    sync(store, tmp_path)
    assert not publish_catalog(store, mine), "nothing but the time is new"
    put(store, ready_ledger("bo"))
    sync(store, tmp_path)
    assert publish_catalog(store, mine)
    assert fetch_snapshot(store, theirs).is_new
    with open_catalog(theirs) as reader:
        assert [row.author for row in reader.ready()] == ["ada", "bo"]
    theirs.write_bytes(theirs.read_bytes()[:-1] + b"?")
    assert fetch_snapshot(store, theirs).is_new and theirs.read_bytes() == mine.read_bytes()
    assert sorted(one.name for one in tmp_path.iterdir() if "new" in one.name or "sent" in one.name) == []


def test_a_published_catalog_that_is_not_what_it_says_is_refused(store: S3Store, tmp_path: Path) -> None:
    put(store, ready_ledger("ada"))
    sync(store, tmp_path)
    publish_catalog(store, tmp_path / "catalog.duckdb")
    told = store.head("roster/catalog.duckdb")
    assert told is not None
    other = tmp_path / "other"
    other.write_bytes(b"x" * told.bytes)
    with pytest.raises(StoreUnavailable):
        store.upload_file(other, "roster/catalog.duckdb", sha256=str(told.sha256)[::-1])
        fetch_snapshot(store, tmp_path / "fetched.duckdb")
    assert not (tmp_path / "fetched.duckdb").exists()
