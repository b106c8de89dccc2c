"""One sync at a time on this machine: a file lock that dies with its process."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roster.errors import CatalogBusy, CatalogNotLocal

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_PAUSE_S = 0.05


@contextmanager
def sync_lock(catalog: Path, wait_s: float = 0) -> Iterator[None]:
    """Hold `<catalog>.lock` exclusively, with this process's id written into it; another's is waited for so long.

    The kernel lets go of it when the process ends, however it ends. The file itself stays: removing it would
    let two processes lock two different files.

    Raises CatalogBusy when another still holds it then, CatalogNotLocal when the file system has no locks.
    """
    descriptor = os.open(
        catalog.with_name(catalog.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
    )
    end = time.monotonic() + wait_s
    try:
        while not _is_locked(descriptor, catalog):
            if time.monotonic() >= end:
                holder = os.pread(descriptor, 20, 0).strip()
                raise CatalogBusy(catalog, int(holder) if holder.isdigit() else None)
            time.sleep(_PAUSE_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, catalog: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise CatalogNotLocal(catalog, str(error)) from error
        raise
    return True
