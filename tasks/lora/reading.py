"""What an adapter is: its tensors sorted by meaning, held against the base, and its layout decided.

Reads names and shapes only. Nothing is guessed: whatever is not understood is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.lora.base import BaseConfig
from tasks.lora.config import AdapterConfig, list_config_warnings
from tasks.lora.errors import (
    BaseMismatch,
    MissingTensor,
    NoExpertKeys,
    ShapeMismatch,
    UnknownFamily,
    UnsupportedSourceFormat,
)
from tasks.lora.families import Family, LayerKind, LinearModule, find_family
from tasks.lora.files import AdapterFiles
from tasks.lora.header import TensorEntry
from tasks.lora.layouts import Orientation, Packing, PairShapes, decide_orientation
from tasks.lora.names import ExpertKey, Factor, ModuleKey, StackedKey, format_key, parse_key
from tasks.lora.packing import DecidedBy, PackingDecision, decide_packing
from tasks.lora.trainers import TrainingStatement


@dataclass(frozen=True, slots=True)
class StackedPair:
    """The two stored factors of all experts of one parameter of one layer."""

    layer: int
    parameter: str
    a: TensorEntry
    b: TensorEntry

    def stored(self, factor: Factor) -> TensorEntry:
        """Return the stored lora_A or lora_B."""
        return self.a if factor is Factor.A else self.b


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A factor of an ordinary module, which is served as it is."""

    key: ModuleKey
    entry: TensorEntry

    @property
    def layer(self) -> int:
        """The layer's number."""
        return self.key.layer


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """An adapter that fits its base, and how it is laid out.

    pairs: by layer, in the family's order of parameters. modules: by layer, then name, A before B.
    """

    label: str
    family: Family
    base: BaseConfig
    config: AdapterConfig
    orientation: Orientation
    packing: tuple[PackingDecision, ...]
    pairs: tuple[StackedPair, ...]
    modules: tuple[ModuleTensor, ...]
    warnings: tuple[str, ...]

    @property
    def rank(self) -> int:
        """The rank of every factor."""
        return self.config.r

    @property
    def expert_pairs(self) -> int:
        """How many (A, B) pairs of single experts' projections there are."""
        projections = sum(len(parameter.projections) for parameter in self.family.parameters)
        return len(self.base.sparse_layers) * self.base.experts * projections

    def packing_of(self, parameter: str) -> Packing:
        """Return the packing of one of the family's parameters."""
        return next(decision.value for decision in self.packing if decision.parameter == parameter)


def read_layout(
    files: AdapterFiles,
    config: AdapterConfig,
    base: BaseConfig,
    *,
    forced: Packing | None = None,
    training: TrainingStatement | None = None,
) -> AdapterLayout:
    """Return the layout of an adapter of this base.

    forced: the operator's packing for every parameter. training: what the upload says of its training.
    Raises, in this order, for names (MalformedKey, UnexpectedTensor, UnsupportedConfig,
    UnsupportedSourceFormat, NoExpertKeys), for what the base lacks or the file does (BaseMismatch,
    MissingTensor), for shapes (ShapeMismatch, RankUnsupported, BaseMismatch), and for the layout
    (LayoutConflict, OrientationUndecided, PackingUndecided, InvalidConfig).
    """
    family = find_family(base.model_type)
    if family is None:
        raise UnknownFamily(base.label, "model_type", "a family of the table", base.model_type)
    stacked, modules = _sort_tensors(files, family)
    if not stacked:
        present = sorted({key.kind.value for key in modules})
        raise NoExpertKeys(
            files.label, files.weights.name, "factors of routed experts", f"only {', '.join(present)}"
        )
    _check_layers(files.label, family, base, stacked, modules)
    pairs = _pair_up(files.label, family, base, stacked)
    for key, entry in modules.items():
        _check_module(files.label, family, base, config.r, key, modules, entry)
    orientation = decide_orientation(
        [_shapes(pair, family, base) for pair in pairs],
        experts=base.experts,
        rank=config.r,
        adapter=files.label,
    )
    packing = tuple(
        decide_packing(
            parameter.name,
            family=family,
            config=config,
            forced=forced,
            training=training,
            adapter=files.label,
        )
        for parameter in family.parameters
    )
    return AdapterLayout(
        label=files.label,
        family=family,
        base=base,
        config=config,
        orientation=orientation,
        packing=packing,
        pairs=pairs,
        modules=tuple(
            ModuleTensor(key, modules[key])
            for key in sorted(modules, key=lambda key: (key.layer, key.template, key.factor))
        ),
        warnings=_list_warnings(files, config, packing),
    )


def _sort_tensors(
    files: AdapterFiles, family: Family
) -> tuple[dict[StackedKey, TensorEntry], dict[ModuleKey, TensorEntry]]:
    stacked: dict[StackedKey, TensorEntry] = {}
    modules: dict[ModuleKey, TensorEntry] = {}
    for entry in files.tensors:
        key = parse_key(entry.name, family, files.label)
        if isinstance(key, ExpertKey):
            raise UnsupportedSourceFormat(files.label, entry.name, "stacked experts", "one tensor per expert")
        if len(entry.shape) != 2:
            raise UnsupportedSourceFormat(files.label, entry.name, "two dimensions", f"shape {entry.shape}")
        if isinstance(key, StackedKey):
            stacked[key] = entry
        else:
            modules[key] = entry
    return stacked, modules


def _check_layers(
    adapter: str,
    family: Family,
    base: BaseConfig,
    stacked: dict[StackedKey, TensorEntry],
    modules: dict[ModuleKey, TensorEntry],
) -> None:
    sparse = set(base.sparse_layers)
    for key, entry in (stacked | modules).items():
        kind = LayerKind.SPARSE if isinstance(key, StackedKey) else _module(family, key).layers
        if key.layer >= base.layers:
            found = f"layer {key.layer}"
            raise BaseMismatch(adapter, entry.name, f"layers 0 to {base.layers - 1}, as the base has", found)
        if kind is not LayerKind.ALL and (key.layer in sparse) != (kind is LayerKind.SPARSE):
            layers = "with routed experts" if kind is LayerKind.SPARSE else "without routed experts"
            raise BaseMismatch(
                adapter, entry.name, f"a layer {layers}", f"layer {key.layer}, which is not one"
            )


def _pair_up(
    adapter: str, family: Family, base: BaseConfig, stacked: dict[StackedKey, TensorEntry]
) -> tuple[StackedPair, ...]:
    pairs = []
    for layer in base.sparse_layers:
        for parameter in family.parameters:
            keys = [StackedKey(layer, parameter.name, factor) for factor in Factor]
            for key in keys:
                if key not in stacked:
                    raise MissingTensor(
                        adapter,
                        format_key(key, family),
                        f"the experts' {parameter.name} in each of {len(base.sparse_layers)} layers",
                        "no such tensor",
                    )
            pairs.append(StackedPair(layer, parameter.name, *(stacked[key] for key in keys)))
    return tuple(pairs)


def _check_module(
    adapter: str,
    family: Family,
    base: BaseConfig,
    rank: int,
    key: ModuleKey,
    modules: dict[ModuleKey, TensorEntry],
    entry: TensorEntry,
) -> None:
    partner = ModuleKey(key.layer, key.template, key.kind, Factor.B if key.factor is Factor.A else Factor.A)
    if partner not in modules:
        raise MissingTensor(
            adapter, format_key(partner, family), "the partner of " + entry.name, "no such tensor"
        )
    module = _module(family, key)
    size = base.size(module.in_size if key.factor is Factor.A else module.out_size)
    found_rank, found_size = entry.shape if key.factor is Factor.A else reversed(entry.shape)
    if found_rank != rank:
        raise ShapeMismatch(adapter, entry.name, f"rank {rank}, as the config says", f"shape {entry.shape}")
    if found_size != size:
        raise BaseMismatch(adapter, entry.name, f"{size} along the other axis", f"shape {entry.shape}")


def _module(family: Family, key: ModuleKey) -> LinearModule:
    return next(module for module in family.modules if module.template == key.template)


def _shapes(pair: StackedPair, family: Family, base: BaseConfig) -> PairShapes:
    own = next(item for item in family.parameters if item.name == pair.parameter)
    sibling = next(item for item in family.parameters if item.name != pair.parameter)
    return PairShapes(
        where=pair.a.name,
        a=pair.a.shape,
        b=pair.b.shape,
        in_size=base.size(own.in_size),
        out_size=base.size(own.out_size),
        sibling_in=base.size(sibling.in_size),
        sibling_out=base.size(sibling.out_size),
    )


def _list_warnings(
    files: AdapterFiles, config: AdapterConfig, packing: tuple[PackingDecision, ...]
) -> tuple[str, ...]:
    warnings = list(list_config_warnings(config))
    if files.stray:
        warnings.append(f"other files in the folder were ignored: {', '.join(files.stray)[:200]}")
    if config.r == 1:
        warnings.append("rank 1: both packings are one and the same, so a control cannot tell them apart")
    for decision in packing:
        if decision.decided_by is DecidedBy.PROVISIONAL:
            warnings.append(
                f"nothing states the packing of {decision.parameter}: {decision.value} is provisional"
            )
        warnings.extend(
            f"{decision.parameter} is read as {decision.value} ({decision.decided_by}), "
            f"but {item.source} says {item.says}: {item.detail}"
            for item in decision.overruled
        )
    return tuple(warnings)
