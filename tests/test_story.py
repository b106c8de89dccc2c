"""An author's story where operators have acted, or several adapters compete: who is served, and why nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from catalog_builders import sync
from cli_builders import Roster
from ledger_builders import Document, base_text, halted, inspected, ledger, ready_ledger, refused
from test_cli_query import record

from roster.advice import ADVICE
from roster.catalog import open_catalog
from roster.story import tell


def good(author: str, number: int, *, base: str = "tiny") -> Document:
    return ready_ledger(author, f"{author} {number}", number=number, base=base)


def short(author: str, number: int) -> str:
    return str(good(author, number)["adapter_digest"])[:12]


MANY = [halted("inspected", "stopped", "disk_full", minute=n) for n in range(20)]
BAD = ledger("bert", "b", [inspected(), refused("checked", "non_finite", minute=1)], runs={"r9": 9})
HELD = (
    {"act": "hold", "who": "kim", "why": "wrong text", "at": "2026-11-19T08:00:00Z"},
    {"act": "release", "who": "kim", "at": "2026-11-20T08:00:00Z"},
    {"act": "hold", "who": "mia", "why": "a complaint.", "base": "tiny"},
)
PIN = {"act": "pin", "base": "tiny", "adapter_digest": good("dora", 1)["adapter_digest"]}
PIN_TO_BAD = PIN | {"adapter_digest": (BAD | {"author": "iris"})["adapter_digest"]}
PIN_TO_NONE = PIN | {"adapter_digest": "9" * 64}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One catalog for all: making one takes longer than all that is asked of it."""
    path = tmp_path_factory.mktemp("story") / "c.duckdb"
    documents = [
        *(good("anna", 1), good("anna", 2)),
        *(good("bert", 1), BAD),
        ledger("many", "a", MANY, runs={"r1": 1}),
        *(good("carl", 1), good("carl", 2), record("carl", *HELD)),
        *(good("dora", 1), good("dora", 2), record("dora", PIN)),
        *(good("emil", 1), record("emil", {"act": "retire", "why": "left"})),
        *(good("fred", 1), record("fred", {"act": "purge", "why": "left"})),
        *(good("gina", 1), good("gina", 3, base="big"), record("gina", {"act": "hold", "base": "big"})),
        record("hans", {"act": "hold", "why": "not yet"}),
        *(good("iris", 1), BAD | {"author": "iris"}, record("iris", PIN_TO_BAD)),
        *(good("jane", 1), record("jane", PIN_TO_NONE)),
        *(good("kurt", 1), record("kurt", PIN_TO_NONE, {"act": "hold", "why": "not yet"})),
    ]
    sync(path, documents, bases=(base_text("tiny"), base_text("big")))
    return path


def told(path: Path, author: str, base: str | None = None) -> list[str]:
    with open_catalog(path) as reader:
        return tell(reader.show(author), reader.states(author), reader.events(author), base=base)


def blocks(lines: Sequence[str]) -> dict[str, list[str]]:
    """The lines of each adapter by the run that it was uploaded as, and those before them under ""."""
    found: dict[str, list[str]] = {"": []}
    run = ""
    for line in lines:
        if line.startswith("Adapter "):
            run = line.split("as run ")[1].split(" ")[0]
            found[run] = []
        found[run].append(line)
    return found


def test_the_newer_of_two_good_ones_is_served_and_the_other_says_so(path: Path) -> None:
    lines = told(path, "anna")
    assert f"anna is served on tiny by adapter {short('anna', 2)} (run r2)." in lines
    story = blocks(lines)
    assert story["r2"][-1] == "Next: nothing; it is served."
    newer = f"adapter {short('anna', 2)} (run r2)"
    assert story["r1"][-1] == f"Next: nothing; {newer} is served, which was submitted later."


def test_the_time_of_every_step_is_told(path: Path) -> None:
    lines = told(path, "anna")
    start = lines.index("What was done with it:")
    assert lines[start + 1] == "  2026-11-20T12:00:49Z: inspected, done, after 42 s."
    assert lines[start + 7].endswith(": verdict, ready, after 42 s.")


def test_of_many_steps_the_last_ones_are_told(path: Path) -> None:
    lines = told(path, "many")
    start = lines.index("What was done with it:")
    assert lines[start + 1] == "  4 earlier steps (`roster history`)."
    assert lines[start + 2].startswith("  2026-11-20T12:04:49Z: inspected, stopped (disk_full)")
    assert lines[start + 17].startswith("  2026-11-20T12:19:49Z") and not lines[start + 18].startswith("  ")


def test_a_refused_newer_upload_leaves_the_old_one_served_and_says_so(path: Path) -> None:
    assert blocks(told(path, "bert"))["r9"][-2:] == [
        f"Meanwhile adapter {short('bert', 1)} (run r1) is served.",
        f"Next: {ADVICE['non_finite']}",
    ]


def test_a_hold_is_told_with_who_and_why(path: Path) -> None:
    lines = told(path, "carl")
    assert lines[1:7] == [
        "carl is not served.",
        "On tiny, carl is on hold: not served, uploads are judged all the same, by mia on 2026-11-21T09:00:00Z, "
        "because: a complaint.",
        "What operators did:",
        "  2026-11-19T08:00:00Z: was put on hold on every base by kim: wrong text.",
        "  2026-11-20T08:00:00Z: was released on every base by kim.",
        "  2026-11-21T09:00:00Z: was put on hold on tiny by mia: a complaint.",
    ]
    ready = "It is ready, and not served while carl is on hold."
    story = blocks(lines)
    assert story["r2"][-2:] == [ready, "Next: `roster release carl` when it may be served again."]
    later = f"Next: nothing; adapter {short('carl', 2)} (run r2) is ready too, and was submitted later."
    assert story["r1"][-2:] == [ready, later]


def test_a_pin_says_what_it_keeps_from_being_served(path: Path) -> None:
    lines, pinned = told(path, "dora"), short("dora", 1)
    assert f"dora is served on tiny by adapter {pinned} (run r1)." in lines
    assert any(line.startswith(f"On tiny, dora is pinned to adapter {pinned}, which alone") for line in lines)
    assert f"  2026-11-21T09:00:00Z: was pinned to adapter {pinned} on tiny by mia." in lines
    story = blocks(lines)
    assert story["r1"][-1] == "Next: nothing; it is served."
    assert story["r2"][-2] == "It is ready, and not served while dora is pinned to another adapter."
    assert story["r2"][-1].startswith("Next: `roster unpin dora`")


def test_a_pin_under_which_nobody_is_served_says_so(path: Path) -> None:
    refused = str(BAD["adapter_digest"])[:12]
    for author, pinned, what in (
        ("iris", refused, "whose state is quarantined"),
        ("jane", "9" * 12, "which jane has not uploaded for tiny"),
    ):
        lines = told(path, author)
        start = lines.index(f"Nobody is served on tiny while it is pinned to adapter {pinned}, {what}.")
        assert lines[1] == f"{author} is not served." and "is pinned to adapter" in lines[start - 1]
        assert lines[start + 1] == f"Next: {ADVICE['pin_not_ready']}"
    for author in ("dora", "kurt"):
        assert not any(line.startswith("Nobody is served") for line in told(path, author)), author


@pytest.mark.real
def test_a_pin_to_what_cannot_be_served_says_so(tmp_path: Path) -> None:
    elsewhere = tmp_path / "c.duckdb"
    sync(elsewhere, [good("dora", 1), good("dora", 2), record("dora", PIN)], bases=(base_text("big"),))
    what = "which cannot be served (base tiny is not registered)"
    pinned = short("dora", 1)
    assert f"Nobody is served on tiny while it is pinned to adapter {pinned}, {what}." in told(
        elsewhere, "dora"
    )
    with open_catalog(elsewhere) as reader:
        [problem] = [row for row in reader.problems() if row.code == "pin_not_ready"]
    assert f"{what}: nobody is served meanwhile" in str(problem.reason)


@pytest.mark.parametrize("author", ["emil", "fred"])
def test_a_retired_author_is_told_so(path: Path, author: str) -> None:
    lines = told(path, author)
    assert lines[1] == f"{author} is not served."
    assert lines[2].startswith(
        f"On tiny, {author} is retired: not served, and uploads are not taken up, by mia on "
    )
    assert lines[-1] == f"Next: `roster release {author}` when it may be served again."


def test_two_bases_are_told_apart_and_one_can_be_asked_for(path: Path) -> None:
    lines = told(path, "gina")
    assert lines[:3] == [
        "gina has uploaded 2 adapters.",
        f"gina is served on tiny by adapter {short('gina', 1)} (run r1).",
        "gina is not served on big.",
    ]
    assert blocks(lines)["r1"][-1] == "Next: nothing; it is served.", "the hold is of the other base"
    tiny = told(path, "gina", base="tiny")
    assert tiny[0] == "gina has uploaded 1 adapter for base tiny."
    assert not any("big" in line for line in tiny)


def test_who_has_uploaded_nothing_but_is_on_hold_has_a_story_too(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROSTER_HOME", str(path.parent))
    path.with_name("catalog.duckdb").symlink_to(path)
    story = Roster(capsys, path.parent)("why", "hans", "--json").document["story"]
    assert story[:3] == [
        "hans has uploaded no adapters.",
        "hans is not served.",
        "On every base, hans is on hold: not served, uploads are judged all the same, by mia on "
        "2026-11-21T09:00:00Z, because: not yet.",
    ]


def test_a_stale_verdict_that_may_not_be_served_says_how_to_renew_it(tmp_path: Path) -> None:
    sync(tmp_path / "c.duckdb", [good("anna", 1)], versions={"scored": "2"}, serve_stale=False)
    lines = told(tmp_path / "c.duckdb", "anna")
    assert lines[1] == "anna is not served."
    assert any(line.startswith("It cannot be served all the same: its verdict is stale") for line in lines)
    assert lines[-1] == f"Next: {ADVICE['stale']}"
