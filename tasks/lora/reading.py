"""What an adapter is: its tensors sorted by meaning, held against the base, and put in pairs.

Reads names and shapes only. Nothing is guessed: whatever is not understood is an error. The packing of stacked pairs,
which neither tells, is decided elsewhere (inspect.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.lora.base import BaseConfig
from tasks.lora.config import AdapterConfig, list_config_warnings
from tasks.lora.errors import (
    BaseMismatch,
    MissingTensor,
    MixedForms,
    NoExpertKeys,
    UnsupportedSourceFormat,
)
from tasks.lora.family import Family, LayerKind, LinearModule
from tasks.lora.files import AdapterFiles
from tasks.lora.header import TensorEntry
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
    config: AdapterConfig,
    base: BaseConfig,
    *,
    training: TrainingStatement | None = None,
) -> AdapterLayout:
    """Return the layout of an adapter of this base, its packing still open.

    training: what the upload says of its training; its PEFT version counts where the config gives none.
    Raises, in this order, for names (MalformedKey, UnexpectedTensor, UnsupportedConfig, CollidingNames,
    UnsupportedSourceFormat, NoExpertKeys, MixedForms), for what the base lacks or the file does (BaseMismatch,
    MissingTensor, UnsupportedDtype), for shapes and scalings (ShapeMismatch, RankUnsupported, BaseMismatch,
    AlphaUndecided), and for the layout (LayoutConflict, RoleUndecided, OrientationUndecided).
    """
    family = base.family
    frame = Frame(files.label, family, base, config)
    found = _parse_tensors(files, family)
    form = _find_form(files, found)
    _check_layers(frame, found)
    version = config.peft_version or (training.peft_version if training is not None else None)
    by_version = orientation_by_peft(version, family.stored)
    orientation = Orientation.STANDARD
    if form is SourceForm.STACKED:
        stacked = {key: entry for key, entry in found.items() if isinstance(key, StackedKey)}
        pairs, orientation = pair_stacked(frame, stacked, by_version)
    elif form is SourceForm.PER_EXPERT:
        pairs = pair_experts(
            frame, {key: entry for key, entry in found.items() if isinstance(key, ExpertKey)}
        )
    else:
        pairs = pair_cubes(frame, {key: entry for key, entry in found.items() if isinstance(key, CubeKey)})
    trained = {projection for pair in pairs for projection in pair.projections}
    projections = [name for parameter in family.parameters for name in parameter.projections]
    absent = tuple(name for name in projections if name not in trained)
    return AdapterLayout(
        label=files.label,
        family=family,
        base=base,
        config=config,
        form=form,
        orientation=orientation,
        packing=(),
        block_diagonal=False,
        absent=absent,
        pairs=pairs,
        modules=_match_modules(
            frame, {key: entry for key, entry in found.items() if isinstance(key, ModuleKey)}
        ),
        warnings=tuple(_list_warnings(files, config, form, absent, pairs)),
    )


def _parse_tensors(files: AdapterFiles, family: Family) -> dict[ParsedKey, TensorEntry]:
    keys = parse_names([entry.name for entry in files.tensors], family, files.label)
    for key, entry in zip(keys, files.tensors, strict=True):
        dimensions = 3 if isinstance(key, CubeKey) else 2
        if len(entry.shape) != dimensions:
            raise UnsupportedSourceFormat(
                files.label,
                entry.name,
                f"{dimensions} dimensions",
                f"shape {entry.shape}",
                "Save the adapter with PEFT's save_pretrained.",
            )
    return dict(zip(keys, files.tensors, strict=True))


def _find_form(files: AdapterFiles, found: Mapping[ParsedKey, TensorEntry]) -> SourceForm:
    first: dict[SourceForm, TensorEntry] = {}
    for key, entry in found.items():
        if not isinstance(key, ModuleKey):
            first.setdefault(_FORMS[type(key)], entry)
    if not first:
        kinds = sorted({key.kind.value for key in found if isinstance(key, ModuleKey)})
        raise NoExpertKeys(
            files.label, files.weights_name, "factors of routed experts", f"only {', '.join(kinds)}"
        )
    form, *others = first
    if others:
        raise MixedForms(
            files.label,
            first[others[0]].name,
            f"{form} experts throughout, as {first[form].name} is",
            f"{others[0]} ones",
        )
    return form


def _check_layers(frame: Frame, found: Mapping[ParsedKey, TensorEntry]) -> None:
    base = frame.base
    for key, entry in found.items():
        if key.layer >= base.layers:
            raise BaseMismatch(
                frame.adapter,
                entry.name,
                f"layers 0 to {base.layers - 1}, as the base has",
                f"layer {key.layer}",
            )
        kinds = _list_kinds(frame.family, key)
        if not any(base.has(key.layer, kind) for kind in kinds):
            expected = " or ".join(f"a layer {_describe(kind)}" for kind in kinds)
            where = f"layer {key.layer}, which is not one"
            original = _find_original(base, key)
            if original is None:
                raise BaseMismatch(frame.adapter, entry.name, expected, where)
            where += f": there {original.sources[0].format(layer=key.layer)} is used in its place, too"
            advice = "Submit the adapter as it was trained; those factors are written twice at conversion."
            raise BaseMismatch(frame.adapter, entry.name, expected, where, advice)


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
    matched = []
    for key in sorted(modules, key=lambda key: (key.layer, key.template, key.factor)):
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
        matched.append(ModuleTensor(key, entry, scale))
    return tuple(matched)


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
