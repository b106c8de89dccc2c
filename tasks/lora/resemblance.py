"""How the pairs of columns that a packing names as one expert's differ from other pairs: the tests of `correlation`.

Each gives a z: a number as unlikely by chance as that many standard errors of a normal deviate, whatever the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, copysign, log, log1p, sqrt

import torch
from torch import Tensor

from tasks.lora.columns import Columns, Sample

# A background of fewer degrees of freedom is none.
_LEAST_FREEDOM = 8
# Orthogonal: the mean |cosine| of the pairs is below this share of the others' median.
_ORTHOGONAL = 0.1


@dataclass(frozen=True, slots=True)
class Difference:
    """z, and size as a share of the background's mean. matched: whether the background is in the same cells."""

    z: float
    contrast: float
    matched: bool


def compare_pairs(cosines: Tensor, named: Tensor, cells: Tensor, number: int) -> Difference:
    """Return how the |cosines| (pairs,) of the named pairs differ from the other pairs' in the same cells.

    cells: (pairs,) below `number`. Pairs of a cell are of one kind but for being named or not; where every cell is all
    named or not at all, the means of the cells are compared.
    """
    inside, rest = (_sum_up(cosines[part], cells[part], number) for part in (named, ~named))
    both = (inside.count > 0) & (rest.count > 0)
    matched = bool(both.any())
    if matched:
        found, counts, expected = inside.mean[both], inside.count[both], rest.mean[both]
        freedom = float((rest.count[both] - 1).sum())
        spread = float(rest.squares[both].sum())
        variances = float((counts + counts.square() / rest.count[both]).sum())
    else:
        found, others = inside.mean[inside.count > 0], rest.mean[rest.count > 0]
        counts, expected = torch.ones_like(found), others.mean().expand_as(found)
        freedom = len(others) - 1.0
        spread = float((others - others.mean()).square().sum())
        variances = len(found) + len(found) ** 2 / max(1, len(others))
    base = float((counts * expected).sum())
    if freedom < _LEAST_FREEDOM or spread == 0.0 or base == 0.0:
        return Difference(0.0, 0.0, matched)
    total = float((counts * (found - expected)).sum())
    return Difference(_as_z(total / sqrt(variances * spread / freedom), freedom), total / base, matched)


def rate_orthogonality(cosines: Tensor, named: Tensor) -> float:
    """Return how unlikely it is that the named |cosines|, if drawn from the others, are so small; 0 if they are not."""
    inside = cosines[named]
    if len(inside) == 0 or len(cosines) - len(inside) < _LEAST_FREEDOM:
        return 0.0
    mean = float(inside.mean())
    # No median is more than twice the mean: most tensors need no sorting.
    if mean * (len(cosines) - len(inside)) >= 2 * _ORTHOGONAL * (float(cosines.sum()) - mean * len(inside)):
        return 0.0
    rest = cosines[~named]
    if mean >= _ORTHOGONAL * rest.median():
        return 0.0
    # A few may be larger: columns that are all but zero are not quite orthogonal to anything.
    small = max(1, round(0.9 * len(inside)))
    below = (rest <= inside.kthvalue(small).values).sum()
    return sqrt(-2 * small * log((float(below) + 1) / (len(rest) + 1)))


def rate_zeros(count: int, *, experts: int, rank: int) -> float:
    """Return how unlikely it is that so many zero columns, anywhere among E * r, are those of whole experts."""
    return sqrt(2 * (log(comb(experts * rank, count)) - log(comb(experts, count // rank))))


def row_cosines(a: Tensor, sample: Sample) -> Tensor:
    """Return the cosines between the sampled rows of each expert in lora_A: (experts, components, components).

    NaN for rows of zeros.
    """
    rows = a.index_select(0, sample.a_rows().flatten()).float()
    unit = (rows / rows.norm(dim=1, keepdim=True)).reshape(*sample.a_rows().shape, -1)
    return torch.bmm(unit, unit.transpose(1, 2))


def align_factors(a_cosines: Tensor, columns: Columns, places: Tensor) -> tuple[float, float]:
    """Return z and size of the correlation between lora_A's cosines and lora_B's, over the pairs of each expert.

    places: where in lora_B a packing has the components whose rows a_cosines compares, (experts, components).
    """
    first, second = torch.triu_indices(places.shape[1], places.shape[1], 1)
    left, right = columns.place[places[:, first]], columns.place[places[:, second]]
    x, y = a_cosines[:, first, second], columns.cosines[left, right]
    usable = (left >= 0) & (right >= 0) & x.isfinite() & columns.comparable[left, right]
    count = int(usable.sum())
    if count < _LEAST_FREEDOM:
        return 0.0, 0.0
    x, y = (torch.where(usable, values - values[usable].mean(), 0.0) for values in (x, y))
    size = float(x.norm() * y.norm())
    correlation = float((x * y).sum()) / size if size > 0.0 else 0.0
    # Where both factors repeat themselves from expert to expert, the experts are not so many witnesses.
    repeated = 1 + (len(x) - 1) * _repetition(x, usable) * _repetition(y, usable)
    return correlation * sqrt(count / repeated), correlation


def _repetition(values: Tensor, usable: Tensor) -> float:
    """The intraclass correlation of each column's values (experts, pairs of components), 0 to 1."""
    counts, sums = usable.sum(0), values.sum(0)
    kept = counts > 1
    if not kept.any():
        return 0.0
    counts = counts[kept]
    explained = float((sums[kept].square() / counts).sum())
    within = (float(values[:, kept].square().sum()) - explained) / float((counts - 1).sum())
    between = explained / len(counts)
    total = between + (float(counts.sum()) / len(counts) - 1) * within
    return min(1.0, max(0.0, (between - within) / total)) if total > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class _Cells:
    """For each cell: how many values, their mean, the sum of their squared distances from it."""

    count: Tensor
    mean: Tensor
    squares: Tensor


def _sum_up(values: Tensor, cells: Tensor, number: int) -> _Cells:
    count = torch.bincount(cells, minlength=number).double()
    mean = torch.bincount(cells, values.double(), minlength=number) / count
    squares = torch.bincount(cells, (values - mean[cells]).square(), minlength=number)
    return _Cells(count, mean, squares)


def _as_z(t: float, freedom: float) -> float:
    """The normal deviate about as unlikely as this value of Student's t."""
    return copysign(sqrt(freedom * log1p(t * t / freedom)), t)
