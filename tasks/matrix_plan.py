"""What a matrix consists of, which of it was measured before, and what the rest will cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from roster.serving_engine import EngineInfo
from storage.bases import Base, read_base
from storage.errors import HeldoutMissing, InvalidDocument
from storage.heldout import read_heldout
from storage.keys import matrix_cell_key, parse_heldout_ref
from storage.matrices import list_cells
from storage.s3 import S3Store
from tasks.bpb.engine import Engine
from tasks.bpb.errors import HeldoutUnusable
from tasks.bpb.heldout import Unit, unit_kind
from tasks.bpb.identity import measure_id
from tasks.bpb.measure import METHOD_VERSION, Prepared, prepare_units
from tasks.bpb.protocol import Scorer
from tasks.engine_fit import check_engine, needs_of_manifest
from tasks.engines import read_engine, require_qualified
from tasks.errors import NobodyServed, NoEngine
from tasks.job import JobLimits
from tasks.matrix_rows import Row, find_kin, list_served, read_rows

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Column:
    """A text: its name and digest, whose own it is, and its units ready to score. `tokens`: of one scoring of it."""

    ref: str
    text: str
    owners: frozenset[str]
    measure_id: str
    prepared: Prepared

    @property
    def tokens(self) -> int:
        """What one scoring of it sends to the engine, which is asked the first prompt twice."""
        windows = [window for unit in self.prepared.units for window in unit.windows]
        return sum(window.end - window.begin for window in (*windows, windows[0]))


@dataclass(frozen=True, slots=True)
class Cell:
    """A row (None: the base) on a column, and where it is stored."""

    row: Row | None
    column: Column
    key: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A matrix before it is measured.

    `space`: all that cells must share to be compared. `kin`: authors who are never each other's wrong ones. `known`:
    the keys of the cells that are there, none where all are measured afresh. `left_out`: what is not in it, and why.
    """

    base: Base
    info: EngineInfo
    space: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    kin: frozenset[frozenset[str]]
    sample: int | None
    whole: bool
    fresh: bool
    cells: tuple[Cell, ...]
    known: frozenset[str]
    left_out: tuple[tuple[str, str], ...]

    @property
    def pending(self) -> tuple[Cell, ...]:
        """The cells that are still to be measured, each once: two names may stand for one text."""
        return tuple({cell.key: cell for cell in self.cells if cell.key not in self.known}.values())

    @property
    def pending_tokens(self) -> int:
        """What measuring them sends to the engine."""
        return sum(cell.column.tokens for cell in self.pending)

    @property
    def tokens_per_s(self) -> float | None:
        """The rate at which this engine scored these adapters for their verdicts, None where it scored none."""
        seconds = sum(row.seconds for row in self.rows)
        return sum(row.tokens for row in self.rows) / seconds if seconds > 0 else None

    @property
    def pending_seconds(self) -> float | None:
        """How long the rest takes at that rate, loading apart; None where no rate is known."""
        rate = self.tokens_per_s
        return self.pending_tokens / rate if rate else None

    def describe_cost(self) -> str:
        """One sentence: what is to be measured, in tokens and in time."""
        pending, keys = len(self.pending), {cell.key for cell in self.cells}
        head = (
            f"{len(self.rows)} adapters and the base on {len(self.columns)} texts: {len(keys)} cells, "
            f"{len(keys) - pending} measured before, {pending} to measure: {self.pending_tokens} tokens"
        )
        if not pending:
            return head
        seconds, rate = self.pending_seconds, self.tokens_per_s
        if seconds is None or rate is None:
            return f"{head}; this engine has scored none of these adapters yet, so how long that takes is not known"
        return f"{head}, about {seconds:.0f} s at the {rate:.0f} tokens/s of their verdicts"


def plan_matrix(
    store: S3Store,
    name: str,
    limits: JobLimits,
    *,
    authors: Sequence[str] = (),
    sample: int | None = None,
    fresh: bool = False,
) -> Plan:
    """What a matrix of a base's served adapters consists of; asks the engine to tokenise, and to score nothing.

    authors: only these and their texts; all whom the roster serves if there are none. sample: so many others on each
    text instead of all, drawn by digests, so that more are always the same ones and some. fresh: nothing measured
    before is used.

    Raises:
        UnknownBase, NoEngine, NobodyServed, NotServed.
        EngineUnverified, EngineNotQualified, EngineUnfit, EngineTooOld: the engine cannot score them, or not so that
            it could be trusted.
        EngineUnavailable, EngineProtocolError, TokenizerUnsupported, WindowInvalid, InvalidDocument, StoreUnavailable.
    """
    base = read_base(store, name)
    url = base.document.engine.url
    if url is None:
        raise NoEngine(name)
    info = read_engine(store, name)
    served = list_served(store, name, authors)
    left_out: list[tuple[str, str]] = []
    rows = read_rows(store, served, info.engine_id, left_out)
    if not rows:
        raise NobodyServed(name)
    check_engine(info, name, base.document.served_model, [needs_of_manifest(row.manifest) for row in rows])
    require_qualified(store, name, info.engine_id)
    with Engine(url, timeout_s=limits.engine_timeout_s) as engine:
        columns = _prepare_columns(store, base, rows, engine, limits.score_stride or None, left_out)
    space = _space(base, info, columns)
    plan = Plan(
        base=base,
        info=info,
        space=space,
        rows=rows,
        columns=columns,
        kin=find_kin(rows, base.document.exclusions),
        sample=sample,
        whole=not authors,
        fresh=fresh,
        cells=(),
        known=frozenset(),
        left_out=tuple(left_out),
    )
    return plan_columns(store, plan, columns)


def plan_columns(store: S3Store, plan: Plan, columns: Sequence[Column]) -> Plan:
    """The same adapters on these texts.

    Raises:
        StoreUnavailable.
    """
    known = frozenset() if plan.fresh else list_cells(store, plan.base.name, plan.space)
    planned = replace(plan, columns=tuple(columns), known=known)
    return replace(planned, cells=plan_cells(planned))


def plan_cells(plan: Plan) -> tuple[Cell, ...]:
    """The base's cells, then each adapter's: on all columns, or on its own and, by a sample, on drawn ones."""
    cells = [Cell(None, column, _key(plan, None, column)) for column in plan.columns]
    wanted = {(row.author, column.ref) for column in plan.columns for row in _on_column(plan, column)}
    for row in plan.rows:
        cells += (
            Cell(row, column, _key(plan, row, column))
            for column in plan.columns
            if (row.author, column.ref) in wanted
        )
    return tuple(cells)


def _on_column(plan: Plan, column: Column) -> list[Row]:
    others = [row for row in plan.rows if row.author not in column.owners]
    if plan.sample is not None:
        strangers = [
            row
            for row in others
            if not any(frozenset((row.author, owner)) in plan.kin for owner in column.owners)
        ]
        drawn = sorted(strangers, key=lambda row: _draw(column.text, row.manifest.output_digest))
        others = drawn[: plan.sample]
    return [row for row in plan.rows if row.author in column.owners] + others


def _draw(text: str, output_digest: str) -> bytes:
    return hashlib.sha256(f"{text} {output_digest}".encode()).digest()


def _key(plan: Plan, row: Row | None, column: Column) -> str:
    return matrix_cell_key(
        plan.base.name, plan.space, column.text, row.manifest.output_digest if row else None
    )


def _prepare_columns(
    store: S3Store,
    base: Base,
    rows: Sequence[Row],
    engine: Scorer,
    stride: int | None,
    left_out: list[tuple[str, str]],
) -> tuple[Column, ...]:
    owners: dict[str, set[str]] = {}
    for row in rows:
        for ref in row.refs:
            owners.setdefault(ref, set()).add(row.author)
    columns = []
    for ref in sorted(owners):
        try:
            heldout = read_heldout(store, *parse_heldout_ref(ref))
            units = tuple(Unit(unit.id, unit.text, unit.prompt) for unit in heldout.units)
            prepared = prepare_units(engine, units, stride=stride)
        except (HeldoutMissing, InvalidDocument, HeldoutUnusable) as error:
            left_out.append((ref, str(error)))
            continue
        identity = measure_id(
            heldout_sha256s=[heldout.sha256],
            unit_kind=unit_kind(units),
            window=prepared.window,
            stride=prepared.stride,
            bos_rule=prepared.bos_rule,
            base_weights_digest=base.document.weights_digest or "",
        )
        columns.append(Column(ref, heldout.sha256, frozenset(owners[ref]), identity, prepared))
    return tuple(columns)


def _space(base: Base, info: EngineInfo, columns: Sequence[Column]) -> str:
    """16 hexadecimal digits over base, engine and the way of measuring; texts and adapters have their own digests."""
    ways = sorted({f"{c.prepared.window} {c.prepared.stride} {c.prepared.bos_rule}" for c in columns})
    content = [base.digest, info.engine_id, METHOD_VERSION, *ways]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
