"""The verdict on an adapter: from stored scores, without an engine, or from the step that refused it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.claims import read_ledger
from storage.ledger import Outcome, Step, StepKind
from tasks.bpb.measure import Measurement
from tasks.bpb.verdict import decide
from tasks.bpb.wording import ControlKind
from tasks.errors import BaseChanged
from tasks.job import Job, Result, run_step
from tasks.stored_scores import Scores, judge_scores


@task(persist_result=False, cache_policy=NO_CACHE)
def judge(job: Job, inspected: Step, converted: Step, opponents: Step, scored: Step) -> Step:
    """Ready, quarantined, inconclusive or stopped, with every figure and the thresholds it was decided by."""
    control: Any = converted.result["control"]
    scores = Scores(
        inspected=inspected,
        scored=scored,
        output_digest=str(converted.result["output_digest"]),
        control_kind=ControlKind(control["kind"]),
        are_others_ready=bool(opponents.result["available"]),
        training=job.upload.training,
    )
    thresholds = job.limits.thresholds

    def work() -> Result:
        _require_same_base(job)
        return judge_scores(scores, thresholds)

    return _verdict(job, inspected, scores.inputs(thresholds), work)


@task(persist_result=False, cache_policy=NO_CACHE)
def refuse(job: Job, inspected: Step | None, ended: Step) -> Step:
    """The verdict that an earlier step has reached already; without an inspection if that was what refused."""

    def work() -> Result:
        _require_same_base(job)
        return Result(ended.outcome, dict(ended.result))

    return _verdict(job, inspected, {"ended": ended.step_key}, work)


def _verdict(job: Job, inspected: Step | None, inputs: dict[str, str], work: Callable[[], Result]) -> Step:
    """A verdict for the submission at hand, as it was inspected.

    An earlier one for the same inputs stands only as the ledger's last step: after anything else (another verdict, a
    stop, a step done again) it is given again, so that a ledger never ends without its verdict.
    """
    more = {
        "base": job.base.name,
        "training": job.upload.training_digest or "none",
        "inspected": inspected.step_key if inspected else "none",
    }
    return run_step(
        job,
        StepKind.VERDICT,
        inputs | more,
        work,
        stands=lambda known: known == job.ledger.document.steps[-1],
    )


def _require_same_base(job: Job) -> None:
    """Return if the adapter was not submitted for another base meanwhile, which this verdict would then count for.

    Raises:
        BaseChanged: it was.
    """
    now, _ = read_ledger(job.store, job.author, job.upload.adapter_digest)
    if now.base != job.base.name:
        raise BaseChanged(job.label, job.base.name, now.base)


def find_drift(job: Job, measured: Measurement) -> dict[str, Any] | None:
    """Why these scores may not be kept at all, since the engine itself changed while it scored; None if it did not.

    A drifted measurement must not be recorded as done: every later run would judge the same bad numbers again.
    """
    sets = [one.ref for one in job.heldout]
    verdict = decide(measured, opponents_available=False, thresholds=job.limits.thresholds, heldout=sets)
    if verdict.outcome.value != Outcome.STOPPED.value or verdict.code is None:
        return None
    code = verdict.code.value
    return {"code": code, "codes": [code], "reason": verdict.reason, "where": None}
