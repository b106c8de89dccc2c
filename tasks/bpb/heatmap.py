"""A matrix of bits per byte as a picture: plain SVG, small enough for an artifact at a hundred by a hundred."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_LEVELS = 12
"""Steps of colour on each side of zero; all cells of one colour are one path."""

_LEAST_BETTER = 0.5
"""What is better than own is at least this strong, however small: it is what the picture is looked at for."""

_NAMED = 60
"""Up to so many rows and columns are named; beyond that the names would be unreadable."""

_LETTERS = 24  # of a name
_BETTER, _EQUAL, _WORSE = (178, 24, 43), (247, 247, 247), (33, 102, 172)
_MISSING = "#dddddd"


@dataclass(frozen=True, slots=True)
class Heatmap:
    """What is drawn: a row for each adapter, a column for each text.

    `margins`: bits per byte more than the text's own adapter, None where nothing was scored. `own`: the cells, by row
    and column, of adapters on their own text.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    margins: tuple[tuple[float | None, ...], ...]
    own: frozenset[tuple[int, int]]


def draw_heatmap(heatmap: Heatmap, *, title: str) -> str:
    """The picture as SVG. Blue is worse than the text's own adapter, red is better, grey was not scored.

    The colours reach full strength at the largest margin of either sign; own cells have a black frame.
    """
    rows, columns = heatmap.rows, heatmap.columns
    is_named = max(len(rows), len(columns)) <= _NAMED
    size = 18 if is_named else max(2, 900 // max(len(rows), len(columns)))
    letters = max((len(name[:_LETTERS]) for name in (*rows, *columns)), default=0) if is_named else 0
    edge = 10 + 7 * letters
    width = max(edge + len(columns) * size + 10, 460)
    top = edge + 24
    height = top + len(rows) * size + 40
    strongest = max((abs(m) for line in heatmap.margins for m in line if m is not None), default=0.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="16" font-size="13">{escape(title)}</text>',
        *_paths(heatmap, strongest, edge, top, size),
        *_frames(heatmap, edge, top, size),
        *(_names(heatmap, edge, top, size) if is_named else ()),
        f'<text x="10" y="{height - 14}">rows: adapters, columns: texts; blue: up to {strongest:.3f} bits per byte '
        "worse than own, red: better</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def as_data_uri(svg: str) -> str:
    """The picture as an address that holds it whole."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode("ascii")


def _paths(heatmap: Heatmap, strongest: float, left: int, top: int, size: int) -> list[str]:
    """One path for each colour that occurs."""
    drawn: dict[str, list[str]] = {}
    for y, line in enumerate(heatmap.margins):
        for x, margin in enumerate(line):
            colour = _MISSING if margin is None else _colour(margin, strongest)
            square = f"M{left + x * size} {top + y * size}h{size}v{size}h-{size}z"
            drawn.setdefault(colour, []).append(square)
    return [f'<path fill="{colour}" d="{"".join(squares)}"/>' for colour, squares in sorted(drawn.items())]


def _colour(margin: float, strongest: float) -> str:
    level = round(margin / strongest * _LEVELS) / _LEVELS if strongest else 0.0
    if margin < 0:
        level = min(level, -_LEAST_BETTER)
    full = _WORSE if level > 0 else _BETTER
    mixed = (round(e + (f - e) * abs(level)) for e, f in zip(_EQUAL, full, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _frames(heatmap: Heatmap, left: int, top: int, size: int) -> list[str]:
    squares = "".join(
        f"M{left + x * size} {top + y * size}h{size}v{size}h-{size}z" for y, x in sorted(heatmap.own)
    )
    return [f'<path fill="none" stroke="black" stroke-width="1.5" d="{squares}"/>'] if squares else []


def _names(heatmap: Heatmap, left: int, top: int, size: int) -> list[str]:
    return [
        *(
            f'<text x="{left - 5}" y="{top + y * size + size - 5}" text-anchor="end">{_short(name)}</text>'
            for y, name in enumerate(heatmap.rows)
        ),
        *(
            f'<text transform="translate({left + x * size + size - 5} {top - 5}) rotate(-90)">{_short(name)}</text>'
            for x, name in enumerate(heatmap.columns)
        ),
    ]


def _short(name: str) -> str:
    return escape(name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…")


def build_heatmap(
    rows: Sequence[str],
    columns: Sequence[str],
    bpb: Sequence[Sequence[float | None]],
    own: frozenset[tuple[int, int]],
) -> Heatmap:
    """The heatmap of a matrix of bits per byte, rows of adapters by columns of texts.

    A text's margins are taken against the best of its own adapters; without one nothing of it can be drawn.
    """
    best: list[float | None] = []
    for x in range(len(columns)):
        figures = [bpb[y][x] for y, column in sorted(own) if column == x]
        present = [figure for figure in figures if figure is not None]
        best.append(min(present) if present else None)
    margins = tuple(
        tuple(
            None if figure is None or least is None else figure - least
            for figure, least in zip(line, best, strict=True)
        )
        for line in bpb
    )
    return Heatmap(tuple(rows), tuple(columns), margins, own)
