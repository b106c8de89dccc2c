"""The second reading of every form and target, against deltas that plain loops make from what the adapter means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from delta_builders import CASES, Deltas, change, change_config, convert, spell_deltas, stacked_case
from lora_builders import BIT_FOR_BIT, EXPERTS, LABEL, LAYERS, PREFIX, Logical

from tasks.lora.config import read_adapter_config
from tasks.lora.factors import list_parts
from tasks.lora.files import AdapterFiles
from tasks.lora.inspect import Inspection
from tasks.lora.names import Factor
from tasks.lora.served_factors import ServedFactors
from tasks.lora.source_factors import SourceFactors
from tasks.lora.target import TargetFormat
from tasks.lora.tensors import open_tensors


def read_source(found: Inspection) -> Deltas:
    deltas: Deltas = {}
    with open_tensors(found.files) as reader:
        source = SourceFactors(reader, found.layout)
        for part in list_parts(found.layout):
            lines = {factor: source.read(part, factor) for factor in Factor}
            for projection, scaling in source.scalings(part).items():
                a, b = (lines[factor][projection].values.double() for factor in Factor)
                for e in range(len(a)):
                    deltas[part.layer, projection, e] = scaling * b[e] @ a[e]
    return deltas


def read_served(found: Inspection, files: AdapterFiles, format: TargetFormat) -> Deltas:
    config = read_adapter_config(files.directory, label=LABEL)
    deltas: Deltas = {}
    with open_tensors(files) as reader:
        served = ServedFactors(reader, files, config, found.layout, format)
        for part in list_parts(found.layout):
            assert served.has(part)
            lines = {factor: served.read(part, factor) for factor in Factor}
            for projection, [scaling] in served.scalings(part).items():
                a, b = (lines[factor][projection][0].values.double() for factor in Factor)
                for e in range(len(a)):
                    deltas[part.layer, projection, e] = scaling[e] * b[e] @ a[e]
    return deltas


def assert_same(found: Deltas, expected: Deltas, tolerance: float = 1e-12) -> None:
    """Those of experts are as expected, or zero where nothing is; each is another."""
    experts = {key: delta for key, delta in found.items() if key[1].count("_") == 1 and "." not in key[1]}
    assert experts.keys() >= expected.keys()
    for key, delta in experts.items():
        wanted = expected.get(key, torch.zeros_like(delta))
        torch.testing.assert_close(delta, wanted, rtol=tolerance, atol=tolerance)
    one, *others = (delta for key, delta in expected.items() if key[1] == "down_proj")
    assert not any(torch.allclose(one, other, rtol=1e-2) for other in others)


@pytest.mark.parametrize("case", CASES)
def test_source_and_outputs_are_read_as_they_are_meant(tmp_path: Path, case: str) -> None:
    """The per-expert output also with its tensors in another order."""
    made = CASES[case](tmp_path / "source")
    assert_same(read_source(made.found), made.deltas)
    for format in TargetFormat:
        output = convert(made, tmp_path / format, format)
        # In bfloat16, each of the two factors has 8 bits.
        tolerance = 1e-12 if format in BIT_FOR_BIT else 0.02
        assert_same(read_served(made.found, output, format), made.deltas, tolerance)
    shuffled = change(tmp_path / "per-expert", lambda tensors: None)
    assert ".experts.0.gate_proj." not in shuffled.tensors[0].name
    assert_same(read_served(made.found, shuffled, TargetFormat.PER_EXPERT), made.deltas)


def test_the_other_packing_gives_other_deltas(tmp_path: Path) -> None:
    made = stacked_case(tmp_path / "source", "rank_major", "standard")
    [first, second] = made.found.layout.packing
    assert first.value is not None and second.value is not None
    other = replace(first, value=first.value.other), replace(second, value=second.value.other)
    misread = replace(made.found, layout=replace(made.found.layout, packing=other))
    found = read_source(misread)
    assert all(not torch.allclose(found[key], delta, rtol=0.1) for key, delta in made.deltas.items())


def test_modules_are_read_with_their_own_scaling(tmp_path: Path) -> None:
    made = stacked_case(tmp_path / "source", "rank_major", "standard")
    output = convert(made, tmp_path / "made", TargetFormat.PER_EXPERT)
    parts = [part for part in list_parts(made.found.layout) if part.module]
    assert len(parts) == 5 * LAYERS
    output = change_config(tmp_path / "made", alpha_pattern={r"1\.self_attn\.q_proj": 30})
    config = read_adapter_config(output.directory, label=LABEL)
    with open_tensors(output) as reader:
        served = ServedFactors(reader, output, config, made.found.layout, TargetFormat.PER_EXPERT)
        scalings = {
            part.served[name][0]: served.scalings(part)[name][0] for part in parts for name in part.served
        }
    assert scalings["model.layers.1.self_attn.q_proj"].tolist() == [10.0]
    assert scalings["model.layers.0.self_attn.q_proj"].tolist() == [2.0]


@pytest.mark.parametrize("format", TargetFormat)
def test_a_part_without_a_tensor_is_not_there(tmp_path: Path, format: TargetFormat) -> None:
    made = stacked_case(tmp_path / "source", "rank_major", "standard")
    convert(made, tmp_path / "made", format)
    names = {"per-expert": "experts.2.down_proj", "stacked": "experts", "slots": "experts.down_proj"}
    name = names[format]
    missing, short = f"{PREFIX}.1.mlp.{name}.lora_B.weight", f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[missing]
        tensors[short] = tensors[short][:, 1:]

    output = change(tmp_path / "made", edit)
    config = read_adapter_config(output.directory, label=LABEL)
    with open_tensors(output) as reader:
        served = ServedFactors(reader, output, config, made.found.layout, format)
        absent = [part for part in list_parts(made.found.layout) if not served.has(part)]
    assert [(part.layer, part.projections) for part in absent] == [
        (1, ("down_proj",)),
        (0, ("self_attn.q_proj",)),
    ]


def test_the_oracle_knows_each_expert() -> None:
    deltas = spell_deltas(Logical())
    assert len(deltas) == LAYERS * EXPERTS * 3
