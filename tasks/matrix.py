"""The matrix of a base: its served adapters on each other's held-out text, measured cell by cell under the lease."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from storage.documents import utc_now
from storage.errors import ObjectNotFound
from storage.matrices import (
    MatrixCell,
    MatrixDocument,
    read_cells,
    read_samples,
    write_cell,
    write_matrix,
    write_samples,
)
from storage.s3 import S3Store
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineRefused
from tasks.bpb.measure import SubjectScores, score_subject
from tasks.errors import EngineChanged, MatrixDrift
from tasks.job import JobLimits
from tasks.matrix_engine import leased_for, loaded_row
from tasks.matrix_generation import (
    Generation,
    choose_prompts,
    column_of_samples,
    count_generated,
    draw_samples,
    samples_digest,
)
from tasks.matrix_plan import Cell, Column, Plan, Say, plan_columns
from tasks.matrix_report import attribute_columns, draw_matrix, summarize_matrix
from tasks.matrix_rows import Row

Progress = Callable[[int, int], None]
"""Called with the tokens scored and all that there are to score."""

_AGAIN = "What this run measured was removed again. Look at the engine, then run `roster matrix` again."
_FRESH = "Look at the engine; if it is sound, run `roster matrix --fresh`, which measures every cell again."


def fill_matrix(
    store: S3Store,
    plan: Plan,
    limits: JobLimits,
    *,
    generation: Generation | None = None,
    say: Say,
    progress: Progress,
) -> MatrixDocument:
    """Measure the cells that are still to be measured, store each as it comes, and then what all of them say.

    generation: have each adapter write too, and attribute what it wrote in the same way.

    The lease is taken for one adapter at a time, so that adapters on their way are scored in between. The base is
    scored first, and again last on the shortest text.

    Raises:
        MatrixDrift: the base's scores moved; what this run measured is removed then.
        EngineChanged: the engine was restarted as another one; what was measured of the adapter at hand is removed.
        EngineUnavailable, EngineProtocolError, MeasurementVoid, LeaseNotGranted, LeaseLost, StoreUnavailable: what was
            measured stays, and the next run goes on from there.
    """
    left_out = list(plan.left_out)
    cells = _fill_all(store, plan, limits, left_out, say, progress)
    generated = None
    if generation is not None:
        rows = [row for row in plan.rows if row.author not in dict(left_out)]
        columns = _generate(store, plan, limits, rows, generation, say)
        written = plan_columns(store, plan, columns)
        say(f"what the adapters wrote: {written.describe_cost()}")
        found = _fill_all(store, written, limits, left_out, say, progress)
        generated = count_generated(
            generation, columns, attribute_columns(columns, written.cells, found, plan.kin)
        )
    document = summarize_matrix(plan, cells, left_out, generated)
    write_matrix(store, document, draw_matrix(document))
    return document


def _fill_all(
    store: S3Store,
    plan: Plan,
    limits: JobLimits,
    left_out: list[tuple[str, str]],
    say: Say,
    progress: Progress,
) -> Mapping[str, MatrixCell]:
    """All cells of a plan, of which those that are not there are measured; of a run that drifted none stay."""
    written: list[str] = []
    if plan.pending:
        try:
            _fill(store, plan, limits, written, left_out, say, progress)
        except MatrixDrift:
            _remove(store, written)
            raise
    return read_cells(store, {cell.key for cell in plan.cells})


def _generate(
    store: S3Store, plan: Plan, limits: JobLimits, rows: Sequence[Row], generation: Generation, say: Say
) -> tuple[Column, ...]:
    """What each adapter wrote, as a text of its own; drawn now where it is not stored."""
    columns = []
    for row in rows:
        prompts = choose_prompts(plan, row, generation)
        if not prompts:
            say(f"{row.author}: no prompt is short enough for {generation.max_tokens} more tokens")
            continue
        digest = samples_digest(row, prompts, generation)
        samples = read_samples(store, plan.base.name, plan.space, digest)
        if samples is None:
            say(f"{row.author} continues {len(prompts)} prompts, {generation.seeds} times each")
            with loaded_row(store, plan, limits, row) as (engine, model):
                samples = draw_samples(engine, model, plan, row, prompts, generation)
            write_samples(store, plan.space, digest, samples)
        if samples.samples:
            columns.append(column_of_samples(plan, row, samples))
    return tuple(columns)


def _fill(
    store: S3Store,
    plan: Plan,
    limits: JobLimits,
    written: list[str],
    left_out: list[tuple[str, str]],
    say: Say,
    progress: Progress,
) -> None:
    done, total = 0, plan.pending_tokens
    # Preferably a text that the base was scored on before, so that drift since then is seen.
    probe = min(
        (cell for cell in plan.cells if cell.row is None),
        key=lambda cell: (cell.key not in plan.known, cell.column.tokens, cell.column.ref),
    ).column
    before = _probe_base(store, plan, limits, probe)
    for author, cells in _by_row(plan.pending).items():
        say(f"{author or 'the base'} on {len(cells)} texts")
        row = cells[0].row
        first = len(written)
        try:
            with loaded_row(store, plan, limits, row) as (engine, model):
                for cell in cells:
                    made = _measure(plan, engine, model, cell)
                    written.append(write_cell(store, plan.space, made))
                    done += cell.column.tokens
                    progress(done, total)
        except (EngineRefused, ObjectNotFound) as error:
            if row is None:
                raise
            say(f"{author} is left out: {error}")
            left_out.append((row.author, str(error)))
        except EngineChanged:
            _remove(store, written[first:])
            raise
    after = _probe_base(store, plan, limits, probe)
    _compare_probes(plan, probe, before, after, limit=limits.thresholds.drift_limit, advice=_AGAIN)


def _remove(store: S3Store, keys: Sequence[str]) -> None:
    for key in keys:
        store.delete(key)


def _by_row(cells: Sequence[Cell]) -> dict[str | None, list[Cell]]:
    """The cells by author, None for the base, in the plan's order."""
    rows: dict[str | None, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.row.author if cell.row else None, []).append(cell)
    return rows


def _measure(plan: Plan, engine: Engine, model: str, cell: Cell) -> MatrixCell:
    column = cell.column
    began = time.monotonic()
    scores = _score(engine, model, column)
    return MatrixCell(
        base=plan.base.name,
        engine_id=plan.info.engine_id,
        measure_id=column.measure_id,
        text=column.text,
        output_digest=cell.row.manifest.output_digest if cell.row else None,
        units=tuple(unit.id for unit in column.prepared.units),
        unit_bytes=tuple(unit.byte_count for unit in column.prepared.units),
        bits=tuple(None if math.isnan(bits) else bits for bits in scores.bits),
        tokens=column.tokens,
        seconds=round(time.monotonic() - began, 3),
        measured_at=utc_now(),
    )


def _score(engine: Engine, model: str, column: Column) -> SubjectScores:
    return score_subject(
        engine, model, column.prepared, label=column.ref, progress=lambda label, done, total: None
    )


def _probe_base(store: S3Store, plan: Plan, limits: JobLimits, probe: Column) -> tuple[float, ...]:
    """The base's bits on the probe now, which must be those of its cell where there is one.

    Raises:
        MatrixDrift: they are not.
    """
    with leased_for(store, plan, limits) as engine:
        now = _score(engine, plan.base.document.served_model, probe).bits
    keys = [
        cell.key
        for cell in plan.cells
        if cell.row is None and cell.column is probe and cell.key in plan.known
    ]
    for stored in read_cells(store, keys).values():
        before = tuple(math.nan if bits is None else bits for bits in stored.bits)
        _compare_probes(plan, probe, before, now, limit=limits.thresholds.drift_limit, advice=_FRESH)
    return now


def _compare_probes(
    plan: Plan,
    probe: Column,
    before: tuple[float, ...],
    after: tuple[float, ...],
    *,
    limit: float,
    advice: str,
) -> None:
    sizes = [unit.byte_count for unit in probe.prepared.units]
    shared = [
        index
        for index in range(len(sizes))
        if math.isfinite(before[index]) and math.isfinite(after[index]) and sizes[index]
    ]
    byte_count = sum(sizes[index] for index in shared)
    expected = math.fsum(before[index] for index in shared) / byte_count if byte_count else math.nan
    found = math.fsum(after[index] for index in shared) / byte_count if byte_count else math.nan
    # Not a number, where nothing can be compared, is drift too.
    if not abs(found - expected) <= limit:
        raise MatrixDrift(plan.base.name, probe.ref, f"{expected:.6f}", f"{found:.6f}", advice)
