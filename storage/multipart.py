"""A large file sent in parts by several threads, for storage/s3.py; nobody sees it before it is completed.

Parts are of a size that follows from the file's, and a store tells of each part that it has the md5 of its bytes, so an
upload that was broken off, by a killed process too, is found again and only what is missing is sent. Where the parts
that are there are of another content, that upload is taken away. A store that tells something else than the md5 (one
that encrypts with its own keys), or that does not list uploads, is sent everything.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from storage.answers import CUT_SHORT, FAULTS, cut_short, is_listing_denied, is_upload_gone
from storage.crew import Crew

PART = 16 << 20
"""Bytes of a part, and of the largest file that is sent by one request."""

_MOST_PARTS = 10_000  # Source: Amazon S3 User Guide, "Amazon S3 multipart upload limits"


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An upload in parts that was begun and not completed."""

    key: str
    upload_id: str
    begun: datetime


@dataclass(slots=True)
class SentParts:
    """A file in `count` parts, and the ETag of each that the store has, by number.

    `is_found`: some were there from an upload that was broken off.
    """

    key: str
    upload_id: str
    bytes: int
    sha256: str
    count: int
    is_found: bool
    etags: dict[int, str]

    @property
    def is_whole(self) -> bool:
        """Whether the store has every part."""
        return len(self.etags) == self.count


class PartSender:
    """Sends files in parts to one bucket of a boto3 client, whose faults it lets through. Threads may share it."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def send(
        self,
        path: Path,
        key: str,
        size: int,
        sha256: str,
        *,
        threads: int,
        anew: bool = False,
        sent: Callable[[int], None] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> SentParts:
        """Have the store hold every part of a file, and return what completes it; not all of it where it was stopped.

        `anew`: without looking for an upload that was broken off. `sent` is told the size of each part that is there.

        Raises FAULTS, OSError.
        """
        part = part_size(size)
        spans = {number: min(part, size - start) for number, start in enumerate(range(0, size, part), 1)}
        found = None if anew else self._find(path, key, part, spans)
        etags = found[1] if found is not None else {}
        upload_id = found[0] if found is not None else self._begin(key, sha256)
        upload = SentParts(key, upload_id, size, sha256, len(spans), is_found=found is not None, etags=etags)
        tell = sent or (lambda count: None)
        for number in etags:
            tell(spans[number])
        missing = [number for number in spans if number not in upload.etags]
        with Crew(partial(self._send_part, path, upload, part), missing, threads) as crew:
            for number, etag in crew.results():
                upload.etags[number] = etag
                tell(spans[number])
                if is_stopped():
                    crew.join()  # a part that comes after its upload was taken away may stay in the store
                    break
        return upload

    def complete(self, upload: SentParts) -> None:
        """Make an object of the parts. Raises FAULTS."""
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(upload.etags.items())]
        self._client.complete_multipart_upload(
            Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id, MultipartUpload={"Parts": parts}
        )

    def list_pending(self, prefix: str) -> Iterator[PendingUpload]:
        """Yield every upload under a prefix that was begun and not completed; none where they are not listed.

        Raises FAULTS.
        """
        following: dict[str, str] = {}
        seen: set[str] = set()
        while True:
            try:
                page = _ask(
                    self._client.list_multipart_uploads, Bucket=self._bucket, Prefix=prefix, **following
                )
            except FAULTS as error:
                if is_listing_denied(error):
                    return
                raise
            for one in page.get("Uploads", ()):
                yield PendingUpload(one["Key"], one["UploadId"], one["Initiated"])
            if not page.get("IsTruncated"):
                return
            following = {
                "KeyMarker": page.get("NextKeyMarker", ""),
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }
            if str(following) in seen or not any(following.values()):
                raise cut_short("a page of uploads that does not say how to go on")
            seen.add(str(following))

    def abort(self, upload: PendingUpload) -> None:
        """Take an upload's parts away; one that is gone is no error. Raises FAULTS."""
        try:
            self._client.abort_multipart_upload(
                Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id
            )
        except FAULTS as error:
            if not is_upload_gone(error):
                raise

    def _begin(self, key: str, sha256: str) -> str:
        begun = self._client.create_multipart_upload(
            Bucket=self._bucket, Key=key, Metadata={"sha256": sha256}
        )
        return str(begun["UploadId"])

    def _send_part(self, path: Path, upload: SentParts, part: int, number: int) -> tuple[int, str]:
        body = _read(path, (number - 1) * part, part)
        answer = self._client.upload_part(
            Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id, PartNumber=number, Body=body
        )
        return number, str(answer["ETag"])

    def _find(
        self, path: Path, key: str, part: int, spans: dict[int, int]
    ) -> tuple[str, dict[int, str]] | None:
        """Return id and parts of the upload of this file that has most of it; those of another content go."""
        best: tuple[str, dict[int, str]] | None = None
        for pending in self.list_pending(key):
            there = self._list_parts(pending) if pending.key == key else {}
            if not there:
                continue  # another key's, or somebody has begun it just now
            if any(
                spans.get(number) != size or _md5(_read(path, (number - 1) * part, part)) != etag.strip('"')
                for number, (size, etag) in there.items()
            ):
                self.abort(pending)
            elif best is None or len(there) > len(best[1]):
                best = pending.upload_id, {number: etag for number, (_, etag) in there.items()}
        return best

    def _list_parts(self, upload: PendingUpload) -> dict[int, tuple[int, str]]:
        """Return size and ETag of each part that the store has, by number; none of an upload that is gone."""
        found: dict[int, tuple[int, str]] = {}
        following: dict[str, int] = {}
        while True:
            try:
                page = _ask(
                    self._client.list_parts,
                    Bucket=self._bucket,
                    Key=upload.key,
                    UploadId=upload.upload_id,
                    **following,
                )
            except FAULTS as error:
                if is_upload_gone(error):
                    return {}
                raise
            parts = page.get("Parts", ())
            found |= {one["PartNumber"]: (one["Size"], one["ETag"]) for one in parts}
            if not page.get("IsTruncated") or not parts:
                return found
            following = {"PartNumberMarker": parts[-1]["PartNumber"]}


def goes_in_parts(size: int) -> bool:
    """Tell whether a file of so many bytes is sent in parts."""
    return size > PART


def part_size(size: int) -> int:
    """Return the bytes of each part but the last of a file of this size, the same in every process."""
    return max(PART, -(-size // _MOST_PARTS))


def _ask(listing: Callable[..., Any], **wanted: Any) -> Any:
    with suppress(*CUT_SHORT):
        return listing(**wanted)
    return listing(**wanted)


def _read(path: Path, start: int, count: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), count, start)


def _md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()
