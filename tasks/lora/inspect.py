"""Everything that can be said about an adapter before it is converted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasks.lora.base import BaseConfig
from tasks.lora.config import read_adapter_config
from tasks.lora.families import TensorClass
from tasks.lora.files import AdapterFiles, open_adapter
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.packing import PackingDecision
from tasks.lora.reading import AdapterLayout, read_layout
from tasks.lora.trainers import TrainingStatement

FORMAT = "stacked"


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One class of tensors. keys: how many tensors it has in the file.

    trained_fraction: the share of its (A, B) pairs whose delta can differ from zero, a routed expert's
    projection counting as one pair; None where only headers were read.
    """

    name: TensorClass
    keys: int
    trained_fraction: float | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """An adapter that fits its base. ranks: one for each class in the file.

    layers: those with routed experts. pairs: (A, B) pairs of single experts' projections.
    files, layout: what a conversion is planned from.
    """

    label: str
    family: str
    base: str
    layers: int
    experts: int
    ranks: tuple[tuple[TensorClass, int], ...]
    orientation: Orientation
    packing: tuple[PackingDecision, ...]
    pairs: int
    format: str
    classes: tuple[ClassSummary, ...]
    warnings: tuple[str, ...]
    files: AdapterFiles
    layout: AdapterLayout


def inspect_adapter(
    directory: Path,
    base: BaseConfig,
    *,
    label: str,
    forced: Packing | None = None,
    training: TrainingStatement | None = None,
    header_only: bool = False,
) -> Inspection:
    """Return what the adapter in `directory` is, and how its experts are laid out.

    header_only: read names, shapes and the config, no tensor data. Raises any AdapterError but those of a
    finished conversion; from the data NonFinite, and ExpertsUntrained where every routed delta is zero.
    """
    files = open_adapter(directory, label=label)
    config = read_adapter_config(directory, label=label)
    layout = read_layout(files, config, base, forced=forced, training=training)
    fractions: tuple[tuple[TensorClass, float], ...] = ()
    warnings = layout.warnings
    if not header_only:
        from tasks.lora.survey import survey_tensors  # torch takes seconds to import; headers need none of it

        survey = survey_tensors(files, layout)
        fractions = survey.class_fractions
        warnings += survey.warnings
    counts = {TensorClass.ROUTED_EXPERTS: 2 * len(layout.pairs)}
    for module in layout.modules:
        counts[module.key.kind] = counts.get(module.key.kind, 0) + 1
    return Inspection(
        label=label,
        family=layout.family.name,
        base=base.label,
        layers=len(base.sparse_layers),
        experts=base.experts,
        ranks=tuple((kind, layout.rank) for kind in counts),
        orientation=layout.orientation,
        packing=layout.packing,
        pairs=layout.expert_pairs,
        format=FORMAT,
        classes=tuple(ClassSummary(kind, count, dict(fractions).get(kind)) for kind, count in counts.items()),
        warnings=warnings,
        files=files,
        layout=layout,
    )
