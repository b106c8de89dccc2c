"""Adapters that are made for a base from its config alone, to see that an engine applies what it loads.

Seeded random factors in the form in which adapters are served, in the first and the last layer that has each module:
enough to be plain in the scores, and small even for a large base. They mean nothing and are never served.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks.lora.base import BaseConfig
from tasks.lora.errors import InvalidBaseConfig
from tasks.lora.family import ExpertParameter, LinearModule, TensorClass
from tasks.lora.files import CONFIG_NAME, WEIGHTS_NAME
from tasks.lora.header import TensorGroup, format_header
from tasks.lora.names import (
    PREFIX,
    ExpertKey,
    Factor,
    ModuleKey,
    StackedKey,
    find_module,
    format_key,
    format_parameter,
    format_served_expert_keys,
    format_served_key,
    format_served_module_keys,
    format_served_parameter,
)
from tasks.lora.resolve import ServedModules, find_unresolved
from tasks.lora.target import TargetFormat, TargetModule, format_target_config
from tasks.lora.write import staged_folder, write_file, write_safetensors

_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The change of a module's output, as a share of its input, at strength 1.
_EFFECT = 0.5


@dataclass(frozen=True, slots=True)
class _Pair:
    """Factors of one shape. names: without `.lora_A.weight`. stack: how many experts one of them holds.

    target: what the config must say of them, but for the rank and the scaling: the engine's name and PEFT's.
    """

    names: tuple[str, ...]
    in_size: int
    out_size: int
    stack: int
    target: tuple[str, str | None]

    def shape(self, factor: Factor, rank: int) -> tuple[int, int]:
        ranks = self.stack * rank
        return (ranks, self.in_size) if factor is Factor.A else (self.out_size, ranks)


@dataclass(frozen=True, slots=True)
class DiagnosticSite:
    """One place of a layer that takes factors: a module, or the routed experts with all their projections."""

    kind: TensorClass
    place: str
    layer: int
    pairs: tuple[_Pair, ...]


def list_sites(
    base: BaseConfig, format: TargetFormat, served: ServedModules | None
) -> tuple[DiagnosticSite, ...]:
    """Return where an adapter of this form can change a base: of each place, the first and the last layer.

    served: what the engine told of itself; sites where it takes no factors are left out. A module whose size the
    base's config.json does not give is left out, too. Raises InvalidBaseConfig where it lacks the experts' sizes.
    """
    sites = [*_list_expert_sites(base, format), *_list_module_sites(base)]
    if served is not None:
        names = [f"{PREFIX}{pair.names[0]}.lora_A.weight" for site in sites for pair in site.pairs]
        lost = {one.name for one in find_unresolved(names, served, base.family)}
        sites = [
            site
            for site in sites
            if not any(f"{PREFIX}{pair.names[0]}.lora_A.weight" in lost for pair in site.pairs)
        ]
    places: dict[tuple[TensorClass, str], list[DiagnosticSite]] = {}
    for site in sites:
        places.setdefault((site.kind, site.place), []).append(site)
    return tuple(site for found in places.values() for site in dict.fromkeys((found[0], found[-1])))


def write_diagnostic(
    destination: Path,
    sites: Sequence[DiagnosticSite],
    *,
    format: TargetFormat,
    rank: int,
    dtype: str,
    seed: str,
    strengths: Mapping[TensorClass, float],
) -> None:
    """Write an adapter on those sites whose class has a strength, to a folder that appears whole or not at all.

    dtype: F32, F16 or BF16. At strength 1 a module's output changes by about half of its input, scaling 1. The same
    seed and arguments give the same bytes. Raises ValueError where no site has such a class, DestinationExists,
    OSError.
    """
    chosen = [site for site in sites if site.kind in strengths]
    if not chosen:
        raise ValueError(f"no site of {', '.join(strengths)}")
    pairs = [(pair, strengths[site.kind]) for site in chosen for pair in site.pairs]
    groups = [
        TensorGroup(
            tuple(f"{PREFIX}{name}.lora_{factor}.weight" for name in pair.names),
            dtype,
            pair.shape(factor, rank),
        )
        for pair, _ in pairs
        for factor in Factor
    ]
    header = format_header(groups)
    modules = [
        TargetModule(name, rank, 1.0, parameter) for pair, _ in pairs for name, parameter in [pair.target]
    ]
    total = len(header) + sum(group.data_bytes for group in groups)
    with staged_folder(destination) as folder:
        write_safetensors(folder / WEIGHTS_NAME, header, _make_blocks(pairs, rank, dtype, seed), total)
        write_file(folder / CONFIG_NAME, format_target_config(modules, format=format, base_model=None))


def _make_blocks(
    pairs: Sequence[tuple[_Pair, float]], rank: int, dtype: str, seed: str
) -> Iterator[memoryview]:
    """Yield each group's bytes: rows of A of length about 1, B such that the product has the strength."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]) >> 1
    generator = torch.Generator().manual_seed(number)
    for pair, strength in pairs:
        sizes = {Factor.A: pair.in_size**-0.5, Factor.B: _EFFECT * strength * rank**-0.5}
        for factor in Factor:
            shape = (len(pair.names), *pair.shape(factor, rank))
            values = (torch.randn(shape, generator=generator) * sizes[factor]).to(_TORCH[dtype])
            yield memoryview(values.contiguous().view(torch.uint8).numpy()).cast("B")


def _list_expert_sites(base: BaseConfig, format: TargetFormat) -> Iterator[DiagnosticSite]:
    for layer in base.sparse_layers:
        pairs = tuple(
            pair
            for parameter in base.family.parameters
            for pair in _list_expert_pairs(base, format, layer, parameter)
        )
        yield DiagnosticSite(TensorClass.ROUTED_EXPERTS, base.family.served_experts, layer, pairs)


def _list_expert_pairs(
    base: BaseConfig, format: TargetFormat, layer: int, parameter: ExpertParameter
) -> Iterator[_Pair]:
    in_size, out_size = base.size(parameter.in_size), base.size(parameter.out_size)
    trained = format_parameter(layer, parameter.name, base.family)
    if format is TargetFormat.STACKED:
        name = _module_name(format_served_key(StackedKey(layer, parameter.name, Factor.A), base))
        target = format_served_parameter(layer, parameter.name, base)
        wrapped = None if trained == target else trained
        yield _Pair((name,), in_size, out_size, base.experts, (target, wrapped))
        return
    share = out_size // len(parameter.projections)
    for projection in parameter.projections:
        names = format_served_expert_keys(layer, projection, Factor.A, base)
        first = _module_name(format_served_key(ExpertKey(layer, 0, projection, Factor.A), base))
        yield _Pair(tuple(map(_module_name, names)), in_size, share, 1, (first, trained))


def _list_module_sites(base: BaseConfig) -> Iterator[DiagnosticSite]:
    for module in base.family.modules:
        sizes = _find_sizes(base, module)
        for layer in range(base.layers) if sizes else ():
            if base.has(layer, module.layers):
                key = ModuleKey(layer, module.sources[0], module.kind, Factor.A)
                pairs = tuple(_list_module_pairs(base, key, *sizes))
                yield DiagnosticSite(module.kind, module.served, layer, pairs)


def _list_module_pairs(base: BaseConfig, key: ModuleKey, in_size: int, out_size: int) -> Iterator[_Pair]:
    wrapped = find_module(key, base).parameter
    if wrapped is not None:
        wrapped = f"{_module_name(format_key(key, base.family))}.{wrapped}"
    for name in map(_module_name, format_served_module_keys(key, base)):
        yield _Pair((name,), in_size, out_size, 1, (name, wrapped))
        wrapped = None


def _find_sizes(base: BaseConfig, module: LinearModule) -> tuple[int, int] | tuple[()]:
    """Both sizes, nothing where the config lacks a field: a base without shared experts has none of theirs."""
    try:
        return base.size(module.in_size), base.size(module.out_size)
    except InvalidBaseConfig:
        return ()


def _module_name(key: str) -> str:
    return key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
