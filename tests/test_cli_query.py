"""The questions at the command line: filters, history, the schema, operators' acts, and which catalog answers."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from catalog_builders import NOON, sync
from cli_builders import Ran, Roster
from ledger_builders import base_text, halted, inspected, ledger, ready_ledger, refused
from store_builders import failing, memory_store, with_faults

from flows.standing import StoreView
from roster.incoming import LedgerText
from storage.snapshot import publish_snapshot
from tasks.engine_health import EngineHealth, Qualified
from tasks.inbox import PendingUpload, UploadState

DOCS = (Path(__file__).parent.parent / "docs" / "cli.md").read_text("utf-8")
BASES = (base_text("tiny"), base_text("big"), base_text("idle"))


def record(author: str, *acts: dict[str, Any]) -> LedgerText:
    """An author's record as the store holds it."""
    events = [
        {"base": None, "adapter_digest": None, "who": "mia", "at": "2026-11-21T09:00:00Z", "why": "", **act}
        for act in acts
    ]
    body = json.dumps({"schema": 1, "author": author, "events": events})
    return LedgerText(f"ledger/{author}/_author.json", f'"{len(body)}"', body)


def ago(**age: int) -> str:
    return f"{datetime.now(UTC) - timedelta(**age):%Y-%m-%dT%H:%M:%SZ}"


def waiting_for(document: dict[str, Any], **age: int) -> dict[str, Any]:
    for step in document["steps"]:
        step |= {"started_at": ago(**age), "finished_at": ago(**age)}
    return document


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Roster:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROSTER_HOME", str(tmp_path / "home"))
    for name in ("ROSTER_STORE_ENDPOINT", "ROSTER_STORE_BUCKET", "ROSTER_STORE_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return Roster(capsys, tmp_path / "home")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ash and elm are served, fir is held, oak waits, pin was stopped, rue is refused; yew is on another base."""
    newer = ledger("elm", "b", [inspected(), refused("checked", "non_finite", minute=1)], runs={"r9": 9})
    documents = [
        ready_ledger("ash"),
        ready_ledger("elm"),
        newer,
        ready_ledger("fir"),
        record("fir", {"act": "hold", "why": "a complaint"}),
        waiting_for(
            ledger("oak", "a", [halted("inspected", "waiting", "no_heldout")], runs={"r1": 2}), days=3
        ),
        waiting_for(
            ledger("pin", "a", [halted("scored", "stopped", "disk_full")], runs={"r1": 2}), minutes=5
        ),
        ledger("rue", "a", [inspected(), refused("checked", "non_finite", minute=1)], runs={"r1": 3}),
        ready_ledger("yew", base="big"),
    ]
    path = tmp_path_factory.mktemp("world") / "catalog.duckdb"
    sync(path, documents, bases=BASES)
    return path


@pytest.fixture
def roster(offline: Roster, world: Path) -> Roster:
    shutil.copy(world, offline.home)
    return offline


def names(ran: Ran, rows: str) -> list[str]:
    return [row["author"] for row in ran.document[rows]]


def test_who_is_served_is_filtered_by_base_and_age(roster: Roster) -> None:
    assert names(roster("ready", "--json"), "ready") == ["yew", "ash", "elm"]
    assert names(roster("ready", "--base", "big", "--json"), "ready") == ["yew"]
    assert names(roster("ready", "--base", "idle", "--json"), "ready") == []
    measured = datetime(2026, 11, 20, 12, tzinfo=UTC)
    days = (datetime.now(UTC) - measured).days
    assert len(names(roster("ready", "--older-than", f"{days - 2}d", "--json"), "ready")) == (
        3 if days > 2 else 0
    )
    assert names(roster("ready", "--older-than", f"{days + 2}d", "--json"), "ready") == []
    assert "not served, as operators said: fir (held on tiny)" in roster("ready").err


def test_what_waits_is_filtered_by_state_and_age(roster: Roster) -> None:
    document = roster("waiting", "--json").document
    assert set(document) == {"synced_at", "waiting"} and document["synced_at"] == NOON
    assert [(row["author"], row["code"]) for row in document["waiting"]] == [
        ("oak", "no_heldout"),
        ("pin", "disk_full"),
    ]
    assert names(roster("waiting", "--state", "stopped", "--json"), "waiting") == ["pin"]
    assert names(roster("waiting", "--older-than", "2h", "--json"), "waiting") == ["oak"]
    assert names(roster("waiting", "--base", "big", "--json"), "waiting") == []
    ran = roster("waiting")
    assert re.search(r"^oak/r1 +tiny +waiting +no_heldout +3 d +because of no_heldout", ran.out, re.MULTILINE)
    assert "no_heldout: Add held-out text with `roster heldout add`" in ran.err
    assert roster("waiting", "--base", "big").out == "nothing waits\n"


def test_everyone_is_listed_by_state(roster: Roster) -> None:
    rows = roster("show", "--json").document["authors"]
    assert {row["author"]: row["state"] for row in rows} == {
        "ash": "ready",
        "elm": "ready",
        "fir": "held",
        "oak": "waiting",
        "pin": "stopped",
        "rue": "quarantined",
        "yew": "ready",
    }
    assert names(roster("show", "--state", "held", "--json"), "authors") == ["fir"]
    assert names(roster("show", "--state", "ready", "--base", "tiny", "--json"), "authors") == ["ash", "elm"]
    out = roster("show").out
    assert re.search(r"^elm +tiny +ready +[0-9a-f]{12} +r9 +quarantined \(non_finite\) +2", out, re.MULTILINE)


def test_one_author_is_filtered_by_state(roster: Roster) -> None:
    document = roster("show", "elm", "--json").document
    assert [one["adapter"]["state"] for one in document["adapters"]] == ["quarantined", "ready"]
    assert document["times"][0]["steps"] == 9
    (one,) = roster("show", "elm", "--state", "quarantined", "--json").document["adapters"]
    assert one["adapter"]["run"] == "r9"
    assert roster("show", "elm", "--state", "waiting").out.startswith("no adapter is so\n")
    held = roster("show", "fir").out
    assert held.startswith(
        "On tiny, fir is on hold: not served, uploads are judged all the same, by mia on 2026-"
    )
    assert "because: a complaint.\n" in held


def test_the_history_holds_steps_and_acts_in_the_order_of_time(roster: Roster) -> None:
    document = roster("history", "fir", "--json").document
    assert [row["kind"] for row in document["history"]] == [
        step["kind"] for step in ready_ledger("fir")["steps"]
    ]
    assert [(row["act"], row["who"], row["why"]) for row in document["acts"]] == [
        ("hold", "mia", "a complaint")
    ]
    lines = roster("history", "fir").out.splitlines()
    assert len(lines) == 1 + len(document["history"]) + 1
    assert lines == [lines[0], *sorted(lines[1:])]
    assert re.match(r"2026-11-21T09:00:00Z +hold +every base +mia +a complaint", lines[-1])
    last = roster("history", "fir", "--limit", "2", "--json").document["history"]
    assert last == document["history"][-2:]
    assert roster("history", "fir", "--base", "big", "--json").document["history"] == []
    assert roster("history", "nobody").code == 2


@pytest.mark.parametrize(
    "command", [["ready"], ["waiting"], ["show"], ["show", "ash"], ["why", "ash"], ["history", "ash"]]
)
def test_a_base_that_nobody_knows_is_no_empty_answer(roster: Roster, command: list[str]) -> None:
    ran = roster(*command, "--base", "tinny", "--json")
    assert ran.code == 2
    assert "base 'tinny': expected a registered base, found: big, idle, tiny" in ran.document["error"]


@pytest.mark.parametrize("age", ["soon", "-3d"])
def test_an_age_is_a_time_above_nothing(roster: Roster, age: str) -> None:
    assert roster("ready", f"--older-than={age}").code == 2


# sql --schema


def test_the_schema_lists_every_view_and_table_with_what_it_holds(roster: Roster) -> None:
    views = roster("sql", "--schema", "--json").document["views"]
    by_name = {view["name"]: view for view in views}
    assert {"ready", "authors", "adapters", "history", "waiting", "problems", "author_states"} <= set(by_name)
    assert {"ledgers", "steps", "meta"} <= set(by_name)
    for view in views:
        assert view["comment"], view["name"]
        for column in view["columns"]:
            assert column["comment"] and column["type"], (view["name"], column["name"])
    out = roster("sql", "--schema").out
    assert re.search(r"^ready +\S", out, re.MULTILINE) and len(out.splitlines()) == 1 + len(views)


def test_the_columns_of_one_view_are_explained(roster: Roster) -> None:
    (view,) = roster("sql", "--schema", "ready", "--json").document["views"]
    columns = roster("sql", "SELECT * FROM ready", "--json").document["columns"]
    assert [column["name"] for column in view["columns"]] == columns
    out = roster("sql", "--schema", "ready").out
    assert out.startswith("ready: ") and re.search(r"^own +DOUBLE +\S", out, re.MULTILINE)


def test_what_cannot_be_asked_is_said(roster: Roster) -> None:
    ran = roster("sql", "--schema", "redy", "--json")
    assert ran.code == 2
    assert "catalog: redy: expected the name of a view or table" in ran.document["error"]
    assert "ready, " in ran.document["error"]
    assert "--schema lists what can be asked" in roster("sql").err


# Which catalog


def test_without_a_catalog_the_published_one_answers(
    offline: Roster, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_store() as store:
        monkeypatch.setattr("flows.connect.open_store_hurried", lambda settings: store)
        ran = offline("ready", "--json")
        assert ran.code == 3 and "expected a file, found none; run `roster sync`" in ran.document["error"]
        publish_snapshot(store, world, "what it says")
        ran = offline("ready", "--json")
        assert names(ran, "ready") == ["yew", "ash", "elm"]
        assert f"this is the published one, of the sync at {NOON}" in ran.err
        assert not (offline.home / "catalog.duckdb").exists(), "a sync of this machine's own finds none"
        # https://github.com/duckdb/duckdb/issues/24103: somebody opened what was fetched for writing, and was killed.
        log = offline.home / "published.duckdb.wal"
        log.write_bytes(b"left by a killed client")
        ran = offline("ready", "--json")
        assert (
            names(ran, "ready") == ["yew", "ash", "elm"]
            and "set aside as published.duckdb.wal.damaged" in ran.err
        )
        assert log.with_name(log.name + ".damaged").read_bytes() == b"left by a killed client"

        broken = with_faults(store, head_object=failing(EndpointConnectionError(endpoint_url="http://store")))
        monkeypatch.setattr("flows.connect.open_store_hurried", lambda settings: broken)
        ran = offline("ready", "--json")
        assert names(ran, "ready") == ["yew", "ash", "elm"], "what was fetched before stands"
        assert "the snapshot that was fetched before stands" in ran.err
        shutil.copy(world, offline.home)
        ran = offline("ready", "--json")
        assert names(ran, "ready") == ["yew", "ash", "elm"] and ran.err == "", (
            "a catalog of one's own needs no store"
        )


# status


def test_how_one_base_stands(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = (_engine("big"), _engine("tiny"))
    uploads = tuple(
        PendingUpload(author, "r1", "", UploadState.WAITING, datetime.now(UTC), base=base)
        for author, base in (("oak", "tiny"), ("ivy", None), ("yew", "big"))
    )
    monkeypatch.setattr("flows.standing._look_at_store", lambda *_: (StoreView(uploads, engines, 1), None))
    document = roster("status", "--base", "tiny", "--json").document
    assert [one["author"] for one in document["uploads"]] == ["oak", "ivy"]
    assert [one["base"] for one in document["engines"]] == ["tiny"]
    assert document["ready"] == 2 and [row["author"] for row in document["waiting"]] == ["oak", "pin"]
    big = roster("status", "--base", "big", "--json").document
    assert (big["ready"], big["waiting"], [row["author"] for row in big["problems"]]) == (1, [], [])
    assert "expected a registered base, found: big, tiny" in roster("status", "--base", "tinny").err


def _engine(base: str) -> EngineHealth:
    return EngineHealth(base, "http://a", True, "e1", "0.32.0", True, Qualified.PASSED, (), (), None)


# docs/cli.md


@pytest.mark.parametrize("example", re.findall(r"^```python\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL))
def test_the_python_examples_run(
    roster: Roster, example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    roster.home.rename(roster.home.parent / ".roster")
    exec(compile(example, "docs/cli.md", "exec"), {})
    assert capsys.readouterr().out.startswith(("ash 0.25", "[('"))


def test_every_filter_that_is_documented_is_there(roster: Roster) -> None:
    rows = re.findall(r"^\| `(--[a-z-]+) [A-Z]+` \| ([^|]+) \|", DOCS, re.MULTILINE)
    assert [option for option, _ in rows] == ["--base", "--state", "--older-than"]
    for option, commands in rows:
        for command in re.findall(r"`(\w+)`", commands):
            assert option in roster(command, "--help").out, (option, command)
