"""Whether a merged matrix is its base plus a delta, rounded as storing it in its dtype rounds it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_BLOCK = 1 << 17
"""How many numbers are worked on at a time: what the processor's cache holds is several times faster than memory."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The delta of one matrix: scaling·B·A. a: (rank, in). b: (rank, out), B transposed; both in the stored dtype."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One matrix of a merged checkpoint against base + delta.

    error: |merged - expected| / |what moved|, Frobenius norms. outside: numbers farther off than rounding explains one
    by one. explained: whether it explains all of them together. equal, size: numbers that are exactly as expected, and
    all. moved: whether merged differs from base. due: whether it must, as the delta is more than two units in the last
    place of some number.
    """

    error: float
    outside: int
    explained: bool
    equal: int
    size: int
    moved: bool
    due: bool

    @property
    def agrees(self) -> bool:
        """Whether merged is base + delta."""
        return not self.outside and self.explained and not self.unchanged

    @property
    def unchanged(self) -> bool:
        """Whether it was left out of the merge."""
        return self.due and not self.moved


def compare_matrix(base: torch.Tensor, merged: torch.Tensor, factors: Factors) -> Comparison:
    """Return how far `merged` is from base + delta, both (out, in), in any of the stored dtypes.

    expected = round(base + delta) in merged's dtype. A trainer may sum in another order, and round factors and delta
    before it adds: let that move a delta by w, in units of the coarsest dtype that took part, and let u be the merge's
    unit in the last place. Two bounds follow, and NaN is within neither:

    1. No number is farther off than one u and the most that w can be.
    2. A number that is rounded otherwise for a shift by w is off by u, which befalls w / u of them. So the sum of the
       squares is about that of u·w + w², and four numbers more for matrices so small that chance counts. This is
       what tells another delta where deltas are below u, and every single number is within the first bound.
    """
    dtype = find_dtype(merged)
    limits = torch.finfo(dtype)
    coarsest = max(torch.finfo(one).eps for one in (dtype, factors.a.dtype, factors.b.dtype))
    # The unit of the smallest numbers, which matters in float16 alone.
    quantum = limits.smallest_normal * limits.eps
    exact = torch.float64 if dtype is torch.float32 else torch.float32
    a, b = factors.a.to(exact), (factors.b.to(exact) * factors.scaling).T
    columns, rows = a.norm(dim=0), b.norm(dim=1, keepdim=True)
    spread = quantum * math.sqrt(len(a)) * max(factors.scaling, 1.0)
    off_squared = found_squared = expected_squared = allowed_squared = widest = 0.0
    outside = equal = 0
    moved = due = False
    step = max(1, _BLOCK // base.shape[1])
    for first in range(0, len(base), step):
        part = slice(first, first + step)
        delta = b[part] @ a
        before, found = base[part].to(exact), merged[part].to(dtype).to(exact)
        expected = (before + delta).to(dtype).to(exact)
        start = before.to(dtype).to(exact)
        off = (found - expected).abs_()
        unit = torch.maximum(expected.abs(), start.abs()).mul_(limits.eps)
        delta.abs_()
        due = due or bool((delta > 2 * unit + limits.smallest_normal).any())
        unit += quantum
        # Lengths of a row of B and a column of A bound the sum of |b|·|a|, whatever its order.
        bound = torch.mul(rows[part], columns).mul_(coarsest)
        shift = delta.mul_(coarsest).add_(bound, alpha=0.25).add_(rows[part] + columns, alpha=spread)
        outside += off.numel() - int(torch.count_nonzero(off <= bound.add_(shift).add_(unit)))
        equal += off.numel() - int(torch.count_nonzero(off))
        off_squared += _dot(off, off)
        allowed_squared += _dot(unit.add_(shift), shift)
        widest = max(widest, float(unit.amax()))
        moved = moved or not torch.equal(found, start)
        found_squared += _dot(found.sub_(start), found)
        expected_squared += _dot(expected.sub_(start), expected)
    travelled = math.sqrt(max(found_squared, expected_squared))
    error = math.sqrt(off_squared) / travelled if travelled else 0.0
    return Comparison(
        error=error if math.isfinite(error) else math.inf,
        outside=outside,
        explained=off_squared <= allowed_squared + 4 * widest**2,
        equal=equal,
        size=base.numel(),
        moved=moved,
        due=due,
    )


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.dot(one.flatten(), other.flatten()))


def find_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the narrowest dtype that holds all of its numbers: a merge in bfloat16 may be stored as float32."""
    if tensor.dtype is torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(tensor[:1].to(dtype).to(torch.float32), tensor[:1]) and torch.equal(
                tensor.to(dtype).to(torch.float32), tensor
            ):
                return dtype
    return tensor.dtype
