"""The fields of a base model's config.json, each read as one kind of value or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.lora.errors import InvalidBaseConfig
from tasks.lora.family import Field

BASE_CONFIG_NAME = "config.json"

# Far beyond any model, and small enough that every product of sizes can be printed.
_MOST = 2**31 - 1
_COUNT = f"a whole number above zero, at most {_MOST}"
_WHOLE = "a whole number"
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class BaseFields:
    """A config.json in parts, of which the first that gives a field counts.

    What is asked of it raises InvalidBaseConfig for a value of another kind.
    """

    label: str
    parts: tuple[dict[str, object], ...]

    def invalid(self, name: str, expected: str, found: object) -> InvalidBaseConfig:
        """Return the error for a field."""
        return InvalidBaseConfig(self.label, f"{BASE_CONFIG_NAME}: {name}", expected, str(found)[:_SHOWN])

    def find(self, name: str) -> object:
        """Return what the first part that gives a field has there, or None."""
        return next((part[name] for part in self.parts if part.get(name) is not None), None)

    def count(self, field: Field) -> int:
        """Return a whole number above zero, at most 2**31 - 1. Raises InvalidBaseConfig without one."""
        value = self.optional_count(field)
        if not value:
            raise self.invalid(str(field), _COUNT, "nothing" if value is None else value)
        return value

    def optional_count(self, field: Field) -> int | None:
        """Return a whole number from zero on, or None; the first part that has any of its names is asked alone."""
        number = self._find_count(field)
        if number is None and field.otherwise is not None:
            return self._find_count(Field((field.otherwise,)))
        return number

    def _find_count(self, field: Field) -> int | None:
        for part in self.parts:
            found: dict[str, int] = {}
            for path, value in (pair for name in field.names for pair in _walk(part, name)):
                if type(value) is not int or not 0 <= value <= _MOST:
                    raise self.invalid(path, _COUNT, repr(value))
                found[path] = value
            if len(set(found.values())) > 1:
                raise self.invalid(str(field), "the same number in each", json.dumps(found))
            for number in found.values():
                return number
        return None

    def whole(self, name: str) -> int:
        """Return a whole number, that of a list's first entry. Raises InvalidBaseConfig without one."""
        value = self.optional_whole(name)
        if value is None:
            raise self.invalid(name, _WHOLE, "nothing")
        return value

    def optional_whole(self, name: str) -> int | None:
        """Return a whole number, that of a list's first entry, or None without one."""
        value = self.find(name)
        first: object = value[0] if isinstance(value, list) and value else value
        if first is None:
            return None
        if type(first) is int:
            return first
        raise self.invalid(name, _WHOLE, repr(value))

    def optional_words(self, name: str) -> tuple[str, ...] | None:
        """Return a list of words, of a text its letters, or None without either."""
        value = self.find(name)
        if value is None:
            return None
        if isinstance(value, str) or (
            isinstance(value, list) and all(isinstance(word, str) for word in value)
        ):
            return tuple(value)
        raise self.invalid(name, "a list of words, or a text", repr(value))

    def optional_numbers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers, or None without one."""
        value = self.find(name)
        if value is None:
            return None
        if isinstance(value, list) and all(type(number) is int for number in value):
            return tuple(value)
        raise self.invalid(name, "a list of whole numbers", repr(value))

    def is_list(self, name: str) -> bool:
        """Return whether a field is a list."""
        return isinstance(self.find(name), list)

    def is_true(self, name: str) -> bool:
        """Return whether a field is true; without one it is not."""
        value = self.find(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.invalid(name, "true or false", repr(value))


def _walk(value: object, path: str, before: str = "") -> Iterator[tuple[str, object]]:
    """Yield what stands at a path and is not null, each with its own path."""
    first, _, rest = path.partition(".")
    if isinstance(value, dict):
        for name in value if first == "*" else (first,):
            inner = value.get(name)
            if rest:
                yield from _walk(inner, rest, f"{before}{name}.")
            elif inner is not None:
                yield f"{before}{name}", inner
