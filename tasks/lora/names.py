"""Tensor names to their meaning and back; both ways come from the same templates.

The grammar is a closed world: a key that no template of the family spells is an error, since the engine
would drop or misplace it without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from tasks.lora.errors import AdapterError, MalformedKey, UnexpectedTensor, UnsupportedConfig
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
class ModuleKey:
    """A factor of an ordinary module; `template` is the family's."""

    layer: int
    template: str
    kind: TensorClass
    factor: Factor


ParsedKey = StackedKey | ExpertKey | ModuleKey

_FACTOR = "lora_{factor}.weight"
_SHOWN = 200

# Names of other kinds of adapters. Source: PEFT 0.21.2 tuners/lora/{layer,dora}.py, utils/save_and_load.py.
_FEATURES = (
    (re.compile(r"lora_magnitude_vector"), "DoRA's magnitudes"),
    (re.compile(r"\.lora_B\.bias$"), "a bias on lora_B"),
    (re.compile(r"lora_embedding_[AB]"), "a LoRA on an embedding"),
    (re.compile(r"trainable_tokens_delta|token_adapter"), "trained token embeddings"),
    (re.compile(r"modules_to_save|original_module"), "a fully trained module"),
    (re.compile(r"(^|\.)(lm_head|embed_tokens)\."), "weights for lm_head or the embeddings"),
)


def parse_key(key: str, family: Family, adapter: str) -> ParsedKey:
    """Return what `key` names in an adapter of this family.

    Raises UnsupportedConfig for the keys of features that cannot be served, MalformedKey for names that are
    no saved LoRA factor, and UnexpectedTensor for factors of modules that the family does not have.
    """
    for pattern, parse in _grammar(family):
        match = pattern.fullmatch(key)
        if match is not None:
            return parse(match)
    raise _explain(key, family, adapter)


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
        case ModuleKey(layer, template, _, factor):
            return _module_template(template).format(layer=layer, factor=factor)


def _expert_template(family: Family) -> str:
    return f"{PREFIX}{family.expert}.{_FACTOR}"


def _stacked_template(family: Family, wrapper: str) -> str:
    return f"{PREFIX}{family.experts}.{wrapper}{_FACTOR}"


def _module_template(template: str) -> str:
    return f"{PREFIX}{template}.{_FACTOR}"


@cache
def _grammar(family: Family) -> tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], ParsedKey]], ...]:
    projections = [name for parameter in family.parameters for name in parameter.projections]
    rules: list[tuple[str, Callable[[re.Match[str]], ParsedKey]]] = [
        (
            _expert_template(family),
            lambda match: ExpertKey(
                int(match["layer"]), int(match["expert"]), match["projection"], Factor(match["factor"])
            ),
        )
    ]
    for parameter in family.parameters:

        def parse_stacked(match: re.Match[str], name: str = parameter.name) -> ParsedKey:
            return StackedKey(int(match["layer"]), name, Factor(match["factor"]))

        rules.append((_stacked_template(family, parameter.wrapper), parse_stacked))
    for module in family.modules:

        def parse_module(
            match: re.Match[str], template: str = module.template, kind: TensorClass = module.kind
        ) -> ParsedKey:
            return ModuleKey(int(match["layer"]), template, kind, Factor(match["factor"]))

        rules.append((_module_template(module.template), parse_module))
    return tuple((_compile(template, projections), parse) for template, parse in rules)


def _compile(template: str, projections: list[str]) -> re.Pattern[str]:
    holes = {
        "layer": r"(?P<layer>0|[1-9][0-9]{0,5})",
        "expert": r"(?P<expert>0|[1-9][0-9]{0,5})",
        "projection": f"(?P<projection>{'|'.join(map(re.escape, projections))})",
        "factor": r"(?P<factor>[AB])",
    }
    parts = re.split(r"\{(\w+)\}", template)
    return re.compile("".join(holes[part] if odd % 2 else re.escape(part) for odd, part in enumerate(parts)))


def _explain(key: str, family: Family, adapter: str) -> AdapterError:
    shown = key if len(key) <= _SHOWN else f"{key[:_SHOWN]}… ({len(key)} characters)"
    for pattern, feature in _FEATURES:
        if pattern.search(key):
            return UnsupportedConfig(
                adapter, shown, "LoRA factors of linear layers and experts only", feature
            )
    if not key.startswith(PREFIX):
        return MalformedKey(adapter, shown, f"a name that begins with {PREFIX}", f"{shown.split('.')[0]!r}")
    named = re.search(r"\.lora_[AB]\.([^.]+)\.weight$", key)
    if named:
        return MalformedKey(
            adapter,
            shown,
            "a name that ends in .lora_A.weight or .lora_B.weight",
            f"PEFT's adapter name {named[1]!r} left in it",
        )
    if not re.search(r"\.lora_[AB]\.weight$", key):
        return MalformedKey(
            adapter,
            shown,
            "a name that ends in .lora_A.weight or .lora_B.weight",
            f"the ending {'.'.join(shown.split('.')[-2:])!r}",
        )
    return UnexpectedTensor(
        adapter, shown, f"a module of {family.name}", "a name that no module of this family has"
    )
