"""What boto3 says of a request that failed, and what it is to us; the client alone (storage/s3.py) uses it."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeAlias

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from botocore.parsers import ResponseParserError
from botocore.utils import parse_timestamp
from urllib3.exceptions import HTTPError

from storage.errors import ObjectNotFound, PreconditionFailed, StorageError, StoreNotTrusted, StoreUnavailable
from storage.objects import ObjectInfo

_HEADER_TIME = "%a, %d %b %Y %H:%M:%S GMT"

CUT_SHORT = (IncompleteReadError, ResponseStreamingError, ResponseParserError)
"""An answer that came, but not whole. It is asked for once more; boto3 repeats requests, but not this."""

BROKEN_OFF = (*CUT_SHORT, ReadTimeoutError, HTTPError)
"""The same of what is read piece by piece, where the line may fall silent too.

Of these botocore does not translate all: it reads the body of a refused download, and every encrypted one, without
catching what urllib3 raises. Source: botocore 1.44, endpoint.py, convert_to_response_dict; response.py, StreamingBody.
"""

FAULTS = (ClientError, BotoCoreError, ResponseParserError, HTTPError)
"""Whatever a request of boto3 can raise."""

Fault: TypeAlias = ClientError | BotoCoreError | ResponseParserError | HTTPError

_MISSING = frozenset({"NoSuchKey", "NotFound", "404"})
_CONDITION_FAILED = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict"})
_NOT_LISTED = frozenset({"AccessDenied", "403", "NotImplemented", "MethodNotAllowed"})
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


def as_ours(endpoint: str, operation: str, key: str, error: Fault) -> StorageError:
    """Return the error that a request's failure is to us, with what to do about it."""
    if not isinstance(error, ClientError):
        return StoreUnavailable(operation, key, f"{endpoint}: {error}. Is it up, and is this its address?")
    code = error_code(error)
    if is_missing(error):
        return ObjectNotFound(key)
    if is_refusal(error):
        return PreconditionFailed(key)
    if code == "NotImplemented":
        return StoreNotTrusted(endpoint, f"it must be able to {operation} {key}", "NotImplemented")
    said = error.response["Error"].get("Message", "")
    advice = _ADVICE.get(code, said or "see the store's log")
    return StoreUnavailable(operation, key, f"{endpoint} answered {code}: {advice}")


def unlike(key: str, size: int, sha256: str, stored: ObjectInfo | None) -> StoreUnavailable:
    """Return the error of an upload after which the store holds something else."""
    found = "no object" if stored is None else f"{stored.bytes} bytes with sha256 {stored.sha256}"
    return StoreUnavailable("upload", key, f"sent {size} bytes with sha256 {sha256}, it now holds {found}")


def is_missing(error: ClientError) -> bool:
    """Tell whether there is no such object."""
    return error_code(error) in _MISSING


def is_refusal(error: ClientError) -> bool:
    """Tell whether a condition was refused."""
    return error_code(error) in _CONDITION_FAILED


def is_upload_gone(error: Fault) -> bool:
    """Tell whether an upload in parts is not there: it was never begun, or it is done already."""
    return isinstance(error, ClientError) and error_code(error) == "NoSuchUpload"


def is_out_of_range(error: Fault) -> bool:
    """Tell whether an object has none of the bytes that were asked for."""
    return isinstance(error, ClientError) and error_code(error) == "InvalidRange"


def is_listing_denied(error: Fault) -> bool:
    """Tell whether uploads in parts cannot be listed: with these credentials, or in this store at all."""
    return isinstance(error, ClientError) and error_code(error) in _NOT_LISTED


def cut_short(found: str) -> ResponseStreamingError:
    """Return the error of an answer that is not what was asked for, as one that came short."""
    return ResponseStreamingError(error=found)


def error_code(error: ClientError) -> str:
    """Return the code that the store gave, such as SlowDown."""
    return str(error.response["Error"].get("Code", "no code"))


def check_whole(operation_model: Any, response_dict: Any, **_: Any) -> None:
    """Return if the body of an answer is as long as its header says; a listing without its end would say too little.

    botocore tells urllib3 not to look, and looks itself only at what is streamed. Of an empty body it makes an empty
    listing. Source: botocore 1.44, httpsession.py, enforce_content_length; parsers.py, RestXMLParser.

    Raises ResponseStreamingError.
    """
    said, body = response_dict["headers"].get("content-length"), response_dict["body"]
    is_read = isinstance(body, bytes) and operation_model.http["method"] != "HEAD"
    if is_read and said is not None and response_dict["status_code"] < 300 and len(body) < int(said):
        raise ResponseStreamingError(error=f"{len(body)} of {said} bytes came")


def parse_time(value: Any) -> Any:
    """Return the time a store tells; botocore takes half of a listing's time for the two usual spellings."""
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(value)
    with suppress(TypeError, ValueError):
        return datetime.strptime(value, _HEADER_TIME).replace(tzinfo=UTC)
    return parse_timestamp(value)
