"""Inspect, convert and check on plain directories: the pipeline's own steps without store, ledger or server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.digests import directory_digest, is_adapter_file, sha256_file
from storage.keys import TRAINING_FILE
from storage.training import parse_training
from tasks.conversion import (
    conversion_record,
    inspection_record,
    training_statement,
    write_converted,
    written_digest,
)
from tasks.lora.base import BaseConfig
from tasks.lora.check import CheckReport, check_conversion
from tasks.lora.config import read_adapter_config
from tasks.lora.convert import digest_adapter
from tasks.lora.files import open_adapter
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.plan import plan_conversion
from tasks.lora.write import Progress


def inspect_directory(
    directory: Path, base: BaseConfig, *, packing: str | None, header_only: bool
) -> dict[str, Any]:
    """What `roster inspect --json` prints of an adapter's directory; `packing` forces a reading.

    The output's digest is that of the files that `convert_directory` would write. With `header_only` both are None.

    Raises:
        AdapterError: it cannot be read as an adapter of that base.
        InvalidDocument: its training.json cannot be read.
    """
    found, record = _inspect(directory, base, packing=packing, header_only=header_only)
    record |= {"adapter_digest": None, "output_digest": None}
    if not header_only:
        made = digest_adapter(found.files, plan_conversion(found.layout))
        record["adapter_digest"] = adapter_digest(directory)
        record["output_digest"] = written_digest(made)
    return record


def convert_directory(
    source: Path, destination: Path, base: BaseConfig, *, packing: str | None, progress: Progress | None
) -> dict[str, Any]:
    """What `roster convert --json` prints, after writing the converted adapter to a new directory.

    Raises:
        AdapterError, InvalidDocument: the source cannot be converted; nothing is written.
        DestinationExists: `destination` is there already, and not empty.
    """
    found, record = _inspect(source, base, packing=packing, header_only=False)
    made = write_converted(found, plan_conversion(found.layout), destination, progress)
    record |= conversion_record(made)
    record["adapter_digest"] = adapter_digest(source)
    return record


def check_directories(
    source: Path, destination: Path, base: BaseConfig, *, packing: str | None
) -> CheckReport:
    """Every check of a conversion, passed or not.

    Raises:
        AdapterError, InvalidDocument: one of the two directories cannot be read at all; the message names it.
    """
    found, _ = _inspect(source, base, packing=packing, header_only=True)
    open_adapter(destination, label=str(destination))
    read_adapter_config(destination, label=str(destination))
    return check_conversion(found.files, destination, found.layout)


def adapter_digest(directory: Path) -> str:
    """The digest that an upload of this directory would have."""
    own = (path for path in directory.iterdir() if is_adapter_file(path.name))
    return directory_digest(sha256_file(path) for path in own)


def _inspect(
    directory: Path, base: BaseConfig, *, packing: str | None, header_only: bool
) -> tuple[Inspection, dict[str, Any]]:
    """An inspection, and its record with the warnings of everything that was read."""
    path = directory / TRAINING_FILE
    training, ignored = parse_training(str(path), path.read_bytes()) if path.is_file() else (None, ())
    found = inspect_adapter(
        directory,
        base,
        label=directory.resolve().name,
        forced=None if packing is None else Packing(packing),
        training=training_statement(training),
        header_only=header_only,
    )
    record = inspection_record(found)
    record["warnings"] += ignored
    return found, record
