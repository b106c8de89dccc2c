"""The verdict on an adapter: from stored scores, without an engine, or from the step that refused it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.claims import read_ledger
from storage.documents import format_time
from storage.ledger import Outcome, Step, StepKind
from tasks.bpb.measure import (
    BASE,
    BASE_AGAIN,
    CONTROL,
    OWN,
    WRONG_PREFIX,
    Measurement,
    SubjectBits,
    UnitBytes,
    VoidedUnit,
)
from tasks.bpb.verdict import Thresholds, Verdict, decide
from tasks.bpb.wording import ControlKind
from tasks.errors import BaseChanged
from tasks.job import Job, Result, run_step
from tasks.readings import scores_statement


@task(persist_result=False, cache_policy=NO_CACHE)
def judge(job: Job, inspected: Step, converted: Step, opponents: Step, scored: Step) -> Step:
    """Ready, quarantined, inconclusive or stopped, with every figure and the thresholds it was decided by."""
    thresholds = job_thresholds(job)
    control: Any = converted.result["control"]
    available = bool(opponents.result["available"])

    def work() -> Result:
        _require_same_base(job)
        verdict = decide(
            recorded_measurement(scored),
            opponents_available=available,
            thresholds=thresholds,
            control_kind=ControlKind(control["kind"]),
        )
        record = verdict_record(verdict, str(converted.result["output_digest"]), scored)
        if scores_statement(inspected) is not None:
            record["notes"].append(
                "scores on this text decided the packing: the control is the reading that lost, and proves nothing more"
            )
        return Result(Outcome(verdict.outcome.value), record)

    inputs = {
        "scored": scored.step_key,
        "thresholds": json.dumps(asdict(thresholds), sort_keys=True),
        "control": control["kind"],
        "others": "some" if available else "none",
    }
    return _verdict(job, inspected, inputs, work)


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


def job_thresholds(job: Job) -> Thresholds:
    """The thresholds that this run's settings ask for."""
    limits = job.limits
    return Thresholds(floor=limits.floor_bpb, min_units=limits.min_units, min_bytes=limits.min_bytes)


def find_drift(job: Job, measured: Measurement) -> dict[str, Any] | None:
    """Why these scores may not be kept at all, since the engine itself changed while it scored; None if it did not.

    A drifted measurement must not be recorded as done: every later run would judge the same bad numbers again.
    """
    verdict = decide(measured, opponents_available=False, thresholds=job_thresholds(job))
    if verdict.outcome.value != Outcome.STOPPED.value or verdict.code is None:
        return None
    code = verdict.code.value
    return {"code": code, "codes": [code], "reason": verdict.reason, "where": None}


def recorded_measurement(scored: Step) -> Measurement:
    """The measurement that a scored step recorded."""
    record: Any = scored.result
    return Measurement(
        units=tuple(UnitBytes(unit["id"], unit["bytes"]) for unit in record["units"]),
        voided=tuple(VoidedUnit(one["id"], one["reason"], one["subject"]) for one in record["voided"]),
        scores=tuple(SubjectBits(label, tuple(bits)) for label, bits in record["subjects"].items()),
        tokens=record["tokens"],
        seconds=record["seconds"],
    )


def verdict_record(verdict: Verdict, output_digest: str, scored: Step) -> dict[str, Any]:
    """A verdict as the ledger writes it; figures in bits per byte."""
    bpb = {one.label: one.bpb for one in verdict.bpb}
    return {
        "code": verdict.code.value if verdict.code else None,
        "codes": [code.value for code in verdict.codes],
        "reason": verdict.reason,
        "output_digest": output_digest,
        "own": bpb.get(OWN),
        "base": bpb.get(BASE),
        "base_again": bpb.get(BASE_AGAIN),
        "control": bpb.get(CONTROL),
        "wrong": {
            label.removeprefix(WRONG_PREFIX): value
            for label, value in bpb.items()
            if label.startswith(WRONG_PREFIX)
        },
        "margin": verdict.margin,
        "interval": list(verdict.interval) if verdict.interval else None,
        "differences": {
            one.label: {"mean": one.mean, "lower": one.lower, "upper": one.upper}
            for one in verdict.differences
        },
        "noise": verdict.noise,
        "units": verdict.units,
        "bytes": verdict.byte_count,
        "thresholds": asdict(verdict.thresholds),
        "measured_at": format_time(scored.finished_at),
        "notes": list(verdict.notes),
    }
