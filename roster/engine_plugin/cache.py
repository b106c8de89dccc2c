"""Fetched adapters on disk: each in a folder named by its output digest, verified, held while a server knows it.

`adapters/<digest>/` holds the adapter's files and its manifest. Whole folders are renamed into place, and a damaged
file is replaced by one rename, so a path never loses its bytes or gets others. Servers may share a cache: each holds a
shared lock on `locks/<digest>` while its vLLM knows the adapter, since vLLM exits when the folder of one that it knows
is gone. A lock ends with its process. The time of the lock's file is that of the adapter's last use.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from roster.engine_plugin.refusals import NotIntact
from roster.serving import Manifest, ServedFile
from storage.digests import FileDigest, directory_digest, sha256_file

MANIFEST = "manifest.json"
_INCOMING = ".incoming"

Signature = tuple[tuple[str, int, int, int], ...]
Download = Callable[[ServedFile, Path], FileDigest]
"""Brings a file to that path, and returns the digest of what came."""


@dataclass(slots=True)
class Hold:
    """An adapter that this process may have told vLLM of; its folder stays until `release`."""

    digest: str
    path: Path
    _lock: int
    _signature: Signature = field(default=())

    def is_intact(self) -> bool:
        """Whether the files are those that were verified, by size, time and place on disk."""
        return bool(self._signature) and _signature(self.path) == self._signature

    def note_use(self) -> None:
        """Make this the adapter that was used last."""
        os.utime(self._lock)

    def note_verified(self) -> None:
        """Remember the files as they are now as verified."""
        self._signature = _signature(self.path)

    def release(self) -> None:
        """Give the folder up; vLLM must not know it any more."""
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class Entry:
    """An adapter in the cache: its size in bytes, and when it was used last (seconds since 1970)."""

    digest: str
    bytes: int
    used_at: float


class AdapterCache:
    """The cache under `folder`. Its methods read and write disks: call them from threads; several may at once."""

    def __init__(self, folder: Path) -> None:
        self._adapters, self._locks = folder / "adapters", folder / "locks"
        self._adapters.mkdir(parents=True, exist_ok=True)
        self._locks.mkdir(exist_ok=True)
        for left in self._adapters.glob(f"*{_INCOMING}"):  # of a server that was killed while it fetched
            with suppress(BlockingIOError), self._filling(left.name.removesuffix(_INCOMING), wait=False):
                pass

    def hold(self, digest: str) -> Hold:
        """Keep an adapter's folder from being removed, whether it is there yet or not; waits for nothing.

        Raises BlockingIOError while it is being removed, OSError.
        """
        lock = os.open(self._locks / digest, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        held = Hold(digest, self._adapters / digest, lock)
        held.note_use()
        return held

    def read_manifest(self, digest: str) -> Manifest | None:
        """The manifest of an adapter in the cache; None where it is not there, cannot be read, or is another's."""
        try:
            manifest = Manifest.model_validate_json((self._adapters / digest / MANIFEST).read_bytes())
            check_manifest(digest, digest, manifest)
        except (FileNotFoundError, ValueError, NotIntact):
            return None
        return manifest

    def count_missing(self, manifest: Manifest) -> int:
        """How many bytes of an adapter are not here yet."""
        folder = self._adapters / manifest.output_digest
        return sum(file.bytes for file in manifest.files if not (folder / file.name).exists())

    def fill(self, held: Hold, name: str, manifest: Manifest, download: Download) -> int:
        """Verify every byte of a held adapter and bring what is missing or damaged; returns the files brought.

        `name` is the adapter's, for messages. Whole or not at all: what is not as the manifest, which was checked,
        says is not put there.
        Raises NotIntact when `download` brings other bytes; whatever `download` raises; OSError.
        """
        with self._filling(held.digest) as incoming:
            bad = [file for file in manifest.files if not _is_whole(held.path / file.name, file)]
            for file in bad:
                _bring(name, file, incoming, download)
            if bad or self.read_manifest(held.digest) != manifest:
                (incoming / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
            if held.path.exists():
                for path in incoming.iterdir():
                    path.replace(held.path / path.name)
            else:
                incoming.replace(held.path)
            held.note_verified()
        return len(bad)

    def list_entries(self) -> list[Entry]:
        """All adapters in the cache, the one that was not used for longest first."""
        found = []
        for path in self._adapters.iterdir():
            if path.name.endswith(_INCOMING) or not path.is_dir():
                continue
            with suppress(FileNotFoundError):  # another server may be removing it
                size = sum(file.stat().st_size for file in path.iterdir())
                found.append(Entry(path.name, size, (self._locks / path.name).stat().st_mtime))
        return sorted(found, key=lambda entry: entry.used_at)

    def remove(self, digest: str) -> bool:
        """Remove an adapter, unless any server holds it; tells whether it is gone."""
        lock = os.open(self._locks / digest, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            shutil.rmtree(self._adapters / digest, ignore_errors=True)
            return not (self._adapters / digest).exists()
        finally:
            os.close(lock)

    @contextmanager
    def _filling(self, digest: str, *, wait: bool = True) -> Iterator[Path]:
        """An empty folder to bring files into, for one thread of one process at a time; nothing stays of it.

        Raises BlockingIOError where another has it and `wait` is false.
        """
        incoming = self._adapters / f"{digest}{_INCOMING}"
        lock = os.open(self._locks / incoming.name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                shutil.rmtree(incoming, ignore_errors=True)
                incoming.mkdir()
                yield incoming
            finally:
                shutil.rmtree(incoming, ignore_errors=True)
        finally:
            os.close(lock)


def check_manifest(name: str, digest: str, manifest: Manifest) -> None:
    """Raise NotIntact, which names the adapter, unless a manifest is that of an output digest.

    A plain file name is one that leads nowhere else, and is no second line of what the digest is made over.
    """
    for file in manifest.files:
        if Path(file.name).name != file.name or not file.name.isprintable() or file.name[:1] in ("", "."):
            raise NotIntact(name, MANIFEST, "plain file names", repr(file.name))
    made = directory_digest(FileDigest(file.name, file.bytes, file.sha256) for file in manifest.files)
    for found in (manifest.output_digest, made):
        if found != digest:
            raise NotIntact(name, MANIFEST, f"files that make the digest {digest}", found)


def _is_whole(path: Path, file: ServedFile) -> bool:
    try:
        return path.stat().st_size == file.bytes and sha256_file(path).sha256 == file.sha256
    except FileNotFoundError:
        return False


def _bring(name: str, file: ServedFile, incoming: Path, download: Download) -> None:
    came = download(file, incoming / file.name)
    if (came.bytes, came.sha256) != (file.bytes, file.sha256):
        expected = f"{file.bytes} bytes with sha256 {file.sha256}"
        raise NotIntact(name, file.name, expected, f"{came.bytes} bytes with sha256 {came.sha256}")


def _signature(folder: Path) -> Signature:
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.name != MANIFEST]
    except FileNotFoundError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
