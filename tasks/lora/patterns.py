"""Keys of rank_pattern and alpha_pattern, and the modules that they match.

Source: PEFT 0.18.1 to 0.21.2 utils/other.py, get_pattern_key; vLLM 0.32 lora/peft_helper.py, _match_pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PLAIN = re.compile(r"[\w.-]+")
_MOST_REPEATS = 4
_MOST_CHARACTERS = 10_000
# Ways to match that a pattern may have: trying all on a name takes some 30 ms.
_MOST_WAYS = 100_000
_WAYS_OF_A_REPEAT = 16


class PatternTable:
    """The keys of one pattern field, ready to be asked about tens of thousands of modules."""

    def __init__(self, patterns: Mapping[str, float]) -> None:
        """Sort the keys by kind. Raises ValueError for a key that `check_key` refuses."""
        # Plain keys, whose one special character is the dot, by the lengths of the parts between their dots.
        self._plain: dict[tuple[int, ...], dict[tuple[str, ...], tuple[int, str]]] = {}
        self._others: list[tuple[int, str, re.Pattern[str]]] = []
        self._values = dict(patterns)
        for place, key in enumerate(patterns):
            if _PLAIN.fullmatch(key):
                parts = tuple(key.split("."))
                self._plain.setdefault(tuple(map(len, parts)), {})[parts] = (place, key)
            else:
                self._others.append((place, key, compile_key(key)))

    def find(self, name: str) -> dict[str, float]:
        """Return the keys that match a module's name, in the order of the file, and their values."""
        found = [(place, key) for place, key, pattern in self._others if pattern.match(name)]
        for lengths, keys in self._plain.items():
            begin = len(name) - sum(lengths) - len(lengths) + 1
            if begin == 0 or (begin > 0 and name[begin - 1] == "."):
                parts = []
                for length in lengths:
                    parts.append(name[begin : begin + length])
                    begin += length + 1
                match = keys.get(tuple(parts))
                if match is not None:
                    found.append(match)
        return {key: self._values[key] for _, key in sorted(found)}


def compile_key(key: str) -> re.Pattern[str]:
    """Return the expression that PEFT and vLLM make of a key: the whole name, or what follows one of its dots.

    Raises ValueError for a key that is no regular expression, or one that could take years to match: a repeated
    group, more than four repeats, or alternatives that multiply. Python tries one after another whatever may match.
    """
    if len(key) > _MOST_CHARACTERS:
        raise ValueError(
            f"a pattern of at most {_MOST_CHARACTERS} characters is expected, this has {len(key)}"
        )
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", key)
    if re.search(r"\)[*+{]", bare) or len(re.findall(r"[*+{]", bare)) > _MOST_REPEATS:
        raise ValueError(f"a pattern with a repeated group or more than {_MOST_REPEATS} repeats")
    try:
        pattern = re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError) as error:
        raise ValueError(f"no regular expression: {error}") from error
    except RecursionError as error:
        raise ValueError("a pattern nested too deep to be real") from error
    if _count_ways(bare) > _MOST_WAYS:
        raise ValueError(f"a pattern that may match in more than {_MOST_WAYS} ways")
    return pattern


def _count_ways(bare: str) -> int:
    """Return how many ways a pattern without escapes and sets can match at most, or a number above the limit.

    Alternatives add up, what follows one another multiplies; an optional part has two ways.
    """
    outer: list[tuple[int, int]] = []
    before, ways = 0, 1
    for token in re.findall(r"\(\??|[)|*+{?]", bare):
        if token[0] == "(":
            outer.append((before, ways))
            before, ways = 0, 1
        elif token == "|":
            before, ways = before + ways, 1
        elif token == ")":
            inner = before + ways
            before, ways = outer.pop() if outer else (0, 1)
            ways *= inner
        else:
            ways *= 2 if token == "?" else _WAYS_OF_A_REPEAT
        ways = min(ways, _MOST_WAYS + 1)
    return before + ways
