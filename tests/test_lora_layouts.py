"""Telling the orientation from shapes."""

from __future__ import annotations

import pytest
from lora_builders import EXPERTS, HIDDEN, INTER, LABEL, RANK

from tasks.lora.errors import (
    AdapterError,
    BaseMismatch,
    LayoutConflict,
    OrientationUndecided,
    RankUnsupported,
    ShapeMismatch,
)
from tasks.lora.layouts import Orientation, PairShapes, decide_orientation


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
    return PairShapes(f"layer {layer} {parameter}", a, b, RANK, inside, out, *sibling)


def decide(*pairs: PairShapes, by_version: Orientation | None = None) -> Orientation:
    return decide_orientation(pairs, experts=EXPERTS, adapter=LABEL, by_version=by_version)


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


@pytest.mark.parametrize("says", Orientation)
def test_version_is_asked_only_where_shapes_leave_it_open(says: Orientation) -> None:
    square = pair("down", "standard", hidden=7, inter=7)
    assert decide(square, by_version=says) is says
    for orientation in Orientation:
        assert decide(square, pair("gate_up", orientation, hidden=7, inter=7), by_version=says) is orientation


def test_layers_must_agree() -> None:
    """unsloth-zoo#1269: one verdict for the whole file, never one for each tensor."""
    with pytest.raises(LayoutConflict, match=r"layer 1 down: .*swapped pair.*layer 0 gate_up is standard"):
        decide(pair("gate_up", "standard"), pair("down", "swapped", layer=1))


def shapes(a: tuple[int, ...], b: tuple[int, ...]) -> PairShapes:
    return PairShapes("some key", a, b, RANK, HIDDEN, 2 * INTER, INTER, HIDDEN)


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
