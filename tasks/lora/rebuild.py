"""The converted factors put back into the source's form and held against it, number by number.

Of an output whose numbers are those that the engine holds (slots), the source's are made so first.

Everything is compared as *lines*: line (e, j) of a factor is what component j of expert e contributes, a
vector over the inputs (A) or the outputs (B). Where a line stands, in the source and in the output, is computed
here in plain arithmetic, not with the conversion's own views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from tasks.lora.expected import ServedGroup, list_groups, list_owners
from tasks.lora.family import ExpertParameter, TensorClass
from tasks.lora.files import AdapterFiles
from tasks.lora.header import TensorEntry, TensorSpec
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.names import Factor, format_served_module_keys
from tasks.lora.overflow import MOST_OVERFLOWS, ServingRange, find_peak, find_range, find_suspects
from tasks.lora.rearrange import one_thread
from tasks.lora.served_rounding import ServedRounding, find_rounding
from tasks.lora.sources import AdapterLayout, ExpertPair, ModuleTensor, SourceForm
from tasks.lora.target import TargetFormat, find_served_scaling
from tasks.lora.tensors import (
    TORCH_DTYPES,
    TensorReader,
    bits,
    count_nonfinite,
    open_tensors,
    take_magnitudes,
)
from tasks.lora.write import Progress


@dataclass(slots=True)
class Findings:
    """What the comparison met, filled as it goes.

    compared: source tensors. differing: those not found again bit for bit. unshared: parameters whose
    projections do not share A. nonzero: output tensors with numbers where the source has none. nonfinite: (tensor,
    count). overflows: (source tensor, expert or -1, largest magnitude) where finite factors leave the range that is
    served. trained: by class and layer, how many pairs moved, and how many there are.
    """

    compared: int = 0
    differing: list[str] = field(default_factory=list)
    unshared: list[str] = field(default_factory=list)
    nonzero: list[str] = field(default_factory=list)
    nonfinite: list[tuple[str, int]] = field(default_factory=list)
    overflows: list[tuple[str, int, float]] = field(default_factory=list)
    trained: dict[TensorClass, dict[int, tuple[int, int]]] = field(default_factory=dict)

    def count_trained(self, kind: TensorClass, layer: int, moved: list[bool]) -> None:
        """Count pairs of a class in a layer. moved: a truth value for each."""
        layers = self.trained.setdefault(kind, {})
        before, pairs = layers.get(layer, (0, 0))
        layers[layer] = (before + sum(moved), pairs + len(moved))


def compare_adapters(
    source: AdapterFiles,
    converted: AdapterFiles,
    layout: AdapterLayout,
    format: TargetFormat,
    expected: list[TensorSpec],
    progress: Progress | None = None,
) -> Findings:
    """Return what comparing all data of both files found; parts whose tensors are missing are left out.

    expected: what `list_expected` gives. progress: told (layers done, layers) as the experts are compared. Memory: a
    few times the largest stacked factor.
    """
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in expected}
    usable = {
        entry.name: entry
        for entry in converted.tensors
        if shapes.get(entry.name) == (entry.dtype, entry.shape)
    }
    findings = Findings()
    with open_tensors(source) as old, open_tensors(converted) as new, one_thread():
        comparison = _Comparison(
            *(old, new, usable, layout, format, findings),
            range=find_range(layout, format),
            rounding=find_rounding(layout, format),
        )
        for done, layer in enumerate(layout.base.sparse_layers, 1):
            for parameter in layout.family.parameters:
                comparison.compare_parameter(layer, parameter)
            if progress is not None:
                progress(done, len(layout.base.sparse_layers))
        for first, second in zip(layout.modules[::2], layout.modules[1::2], strict=True):
            comparison.compare_modules((first, second))
    return findings


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Both files while they are compared; `entries` are the output's tensors that are as expected."""

    old: TensorReader
    new: TensorReader
    entries: Mapping[str, TensorEntry]
    layout: AdapterLayout
    format: TargetFormat
    findings: Findings
    range: ServingRange
    rounding: ServedRounding | None

    def compare_parameter(self, layer: int, parameter: ExpertParameter) -> None:
        groups = {
            factor: list(list_groups(self.layout, self.format, layer, parameter, factor)) for factor in Factor
        }
        if not all(
            name in self.entries for found in groups.values() for group in found for name in group.names
        ):
            return
        pairs = list_owners(self.layout, layer, parameter.projections)
        peaks: dict[Factor, dict[str, torch.Tensor]] = {}
        for factor in Factor:
            if self.format is TargetFormat.STACKED:
                peaks[factor] = self._compare_stacked(groups[factor][0], parameter, pairs, factor)
            else:
                peaks[factor] = self._compare_experts(groups[factor], parameter, pairs, factor)
        for projection, a in peaks[Factor.A].items():
            moved = ((a != 0) & (peaks[Factor.B][projection] != 0)).any(dim=1).tolist()
            self.findings.count_trained(TensorClass.ROUTED_EXPERTS, layer, moved)
        for pair in pairs:
            self._note_overflows(pair, parameter, peaks)

    def compare_modules(self, pair: tuple[ModuleTensor, ModuleTensor]) -> None:
        moved = []
        sources: list[torch.Tensor] = []
        for module in pair:
            names = format_served_module_keys(module.key, self.layout.base)
            if not all(name in self.entries for name in names):
                continue
            tensors = [self.new.read_tensor(self.entries[name]) for name in names]
            source = self.old.read_tensor(module.entry)
            scale = module.scale
            held = self._round(source, module.key.factor, find_served_scaling(scale.scaling, scale.rank))
            self.findings.compared += 1
            if not all(torch.equal(bits(tensor), bits(held)) for tensor in tensors):
                self.findings.differing.append(module.entry.name)
            moved.append(bool(self._note_values(names, torch.stack(tensors)).any(dim=1).all()))
            sources.append(source if module.key.factor is Factor.A else source.T)
        moved_both = len(moved) == len(pair) and all(moved)
        self.findings.count_trained(pair[0].key.kind, pair[0].layer, [moved_both])
        if len(sources) == len(pair):
            self._note_peak(pair[1].entry.name, -1, sources[0], sources[1], pair[1].scale.scaling)

    def _note_overflows(
        self, pair: ExpertPair, parameter: ExpertParameter, peaks: dict[Factor, dict[str, torch.Tensor]]
    ) -> None:
        """Note the experts of a pair that leave the range; only those are multiplied that may."""
        scaling, largest = pair.scale.scaling, self.range.largest
        # In slots, the output's B is scaled already.
        missing = scaling if self.rounding is None else 1.0
        suspects = {
            projection: find_suspects(
                peaks[Factor.A][projection], peaks[Factor.B][projection], missing, largest
            )
            for projection in pair.projections
        }
        if not any(bool(found.any()) for found in suspects.values()):
            return
        lines = {}
        for factor in Factor:
            found = self._read_source_lines(pair, factor)
            lines[factor] = dict(self._split(pair, found, parameter, factor))
        names = [entry.name for entry in self._holders(pair, Factor.B)]
        for projection, found in suspects.items():
            for expert in found.nonzero().flatten().tolist():
                name = names[expert] if len(names) > 1 else names[0]
                a, b = (lines[factor][projection][expert] for factor in Factor)
                self._note_peak(name, expert, a, b, scaling)

    def _note_peak(self, name: str, expert: int, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        # One is enough to refuse the adapter; all products of a large one that overflows throughout take minutes.
        if len(self.findings.overflows) == MOST_OVERFLOWS:
            return
        peak = find_peak(a, b, scaling, self.range.largest)
        if peak:
            self.findings.overflows.append((name, expert, peak))

    def _compare_experts(
        self, groups: list[ServedGroup], parameter: ExpertParameter, pairs: list[ExpertPair], factor: Factor
    ) -> dict[str, torch.Tensor]:
        """Compare one factor with the tensors of single projections; return the peaks of each trained one."""
        lines = {group.projections[0]: self._read_expert_lines(group, factor) for group in groups}
        trained: set[str] = set()
        for pair in pairs:
            trained.update(pair.projections)
            parts = [bits(lines[projection]) for projection in pair.projections]
            shared = factor is Factor.A and not self.layout.block_diagonal
            if shared and not all(torch.equal(parts[0], other) for other in parts[1:]):
                self.findings.unshared.append(f"layer {pair.layer} {pair.parameter}")
            joined = _join(parts, parameter, factor, block_diagonal=self.layout.block_diagonal)
            self._compare_source(pair, factor, joined)
        peaks = {}
        for group in groups:
            projection = group.projections[0]
            if projection not in trained:
                found = bits(lines[projection])
                each = found if len(group.names) > 1 else found.unsqueeze(0)
                self.findings.nonzero += [
                    name for name, part in zip(group.names, each, strict=True) if bool(part.any())
                ]
            peak = self._note_values(group.names, lines[projection])
            if projection in trained:
                peaks[projection] = peak
        return peaks

    def _compare_stacked(
        self, group: ServedGroup, parameter: ExpertParameter, pairs: list[ExpertPair], factor: Factor
    ) -> dict[str, torch.Tensor]:
        """Compare one factor with one tensor for all experts; return as `_compare_experts` does."""
        lines = self._read_stacked_lines(group, factor)
        numbers = int(torch.count_nonzero(bits(lines)))
        parts: dict[str, torch.Tensor] = {}
        first = 0
        for pair in pairs:
            part = lines[:, first : first + pair.rank]
            first += pair.rank
            if factor is Factor.B and pair.projections != parameter.projections:
                part = part[:, :, _rows(parameter, pair.projections[0], lines.shape[2])]
            numbers -= int(torch.count_nonzero(bits(part)))
            self._compare_source(pair, factor, bits(part))
            parts |= self._split(pair, part, parameter, factor)
        if numbers:
            self.findings.nonzero.append(group.names[0])
        self._note_values(group.names, lines)  # overwrites the lines with their magnitudes
        return {
            projection: bits(part).amax(dim=2).view(part.dtype).double() for projection, part in parts.items()
        }

    def _split(
        self, pair: ExpertPair, part: torch.Tensor, parameter: ExpertParameter, factor: Factor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each projection's own lines among those of its pair."""
        count = len(pair.projections)
        for place, projection in enumerate(pair.projections):
            own = part
            if self.layout.block_diagonal:
                own = own.chunk(count, dim=1)[place]
            if factor is Factor.B and count > 1:
                own = own[:, :, _rows(parameter, projection, own.shape[2])]
            yield projection, own

    def _compare_source(self, pair: ExpertPair, factor: Factor, rebuilt: torch.Tensor) -> None:
        """Compare (experts, components, positions) of the output with what the source has there."""
        entries = self._holders(pair, factor)
        scaling = find_served_scaling(pair.scale.scaling, self.layout.rank_of(pair))
        found = bits(self._round(self._read_source_lines(pair, factor), factor, scaling))
        self.findings.compared += len(entries)
        if torch.equal(found, rebuilt):
            return
        if len(entries) == 1:
            self.findings.differing.append(entries[0].name)
        else:
            self.findings.differing += [
                entry.name
                for entry, old, new in zip(entries, found, rebuilt, strict=True)
                if not torch.equal(old, new)
            ]

    def _round(self, values: torch.Tensor, factor: Factor, scaling: float) -> torch.Tensor:
        """Return numbers of the source as the output must hold them."""
        if self.rounding is None:
            return values
        return self.rounding.round(values, scaling if factor is Factor.B else 1.0)

    def _holders(self, pair: ExpertPair, factor: Factor) -> tuple[TensorEntry, ...]:
        """Return the tensors whose lines are those of the delta's A or B: when swapped, the other factor's."""
        swapped = self.layout.orientation is Orientation.SWAPPED
        return pair.a if (factor is Factor.A) is not swapped else pair.b

    def _read_source_lines(self, pair: ExpertPair, factor: Factor) -> torch.Tensor:
        """Return (experts, components, positions) of the source, in its dtype; moved as integers, bit for bit.

        Stacked: lora_A has line (e, j) in row e * rank + j; lora_B in a column, j * experts + e when rank-major, e *
        rank + j when grouped by expert. Else expert e's tensor has line j in row j of lora_A and column j of lora_B.
        """
        experts, rank = self.layout.base.experts, pair.rank
        entries = self._holders(pair, factor)
        rows, dtype = entries is pair.a, TORCH_DTYPES[entries[0].dtype]
        if self.layout.form is SourceForm.STACKED:
            tensor = bits(self.old.read_tensor(entries[0]))
            expert, component = torch.arange(experts).unsqueeze(1), torch.arange(rank).unsqueeze(0)
            if rows or self.layout.packing_of(pair.parameter, pair.layer) is Packing.GROUPED_BY_EXPERT:
                places = expert * rank + component
            else:
                places = component * experts + expert
            lines = (tensor if rows else tensor.T.contiguous()).index_select(0, places.flatten())
            return lines.view(experts, rank, -1).view(dtype)
        if self.layout.form is SourceForm.PER_EXPERT:
            each = [bits(self.old.read_tensor(entry)) for entry in entries]
        else:
            cube = bits(self.old.read_tensor(entries[0]))
            each = [cube[expert if len(cube) > 1 else 0] for expert in range(experts)]
        return torch.stack([tensor if rows else tensor.T for tensor in each]).view(dtype)

    def _read_expert_lines(self, group: ServedGroup, factor: Factor) -> torch.Tensor:
        """Return (experts, rank, positions) of the output's tensors of single experts, or of all in one."""
        tensors = [self.new.read_tensor(self.entries[name]) for name in group.names]
        if self.format is TargetFormat.SLOTS:
            return tensors[0] if factor is Factor.A else tensors[0].transpose(1, 2).contiguous()
        return torch.stack([tensor if factor is Factor.A else tensor.T for tensor in tensors])

    def _read_stacked_lines(self, group: ServedGroup, factor: Factor) -> torch.Tensor:
        """Return (experts, components, positions) of an output tensor: line (e, j) in row e * rank + j, or column
        j * experts + e."""
        tensor = self.new.read_tensor(self.entries[group.names[0]])
        experts, rank = self.layout.base.experts, group.rank
        expert, component = torch.arange(experts).unsqueeze(1), torch.arange(rank).unsqueeze(0)
        if factor is Factor.A:
            lines = tensor.index_select(0, (expert * rank + component).flatten())
        else:
            lines = tensor.T.contiguous().index_select(0, (component * experts + expert).flatten())
        return lines.view(experts, rank, -1)

    def _note_values(self, names: tuple[str, ...], lines: torch.Tensor) -> torch.Tensor:
        """Note what is not finite and return the peaks: (tensors, rank), the largest magnitude of each line, float64.

        lines: (tensors, rank, positions); one name for each tensor, or one for all. They are overwritten.
        """
        magnitudes = take_magnitudes(lines)
        peaks = magnitudes.amax(dim=2)
        if count_nonfinite(peaks, lines.dtype):
            parts = magnitudes if len(names) > 1 else magnitudes.unsqueeze(0)
            for name, part in zip(names, parts, strict=True):
                count = count_nonfinite(part, lines.dtype)
                if count:
                    self.findings.nonfinite.append((name, count))
        return peaks.view(lines.dtype).double()


def _rows(parameter: ExpertParameter, projection: str, size: int) -> slice:
    """Return which of the `size` output rows of a parameter are a projection's."""
    count, place = len(parameter.projections), parameter.projections.index(projection)
    share = size // count
    return slice(place, size, count) if parameter.interleaved else slice(place * share, (place + 1) * share)


def _join(
    parts: list[torch.Tensor], parameter: ExpertParameter, factor: Factor, *, block_diagonal: bool
) -> torch.Tensor:
    """Return the lines of a pair from those of its projections, which are all that the parameter has, or one."""
    if len(parts) == 1:
        return parts[0]
    if factor is Factor.A:
        return torch.cat(parts, dim=1) if block_diagonal else parts[0]
    experts, rank, size = parts[0].shape
    make = parts[0].new_zeros if block_diagonal else parts[0].new_empty
    joined = make((experts, rank * (len(parts) if block_diagonal else 1), len(parts) * size))
    for place, (projection, part) in enumerate(zip(parameter.projections, parts, strict=True)):
        first = place * rank if block_diagonal else 0
        joined[:, first : first + rank, _rows(parameter, projection, joined.shape[2])] = part
    return joined
