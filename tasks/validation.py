"""Check: that the conversion was carried out as decided, from the files alone."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.ledger import Outcome, Step, StepKind
from tasks.conversion import ensure_converted, read_source, target_format
from tasks.job import Job, Result, run_step
from tasks.lora.check import check_conversion, raise_for
from tasks.readings import scores_statement
from tasks.records import check_records


@task(persist_result=False, cache_policy=NO_CACHE)
def check(job: Job, inspected: Step, converted: Step) -> Step:
    """Round trip, coverage, scaling, finite and trained factors of the converted adapter."""

    def work() -> Result:
        own_path, _ = ensure_converted(job, inspected, converted)
        found = read_source(job, scores_statement(inspected))
        report = check_conversion(found.files, own_path, found.layout, target_format(job))
        raise_for(report)
        return Result(Outcome.DONE, {"checks": check_records(report)})

    inputs = {"converted": converted.step_key, "output": str(converted.result["output_digest"])}
    return run_step(job, StepKind.CHECKED, inputs, work)
