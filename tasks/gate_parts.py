"""What the gates of an engine are told and work with: the engine's door, adapters to be made, answers and distances."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.lora.family import TensorClass
from tasks.lora.target import TargetFormat

Answers = tuple[tuple[float | None, ...], ...]
"""For each prompt one log-probability for each token, in nats; None for the first."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far answers in one dtype move by rounding alone, in nats.

    least: the tolerance where answers repeat exactly. most: of noise that is still rounding.
    """

    least: float
    most: float


# Sums in another order: seen up to 1e-5 in float32. A logit of 16 to 32 is rounded to 2^-3 in bfloat16.
_ROUNDINGS: Mapping[str, Rounding] = {
    "float32": Rounding(1e-4, 1e-3),
    "float16": Rounding(0.01, 0.1),
    "bfloat16": Rounding(0.05, 0.5),
}


class GateEngine(Protocol):
    """An engine that loads adapters by name and can be asked by several threads at once."""

    def load(self, name: str, path: str, *, is_3d: bool) -> None:
        """Make the adapter in this directory available as model `name`."""

    def unload(self, name: str) -> None:
        """Forget an adapter."""

    def served_models(self) -> tuple[str, ...]:
        """The names of the base and of all adapters that are loaded now."""

    def logprobs(
        self, model: str, prompts: Sequence[Sequence[int]], *, generate: int = 1
    ) -> list[tuple[float | None, ...]]:
        """For each prompt one natural log-probability per token; then `generate` tokens are made after it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """An adapter that is to be made: on which classes of modules, how strong on each. number: another for each."""

    number: int
    strengths: Mapping[TensorClass, float]
    format: TargetFormat
    rank: int


@dataclass(frozen=True, slots=True)
class Made:
    """An adapter on the disk, under the name that it gets on the engine."""

    name: str
    path: str
    is_3d: bool


Make = Callable[[Recipe], Made]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GateSetting:
    """What is asked of an engine, by what it says of itself.

    model: the base's served name. classes: of the modules that take factors, for each form that it takes.
    slots: adapters in one batch; cached: adapters kept in memory. length: tokens of a prompt with what is generated.
    """

    model: str
    dtype: str
    vocab: int
    slots: int
    cached: int
    length: int
    max_rank: int
    classes: Mapping[TargetFormat, tuple[TensorClass, ...]]


def rounding_of(dtype: str) -> Rounding:
    """That of an unknown dtype is taken for the coarsest."""
    return _ROUNDINGS.get(dtype, _ROUNDINGS["bfloat16"])


def find_gap(one: Answers, other: Answers) -> float:
    """The largest distance of two log-probabilities of the same token; infinite where one is not a number."""
    if [len(answer) for answer in one] != [len(answer) for answer in other]:
        return math.inf
    largest = 0.0
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left[1:], right[1:], strict=True):
            distance = math.inf if a is None or b is None else abs(a - b)
            if not math.isfinite(distance):
                return math.inf
            largest = max(largest, distance)
    return largest


def say_nats(value: float) -> str:
    """A distance as a message says it."""
    return f"{value:.3g} nats" if math.isfinite(value) else "not a finite number of nats"
