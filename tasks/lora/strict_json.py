"""JSON as others write it, read without trust."""

from __future__ import annotations

import json
from typing import NoReturn


def parse_strict_json(data: bytes) -> object:
    """Return the value that `data` spells.

    Raises ValueError, with a short reason, for anything but UTF-8 JSON: repeated keys, NaN and Infinity, halves of
    surrogate pairs, numbers too long for the parser and nesting too deep for it included.
    """
    try:
        value: object = json.loads(
            data.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant
        )
        # Half a pair, which only an escape can spell, is text that nothing later could write down.
        if rb"\u" in data:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeDecodeError as error:
        raise ValueError(f"bytes that are not UTF-8 at position {error.start}") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair, {error.object[error.start]!a}") from error
    except RecursionError as error:
        raise ValueError("nesting too deep to be real") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON at position {error.pos}: {error.msg}") from error


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:200]!r} twice")
            seen.add(name)
    return fields


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"the constant {constant}, which JSON does not have")
