"""What can go wrong between the pipeline and a vLLM server. Each error keeps its facts."""

from __future__ import annotations


class EngineError(Exception):
    """The parent of every error about the engine."""


class EngineUnavailable(EngineError):
    """The server cannot be reached, does not answer in time, or says that it cannot work now.

    model: what was to be loaded or asked when it did so, None where that was no model in particular.
    """

    def __init__(self, url: str, request: str, reason: str, model: str | None = None) -> None:
        super().__init__(url, request, reason, model)
        self.url = url
        self.request = request
        self.reason = reason
        self.model = model

    def __str__(self) -> str:
        return (
            f"engine at {self.url}: {self.request} expected an answer, found {self.reason}. Wait for the engine "
            "to come back (its supervisor restarts it) and run the step again."
        )


class EngineRefused(EngineError):
    """A server that is well otherwise did not take an adapter."""

    def __init__(self, name: str, path: str, status: int, message: str) -> None:
        super().__init__(name, path, status, message)
        self.name = name
        self.path = path
        self.status = status
        self.message = message

    def __str__(self) -> str:
        said = self.message.strip()
        if not said or said.endswith(":"):
            # vLLM's own assertions carry no text, and reach us as nothing or as "Call to add_lora method failed:".
            said = f"{said} no reason given; so vLLM fails when an expert or a projection is missing".strip()
        return (
            f"{self.name}: expected the engine to load {self.path}, found HTTP {self.status}: {said}. Compare "
            "the directory's keys, rank and adapter_config.json with what the served model takes."
        )


class EngineAtFault(EngineError):
    """A server did not take an adapter, and would have taken no other of its kind. WHOSE: what has to change."""

    WHOSE = ""

    def __init__(self, name: str, message: str, cause: str, advice: str) -> None:
        super().__init__(name, message, cause, advice)
        self.name = name
        self.message = message
        self.cause = cause
        self.advice = advice

    def __str__(self) -> str:
        return (
            f"{self.name}: expected the engine to load it, found: {self.message} That is {self.WHOSE}, not the "
            f"adapter: {self.cause}. {self.advice}."
        )


class EngineFlagMissing(EngineAtFault):
    """It was started without a setting that it needs for it."""

    WHOSE = "the engine's setting"


class EngineUnsupported(EngineAtFault):
    """Its vLLM cannot."""

    WHOSE = "this vLLM"


class EngineProtocolError(EngineError):
    """The server answered something other than what it was asked for."""

    def __init__(self, request: str, subject: str, expected: str, found: str) -> None:
        super().__init__(request, subject, expected, found)
        self.request = request
        self.subject = subject
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return (
            f"{self.subject}: {self.request} expected {self.expected}, found {self.found}. No score is taken from "
            "such an answer; check that the engine is the pinned vLLM with our plugins."
        )
