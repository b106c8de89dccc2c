"""Everything that is wrong with one adapter, gathered while it is read, so that one answer can name it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tasks.lora.errors import AdapterError
from tasks.lora.files import CONFIG_NAME

_Given = ParamSpec("_Given")
_Read = TypeVar("_Read")


class Problems:
    """The errors of one adapter, in the order in which they were found.

    Of a class the first stands for all, and says how many there were; of those about the config there is one for each
    field, whose name is in `where`.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._first: dict[tuple[type[AdapterError], str], AdapterError] = {}
        self._counts: Counter[tuple[type[AdapterError], str]] = Counter()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._first)

    def add(self, error: AdapterError, kind: str | None = None) -> None:
        """Keep an error.

        kind: tells apart what its class does not; None for the field of the config, if the error is about one.
        """
        if kind is None:
            kind = error.where if error.where.startswith(CONFIG_NAME) else ""
        key = (type(error), kind)
        self._first.setdefault(key, error)
        self._counts[key] += 1

    def extend(self, later: Problems) -> None:
        """Add what was found later."""
        for key, error in later._first.items():
            self._first.setdefault(key, error)
            self._counts[key] += later._counts[key]

    def attempt(
        self, read: Callable[_Given, _Read], *args: _Given.args, **kwargs: _Given.kwargs
    ) -> _Read | None:
        """Return what `read` returns; where it raises an AdapterError keep that, and those with it, and return None."""
        try:
            return read(*args, **kwargs)
        except AdapterError as error:
            for one in (error, *error.others):
                self.add(one)
            return None

    def has(self, *kinds: type[AdapterError]) -> bool:
        """Return whether there is an error of any of these classes."""
        return any(kind in kinds for kind, _ in self._first)

    def drop(self, *kinds: type[AdapterError]) -> None:
        """Forget the errors of these classes: mere consequences of others."""
        self._first = {key: error for key, error in self._first.items() if key[0] not in kinds}

    def merge(self) -> AdapterError:
        """Return the first error with all others on it (`others`); there must be one."""
        first, *others = (self._tell(key, error) for key, error in self._first.items())
        first.others = tuple(others)
        return first

    def raise_any(self) -> None:
        """Raise what `merge` returns; return if there is no error."""
        if self:
            raise self.merge()

    def _tell(self, key: tuple[type[AdapterError], str], error: AdapterError) -> AdapterError:
        count = self._counts[key]
        if count == 1:
            return error
        found = f"{error.found} (the first of {count})"
        return type(error)(error.adapter, error.where, error.expected, found, error.advice)
