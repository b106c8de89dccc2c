"""adapter_config.json: what the trainer says about itself, and what of it can be served."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
)

from tasks.lora.config_fields import list_field_refusals, list_foreign
from tasks.lora.errors import AdapterError, AlphaUndecided, InvalidConfig, RankUnsupported, UnsupportedConfig
from tasks.lora.files import CONFIG_NAME, read_config_bytes
from tasks.lora.patterns import MOST_TRIES, PatternTable, check_amount, check_key
from tasks.lora.problems import Problems
from tasks.lora.strict_json import parse_strict_json

# What `--max-lora-rank` may be. Source: vLLM 0.32 config/lora.py, MaxLoRARanks.
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

# Inits that leave the base weights alone. Source: vLLM 0.32 lora/peft_helper.py, _init_is_supported.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


class ParameterMarker(BaseModel):
    """What unsloth_zoo >= 2026.9.6 states about one stacked parameter."""

    lora_B_layout: str | None = None  # noqa: N815


class ExpertMarker(BaseModel):
    """The object that unsloth_zoo >= 2026.9.6 adds under `unsloth_fused_expert_lora`."""

    lora_B_layout: str | None = None  # noqa: N815
    parameters: dict[str, ParameterMarker] = {}


class AutoMapping(BaseModel):
    """The parts of `auto_mapping` that bear on the layout."""

    unsloth_fixed: bool | None = None
    lora_B_layout: str | None = None  # noqa: N815
    unsloth_fused_expert_lora: ExpertMarker | None = None


def _check_key(key: str) -> str:
    check_key(key)
    return key


def _check_patterns(patterns: object) -> object:
    if isinstance(patterns, dict):
        check_amount(patterns)
    return patterns


PatternKey = Annotated[str, AfterValidator(_check_key)]
# Far above any real value, and small enough that whole numbers are exact in float64.
Rank = Annotated[StrictInt, Field(ge=1, lt=2**31)]
Alpha = Annotated[StrictInt | StrictFloat, Field(gt=0, lt=2**53, allow_inf_nan=False)]
Ranks = Annotated[dict[PatternKey, Rank], BeforeValidator(_check_patterns)]
Alphas = Annotated[dict[PatternKey, Alpha], BeforeValidator(_check_patterns)]


class AdapterConfig(BaseModel):
    """An adapter_config.json as the trainer wrote it; fields not named here are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    peft_type: str | None = None
    r: Rank
    lora_alpha: Alpha
    rank_pattern: Ranks | None = None
    alpha_pattern: Alphas | None = None
    use_rslora: StrictBool | None = None
    lora_dropout: float | None = None
    bias: str | None = None
    init_lora_weights: StrictBool | str | None = True
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    base_model_name_or_path: str | None = None
    peft_version: str | None = None
    auto_mapping: AutoMapping | None = None
    lora_B_layout: str | None = None  # noqa: N815
    unsloth_fused_expert_lora: ExpertMarker | None = None

    @property
    def other_fields(self) -> Mapping[str, object]:
        """Fields that are not named in this class."""
        return MappingProxyType(self.model_extra or {})

    @cached_property
    def rank_table(self) -> PatternTable:
        """The keys of rank_pattern."""
        return PatternTable(self.rank_pattern or {})

    @cached_property
    def alpha_table(self) -> PatternTable:
        """The keys of alpha_pattern."""
        return PatternTable(self.alpha_pattern or {})


def read_adapter_config(directory: Path, *, label: str) -> AdapterConfig:
    """Return the folder's config, known to use only features whose effect survives serving.

    Raises MissingConfig, EscapingPath, CorruptFile, InvalidConfig, UnsupportedConfig or RankUnsupported, with every
    other field that is refused among its `others`.
    """
    config = load_adapter_config(directory, label=label)
    problems = Problems()
    for error in list_refusals(config, label):
        problems.add(error)
    problems.raise_any()
    return config


def load_adapter_config(directory: Path, *, label: str) -> AdapterConfig:
    """Return the folder's config, whatever it asks for.

    Raises MissingConfig, EscapingPath, CorruptFile or InvalidConfig.
    """
    return parse_adapter_config(read_config_bytes(directory, label=label), label=label)


def parse_adapter_config(data: bytes, *, label: str) -> AdapterConfig:
    """Return the config that these bytes spell. Raises InvalidConfig for the first wrong field, the others on it."""
    try:
        return AdapterConfig.model_validate(parse_strict_json(data))
    except ValidationError as error:
        faults = {fault["loc"][:1]: fault for fault in reversed(error.errors(include_url=False))}
        problems = Problems()
        for fault in reversed(faults.values()):
            field = ".".join(map(str, fault["loc"]))[:200] or "the whole"
            found = "nothing" if fault["type"] == "missing" else repr(fault["input"])[:200]
            expected = fault["msg"].removeprefix("Value error, ")[:200]
            problems.add(InvalidConfig(label, f"{CONFIG_NAME}: {field}", expected, found))
        raise problems.merge() from error
    except ValueError as error:
        raise InvalidConfig(label, CONFIG_NAME, "strict JSON", str(error)) from error


def list_refusals(config: AdapterConfig, label: str) -> Iterator[AdapterError]:
    """Yield an error for each feature that would be lost in serving: UnsupportedConfig, and RankUnsupported for r."""

    def refuse(field: str, expected: str, found: object) -> UnsupportedConfig:
        return UnsupportedConfig(label, f"{CONFIG_NAME}: {field}", expected, repr(found)[:200])

    if config.peft_type is not None and config.peft_type.upper() != "LORA":
        yield refuse("peft_type", "LORA", config.peft_type)
    if config.bias not in (None, "none"):
        yield refuse("bias", "none", config.bias)
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        yield refuse("init_lora_weights", "an init that leaves the base weights alone", init)
    yield from list_field_refusals(config.other_fields, label)
    if config.r > MAX_LORA_RANKS[-1]:
        yield RankUnsupported(label, f"{CONFIG_NAME}: r", f"at most {MAX_LORA_RANKS[-1]}", str(config.r))


def list_costly_patterns(config: AdapterConfig, names: int, label: str) -> Iterator[InvalidConfig]:
    """Yield an error for each pattern field that would take minutes to ask for so many modules' names."""
    for field, table in (("rank_pattern", config.rank_table), ("alpha_pattern", config.alpha_table)):
        if table.ways * names > MOST_TRIES:
            expected = (
                f"patterns that match {names} names in at most {MOST_TRIES // names} ways each, all together"
            )
            advice = (
                "Write plain names, or fewer patterns: each is tried on every module, and some in many ways."
            )
            yield InvalidConfig(label, f"{CONFIG_NAME}: {field}", expected, f"{table.ways} ways", advice)


@dataclass(frozen=True, slots=True)
class LoraScale:
    """How a module was trained. scaling: the factor on B·A."""

    rank: int
    alpha: float
    scaling: float


def read_scale(config: AdapterConfig, module: str, *, stored: int, adapter: str) -> LoraScale:
    """Return the rank, alpha and scaling that the trainer gave a module.

    module: its name without `base_model.model.`, such as `model.layers.0.mlp.experts.3.gate_proj`; for all experts of
    a stacked parameter the parameter's, `model.layers.0.mlp.experts.gate_up_proj`. stored: the rank that its
    tensors have; it is for the caller to compare.

    PEFT asks the two pattern fields separately, and the first key that matches counts. It matches the name of a
    linear module, of a stacked parameter (never that of the experts module or of its wrapper), and of a router's
    weight, `….mlp.gate.weight`, where target_parameters names that. It sorts the keys when it saves, so that their
    order in training is lost: of keys of rank_pattern that disagree, the one that `stored` confirms is taken.
    Raises AlphaUndecided for such keys of alpha_pattern.
    Source: PEFT 0.18.1, 0.19.0 and 0.21.2, which agree in all of this (tests/test_lora_scales.py runs them).
    """
    name = _name_in_peft(config, module)
    ranks = config.rank_table.find(name)
    alphas = config.alpha_table.find(name)
    if len(set(alphas.values())) > 1 and _is_sorted(config.alpha_pattern):
        shown = ", ".join(f"{key!r}: {value}" for key, value in alphas.items())
        raise AlphaUndecided(adapter, f"{CONFIG_NAME}: alpha_pattern", f"one alpha for {name}", shown[:200])
    rank = int(next(iter(ranks.values()), config.r))
    if stored in ranks.values() and _is_sorted(config.rank_pattern):
        rank = stored
    alpha = next(iter(alphas.values()), config.lora_alpha)
    return LoraScale(rank, alpha, alpha / (math.sqrt(rank) if config.use_rslora else rank))


def _name_in_peft(config: AdapterConfig, module: str) -> str:
    """Return the name that PEFT holds against the patterns."""
    weight = f"{module}.weight"
    named = any(f".{weight}".endswith(f".{target}") for target in config.target_parameters or ())
    return weight if named else module


def _is_sorted(patterns: Mapping[str, float] | None) -> bool:
    keys = list(patterns or ())
    return keys == sorted(keys)


def smallest_max_lora_rank(rank: int) -> int:
    """Return the smallest legal `--max-lora-rank` that serves `rank`, which is at most 512."""
    return next(legal for legal in MAX_LORA_RANKS if legal >= rank)


def list_config_warnings(config: AdapterConfig) -> tuple[str, ...]:
    """Return one sentence for each field that is ignored though it holds something, or that PEFT would not have taken.

    Source of the last: PEFT 0.17 to 0.21.2 tuners/lora/layer.py, ParamWrapper.
    """
    warnings = [
        f"{CONFIG_NAME}: {name} is another program's, bears on training alone and was ignored"
        for name in list_foreign(config.other_fields)
    ]
    if config.lora_dropout and config.target_parameters:
        warnings.append(
            f"{CONFIG_NAME}: lora_dropout {config.lora_dropout} beside target_parameters: PEFT refuses that, "
            "so the experts may have been trained without it"
        )
    return tuple(warnings)
