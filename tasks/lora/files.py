"""An adapter's folder: what lies in it, and where each tensor stands. Reads headers, never tensor data."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from tasks.lora.errors import (
    CorruptFile,
    EscapingPath,
    MissingConfig,
    MissingWeights,
    PickleRefused,
    UnsupportedSourceFormat,
)
from tasks.lora.header import LENGTH_BYTES, MAX_HEADER_BYTES, TensorEntry, parse_header

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
MAX_CONFIG_BYTES = 16_000_000

# Names that belong beside an adapter: PEFT's model card, and what an upload says of itself.
_COMPANIONS = ("README.md", "training.json", "_READY.json")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A folder whose weight file's header was read and found to describe the file exactly.

    tensors: in file order. stray: names that do not belong in such a folder; they are ignored.
    """

    label: str
    directory: Path
    weights: Path
    weights_bytes: int
    tensors: tuple[TensorEntry, ...]
    stray: tuple[str, ...]


def open_adapter(directory: Path, *, label: str) -> AdapterFiles:
    """Return the folder's tensors and stray files.

    Raises MissingWeights, PickleRefused where pickles are all there is, UnsupportedSourceFormat for shards,
    EscapingPath, CorruptFile, UnsupportedDtype or EmptyAdapter.
    """
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    shards = [name for name in names if name == INDEX_NAME or name.startswith("adapter_model-")]
    if shards:
        raise UnsupportedSourceFormat(label, shards[0], f"one {WEIGHTS_NAME}", "weights in several files")
    if WEIGHTS_NAME not in names:
        pickles = [name for name in names if name.startswith("adapter_model.") and name.endswith(_PICKLES)]
        if pickles:
            raise PickleRefused(label, pickles[0], WEIGHTS_NAME, "pickled weights only")
        raise MissingWeights(label, str(directory), WEIGHTS_NAME, ", ".join(names)[:200] or "no files")
    weights, size = resolve_file(directory, WEIGHTS_NAME, label=label)
    tensors = parse_header(
        _read_header(weights, size, label), file_bytes=size, adapter=label, where=WEIGHTS_NAME
    )
    stray = tuple(name for name in names if name not in (CONFIG_NAME, WEIGHTS_NAME, *_COMPANIONS))
    return AdapterFiles(label, directory, weights, size, tensors, stray)


def read_config_bytes(directory: Path, *, label: str) -> bytes:
    """Return the bytes of adapter_config.json.

    Raises MissingConfig, EscapingPath, or CorruptFile for one too large to be a config.
    """
    if not (directory / CONFIG_NAME).exists():
        raise MissingConfig(label, str(directory), CONFIG_NAME, "no such file")
    path, size = resolve_file(directory, CONFIG_NAME, label=label)
    if size > MAX_CONFIG_BYTES:
        raise CorruptFile(label, CONFIG_NAME, f"at most {MAX_CONFIG_BYTES} bytes", f"{size} bytes")
    return path.read_bytes()


def resolve_file(directory: Path, name: str, *, label: str) -> tuple[Path, int]:
    """Return a file's real path and its size in bytes.

    Raises EscapingPath for a link that leads out of the folder or nowhere, and for anything but a file.
    """
    expected = f"a regular file inside {directory}"
    try:
        path = (directory / name).resolve(strict=True)
    except OSError as error:
        raise EscapingPath(label, name, expected, f"a link that leads nowhere ({error.strerror})") from error
    if not path.is_relative_to(directory.resolve()):
        raise EscapingPath(label, name, expected, f"a link to {path}")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise EscapingPath(label, name, expected, "a folder or a device")
    return path, status.st_size


def _read_header(path: Path, size: int, label: str) -> bytes:
    with path.open("rb") as file:
        start = file.read(64)
        _refuse_other_formats(start, label)
        if len(start) < LENGTH_BYTES:
            raise CorruptFile(label, WEIGHTS_NAME, f"at least {LENGTH_BYTES} bytes", f"{len(start)} bytes")
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES:
            raise CorruptFile(
                label, WEIGHTS_NAME, f"a header of at most {MAX_HEADER_BYTES} bytes", f"a length of {length}"
            )
        if LENGTH_BYTES + length > size:
            raise CorruptFile(
                label, WEIGHTS_NAME, f"a header of {length} bytes, as its length says", f"{size} bytes in all"
            )
        file.seek(LENGTH_BYTES, os.SEEK_SET)
        return file.read(length)


def _refuse_other_formats(start: bytes, label: str) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise CorruptFile(
            label, WEIGHTS_NAME, "safetensors", "a Git LFS pointer", "Fetch the file itself: git lfs pull."
        )
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CorruptFile(
            label, WEIGHTS_NAME, "safetensors", "a web page", "A download failed; fetch the file again."
        )
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        raise PickleRefused(label, WEIGHTS_NAME, "safetensors", "pickled weights under another name")
