"""How the factors of all experts can be stacked in one tensor, and what their shapes tell of it.

Letters: E experts, r rank. Source: PEFT tuners/lora/layer.py, ParamWrapper: 0.19.1 to 0.21.2 standard,
earlier ones swapped for parameters stored (E, out, in); unsloth_zoo <= 2026.9.5
temporary_patches/moe_utils.py for grouped_by_expert. docs/layouts.md shows all four encodings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tasks.lora.errors import (
    AdapterError,
    BaseMismatch,
    LayoutConflict,
    OrientationUndecided,
    RankUnsupported,
    ShapeMismatch,
)
from tasks.lora.names import Factor


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


@dataclass(frozen=True, slots=True)
class PairShapes:
    """The stored shapes of one stacked pair, and the sizes of the parameter it changes.

    where: the stored name of its lora_A. rank: as the config says. sibling_in, sibling_out: the sizes of the layer's
    other parameter, to tell exchanged names from another base.
    """

    where: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    rank: int
    in_size: int
    out_size: int
    sibling_in: int
    sibling_out: int


def decide_orientation(
    pairs: Sequence[PairShapes], *, experts: int, adapter: str, by_version: Orientation | None
) -> Orientation:
    """Return the one orientation that fits every pair of every layer.

    A pair with in = out fits both; its siblings then decide. by_version: what the version of the program that wrote
    the file says, asked where all pairs fit both. Raises ShapeMismatch, RankUnsupported or BaseMismatch for a pair
    that fits neither, LayoutConflict where pairs need different ones or where the two parameters' names are
    exchanged, OrientationUndecided where nothing tells.
    """
    decided: dict[Orientation, PairShapes] = {}
    for pair in pairs:
        fitting = list_fitting(pair.a, pair.b, pair.in_size, pair.out_size)
        if not fitting or pair.a[0] != experts * pair.rank:
            raise _explain(pair, experts, adapter)
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
    if decided:
        return next(iter(decided))
    if by_version is None:
        raise OrientationUndecided(
            adapter,
            pairs[0].where,
            "a pair that fits one orientation only, or a version of PEFT that writes such a pair in one way",
            f"in = out = {pairs[0].in_size}, and no such version",
        )
    return by_version


def list_fitting(
    a: tuple[int, ...], b: tuple[int, ...], in_size: int, out_size: int
) -> tuple[Orientation, ...]:
    """Return the orientations under which stored factors of these shapes change a parameter of these sizes."""
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return ()
    sizes = {Orientation.STANDARD: (in_size, out_size), Orientation.SWAPPED: (out_size, in_size)}
    return tuple(orientation for orientation, found in sizes.items() if found == (a[1], b[0]))


def _explain(pair: PairShapes, experts: int, adapter: str) -> AdapterError:
    rank = pair.rank
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
    if list_fitting(pair.a, pair.b, pair.sibling_in, pair.sibling_out):
        return LayoutConflict(
            adapter,
            pair.where,
            f"in {pair.in_size} and out {pair.out_size}, the sizes of the parameter of this name",
            f"{found}, which fit the layer's other parameter",
            "The two pairs' names are exchanged; save the adapter again with the program that trained it.",
        )
    return BaseMismatch(adapter, pair.where, f"in {pair.in_size} and out {pair.out_size}", found)
