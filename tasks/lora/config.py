"""adapter_config.json: what the trainer says about itself, and what of it can be served."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationError

from tasks.lora.errors import InvalidConfig, RankUnsupported, UnsupportedConfig
from tasks.lora.files import CONFIG_NAME, read_config_bytes
from tasks.lora.strict_json import parse_strict_json

# What `--max-lora-rank` may be. Source: vLLM 0.32 config/lora.py, MaxLoRARanks.
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

# Inits that leave the base weights alone. Source: vLLM 0.32 lora/peft_helper.py, _init_is_supported.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")

# Fields whose features change what the factors mean: any value that is not empty is refused.
# Source: PEFT 0.21.2 tuners/lora/config.py; vLLM 0.32 lora/peft_helper.py.
_REFUSED_FIELDS = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "megatron_config",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)

# Seen with PEFT 0.19.0 and 0.21.2 on transformers 5.24, whose experts are stacked parameters.
_PATTERN_ADVICE = (
    "Train with one rank and one alpha. If you set no pattern, PEFT did: from 0.19 on it turns gate_proj and up_proj "
    "in target_modules into a stacked parameter of twice the rank; name the experts in target_parameters instead."
)

# Fields that say how training went or what it aimed at; they do not change what the factors mean.
_HARMLESS_FIELDS = frozenset(
    (
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)


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


class AdapterConfig(BaseModel):
    """An adapter_config.json as the trainer wrote it; fields not named here are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    peft_type: str | None = None
    r: Annotated[StrictInt, Field(ge=1)]
    lora_alpha: Annotated[StrictInt | StrictFloat, Field(gt=0, allow_inf_nan=False)]
    use_rslora: StrictBool = False
    lora_dropout: float | None = None
    bias: str = "none"
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


def read_adapter_config(directory: Path, *, label: str) -> AdapterConfig:
    """Return the folder's config, known to use only features whose effect survives serving.

    Raises MissingConfig, EscapingPath, CorruptFile, InvalidConfig, UnsupportedConfig or RankUnsupported.
    """
    config = parse_adapter_config(read_config_bytes(directory, label=label), label=label)
    _refuse_features(config, label)
    if config.r > MAX_LORA_RANKS[-1]:
        raise RankUnsupported(label, f"{CONFIG_NAME}: r", f"at most {MAX_LORA_RANKS[-1]}", str(config.r))
    return config


def parse_adapter_config(data: bytes, *, label: str) -> AdapterConfig:
    """Return the config that these bytes spell. Raises InvalidConfig, which names the field."""
    try:
        return AdapterConfig.model_validate(parse_strict_json(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the whole"
        found = "nothing" if first["type"] == "missing" else repr(first["input"])[:200]
        raise InvalidConfig(label, f"{CONFIG_NAME}: {field}", first["msg"], found) from error
    except ValueError as error:
        raise InvalidConfig(label, CONFIG_NAME, "strict JSON", str(error)) from error


def effective_scaling(config: AdapterConfig) -> float:
    """Return the factor on B·A that the trainer applied: alpha / r, or alpha / sqrt(r) with rsLoRA."""
    return config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def smallest_max_lora_rank(rank: int) -> int:
    """Return the smallest legal `--max-lora-rank` that serves `rank`, which is at most 512."""
    return next(legal for legal in MAX_LORA_RANKS if legal >= rank)


def list_config_warnings(config: AdapterConfig) -> tuple[str, ...]:
    """Return one sentence for each field that may matter and is not understood."""
    unknown = sorted(
        name
        for name, value in config.other_fields.items()
        if name not in _HARMLESS_FIELDS
        and name not in _REFUSED_FIELDS
        and value not in (None, False, [], {}, "")
    )
    warnings = [f"{CONFIG_NAME}: the field {name} is not known here and was ignored" for name in unknown]
    if config.lora_dropout and config.target_parameters:
        warnings.append(
            f"{CONFIG_NAME}: lora_dropout {config.lora_dropout} beside target_parameters: PEFT refuses that, "
            "so the experts may have been trained without it"
        )
    return tuple(warnings)


def _refuse_features(config: AdapterConfig, label: str) -> None:
    def refuse(field: str, expected: str, found: object) -> UnsupportedConfig:
        advice = _PATTERN_ADVICE if field in ("rank_pattern", "alpha_pattern") else ""
        return UnsupportedConfig(label, f"{CONFIG_NAME}: {field}", expected, repr(found)[:200], advice)

    if config.peft_type is not None and config.peft_type.upper() != "LORA":
        raise refuse("peft_type", "LORA", config.peft_type)
    if config.bias != "none":
        raise refuse("bias", "none", config.bias)
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise refuse("init_lora_weights", "an init that leaves the base weights alone", init)
    for field in _REFUSED_FIELDS:
        value = config.other_fields.get(field)
        if value not in (None, False, [], {}, ""):
            raise refuse(field, "nothing", value)
