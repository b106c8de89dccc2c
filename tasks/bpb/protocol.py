"""What the measurement asks of an engine, and how a text becomes windows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tasks.bpb.errors import TokenizerUnsupported, WindowInvalid
from tasks.bpb.heldout import Unit

# Any text that a tokenizer turns into ordinary tokens: shows what it puts around a text.
_PROBE = "roster"
# A UTF-8 character has at most 4 bytes, so at most 3 more tokens complete the character that a token began.
_MAX_LEFT_OUT = 4
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Scorer(Protocol):
    """An engine that tokenises, loads adapters by name and gives log-probabilities of given token ids."""

    def tokenize(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The token ids of a whole text, however long."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids; bytes that are no whole character become U+FFFD."""

    def load(self, name: str, path: str, *, is_3d: bool) -> None:
        """Make the adapter in this directory available as model `name`."""

    def unload(self, name: str) -> None:
        """Forget an adapter."""

    def logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float | None, ...]]:
        """For each prompt one natural log-probability per token: None at 0, nan where it is not finite."""

    def max_model_len(self) -> int:
        """The longest prompt and completion together, in tokens."""

    def served_models(self) -> tuple[str, ...]:
        """The names of the base and of all adapters that are loaded now."""


class BosRule(StrEnum):
    """How the first token of a text is treated."""

    ONE_BOS = "one_bos"
    FIRST_TOKEN_LEFT_OUT = "first_token_left_out"


@dataclass(frozen=True, slots=True)
class Window:
    """One prompt for the engine: ids `[begin, end)`, of which `[first_scored, end)` are scored."""

    begin: int
    end: int
    first_scored: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of one unit; tokens from `scored_from` on are scored and stand for `byte_count` bytes."""

    ids: tuple[int, ...]
    scored_from: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class Unscorable:
    """Why a unit cannot be scored."""

    reason: str


def plan_windows(ids: Sequence[int], scored_from: int, *, max_len: int, stride: int) -> tuple[Window, ...]:
    """Windows of at most `max_len` ids in which each token from `scored_from` on is scored exactly once.

    Windows begin at multiples of `stride`. A scored token has all tokens before it as context, or at least
    `max_len - stride` of them. Windows in which nothing would be scored are left out.

    Raises:
        WindowInvalid: not 1 <= stride < max_len, or the first token would be scored without any context.
    """
    if not 1 <= stride < max_len or scored_from < 1:
        raise WindowInvalid(max_len, stride, scored_from)
    windows = []
    covered = scored_from
    for begin in range(0, len(ids), stride):
        end = min(begin + max_len, len(ids))
        if end > covered:
            windows.append(Window(begin, end, covered))
            covered = end
    return tuple(windows)


def find_bos(scorer: Scorer) -> int | None:
    """The token that the tokenizer puts before a text, None if it puts none. What it appends is ignored.

    Raises:
        TokenizerUnsupported: it puts several tokens there, or changes the text's own tokens.
    """
    with_special = scorer.tokenize(_PROBE, add_special_tokens=True)
    without_special = scorer.tokenize(_PROBE, add_special_tokens=False)
    for count in (0, 1):
        if with_special[count : count + len(without_special)] == without_special:
            break
    else:
        raise TokenizerUnsupported(with_special, without_special)
    if count == 0:
        return None
    if with_special[0] in without_special:
        raise TokenizerUnsupported(with_special, without_special)
    return with_special[0]


def encode_unit(scorer: Scorer, unit: Unit, bos: int | None) -> Encoded | Unscorable:
    """The unit's token ids, where scoring begins, and the UTF-8 bytes of exactly the scored text.

    The ids are BOS (if there is one), the prompt's tokens, the text's tokens, each tokenised by itself
    without special tokens; a BOS written in the text is a token of the text like any other. Without anything
    before it, the text's first token has no context and is left out with its bytes, together with the tokens
    that complete its last character where it ends inside one.
    """
    try:
        byte_count = len(unit.text.encode())
        (unit.prompt or "").encode()
    except UnicodeEncodeError as error:
        return Unscorable(f"has a character that UTF-8 cannot hold, at {error.start}: {error.reason}")
    if byte_count == 0:
        return Unscorable("has no text")
    before: tuple[int, ...] = () if bos is None else (bos,)
    if unit.prompt:
        before += scorer.tokenize(unit.prompt, add_special_tokens=False)
    text_ids = scorer.tokenize(unit.text, add_special_tokens=False)
    if before:
        if not text_ids:
            return Unscorable("gives no tokens")
        return Encoded(before + text_ids, len(before), byte_count)
    return _leave_out_first(scorer, unit.text, text_ids)


def _leave_out_first(scorer: Scorer, text: str, ids: tuple[int, ...]) -> Encoded | Unscorable:
    for count in range(1, min(_MAX_LEFT_OUT, len(ids) - 1) + 1):
        head = scorer.detokenize(ids[:count])
        if _REPLACEMENT not in head and text.startswith(head):
            byte_count = len(text[len(head) :].encode())
            if byte_count == 0:
                return Unscorable("has no text after its first token, which has no context and is not scored")
            return Encoded(ids, count, byte_count)
    if len(ids) <= 1:
        return Unscorable(f"has {len(ids)} tokens; the first has no context and is not scored")
    return Unscorable("the text of its first token cannot be told, so its bytes cannot be left out")
