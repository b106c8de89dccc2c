"""training.json: what the trainer states about an adapter, optional in every part."""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from storage.documents import AuthorName, ForeignDocument, decode_document, unknown_keys
from storage.errors import InvalidDocument
from storage.keys import parse_heldout_ref


def _check_heldout_ref(ref: str) -> str:
    parse_heldout_ref(ref)
    return ref


def _null_is_silence(value: object) -> object:
    return () if value is None else value


_SHOWN_KEYS, _SHOWN = 20, 200
# Where a signature or a token may begin; a `%` may write any of the three.
_QUERY = re.compile(r"[?#;]|%(?:25)*(?:3f|23|3b)", re.IGNORECASE)
_SECRET = re.compile(r"(?i)(signature|token|secret|password|credential|access.?key(?:.?id)?)(=|%3d)[^&/\s]*")

Bpb = Annotated[float, Field(ge=0, allow_inf_nan=False)]
HeldoutRef = Annotated[str, AfterValidator(_check_heldout_ref)]
OrNull = BeforeValidator(_null_is_silence)


class Trainer(ForeignDocument):
    """The program that trained the adapter."""

    name: str
    version: str | None = None


class ReferenceScore(ForeignDocument):
    """What the trainer measured on one held-out set, in bits per UTF-8 byte."""

    own_bpb: Bpb
    base_bpb: Bpb
    units: int = Field(ge=1)
    bytes: int = Field(ge=1)


class Reference(ForeignDocument):
    """The trainer's own scores, per held-out set, and the measure they were taken by."""

    measure_id: str
    heldout: dict[HeldoutRef, ReferenceScore]


class Training(ForeignDocument):
    """What the trainer states; where it is silent the field is None or empty."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    trainer: Trainer | None = None
    peft_version: str | None = None
    base: str | None = None
    lora_b_layout: str | dict[str, str] | None = Field(default=None, alias="lora_B_layout")
    intended_targets: Annotated[tuple[str, ...], OrNull] = ()
    heldout: Annotated[tuple[HeldoutRef, ...], OrNull] = ()
    authors: Annotated[tuple[AuthorName, ...], OrNull] = ()
    reference: Reference | None = None
    merged_checkpoint: str | None = None


def redact_uri(uri: str) -> str:
    """Return an address as it may be recorded and shown: without query, without what a secret may stand in.

    Presigned addresses carry their signature in the query, others a user and password before the host.
    """
    shown = _QUERY.split(uri, maxsplit=1)[0]
    shown += "?…" if len(shown) < len(uri) else ""
    user, at, place = re.sub("%(?:25)*40", "@", shown).rpartition("@")
    if at:
        scheme, slashes, _ = user.partition("://")
        shown = f"{scheme}://…@{place}" if slashes else f"…@{place}"
    return _SECRET.sub(r"\1\2…", shown)


def _refuse_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the object; parsers differ in which of two equal keys they take, so there may be none."""
    fields: dict[str, object] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {key[:_SHOWN]!r} twice")
        fields[key] = value
    return fields


def parse_training(key: str, body: bytes) -> tuple[Training, tuple[str, ...]]:
    """Return what a training.json states, and a warning for each key in it that we do not know and ignore.

    Of very many keys the first are named. Raises InvalidDocument.
    """
    training = decode_document(key, body, Training)
    try:
        raw = json.loads(body, object_pairs_hook=_refuse_doubles)
    except ValueError as error:
        raise InvalidDocument(key, str(error)) from error
    unknown = unknown_keys(training, raw)
    warnings = [f"{key}: {path[:_SHOWN]} is no key we know, ignored" for path in unknown[:_SHOWN_KEYS]]
    if len(unknown) > _SHOWN_KEYS:
        warnings.append(f"{key}: {len(unknown) - _SHOWN_KEYS} more keys that we do not know, ignored")
    return training, tuple(warnings)
