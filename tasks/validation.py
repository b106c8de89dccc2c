"""Check: that the conversion was carried out as decided, and that the engine will take every key of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from roster.serving_engine import EngineInfo
from storage.ledger import Outcome, Step, StepKind
from tasks.conversion import ensure_converted, read_source, target_format
from tasks.engines import published_engine
from tasks.errors import EngineUnfit
from tasks.job import Job, Result, run_step
from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.check import check_conversion, raise_for
from tasks.lora.files import open_adapter
from tasks.lora.resolve import check_resolved
from tasks.readings import scores_statement
from tasks.records import check_records
from tasks.served import find_engine_gap, list_witnesses


@task(persist_result=False, cache_policy=NO_CACHE)
def check(job: Job, inspected: Step, converted: Step) -> Step:
    """Round trip, coverage, scaling, finite and trained factors of the converted adapter, and where its keys lead."""
    served = list_witnesses(published_engine(job), _read_base(job))

    def work() -> Result:
        own_path, _ = ensure_converted(job, inspected, converted)
        found = read_source(job, scores_statement(inspected))
        report = check_conversion(found.files, own_path, found.layout, target_format(job), served)
        raise_for(report)
        return Result(Outcome.DONE, {"checks": check_records(report)})

    inputs = {
        "converted": converted.step_key,
        "output": str(converted.result["output_digest"]),
        "served": " ".join(one.digest for one in served) or "unknown",
    }
    return run_step(job, StepKind.CHECKED, inputs, work)


def require_resolved(job: Job, info: EngineInfo, own: Path, others: Sequence[Path]) -> None:
    """Return if the running engine, as it told of itself, will use every key of a converted adapter.

    others: its opponents', which were found good when they were judged; what the engine leaves unused of theirs now
    would make them easy to beat.

    Raises:
        EngineUnfit: its settings keep it from using some that its class could serve.
        UnresolvedKeys: some of its own lead nowhere, whatever the settings.
    """
    base, names = _read_base(job), _read_names(job, own)
    check_resolved(job.label, names, list_witnesses(info, base), base.family)
    for each in chain([names], (_read_names(job, other) for other in others)):
        gap = find_engine_gap(each, info, base)
        if gap is not None:
            raise EngineUnfit(job.base.name, gap.setting, gap.expected, gap.found, gap.advice)


def _read_names(job: Job, directory: Path) -> list[str]:
    return [entry.name for entry in open_adapter(directory, label=job.label).tensors]


def _read_base(job: Job) -> BaseConfig:
    return read_base_config(job.base.config, label=f"base {job.base.name}")
