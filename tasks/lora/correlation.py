"""Which packing a stacked lora_B has, told from the numbers alone.

Letters: E experts, r components per expert. All columns of one expert are images of one gradient. What that does to
them shows in three ways, and none of them needs the rest of the adapter or its base model.

1. Likeness. The |cosine| between columns of one expert is larger than between columns of different experts; in
   factors that come from an SVD it is smaller. Each packing names other pairs of columns as one expert's. Those are
   compared with pairs that are not, and that have the same two component numbers under the *other* packing: so if a
   component is alike in all experts, the other packing does not profit from it.
2. Alignment. Training moves both factors of an expert together: the cosines between its rows of lora_A, whose order is
   known, go with the cosines between its columns of lora_B, signs included. Under the other packing the columns are of
   several experts, and have nothing to do with those rows. This needs no zero start of either factor.
3. Exact facts. The columns of an expert that saw no token are zero; those that come from an SVD are orthogonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import copysign, hypot, sqrt

import torch
from torch import Tensor

from tasks.lora.columns import (
    Columns,
    Sample,
    choose_sample,
    find_zero_blocks,
    find_zero_columns,
    take_columns,
)
from tasks.lora.layouts import Packing
from tasks.lora.resemblance import (
    align_factors,
    compare_pairs,
    rate_orthogonality,
    rate_zeros,
    row_cosines,
)

# A packing is named if its z is more than the first, and more than so many times the other's. If lora_A does not
# witness for it, by so much, the second pair holds.
_BAR = (6.0, 3.0)
_BAR_ALONE = (12.0, 8.0)
_LEAST_WITNESS = 3.0
# What lora_A may say for the other packing before the answer is withheld; and where exact facts gave it.
_VETO = 3.0
_VETO_EXACT = 6.0
# With many tensors any small bias becomes significant: an effect must also be of some size.
_LEAST_CONTRAST = 0.05
_LEAST_CORRELATION = 0.03


@dataclass(frozen=True, slots=True)
class Reading:
    """What lora_B looks like under one packing, in one tensor or in all of a parameter.

    pairs: how many pairs of columns it names as one expert's. likeness: z of their |cosine| against other pairs'.
    contrast: that difference as a share of the others' mean. matched: whether the others had the same components.
    orthogonality: z of their being orthogonal, 0 if they are not. alignment: z of the correlation between the cosines
    of lora_A's rows and of lora_B's columns. correlation: that correlation. zeros: z of the zero columns' being whole
    experts, 0 if they are not.
    """

    pairs: int
    likeness: float
    contrast: float
    matched: bool
    orthogonality: float
    alignment: float
    correlation: float
    zeros: float = 0.0

    @property
    def z(self) -> float:
        """All in one; negative where same-expert columns are less alike than others."""
        size = hypot(self.likeness, max(self.alignment, 0.0))
        if max(self.orthogonality, self.zeros) > size:
            return -self.orthogonality if self.orthogonality > self.zeros else self.zeros
        return copysign(size, self.likeness if abs(self.likeness) > self.alignment else 1.0)

    @property
    def strength(self) -> float:
        """Likeness and alignment as far as they count.

        Effects that are too small do not; likeness to pairs that were not matched, only as much as alignment.
        """
        aligned = max(self.alignment, 0.0) if self.correlation >= _LEAST_CORRELATION else 0.0
        alike = abs(self.likeness) if abs(self.contrast) >= _LEAST_CONTRAST else 0.0
        return hypot(alike if self.matched else min(alike, aligned), aligned)


@dataclass(frozen=True, slots=True)
class TensorScore:
    """What one stored pair says of the packing of its lora_B.

    readings: under each packing. zero_blocks: the packing under which its zero columns are whole experts;
    zero_columns: how many there are. says: what it names decisively on its own. sampled: what was looked at.
    """

    layer: int
    parameter: str
    readings: tuple[tuple[Packing, Reading], ...]
    zero_blocks: Packing | None
    zero_columns: int
    says: Packing | None
    sampled: str

    @property
    def rank_major(self) -> float:
        """z as rank_major."""
        return dict(self.readings)[Packing.RANK_MAJOR].z

    @property
    def grouped(self) -> float:
        """z as grouped_by_expert."""
        return dict(self.readings)[Packing.GROUPED_BY_EXPERT].z


@dataclass(frozen=True, slots=True)
class PooledScore:
    """What all tensors of one parameter say together.

    says: the packing, or None. rank_major, grouped: z. tensors: how many were pooled. outliers: those that name
    another packing than the rest, each decisively on its own; they are not in the pool. If as many name one packing as
    the other, they all are outliers. by_layer: what each layer's tensor names on its own. detail: one line for people.
    """

    says: Packing | None
    rank_major: float
    grouped: float
    tensors: int
    outliers: tuple[TensorScore, ...]
    by_layer: tuple[tuple[int, Packing | None], ...]
    detail: str


def score_tensor(a: Tensor, b: Tensor, *, layer: int, parameter: str, experts: int, rank: int) -> TensorScore:
    """Return what one stored pair says: lora_A (E * r, x), lora_B (y, E * r), finite, any float dtype.

    The orientation does not matter: whichever factor of an expert is stored in lora_B, its columns resemble each other.
    """
    if rank == 1 or experts == 1:
        nothing = tuple((packing, _UNREAD) for packing in Packing)
        return TensorScore(layer, parameter, nothing, None, 0, None, "nothing: both packings are one")
    sample = choose_sample(experts=experts, rank=rank, rows=b.shape[0], seed=layer)
    columns = take_columns(b, sample)
    a_cosines = row_cosines(a, sample)
    zero = find_zero_columns(b)
    zero_blocks = find_zero_blocks(zero, experts=experts, rank=rank)
    zero_columns = int(zero.sum())
    readings = []
    for packing in Packing:
        reading = _read(packing, sample, columns, a_cosines)
        if packing is zero_blocks:
            reading = replace(reading, zeros=rate_zeros(zero_columns, experts=experts, rank=rank))
        readings.append((packing, reading))
    says = _decide(dict(readings))
    return TensorScore(layer, parameter, tuple(readings), zero_blocks, zero_columns, says, str(sample))


def pool_scores(scores: Sequence[TensorScore]) -> PooledScore:
    """Return what the tensors of one parameter, one for each layer, say together."""
    named = [score.says for score in scores if score.says is not None]
    counts = {packing: named.count(packing) for packing in Packing}
    minority = [packing for packing in Packing if counts[packing] <= counts[packing.other]]
    outliers = tuple(score for score in scores if score.says in minority)
    pooled = [score for score in scores if score not in outliers]
    readings = {packing: _pool([dict(score.readings)[packing] for score in pooled]) for packing in Packing}
    if any(score.zero_columns and score.zero_blocks is None for score in pooled):
        # Some columns here are zero for another reason, so in the other tensors they may be too.
        readings = {packing: replace(reading, zeros=0.0) for packing, reading in readings.items()}
    return PooledScore(
        says=_decide(readings),
        rank_major=readings[Packing.RANK_MAJOR].z,
        grouped=readings[Packing.GROUPED_BY_EXPERT].z,
        tensors=len(pooled),
        outliers=outliers,
        by_layer=tuple((score.layer, score.says) for score in scores),
        detail=_describe(readings, pooled),
    )


_UNREAD = Reading(0, 0.0, 0.0, True, 0.0, 0.0, 0.0)


def _read(packing: Packing, sample: Sample, columns: Columns, a_cosines: Tensor) -> Reading:
    if len(columns.index) < 2:
        return _UNREAD
    own, others = (sample.expert_of(columns.index, each) for each in (packing, packing.other))
    component = sample.component_of(columns.index, packing.other)
    # Pairs that both packings name say nothing of either. Tables of all pairs first: picking from them is what costs.
    usable = columns.pairs & columns.comparable & (others[:, None] != others)
    [at] = usable.flatten().nonzero(as_tuple=True)
    named = (own[:, None] == own).take(at)
    ends = component[:, None], component
    cells = (torch.minimum(*ends) * sample.of_components + torch.maximum(*ends)).take(at)
    difference = compare_pairs(columns.cosines.take(at).abs(), named, cells, number=sample.of_components**2)
    alignment, correlation = align_factors(a_cosines, columns, sample.columns(packing))
    return Reading(
        pairs=int(named.sum()),
        likeness=difference.z,
        contrast=difference.contrast,
        matched=difference.matched,
        orthogonality=rate_orthogonality(columns.raw.take(at).abs(), named),
        alignment=alignment,
        correlation=correlation,
    )


def _pool(readings: Sequence[Reading]) -> Reading:
    """Stouffer's sums, and means weighted by pairs. Orthogonality counts if half of the tensors show it."""
    root = sqrt(max(1, len(readings)))
    pairs = sum(reading.pairs for reading in readings)
    orthogonal = [reading.orthogonality for reading in readings if reading.orthogonality > 0.0]
    return Reading(
        pairs=pairs,
        likeness=sum(reading.likeness for reading in readings) / root,
        contrast=sum(reading.contrast * reading.pairs for reading in readings) / max(1, pairs),
        matched=all(reading.matched for reading in readings),
        orthogonality=hypot(*orthogonal) if 2 * len(orthogonal) >= len(readings) else 0.0,
        alignment=sum(reading.alignment for reading in readings) / root,
        correlation=sum(reading.correlation * reading.pairs for reading in readings) / max(1, pairs),
        zeros=hypot(*(reading.zeros for reading in readings)),
    )


def _decide(readings: dict[Packing, Reading]) -> Packing | None:
    """Return the one packing that is named, by likeness and alignment or by exact facts, with lora_A not against it."""
    named = set()
    for packing, mine in readings.items():
        other = readings[packing.other]
        against = other.alignment if other.alignment > mine.alignment else 0.0
        least, ratio = _BAR if mine.alignment >= _LEAST_WITNESS and not against else _BAR_ALONE
        if mine.strength > least and mine.strength > ratio * abs(other.z) and against < _VETO:
            named.add(packing)
        if max(mine.orthogonality, mine.zeros) > _BAR[0] and mine.orthogonality >= other.orthogonality:
            if against > _VETO_EXACT:
                return None
            named.add(packing)
    return named.pop() if len(named) == 1 else None


def _describe(readings: dict[Packing, Reading], pooled: Sequence[TensorScore]) -> str:
    if not pooled:
        return "no tensors that agree"
    parts = []
    for packing, reading in readings.items():
        facts = [f"likeness {reading.likeness:.1f}", f"alignment {reading.alignment:.1f}"]
        facts += [f"orthogonal {reading.orthogonality:.1f}"] if reading.orthogonality else []
        facts += [f"zero blocks {reading.zeros:.1f}"] if reading.zeros else []
        parts.append(f"z {reading.z:.1f} as {packing} ({', '.join(facts)})")
    return f"{'; '.join(parts)}; {len(pooled)} tensors, {pooled[0].sampled} of each"
