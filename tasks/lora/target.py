"""The output's adapter_config.json: what vLLM and PEFT need to read the target as it is meant, nothing else.

Both look a module's rank and alpha up by name, but not always by the same name: for the experts of a per-expert file
PEFT asks for the stacked parameter that it makes of them, and for a router for its weight. What is written here
gives every name that either of them asks for its own rank and alpha.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

_EXPERTS = re.compile(r"(?P<front>.+)\.experts(?:\.(?P<expert>\d+))?\.(?P<last>\w+)")
_LAYER = re.compile(r"\.(\d+)\.")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class TargetFormat(StrEnum):
    """How the output stores the experts.

    per-expert: one tensor for each. stacked: all of a parameter in one. slots: all of a projection in one, in the
    numbers and the order in which the engine's slots hold them (docs/slots.md); served where per-expert is.
    """

    PER_EXPERT = "per-expert"
    STACKED = "stacked"
    SLOTS = "slots"


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A pair of factors that is served: an expert's projection or a module, or a stacked parameter.

    name: the engine's, without `base_model.model.`; a stacked parameter ends in `.gate_up_proj` or `.down_proj`.
    scaling: the factor on B·A. parameter: the parameter that PEFT with transformers 5 makes of it, such as
    `….mlp.experts.gate_up_proj` of an expert's gate or `….mlp.gate.weight` of a router; None for a module that
    stays one, and for a stacked parameter that PEFT calls the same.
    """

    name: str
    rank: int
    scaling: float
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a name must be given, and what it gets where no key matches it."""

    rank: int
    alpha: float
    default_rank: int
    default_alpha: float


def format_target_config(
    modules: Sequence[TargetModule], *, format: TargetFormat, base_model: str | None
) -> bytes:
    """Return the adapter_config.json of the output.

    Scalings are written as they act: use_rslora is false, and alpha is such that alpha / r is the scaling (see
    `find_alpha`). r and lora_alpha are those of the first routed expert, for PEFT takes no others for the experts
    of a per-expert file (it doubles both for gate and up, which it fuses: 0.19 and later,
    utils/transformers_weight_conversion.py, _convert_peft_config_moe). What differs from them gets a key in
    rank_pattern or alpha_pattern; no key matches a name that wants another value, so their order is indifferent.
    base_model: kept where it is a hub name; a path of the trainer's machine means nothing elsewhere.

    Two rare per-expert files are for vLLM only: gate and up with different scalings in one layer, for which PEFT has
    but one, and gate and up whose rank differs by layer, where PEFT refuses the shapes. Raises ValueError where the
    experts of one projection in one layer differ in rank or scaling, which neither can serve.
    """
    first = next((module for module in modules if _EXPERTS.fullmatch(module.name)), modules[0])
    alpha = find_alpha(first.scaling, first.rank)
    wanted = _list_wanted(modules, first.rank, alpha)
    ranks = {name: (item.rank, item.default_rank) for name, item in wanted.items()}
    alphas = {name: (item.alpha, item.default_alpha) for name, item in wanted.items()}
    fields: dict[str, object] = {
        "base_model_name_or_path": base_model if base_model and _HUB_NAME.fullmatch(base_model) else None,
        "bias": "none",
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": first.rank,
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    patterns = {"alpha_pattern": _list_keys(alphas), "rank_pattern": _list_keys(ranks)}
    fields |= {name: keys for name, keys in patterns.items() if keys}
    fields |= _list_targets(modules, format)
    return (json.dumps(dict(sorted(fields.items())), indent=2) + "\n").encode("utf-8")


def find_alpha(scaling: float, rank: int) -> float:
    """Return the alpha for which alpha / rank is exactly `scaling` in float64, a whole number where one is.

    Of several the shortest to write. Not every scaling is a float divided by its rank (with rsLoRA that is common):
    where none is exact, the nearest is returned, one unit in the last place of the scaling away (2.2e-16 of it at
    most).
    """
    product = scaling * rank
    whole = round(product)
    if whole / rank == scaling:
        return whole
    near = (product, math.nextafter(product, 0), math.nextafter(product, math.inf))
    return min(near, key=lambda alpha: (abs(alpha / rank - scaling), len(repr(alpha))))


def find_served_scaling(scaling: float, rank: int) -> float:
    """Return the scaling that the engine computes from a per-expert output's config: alpha / r, see `find_alpha`."""
    return find_alpha(scaling, rank) / rank


def _list_targets(modules: Iterable[TargetModule], format: TargetFormat) -> dict[str, object]:
    """Return the fields that say what is targeted, as last components of names."""
    if format is not TargetFormat.STACKED:
        return {"target_modules": sorted({module.name.rpartition(".")[2] for module in modules})}
    parameters, names, stacked = set(), set(), set()
    for module in modules:
        match = _EXPERTS.fullmatch(module.name)
        trained = module.parameter or module.name
        if match:
            stacked.add(trained.rpartition(".")[2])
        if match or module.parameter:
            # As PEFT's own users name them: what follows the layer's number, in every layer that has it.
            parameters.add(_LAYER.split(trained, maxsplit=1)[-1])
        else:
            names.add(module.name.rpartition(".")[2])
    layout = {"lora_B_layout": "rank_major"}
    return {
        "target_modules": sorted(names),
        "target_parameters": sorted(parameters),
        # As unsloth_zoo >= 2026.9.6 marks its own, but for the number of experts, which nothing reads.
        "lora_B_layout": "rank_major",
        "unsloth_fused_expert_lora": {
            "lora_A_layout": "grouped_by_expert",
            "lora_B_layout": "rank_major",
            "parameters": {name: layout for name in sorted(stacked)},
        },
    }


def _list_wanted(modules: Iterable[TargetModule], rank: int, alpha: float) -> dict[str, _Wanted]:
    """Return what vLLM and PEFT must find under each name; the experts of a projection are there as one of them."""
    alike: dict[str, TargetModule] = {}
    for module in modules:
        match = _EXPERTS.fullmatch(module.name)
        first = alike.setdefault(f"{match['front']} {match['last']}" if match else module.name, module)
        if (module.rank, module.scaling) != (first.rank, first.scaling):
            raise ValueError(f"{first.name} and {module.name}, experts of one projection, differ")
    wanted: dict[str, _Wanted] = {}
    wrapped: dict[str, list[TargetModule]] = {}
    for module in alike.values():
        wanted[module.name] = _Wanted(module.rank, find_alpha(module.scaling, module.rank), rank, alpha)
        if module.parameter is not None:
            wrapped.setdefault(module.parameter, []).append(module)
    largest = max(module.rank for module in alike.values())
    for parameter, parts in wrapped.items():
        total, count = sum(part.rank for part in parts), len(parts)
        # A rank above those that are served would make vLLM ask for larger buffers, or refuse the adapter.
        if len({part.scaling for part in parts}) == 1 and (total == rank * count or total <= largest):
            summed = sum(wanted[part.name].alpha for part in parts)
            wanted[parameter] = _Wanted(total, summed, rank * count, alpha * count)
    return wanted


def _list_keys(wanted: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the shortest keys that give each name its value, where that is not its default.

    wanted: by name the value and the default.
    """
    keys: dict[str, float] = {}
    for name, (value, default) in wanted.items():
        if value != default and not any(_matches(key, name) for key in keys):
            key = next(
                key
                for key in _list_candidates(name, wanted)
                if all(value == other for each, (other, _) in wanted.items() if _matches(key, each))
            )
            keys[key] = value
    return keys


def _list_candidates(name: str, wanted: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Yield keys that match a name, each matching fewer others; the last matches names of equal values alone."""
    match = _EXPERTS.fullmatch(name)
    if match:
        number = r"(\.\d+)?" if match["expert"] else ""
        front, last = match["front"], rf"experts{number}\.{match['last']}"
    else:
        front, _, last = name.rpartition(".")
    if f"{name}.weight" in wanted:
        last += r"(\.weight)?"
    yield last
    yield rf"{front.rpartition('.')[2]}\.{last}"
    head, _, tail = _LAYER.split(f"{front}.", maxsplit=1)
    places = {_LAYER.split(each, maxsplit=1)[1]: each for each in wanted if _mask(each) == _mask(name)}
    layers = [layer for layer, each in places.items() if wanted[each][0] == wanted[name][0]]
    layer = f"({'|'.join(layers)})" if len(layers) > 1 else layers[0]
    yield rf"{re.escape(head)}\.{layer}\.{re.escape(tail)}{last}"


def _mask(name: str) -> str:
    return _LAYER.sub(".{}.", name, count=1)


def _matches(key: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({key})$", name) is not None
