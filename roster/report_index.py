"""Reading a report's index from the catalog. The views hold the rules; here rows are put together and named."""

from collections.abc import Iterator

from roster.reader import CatalogReader
from roster.report_details import SUBMITTED_AT, block_of, only_base
from roster.report_names import Names
from roster.report_rows import ReportAct, ReportAuthor, ReportConcern, ReportIndex
from roster.rows import ProblemRow, StateRow, WaitingRow

_AUTHORS = """
SELECT
    a.author, a.base,
    CASE a.state WHEN 'ready' THEN 'served' ELSE a.state END AS standing,
    CASE WHEN a.ready_digest <> a.newest_digest THEN a.newest_state END AS newer,
    nullif(a.newest_code, '') AS code,
    f.own, f.base_bpb, f.control, f.margin, f.interval_lower, f.interval_upper, f.wrong_adapters, f.rank, f.measured_at,
    a.adapters,
    {newest_at} AS newest_at,
    a.stale, a.pinned_digest IS NOT NULL AS pinned
FROM authors a
LEFT JOIN adapters f
    ON f.author = a.author AND f.base = a.base AND f.adapter_digest = coalesce(a.ready_digest, a.newest_digest)
WHERE {only}
"""


def list_names(reader: CatalogReader, base: str | None, *, anonymous: bool) -> Names:
    """Return what the authors of one base or of all are called on a page."""
    return Names((row.author for row in reader.authors() if base in (None, row.base)), anonymous=anonymous)


def read_index(reader: CatalogReader, base: str | None, names: Names) -> ReportIndex:
    """Return the index of one base or of all, authors in the order of their names on the page."""
    rows = reader.sql(
        _AUTHORS.format(newest_at=SUBMITTED_AT.format("a.newest_submission"), only=only_base(base, "a.base"))
    ).rows
    order = sorted({str(row[0]) for row in rows}, key=names.name)
    place = {author: block_of(position) for position, author in enumerate(order)}
    authors = [
        ReportAuthor(names.name(str(author)), place[str(author)], *values)  # type: ignore[arg-type]
        for author, *values in rows
    ]
    return ReportIndex(
        synced_at=reader.synced_at(),
        authors=tuple(sorted(authors, key=lambda row: (row.author, row.base))),
        concerns=_concerns(reader, base, names),
        acts=_acts(reader, base, names),
        order=tuple(order),
    )


def _concerns(reader: CatalogReader, base: str | None, names: Names) -> tuple[ReportConcern, ...]:
    """What is a problem, and what waits; a stopped adapter is both, and told once."""
    served = {(row.author, row.base) for row in reader.ready(base)}
    problems = [_problem(row, names) for row in reader.problems() if base in (None, row.base)]
    waiting = [row for row in reader.waiting() if row.state == "waiting" and base in (None, row.base)]
    return (*problems, *(_waits(row, names, (row.author, row.base) in served) for row in waiting))


def _problem(row: ProblemRow, names: Names) -> ReportConcern:
    return ReportConcern(
        author=None if row.author is None else names.name(row.author),
        base=row.base,
        kind=row.problem,
        code=row.code,
        since=row.since,
        served_instead=row.served_instead is not None,
        run=None if names.anonymous else row.run,
        reason=None if names.anonymous else row.reason,
    )


def _waits(row: WaitingRow, names: Names, is_served: bool) -> ReportConcern:
    return ReportConcern(
        author=names.name(row.author),
        base=row.base,
        kind=row.state,
        code=row.code,
        since=row.since,
        served_instead=is_served,
        run=None if names.anonymous else row.run,
        reason=None if names.anonymous else row.reason,
    )


def _acts(reader: CatalogReader, base: str | None, names: Names) -> tuple[ReportAct, ...]:
    found = [
        ReportAct(
            names.name(row.author),
            row.base,
            kind,
            row.since,
            None if names.anonymous else row.who,
            None if names.anonymous else row.why,
        )
        for row in reader.states()
        if base is None or row.base in (None, base)
        for kind in _kinds(row)
    ]
    return tuple(sorted(found, key=lambda act: (act.act, act.author, act.base or "")))


def _kinds(row: StateRow) -> Iterator[str]:
    if row.retired or row.held:
        yield "retired" if row.retired else "held"
    if row.pinned_digest is not None:
        yield "pinned"
