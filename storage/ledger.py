"""One adapter's ledger: its submissions, its claim, its steps and its verdict, as a document."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator

from storage.documents import (
    AuthorName,
    BaseName,
    Document,
    RootDocument,
    RunName,
    Sha256,
    Submission,
    UtcTime,
)


class StepKind(StrEnum):
    """What a step did."""

    INSPECTED = "inspected"
    CONVERTED = "converted"
    CHECKED = "checked"
    STAGED = "staged"
    OPPONENTS = "opponents"
    SCORED = "scored"
    VERDICT = "verdict"


class Outcome(StrEnum):
    """How a step ended."""

    DONE = "done"
    READY = "ready"
    QUARANTINED = "quarantined"
    INCONCLUSIVE = "inconclusive"
    WAITING = "waiting"
    STOPPED = "stopped"


TERMINAL = frozenset({Outcome.DONE, Outcome.READY, Outcome.QUARANTINED, Outcome.INCONCLUSIVE})
"""The outcomes that let a later run skip the step; the others are history."""


class SubmissionRef(Document):
    """One upload that brought this adapter."""

    run: RunName
    submission: Submission


class Claim(Document):
    """Who works on the adapter, and until when nobody else may."""

    holder: str = Field(min_length=1)
    expires_at: UtcTime


class Step(Document):
    """One thing that was done about the adapter; never changed once it is written.

    `result` is what the step found, in the form its kind has; `inputs` are the parts of its step key.
    """

    kind: StepKind
    step_key: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    attempt: int = Field(ge=1)
    code_version: str
    inputs: dict[str, str]
    outcome: Outcome
    result: dict[str, JsonValue]
    started_at: UtcTime
    finished_at: UtcTime
    worker: str
    flow_run: str | None

    @model_validator(mode="after")
    def _outcome_fits_kind(self) -> Self:
        if self.outcome is (Outcome.DONE if self.kind is StepKind.VERDICT else Outcome.READY):
            raise ValueError(f"a step of kind {self.kind} does not end {self.outcome}")
        return self


class Ledger(RootDocument):
    """Everything that is known of one adapter. `base` is the one its latest submission names."""

    author: AuthorName
    adapter_digest: Sha256
    base: BaseName
    submissions: tuple[SubmissionRef, ...]
    claim: Claim | None = None
    steps: tuple[Step, ...] = ()
    verdict: Step | None = None

    def with_submission(self, submission: SubmissionRef, base: str) -> Ledger:
        """Return this ledger with one more submission; the base follows the latest one."""
        if submission in self.submissions:
            return self
        latest = all(submission.submission > known.submission for known in self.submissions)
        changes = {"submissions": (*self.submissions, submission), "base": base if latest else self.base}
        return self.model_copy(update=changes)

    def with_step(self, step: Step) -> Ledger:
        """Return this ledger with one more step, which is the verdict too if it is one and terminal."""
        if step in self.steps:
            return self
        judged = step.kind is StepKind.VERDICT and step.outcome in TERMINAL
        return self.model_copy(
            update={"steps": (*self.steps, step), "verdict": step if judged else self.verdict}
        )

    def with_claim(self, claim: Claim | None) -> Ledger:
        """Return this ledger with another claim, or none."""
        return self.model_copy(update={"claim": claim})
