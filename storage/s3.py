"""The one door to the object store: every call to boto3 is made here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self
from uuid import uuid4

from boto3.s3.transfer import TransferConfig
from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from storage.digests import FileDigest
from storage.errors import ObjectNotFound, PreconditionFailed, StorageError, StoreNotTrusted, StoreUnavailable
from storage.objects import ObjectInfo, StoredObject

_CONNECT_SECONDS = 5
_READ_SECONDS = 60
_ATTEMPTS = 5
_CONNECTIONS = 32
_PIECE = 1 << 20

_TRANSFER = TransferConfig(multipart_threshold=32 << 20, multipart_chunksize=32 << 20, max_concurrency=4)

_BROKEN_OFF = (IncompleteReadError, ReadTimeoutError, ResponseStreamingError)
"""A transfer that broke off half way is asked for once more; boto3 repeats requests, but not this."""

_MISSING = frozenset({"NoSuchKey", "NotFound", "404"})
_CONDITION_FAILED = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict"})
_ADVICE = {
    "ExpiredToken": "the session's credentials have expired: renew them and try again",
    "RequestExpired": "the session's credentials have expired: renew them and try again",
    "TokenRefreshRequired": "the session's credentials have expired: renew them and try again",
    "InvalidAccessKeyId": "it does not know the access key: check the configured credentials",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: check the credentials",
    "AccessDenied": "the credentials may not do this: give them read and write access to the bucket",
    "403": "it refused the credentials: check the access key, the secret key and their rights to the bucket",
    "RequestTimeTooSkewed": "this machine's clock differs from the store's: set it right",
    "SlowDown": "it is overloaded and asks to slow down: try again later",
    "NoSuchBucket": "the bucket does not exist: check its name, or create it",
}


class S3Store:
    """One bucket of an S3-compatible object store. Threads may share it; processes may not.

    Transient faults (broken connections, time-outs, 5xx, SlowDown) are tried five times, with growing, random
    pauses, before they become StoreUnavailable.
    """

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self.bucket = bucket

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
    ) -> Self:
        """Return the bucket behind an endpoint (None: Amazon's own); nothing is asked of it yet.

        Without keys boto3 looks for credentials in its usual places. For a custom endpoint checksums are sent
        only where the protocol asks for them, since many stores refuse the headers that boto3 adds.
        Source: boto/boto3 issue 4392.
        """
        checksums = "when_required" if endpoint is not None else "when_supported"
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            max_pool_connections=_CONNECTIONS,
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            request_checksum_calculation=checksums,
            response_checksum_validation=checksums,
            s3={"addressing_style": addressing_style},
        )
        session = Session(aws_access_key_id=access_key, aws_secret_access_key=secret_key, region_name=region)
        return cls(session.client("s3", endpoint_url=endpoint, config=config), bucket)

    @property
    def endpoint(self) -> str:
        """Return the address requests go to."""
        return str(self._client.meta.endpoint_url)

    def uri(self, key: str) -> str:
        """Return the `s3://` address of a key or prefix."""
        return f"s3://{self.bucket}/{key}"

    def get(self, key: str) -> StoredObject:
        """Return a small object with its bytes.

        Raises ObjectNotFound, StoreUnavailable.
        """
        try:
            with suppress(*_BROKEN_OFF):
                return self._read(key)
            return self._read(key)
        except (ClientError, BotoCoreError) as error:
            self._fail("get", key, error)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what the store says of an object, None if there is none.

        Raises StoreUnavailable.
        """
        try:
            return _info(key, self._client.head_object(Bucket=self.bucket, Key=key))
        except ClientError as error:
            if _code(error) in _MISSING:
                return None
            self._fail("head", key, error)
        except BotoCoreError as error:
            self._fail("head", key, error)

    def put(self, key: str, body: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        """Write a small object and return its new ETag.

        With `if_none_match` only if there is no object yet, with `if_match` only over the object of that
        ETag. A request that boto3 repeated because its answer got lost may be refused for what it wrote
        itself; the bytes then tell, and such a put counts as done.

        Raises PreconditionFailed, StoreUnavailable, StoreNotTrusted where the store knows no conditions.
        """
        conditions: dict[str, str] = {}
        if if_none_match:
            conditions["IfNoneMatch"] = "*"
        if if_match is not None:
            conditions["IfMatch"] = if_match
        try:
            response = self._client.put_object(Bucket=self.bucket, Key=key, Body=body, **conditions)
        except ClientError as error:
            refused = _code(error) in _CONDITION_FAILED or (if_match is not None and _code(error) in _MISSING)
            if not refused:
                self._fail("put", key, error)
            landed = (
                self._etag_of(key, body) if error.response["ResponseMetadata"].get("RetryAttempts") else None
            )
            if landed is None:
                raise PreconditionFailed(key) from error
            return landed
        except BotoCoreError as error:
            self._fail("put", key, error)
        return str(response["ETag"])

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error.

        Raises StoreUnavailable.
        """
        try:
            self._client.delete_object(Bucket=self.bucket, Key=key)
        except (ClientError, BotoCoreError) as error:
            self._fail("delete", key, error)

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object under a prefix, in the store's order, asking for one page after the other.

        An object that is not listed may yet exist: `head` tells. Raises StoreUnavailable, StoreNotTrusted.
        """
        for page in self._pages(prefix, {}):
            for item in page.get("Contents", ()):
                yield ObjectInfo(item["Key"], item["ETag"], item["Size"], item["LastModified"])

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
        try:
            with path.open("rb") as file:
                extra = {"Metadata": {"sha256": sha256}}
                self._client.upload_fileobj(
                    file, self.bucket, key, ExtraArgs=extra, Config=_TRANSFER, Callback=sent
                )
        except (ClientError, BotoCoreError) as error:
            self._fail("upload", key, error)
        stored = self.head(key)
        if stored is None or (stored.bytes, stored.sha256) != (size, sha256):
            found = "no object" if stored is None else f"{stored.bytes} bytes with sha256 {stored.sha256}"
            raise StoreUnavailable(
                "upload", key, f"sent {size} bytes with sha256 {sha256}, it now holds {found}"
            )
        return stored

    def download_file(self, key: str, path: Path, *, if_match: str) -> FileDigest:
        """Write the object of this ETag to a file, whole or not at all, and return the digest of its bytes.

        Raises ObjectNotFound, PreconditionFailed if the object is another by now, StoreUnavailable, OSError.
        """
        part = path.with_name(f".{path.name}.{uuid4().hex}.part")
        try:
            try:
                with suppress(*_BROKEN_OFF):
                    return self._stream(key, if_match, part, path)
                return self._stream(key, if_match, part, path)
            except (ClientError, BotoCoreError) as error:
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
            if _code(error) not in _MISSING:
                self._fail("head", self.uri(""), error)
            self._create_bucket()
        except BotoCoreError as error:
            self._fail("head", self.uri(""), error)

    def probe(self) -> None:
        """Return if the store can be trusted with the ledger: it reads what was put and keeps conditions.

        Raises StoreNotTrusted, StoreUnavailable.
        """
        key = f"_probe/{uuid4().hex}"
        first = self.put(key, b"first")
        try:
            self._expect(self.get(key).body == b"first", "reading back what was just put", "other bytes")
            self._expect_refused(
                key, "an If-None-Match put over an object must be refused", if_none_match=True
            )
            self.put(key, b"second", if_match=first)
            self._expect_refused(key, "a put with a stale If-Match must be refused", if_match=first)
            self._expect(
                self.get(key).body == b"second", "reading back what was just swapped in", "other bytes"
            )
        except PreconditionFailed as error:
            raise StoreNotTrusted(
                self.endpoint, "a put whose condition holds must be accepted", "refused"
            ) from error
        finally:
            self.delete(key)

    def _expect(self, holds: bool, probe: str, found: str) -> None:
        if not holds:
            raise StoreNotTrusted(self.endpoint, probe, found)

    def _expect_refused(
        self, key: str, probe: str, *, if_none_match: bool = False, if_match: str | None = None
    ) -> None:
        with suppress(PreconditionFailed):
            self.put(key, b"must be refused", if_none_match=if_none_match, if_match=if_match)
            raise StoreNotTrusted(self.endpoint, probe, "it was accepted")

    def _read(self, key: str) -> StoredObject:
        response = self._client.get_object(Bucket=self.bucket, Key=key)
        return StoredObject(_info(key, response), response["Body"].read())

    def _stream(self, key: str, if_match: str, part: Path, path: Path) -> FileDigest:
        body = self._client.get_object(Bucket=self.bucket, Key=key, IfMatch=if_match)["Body"]
        digest = hashlib.sha256()
        with part.open("wb") as file:
            for piece in body.iter_chunks(_PIECE):
                file.write(piece)
                digest.update(piece)
            size = file.tell()
        part.replace(path)
        return FileDigest(path.name, size, digest.hexdigest())

    def _pages(self, prefix: str, extra: dict[str, str]) -> Iterator[Any]:
        seen: set[str] = set()
        token: dict[str, str] = {}
        while True:
            try:
                page = self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, **extra, **token)
            except (ClientError, BotoCoreError) as error:
                self._fail("list", prefix, error)
            yield page
            if not page.get("IsTruncated"):
                return
            following = page.get("NextContinuationToken")
            probe = f"listing {prefix} must come to an end"
            self._expect(bool(following), probe, "a page that says there is more, but not how to ask for it")
            self._expect(following not in seen, probe, "a page that leads back to one already read")
            seen.add(following)
            token = {"ContinuationToken": following}

    def _etag_of(self, key: str, body: bytes) -> str | None:
        """Return the ETag of the object if it holds exactly these bytes."""
        try:
            stored = self.get(key)
        except ObjectNotFound:
            return None
        return stored.info.etag if stored.body == body else None

    def _create_bucket(self) -> None:
        region = self._client.meta.region_name
        place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        try:
            self._client.create_bucket(Bucket=self.bucket, **place)
        except ClientError as error:
            if _code(error) != "BucketAlreadyOwnedByYou":
                self._fail("create", self.uri(""), error)
        except BotoCoreError as error:
            self._fail("create", self.uri(""), error)

    def _fail(self, operation: str, key: str, error: ClientError | BotoCoreError) -> NoReturn:
        raise self._as_ours(operation, key, error) from error

    def _as_ours(self, operation: str, key: str, error: ClientError | BotoCoreError) -> StorageError:
        if not isinstance(error, ClientError):
            return StoreUnavailable(
                operation, key, f"{self.endpoint}: {error}. Is it up, and is this its address?"
            )
        code = _code(error)
        if code in _MISSING:
            return ObjectNotFound(key)
        if code in _CONDITION_FAILED:
            return PreconditionFailed(key)
        if code == "NotImplemented":
            return StoreNotTrusted(self.endpoint, f"it must be able to {operation} {key}", "NotImplemented")
        said = error.response["Error"].get("Message", "")
        advice = _ADVICE.get(code, said or "see the store's log")
        return StoreUnavailable(operation, key, f"{self.endpoint} answered {code}: {advice}")


def _code(error: ClientError) -> str:
    return str(error.response["Error"].get("Code", "no code"))


def _info(key: str, response: Any) -> ObjectInfo:
    return ObjectInfo(
        key,
        response["ETag"],
        response["ContentLength"],
        response["LastModified"],
        response["Metadata"].get("sha256"),
    )
