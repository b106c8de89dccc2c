"""What an adapter is: its tensors sorted by meaning, held against the base, and put in pairs.

Reads names and shapes only. Nothing is guessed: whatever is not understood is an error. The packing of stacked pairs,
which neither tells, is decided elsewhere (inspect.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tasks.lora.base import BaseConfig
from tasks.lora.config import AdapterConfig, list_config_warnings, list_costly_patterns
from tasks.lora.errors import (
    BaseMismatch,
    IntentUnmet,
    InvalidConfig,
    MalformedKey,
    MissingTensor,
    MixedForms,
    NoExpertKeys,
    UnexpectedTensor,
    UnsupportedSourceFormat,
)
from tasks.lora.family import Family, LayerKind, LinearModule, TensorClass
from tasks.lora.files import AdapterFiles
from tasks.lora.header import TensorEntry
from tasks.lora.intent import describe_expert_intent, find_unmet, list_unintended
from tasks.lora.layouts import Orientation
from tasks.lora.names import (
    CubeKey,
    ExpertKey,
    Factor,
    ModuleKey,
    ParsedKey,
    StackedKey,
    find_module,
    format_key,
    parse_names,
)
from tasks.lora.pairing import Frame, check_factor, module_name, pair_cubes, pair_experts, pair_stacked
from tasks.lora.problems import Problems
from tasks.lora.sources import AdapterLayout, ExpertPair, ModuleTensor, SourceForm
from tasks.lora.trainers import TrainingStatement, orientation_by_peft

_LAYERS = {
    LayerKind.ALL: "of the base",
    LayerKind.SPARSE: "with routed experts",
    LayerKind.DENSE: "without routed experts",
    LayerKind.LISTED_DENSE: "without routed experts, of a base that lists such (the engine leaves others bare)",
}
_FORMS = {StackedKey: SourceForm.STACKED, ExpertKey: SourceForm.PER_EXPERT, CubeKey: SourceForm.CUBE}


def read_layout(
    files: AdapterFiles,
    config: AdapterConfig | None,
    base: BaseConfig,
    problems: Problems,
    *,
    training: TrainingStatement | None = None,
) -> AdapterLayout | None:
    """Return the layout of an adapter of this base, its packing still open; None where its parts do not fit together.

    config: without one only names and layers are looked at. training: what the upload says of its training: what was to
    be trained; its PEFT version counts where the config gives none. Adds to `problems`, in this order, for names
    (MalformedKey, UnexpectedTensor, UnsupportedConfig, CollidingNames, UnsupportedSourceFormat, NoExpertKeys,
    MixedForms), for what the base lacks or the file does (IntentUnmet, BaseMismatch, MissingTensor, UnsupportedDtype),
    for patterns that take too long to match (InvalidConfig; shapes are not looked at then), for shapes and scalings
    (ShapeMismatch, RankUnsupported, BaseMismatch, AlphaUndecided), and for the layout (LayoutConflict, RoleUndecided,
    OrientationUndecided). Names that are refused do not keep the rest from being read.
    """
    family = base.family
    understood = _parse_tensors(files, family, problems)
    misfits = Problems()
    form = misfits.attempt(_find_form, files, understood, describe_expert_intent(training, config, family))
    present = {_class_of(key) for key in understood}
    unmet = find_unmet(training, present, files.label)
    if unmet is not None:
        misfits.add(unmet)
    found = _choose_layers(files.label, base, understood, misfits)
    if config is not None:
        for costly in list_costly_patterns(config, len(files.tensors), files.label):
            misfits.add(costly)
    layout = None
    if config is not None and not misfits.has(InvalidConfig):
        frame = Frame(files.label, family, base, config, misfits)
        version = config.peft_version or (training.peft_version if training is not None else None)
        pairs, orientation = _pair_up(frame, form, found, orientation_by_peft(version, family.stored))
        modules = _match_modules(
            frame, {key: entry for key, entry in found.items() if isinstance(key, ModuleKey)}
        )
        if form is not None and not misfits:
            layout = _make_layout(files, config, base, form, orientation, pairs, modules)
            layout = replace(layout, warnings=(*layout.warnings, *list_unintended(training, present)))
    if problems.has(MalformedKey, UnexpectedTensor, UnsupportedSourceFormat):
        # What seems to be missing may be what was not understood.
        misfits.drop(MissingTensor, NoExpertKeys, IntentUnmet)
    problems.extend(misfits)
    return layout


def _make_layout(
    files: AdapterFiles,
    config: AdapterConfig,
    base: BaseConfig,
    form: SourceForm,
    orientation: Orientation,
    pairs: tuple[ExpertPair, ...],
    modules: tuple[ModuleTensor, ...],
) -> AdapterLayout:
    trained = {projection for pair in pairs for projection in pair.projections}
    projections = [name for parameter in base.family.parameters for name in parameter.projections]
    absent = tuple(name for name in projections if name not in trained)
    return AdapterLayout(
        label=files.label,
        family=base.family,
        base=base,
        config=config,
        form=form,
        orientation=orientation,
        packing=(),
        block_diagonal=False,
        absent=absent,
        pairs=pairs,
        modules=modules,
        warnings=tuple(_list_warnings(files, config, form, absent, pairs)),
    )


def _parse_tensors(files: AdapterFiles, family: Family, problems: Problems) -> dict[ParsedKey, TensorEntry]:
    found: dict[ParsedKey, TensorEntry] = {}
    keys = parse_names([entry.name for entry in files.tensors], family, files.label, problems)
    for key, entry in zip(keys, files.tensors, strict=True):
        if key is None:
            continue
        dimensions = 3 if isinstance(key, CubeKey) else 2
        if len(entry.shape) == dimensions:
            found[key] = entry
            continue
        problems.add(
            UnsupportedSourceFormat(
                files.label,
                entry.name,
                f"{dimensions} dimensions",
                f"shape {entry.shape}",
                "Save the adapter with PEFT's save_pretrained.",
            )
        )
    return found


def _pair_up(
    frame: Frame,
    form: SourceForm | None,
    found: Mapping[ParsedKey, TensorEntry],
    by_version: Orientation | None,
) -> tuple[tuple[ExpertPair, ...], Orientation]:
    if form is SourceForm.STACKED:
        return pair_stacked(
            frame, {key: entry for key, entry in found.items() if isinstance(key, StackedKey)}, by_version
        )
    pairs: tuple[ExpertPair, ...] = ()
    if form is SourceForm.PER_EXPERT:
        pairs = pair_experts(
            frame, {key: entry for key, entry in found.items() if isinstance(key, ExpertKey)}
        )
    elif form is SourceForm.CUBE:
        pairs = pair_cubes(frame, {key: entry for key, entry in found.items() if isinstance(key, CubeKey)})
    return pairs, Orientation.STANDARD


def _class_of(key: ParsedKey) -> TensorClass:
    return key.kind if isinstance(key, ModuleKey) else TensorClass.ROUTED_EXPERTS


def _find_form(files: AdapterFiles, found: Mapping[ParsedKey, TensorEntry], intent: str) -> SourceForm:
    first: dict[SourceForm, TensorEntry] = {}
    for key, entry in found.items():
        if not isinstance(key, ModuleKey):
            first.setdefault(_FORMS[type(key)], entry)
    if not first:
        kinds = sorted({key.kind.value for key in found if isinstance(key, ModuleKey)})
        expected = f"factors of routed experts, {intent}" if intent else "factors of routed experts"
        raise NoExpertKeys(files.label, files.weights_name, expected, f"only {', '.join(kinds)}")
    form, *others = first
    if others:
        raise MixedForms(
            files.label,
            first[others[0]].name,
            f"{form} experts throughout, as {first[form].name} is",
            f"{others[0]} ones",
        )
    return form


def _choose_layers(
    adapter: str, base: BaseConfig, found: Mapping[ParsedKey, TensorEntry], problems: Problems
) -> dict[ParsedKey, TensorEntry]:
    """Return what belongs to a layer of the base that has such a thing; the rest are problems."""
    chosen: dict[ParsedKey, TensorEntry] = {}
    for key, entry in found.items():
        if key.layer < base.layers and any(
            base.has(key.layer, kind) for kind in _list_kinds(base.family, key)
        ):
            chosen[key] = entry
        else:
            problems.add(_explain_layer(adapter, base, key, entry))
    return chosen


def _explain_layer(adapter: str, base: BaseConfig, key: ParsedKey, entry: TensorEntry) -> BaseMismatch:
    if key.layer >= base.layers:
        return BaseMismatch(
            adapter, entry.name, f"layers 0 to {base.layers - 1}, as the base has", f"layer {key.layer}"
        )
    expected = " or ".join(f"a layer {_describe(kind)}" for kind in _list_kinds(base.family, key))
    where = f"layer {key.layer}, which is not one"
    original = _find_original(base, key)
    if original is None:
        return BaseMismatch(adapter, entry.name, expected, where)
    where += f": there {original.sources[0].format(layer=key.layer)} is used in its place, too"
    advice = "Submit the adapter as it was trained; those factors are written twice at conversion."
    return BaseMismatch(adapter, entry.name, expected, where, advice)


def _describe(kind: LayerKind) -> str:
    return _LAYERS.get(kind) or f"of {kind.replace('_', ' ')}"


def _list_kinds(family: Family, key: ParsedKey) -> list[LayerKind]:
    """Return the kinds of layers that have what a key means."""
    if not isinstance(key, ModuleKey):
        return [LayerKind.SPARSE]
    return [module.layers for module in family.modules if module.sources[0] == key.template]


def _find_original(base: BaseConfig, key: ParsedKey) -> LinearModule | None:
    """Return the module of this layer whose factors are served in the place of those that a key means, too."""
    rows = base.family.modules
    if not isinstance(key, ModuleKey):
        return None
    served = {row.served for row in rows if row.sources[0] == key.template}
    return next(
        (row for row in rows if served & {*row.also_served} and base.has(key.layer, row.layers)), None
    )


def _match_modules(frame: Frame, modules: Mapping[ModuleKey, TensorEntry]) -> tuple[ModuleTensor, ...]:
    keys = sorted(modules, key=lambda key: (key.layer, key.template, key.factor))
    matched = (frame.problems.attempt(_match_module, frame, modules, key) for key in keys)
    return tuple(module for module in matched if module is not None)


def _match_module(frame: Frame, modules: Mapping[ModuleKey, TensorEntry], key: ModuleKey) -> ModuleTensor:
    entry = modules[key]
    other = Factor.B if key.factor is Factor.A else Factor.A
    partner = ModuleKey(key.layer, key.template, key.kind, other)
    if partner not in modules:
        raise MissingTensor(
            frame.adapter,
            format_key(partner, frame.family),
            f"the partner of {entry.name}",
            "no such tensor",
        )
    module = find_module(key, frame.base)
    stored, _ = entry.shape if key.factor is Factor.A else reversed(entry.shape)
    scale = frame.scale(module_name(entry), stored)
    size = frame.base.size(module.in_size if key.factor is Factor.A else module.out_size)
    check_factor(frame, entry, key.factor, rank=scale.rank, size=size)
    return ModuleTensor(key, entry, scale)


def _list_warnings(
    files: AdapterFiles,
    config: AdapterConfig,
    form: SourceForm,
    absent: tuple[str, ...],
    pairs: tuple[ExpertPair, ...],
) -> list[str]:
    warnings = list(list_config_warnings(config))
    if files.stray:
        warnings.append(f"other files in the folder were ignored: {', '.join(files.stray)[:200]}")
    if absent:
        trained = [name for pair in pairs if pair.layer == pairs[0].layer for name in pair.projections]
        warnings.append(
            f"the experts' {' and '.join(absent)} were not trained, only {' and '.join(trained)}; "
            "they are served as pairs of zeros"
        )
    shared = [
        pair.parameter
        for pair in pairs
        if form is SourceForm.CUBE and pair.a[0].shape[0] == pair.b[0].shape[0] == 1
    ]
    if shared:
        warnings.append(f"all experts share both factors of {shared[0]}: a control cannot move them")
    return warnings
