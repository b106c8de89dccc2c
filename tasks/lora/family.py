"""What a row of the table of families can say. The rows stand in families.py, and no family's name anywhere else.

Templates hold `{layer}`, counted from where the decoder's layers begin: the row's prefixes go before them. Names are
parsed and formatted from the same templates (names.py). A need that no row has yet is a new field here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class TensorClass(StrEnum):
    """What a LoRA factor belongs to."""

    ROUTED_EXPERTS = "routed_experts"
    SHARED_EXPERTS = "shared_experts"
    ATTENTION = "attention"
    ROUTER = "router"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Field:
    """A whole number of the base's config.json; of several spellings, those present must agree.

    A spelling may be a path: `a.*.b` is the b of every entry of the object a, and those must agree, too. otherwise: the
    field that counts where there is none of these.
    """

    names: tuple[str, ...]
    otherwise: str | None = None

    def __str__(self) -> str:
        return " or ".join([*self.names, *([self.otherwise] if self.otherwise else [])])


@dataclass(frozen=True, slots=True)
class Size:
    """A dimension of the base model as its config.json gives it: a sum of products of fields and numbers."""

    products: tuple[tuple[Field | int, ...], ...]

    def __add__(self, other: Size) -> Size:
        return Size(self.products + other.products)

    def __mul__(self, other: Size) -> Size:
        return Size(tuple(left + right for left in self.products for right in other.products))

    def __rmul__(self, count: int) -> Size:
        return Size(tuple((count, *product) for product in self.products))

    def __str__(self) -> str:
        return " + ".join(" * ".join(map(str, product)) for product in self.products)


def size_of(*names: str, otherwise: str | None = None) -> Size:
    """Return the dimension that one field of config.json holds, under any of these names, or another without it."""
    return Size(((Field(names, otherwise),),))


class LayerKind(StrEnum):
    """Which layers of a model have a module.

    LISTED_DENSE: those without experts, of a base that lists such. SLIDING_KEYS: those of sliding attention that
    compute keys and values. SEPARATE_VALUES, KEYS_AS_VALUES: those of full attention that compute their values, or take
    their keys for them. LATENT_QUERIES, DIRECT_QUERIES: those that compute their queries in two steps, or in one.
    """

    ALL = "all"
    SPARSE = "sparse"
    DENSE = "dense"
    LISTED_DENSE = "listed_dense"
    FULL_ATTENTION = "full_attention"
    LINEAR_ATTENTION = "linear_attention"
    SLIDING_ATTENTION = "sliding_attention"
    SLIDING_KEYS = "sliding_attention_with_keys_of_its_own"
    SEPARATE_VALUES = "separate_values"
    KEYS_AS_VALUES = "keys_as_values"
    LATENT_QUERIES = "latent_queries"
    DIRECT_QUERIES = "direct_queries"


class ConfigFields(Protocol):
    """What a layer rule may read of a config.json; each raises InvalidBaseConfig for a value of another kind."""

    def whole(self, name: str) -> int:
        """Return a whole number; that of a list's first entry."""

    def optional_whole(self, name: str) -> int | None:
        """Return a whole number, or None without one; that of a list's first entry."""

    def optional_words(self, name: str) -> tuple[str, ...] | None:
        """Return a list of words, of a text its letters, or None without either."""

    def optional_numbers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers, or None without one."""

    def is_list(self, name: str) -> bool:
        """Return whether it is a list."""

    def is_true(self, name: str) -> bool:
        """Return whether it is true; without it, not."""

    def invalid(self, name: str, expected: str, found: object) -> Exception:
        """Return the InvalidBaseConfig for a field."""


class LayerRule(Protocol):
    """Which layers a config.json gives a kind (layer_rules.py). As text: the fields that it reads."""

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return the numbers of those layers, of `layers` in all. Raises InvalidBaseConfig."""


class StoredAs(StrEnum):
    """How transformers stores a stacked expert parameter, and whether PEFT knows; it decides PEFT's orientation.

    IN_OUT: (experts, in, out), marked as transposed by some versions of transformers. UNMARKED_IN_OUT: the same, by
    none.
    """

    OUT_IN = "out_in"
    IN_OUT = "in_out"
    UNMARKED_IN_OUT = "unmarked_in_out"


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A stacked parameter of the experts module, and the projections it holds.

    wrapper: what PEFT puts between the experts module and the factor, with its dot; the parameter that is registered
    first ends up inside. projections: as transformers names them, in the order in which they lie along the parameter's
    output rows. interleaved: they take turns row by row, instead of equal shares one after the other. served: what the
    engine calls each in per-expert files. numbered: what some trainers call them where all experts of one projection
    are a tensor of three dimensions.
    """

    name: str
    wrapper: str
    in_size: Size
    out_size: Size
    projections: tuple[str, ...]
    served: tuple[str, ...]
    numbered: tuple[str, ...]
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LinearModule:
    """A module with one pair of factors. Rows of one template differ in their layers.

    sources: the templates under which trainers save it, transformers 5's first. served: the engine's. parameter:
    what PEFT names it after where transformers has a bare parameter there, such as "weight" of a router. also_served:
    the engine's templates of further modules that get the same factors; each is the `served` of another row.
    """

    sources: tuple[str, ...]
    served: str
    kind: TensorClass
    layers: LayerKind
    in_size: Size
    out_size: Size
    parameter: str | None = None
    also_served: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UnservedModule:
    """A module that trainers have and the engine does not serve right, by its template. why: what it does instead."""

    source: str
    why: str


class Proof(StrEnum):
    """How it is known what the engine does with a family: run on the real engine, or read in its source."""

    RUN = "run"
    READ = "read"


@dataclass(frozen=True, slots=True)
class MinimumVersion:
    """The first vLLM release that serves a format of a model class right. report: the public report of before."""

    format: str
    version: str
    report: str


@dataclass(frozen=True, slots=True)
class ServedClass:
    """A class of the engine that serves a family.

    architecture: as config.json's `architectures` name it. decoder: what precedes the layers' templates, with its dot.
    native_3d: it takes stacked experts as they are, and per-expert ones only in mixed mode; other classes the other way
    round. source: the engine's file. proof: how all this is known. minimum: of each form that is served right by any.
    """

    architecture: str
    decoder: str
    native_3d: bool
    source: str
    proof: Proof
    minimum: tuple[MinimumVersion, ...] = ()

    def serves(self, format: str) -> bool:
        """Return whether some release serves that format of the class right."""
        return self.minimum_of(format) is not None

    def minimum_of(self, format: str) -> MinimumVersion | None:
        """Return the first release that serves that format right; None where none is known to.

        Slots are the same numbers as per-expert, and served by the same code of the engine.
        """
        known = "per-expert" if format == "slots" else format
        return next((one for one in self.minimum if one.format == known), None)


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture calls its parts, on the trainer's side and on the engine's.

    model_types: as config.json names it, its text part's name too; the first is the family's name. decoders: what
    trainers' names have before the layers' templates, transformers 5's first. served: the engine's classes; the first
    is meant where a config.json of text alone names none, the last where one with a nested text_config does.
    experts: the template of the stacked module; served_experts: the engine's. stored: as transformers has them.
    expert_count: of the routed ones. sparse: which layers have them. layer_kinds: besides ALL, SPARSE and DENSE,
    which is every layer that is not sparse unless given here. patched_by_unsloth: unsloth_zoo <= 2026.9.5 runs the
    experts with its own forward. layer_lists: fields with one word or letter a layer, whose length counts as the number
    of layers, whatever num_hidden_layers says. unserved: modules that are refused with a reason of their own; what
    stands nowhere is refused, too.
    """

    model_types: tuple[str, ...]
    decoders: tuple[str, ...]
    served: tuple[ServedClass, ...]
    experts: str
    served_experts: str
    parameters: tuple[ExpertParameter, ...]
    stored: StoredAs
    modules: tuple[LinearModule, ...]
    expert_count: Size
    sparse: LayerRule
    patched_by_unsloth: bool
    layer_kinds: tuple[tuple[LayerKind, LayerRule], ...] = ()
    layer_lists: tuple[str, ...] = ()
    unserved: tuple[UnservedModule, ...] = ()

    @property
    def name(self) -> str:
        """The family's name."""
        return self.model_types[0]

    def parameter_of(self, projection: str) -> ExpertParameter:
        """Return the parameter that holds a projection, as transformers names it."""
        return next(parameter for parameter in self.parameters if projection in parameter.projections)
