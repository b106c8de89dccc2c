"""The plan of a conversion: where every number of the output comes from. Frozen, printable, no tensor data.

The output is in canonical order, whatever the order and the encoding of the source: wider dtypes first (so
that each tensor stays aligned), then layer, parameter, A before B, projection, expert. What the engine wants twice
stands side by side. Thus all encodings of one adapter become the same bytes, each source tensor is read once, and the
file is written front to back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tasks.lora.base import BaseConfig
from tasks.lora.blocks import (
    Piece,
    PlannedBlock,
    list_expert_blocks,
    list_module_blocks,
    list_stacked_blocks,
    pairs_of,
    stacked_rank,
    stand_in,
)
from tasks.lora.config import MAX_LORA_RANKS
from tasks.lora.errors import RankUnsupported, UnsupportedConfig
from tasks.lora.family import ExpertParameter
from tasks.lora.files import SLOTS_METADATA, SLOTS_NAME, WEIGHTS_NAME
from tasks.lora.header import ITEM_BYTES, PLAIN_METADATA, TensorSpec, format_header
from tasks.lora.names import (
    PREFIX,
    ExpertKey,
    Factor,
    find_module,
    format_key,
    format_parameter,
    format_served_key,
    format_served_module_keys,
    format_served_parameter,
)
from tasks.lora.packing import PackingDecision
from tasks.lora.slots import list_slots_blocks, list_slots_module_blocks
from tasks.lora.sources import AdapterLayout, SourceForm
from tasks.lora.target import TargetFormat, TargetModule

_LISTED = {
    TargetFormat.PER_EXPERT: list_expert_blocks,
    TargetFormat.STACKED: list_stacked_blocks,
    TargetFormat.SLOTS: list_slots_blocks,
}


class PlanKind(StrEnum):
    """The adapter itself, or one of the two controls made from it."""

    CONVERSION = "conversion"
    OTHER_PACKING = "other_packing"
    DISPLACED_EXPERTS = "displaced_experts"


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Everything a conversion writes, in the order of writing.

    As text: each block's tensors, and indented the sources that it is made of: for each, the shape that is taken, from
    which element on and by which strides, and where in the block it is placed, if it does not fill it front to back.
    rank: the largest. pairs: (A, B) pairs of single experts' projections, those of zeros included. dtype: those in use,
    such as "BF16" or "BF16,F32"; of slots the one that the base is served in. modules: what is served, with rank and
    scaling; the first expert stands for all.
    header: the weight file's first bytes, before the blocks. predicted_bytes: the size of the weight file.
    """

    adapter: str
    kind: PlanKind
    format: TargetFormat
    rank: int
    pairs: int
    dtype: str
    modules: tuple[TargetModule, ...]
    base_model: str | None
    blocks: tuple[PlannedBlock, ...]
    header: bytes = field(repr=False)
    predicted_bytes: int

    @property
    def tensors(self) -> list[TensorSpec]:
        """Every tensor, in the order of writing."""
        return [tensor for block in self.blocks for tensor in block.group.tensors]

    @property
    def weights_name(self) -> str:
        """The name of the weight file."""
        return SLOTS_NAME if self.format is TargetFormat.SLOTS else WEIGHTS_NAME

    def __str__(self) -> str:
        head = (
            f"{self.kind} of {self.adapter}, {self.format}: {len(self.tensors)} tensors, {self.pairs} expert pairs, "
            f"rank {self.rank}, {self.dtype}, {self.predicted_bytes} bytes"
        )
        return "\n".join([head, *map(_format_block, self.blocks)])


def plan_conversion(layout: AdapterLayout, format: TargetFormat = TargetFormat.PER_EXPERT) -> ConversionPlan:
    """Return the plan that turns the adapter into the target format.

    Factors of other modules stay as they are, but for slots, where all numbers become those that the engine holds.
    layout: with the packing of every stacked parameter decided. Whether the engine serves the format is not asked
    (`require_served`), for other tools may read the output. Raises for a stacked target UnsupportedDtype,
    UnsupportedConfig and RankUnsupported where gate and up of one expert cannot share a tensor; for slots
    InvalidBaseConfig where the base is served in no known dtype.
    """
    return _plan(layout, format, PlanKind.CONVERSION)


def require_served(base: BaseConfig, format: TargetFormat, label: str) -> None:
    """Return if the engine serves that format of a base. label: whom the error names.

    Raises UnsupportedConfig where no release of the base's class does, whatever the server's flags.
    """
    if not base.served.serves(format):
        raise UnsupportedConfig(
            label,
            "target format",
            f"a format that {base.served.architecture} serves right",
            f"{format}, which no known vLLM release does",
            "Convert to " + " or ".join(other for other in TargetFormat if base.served.serves(other)) + ".",
        )


def plan_control(layout: AdapterLayout, format: TargetFormat = TargetFormat.PER_EXPERT) -> ConversionPlan:
    """Return the plan of the control: the same source, read so that every expert gets wrong factors.

    With the other packing; where no pair has one, in another form or at rank 1, each expert gets the factor B of the
    one before it (A, where all experts share B). Raises like `plan_conversion`.
    """
    if layout.form is SourceForm.STACKED and any(pair.rank > 1 for pair in layout.pairs):
        other = replace(layout, packing=tuple(map(_reverse, layout.packing)))
        return _plan(other, format, PlanKind.OTHER_PACKING)
    return _plan(layout, format, PlanKind.DISPLACED_EXPERTS)


def _plan(layout: AdapterLayout, format: TargetFormat, kind: PlanKind) -> ConversionPlan:
    blocks = sorted(_list_blocks(layout, format, kind), key=lambda block: -ITEM_BYTES[block.group.dtype])
    modules = tuple(_list_modules(layout, format))
    metadata = SLOTS_METADATA if format is TargetFormat.SLOTS else PLAIN_METADATA
    header = format_header((block.group for block in blocks), metadata)
    return ConversionPlan(
        adapter=layout.label,
        kind=kind,
        format=format,
        rank=max(module.rank for module in modules),
        pairs=layout.expert_pairs,
        dtype=",".join(sorted({block.group.dtype for block in blocks})),
        modules=modules,
        base_model=layout.config.base_model_name_or_path,
        blocks=tuple(blocks),
        header=header,
        predicted_bytes=len(header) + sum(block.group.data_bytes for block in blocks),
    )


def _reverse(decision: PackingDecision) -> PackingDecision:
    return replace(
        decision,
        value=decision.value.other if decision.value is not None else None,
        by_layer=tuple((layer, packing.other) for layer, packing in decision.by_layer),
    )


def _list_blocks(layout: AdapterLayout, format: TargetFormat, kind: PlanKind) -> Iterator[PlannedBlock]:
    list_parameter = _LISTED[format]
    list_modules = list_slots_module_blocks if format is TargetFormat.SLOTS else list_module_blocks
    displaced = kind is PlanKind.DISPLACED_EXPERTS
    for layer in range(layout.base.layers):
        if layer in layout.base.sparse_layers:
            for parameter in layout.family.parameters:
                yield from list_parameter(layout, layer, parameter, displaced=displaced)
        yield from list_modules(layout, layer)


def _list_modules(layout: AdapterLayout, format: TargetFormat) -> Iterator[TargetModule]:
    for module in _list_trained(layout, format):
        # In slots, B holds the scaling already.
        yield replace(module, scaling=1.0) if format is TargetFormat.SLOTS else module


def _list_trained(layout: AdapterLayout, format: TargetFormat) -> Iterator[TargetModule]:
    for layer in layout.base.sparse_layers:
        for parameter in layout.family.parameters:
            if format is not TargetFormat.STACKED:
                yield from _list_expert_modules(layout, layer, parameter)
            else:
                yield _find_stacked_module(layout, layer, parameter)
    for module in layout.modules:
        if module.key.factor is Factor.A:
            rank, scaling = module.scale.rank, module.scale.scaling
            name, *others = map(_module_name, format_served_module_keys(module.key, layout.base))
            wrapped = find_module(module.key, layout.base).parameter
            if wrapped is not None:
                wrapped = f"{_module_name(format_key(module.key, layout.family))}.{wrapped}"
            yield TargetModule(name, rank, scaling, wrapped)
            yield from (TargetModule(other, rank, scaling) for other in others)


def _list_expert_modules(
    layout: AdapterLayout, layer: int, parameter: ExpertParameter
) -> Iterator[TargetModule]:
    pairs = {name: pair for pair in pairs_of(layout, layer, parameter) for name in pair.projections}
    stacked = format_parameter(layer, parameter.name, layout.family)
    for projection in parameter.projections:
        pair = pairs.get(projection, stand_in(layout, layer))
        # One expert stands for all of them: a projection of a layer has one rank and one scaling.
        name = _module_name(format_served_key(ExpertKey(layer, 0, projection, Factor.A), layout.base))
        yield TargetModule(name, layout.rank_of(pair), pair.scale.scaling, stacked)


def _find_stacked_module(layout: AdapterLayout, layer: int, parameter: ExpertParameter) -> TargetModule:
    pairs = pairs_of(layout, layer, parameter)
    rank = stacked_rank(layout, layer, parameter)
    name = format_served_parameter(layer, parameter.name, layout.base)
    trained = format_parameter(layer, parameter.name, layout.family)
    scalings = sorted({pair.scale.scaling for pair in pairs or [stand_in(layout, layer)]})
    if len(scalings) > 1:
        raise UnsupportedConfig(
            layout.label,
            name,
            f"one scaling for {' and '.join(parameter.projections)}, which are stacked in one tensor",
            " and ".join(f"{scaling:g}" for scaling in scalings),
            "Convert it to the per-expert format.",
        )
    if rank > MAX_LORA_RANKS[-1]:
        found = f"{rank}: {' and '.join(parameter.projections)} need components of their own"
        raise RankUnsupported(
            layout.label,
            name,
            f"a stacked rank of at most {MAX_LORA_RANKS[-1]}",
            found,
            "Convert it to the per-expert format.",
        )
    return TargetModule(name, rank, scalings[0], None if trained == name else trained)


def _module_name(key: str) -> str:
    return key.removeprefix(PREFIX).removesuffix(".lora_A.weight")


def _format_block(block: PlannedBlock) -> str:
    names = block.group.names
    head = f"{names[0]} {block.group.dtype} {block.group.shape}"
    if block.scaling != 1:
        head += f" times {block.scaling!r}"
    if len(names) > 1:
        head += f" and {len(names) - 1} more up to {names[-1]}"
    return "\n".join([head, *(map(_format_piece, block.pieces) if block.pieces else ["    zeros"])])


def _format_piece(piece: Piece) -> str:
    first = piece.sources[0].name
    more = f" and {len(piece.sources) - 1} more" if len(piece.sources) > 1 else ""
    place = piece.place
    to = f", placed from {place.offset} by {place.strides}" if place is not None else ""
    return f"    {first}{more}: {piece.view.shape} from {piece.view.offset} by {piece.view.strides}{to}"
