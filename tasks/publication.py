"""Staging: the converted adapter in the object store, where the roster can name it."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from roster.serving import AdapterFormat, Layout, Manifest, ServedFile
from storage.documents import put_document
from storage.errors import PreconditionFailed, StoreNotTrusted, StoreUnavailable
from storage.keys import control_prefix, manifest_key, serving_prefix
from storage.ledger import Outcome, Step, StepKind
from tasks.conversion import ensure_converted
from tasks.job import STEP_VERSIONS, Job, Result, run_step
from tasks.opponents import control_name
from tasks.progress import Counted
from tasks.transfer import put_directory, recorded_files
from tasks.uploading import EarlyUpload, drop_parts


@task(persist_result=False, cache_policy=NO_CACHE)
def stage(job: Job, inspected: Step, converted: Step, early: EarlyUpload | None = None) -> Step:
    """The converted adapter in the object store, whole, the manifest last.

    Its control is not: `offer_control` puts it there for an engine that does not see this disk.

    early: what has been sent of it during the check.
    """
    own = str(converted.result["output_digest"])
    prefix = serving_prefix(job.author, own)

    def work() -> Result:
        own_path, _ = ensure_converted(job, inspected, converted)
        progress = job.progress("uploading", Counted.BYTES)
        if early is not None:
            early.finish()
        put_directory(job.store, own_path, prefix, recorded_files(converted.result["files"]), progress)
        _put_manifest(job, prefix, _manifest(job, inspected, converted))
        record = {"output_digest": own, "prefix": prefix, "uri": job.store.uri(prefix)}
        return Result(Outcome.DONE, record)

    return run_step(
        job,
        StepKind.STAGED,
        {"converted": converted.step_key, "output": own},
        work,
        # What `roster gc` took out of the store is put there again.
        stands=lambda known: job.store.head(manifest_key(prefix)) is not None,
    )


def offer_control(job: Job, converted: Step, name: str) -> None:
    """Put the control into the store if it is what an engine is about to be asked for by this name.

    Raises:
        StoreUnavailable: the store did not take it.
    """
    control: Any = converted.result["control"]
    digest = str(control["output_digest"])
    if name != control_name(job.author, digest):
        return
    prefix = control_prefix(job.author, digest)
    progress = job.progress("uploading the control", Counted.BYTES)
    put_directory(job.store, job.converted_path(digest), prefix, recorded_files(control["files"]), progress)


def unstage_control(job: Job, converted: Step) -> None:
    """Take the control out of the store and off this disk, and what was sent of an adapter that is not staged.

    The control has served its purpose and is never served.

    The verdict is written already, and stands whether or not the store does this.
    """
    control: Any = converted.result["control"]
    prefix = control_prefix(job.author, control["output_digest"])
    drop_control(job, converted)
    try:
        for found in job.store.list_objects(prefix):
            job.store.delete(found.key)
        drop_parts(job, converted)
    except (StoreUnavailable, StoreNotTrusted) as error:
        job.log.warning(
            "%s: its control stays at %s; running it again takes it away: %s", job.label, prefix, error
        )


def drop_control(job: Job, converted: Step) -> None:
    """Take the control off this disk: its scores are on the record."""
    control: Any = converted.result["control"]
    job.disk.drop(job.converted_path(control["output_digest"]))


def _put_manifest(job: Job, prefix: str, manifest: Manifest) -> None:
    try:
        put_document(job.store, manifest_key(prefix), manifest, if_none_match=True)
    except PreconditionFailed:
        job.log.info("%s: %s was staged before; its first manifest stands", job.label, prefix)


def _manifest(job: Job, inspected: Step, converted: Step) -> Manifest:
    made: Any = converted.result
    layout = {"orientation": inspected.result["orientation"], "packing": inspected.result["packing"]}
    return Manifest(
        author=job.author,
        run=job.upload.marker.run,
        base=job.base.name,
        adapter_digest=job.upload.adapter_digest,
        output_digest=made["output_digest"],
        format=AdapterFormat(made["format"]),
        rank=made["rank"],
        max_lora_rank=made["max_lora_rank"],
        is_3d_lora_weight=made["is_3d_lora_weight"],
        needs_mixed_format=made["needs_mixed_format"],
        minimum_vllm=made.get("minimum_vllm"),
        dtype=made["dtype"],
        layout=Layout.model_validate(layout),
        files=tuple(ServedFile(**file) for file in made["files"]),
        converter_version=STEP_VERSIONS[StepKind.CONVERTED],
    )
