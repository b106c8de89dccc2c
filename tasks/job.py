"""One adapter on its way through the pipeline: what every step needs, and the rule by which a step is skipped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from storage.bases import Base
from storage.claims import LedgerHandle
from storage.digests import step_key
from storage.documents import utc_now
from storage.heldout import HeldoutSet
from storage.ledger import Outcome, Step, StepKind
from storage.policy import Policy
from storage.s3 import S3Store
from storage.uploads import Upload
from tasks.bpb.measure import METHOD_VERSION
from tasks.bpb.rulings import Thresholds
from tasks.disk import RunDisk, disk_full
from tasks.lora.inspect import Inspection
from tasks.lora.layouts import Packing
from tasks.lora.packing import ScoresStatement
from tasks.outcomes import RULED, is_transient, refusal, rule, stoppage
from tasks.progress import Counted, ProgressLines

# A step's own version. Raise it when the same inputs would now give another result: old verdicts are then
# shown as stale, and a re-run does the step again.
STEP_VERSIONS: Mapping[str, str] = {
    StepKind.INSPECTED: "4",
    StepKind.CONVERTED: "2",
    StepKind.CHECKED: "4",
    StepKind.STAGED: "1",
    StepKind.OPPONENTS: "2",
    StepKind.SCORED: METHOD_VERSION,
    StepKind.VERDICT: "3",
}


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What an operator may tune (see `flows.settings.Settings` for units and defaults)."""

    work_path: Path
    merged_root: Path | None
    max_opponents: int
    thresholds: Thresholds
    score_stride: int
    engine_timeout_s: float
    engine_wait_s: float
    claim_seconds: int
    check_depth: str
    ablation: bool


@dataclass(slots=True)
class Job:
    """One adapter of one author, claimed by this flow run.

    `policy` is the operator's, where one applies to this base. `inspections` holds what this run has read of the
    upload already, by the scores and the provisional packing that it was read with: reading every tensor takes seconds.
    """

    store: S3Store
    upload: Upload
    base: Base
    policy: Policy | None
    heldout: tuple[HeldoutSet, ...]
    ledger: LedgerHandle
    limits: JobLimits
    disk: RunDisk
    forced: frozenset[StepKind]
    worker: str
    flow_run: str
    log: logging.Logger | logging.LoggerAdapter[Any]
    done_here: list[StepKind] = field(default_factory=list)
    inspections: dict[tuple[ScoresStatement | None, Packing], Inspection] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How messages name the adapter: `<author>/<run>`."""
        return f"{self.upload.marker.author}/{self.upload.marker.run}"

    @property
    def author(self) -> str:
        """The author whose adapter this is."""
        return self.upload.marker.author

    def converted_path(self, output_digest: str) -> Path:
        """Where a converted adapter lies on this machine; the engine loads it from here, so it never changes."""
        return self.served_path(self.author, output_digest)

    def progress(self, what: str, unit: Counted) -> ProgressLines:
        """What a long piece of work of this run tells how far it has come, for lines in the run's log."""
        return ProgressLines(self.log, f"{self.label}: {what}", unit)

    def served_path(self, author: str, output_digest: str) -> Path:
        """The same for an adapter of any author on this base."""
        return self.limits.work_path / "served" / self.base.name / author / output_digest


@dataclass(frozen=True, slots=True)
class Result:
    """What a step found: an outcome and the ledger's record of it."""

    outcome: Outcome
    record: dict[str, Any]


class StepEnded(Exception):
    """A step ended the adapter's run: refused, waiting or stopped. The step is in the ledger already."""

    def __init__(self, step: Step) -> None:
        """Keep the step."""
        self.step = step
        super().__init__(step)

    def __str__(self) -> str:
        """Name the step, its outcome and the reason."""
        return f"{self.step.kind}: {self.step.outcome}: {self.step.result.get('reason', '')}"


def run_step(
    job: Job,
    kind: StepKind,
    inputs: Mapping[str, str],
    work: Callable[[], Result],
    *,
    stands: Callable[[Step], bool] = lambda known: True,
    part_of: StepKind | None = None,
) -> Step:
    """The finished step of this kind for these inputs: the recorded one if there is one, else `work` done now.

    `inputs` is everything that can change the result; the step's own version is added here. `stands` may deny
    that a recorded step can still be used; a transient refusal never can. `part_of`: another kind that this step is
    done for; it is then done again where that one is forced.

    Raises:
        StepEnded: the step refused the adapter, waits or had to stop; it is recorded.
        ClaimLost: another run has taken this adapter over; nothing is recorded.
    """
    key = step_key({"kind": kind.value, "version": STEP_VERSIONS[kind], **inputs})
    known = job.ledger.finished(kind, key)
    if (
        known is not None
        and (part_of or kind) not in job.forced
        and not is_transient(known.result)
        and stands(known)
    ):
        job.log.info("%s: %s was finished before (%s), skipped", job.label, kind.value, known.outcome.value)
        return _continue_or_end(known)
    started, begun = utc_now(), time.monotonic()
    job.log.info("%s: %s …", job.label, kind.value)

    def ended(result: Result) -> Step:
        return _step(job, kind, key, inputs, result, started)

    try:
        step = ended(work())
        took = time.monotonic() - begun
    except Exception as error:
        ruled = _ruled(job, error)
        if ruled is None:
            # Unknown errors, a result that is no JSON among them, stop the run, on the record, and surface whole in
            # the run's log.
            _append(job, ended(Result(Outcome.STOPPED, stoppage(error))))
            raise
        step = _append(job, ended(Result(rule(ruled).outcome, refusal(ruled))))
        job.log.warning("%s: %s %s: %s", job.label, kind.value, step.outcome.value, ruled)
        raise StepEnded(step) from error
    _append(job, step)
    job.log.info("%s: %s %s after %.3f s", job.label, kind.value, step.outcome.value, took)
    return _continue_or_end(step)


def _ruled(job: Job, error: Exception) -> Exception | None:
    """The error as the table knows it, None if it does not; of the disk's own errors it knows those about room."""
    if isinstance(error, RULED):
        return error
    return disk_full(error, job.label, job.limits.work_path) if isinstance(error, OSError) else None


def _step(
    job: Job, kind: StepKind, key: str, inputs: Mapping[str, str], result: Result, started: datetime
) -> Step:
    return Step(
        kind=kind,
        step_key=key,
        attempt=job.ledger.next_attempt(kind, key),
        code_version=STEP_VERSIONS[kind],
        inputs=dict(inputs),
        outcome=result.outcome,
        result=result.record,
        started_at=started,
        finished_at=utc_now(),
        worker=job.worker,
        flow_run=job.flow_run,
    )


def _append(job: Job, step: Step) -> Step:
    job.ledger.append(step)
    job.done_here.append(step.kind)
    return step


def _continue_or_end(step: Step) -> Step:
    if step.kind is not StepKind.VERDICT and step.outcome is not Outcome.DONE:
        raise StepEnded(step)
    return step
