"""The blocks of an output's weight file: what each is made of, in canonical order; slots.py has those of slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tasks.lora.errors import UnsupportedDtype
from tasks.lora.family import ExpertParameter
from tasks.lora.header import ITEM_BYTES, TensorEntry, TensorGroup
from tasks.lora.lines import Lines, find_lines, find_projection_lines
from tasks.lora.names import (
    Factor,
    StackedKey,
    format_served_expert_keys,
    format_served_key,
    format_served_module_keys,
)
from tasks.lora.sources import AdapterLayout, ExpertPair
from tasks.lora.views import View, whole


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers that move from a source to a block, in the order of the view.

    sources: tensors of one shape and dtype, taken as if they lay one after another; `view` is over them all. place:
    where the numbers stand in the block; None fills it front to back.
    """

    sources: tuple[TensorEntry, ...]
    view: View
    place: View | None = None


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """Consecutive tensors of the output, whose bytes are the block. What no piece fills is zero.

    The pieces' numbers are moved bit for bit, or, where their dtype is not the group's, turned into that; then they
    are multiplied by `scaling` in it.
    """

    group: TensorGroup
    pieces: tuple[Piece, ...]
    scaling: float = 1.0

    @property
    def stored_dtype(self) -> str:
        """The dtype of the sources; the group's own where there are none."""
        return self.pieces[0].sources[0].dtype if self.pieces else self.group.dtype

    @property
    def stored_bytes(self) -> int:
        """Bytes of all elements in the dtype of the sources."""
        return self.group.data_bytes // ITEM_BYTES[self.group.dtype] * ITEM_BYTES[self.stored_dtype]

    @property
    def is_rounded(self) -> bool:
        """Whether its numbers are other than those of the sources."""
        return self.stored_dtype != self.group.dtype or self.scaling != 1


def list_expert_blocks(
    layout: AdapterLayout, layer: int, parameter: ExpertParameter, *, displaced: bool
) -> Iterator[PlannedBlock]:
    """Yield for each factor and projection of a parameter one block of all experts' tensors.

    displaced: each expert gets the factor B of the one before it.
    """
    pairs = {name: pair for pair in pairs_of(layout, layer, parameter) for name in pair.projections}
    for factor in Factor:
        for projection in parameter.projections:
            pair = pairs.get(projection)
            like = pair or stand_in(layout, layer)
            rank, size = layout.rank_of(like), _size(layout, parameter, factor)
            dtype = _dtype(layout, like, factor)
            shape = (rank, size) if factor is Factor.A else (size, rank)
            names = format_served_expert_keys(layer, projection, factor, layout.base)
            group = TensorGroup(tuple(names), dtype, shape)
            if pair is None:
                yield PlannedBlock(group, ())
                continue
            lines = find_projection_lines(layout, pair, projection, factor)
            view = lines.view if factor is Factor.A else lines.view.permute(0, 2, 1)
            moved = displaced and factor is _movable(layout, pair)
            yield PlannedBlock(group, _fill(lines, view, whole(*view.shape), axis=0 if moved else None))


def list_stacked_blocks(
    layout: AdapterLayout, layer: int, parameter: ExpertParameter, *, displaced: bool
) -> Iterator[PlannedBlock]:
    """Yield the two stacked tensors of a parameter, rank-major and standard, one block each.

    Projections with an A of their own get components of their own, as PEFT stacks them. displaced: as in
    `list_expert_blocks`. Raises UnsupportedDtype where such projections' dtypes differ.
    """
    pairs = pairs_of(layout, layer, parameter)
    experts = layout.base.experts
    for factor in Factor:
        dtypes = sorted({_dtype(layout, pair, factor) for pair in pairs or [stand_in(layout, layer)]})
        name = format_served_key(StackedKey(layer, parameter.name, factor), layout.base)
        if len(dtypes) > 1:
            raise UnsupportedDtype(
                layout.label,
                name,
                f"one dtype for {' and '.join(parameter.projections)}, which are stacked in one tensor",
                " and ".join(dtypes),
                "Convert it to the per-expert format, or save the adapter in one dtype.",
            )
        rank = stacked_rank(layout, layer, parameter)
        if factor is Factor.A:
            size = layout.base.size(parameter.in_size)
            shape, block = (experts * rank, size), whole(experts, rank, size)
        else:
            size = layout.base.size(parameter.out_size)
            shape, block = (size, experts * rank), whole(size, rank, experts)
        pieces: list[Piece] = []
        first = 0
        for pair in pairs:
            lines = find_lines(layout, pair, factor)
            place = block.narrow(1, first, first + pair.rank)
            first += pair.rank
            view, axis = lines.view, 0
            if factor is Factor.B:
                if pair.projections != parameter.projections:
                    count, own = len(parameter.projections), parameter.projections.index(pair.projections[0])
                    place = place.share(0, own, count, interleaved=parameter.interleaved)
                view, axis = view.permute(2, 1, 0), 2
            moved = displaced and factor is _movable(layout, pair)
            pieces += _fill(lines, view, place, axis=axis if moved else None)
        yield PlannedBlock(TensorGroup((name,), dtypes[0], shape), tuple(pieces))


def list_module_blocks(layout: AdapterLayout, layer: int) -> Iterator[PlannedBlock]:
    """Yield the other factors of a layer as they are, each under every name that the engine gives it."""
    for module in layout.modules:
        if module.layer == layer:
            entry = module.entry
            for name in format_served_module_keys(module.key, layout.base):
                group = TensorGroup((name,), entry.dtype, entry.shape)
                yield PlannedBlock(group, (Piece((entry,), whole(*entry.shape)),))


def pairs_of(layout: AdapterLayout, layer: int, parameter: ExpertParameter) -> list[ExpertPair]:
    """Return the pairs that a layer has of a parameter: one, one for each projection, or none."""
    return [
        pair for pair in layout.pairs if pair.layer == layer and pair.projections[0] in parameter.projections
    ]


def stand_in(layout: AdapterLayout, layer: int) -> ExpertPair:
    """Return the pair whose rank, scaling and dtypes a layer's absent projections take on."""
    return next(pair for pair in layout.pairs if pair.layer == layer)


def stacked_rank(layout: AdapterLayout, layer: int, parameter: ExpertParameter) -> int:
    """Return how many components the stacked target holds for each expert of a parameter."""
    own = sum(pair.rank for pair in pairs_of(layout, layer, parameter))
    return own or layout.rank_of(stand_in(layout, layer))


def _fill(lines: Lines, view: View, place: View, *, axis: int | None) -> tuple[Piece, ...]:
    """Return what moves `view` to `place`; along the axis of the experts, if given, each one place on."""
    if axis is not None:
        last = view.shape[axis] - 1
        return (
            Piece(lines.sources, view.narrow(axis, 0, last), place.narrow(axis, 1, last + 1)),
            Piece(lines.sources, view.narrow(axis, last, last + 1), place.narrow(axis, 0, 1)),
        )
    return (Piece(lines.sources, view, None if place == whole(*view.shape) else place),)


def _movable(layout: AdapterLayout, pair: ExpertPair) -> Factor:
    """Return the factor whose move from expert to expert changes them: B, but where all experts share it."""
    return Factor.B if find_lines(layout, pair, Factor.B).view.strides[0] else Factor.A


def _dtype(layout: AdapterLayout, pair: ExpertPair, factor: Factor) -> str:
    return pair.stored(layout.orientation.stored(factor))[0].dtype


def _size(layout: AdapterLayout, parameter: ExpertParameter, factor: Factor) -> int:
    """Return the length of one projection's lines."""
    if factor is Factor.A:
        return layout.base.size(parameter.in_size)
    return layout.base.size(parameter.out_size) // len(parameter.projections)
