"""The factors that the trainer stored, as the layout says, in plain arithmetic (factors.py says why)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tasks.lora.factors import Lines, Part, Room, clear_room, read_entry, read_run, rows_of
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.names import Factor
from tasks.lora.served_rounding import ServedRounding
from tasks.lora.sources import AdapterLayout, ExpertPair, SourceForm
from tasks.lora.target import find_served_scaling
from tasks.lora.tensors import TensorReader


class SourceFactors:
    """The factors as the trainer stored them, as the layout says; with a rounding as the engine holds them."""

    def __init__(
        self, reader: TensorReader, layout: AdapterLayout, rounding: ServedRounding | None = None
    ) -> None:
        """Read with `reader`, which is the source's.

        rounding: what is done to every number; B holds its scaling then.
        """
        self._reader = reader
        self._layout = layout
        self._rounding = rounding

    def read(self, part: Part, factor: Factor, room: Room | None = None) -> dict[str, Lines]:
        """Return the factor of each of the part's projections that the source has.

        room: cleared and used, so that what was read into it before is lost. Raises CorruptFile if the file shrank.
        """
        room = clear_room(room)
        if part.module:
            module = part.module[0 if factor is Factor.A else 1]
            scaling = find_served_scaling(module.scale.scaling, module.scale.rank)
            values = self._round(read_entry(self._reader, module.entry, room), factor, scaling)
            return {part.projections[0]: Lines(values.unsqueeze(0), (module.entry.name,))}
        lines: dict[str, Lines] = {}
        for pair in self._layout.pairs:
            if pair.layer == part.layer and pair.projections[0] in part.projections:
                lines |= self._read_pair(pair, part, factor, room)
        return lines

    def scalings(self, part: Part) -> dict[str, float]:
        """Return the scaling that the trainer applied to each projection that the source has; 1 where B holds it."""
        if part.module:
            return {part.projections[0]: self._left(part.module[0].scale.scaling)}
        return {
            projection: self._left(pair.scale.scaling)
            for pair in self._layout.pairs
            if pair.layer == part.layer
            for projection in pair.projections
            if projection in part.projections
        }

    def _read_pair(
        self, pair: ExpertPair, part: Part, factor: Factor, room: Room
    ) -> Iterator[tuple[str, Lines]]:
        """Yield the factor of each projection of a pair.

        A swapped file holds the transpose of the delta as B·A, so that A of the delta is its stored B, transposed.
        """
        if self._layout.orientation is Orientation.SWAPPED:
            whole = self._read_stored(pair, Factor.B if factor is Factor.A else Factor.A, factor, room)
            whole = replace(whole, values=whole.values.transpose(1, 2))
        else:
            whole = self._read_stored(pair, factor, factor, room)
        count = len(pair.projections)
        for place, projection in enumerate(pair.projections):
            values = whole.values
            if self._layout.block_diagonal:  # each projection has components of its own
                own = pair.rank // count
                components = slice(place * own, (place + 1) * own)
                values = values[:, components] if factor is Factor.A else values[:, :, components]
            if factor is Factor.B and count > 1:
                values = values[:, rows_of(part, place, count, values.shape[1])]
            yield projection, replace(whole, values=values)

    def _left(self, scaling: float) -> float:
        return scaling if self._rounding is None else 1.0

    def _round(self, values: torch.Tensor, factor: Factor, scaling: float) -> torch.Tensor:
        """Return numbers of a factor of the delta, as they are or as the engine holds them."""
        if self._rounding is None:
            return values
        return self._rounding.round(values, scaling if factor is Factor.B else 1.0)

    def _read_stored(self, pair: ExpertPair, factor: Factor, meant: Factor, room: Room) -> Lines:
        """Return lora_A as (E, r, x) or lora_B as (E, y, r), as they are stored. meant: the factor of the delta."""
        experts, rank = self._layout.base.experts, pair.rank
        scaling = find_served_scaling(pair.scale.scaling, self._layout.rank_of(pair))
        entries = pair.a if factor is Factor.A else pair.b
        names = tuple(entry.name for entry in entries)
        if self._layout.form is SourceForm.PER_EXPERT:
            return Lines(self._round(read_run(self._reader, entries, room), meant, scaling), names)
        values = self._round(read_entry(self._reader, entries[0], room), meant, scaling)
        if self._layout.form is SourceForm.CUBE:
            # (E or 1, r, x) and (E or 1, y, r): of 1 all experts have the same.
            values = values.expand(experts, -1, -1)
        elif factor is Factor.A:
            values = values.view(experts, rank, -1)
        elif self._layout.packing_of(pair.parameter, pair.layer) is Packing.RANK_MAJOR:
            values = values.view(-1, rank, experts).permute(2, 0, 1)
        else:
            values = values.view(-1, experts, rank).permute(1, 0, 2)
        return Lines(values, names)
