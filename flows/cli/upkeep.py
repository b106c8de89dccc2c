"""The store's upkeep: garbage, backups, restores."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory

from flows.cli.output import AsJson, emit, note, say, table

_INCOMPLETE = 1

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def gc(*, dry_run: Flag = False, older_than: timedelta = timedelta(days=7), json: AsJson = False) -> None:
    """Remove converted adapters and controls from the store that nothing refers to, and files half sent a day ago.

    Kept are: what the roster names or one of the last 20 rosters did, what a ready verdict, an adapter without a
    verdict or a pin needs, everything of authors that a run is at work on, and what is younger. A later run of an
    adapter puts its files there again.

    ```
    roster gc --dry-run
    ```

    Parameters
    ----------
    dry_run:
        List them with their bytes, and remove nothing.
    older_than:
        Only what has lain there longer, such as 7d or 12h.
    """
    from flows.connect import open_store, worker_name
    from flows.settings import load_settings
    from tasks.collecting import Collected, collect, list_abandoned, list_unreferenced

    store = open_store(load_settings())
    now = datetime.now(UTC)
    found = list_unreferenced(store, older_than=older_than, now=now)
    if dry_run:
        done = Collected((), (), tuple(list_abandoned(store, now)))
    else:
        done = collect(store, found, worker=worker_name())
    shown = found if dry_run else done.removed
    total = sum(one.bytes for one in shown)
    document = {
        "dry_run": dry_run,
        "prefixes": [
            {"prefix": one.prefix, "objects": len(one.objects), "bytes": one.bytes} for one in shown
        ],
        "bytes": total,
        "left": [{"prefix": prefix, "why": why} for prefix, why in done.left],
        "aborted": [{"key": one.key, "begun": one.begun.isoformat()} for one in done.aborted],
    }

    def show() -> None:
        rows = [(one.prefix, len(one.objects), one.bytes, f"{one.newest:%Y-%m-%d %H:%M}") for one in shown]
        empty = "nothing is unreferenced" if not found else "nothing was removed"
        table(("prefix", "objects", "bytes", "since (UTC)"), rows, empty=empty)
        for prefix, why in done.left:
            note(f"{prefix} stays: {why}")
        for one in done.aborted:
            note(
                f"{one.key}, half sent since {one.begun:%Y-%m-%d %H:%M}, {'would go' if dry_run else 'is gone'}"
            )
        note(f"{len(shown)} prefixes, {total} bytes {'would be removed' if dry_run else 'removed'}")

    emit(document, as_json=json, show=show)


def backup(directory: Path, /, *, with_uploads: Flag = False, json: AsJson = False) -> int:
    """Copy the bucket into a new folder, each object by its sha256. Broken off, it goes on when it is called again.

    ```
    roster backup saved
    ```

    Parameters
    ----------
    directory:
        A folder that does not exist yet, or that holds a backup that was broken off.
    with_uploads:
        Copy what trainers uploaded too; what is served, proven and recorded does not need it.
    """
    from flows.cli.progress import byte_progress
    from flows.connect import open_store
    from flows.settings import load_settings
    from tasks.backup import back_up

    with byte_progress("copying") as progress:
        done = back_up(open_store(load_settings()), directory, with_uploads=with_uploads, progress=progress)
    info = done.info
    document = info.model_dump(mode="json", by_alias=True) | {"copied": done.copied}

    def show() -> None:
        for key in info.missing:
            note(f"{key}: the roster names it, and it is not in the store")
        for key in info.damaged:
            note(
                f"{key}: its bytes are not those whose sha256 was noted when it was written; copied as it is"
            )
        say(f"{directory}: {info.objects} objects, {info.bytes} bytes ({done.copied} objects copied now)")

    emit(document, as_json=json, show=show)
    return _INCOMPLETE if info.missing or info.damaged else 0


def restore(directory: ExistingDirectory, /, *, into_existing: Flag = False, json: AsJson = False) -> int:
    """Put a backup into the empty bucket that the settings name. Broken off, it goes on when it is called again.

    Nothing that is there is written over. The published roster comes last; then run `roster rebuild`.

    ```
    roster restore saved --into-existing
    ```

    Parameters
    ----------
    directory:
        A folder that `roster backup` finished.
    into_existing:
        Add what is missing to a bucket that is in use. Objects that differ stay as they are there, and are listed.
    """
    from flows.cli.progress import byte_progress
    from flows.connect import open_store
    from flows.settings import load_settings
    from tasks.restore import restore as restore_backup

    with byte_progress("restoring") as progress:
        done = restore_backup(
            open_store(load_settings()), directory, into_existing=into_existing, progress=progress
        )
    document = {
        "objects": done.info.objects,
        "put": done.put,
        "same": done.same,
        "kept": list(done.kept),
        "purged": list(done.purged),
        "with_uploads": done.info.with_uploads,
    }

    def show() -> None:
        for key in done.kept:
            note(f"{key}: another object is there, which stays")
        for author in done.purged:
            note(f"{author} was purged since this backup, which has files of theirs: purge this author again")
        say(
            f"{done.put} objects put, {done.same} were there, {len(done.kept)} differ; of {done.info.objects} in all"
        )
        note("run `roster rebuild`: it makes the catalog anew and publishes what is ready")

    emit(document, as_json=json, show=show)
    return _INCOMPLETE if done.kept or done.purged else 0
