"""A scripted engine with injected faults, behind vLLM's HTTP routes; it dies and is started again as one process is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipeline_builders import BASE, BASE_BPB, CONTROL_BPB, OTHER_BPB, OWN_BPB
from scripted_server import Answer, ScriptedServer

from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineUnavailable

COMPLETIONS, LOAD = "/v1/completions", "/v1/load_lora_adapter"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 7.50 GiB. GPU 0 has a total capacity of 79.14 GiB"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."

# What is done to an answer; given the answer and its prompts. None drops the connection.
Change = Callable[[Answer, list[list[int]]], Answer | None]


@dataclass
class Fault:
    """What happens to requests of one route whose model's name begins so.

    after: how many such requests pass first; times: how many are met then, all if None. kills: the engine is dead
    from then on, all of it. marker: only requests with a prompt that holds this text.
    """

    route: str
    model: str
    change: Change
    after: int = 0
    times: int | None = None
    kills: bool = False
    marker: str = ""
    met: int = 0
    seen: int = 0

    def takes(self, path: str, body: dict[str, Any]) -> bool:
        name = str(body.get("model") or body.get("lora_name") or "")
        if path != self.route or not name.startswith(self.model):
            return False
        if self.marker and not any(self.marker in _text(prompt) for prompt in body["prompt"]):
            return False
        self.seen += 1
        if self.seen <= self.after or (self.times is not None and self.met >= self.times):
            return False
        self.met += 1
        return True


class FaultyServer(ScriptedServer):
    """deaths: how often its engine has died. lingers: a dead one still has its HTTP server, which says so."""

    def __init__(self) -> None:
        super().__init__((BASE,), BASE_BPB, score_by_author, {})
        self.faults: list[Fault] = []
        self.dead, self.lingers, self.deaths = False, False, 0

    def restart(self) -> None:
        """A new process in the place of a dead one: it knows no adapter."""
        self.dead = False
        self.loaded.clear()

    def answer(self, path: str, body: dict[str, Any]) -> Answer | None:
        if self.dead:
            return (503 if path == "/health" else 500, {"error": {"message": DEAD}}) if self.lingers else None
        for fault in self.faults:
            if fault.takes(path, body):
                if fault.kills:
                    self.dead, self.deaths = True, self.deaths + 1
                honest = super().answer(path, body)
                assert honest is not None
                return fault.change(honest, body.get("prompt", []))
        return super().answer(path, body)

    @contextmanager
    def leased(self, job: object, offer: Callable[[str], None]) -> Iterator[Engine]:
        """What `leased_engine` gives, without Prefect's lease."""
        impatient = any(fault.change is hangs for fault in self.faults)
        with Engine(self.url, timeout_s=1 if impatient else 30, offer=offer) as engine:
            if not engine.is_healthy():
                raise EngineUnavailable(self.url, "GET /health", "no healthy answer")
            yield engine


def score_by_author(name: str, author: str) -> float:
    """An adapter fits its author's text and no other, its control is about as good as the base."""
    if "~control@" in name:
        return CONTROL_BPB
    return OWN_BPB if name.startswith(f"{author}@") else OTHER_BPB


def says(status: int, message: str) -> Change:
    """An error instead, as vLLM writes it."""
    return lambda answer, prompts: (status, {"error": {"message": message}})


def drops(answer: Answer, prompts: list[list[int]]) -> None:
    """No answer at all."""


def hangs(answer: Answer, prompts: list[list[int]]) -> Answer:
    """Longer than the client waits."""
    time.sleep(1.3)
    return answer


def cut_short(answer: Answer, prompts: list[list[int]]) -> Answer:
    """JSON, but not what was asked for."""
    return 200, {"choices": json.dumps(answer[1])[:40]}


def forgets_a_choice(answer: Answer, prompts: list[list[int]]) -> Answer:
    """One prompt less than was asked for."""
    return 200, {"choices": answer[1]["choices"][:-1]}


def positions(change: Callable[[list[Any]], list[Any]], marker: str = "") -> Change:
    """What is said of the tokens of prompts with this text, changed."""

    def changed(answer: Answer, prompts: list[list[int]]) -> Answer:
        choices = [
            choice | {"prompt_logprobs": change(choice["prompt_logprobs"])}
            if marker in _text(prompt)
            else choice
            for choice, prompt in zip(answer[1]["choices"], prompts, strict=True)
        ]
        return 200, {"choices": choices}

    return changed


def value_at_7(value: float | None) -> Callable[[list[Any]], list[Any]]:
    """Another log-probability for token 7."""
    return lambda entries: [*entries[:7], {next(iter(entries[7])): {"logprob": value}}, *entries[8:]]


def moved(bits: float) -> Callable[[list[Any]], list[Any]]:
    """All log-probabilities worse by so many bits per token, which is a byte here."""
    nats = bits * 0.6931471805599453
    return lambda entries: [
        entry and {token: {"logprob": one["logprob"] - nats} for token, one in entry.items()}
        for entry in entries
    ]


def _text(prompt: list[int]) -> str:
    return bytes(token for token in prompt if token < 256).decode(errors="replace")
