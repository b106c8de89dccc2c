"""Tensor names to their meaning and back; both ways come from the same templates (family.py).

What is read may stand under any name that trainers or engines have for it; what is written stands under the engine's.

The grammar is a closed world: a key that no template of the family spells is an error, since the engine
would drop or misplace it without a word. What programs leave in a name is taken out first (`normalise_name`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from tasks.lora.base import BaseConfig
from tasks.lora.errors import (
    AdapterError,
    CollidingNames,
    MalformedKey,
    UnexpectedTensor,
    UnsupportedConfig,
)
from tasks.lora.family import Family, LinearModule, TensorClass
from tasks.lora.problems import Problems

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
    """A factor of an ordinary module. template: transformers 5's, of which a family may have several rows."""

    layer: int
    template: str
    kind: TensorClass
    factor: Factor


ParsedKey = StackedKey | ExpertKey | CubeKey | ModuleKey

_Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], ParsedKey]]

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
    return _parse(name, _grammar(family), family, adapter)


def parse_names(
    names: Iterable[str], family: Family, adapter: str, problems: Problems
) -> tuple[ParsedKey | None, ...]:
    """Return what each of a file's names means, in the same order; no two mean the same.

    None for one that means nothing, or what an earlier one means. Adds to `problems` what `parse_key` raises, once
    for each feature, and CollidingNames for two names of one factor or of two adapters.
    """
    found: dict[ParsedKey, str] = {}
    held: dict[str, str] = {}
    rules = _grammar(family)
    keys: list[ParsedKey | None] = []
    for name in names:
        try:
            key = _parse(name, rules, family, adapter)
        except AdapterError as error:
            # What a name ends in, of a MalformedKey, has no end of values.
            problems.add(error, "" if isinstance(error, MalformedKey) else error.found)
            keys.append(None)
            continue
        if key in found:
            expected = f"one name of {format_key(key, family)}"
            problems.add(CollidingNames(adapter, _shorten(name), expected, f"also {_shorten(found[key])}"))
            keys.append(None)
            continue
        found[key] = name
        keys.append(key)
        match = _ADAPTER_NAME.search(name)
        if match is not None:
            held.setdefault(match[2], name)
    first, *others = held or [""]
    for other in others:
        expected, said = f"one adapter, {_shorten(first)!r}", f"a factor of the adapter {_shorten(other)!r}"
        problems.add(CollidingNames(adapter, _shorten(held[other]), expected, said))
    return tuple(keys)


def _parse(name: str, rules: Iterable[_Rule], family: Family, adapter: str) -> ParsedKey:
    plain = normalise_name(name)
    for pattern, parse in rules:
        match = pattern.fullmatch(plain)
        if match is not None:
            return parse(match)
    raise _explain(name, plain, family, adapter)


def format_key(key: ParsedKey, family: Family) -> str:
    """Return the tensor name that `parse_key` reads as `key`, as PEFT with transformers 5 spells it."""
    match key:
        case ExpertKey(layer, expert, projection, factor):
            path = f"{family.experts}.{expert}.{projection}"
        case StackedKey(layer, parameter, factor):
            path = f"{family.experts}.{_find_wrapper(family, parameter)}".removesuffix(".")
        case CubeKey(layer, projection, factor):
            path = f"{family.experts}.{projection}"
        case ModuleKey(layer, path, _, factor):
            pass
    return _spell(family.decoders[0], path, layer, factor)


def format_parameter(layer: int, parameter: str, family: Family) -> str:
    """Return what PEFT with transformers 5 calls a stacked parameter of a layer, without `base_model.model.`."""
    return f"{family.decoders[0]}{family.experts}.{parameter}".format(layer=layer)


def format_served_key(key: ExpertKey | StackedKey | ModuleKey, base: BaseConfig) -> str:
    """Return the name under which the engine takes a factor; of a module's several the first.

    Raises ValueError for a module that the layer lacks.
    """
    family = base.family
    match key:
        case ExpertKey(layer, expert, projection, factor):
            path = f"{family.served_experts}.{expert}.{_find_served(family, projection)}"
        case StackedKey(layer, parameter, factor):
            path = f"{family.served_experts}.{_find_wrapper(family, parameter)}".removesuffix(".")
        case ModuleKey():
            return format_served_module_keys(key, base)[0]
    return _spell(base.served.decoder, path, layer, factor)


def format_served_module_keys(key: ModuleKey, base: BaseConfig) -> tuple[str, ...]:
    """Return every name under which the engine takes this one factor of a module, the module's own first.

    Raises ValueError for a module that the layer lacks.
    """
    module = find_module(key, base)
    return tuple(
        _spell(base.served.decoder, path, key.layer, key.factor)
        for path in (module.served, *module.also_served)
    )


def format_served_expert_keys(layer: int, projection: str, factor: Factor, base: BaseConfig) -> list[str]:
    """Return what `format_served_key` gives for each expert of one projection, in order.

    An output has tens of thousands of them.
    """
    front = f"{PREFIX}{base.served.decoder}{base.family.served_experts.format(layer=layer)}."
    back = f".{_find_served(base.family, projection)}.{_FACTOR.format(factor=factor)}"
    return [f"{front}{expert}{back}" for expert in range(base.experts)]


def format_served_slots_key(layer: int, projection: str, factor: Factor, base: BaseConfig) -> str:
    """Return what `format_served_key` gives for an expert of one projection, without the expert's number."""
    path = f"{base.family.served_experts}.{_find_served(base.family, projection)}"
    return _spell(base.served.decoder, path, layer, factor)


def format_served_parameter(layer: int, parameter: str, base: BaseConfig) -> str:
    """Return the name that the engine holds against a config's patterns, without `base_model.model.`.

    It calls the inner one of the experts' parameters gate_up_proj and the outer one down_proj, in every family.
    Source: vLLM 0.32 lora/peft_helper.py, get_rank_and_scaling.
    """
    name = "gate_up_proj" if _find_wrapper(base.family, parameter) else "down_proj"
    return f"{base.served.decoder}{base.family.served_experts}.{name}".format(layer=layer)


def find_module(key: ModuleKey, base: BaseConfig) -> LinearModule:
    """Return the row that describes a module in its layer. Raises ValueError for a module that the layer lacks."""
    for module in base.family.modules:
        if module.sources[0] == key.template and base.has(key.layer, module.layers):
            return module
    raise ValueError(f"{base.label}: layer {key.layer} has no {key.template}")


def _spell(decoder: str, path: str, layer: int, factor: Factor) -> str:
    return f"{PREFIX}{decoder}{path.format(layer=layer)}.{_FACTOR.format(factor=factor)}"


def _find_wrapper(family: Family, parameter: str) -> str:
    return next(item.wrapper for item in family.parameters if item.name == parameter)


def _find_served(family: Family, projection: str) -> str:
    parameter = family.parameter_of(projection)
    return parameter.served[parameter.projections.index(projection)]


@cache
def _grammar(family: Family) -> tuple[_Rule, ...]:
    return tuple(_list_rules(family))


def _list_rules(family: Family) -> Iterator[_Rule]:
    """Yield what each template of the family means, those of tens of thousands of names first."""
    decoders = _list_decoders(family)
    stacked = dict.fromkeys([family.experts, family.served_experts])
    names: dict[str, str] = {}
    for parameter in family.parameters:
        for spelt in (parameter.numbered, parameter.served, parameter.projections):
            names |= zip(spelt, parameter.projections, strict=True)

    def compile_rule(path: str) -> re.Pattern[str]:
        return _compile(f"{PREFIX}{{decoder}}{path}.{_FACTOR}", decoders, names)

    for experts in stacked:
        yield (
            compile_rule(f"{experts}.{{expert}}.{{projection}}"),
            lambda match: ExpertKey(
                int(match["layer"]), int(match["expert"]), names[match["projection"]], Factor(match["factor"])
            ),
        )
    for experts in stacked:
        yield (
            compile_rule(f"{experts}.{{projection}}"),
            lambda match: CubeKey(int(match["layer"]), names[match["projection"]], Factor(match["factor"])),
        )
        for parameter in family.parameters:

            def parse_stacked(match: re.Match[str], name: str = parameter.name) -> ParsedKey:
                return StackedKey(int(match["layer"]), name, Factor(match["factor"]))

            yield compile_rule(f"{experts}.{parameter.wrapper}".removesuffix(".")), parse_stacked
    for module in family.modules:

        def parse_module(match: re.Match[str], module: LinearModule = module) -> ParsedKey:
            return ModuleKey(int(match["layer"]), module.sources[0], module.kind, Factor(match["factor"]))

        for path in dict.fromkeys([*module.sources, module.served]):
            yield compile_rule(path), parse_module


def _list_decoders(family: Family) -> Iterable[str]:
    return dict.fromkeys([*family.decoders, *(served.decoder for served in family.served)])


def _compile(template: str, decoders: Iterable[str], projections: Iterable[str]) -> re.Pattern[str]:
    holes = {
        "decoder": f"(?:{'|'.join(map(re.escape, decoders))})",
        "layer": r"(?P<layer>0|[1-9][0-9]{0,5})",
        "expert": r"(?P<expert>0|[1-9][0-9]{0,5})",
        "projection": f"(?P<projection>{'|'.join(map(re.escape, projections))})",
        "factor": r"(?P<factor>[AB])",
    }
    parts = re.split(r"\{(\w+)\}", template)
    return re.compile("".join(holes[part] if odd % 2 else re.escape(part) for odd, part in enumerate(parts)))


@cache
def _list_unserved(family: Family) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return the names of the modules that the engine does not serve, each with the reason."""
    decoders = tuple(_list_decoders(family))
    return tuple(
        (_compile(f"{PREFIX}{{decoder}}{module.source}.{_FACTOR}", decoders, ()), module.why)
        for module in family.unserved
    )


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
    for pattern, why in _list_unserved(family):
        if pattern.fullmatch(plain):
            advice = "Train without this module, or serve the merged model."
            return UnexpectedTensor(adapter, shown, "a module that the engine serves as trained", why, advice)
    return UnexpectedTensor(
        adapter, shown, f"a module of {family.name}", "a name that no module of this family has"
    )


def _shorten(name: str) -> str:
    return name if len(name) <= _SHOWN else f"{name[:_SHOWN]}… ({len(name)} characters)"
