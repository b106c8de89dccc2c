"""The base model's sizes, from the config.json beside its weights. No size has a default."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.lora.base_fields import BASE_CONFIG_NAME, BaseFields
from tasks.lora.errors import InvalidBaseConfig, UnknownFamily
from tasks.lora.families import FAMILIES, find_family
from tasks.lora.family import Family, Field, LayerKind, ServedClass, Size
from tasks.lora.strict_json import parse_strict_json

_HEAD_DIM = "head_dim"
_LAYERS = Field(("num_hidden_layers",))
_SHOWN = 200
_MOST_LAYERS = _MOST_EXPERTS = 10_000


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """The dimensions that an adapter of this base must fit, and what the engine calls its parts.

    served: the class of the engine that its config.json means. sparse_layers: the numbers of the layers that have
    routed experts. numbers: the family's fields that the config gives. kinds: the layers of each kind. dtype: of the
    weights, such as bfloat16, as the config says; None where it says nothing. engine_dtype: what the operator has it
    served in, as the engine's --dtype names it; None where that is left to the engine.
    """

    label: str
    family: Family
    served: ServedClass
    layers: int
    sparse_layers: tuple[int, ...]
    vocab: int
    numbers: tuple[tuple[Field, int], ...]
    kinds: tuple[tuple[LayerKind, frozenset[int]], ...]
    dtype: str | None
    engine_dtype: str | None = None

    def size(self, size: Size) -> int:
        """Return a dimension's number. Raises InvalidBaseConfig where the config lacks a field of it."""
        numbers = dict(self.numbers)
        missing = next((field for field in _list_fields(size) if field not in numbers), None)
        if missing is not None:
            where = f"{BASE_CONFIG_NAME}: {missing}"
            raise InvalidBaseConfig(self.label, where, "a whole number above zero", "nothing")
        return sum(
            math.prod(part if isinstance(part, int) else numbers[part] for part in product)
            for product in size.products
        )

    @property
    def experts(self) -> int:
        """The number of routed experts in a layer that has any."""
        return self.size(self.family.expert_count)

    def has(self, layer: int, kind: LayerKind) -> bool:
        """Return whether a layer is of a kind. Raises KeyError for a kind that the family does not have."""
        return layer in dict(self.kinds)[kind]


def read_base_config(source: Path | bytes, *, label: str, engine_dtype: str | None = None) -> BaseConfig:
    """Return the sizes in a config.json: its bytes, its path, or a folder that holds it.

    engine_dtype: what no config.json says, see BaseConfig.

    Fields may sit in `text_config`, whose word counts; `architectures` is not needed. Raises InvalidBaseConfig for a
    missing, wrong or contradictory size, UnknownFamily for a model_type that no row of families.py has, or an
    architecture that its row does not have.
    """
    raw = _read_object(source, label)
    fields = _find_parts(raw, label)
    family = _find_family(fields)
    layers = _count_layers(fields, family)
    sparse = family.sparse.list_layers(fields, layers)
    if not sparse:
        raise fields.invalid(str(family.sparse), "at least one layer with experts", "none")
    every = frozenset(range(layers))
    kinds = {LayerKind.ALL: every, LayerKind.SPARSE: frozenset(sparse), LayerKind.DENSE: every - {*sparse}}
    kinds |= {kind: frozenset(rule.list_layers(fields, layers)) for kind, rule in family.layer_kinds}
    base = BaseConfig(
        label=label,
        family=family,
        served=_find_served(fields, family),
        layers=layers,
        sparse_layers=sparse,
        vocab=fields.count(Field(("vocab_size",))),
        numbers=tuple(_list_numbers(fields, family)),
        kinds=tuple(kinds.items()),
        dtype=_find_dtype(fields),
        engine_dtype=engine_dtype,
    )
    if not 2 <= base.experts <= _MOST_EXPERTS:
        expected = f"at least two experts, at most {_MOST_EXPERTS}"
        raise fields.invalid(str(family.expert_count), expected, base.experts)
    return base


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


def _find_parts(raw: dict[str, object], label: str) -> BaseFields:
    nested = raw.get("text_config")
    if not nested:
        return BaseFields(label, (raw,))
    if not isinstance(nested, dict):
        raise BaseFields(label, (raw,)).invalid("text_config", "a JSON object", repr(nested))
    return BaseFields(label, (nested, raw))


def _find_family(fields: BaseFields) -> Family:
    """The model_type of the whole is asked before that of its text part."""
    named = [part.get("model_type") for part in reversed(fields.parts)]
    for model_type in named:
        family = find_family(model_type) if isinstance(model_type, str) else None
        if family is not None:
            return family
    known = ", ".join(row.name for row in FAMILIES)
    found = " and ".join(map(repr, named))[:_SHOWN]
    raise UnknownFamily(fields.label, f"{BASE_CONFIG_NAME}: model_type", f"one of {known}", found)


def _find_served(fields: BaseFields, family: Family) -> ServedClass:
    """The class that `architectures` names first; of a config that names none, by whether it has a text part.

    A whole of a model_type that is not the family's has a class of its own, and must name it.
    """
    where, named = "architectures", fields.parts[-1].get("architectures")
    if named is None or named == []:
        whole = fields.parts[-1].get("model_type")
        if whole is None or whole in family.model_types:
            return family.served[0 if len(fields.parts) == 1 else -1]
        found = f"none in a {str(whole)[:_SHOWN]!r}"
    elif not isinstance(named, list) or not isinstance(named[0], str):
        raise fields.invalid(where, "a list of names", repr(named))
    else:
        served = next((item for item in family.served if item.architecture == named[0]), None)
        if served is not None:
            return served
        found = repr(named[0])[:_SHOWN]
    known = ", ".join(item.architecture for item in family.served)
    expected = f"one of {known}, which serve {family.name}"
    raise UnknownFamily(fields.label, f"{BASE_CONFIG_NAME}: {where}", expected, found)


def _count_layers(fields: BaseFields, family: Family) -> int:
    listed = (fields.optional_words(name) for name in family.layer_lists)
    layers = next((len(words) for words in listed if words), None) or fields.count(_LAYERS)
    if layers > _MOST_LAYERS:
        raise fields.invalid(str(_LAYERS), f"at most {_MOST_LAYERS}", layers)
    return layers


def _find_dtype(fields: BaseFields) -> str | None:
    """The whole's word counts, as for the engine; transformers 4 calls it torch_dtype.

    Source: vLLM 0.32 transformers_utils/model_arch_config_convertor.py, get_torch_dtype.
    """
    named = (part.get(name) for part in reversed(fields.parts) for name in ("dtype", "torch_dtype"))
    return next((word.removeprefix("torch.") for word in named if isinstance(word, str)), None)


def _list_numbers(fields: BaseFields, family: Family) -> Iterator[tuple[Field, int]]:
    """Yield what the config gives of the fields of all sizes; those of the experts' it must give."""
    needed = [
        family.expert_count,
        *(size for item in family.parameters for size in (item.in_size, item.out_size)),
    ]
    others = (size for module in family.modules for size in (module.in_size, module.out_size))
    for field in dict.fromkeys(field for size in needed for field in _list_fields(size)):
        yield field, fields.count(field)
    for field in dict.fromkeys(field for size in others for field in _list_fields(size)):
        number = fields.optional_count(field)
        if number is None and _HEAD_DIM in field.names:
            number = _derive_head_dim(fields)
        if number is not None:
            yield field, number


def _list_fields(size: Size) -> Iterator[Field]:
    return (part for product in size.products for part in product if isinstance(part, Field))


def _derive_head_dim(fields: BaseFields) -> int:
    """As upstream computes it where it is not given."""
    hidden, heads = fields.count(Field(("hidden_size",))), fields.count(Field(("num_attention_heads",)))
    if hidden % heads:
        raise fields.invalid(_HEAD_DIM, f"a number, as {heads} heads do not divide {hidden}", "nothing")
    return hidden // heads
