"""Attention that takes its keys for the values: one pair in the trainer's file, two in the engine's.

vLLM 0.32 models/gemma4.py loads the base's k_proj into two slices of qkv_proj, an adapter's into one: served as it was
saved, the values stay the base's. What is meant is told here by a plain loop over the source's names.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_builders import change as change_numbers
from family_inventories import RANK, load_inventory, stacked_adapter
from lora_builders import LABEL, assert_equal, find_weights, load, look

from tasks.lora.base import read_base_config
from tasks.lora.check import check_conversion
from tasks.lora.checks import CheckReport, raise_for
from tasks.lora.convert import ConvertedFiles, convert_adapter, digest_adapter
from tasks.lora.errors import AdapterError, BaseMismatch, DeltaMismatch, MissingTensor, NonFinite
from tasks.lora.inspect import Inspection
from tasks.lora.plan import plan_control, plan_conversion
from tasks.lora.snapshots import load_snapshot
from tasks.lora.target import TargetFormat

Tensors = dict[str, torch.Tensor]
INVENTORY = load_inventory("gemma4")
BASE = read_base_config(INVENTORY.encoded, label="tiny-base")
# The third layer of three has full attention, and no v_proj.
TRAINED = "base_model.model.model.language_model.layers.2.self_attn"
SERVED = "base_model.model.language_model.model.layers.2.self_attn"
VALUES = [f"{SERVED}.v_proj.lora_{factor}.weight" for factor in "AB"]


def fill(rank: int = RANK) -> Tensors:
    """An adapter of all that there is, every number another one; k_proj of the third layer of its own rank."""
    generator = torch.Generator().manual_seed(1)
    shapes = {name: list(each.shape) for name, each in stacked_adapter(INVENTORY).items()}
    assert [name for name in shapes if "layers.2" in name and "v_proj" in name] == []
    shapes[f"{TRAINED}.k_proj.lora_A.weight"][0] = rank
    shapes[f"{TRAINED}.k_proj.lora_B.weight"][1] = rank
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def inspect(folder: Path, tensors: Tensors, **config: Any) -> Inspection:
    return look(folder / "source", tensors, BASE, **config)


def write(found: Inspection, folder: Path, format: TargetFormat) -> ConvertedFiles:
    return convert_adapter(found.files, plan_conversion(found.layout, format), folder)


def check(
    found: Inspection, folder: Path, change: Callable[[Tensors], object], format: TargetFormat
) -> CheckReport:
    """Convert, change what was written, check."""
    write(found, folder, format)
    change_numbers(folder, change)
    return check_conversion(found.files, folder, found.layout, format)


def list_failed(report: CheckReport) -> list[str]:
    return [each.name.value for each in report.checks if not each.passed]


@pytest.mark.parametrize("format", TargetFormat)
def test_pair_is_written_under_both_names(tmp_path: Path, format: TargetFormat) -> None:
    tensors = fill()
    found = inspect(tmp_path, tensors)
    files = write(found, tmp_path / "made", format)
    expected: Tensors = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            continue
        expected[name.replace("model.language_model.", "language_model.model.")] = tensor
        if ".2.self_attn.k_proj" in name:
            expected[f"{SERVED}.v_proj.lora_{'A' if 'lora_A' in name else 'B'}.weight"] = tensor
    made = load(tmp_path / "made")
    if format is TargetFormat.SLOTS:  # of a base that is served in bfloat16
        expected = {
            name: tensor.bfloat16() * (2 if "lora_B" in name else 1) for name, tensor in expected.items()
        }
    assert_equal({name: tensor for name, tensor in made.items() if ".experts." not in name}, expected)
    assert set(VALUES) < set(expected), "and nothing under that name in the source"

    served = load_snapshot(BASE.served.architecture, "0.32.0", layers=3, experts=4)
    assert served is not None
    report = check_conversion(found.files, tmp_path / "made", found.layout, format, [served])
    assert list_failed(report) == []
    figures = {each.name.value: dict(each.figures) for each in report.checks}
    assert figures["coverage"]["pairs"] == found.layout.expert_pairs == 3 * 4 * 3
    assert figures["resolves"]["attention"] == sum(".self_attn." in name for name in made)
    assert figures["round_trip"]["compared"] == len(tensors)
    assert files.files[1].bytes == find_weights(tmp_path / "made").stat().st_size


def test_order_is_canonical(tmp_path: Path) -> None:
    """Each name beside the one whose numbers it has, whatever the order in the source, so that it is read once."""
    tensors = fill()
    digests = set()
    for folder, names in (("given", list(tensors)), ("reversed", list(reversed(tensors)))):
        found = inspect(tmp_path / folder, {name: tensors[name] for name in names})
        plan = plan_conversion(found.layout)
        digests.add(digest_adapter(found.files, plan))
    assert len(digests) == 1
    order = [tensor.name for tensor in plan.tensors]
    for name in VALUES:
        assert (name.replace("v_proj", "k_proj"), name) in pairwise(order)
    control = digest_adapter(found.files, plan_control(found.layout))
    assert control not in digests


def test_both_have_the_rank_and_the_scaling_of_the_one(tmp_path: Path) -> None:
    """The engine looks each of them up by its own name."""
    patterns = {"rank_pattern": {"layers.2.self_attn.k_proj": 5}, "alpha_pattern": {"2.self_attn.k_proj": 11}}
    found = inspect(tmp_path, fill(rank=5), **patterns)
    plan = plan_conversion(found.layout)
    modules = {module.name: (module.rank, module.scaling) for module in plan.modules}
    names = [f"{SERVED.removeprefix('base_model.model.')}.{name}" for name in ("k_proj", "v_proj")]
    assert [modules[name] for name in names] == [(5, 11 / 5)] * 2
    assert {modules[name] for name in modules if name not in names} == {(3, 2.0)}
    for format in TargetFormat:
        write(found, tmp_path / format, format)
        report = check_conversion(found.files, tmp_path / format, found.layout, format)
        assert list_failed(report) == []


def drop_both(tensors: Tensors) -> None:
    for name in VALUES:
        del tensors[name]


def change_number(tensors: Tensors) -> None:
    tensors[VALUES[1]][7, 2] += 1


def take_another(tensors: Tensors) -> None:
    """Of the right shape and the same numbers, but those of q_proj."""
    tensors[VALUES[0]] = tensors[VALUES[0].replace("v_proj", "q_proj")].clone()


def spoil(tensors: Tensors) -> None:
    tensors[VALUES[0]][1, 4] = torch.nan


@pytest.mark.parametrize("format", TargetFormat)
@pytest.mark.parametrize(
    ("change", "failed", "error", "where", "says"),
    [
        (
            drop_both,
            ["coverage", "size", "deltas", "round_trip"],
            MissingTensor,
            VALUES[0],
            "2 tensors missing",
        ),
        (
            change_number,
            ["deltas", "round_trip"],
            DeltaMismatch,
            "language_model.model.layers.2.self_attn.v_proj",
            "1 of 60 deltas that differ",
        ),
        (
            take_another,
            ["deltas", "round_trip"],
            DeltaMismatch,
            "language_model.model.layers.2.self_attn.v_proj",
            "1 of 60 deltas that differ",
        ),
        (
            spoil,
            ["finite", "deltas", "round_trip"],
            NonFinite,
            VALUES[0],
            "1 NaN or infinite values in 1 tensors",
        ),
    ],
)
def test_faults_of_the_second_are_found(
    tmp_path: Path,
    format: TargetFormat,
    change: Callable[[Tensors], object],
    failed: list[str],
    error: type[AdapterError],
    where: str,
    says: str,
) -> None:
    report = check(inspect(tmp_path, fill()), tmp_path / "made", change, format)
    assert list_failed(report) == failed
    with pytest.raises(error) as caught:
        raise_for(report)
    assert (caught.value.adapter, caught.value.where) == (LABEL, where)
    assert says in caught.value.found
    pairs = next(dict(each.figures)["pairs"] for each in report.checks if each.name.value == "coverage")
    assert pairs == 3 * 4 * 3, "no expert is missing"


def test_values_of_their_own_are_refused(tmp_path: Path) -> None:
    """No model with this config.json has such a module, so another base was meant, or the output of a conversion."""
    extra = {
        f"{TRAINED}.v_proj.lora_{factor}.weight": fill()[f"{TRAINED}.k_proj.lora_{factor}.weight"].clone()
        for factor in "AB"
    }
    with pytest.raises(BaseMismatch) as caught:
        inspect(tmp_path, fill() | extra)
    error = caught.value
    assert (error.adapter, error.where) == (LABEL, f"{TRAINED}.v_proj.lora_A.weight")
    assert error.expected == (
        "a layer of sliding attention with keys of its own or a layer of separate values"
    )
    assert error.found == (
        "layer 2, which is not one: there layers.2.self_attn.k_proj is used in its place, too "
        "(the first of 2)"
    )
    assert (
        error.advice == "Submit the adapter as it was trained; those factors are written twice at conversion."
    )


def test_factors_of_a_size_that_the_layer_does_not_have_are_refused(tmp_path: Path) -> None:
    """Three heads of 16 there, where the other layers have two of 8."""
    name = f"{TRAINED}.k_proj.lora_B.weight"
    with pytest.raises(BaseMismatch) as caught:
        inspect(tmp_path, fill() | {name: torch.ones(2 * 16, RANK)})
    assert (caught.value.where, caught.value.expected) == (name, "48 along the other axis")
