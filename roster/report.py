"""The report: the whole roster as one HTML page that asks nothing of any server.

Everything that is shown is in the page as JSON and becomes text nodes when it is drawn, so that no name and no reason
can be markup. A content security policy allows the page's own script and style, by their hashes, and no request.
What is known of each author beyond a line of the table is deflated, and unpacked when the author is opened.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from importlib.resources import files

from roster.advice import ADVICE, advise
from roster.report_details import ADAPTERS, OF_AUTHOR, PARTS, DetailTable, pack
from roster.report_rows import ReportAct, ReportAuthor, ReportConcern, ReportIndex, ReportMatrix

_SCRIPTS = ("core.js", "charts.js", "table.js", "author.js", "main.js")
_PLAIN_ROWS = 500
"""Without scripts, so many authors are listed: mail programs and previews run none."""


@dataclass(frozen=True, slots=True)
class Report:
    """A page to be. left_out: what it lacks and why, a sentence each. blocks: the details, as they were packed."""

    index: ReportIndex
    matrices: tuple[ReportMatrix, ...]
    left_out: tuple[str, ...]
    base: str | None
    is_anonymous: bool
    tool_version: str


def render_report(report: Report, blocks: Iterable[str]) -> str:
    """Return the page. `blocks`: what `pack_details` gives for the index's order."""
    script = "\n".join(['"use strict";', *(_asset(name) for name in _SCRIPTS)])
    style = _asset("style.css")
    packed = [_block(f"b{at}", block) for at, block in enumerate(blocks)]
    packed += [_block(f"m{at}", pack(_matrix(matrix))) for at, matrix in enumerate(report.matrices)]
    title = "Adapter roster" if report.base is None else f"Adapter roster of {report.base}"
    parts = {
        "policy": html.escape(
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
        "title": html.escape(title),
        "as_of": html.escape(f"as of {_time(report.index.synced_at)} UTC"),
        "footer": html.escape(_footer(report)),
        "plain": _plain(report.index.authors),
        "style": style,
        "script": script,
        "data": _as_json(report),
        "blocks": "\n".join(packed),
    }
    # One pass: a name that looks like a place of the template is text.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("roster").joinpath("report_page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _block(name: str, packed: str) -> str:
    return f'<script type="text/plain" id="{name}">{packed}</script>'


def _as_json(report: Report) -> str:
    index = report.index
    found = [*(row.code for row in index.authors), *(row.code for row in index.concerns)]
    codes = {*ADVICE, *(code for code in found if code)}
    text = json.dumps(
        {
            "synced_at": index.synced_at,
            "columns": {
                "authors": [field.name for field in fields(ReportAuthor)],
                "concerns": [field.name for field in fields(ReportConcern)],
                "acts": [field.name for field in fields(ReportAct)],
                "adapters": [*_names(ADAPTERS, report), "served"],
                **{table.name: _names(table, report) for table in (*PARTS, *OF_AUTHOR)},
            },
            "parts": [part.name for part in PARTS],
            "authors": [astuple(row) for row in index.authors],
            "concerns": [astuple(row) for row in index.concerns],
            "acts": [astuple(row) for row in index.acts],
            "advice": {code: advise(code) for code in sorted(codes)},
            "matrices": len(report.matrices),
            "left_out": report.left_out,
        },
        separators=(",", ":"),
        allow_nan=False,
    )
    # What ends a script element, or begins a comment in one, is no longer spelt so.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _names(table: DetailTable, report: Report) -> list[str]:
    return [column.name for column in table.columns(anonymous=report.is_anonymous)]


def _matrix(matrix: ReportMatrix) -> str:
    """The matrix as the page reads it: each text's figures in the adapters' order, null where none was taken."""
    texts = []
    for text in matrix.texts:
        known = dict(text.bpb)
        figures = [_rounded(known.get(author)) for author in matrix.adapters]
        texts.append([text.ref, text.owners, _rounded(text.base_bpb), figures])
    whole = [matrix.base, matrix.measured_at, matrix.engine_id, matrix.adapters, texts, matrix.said]
    return json.dumps(whole, separators=(",", ":"), allow_nan=False)


def _rounded(bpb: float | None) -> float | None:
    return None if bpb is None else round(bpb, 5)


def _plain(authors: Sequence[ReportAuthor]) -> str:
    """What is told where no script runs: who is served, and the figures."""
    rows = "".join(
        f"<tr><td>{html.escape(row.author)}</td><td>{html.escape(row.base)}</td>"
        f"<td>{html.escape(row.standing)}</td><td>{html.escape(row.code or '')}</td>"
        f"<td>{_figure(row.own)}</td><td>{_figure(row.base_bpb)}</td><td>{_figure(row.margin)}</td></tr>"
        for row in authors[:_PLAIN_ROWS]
    )
    heads = "".join(
        f"<th>{head}</th>" for head in ("author", "base", "state", "code", "own", "bare base", "margin")
    )
    served = sum(row.standing == "served" for row in authors)
    cut = f" The first {_PLAIN_ROWS} are listed." if len(authors) > _PLAIN_ROWS else ""
    return (
        f"<p>{served} of {len(authors)} are served.{cut} Search, charts and each author's story need a browser that "
        f'runs scripts.</p><table class="plain"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _time(text: str) -> str:
    return text[:16].replace("T", " ")


def _footer(report: Report) -> str:
    names = (
        " Authors are numbered anew for each page, and words of people are left out."
        if report.is_anonymous
        else ""
    )
    return (
        "Figures are bits per byte on held-out text: lower is better. Margin: the nearest other author's adapter minus "
        f"own, with its interval. Times are UTC. Catalog of {report.index.synced_at}, adapter-roster "
        f"{report.tool_version}.{names}"
    )
