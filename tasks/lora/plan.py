"""The plan of a conversion: what every tensor of the output is made of. Frozen, printable, no tensor data.

The output is in canonical order, whatever the order and the encoding of the source: wider dtypes first (so
that each tensor stays aligned), then layer, parameter, A before B, projection, expert. Thus all encodings of
one adapter become the same bytes, each source tensor is read once, and the file is written front to back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from tasks.lora.families import ExpertParameter
from tasks.lora.header import ITEM_BYTES, TensorEntry, TensorSpec, format_header
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.names import ExpertKey, Factor, format_key
from tasks.lora.reading import AdapterLayout, ModuleTensor, StackedPair


class PlanKind(StrEnum):
    """The adapter itself, or one of the two controls made from it."""

    CONVERSION = "conversion"
    OTHER_PACKING = "other_packing"
    DISPLACED_EXPERTS = "displaced_experts"


@dataclass(frozen=True, slots=True)
class ExpertTake:
    """One projection's factor of one expert, out of a stacked tensor.

    rows: begin and end of the projection among the parameter's output rows; they cut B alone, since all
    projections of a parameter share A.
    """

    factor: Factor
    projection: str
    expert: int
    rows: tuple[int, int]
    packing: Packing
    orientation: Orientation


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the output and the source tensor it comes from; without a take, a plain copy of it."""

    spec: TensorSpec
    source: TensorEntry
    take: ExpertTake | None


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Everything a conversion writes, in the order of writing.

    rank, alpha, use_rslora: as the trainer applied them. pairs: (A, B) pairs of single experts' projections.
    dtype: those in use, such as "BF16" or "BF16,F32". predicted_bytes: of the weight file.
    """

    adapter: str
    kind: PlanKind
    experts: int
    rank: int
    alpha: float
    use_rslora: bool
    pairs: int
    dtype: str
    target_modules: tuple[str, ...]
    base_model: str | None
    tensors: tuple[PlannedTensor, ...]
    predicted_bytes: int

    def __str__(self) -> str:
        head = (
            f"{self.kind} of {self.adapter}: {len(self.tensors)} tensors, {self.pairs} expert pairs, "
            f"rank {self.rank}, alpha {self.alpha:g}{' (rsLoRA)' if self.use_rslora else ''}, {self.dtype}, "
            f"{self.predicted_bytes} bytes"
        )
        return "\n".join([head, *map(_format_tensor, self.tensors)])


def plan_conversion(layout: AdapterLayout) -> ConversionPlan:
    """Return the plan that turns the adapter into per-expert factors, other tensors unchanged."""
    tensors = sorted(_list_tensors(layout), key=lambda tensor: -ITEM_BYTES[tensor.spec.dtype])
    projections = {name for parameter in layout.family.parameters for name in parameter.projections}
    modules = {module.key.template.rpartition(".")[2] for module in layout.modules}
    return ConversionPlan(
        adapter=layout.label,
        kind=PlanKind.CONVERSION,
        experts=layout.base.experts,
        rank=layout.rank,
        alpha=layout.config.lora_alpha,
        use_rslora=layout.config.use_rslora,
        pairs=layout.expert_pairs,
        dtype=",".join(sorted({tensor.spec.dtype for tensor in tensors})),
        target_modules=tuple(sorted(projections | modules)),
        base_model=layout.config.base_model_name_or_path,
        tensors=tuple(tensors),
        predicted_bytes=_predict_bytes(tensors),
    )


def plan_control(plan: ConversionPlan) -> ConversionPlan:
    """Return the plan of the control: the same source, read so that every expert gets wrong factors.

    With the other packing; at rank 1, where both packings are the same, each expert's B moved one expert on.
    """
    kind = PlanKind.OTHER_PACKING if plan.rank > 1 else PlanKind.DISPLACED_EXPERTS
    tensors = tuple(
        tensor if tensor.take is None else replace(tensor, take=_mislead(tensor.take, kind, plan.experts))
        for tensor in plan.tensors
    )
    return replace(plan, kind=kind, tensors=tensors)


def _mislead(take: ExpertTake, kind: PlanKind, experts: int) -> ExpertTake:
    if kind is PlanKind.OTHER_PACKING:
        return replace(take, packing=take.packing.other)
    return take if take.factor is Factor.A else replace(take, expert=(take.expert - 1) % experts)


def _list_tensors(layout: AdapterLayout) -> Iterator[PlannedTensor]:
    parts: list[StackedPair | ModuleTensor] = [*layout.pairs, *layout.modules]
    for part in sorted(parts, key=lambda part: part.layer):
        if isinstance(part, StackedPair):
            yield from _list_expert_tensors(layout, part)
        else:
            entry = part.entry
            yield PlannedTensor(TensorSpec(entry.name, entry.dtype, entry.shape), entry, None)


def _list_expert_tensors(layout: AdapterLayout, pair: StackedPair) -> Iterator[PlannedTensor]:
    parameter = next(item for item in layout.family.parameters if item.name == pair.parameter)
    packing = layout.packing_of(pair.parameter)
    for factor in Factor:
        source = pair.stored(layout.orientation.stored(factor))
        for index, projection in enumerate(parameter.projections):
            rows = _rows(layout, parameter, index)
            columns = layout.base.size(parameter.in_size)
            shape = (layout.rank, columns) if factor is Factor.A else (rows[1] - rows[0], layout.rank)
            for expert in range(layout.base.experts):
                name = format_key(ExpertKey(pair.layer, expert, projection, factor), layout.family)
                take = ExpertTake(factor, projection, expert, rows, packing, layout.orientation)
                yield PlannedTensor(TensorSpec(name, source.dtype, shape), source, take)


def _rows(layout: AdapterLayout, parameter: ExpertParameter, index: int) -> tuple[int, int]:
    share = layout.base.size(parameter.out_size) // len(parameter.projections)
    return index * share, (index + 1) * share


def _predict_bytes(tensors: list[PlannedTensor]) -> int:
    specs = [tensor.spec for tensor in tensors]
    return len(format_header(specs)) + sum(spec.data_bytes for spec in specs)


def _format_tensor(tensor: PlannedTensor) -> str:
    head = f"{tensor.spec.name} {tensor.spec.dtype} {tensor.spec.shape} <- {tensor.source.name}"
    take = tensor.take
    if take is None:
        return f"{head}: as it is"
    rows = f", rows {take.rows[0]}:{take.rows[1]}" if take.factor is Factor.B else ""
    return f"{head}: {take.factor} of expert {take.expert}{rows}, {take.packing}, {take.orientation}"
