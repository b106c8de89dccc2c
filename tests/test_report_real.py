"""The report in a real browser: sort, search, open an author, read a cell, print; and nothing leaves the page."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, FLAGS
from catalog_builders import sync
from ledger_builders import digest, ledger, refused, whole_path
from playwright.sync_api import Browser, Page, expect, sync_playwright

from roster.catalog import open_catalog
from roster.report import Report, render_report
from roster.report_details import pack_details
from roster.report_index import list_names, read_index
from roster.report_rows import ReportMatrix, ReportText

pytestmark = pytest.mark.real

AUTHORS = 230
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"> `roster why` \u202etxet"


def own_bpb(number: int) -> float:
    return 1.0 + number / 1024


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Authors that are served, each with a margin of its own, and one that is refused with hostile words."""
    folder = tmp_path_factory.mktemp("report")
    served = []
    for n in range(AUTHORS):
        author, own = f"author-{n:03}", own_bpb(n)
        margin = 0.0625 + (n * 37 % AUTHORS) / 4096
        steps = whole_path(author, digest(author), own=own, wrong={"zeno": own + margin})
        served.append(ledger(author, "a", steps, runs={"r1": n}))
    bad = refused("inspected", "layout_conflict", minute=9)
    bad["result"]["reason"] = HOSTILE
    sync(folder / "catalog.duckdb", [*served, ledger("zeno", "a", [bad], runs={"r2": 999})])
    names3 = ("author-000", "author-001", "author-002")
    matrix = ReportMatrix(
        "tiny",
        "2026-11-20T12:00:00Z",
        "2" * 16,
        names3,
        tuple(
            ReportText(
                f"{one}/main", (one,), 2.5, tuple((other, 1.5 if one == other else 2.0) for other in names3)
            )
            for one in names3
        ),
        ("Held-out sets: 3 of 3 right.",),
    )
    with open_catalog(folder / "catalog.duckdb") as reader:
        names = list_names(reader, None, anonymous=False)
        index = read_index(reader, None, names)
        page = render_report(
            Report(index, (matrix,), (), None, False, "0"), pack_details(reader, None, index.order, names)
        )
    (folder / "roster.html").write_text(page, "utf-8")
    return folder / "roster.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = shutil.which(CHROMIUM)
    if found is None:
        message = f"no {CHROMIUM} on PATH: nobody opens the report here (apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def faults() -> list[str]:
    """What the browser complained of, and every address that the page asked for."""
    return []


@pytest.fixture
def page(chromium: Browser, report: Path, faults: list[str]) -> Iterator[Page]:
    yield from opened(chromium, report, faults, width=1440, height=900)


@pytest.fixture
def phone(chromium: Browser, report: Path, faults: list[str]) -> Iterator[Page]:
    yield from opened(chromium, report, faults, width=390, height=844)


def opened(chromium: Browser, report: Path, faults: list[str], *, width: int, height: int) -> Iterator[Page]:
    context = chromium.new_context(viewport={"width": width, "height": height})
    page = context.new_page()
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.append(request.url))
    page.goto(report.as_uri())
    yield page
    assert page.title() == "Adapter roster"
    assert faults == [report.as_uri()], "the page itself, and nothing else, was asked for"
    context.close()


def shown(page: Page) -> list[str]:
    return page.locator("#table tbody th").all_inner_texts()


def test_search_sort_and_more_rows(page: Page) -> None:
    expect(page.locator("#tiles")).to_contain_text(f"{AUTHORS}served of {AUTHORS + 1}", use_inner_text=False)
    assert shown(page)[:2] == ["author-000", "author-001"]
    page.get_by_role("button", name="Margin", exact=True).click()
    by_margin = sorted(range(AUTHORS), key=lambda n: n * 37 % AUTHORS)
    assert shown(page)[:5] == [f"author-{n:03}" for n in by_margin[:5]]
    page.get_by_role("button", name="Margin", exact=True).click()
    assert shown(page)[0] == f"author-{by_margin[-1]:03}"
    page.get_by_role("searchbox").fill("layout_conflict")
    assert shown(page) == ["zeno"]
    page.get_by_role("searchbox").fill("author 12")
    assert sorted(shown(page)) == [f"author-{n:03}" for n in (12, *range(112, 113), *range(120, 130), 212)]
    page.get_by_role("searchbox").fill("")
    page.locator("#filter").select_option("not_served")
    assert shown(page) == ["zeno"]
    page.locator("#filter").select_option("all")
    page.get_by_role("button", name="Author", exact=True).click()
    for _ in range(4):
        if page.locator("#more").is_visible():
            page.locator("#more").scroll_into_view_if_needed()
            page.wait_for_timeout(200)
    assert shown(page) == [*(f"author-{n:03}" for n in range(AUTHORS)), "zeno"]


def test_open_an_author_and_come_back(page: Page, tmp_path: Path) -> None:
    page.get_by_role("searchbox").fill("author-117")
    page.locator("#table").get_by_role("link", name="author-117").click()
    author = page.locator("#author")
    expect(author).to_contain_text(f"{own_bpb(117):.4f}")
    expect(author).to_contain_text("Scores, bits per byte")
    expect(author).to_contain_text("unsloth_fixed, no marker")
    expect(author).to_contain_text(digest("author-117"))
    author.get_by_text("History: 7 steps").click()
    expect(author.get_by_role("cell", name="inspected")).to_be_visible()
    page.screenshot(path=tmp_path / "author.png", full_page=True)
    page.go_back()
    expect(page.locator("#overview")).to_be_visible()
    assert shown(page) == ["author-117"]


def test_hostile_words_are_words(page: Page) -> None:
    page.locator("#concerns").get_by_role("link", name="zeno").click()
    expect(page.locator("#author")).to_contain_text("<img src=x onerror=\"document.title='taken'\">")
    expect(page.locator("#author code", has_text="roster why")).to_have_count(1)
    assert page.locator("img").count() == 0
    page.evaluate("location.hash = '#a/' + encodeURIComponent('__proto__<b>')")
    expect(page.locator("#author")).to_contain_text("no such author")


def test_a_cell_of_the_matrix_is_read(page: Page, tmp_path: Path) -> None:
    picture = page.locator("svg.heatmap")
    picture.scroll_into_view_if_needed()
    cell = picture.locator("text.number").nth(1)
    cell.hover(force=True)
    expect(page.locator(".told")).to_have_text(
        "author-000 on author-001/main: 2.0000 bits per byte, +0.5000 against own."
    )
    page.screenshot(path=tmp_path / "matrix.png")


def test_a_phone_needs_no_sideways_scrolling(phone: Page, tmp_path: Path) -> None:
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    phone.screenshot(path=tmp_path / "phone.png")
    phone.locator("#sort").select_option(label="Smallest margin first")
    assert shown(phone)[0] == "author-000"
    phone.locator("#table").get_by_role("link", name="author-000").click()
    expect(phone.locator("#author")).to_contain_text("Scores, bits per byte")
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    phone.screenshot(path=tmp_path / "phone-author.png", full_page=True)


def test_paper_has_every_row_and_no_button(page: Page, tmp_path: Path) -> None:
    drawn = len(shown(page))
    assert drawn < AUTHORS
    pdf = page.pdf(path=tmp_path / "roster.pdf", prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 5
    assert len(shown(page)) == AUTHORS + 1
    page.emulate_media(media="print")
    expect(page.locator("#tools")).to_be_hidden()
    page.set_viewport_size({"width": 703, "height": 1000})  # A4 within its margins
    assert page.evaluate("document.documentElement.scrollWidth") == 703
