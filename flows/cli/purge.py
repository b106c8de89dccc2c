"""Removing everything of an author."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import CycloptsError, Parameter

from flows.cli.lifecycle import Reason
from flows.cli.output import AsJson, emit, note, say, table

if TYPE_CHECKING:
    from flows.settings import Settings
    from storage.s3 import S3Store
    from tasks.purging import Purged, PurgePlan

_UNCONFIRMED, _UNFINISHED = 2, 1

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def purge(
    author: str,
    /,
    *,
    why: Reason,
    who: str | None = None,
    dry_run: Flag = False,
    yes: Flag = False,
    json: AsJson = False,
) -> int:
    """Remove everything of an author for good: uploads, served adapters, held-out text, measurements with text.

    Ledgers stay, reduced to digests, submissions, outcomes, reasons and times. The author is retired first, and is out
    of the published roster before any adapter goes. Broken off, it goes on when it is called again. Backups, and what
    servers and workers keep on their disks, are yours to clear: docs/lifecycle.md.

    ```
    roster purge ash --why "the author asked for it" --dry-run
    ```

    Parameters
    ----------
    author:
        Whose everything.
    why:
        Your reason; it stays on the author's record.
    who:
        In whose name; your own user's if left out.
    dry_run:
        Say what would be removed, and do nothing.
    yes:
        Do not ask for the author's name to be typed; needed with --json, and where there is no terminal.
    """
    from flows.connect import open_store, operator_name
    from flows.settings import load_settings
    from tasks.purging import plan_purge, purge_author

    settings = load_settings()
    store = open_store(settings)
    plan = plan_purge(store, author)
    if dry_run:
        emit(_plan_document(plan), as_json=json, show=lambda: _show_plan(plan))
        return 0
    if not yes and not _is_confirmed(plan, as_json=json):
        note("nothing was done: that is not the author's name")
        return _UNCONFIRMED
    done = purge_author(
        store,
        author,
        who=who or operator_name(),
        why=why,
        sync=partial(_sync_now, settings, store, author),
        say=note,
    )
    emit(_purged_document(author, done), as_json=json, show=lambda: _show_purged(author, done))
    return _UNFINISHED if done.left or done.unreadable else 0


def _sync_now(settings: Settings, store: S3Store, author: str) -> None:
    from flows.connect import sync_limits
    from storage.keys import author_record_key
    from tasks.cataloguing import sync_catalog

    sync_catalog(store, settings.catalog_path, sync_limits(settings), touched=[author_record_key(author)])


def _is_confirmed(plan: PurgePlan, *, as_json: bool) -> bool:
    """Whether the author's name was typed, on a terminal; with --json stdout is no place to show what would go."""
    if as_json or sys.stdin is None or not sys.stdin.isatty():
        asks = "a purge asks for the author's name to be typed; say --yes where nobody can, and with --json."
        raise CycloptsError(msg=asks, command_chain=("purge",))
    _show_plan(plan)
    note(f"This cannot be undone. Type the author's name to purge {plan.author}:")
    return sys.stdin.readline().strip() == plan.author


def _plan_document(plan: PurgePlan) -> dict[str, Any]:
    return {
        "author": plan.author,
        "dry_run": True,
        "parts": {part.name: {"objects": part.objects, "bytes": part.bytes} for part in plan.parts},
        "ledgers": plan.ledgers,
        "served": list(plan.served),
        "at_work": list(plan.holders),
        "unreadable": list(plan.unreadable),
    }


def _purged_document(author: str, done: Purged) -> dict[str, Any]:
    return {
        "author": author,
        "dry_run": False,
        "parts": {part.name: {"objects": part.objects, "bytes": part.bytes} for part in done.parts},
        "ledgers": done.ledgers,
        "interrupted": list(done.interrupted),
        "left": list(done.left),
        "unreadable": list(done.unreadable),
    }


def _show_plan(plan: PurgePlan) -> None:
    rows = [(part.name, part.objects, part.bytes) for part in plan.parts if part.objects]
    table(("removed", "objects", "bytes"), rows, empty=f"{plan.author}: nothing is left to be removed")
    say(f"{plan.ledgers} ledgers would be reduced to digests, outcomes and reasons")
    if plan.served:
        say(f"served now on {', '.join(plan.served)}; out of the roster first")
    for holder in plan.holders:
        note(f"{holder} is at work on it, and would be stopped")
    _show_unreadable(plan.unreadable)


def _show_purged(author: str, done: Purged) -> None:
    for holder in done.interrupted:
        note(
            f"{holder} was at work, and stops at its next write; purge again then, should it have left anything"
        )
    for key in done.left:
        note(f"{key} came anew each time it was removed: who writes it? Then purge again")
    _show_unreadable(done.unreadable)
    objects = sum(part.objects for part in done.parts)
    say(f"{author}: purged; {objects} objects removed, {done.ledgers} ledgers reduced")


def _show_unreadable(unreadable: tuple[str, ...]) -> None:
    for fault in unreadable:
        note(f"{fault} It stays as it is: delete it, or mend it and purge again")
