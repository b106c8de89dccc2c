"""Registered bases: their config.json, and what we know of them beyond it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from storage.digests import FileDigest, directory_digest, sha256_file
from storage.documents import (
    AuthorName,
    BaseName,
    Document,
    RootDocument,
    Sha256,
    put_document,
    read_document,
)
from storage.errors import InvalidDocument, NameTaken, NoWeights, ObjectNotFound, UnknownBase
from storage.keys import BASES, UPLOADS, base_config_key, base_document_key, parse_base_document_key
from storage.progress import Progress, Tally
from storage.s3 import S3Store


class TargetFormat(StrEnum):
    """The form in which adapters of a base are served."""

    PER_EXPERT = "per-expert"
    STACKED = "stacked"
    SLOTS = "slots"


class BaseEngine(Document):
    """How the base is served; None where the engine decides."""

    url: str | None = None
    dtype: str | None = None
    quantization: str | None = None


class BaseDocument(RootDocument):
    """base.json. `aliases` are further names that trainers use for this base, `served_model` is the engine's.

    `exclusions` are pairs of authors who are never each other's wrong adapter, such as pen names. `weights` is the
    folder where workers find the weights that `weights_digest` was taken of; None where they are on no worker's disk.
    """

    base: BaseName
    aliases: tuple[str, ...] = ()
    served_model: str
    weights_digest: Sha256 | None
    weights: str | None = None
    engine: BaseEngine
    target_format: TargetFormat
    exclusions: tuple[tuple[AuthorName, AuthorName], ...] = ()


@dataclass(frozen=True, slots=True)
class Base:
    """A registered base: its config.json as given, base.json, and a digest of what can change a result."""

    name: str
    config: bytes
    document: BaseDocument
    digest: str


def base_digest(config: bytes, weights_digest: str | None) -> str:
    """Return the digest of a base's config.json and weights; addresses and names do not count."""
    parts = [FileDigest("config.json", len(config), hashlib.sha256(config).hexdigest())]
    if weights_digest is not None:
        parts.append(FileDigest("weights", 0, weights_digest))
    return directory_digest(parts)


def weights_digest(directory: Path, progress: Progress) -> str:
    r"""Return the sha256 over the sorted lines `<sha256> <name>\n` of the weight files in a directory.

    These are its safetensors, or its *.bin files where it has none. Reads them all: minutes for a large base.

    Raises NoWeights, OSError.
    """
    paths = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if not paths:
        raise NoWeights(str(directory))
    tally = Tally(sum(path.stat().st_size for path in paths), progress)
    return directory_digest([sha256_file(path, tally) for path in paths])


def register_base(store: S3Store, config: bytes, document: BaseDocument) -> Base:
    """Write a base's config.json and base.json, over earlier ones of that name, and return the base.

    Raises InvalidDocument for a config.json that is no JSON object, NameTaken if an author has one of its
    names, StoreUnavailable.
    """
    name = document.base
    _check_config(name, config)
    names = {name, document.served_model, *document.aliases}
    for author in store.list_folders(UPLOADS):
        if author in names:
            raise NameTaken("base", author, f"author {author}, who could then not be served beside it")
    store.put(base_config_key(name), config)
    put_document(store, base_document_key(name), document)
    return Base(name, config, document, base_digest(config, document.weights_digest))


def read_base(store: S3Store, name: str) -> Base:
    """Return a registered base.

    Raises InvalidName, UnknownBase, InvalidDocument, StoreUnavailable.
    """
    try:
        document, _ = read_document(store, base_document_key(name), BaseDocument)
        config = store.get(base_config_key(name)).body
    except ObjectNotFound:
        raise UnknownBase(name, list_bases(store)) from None
    if document.base != name:
        raise InvalidDocument(base_document_key(name), f"it describes base {document.base}")
    _check_config(name, config)
    return Base(name, config, document, base_digest(config, document.weights_digest))


def find_base(store: S3Store, name: str) -> Base | None:
    """Return the base that is registered under this name, or under a name that has it as an alias; else None.

    Raises InvalidDocument, StoreUnavailable, StoreNotTrusted.
    """
    names = list_bases(store)
    if name in names:
        return read_base(store, name)
    bases = (read_base(store, other) for other in names)
    return next((base for base in bases if name in base.document.aliases), None)


def list_bases(store: S3Store) -> tuple[str, ...]:
    """Return the names of the registered bases, sorted.

    Raises StoreUnavailable, StoreNotTrusted.
    """
    names = (parse_base_document_key(found.key) for found in store.list_objects(BASES))
    return tuple(sorted(name for name in names if name is not None))


def _check_config(name: str, config: bytes) -> None:
    key = base_config_key(name)
    try:
        values = json.loads(config)
    except ValueError as error:
        raise InvalidDocument(key, f"expected JSON, found: {error}") from error
    if not isinstance(values, dict):
        raise InvalidDocument(key, f"expected a JSON object, found {type(values).__name__}")
