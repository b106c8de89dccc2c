"""JSON documents in the store: how they are written, read and refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)

from storage.errors import InvalidDocument
from storage.keys import check_author, check_base, check_run

if TYPE_CHECKING:
    from storage.s3 import S3Store  # what only parses documents needs no client

_SHOWN_FAULTS = 3
_SHOWN = 200  # characters of one

Model = TypeVar("Model", bound=BaseModel)


class Document(BaseModel):
    """A part of a document that we write: frozen, and refusing keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class ForeignDocument(Document):
    """A part of a document that others write: unknown keys are ignored, and named by `unknown_keys`."""

    # By their JSON names alone: a key that counts must not be warned of as unknown.
    model_config = ConfigDict(extra="ignore", populate_by_name=False)


class RootDocument(Document):
    """A whole document that we write; carries `"schema": 1`."""

    schema_version: Literal[1] = Field(default=1, alias="schema")


def utc_now() -> datetime:
    """Return the time, in UTC."""
    return datetime.now(UTC)


def format_time(moment: datetime) -> str:
    """Return a time as documents write it: ISO 8601, UTC, to the second, with Z."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _to_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC).replace(microsecond=0)
    except OverflowError as error:
        raise ValueError("a time before the year 1 or after 9999 in UTC") from error


UtcTime = Annotated[
    AwareDatetime,
    AfterValidator(_to_utc),
    PlainSerializer(format_time, return_type=str),
]
"""A time in UTC to the second, the fraction cut off."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
AuthorName = Annotated[str, AfterValidator(check_author)]
RunName = Annotated[str, AfterValidator(check_run)]
BaseName = Annotated[str, AfterValidator(check_base)]
Submission = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ-[0-9a-f]{8}$")]
"""`<submitted_at>-<8 random hex>`; submissions are compared as text, the highest is the latest."""


def encode_document(key: str, document: BaseModel) -> bytes:
    """Return a document as UTF-8 JSON: two spaces of indent, text as it is, one newline at the end.

    Raises InvalidDocument for a number that JSON has no word for (NaN, infinity) or text that UTF-8 has none
    for.
    """
    try:
        values = document.model_dump(mode="python", by_alias=True)
        text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode()
    except ValueError as error:
        raise InvalidDocument(key, str(error)) from error


def decode_document(key: str, body: bytes, model: type[Model]) -> Model:
    """Return the document of this model that the bytes say.

    Raises InvalidDocument, which names the first faulty fields.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise InvalidDocument(key, describe_faults(error)) from error


def describe_faults(error: ValidationError) -> str:
    """Return a refusal as one line: where, and what is wrong there, for the first faults."""
    faults = error.errors(include_url=False, include_context=False)
    shown = [
        ": ".join([".".join(map(str, f["loc"]))[:_SHOWN], f["msg"][:_SHOWN]]).removeprefix(": ")
        for f in faults[:_SHOWN_FAULTS]
    ]
    if len(faults) > _SHOWN_FAULTS:
        shown.append(f"and {len(faults) - _SHOWN_FAULTS} more")
    return "; ".join(shown)


def unknown_keys(document: BaseModel, raw: object, at: str = "") -> tuple[str, ...]:
    """Return the dotted paths of the keys in the raw JSON that the document has no field for."""
    if not isinstance(raw, dict):
        return ()
    known = {field.alias or name: name for name, field in type(document).model_fields.items()}
    found: list[str] = []
    for key, value in raw.items():
        path = f"{at}{key}"
        if key not in known:
            found.append(path)
            continue
        inner = getattr(document, known[key])
        if isinstance(inner, BaseModel):
            found += unknown_keys(inner, value, f"{path}.")
        elif isinstance(inner, dict):
            for name, part in inner.items():
                if isinstance(part, BaseModel):
                    found += unknown_keys(part, value[name], f"{path}.{name}.")
    return tuple(found)


def read_document(store: S3Store, key: str, model: type[Model]) -> tuple[Model, str]:
    """Return a stored document and the ETag it was read at.

    Raises ObjectNotFound, InvalidDocument, StoreUnavailable.
    """
    stored = store.get(key)
    return decode_document(key, stored.body, model), stored.info.etag


def put_document(
    store: S3Store, key: str, document: BaseModel, *, if_none_match: bool = False, if_match: str | None = None
) -> str:
    """Write a document and return its ETag.

    Raises PreconditionFailed if a condition was given and does not hold, InvalidDocument, StoreUnavailable.
    """
    return store.put(key, encode_document(key, document), if_none_match=if_none_match, if_match=if_match)
