"""The expert factors of each layer put in pairs and held against the base and the config, for every form of source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tasks.lora.base import BaseConfig
from tasks.lora.config import MAX_LORA_RANKS, AdapterConfig, LoraScale, read_scale
from tasks.lora.errors import (
    BaseMismatch,
    MissingTensor,
    RankUnsupported,
    ShapeMismatch,
    UnsupportedConfig,
    UnsupportedDtype,
)
from tasks.lora.family import ExpertParameter, Family
from tasks.lora.files import CONFIG_NAME
from tasks.lora.header import TensorEntry
from tasks.lora.layouts import Orientation, PairShapes, decide_orientation
from tasks.lora.names import PREFIX, CubeKey, ExpertKey, Factor, StackedKey, format_key, normalise_name
from tasks.lora.problems import Problems
from tasks.lora.roles import decide_role
from tasks.lora.sources import ExpertPair

_Key = TypeVar("_Key", StackedKey, ExpertKey, CubeKey)


@dataclass(frozen=True, slots=True)
class Frame:
    """What an adapter's tensors are held against, and where what does not fit is noted."""

    adapter: str
    family: Family
    base: BaseConfig
    config: AdapterConfig
    problems: Problems

    def scale(self, module: str, stored: int) -> LoraScale:
        """Return how a module was trained; `stored` is the rank that its tensors have."""
        return read_scale(self.config, module, stored=stored, adapter=self.adapter)


def pair_stacked(
    frame: Frame, found: Mapping[StackedKey, TensorEntry], by_version: Orientation | None
) -> tuple[tuple[ExpertPair, ...], Orientation]:
    """Return the stacked pairs and the orientation of all of them.

    by_version: for `decide_orientation`. Problems: MissingTensor, RankUnsupported, and what `decide_role`,
    `decide_orientation` and `read_scale` raise.
    """
    family, base = frame.family, frame.base
    pairs: list[ExpertPair] = []
    shapes: list[PairShapes] = []
    roles = frame.problems.attempt(_find_roles, frame, found) or []
    for layer in base.sparse_layers:
        for parameter, name in roles:
            why = f"the experts' {parameter.name} in each of {len(base.sparse_layers)} layers"
            a, b = (_find(frame, found, StackedKey(layer, name, factor), why) for factor in Factor)
            if a is None or b is None:
                continue
            # The stored name is that of the wrapper; PEFT holds the parameter's against the patterns.
            wrapper = next(item.wrapper for item in family.parameters if item.name == name)
            module = f"{f'{module_name(a)}.'.removesuffix(wrapper)}{parameter.name}"
            scale = frame.problems.attempt(frame.scale, module, a.shape[0] // base.experts)
            if scale is None:
                continue
            sibling = next(item for item in family.parameters if item is not parameter)
            shapes.append(
                PairShapes(
                    where=a.name,
                    a=a.shape,
                    b=b.shape,
                    rank=scale.rank,
                    in_size=base.size(parameter.in_size),
                    out_size=base.size(parameter.out_size),
                    sibling_in=base.size(sibling.in_size),
                    sibling_out=base.size(sibling.out_size),
                )
            )
            pairs.append(
                ExpertPair(layer, parameter.name, parameter.projections, scale.rank, scale, (a,), (b,))
            )
    if not shapes:
        return (), Orientation.STANDARD
    orientation = frame.problems.attempt(
        decide_orientation, shapes, experts=base.experts, adapter=frame.adapter, by_version=by_version
    )
    for pair in pairs:
        frame.problems.attempt(_check_rank, frame, pair.a[0], pair.rank)
    return tuple(pairs), orientation or Orientation.STANDARD


def pair_experts(frame: Frame, found: Mapping[ExpertKey, TensorEntry]) -> tuple[ExpertPair, ...]:
    """Return one pair for each trained projection of each layer, from tensors of single experts.

    Problems: MissingTensor, BaseMismatch, ShapeMismatch, RankUnsupported, AlphaUndecided; UnsupportedConfig or
    UnsupportedDtype where experts of one projection differ in scaling or dtype.
    """
    experts = range(frame.base.experts)
    for key, entry in found.items():
        if key.expert not in experts:
            expected = f"experts 0 to {experts.stop - 1}, as the base has"
            frame.problems.add(BaseMismatch(frame.adapter, entry.name, expected, f"expert {key.expert}"))
    pairs = []
    for layer, parameter, projection in _list_trained(frame, {key.projection for key in found}):
        why = f"all {experts.stop} experts' {projection} in each layer"
        a, b = (
            [
                one
                for expert in experts
                if (one := _find(frame, found, ExpertKey(layer, expert, projection, factor), why))
            ]
            for factor in Factor
        )
        if len(a) != len(experts) or len(b) != len(experts):
            continue
        scale = frame.problems.attempt(_read_one_scale, frame, projection, a)
        if scale is not None:
            pairs.append(_make_pair(frame, layer, parameter, projection, scale, a, b))
    return tuple(pairs)


def pair_cubes(frame: Frame, found: Mapping[CubeKey, TensorEntry]) -> tuple[ExpertPair, ...]:
    """Return one pair for each trained projection of each layer, from tensors of three dimensions.

    Problems: MissingTensor, BaseMismatch, ShapeMismatch, RankUnsupported and AlphaUndecided.
    """
    pairs = []
    for layer, parameter, projection in _list_trained(frame, {key.projection for key in found}):
        why = f"the experts' {projection} in each layer"
        a, b = (_find(frame, found, CubeKey(layer, projection, factor), why) for factor in Factor)
        if a is None or b is None:
            continue
        for cube in (a, b):
            if cube.shape[0] not in (1, frame.base.experts):
                expected = f"{frame.base.experts} experts, or 1 for what all share, along the first axis"
                frame.problems.add(BaseMismatch(frame.adapter, cube.name, expected, f"shape {cube.shape}"))
        scale = frame.problems.attempt(frame.scale, module_name(a), a.shape[1])
        if scale is not None:
            pairs.append(_make_pair(frame, layer, parameter, projection, scale, (a,), (b,)))
    return tuple(pairs)


def check_factor(frame: Frame, entry: TensorEntry, factor: Factor, *, rank: int, size: int) -> None:
    """Check that the last two axes are (rank, size), of factor B (size, rank).

    Raises ShapeMismatch for another rank, RankUnsupported for one that no engine serves, BaseMismatch for another size.
    """
    found_rank, found_size = entry.shape[-2:] if factor is Factor.A else reversed(entry.shape[-2:])
    if found_rank != rank:
        raise ShapeMismatch(
            frame.adapter, entry.name, f"rank {rank}, as the config says", f"shape {entry.shape}"
        )
    if found_size != size:
        raise BaseMismatch(frame.adapter, entry.name, f"{size} along the other axis", f"shape {entry.shape}")
    _check_rank(frame, entry, rank)


def module_name(entry: TensorEntry) -> str:
    """Return the name of the module as the trainer's PEFT knew it, and as the config's patterns know it."""
    return normalise_name(entry.name).removeprefix(PREFIX).rpartition(".lora_")[0]


def _find_roles(frame: Frame, found: Mapping[StackedKey, TensorEntry]) -> list[tuple[ExpertParameter, str]]:
    """Return the parameters that were trained, each with the one whose name its tensors bear."""
    family = frame.family
    outer = next(item for item in family.parameters if not item.wrapper)
    if any(key.parameter != outer.name for key in found):
        return [(parameter, parameter.name) for parameter in family.parameters]
    layer = frame.base.sparse_layers[0]
    why = "a pair in each layer with experts"
    a, b = (_find(frame, found, StackedKey(layer, outer.name, factor), why) for factor in Factor)
    if a is None or b is None:
        return []
    role = decide_role(
        a,
        b,
        family=family,
        base=frame.base,
        targets=frame.config.target_parameters or (),
        adapter=frame.adapter,
    )
    return [(role, outer.name)]


def _read_one_scale(frame: Frame, projection: str, entries: Sequence[TensorEntry]) -> LoraScale:
    """Return the scale that all experts' lora_A of a projection of a layer have."""
    first, *others = (frame.scale(module_name(entry), entry.shape[0]) for entry in entries)
    for entry, scale in zip(entries[1:], others, strict=True):
        if scale != first:
            raise UnsupportedConfig(
                frame.adapter,
                f"{CONFIG_NAME}: rank_pattern and alpha_pattern",
                f"one rank and alpha for all experts' {projection} of a layer, as engines load them",
                f"rank {scale.rank}, alpha {scale.alpha:g} for {module_name(entry)} and "
                f"rank {first.rank}, alpha {first.alpha:g} for {module_name(entries[0])}",
                "Train all experts of a projection with one rank and one alpha.",
            )
    return first


def _list_trained(frame: Frame, trained: set[str]) -> Iterator[tuple[int, ExpertParameter, str]]:
    for layer in frame.base.sparse_layers:
        for parameter in frame.family.parameters:
            for projection in parameter.projections:
                if projection in trained:
                    yield layer, parameter, projection


def _make_pair(
    frame: Frame,
    layer: int,
    parameter: ExpertParameter,
    projection: str,
    scale: LoraScale,
    a: Sequence[TensorEntry],
    b: Sequence[TensorEntry],
) -> ExpertPair:
    sizes = {
        Factor.A: frame.base.size(parameter.in_size),
        Factor.B: frame.base.size(parameter.out_size) // len(parameter.projections),
    }
    for factor, entries in ((Factor.A, a), (Factor.B, b)):
        for entry in entries:
            frame.problems.attempt(check_factor, frame, entry, factor, rank=scale.rank, size=sizes[factor])
            if entry.dtype != entries[0].dtype:
                frame.problems.add(
                    UnsupportedDtype(
                        frame.adapter,
                        entry.name,
                        f"{entries[0].dtype}, as {entries[0].name} is",
                        entry.dtype,
                        "Save all experts' factors of a projection in one dtype.",
                    )
                )
    return ExpertPair(layer, projection, (projection,), scale.rank, scale, tuple(a), tuple(b))


def _find(frame: Frame, found: Mapping[_Key, TensorEntry], key: _Key, why: str) -> TensorEntry | None:
    entry = found.get(key)
    if entry is None:
        where = format_key(key, frame.family)
        frame.problems.add(MissingTensor(frame.adapter, where, why, "no such tensor"))
    return entry


def _check_rank(frame: Frame, entry: TensorEntry, rank: int) -> None:
    if rank > MAX_LORA_RANKS[-1]:
        raise RankUnsupported(
            frame.adapter, entry.name, f"a rank of at most {MAX_LORA_RANKS[-1]}", f"rank {rank}"
        )
