"""The factors that an adapter means, read a second time: those of the source, and those that the engine takes.

The conversion moves numbers by views and plans (views.py, lines.py, blocks.py); nothing of that is used here. What is
written here follows the description of the encodings alone (docs/layouts.md), in the plainest arithmetic: reshape,
exchange of axes, slices. Letters: E experts, r rank. A is (E, r, in), B is (E, out, r), delta = scaling * B·A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from tasks.lora.family import TensorClass
from tasks.lora.header import TensorEntry
from tasks.lora.names import find_module
from tasks.lora.sources import AdapterLayout, ModuleTensor
from tasks.lora.tensors import TORCH_DTYPES, TensorReader, bits

# Tensors begin at multiples of it in memory.
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Lines:
    """One factor of one projection of all experts; an ordinary module has one expert.

    values: (E, r, in) of A, (E, out, r) of B, in the stored dtype, most often a view. names: the tensors that hold it,
    one for each expert, or one in all.
    """

    values: torch.Tensor
    names: tuple[str, ...]


def has_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors hold the same numbers in the same dtype and shape, NaN and infinity among them."""
    if first.dtype != second.dtype:
        return False
    return torch.equal(bits(first.contiguous()), bits(second.contiguous()))


@dataclass(frozen=True, slots=True)
class Part:
    """What is compared as one: a stacked parameter of a layer, or an ordinary module.

    projections: those it holds, in their order. in_size, out_size: of each. interleaved: their rows take turns.
    served: by projection the engine's names of the experts in their order; of a module those of all modules that get
    its factors. stacked: the engine's name where experts are stacked in one tensor, without its factor; pattern: what
    it holds against the config's patterns then. slots: by projection the engine's name without an expert's number, of
    all of them. module: A and B as they are stored, none for experts.
    """

    kind: TensorClass
    layer: int
    projections: tuple[str, ...]
    in_size: int
    out_size: int
    interleaved: bool
    served: Mapping[str, tuple[str, ...]]
    stacked: str = ""
    pattern: str = ""
    slots: Mapping[str, str] = field(default_factory=dict)
    module: tuple[ModuleTensor, ...] = ()


def list_parts(layout: AdapterLayout) -> Iterator[Part]:
    """Yield every stacked parameter of every sparse layer, then every module."""
    family, base = layout.family, layout.base
    for layer in base.sparse_layers:
        front = f"{base.served.decoder}{family.served_experts.format(layer=layer)}"
        for parameter in family.parameters:
            yield Part(
                kind=TensorClass.ROUTED_EXPERTS,
                layer=layer,
                projections=parameter.projections,
                in_size=base.size(parameter.in_size),
                out_size=base.size(parameter.out_size) // len(parameter.projections),
                interleaved=parameter.interleaved,
                served={
                    projection: tuple(f"{front}.{expert}.{name}" for expert in range(base.experts))
                    for projection, name in zip(parameter.projections, parameter.served, strict=True)
                },
                stacked=f"{front}.{parameter.wrapper}".removesuffix("."),
                # The engine calls the inner parameter gate_up_proj and the outer one down_proj, in every family.
                pattern=f"{front}.{'gate_up_proj' if parameter.wrapper else 'down_proj'}",
                slots={
                    projection: f"{front}.{name}"
                    for projection, name in zip(parameter.projections, parameter.served, strict=True)
                },
            )
    for a, b in zip(layout.modules[::2], layout.modules[1::2], strict=True):
        row = find_module(a.key, base)
        name = row.sources[0].rpartition("{layer}.")[2]
        served = tuple(
            f"{base.served.decoder}{path.format(layer=a.layer)}" for path in (row.served, *row.also_served)
        )
        yield Part(
            kind=a.key.kind,
            layer=a.layer,
            projections=(name,),
            in_size=a.entry.shape[1],
            out_size=b.entry.shape[0],
            interleaved=False,
            served={name: served},
            module=(a, b),
        )


class Room:
    """Memory for the tensors of one read after another; of one thread.

    What the system hands out anew for each read costs more than the reading itself.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def clear(self) -> None:
        """Let the memory be used again: what was taken so far is overwritten."""
        self._used = 0

    def take(self, count: int) -> torch.Tensor:
        """Return `count` bytes, which hold anything; they stay valid when the room grows."""
        if self._used + count > len(self._memory):
            self._memory = torch.empty(max(count, 2 * len(self._memory)), dtype=torch.uint8)
            self._used = 0
        taken = self._memory[self._used : self._used + count]
        self._used += -(-count // _ALIGNED) * _ALIGNED
        return taken


def rows_of(part: Part, place: int, count: int, size: int) -> slice:
    """Return which of the `size` rows of B are those of the projection at `place` of `count`."""
    share = size // count
    return slice(place, size, count) if part.interleaved else slice(place * share, (place + 1) * share)


def clear_room(room: Room | None) -> Room:
    """Return the room, or one that nobody else has."""
    room = Room() if room is None else room
    room.clear()
    return room


def read_run(reader: TensorReader, entries: Sequence[TensorEntry], room: Room) -> torch.Tensor:
    """Return tensors of one shape as one with a new first axis; at once where they lie side by side."""
    first, last = entries[0], entries[-1]
    if all((one.file, one.end) == (two.file, two.begin) for one, two in pairwise(entries)):
        shape = (len(entries), *first.shape)
        entry = TensorEntry(first.name, first.dtype, shape, first.begin, last.end, first.file)
        return read_entry(reader, entry, room)
    return torch.stack([read_entry(reader, entry, room) for entry in entries])


def read_entry(reader: TensorReader, entry: TensorEntry, room: Room) -> torch.Tensor:
    """Return a tensor in the room's memory. Raises CorruptFile if the file shrank."""
    memory = room.take(entry.end - entry.begin)
    reader.read_into(entry, memory.numpy().data)
    return memory.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
