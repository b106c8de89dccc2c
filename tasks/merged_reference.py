"""The trainer's merged checkpoint, where an upload names one: found, fetched, and held against the adapter as read.

It is read from the store's own bucket, or from a folder under the setting `merged_root`; never from anywhere else.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from storage.errors import ObjectNotFound, PreconditionFailed
from storage.keys import UPLOADS
from storage.objects import ObjectInfo
from storage.progress import Tally
from storage.training import redact_uri
from tasks.errors import SourceGone
from tasks.job import Job
from tasks.lora.checks import CheckName, CheckResult
from tasks.lora.errors import LayoutConflict, MergedMismatch, WeightsIncomparable
from tasks.lora.files import AdapterFiles
from tasks.lora.merged import MergedFindings, Progress, compare_merged, read_otherwise
from tasks.lora.sources import AdapterLayout
from tasks.lora.weights import INDEX_NAME, open_weights
from tasks.progress import Counted

_SHOWN = 200
_WEIGHTS = ".safetensors"
_BASE_ADVICE = (
    "This says nothing against the adapter: give the weights of its base (`roster base add --weights`)."
)


@dataclass(frozen=True, slots=True)
class Uncompared:
    """Why a merged checkpoint was not compared; a warning, which says nothing of the adapter."""

    reason: str


@dataclass(frozen=True, slots=True)
class MergedReference:
    """A merged checkpoint that can be compared: a folder, or objects that are to be fetched.

    weights: the folder of the base's. digest: of what tells one state of it from another without reading it.
    """

    weights: Path
    directory: Path | None
    objects: tuple[ObjectInfo, ...]
    digest: str


def merged_check(
    source: AdapterFiles,
    layout: AdapterLayout,
    merged: Path,
    weights: Path,
    *,
    progress: Progress | None = None,
) -> CheckResult | Uncompared:
    """What a merged checkpoint shows of the adapter as it was read: the check `merged`.

    merged, weights: the folders of the merged checkpoint and of its base's weights. A failure is delta_mismatch, or
    layout_conflict where the other packing agrees.

    Raises:
        ReferenceInvalid: the merged checkpoint cannot be trusted, or one of the two cannot be read.
    """
    theirs = open_weights(merged, label=layout.label, name="the merged checkpoint")
    ours = open_weights(weights, label=layout.label, name="the base's weights", advice=_BASE_ADVICE)
    try:
        found = compare_merged(source, layout, theirs, ours, other=read_otherwise(layout), progress=progress)
    except WeightsIncomparable as error:
        return Uncompared(f"the merged checkpoint was not compared: {error}")
    return _result(found)


def find_merged(job: Job) -> MergedReference | Uncompared | None:
    """The merged checkpoint that an upload names, None where it names none; nothing of it is read yet.

    Raises:
        StoreUnavailable: the store cannot be asked.
    """
    uri = job.upload.training.merged_checkpoint if job.upload.training else None
    if uri is None:
        return None
    if not uri.isprintable():
        return _uncompared(uri, "it holds characters that no address has")
    stated = job.base.document.weights
    if stated is None or not Path(stated).is_dir():
        why = "is registered without its weights" if stated is None else "has its weights on another machine"
        return _uncompared(uri, f"base {job.base.name} {why} (`roster base add … --weights DIR`)")
    prefix = _bucket_prefix(job, uri)
    if prefix is not None:
        return _find_objects(job, uri, prefix, Path(stated))
    try:
        return _find_folder(job, uri, Path(stated))
    except ValueError:  # brackets that hold no address, %00
        return _uncompared(uri, "it is no address")
    except OSError as error:
        return _uncompared(uri, f"it cannot be read on this machine ({error.strerror})")


def check_merged(
    job: Job,
    source: AdapterFiles,
    layout: AdapterLayout,
    reference: MergedReference,
    *,
    progress: Progress | None = None,
) -> CheckResult | Uncompared:
    """The check `merged` of an upload; what is fetched for it is removed again.

    Raises:
        ReferenceInvalid: see `merged_check`.
        DiskFull: there is no room for what has to be fetched.
        SourceGone: a file of it was deleted from the store, or replaced meanwhile.
        StoreUnavailable: a file could not be fetched.
    """
    if reference.directory is not None:
        return merged_check(source, layout, reference.directory, reference.weights, progress=progress)
    job.disk.require(sum(one.bytes for one in reference.objects), job.label)
    folder = job.disk.folder() / "merged"
    folder.mkdir()
    try:
        tally = Tally(
            sum(one.bytes for one in reference.objects),
            job.progress("fetching the merged checkpoint", Counted.BYTES),
        )
        for one in reference.objects:
            job.log.info("%s: fetching %s (%d bytes)", job.label, one.key, one.bytes)
            try:
                path = folder / one.key.rpartition("/")[2]
                job.store.download_file(one.key, path, if_match=one.etag, received=tally)
            except (ObjectNotFound, PreconditionFailed) as error:
                raise SourceGone(job.label, one.key) from error
        return merged_check(source, layout, folder, reference.weights, progress=progress)
    finally:
        shutil.rmtree(folder)


def _result(found: MergedFindings) -> CheckResult:
    figures = (
        ("matrices", found.matrices),
        ("visible", found.visible),
        ("differing", found.many),
        ("other_packing", len(found.other)),
        ("equal", found.equal),
        ("largest", found.largest),
        ("untouched", found.untouched),
    )
    if found.many:
        detail = (
            f"{found.many} of {found.matrices} weights are not base + delta; the worst, {found.worst}, is off by "
            f"{found.largest:.3g} of what the merge changed"
        )
        return CheckResult(CheckName.MERGED, False, detail, figures, found.worst, MergedMismatch)
    if found.other:
        more = f" and {len(found.other) - 1} more" if len(found.other) > 1 else ""
        detail = f"{found.other[0]}{more}: the merge is that of the other packing"
        return CheckResult(CheckName.MERGED, False, detail, figures, found.other[0], LayoutConflict)
    detail = (
        f"{found.matrices} weights are base + delta in {found.dtype}, {found.equal:.2%} of their numbers exactly; "
        f"largest error {found.largest:.2g} ({found.worst})"
    )
    if found.visible < found.matrices:
        detail += f"; {found.matrices - found.visible} did not change, nor should they"
    return CheckResult(CheckName.MERGED, True, detail, figures)


def _bucket_prefix(job: Job, uri: str) -> str | None:
    """The prefix in the store's bucket that a URI means; None for one that leads elsewhere."""
    own = f"s3://{job.store.bucket}/"
    if uri.startswith(own):
        prefix = uri.removeprefix(own)
    elif uri.startswith(UPLOADS):
        prefix = uri
    else:
        return None
    return f"{prefix.rstrip('/')}/"


def _find_objects(job: Job, uri: str, prefix: str, weights: Path) -> MergedReference | Uncompared:
    objects = tuple(
        one for one in job.store.list_objects(prefix) if _is_weights(one.key.removeprefix(prefix))
    )
    if not objects:
        return _uncompared(uri, "no *.safetensors are there")
    lines = (f"{one.key} {one.etag} {one.bytes}" for one in objects)
    return MergedReference(weights, None, objects, _digest(lines))


def _find_folder(job: Job, uri: str, weights: Path) -> MergedReference | Uncompared:
    root, parts = job.limits.merged_root, urlsplit(uri)
    if parts.scheme not in ("", "file") or parts.netloc or not parts.path.startswith("/"):
        return _uncompared(uri, f"expected s3://{job.store.bucket}/… or {UPLOADS}… or a folder's path")
    if root is None:
        return _uncompared(uri, "a folder is read only under ROSTER_MERGED_ROOT, which is not set")
    path = Path(unquote(parts.path) if parts.scheme else uri).resolve()
    if not path.is_relative_to(root.resolve()):
        return _uncompared(uri, "it is not under ROSTER_MERGED_ROOT")
    files = sorted(one for one in path.iterdir() if _is_weights(one.name)) if path.is_dir() else []
    if not files:
        return _uncompared(uri, "no *.safetensors are there")
    if not all(one.is_file() and one.resolve().is_relative_to(root.resolve()) for one in files):
        return _uncompared(uri, "a file of it is a link that leads elsewhere, or no file")
    lines = (f"{one} {one.stat().st_size} {one.stat().st_mtime_ns}" for one in files)
    return MergedReference(weights, path, (), _digest(lines))


def _is_weights(name: str) -> bool:
    return "/" not in name and (name.endswith(_WEIGHTS) or name == INDEX_NAME)


def _uncompared(uri: str, why: str) -> Uncompared:
    return Uncompared(f"merged_checkpoint {redact_uri(uri)[:_SHOWN]!r} was not compared: {why}")


def _digest(lines: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
