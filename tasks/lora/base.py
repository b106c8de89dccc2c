"""The base model's sizes, from the config.json beside its weights. No size has a default."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tasks.lora.errors import InvalidBaseConfig, UnknownFamily
from tasks.lora.families import FAMILIES, Family, Size, find_family
from tasks.lora.strict_json import parse_strict_json

BASE_CONFIG_NAME = "config.json"

_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """The dimensions that an adapter of this base must fit.

    sparse_layers: the numbers of the layers that have routed experts. dense_intermediate: None where the
    config does not give it. heads and kv_heads: attention heads, head_dim: their width.
    """

    label: str
    model_type: str
    hidden: int
    expert_intermediate: int
    dense_intermediate: int | None
    experts: int
    layers: int
    sparse_layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def size(self, size: Size) -> int:
        """Return a dimension's number. Raises InvalidBaseConfig where the config does not give it."""
        number = {
            Size.HIDDEN: self.hidden,
            Size.EXPERT_INTERMEDIATE: self.expert_intermediate,
            Size.GATE_AND_UP: 2 * self.expert_intermediate,
            Size.DENSE_INTERMEDIATE: self.dense_intermediate,
            Size.EXPERTS: self.experts,
            Size.QUERY: self.heads * self.head_dim,
            Size.KEY_VALUE: self.kv_heads * self.head_dim,
        }[size]
        if number is None:
            raise InvalidBaseConfig(self.label, f"{BASE_CONFIG_NAME}: {size}", "a number", "nothing")
        return number


def read_base_config(source: Path | bytes, *, label: str) -> BaseConfig:
    """Return the sizes in a config.json: its bytes, its path, or a folder that holds it.

    Sizes may sit in `text_config`; `architectures` is not needed. Raises InvalidBaseConfig for a missing,
    wrong or contradictory size, UnknownFamily for an architecture that no row of families.py describes.
    """
    fields = _Fields(label, _read_object(source, label))
    model_type = fields.raw.get("model_type")
    family = find_family(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(row.name for row in FAMILIES)
        raise UnknownFamily(
            label, f"{BASE_CONFIG_NAME}: model_type", f"one of {known}", repr(model_type)[:200]
        )
    nested = fields.raw.get("text_config")
    if isinstance(nested, dict) and "num_hidden_layers" not in fields.raw:
        fields = _Fields(label, nested)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = fields.count("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise fields.invalid("num_hidden_layers", f"at most {_MOST_LAYERS}", layers)
    return BaseConfig(
        label=label,
        model_type=family.name,
        hidden=hidden,
        expert_intermediate=fields.count(family.expert_intermediate_field),
        dense_intermediate=fields.optional_count(family.dense_intermediate_field),
        experts=_expert_count(fields, family),
        layers=layers,
        sparse_layers=_sparse_layers(fields, family, layers),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=_head_dim(fields, hidden, heads),
        vocab=fields.count("vocab_size"),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    label: str
    raw: dict[str, object]

    def invalid(self, field: str, expected: str, found: object) -> InvalidBaseConfig:
        return InvalidBaseConfig(self.label, f"{BASE_CONFIG_NAME}: {field}", expected, str(found)[:200])

    def count(self, field: str) -> int:
        value = self.optional_count(field)
        if value is None:
            raise self.invalid(field, "a whole number above zero", "nothing")
        return value

    def optional_count(self, field: str) -> int | None:
        value = self.raw.get(field)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise self.invalid(field, "a whole number above zero", repr(value))
        return value


def _read_object(source: Path | bytes, label: str) -> dict[str, object]:
    if isinstance(source, Path):
        path = source / BASE_CONFIG_NAME if source.is_dir() else source
        if not path.is_file():
            raise InvalidBaseConfig(label, str(path), "the base model's config.json", "no such file")
        source = path.read_bytes()
    try:
        value = parse_strict_json(source)
    except ValueError as error:
        raise InvalidBaseConfig(label, BASE_CONFIG_NAME, "strict JSON", str(error)) from error
    if not isinstance(value, dict):
        raise InvalidBaseConfig(label, BASE_CONFIG_NAME, "a JSON object", type(value).__name__)
    return value


def _expert_count(fields: _Fields, family: Family) -> int:
    names = " or ".join(family.expert_count_fields)
    found = {name: count for name in family.expert_count_fields if (count := fields.optional_count(name))}
    if not found:
        raise fields.invalid(names, "the number of experts", "nothing")
    if len(set(found.values())) > 1:
        raise fields.invalid(names, "the same number in both", json.dumps(found))
    experts = next(iter(found.values()))
    if experts == 1:
        raise fields.invalid(names, "at least two experts", experts)
    return experts


def _sparse_layers(fields: _Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Every layer unless the config says otherwise, as upstream reads a config without these fields."""
    step = fields.optional_count(family.sparse_step_field) or 1
    dense = fields.raw.get(family.dense_layers_field) or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.invalid(family.dense_layers_field, "a list of layer numbers", repr(dense))
    sparse = tuple(layer for layer in range(layers) if layer not in set(dense) and (layer + 1) % step == 0)
    if not sparse:
        raise fields.invalid(family.sparse_step_field, "at least one layer with experts", "none")
    return sparse


def _head_dim(fields: _Fields, hidden: int, heads: int) -> int:
    """As given, else hidden / heads, as upstream computes it."""
    given = fields.optional_count("head_dim")
    if given is not None:
        return given
    if hidden % heads:
        raise fields.invalid("head_dim", f"a number, as {heads} heads do not divide {hidden}", "nothing")
    return hidden // heads
