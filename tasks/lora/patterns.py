"""Keys of rank_pattern and alpha_pattern, and the modules that they match.

Source: PEFT 0.18.1 to 0.21.2 utils/other.py, get_pattern_key; vLLM 0.32 lora/peft_helper.py, _match_pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PLAIN = re.compile(r"[\w.-]+")
_MOST_REPEATS = 4
_MOST_CHARACTERS = 10_000
# Of all patterns of one field, plain keys apart: compiling them takes seconds at most.
_MOST_PATTERNS, _MOST_CHARACTERS_IN_ALL = 5_000, 250_000
# Ways to match that a pattern may have: trying all on a name takes some 50 ms.
_MOST_WAYS = 1_000_000
# The same for all patterns of a field and all names that are asked for: a minute or two, measured with patterns whose
# end Python cannot look for first, such as `.*.*.*\d!`.
MOST_TRIES = 500_000_000
# A name has forty letters and more, and a repeat may end at each of them.
_WAYS_OF_A_REPEAT, _WAYS_OF_DIGITS = 40, 4
# What a pattern costs a name that it does not match, in ways.
_WAYS_OF_A_CALL = 2


class PatternTable:
    """The keys of one pattern field, ready to be asked about tens of thousands of modules."""

    def __init__(self, patterns: Mapping[str, float]) -> None:
        """Sort the keys by kind. Raises ValueError for a key that `compile_key` refuses."""
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

    @property
    def ways(self) -> int:
        """Return how many ways there are to match one name, at most: what asking for it costs."""
        patterns = sum(_WAYS_OF_A_CALL + _count_ways(_lay_bare(key)) for _, key, _ in self._others)
        return patterns + len(self._plain)

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


def check_key(key: str) -> None:
    """Raise ValueError for a key that `compile_key` refuses; plain keys are not compiled for that."""
    if len(key) > _MOST_CHARACTERS or not _PLAIN.fullmatch(key):
        compile_key(key)


def check_amount(patterns: Mapping[str, object]) -> None:
    """Raise ValueError where there are more patterns than can be compiled in seconds; plain keys do not count."""
    others = [key for key in patterns if not _PLAIN.fullmatch(key)]
    characters = sum(map(len, others))
    if len(others) > _MOST_PATTERNS or characters > _MOST_CHARACTERS_IN_ALL:
        raise ValueError(
            f"at most {_MOST_PATTERNS} patterns of {_MOST_CHARACTERS_IN_ALL} characters in all, "
            f"where these are {len(others)} of {characters}"
        )


def compile_key(key: str) -> re.Pattern[str]:
    """Return the expression that PEFT and vLLM make of a key: the whole name, or what follows one of its dots.

    Raises ValueError, which says what is expected, for a key that is no regular expression, or that could take years to
    match: a repeated group, more than four repeats, or alternatives that multiply. Python tries one after another
    whatever may match.
    """
    if len(key) > _MOST_CHARACTERS:
        raise ValueError(f"a pattern of at most {_MOST_CHARACTERS} characters, where this has {len(key)}")
    bare = _lay_bare(key)
    if re.search(r"\)[*+{]", bare) or len(re.findall(r"[*+{]", bare)) > _MOST_REPEATS:
        raise ValueError(f"a pattern without repeated groups and with at most {_MOST_REPEATS} repeats")
    try:
        pattern = re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError) as error:
        raise ValueError(f"a regular expression, which this is not: {error}") from error
    except RecursionError as error:
        raise ValueError("a pattern that is not nested too deep to be real") from error
    if _count_ways(bare) > _MOST_WAYS:
        raise ValueError(f"a pattern that matches in at most {_MOST_WAYS} ways")
    return pattern


def _lay_bare(key: str) -> str:
    """Return a pattern without its escapes and sets: 0 stands for a digit, x for any other of them."""
    return re.sub(r"\\.|\[[^\]]*\]", lambda found: "0" if found[0] in (r"\d", "[0-9]") else "x", key)


def _count_ways(bare: str) -> int:
    """Return how many ways a pattern that was laid bare can match at most, or a number above the limit.

    Alternatives add up, what follows one another multiplies; an optional part has two ways. A name has few digits
    together, so that repeating them has few ways, too.
    """
    outer: list[tuple[int, int]] = []
    before, ways = 0, 1
    for token in re.findall(r"\(\??|0[*+]|[)|*+{?]", bare):
        if token[0] == "(":
            outer.append((before, ways))
            before, ways = 0, 1
        elif token == "|":
            before, ways = before + ways, 1
        elif token == ")":
            inner = before + ways
            before, ways = outer.pop() if outer else (0, 1)
            ways *= inner
        elif token == "?":
            ways *= 2
        else:
            ways *= _WAYS_OF_DIGITS if token[0] == "0" else _WAYS_OF_A_REPEAT
        ways = min(ways, _MOST_WAYS + 1)
    return before + ways
