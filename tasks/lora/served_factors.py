"""The factors that the engine takes from a converted file, in plain arithmetic (factors.py says why)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tasks.lora.config import AdapterConfig
from tasks.lora.factors import Lines, Part, Room, clear_room, read_entry, read_run, rows_of
from tasks.lora.files import AdapterFiles
from tasks.lora.names import PREFIX, Factor
from tasks.lora.served_scaling import ServedScaling
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat
from tasks.lora.tensors import TensorReader


class ServedFactors:
    """The factors as the engine takes them from a converted file, with the scalings that its config gives them.

    Source: vLLM 0.32 lora/lora_model.py, lora/model_manager.py (_create_merged_loras_inplace) and
    lora/layers/fused_moe.py: a stacked file is rank_major and standard, gate and up lie in it as in the base. A file of
    the format slots has what the engine stacks of single experts (docs/slots.md).
    """

    def __init__(
        self,
        reader: TensorReader,
        files: AdapterFiles,
        config: AdapterConfig,
        layout: AdapterLayout,
        format: TargetFormat,
    ) -> None:
        """Read with `reader`, which is that of `files`. layout: of the source; only its base is looked at."""
        self._reader = reader
        self._entries = {entry.name: entry for entry in files.tensors}
        self._scaling = ServedScaling(config)
        self._experts = layout.base.experts
        self._stacked = format is TargetFormat.STACKED
        self._slots = format is TargetFormat.SLOTS

    def has(self, part: Part) -> bool:
        """Return whether every tensor of the part is there, in shapes that fit the base and one another."""
        if self._stacked and not part.module:
            a, b = (self._find(_name([part.stacked], factor)) for factor in Factor)
            total = a[0] if a else 0
            fits = total > 0 and total % self._experts == 0
            return fits and (a, b) == ((total, part.in_size), (part.out_size * len(part.projections), total))
        if self._slots and not part.module:
            for name in part.slots.values():
                a, b = (self._find(_name([name], factor)) for factor in Factor)
                rank, experts = (a[1] if len(a) > 1 else 0), self._experts
                if (a, b) != ((experts, rank, part.in_size), (experts, part.out_size, rank)):
                    return False
            return True
        for modules in part.served.values():
            a, b = (self._find(_name(modules, factor)) for factor in Factor)
            rank = a[0] if a else 0
            if (a, b) != ((rank, part.in_size), (part.out_size, rank)):
                return False
        return True

    def read(self, part: Part, factor: Factor, room: Room | None = None) -> dict[str, list[Lines]]:
        """Return the factor of each of the part's projections: of experts once, of a module under each of its names.

        The part must be there (`has`). room: as for the source. Raises CorruptFile if the file shrank.
        """
        room = clear_room(room)
        if part.module:
            names = _name(part.served[part.projections[0]], factor)
            tensors = [read_entry(self._reader, self._entries[name], room) for name in names]
            lines = [Lines(tensor.unsqueeze(0), (name,)) for name, tensor in zip(names, tensors, strict=True)]
            return {part.projections[0]: lines}
        if self._stacked:
            return {projection: [lines] for projection, lines in self._read_stacked(part, factor, room)}
        if self._slots:
            return {
                projection: [self._read_slots(name, factor, room)] for projection, name in part.slots.items()
            }
        read: dict[str, list[Lines]] = {}
        for projection, modules in part.served.items():
            each = _name(modules, factor)
            entries = [self._entries[name] for name in each]
            read[projection] = [Lines(read_run(self._reader, entries, room), each)]
        return read

    def scalings(self, part: Part) -> dict[str, list[torch.Tensor]]:
        """Return what the engine multiplies each projection by, (E,) in float64, in the order of `read`."""
        if part.module:
            names = part.served[part.projections[0]]
            return {part.projections[0]: [self._scale([name]) for name in names]}
        if self._stacked:
            scaling = self._scale([part.pattern]).expand(self._experts)
            return {projection: [scaling] for projection in part.projections}
        return {projection: [self._scale(names)] for projection, names in part.served.items()}

    def _scale(self, modules: Sequence[str]) -> torch.Tensor:
        return torch.tensor([self._scaling.of(name)[1] for name in modules], dtype=torch.float64)

    def _read_slots(self, module: str, factor: Factor, room: Room) -> Lines:
        [name] = _name([module], factor)
        return Lines(read_entry(self._reader, self._entries[name], room), (name,))

    def _read_stacked(self, part: Part, factor: Factor, room: Room) -> Iterator[tuple[str, Lines]]:
        [name] = _name([part.stacked], factor)
        values = read_entry(self._reader, self._entries[name], room)
        experts, count = self._experts, len(part.projections)
        if factor is Factor.A:
            values = values.view(experts, -1, values.shape[1])
        else:
            values = values.view(values.shape[0], -1, experts).permute(2, 0, 1)
        for place, projection in enumerate(part.projections):
            own = values
            if factor is Factor.B:
                own = values[:, rows_of(part, place, count, values.shape[1])]
            yield projection, Lines(own, (name,))

    def _find(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the one shape of these tensors; () where one is missing or not of the others' shape and dtype."""
        entries = [self._entries.get(name) for name in names]
        found = {(entry.dtype, entry.shape) if entry is not None else ("", ()) for entry in entries}
        return found.pop()[1] if len(found) == 1 else ()


def _name(modules: Sequence[str], factor: Factor) -> tuple[str, ...]:
    """Return the names of the tensors that hold a factor of these modules; there are tens of thousands of them."""
    ending = f".lora_{factor}.weight"
    return tuple([PREFIX + module + ending for module in modules])
