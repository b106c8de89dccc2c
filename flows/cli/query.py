"""Asking the catalog: who is ready, and why or why not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from flows.cli.output import OUT, AsJson, emit, note, table
from flows.settings import load_settings


def ready(*, base: str | None = None, json: AsJson = False) -> None:
    """List the serve-ready authors.

    Parameters
    ----------
    base:
        Only those on this base.
    """
    from roster.catalog import open_catalog

    with open_catalog(_catalog()) as reader:
        rows, synced_at = reader.ready(base), reader.synced_at()

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
                "stale" if r.stale else "",
            )
            for r in rows
        ]
        columns = ["author", "base", "own BPB", "base BPB", "margin", "wrongs", "output", ""]
        table("Serve-ready", columns, shown, empty="no author is serve-ready")
        note(f"as of the sync at {synced_at}")

    emit({"synced_at": synced_at, "ready": [asdict(row) for row in rows]}, as_json=json, show=show)


def show(author: str, *, json: AsJson = False) -> None:
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
            OUT.print(f"[bold]{a.author}/{a.run}[/] on {a.base}: {state}, {served}")
            if a.reason:
                OUT.print(f"  {a.reason}", markup=False, highlight=False)
            decided = {(e.parameter, e.value, e.decided_by) for e in one.evidence}
            columns = ["parameter", "value", "decided by"]
            table("Packing", columns, sorted(decided, key=str), empty="  no layout decided")
            scores = [(s.subject, _plain(s.bpb), _signed(s.difference)) for s in one.scores]
            table("Bits per byte", ["scored with", "BPB", "minus own"], scores, empty="  not scored")

    emit(asdict(story), as_json=json, show=show)


def why(author: str, *, json: AsJson = False) -> None:
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
            OUT.print(sentence, markup=False, highlight=False)

    emit({"author": author, "story": sentences}, as_json=json, show=show)


def sql(query: str, *, json: AsJson = False) -> None:
    """Ask the catalog in SQL. It can read the catalog and nothing else.

    Views: authors, adapters, verdicts, scores, evidence, checks, ready, history, waiting, problems, stale.

    Parameters
    ----------
    query:
        One statement, such as "SELECT author, own FROM ready ORDER BY own".
    """
    from roster.catalog import open_catalog

    with open_catalog(_catalog()) as reader:
        answer = reader.sql(query)
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    emit(
        {"columns": list(answer.columns), "rows": rows},
        as_json=json,
        show=lambda: table("", answer.columns, answer.rows, empty="no rows"),
    )


def status(*, json: AsJson = False) -> None:
    """Say what runs here, what is on its way, what waits and what needs a person."""
    from flows.services import read_services
    from roster.catalog import open_catalog
    from roster.errors import CatalogMissing

    settings = load_settings()
    services = read_services(settings.home)
    try:
        with open_catalog(settings.catalog_path) as reader:
            authors, waiting, problems = reader.authors(), reader.waiting(), reader.problems()
            synced_at: str | None = reader.synced_at()
    except CatalogMissing:
        authors, waiting, problems, synced_at = [], [], [], None
    on_the_way = [row for row in authors if row.newest_state == "in_progress"]
    document = {
        "home": str(settings.home),
        "services": list(services.addresses) if services else None,
        "synced_at": synced_at,
        "ready": sum(row.is_ready for row in authors),
        "in_progress": [asdict(row) for row in on_the_way],
        "waiting": [asdict(row) for row in waiting],
        "problems": [asdict(row) for row in problems],
    }

    def show() -> None:
        if services:
            OUT.print("running:", ", ".join(services.addresses), highlight=False)
        else:
            OUT.print(f"no embedded services run in {settings.home}; start them with: roster up")
        if synced_at is None:
            OUT.print("there is no catalog here yet; make one with: roster sync")
            return
        OUT.print(
            f"{document['ready']} ready, {len(on_the_way)} on their way (sync of {synced_at})",
            highlight=False,
        )
        rows = [(w.author, w.run, w.state, w.code, w.reason) for w in waiting]
        table("Waiting", ["author", "run", "state", "code", "reason"], rows, empty="nothing waits")
        bad = [(p.author, p.run, p.problem, p.code, p.reason) for p in problems]
        table("To look at", ["author", "run", "problem", "code", "reason"], bad, empty="no problems")

    emit(document, as_json=json, show=show)


def _catalog() -> Path:
    return load_settings().catalog_path


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.4f}"
