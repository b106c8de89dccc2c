"""The one door to the object store: every call to boto3 is made here."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self
from uuid import uuid4

from boto3.s3.transfer import TransferConfig
from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.session import get_session

from storage.answers import (
    BROKEN_OFF,
    CUT_SHORT,
    FAULTS,
    Fault,
    as_ours,
    check_whole,
    error_code,
    is_missing,
    is_refusal,
    is_upload_gone,
    parse_time,
)
from storage.digests import FileDigest
from storage.errors import ObjectNotFound, PreconditionFailed, StorageError, StoreNotTrusted, StoreUnavailable
from storage.objects import ObjectInfo, StoredObject

_CONNECT_SECONDS = 5
_READ_SECONDS = 60
_ATTEMPTS = 5
_HURRIED_CONNECT_SECONDS, _HURRIED_READ_SECONDS, _HURRIED_ATTEMPTS = 2, 10, 2
_CONNECTIONS = 32
_PIECE = 1 << 20

_TRANSFER = TransferConfig(multipart_threshold=32 << 20, multipart_chunksize=32 << 20, max_concurrency=4)

_REFUSALS = 3
_LONGEST_PAUSE = 0.2


class S3Store:
    """One bucket of an S3-compatible object store. Threads may share it; processes may not.

    Transient faults (broken connections, time-outs, 5xx, SlowDown) are tried five times, with growing, random
    pauses, before they become StoreUnavailable.
    """

    def __init__(self, client: Any, bucket: str, session: Session | None = None) -> None:
        self._client = client
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

        Without keys boto3 looks for credentials in its usual places. For a custom endpoint checksums are sent
        only where the protocol asks for them, since many stores refuse the headers that boto3 adds.
        Source: boto/boto3 issue 4392.
        """
        checksums = "when_required" if endpoint is not None else "when_supported"
        config = Config(
            connect_timeout=_HURRIED_CONNECT_SECONDS if hurried else _CONNECT_SECONDS,
            read_timeout=_HURRIED_READ_SECONDS if hurried else _READ_SECONDS,
            max_pool_connections=_CONNECTIONS,
            retries={
                "mode": "standard",
                "total_max_attempts": _HURRIED_ATTEMPTS if hurried else _ATTEMPTS,
            },
            request_checksum_calculation=checksums,
            response_checksum_validation=checksums,
            s3={"addressing_style": addressing_style},
        )
        core = get_session()
        core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parse_time)
        session = Session(access_key, secret_key, region_name=region, botocore_session=core)
        client = session.client("s3", endpoint_url=endpoint, config=config)
        client.meta.events.register("before-parse.s3", check_whole)
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
            return _info(key, self._client.head_object(Bucket=self.bucket, Key=key))
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
        for page in self._pages(prefix, {}):
            for item in page.get("Contents", ()):
                # Servers differ in whether they quote an ETag in a listing; a condition needs it quoted.
                etag = f'"{item["ETag"].strip(chr(34))}"'
                yield ObjectInfo(item["Key"], etag, item["Size"], item["LastModified"])

    def list_folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the folders right under a prefix, without the prefix and without `/`.

        Raises StoreUnavailable, StoreNotTrusted.
        """
        for page in self._pages(prefix, {"Delimiter": "/"}):
            for item in page.get("CommonPrefixes", ()):
                yield item["Prefix"].removeprefix(prefix).rstrip("/")

    def upload_file(
        self, path: Path, key: str, *, sha256: str, sent: Callable[[int], None] | None = None
    ) -> ObjectInfo:
        """Write a file of any size, note its sha256 beside it, and return what the store then holds.

        `sent` is told the size of each piece that went out, from several threads.

        Raises StoreUnavailable (also when the stored object is not the one just sent), OSError.
        """
        size = path.stat().st_size
        failure: StorageError | None = None
        try:
            with path.open("rb") as file:
                extra = {"Metadata": {"sha256": sha256}}
                self._client.upload_fileobj(
                    file, self.bucket, key, ExtraArgs=extra, Config=_TRANSFER, Callback=sent
                )
        except FAULTS as error:
            if not (isinstance(error, CUT_SHORT) or is_upload_gone(error)):
                self._fail("upload", key, error)
            failure = as_ours(self.endpoint, "upload", key, error)  # or it was done, and the answer got lost
        stored = self.head(key)
        if stored is None or (stored.bytes, stored.sha256) != (size, sha256):
            if failure is not None:
                raise failure
            found = "no object" if stored is None else f"{stored.bytes} bytes with sha256 {stored.sha256}"
            raise StoreUnavailable(
                "upload", key, f"sent {size} bytes with sha256 {sha256}, it now holds {found}"
            )
        return stored

    def download_file(
        self, key: str, path: Path, *, if_match: str, received: Callable[[int], None] | None = None
    ) -> FileDigest:
        """Write the object of this ETag to a file, whole or not at all, and return the digest of its bytes.

        `received` is told the size of each piece that came in.

        Raises ObjectNotFound, PreconditionFailed if the object is another by now, StoreUnavailable, OSError.
        """
        part = path.with_name(f".{path.name}.{uuid4().hex}.part")
        try:
            try:
                with suppress(*BROKEN_OFF):
                    return self._stream(key, if_match, part, path, received)
                return self._stream(key, if_match, part, path, received)
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
        return StoredObject(_info(key, response), response["Body"].read())

    def _digest(self, key: str, if_match: str) -> str:
        body = self._client.get_object(Bucket=self.bucket, Key=key, IfMatch=if_match)["Body"]
        digest = hashlib.sha256()
        for piece in body.iter_chunks(_PIECE):
            digest.update(piece)
        return digest.hexdigest()

    def _stream(
        self, key: str, if_match: str, part: Path, path: Path, received: Callable[[int], None] | None
    ) -> FileDigest:
        body = self._client.get_object(Bucket=self.bucket, Key=key, IfMatch=if_match)["Body"]
        digest = hashlib.sha256()
        with part.open("wb") as file:
            for piece in body.iter_chunks(_PIECE):
                file.write(piece)
                digest.update(piece)
                if received is not None:
                    received(len(piece))
            size = file.tell()
        part.replace(path)
        return FileDigest(path.name, size, digest.hexdigest())

    def _pages(self, prefix: str, extra: dict[str, str]) -> Iterator[Any]:
        seen: set[str] = set()
        token: dict[str, str] = {}
        while True:
            try:
                page = self._page(Prefix=prefix, **extra, **token)
            except FAULTS as error:
                self._fail("list", prefix, error)
            yield page
            if not page.get("IsTruncated"):
                return
            following = page.get("NextContinuationToken")
            probe = f"listing {prefix} must come to an end"
            if not following:
                found = "a page that says there is more, but not how to ask for it"
                raise StoreNotTrusted(self.endpoint, probe, found)
            if following in seen:
                raise StoreNotTrusted(self.endpoint, probe, "a page that leads back to one already read")
            seen.add(following)
            token = {"ContinuationToken": following}

    def _page(self, **wanted: str) -> Any:
        with suppress(*CUT_SHORT):
            return self._client.list_objects_v2(Bucket=self.bucket, **wanted)
        return self._client.list_objects_v2(Bucket=self.bucket, **wanted)

    def _find(self, key: str) -> StoredObject | None:
        try:
            return self.get(key)
        except ObjectNotFound:
            return None

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


def _info(key: str, response: Any) -> ObjectInfo:
    return ObjectInfo(
        key,
        response["ETag"],
        response["ContentLength"],
        response["LastModified"],
        response["Metadata"].get("sha256"),
    )
