"""The scripted engine behind vLLM's HTTP routes: for flow runs in other processes, whose client is then the real one.

Whose adapter is meant is told by the held-out text: each of its units begins with its author's name.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

from loopback_server import LoopbackServer
from scripted_scorer import ScriptedScorer

MAX_LEN = 512
Answer = tuple[int, dict[str, Any]]


class ScriptedServer(LoopbackServer):
    """A server on loopback for bases of one mean of bits per byte.

    score: mean bits per byte of an adapter on an author's text, from the adapter's name and that author; None for
        exactly what the base has.
    refuse: adapters that the engine does not load, by how their names begin, with its message.
    """

    def __init__(
        self,
        bases: tuple[str, ...],
        base_bpb: float,
        score: Callable[[str, str], float | None],
        refuse: Mapping[str, str],
        port: int = 0,
    ) -> None:
        self.bases, self.base_bpb, self.score, self.refuse = bases, base_bpb, score, refuse
        self.loaded: dict[str, str] = {}
        self._scorers: dict[str, ScriptedScorer] = {}
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body in one packet: else each answer waits 40 ms for the client's acknowledgement of the head.
            wbufsize = -1

            def do_GET(self) -> None:
                self._send(outer.answer(self.path, {}))

            def do_POST(self) -> None:
                self._send(
                    outer.answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                )

            def _send(self, answer: Answer | None) -> None:
                if answer is None:
                    self.close_connection = True
                    return
                content = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                pass

        super().__init__(Handler, port)

    def answer(self, path: str, body: dict[str, Any]) -> Answer | None:
        """What goes out for a request; None drops the connection instead."""
        with self._lock:
            match path:
                case "/health":
                    return 200, {}
                case "/v1/models":
                    cards = [{"id": base, "max_model_len": MAX_LEN} for base in self.bases]
                    parent = self.bases[0]
                    loaded = [
                        {"id": name, "root": root, "parent": parent} for name, root in self.loaded.items()
                    ]
                    return 200, {"data": [*cards, *loaded]}
                case "/tokenize":
                    special = bool(body["add_special_tokens"])
                    tokens = self._scorer("").tokenize(body["prompt"], add_special_tokens=special)
                    return 200, {"tokens": tokens}
                case "/detokenize":
                    return 200, {"prompt": self._scorer("").detokenize(body["tokens"])}
                case "/v1/load_lora_adapter":
                    return self._load(body["lora_name"], body["lora_path"])
                case "/v1/unload_lora_adapter":
                    return (200, {}) if self.loaded.pop(body["lora_name"], None) else (404, {})
                case "/v1/completions":
                    return self._complete(body["model"], body["prompt"])
        return 404, {"detail": "Not Found"}

    def _load(self, name: str, path: str) -> Answer:
        for start, message in self.refuse.items():
            if name.startswith(start):
                return 400, {"error": {"message": message}}
        self.loaded[name] = path
        return 200, {}

    def _complete(self, model: str, prompts: list[list[int]]) -> Answer:
        if model not in (*self.bases, *self.loaded):
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        choices = [self._choice(index, model, prompt) for index, prompt in enumerate(prompts)]
        return 200, {"choices": choices}

    def _choice(self, index: int, model: str, prompt: list[int]) -> dict[str, Any]:
        author = self._scorer("").detokenize(prompt).removeprefix("<s>").split(" ")[0]
        scorer = self._scorer(author)
        name = scorer.base if model in self.bases or self.score(model, author) is None else model
        if name not in scorer.served_models():
            scorer.load(name, self.loaded[name], is_3d=False)
        [values] = scorer.logprobs(name, [prompt])
        entries = [{str(token): {"logprob": value}} for token, value in zip(prompt, values, strict=True)]
        return {"index": index, "prompt_logprobs": [None, *entries[1:]]}

    def _scorer(self, author: str) -> ScriptedScorer:
        if author not in self._scorers:
            self._scorers[author] = ScriptedScorer(
                {"base": self.base_bpb},
                adapters=lambda name, path: self.score(name, author) or self.base_bpb,
                max_len=MAX_LEN,
                bos=True,
                flavour=0.01,
            )
        return self._scorers[author]
