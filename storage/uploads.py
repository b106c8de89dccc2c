"""Uploads in the store: found, read, and downloaded exactly as their marker says."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from storage.digests import FileDigest, directory_digest, is_adapter_file
from storage.documents import (
    AuthorName,
    BaseName,
    Document,
    RootDocument,
    RunName,
    Sha256,
    Submission,
    UtcTime,
    format_time,
    read_document,
)
from storage.errors import (
    InvalidDocument,
    ObjectNotFound,
    PreconditionFailed,
    UploadAmbiguous,
    UploadChanged,
    UploadCorrupt,
    UploadIncomplete,
)
from storage.keys import (
    MARKER_FILE,
    TRAINING_FILE,
    marker_key,
    training_key,
    upload_file_key,
)
from storage.progress import Progress, Tally
from storage.s3 import S3Store
from storage.training import Training, parse_training

_DOWNLOADS = 2
# In UTF-8. A file system takes 255, and a download has a longer name until it is whole.
_MAX_NAME_BYTES = 200
_MAX_TRAINING_BYTES = 16_000_000
# Names that are read as they are spelt. The adapter's own files are downloaded, and judged where they are read.
_SPELT = (TRAINING_FILE, MARKER_FILE)


class UploadedFile(Document):
    """One file that the marker lists."""

    name: str
    bytes: int = Field(ge=0)
    sha256: Sha256


class UploadMarker(RootDocument):
    """_READY.json, put last: the upload is complete when every listed file is there.

    `adopted` says that the files came without one, and that it was written by us once they were settled.
    """

    submitted_at: UtcTime
    submission: Submission
    author: AuthorName
    run: RunName
    base: BaseName
    files: tuple[UploadedFile, ...]
    # Left out where it is false: markers of trainers stay as they were.
    adopted: bool = Field(False, exclude_if=lambda value: not value)

    @property
    def adapter_digest(self) -> str:
        """Return what the adapter's own files are by this marker; it may list none."""
        own = (one for one in self.files if is_adapter_file(one.name))
        return directory_digest(FileDigest(one.name, one.bytes, one.sha256) for one in own)

    @model_validator(mode="after")
    def _submission_is_of_its_time(self) -> Self:
        if not self.submission.startswith(format_time(self.submitted_at) + "-"):
            raise ValueError(f"submission {self.submission} does not begin with submitted_at")
        return self


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of an upload, pinned to the object it was when the upload was read."""

    digest: FileDigest
    etag: str


@dataclass(frozen=True, slots=True)
class Upload:
    """One complete upload. `adapter_digest` rests on the marker until `download_upload` has verified it.

    `warnings` name what was ignored in training.json; `misstatement` says why it cannot be read at all, and then
    nothing of it counts. `ambiguity` says what is wrong with the file names; such an
    upload is known by what its marker lists alone: no file of it is looked at, and it cannot be downloaded.
    """

    marker: UploadMarker
    marker_etag: str
    files: tuple[StoredFile, ...]
    adapter_digest: str
    training: Training | None = None
    training_digest: str | None = None
    warnings: tuple[str, ...] = ()
    ambiguity: str | None = None
    misstatement: str | None = None

    @property
    def adapter_files(self) -> tuple[StoredFile, ...]:
        """Return the adapter's own files, whose bytes are its identity."""
        return tuple(file for file in self.files if is_adapter_file(file.digest.name))


def read_upload(store: S3Store, author: str, run: str) -> Upload:
    """Return an upload that is there as its marker says, each file pinned to its ETag.

    Raises InvalidName, UploadIncomplete while the marker or a listed file is missing or has another size,
    InvalidDocument for a marker that cannot be used, StoreUnavailable.
    """
    key = marker_key(author, run)
    try:
        marker, etag = read_document(store, key, UploadMarker)
    except ObjectNotFound:
        raise UploadIncomplete(author, run, f"{MARKER_FILE} is not there yet") from None
    if (marker.author, marker.run) != (author, run):
        raise InvalidDocument(key, f"it is the marker of {marker.author}/{marker.run}")
    if not any(is_adapter_file(file.name) for file in marker.files):
        raise InvalidDocument(key, "it lists neither adapter_config.json nor a weight file")
    digest = marker.adapter_digest
    fault = file_names_fault(file.name for file in marker.files)
    if fault is not None:
        stated = {file.name: file.sha256 for file in marker.files}.get(TRAINING_FILE)
        return Upload(marker, etag, (), digest, training_digest=stated, ambiguity=fault)
    files = tuple(_stored(store, marker, file) for file in marker.files)
    return _with_training(store, Upload(marker, etag, files, digest))


def download_upload(
    store: S3Store, upload: Upload, directory: Path, progress: Progress | None = None
) -> tuple[FileDigest, ...]:
    """Write the adapter's own files into a directory, verified, and return their digests.

    The other files of an upload are the trainer's and stay where they are. progress: called with the bytes that came
    and the bytes in all.

    Raises UploadAmbiguous if its files cannot be told apart, UploadChanged if it is another by now,
    UploadCorrupt if a file keeps coming with other bytes than its marker says, ObjectNotFound if a file was
    deleted, StoreUnavailable, OSError.
    """
    if upload.ambiguity is not None:
        raise UploadAmbiguous(upload.marker.author, upload.marker.run, upload.ambiguity)
    directory.mkdir(parents=True, exist_ok=True)
    total = sum(file.digest.bytes for file in upload.adapter_files)
    tally = Tally(total, progress) if progress is not None else None
    digests = tuple(_download(store, upload.marker, file, directory, tally) for file in upload.adapter_files)
    marker = store.head(marker_key(upload.marker.author, upload.marker.run))
    if marker is None or marker.etag != upload.marker_etag:
        raise UploadChanged(upload.marker.author, upload.marker.run, MARKER_FILE)
    return digests


def file_names_fault(names: Iterable[str]) -> str | None:
    """Return what is wrong with the file names of an upload, None if they are plain and can be told apart.

    Names that differ in case or Unicode form alone are one file on some disks, and two in every store. A file that is
    read by its name is not read under that name in other letters.
    """
    seen: dict[str, str] = {}
    for name in names:
        shown = repr(name[:_MAX_NAME_BYTES])
        if "/" in name:
            return f"{shown} lies in a folder; an upload is one folder with one save and no other in it"
        if name in {"", ".", "..", MARKER_FILE} or "\\" in name or not name.isprintable():
            return f"{shown} is no name for an uploaded file"
        if len(name.encode()) > _MAX_NAME_BYTES:
            return f"{shown}… is longer than {_MAX_NAME_BYTES} bytes"
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())
        if seen.get(folded) == name:
            return f"{shown} is listed twice"
        if folded in seen:
            return f"{seen[folded]!a} and {name!a} differ in nothing but case or Unicode form"
        seen[folded] = name
    for known in _SPELT:
        name = seen.get(known.casefold(), known)
        if name != known:
            return f"{name!r} is {known} in other letters, and would be passed over: rename it"
    return None


def _stored(store: S3Store, marker: UploadMarker, file: UploadedFile) -> StoredFile:
    found = store.head(upload_file_key(marker.author, marker.run, file.name))
    if found is None:
        raise UploadIncomplete(marker.author, marker.run, f"{file.name} is listed, but not there")
    if found.bytes != file.bytes:
        reason = f"{file.name} should have {file.bytes} bytes, found {found.bytes}"
        raise UploadIncomplete(marker.author, marker.run, reason)
    return StoredFile(FileDigest(file.name, file.bytes, file.sha256), found.etag)


def _with_training(store: S3Store, upload: Upload) -> Upload:
    marker = upload.marker
    listed = next((file for file in marker.files if file.name == TRAINING_FILE), None)
    if listed is None:
        return upload
    key = training_key(marker.author, marker.run)
    stated = replace(upload, training_digest=listed.sha256)
    if listed.bytes > _MAX_TRAINING_BYTES:
        reason = f"{listed.bytes} bytes, where at most {_MAX_TRAINING_BYTES} are read"
        return replace(stated, misstatement=reason)
    try:
        body = store.get(key).body
    except ObjectNotFound:
        reason = f"{TRAINING_FILE} is listed, and was taken away just now"
        raise UploadIncomplete(marker.author, marker.run, reason) from None
    if hashlib.sha256(body).hexdigest() != listed.sha256:
        reason = f"{TRAINING_FILE} is not the one that the marker lists"
        raise UploadIncomplete(marker.author, marker.run, reason)
    try:
        training, warnings = parse_training(key, body)
    except InvalidDocument as error:
        return replace(stated, misstatement=error.reason)
    return replace(stated, training=training, warnings=warnings)


def _download(
    store: S3Store, marker: UploadMarker, file: StoredFile, directory: Path, tally: Tally | None
) -> FileDigest:
    expected = file.digest
    key = upload_file_key(marker.author, marker.run, expected.name)
    path = directory / expected.name
    found = ""
    for _ in range(_DOWNLOADS):
        try:
            got = store.download_file(key, path, if_match=file.etag, received=tally)
        except PreconditionFailed:
            raise UploadChanged(marker.author, marker.run, expected.name) from None
        if got.sha256 == expected.sha256:
            return got
        path.unlink()
        found = got.sha256
    now = store.head(key)
    if now is None:
        raise ObjectNotFound(key)
    if now.etag != file.etag:
        raise UploadChanged(marker.author, marker.run, expected.name)
    raise UploadCorrupt(marker.author, marker.run, expected.name, expected.sha256, found)
