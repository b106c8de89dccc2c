"""Prompts asked of an engine: what a prompt's tokens cost, or why its answer cannot be used, and is it the same twice?

Rules 7 and 9 of `tasks.bpb.measure`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.bpb.errors import EngineUnsteady, MeasurementVoid
from tasks.bpb.protocol import Scorer, Window

REPEAT_LIMIT = 0.02
"""Bits per byte by which two answers to one prompt may differ.

As much as a whole set may move between two passes (0.005), times the square root of the 20 texts that a set has at
least: rounding that depends on what else is in a batch averages out so.
"""

# vLLM's HTTP server writes -9999.0 for minus infinity.
_HTTP_MINUS_INFINITY = -9999.0
# log p of a certain token may come out above 0 by a rounding of float32.
_ROUNDING_NATS = 1e-4
# Unusable answers that are asked for again: an engine that gives them by chance is found as well by these as by all.
_ASKED_AGAIN = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """One window over a unit's token ids; `byte_count` is the share of its scored tokens in the unit's bytes."""

    unit: str
    ids: tuple[int, ...]
    window: Window
    byte_count: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The nats of a prompt's scored tokens, nan with the problem where they cannot be used."""

    nats: float
    problem: str | None


def ask(scorer: Scorer, model_name: str, prompts: Sequence[Prompt]) -> list[Answer]:
    """What one model says to each prompt, in one call.

    Raises:
        MeasurementVoid: the engine answered with another number of prompts than it was sent.
    """
    answers = scorer.logprobs(model_name, [prompt.ids for prompt in prompts])
    if len(answers) != len(prompts):
        reason = f"{len(prompts)} prompts were sent and {len(answers)} came back"
        raise MeasurementVoid(model_name, len({prompt.unit for prompt in prompts}), reason)
    return [_read(values, prompt.window) for prompt, values in zip(prompts, answers, strict=True)]


def ask_again(scorer: Scorer, model_name: str, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> None:
    """Return if the first prompt, and those whose answers cannot be used, get the same answers once more.

    Raises:
        EngineUnsteady: one gets another answer.
        MeasurementVoid: as `ask`.
    """
    unusable = [place for place, answer in enumerate(answers) if answer.problem is not None]
    places = [0, *(place for place in unusable[:_ASKED_AGAIN] if place > 0)]
    for place, again in zip(places, ask(scorer, model_name, [prompts[n] for n in places]), strict=True):
        if not _is_same(answers[place], again, prompts[place].byte_count):
            raise EngineUnsteady(model_name, prompts[place].unit, _tell(answers[place]), _tell(again))


def _read(values: Sequence[float | None], window: Window) -> Answer:
    problem = _problem(values, window)
    if problem is not None:
        return Answer(math.nan, problem)
    scored = values[window.first_scored - window.begin :]
    return Answer(math.fsum(-value for value in scored if value is not None), None)


def _problem(values: Sequence[float | None], window: Window) -> str | None:
    """Why these log-probabilities cannot be used, None if they can."""
    if len(values) != window.end - window.begin:
        return f"{len(values)} values came back for {window.end - window.begin} tokens"
    if values[0] is not None:
        return f"token {window.begin} has the value {values[0]}, although nothing stands before it"
    for position, value in enumerate(values[1:], start=window.begin + 1):
        if value is None:
            return f"token {position} has no value"
        if not math.isfinite(value) or value <= _HTTP_MINUS_INFINITY or value > _ROUNDING_NATS:
            return f"token {position} has the value {value}"
    return None


def _is_same(first: Answer, again: Answer, byte_count: float) -> bool:
    """Whether two answers agree, or neither can be used."""
    if first.problem is None and again.problem is None:
        return abs(first.nats - again.nats) / math.log(2) <= REPEAT_LIMIT * byte_count
    return first.problem is not None and again.problem is not None


def _tell(answer: Answer) -> str:
    return answer.problem or f"{answer.nats / math.log(2):.4f} bits"
