"""Inspect, convert and check on plain directories: the pipeline's own steps without store, ledger or server.

What a command may not need is imported where it is needed: torch alone takes longer than an adapter's headers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.digests import directory_digest, is_adapter_file, sha256_file
from storage.keys import TRAINING_FILE
from tasks.lora.base import BaseConfig
from tasks.lora.config import read_adapter_config
from tasks.lora.errors import (
    AdapterError,
    LayoutConflict,
    OrientationUndecided,
    PackingUndecided,
    RoleUndecided,
)
from tasks.lora.files import open_adapter
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.problems import Problems
from tasks.lora.target import TargetFormat
from tasks.records import (
    conversion_record,
    inspection_record,
    policy_statement,
    training_statement,
    written_digest,
)
from tasks.training_file import read_training

if TYPE_CHECKING:
    from storage.policy import Policy
    from tasks.lora.checks import CheckReport
    from tasks.lora.write import Progress


@dataclass(frozen=True, slots=True)
class KnownBase:
    """A base's sizes and, for one that is registered, the operator's policy."""

    config: BaseConfig
    policy: Policy | None = None


@dataclass(frozen=True, slots=True)
class ReferenceFolders:
    """The trainer's merged checkpoint, and the weights of the base that it was merged into."""

    merged: Path
    weights: Path


def inspect_directory(
    directory: Path, base: KnownBase, *, packing: str | None, header_only: bool
) -> dict[str, Any]:
    """What `roster inspect --json` prints of an adapter's directory; `packing` forces a reading.

    The output's digest is that of the files that `convert_directory` would write. With `header_only` both are None.

    Raises:
        AdapterError: it cannot be read as an adapter of that base, or its training.json cannot be read.
    """
    if header_only:
        _, record = _inspect(directory, base, packing=packing, header_only=True)
        return record | {"adapter_digest": None, "output_digest": None}
    with ThreadPoolExecutor(1) as aside:
        # The files are hashed while torch is imported, which takes about as long.
        own = aside.submit(adapter_digest, directory)
        found, record = _inspect(directory, base, packing=packing, header_only=False)
        from tasks.lora.convert import digest_adapter
        from tasks.lora.plan import plan_conversion

        made = digest_adapter(found.files, plan_conversion(found.layout))
        return record | {"adapter_digest": own.result(), "output_digest": written_digest(made)}


def convert_directory(
    source: Path,
    destination: Path,
    base: KnownBase,
    *,
    packing: str | None,
    format: str,
    progress: Progress | None,
) -> dict[str, Any]:
    """What `roster convert --json` prints, after writing the converted adapter to a new directory.

    `format` is per-expert, stacked or slots.

    Raises:
        AdapterError: the source cannot be converted; nothing is written.
        DestinationExists: `destination` is there already, and not empty.
    """
    with ThreadPoolExecutor(1) as aside:
        own = aside.submit(adapter_digest, source)
        found, record = _inspect(source, base, packing=packing, header_only=False)
        from tasks.lora.convert import convert_adapter
        from tasks.lora.plan import plan_conversion, require_served

        require_served(base.config, TargetFormat(format), found.layout.label)
        plan = plan_conversion(found.layout, TargetFormat(format))
        made = convert_adapter(found.files, plan, destination, progress)
        record |= conversion_record(made, found.layout.base.served)
        return record | {"adapter_digest": own.result()}


def migrate_directory(
    source: Path,
    destination: Path | None,
    base: KnownBase,
    *,
    packing: str | None,
    stamp: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    """What `roster migrate --json` prints, after saving a stacked adapter again for other tools.

    Re-packed rank_major and standard, or with `stamp` as it is, and in both cases with a true marker. Without a
    `destination` nothing is written.

    Raises:
        AdapterError: it cannot be read, has nothing to migrate, or its packing is not known.
        DestinationExists: `destination` is there already, and not empty.
    """
    found, record = _inspect(source, base, packing=packing, header_only=False)
    from tasks.lora.convert import convert_adapter
    from tasks.lora.plan import plan_conversion
    from tasks.lora.stamp import require_decided, stamp_adapter

    require_decided(found.layout)
    if destination is not None and stamp:
        stamp_adapter(found.files, found.layout, destination, progress)
    elif destination is not None:
        plan = plan_conversion(found.layout, TargetFormat.STACKED)
        convert_adapter(found.files, plan, destination, progress)
    return record


def check_directories(
    source: Path,
    destination: Path,
    base: KnownBase,
    *,
    packing: str | None,
    depth: str = "standard",
    device: str = "cpu",
    reference: ReferenceFolders | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Every check of a conversion, passed or not; where its keys lead, by what this repository keeps of the engine.

    depth: quick, standard or full. device: cpu or cuda. reference: the trainer's merged checkpoint.

    Raises:
        AdapterError: one of the two directories cannot be read at all; the message names it.
        ReferenceInvalid: the merged checkpoint cannot be trusted, or one of its folders cannot be read.
        DeviceMissing: deltas are to be made on a GPU, and torch sees none.
    """
    from tasks.lora.check import check_conversion
    from tasks.lora.checks import Depth
    from tasks.served import list_witnesses

    found, _ = _inspect(source, base, packing=packing, header_only=False)
    output = open_adapter(destination, label=str(destination))
    config = read_adapter_config(destination, label=str(destination))
    made = TargetFormat.STACKED if config.target_parameters else TargetFormat.PER_EXPERT
    if output.is_slots:
        made = TargetFormat.SLOTS
    report = check_conversion(
        found.files,
        destination,
        found.layout,
        made,
        list_witnesses(None, base.config),
        depth=Depth(depth),
        device=device,
        progress=progress,
    )
    if reference is None:
        return report
    from tasks.merged_reference import Uncompared, merged_check

    compared = merged_check(found.files, found.layout, reference.merged, reference.weights, progress=progress)
    return report.noting(compared.reason) if isinstance(compared, Uncompared) else report.adding(compared)


def adapter_digest(directory: Path) -> str:
    """The digest that an upload of this directory would have."""
    uploaded = (path for path in directory.iterdir() if not path.name.startswith(".") and path.is_file())
    own = (path for path in uploaded if is_adapter_file(path.name))
    return directory_digest(sha256_file(path) for path in own)


def _inspect(
    directory: Path, base: KnownBase, *, packing: str | None, header_only: bool
) -> tuple[Inspection, dict[str, Any]]:
    """An inspection, and its record with the warnings of everything that was read."""
    label = directory.resolve().name
    try:
        training, ignored = read_training(directory, label=label)
    except AdapterError as error:
        raise _add_the_rest(error, directory, base) from error
    found = inspect_adapter(
        directory,
        base.config,
        label=label,
        forced=None if packing is None else Packing(packing),
        training=training_statement(training),
        policy=policy_statement(base.policy),
        header_only=header_only,
    )
    record = inspection_record(found)
    record["warnings"] += ignored
    return found, record


def _add_the_rest(error: AdapterError, directory: Path, base: KnownBase) -> AdapterError:
    """Return a refusal of training.json with all else that can be said of the adapter without that file."""
    problems = Problems()
    problems.add(error, TRAINING_FILE)
    label = directory.resolve().name
    problems.attempt(inspect_adapter, directory, base.config, label=label, header_only=True)
    problems.drop(LayoutConflict, OrientationUndecided, PackingUndecided, RoleUndecided)
    return problems.merge()
