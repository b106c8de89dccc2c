"""What can go wrong where the parts meet: between upload, conversion, engine and ledger."""

from __future__ import annotations


class PipelineError(Exception):
    """The parent of the errors of the steps themselves; keeps its facts and pickles."""


class SourceGone(PipelineError):
    """A file of the upload was deleted while the pipeline needed it."""

    def __init__(self, adapter: str, key: str) -> None:
        super().__init__(adapter, key)
        self.adapter, self.key = adapter, key

    def __str__(self) -> str:
        return (
            f"{self.adapter}: {self.key} was in the store at intake and is gone now. What is served stays as it is; "
            "upload the adapter again if it is still wanted."
        )


class NotReproducible(PipelineError):
    """Converting the same upload again gave other bytes, although the code's version is the same."""

    def __init__(self, adapter: str, expected: tuple[str, str], found: tuple[str, str]) -> None:
        super().__init__(adapter, expected, found)
        self.adapter, self.expected, self.found = adapter, expected, found

    def __str__(self) -> str:
        return (
            f"{self.adapter}: converting again gave {', '.join(d[:16] for d in self.found)}, the ledger records "
            f"{', '.join(d[:16] for d in self.expected)} (adapter, control). Two workers run different code under one "
            "step version: bring them to the same release, then force the run."
        )


class NoEngine(PipelineError):
    """The base has no engine's address, so nothing can be scored."""

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self.base = base

    def __str__(self) -> str:
        return (
            f"base {self.base}: expected the address of a vLLM server, found none. Register the base again with "
            "--engine-url, or start the embedded services with `roster up --base`."
        )


class EngineUnverified(PipelineError):
    """The engine of a base has not told what it is, so its scores could not be compared with anything."""

    def __init__(self, base: str, key: str) -> None:
        super().__init__(base, key)
        self.base, self.key = base, key

    def __str__(self) -> str:
        return (
            f"base {self.base}: expected the engine to have published {self.key}, found nothing. Start it with our "
            "plugins (docs/engine.md) and retry."
        )


class EngineUnfit(PipelineError):
    """The running engine lacks something that this adapter or the check needs."""

    def __init__(self, base: str, setting: str, expected: str, found: str) -> None:
        super().__init__(base, setting, expected, found)
        self.base, self.setting, self.expected, self.found = base, setting, expected, found

    def __str__(self) -> str:
        return (
            f"engine of base {self.base}: {self.setting}: expected {self.expected}, found {self.found}. "
            "Restart it with that setting and retry."
        )


class OpponentRefused(PipelineError):
    """The engine took neither the control nor a wrong adapter, which says nothing of the adapter itself."""

    def __init__(self, adapter: str, name: str, message: str) -> None:
        super().__init__(adapter, name, message)
        self.adapter, self.name, self.message = adapter, name, message

    def __str__(self) -> str:
        return (
            f"{self.adapter}: the engine would not load {self.name}, which it is compared with: {self.message}. "
            "Nothing is said of the adapter; look at the engine's log, then retry."
        )
