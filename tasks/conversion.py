"""Inspect and convert: from the upload's files to what vLLM serves, and to the control."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.digests import FileDigest, directory_digest
from storage.errors import ObjectNotFound
from storage.keys import control_prefix, serving_prefix
from storage.ledger import Outcome, Step, StepKind
from storage.training import Training
from storage.uploads import download_upload
from tasks.errors import NotReproducible, SourceGone
from tasks.job import Job, Result, run_step
from tasks.lora.base import read_base_config
from tasks.lora.convert import ConvertedFiles, convert_adapter
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.plan import ConversionPlan, plan_control, plan_conversion
from tasks.lora.trainers import TrainingStatement
from tasks.lora.write import Progress, WrittenFile
from tasks.transfer import fetch_directory, recorded_files


@dataclass(frozen=True, slots=True)
class Converted:
    """One written directory and the digest it is known by."""

    files: ConvertedFiles
    output_digest: str


@task(persist_result=False, cache_policy=NO_CACHE)
def inspect(job: Job) -> Step:
    """What the adapter is, with every piece of evidence about its layout; refused if it cannot be read."""

    def work() -> Result:
        found = read_source(job)
        record = inspection_record(found) | {"base": job.base.name}
        record["warnings"] = [*found.warnings, *job.upload.warnings]
        return Result(Outcome.DONE, record)

    inputs = {
        "adapter": job.upload.adapter_digest,
        "base": job.base.digest,
        "training": job.upload.training_digest or "none",
    }
    return run_step(job, StepKind.INSPECTED, inputs, work)


@task(persist_result=False, cache_policy=NO_CACHE)
def convert(job: Job, inspected: Step) -> Step:
    """The adapter as vLLM serves it, and its control, on this machine's disk."""

    def work() -> Result:
        own, control, plan = _convert_both(job)
        record = conversion_record(own)
        record["control"] = {
            "output_digest": control.output_digest,
            "kind": plan.kind.value,
            "files": _file_records(control.files),
        }
        return Result(Outcome.DONE, record)

    inputs = {
        "adapter": job.upload.adapter_digest,
        "base": job.base.digest,
        "inspected": inspected.step_key,
        "format": job.base.document.target_format.value,
    }
    return run_step(job, StepKind.CONVERTED, inputs, work)


def read_source(job: Job) -> Inspection:
    """The upload, downloaded if this run has not done so yet, and inspected.

    Raises:
        AdapterError: it cannot be read as an adapter of its base.
        SourceGone: a file was deleted from the store.
        UploadChanged, UploadCorrupt, StoreUnavailable: see `storage.uploads.download_upload`.
    """
    source = job.disk.folder() / "source"
    if not source.is_dir():
        part = job.disk.folder() / uuid4().hex
        try:
            download_upload(job.store, job.upload, part)
        except ObjectNotFound as error:
            raise SourceGone(job.label, error.key) from error
        part.rename(source)
    return inspect_adapter(
        source,
        read_base_config(job.base.config, label=f"base {job.base.name}"),
        label=job.label,
        training=training_statement(job.upload.training),
    )


def ensure_converted(job: Job, converted: Step) -> tuple[Path, Path]:
    """The directories of the adapter and of its control: here, else in the store, else converted once more.

    Both stay on this disk until the run ends.

    Raises:
        NotReproducible: converting again gave other bytes than the ledger records.
    """
    own = str(converted.result["output_digest"])
    control: Any = converted.result["control"]
    wanted = (
        (own, serving_prefix(job.author, own), converted.result["files"]),
        (control["output_digest"], control_prefix(job.author, control["output_digest"]), control["files"]),
    )
    try:
        for digest, prefix, files in wanted:
            if not job.disk.hold(job.converted_path(digest)):
                fetch_directory(
                    job.store, prefix, recorded_files(files), job.disk, job.converted_path(digest)
                )
    except ObjectNotFound:
        job.log.info("%s: its converted files are neither here nor in the store; converting again", job.label)
        made, made_control, _ = _convert_both(job)
        found = (made.output_digest, made_control.output_digest)
        if found != (own, control["output_digest"]):
            raise NotReproducible(job.label, (own, control["output_digest"]), found) from None
    return job.converted_path(own), job.converted_path(control["output_digest"])


def training_statement(training: Training | None) -> TrainingStatement | None:
    """What a training.json says about the layout, None without one."""
    if training is None:
        return None
    said = training.lora_b_layout
    return TrainingStatement(
        trainer_name=training.trainer.name if training.trainer else None,
        trainer_version=training.trainer.version if training.trainer else None,
        layout=said if isinstance(said, str) else None,
        layouts=tuple(said.items()) if isinstance(said, dict) else (),
    )


def inspection_record(found: Inspection) -> dict[str, Any]:
    """An inspection as the ledger and `--json` write it."""
    return {
        "family": found.family,
        "base": found.base,
        "layers": found.layers,
        "experts": found.experts,
        "ranks": {kind.value: rank for kind, rank in found.ranks},
        "orientation": found.orientation.value,
        "packing": {
            decision.parameter: {
                "value": decision.value.value,
                "decided_by": decision.decided_by.value,
                "evidence": [
                    {
                        "source": item.source.value,
                        "says": item.says.value,
                        "strength": item.strength.value,
                        "detail": item.detail,
                    }
                    for item in decision.evidence
                ],
            }
            for decision in found.packing
        },
        "pairs": found.pairs,
        "format": found.format,
        "classes": {
            summary.name.value: {"keys": summary.keys, "trained_fraction": summary.trained_fraction}
            for summary in found.classes
        },
        "warnings": list(found.warnings),
    }


def conversion_record(made: Converted) -> dict[str, Any]:
    """A conversion as the ledger and `--json` write it."""
    files = made.files
    return {
        "output_digest": made.output_digest,
        "format": files.format,
        "rank": files.rank,
        "max_lora_rank": files.max_lora_rank,
        "is_3d_lora_weight": False,
        "needs_mixed_format": False,
        "dtype": files.dtype,
        "pairs": files.pairs,
        "files": _file_records(files),
    }


def write_converted(
    found: Inspection, plan: ConversionPlan, destination: Path, progress: Progress | None
) -> Converted:
    """One planned directory, written and named by digest."""
    made = convert_adapter(found.files, plan, destination, progress)
    return Converted(made, written_digest(made.files))


def written_digest(files: Iterable[WrittenFile]) -> str:
    """The digest of a converted directory, of the files that were or would be written to it."""
    return directory_digest(FileDigest(file.name, file.bytes, file.sha256) for file in files)


def _convert_both(job: Job) -> tuple[Converted, Converted, ConversionPlan]:
    found = read_source(job)
    plan = plan_conversion(found.layout)
    control = plan_control(plan)
    return _write(job, found, plan), _write(job, found, control), control


def _write(job: Job, found: Inspection, plan: ConversionPlan) -> Converted:
    """Written in the run's own folder, then moved to the name that its bytes give it."""
    fresh = job.disk.folder() / uuid4().hex
    made = write_converted(found, plan, fresh, None)
    job.disk.share(fresh, job.converted_path(made.output_digest))
    return made


def _file_records(files: ConvertedFiles) -> list[dict[str, Any]]:
    return [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in files.files]
