"""Asking the catalog: who is ready, and why or why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.output import AsJson, emit, note, say, table

if TYPE_CHECKING:
    from roster.rows import AuthorRow, EvidenceRow, ProblemRow, WaitingRow


def ready(*, base: str | None = None, json: AsJson = False) -> None:
    """List the serve-ready authors.

    Parameters
    ----------
    base:
        Only those on this base.
    """
    from roster.catalog import open_catalog
    from storage.errors import UnknownBase

    with open_catalog(_catalog()) as reader:
        rows, synced_at = reader.ready(base), reader.synced_at()
        known = [row.base for row in reader.bases()]
    if base is not None and base not in known and not rows:
        raise UnknownBase(base, known)

    def show() -> None:
        shown = [
            (
                r.author,
                r.base,
                f"{r.own:.4f}",
                f"{r.base_bpb:.4f}",
                _signed(r.margin),
                r.wrong_adapters,
                r.output_digest[:12],
            )
            for r in rows
        ]
        columns = ["author", "base", "own BPB", "base BPB", "margin", "wrongs", "output"]
        where = "" if base is None else f" on {base}"
        table(columns, shown, empty=f"no author is serve-ready{where}")
        stale = [row.author for row in rows if row.stale]
        if stale:
            note(f"judged by an earlier version of the code, served all the same: {', '.join(stale)}")
        note(f"as of the sync at {synced_at}")

    emit({"synced_at": synced_at, "ready": [asdict(row) for row in rows]}, as_json=json, show=show)


def show(author: str, /, *, json: AsJson = False) -> None:
    """Show an author's adapters, newest first: state, verdict, layout, scores.

    Parameters
    ----------
    author:
        Whose adapters.
    """
    from roster.catalog import open_catalog

    with open_catalog(_catalog()) as reader:
        story = reader.show(author)

    def show() -> None:
        for one in story.adapters:
            a = one.adapter
            served = "served" if one.served else "not served"
            state = f"{a.state} ({a.code})" if a.code else a.state
            say(f"{a.author}/{a.run} on {a.base}: {state}, {served}")
            if a.reason:
                say(f"  {a.reason}")
            for line in _packing_lines(one.evidence):
                say(f"  {line}")
            scores = [(s.subject, _plain(s.bpb), _signed(s.difference)) for s in one.scores]
            table(["  scored with", "BPB", "minus own"], _indent(scores), empty="  not scored")

    emit(asdict(story), as_json=json, show=show)


def why(author: str, /, *, json: AsJson = False) -> None:
    """Tell an author's story in plain sentences: what came, what was decided, how it scored, what to do next.

    Parameters
    ----------
    author:
        Whose story.
    """
    from roster.catalog import open_catalog
    from roster.story import tell

    with open_catalog(_catalog()) as reader:
        sentences = tell(reader.show(author))

    def show() -> None:
        for sentence in sentences:
            say(sentence)

    emit({"author": author, "story": sentences}, as_json=json, show=show)


def sql(query: str, /, *, json: AsJson = False) -> None:
    """Ask the catalog in SQL. It can read the catalog and nothing else.

    Views: ready, authors, adapters, verdicts, scores, layouts, evidence, checks, history, waiting, problems, stale.

    ```
    roster sql "SELECT author, own, base_bpb FROM ready ORDER BY own"
    ```

    Parameters
    ----------
    query:
        One statement, such as "SELECT author, own FROM ready ORDER BY own".
    """
    from roster.catalog import open_catalog

    with open_catalog(_catalog()) as reader:
        answer = reader.sql(query)
    columns = _distinct(answer.columns)
    rows = [dict(zip(columns, row, strict=True)) for row in answer.rows]
    emit(
        {"columns": columns, "rows": rows},
        as_json=json,
        show=lambda: table(columns, answer.rows, empty="no rows"),
    )


def status(*, json: AsJson = False) -> int:
    """Say what runs here, what is on its way, what waits and what needs a person."""
    from flows.services import read_owner, read_services, read_untested
    from flows.settings import load_settings
    from roster.catalog import open_catalog
    from roster.errors import CatalogMissing, RosterError

    settings = load_settings()
    services, owner = read_services(settings.home), read_owner(settings.home)
    untested = read_untested(settings.home, services) if services else {}
    authors: list[AuthorRow] = []
    waiting: list[WaitingRow] = []
    problems: list[ProblemRow] = []
    synced_at: str | None = None
    fault: RosterError | None = None
    try:
        with open_catalog(settings.catalog_path) as reader:
            authors, waiting, problems = reader.authors(), reader.waiting(), reader.problems()
            synced_at = reader.synced_at()
    except RosterError as error:
        fault = error
    on_the_way = [row for row in authors if row.newest_state == "in_progress"]
    ready = sum(row.is_ready for row in authors)
    document = {
        "home": str(settings.home),
        "services": list(services.addresses) if services else None,
        "untested": {base: list(parts) for base, parts in untested.items()},
        "store": settings.store_endpoint,
        "catalog_fault": str(fault) if fault else None,
        "synced_at": synced_at,
        "ready": ready,
        "in_progress": [asdict(row) for row in on_the_way],
        "waiting": [asdict(row) for row in waiting],
        "problems": [asdict(row) for row in problems],
    }

    def show() -> None:
        if services:
            say(f"running: {', '.join(services.addresses)}")
            for base, parts in untested.items():
                say(f"engine of {base}: not verified by anybody: {', '.join(parts)}")
        elif owner:
            say(f"the embedded services of {settings.home} are starting or stopping, process {owner.pid}")
        elif settings.store_endpoint:
            say(f"store: {settings.store_endpoint}, Prefect: {settings.prefect_api_url or 'none'} (as set)")
        else:
            say(f"no embedded services run in {settings.home}; start them with: roster up")
        if fault:
            say(str(fault))
            return
        say(f"{ready} ready, {len(on_the_way)} on their way (sync of {synced_at})")
        _say_each("waiting", [f"{w.author}/{w.run}: {w.state} ({w.code}): {w.reason}" for w in waiting])
        _say_each("to look at", [_describe_problem(row) for row in problems])

    emit(document, as_json=json, show=show)
    return 0 if fault is None or isinstance(fault, CatalogMissing) else 3


def _say_each(title: str, lines: Sequence[str]) -> None:
    say(f"{title}: {len(lines) or 'nothing'}")
    for line in lines:
        say(f"  {line}")


def _describe_problem(row: ProblemRow) -> str:
    adapter = "/".join(part for part in (row.author, row.run) if part)
    return f"{adapter or row.base or 'an object'}: {row.problem} ({row.code}): {row.reason}"


def _packing_lines(evidence: Sequence[EvidenceRow]) -> list[str]:
    decided = dict.fromkeys((e.parameter, e.value, e.decided_by) for e in evidence)
    return [f"{name}: packing {value}, decided by {by}" for name, value, by in decided]


def _indent(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [(f"  {first}", *rest) for first, *rest in rows]


def _distinct(columns: Sequence[str]) -> list[str]:
    """Column names of which none is lost in a dictionary: a repeated one gets a number, as DuckDB does in tables."""
    names: list[str] = []
    for column in columns:
        name, number = column, 0
        while name in names or (number and name in columns):
            number += 1
            name = f"{column}_{number}"
        names.append(name)
    return names


def _catalog() -> Path:
    from flows.settings import Settings

    # The bare settings: no query needs the embedded services.
    return Settings().catalog_path


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.4f}"
