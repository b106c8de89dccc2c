"""The scores on a run's page: the table of bits per byte, each held-out set by itself, and the picture of all texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from storage.ledger import Step
from tasks.bpb.heatmap import Heatmap, as_data_uri, draw_heatmap
from tasks.bpb.measure import BASE, CONTROL, OWN, WRONG_PREFIX, Measurement, SubjectBits
from tasks.page_text import table
from tasks.stored_scores import recorded_measurement

_COLUMNS = 60
"""So many columns at most: more texts than that share them, neighbours together."""

_ROWS = 24
"""So many subjects at most, those that come nearest to own."""


def scores_section(label: str, verdict: Step, scored: Step | None) -> str:
    """The scores of a verdict as markdown; the picture only where the scored step that it rests on is given."""
    record: Any = verdict.result
    notes = "".join(f"\n- {note}" for note in record["notes"])
    confidence = record["thresholds"]["confidence"]
    parts = [
        "## Bits per byte",
        f"{record['units']} units, {record['bytes']} bytes; lower is better.",
        table(["scored with", "bits per byte", f"minus own [{confidence:.0%}]"], list(_score_rows(record))),
        *_picture(label, scored),
        *_sets(record),
        *([notes] if notes else []),
    ]
    return "\n\n".join(parts)


def draw_scores(label: str, measured: Measurement) -> str | None:
    """What each text says, as SVG, a row for each subject, a column for each text or a few; None without own.

    A cell is the bits per byte more than own has on the same text: blue is worse than own, red is better.
    """
    bits = {column.label: column.bits for column in measured.scores}
    others = [one for one in measured.scores if one.label != OWN and _is_compared(one)]
    if OWN not in bits or not others or not measured.units:
        return None
    size = math.ceil(len(measured.units) / _COLUMNS)
    groups = [
        range(start, min(start + size, len(measured.units))) for start in range(0, len(measured.units), size)
    ]
    by_distance = sorted(others, key=lambda one: math.fsum(one.bits))
    near = {one.label for one in by_distance[:_ROWS]}
    shown = [one for one in others if one.label in near]

    def more(subject: SubjectBits, group: range) -> float:
        byte_count = sum(measured.units[n].byte_count for n in group)
        return math.fsum(subject.bits[n] - bits[OWN][n] for n in group) / byte_count

    first = (measured.units[group.start].id for group in groups)
    heatmap = Heatmap(
        rows=tuple(one.label for one in shown),
        columns=tuple(
            name if len(group) == 1 else f"{name} +{len(group) - 1}"
            for name, group in zip(first, groups, strict=True)
        ),
        margins=tuple(tuple(more(one, group) for group in groups) for one in shown),
        own=frozenset(),
    )
    return draw_heatmap(heatmap, title=f"{label}: each text against own")


def _picture(label: str, scored: Step | None) -> Iterator[str]:
    svg = draw_scores(label, recorded_measurement(scored)) if scored is not None else None
    if svg is not None:
        yield f"![each text against own]({as_data_uri(svg)})"


def _is_compared(subject: SubjectBits) -> bool:
    """Base again only shows how steady the engine was."""
    return subject.label in (BASE, CONTROL) or subject.label.startswith(WRONG_PREFIX)


def _score_rows(record: dict[str, Any]) -> Iterator[list[str]]:
    yield ["own", _number(record["own"]), ""]
    named = [("base", record["base"]), ("control", record["control"])]
    named += [(f"wrong:{author}", bpb) for author, bpb in record["wrong"].items()]
    for label, bpb in named:
        between = record["differences"].get(label)
        shown = (
            f"{between['mean']:+.4f} [{between['lower']:+.4f}, {between['upper']:+.4f}]" if between else ""
        )
        yield [label, _number(bpb), shown]
    for name, one in record.get("ablation", {}).items():
        yield [f"({name.replace('_', ' ')})", _number(one["bpb"]), ""]


def _sets(record: dict[str, Any]) -> Iterator[str]:
    """What each of several held-out sets says by itself."""
    sets = record.get("sets", {})
    if len(sets) < 2:
        return
    rows = [
        [
            name,
            one["outcome"] if not one["codes"] else f"{one['outcome']}: {', '.join(one['codes'])}",
            *(_number(one[subject]) for subject in ("own", "base", "control", "margin")),
            str(one["units"]),
        ]
        for name, one in sets.items()
    ]
    columns = ["held-out set", "by itself", "own", "base", "control", "margin", "units"]
    yield f"Each set decides by itself.\n\n{table(columns, rows)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
