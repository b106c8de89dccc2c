"""The last resort for an adapter whose packing nothing tells: the scores of both its readings decide, or it stops."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.ledger import Outcome, Step, StepKind
from tasks.bpb.measure import CONTROL
from tasks.bpb.readings import Readings, compare_readings
from tasks.bpb.rulings import Code as ScoreCode
from tasks.bpb.verdict import Verdict, decide
from tasks.conversion import read_source, source_record
from tasks.errors import ReadingsUndecided
from tasks.job import Job, Result, run_step
from tasks.lora.layouts import Packing
from tasks.lora.packing import ScoresStatement
from tasks.readings import provisional_packing, undecided_parameters
from tasks.stored_scores import recorded_measurement


@task(persist_result=False, cache_policy=NO_CACHE)
def settle(job: Job, inspected: Step, scored: Step) -> Step:
    """The inspection with the packing that the scores of both readings decided.

    `inspected` is the inspection that left it undecided, `scored` the scores of its readings: own is the provisional
    one, control the other. Quarantined where neither wins, inconclusive where the text was too little to ask.
    """
    thresholds = job.limits.thresholds

    def work() -> Result:
        verdict = decide(recorded_measurement(scored), opponents_available=False, thresholds=thresholds)
        if verdict.code is ScoreCode.TOO_LITTLE_TEXT:
            return Result(Outcome.INCONCLUSIVE, _too_little(job, inspected, verdict))
        readings = compare_readings(verdict)
        own = provisional_packing(inspected)
        parameters = undecided_parameters(inspected)
        figures, wanted = _figures(readings, own), f"all of it on one side, beyond {readings.bar:.4f}"
        if readings.winner is None:
            raise ReadingsUndecided(job.label, " and ".join(parameters), figures, wanted)
        winner = own.other if readings.winner == CONTROL else own
        detail = f"{figures}: {wanted}"
        scores = ScoresStatement(tuple((parameter, winner) for parameter in parameters), detail)
        record = source_record(job, read_source(job, scores))
        return Result(Outcome.DONE, record | {"readings": _readings_record(readings, own)})

    inputs = {
        "inspected": inspected.step_key,
        "scored": scored.step_key,
        "thresholds": json.dumps(asdict(thresholds), sort_keys=True),
    }
    return run_step(job, StepKind.INSPECTED, inputs, work)


def _figures(readings: Readings, own: Packing) -> str:
    """Both scores and the interval of their difference, in words."""
    between = readings.difference
    return (
        f"{own} {readings.own:.4f} and {own.other} {readings.control:.4f} bits per byte (base {readings.base:.4f}, "
        f"{readings.units} units); {own.other} minus {own} is {between.mean:+.4f} "
        f"[{between.lower:+.4f}, {between.upper:+.4f}]"
    )


def _readings_record(readings: Readings, own: Packing) -> dict[str, Any]:
    between = readings.difference
    return {
        "bpb": {own.value: readings.own, own.other.value: readings.control, "base": readings.base},
        "difference": {"mean": between.mean, "lower": between.lower, "upper": between.upper},
        "bar": readings.bar,
        "units": readings.units,
    }


def _too_little(job: Job, inspected: Step, verdict: Verdict) -> dict[str, Any]:
    code = ScoreCode.TOO_LITTLE_TEXT.value
    names = " and ".join(undecided_parameters(inspected))
    reason = f"{job.label}: nothing but scores can tell the packing of {names}, and {verdict.reason}"
    return {"code": code, "codes": [code], "reason": reason, "where": None}
