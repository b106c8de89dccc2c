"""How the factors of all experts are stacked in one tensor, and the way out.

Letters: E experts, r rank. Source: PEFT tuners/lora/layer.py, ParamWrapper: 0.19.1 to 0.21.2 standard,
earlier ones swapped for parameters stored (E, out, in); unsloth_zoo <= 2026.9.5
temporary_patches/moe_utils.py for grouped_by_expert. docs/layouts.md shows all four encodings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tasks.lora.errors import (
    AdapterError,
    BaseMismatch,
    LayoutConflict,
    OrientationUndecided,
    RankUnsupported,
    ShapeMismatch,
)
from tasks.lora.names import Factor

if TYPE_CHECKING:
    from torch import Tensor


class Packing(StrEnum):
    """Whose column j of a stacked axis is: expert j mod E (rank_major), or expert j // r."""

    RANK_MAJOR = "rank_major"
    GROUPED_BY_EXPERT = "grouped_by_expert"

    @property
    def other(self) -> Packing:
        """The one that this is not."""
        return Packing.GROUPED_BY_EXPERT if self is Packing.RANK_MAJOR else Packing.RANK_MAJOR


class Orientation(StrEnum):
    """Whether the stored product is the delta (B·A), or its transpose."""

    STANDARD = "standard"
    SWAPPED = "swapped"

    def stored(self, factor: Factor) -> Factor:
        """Return the stored factor that holds `factor` of the delta."""
        if self is Orientation.STANDARD:
            return factor
        return Factor.B if factor is Factor.A else Factor.A


def unstack_factor(
    stored: Tensor, factor: Factor, *, experts: int, packing: Packing, orientation: Orientation
) -> Tensor:
    """Return one factor of every expert, A (E, rank, in) or B (E, out, rank), from the tensor that holds it.

    stored: whichever of the pair holds the factor; lora_A (E·rank, x) or lora_B (x, E·rank). lora_A always has its
    experts slowest along its rows; the packing is lora_B's alone. The delta of expert e is B[e] @ A[e].
    """
    if orientation.stored(factor) is Factor.A:
        each = stored.reshape(experts, -1, stored.shape[1])
    elif packing is Packing.RANK_MAJOR:
        # A copy, because torch transposes two dimensions six times faster than it rearranges three.
        each = stored.reshape(-1, experts).T.contiguous().reshape(experts, stored.shape[0], -1)
    else:
        each = stored.reshape(stored.shape[0], experts, -1).permute(1, 0, 2)
    return each if orientation is Orientation.STANDARD else each.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class PairShapes:
    """The stored shapes of one stacked pair, and the sizes of the parameter it changes.

    where: the key of its lora_A. sibling_in, sibling_out: the sizes of the layer's other parameter, to tell
    exchanged names from another base.
    """

    where: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    in_size: int
    out_size: int
    sibling_in: int
    sibling_out: int


def decide_orientation(pairs: Sequence[PairShapes], *, experts: int, rank: int, adapter: str) -> Orientation:
    """Return the one orientation that fits every pair of every layer.

    A pair with in = out fits both; its siblings then decide. Raises ShapeMismatch, RankUnsupported or
    BaseMismatch for a pair that fits neither, LayoutConflict where pairs need different ones or where the
    two parameters' names are exchanged, OrientationUndecided where all pairs fit both.
    """
    decided: dict[Orientation, PairShapes] = {}
    for pair in pairs:
        fitting = _fitting(pair.a, pair.b, experts * rank, pair.in_size, pair.out_size)
        if not fitting:
            raise _explain(pair, experts, rank, adapter)
        if len(fitting) == 1:
            decided.setdefault(fitting[0], pair)
    if len(decided) > 1:
        standard, swapped = decided[Orientation.STANDARD], decided[Orientation.SWAPPED]
        raise LayoutConflict(
            adapter,
            swapped.where,
            f"one orientation throughout ({standard.where} is standard)",
            f"a swapped pair {swapped.a} {swapped.b}",
            "The file was put together from two programs' output; save it again with one of them.",
        )
    if not decided:
        raise OrientationUndecided(
            adapter, pairs[0].where, "a pair that fits one orientation only", f"in = out = {pairs[0].in_size}"
        )
    return next(iter(decided))


def _fitting(
    a: tuple[int, ...], b: tuple[int, ...], stacked: int, in_size: int, out_size: int
) -> list[Orientation]:
    shapes = {
        Orientation.STANDARD: ((stacked, in_size), (out_size, stacked)),
        Orientation.SWAPPED: ((stacked, out_size), (in_size, stacked)),
    }
    return [orientation for orientation, shape in shapes.items() if shape == (a, b)]


def _explain(pair: PairShapes, experts: int, rank: int, adapter: str) -> AdapterError:
    found = f"lora_A {pair.a} and lora_B {pair.b}"
    if len(pair.a) != 2 or len(pair.b) != 2 or pair.a[0] != pair.b[1]:
        return ShapeMismatch(
            adapter, pair.where, "two factors with one stacked axis (E·r, x) and (y, E·r)", found
        )
    stacked = pair.a[0]
    if stacked != experts * rank:
        expected = f"{experts} experts * rank {rank} = {experts * rank} rows"
        if stacked % rank == 0:
            fits = f"{stacked} rows: {stacked // rank} experts of rank {rank}"
            if stacked % experts == 0:
                fits += f", or rank {stacked // experts} for {experts} experts"
            return BaseMismatch(adapter, pair.where, expected, fits)
        return RankUnsupported(adapter, pair.where, expected, f"{stacked} rows")
    if _fitting(pair.a, pair.b, stacked, pair.sibling_in, pair.sibling_out):
        return LayoutConflict(
            adapter,
            pair.where,
            f"in {pair.in_size} and out {pair.out_size}, the sizes of the parameter of this name",
            f"{found}, which fit the layer's other parameter",
            "The two pairs' names are exchanged; save the adapter again with the program that trained it.",
        )
    return BaseMismatch(adapter, pair.where, f"in {pair.in_size} and out {pair.out_size}", found)
