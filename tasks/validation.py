"""Check: that the conversion was carried out as decided, from the files alone."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.ledger import Outcome, Step, StepKind
from tasks.conversion import ensure_converted, read_source
from tasks.job import Job, Result, run_step
from tasks.lora.check import CheckReport, check_conversion, raise_for


@task(persist_result=False, cache_policy=NO_CACHE)
def check(job: Job, converted: Step) -> Step:
    """Round trip, coverage, scaling, finite and trained factors of the converted adapter."""

    def work() -> Result:
        own_path, _ = ensure_converted(job, converted)
        found = read_source(job)
        report = check_conversion(found.files, own_path, found.layout)
        raise_for(report)
        return Result(Outcome.DONE, {"checks": check_records(report)})

    inputs = {"converted": converted.step_key, "output": str(converted.result["output_digest"])}
    return run_step(job, StepKind.CHECKED, inputs, work)


def check_records(report: CheckReport) -> list[dict[str, Any]]:
    """A report's checks as the ledger and `--json` write them."""
    return [
        {
            "name": result.name.value,
            "passed": result.passed,
            "detail": result.detail,
            "figures": dict(result.figures),
        }
        for result in report.checks
    ]
