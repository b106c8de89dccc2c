"""Everything that can be said about an adapter before it is converted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.lora.base import BaseConfig
from tasks.lora.config import list_refusals, load_adapter_config
from tasks.lora.decide import RANK_1, PackedTensor, decide_packing
from tasks.lora.errors import MissingWeights
from tasks.lora.family import TensorClass
from tasks.lora.files import SLOTS_NAME, WEIGHTS_NAME, AdapterFiles, open_adapter
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.names import Factor
from tasks.lora.packing import PackingDecision, PolicyStatement, ScoresStatement, Source
from tasks.lora.problems import Problems
from tasks.lora.reading import read_layout
from tasks.lora.sources import AdapterLayout, SourceForm
from tasks.lora.statements import Statements, list_statements
from tasks.lora.trainers import TrainingStatement, may_train_squares_transposed


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
    """An adapter that fits its base. ranks: the largest of each class in the file.

    layers: those with routed experts. packing: one decision for each stacked parameter, () for other forms.
    pairs: (A, B) pairs of single experts' projections. files, layout: what a conversion is planned from.
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
    format: SourceForm
    classes: tuple[ClassSummary, ...]
    warnings: tuple[str, ...]
    files: AdapterFiles
    layout: AdapterLayout

    @property
    def undecided(self) -> bool:
        """Whether only scores under both readings can tell a parameter's packing."""
        return any(decision.undecided for decision in self.packing)


def inspect_adapter(
    directory: Path,
    base: BaseConfig,
    *,
    label: str,
    forced: Packing | None = None,
    training: TrainingStatement | None = None,
    policy: PolicyStatement | None = None,
    scores: ScoresStatement | None = None,
    provisional: Packing = Packing.RANK_MAJOR,
    header_only: bool = False,
) -> Inspection:
    """Return what the adapter in `directory` is, and how its experts are laid out.

    forced: the operator's packing of every parameter. training: what the upload says of itself. policy: the
    operator's rule for adapters that say nothing. scores: what scoring under both readings showed. provisional: the
    reading of what none of these tells.
    header_only: read names, shapes and the config, no tensor data; then nothing but statements tells the packing.
    Raises any AdapterError but those of a finished conversion; from the data NonFinite, LayoutConflict where it
    contradicts what is stated, and ExpertsUntrained where every routed delta is zero. It is the first of what is wrong
    with the file, the config, the names, the layout and the data, in this order; all else that could be found is
    among its `others`.
    """
    problems = Problems()
    files = problems.attempt(_open_source, directory, label=label)
    config = problems.attempt(load_adapter_config, directory, label=label)
    if config is not None:
        for error in list_refusals(config, label):
            problems.add(error)
    if files is None:
        raise problems.merge()
    layout = read_layout(files, config, base, problems, training=training)
    if layout is None:
        raise problems.merge()
    said = _gather_statements(layout, problems, forced=forced, training=training, policy=policy)
    survey = None
    if not header_only:
        from tasks.lora.survey import survey_tensors  # torch takes seconds to import; headers need none of it

        survey = problems.attempt(survey_tensors, files, layout)
        if survey is None:
            raise problems.merge()
    decided = [
        problems.attempt(
            decide_packing,
            parameter,
            statements,
            _list_tensors(parameter, layout) if survey is None else survey.list_tensors(parameter),
            None if survey is None else survey.pool(parameter),
            scores,
            provisional=provisional,
            adapter=label,
        )
        for parameter, statements in said
    ]
    packing = tuple(decision for decision in decided if decision is not None)
    if len(packing) < len(_list_stacked(layout)):
        raise problems.merge()
    layout = replace(layout, packing=packing)
    warnings = [*layout.warnings, *_list_packing_warnings(packing), *_list_square_warnings(layout, training)]
    fractions: dict[TensorClass, float] = {}
    if survey is not None:
        from tasks.lora.trained import find_trained, is_block_diagonal

        layout = replace(layout, block_diagonal=is_block_diagonal(survey, layout))
        trained = problems.attempt(find_trained, survey, layout, weights_name=files.weights_name)
        if trained is not None:
            fractions = dict(trained.class_fractions)
            warnings += trained.warnings
    problems.raise_any()
    ranks = _list_ranks(layout)
    warnings += _list_rank_warnings(layout, ranks)
    counts = {TensorClass.ROUTED_EXPERTS: sum(len(pair.a) + len(pair.b) for pair in layout.pairs)}
    for module in layout.modules:
        counts[module.key.kind] = counts.get(module.key.kind, 0) + 1
    return Inspection(
        label=label,
        family=layout.family.name,
        base=base.label,
        layers=len(base.sparse_layers),
        experts=base.experts,
        ranks=tuple((kind, max(found)) for kind, found in ranks.items()),
        orientation=layout.orientation,
        packing=packing,
        pairs=layout.expert_pairs,
        format=layout.form,
        classes=tuple(ClassSummary(kind, count, fractions.get(kind)) for kind, count in counts.items()),
        warnings=tuple(warnings),
        files=files,
        layout=layout,
    )


def _gather_statements(
    layout: AdapterLayout,
    problems: Problems,
    *,
    forced: Packing | None,
    training: TrainingStatement | None,
    policy: PolicyStatement | None,
) -> list[tuple[str, Statements]]:
    """Return what is said of each stacked parameter, but of those of which something unknown is said."""
    found = []
    for parameter in _list_stacked(layout):
        statements = problems.attempt(
            list_statements,
            parameter,
            family=layout.family,
            config=layout.config,
            forced=forced,
            training=training,
            policy=policy,
            adapter=layout.label,
        )
        if statements is not None:
            found.append((parameter, statements))
    return found


def _list_stacked(layout: AdapterLayout) -> tuple[str, ...]:
    if layout.form is not SourceForm.STACKED:
        return ()
    return tuple(dict.fromkeys(pair.parameter for pair in layout.pairs))


def _list_tensors(parameter: str, layout: AdapterLayout) -> tuple[PackedTensor, ...]:
    """What headers alone tell."""
    return tuple(
        PackedTensor(pair.layer, pair.b[0].name, same=RANK_1 if pair.rank == 1 else None)
        for pair in layout.pairs
        if pair.parameter == parameter
    )


def _list_ranks(layout: AdapterLayout) -> dict[TensorClass, set[int]]:
    ranks = {TensorClass.ROUTED_EXPERTS: {layout.rank_of(pair) for pair in layout.pairs}}
    for module in layout.modules:
        if module.key.factor is Factor.A:
            ranks.setdefault(module.key.kind, set()).add(module.entry.shape[0])
    return ranks


def _list_rank_warnings(layout: AdapterLayout, ranks: dict[TensorClass, set[int]]) -> Iterator[str]:
    for kind, found in ranks.items():
        if len(found) > 1:
            yield f"{kind} has several ranks: {', '.join(map(str, sorted(found)))}"
    if layout.form is SourceForm.STACKED and {pair.rank for pair in layout.pairs} == {1}:
        yield "rank 1: both packings are one and the same, so a control cannot tell them apart"


def _list_square_warnings(layout: AdapterLayout, training: TrainingStatement | None) -> Iterator[str]:
    if layout.form is not SourceForm.STACKED or not may_train_squares_transposed(layout.config, training):
        return
    present = {pair.parameter for pair in layout.pairs}
    for parameter in layout.family.parameters:
        size = layout.base.size(parameter.in_size)
        if parameter.name in present and size == layout.base.size(parameter.out_size):
            yield (
                f"{parameter.name} has in = out = {size}: unsloth_zoo up to 2026.9.7 trained such a parameter in "
                f"one orientation and merges it in the other; it is read as merged. If it was trained by one, "
                "compare its scores with the trainer's own"
            )


def _list_packing_warnings(packing: Iterable[PackingDecision]) -> Iterator[str]:
    for decision in packing:
        if decision.undecided:
            why = next(item.detail for item in decision.evidence if item.source is Source.PROVISIONAL)
            yield f"the packing of {decision.parameter}: {decision.value} is provisional: {why}"
        reading = decision.value or "mixed"
        for item in decision.overruled:
            yield (
                f"{decision.parameter} is read as {reading} ({decision.decided_by}), "
                f"but {item.source} says {item.says}: {item.detail}"
            )


def _open_source(directory: Path, *, label: str) -> AdapterFiles:
    """Return the folder's tensors. Raises like `open_adapter`, and MissingWeights for what a conversion wrote."""
    files = open_adapter(directory, label=label)
    if files.is_slots:
        raise MissingWeights(
            label,
            "its folder",
            WEIGHTS_NAME,
            f"{SLOTS_NAME}, which a conversion writes",
            "Hand in what the trainer saved: these numbers are rounded and scaled for serving.",
        )
    return files
