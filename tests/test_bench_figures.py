"""The page of all figures is made of what is saved, and tells what was missed; lines and plot of cost against size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import all as bench_all
from bench import size
from bench.__main__ import BENCHES
from bench.figures import PAGE, ROWS, format_page, list_rows, read_results
from bench.plot import format_plot

SVG = "{http://www.w3.org/2000/svg}"


def test_the_page_is_what_the_saved_results_say() -> None:
    assert PAGE.read_text("utf-8") == format_page(read_results()), "./run bench all --table writes it"


def test_every_bench_is_run_and_those_of_the_table_are_benches() -> None:
    assert set(bench_all.MINUTES) == set(BENCHES) - {"all"}
    assert set(ROWS) <= set(bench_all.MINUTES)


def test_a_goal_that_is_missed_is_told() -> None:
    results = read_results()
    worse = json.loads(json.dumps(results["convert"]))
    worse["formats"]["per-expert"]["ratio_to_cp"] = 1.31

    def ratio(figures: Any) -> tuple[str, ...]:
        [row] = [cells for _, cells in list_rows({"convert": figures}) if cells[0] == "the same, as a ratio"]
        return row

    assert ratio(results["convert"])[-1] == "yes"
    assert ratio(worse)[1:] == ("1.31", "by hand 3.6", "1.3 of `cp`", "**no**")


def test_what_was_not_measured_is_named() -> None:
    page = format_page({name: one for name, one in read_results().items() if name != "fuzz"})
    [line] = [line for line in page.splitlines() if line.startswith("Not measured yet")]
    assert "`fuzz`" in line and "| `fuzz`" not in page


def test_the_dry_run_names_benches_and_minutes_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = PAGE.read_bytes()
    figures = bench_all.run(["--dry-run", "--only", "fuzz", "convert"])
    assert figures == {"benches": {"convert": {"minutes": 3}, "fuzz": {"minutes": 7}}, "minutes": 10}
    assert "2 benches, about 10 minutes: convert, fuzz" in capsys.readouterr().err
    assert PAGE.read_bytes() == before


def test_a_line_is_found_and_what_is_none_is_told() -> None:
    straight = size.fit_line([(0.5, 2.0), (1.0, 3.0), (3.0, 7.0)])
    assert straight == {"intercept_s": 1.0, "s_per_gb": 2.0, "explained": 1.0}
    squares = size.fit_line([(0.0, 0.0), (1.0, 1.0), (2.0, 4.0), (4.0, 16.0), (8.0, 64.0)])
    assert 0.9 < squares["explained"] < 0.98


def test_the_plot_has_each_point_in_its_place() -> None:
    drawn = ElementTree.fromstring(
        format_plot({"a < b": ([(1, 10), (2, 20)], (0.0, 10.0))}, x="GB", y="seconds")
    )
    first, second, _legend = drawn.findall(f"{SVG}circle")
    origin, top = 60.0, 20.0
    assert [float(first.attrib[key]) for key in ("cx", "cy")] == [origin + 245, 370 - 175]
    assert [float(second.attrib[key]) for key in ("cx", "cy")] == [550.0, top]
    assert "a < b" in [text.text for text in drawn.findall(f"{SVG}text")]


@pytest.mark.real
def test_sizes_are_measured_and_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(size, "RESULT", tmp_path / "size.json")
    monkeypatch.setattr(size, "PLOT", tmp_path / "plot.svg")
    figures = size.run(
        ["--turns", "1", "--layers", "24", "--experts", "32", "--folder", str(tmp_path), "--save"]
    )
    assert [(one["layers"], one["experts"]) for one in figures["points"]] == [(24, 8), (24, 32)]
    small, large = figures["points"]
    # (E·r)·(2H + 3I) numbers of two bytes a layer.
    assert round(large["gb_in"], 2) == round(24 * 32 * 16 * (2 * 2048 + 3 * 768) * 2 / 1e9, 2)
    assert all(large[part] > 0 and small[part] > 0 for part in size.PARTS)
    assert json.loads((tmp_path / "size.json").read_text()) == figures
    assert len(ElementTree.parse(tmp_path / "plot.svg").findall(f"{SVG}circle")) == 2 * 4 + 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.svg", "size.json"]
