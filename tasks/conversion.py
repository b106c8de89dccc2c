"""Inspect and convert: from the upload's files to what vLLM serves, and to the control."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.errors import ObjectNotFound
from storage.ledger import Outcome, Step, StepKind
from storage.uploads import download_upload
from tasks.errors import NotReproducible, SourceGone
from tasks.job import Job, Result, run_step
from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.convert import ConvertedFiles, convert_adapter
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.packing import ScoresStatement
from tasks.lora.plan import ConversionPlan, PlanKind, plan_control, plan_conversion, require_served
from tasks.lora.slots import find_served_dtype
from tasks.lora.target import TargetFormat
from tasks.progress import Counted
from tasks.readings import provisional_packing, scores_statement
from tasks.records import (
    conversion_record,
    file_records,
    inspection_record,
    policy_statement,
    training_statement,
    written_digest,
)
from tasks.training_file import list_base_warnings, unreadable_training
from tasks.transfer import holds_files


@dataclass(frozen=True, slots=True)
class Converted:
    """One written directory and the digest it is known by."""

    files: ConvertedFiles
    output_digest: str


@task(persist_result=False, cache_policy=NO_CACHE)
def inspect(job: Job) -> Step:
    """What the adapter is, with every piece of evidence about its layout; refused if it cannot be read."""

    def work() -> Result:
        return Result(Outcome.DONE, source_record(job, read_source(job)))

    inputs = {
        "adapter": job.upload.adapter_digest,
        "base": job.base.digest,
        "training": job.upload.training_digest or "none",
        "policy": job.policy.digest if job.policy else "none",
    }
    if job.upload.ambiguity is not None:
        # Names of files that are none of the adapter's own count too, and are no part of its digest.
        inputs["file_names"] = job.upload.ambiguity
    return run_step(job, StepKind.INSPECTED, inputs, work)


@task(persist_result=False, cache_policy=NO_CACHE)
def convert(job: Job, inspected: Step) -> Step:
    """The adapter as vLLM serves it, and its control, on this machine's disk.

    Where nothing tells the packing, the two are the two readings that are scored against each other.
    """

    def work() -> Result:
        found, own, control, kind = _convert_both(job, inspected)
        record = conversion_record(own.files, found.layout.base.served)
        record["control"] = {
            "output_digest": control.output_digest,
            "kind": kind.value,
            "rank": control.files.rank,
            "files": file_records(control.files.files),
        }
        return Result(Outcome.DONE, record)

    inputs = {
        "adapter": job.upload.adapter_digest,
        "base": job.base.digest,
        "inspected": inspected.step_key,
        "format": target_format(job).value,
    }
    if target_format(job) is TargetFormat.SLOTS:
        # What the base is served in is no part of its digest, and of no other form.
        inputs["dtype"] = find_served_dtype(read_job_base(job))
    return run_step(job, StepKind.CONVERTED, inputs, work)


def read_source(
    job: Job, scores: ScoresStatement | None = None, *, provisional: Packing = Packing.RANK_MAJOR
) -> Inspection:
    """The upload as inspected; downloaded and read if this run has not done so yet.

    `scores` decide the packing of parameters that neither a statement nor the tensors decide; what they do not name
    either is read as `provisional`.

    Raises:
        AdapterError: it cannot be read as an adapter of its base, or its training.json not at all.
        SourceGone: a file was deleted from the store.
        UploadAmbiguous, UploadChanged, UploadCorrupt, StoreUnavailable: see `storage.uploads.download_upload`.
    """
    if job.upload.misstatement is not None:
        raise unreadable_training(job.label, job.upload.misstatement)
    if (scores, provisional) not in job.inspections:
        job.inspections[scores, provisional] = inspect_adapter(
            _fetch_source(job),
            read_job_base(job),
            label=job.label,
            training=training_statement(job.upload.training),
            policy=policy_statement(job.policy),
            scores=scores,
            provisional=provisional,
        )
    return job.inspections[scores, provisional]


def source_record(job: Job, found: Inspection) -> dict[str, Any]:
    """An inspection of the upload as its ledger writes it."""
    record = inspection_record(found) | {"base": job.base.name}
    of_base = list_base_warnings(job.upload.training, job.base.document)
    record["warnings"] = [*found.warnings, *job.upload.warnings, *of_base]
    return record


def ensure_converted(job: Job, inspected: Step, converted: Step) -> tuple[Path, Path]:
    """The directories of the adapter and of its control: here, else converted once more.

    Both stay on this disk until the run ends. What another machine converted is not fetched: the control is in no store
    (docs/pipeline.md), and to convert it again the upload has to be fetched anyway.

    Raises:
        NotReproducible: converting again gave other bytes than the ledger records.
    """
    own = str(converted.result["output_digest"])
    control: Any = converted.result["control"]
    outputs = (own, str(control["output_digest"]))
    own_path, control_path = map(job.converted_path, outputs)
    if not (job.disk.hold(own_path) and job.disk.hold(control_path)):
        job.log.info("%s: its converted files are not on this machine; converting again", job.label)
        _, made, made_control, _ = _convert_both(job, inspected)
        found = (made.output_digest, made_control.output_digest)
        if found != outputs:
            raise NotReproducible(job.label, outputs, found)
    return own_path, control_path


def _fetch_source(job: Job) -> Path:
    """The upload's files on this disk, which a run that died or stopped before its check was done has left there.

    What was left is read against the marker's digests: after a power cut it may have its size and none of its bytes,
    which would pass for a damaged adapter.
    """
    source = _source_path(job)
    if job.disk.is_held(source):
        return source
    if job.disk.hold(source):
        if holds_files(source, [file.digest for file in job.upload.adapter_files]):
            return source
        job.log.warning("%s: what an earlier run left of it here is damaged; fetching it again", job.label)
        job.disk.drop(source)
    # The adapter is converted twice, and neither copy is smaller than what was uploaded.
    own = sum(file.digest.bytes for file in job.upload.adapter_files)
    job.disk.require(3 * own, job.label)
    part = job.disk.folder() / uuid4().hex
    try:
        download_upload(job.store, job.upload, part, job.progress("downloading", Counted.BYTES))
    except ObjectNotFound as error:
        raise SourceGone(job.label, error.key) from error
    job.disk.share(part, source)
    return source


def drop_source(job: Job) -> None:
    """Take the upload off this disk: its check is done. Should it be converted once more, it is fetched again."""
    job.inspections.clear()
    job.disk.drop(_source_path(job))


def _source_path(job: Job) -> Path:
    return job.limits.work_path / "sources" / job.upload.adapter_digest


def target_format(job: Job) -> TargetFormat:
    """The form in which adapters of this base are served."""
    return TargetFormat(job.base.document.target_format.value)


def read_job_base(job: Job) -> BaseConfig:
    """What the base's config.json says, and what it is served in.

    Raises InvalidBaseConfig, UnknownFamily.
    """
    dtype = job.base.document.engine.dtype
    return read_base_config(job.base.config, label=f"base {job.base.name}", engine_dtype=dtype)


def _convert_both(job: Job, inspected: Step) -> tuple[Inspection, Converted, Converted, PlanKind]:
    """The adapter as inspected, itself converted, its control converted, and what kind of control that is."""
    found, target = read_source(job, scores_statement(inspected)), target_format(job)
    require_served(found.layout.base, target, job.label)
    plan = plan_conversion(found.layout, format=target)
    if found.undecided:
        other = read_source(job, provisional=provisional_packing(inspected).other)
        control, kind = plan_conversion(other.layout, format=target), PlanKind.OTHER_PACKING
    else:
        control = plan_control(found.layout, format=target)
        kind = control.kind
    job.disk.require(plan.predicted_bytes + control.predicted_bytes, job.label)
    return found, _write(job, found, plan), _write(job, found, control), kind


def _write(job: Job, found: Inspection, plan: ConversionPlan) -> Converted:
    """Written in the run's own folder, then moved to the name that its bytes give it."""
    fresh = job.disk.folder() / uuid4().hex
    files = convert_adapter(found.files, plan, fresh, job.progress("converting", Counted.BYTES))
    made = Converted(files, written_digest(files.files))
    job.disk.share(fresh, job.converted_path(made.output_digest))
    return made
