"""A plot as SVG: points, a straight line through each series, axes. No plotting library is among our dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 170, 20, 50
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")
_TICKS = 5

Point = tuple[float, float]
Line = tuple[float, float]
"""Intercept and slope."""


def format_plot(series: Mapping[str, tuple[Sequence[Point], Line]], *, x: str, y: str) -> str:
    """Return the SVG document. series: by name, points and the line through them. x, y: what the axes show."""
    most_x = max(point[0] for points, _ in series.values() for point in points)
    most_y = max(point[1] for points, _ in series.values() for point in points)
    top_x, top_y = _round_up(most_x), _round_up(most_y)

    def place(point: Point) -> Point:
        across = _LEFT + point[0] / top_x * (_WIDTH - _LEFT - _RIGHT)
        return round(across, 1), round(_HEIGHT - _BOTTOM - point[1] / top_y * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [*_draw_axes(top_x, top_y, place((0, 0)), place((top_x, top_y)), x, y)]
    for number, (name, (points, (intercept, slope))) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        (x1, y1), (x2, y2) = place((0, max(0.0, intercept))), place((most_x, intercept + slope * most_x))
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>')
        parts += [f'<circle cx="{cx}" cy="{cy}" r="4" fill="{colour}"/>' for cx, cy in map(place, points)]
        across, down = _WIDTH - _RIGHT + 20, _TOP + 20 + 20 * number
        parts.append(f'<circle cx="{across}" cy="{down - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{across + 12}" y="{down}">{escape(name)}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def _draw_axes(top_x: float, top_y: float, origin: Point, corner: Point, x: str, y: str) -> list[str]:
    (left, bottom), (right, top) = origin, corner
    parts = []
    for number in range(_TICKS + 1):
        share = number / _TICKS
        across, down = round(left + share * (right - left), 1), round(bottom + share * (top - bottom), 1)
        parts += [
            f'<line x1="{left}" y1="{down}" x2="{right}" y2="{down}" stroke="#dddddd"/>',
            f'<text x="{left - 8}" y="{down + 4}" text-anchor="end">{share * top_y:g}</text>',
            f'<text x="{across}" y="{bottom + 18}" text-anchor="middle">{share * top_x:g}</text>',
        ]
    middle = (left + right) / 2
    parts += [
        f'<line x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="black"/>',
        f'<line x1="{left}" y1="{bottom}" x2="{left}" y2="{top}" stroke="black"/>',
        f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">{escape(x)}</text>',
        f'<text x="14" y="{(top + bottom) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(top + bottom) / 2})">{escape(y)}</text>',
    ]
    return parts


def _round_up(value: float) -> float:
    """The next number that a scale of five steps shows well."""
    scale = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 0.1
    steps = (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10)
    return next(step * scale for step in steps if step * scale >= value)
