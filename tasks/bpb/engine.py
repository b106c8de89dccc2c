"""The one door to a vLLM server over HTTP: tokens, adapters, and log-probabilities of given tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import httpx

from tasks.bpb.engine_errors import (
    EngineFlagMissing,
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    EngineUnsupported,
)
from tasks.bpb.engine_faults import Lack, find_fault, is_engine_ill
from tasks.bpb.engine_wire import (
    NAN_OVER_HTTP,
    Answer,
    ModelCard,
    ModelList,
    Text,
    Tokens,
    error_message,
    parse_answer,
    read_choices,
    read_logprobs,
)

PROMPTS_PER_REQUEST = 64
REQUESTS_AT_ONCE = 2
# A server tells of the end of its engine a moment late, and may take another to close its port.
_HEALTH_TRIES, _HEALTH_PAUSE_S, _HEALTH_TIMEOUT_S = 5, 0.5, 10.0


class Engine:
    """A vLLM server at `url`, asked synchronously; usable from several threads, closed as a context manager.

    Raises EngineUnavailable from every method but `is_healthy` when the server cannot be reached, takes longer
    than `timeout_s` seconds for one request, or answers 5xx; EngineProtocolError when an answer is not what was
    asked for. Nothing is repeated, except that a GET whose connection was reset is sent once more.

    `offer` is told the name of an adapter whose directory the server does not see, before the server is asked for it by
    that name; see `load`.
    """

    def __init__(self, url: str, *, timeout_s: float, offer: Callable[[str], None] | None = None) -> None:
        self.url = url.rstrip("/")
        self._offer = offer
        # Proxies from the environment are for the outside world, never for the engine.
        self._client = httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back the connections."""
        self._client.close()

    def is_healthy(self) -> bool:
        """Whether the server answers and its engine process lives."""
        try:
            return self._send("GET", "/health").is_success
        except EngineUnavailable:
            return False

    def has_died(self) -> bool:
        """Whether no engine is left at the address: nobody answers there, or a server without its engine.

        One that takes its time has not died. Asked for a few seconds before it is believed to live.
        """
        for attempt in range(_HEALTH_TRIES):
            if attempt:
                time.sleep(_HEALTH_PAUSE_S)
            try:
                answer = self._client.get("/health", timeout=_HEALTH_TIMEOUT_S)
            except httpx.TimeoutException:
                return False
            except httpx.TransportError:
                return True
            if answer.is_server_error:
                return True
        return False

    def served_models(self) -> tuple[str, ...]:
        """The names of the base and of all adapters that are loaded now."""
        return tuple(card.id for card in self._model_cards())

    def list_adapters(self) -> tuple[ModelCard, ...]:
        """The adapters that are loaded now: the name and path (`root`) of each, as the server has them."""
        return tuple(card for card in self._model_cards() if card.parent is not None)

    def max_model_len(self) -> int:
        """The longest prompt and completion together, in tokens."""
        for card in self._model_cards():
            if card.parent is None and card.max_model_len is not None:
                return card.max_model_len
        raise EngineProtocolError("GET /v1/models", self.url, "a base model with max_model_len", "none")

    def tokenize(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The token ids of a whole text under the base model's tokenizer, however long the text."""
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return tuple(self._ask("/tokenize", body, Tokens).tokens)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids; bytes that are no whole character become U+FFFD."""
        return self._ask("/detokenize", {"tokens": list(ids)}, Text).prompt

    def load(self, name: str, path: str, *, is_3d: bool) -> None:
        """Make the adapter in directory `path`, as the server sees it, available as model `name`.

        `is_3d`: its experts are in vLLM's fused format. Loading a name again from the same path is no error. A server
        on another machine, where there is no such path, is asked for the name itself: with the resolver plugin it
        fetches from the store what is staged under the digest in the name, which is the same adapter.
        Raises EngineRefused when a live server does not take the adapter, or has the name from another path;
        EngineUnavailable also when its message says that it is ill itself: out of memory, out of disk, its device lost;
        EngineFlagMissing, EngineUnsupported when its message says that it would take no such adapter as it was
        started, or at all; EngineProtocolError when the server has no such route, or no directory at `path`.
        """
        body = {"lora_name": name, "lora_path": path, "is_3d_lora_weight": is_3d}
        answer = self._send("POST", "/v1/load_lora_adapter", body, model=name)
        if answer.is_success:
            return
        if answer.status_code == httpx.codes.NOT_FOUND:
            if self._offer is not None:
                self._offer(name)
            if self._fetches(name):
                return
            expected = (
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and {path} to be readable by the server; or a server with the "
                "resolver plugin, which fetches it from the store"
            )
            found = f"HTTP 404: {error_message(answer.content)}"
            raise EngineProtocolError("POST /v1/load_lora_adapter", name, expected, found)
        if answer.is_client_error and any(
            card.id == name and card.root == path for card in self._model_cards()
        ):
            return
        message = error_message(answer.content)
        if (known := find_fault(message)) is not None:
            kind = EngineFlagMissing if known.fault.lack is Lack.SETTING else EngineUnsupported
            raise kind(name, message, known.fault.cause, known.fault.advice)
        # vLLM answers 500 for an adapter that it cannot read, for want of memory, and for an engine that has died.
        if answer.is_server_error and (is_engine_ill(message) or not self.is_healthy()):
            raise self._unavailable("POST /v1/load_lora_adapter", answer, name)
        raise EngineRefused(name, path, answer.status_code, message)

    def _fetches(self, name: str) -> bool:
        """Whether the server answers for this name, of which it may have to fetch the adapter first."""
        body = {"model": name, "prompt": "a", "max_tokens": 1}
        answer = self._send("POST", "/v1/completions", body, model=name)
        if answer.is_server_error:
            raise self._unavailable("POST /v1/completions", answer, name)
        return answer.is_success

    def unload(self, name: str) -> None:
        """Have the server forget an adapter; one it does not know is no error.

        Raises EngineProtocolError when the server refuses for another reason.
        """
        answer = self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if answer.is_success or answer.status_code == httpx.codes.NOT_FOUND:
            return
        self._check_success("POST /v1/unload_lora_adapter", name, answer)

    def logprobs(
        self, model: str, prompts: Sequence[Sequence[int]], *, generate: int = 1
    ) -> list[tuple[float | None, ...]]:
        """For each prompt of token ids one natural log-probability per token, given the tokens before it.

        `generate`: how many tokens the server makes after each prompt, which are not looked at; many keep it busy.

        `None` at position 0. `float("nan")` where the server gives no number, an infinite one, or -9999, which
        its HTTP makes of -inf; in the whole prompt where it cannot write one of its numbers. The prompts go out
        in requests of bounded size, a few at once.
        Raises EngineUnavailable also when the server does not know `model`, which it forgets with a restart;
        EngineProtocolError when an answer has another length than its prompt, lacks a position after the first,
        or holds the log-probability of another token.
        """
        starts = range(0, len(prompts), PROMPTS_PER_REQUEST)
        batches = [prompts[start : start + PROMPTS_PER_REQUEST] for start in starts]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            scored = list(pool.map(lambda batch: self._score_batch(model, batch, generate), batches))
        return [logprobs for batch in scored for logprobs in batch]

    def _score_batch(
        self, model: str, prompts: Sequence[Sequence[int]], generate: int
    ) -> list[tuple[float | None, ...]]:
        request = "POST /v1/completions"
        body = {
            "model": model,
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": generate,
            "temperature": 0,
            "prompt_logprobs": 0,
            **({"ignore_eos": True} if generate > 1 else {}),
        }
        answer = self._send("POST", "/v1/completions", body, model=model)
        if answer.status_code == httpx.codes.NOT_FOUND:
            reason = f"that it does not know {model} (was it restarted?)"
            raise EngineUnavailable(self.url, request, reason, model)
        if answer.is_client_error and NAN_OVER_HTTP in error_message(answer.content):
            if len(prompts) > 1:
                return [self._score_batch(model, [prompt], generate)[0] for prompt in prompts]
            return [(None, *[math.nan] * (len(prompts[0]) - 1))]
        self._check_success(request, model, answer, model)
        return [
            read_logprobs(model, prompt, choice.prompt_logprobs)
            for prompt, choice in zip(prompts, read_choices(model, answer.content, len(prompts)), strict=True)
        ]

    def continue_prompts(
        self, model: str, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[tuple[int, ...]]:
        """For each prompt of token ids the ids of a continuation, drawn with this seed, of at most `max_tokens`.

        One that ends earlier has the token that ended it. The same request draws the same again, or nearly: rounding
        differs with what is computed beside it.
        Raises EngineUnavailable also when the server does not know `model`; EngineProtocolError when an answer has no
        token ids.
        """
        request = "POST /v1/completions"
        continued: list[tuple[int, ...]] = []
        for start in range(0, len(prompts), PROMPTS_PER_REQUEST):
            batch = prompts[start : start + PROMPTS_PER_REQUEST]
            body = {
                "model": model,
                "prompt": [list(prompt) for prompt in batch],
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": seed,
                "return_token_ids": True,
            }
            answer = self._send("POST", "/v1/completions", body, model=model)
            if answer.status_code == httpx.codes.NOT_FOUND:
                reason = f"that it does not know {model} (was it restarted?)"
                raise EngineUnavailable(self.url, request, reason, model)
            self._check_success(request, model, answer, model)
            for choice in read_choices(model, answer.content, len(batch)):
                if choice.token_ids is None:
                    raise EngineProtocolError(request, model, "token_ids of each continuation", "none")
                continued.append(tuple(choice.token_ids))
        return continued

    def _model_cards(self) -> list[ModelCard]:
        answer = self._send("GET", "/v1/models")
        self._check_success("GET /v1/models", self.url, answer)
        return parse_answer("GET /v1/models", self.url, answer.content, ModelList).data

    def _ask(self, path: str, body: dict[str, object], kind: type[Answer]) -> Answer:
        answer = self._send("POST", path, body)
        self._check_success(f"POST {path}", self.url, answer)
        return parse_answer(f"POST {path}", self.url, answer.content, kind)

    def _send(
        self, method: str, path: str, body: dict[str, object] | None = None, *, model: str | None = None
    ) -> httpx.Response:
        try:
            try:
                return self._client.request(method, path, json=body)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                if method != "GET":
                    raise
                return self._client.request(method, path)
        except httpx.TransportError as error:
            reason = f"{type(error).__name__} {error}".strip()
            raise EngineUnavailable(self.url, f"{method} {path}", reason, model) from error

    def _check_success(
        self, request: str, subject: str, answer: httpx.Response, model: str | None = None
    ) -> None:
        if answer.is_server_error:
            raise self._unavailable(request, answer, model)
        if not answer.is_success:
            found = f"HTTP {answer.status_code}: {error_message(answer.content)}"
            raise EngineProtocolError(request, subject, "HTTP 200", found)

    def _unavailable(self, request: str, answer: httpx.Response, model: str | None) -> EngineUnavailable:
        reason = f"HTTP {answer.status_code}: {error_message(answer.content)}"
        return EngineUnavailable(self.url, request, reason, model)
