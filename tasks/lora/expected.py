"""What a converted adapter must hold, told from the source's layout alone and not from the plan of its conversion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tasks.lora.family import ExpertParameter
from tasks.lora.header import TensorSpec
from tasks.lora.layouts import Orientation
from tasks.lora.names import (
    PREFIX,
    Factor,
    StackedKey,
    format_served_expert_keys,
    format_served_key,
    format_served_module_keys,
    format_served_parameter,
    format_served_slots_key,
)
from tasks.lora.slots import find_served_dtype
from tasks.lora.sources import AdapterLayout, ExpertPair
from tasks.lora.target import TargetFormat


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """Output tensors of one shape that together hold a factor of all experts: one for each, or one in all.

    rank: components of each expert in them. modules: the engine's names of what they belong to, one for each expert, or
    one in all; of factor A alone.
    """

    projections: tuple[str, ...]
    names: tuple[str, ...]
    modules: tuple[str, ...]
    rank: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedModule:
    """What an engine scales by itself. name: as the patterns of a config are held against it."""

    name: str
    rank: int
    scaling: float


def list_expected(layout: AdapterLayout, format: TargetFormat) -> Iterator[TensorSpec]:
    """Yield every tensor that the converted adapter must hold: the base's sizes, the source's dtypes.

    In the format slots all are of the dtype that the base is served in.
    """
    for layer in layout.base.sparse_layers:
        for parameter in layout.family.parameters:
            for factor in Factor:
                for group in list_groups(layout, format, layer, parameter, factor):
                    yield from (TensorSpec(name, group.dtype, group.shape) for name in group.names)
    yield from _list_expected_modules(layout, format)


def _list_expected_modules(layout: AdapterLayout, format: TargetFormat) -> Iterator[TensorSpec]:
    """Yield those of them that belong to no routed expert; a factor that the engine wants twice is there twice."""
    for module in layout.modules:
        dtype = find_served_dtype(layout.base) if format is TargetFormat.SLOTS else module.entry.dtype
        for name in format_served_module_keys(module.key, layout.base):
            yield TensorSpec(name, dtype, module.entry.shape)


def list_served(layout: AdapterLayout, format: TargetFormat) -> Iterator[ServedModule]:
    """Yield every module of the converted adapter with the rank and the scaling that it must have.

    In the format slots every scaling is 1, as B holds it already.
    """
    holds_scaling = format is TargetFormat.SLOTS
    for layer in layout.base.sparse_layers:
        for parameter in layout.family.parameters:
            for group in list_groups(layout, format, layer, parameter, Factor.A):
                pairs = list_owners(layout, layer, group.projections) or [_stand_in(layout, layer)]
                scaling = 1.0 if holds_scaling else pairs[0].scale.scaling
                yield from (ServedModule(name, group.rank, scaling) for name in group.modules)
    for module in layout.modules:
        if module.key.factor is Factor.A:
            for name in format_served_module_keys(module.key, layout.base):
                scaling = 1.0 if holds_scaling else module.scale.scaling
                yield ServedModule(_module_name(name), module.scale.rank, scaling)


def list_groups(
    layout: AdapterLayout, format: TargetFormat, layer: int, parameter: ExpertParameter, factor: Factor
) -> Iterator[ServedGroup]:
    """Yield the output's tensors of one factor of a parameter."""
    experts = layout.base.experts
    in_size, out_size = layout.base.size(parameter.in_size), layout.base.size(parameter.out_size)
    if format is TargetFormat.STACKED:
        pairs = list_owners(layout, layer, parameter.projections)
        rank = sum(pair.rank for pair in pairs) or _own_rank(layout, _stand_in(layout, layer))
        shape = (experts * rank, in_size) if factor is Factor.A else (out_size, experts * rank)
        name = format_served_key(StackedKey(layer, parameter.name, factor), layout.base)
        dtype = _dtype(layout, layer, pairs, factor)
        module = format_served_parameter(layer, parameter.name, layout.base)
        yield ServedGroup(parameter.projections, (name,), (module,), rank, dtype, shape)
        return
    for projection in parameter.projections:
        pairs = list_owners(layout, layer, (projection,))
        rank = _own_rank(layout, pairs[0]) if pairs else _own_rank(layout, _stand_in(layout, layer))
        share = out_size // len(parameter.projections)
        names = tuple(format_served_expert_keys(layer, projection, factor, layout.base))
        shape = (rank, in_size) if factor is Factor.A else (share, rank)
        # The engine scales each expert by itself, even where one tensor holds them all.
        modules = tuple(map(_module_name, names)) if factor is Factor.A else ()
        if format is TargetFormat.SLOTS:
            names = (format_served_slots_key(layer, projection, factor, layout.base),)
            dtype = find_served_dtype(layout.base)
            yield ServedGroup((projection,), names, modules, rank, dtype, (experts, *shape))
        else:
            dtype = _dtype(layout, layer, pairs, factor)
            yield ServedGroup((projection,), names, modules, rank, dtype, shape)


def list_owners(layout: AdapterLayout, layer: int, projections: tuple[str, ...]) -> list[ExpertPair]:
    """Return the source's pairs that hold any of these projections of a layer."""
    return [
        pair
        for pair in layout.pairs
        if pair.layer == layer and not {*pair.projections}.isdisjoint(projections)
    ]


def _own_rank(layout: AdapterLayout, pair: ExpertPair) -> int:
    return pair.rank // len(pair.projections) if layout.block_diagonal else pair.rank


def _stand_in(layout: AdapterLayout, layer: int) -> ExpertPair:
    """Return the pair whose rank, scaling and dtypes the zeros of its layer take on."""
    return next(pair for pair in layout.pairs if pair.layer == layer)


def _module_name(name: str) -> str:
    return name.removeprefix(PREFIX).removesuffix(".lora_A.weight")


def _dtype(layout: AdapterLayout, layer: int, pairs: list[ExpertPair], factor: Factor) -> str:
    pair = pairs[0] if pairs else _stand_in(layout, layer)
    swapped = layout.orientation is Orientation.SWAPPED
    return (pair.a if (factor is Factor.A) is not swapped else pair.b)[0].dtype
