"""The record of a check as a table for people: the same on a terminal and on a run's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHECK_COLUMNS = ["result", "check", "about", "found", "numbers"]
ERROR_COLUMNS = ["projection", "deltas", "differing", "median error", "99 %", "largest", "worst"]

_FEW = 5
"""So many numbers stand in a table; the record has all of them."""


def check_rows(record: Mapping[str, Any], *, passed: str, failed: str) -> list[list[str]]:
    """A row for each check that was made, by `CHECK_COLUMNS`; records of earlier code have less to tell."""
    return [
        [
            passed if one["passed"] else failed,
            one["name"],
            one.get("about", ""),
            one["detail"],
            _say_figures(one.get("figures", {})),
        ]
        for one in record["checks"]
    ]


def error_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """The distribution of the deltas' relative errors, a row for each projection; nothing but for a full check."""
    if record.get("depth") != "full":
        return []
    return [
        [
            one["projection"],
            str(one["pairs"]),
            str(one["differing"]),
            *(_say_error(one[name]) for name in ("median", "p99", "largest")),
            "-" if one["largest"] == 0 else one["worst"],
        ]
        for one in record["errors"]
    ]


def closing_lines(record: Mapping[str, Any]) -> list[str]:
    """What stands below the table: what was not made, how sure the probes are, notes, and last what all of it shows."""
    if "depth" not in record:
        return []
    lines = []
    if record["not_made"]:
        lines.append(f"not made at depth {record['depth']}: {', '.join(record['not_made'])}")
    probes = record["probes"]
    if record["depth"] != "full":
        lines.append(
            f"probes: seed {probes['seed']}; a damage of one delta by {probes['damage']:g} of its norm or more would "
            f"have been missed with a probability of at most {probes['miss_probability']:.1g}"
        )
    return [*lines, *(f"note: {note}" for note in record["notes"]), record["proof"]]


def _say_error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}"


def _say_figures(figures: Mapping[str, float | None]) -> str:
    """Return the first numbers that are not zero: those that are say that nothing is wrong."""
    said = [
        f"{name.replace('_', ' ')} " + ("not finite" if value is None else f"{value:.6g}")
        for name, value in figures.items()
        if value != 0
    ]
    return ", ".join(said[:_FEW])
