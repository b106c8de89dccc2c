"""What an adapter's files hold, sorted by meaning: expert pairs, other factors, and how they are laid out.

A component is one column of B with its row of A. As many as an expert has stored, so large is the rank of its factors
as served, but where a pair is block diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tasks.lora.base import BaseConfig
from tasks.lora.config import AdapterConfig, LoraScale
from tasks.lora.family import Family
from tasks.lora.header import TensorEntry
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.names import Factor, ModuleKey
from tasks.lora.packing import PackingDecision


class SourceForm(StrEnum):
    """How the factors of all experts are stored: in one 2-D tensor, in one tensor each, in one 3-D tensor."""

    STACKED = "stacked"
    PER_EXPERT = "per-expert"
    CUBE = "3-d"


@dataclass(frozen=True, slots=True)
class ExpertPair:
    """The stored factors of all experts of one parameter of one layer.

    parameter: the family's name for it where experts are stacked, else the one projection that it is.
    projections: those it holds, in the order of their output rows. rank: the components stored for each expert. a, b:
    the stored lora_A and lora_B, one tensor each, or one for each expert in their order.
    """

    layer: int
    parameter: str
    projections: tuple[str, ...]
    rank: int
    scale: LoraScale
    a: tuple[TensorEntry, ...]
    b: tuple[TensorEntry, ...]

    def stored(self, factor: Factor) -> tuple[TensorEntry, ...]:
        """Return the stored lora_A or lora_B."""
        return self.a if factor is Factor.A else self.b


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A factor of an ordinary module, which is served as it is."""

    key: ModuleKey
    entry: TensorEntry
    scale: LoraScale

    @property
    def layer(self) -> int:
        """The layer's number."""
        return self.key.layer


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """An adapter that fits its base, and how it is laid out.

    packing: one decision for each stacked parameter in the file, () for other forms. block_diagonal: the stacked pairs
    of several projections hold each one's factors in components of its own. absent: projections that the file
    never trains; they are served as zeros. pairs: by layer, in the family's order. modules: by layer, then name, A
    before B.
    """

    label: str
    family: Family
    base: BaseConfig
    config: AdapterConfig
    form: SourceForm
    orientation: Orientation
    packing: tuple[PackingDecision, ...]
    block_diagonal: bool
    absent: tuple[str, ...]
    pairs: tuple[ExpertPair, ...]
    modules: tuple[ModuleTensor, ...]
    warnings: tuple[str, ...]

    @property
    def expert_pairs(self) -> int:
        """How many (A, B) pairs of single experts' projections are served, those of absent ones included."""
        projections = sum(len(parameter.projections) for parameter in self.family.parameters)
        return len(self.base.sparse_layers) * self.base.experts * projections

    def packing_of(self, parameter: str, layer: int) -> Packing:
        """Return the packing of one stacked parameter in one layer."""
        return next(item for item in self.packing if item.parameter == parameter).at(layer)

    def rank_of(self, pair: ExpertPair) -> int:
        """Return the rank of each of the pair's projections by itself."""
        return pair.rank // len(pair.projections) if self.block_diagonal else pair.rank

    def components_of(self, pair: ExpertPair) -> Iterator[tuple[str, range]]:
        """Yield each of the pair's projections with its components among those stored."""
        rank = self.rank_of(pair)
        for place, projection in enumerate(pair.projections):
            first = place * rank if self.block_diagonal else 0
            yield projection, range(first, first + rank)
