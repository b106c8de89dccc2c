"""Probes and materialised deltas on conversions that are right and on damaged ones; errors against a float64 loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_builders import (
    CASES,
    Case,
    Tensors,
    change,
    change_config,
    convert,
    down_case,
    experts_case,
    stacked_case,
)
from lora_builders import (
    BIT_FOR_BIT,
    EXPERTS,
    HIDDEN,
    INTER,
    LAYERS,
    PREFIX,
    RANK,
    Logical,
    encode,
    expert_name,
    look,
    stacked_name,
)

from tasks.lora import deltas
from tasks.lora.deltas import DELTA_TOLERANCE, DeltaFindings, compare_deltas
from tasks.lora.family import TensorClass
from tasks.lora.files import AdapterFiles
from tasks.lora.layouts import Packing
from tasks.lora.parallel import count_threads
from tasks.lora.probes import PROBED_DAMAGE, ProbeFindings, probe_deltas
from tasks.lora.target import TargetFormat

PER_EXPERT, STACKED, SLOTS = TargetFormat
MODULES = 5 * LAYERS
ALL_PAIRS = LAYERS * EXPERTS * 3


def compare(case: Case, output: AdapterFiles, format: TargetFormat) -> tuple[ProbeFindings, DeltaFindings]:
    files, layout = case.found.files, case.found.layout
    probed = probe_deltas(files, output, layout, format, seed=20)
    return probed, compare_deltas(files, output, layout, format, device="cpu")


@pytest.mark.parametrize("case", CASES)
def test_right_conversions_differ_nowhere(tmp_path: Path, case: str) -> None:
    """As converted, and with the tensors in another order in the file."""
    made = CASES[case](tmp_path / "source")
    modules = len(made.found.layout.modules) // 2
    for format in TargetFormat:
        for number in range(2):
            folder = tmp_path / format
            files = convert(made, folder, format) if number == 0 else change(folder, lambda tensors: None)
            probed, full = compare(made, files, format)
            assert probed.pairs == full.pairs == ALL_PAIRS + modules
            assert probed.differing == full.differing == ()
            assert probed.exchanged == full.exchanged == probed.unshared == ()
            assert probed.nonzero == probed.nonfinite == probed.left_out == full.left_out == ()
            # Slots hold each factor in bfloat16, B after two roundings.
            rounding = 0.0 if format in BIT_FOR_BIT else 3 * 2**-8
            assert all(one.largest < 1e-6 + rounding for one in probed.errors)
            # Equal numbers give equal products, but where the engine's file has further components.
            assert all(one.largest < 1e-7 + rounding for one in full.errors)
        held = {projection for _, projection, _ in made.deltas}
        routed = probed.trained[TensorClass.ROUTED_EXPERTS]
        assert routed == {layer: (len(held) * EXPERTS, len(held) * EXPERTS) for layer in range(LAYERS)}


def exchange(first: str, second: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return edit


def alter(name: str, edit: Callable[[torch.Tensor], Any]) -> Callable[[Tensors], None]:
    def run(tensors: Tensors) -> None:
        edit(tensors[name])

    return run


def exchange_all(tensors: Tensors) -> None:
    for e in range(EXPERTS):
        gate, up = (expert_name(1, e, projection, "B") for projection in ("gate_proj", "up_proj"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def regroup(tensors: Tensors) -> None:
    old = tensors[stacked_name(1, "down_proj", "B")].clone()
    for e in range(EXPERTS):
        for j in range(RANK):
            tensors[stacked_name(1, "down_proj", "B")][:, e * RANK + j] = old[:, j * EXPERTS + e]


def exchange_halves(tensors: Tensors) -> None:
    name = stacked_name(0, "gate_up_proj", "B")
    tensors[name] = torch.cat([tensors[name][INTER:], tensors[name][:INTER]])


GATE, UP, DOWN = (f"expert 2 {name}" for name in ("gate_proj", "up_proj", "down_proj"))
QUERY = f"{PREFIX}.1.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("format", "edit", "differing", "exchanged"),
    [
        pytest.param(
            PER_EXPERT,
            exchange(expert_name(1, 0, "down_proj", "B"), expert_name(1, 2, "down_proj", "B")),
            {"layer 1 expert 0 down_proj", f"layer 1 {DOWN}"},
            (),
            id="B of two experts exchanged",
        ),
        pytest.param(
            PER_EXPERT,
            exchange(expert_name(1, 2, "gate_proj", "B"), expert_name(1, 2, "up_proj", "B")),
            {f"layer 1 {GATE}", f"layer 1 {UP}"},
            ("layer 1 expert 2",),
            id="gate and up of one expert exchanged",
        ),
        pytest.param(
            PER_EXPERT,
            exchange_all,
            {f"layer 1 expert {e} {name}" for e in range(EXPERTS) for name in ("gate_proj", "up_proj")},
            ("layer 1",),
            id="gate and up of a layer exchanged",
        ),
        pytest.param(
            PER_EXPERT,
            alter(expert_name(0, 2, "down_proj", "A"), lambda a: a[1, 3].mul_(1.5)),
            {f"layer 0 {DOWN}"},
            (),
            id="one number of A",
        ),
        pytest.param(
            PER_EXPERT,
            alter(expert_name(0, 2, "down_proj", "B"), lambda b: b.copy_(b.flip(1))),
            {f"layer 0 {DOWN}"},
            (),
            id="ranks permuted in B alone",
        ),
        pytest.param(
            PER_EXPERT,
            alter(expert_name(0, 2, "up_proj", "B"), torch.Tensor.neg_),
            {f"layer 0 {UP}"},
            (),
            id="a sign",
        ),
        pytest.param(
            PER_EXPERT,
            alter(QUERY, lambda b: b[2].mul_(1.1)),
            {"model.layers.1.self_attn.q_proj"},
            (),
            id="one row of an attention module",
        ),
        pytest.param(
            STACKED,
            regroup,
            {f"layer 1 expert {e} down_proj" for e in range(EXPERTS)},
            (),
            id="stacked in the other packing",
        ),
        pytest.param(
            STACKED,
            exchange_halves,
            {f"layer 0 expert {e} {name}" for e in range(EXPERTS) for name in ("gate_proj", "up_proj")},
            ("layer 0",),
            id="stacked: gate and up exchanged",
        ),
        pytest.param(
            STACKED,
            alter(stacked_name(0, "gate_up_proj", "A"), lambda a: a[2 * RANK].mul_(1.01)),
            {f"layer 0 {GATE}", f"layer 0 {UP}"},
            (),
            id="stacked: one line of A",
        ),
    ],
)
def test_damage_is_named(
    tmp_path: Path,
    format: TargetFormat,
    edit: Callable[[Tensors], Any],
    differing: set[str],
    exchanged: tuple[str, ...],
) -> None:
    made = stacked_case(tmp_path / "source", "grouped_by_expert", "swapped")
    convert(made, tmp_path / "made", format)
    probed, full = compare(made, change(tmp_path / "made", edit), format)
    assert {where for where, _ in probed.differing} == {where for where, _ in full.differing} == differing
    assert probed.exchanged == full.exchanged == exchanged
    assert (
        sum(one.differing for one in full.errors)
        == sum(one.differing for one in probed.errors)
        == len(differing)
    )
    exact = dict(full.differing)
    for where, error in probed.differing:
        # An estimate from 256 numbers of rank one at worst.
        assert exact[where] / 3 < error < exact[where] * 3


@pytest.mark.parametrize("batch", [1, 2, EXPERTS])
def test_errors_are_those_of_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Whether experts are multiplied one by one, by twos or all at once."""
    monkeypatch.setitem(deltas._BATCH_BYTES, "cpu", batch * 4 * INTER * HIDDEN)
    made = experts_case(tmp_path / "source")
    convert(made, tmp_path / "made", PER_EXPERT)
    generator = torch.Generator().manual_seed(3)

    def edit(tensors: Tensors) -> None:
        for e in range(EXPERTS):
            b = tensors[expert_name(1, e, "gate_proj", "B")]
            b *= 1 + 0.01 * (e + 1) * torch.rand(b.shape, generator=generator)

    output = change(tmp_path / "made", edit)
    found: Tensors = {}
    change(tmp_path / "made", found.update)
    errors = []
    for e in range(EXPERTS):
        a, b = (found[expert_name(1, e, "gate_proj", factor)].double() for factor in "AB")
        wanted = made.deltas[1, "gate_proj", e]
        errors.append(float((2.0 * b @ a - wanted).norm() / wanted.norm()))
    assert len({round(error, 4) for error in errors}) == EXPERTS
    _, full = compare(made, output, PER_EXPERT)
    assert {where: pytest.approx(error, rel=1e-4) for where, error in full.differing} == {
        f"layer 1 expert {e} gate_proj": error for e, error in enumerate(errors)
    }
    gate = next(one for one in full.errors if one.projection == "gate_proj")
    assert (gate.pairs, gate.differing) == (LAYERS * EXPERTS, EXPERTS)
    assert gate.largest == pytest.approx(max(errors), rel=1e-4)
    assert gate.worst == f"layer 1 expert {errors.index(max(errors))}"
    assert gate.p99 == gate.largest
    assert gate.median < 1e-6


def test_a_scaling_that_the_config_lost_is_found(tmp_path: Path) -> None:
    """vllm-omni#6565: one alpha for all modules instead of one of their own."""
    logical = Logical(rank=4)
    found = look(tmp_path / "source", encode(logical), r=4, alpha_pattern={"1.mlp.experts.down_proj": 3})
    made = Case(found, {})
    for format in BIT_FOR_BIT:  # slots leave no scaling to the config
        output = convert(made, tmp_path / format, format)
        assert all(findings.differing == () for findings in compare(made, output, format))
        output = change_config(tmp_path / format, alpha_pattern={})
        for findings in compare(made, output, format):
            assert {where for where, _ in findings.differing} == {
                f"layer 1 expert {e} down_proj" for e in range(EXPERTS)
            }
            assert all(error == pytest.approx(1.0, rel=1e-6) for _, error in findings.differing)


def test_numbers_where_the_source_has_none_are_found(tmp_path: Path) -> None:
    made = down_case(tmp_path / "source")
    convert(made, tmp_path / "experts", PER_EXPERT)
    a, b = (expert_name(1, 2, "up_proj", factor) for factor in "AB")
    output = change(tmp_path / "experts", alter(a, lambda tensor: tensor[0, 0].fill_(1e-30)))
    probed, full = compare(made, output, PER_EXPERT)
    assert probed.nonzero == (a,) and probed.differing == full.differing == ()
    output = change(tmp_path / "experts", alter(b, lambda tensor: tensor[0, 0].fill_(1e-30)))
    probed, full = compare(made, output, PER_EXPERT)
    assert probed.nonzero == (a, b)
    assert probed.differing == full.differing == (("layer 1 expert 2 up_proj", math.inf),)
    assert probed.trained[TensorClass.ROUTED_EXPERTS][1] == (EXPERTS, EXPERTS)
    convert(made, tmp_path / "stacked", STACKED)
    name = stacked_name(0, "gate_up_proj", "B")
    output = change(tmp_path / "stacked", alter(name, lambda tensor: tensor[0, 0].fill_(1e-30)))
    assert compare(made, output, STACKED)[0].nonzero == (name,)


def test_an_a_that_projections_do_not_share_is_found(tmp_path: Path) -> None:
    made = stacked_case(tmp_path / "source", "rank_major", "standard")
    convert(made, tmp_path / "made", PER_EXPERT)
    name = expert_name(1, 3, "up_proj", "A")
    output = change(tmp_path / "made", alter(name, lambda a: a[0].mul_(1.001)))
    probed, _ = compare(made, output, PER_EXPERT)
    assert probed.unshared == ("layer 1 gate_proj and up_proj",)
    assert [where for where, _ in probed.differing] == ["layer 1 expert 3 up_proj"]
    # Probed, it is infinite, and so is what the two may differ by.
    output = change(tmp_path / "made", alter(name, lambda a: a[0, 0].fill_(3e38)))
    assert compare(made, output, PER_EXPERT)[0].unshared == ("layer 1 gate_proj and up_proj",)
    gate = expert_name(1, 3, "gate_proj", "A")
    output = change(tmp_path / "made", lambda tensors: tensors.update({gate: tensors[name].clone()}))
    assert compare(made, output, PER_EXPERT)[0].unshared == (), "the same in both"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    made = stacked_case(tmp_path / "source", "rank_major", "standard")
    for format, name in (
        (PER_EXPERT, expert_name(0, 3, "gate_proj", "A")),
        (STACKED, stacked_name(1, "down_proj", "B")),
    ):
        convert(made, tmp_path / format, format)
        output = change(tmp_path / format, alter(name, lambda tensor: tensor[0, 3].fill_(value)))
        probed, full = compare(made, output, format)
        assert probed.nonfinite == (name,)
        assert probed.differing == full.differing
        assert len(probed.differing) == 1 and probed.differing[0][1] == math.inf


def test_the_same_nan_on_both_sides_is_no_difference(tmp_path: Path) -> None:
    """It is named as not finite; another NaN, or one in the output alone, is a difference too."""
    made = stacked_case(tmp_path / "source", "rank_major", "standard")
    name = expert_name(1, 2, "down_proj", "B")
    source = change(tmp_path / "source", alter(stacked_name(1, "down_proj", "B"), put_in_expert_2))
    made = replace(made, found=replace(made.found, files=source))
    output = convert(made, tmp_path / "made", PER_EXPERT)
    for findings in compare(made, output, PER_EXPERT):
        assert findings.differing == ()
    assert compare(made, output, PER_EXPERT)[0].nonfinite == (name,)
    output = change(tmp_path / "made", alter(name, lambda b: b[0, 0].fill_(-math.inf)))
    for findings in compare(made, output, PER_EXPERT):
        assert findings.differing == (("layer 1 expert 2 down_proj", math.inf),)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_beside_zeros_is_a_difference(tmp_path: Path, value: float) -> None:
    """In an expert that saw no tokens, and in a projection that was not trained."""
    logical = Logical()
    logical.b[1, "down_proj"][2] = 0
    for made, name in (
        (Case(look(tmp_path / "source", encode(logical)), {}), "down_proj"),
        (down_case(tmp_path / "down"), "up_proj"),
    ):
        convert(made, tmp_path / name, PER_EXPERT)
        edit = alter(expert_name(1, 2, name, "B"), lambda b: b[0, 0].fill_(value))
        for findings in compare(made, change(tmp_path / name, edit), PER_EXPERT):
            assert findings.differing == ((f"layer 1 expert 2 {name}", math.inf),)


def put_in_expert_2(b: torch.Tensor) -> None:
    b[0, 2] = math.nan


@pytest.mark.parametrize("size", [1e37, 1e-37])
def test_numbers_at_the_edges_of_float32_are_compared(tmp_path: Path, size: float) -> None:
    """Finite bfloat16 factors whose probed sums and products leave float32, or are too small for it."""
    logical = Logical(dtype=torch.bfloat16)
    for factors in (logical.a, logical.b):
        for key in factors:
            factors[key] = (factors[key] * size).to(torch.bfloat16)
    assert all(tensor.isfinite().all() and (tensor != 0).all() for tensor in logical.a.values())
    made = Case(look(tmp_path / "source", encode(logical)), {})
    output = convert(made, tmp_path / "made", PER_EXPERT)
    probed, full = compare(made, output, PER_EXPERT)
    assert probed.differing == probed.nonfinite == full.differing == ()
    name = expert_name(0, 1, "down_proj", "B")
    output = change(tmp_path / "made", alter(name, lambda b: b[0].mul_(1.5)))
    for findings in compare(made, output, PER_EXPERT):
        assert [where for where, _ in findings.differing] == ["layer 0 expert 1 down_proj"]


def test_large_parts_are_looked_at_one_by_one(tmp_path: Path) -> None:
    layout = stacked_case(tmp_path / "source", "rank_major", "standard").found.layout
    assert 1 <= count_threads(layout) <= 4
    [pair, *_] = layout.pairs
    huge = replace(pair, a=(replace(pair.a[0], end=pair.a[0].begin + 2**29),))
    assert count_threads(replace(layout, pairs=(huge,))) == 1


def test_components_that_cancel_are_compared_in_float64(tmp_path: Path) -> None:
    """Float32 leaves nothing true of a delta whose components are a million times as large as it is."""
    logical = Logical()
    for key, a in logical.a.items():
        b = logical.b[key]
        a[:, 1], b[:, :, 1] = a[:, 0], -b[:, :, 0] * (1 + 2.0**-20)
        a[:, 2] = 0
    made = Case(look(tmp_path / "source", encode(logical)), {})
    output = convert(made, tmp_path / "made", STACKED)
    assert all(findings.differing == () for findings in compare(made, output, STACKED))
    shuffled = convert(made, tmp_path / "experts", PER_EXPERT)
    assert all(findings.differing == () for findings in compare(made, shuffled, PER_EXPERT))
    name = expert_name(0, 1, "down_proj", "B")
    output = change(tmp_path / "experts", alter(name, lambda b: b[0, 0].mul_(1 + 2.0**-22)))
    for findings in compare(made, output, PER_EXPERT):
        assert [where for where, _ in findings.differing] == ["layer 0 expert 1 down_proj"]
        assert 0.05 < findings.differing[0][1] < 1


def test_a_damage_that_float32_swallows_between_components_that_cancel_is_found(tmp_path: Path) -> None:
    """All that is left of the delta is added while the sum is ten million times as large: its digits are lost."""
    logical = Logical()
    for key, a in logical.a.items():
        b = logical.b[key]
        a[:, 2], b[:, :, 2] = a[:, 0], -b[:, :, 0]
        b[:, :, 1] *= 1e-7
    made = Case(look(tmp_path / "source", encode(logical)), {})
    output = convert(made, tmp_path / "made", PER_EXPERT)
    assert all(findings.differing == () for findings in compare(made, output, PER_EXPERT))
    name = expert_name(0, 1, "down_proj", "B")
    old = logical.b[0, "down_proj"][1] @ logical.a[0, "down_proj"][1]
    output = change(tmp_path / "made", alter(name, lambda b: b[:, 1].mul_(1.01)))
    b = logical.b[0, "down_proj"][1].clone()
    b[:, 1] *= 1.01
    assert torch.equal(b @ logical.a[0, "down_proj"][1], old), "float32 alone would see nothing"
    for findings in compare(made, output, PER_EXPERT):
        assert [where for where, _ in findings.differing] == ["layer 0 expert 1 down_proj"]
        assert findings.differing[0][1] == pytest.approx(0.01, rel=0.01)


def test_an_expert_without_tokens_is_no_error(tmp_path: Path) -> None:
    logical = Logical()
    logical.b[1, "down_proj"][2] = 0
    made = Case(look(tmp_path / "source", encode(logical)), {})
    output = convert(made, tmp_path / "made", PER_EXPERT)
    probed, full = compare(made, output, PER_EXPERT)
    assert probed.differing == full.differing == ()
    pairs = 3 * EXPERTS
    assert probed.trained[TensorClass.ROUTED_EXPERTS] == {0: (pairs, pairs), 1: (pairs - 1, pairs)}


def test_modules_of_a_class_count_as_trained_by_layer(tmp_path: Path) -> None:
    made = stacked_case(tmp_path / "source", "rank_major", "standard")
    convert(made, tmp_path / "made", STACKED)
    output = change(tmp_path / "made", alter(QUERY, torch.Tensor.zero_))
    probed, _ = compare(made, output, STACKED)
    assert probed.trained[TensorClass.ATTENTION] == {0: (4, 4), 1: (3, 4)}
    assert probed.trained[TensorClass.ROUTER] == {0: (1, 1), 1: (1, 1)}


def test_missing_tensors_are_left_out_and_named(tmp_path: Path) -> None:
    made = stacked_case(tmp_path / "source", "rank_major", "standard")
    convert(made, tmp_path / "made", PER_EXPERT)
    output = change(tmp_path / "made", lambda tensors: tensors.pop(expert_name(1, 2, "up_proj", "A")))
    for findings in compare(made, output, PER_EXPERT):
        assert findings.left_out == ("layer 1 gate_proj and up_proj",)
        assert findings.pairs == ALL_PAIRS - 2 * EXPERTS + MODULES
        assert findings.differing == ()


def test_a_layout_that_was_read_otherwise_is_found(tmp_path: Path) -> None:
    """The output of one packing, held against the source in the other."""
    made = stacked_case(tmp_path / "source", "rank_major", "standard")
    output = convert(made, tmp_path / "made", PER_EXPERT)
    other = tuple(replace(item, value=Packing.GROUPED_BY_EXPERT) for item in made.found.layout.packing)
    misread = replace(made, found=replace(made.found, layout=replace(made.found.layout, packing=other)))
    for findings in compare(misread, output, PER_EXPERT):
        assert len(findings.differing) == min(64, ALL_PAIRS)
        assert sum(one.differing for one in findings.errors) == ALL_PAIRS
        assert all(error > 0.5 for _, error in findings.differing)


def test_what_was_done_is_told(tmp_path: Path) -> None:
    made = stacked_case(tmp_path / "source", "rank_major", "standard")
    output = convert(made, tmp_path / "made", PER_EXPERT)
    told: list[tuple[int, int]] = []
    files, layout = made.found.files, made.found.layout

    def note(done: int, total: int) -> None:
        told.append((done, total))

    full = compare_deltas(files, output, layout, PER_EXPERT, device="cpu", progress=note)
    parts = LAYERS * 2 + MODULES
    assert told == [(done, parts) for done in range(1, parts + 1)]
    assert (full.device, full.tolerance) == ("cpu", DELTA_TOLERANCE)
    told.clear()
    one, two = (probe_deltas(files, output, layout, PER_EXPERT, progress=note) for _ in range(2))
    assert sorted(told[:parts]) == [(done, parts) for done in range(1, parts + 1)]
    assert one.seed != two.seed, "fresh probes each time"
    assert one.miss_probability < 1e-9 < PROBED_DAMAGE
    assert [error.projection for error in full.errors][:3] == ["gate_proj", "up_proj", "down_proj"]
    assert HIDDEN != INTER
