"""Unstacking, and telling the orientation from shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lora_builders import EXPERTS, HIDDEN, INTER, LABEL, RANK

from tasks.lora.errors import (
    AdapterError,
    BaseMismatch,
    LayoutConflict,
    OrientationUndecided,
    RankUnsupported,
    ShapeMismatch,
)
from tasks.lora.layouts import Orientation, Packing, PairShapes, decide_orientation, unstack_factor
from tasks.lora.names import Factor

sizes = st.integers(min_value=1, max_value=6)


def numbers(experts: int, rank: int, inside: int, out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (E, rank, in) and B (E, out, rank), every number different."""
    a = torch.arange(experts * rank * inside).reshape(experts, rank, inside)
    return a, -1 - torch.arange(experts * out * rank).reshape(experts, out, rank)


def stack(a: torch.Tensor, b: torch.Tensor, packing: str, orientation: str) -> dict[Factor, torch.Tensor]:
    """The stored pair, filled row by row and column by column as the producers define it."""
    experts, rank, _ = a.shape
    rows, columns = (b.transpose(1, 2), a) if orientation == "swapped" else (a, b.transpose(1, 2))
    stored_a = torch.zeros(experts * rank, rows.shape[2], dtype=a.dtype)
    stored_b = torch.zeros(columns.shape[2], experts * rank, dtype=a.dtype)
    for e in range(experts):
        for j in range(rank):
            stored_a[e * rank + j] = rows[e, j]
            stored_b[:, j * experts + e if packing == "rank_major" else e * rank + j] = columns[e, j]
    return {Factor.A: stored_a, Factor.B: stored_b}


def unstack(
    stored: dict[Factor, torch.Tensor], experts: int, packing: Packing, orientation: Orientation
) -> list[torch.Tensor]:
    return [
        unstack_factor(
            stored[orientation.stored(factor)],
            factor,
            experts=experts,
            packing=packing,
            orientation=orientation,
        )
        for factor in Factor
    ]


@given(sizes, sizes, sizes, sizes, st.sampled_from(Packing), st.sampled_from(Orientation))
def test_unstacking_undoes_stacking(
    experts: int, rank: int, inside: int, out: int, packing: Packing, orientation: Orientation
) -> None:
    a, b = numbers(experts, rank, inside, out)
    found = unstack(stack(a, b, packing, orientation), experts, packing, orientation)
    assert torch.equal(found[0], a)
    assert torch.equal(found[1], b)


@given(sizes, sizes, sizes, sizes, st.sampled_from(Packing), st.sampled_from(Orientation))
def test_packings_agree_only_where_there_is_nothing_to_pack(
    experts: int, rank: int, inside: int, out: int, packing: Packing, orientation: Orientation
) -> None:
    """E = r is not degenerate; E = 1 and r = 1 are. The stored lora_A knows no packing."""
    a, b = numbers(experts, rank, inside, out)
    misread = unstack(stack(a, b, packing, orientation), experts, packing.other, orientation)
    packed, unpacked = (0, 1) if orientation is Orientation.SWAPPED else (1, 0)
    assert torch.equal(misread[packed], (a, b)[packed]) == (experts == 1 or rank == 1)
    assert torch.equal(misread[unpacked], (a, b)[unpacked])


def pair(
    parameter: str, orientation: str, *, hidden: int = HIDDEN, inter: int = INTER, layer: int = 0
) -> PairShapes:
    """A pair as stored, for a base of the same sizes."""
    sides = {"gate_up": (hidden, 2 * inter), "down": (inter, hidden)}
    inside, out = sides[parameter]
    sibling = sides["down" if parameter == "gate_up" else "gate_up"]
    stacked = EXPERTS * RANK
    standard = orientation == "standard"
    a, b = ((stacked, inside), (out, stacked)) if standard else ((stacked, out), (inside, stacked))
    return PairShapes(f"layer {layer} {parameter}", a, b, inside, out, *sibling)


def decide(*pairs: PairShapes) -> Orientation:
    return decide_orientation(pairs, experts=EXPERTS, rank=RANK, adapter=LABEL)


@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize(("hidden", "inter"), [(HIDDEN, INTER), (14, 7), (7, 7)])
def test_orientation_is_decided_jointly(orientation: Orientation, hidden: int, inter: int) -> None:
    pairs = [pair(name, orientation, hidden=hidden, inter=inter) for name in ("gate_up", "down")]
    assert decide(*pairs) is orientation


@pytest.mark.parametrize(
    ("parameter", "hidden", "inter"), [("gate_up", 14, 7), ("down", 7, 7)], ids=["gate_up", "down"]
)
def test_lone_square_projection_is_not_guessed(parameter: str, hidden: int, inter: int) -> None:
    with pytest.raises(OrientationUndecided, match=rf"{LABEL}: layer 0 {parameter}: found in = out = \d+"):
        decide(pair(parameter, "standard", hidden=hidden, inter=inter))


def test_layers_must_agree() -> None:
    """unsloth-zoo#1269: one verdict for the whole file, never one for each tensor."""
    with pytest.raises(LayoutConflict, match=r"layer 1 down: .*swapped pair.*layer 0 gate_up is standard"):
        decide(pair("gate_up", "standard"), pair("down", "swapped", layer=1))


def shapes(a: tuple[int, ...], b: tuple[int, ...]) -> PairShapes:
    return PairShapes("some key", a, b, HIDDEN, 2 * INTER, INTER, HIDDEN)


@pytest.mark.parametrize(
    ("a", "b", "error", "expected", "found"),
    [
        ((12, 11), (14, 12), BaseMismatch, "in 10 and out 14", "lora_A (12, 11)"),
        ((12, 10), (16, 12), BaseMismatch, "in 10 and out 14", "lora_B (16, 12)"),
        ((24, 10), (14, 24), BaseMismatch, "12 rows", "8 experts of rank 3, or rank 6 for 4 experts"),
        ((18, 10), (14, 18), BaseMismatch, "12 rows", "18 rows: 6 experts of rank 3"),
        ((250, 10), (14, 250), RankUnsupported, "12 rows", "250 rows"),
        ((12, 10), (14, 24), ShapeMismatch, "one stacked axis", "lora_B (14, 24)"),
        ((4, 3, 10), (4, 14, 3), ShapeMismatch, "one stacked axis", "lora_A (4, 3, 10)"),
        ((12, 7), (10, 12), LayoutConflict, "parameter of this name", "fit the layer's other parameter"),
    ],
)
def test_misfits_are_explained(
    a: tuple[int, ...], b: tuple[int, ...], error: type[AdapterError], expected: str, found: str
) -> None:
    with pytest.raises(error) as caught:
        decide(shapes(a, b))
    assert caught.value.where == "some key"
    assert expected in caught.value.expected
    assert found in caught.value.found
