"""A scripted engine: the one fake of the BPB check, for tests of everything but the engine itself.

It tokenises by bytes (ids 0-255, `<s>` is BOS, `</s>` is EOS) and scores each token without looking at its
context, so a text's total does not depend on how it is cut into windows. A model is given by its mean bits
per byte.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

BOS_ID = 256
EOS_ID = 257
_SPECIAL = {BOS_ID: "<s>", EOS_ID: "</s>"}
_IDS = {name: id for id, name in _SPECIAL.items()}
_SPLIT = re.compile(f"({'|'.join(map(re.escape, _IDS))})")


@dataclass(frozen=True)
class BadValue:
    """`model` gives `value` at `position` of every prompt that holds `marker` (by default: of all)."""

    model: str
    position: int
    value: float | None
    marker: str = ""


class ScriptedScorer:
    """Implements `tasks.bpb.protocol.Scorer`.

    models: mean bits per byte by model name; the first name is the base, the others can be loaded.
    adapters: mean bits per byte of an adapter that `models` does not name, from its name and path.
    max_len: max_model_len. Longer prompts (with one generated token) are refused, as the server does.
    bos, eos: what tokenize puts around a text with special tokens.
    spread: how much bits vary from byte to byte, as a fraction of the mean; alike for all models.
    flavour: the same with another pattern for each model, so that differences vary too.
    noise: bits per byte that come and go from one call to the next.
    drift: bits per byte added to the base once an adapter has been scored.
    bad: values to give instead of right ones.
    short: models that answer one prompt too few.
    on_load, on_logprobs: exceptions to raise, by model name.

    calls: what was asked, in order: (load | unload | logprobs, model name).
    prompts: the prompts of all logprobs calls, by model name.
    stacked: the adapters that were loaded as vLLM's fused format.
    """

    def __init__(
        self,
        models: Mapping[str, float],
        *,
        adapters: Callable[[str, str], float] | None = None,
        max_len: int = 64,
        bos: bool = False,
        eos: bool = False,
        spread: float = 0.0,
        flavour: float = 0.0,
        noise: float = 0.0,
        drift: float = 0.0,
        bad: Sequence[BadValue] = (),
        short: Sequence[str] = (),
        on_load: Mapping[str, BaseException] | None = None,
        on_logprobs: Mapping[str, BaseException] | None = None,
    ) -> None:
        self.base = next(iter(models))
        self.models = dict(models)
        self.adapters = adapters
        self.max_len = max_len
        self.bos = bos
        self.eos = eos
        self.spread = spread
        self.flavour = flavour
        self.noise = noise
        self.drift = drift
        self.bad = tuple(bad)
        self.short = frozenset(short)
        self.on_load = dict(on_load or {})
        self.on_logprobs = dict(on_logprobs or {})
        self.calls: list[tuple[str, str]] = []
        self.prompts: dict[str, list[tuple[int, ...]]] = {}
        self.stacked: set[str] = set()
        self._loaded: dict[str, float] = {}

    def tokenize(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in _SPLIT.split(text):
            ids.extend([_IDS[piece]] if piece in _IDS else piece.encode())
        if add_special_tokens:
            ids = [BOS_ID] * self.bos + ids + [EOS_ID] * self.eos
        return tuple(ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        pieces = b"".join(_SPECIAL[id].encode() if id in _SPECIAL else bytes([id]) for id in ids)
        return pieces.decode(errors="replace")

    def load(self, name: str, path: str, *, is_3d: bool) -> None:
        self.calls.append(("load", name))
        if is_3d:
            self.stacked.add(name)
        if name in self.on_load:
            raise self.on_load[name]
        if name in self.models:
            self._loaded[name] = self.models[name]
        elif self.adapters is not None:
            self._loaded[name] = self.adapters(name, path)
        else:
            raise LookupError(f"scripted engine: no adapter {name} in the script")

    def unload(self, name: str) -> None:
        self.calls.append(("unload", name))
        del self._loaded[name]

    def max_model_len(self) -> int:
        return self.max_len

    def served_models(self) -> tuple[str, ...]:
        return (self.base, *self._loaded)

    def logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float | None, ...]]:
        self.calls.append(("logprobs", model))
        if model in self.on_logprobs:
            raise self.on_logprobs[model]
        if model != self.base and model not in self._loaded:
            raise LookupError(f"scripted engine: {model} is not loaded")
        too_long = [len(prompt) for prompt in prompts if len(prompt) + 1 > self.max_len]
        if too_long:
            raise ValueError(f"scripted engine: prompts of {too_long} tokens, max_model_len {self.max_len}")
        self.prompts.setdefault(model, []).extend(tuple(prompt) for prompt in prompts)
        nats = {id: -self._bits(model, id) * math.log(2) for id in set().union(*prompts)}
        answers = [self._answer(model, prompt, nats) for prompt in prompts]
        return answers[:-1] if model in self.short else answers

    def _answer(
        self, model: str, prompt: Sequence[int], nats: Mapping[int, float]
    ) -> tuple[float | None, ...]:
        values: list[float | None] = [None, *(nats[id] for id in prompt[1:])]
        text = self.detokenize(prompt)
        for bad in self.bad:
            if bad.model == model and bad.marker in text and bad.position < len(values):
                values[bad.position] = bad.value
        return tuple(values)

    def _bits(self, model: str, id: int) -> float:
        mean = self.models[self.base] if model == self.base else self._loaded[model]
        if model == self.base and any(name != self.base for _, name in self.calls):
            mean += self.drift
        wobble = self.noise * _fraction(f"{len(self.calls)} {id}") if self.noise else 0.0
        return (
            mean * (1 + self.spread * _fraction(f"{id}") + self.flavour * _fraction(f"{model} {id}")) + wobble
        )


@cache
def _fraction(key: str) -> float:
    """A number in [-1, 1) that only the key decides."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) / 2**31 - 1
