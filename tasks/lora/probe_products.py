"""Random probes, and a factor times its probes at about the speed at which it can be read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from tasks.lora.factors import Part
from tasks.lora.names import Factor

PROBES = 16
"""How many inputs, and how many weightings of the outputs, are tried: k."""

# Numbers that are turned into float32 at a time: they stay in a core's own cache until they are multiplied.
_CHUNK = 1 << 18


class Probes:
    """Standard normal numbers, (size, k) in float32: one set for all inputs of a size, another for all outputs of it.

    The projections of one parameter have the same probes, so that one can be held against another.
    """

    def __init__(self, seed: int, parts: Iterable[Part]) -> None:
        """Draw those that the parts need."""
        sizes = {(Factor.A, part.in_size) for part in parts} | {(Factor.B, part.out_size) for part in parts}
        self._drawn = {key: _draw(seed, *key) for key in sizes}

    def of(self, factor: Factor, size: int) -> torch.Tensor:
        """Return the inputs for an A of this size, or the weightings for a B of it."""
        return self._drawn[factor, size]


def _draw(seed: int, factor: Factor, size: int) -> torch.Tensor:
    # torch's generator on a CPU looks at 32 bits of its seed: a file could be made to please dozens of so few.
    generator = np.random.default_rng([seed, size, int(factor is Factor.B)])
    return torch.from_numpy(generator.standard_normal((size, PROBES), dtype=np.float32))


@dataclass(frozen=True, slots=True)
class ProbedFactor:
    """A factor times its probes: (E, r, k), float64. names: the tensors that hold the factor."""

    values: torch.Tensor
    names: tuple[str, ...]

    def names_where(self, experts: torch.Tensor) -> list[str]:
        """Return the tensors that hold these experts' lines. experts: (E,), truth values."""
        return [
            self.names[place if len(self.names) > 1 else 0] for place in experts.nonzero().flatten().tolist()
        ]


@dataclass(frozen=True, slots=True)
class ProbedPair:
    """A projection of all experts, probed. scaling: (E,) or (1,), float64."""

    a: ProbedFactor
    b: ProbedFactor
    scaling: torch.Tensor

    def deltas(self) -> torch.Tensor:
        """Return the probed deltas, (E, k, k) in float64."""
        return self.scaling.view(-1, 1, 1) * (self.b.values.transpose(1, 2) @ self.a.values)

    def components(self) -> torch.Tensor:
        """Return the norms that the probed deltas would have if no component cancelled another, (E,)."""
        squares = self.a.values.square().sum(dim=2) * self.b.values.square().sum(dim=2)
        return self.scaling.abs() * squares.sum(dim=1).sqrt()

    def moved(self) -> torch.Tensor:
        """Return of each expert whether its delta can differ from zero, (E,)."""
        return ((self.a.values != 0).any(dim=2) & (self.b.values != 0).any(dim=2)).any(dim=1)


@dataclass(frozen=True, slots=True)
class Judged:
    """Two probed deltas of each expert, all (E,) in float64.

    errors: difference over norm. difference, norm: of the two, and of the source's. components: the larger of what
    the two would be if no component cancelled another.
    """

    errors: torch.Tensor
    difference: torch.Tensor
    norm: torch.Tensor
    components: torch.Tensor


def judge(old: ProbedPair | None, new: ProbedPair) -> Judged:
    """Return how the output's pair compares with the source's, of which None is zero."""
    found, components = new.deltas(), new.components()
    wanted = torch.zeros_like(found)
    if old is not None:
        wanted, components = old.deltas(), torch.maximum(components, old.components())
    difference = (found - wanted).flatten(1).norm(dim=1)
    norm = wanted.flatten(1).norm(dim=1)
    errors = torch.where(difference == 0, 0.0, difference / norm)
    return Judged(errors.nan_to_num(nan=torch.inf, posinf=torch.inf), difference, norm, components)


def multiply_probes(lines: torch.Tensor, probes: torch.Tensor) -> torch.Tensor:
    """Return lines @ probes, (E, r, k) in float64, added up in float32.

    lines: (E, r, n), any dtype and strides; read in the order of memory, so that no transposed copy is needed.
    probes: (n, k), float32.
    """
    experts, rank, size = lines.shape
    by_expert, by_component, by_position = lines.stride()
    if by_expert == 0 and experts > 1:  # all experts have the same
        return multiply_probes(lines[:1], probes).expand(experts, -1, -1)
    if by_position > max(by_expert, by_component):
        found = _multiply_columns(lines, probes)
    elif by_position > by_component:
        found = _multiply_each(lines, probes)
    else:
        found = torch.empty(experts, rank, probes.shape[1])
        count = max(1, _CHUNK // (rank * size))
        for first in range(0, experts, count):
            chunk = _convert(lines[first : first + count]).view(-1, size)
            torch.mm(chunk, probes, out=found[first : first + count].view(len(chunk), -1))
    return found.double()


def _multiply_columns(lines: torch.Tensor, probes: torch.Tensor) -> torch.Tensor:
    """Likewise where positions are farthest apart in memory: a sum over stretches of positions."""
    experts, rank, size = lines.shape
    grouped = lines.stride(0) >= lines.stride(1)
    columns = lines.permute(2, 0, 1) if grouped else lines.permute(2, 1, 0)
    total = torch.zeros(probes.shape[1], experts * rank)
    count = max(1, _CHUNK // (experts * rank))
    for first in range(0, size, count):
        chunk = _convert(columns[first : first + count]).view(-1, experts * rank)
        total.addmm_(probes[first : first + count].T, chunk)
    if grouped:
        return total.view(-1, experts, rank).permute(1, 2, 0)
    return total.view(-1, rank, experts).permute(2, 1, 0)


def _multiply_each(lines: torch.Tensor, probes: torch.Tensor) -> torch.Tensor:
    """Likewise where each expert has a tensor (n, r) of its own."""
    experts, rank, size = lines.shape
    weights = probes.T.contiguous()
    found = torch.empty(experts, probes.shape[1], rank)
    count = max(1, _CHUNK // (rank * size))
    for first in range(0, experts, count):
        chunk = _convert(lines[first : first + count].transpose(1, 2))
        torch.matmul(weights, chunk, out=found[first : first + count])
    return found.transpose(1, 2)


def _convert(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
