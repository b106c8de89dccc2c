"""Submitting a local directory as an upload: the marker last, so that nobody reads half of it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from storage.bases import list_bases, read_base
from storage.digests import is_adapter_file, sha256_file
from storage.documents import encode_document, format_time, put_document, read_document, utc_now
from storage.errors import (
    InvalidDocument,
    NameTaken,
    ObjectNotFound,
    PreconditionFailed,
    UploadRaced,
    UploadRefused,
)
from storage.keys import (
    TRAINING_FILE,
    UPLOADS,
    begun_key,
    check_author,
    check_base,
    check_run,
    folded_author,
    marker_key,
    training_key,
    upload_file_key,
)
from storage.progress import Progress, Tally
from storage.s3 import S3Store
from storage.training import Training, parse_training
from storage.uploads import UploadedFile, UploadMarker, file_names_fault


def new_submission(now: datetime) -> str:
    """Return a fresh submission id, `<time>-<8 random hex>`; later ones compare higher."""
    return f"{format_time(now)}-{secrets.token_hex(4)}"


def submit_upload(
    store: S3Store,
    directory: Path,
    author: str,
    run: str,
    base: str,
    *,
    training: Training | None,
    progress: Progress,
    now: Callable[[], datetime] = utc_now,
) -> UploadMarker:
    """Upload a directory's files, then its marker, and return the marker.

    Plain files right inside the directory are uploaded; folders and dot files are left out. A `training`
    takes the place of the directory's own training.json. A run may be submitted again: its old marker is
    taken away first, and `_SUBMITTING` stands there until the new one is put, so that what a broken-off submission
    leaves is not taken for files that somebody copied. The base need not be registered yet.

    Raises InvalidName, NameTaken, UploadRefused for a directory that cannot be an adapter or changes
    meanwhile, InvalidDocument for a training.json that cannot be read, UploadRaced, StoreUnavailable,
    OSError.
    """
    check_run(run)
    check_base(base)
    _check_author_is_free(store, check_author(author))
    paths = _files(directory)
    if training is not None:
        paths = [path for path in paths if path.name != TRAINING_FILE]
    elif (directory / TRAINING_FILE) in paths:
        parse_training(str(directory / TRAINING_FILE), (directory / TRAINING_FILE).read_bytes())

    begun = begun_key(author, run)
    store.put(begun, b"")
    store.delete(marker_key(author, run))
    tally = Tally(sum(path.stat().st_size for path in paths), progress)
    files = [_send(store, path, upload_file_key(author, run, path.name), tally) for path in paths]
    if training is not None:
        files.append(_send_training(store, training, training_key(author, run)))
    marker = _put_marker(store, author, run, base, files, now())
    store.delete(begun)
    return marker


def _put_marker(
    store: S3Store, author: str, run: str, base: str, files: list[UploadedFile], moment: datetime
) -> UploadMarker:
    marker = UploadMarker(
        submitted_at=moment,
        submission=new_submission(moment),
        author=author,
        run=run,
        base=base,
        files=tuple(sorted(files, key=lambda file: file.name)),
    )
    key = marker_key(author, run)
    try:
        put_document(store, key, marker, if_none_match=True)
    except PreconditionFailed:
        _replace_adopted(store, key, marker)
    return marker


def _replace_adopted(store: S3Store, key: str, marker: UploadMarker) -> None:
    """Put the marker over one that we wrote meanwhile for the files that lay there; over any other it is a race."""
    try:
        found, etag = read_document(store, key, UploadMarker)
        if not found.adopted:
            raise UploadRaced(marker.author, marker.run)
        put_document(store, key, marker, if_match=etag)
    except (ObjectNotFound, InvalidDocument, PreconditionFailed) as error:
        raise UploadRaced(marker.author, marker.run) from error


def _check_author_is_free(store: S3Store, author: str) -> None:
    for other in store.list_folders(UPLOADS):
        if other != author and folded_author(other) == folded_author(author):
            raise NameTaken("author", author, f"author {other}")
    for name in list_bases(store):
        document = read_base(store, name).document
        if author in {name, document.served_model, *document.aliases}:
            raise NameTaken("author", author, f"base {name}, which is served under that name")


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UploadRefused(str(directory), "it is not a directory")
    files: list[Path] = []
    for path in sorted(directory.iterdir()):
        if path.is_dir() or path.name.startswith("."):
            continue
        if path.is_symlink() or not path.is_file():
            raise UploadRefused(
                str(directory), f"{path.name} is a link or no plain file: put the file itself there"
            )
        files.append(path)
    fault = file_names_fault(path.name for path in files)
    if fault is not None:
        raise UploadRefused(str(directory), fault)
    if not any(is_adapter_file(path.name) for path in files):
        entries = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
        found = ", ".join(path.name + "/" * path.is_dir() for path in entries)[:200] or "no file"
        raise UploadRefused(
            str(directory),
            f"expected adapter_config.json and adapter_model.safetensors, found {found}: "
            "name the folder that holds the final adapter",
        )
    return files


def _send(store: S3Store, path: Path, key: str, tally: Tally) -> UploadedFile:
    before = _stamp(path)
    digest = sha256_file(path)
    store.upload_file(path, key, sha256=digest.sha256, sent=tally)
    if _stamp(path) != before:
        raise UploadRefused(str(path.parent), f"{path.name} changed while it was uploaded; is training over?")
    return UploadedFile(name=digest.name, bytes=digest.bytes, sha256=digest.sha256)


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _send_training(store: S3Store, training: Training, key: str) -> UploadedFile:
    body = encode_document(key, training)
    store.put(key, body)
    return UploadedFile(name=TRAINING_FILE, bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
