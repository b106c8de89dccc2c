"""Check: that the conversion was carried out as decided and read as meant, and that the engine will take every key."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE

from roster.serving_engine import EngineInfo
from storage.ledger import Outcome, Step, StepKind
from tasks.conversion import ensure_converted, read_job_base, read_source, target_format
from tasks.engines import published_engine
from tasks.errors import EngineUnfit
from tasks.job import Job, Result, run_step
from tasks.lora.base import BaseConfig
from tasks.lora.check import check_conversion
from tasks.lora.checks import Depth, find_failure
from tasks.lora.files import open_adapter
from tasks.lora.resolve import check_resolved
from tasks.lora.slots import list_engine_names
from tasks.merged_reference import MergedReference, Uncompared, check_merged, find_merged
from tasks.outcomes import refusal, rule
from tasks.progress import Counted
from tasks.readings import scores_statement, undecided_parameters
from tasks.records import check_record
from tasks.served import find_engine_gap, list_witnesses


@task(persist_result=False, cache_policy=NO_CACHE)
def check(job: Job, inspected: Step, converted: Step) -> Step:
    """Every check of the converted adapter with its numbers, as deep as the settings say; where its keys lead.

    The trainer's merged checkpoint, where the upload names one, is compared once nothing else is wrong, and once the
    packing is decided. Where a check fails, the step that refuses the adapter holds them all.
    """
    served = list_witnesses(published_engine(job), read_job_base(job))
    reference = None if undecided_parameters(inspected) else find_merged(job)

    def work() -> Result:
        own_path, _ = ensure_converted(job, inspected, converted)
        found = read_source(job, scores_statement(inspected))
        depth, device = _choose_depth(job)
        report = check_conversion(
            *(found.files, own_path, found.layout, target_format(job), served),
            depth=depth,
            device=device,
            progress=job.progress("checking", Counted.PARTS),
        )
        if isinstance(reference, Uncompared):
            report = report.noting(reference.reason)
        elif reference is not None and report.passed:
            compared = job.progress("comparing with the merged checkpoint", Counted.NUMBERS)
            seen = check_merged(job, found.files, found.layout, reference, progress=compared)
            report = report.noting(seen.reason) if isinstance(seen, Uncompared) else report.adding(seen)
        error = find_failure(report)
        if error is None:
            return Result(Outcome.DONE, check_record(report))
        job.log.warning("%s: %s", job.label, error)
        return Result(rule(error).outcome, refusal(error) | check_record(report))

    inputs = {
        "converted": converted.step_key,
        "output": str(converted.result["output_digest"]),
        "served": " ".join(one.digest for one in served) or "unknown",
        "depth": job.limits.check_depth,
    }
    if reference is not None:
        inputs["merged"] = reference.digest if isinstance(reference, MergedReference) else reference.reason
    return run_step(job, StepKind.CHECKED, inputs, work)


def _choose_depth(job: Job) -> tuple[Depth, str]:
    """How deep to look, and where deltas are made: `auto` is full where torch sees a GPU, else standard."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if job.limits.check_depth != "auto":
        return Depth(job.limits.check_depth), device
    return (Depth.FULL if device == "cuda" else Depth.STANDARD), device


def require_resolved(job: Job, info: EngineInfo, own: Path, others: Sequence[Path]) -> None:
    """Return if the running engine, as it told of itself, will use every key of a converted adapter.

    others: its opponents', which were found good when they were judged; what the engine leaves unused of theirs now
    would make them easy to beat.

    Raises:
        EngineUnfit: its settings keep it from using some that its class could serve.
        UnresolvedKeys: some of its own lead nowhere, whatever the settings.
    """
    base = read_job_base(job)
    names = _read_names(job, own, base)
    check_resolved(job.label, names, list_witnesses(info, base), base.family)
    for each in chain([names], (_read_names(job, other, base) for other in others)):
        gap = find_engine_gap(each, info, base)
        if gap is not None:
            raise EngineUnfit(job.base.name, gap.setting, gap.expected, gap.found, gap.advice)


def _read_names(job: Job, directory: Path, base: BaseConfig) -> list[str]:
    return list_engine_names(open_adapter(directory, label=job.label), base)
