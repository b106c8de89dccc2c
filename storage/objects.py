"""What the store tells of an object."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as the store describes it.

    `etag` is an opaque change token, quoted as the store sends it and never a digest of ours. `sha256` is
    what the writer noted beside the bytes; None in listings and for objects that were not put by
    `upload_file`.
    """

    key: str
    etag: str
    bytes: int
    last_modified: datetime
    sha256: str | None = None

    @classmethod
    def of(cls, key: str, answer: Any) -> Self:
        """Return what the answer to a get or head of boto3 says of this object."""
        noted = answer["Metadata"].get("sha256")
        return cls(key, answer["ETag"], answer["ContentLength"], answer["LastModified"], noted)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object with its bytes."""

    info: ObjectInfo
    body: bytes
