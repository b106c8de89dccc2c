"""Inspect, convert and check on plain directories: the pipeline's own steps without store, ledger or server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.digests import directory_digest, is_adapter_file, sha256_file
from storage.keys import TRAINING_FILE
from storage.training import parse_training
from tasks.conversion import conversion_record, inspection_record, training_statement, write_converted
from tasks.lora.base import read_base_config
from tasks.lora.check import CheckReport, check_conversion
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.plan import plan_conversion
from tasks.lora.write import Progress


def inspect_directory(
    directory: Path, base: Path, *, packing: str | None, header_only: bool
) -> dict[str, Any]:
    """What `roster inspect --json` prints of an adapter's directory.

    `base` is a config.json or the directory that holds one; `packing` forces a reading. Digests are None with
    `header_only`.

    Raises:
        AdapterError: it cannot be read as an adapter of that base.
    """
    found = _inspect(directory, base, packing=packing, header_only=header_only)
    record = inspection_record(found)
    record["adapter_digest"] = None if header_only else adapter_digest(directory)
    record["output_digest"] = None
    return record


def convert_directory(
    source: Path, destination: Path, base: Path, *, packing: str | None, progress: Progress | None
) -> dict[str, Any]:
    """What `roster convert --json` prints, after writing the converted adapter to a new directory.

    Raises:
        AdapterError: the source cannot be converted; nothing is written.
        DestinationExists: `destination` is there already.
    """
    found = _inspect(source, base, packing=packing, header_only=False)
    made = write_converted(found, plan_conversion(found.layout), destination, progress)
    record = inspection_record(found) | conversion_record(made)
    record["adapter_digest"] = adapter_digest(source)
    return record


def check_directories(source: Path, destination: Path, base: Path, *, packing: str | None) -> CheckReport:
    """Every check of a conversion, passed or not.

    Raises:
        AdapterError: one of the two directories cannot be read at all.
    """
    found = _inspect(source, base, packing=packing, header_only=True)
    return check_conversion(found.files, destination, found.layout)


def adapter_digest(directory: Path) -> str:
    """The digest that an upload of this directory would have."""
    own = (path for path in directory.iterdir() if is_adapter_file(path.name))
    return directory_digest(sha256_file(path) for path in own)


def _inspect(directory: Path, base: Path, *, packing: str | None, header_only: bool) -> Inspection:
    path = directory / TRAINING_FILE
    training = parse_training(str(path), path.read_bytes()) if path.is_file() else None
    return inspect_adapter(
        directory,
        read_base_config(base, label=str(base)),
        label=directory.name,
        forced=None if packing is None else Packing(packing),
        training=training_statement(training[0] if training else None),
        header_only=header_only,
    )
