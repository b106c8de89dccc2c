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

import tasks.cataloguing
from roster.catalog import open_catalog
from roster.errors import RosterDrop
from roster.serving import Roster
from storage.claims import list_ledgers
from storage.documents import read_document
from storage.keys import roster_key
from storage.objects import ObjectInfo
from storage.s3 import S3Store
from tasks.cataloguing import Synced, SyncLimits, sync_catalog

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
    build = tasks.cataloguing.build_roster
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

    def listing(store: S3Store) -> Iterator[ObjectInfo]:
        found = list(list_ledgers(store))
        store.delete(key_of(ready_ledger("bo")))
        return iter(found)

    monkeypatch.setattr(tasks.cataloguing, "list_ledgers", listing)
    sync(store, tmp_path)
    assert served(store) == {"ada"}


def test_a_ledger_that_a_listing_leaves_out_is_not_gone(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, ready_ledger("ada"), ready_ledger("bo"))
    sync(store, tmp_path)
    monkeypatch.setattr(tasks.cataloguing, "list_ledgers", lambda store: iter(()))
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
