"""Bringing an old adapter into a form that no tool can misread."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory

from flows.cli.convert import Packing, forced_packing, read_named_base, show_inspection
from flows.cli.output import AsJson, emit, note


def migrate(
    directory: ExistingDirectory,
    /,
    *,
    base: str,
    output: Path | None = None,
    stamp: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    packing: Packing = "auto",
    dry_run: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: AsJson = False,
) -> int:
    """Save an old adapter again so that other tools read it right: re-packed, or with a true marker.

    Re-packed: all experts rank_major and standard, as PEFT 0.19.1 and later and vLLM take them, with the marker that
    says so. Nothing is written where neither a statement nor the tensors tell the packing: a marker would be a guess.
    For serving in this pipeline no migration is needed.

    ```
    roster migrate trained/ash --base models/tiny --output migrated/ash
    ```

    Parameters
    ----------
    directory:
        The directory that the trainer saved. It is not changed.
    base:
        The base's config.json, a directory that holds one, or the name of a registered base, whose policy then counts.
    output:
        A directory that does not exist yet; beside the old one, with -migrated added, if left out.
    stamp:
        Keep every weight where it is, and write only the marker of the packing that it has. For tools that read the
        marker; others still take the file for rank_major.
    packing:
        Force a reading instead of deciding from evidence.
    dry_run:
        Say what would be written, and write nothing.
    """
    from flows.cli.progress import byte_progress
    from tasks.directories import migrate_directory

    here = directory.resolve()
    destination = output or here.with_name(f"{here.name}-migrated")
    with byte_progress("writing") as progress:
        found = migrate_directory(
            directory,
            None if dry_run else destination,
            read_named_base(base),
            packing=forced_packing(packing),
            stamp=stamp,
            progress=progress,
        )

    def show() -> None:
        show_inspection(found)
        what = "the marker of the packing it has" if stamp else "rank_major, standard, marked"
        note(f"{'would write' if dry_run else 'wrote'} {destination}: {what}")

    emit(found | {"destination": str(destination), "written": not dry_run}, as_json=json, show=show)
    return 0
