"""A file that is replaced as a whole: made beside the old one, flushed, and put under its name.

The sum beside it, `<name>.sum`, tells that every byte is as it was written, without reading it through DuckDB: the
sha256 of the file, and which file that was. It only saves time. Where it is missing, or does not fit, nothing is known.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class FileMark:
    """Which file lies under a name: another mark, another file; the same mark, unwritten since, but for its disk."""

    inode: int
    size: int
    modified_ns: int


def mark_of(path: Path) -> FileMark | None:
    """Return the mark of the file at `path`, None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return FileMark(found.st_ino, found.st_size, found.st_mtime_ns)


def write_ahead(path: Path) -> Path:
    """Return where DuckDB keeps the write-ahead log of a database."""
    return path.with_name(path.name + ".wal")


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Give a name of our own beside `path`; afterwards nothing is left under it, or what DuckDB makes of it."""
    fresh = path.with_name(f"{path.name}.new-{uuid.uuid4().hex}")
    try:
        yield fresh
    finally:
        _remove_all(fresh)


def remove_leftovers(path: Path) -> None:
    """Remove what killed syncs left beside `path`; the caller holds the lock, so none of it is in use."""
    for leftover in path.parent.glob(path.name + ".new-*"):
        _remove_all(leftover)


def _remove_all(fresh: Path) -> None:
    """Remove a file, its write-ahead log, and `<name>.tmp`, the folder for what DuckDB has no memory for."""
    for leftover in (fresh, write_ahead(fresh), fresh.with_name(fresh.name + ".tmp")):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Give a damaged file a second name and return it; there is no moment in which readers find nothing."""
    aside = path.with_name(path.name + ".damaged")
    aside.unlink(missing_ok=True)
    os.link(path, aside)
    return aside


def set_log_aside(path: Path) -> Path | None:
    """Give another name to a write-ahead log beside `path` and return it, None where there is no log."""
    log = write_ahead(path)
    return log.replace(log.with_name(log.name + ".damaged")) if log.exists() else None


def swap_in(fresh: Path, path: Path) -> None:
    """Put `fresh` in the place of `path`: first onto the disk, then under the name; then note its sum.

    A write-ahead log there is another program's and not of this file: it must not be replayed into it.
    """
    with ThreadPoolExecutor(1) as beside_us:  # while the disk writes
        summing = beside_us.submit(file_sha256, fresh)
        _flush(fresh)
        digest, mark = summing.result(), mark_of(fresh)
    set_log_aside(path)
    fresh.replace(path)
    _flush(path.parent)
    if mark is not None:
        _note_sum(path, digest, mark)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, 64 hexadecimal characters."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def noted_sum(path: Path, mark: FileMark) -> str | None:
    """Return the noted sha256 of the file of this mark at `path`, None where there is no such note."""
    try:
        digest, *numbers = _sum_of(path).read_text(encoding="ascii").split()
        noted = FileMark(*map(int, numbers))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return digest if noted == mark else None


def _note_sum(path: Path, digest: str, mark: FileMark) -> None:
    """Note beside the file of this mark, which lies at `path`, that its sha256 is `digest`."""
    with beside(path) as fresh:
        fresh.write_text(f"{digest} {mark.inode} {mark.size} {mark.modified_ns}\n", encoding="ascii")
        fresh.replace(_sum_of(path))


def _sum_of(path: Path) -> Path:
    return path.with_name(path.name + ".sum")


def _flush(path: Path) -> None:
    """Wait until the disk has a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
