"""The one door to the object store: every request is made here, with the client of storage/client.py."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self
from uuid import uuid4

from boto3.session import Session
from botocore.exceptions import ClientError

from storage.answers import (
    BROKEN_OFF,
    CUT_SHORT,
    FAULTS,
    Fault,
    as_ours,
    error_code,
    is_missing,
    is_refusal,
    is_upload_gone,
    unlike,
)
from storage.client import make_client
from storage.digests import FileDigest
from storage.errors import ObjectNotFound, PreconditionFailed, StorageError, StoreNotTrusted
from storage.multipart import PartSender, PendingUpload, SentParts, goes_in_parts
from storage.objects import ObjectInfo, StoredObject
from storage.pages import list_pages
from storage.ranges import fetch_object

_PIECE = 1 << 20

_THREADS = 4
# Beside other work, which four slow down by more than they gain where the store shares its cores.
_THREADS_ASIDE = 2

_REFUSALS = 3
_LONGEST_PAUSE = 0.2


class S3Store:
    """One bucket of an S3-compatible object store. Threads may share it; processes may not.

    Transient faults (broken connections, time-outs, 5xx, SlowDown) are tried five times, with growing, random
    pauses, before they become StoreUnavailable.
    """

    def __init__(self, client: Any, bucket: str, session: Session | None = None) -> None:
        self._client = client
        self._parts = PartSender(client, bucket)
        self.bucket = bucket
        self.session = session

    @classmethod
    def open(
        cls,
        *,
        endpoint: str | None,
        bucket: str,
        region: str,
        access_key: str | None,
        secret_key: str | None,
        addressing_style: str = "path",
        hurried: bool = False,
    ) -> Self:
        """Return the bucket behind an endpoint (None: Amazon's own); nothing is asked of it yet.

        With `hurried` a store that does not answer is given up within seconds, for someone who waits at a prompt.

        Without keys boto3 looks for credentials in its usual places.
        """
        session, client = make_client(
            endpoint, region, access_key, secret_key, addressing_style=addressing_style, hurried=hurried
        )
        # Only addresses with the bucket in their path are those that storage/bulk.py makes.
        return cls(client, bucket, session if addressing_style == "path" else None)

    @property
    def endpoint(self) -> str:
        """Return the address requests go to."""
        return str(self._client.meta.endpoint_url)

    @property
    def region(self) -> str:
        """Return the region requests are signed for."""
        return str(self._client.meta.region_name)

    def uri(self, key: str) -> str:
        """Return the `s3://` address of a key or prefix."""
        return f"s3://{self.bucket}/{key}"

    def get(self, key: str) -> StoredObject:
        """Return a small object with its bytes.

        Raises ObjectNotFound, StoreUnavailable.
        """
        try:
            with suppress(*BROKEN_OFF):
                return self._read(key)
            return self._read(key)
        except FAULTS as error:
            self._fail("get", key, error)

    def read_start(self, key: str, size: int, *, if_match: str) -> bytes:
        """Return the first `size` bytes of the object of this ETag, fewer where it is shorter; size is at least 1.

        Raises ObjectNotFound, PreconditionFailed if the object is another by now, StoreUnavailable.
        """
        wanted = {"Range": f"bytes=0-{size - 1}", "IfMatch": if_match}
        try:
            with suppress(*BROKEN_OFF):
                return self._read(key, **wanted).body
            return self._read(key, **wanted).body
        except FAULTS as error:
            if isinstance(error, ClientError) and error_code(error) == "InvalidRange":
                return b""  # an object without a byte has no first one
            self._fail("get", key, error)

    def digest_object(self, key: str, *, if_match: str) -> str:
        """Return the sha256 of all bytes of the object of this ETag, 64 hex characters; nothing is kept of them.

        Raises ObjectNotFound, PreconditionFailed if the object is another by now, StoreUnavailable.
        """
        try:
            with suppress(*BROKEN_OFF):
                return self._digest(key, if_match)
            return self._digest(key, if_match)
        except FAULTS as error:
            self._fail("digest", key, error)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what the store says of an object, None if there is none.

        Raises StoreUnavailable.
        """
        try:
            return ObjectInfo.of(key, self._client.head_object(Bucket=self.bucket, Key=key))
        except ClientError as error:
            if is_missing(error):
                return None
            self._fail("head", key, error)
        except FAULTS as error:
            self._fail("head", key, error)

    def put(self, key: str, body: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        """Write a small object and return its new ETag.

        With `if_none_match` only if there is no object yet, with `if_match` only over the object of that
        ETag. Where that is refused, what is there now decides: with these very bytes the put counts as done, since
        a request whose answer got lost is sent again, by boto3 or on the way, and refused for what it wrote itself;
        where the condition holds after all, it is asked again.

        Raises PreconditionFailed, StoreUnavailable, StoreNotTrusted where the store knows no conditions or keeps
        refusing one that holds.
        """
        conditions: dict[str, str] = {}
        if if_none_match:
            conditions["IfNoneMatch"] = "*"
        if if_match is not None:
            conditions["IfMatch"] = if_match
        for refusal in range(1, _REFUSALS + 1):
            try:
                response = self._client.put_object(Bucket=self.bucket, Key=key, Body=body, **conditions)
                return str(response["ETag"])
            except ClientError as error:
                refused = is_refusal(error) or (if_match is not None and is_missing(error))
                if not refused:
                    self._fail("put", key, error)
            except FAULTS as error:
                self._fail("put", key, error)
            there = self._find(key)
            if there is not None and there.body == body:
                return there.info.etag
            holds = there is None if if_none_match else there is not None and there.info.etag == if_match
            if not holds:
                raise PreconditionFailed(key)
            time.sleep(random.uniform(0, _LONGEST_PAUSE * refusal))
        raise StoreNotTrusted(self.endpoint, "a put whose condition holds must be accepted", "refused")

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error.

        Raises StoreUnavailable.
        """
        try:
            self._client.delete_object(Bucket=self.bucket, Key=key)
        except FAULTS as error:
            self._fail("delete", key, error)

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object under a prefix, in the store's order, asking for one page after the other.

        An object that is not listed may yet exist: `head` tells. Raises StoreUnavailable, StoreNotTrusted.
        """
        for page in list_pages(self._client, self.bucket, prefix):
            for item in page.get("Contents", ()):
                # Servers differ in whether they quote an ETag in a listing; a condition needs it quoted.
                etag = f'"{item["ETag"].strip(chr(34))}"'
                yield ObjectInfo(item["Key"], etag, item["Size"], item["LastModified"])

    def list_folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the folders right under a prefix, without the prefix and without `/`.

        Raises StoreUnavailable, StoreNotTrusted.
        """
        for page in list_pages(self._client, self.bucket, prefix, Delimiter="/"):
            for item in page.get("CommonPrefixes", ()):
                yield item["Prefix"].removeprefix(prefix).rstrip("/")

    def upload_file(
        self, path: Path, key: str, *, sha256: str, sent: Callable[[int], None] | None = None
    ) -> ObjectInfo:
        """Write a file of any size, note its sha256 beside it, and return what the store then holds.

        A large one goes in parts, on from those that the store has of it already. `sent` is told the size of each piece
        that is there.

        Raises StoreUnavailable (also when the stored object is not the one just sent), OSError.
        """
        size = path.stat().st_size
        for anew in (False, True):
            parts: SentParts | None = None
            failure: StorageError | None = None
            try:
                if goes_in_parts(size):
                    parts = self._parts.send(
                        path, key, size, sha256, threads=_THREADS, anew=anew, sent=None if anew else sent
                    )
                    self._parts.complete(parts)
                else:
                    noted = {"Key": key, "Metadata": {"sha256": sha256}}
                    self._client.put_object(Bucket=self.bucket, Body=path.read_bytes(), **noted)
                    if sent is not None:
                        sent(size)
            except FAULTS as error:
                failure = self._doubt(key, error)
            stored = self.head(key)
            if stored is not None and (stored.bytes, stored.sha256) == (size, sha256):
                return stored
            if failure is not None:
                raise failure
            if parts is None or not parts.is_found:
                break
            # else it had been begun for another file, of which the store had nothing but parts that are in this one too
        raise unlike(key, size, sha256, stored)

    def send_parts(
        self, path: Path, key: str, *, sha256: str, is_stopped: Callable[[], bool]
    ) -> SentParts | None:
        """Have the store hold all parts of a file, which nobody sees before `complete_parts`; None if it was stopped.

        For what is sent beside other work.

        Raises StoreUnavailable, OSError.
        """
        try:
            size = path.stat().st_size
            parts = self._parts.send(path, key, size, sha256, threads=_THREADS_ASIDE, is_stopped=is_stopped)
        except FAULTS as error:
            self._fail("upload", key, error)
        return parts if parts.is_whole else None

    def complete_parts(self, parts: SentParts) -> ObjectInfo:
        """Make the parts an object, and return what the store then holds.

        Raises StoreUnavailable (also when the stored object is not the one that was sent).
        """
        failure: StorageError | None = None
        try:
            self._parts.complete(parts)
        except FAULTS as error:
            failure = self._doubt(parts.key, error)
        stored = self.head(parts.key)
        if stored is None or (stored.bytes, stored.sha256) != (parts.bytes, parts.sha256):
            raise failure or unlike(parts.key, parts.bytes, parts.sha256, stored)
        return stored

    def list_pending(self, prefix: str) -> list[PendingUpload]:
        """Return the uploads in parts under a prefix that were begun and not completed; none if they are not listed.

        Raises StoreUnavailable.
        """
        try:
            return list(self._parts.list_pending(prefix))
        except FAULTS as error:
            self._fail("list uploads of", prefix, error)

    def abort_upload(self, upload: PendingUpload) -> None:
        """Take the parts of an upload away; one that is gone is no error. Raises StoreUnavailable."""
        try:
            self._parts.abort(upload)
        except FAULTS as error:
            self._fail("abort the upload of", upload.key, error)

    def download_file(
        self, key: str, path: Path, *, if_match: str, received: Callable[[int], None] | None = None
    ) -> FileDigest:
        """Write the object of this ETag to a file, whole or not at all, and return the digest of its bytes.

        A large one comes by several requests at once. `received` is told the size of each piece that came in, from
        several threads.

        Raises ObjectNotFound, PreconditionFailed if the object is another by now, StoreUnavailable, OSError.
        """
        part = path.with_name(f".{path.name}.{uuid4().hex}.part")
        get = partial(self._client.get_object, Bucket=self.bucket, Key=key, IfMatch=if_match)
        try:
            fetched = fetch_object(get, part, received)
            part.replace(path)
            return replace(fetched, name=path.name)
        except FAULTS as error:
            self._fail("download", key, error)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()

    def ensure_bucket(self) -> None:
        """Create the bucket if it does not exist.

        Raises StoreUnavailable.
        """
        try:
            self._client.head_bucket(Bucket=self.bucket)
        except ClientError as error:
            if not is_missing(error):
                self._fail("head", self.uri(""), error)
            self._create_bucket()
        except FAULTS as error:
            self._fail("head", self.uri(""), error)

    def _read(self, key: str, **wanted: str) -> StoredObject:
        response = self._client.get_object(Bucket=self.bucket, Key=key, **wanted)
        return StoredObject(ObjectInfo.of(key, response), response["Body"].read())

    def _digest(self, key: str, if_match: str) -> str:
        body = self._client.get_object(Bucket=self.bucket, Key=key, IfMatch=if_match)["Body"]
        digest = hashlib.sha256()
        for piece in body.iter_chunks(_PIECE):
            digest.update(piece)
        return digest.hexdigest()

    def _find(self, key: str) -> StoredObject | None:
        try:
            return self.get(key)
        except ObjectNotFound:
            return None

    def _doubt(self, key: str, error: Fault) -> StorageError:
        """Return what an upload's failure is to us where it may have been done all the same; raise it where not."""
        if not (isinstance(error, CUT_SHORT) or is_upload_gone(error)):
            self._fail("upload", key, error)
        return as_ours(self.endpoint, "upload", key, error)

    def _fail(self, operation: str, key: str, error: Fault) -> NoReturn:
        raise as_ours(self.endpoint, operation, key, error) from error

    def _create_bucket(self) -> None:
        region = self._client.meta.region_name
        place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        try:
            self._client.create_bucket(Bucket=self.bucket, **place)
        except ClientError as error:
            if error_code(error) != "BucketAlreadyOwnedByYou":
                self._fail("create", self.uri(""), error)
        except FAULTS as error:
            self._fail("create", self.uri(""), error)
