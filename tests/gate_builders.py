"""A scripted engine for the gates: it answers as an engine of several slots does, or with one of its known faults."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from threading import Lock

from tasks.gate_parts import GateSetting, Made, Recipe
from tasks.lora.family import TensorClass
from tasks.lora.target import TargetFormat

EXPERTS, ATTENTION = TensorClass.ROUTED_EXPERTS, TensorClass.ATTENTION
BOTH = (EXPERTS, ATTENTION)
SLOTS, CACHED = 3, 4
_TOKEN_S = 0.0005


def setting(**changes: object) -> GateSetting:
    values: dict[str, object] = {
        "model": "tiny",
        "dtype": "float32",
        "vocab": 200,
        "slots": SLOTS,
        "cached": CACHED,
        "length": 512,
        "max_rank": 16,
        "classes": {TargetFormat.PER_EXPERT: BOTH},
    }
    return GateSetting(**{**values, **changes})  # type: ignore[arg-type]


class Workbench:
    """Makes adapters without writing any; remembers what they were to be."""

    def __init__(self) -> None:
        self.made: dict[str, Recipe] = {}

    def __call__(self, recipe: Recipe) -> Made:
        path = f"/made/{recipe.number}"
        self.made[path] = recipe
        return Made(f"~qualify@test-{recipe.number}", path, recipe.format is TargetFormat.STACKED)


@dataclass
class PlayedEngine:
    """Answers by the bytes of an adapter's path; thread-safe, and busy while it generates.

    leaks: base rows get the last adapter's answers while every slot is busy. mixes: adapters get another one's while
    another one is busy. forgets: what was loaded first answers as the base does once more are loaded than slots.
    spoils: the base is another one after all. dead: adapters on these classes change nothing. weak: how small effects
    are at strength 1. noise: nats that come and go; late_noise: the same, of
    adapters on several classes alone. serial: it answers one request after another. refuses: what loading
    the n-th adapter raises; fails_at: what the n-th question does.
    """

    bench: Workbench | None = None
    slots: int = SLOTS
    leaks: bool = False
    mixes: bool = False
    forgets: bool = False
    spoils: bool = False
    serial: bool = False
    dead: tuple[TensorClass, ...] = ()
    weak: float = 1.0
    noise: float = 0.0
    late_noise: float = 0.0
    refuses: dict[int, Exception] = field(default_factory=dict)
    fails_at: dict[int, BaseException] = field(default_factory=dict)
    loaded: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    stacked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._lock, self._one_by_one = Lock(), Lock()
        self._busy: list[str] = []
        self._asked = count()
        self._loads = count()
        self._most = 0

    def load(self, name: str, path: str, *, is_3d: bool) -> None:
        self.calls.append(("load", name))
        number = next(self._loads)
        if number in self.refuses:
            raise self.refuses[number]
        if is_3d:
            self.stacked.add(name)
        self.loaded[name] = path
        self._most = max(self._most, len(self.loaded))

    def unload(self, name: str) -> None:
        self.calls.append(("unload", name))
        self.loaded.pop(name, None)

    def served_models(self) -> tuple[str, ...]:
        return ("tiny", *self.loaded)

    def is_healthy(self) -> bool:
        return True

    def logprobs(
        self, model: str, prompts: Sequence[Sequence[int]], *, generate: int = 1
    ) -> list[tuple[float | None, ...]]:
        if self.serial:
            with self._one_by_one:
                return self._answer(model, prompts, generate)
        return self._answer(model, prompts, generate)

    def _answer(
        self, model: str, prompts: Sequence[Sequence[int]], generate: int
    ) -> list[tuple[float | None, ...]]:
        if model != "tiny" and model not in self.loaded:
            raise LookupError(model)
        with self._lock:
            asked = next(self._asked)
            self._busy.append(model)
        if asked in self.fails_at:
            raise self.fails_at[asked]
        time.sleep(_TOKEN_S * generate)
        with self._lock:
            others = sorted({one for one in self._busy if one not in ("tiny", model)})
            self._busy.remove(model)
        recipe = self.bench.made.get(self.loaded.get(model, "")) if self.bench else None
        late = self.late_noise if recipe and len(recipe.strengths) > 1 else 0.0
        wobble = (self.noise + late) * (asked % 2)
        key = self._key(model, others)
        return [
            (
                None,
                *(self._value(key, left, right) + wobble for left, right in pairwise(ids)),
            )
            for ids in map(list, prompts)
        ]

    def _key(self, model: str, others: list[str]) -> str | None:
        """The path of the adapter that answers, None for the base."""
        if model == "tiny":
            if self.leaks and len(others) >= self.slots:
                return self.loaded[others[-1]]
            return "spoilt" if self.spoils and self._most and not self.loaded else None
        if self.mixes and others:
            return self.loaded[others[0]]
        if self.forgets and self._most > self.slots and model == next(iter(self.loaded)):
            return None
        return self.loaded[model]

    def _value(self, key: str | None, left: int, right: int) -> float:
        value = -3 + _fraction(f"{left} {right}")
        if key is None:
            return value
        size = 1.0
        if self.bench is not None and key in self.bench.made:
            strengths = self.bench.made[key].strengths
            live = [strength for kind, strength in strengths.items() if kind not in self.dead]
            size = min(1.0, self.weak * max(live)) if live else 0.0
        return value + size * _fraction(f"{_content(key)} {left} {right}")


@cache
def _content(path: str) -> str:
    weights = Path(path) / "adapter_model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else path


def _fraction(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) / 2**31 - 1
