"""How far the deltas of a conversion are from those of its source: collected pair by pair, told by projection."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tasks.lora.factors import Part
from tasks.lora.family import TensorClass

MOST_NAMED = 64
"""So many differing pairs are named, the worst."""


@dataclass(frozen=True, slots=True)
class ProjectionErrors:
    """The relative errors of all pairs of one projection: the norm of the difference over that of the source's delta.

    projection: as transformers names it; of an ordinary module the end of its name. differing: pairs beyond the
    tolerance. worst: "layer 3 expert 17", or a module's name.
    """

    projection: str
    pairs: int
    differing: int
    median: float
    p99: float
    largest: float
    worst: str


@dataclass(frozen=True, slots=True)
class PairErrors:
    """How the pairs of one projection of a part compare.

    copy: which of the modules that get its factors; 0 for experts. errors: relative, (experts,) in float64; of a
    module one number. differing: (experts,), truth values.
    """

    projection: str
    copy: int
    errors: torch.Tensor
    differing: torch.Tensor


@dataclass(slots=True)
class _Collected:
    errors: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    differing: int = 0


class ErrorTally:
    """Collects relative errors, and which pairs differ."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._projections: dict[str, _Collected] = {}
        self._differing: list[tuple[str, float]] = []

    def add(self, part: Part, found: PairErrors) -> None:
        """Add the pairs of one projection of a part."""
        projection = found.projection
        collected = self._projections.setdefault(projection, _Collected())
        collected.errors.append(found.errors)
        names, ending = [part.served[projection][found.copy]], ""
        if part.kind is TensorClass.ROUTED_EXPERTS:
            names = [f"layer {part.layer} expert {expert}" for expert in range(len(found.errors))]
            ending = f" {projection}"
        collected.names += names
        for place in found.differing.nonzero().flatten().tolist():
            self._differing.append((names[place] + ending, float(found.errors[place])))
            collected.differing += 1

    @property
    def pairs(self) -> int:
        """How many pairs were added."""
        return sum(len(collected.names) for collected in self._projections.values())

    def list_differing(self) -> tuple[tuple[str, float], ...]:
        """Return where pairs differ, with the relative error: the MOST_NAMED worst, the worst first."""
        return tuple(sorted(self._differing, key=lambda item: -item[1])[:MOST_NAMED])

    def list_errors(self) -> tuple[ProjectionErrors, ...]:
        """Return the distribution of each projection's errors, in the order in which they came."""
        return tuple(_summarise(name, collected) for name, collected in self._projections.items())


def describe_part(part: Part) -> str:
    """Return what a part is called: "layer 3 gate_proj and up_proj", or a module's name."""
    if part.kind is TensorClass.ROUTED_EXPERTS:
        return f"layer {part.layer} {' and '.join(part.projections)}"
    return part.served[part.projections[0]][0]


def name_exchanged(part: Part, exchanged: torch.Tensor) -> list[str]:
    """Return the experts whose two projections are exchanged, or the layer where all are. exchanged: (experts,)."""
    experts = exchanged.nonzero().flatten().tolist()
    if len(experts) == len(exchanged):
        return [f"layer {part.layer}"]
    return [f"layer {part.layer} expert {expert}" for expert in experts]


def _summarise(projection: str, collected: _Collected) -> ProjectionErrors:
    errors = torch.cat(collected.errors)
    ordered, count = errors.sort().values, len(errors)
    return ProjectionErrors(
        projection=projection,
        pairs=count,
        differing=collected.differing,
        median=float(ordered[(count - 1) // 2]),
        p99=float(ordered[-(-99 * count // 100) - 1]),
        largest=float(ordered[-1]),
        worst=collected.names[int(errors.argmax())],
    )
