"""An adapter's folder: what lies in it, and where each tensor stands. Reads headers, never tensor data."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from tasks.lora.errors import (
    AdapterError,
    AmbiguousWeights,
    CorruptFile,
    EmptyAdapter,
    EscapingPath,
    MissingConfig,
    MissingWeights,
    MisspeltFile,
    PickleRefused,
    UnreadableName,
)
from tasks.lora.header import LENGTH_BYTES, MAX_HEADER_BYTES, TensorEntry, parse_header
from tasks.lora.strict_json import parse_strict_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
SLOTS_NAME = "adapter_slots.safetensors"
SLOTS_METADATA = {"format": "adapter-roster slots", "version": "1"}
"""The weight file of an output in the format slots, and what its header says of it (docs/slots.md)."""
MAX_CONFIG_BYTES = 16_000_000

# Names that belong beside an adapter: PEFT's model card, and what an upload says of itself.
_COMPANIONS = ("README.md", "training.json", "_READY.json")
# Names that are read as they are spelt.
_SPELT = (CONFIG_NAME, "training.json")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_ENDING = ".safetensors"
_FOLDER = "its folder"
"""Where a file is missing: the ledger keeps these messages, and a worker's own paths have no business there."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file of an adapter. name: in its folder. path: where it really lies."""

    name: str
    path: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A folder whose weight files' headers were read and found to describe the files exactly.

    weights: one file, or the index's files by name. tensors: file by file, each in the order of its bytes.
    stray: names that do not belong in such a folder; they are ignored.
    """

    label: str
    directory: Path
    weights: tuple[WeightFile, ...]
    tensors: tuple[TensorEntry, ...]
    stray: tuple[str, ...]

    @property
    def weights_name(self) -> str:
        """The one name that stands for all weights in a message."""
        return self.weights[0].name if len(self.weights) == 1 else INDEX_NAME

    @property
    def is_slots(self) -> bool:
        """Whether this is an output in the format slots."""
        return self.weights_name == SLOTS_NAME


class _Index(BaseModel):
    """What says in which file each tensor lies. Source: transformers' and accelerate's sharded saves."""

    weight_map: dict[str, str]


def open_adapter(directory: Path, *, label: str) -> AdapterFiles:
    """Return the folder's tensors and stray files.

    The weights are one adapter_model.safetensors, or an index and the files that it names; every tensor must
    lie exactly where the index says. Or they are one adapter_slots.safetensors, as we write it. Raises MissingWeights,
    AmbiguousWeights, PickleRefused where pickles are all there is, EscapingPath, MisspeltFile, UnreadableName,
    CorruptFile, UnsupportedDtype or EmptyAdapter.
    """
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    _check_entries(directory, names, label)
    places = _read_index(directory, label) if INDEX_NAME in names else None
    chosen = sorted(set(places.values())) if places else [_choose_file(names)]
    _check_chosen(directory, names, chosen, label)
    weights: list[WeightFile] = []
    tensors: list[TensorEntry] = []
    for number, name in enumerate(chosen):
        path, size = resolve_file(directory, name, label=label)
        header = _read_header(path, name, size, label)
        weights.append(WeightFile(name, path, size))
        said = SLOTS_METADATA if name == SLOTS_NAME else None
        tensors += parse_header(
            header, file_bytes=size, adapter=label, where=name, file=number, metadata=said
        )
    if places:
        _check_places(places, weights, tensors, label)
    known = {CONFIG_NAME, INDEX_NAME, *chosen, *_COMPANIONS}
    stray = tuple(name for name in names if name not in known)
    return AdapterFiles(label, directory, tuple(weights), tuple(tensors), stray)


def read_config_bytes(directory: Path, *, label: str) -> bytes:
    """Return the bytes of adapter_config.json.

    Raises MissingConfig, EscapingPath, or CorruptFile for one too large to be a config.
    """
    data = read_document_bytes(directory, CONFIG_NAME, label=label)
    if data is None:
        raise MissingConfig(label, _FOLDER, CONFIG_NAME, "no such file")
    return data


def read_document_bytes(directory: Path, name: str, *, label: str) -> bytes | None:
    """Return the bytes of a small file, None where there is no such file.

    Raises EscapingPath, or CorruptFile for one too large to be a document.
    """
    if not (directory / name).is_symlink() and not (directory / name).exists():
        return None
    path, size = resolve_file(directory, name, label=label)
    if size > MAX_CONFIG_BYTES:
        raise CorruptFile(label, name, f"at most {MAX_CONFIG_BYTES} bytes", f"{size} bytes")
    return path.read_bytes()


def resolve_file(directory: Path, name: str, *, label: str) -> tuple[Path, int]:
    """Return a file's real path and its size in bytes.

    Raises EscapingPath for a link that leads out of the folder or nowhere, and for anything but a file.
    """
    expected = f"a regular file inside {_FOLDER}"
    try:
        path = (directory / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # pathlib of Python 3.11 and 3.12 raises RuntimeError for a loop
        reason = error.strerror if isinstance(error, OSError) else "it leads to itself"
        raise EscapingPath(label, name, expected, f"a link that leads nowhere ({reason})") from error
    if not path.is_relative_to(directory.resolve()):
        raise EscapingPath(label, name, expected, f"a link to {path}")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise EscapingPath(label, name, expected, "a folder or a device")
    return path, status.st_size


def _check_entries(directory: Path, names: Sequence[str], label: str) -> None:
    """Refuse what no upload can hold: names that are no text, links that lead elsewhere, pipes and devices.

    And a config or statement in other letters, which would be passed over without a word.

    Folders are ignored, and so are files whose names begin with a dot, which are never uploaded.
    """
    for name in names:
        if not _is_text(name):
            raise UnreadableName(label, ascii(name)[:200], "file names in UTF-8", "bytes that are not")
        for known in _SPELT:
            if name != known and name.casefold() == known:
                raise MisspeltFile(label, name, f"{known}, in small letters", "a name in other letters")
        if not name.startswith(".") and not _is_folder(directory / name):
            resolve_file(directory, name, label=label)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # Python has half surrogates for bytes that are no UTF-8
        return False
    return True


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return False


def _read_index(directory: Path, label: str) -> Mapping[str, str]:
    """Return the name of its file for each tensor of the index."""
    path, size = resolve_file(directory, INDEX_NAME, label=label)
    if size > MAX_HEADER_BYTES:
        raise CorruptFile(label, INDEX_NAME, f"at most {MAX_HEADER_BYTES} bytes", f"{size} bytes")
    try:
        places = _Index.model_validate(parse_strict_json(path.read_bytes())).weight_map
    except ValidationError as error:
        found = error.errors(include_url=False)[0]["msg"]
        raise CorruptFile(label, INDEX_NAME, "weight_map: {tensor: file}", found) from error
    except ValueError as error:
        raise CorruptFile(label, INDEX_NAME, "strict JSON", str(error)) from error
    if not places:
        raise EmptyAdapter(label, INDEX_NAME, "at least one tensor", "none")
    for name in sorted(set(places.values())):
        if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
            raise EscapingPath(label, INDEX_NAME, "names of files beside the index", repr(name)[:200])
        if name.endswith(_PICKLES):
            raise PickleRefused(
                label, f"{INDEX_NAME}: {name}", "names of safetensors files", "pickled weights"
            )
        if not name.endswith(_ENDING):
            raise CorruptFile(label, INDEX_NAME, f"names of {_ENDING} files", repr(name)[:200])
    return places


def _choose_file(names: Sequence[str]) -> str:
    """Return the one weight file of a folder without an index."""
    saved = any(name.lower().startswith("adapter_model") for name in names)
    return SLOTS_NAME if SLOTS_NAME in names and not saved else WEIGHTS_NAME


def _check_chosen(directory: Path, names: Sequence[str], chosen: Sequence[str], label: str) -> None:
    """Refuse a folder that lacks a file of the weights, or holds weights of another save beside them."""
    saves = [
        name
        for name in names
        if (name.lower().startswith("adapter_model") and name.lower().endswith(_ENDING)) or name == SLOTS_NAME
    ]
    parts = [name for name in saves if name.startswith("adapter_model-")]
    others = [name for name in saves if name not in chosen]
    missing = [name for name in chosen if name not in names]
    if chosen == [WEIGHTS_NAME] and missing:
        raise _explain_missing(directory, names, parts, label)
    if missing:
        raise MissingWeights(
            label,
            missing[0],
            f"every file that {INDEX_NAME} names",
            "no such file",
            "Upload all files of the save.",
        )
    if others:
        raise AmbiguousWeights(label, others[0], f"no weights but {', '.join(chosen)[:200]}", "more weights")


def _explain_missing(directory: Path, names: Sequence[str], parts: Sequence[str], label: str) -> AdapterError:
    if parts:
        return MissingWeights(
            label, _FOLDER, INDEX_NAME, f"{parts[0]} without it", "Upload the index of the files too."
        )
    pickles = [name for name in names if name.startswith("adapter_model") and name.endswith(_PICKLES)]
    if pickles:
        return PickleRefused(label, pickles[0], WEIGHTS_NAME, "pickled weights only")
    return MissingWeights(label, _FOLDER, WEIGHTS_NAME, ", ".join(names)[:200] or "no files")


def _check_places(
    places: Mapping[str, str], weights: Sequence[WeightFile], tensors: Sequence[TensorEntry], label: str
) -> None:
    """Refuse a tensor that lies elsewhere than the index says, and one that does not lie there."""
    for entry in tensors:
        file = weights[entry.file].name
        if places.get(entry.name) != file:
            listed = f"it in {places[entry.name]}" if entry.name in places else "no such tensor"
            raise CorruptFile(
                label, f"{file}: {entry.name[:200]}", f"{listed}, as {INDEX_NAME} says", "it in this file"
            )
    unseen = places.keys() - {entry.name for entry in tensors}
    if unseen:
        name = min(unseen)
        raise CorruptFile(
            label, f"{places[name]}: {name[:200]}", f"the tensor, as {INDEX_NAME} says", "no such tensor"
        )


def _read_header(path: Path, name: str, size: int, label: str) -> bytes:
    with path.open("rb") as file:
        start = file.read(64)
        _refuse_other_formats(start, name, label)
        if len(start) < LENGTH_BYTES:
            raise CorruptFile(label, name, f"at least {LENGTH_BYTES} bytes", f"{len(start)} bytes")
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES:
            raise CorruptFile(
                label, name, f"a header of at most {MAX_HEADER_BYTES} bytes", f"a length of {length}"
            )
        if LENGTH_BYTES + length > size:
            raise CorruptFile(
                label, name, f"a header of {length} bytes, as its length says", f"{size} bytes in all"
            )
        file.seek(LENGTH_BYTES, os.SEEK_SET)
        return file.read(length)


def _refuse_other_formats(start: bytes, name: str, label: str) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise CorruptFile(
            label, name, "safetensors", "a Git LFS pointer", "Fetch the file itself: git lfs pull."
        )
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CorruptFile(
            label, name, "safetensors", "a web page", "A download failed; fetch the file again."
        )
    # A header of 640 bytes begins like a pickle too; what follows its length tells the two apart.
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")) and start[LENGTH_BYTES:][:1] != b"{":
        raise PickleRefused(label, name, "safetensors", "pickled weights under another name")
