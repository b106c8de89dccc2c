"""training.json: what the trainer states about an adapter, optional in every part."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from storage.documents import AuthorName, ForeignDocument, decode_document, unknown_keys
from storage.keys import parse_heldout_ref


def _check_heldout_ref(ref: str) -> str:
    parse_heldout_ref(ref)
    return ref


_SHOWN_KEYS, _SHOWN = 20, 200

HeldoutRef = Annotated[str, AfterValidator(_check_heldout_ref)]


class Trainer(ForeignDocument):
    """The program that trained the adapter."""

    name: str
    version: str | None = None


class ReferenceScore(ForeignDocument):
    """What the trainer measured on one held-out set, in bits per UTF-8 byte."""

    own_bpb: float
    base_bpb: float
    units: int
    bytes: int


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
    intended_targets: tuple[str, ...] = ()
    heldout: tuple[HeldoutRef, ...] = ()
    authors: tuple[AuthorName, ...] = ()
    reference: Reference | None = None
    merged_checkpoint: str | None = None


def parse_training(key: str, body: bytes) -> tuple[Training, tuple[str, ...]]:
    """Return what a training.json states, and a warning for each key in it that we do not know and ignore.

    Of very many keys the first are named. Raises InvalidDocument.
    """
    training = decode_document(key, body, Training)
    unknown = unknown_keys(training, json.loads(body))
    warnings = [f"{key}: {path[:_SHOWN]} is no key we know, ignored" for path in unknown[:_SHOWN_KEYS]]
    if len(unknown) > _SHOWN_KEYS:
        warnings.append(f"{key}: {len(unknown) - _SHOWN_KEYS} more keys that we do not know, ignored")
    return training, tuple(warnings)
