"""What a file, an adapter and a step are known by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_STEP_KEY_LENGTH = 16
# Large, so that a thread that hashes while another one imports or computes rarely waits for the interpreter.
_PIECE = 1 << 25


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file: its name without folders, its size, its sha256 in hexadecimal."""

    name: str
    bytes: int
    sha256: str


def sha256_file(path: Path, seen: Callable[[int], None] = lambda _: None) -> FileDigest:
    """Return a file's digest, read in pieces; `seen` is told the size of each piece.

    Raises OSError if it cannot be read.
    """
    digest = hashlib.sha256()
    piece = memoryview(bytearray(min(_PIECE, max(1, path.stat().st_size))))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            seen(count)
        return FileDigest(path.name, file.tell(), digest.hexdigest())


def directory_digest(files: Iterable[FileDigest]) -> str:
    r"""Return the sha256 over the lines `<sha256> <file name>\n`, sorted by name, 64 hex characters."""
    total = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        total.update(f"{file.sha256} {file.name}\n".encode())
    return total.hexdigest()


def is_adapter_file(name: str) -> bool:
    """Tell whether a file is the adapter's own, so that its bytes are part of the adapter's identity.

    Its own are adapter_config.json and every weight file: all safetensors with their index, and pickles
    called adapter_model*. Pickles are never opened, but an upload that has nothing else needs an identity
    under which it can be refused. Other pickles (optimizer.pt, training_args.bin) are the trainer's.
    """
    folded = name.casefold()
    if folded == "adapter_config.json" or folded.endswith((".safetensors", ".safetensors.index.json")):
        return True
    return folded.startswith("adapter_model") and folded.endswith((".bin", ".pt", ".pth", ".bin.index.json"))


def step_key(parts: Mapping[str, str]) -> str:
    """Return the first 16 hex characters of the sha256 over everything that can change a step's result."""
    canonical = json.dumps(dict(parts), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:_STEP_KEY_LENGTH]
