"""What a vLLM server's HTTP answers look like, and what is read out of them.

Source: vllm/entrypoints/openai and vllm/entrypoints/serve, vLLM 0.32.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from tasks.bpb.engine_errors import EngineProtocolError

MINUS_INFINITY_OVER_HTTP = -9999.0
"""What vLLM's server writes for a log-probability of -inf.

Source: vllm/entrypoints/generate/base/serving.py (`clamp_prompt_logprobs`), vLLM 0.32.0.
"""
NAN_OVER_HTTP = "not JSON compliant"
"""In the message of the 400 with which vLLM's server answers a whole request when one of its numbers is nan."""


class ModelCard(BaseModel):
    """One served model: the base, or an adapter, whose `parent` is the base and whose `root` is its path."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    data: list[ModelCard]


class Tokens(BaseModel):
    """Answer of POST /tokenize."""

    tokens: list[int]


class Text(BaseModel):
    """Answer of POST /detokenize."""

    prompt: str


class Logprob(BaseModel):
    """What is said of one token."""

    logprob: float | None


class Choice(BaseModel):
    """The answer to one prompt of a request."""

    index: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """Answer of POST /v1/completions."""

    choices: list[Choice]


class _ErrorInfo(BaseModel):
    message: str


class _ErrorBody(BaseModel):
    error: _ErrorInfo


Answer = TypeVar("Answer", bound=BaseModel)


def read_logprobs(
    model: str, ids: Sequence[int], positions: Sequence[dict[int, Logprob] | None] | None
) -> tuple[float | None, ...]:
    """One prompt's log-probabilities out of vLLM's `prompt_logprobs`; `Engine.logprobs` says what they are.

    Raises EngineProtocolError when they are not those of exactly these token ids.
    """
    request = "POST /v1/completions"
    if positions is None or len(positions) != len(ids):
        found = "none" if positions is None else f"{len(positions)}"
        raise EngineProtocolError(request, model, f"{len(ids)} prompt log-probabilities", found)
    if ids and positions[0] is not None:
        raise EngineProtocolError(request, model, "nothing at position 0", f"tokens {sorted(positions[0])}")
    values: list[float | None] = [None]
    for position in range(1, len(ids)):
        entry = positions[position]
        if entry is None or ids[position] not in entry:
            found = "nothing" if entry is None else f"tokens {sorted(entry)}"
            raise EngineProtocolError(request, model, f"token {ids[position]} at position {position}", found)
        values.append(_finite_or_nan(entry[ids[position]].logprob))
    return tuple(values[: len(ids)])


def _finite_or_nan(value: float | None) -> float:
    if value is None or not math.isfinite(value) or value == MINUS_INFINITY_OVER_HTTP:
        return math.nan
    return value


def parse_answer(request: str, subject: str, content: bytes, kind: type[Answer]) -> Answer:
    """An answer's JSON as `kind`; raises EngineProtocolError where it is not that."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole answer"
        found = f"at {place}: {first['msg']}"
        raise EngineProtocolError(request, subject, f"vLLM's {kind.__name__} as JSON", found) from error


def read_choices(model: str, content: bytes, count: int) -> list[Choice]:
    """The choices of a completion, one for each of its prompts, in their order.

    Raises EngineProtocolError when there is not exactly one for each.
    """
    request = "POST /v1/completions"
    answer = parse_answer(request, model, content, Completion)
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    indices = [choice.index for choice in choices]
    if indices != list(range(count)):
        raise EngineProtocolError(request, model, f"one choice for each of {count} prompts", f"{indices}")
    return choices


def error_message(content: bytes) -> str:
    """The message of an error answer, or its first 500 characters where it has another form."""
    try:
        return _ErrorBody.model_validate_json(content).error.message
    except ValidationError:
        return content.decode(errors="replace")[:500]
