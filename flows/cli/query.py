"""Asking the catalog about everyone: who is ready, and what waits."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Literal

from flows.cli.catalog_file import open_for_reading
from flows.cli.filters import OlderThan, check_base, is_older
from flows.cli.output import AsJson, emit, note, signed, table


def ready(*, base: str | None = None, older_than: OlderThan = None, json: AsJson = False) -> None:
    """List the serve-ready authors.

    Parameters
    ----------
    base:
        Only those on this base.
    older_than:
        Only those scored longer ago, such as 30d.
    """
    with open_for_reading() as reader:
        check_base(reader, base)
        rows, synced_at = reader.ready(base), reader.synced_at()
        withheld = [row for row in reader.states() if (row.held or row.retired) and base in (None, row.base)]
    rows = [row for row in rows if is_older(row.measured_at, older_than)]

    def show() -> None:
        shown = [
            (
                r.author,
                r.base,
                f"{r.own:.4f}",
                f"{r.base_bpb:.4f}",
                signed(r.margin),
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
            note(f"judged by earlier code or on another engine, served all the same: {', '.join(stale)}")
        if withheld:
            said = ", ".join(
                f"{row.author} ({'retired' if row.retired else 'held'} on {row.base or 'every base'})"
                for row in withheld
            )
            note(f"not served, as operators said: {said}")
        note(f"as of the sync at {synced_at}")

    emit({"synced_at": synced_at, "ready": [row._asdict() for row in rows]}, as_json=json, show=show)


def waiting(
    *,
    base: str | None = None,
    state: Literal["waiting", "stopped"] | None = None,
    older_than: OlderThan = None,
    json: AsJson = False,
) -> None:
    """List the adapters that are taken up again by themselves, and what each waits for, the longest waiting first.

    Parameters
    ----------
    base:
        Only those for this base.
    state:
        waiting: for something to be handed in. stopped: by a fault that is not the adapter's.
    older_than:
        Only those that have waited longer, such as 2h.
    """
    from flows.ages import format_age
    from roster.advice import advise

    with open_for_reading() as reader:
        check_base(reader, base)
        rows, synced_at = reader.waiting(base), reader.synced_at()
    rows = [row for row in rows if state in (None, row.state) and is_older(row.since, older_than)]
    now = datetime.now(UTC)

    def show() -> None:
        shown = [
            (
                f"{r.author}/{r.run}",
                r.base,
                r.state,
                r.code,
                format_age(now - datetime.fromisoformat(r.since)) if r.since else "",
                r.reason,
            )
            for r in rows
        ]
        table(["adapter", "base", "state", "code", "for", "reason"], shown, empty="nothing waits")
        for code in dict.fromkeys(row.code for row in rows):
            note(f"{code}: {advise(code)}")
        note(f"as of the sync at {synced_at}")

    emit({"synced_at": synced_at, "waiting": [asdict(row) for row in rows]}, as_json=json, show=show)
