"""The whole roster as one page, to be printed, sent, and opened anywhere."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.catalog_file import open_for_reading
from flows.cli.output import AsJson, emit, note, say

if TYPE_CHECKING:
    from storage.s3 import S3Store


def report(
    out: Path,
    /,
    *,
    base: str | None = None,
    anonymous: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: AsJson = False,
) -> None:
    """Write the whole roster as one HTML page: who is served, what needs a look, margins, matrices, every author.

    The page holds everything, asks nothing of any server, and prints. It is of the catalog's last sync.

    ```
    roster report roster.html
    ```

    Parameters
    ----------
    out:
        The file; one that is there is replaced.
    base:
        Only this base.
    anonymous:
        Number the authors, anew each time, and leave out every name, reason, path and digest.
    """
    from tasks.reporting import write_report

    with open_for_reading() as reader:
        written = write_report(reader, out, store=_store(), base=base, anonymous=anonymous)

    def show() -> None:
        for gap in written.left_out:
            note(gap)
        say(
            f"{written.path}: {written.served} of {written.authors} served, {written.matrices} matrices, "
            f"{written.bytes / 1e6:.1f} MB, as of the sync at {written.synced_at}"
        )

    emit({**asdict(written), "path": str(written.path)}, as_json=json, show=show)


def _store() -> S3Store | None:
    """The store, given up within seconds where it does not answer; None where none is set."""
    from flows import connect
    from flows.settings import SettingsIncomplete, load_settings

    try:
        return connect.open_store_hurried(load_settings())
    except SettingsIncomplete:
        return None
