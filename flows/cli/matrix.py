"""The roster as a whole: every served adapter on every held-out text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from flows.cli.output import AsJson, emit, note, say, table
from flows.cli.progress import part_progress

if TYPE_CHECKING:
    from storage.matrices import MatrixDocument
    from tasks.matrix_generation import Generation
    from tasks.matrix_plan import Plan

_WIDEST = 8  # texts, of which a table still shows each one's numbers


def matrix(
    *,
    base: str,
    authors: Annotated[list[str] | None, Parameter(negative="", consume_multiple=True)] = None,
    sample: PositiveInt | None = None,
    generate: PositiveInt | None = None,
    fresh: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    dry_run: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    heatmap: Path | None = None,
    json: AsJson = False,
) -> None:
    """Score every served adapter of a base on everyone's held-out text, and say whose text each one fits best.

    The cost is said before anything is scored. Every cell (an adapter, or the base, on one text) is stored as soon as
    it is measured, so that a command that was stopped goes on from there, and one more author costs one more row and
    column. The engine's lease is held for one adapter at a time.

    ```
    roster matrix --base tiny --dry-run
    ```

    Parameters
    ----------
    base:
        The base whose adapters are compared, by its registered name.
    authors:
        Only these authors' adapters, on their texts; all whom the roster serves if left out.
    sample:
        Score so many others on each text, and not all of them. More of them are the same ones and some.
    generate:
        Have each adapter continue ten prompts of its own texts too, with so many seeds, and say whose each is.
    fresh:
        Measure every cell again.
    dry_run:
        Say what it would cost, and score nothing.
    heatmap:
        Write the picture of the matrix to this file too, as SVG.
    """
    from flows.connect import job_limits, open_store
    from flows.settings import connect_prefect, load_settings

    settings = load_settings()
    connect_prefect(settings)
    store = open_store(settings)
    limits = job_limits(settings)
    from tasks.matrix import fill_matrix
    from tasks.matrix_generation import Generation, describe_generation
    from tasks.matrix_plan import plan_matrix
    from tasks.matrix_report import draw_matrix

    plan = plan_matrix(store, base, limits, authors=authors or (), sample=sample, fresh=fresh)
    generation = Generation(generate) if generate else None
    cost = [plan.describe_cost(), *([describe_generation(plan, generation)] if generation else [])]
    if dry_run:
        emit(_cost(plan, generation), as_json=json, show=lambda: say("\n".join(cost)))
        return
    for line in cost:
        note(line)
    with part_progress("scoring") as progress:
        document = fill_matrix(store, plan, limits, generation=generation, say=note, progress=progress)
    if heatmap is not None:
        heatmap.write_text(draw_matrix(document), encoding="utf-8")
    emit(document.model_dump(mode="json", by_alias=True), as_json=json, show=lambda: _show(document))


def _cost(plan: Plan, generation: Generation | None) -> dict[str, Any]:
    from tasks.matrix_generation import generation_cost

    samples, more = generation_cost(plan, generation) if generation else (0, 0)
    return {
        "adapters": len(plan.rows),
        "texts": len(plan.columns),
        "cells": len(plan.cells),
        "pending": len(plan.pending),
        "tokens": plan.pending_tokens,
        "tokens_per_s": plan.tokens_per_s,
        "seconds": plan.pending_seconds,
        "generated": {"samples": samples, "tokens": more} if generation else None,
        "left_out": [{"what": what, "why": why} for what, why in plan.left_out],
    }


def _show(document: MatrixDocument) -> None:
    from tasks.matrix_report import PAIR_COLUMNS, bpb_table, matrix_lines, pair_rows

    if len(document.texts) <= _WIDEST:
        columns, rows = bpb_table(document)
        table(columns, rows, empty="")
    table(PAIR_COLUMNS, pair_rows(document), empty="no two adapters were compared")
    for line in matrix_lines(document):
        say(line)
