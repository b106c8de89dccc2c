"""A look at an adapter's values before conversion: are they finite, and has every part been trained?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tasks.lora.errors import ExpertsUntrained, NonFinite
from tasks.lora.families import TensorClass
from tasks.lora.files import AdapterFiles
from tasks.lora.header import TensorEntry
from tasks.lora.layouts import unstack_factor
from tasks.lora.names import Factor
from tasks.lora.reading import AdapterLayout, StackedPair
from tasks.lora.tensors import TensorReader, count_nonfinite, open_tensors, take_magnitudes


@dataclass(frozen=True, slots=True)
class Survey:
    """class_fractions: the share of pairs, in each class, whose delta can differ from zero.

    Under either orientation: a pair counts as trained if both its factors hold something but zeros.
    """

    class_fractions: tuple[tuple[TensorClass, float], ...]
    warnings: tuple[str, ...]


def survey_tensors(files: AdapterFiles, layout: AdapterLayout) -> Survey:
    """Read every tensor once and return what is trained.

    Raises NonFinite for the first tensor with NaN or infinite values, ExpertsUntrained where no routed
    expert was trained.
    """
    trained: dict[TensorClass, list[bool]] = {}
    projections: dict[str, list[bool]] = {}
    with open_tensors(files) as reader:
        for pair in layout.pairs:
            for projection, experts in _survey_pair(reader, layout, pair):
                projections.setdefault(projection, []).extend(experts)
        for first, second in zip(layout.modules[::2], layout.modules[1::2], strict=True):
            moved = [bool(_read_magnitudes(reader, layout, item.entry).any()) for item in (first, second)]
            trained.setdefault(first.key.kind, []).append(all(moved))
    routed = [expert for experts in projections.values() for expert in experts]
    if not any(routed):
        raise ExpertsUntrained(
            layout.label, files.weights.name, "routed experts that moved", f"all {len(routed)} deltas zero"
        )
    warnings = [
        f"no expert's {projection} was trained: all its deltas are zero"
        for projection, experts in projections.items()
        if not any(experts)
    ]
    shares = {TensorClass.ROUTED_EXPERTS: routed, **trained}
    return Survey(tuple((kind, sum(pairs) / len(pairs)) for kind, pairs in shares.items()), tuple(warnings))


def _survey_pair(
    reader: TensorReader, layout: AdapterLayout, pair: StackedPair
) -> Iterator[tuple[str, list[bool]]]:
    """Yield for each projection whether each expert's delta can differ from zero."""
    stored = {factor: pair.stored(layout.orientation.stored(factor)) for factor in Factor}
    values = {factor: _read_magnitudes(reader, layout, entry) for factor, entry in stored.items()}
    parameter = next(item for item in layout.family.parameters if item.name == pair.parameter)
    a_moved = _find_moved(values[Factor.A], Factor.A, layout, pair)
    axis = 0 if layout.orientation.stored(Factor.B) is Factor.B else 1
    shares = values[Factor.B].chunk(len(parameter.projections), dim=axis)
    for projection, share in zip(parameter.projections, shares, strict=True):
        yield projection, (a_moved & _find_moved(share, Factor.B, layout, pair)).tolist()


def _find_moved(
    magnitudes: torch.Tensor, factor: Factor, layout: AdapterLayout, pair: StackedPair
) -> torch.Tensor:
    """Return (experts,): whether an expert's part of the stacked magnitudes is anything but zeros."""
    stacked_axis = 0 if layout.orientation.stored(factor) is Factor.A else 1
    each = unstack_factor(
        magnitudes.amax(dim=1 - stacked_axis, keepdim=True),
        factor,
        experts=layout.base.experts,
        packing=layout.packing_of(pair.parameter),
        orientation=layout.orientation,
    )
    return each.flatten(1).amax(dim=1) != 0


def _read_magnitudes(reader: TensorReader, layout: AdapterLayout, entry: TensorEntry) -> torch.Tensor:
    tensor = reader.read_tensor(entry)
    magnitudes = take_magnitudes(tensor)
    count = count_nonfinite(magnitudes, tensor.dtype)
    if count:
        raise NonFinite(
            layout.label, entry.name, "finite values", f"{count} NaN or infinite of {tensor.numel()}"
        )
    return magnitudes
