"""Tensor names to their meaning and back; both ways come from the same templates.

The grammar is a closed world: a key that no template of the family spells is an error, since the engine
would drop or misplace it without a word. What programs leave in a name is taken out first (`normalise_name`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from tasks.lora.errors import (
    AdapterError,
    CollidingNames,
    MalformedKey,
    UnexpectedTensor,
    UnsupportedConfig,
)
from tasks.lora.families import Family, TensorClass

PREFIX = "base_model.model."


class Factor(StrEnum):
    """A is (rank, in), B is (out, rank)."""

    A = "A"
    B = "B"


@dataclass(frozen=True, slots=True)
class StackedKey:
    """A factor that holds all experts of one parameter of one layer."""

    layer: int
    parameter: str
    factor: Factor


@dataclass(frozen=True, slots=True)
class ExpertKey:
    """A factor of one projection of one expert."""

    layer: int
    expert: int
    projection: str
    factor: Factor


@dataclass(frozen=True, slots=True)
class CubeKey:
    """A factor of one projection of all experts of one layer, as a tensor of three dimensions.

    A is (experts or 1, rank, in), B is (experts or 1, out, rank); 1 where all experts share it.
    """

    layer: int
    projection: str
    factor: Factor


@dataclass(frozen=True, slots=True)
class ModuleKey:
    """A factor of an ordinary module; `template` is the family's."""

    layer: int
    template: str
    kind: TensorClass
    factor: Factor


ParsedKey = StackedKey | ExpertKey | CubeKey | ModuleKey

_FACTOR = "lora_{factor}.weight"
_SHOWN = 200

# What torch.compile puts between a module and the name of what it wraps.
_COMPILED = "_orig_mod"
# The name under which the trainer's PEFT held the adapter; save_pretrained takes it out, other programs do not.
_ADAPTER_NAME = re.compile(r"(\.lora_[AB])\.([^.]+)(\.(?:weight|bias))$")

# Names of other kinds of adapters. Source: PEFT 0.21.2 tuners/lora/{layer,dora}.py, utils/save_and_load.py.
_FEATURES = (
    (re.compile(r"lora_magnitude_vector"), "DoRA's magnitudes"),
    (re.compile(r"\.lora_B\.bias$"), "a bias on lora_B"),
    (re.compile(r"lora_embedding_[AB]"), "a LoRA on an embedding"),
    (re.compile(r"trainable_tokens_delta|token_adapter"), "trained token embeddings"),
    (re.compile(r"modules_to_save|original_module"), "a fully trained module"),
    (re.compile(r"(^|\.)(lm_head|embed_tokens)\."), "weights for lm_head or the embeddings"),
)


def normalise_name(name: str) -> str:
    """Return the name as PEFT's save_pretrained spells it, whatever else the trainer left in it or out of it.

    Without `_orig_mod.`, without an adapter's name (`lora_A.default.weight`), with `base_model.model.` before it.
    """
    plain = ".".join(part for part in name.split(".") if part != _COMPILED)
    plain = _ADAPTER_NAME.sub(r"\1\3", plain)
    return plain if plain.startswith(PREFIX) else PREFIX + plain


def parse_key(name: str, family: Family, adapter: str) -> ParsedKey:
    """Return what a stored name means in an adapter of this family.

    Raises UnsupportedConfig for the names of features that cannot be served, MalformedKey for names that are
    no saved LoRA factor, and UnexpectedTensor for factors of modules that the family does not have.
    """
    plain = normalise_name(name)
    for pattern, parse in _grammar(family):
        match = pattern.fullmatch(plain)
        if match is not None:
            return parse(match)
    raise _explain(name, plain, family, adapter)


def parse_names(names: Iterable[str], family: Family, adapter: str) -> tuple[ParsedKey, ...]:
    """Return what each of a file's names means, in the same order; no two mean the same.

    Raises what `parse_key` raises, and CollidingNames for two names of one factor or of two adapters.
    """
    found: dict[ParsedKey, str] = {}
    held: dict[str, str] = {}
    for name in names:
        key = parse_key(name, family, adapter)
        if key in found:
            raise CollidingNames(
                adapter,
                _shorten(name),
                f"one name of {format_key(key, family)}",
                f"also {_shorten(found[key])}",
            )
        found[key] = name
        match = _ADAPTER_NAME.search(name)
        if match is not None:
            held.setdefault(match[2], name)
    if len(held) > 1:
        first, second, *_ = held
        raise CollidingNames(
            adapter, _shorten(held[second]), f"one adapter, {first!r}", f"a factor of the adapter {second!r}"
        )
    return tuple(found)


def format_key(key: ParsedKey, family: Family) -> str:
    """Return the tensor name that `parse_key` reads as `key`."""
    match key:
        case ExpertKey(layer, expert, projection, factor):
            return _expert_template(family).format(
                layer=layer, expert=expert, projection=projection, factor=factor
            )
        case StackedKey(layer, parameter, factor):
            wrapper = next(item.wrapper for item in family.parameters if item.name == parameter)
            return _stacked_template(family, wrapper).format(layer=layer, factor=factor)
        case CubeKey(layer, projection, factor):
            return _cube_template(family).format(layer=layer, projection=projection, factor=factor)
        case ModuleKey(layer, template, _, factor):
            return _module_template(template).format(layer=layer, factor=factor)


def format_expert_keys(
    layer: int, projection: str, factor: Factor, family: Family, *, experts: int
) -> list[str]:
    """Return what `format_key` gives for each expert of one projection, in order; an output has tens of thousands."""
    parts = _expert_template(family).split("{expert}")
    front, back = (part.format(layer=layer, projection=projection, factor=factor) for part in parts)
    return [f"{front}{expert}{back}" for expert in range(experts)]


def _expert_template(family: Family) -> str:
    return f"{PREFIX}{family.expert}.{_FACTOR}"


def _stacked_template(family: Family, wrapper: str) -> str:
    return f"{PREFIX}{family.experts}.{wrapper}{_FACTOR}"


def _cube_template(family: Family) -> str:
    return f"{PREFIX}{family.experts}.{{projection}}.{_FACTOR}"


def _module_template(template: str) -> str:
    return f"{PREFIX}{template}.{_FACTOR}"


@cache
def _grammar(family: Family) -> tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], ParsedKey]], ...]:
    projections = {name: name for parameter in family.parameters for name in parameter.projections}
    cubes = projections | {
        number: name
        for parameter in family.parameters
        for number, name in zip(parameter.numbered, parameter.projections, strict=True)
    }
    rules: list[tuple[re.Pattern[str], Callable[[re.Match[str]], ParsedKey]]] = [
        (
            _compile(_expert_template(family), projections),
            lambda match: ExpertKey(
                int(match["layer"]), int(match["expert"]), match["projection"], Factor(match["factor"])
            ),
        ),
        (
            _compile(_cube_template(family), cubes),
            lambda match: CubeKey(int(match["layer"]), cubes[match["projection"]], Factor(match["factor"])),
        ),
    ]
    for parameter in family.parameters:

        def parse_stacked(match: re.Match[str], name: str = parameter.name) -> ParsedKey:
            return StackedKey(int(match["layer"]), name, Factor(match["factor"]))

        rules.append((_compile(_stacked_template(family, parameter.wrapper)), parse_stacked))
    for module in family.modules:

        def parse_module(
            match: re.Match[str], template: str = module.template, kind: TensorClass = module.kind
        ) -> ParsedKey:
            return ModuleKey(int(match["layer"]), template, kind, Factor(match["factor"]))

        rules.append((_compile(_module_template(module.template)), parse_module))
    return tuple(rules)


def _compile(template: str, projections: Iterable[str] = ()) -> re.Pattern[str]:
    holes = {
        "layer": r"(?P<layer>0|[1-9][0-9]{0,5})",
        "expert": r"(?P<expert>0|[1-9][0-9]{0,5})",
        "projection": f"(?P<projection>{'|'.join(map(re.escape, projections))})",
        "factor": r"(?P<factor>[AB])",
    }
    parts = re.split(r"\{(\w+)\}", template)
    return re.compile("".join(holes[part] if odd % 2 else re.escape(part) for odd, part in enumerate(parts)))


def _explain(name: str, plain: str, family: Family, adapter: str) -> AdapterError:
    shown = _shorten(name)
    for pattern, feature in _FEATURES:
        if pattern.search(plain):
            return UnsupportedConfig(
                adapter, shown, "LoRA factors of linear layers and experts only", feature
            )
    if not re.search(r"\.lora_[AB]\.weight$", plain):
        return MalformedKey(
            adapter,
            shown,
            "a name that ends in .lora_A.weight or .lora_B.weight",
            f"the ending {'.'.join(shown.split('.')[-2:])!r}",
        )
    return UnexpectedTensor(
        adapter, shown, f"a module of {family.name}", "a name that no module of this family has"
    )


def _shorten(name: str) -> str:
    return name if len(name) <= _SHOWN else f"{name[:_SHOWN]}… ({len(name)} characters)"
