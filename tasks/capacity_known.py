"""What a capacity plan is made from: what the store knows of a base, and what the operator asks for."""

from __future__ import annotations

from dataclasses import dataclass

from roster.capacity import Memory
from roster.serving import Roster, RosterBase
from roster.serving_engine import EngineInfo
from storage.bases import BaseDocument, read_base
from storage.documents import read_document
from storage.errors import ObjectNotFound
from storage.keys import engine_key, roster_key
from storage.s3 import S3Store


@dataclass(frozen=True, slots=True)
class Known:
    """What is stored of a registered base: its document, who is served on it, what its engine said of itself."""

    document: BaseDocument | None = None
    served: RosterBase | None = None
    engine: EngineInfo | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the operator asks for; None for what is known, or vLLM's own default.

    weight_bytes: what the weights take on each accelerator.
    """

    memory: Memory | None = None
    tp: int | None = None
    ep: bool | None = None
    fully_sharded: bool | None = None
    adapters: int | None = None
    max_lora_rank: int | None = None
    dtype: str | None = None
    weight_bytes: int | None = None


def read_known(store: S3Store, base: str) -> Known:
    """What is stored of a registered base. Raises UnknownBase, InvalidDocument, StoreUnavailable."""
    document = read_base(store, base).document
    try:
        served = read_document(store, roster_key(), Roster)[0].bases.get(base)
    except ObjectNotFound:
        served = None
    try:
        engine = read_document(store, engine_key(base), EngineInfo)[0]
    except ObjectNotFound:
        engine = None
    return Known(document, served, engine)
