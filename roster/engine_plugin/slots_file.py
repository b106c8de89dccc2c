"""A weight file of the format `slots`: what its header says, and its tensors as mapped pages (docs/slots.md).

Knows nothing of vLLM. A stacked tensor holds one factor of one projection of all experts, `(experts, rank, in)` for A
and `(experts, out, rank)` for B, under a single expert's name without the number; other factors have two axes.

Tensors are views of the mapped file: loading copies nothing, and a slot is filled from the page cache. So a file that
a server knows must never be written to in place, or cut: the one would change what the next fill of a slot reads, the
other ends the process (SIGBUS). Renaming another file over it, and removing it, are harmless, as the mapping keeps the
old one; nothing of ours does anything else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from roster.serving import TORCH_DTYPES
from roster.serving_engine import SLOTS_VERSION

SLOTS_FILE = "adapter_slots.safetensors"
WEIGHTS_FILE = "adapter_model.safetensors"
METADATA = {"format": "adapter-roster slots", "version": str(SLOTS_VERSION)}
STACKED_AXES = 3

_AGAIN = "Convert the adapter again with this release of adapter-roster."
_READ_BYTES = 4 << 20
_ALL = slice(None)


class SlotsRefused(ValueError):
    """An adapter of the format `slots` that is not loaded; `where` names the file, tensor or setting."""

    def __init__(self, adapter: str, where: str, expected: str, found: str, advice: str) -> None:
        super().__init__(adapter, where, expected, found, advice)
        self.adapter, self.where = adapter, where
        self.expected, self.found, self.advice = expected, found, advice

    def __str__(self) -> str:
        return (
            f"adapter-roster: {self.adapter} is not loaded: {self.where}: expected {self.expected}, "
            f"found {self.found}. {self.advice}"
        )


@dataclass(frozen=True, slots=True)
class SlotsFile:
    """An opened file whose header is sound. adapter: for messages. shapes: of every tensor, in the file's order.

    bytes: of the whole file. dtype: of all tensors, as torch calls it ("bfloat16"). mapped: safetensors' handle.
    """

    adapter: str
    path: Path
    bytes: int
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    mapped: Any

    def read_through(self) -> None:
        """Read the file once from end to end, so that its pages are in memory.

        A file that was not is read in order then, and a disk that fails, or a file that was cut meanwhile, ends in an
        error instead of the process.
        Raises SlotsRefused, OSError.
        """
        scratch, found = bytearray(_READ_BYTES), 0
        with self.path.open("rb", buffering=0) as file:
            while count := file.readinto(scratch):
                found += count
        if found != self.bytes:
            advice = "It changed while it was read: write elsewhere, and rename."
            raise SlotsRefused(self.adapter, str(self.path), f"{self.bytes} bytes", f"{found} bytes", advice)

    def map_tensor(self, name: str, experts: slice = _ALL) -> torch.Tensor:
        """A tensor as a view of the mapped file; of a stacked one the parts of some experts, where not all."""
        tensor: torch.Tensor = self.mapped.get_tensor(name)
        return tensor[experts]


def is_slots_folder(folder: str | Path) -> bool:
    """Whether an adapter's folder holds a weight file of this format."""
    return (Path(folder) / SLOTS_FILE).is_file()


def open_slots(folder: str | Path, adapter: str) -> SlotsFile:
    """The file of an adapter's folder, by its header.

    Raises SlotsRefused: a second weight file, no whole safetensors file, another format or version, mixed dtypes.
    """
    path = Path(folder) / SLOTS_FILE
    if (path.parent / WEIGHTS_FILE).exists():
        both = f"{SLOTS_FILE} and {WEIGHTS_FILE}"
        raise SlotsRefused(adapter, str(path.parent), "one file of weights", both, "Remove one of them.")
    try:
        size = path.stat().st_size
        mapped: Any = safe_open(path, "pt")
        metadata = dict(sorted((mapped.metadata() or {}).items()))
        parts = {name: mapped.get_slice(name) for name in mapped.offset_keys()}
        shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
        dtypes = sorted({part.get_dtype() for part in parts.values()})
    except SafetensorError as error:
        advice = "Fetch or convert the adapter again."
        raise SlotsRefused(adapter, str(path), "a whole safetensors file", str(error), advice) from error
    if metadata != METADATA:
        raise SlotsRefused(adapter, f"{SLOTS_FILE}: __metadata__", str(METADATA), str(metadata), _AGAIN)
    if len(dtypes) != 1 or dtypes[0] not in TORCH_DTYPES:
        expected = f"one dtype, of {', '.join(TORCH_DTYPES)}"
        raise SlotsRefused(adapter, SLOTS_FILE, expected, ", ".join(dtypes) or "no tensor", _AGAIN)
    return SlotsFile(adapter, path, size, shapes, TORCH_DTYPES[dtypes[0]], mapped)


def number_expert(name: str, expert: int) -> str:
    """What a stacked tensor's part for one expert is called in the per-expert format."""
    stem, factor, weight = name.rpartition(".lora_")
    module, _, projection = stem.rpartition(".")
    return f"{module}.{expert}.{projection}{factor}{weight}"


def split_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors as the per-expert format has them, as views."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == STACKED_AXES:
            split |= {number_expert(name, expert): part for expert, part in enumerate(tensor)}
        else:
            split[name] = tensor
    return split
