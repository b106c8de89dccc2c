"""Held-out sets: texts of an author that no adapter was trained on, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import model_validator

from storage.documents import ForeignDocument, decode_document, unknown_keys
from storage.errors import HeldoutMissing, InvalidDocument, ObjectNotFound
from storage.keys import heldout_key, heldout_prefix, parse_heldout_key
from storage.s3 import S3Store


class HeldoutUnit(ForeignDocument):
    """One text that is scored; a prompt conditions it and is not scored itself."""

    id: str
    prompt: str | None = None
    text: str

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        for field in ("id", "prompt", "text"):
            value = getattr(self, field)
            if value is not None and not value.strip():
                advice = "leave it out" if field == "prompt" else "remove the line or fill it"
                raise ValueError(f"{field} is empty: {advice}")
        return self


@dataclass(frozen=True, slots=True)
class HeldoutSet:
    """One registered set: its units in file order, the sha256 of its bytes, and what was ignored in it."""

    author: str
    name: str
    units: tuple[HeldoutUnit, ...]
    sha256: str
    warnings: tuple[str, ...]

    @property
    def ref(self) -> str:
        """Return how training.json and verdicts name this set: `<author>/<name>`."""
        return f"{self.author}/{self.name}"


def register_heldout(store: S3Store, author: str, name: str, file: Path) -> HeldoutSet:
    """Write a file into the store as an author's held-out set, byte for byte, and return the set.

    Raises InvalidName, InvalidDocument with the number of the first line that is wrong, StoreUnavailable,
    OSError.
    """
    key = heldout_key(author, name)
    body = file.read_bytes()
    parsed = _parse(author, name, str(file), body)
    store.put(key, body)
    return parsed


def read_heldout(store: S3Store, author: str, name: str) -> HeldoutSet:
    """Return a registered held-out set.

    Raises InvalidName, HeldoutMissing, InvalidDocument, StoreUnavailable.
    """
    key = heldout_key(author, name)
    try:
        body = store.get(key).body
    except ObjectNotFound:
        raise HeldoutMissing(author, name, list_heldout(store, author)) from None
    return _parse(author, name, key, body)


def list_heldout(store: S3Store, author: str) -> tuple[str, ...]:
    """Return the names of an author's held-out sets, sorted.

    Raises InvalidName, StoreUnavailable, StoreNotTrusted.
    """
    names = (parse_heldout_key(found.key) for found in store.list_objects(heldout_prefix(author)))
    return tuple(sorted(name[1] for name in names if name is not None))


def _parse(author: str, name: str, where: str, body: bytes) -> HeldoutSet:
    """Return the set in these bytes; lines end at a line feed, blank ones are skipped."""
    units: dict[str, HeldoutUnit] = {}
    warnings: list[str] = []
    for number, line in enumerate(body.split(b"\n"), start=1):
        if not line.strip():
            continue
        at = f"{where}, line {number}"
        _check_encoding(at, line)
        unit = decode_document(at, line, HeldoutUnit)
        if unit.id in units:
            raise InvalidDocument(at, f"id {unit.id!r} is used by an earlier line: every unit needs its own")
        units[unit.id] = unit
        warnings += (
            f"{at}: {path} is no key we know, ignored" for path in unknown_keys(unit, json.loads(line))
        )
    if not units:
        raise InvalidDocument(where, 'it holds no units: expected lines such as {"id": "1", "text": "..."}')
    return HeldoutSet(author, name, tuple(units.values()), hashlib.sha256(body).hexdigest(), tuple(warnings))


def _check_encoding(at: str, line: bytes) -> None:
    if line.startswith(b"\xef\xbb\xbf"):
        raise InvalidDocument(at, "it begins with a byte order mark: save the file as UTF-8 without one")
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise InvalidDocument(at, f"it is not UTF-8: {error}") from error
