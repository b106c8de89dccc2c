"""Writing safetensors front to back, and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

from tasks.lora.errors import DestinationExists

Progress = Callable[[int, int], None]

# Blocks whose memory is in use while the next one is made: the last one, and one before it that may still be hashed, so
# that hashing goes on while a block is slow to make.
HELD_BLOCKS = 2

# Measured on ext4: the kernel takes 1.7 GB in such pieces in less than half of the time that pieces of 8 MB need.
_PIECE = 1 << 18
# Bytes after which the disk is set to work, so that the final sync finds little left to do: 1.9 s become 1.4 s.
_FLUSHED = 1 << 24


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written: its name, its size in bytes, the sha256 of its content in hex."""

    name: str
    bytes: int
    sha256: str


@contextmanager
def staged_folder(destination: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `destination` when the block ends, and vanishes if it fails.

    It lies beside the destination, so that the last step is one rename. Raises DestinationExists.
    """
    # A link is never replaced: a folder cannot be renamed to it, and where it leads is not ours to fill.
    if destination.is_symlink() or (
        destination.exists() and (not destination.is_dir() or any(destination.iterdir()))
    ):
        raise DestinationExists(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}.", suffix=".partial"))
    try:
        yield staged
        staged.chmod(0o755)
        sync_path(staged)
        staged.replace(destination)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    sync_path(destination.parent)


def write_file(path: Path, data: bytes) -> WrittenFile:
    """Write a small file and return its description; it is on the disk afterwards."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path.name, len(data), hashlib.sha256(data).hexdigest())


def write_safetensors(
    path: Path, header: bytes, blocks: Iterator[memoryview], total: int, progress: Progress | None = None
) -> WrittenFile:
    """Write a safetensors file and return its description; it is on the disk afterwards.

    header: its first bytes. blocks: the tensors' bytes one after another, cut anywhere. total: bytes in all. A second
    thread hashes blocks while others are made; the last HELD_BLOCKS are held, the memory of earlier ones may be used
    again. progress: called with bytes done and bytes in all after every block.
    """
    done = flushed = 0
    with path.open("xb", buffering=0) as file, _Hasher() as hasher:
        _reserve(file.fileno(), total)
        for block in chain([memoryview(header)], blocks):
            hasher.add(block)
            _write_all(file.fileno(), block)
            done += len(block)
            if done - flushed >= _FLUSHED:
                # The kernel starts to write these pages to the disk, and drops none, as all are still dirty.
                os.posix_fadvise(file.fileno(), flushed, done - flushed, os.POSIX_FADV_DONTNEED)
                flushed = done
            if progress is not None:
                progress(done, total)
        digest = hasher.hexdigest()
        os.fsync(file.fileno())
    return WrittenFile(path.name, done, digest)


def digest_safetensors(header: bytes, blocks: Iterator[memoryview]) -> str:
    """Return the sha256 in hex of the file that `write_safetensors` would write of the same arguments."""
    with _Hasher() as hasher:
        for block in chain([memoryview(header)], blocks):
            hasher.add(block)
        return hasher.hexdigest()


class _Hasher:
    """A sha256 that works in a thread of its own."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._helper = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._helper.shutdown()

    def add(self, block: memoryview) -> None:
        """Hash a block by and by; on return, all are hashed but it and the HELD_BLOCKS - 1 before it."""
        if len(self._waiting) == HELD_BLOCKS:
            self._waiting.popleft().result()
        self._waiting.append(self._helper.submit(self._digest.update, block))

    def hexdigest(self) -> str:
        """Return the digest of all blocks."""
        while self._waiting:
            self._waiting.popleft().result()
        return self._digest.hexdigest()


def _reserve(descriptor: int, size: int) -> None:
    """Ask for the whole file's place on the disk at once: a full disk shows now, and writing takes less."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # what file systems say that cannot
            raise


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block[:_PIECE]) :]


def sync_path(path: Path) -> None:
    """Return when a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
