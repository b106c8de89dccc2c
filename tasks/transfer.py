"""Converted directories between this machine's disk and the object store, verified both ways."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from roster.serving import Manifest
from storage.digests import FileDigest, sha256_file
from storage.documents import read_document
from storage.errors import InvalidDocument, ObjectNotFound, StoreUnavailable
from storage.keys import manifest_key, serving_prefix
from storage.progress import Progress, Tally
from storage.s3 import S3Store
from tasks.disk import RunDisk
from tasks.lora.write import sync_path


def recorded_files(record: Any) -> tuple[FileDigest, ...]:
    """The files of a ledger record's `files` list."""
    return tuple(FileDigest(file["name"], file["bytes"], file["sha256"]) for file in record)


def read_manifest(store: S3Store, author: str, output_digest: str) -> Manifest:
    """The manifest of a staged adapter.

    Raises:
        ObjectNotFound: it was never staged, or was taken away.
        InvalidDocument: it is none, or names a file that would not lie in the folder that it is fetched to.
    """
    key = manifest_key(serving_prefix(author, output_digest))
    manifest, _ = read_document(store, key, Manifest)
    for file in manifest.files:
        if Path(file.name).name != file.name or file.name in ("", ".."):
            raise InvalidDocument(key, f"files: {file.name!r} is no plain file name")
    return manifest


def fetch_served(
    store: S3Store,
    served: Manifest,
    disk: RunDisk,
    destination: Path,
    progress: Progress | None = None,
) -> None:
    """Download a staged adapter as its manifest lists it; where it lies already it is only held.

    Raises:
        ObjectNotFound, StoreUnavailable: as `fetch_directory`.
    """
    if disk.hold(destination):
        return
    files = [FileDigest(file.name, file.bytes, file.sha256) for file in served.files]
    prefix = serving_prefix(served.author, served.output_digest)
    fetch_directory(store, prefix, files, disk, destination, progress)


def put_directory(
    store: S3Store, directory: Path, prefix: str, files: Sequence[FileDigest], progress: Progress
) -> None:
    """Upload what is not there yet; names under a digest's prefix always mean the same bytes.

    Raises:
        StoreUnavailable: the store did not take it, or holds other bytes afterwards.
    """
    tally = Tally(sum(file.bytes for file in files), progress)
    for file in files:
        known = store.head(prefix + file.name)
        if known is not None and (known.bytes, known.sha256) == (file.bytes, file.sha256):
            tally(file.bytes)
            continue
        store.upload_file(directory / file.name, prefix + file.name, sha256=file.sha256, sent=tally)


def fetch_directory(
    store: S3Store,
    prefix: str,
    files: Sequence[FileDigest],
    disk: RunDisk,
    destination: Path,
    progress: Progress | None = None,
) -> None:
    """Download a converted adapter, verified, to a shared folder that appears whole or not at all, and is held.

    Its bytes are on the disk before it has its name: whoever finds it later, after a power cut too, does not verify it.

    Raises:
        DiskFull: there is no room for it.
        ObjectNotFound: a file is not under the prefix.
        StoreUnavailable: a file's bytes are not what its digest says.
    """
    total = sum(file.bytes for file in files)
    disk.require(total, prefix.rstrip("/"))
    tally = Tally(total, progress) if progress is not None else None
    part = disk.folder() / uuid4().hex
    part.mkdir()
    for file in files:
        _fetch(store, prefix + file.name, file, part / file.name, tally)
        sync_path(part / file.name)
    sync_path(part)
    disk.share(part, destination)


def holds_files(directory: Path, files: Sequence[FileDigest]) -> bool:
    """Whether these files lie in the directory, byte for byte."""
    paths = [(directory / file.name, file) for file in files]
    return all(path.is_file() and sha256_file(path) == file for path, file in paths)


def _fetch(store: S3Store, key: str, file: FileDigest, path: Path, tally: Tally | None) -> None:
    info = store.head(key)
    if info is None:
        raise ObjectNotFound(key)
    got = store.download_file(key, path, if_match=info.etag, received=tally)
    if got.sha256 != file.sha256:
        raise StoreUnavailable("download", key, f"it has sha256 {got.sha256}, the ledger says {file.sha256}")
