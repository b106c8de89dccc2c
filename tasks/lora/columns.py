"""The columns of a stacked lora_B that tell its packing: which are looked at, and how alike they are.

Letters: E experts, r components per expert. Column j * E + e (rank_major) or e * r + j (grouped) is component j of
expert e; row e * r + j of lora_A is it under both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.lora.layouts import Packing

# A tensor with no more columns is looked at whole; of a larger one, half as many are taken under each packing.
_COLUMNS = 256
_FEWEST_COMPONENTS = 16
# Of more rows than these, so many stretches are taken.
_ROWS = 1024
_STRETCHES = 8
# A direction is shared, and taken out, if it holds this share of the columns, evenly over the experts of both packings.
_STRONG = 0.3
_EVEN = 0.6
# Less of a column than this, left after that, is rounding.
_ROUNDING = 1e-5
# So many rows tell whether a tensor may have columns, or halves of columns, of zeros.
_GLANCE = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """What is looked at: some components of some experts (sorted indices), at some stretches of rows of lora_B."""

    experts: Tensor
    components: Tensor
    stretches: tuple[tuple[int, int], ...]
    of_experts: int
    of_components: int

    def columns(self, packing: Packing) -> Tensor:
        """Where in lora_B each component of each expert is if it has this packing: (experts, components)."""
        if packing is Packing.RANK_MAJOR:
            return self.experts[:, None] + self.of_experts * self.components
        return self.a_rows()

    def a_rows(self) -> Tensor:
        """Where in lora_A they are: (experts, components)."""
        return self.experts[:, None] * self.of_components + self.components

    def expert_of(self, columns: Tensor, packing: Packing) -> Tensor:
        """Whose each column is."""
        return columns % self.of_experts if packing is Packing.RANK_MAJOR else columns // self.of_components

    def component_of(self, columns: Tensor, packing: Packing) -> Tensor:
        """Which of its expert's components each column is."""
        return columns // self.of_experts if packing is Packing.RANK_MAJOR else columns % self.of_components

    def __str__(self) -> str:
        return (
            f"{len(self.components)} of {self.of_components} components of {len(self.experts)} of {self.of_experts} "
            f"experts, {sum(end - begin for begin, end in self.stretches)} rows"
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """The sampled columns of lora_B that hold something, and all pairs of them.

    index: (n,) where each stands in lora_B; place: (E * r,) the inverse, -1 for those that are not here. cosines:
    (n, n) without the directions that all share; raw: (n, n) with them. comparable: (n, n) whether two columns hold
    numbers in the same rows, so that their cosine says something. pairs: (n, n) true above the diagonal, once for each
    pair.
    """

    index: Tensor
    place: Tensor
    cosines: Tensor
    raw: Tensor
    comparable: Tensor
    pairs: Tensor


def choose_sample(*, experts: int, rank: int, rows: int, seed: int) -> Sample:
    """Return what to look at: the same for the same numbers, evenly likely for all."""
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int, total: int) -> Tensor:
        return torch.randperm(total, generator=generator)[:count].sort().values

    components, chosen = rank, experts
    if experts * rank > _COLUMNS:
        half = _COLUMNS // 2
        components = min(rank, max(_FEWEST_COMPONENTS, half // experts))
        chosen = min(experts, max(2, half // components))
    stretches: tuple[tuple[int, int], ...] = ((0, rows),)
    if rows > _ROWS:
        begins = [rows * place // _STRETCHES for place in range(_STRETCHES)]
        stretches = tuple((begin, begin + _ROWS // _STRETCHES) for begin in begins)
    return Sample(pick(chosen, experts), pick(components, rank), stretches, experts, rank)


def take_columns(b: Tensor, sample: Sample) -> Columns:
    """Return the sampled columns of lora_B (y, E * r), any float dtype, compared with each other."""
    wanted = torch.zeros(b.shape[1], dtype=torch.bool)
    for packing in Packing:
        wanted[sample.columns(packing)] = True
    [index] = wanted.nonzero(as_tuple=True)
    values = torch.cat([b[begin:end].index_select(1, index) for begin, end in sample.stretches]).float()
    largest = values.abs().amax(0)
    held = largest > 0
    if not held.all():
        index, values, largest = index[held], values[:, held], largest[held]
    # In two steps, because the squares of numbers that a file may well hold are no longer numbers.
    values /= largest
    values /= values.norm(dim=0)
    raw = values.T @ values
    cosines = _remove_shared(raw, index, sample)
    left = cosines.diagonal() > 0
    comparable = _find_comparable(values, sample, b.shape[0]) & left[:, None] & left[None, :]
    place = torch.full((b.shape[1],), -1)
    place[index] = torch.arange(len(index))
    return Columns(index, place, cosines, raw, comparable, torch.ones_like(comparable).triu(1))


def find_zero_columns(b: Tensor) -> Tensor:
    """Return which columns of lora_B (y, E * r) are exactly zero: (E * r,)."""
    zero = (b[:_GLANCE] == 0).all(0)
    if zero.any():
        zero[zero.clone()] = (b[:, zero] == 0).all(0)
    return zero


def find_zero_blocks(zero: Tensor, *, experts: int, rank: int) -> Packing | None:
    """Return the one packing under which the zero columns (E * r,) are whole experts, some but not all.

    None if both packings explain them, or if the other explains them as whole components of all experts (a rank
    that was padded).
    """
    if not zero.any() or zero.all():
        return None
    by_expert = {
        Packing.RANK_MAJOR: zero.reshape(rank, experts).T,
        Packing.GROUPED_BY_EXPERT: zero.reshape(experts, rank),
    }
    whole = [packing for packing, each in by_expert.items() if torch.equal(each.all(1), each.any(1))]
    if len(whole) != 1:
        return None
    other = by_expert[whole[0].other]
    explained = other.all(1)[:, None] | other.all(0)[None, :]
    return None if torch.equal(explained, other) else whole[0]


def _find_comparable(values: Tensor, sample: Sample, of_rows: int) -> Tensor:
    """(n, n): whether two columns of (rows, n) hold numbers in the same halves, upper or lower, even or odd.

    PEFT fuses gate and up that share no lora_A block-diagonally: some components hold gate's rows alone, some up's.
    """
    count = values.shape[1]
    if not (values[:_GLANCE] == 0).any() and not (values[-_GLANCE:] == 0).any():
        return torch.ones(count, count, dtype=torch.bool)
    rows = torch.cat([torch.arange(begin, end) for begin, end in sample.stretches])
    parts = [rows < of_rows // 2, rows >= of_rows // 2, rows % 2 == 0, rows % 2 == 1]
    held = torch.stack([(values[part] != 0).any(0) for part in parts], dim=1)
    return (held[:, None, :] == held[None, :, :]).all(2)


def _remove_shared(raw: Tensor, index: Tensor, sample: Sample) -> Tensor:
    """Return the cosines without the strongest two directions, as far as all experts share them."""
    count = len(raw)
    if count < 4 or float(raw.norm()) < _STRONG * count:
        return raw
    vectors = torch.linalg.qr(torch.randn(count, 2, generator=torch.Generator().manual_seed(count))).Q
    for _ in range(12):
        vectors = torch.linalg.qr(raw @ vectors).Q
    values, rotation = torch.linalg.eigh(vectors.T @ raw @ vectors)
    vectors = vectors @ rotation
    shared = [
        place
        for place in (0, 1)
        if values[place] > _STRONG * count and _evenness(vectors[:, place], index, sample) > _EVEN
    ]
    if not shared:
        return raw
    left: Tensor = raw - (vectors[:, shared] * values[shared]) @ vectors[:, shared].T
    energy = left.diagonal().clone()
    scale = energy.clamp_min(_ROUNDING).rsqrt()
    left = left * scale[:, None] * scale[None, :]
    left.diagonal().copy_((energy > _ROUNDING).float())
    return left


def _evenness(direction: Tensor, index: Tensor, sample: Sample) -> float:
    """How many of the experts a direction (n,) of columns is spread over, as a share, under either packing."""
    least = 1.0
    for packing in Packing:
        owners = sample.expert_of(index, packing)
        energy = torch.zeros(sample.of_experts).index_add_(0, owners, direction.square())
        present = int((torch.bincount(owners, minlength=sample.of_experts) > 0).sum())
        least = min(least, float(1 / energy.square().sum()) / present)
    return least
