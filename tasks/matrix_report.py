"""What the cells of a matrix say together: the stored document, its picture, its tables."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib import metadata

from storage.documents import utc_now
from storage.matrices import (
    MatrixAdapter,
    MatrixCell,
    MatrixDocument,
    MatrixGenerated,
    MatrixLeftOut,
    MatrixPair,
    MatrixShare,
    MatrixText,
)
from tasks.bpb.attribution import Attribution, Proportion, TextScores, attribute
from tasks.bpb.heatmap import as_data_uri, build_heatmap, draw_heatmap
from tasks.matrix_plan import Cell, Column, Plan

_PAIRS = 20
"""So many of the most confusable pairs are told."""

_NUMBERS = 16
"""A page shows the numbers themselves of up to so many adapters and texts."""


def summarize_matrix(
    plan: Plan,
    cells: Mapping[str, MatrixCell],
    left_out: Sequence[tuple[str, str]],
    generated: MatrixGenerated | None = None,
) -> MatrixDocument:
    """Everything the cells say; cells that are not there are as if nobody had asked for them.

    cells: by key, as they are stored.
    """
    found = attribute_columns(plan.columns, plan.cells, cells, plan.kin)
    used = [cells[cell.key] for cell in plan.cells if cell.key in cells]
    present = {cell.row.author for cell in plan.cells if cell.row and cell.key in cells}
    bpb = {text.name: text for text in found.texts}
    return MatrixDocument(
        base=plan.base.name,
        space=plan.space,
        matrix_id=_matrix_id(plan, generated),
        engine_id=plan.info.engine_id,
        sample=plan.sample,
        whole=plan.whole,
        adapters=tuple(
            MatrixAdapter(author=row.author, output_digest=row.manifest.output_digest)
            for row in plan.rows
            if row.author in present
        ),
        texts=tuple(
            MatrixText(
                ref=column.ref,
                text=column.text,
                owners=tuple(sorted(column.owners)),
                units=bpb[column.ref].units,
                bytes=bpb[column.ref].byte_count,
                base_bpb=bpb[column.ref].base,
                bpb=dict(bpb[column.ref].adapters),
                right=share_of(found.per_text[column.ref]) if column.ref in found.per_text else None,
            )
            for column in plan.columns
        ),
        sets=share_of(found.sets),
        units=share_of(found.units),
        misattributed=found.misattributed,
        choices=None if math.isnan(found.choices) else found.choices,
        pairs=tuple(
            MatrixPair(
                ref=pair.text,
                owner=pair.owner,
                other=pair.other,
                margin=pair.margin,
                taken=pair.taken,
                units=pair.units,
            )
            for pair in found.pairs[:_PAIRS]
        ),
        generated=generated,
        left_out=tuple(MatrixLeftOut(what=what, why=why) for what, why in left_out),
        cells=len(used),
        tokens=sum(cell.tokens for cell in used),
        seconds=round(sum(cell.seconds for cell in used), 3),
        measured_at=utc_now(),
        tool_version=metadata.version("adapter-roster"),
    )


def attribute_columns(
    columns: Sequence[Column],
    planned: Sequence[Cell],
    cells: Mapping[str, MatrixCell],
    kin: frozenset[frozenset[str]],
) -> Attribution:
    """Whose the columns are by the cells that are there."""
    base: dict[str, tuple[float, ...]] = {}
    adapters: dict[str, dict[str, tuple[float, ...]]] = {column.ref: {} for column in columns}
    for cell in planned:
        if cell.key in cells:
            bits = tuple(math.nan if one is None else one for one in cells[cell.key].bits)
            if cell.row is None:
                base[cell.column.ref] = bits
            else:
                adapters[cell.column.ref][cell.row.author] = bits
    texts = [
        TextScores(
            column.ref,
            column.owners,
            tuple(unit.byte_count for unit in column.prepared.units),
            base.get(column.ref),
            adapters[column.ref],
        )
        for column in columns
    ]
    return attribute(texts, kin)


def draw_matrix(document: MatrixDocument) -> str:
    """The matrix as a picture, SVG: each adapter, and the base below them, on each text."""
    authors = [adapter.author for adapter in document.adapters]
    bpb: list[list[float | None]] = [[text.bpb.get(author) for text in document.texts] for author in authors]
    bpb.append([text.base_bpb for text in document.texts])
    own = frozenset(
        (y, x)
        for x, text in enumerate(document.texts)
        for y, author in enumerate(authors)
        if author in text.owners
    )
    refs = [text.ref for text in document.texts]
    title = f"{document.base}: {len(authors)} adapters on {len(refs)} texts"
    return draw_heatmap(build_heatmap([*authors, "(base)"], refs, bpb, own), title=title)


def render_matrix(document: MatrixDocument) -> str:
    """The page of a matrix as markdown: what it says, its picture, the most confusable pairs, the numbers."""
    parts = [
        f"# {document.base}: matrix of {len(document.adapters)} adapters on {len(document.texts)} texts",
        "\n".join(f"- {line}" for line in matrix_lines(document)),
        f"![heatmap]({as_data_uri(draw_matrix(document))})",
        "## Most confusable pairs",
        _markdown(PAIR_COLUMNS, pair_rows(document)) if document.pairs else "None: nothing was compared.",
    ]
    if max(len(document.adapters), len(document.texts)) <= _NUMBERS:
        columns, rows = bpb_table(document)
        parts += ["## Bits per byte", _markdown(columns, rows)]
    return "\n\n".join(parts) + "\n"


def matrix_lines(document: MatrixDocument) -> list[str]:
    """What a matrix says, one sentence each."""
    lines = [
        f"held-out sets attributed to their author: {say_share(document.sets)}",
        f"single units: {say_share(document.units)}",
    ]
    if document.choices is not None:
        lines.append(
            f"among {document.choices:.3g} adapters on average (by chance {1 / document.choices:.1%})"
        )
    if document.misattributed:
        lines.append(f"another adapter fits best: {', '.join(document.misattributed)}")
    if document.generated is not None:
        made = document.generated
        lines.append(
            f"what the adapters wrote themselves ({made.prompts} prompts each, {made.seeds} seeds, up to "
            f"{made.max_tokens} tokens at temperature {made.temperature:g}): {say_share(made.right)}"
        )
    lines += [f"left out: {one.what}: {one.why}" for one in document.left_out]
    lines.append(
        f"{document.cells} cells, {document.tokens} tokens, {document.seconds:.0f} s; engine {document.engine_id}, "
        f"space {document.space}, matrix {document.matrix_id}"
    )
    return lines


def say_share(share: MatrixShare) -> str:
    """A share with its interval, in one phrase."""
    if share.share is None or share.interval is None:
        return "none could be compared"
    low, high = share.interval
    return f"{share.right} of {share.total} right, {share.share:.1%} [{low:.1%}, {high:.1%}]"


PAIR_COLUMNS = ("text", "own", "other", "other - own, bits per byte", "units that fit the other")


def pair_rows(document: MatrixDocument) -> list[list[str]]:
    """The rows of the table of confusable pairs, the most confusable first."""
    return [
        [pair.ref, pair.owner, pair.other, f"{pair.margin:+.4f}", f"{pair.taken} of {pair.units}"]
        for pair in document.pairs
    ]


def bpb_table(document: MatrixDocument) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the numbers themselves: each adapter, and the base below them, on each text."""
    columns = ["adapter", *(text.ref for text in document.texts)]
    rows = [
        [adapter.author, *(_figure(text.bpb.get(adapter.author)) for text in document.texts)]
        for adapter in document.adapters
    ]
    rows.append(["(base)", *(_figure(text.base_bpb) for text in document.texts)])
    return columns, rows


def _figure(bpb: float | None) -> str:
    return "" if bpb is None else f"{bpb:.4f}"


def share_of(proportion: Proportion) -> MatrixShare:
    """A proportion as it is stored."""
    if proportion.total == 0:
        return MatrixShare(right=0, total=0, share=None, interval=None)
    return MatrixShare(
        right=proportion.right,
        total=proportion.total,
        share=proportion.share,
        interval=(proportion.lower, proportion.upper),
    )


def _matrix_id(plan: Plan, generated: MatrixGenerated | None) -> str:
    """16 hexadecimal digits over what a matrix consists of, so that the same one measured again replaces itself."""
    rows = sorted((row.author, row.manifest.output_digest) for row in plan.rows)
    columns = sorted((column.ref, column.text, sorted(column.owners)) for column in plan.columns)
    kin = sorted(sorted(pair) for pair in plan.kin)
    asked: list[object] = [plan.space, rows, columns, kin, plan.sample]
    if generated is not None:
        asked.append([generated.seeds, generated.prompts, generated.max_tokens, generated.temperature])
    content = json.dumps(asked)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
