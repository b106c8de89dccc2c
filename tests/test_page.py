"""A run's page: one for every way a run can end, readable at a glance, bounded, and safe to look at."""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock
from uuid import uuid4

import httpx
import pytest
from page_builders import ledger_of, stopped
from pipeline_builders import Desk, OnLoad
from prefect import tags
from prefect.client.orchestration import get_client

import flows.notify
import flows.onboard
import flows.telling
import tasks.page
from flows.telling import read_tail
from storage.claims import open_ledger
from storage.keys import marker_key
from storage.ledger import StepKind, SubmissionRef
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.bpb.measure import Measurement, SubjectBits, UnitBytes
from tasks.page import EngineLog, Surroundings, render_notice, render_page
from tasks.page_scores import draw_scores
from tasks.page_text import plain, table

pytestmark = pytest.mark.real


@pytest.fixture
def pages(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The pages that runs put up, each with its key."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(tasks.page, "create_markdown_artifact", lambda page, key: found.append((key, page)))
    return found


def test_a_ready_run_and_one_that_has_nothing_to_do(desk: Desk, pages: list[tuple[str, str]]) -> None:
    desk.ready("alder")
    ((key, page),) = pages
    staged = next(step for step in desk.ledger("alder").steps if step.kind is StepKind.STAGED)
    assert key == "adapter-alder-run-1"
    upload = desk.store.uri("uploads/alder/run-1/")
    for expected in (
        "# alder/run-1 — ready",
        f"- upload: `{upload}`",
        f"- converted: `{staged.result['uri']}`",
    ):
        assert expected in page
    order = [page.index(f"## {section}") for section in ("Bits per byte", "Checks", "Layout", "Steps")]
    assert order == sorted(order), "what an operator asks first comes first"
    assert "nothing to do" not in page and "What to do" not in page
    picture = svg_of(page)
    assert ">base</text>" in picture and ">control</text>" in picture and ">own</text>" not in picture
    desk.run("alder")
    assert len(pages) == 2 and "This run had nothing to do" in pages[1][1]
    assert svg_of(pages[1][1]) == picture, "the page of a run that skipped everything tells as much"


def test_waits_refusals_and_runs_that_are_elsewhere_have_a_page_too(
    desk: Desk, pages: list[tuple[str, str]]
) -> None:
    upload = desk.submit("alder", desk.adapter("alder"))
    assert desk.run("alder").name == "Waiting: no_heldout"
    assert "# alder/run-1 — waiting: no_heldout" in pages[-1][1] and "roster heldout add" in pages[-1][1]
    ref = SubmissionRef(run="run-1", submission=upload.marker.submission)
    held = open_ledger(desk.store, "alder", upload.adapter_digest, "tiny", ref)
    held.claim("somebody else", 60)
    desk.heldout("alder")
    assert desk.run("alder").name == "Elsewhere"
    assert "# alder/run-1 — elsewhere" in pages[-1][1] and "somebody else" in pages[-1][1]
    held.release()
    desk.store.put(marker_key("alder", "run-1"), b"{}")
    assert desk.run("alder").name == "Refused: corrupt_or_partial"
    assert "# alder/run-1 — refused: corrupt_or_partial" in pages[-1][1]
    assert "docs/why-quarantined.md#corrupt_or_partial" in pages[-1][1]
    desk.store.delete(marker_key("alder", "run-1"))
    desk.run("alder")
    assert "# alder/run-1 — waiting: incomplete_upload" in pages[-1][1]
    assert len(pages) == 4


@pytest.mark.parametrize("refuses", ["tag", "page", "event", "sync"])
def test_what_cannot_be_told_is_a_line_in_the_log_and_ends_no_run(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    """PrefectHQ/prefect#9947, #18546: a server that does not take what only tells of a run made the run itself fail."""

    def refuse(*_: object, **__: object) -> None:
        raise httpx.ReadTimeout("the server\nis busy")

    where = {
        "tag": (flows.telling, "get_client"),
        "page": (tasks.page, "create_markdown_artifact"),
        "event": (flows.notify, "emit_event"),
        "sync": (flows.onboard, "request_sync"),
    }
    monkeypatch.setattr(flows.telling, "flow_run", SimpleNamespace(id=str(uuid4()), tags=["mine"]))
    if refuses != "tag":
        monkeypatch.setattr(flows.telling, "get_client", MagicMock())
    monkeypatch.setattr(*where[refuses], refuse)
    assert desk.ready("alder").name == "Ready"
    lines = [one.getMessage() for one in caplog.records if "goes on without" in one.getMessage()]
    assert lines and all("ReadTimeout: the server is busy" in line for line in lines)
    caplog.clear()
    desk.store.put(marker_key("alder", "run-1"), b"{}")
    assert desk.run("alder").name == "Refused: corrupt_or_partial"
    assert ("goes on without" in caplog.text) == (refuses != "sync"), "which a refused one does not ask for"
    desk.submit("birch", desk.adapter("birch"))
    assert desk.run("birch").name == "Waiting: no_heldout"


def test_a_stop_for_the_engines_sake_shows_the_end_of_its_log(
    desk: Desk,
    pages: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PrefectHQ/prefect#9797, #17879: the last words of what runs beside a flow are what explains its end."""
    log = desk.folder / "engine-tiny.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)) + "torch.OutOfMemoryError: the last words\n")
    monkeypatch.setattr(flows.telling, "engine_log", lambda home, base, url: log)
    gone = EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", "HTTP 500: EngineDeadError")
    desk.engine.on_load = OnLoad("alder@", lambda name: gone)
    assert desk.ready("alder").name == "Stopped: engine_unavailable"
    page = pages[-1][1]
    assert "HTTP 500: EngineDeadError" in page, "what it answered"
    assert f"`{log}`" in page and "torch.OutOfMemoryError: the last words\n```" in page
    assert "line 99" in page and "line 80" not in page
    assert "torch.OutOfMemoryError: the last words" in caplog.text, "also in the run's own log"


def test_an_error_that_no_table_knows_has_a_page_and_surfaces_whole(
    desk: Desk, pages: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(flows.notify, "emit_event", lambda name, *_, **more: told.append(name))
    desk.engine.on_load = OnLoad("alder@", lambda name: ZeroDivisionError("a fault of ours"))
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        desk.ready("alder")
    ((_, page),) = pages
    assert "# alder/run-1 — stopped: internal" in page and "ZeroDivisionError: a fault of ours" in page
    assert told == ["adapter.stopped"]


def test_an_engine_elsewhere_is_named_with_where_it_logs() -> None:
    ledger = ledger_of(stopped(1))
    around = Surroundings("run-9", engine=EngineLog("http://engine:8000", None, ()))
    page = render_page("alder/run-1", ledger, None, None, ledger.steps[-1], around)
    assert "`http://engine:8000`" in page and "docker compose logs engine" in page
    full = ledger_of(stopped(1, "disk_full"))
    assert "## Engine" not in render_page("alder/run-1", full, None, None, full.steps[-1], around)


def test_a_page_stays_small_however_long_its_story() -> None:
    """PrefectHQ/prefect#18546, #9847: what is handed to the server has a limit, and beyond it a log stays empty."""
    keys = ", ".join(
        f"model.layers.{layer}.mlp.experts.{e}.lora_B" for layer in range(48) for e in range(128)
    )
    assert len(keys) > 200_000
    problem = {"code": "missing_tensor", "where": None, "message": keys}
    told = {"code": "missing_tensor", "codes": ["missing_tensor"], "reason": keys, "problems": [problem] * 20}
    steps = [stopped(n, flow_run=f"run-{n}") for n in range(500)] + [stopped(500, result=told)]
    ledger = ledger_of(*steps)
    around = Surroundings("run-500", "s3://b/uploads/alder/run-1/", "https://docs.example")
    page = render_page("alder/run-1", ledger, None, None, steps[-1], around)
    assert len(page) < 60_000
    assert "The last 40 of 501" in page and "earlier runs (500)" in page
    links = re.findall(r"\(/runs/flow-run/(run-\d+)\)", page)
    assert links == [f"run-{n}" for n in range(499, 489, -1)], "the newest first, itself left out"
    assert "(https://docs.example/why-quarantined.md#missing_tensor)" in page


def test_the_picture_of_many_texts_is_bounded_and_says_who_is_worse() -> None:
    units = tuple(UnitBytes(f"u{n}", 100 + n) for n in range(1_000))
    own = tuple(200.0 + n for n in range(1_000))
    subjects = [SubjectBits("base", tuple(2 * b for b in own)), SubjectBits("own", own)]
    subjects += [SubjectBits(f"wrong:author-{w}", tuple(b + 100 + w for b in own)) for w in range(40)]
    better = SubjectBits("control", tuple(b - (50 if n < 100 else -50) for n, b in enumerate(own)))
    again = SubjectBits("base_again", own)
    measured = Measurement(units, (), (*subjects, better, again), tokens=1, seconds=1.0)
    svg = draw_scores("alder/run-1", measured)
    assert svg is not None and len(base64.b64encode(svg.encode())) < 80_000
    assert svg.count("</text>") == 2 + 24 + 59, "title, legend, 24 subjects, 59 columns of 17 texts"
    assert ">wrong:author-22</text>" in svg and "author-23<" not in svg, "the nearest ones stay"
    assert "base_again" not in svg and ">u17 +16</text>" in svg
    red = [fill for fill in re.findall(r'fill="#(\w{6})"', svg) if int(fill[:2], 16) > int(fill[4:], 16) + 40]
    assert red, "where own is worse a cell is red"
    assert draw_scores("alder/run-1", Measurement(units, (), (subjects[0],), tokens=1, seconds=1.0)) is None


def test_a_cell_of_the_picture_is_the_texts_together() -> None:
    """Neighbours are pooled by their bytes: not the mean of their ratios."""
    units = tuple(UnitBytes(f"u{n}", 10 if n % 2 else 90) for n in range(120))
    own = SubjectBits("own", (100.0,) * 120)
    base = SubjectBits("base", tuple(130.0 if n % 2 else 100.0 for n in range(120)))
    svg = draw_scores("a/r", Measurement(units, (), (base, own), tokens=1, seconds=1.0))
    assert svg is not None
    told = re.search(r"up to (\d\.\d+) bits", svg)
    assert told is not None and math.isclose(float(told[1]), 30 / 100), "the mean of 0 and 3 would be 1.5"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)>"),
        ("![x](https://evil/p.png)", "!\\[x]\\(https://evil/p.png)"),
        ("a\n# heading\n| row |", "a # heading | row |"),
        ("x" * 5_000, "x" * 2_000 + "… (3000 more letters)"),
    ],
)
def test_names_out_of_an_adapter_stay_text(text: str, shown: str) -> None:
    assert plain(text) == shown
    assert table(["a"], [[text]]).splitlines()[2] == f"| {shown} |".replace(" | row | ", " \\| row \\| ")
    notice = render_notice("alder/run-1", "refused", text, None, Surroundings("run-1"))
    assert notice == f"# alder/run-1 — refused\n\n{shown}\n"


def test_names_that_we_do_not_take_stay_text_too() -> None:
    """They come from keys in the store, and a page tells of the upload that bears one."""
    around = Surroundings(flow_run="f", upload_uri="s3://b/uploads/ada/<img src=x>/")
    page = render_notice("ada/<img src=x>", "refused: ambiguous_upload", "as <b>", None, around)
    assert "<" not in page and "ada/&lt;img src=x>" in page


def test_the_tail_of_a_log_that_is_not_there_or_is_no_text(tmp_path: Path) -> None:
    assert read_tail(tmp_path / "none.log") == ()
    (tmp_path / "odd.log").write_bytes(b"\xff\xfe\n" + b"y" * 50_000 + b"\nend\n")
    tail = read_tail(tmp_path / "odd.log")
    assert tail[-1] == "end" and sum(map(len, tail)) <= 16_000


@pytest.mark.real
def test_a_run_is_tagged_with_author_and_base_and_keeps_other_tags(prefect_desk: Desk) -> None:
    with tags("nightly"):
        prefect_desk.ready("hornbeam")
    prefect_desk.run("nobody")
    with get_client(sync_client=True) as client:
        runs = [run for run in client.read_flow_runs() if run.name in {"hornbeam/run-1", "nobody/run-1"}]
    found = {run.name: set(run.tags) for run in runs}
    named = {run.name: run.state.name for run in runs if run.state}
    assert found["hornbeam/run-1"] == {"nightly", "author:hornbeam", "base:tiny"}
    assert found["nobody/run-1"] == {"author:nobody"}, "what has no marker has no base"
    assert named == {"hornbeam/run-1": "Ready", "nobody/run-1": "Waiting: incomplete_upload"}


def svg_of(page: str) -> str:
    found = re.search(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", page)
    assert found is not None
    return base64.b64decode(found[1]).decode()
