"""Collecting garbage: what nothing refers to goes, and nothing that a roster, a ledger, a pin or a run needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cli_builders import Roster
from feed_builders import EXAMPLES
from pipeline_builders import Desk, OnLoad
from store_builders import DIGEST, memory_store, with_faults
from upkeep_builders import (
    BASE,
    Killed,
    check_servable,
    contents,
    digest,
    dying,
    expire_claims,
    publish,
    put_adapter,
    put_roster,
    put_staged,
    served_entry,
)

from flows.connect import verdict_thresholds
from storage.author_record import AuthorAct, AuthorEvent, append_author_event
from storage.claims import LedgerHandle, read_ledger
from storage.documents import utc_now
from storage.ledger import Outcome
from storage.purge import purge_ledger
from storage.s3 import S3Store
from tasks.collecting import KEPT_ROSTERS, Collected, collect, list_unreferenced
from tasks.rejudging import rejudge_adapter

pytestmark = pytest.mark.real

NOW = timedelta(0)


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


def unreferenced(store: S3Store, older_than: timedelta = NOW) -> list[str]:
    found = list_unreferenced(store, older_than=older_than, now=utc_now() + timedelta(seconds=1))
    return sorted(one.prefix for one in found)


def run_gc(store: S3Store) -> Collected:
    found = list_unreferenced(store, older_than=NOW, now=utc_now() + timedelta(seconds=1))
    return collect(store, found, worker="host:1")


def test_only_what_nothing_needs_is_garbage(store: S3Store) -> None:
    """Each reason to keep stands alone: without it the prefix would go, as the one beside it does."""
    refused = put_adapter(store, "ada", "refused", Outcome.QUARANTINED)
    put_adapter(store, "ada", "ready", Outcome.READY)
    put_adapter(store, "ada", "on its way", None)
    pinned = put_adapter(store, "ada", "pinned", Outcome.QUARANTINED)
    before = put_adapter(store, "ada", "served before", Outcome.QUARANTINED)
    now = put_adapter(store, "ada", "served now", Outcome.QUARANTINED)
    long_ago = put_adapter(store, "ada", "served long ago", Outcome.QUARANTINED)
    put_staged(store, "control", "ada", digest(now))  # what a killed run left; its ledger is done with it
    put_staged(store, "serving", "ada", digest("no ledger knows it"))
    put_staged(store, "serving", "zeno", digest("no ledger at all"))
    put_staged(store, "serving", "No Author", digest("somebody else's, and none of our business"))
    event = AuthorEvent(
        act=AuthorAct.PIN,
        base=BASE,
        adapter_digest=digest("ada pinned"),
        who="mara",
        at=utc_now(),
        why="",
    )
    append_author_event(store, "ada", lambda record: event)
    put_roster(store, {"ada": served_entry("ada", now)})
    history = {1: long_ago, 2: before} | {number: now for number in range(3, KEPT_ROSTERS + 2)}
    for number, output in history.items():
        put_roster(store, {"ada": served_entry("ada", output)}, f"roster/history/{number:08}.json", number)
    garbage = {
        f"serving/ada/{refused}/",
        f"serving/ada/{long_ago}/",
        f"control/ada/{digest(now)}/",
        f"serving/ada/{digest('no ledger knows it')}/",
        f"serving/zeno/{digest('no ledger at all')}/",
    }
    assert set(unreferenced(store)) == garbage
    assert unreferenced(store, timedelta(hours=1)) == []
    kept = {key for key in contents(store) if not key.startswith(tuple(garbage))}
    done = run_gc(store)
    assert {one.prefix for one in done.removed} == garbage and done.left == ()
    assert set(contents(store)) == kept and pinned
    ledger, _ = read_ledger(store, "ada", digest("ada refused"))
    assert ledger.claim is None and ledger.verdict is not None


@pytest.mark.parametrize("outcome", [Outcome.READY, Outcome.QUARANTINED])
def test_what_an_older_listing_hides_is_looked_for_by_its_name(store: S3Store, outcome: Outcome) -> None:
    output = put_adapter(store, "ada", "hidden", outcome)
    manifest = json.loads((EXAMPLES / "manifest.json").read_text("utf-8"))
    manifest |= {"author": "ada", "output_digest": output, "adapter_digest": digest("ada hidden")}
    store.put(f"serving/ada/{output}/manifest.json", json.dumps(manifest).encode())
    pages = store._client.list_objects_v2

    def older(**asked: Any) -> Any:
        page = pages(**asked)
        page["Contents"] = [one for one in page.get("Contents", ()) if not one["Key"].startswith("ledger/")]
        return page

    done = run_gc(with_faults(store, list_objects_v2=older))
    prefix = f"serving/ada/{output}/"
    if outcome is Outcome.READY:
        assert done.left == ((prefix, "a ledger refers to it that was not listed"),) and not done.removed
    else:
        assert [one.prefix for one in done.removed] == [prefix] and done.left == ()


@pytest.mark.parametrize("what", ["claimed", "claimed since", "published since", "pinned since", "torn"])
def test_what_is_needed_again_meanwhile_stays(store: S3Store, what: str) -> None:
    output = put_adapter(store, "ada", "refused", Outcome.QUARANTINED)
    ledger, etag = read_ledger(store, "ada", digest("ada refused"))
    handle = LedgerHandle(store, ledger, etag, utc_now)
    if what == "claimed":
        handle.claim("worker run", 600)
        assert unreferenced(store) == []
        expire_claims(store)
    found = list_unreferenced(store, older_than=NOW, now=utc_now() + timedelta(seconds=1))
    assert len(found) == 1
    if what.startswith("claimed"):
        handle.claim("worker run", 600)
    elif what == "published since":
        put_roster(store, {"ada": served_entry("ada", output)})
    elif what == "pinned since":
        event = AuthorEvent(
            act=AuthorAct.PIN, base=BASE, adapter_digest=ledger.adapter_digest, who="m", at=utc_now(), why=""
        )
        append_author_event(store, "ada", lambda record: event)
    else:
        store.put(f"ledger/ada/{DIGEST}.json", b'{"schema": 1')
    before = {key for key in contents(store) if key.startswith("serving/")}
    done = collect(store, found, worker="host:1")
    assert done.removed == () and len(done.left) == 1
    words = {
        "claimed": "worker run",
        "published": "a published roster names it",
        "pinned": "a ledger refers to it",
    }
    assert words.get(what.split(maxsplit=1)[0], "not a document we can use") in done.left[0][1]
    assert {key for key in contents(store) if key.startswith("serving/")} == before
    claim = read_ledger(store, "ada", digest("ada refused"))[0].claim
    assert (None if claim is None else claim.holder) == ("worker run" if "claimed" in what else None)


@pytest.mark.real
def test_killed_after_every_single_change_nothing_half_is_left_to_serve(store: S3Store) -> None:
    put_adapter(store, "ada", "ready", Outcome.READY)
    put_adapter(store, "ada", "refused", Outcome.QUARANTINED)
    put_staged(store, "control", "ada", digest("left"))
    publish(store)
    kept = {key for key in contents(store) if "/".join(key.split("/")[2:3]) == digest("ada ready output")}
    kills = 0
    while True:
        try:
            # Two claims come first; the third change is the first removal.
            run_gc(dying(store, after=3))
        except Killed:
            kills += 1
            check_servable(store)
            expire_claims(store)
            if unreferenced(store):
                continue
        break
    assert kills == 6 and unreferenced(store) == []
    assert {key for key in contents(store) if key.startswith(("serving/", "control/"))} == kept != set()


def test_it_stops_long_before_its_claims_run_out(store: S3Store) -> None:
    for name in ("one", "two"):
        put_adapter(store, "ada", name, Outcome.QUARANTINED)
    found = list_unreferenced(store, older_than=NOW, now=utc_now() + timedelta(seconds=1))
    seconds = iter([0.0, 1.0, 100.0])
    done = collect(store, found, worker="host:1", clock=lambda: next(seconds))
    assert len(done.removed) == 1 and "the next `roster gc` goes on" in done.left[0][1]


def test_a_purged_ledger_keeps_nothing(store: S3Store) -> None:
    output = put_adapter(store, "ada", "ready", Outcome.READY)
    assert unreferenced(store) == []
    purge_ledger(store, "ada", digest("ada ready"), utc_now())
    assert unreferenced(store) == [f"serving/ada/{output}/"]


def test_no_run_is_robbed_while_it_scores(desk: Desk) -> None:
    desk.heldout("ash")
    desk.submit("ash", desk.adapter("ash"))
    seen: list[Collected] = []
    desk.engine.on_load = OnLoad("ash@", lambda name: seen.append(run_gc(desk.store)))
    assert desk.run("ash").name == "Ready" and seen
    assert all(one.removed == () for one in seen) and desk.keys("serving/ash/")


def test_what_was_collected_is_staged_again_when_it_is_wanted(desk: Desk) -> None:
    """A refused adapter that is found good later must not be served from files that went meanwhile."""
    desk.settings.floor_bpb = 5.0
    assert str(desk.ready("ash").name).startswith("Quarantined")
    [staged] = [key for key in desk.keys("serving/ash/") if key.endswith("manifest.json")]
    assert [one.author for one in run_gc(desk.store).removed] == ["ash"] and not desk.keys("serving/ash/")
    desk.settings.floor_bpb = 0.002
    found = rejudge_adapter(
        desk.store,
        "ash",
        desk.submitted["ash"].adapter_digest,
        verdict_thresholds(desk.settings),
        dry_run=False,
        worker="w",
        claim_seconds=60,
    )
    assert not found.is_recorded and "its files were taken out of the store" in found.reason
    assert desk.run("ash").name == "Ready" and staged in desk.keys("serving/ash/")


def test_the_command_lists_before_it_removes(
    store: S3Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = put_adapter(store, "ada", "refused", Outcome.QUARANTINED)
    monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
    roster = Roster(capsys, Path())
    size = sum(one.bytes for one in store.list_objects("serving/"))
    assert roster("gc").out == "nothing is unreferenced\n", "it is young"
    ran = roster("gc", "--dry-run", "--older-than", "0s")
    assert (
        ran.code == 0 and f"serving/ada/{output}/" in ran.out and f"{size} bytes would be removed" in ran.err
    )
    before = contents(store)
    found = roster("gc", "--dry-run", "--older-than", "0s", "--json").document
    assert (found["bytes"], len(found["prefixes"]), contents(store)) == (size, 1, before)
    monkeypatch.setattr("tasks.collecting.PENDING_AGE", timedelta(0))
    store._client.create_multipart_upload(Bucket=store.bucket, Key="serving/bert/x/half")
    ran = roster("gc", "--dry-run", "--older-than", "0s")
    assert "serving/bert/x/half, half sent since " in ran.err and "would go" in ran.err
    assert len(list(store.list_pending(""))) == 1
    removed = roster("gc", "--older-than", "0s", "--json").document
    assert removed["prefixes"][0]["objects"] == 3
    assert [one["key"] for one in removed["aborted"]] == ["serving/bert/x/half"]
    assert not list(store.list_objects("serving/")) and not list(store.list_pending(""))


def test_a_run_that_begins_meanwhile_finds_the_claim(store: S3Store) -> None:
    put_adapter(store, "ada", "refused", Outcome.QUARANTINED)
    found = list_unreferenced(store, older_than=NOW, now=utc_now() + timedelta(seconds=1))
    holders: list[str] = []
    real = store._client.delete_object

    def look(**call: str) -> object:
        claim = json.loads(store.get(f"ledger/ada/{digest('ada refused')}.json").body)["claim"]
        holders.append(claim["holder"])
        return real(**call)

    collect(with_faults(store, delete_object=look), found, worker="host:1")
    assert len(holders) == 3 and all(one.startswith("host:1 gc ") for one in holders)


@pytest.mark.parametrize("hours", [23, 25])
def test_uploads_that_were_broken_off_go_after_a_day(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    for key in ("serving/ada/x/weights", "uploads/bo/run-1/weights"):
        begun = store._client.create_multipart_upload(Bucket=store.bucket, Key=key)
        store._client.upload_part(
            Bucket=store.bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"part"
        )
    store.put("serving/ada/x/y", b"")
    [first, second] = sorted(store.list_pending(""), key=lambda one: one.key)
    monkeypatch.setattr("tasks.collecting.utc_now", lambda: first.begun + timedelta(hours=hours))
    done = collect(store, [], worker="host:1")
    gone = (first, second) if hours == 25 else ()
    assert tuple(sorted(done.aborted, key=lambda one: one.key)) == gone
    assert len(store.list_pending("")) == 2 - len(gone)
    assert [one.key for one in store.list_objects("")] == ["serving/ada/x/y"]
