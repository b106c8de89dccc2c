"""The converted factors held against the source, number by number.

Everything is compared as *lines*: line (e, j) of a factor is what component j of expert e contributes, a
vector over the inputs (A) or the outputs (B). Where a line stands in the source is computed here in plain
arithmetic, not with the conversion's own reshaping.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tasks.lora.families import ExpertParameter, TensorClass
from tasks.lora.files import AdapterFiles
from tasks.lora.header import TensorEntry, TensorSpec
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.names import ExpertKey, Factor, format_key
from tasks.lora.reading import AdapterLayout, ModuleTensor, StackedPair
from tasks.lora.tensors import (
    TORCH_DTYPES,
    TensorReader,
    bits,
    count_nonfinite,
    open_tensors,
    take_magnitudes,
)


@dataclass(slots=True)
class Findings:
    """What the comparison met, filled as it goes.

    compared: source tensors. differing: those not found again bit for bit. unshared: parameters whose
    projections do not share A. nonfinite: (tensor, count). trained: class to one truth value a pair.
    """

    compared: int = 0
    differing: list[str] = field(default_factory=list)
    unshared: list[str] = field(default_factory=list)
    nonfinite: list[tuple[str, int]] = field(default_factory=list)
    trained: dict[TensorClass, list[bool]] = field(default_factory=dict)


def list_expected(layout: AdapterLayout) -> Iterator[TensorSpec]:
    """Yield every tensor that the converted adapter must hold: the base's sizes, the source's dtypes."""
    for pair in layout.pairs:
        for factor in Factor:
            dtype = pair.stored(_holder(layout, factor)).dtype
            shape = _expert_shape(layout, pair, factor)
            for names in _list_names(layout, pair, factor):
                yield from (TensorSpec(name, dtype, shape) for name in names)
    for module in layout.modules:
        yield TensorSpec(module.entry.name, module.entry.dtype, module.entry.shape)


def compare_adapters(
    source: AdapterFiles, converted: AdapterFiles, layout: AdapterLayout, expected: list[TensorSpec]
) -> Findings:
    """Return what comparing all data of both files found; parts whose tensors are missing are left out.

    expected: what `list_expected` gives.
    """
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in expected}
    usable = {
        entry.name: entry
        for entry in converted.tensors
        if shapes.get(entry.name) == (entry.dtype, entry.shape)
    }
    findings = Findings()
    with open_tensors(source) as old, open_tensors(converted) as new:
        for pair in layout.pairs:
            _compare_pair(old, new, usable, layout, pair, findings)
        for first, second in zip(layout.modules[::2], layout.modules[1::2], strict=True):
            _compare_modules(old, new, usable, (first, second), findings)
    return findings


def _compare_pair(
    old: TensorReader,
    new: TensorReader,
    entries: dict[str, TensorEntry],
    layout: AdapterLayout,
    pair: StackedPair,
    findings: Findings,
) -> None:
    names = {factor: list(_list_names(layout, pair, factor)) for factor in Factor}
    if not all(name in entries for groups in names.values() for group in groups for name in group):
        return
    moved: dict[Factor, list[torch.Tensor]] = {}
    for factor in Factor:
        blocks = [_read_block(new, [entries[name] for name in group]) for group in names[factor]]
        lines = [
            bits(block if factor is Factor.A else block.transpose(1, 2)).flatten(0, 1) for block in blocks
        ]
        stored = _holder(layout, factor)
        expected = _read_lines(old, layout, pair, stored)
        findings.compared += 1
        if factor is Factor.A:
            same = torch.equal(lines[0], expected)
            if not all(torch.equal(lines[0], other) for other in lines[1:]):
                findings.unshared.append(f"layer {pair.layer} {pair.parameter}")
        else:
            shares = expected.chunk(len(lines), dim=1)
            same = all(map(torch.equal, lines, shares))
        if not same:
            findings.differing.append(pair.stored(stored).name)
        moved[factor] = [
            _note_values(group, block, findings) for group, block in zip(names[factor], blocks, strict=True)
        ]
    routed = findings.trained.setdefault(TensorClass.ROUTED_EXPERTS, [])
    for a_moved, b_moved in zip(moved[Factor.A], moved[Factor.B], strict=True):
        routed.extend((a_moved & b_moved).tolist())


def _holder(layout: AdapterLayout, factor: Factor) -> Factor:
    """Return the stored factor whose lines are those of the delta's A or B: when swapped, the other one."""
    if layout.orientation is Orientation.SWAPPED:
        return Factor.B if factor is Factor.A else Factor.A
    return factor


def _read_lines(
    reader: TensorReader, layout: AdapterLayout, pair: StackedPair, stored: Factor
) -> torch.Tensor:
    """Return (experts * rank, x): line (e, j) of a stored tensor at row e * rank + j.

    A stored lora_A has line (e, j) in row e * rank + j. A stored lora_B has it in a column: j * experts + e
    when rank_major, e * rank + j when grouped by expert.
    """
    tensor = bits(reader.read_tensor(pair.stored(stored)))
    experts, rank = layout.base.experts, layout.rank
    expert = torch.arange(experts).unsqueeze(1)
    component = torch.arange(rank).unsqueeze(0)
    if stored is Factor.A:
        return tensor.index_select(0, (expert * rank + component).flatten())
    if layout.packing_of(pair.parameter) is Packing.RANK_MAJOR:
        columns = component * experts + expert
    else:
        columns = expert * rank + component
    return tensor.T.contiguous().index_select(0, columns.flatten())


def _compare_modules(
    old: TensorReader,
    new: TensorReader,
    entries: dict[str, TensorEntry],
    pair: tuple[ModuleTensor, ModuleTensor],
    findings: Findings,
) -> None:
    moved = []
    for module in pair:
        name = module.entry.name
        if name not in entries:
            continue
        tensor = new.read_tensor(entries[name])
        findings.compared += 1
        if not torch.equal(bits(tensor), bits(old.read_tensor(module.entry))):
            findings.differing.append(name)
        moved.append(bool(_note_values([name], tensor.unsqueeze(0), findings)))
    findings.trained.setdefault(pair[0].key.kind, []).append(len(moved) == len(pair) and all(moved))


def _note_values(names: list[str], block: torch.Tensor, findings: Findings) -> torch.Tensor:
    """Return (len(names),): which tensors of the block hold anything but zeros. Overwrites the block."""
    magnitudes = take_magnitudes(block)
    peaks = magnitudes.flatten(1).amax(dim=1)
    if count_nonfinite(peaks, block.dtype):
        for name, part in zip(names, magnitudes, strict=True):
            count = count_nonfinite(part, block.dtype)
            if count:
                findings.nonfinite.append((name, count))
    return peaks != 0


def _read_block(reader: TensorReader, entries: list[TensorEntry]) -> torch.Tensor:
    """Return (experts, *shape) from tensors of one shape, wherever they stand."""
    size = entries[0].end - entries[0].begin
    buffer = bytearray(size * len(entries))
    view = memoryview(buffer)
    for place, entry in enumerate(entries):
        reader.read_into(entry, view[place * size : (place + 1) * size])
    flat = torch.frombuffer(buffer, dtype=TORCH_DTYPES[entries[0].dtype])
    return flat.view(len(entries), *entries[0].shape)


def _parameter(layout: AdapterLayout, pair: StackedPair) -> ExpertParameter:
    return next(item for item in layout.family.parameters if item.name == pair.parameter)


def _list_names(layout: AdapterLayout, pair: StackedPair, factor: Factor) -> Iterator[list[str]]:
    """Yield for each projection the names of all experts' factors."""
    for projection in _parameter(layout, pair).projections:
        yield [
            format_key(ExpertKey(pair.layer, expert, projection, factor), layout.family)
            for expert in range(layout.base.experts)
        ]


def _expert_shape(layout: AdapterLayout, pair: StackedPair, factor: Factor) -> tuple[int, int]:
    parameter = _parameter(layout, pair)
    if factor is Factor.A:
        return layout.rank, layout.base.size(parameter.in_size)
    return layout.base.size(parameter.out_size) // len(parameter.projections), layout.rank
