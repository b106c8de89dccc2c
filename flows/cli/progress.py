"""Progress bars on stderr, for work counted in bytes or in parts; silent when stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from flows.cli.output import ERR


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (bytes done, bytes in total); the bar goes when the block ends."""
    with _bar(title, DownloadColumn(), TransferSpeedColumn()) as update:
        yield update


@contextmanager
def part_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """The same for (parts done, parts in total), whatever they are; several passes may follow each other."""
    with _bar(title, TaskProgressColumn(), TimeRemainingColumn()) as update:
        yield update


@contextmanager
def _bar(title: str, *more: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), *more)
    with Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as bar:
        shown = bar.add_task(title, total=None)

        def update(done: int, total: int) -> None:
            bar.update(shown, completed=done, total=total)

        yield update
