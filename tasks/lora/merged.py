"""The trainer's merged checkpoint against base + scaling·B·A of the adapter as it was read.

This proves the *reading*: the merge is the producer's own. It is trusted only after it differs from the base
everywhere it should and nowhere else; a merge that leaves its experts out would otherwise "show" that a right adapter
is wrong. Source: unslothai/unsloth#5410 (18,432 expert tensors written unchanged, without a word).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from tasks.lora.blocks import pairs_of
from tasks.lora.errors import WeightsIncomparable
from tasks.lora.family import ExpertParameter
from tasks.lora.files import AdapterFiles
from tasks.lora.lines import Lines, find_projection_lines
from tasks.lora.names import Factor
from tasks.lora.rearrange import one_thread
from tasks.lora.rounding import Comparison, Factors, compare_matrix, find_dtype
from tasks.lora.sources import AdapterLayout, ExpertPair, ModuleTensor, SourceForm
from tasks.lora.tensors import TensorReader, open_tensors
from tasks.lora.weights import (
    FLOATS,
    StoredExperts,
    WeightReader,
    Weights,
    find_experts,
    find_module_weight,
    read_weights,
)

Progress = Callable[[int, int], None]
MOST_NAMED = 64
"""After so many places, no more are named; all are counted."""

_UNKNOWN = "nothing under a name that is known"


@dataclass(frozen=True, slots=True)
class MergedFindings:
    """What a merged checkpoint shows of an adapter's reading; it was found trustworthy.

    matrices: single experts' projections and other modules' weights that were compared. visible: those of them that
    differ from the base; the deltas of the others are zero or vanish in rounding. equal: the share of numbers that are
    exactly as expected. largest, worst: the largest error of a matrix, |merged - expected| / |what moved|, and whose.
    differing, many: the first places and errors of matrices that do not agree, and how many there are. other: layers'
    parameters that agree with the other packing only. untouched: tensors outside the adapter, all equal to the base's.
    dtype: of the merge.
    """

    matrices: int
    visible: int
    equal: float
    largest: float
    worst: str
    differing: tuple[tuple[str, float], ...]
    many: int
    other: tuple[str, ...]
    untouched: int
    dtype: str


def compare_merged(
    source: AdapterFiles,
    layout: AdapterLayout,
    merged: Weights,
    base: Weights,
    *,
    other: AdapterLayout | None,
    progress: Progress | None,
) -> MergedFindings:
    """Return how a merged checkpoint agrees with its base and an adapter as `layout` reads it.

    other: the same adapter in the other packing, tried where `layout` does not agree; None where there is none.
    progress: told (numbers done, numbers in all). One expert's parameter is in memory at a time, and one layer's
    factors. Raises ReferenceInvalid for a merged checkpoint that lacks tensors, equals the base where the adapter moves
    it, or differs from it elsewhere, and for one that cannot be read; WeightsIncomparable where one of the two is
    quantised, or the base's weights have other names than those that are known.
    """
    with (
        open_tensors(source) as factors,
        read_weights(merged) as theirs,
        read_weights(base) as ours,
        one_thread(),
    ):
        found = _Comparing(layout, other, factors, theirs, ours, progress)
        found.compare_all()
        return found.conclude()


@dataclass(slots=True)
class _Comparing:
    """Everything while it is compared. used: tensors of either checkpoint that the adapter covers."""

    layout: AdapterLayout
    other: AdapterLayout | None
    factors: TensorReader
    merged: WeightReader
    base: WeightReader
    progress: Progress | None
    used: set[str] = field(default_factory=set)
    numbers: int = 0
    equal: int = 0
    matrices: int = 0
    visible: int = 0
    largest: float = 0.0
    worst: str = ""
    differing: list[tuple[str, float]] = field(default_factory=list)
    many: int = 0
    unchanged: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    dtype: str = ""

    def compare_all(self) -> None:
        total = _count_numbers(self.layout)
        done = 0
        for layer in self.layout.base.sparse_layers:
            for parameter in self.layout.family.parameters:
                pairs = pairs_of(self.layout, layer, parameter)
                if pairs:
                    self._compare_parameter(layer, parameter, pairs)
                    done += _count_parameter(self.layout, parameter)
                    if self.progress:
                        self.progress(done, total)
        modules = self.layout.modules
        for a, b in zip(modules[::2], modules[1::2], strict=True):
            self._compare_module(a, b)
            done += a.entry.shape[1] * b.entry.shape[0]
            if self.progress:
                self.progress(done, total)

    def conclude(self) -> MergedFindings:
        untouched = self._compare_untouched()
        if self.unchanged:
            count = len(self.unchanged)
            raise self.merged.weights.invalid(
                self.unchanged[0],
                f"every weight changed that the adapter changes, {self.matrices} in all",
                f"{count} of them equal to the base's: they were left out of the merge",
            )
        if not self.visible:
            raise self.merged.weights.invalid("all weights", "a merge that differs from its base", "the base")
        return MergedFindings(
            matrices=self.matrices,
            visible=self.visible,
            equal=self.equal / self.numbers,
            largest=self.largest,
            worst=self.worst,
            differing=tuple(self.differing),
            many=self.many,
            other=tuple(self.others),
            untouched=untouched,
            dtype=self.dtype,
        )

    def _compare_parameter(self, layer: int, parameter: ExpertParameter, pairs: list[ExpertPair]) -> None:
        where = f"layer {layer} {parameter.name}"
        stored = [find_experts(reader, self.layout.base, layer, parameter) for reader in self._both()]
        ours, theirs = stored
        if ours is None:
            raise WeightsIncomparable(self.base.weights.name, where, _UNKNOWN)
        if theirs is None:
            raise self.merged.weights.invalid(where, "the tensors of its experts", _UNKNOWN)
        self.used.update(ours.names, theirs.names)
        results = list(self._compare_experts(self.layout, pairs, ours, theirs))
        if not all(result.agrees for _, result in results) and self.other is not None:
            again = pairs_of(self.other, layer, parameter)
            others = list(self._compare_experts(self.other, again, ours, theirs))
            if all(result.agrees for _, result in others):
                self.others.append(where)
                results = others
        for place, result in results:
            self._note(f"layer {layer} {place}", result)

    def _compare_experts(
        self, layout: AdapterLayout, pairs: list[ExpertPair], ours: StoredExperts, theirs: StoredExperts
    ) -> Iterator[tuple[str, Comparison]]:
        """Yield (place, result) for every expert's projections; those that are not trained must not have moved."""
        trained = {
            projection: (pair.scale.scaling, *self._read_lines(layout, pair, projection))
            for pair in pairs
            for projection in pair.projections
        }
        for expert in range(layout.base.experts):
            before, after = ours.read(self.base, expert), theirs.read(self.merged, expert)
            for projection, base in before.items():
                place = f"expert {expert} {projection}"
                if projection in trained:
                    scaling, a, b = trained[projection]
                    factors = Factors(a[expert], b[expert], scaling)
                    yield place, compare_matrix(base, after[projection], factors)
                elif not _is_same(base, after[projection]):
                    raise self._invalid_elsewhere(f"{place} of {theirs.names[0]}")
            self.dtype = self.dtype or str(find_dtype(after[projection])).removeprefix("torch.")

    def _read_lines(
        self, layout: AdapterLayout, pair: ExpertPair, projection: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a projection's A (experts, rank, in) and B (experts, rank, out) as the layout reads them."""
        a, b = (self._gather(find_projection_lines(layout, pair, projection, factor)) for factor in Factor)
        return a, b

    def _gather(self, lines: Lines) -> torch.Tensor:
        flat = torch.cat([self.factors.read_tensor(entry).flatten() for entry in lines.sources])
        return flat.as_strided(lines.view.shape, lines.view.strides, lines.view.offset)

    def _compare_module(self, a: ModuleTensor, b: ModuleTensor) -> None:
        ours, theirs = (find_module_weight(reader, self.layout.base, a.key) for reader in self._both())
        where = a.key.template.format(layer=a.layer)
        if ours is None:
            raise WeightsIncomparable(self.base.weights.name, where, _UNKNOWN)
        if theirs is None:
            raise self.merged.weights.invalid(where, "its weight", _UNKNOWN)
        self.used.update((ours, theirs))
        factors = Factors(
            self.factors.read_tensor(a.entry), self.factors.read_tensor(b.entry).T, a.scale.scaling
        )
        self._note(where, compare_matrix(self.base.read(ours), self.merged.read(theirs), factors))

    def _note(self, where: str, result: Comparison) -> None:
        self.matrices += 1
        self.visible += result.moved
        self.numbers += result.size
        self.equal += result.equal
        if not result.error <= self.largest or not self.worst:
            self.largest, self.worst = result.error, where
        if result.unchanged:
            self.unchanged.append(where)
        elif not result.agrees:
            self.many += 1
            if len(self.differing) < MOST_NAMED:
                self.differing.append((where, result.error))

    def _compare_untouched(self) -> int:
        """Return how many tensors of one name lie outside the adapter; all of them must be equal."""
        shared = self.base.weights.places.keys() & self.merged.weights.places.keys() - self.used
        for name in sorted(shared):
            same = self.base.shape(name) == self.merged.shape(name)
            if not same or not all(map(_is_same, self.base.iterate(name), self.merged.iterate(name))):
                raise self._invalid_elsewhere(name)
        return len(shared)

    def _invalid_elsewhere(self, where: str) -> Exception:
        found = "another: this is not that base with this adapter alone"
        return self.merged.weights.invalid(
            where, "the base's weight, as the adapter does not change it", found
        )

    def _both(self) -> tuple[WeightReader, WeightReader]:
        return self.base, self.merged


def _is_same(base: torch.Tensor, merged: torch.Tensor) -> bool:
    """Whether nothing but the dtype of floating-point numbers changed."""
    if base.shape != merged.shape:
        return False
    if base.dtype is merged.dtype:
        one, other = (tensor.flatten().view(torch.uint8) for tensor in (base, merged))
        return torch.equal(one, other)
    return {base.dtype, merged.dtype} <= {*FLOATS.values()} and torch.equal(base.to(merged.dtype), merged)


def _count_numbers(layout: AdapterLayout) -> int:
    experts = sum(
        _count_parameter(layout, parameter)
        for layer in layout.base.sparse_layers
        for parameter in layout.family.parameters
        if pairs_of(layout, layer, parameter)
    )
    modules = layout.modules
    return experts + sum(
        a.entry.shape[1] * b.entry.shape[0] for a, b in zip(modules[::2], modules[1::2], strict=True)
    )


def _count_parameter(layout: AdapterLayout, parameter: ExpertParameter) -> int:
    return layout.base.experts * layout.base.size(parameter.in_size) * layout.base.size(parameter.out_size)


def read_otherwise(layout: AdapterLayout) -> AdapterLayout | None:
    """Return the adapter read with the other packing throughout; None where no pair has another."""
    if layout.form is not SourceForm.STACKED or all(pair.rank == 1 for pair in layout.pairs):
        return None
    packing = tuple(
        replace(
            decision,
            value=decision.value.other if decision.value is not None else None,
            by_layer=tuple((layer, packing.other) for layer, packing in decision.by_layer),
        )
        for decision in layout.packing
    )
    # Whether factors are block diagonal was seen in the first reading; taken as if not, the delta is the same.
    return replace(layout, packing=packing, block_diagonal=False)
