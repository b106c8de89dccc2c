"""The report's page holds what the ledgers say, nothing in it is markup, and an anonymous one names nobody."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from catalog_builders import sync
from cli_builders import Roster
from ledger_builders import (
    Document,
    base_text,
    digest,
    halted,
    inspected,
    ledger,
    ready_ledger,
    refused,
    whole_path,
)
from report_builders import Page, read_page
from store_builders import failing, memory_store, with_faults

from roster.catalog import open_catalog
from roster.incoming import LedgerText
from roster.reader import CatalogReader
from roster.report_names import Names
from storage.documents import put_document, utc_now
from storage.errors import StoreUnavailable, UnknownBase
from storage.keys import newest_matrix_key
from storage.matrices import MatrixAdapter, MatrixDocument, MatrixShare, MatrixText
from storage.s3 import S3Store
from tasks.reporting import write_report

pytestmark = pytest.mark.real

DOCS = Path(__file__).parent.parent / "docs" / "report.md"
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- {{script}} & `x` \u2028\u202e\x00"
)
WHY = "she asked <b>twice</b>"
WORDS = (
    "ash",
    "bay",
    "cedar",
    "elm",
    "fir",
    "zeno",
    "r1",
    "r7",
    "mira",
    "asked",
    "alert",
    "because",
    "s3://",
)


def record(author: str, act: str, base: str | None = None) -> LedgerText:
    event = {
        "act": act,
        "base": base,
        "adapter_digest": None,
        "who": "mira",
        "at": "2026-11-21T09:00:00Z",
        "why": WHY,
    }
    body = json.dumps({"schema": 1, "author": author, "events": [event]})
    return LedgerText(f"ledger/{author}/_author.json", digest(body)[:32], body)


def documents() -> list[Document | LedgerText]:
    """ash served twice over; bay served by an older one; cedar refused; elm waits; fir held; bay's other base."""
    hostile = refused("inspected", "layout_conflict", minute=9)
    hostile["result"]["reason"] = HOSTILE
    return [
        ready_ledger("ash", "old", number=1),
        ready_ledger("ash", "new", number=2, own=2.0625, wrong={"zeno": 2.3125, "bay": 2.25}),
        ready_ledger("bay", "old", number=3, own=2.1875),
        ledger("bay", "new", [inspected(), hostile], runs={"r7": 7}),
        ledger("cedar", "a", [hostile], runs={"r4": 4}),
        ledger("elm", "a", [inspected(), halted("scored", "waiting", "no_heldout")], runs={"r5": 5}),
        ready_ledger("fir", "a", number=6),
        record("fir", "hold"),
        ledger(
            "bay", "else", whole_path("bay", digest("bay else"), own=1.5), runs={"r8": 8}, base="other-base"
        ),
    ]


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "catalog.duckdb"
    sync(path, documents(), bases=(base_text("tiny"), base_text("other-base")))
    return path


@pytest.fixture
def reader(catalog: Path) -> Iterator[CatalogReader]:
    with open_catalog(catalog) as reader:
        yield reader


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as store:
        yield store


def write(reader: CatalogReader, folder: Path, **options: Any) -> Page:
    out = folder / "roster.html"
    written = write_report(reader, out, **{"store": None, **options})
    assert written.bytes == out.stat().st_size
    assert [path.name for path in folder.iterdir() if "roster.html" in path.name] == ["roster.html"]
    return read_page(out)


def test_index_says_what_the_ledgers_say(reader: CatalogReader, tmp_path: Path) -> None:
    rows = {(row["author"], row["base"]): row for row in write(reader, tmp_path).rows("authors")}
    assert {key: (row["standing"], row["newer"]) for key, row in rows.items()} == {
        ("ash", "tiny"): ("served", None),
        ("bay", "tiny"): ("served", "quarantined"),
        ("bay", "other-base"): ("served", None),
        ("cedar", "tiny"): ("quarantined", None),
        ("elm", "tiny"): ("waiting", None),
        ("fir", "tiny"): ("held", None),
    }
    ash = rows["ash", "tiny"]
    assert (ash["own"], ash["base_bpb"], ash["margin"], ash["wrongs"]) == (2.0625, 2.375, 0.1875, 2)
    assert (ash["lower"], ash["upper"]) == (0.15625, 0.21875)
    assert (ash["adapters"], ash["newest_at"]) == (2, "2026-11-01T00:02:07Z")
    assert rows["bay", "tiny"]["own"] == 2.1875  # the served one's, not that of the newer refused one
    assert rows["cedar", "tiny"]["own"] is None and rows["cedar", "tiny"]["code"] == "layout_conflict"


def test_waiting_refused_and_held_are_told_with_their_reasons(reader: CatalogReader, tmp_path: Path) -> None:
    page = write(reader, tmp_path)
    found = {(row["author"], row["kind"], row["code"]): row for row in page.rows("concerns")}
    assert set(found) == {
        ("bay", "quarantined", "layout_conflict"),
        ("cedar", "quarantined", "layout_conflict"),
        ("elm", "waiting", "no_heldout"),
    }
    assert found["bay", "quarantined", "layout_conflict"]["served_instead"]
    assert not found["elm", "waiting", "no_heldout"]["served_instead"]
    assert not found["cedar", "quarantined", "layout_conflict"]["served_instead"]
    assert found["elm", "waiting", "no_heldout"]["reason"] == "because of no_heldout"
    assert [(row["author"], row["act"], row["who"], row["why"]) for row in page.rows("acts")] == [
        ("fir", "held", "mira", WHY)
    ]
    assert "roster heldout add" in page.data["advice"]["no_heldout"]


def test_details_are_all_of_an_author(reader: CatalogReader, tmp_path: Path) -> None:
    new, old = write(reader, tmp_path).adapters("ash")
    assert (new["served"], old["served"]) == (True, False)
    assert (new["adapter_digest"], old["run"]) == (digest("ash new"), "r1")
    assert {row["subject"]: row["bpb"] for row in new["scores"]} == {
        **{"own": 2.0625, "base": 2.375, "base_again": 2.375, "control": 2.25},
        **{"wrong:zeno": 2.3125, "wrong:bay": 2.25},
    }
    [control] = [row for row in new["scores"] if row["subject"] == "control"]
    assert (control["difference"], control["difference_lower"], control["difference_upper"]) == (
        0.125,
        0.0625,
        0.1875,
    )
    assert [(row["parameter"], row["source"], row["agrees"]) for row in new["evidence"]] == [
        ("mlp.experts.down_proj", "marker", True),
        ("mlp.experts.gate_up_proj", "training", True),
        ("mlp.experts.gate_up_proj", "fingerprint", True),
    ]
    assert [(row["name"], row["passed"]) for row in new["checks"]] == [
        ("round_trip", True),
        ("coverage", True),
    ]
    assert [row["position"] for row in new["steps"]] == [6, 5, 4, 3, 2, 1, 0]
    assert {row["seconds"] for row in new["steps"]} == {42}
    assert [(row["outcome"], row["latest"]) for row in new["verdicts"]] == [("ready", True)]


def test_many_authors_are_found_in_their_blocks_and_many_steps_are_cut(tmp_path: Path) -> None:
    names = [f"author-{n:03}" for n in range(70)]
    texts = [ledger(name, "a", [inspected()], runs={"r1": 1}) for name in names[2:]]
    waits = ledger(names[1], "b", [halted("scored", "waiting", "no_heldout")], runs={"r2": 2})
    texts += [ready_ledger(names[1], "a", number=1), waits]
    tries = [halted("scored", "stopped", "engine_unavailable", minute=n) for n in range(57)]
    sync(tmp_path / "catalog.duckdb", [*texts, ledger(names[0], "a", tries, runs={"r1": 1})])
    with open_catalog(tmp_path / "catalog.duckdb") as reader:
        page = write(reader, tmp_path)
    where = {row["author"]: row["block"] for row in page.rows("authors")}
    assert list(where) == names
    for number, block in enumerate(page.blocks()):
        assert [entry[0] for entry in block] == [name for name in names if where[name] == number]
    assert len(page.blocks()) == 2
    [waiting] = [row for row in page.rows("concerns") if row["kind"] == "waiting"]
    assert waiting["author"] == names[1] and waiting["served_instead"]
    [adapter] = page.adapters(names[0])
    assert [row["position"] for row in adapter["steps"]] == list(range(56, 16, -1))


def test_nothing_from_anyone_is_markup(reader: CatalogReader, tmp_path: Path) -> None:
    page = write(reader, tmp_path)
    assert HOSTILE in [row["reason"] for row in page.rows("concerns")]
    assert page.adapters("cedar")[0]["reason"] == HOSTILE
    assert WHY in [row["why"] for row in page.rows("acts")]
    blocks = len(page.blocks())
    assert page.elements["script"] == blocks + 2 and "img" not in page.elements and "b" not in page.elements
    [(_, _, script)] = [one for one in page.scripts if one[1] is None]
    [style] = page.styles
    policy = page.metas["Content-Security-Policy"]
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    assert allowed == [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)
    ]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|fetch\(", script)
    assert set(re.findall(r"https?://[\w./]*", script + style)) == {"http://www.w3.org/2000/svg"}
    assert "src=" not in re.sub(r"<script.*?</script>", "", page.source, flags=re.DOTALL)


def test_without_scripts_it_still_says_who_is_served(reader: CatalogReader, tmp_path: Path) -> None:
    text = write(reader, tmp_path).text
    assert "3 of 6 are served" in text
    assert "cedar" in text and "layout_conflict" in text and "2.0625" in text


def test_anonymous_names_nobody_and_keeps_the_figures(reader: CatalogReader, tmp_path: Path) -> None:
    named, page = write(reader, tmp_path), write(reader, tmp_path, anonymous=True)
    everything = page.everything()
    found = [
        word for word in WORDS if re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", strip_code(everything))
    ]
    assert found == []
    assert not re.search(r"[0-9a-f]{64}", everything)
    assert len(re.findall(r"\bash\b", named.everything())) > 3

    def figures(one: Page) -> list[tuple[Any, ...]]:
        rows = one.rows("authors")
        return sorted(str((row["standing"], row["own"], row["margin"], row["code"])) for row in rows)

    assert figures(page) == figures(named)
    [ash] = [row["author"] for row in page.rows("authors") if row["own"] == 2.0625]
    subjects = [row["subject"] for row in page.adapters(ash)[0]["scores"]]
    assert sorted(subjects) == ["base", "base_again", "control", "own", "wrong:other 1", "wrong:other 2"]


def strip_code(source: str) -> str:
    """The page without our own script, style and advice, which may use these words."""
    source = re.sub(r'<script>"use strict".*?</script>|<style>.*?</style>', "", source, flags=re.DOTALL)
    return re.sub(r'"advice":\{.*?\}', "", source)


def test_numbers_of_an_anonymous_page_are_drawn_anew() -> None:
    drawn = {Names(["ash", "bay", "cedar", "elm"], anonymous=True).name("ash") for _ in range(60)}
    assert drawn == {"author-1", "author-2", "author-3", "author-4"}


def test_one_base_alone(reader: CatalogReader, tmp_path: Path) -> None:
    page = write(reader, tmp_path, base="other-base")
    assert [(row["author"], row["base"]) for row in page.rows("authors")] == [("bay", "other-base")]
    assert [adapter["base"] for adapter in page.adapters("bay")] == ["other-base"]
    assert page.rows("concerns") == []
    with pytest.raises(UnknownBase, match=r"other' OR"):
        write_report(reader, tmp_path / "no.html", store=None, base="other' OR 'a' = 'a")
    assert not (tmp_path / "no.html").exists()


def share(right: int, total: int) -> MatrixShare:
    return MatrixShare(right=right, total=total, share=right / total, interval=(0.25, 0.75))


def matrix_text(ref: str, owner: str, base: float, bpb: dict[str, float | None]) -> MatrixText:
    return MatrixText(
        ref=ref,
        text=digest(ref),
        owners=(owner,),
        units=3,
        bytes=90,
        base_bpb=base,
        bpb=bpb,
        right=share(2, 3),
    )


def put_matrix(store: S3Store) -> None:
    document = MatrixDocument(
        base="tiny",
        space="0" * 16,
        matrix_id="1" * 16,
        engine_id="2" * 16,
        sample=None,
        whole=True,
        adapters=tuple(MatrixAdapter(author=name, output_digest=digest(name)) for name in ("bay", "ash")),
        texts=(
            matrix_text("bay/zeno-main", "bay", 2.5, {"bay": 2.0, "ash": None}),
            matrix_text("ash/main", "ash", 2.375, {"bay": 2.125, "ash": 2.25}),
        ),
        sets=share(1, 2),
        units=share(4, 6),
        misattributed=("ash/main",),
        choices=2.0,
        pairs=(),
        generated=None,
        left_out=(),
        cells=5,
        tokens=100,
        seconds=1.5,
        measured_at=utc_now(),
        tool_version="0",
    )
    put_document(store, newest_matrix_key("tiny"), document)


def test_newest_matrix_is_there(reader: CatalogReader, store: S3Store, tmp_path: Path) -> None:
    put_matrix(store)
    page = write(reader, tmp_path, store=store)
    base, _, engine, adapters, texts, said = page.unpacked("m0")
    assert (page.data["matrices"], page.data["left_out"]) == (1, [])
    assert (base, engine, adapters) == ("tiny", "2" * 16, ["ash", "bay"])
    assert texts == [
        ["ash/main", ["ash"], 2.375, [2.25, 2.125]],
        ["bay/zeno-main", ["bay"], 2.5, [None, 2.0]],
    ]
    assert "1 of 2 right" in said[0] and "1 of 2 texts" in said[2]
    anonymous = write(reader, tmp_path, store=store, anonymous=True).unpacked("m0")
    assert "zeno" not in json.dumps(anonymous) and "ash" not in json.dumps(anonymous)


def test_a_store_that_does_not_answer_costs_the_matrices_alone(
    reader: CatalogReader, store: S3Store, tmp_path: Path
) -> None:
    down = with_faults(store, get_object=failing(StoreUnavailable("read", "matrices/", "connection refused")))
    page = write(reader, tmp_path, store=down)
    assert page.data["left_out"] == ["The matrices are not here: the object store did not answer."]
    assert len(page.rows("authors")) == 6


def test_nothing_is_left_where_it_cannot_be_written(reader: CatalogReader, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_report(reader, tmp_path / "absent" / "roster.html", store=None)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_report(reader, tmp_path / "taken", store=None)
    assert sorted(path.name for path in tmp_path.iterdir() if "taken" in path.name) == ["taken"]


def test_every_documented_command(
    catalog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("ROSTER_", "PREFECT_API")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ROSTER_HOME", str(catalog.parent))
    roster = Roster(capsys, catalog.parent)
    text = DOCS.read_text("utf-8")
    lines = re.findall(r"^roster report .*$", text, re.MULTILINE)
    assert len(lines) == 3
    served = []
    for line in lines:
        ran = roster.line(f"{line} --json")
        assert ran.code == 0, ran.err
        served.append((ran.document["served"], ran.document["authors"]))
        assert Path(ran.document["path"]).stat().st_size == ran.document["bytes"]
    assert served == [(3, 6), (2, 5), (3, 6)]
    ran = roster("report", "roster.html")
    assert "3 of 6 served" in ran.out and "no object store is set" in ran.err
    assert roster("report", "roster.html", "--base", "absent").code == 2
    assert roster("report", tmp_path / "absent" / "roster.html").code == 2
