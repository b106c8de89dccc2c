"""What can go wrong while a trainer scores its own adapter with transformers and PEFT. Each error keeps its facts."""

from __future__ import annotations

from tasks.bpb.errors import BpbError


class ReferenceScoringError(BpbError):
    """The parent of these errors: what was looked at, what was expected and found there, and what to do."""

    def __init__(self, where: str, expected: str, found: str, advice: str) -> None:
        super().__init__(where, expected, found, advice)
        self.where = where
        self.expected = expected
        self.found = found
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}. {self.advice}"


class LibraryMissing(ReferenceScoringError):
    """transformers or PEFT is not installed here."""


class ModelUnusable(ReferenceScoringError):
    """The base's directory is none that transformers can score with."""


class HeldoutFileInvalid(ReferenceScoringError):
    """A held-out file is not what `roster heldout add` takes."""


class PackingUnstated(ReferenceScoringError):
    """Nothing says how the experts' factors lie in lora_B, and PEFT would read them in one way without a word."""


class AdapterNotRead(ReferenceScoringError):
    """PEFT does not read this adapter, or not as it was trained."""
