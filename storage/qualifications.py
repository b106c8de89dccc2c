"""What was measured of an engine before its scores are trusted: one document for each engine of a base."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from storage.documents import (
    AuthorName,
    BaseName,
    Document,
    RootDocument,
    Sha256,
    UtcTime,
    put_document,
    read_document,
)
from storage.errors import ObjectNotFound
from storage.keys import qualification_key
from storage.s3 import S3Store


class EngineCheck(Document):
    """One named check: whether it passed, what was found in one sentence, and the figures (nats unless named so)."""

    name: str
    passed: bool
    found: str
    figures: dict[str, float]


class SampledScore(Document):
    """A served adapter scored again on this engine, in bits per byte: own and base, as its verdict has them and now.

    `compared` is false where nothing can be told of the engine from it; `why` then says why.
    """

    author: AuthorName
    output_digest: Sha256
    compared: bool
    why: str | None = None
    own: tuple[float, float] | None = None
    base: tuple[float, float] | None = None


class Qualification(RootDocument):
    """`qualified/<base>/<engine id>.json`: whether an engine applies adapters right, and only them.

    `sample`: adapters of the roster that were scored again. `seconds`: how long all of it took.
    """

    base: BaseName
    engine_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    vllm_version: str
    device: str
    dtype: str
    passed: bool
    checks: tuple[EngineCheck, ...]
    sample: tuple[SampledScore, ...]
    measured_at: UtcTime
    seconds: float
    tool_version: str

    @property
    def failures(self) -> tuple[EngineCheck, ...]:
        """Return the checks that were not passed."""
        return tuple(check for check in self.checks if not check.passed)


def write_qualification(store: S3Store, qualification: Qualification) -> str:
    """Write a qualification over an earlier one of the same engine, and return its key.

    Raises InvalidName, InvalidDocument, StoreUnavailable.
    """
    key = qualification_key(qualification.base, qualification.engine_id)
    put_document(store, key, qualification)
    return key


def read_qualification(store: S3Store, base: str, engine_id: str) -> Qualification | None:
    """Return what was measured of an engine of a base, None where nothing was.

    Raises InvalidName, InvalidDocument, StoreUnavailable.
    """
    try:
        return read_document(store, qualification_key(base, engine_id), Qualification)[0]
    except ObjectNotFound:
        return None
