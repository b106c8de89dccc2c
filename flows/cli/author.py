"""Asking the catalog about one author: what there is, what happened, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from cyclopts.types import PositiveInt

from flows.ages import format_age
from flows.cli.catalog_file import open_for_reading
from flows.cli.filters import State, check_base
from flows.cli.output import AsJson, emit, note, say, signed, table

if TYPE_CHECKING:
    from roster.reader import CatalogReader
    from roster.rows import AdapterStory, AuthorTimesRow, EventRow, EvidenceRow, StepRow


def show(
    author: str | None = None, /, *, base: str | None = None, state: State | None = None, json: AsJson = False
) -> None:
    """Show an author's adapters, newest first: state, verdict, layout, scores. Without an author, list everyone.

    ```
    roster show --state quarantined
    ```

    Parameters
    ----------
    author:
        Whose adapters.
    base:
        Only those on this base.
    state:
        Only the adapters, or the authors, that are so.
    """
    from roster.story import describe_state

    with open_for_reading() as reader:
        check_base(reader, base)
        if author is None:
            _list_authors(reader, base, state, json=json)
            return
        found = reader.show(author).adapters
        states = [row for row in reader.states(author) if base in (None, row.base)]
        times = reader.times(author, base)
    adapters = [
        one for one in found if base in (None, one.adapter.base) and state in (None, one.adapter.state)
    ]

    def show() -> None:
        for state_row in states:
            say(describe_state(state_row))
        for one in adapters:
            _show_adapter(one)
        if not adapters:
            say("no adapter is so")
        for row in times:
            say(_describe_times(row))

    document = {
        "author": author,
        "adapters": [asdict(one) for one in adapters],
        "states": [asdict(row) for row in states],
        "times": [asdict(row) for row in times],
    }
    emit(document, as_json=json, show=show)


def why(author: str, /, *, base: str | None = None, json: AsJson = False) -> None:
    """Tell an author's story in plain sentences: what came, what was decided, how it scored, what to do next.

    Parameters
    ----------
    author:
        Whose story.
    base:
        Only what is of this base.
    """
    from roster.errors import UnknownAuthor
    from roster.rows import AuthorStory
    from roster.story import tell

    with open_for_reading() as reader:
        check_base(reader, base)
        events = reader.events(author)
        try:
            story = reader.show(author)
        except UnknownAuthor:
            if not events:
                raise
            story = AuthorStory(author, ())
        sentences = tell(story, reader.states(author), events, base=base)

    def show() -> None:
        for sentence in sentences:
            say(sentence)

    emit({"author": author, "story": sentences}, as_json=json, show=show)


def history(
    author: str, /, *, base: str | None = None, limit: PositiveInt | None = None, json: AsJson = False
) -> None:
    """List every step of an author's adapters and everything operators did, the oldest first.

    Parameters
    ----------
    author:
        Whose history.
    base:
        Only what is of this base.
    limit:
        Only the last so many steps.
    """
    with open_for_reading() as reader:
        check_base(reader, base)
        found = reader.show(author).adapters  # an unknown author is named
        of_base = {one.adapter.adapter_digest for one in found if base in (None, one.adapter.base)}
        steps = [row for row in reader.history(author) if row.adapter_digest in of_base]
        acts = [row for row in reader.events(author) if base is None or row.base in (None, base)]
    steps = sorted(steps, key=lambda row: (row.finished_at or "", row.adapter_digest, row.position))
    steps = steps if limit is None else steps[-limit:]

    def show() -> None:
        lines = sorted([*map(_step_line, steps), *map(_act_line, acts)], key=lambda line: line[0])
        columns = ("when", "adapter", "what", "outcome", "took", "by", "why")
        table(columns, lines, empty="nothing happened")

    document = {
        "author": author,
        "history": [asdict(row) for row in steps],
        "acts": [asdict(row) for row in acts],
    }
    emit(document, as_json=json, show=show)


def _step_line(row: StepRow) -> tuple[str, ...]:
    took = "" if row.seconds is None else f"{row.seconds} s"
    what = row.kind if row.attempt in (None, 1) else f"{row.kind}, attempt {row.attempt}"
    by = row.worker or ""
    return (row.finished_at or "", row.adapter_digest[:12], what, row.outcome, took, by, row.code or "")


def _act_line(row: EventRow) -> tuple[str, ...]:
    digest = (row.adapter_digest or "")[:12]
    return (row.at, digest, row.act, row.base or "every base", "", row.who, row.why)


def _list_authors(reader: CatalogReader, base: str | None, state: str | None, *, json: bool) -> None:
    rows, synced_at = reader.authors(base, state), reader.synced_at()

    def show() -> None:
        shown = [
            (
                r.author,
                r.base,
                r.state,
                (r.ready_digest or "")[:12],
                r.newest_run,
                f"{r.newest_state} ({r.newest_code})" if r.newest_code else r.newest_state,
                r.adapters,
            )
            for r in rows
        ]
        columns = ["author", "base", "state", "served", "newest run", "which is", "adapters"]
        table(columns, shown, empty="no author is so")
        note(f"as of the sync at {synced_at}")

    emit({"synced_at": synced_at, "authors": [asdict(row) for row in rows]}, as_json=json, show=show)


def _describe_times(row: AuthorTimesRow) -> str:
    ready = ""
    if row.seconds_to_ready is not None:
        ready = f"; ready {format_age(timedelta(seconds=row.seconds_to_ready))} after the first submission"
    engine = f", {row.engine_seconds:.0f} s of them on the engine"
    return f"on {row.base}: {row.runs} runs, {row.steps} steps, {row.seconds} s{engine}{ready}"


def _show_adapter(one: AdapterStory) -> None:
    a = one.adapter
    served = "served" if one.served else "not served"
    state = f"{a.state} ({a.code})" if a.code else a.state
    say(f"{a.author}/{a.run} on {a.base}: {state}, {served}")
    if a.reason:
        say(f"  {a.reason}")
    for line in _packing_lines(one.evidence):
        say(f"  {line}")
    scores = [
        (f"  {s.subject}", "" if s.bpb is None else f"{s.bpb:.4f}", signed(s.difference)) for s in one.scores
    ]
    table(["  scored with", "BPB", "minus own"], scores, empty="  not scored")


def _packing_lines(evidence: Sequence[EvidenceRow]) -> list[str]:
    decided = dict.fromkeys((e.parameter, e.value, e.decided_by) for e in evidence)
    return [f"{name}: packing {value}, decided by {by}" for name, value, by in decided]
