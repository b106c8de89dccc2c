"""This worker's disk: a folder of each run's own, and what the runs of a machine share: converted
adapters, and uploads that a retry may ask for.

A file lock on each folder says that a run uses it. The kernel lets go of a lock when its process ends, however it
ends, so whatever is not locked may be removed by anyone. The disk must be a local one: folders on a network file
system cannot be locked for removal, and would stay.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread
from uuid import uuid4

from tasks.errors import DiskFull

RESERVE_BYTES = 512 << 20
"""Left free in any case: for the logs, the catalog, and the runs beside this one, which have looked before it wrote."""

# No room, no room within the user's quota, no room within the largest file that is allowed.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunDisk:
    """What one run uses of the folder `work`. Nothing is made before it is asked for; `close` lets go of all."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._runs = work / "runs"
        self._folder: Path | None = None
        self._locks: dict[Path, int] = {}
        self._removals: list[Thread] = []

    def folder(self) -> Path:
        """A folder that no other run touches and that `close` removes; what killed runs left of theirs goes now."""
        if self._folder is None:
            self._runs.mkdir(parents=True, exist_ok=True)
            for left in self._runs.iterdir():
                _remove_unused(left)
            made = Path(mkdtemp(dir=self._runs))
            while not self.hold(made):  # someone took it for a dead run's before it was locked
                made = Path(mkdtemp(dir=self._runs))
            self._folder = made
        return self._folder

    def require(self, needed: int, adapter: str) -> None:
        """Return if so many bytes can be written here, beside the reserve; for it, shared folders that no run uses go.

        Raises:
            DiskFull: there is no room even so.
        """
        folder = self.folder()
        if shutil.disk_usage(folder).free >= needed + RESERVE_BYTES:
            return
        trim_folders([*self._work.glob("sources/*"), *self._work.glob("served/*/*/*")], keep=0)
        free = shutil.disk_usage(folder).free
        if free < needed + RESERVE_BYTES:
            expected = f"{_gigabytes(needed + RESERVE_BYTES)} free ({_gigabytes(RESERVE_BYTES)} as a reserve)"
            found = f"{_gigabytes(free)}, and no converted adapter there that no run uses"
            raise DiskFull(adapter, str(self._work), expected, found)

    def hold(self, path: Path) -> bool:
        """Whether this folder is there. If it is, it counts as used now, and nobody removes it before `close`."""
        if path not in self._locks:
            descriptor = _lock(path, fcntl.LOCK_SH)
            if descriptor is None:
                return False
            self._locks[path] = descriptor
        os.utime(path)
        return True

    def is_held(self, path: Path) -> bool:
        """Whether this run has held the folder already."""
        return path in self._locks

    def share(self, made: Path, path: Path) -> None:
        """Give a finished folder of this run the name by which others find it, and hold it.

        If there is one of that name already, that one stays and `made` goes: a name always means the same bytes.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = None if self.hold(path) else _lock(made, fcntl.LOCK_SH)
        if descriptor is not None:
            try:
                made.rename(path)
            except OSError:
                os.close(descriptor)
                if not self.hold(path):  # else another run was quicker
                    raise
            else:
                self._locks[path] = descriptor
                return
        shutil.rmtree(made)

    def drop(self, path: Path) -> None:
        """Remove a shared folder, unless another run uses it: its name at once, its bytes beside what comes next.

        To free some gigabytes takes the kernel a part of a second.
        """
        descriptor = self._locks.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)
        gone = _take_away(path)
        if gone is not None:
            removal = Thread(target=shutil.rmtree, args=(gone,), kwargs={"ignore_errors": True})
            removal.start()
            self._removals.append(removal)

    def close(self) -> None:
        """Remove the run's own folder, let go of the shared ones, and wait until what was dropped is gone."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks.clear()
        while self._removals:
            self._removals.pop().join()


def trim_folders(folders: list[Path], keep: int) -> None:
    """Remove all but the `keep` folders used last; those that a run holds stay in any case."""
    used: dict[Path, float] = {}
    for path in folders:
        try:
            used[path] = path.stat().st_mtime
        except FileNotFoundError:
            continue
    for path in sorted(used, key=lambda path: used[path], reverse=True)[keep:]:
        _remove_unused(path)


def disk_full(error: OSError, adapter: str, work: Path) -> DiskFull | None:
    """What an error of the disk says if it is about room; None if it is about anything else.

    `work` is named where the error does not tell the file: most do not.
    """
    if error.errno not in _FULL:
        return None
    path = error.filename if isinstance(error.filename, str) else str(work)
    return DiskFull(adapter, path, "room", f"the error {os.strerror(error.errno)!r} while writing")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _lock(path: Path, kind: int) -> int | None:
    """An open descriptor that locks the folder at `path`, None if there is none."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, kind)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # while we waited it was removed, and made anew


def _remove_unused(path: Path) -> None:
    """Remove a folder that nobody holds: first its name, so that none is ever found half empty."""
    gone = _take_away(path)
    if gone is not None:
        shutil.rmtree(gone, ignore_errors=True)


def _take_away(path: Path) -> Path | None:
    """The name under which a folder that nobody holds may be removed now; None if there is none, or somebody does."""
    try:
        descriptor = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    if descriptor is None:
        return None
    try:
        gone = path.with_name(f".gone-{uuid4().hex}")
        path.rename(gone)
        return gone
    finally:
        os.close(descriptor)
