"""A progress bar on stderr for work counted in bytes; silent when stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from flows.cli.output import ERR


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (bytes done, bytes in total); the bar goes when the block ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as bar:
        shown = bar.add_task(title, total=None)

        def update(done: int, total: int) -> None:
            bar.update(shown, completed=done, total=total)

        yield update
