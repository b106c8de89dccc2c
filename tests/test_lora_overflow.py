"""Finite factors that are infinite once served: diffusers#5316, openvla#53. The oracle is a plain loop over experts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
    ALPHA,
    DOUBLED,
    ENCODINGS,
    EXPERTS,
    HIDDEN,
    INTER,
    LABEL,
    LAYERS,
    PREFIX,
    RANK,
    Logical,
    Separate,
    attention,
    base_fields,
    encode,
    encode_cubes,
    encode_experts,
    expert_name,
    look,
    make_base,
    spell_out,
    stack_blocks,
    stacked_name,
)

from tasks.lora import rebuild
from tasks.lora.base import read_base_config
from tasks.lora.check import check_conversion
from tasks.lora.checks import CheckName, CheckReport, CheckResult, raise_for
from tasks.lora.convert import convert_adapter
from tasks.lora.errors import NonFinite
from tasks.lora.overflow import find_peak
from tasks.lora.plan import plan_conversion
from tasks.lora.target import TargetFormat

Tensors = dict[str, torch.Tensor]
SCALING = ALPHA / RANK
FP16_MAX = 65504.0


def check(
    tmp_path: Path,
    tensors: Tensors,
    *,
    dtype: str | None = "float16",
    format: TargetFormat = TargetFormat.PER_EXPERT,
    packing: str = "rank_major",
    **config: Any,
) -> CheckReport:
    found = look(tmp_path / "source", tensors, make_base(dtype=dtype), packing=packing, **config)
    convert_adapter(found.files, plan_conversion(found.layout, format), tmp_path / "made")
    return check_conversion(found.files, tmp_path / "made", found.layout, format)


def in_range(report: CheckReport) -> CheckResult:
    assert [one.name for one in report.checks if not one.passed] in ([], [CheckName.IN_RANGE])
    return next(one for one in report.checks if one.name is CheckName.IN_RANGE)


def multiply_out(tensors: Tensors) -> dict[str, float]:
    """The largest |number| of each expert's projection in delta, factors and scaled B, number by number."""
    largest = {}
    for name, a in tensors.items():
        if "lora_A" not in name:
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        rows, columns = b.double().tolist(), a.double().T.tolist()
        delta = (
            abs(SCALING * sum(x * y for x, y in zip(row, column, strict=True)))
            for row in rows
            for column in columns
        )
        own = (abs(float(x)) * s for factor, s in ((a, 1.0), (b, SCALING)) for x in factor.flatten())
        largest[name.replace("lora_A", "lora_B")] = max(*delta, *own)
    return largest


def enlarge(logical: Logical) -> Logical:
    """B so large that some experts' products leave float16 and others do not; every factor by itself is inside."""
    for (layer, parameter), b in logical.b.items():
        logical.a[layer, parameter] *= 1000.0
        for expert in range(EXPERTS):
            b[expert] *= 3.0 ** (5 + expert + 2 * layer) if parameter == "down_proj" else 5.0
    return logical


@pytest.mark.parametrize("format", TargetFormat)
@pytest.mark.parametrize(("packing", "orientation"), ENCODINGS)
def test_experts_whose_deltas_overflow_are_counted(
    tmp_path: Path, packing: str, orientation: str, format: TargetFormat
) -> None:
    logical = enlarge(Logical())
    expected = multiply_out(spell_out(logical))
    over = {name: value for name, value in expected.items() if value > FP16_MAX}
    assert 0 < len(over) < EXPERTS * LAYERS
    tensors = encode(logical, packing=packing, orientation=orientation)
    assert max(float(tensor.abs().max()) for tensor in tensors.values()) * SCALING < FP16_MAX
    report = check(tmp_path, tensors, format=format, packing=packing)
    found = in_range(report)
    assert not found.passed
    figures = dict(found.figures)
    assert figures["overflows"] == len(over)
    assert figures["largest"] == pytest.approx(max(over.values()), rel=1e-6)
    stored = "B" if orientation == "standard" else "A"
    assert found.where == stacked_name(1, "down_proj", stored)
    with pytest.raises(NonFinite) as caught:
        raise_for(report)
    error = caught.value
    assert (error.adapter, error.where) == (LABEL, found.where)
    assert f"of expert {EXPERTS - 1} in a factor or its delta" in error.found
    assert "float16, up to 65504" in error.found
    assert error.expected == "factors and deltas that are finite as they are served"
    assert error.advice


def test_products_are_not_made_once_enough_overflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 30B-shaped adapter that overflowed throughout took six minutes to check."""
    made = []

    def count_and_find(*args: Any) -> float:
        made.append(args)
        return find_peak(*args)

    monkeypatch.setattr(rebuild, "find_peak", count_and_find)
    monkeypatch.setattr(rebuild, "MOST_OVERFLOWS", 2)
    monkeypatch.setattr("tasks.lora.check_numbers.MOST_OVERFLOWS", 2)
    logical = enlarge(Logical())
    for b in logical.b.values():
        b.mul_(1e4)
    found = in_range(
        check(tmp_path, encode(logical, packing="rank_major", orientation="standard"), packing="rank_major")
    )
    assert not found.passed and dict(found.figures)["overflows"] == len(made) == 2
    assert "the largest of the first 2 outside float16" in found.detail


@pytest.mark.parametrize("encoder", [encode_experts, encode_cubes])
def test_other_forms_name_the_worst_expert(tmp_path: Path, encoder: Any) -> None:
    meant = Separate()
    tensors = encode_experts(meant)
    expected = multiply_out(tensors)
    worst = max(expected, key=expected.__getitem__)
    over = [name for name, value in expected.items() if value > FP16_MAX]
    assert worst == expert_name(1, EXPERTS - 1, "down_proj", "B") and 0 < len(over) < len(expected)
    found = in_range(check(tmp_path, encoder(meant)))
    assert dict(found.figures)["overflows"] == len(over)
    assert dict(found.figures)["largest"] == pytest.approx(expected[worst])
    assert found.where == (worst if encoder is encode_experts else found.where)
    assert ("w2" in found.where) == (encoder is encode_cubes)
    assert f"of expert {EXPERTS - 1}" in found.detail


def test_blocks_are_multiplied_by_themselves(tmp_path: Path) -> None:
    """Gate's and up's components in one pair, as PEFT saves per-expert files again."""
    meant = Separate()
    expected = multiply_out(encode_experts(meant))
    over = [value for value in expected.values() if value > FP16_MAX]
    found = in_range(check(tmp_path, encode(stack_blocks(meant)), **DOUBLED))
    assert dict(found.figures) == {"overflows": len(over), "largest": pytest.approx(max(over))}


@pytest.mark.parametrize(
    ("dtype", "detail"),
    [
        ("bfloat16", "all within bfloat16, up to 3.38953e+38"),
        ("float32", "all within bfloat16, up to 3.38953e+38"),
        (None, "all within bfloat16, up to 3.38953e+38, as the base names no dtype"),
    ],
)
def test_what_float16_cannot_hold_others_can(tmp_path: Path, dtype: str | None, detail: str) -> None:
    found = in_range(check(tmp_path, encode(enlarge(Logical())), dtype=dtype))
    assert (found.passed, found.detail) == (True, detail)
    assert dict(found.figures) == {"overflows": 0, "largest": 0.0}


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_products_of_largest_numbers_overflow_every_type(tmp_path: Path, dtype: str | None) -> None:
    logical = Logical(dtype=torch.bfloat16)
    logical.a[1, "down_proj"][2, 1, 4] = 1e30
    logical.b[1, "down_proj"][2, 3, 1] = -1e20
    found = in_range(check(tmp_path, encode(logical), dtype=dtype))
    assert not found.passed
    assert dict(found.figures)["overflows"] == 1
    assert found.where == stacked_name(1, "down_proj", "B") and "of expert 2" in found.detail


def test_large_products_that_cancel_are_in_range(tmp_path: Path) -> None:
    """The bound alone would refuse this: two components that undo each other."""
    logical = Logical()
    for key, a in logical.a.items():
        a[:, 0], a[:, 1] = 40_000.0 * a[:, 2], 40_000.0 * a[:, 2]
        logical.b[key][:, :, 0] = 3000.0 * logical.b[key][:, :, 2]
        logical.b[key][:, :, 1] = -logical.b[key][:, :, 0]
    bounds = [
        SCALING * float((a[0].abs().amax(1) * logical.b[key][0].abs().amax(0)).sum())
        for key, a in logical.a.items()
    ]
    assert max(bounds) > FP16_MAX > max(multiply_out(spell_out(logical)).values())
    assert in_range(check(tmp_path, encode(logical))).passed


def test_a_factor_that_the_engine_cannot_hold(tmp_path: Path) -> None:
    """Its product would do; but the factors are cast, and B takes the scaling, before they are multiplied."""
    logical = Logical()
    logical.b[0, "gate_up_proj"][3, INTER + 2, 1] = 0.6 * FP16_MAX
    logical.a[0, "gate_up_proj"][3, 1] = torch.arange(1, HIDDEN + 1) * 1e-6
    found = in_range(check(tmp_path, encode(logical)))
    assert not found.passed
    assert dict(found.figures) == {"overflows": 1, "largest": pytest.approx(0.6 * FP16_MAX * SCALING)}
    half = in_range(check(tmp_path / "half", encode(logical), lora_alpha=ALPHA / 2))
    assert half.passed, "without a scaling it stays inside"


def test_other_modules_overflow_too(tmp_path: Path) -> None:
    tensors = encode(Logical()) | attention()
    name = f"{PREFIX}.1.self_attn.o_proj.lora_B.weight"
    tensors[name] = tensors[name] * 30_000 / tensors[name].abs().max()
    delta = SCALING * tensors[name].double() @ tensors[name.replace("lora_B", "lora_A")].double()
    assert float(delta.abs().max()) > FP16_MAX
    found = in_range(check(tmp_path, tensors))
    assert (found.passed, found.where) == (False, name)
    assert dict(found.figures) == {"overflows": 1, "largest": pytest.approx(float(delta.abs().max()))}
    assert "expert" not in found.detail


@pytest.mark.parametrize("pattern", [b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"], ids=["nan", "-inf"])
def test_what_is_not_finite_itself_is_another_fault(tmp_path: Path, pattern: bytes) -> None:
    found = look(tmp_path / "source", encode(Logical()), make_base(dtype="float16"))
    weights = tmp_path / "source" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = pattern
    weights.write_bytes(data)
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    report = check_conversion(found.files, tmp_path / "made", found.layout)
    assert [one.name for one in report.checks if not one.passed] == [CheckName.FINITE]


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": ["float16"]}, None),
        ({}, None),
    ],
)
def test_the_dtype_that_a_base_names(fields: dict[str, Any], dtype: str | None) -> None:
    assert make_base(**fields).dtype == dtype


def test_the_whole_base_is_asked_before_its_text_part() -> None:
    text = base_fields(dtype="float16")
    for outer, expected in ((None, "float16"), ("bfloat16", "bfloat16")):
        whole = {"model_type": "qwen3_moe", "dtype": outer, "text_config": text}
        assert read_base_config(json.dumps(whole).encode(), label="tiny").dtype == expected
    assert math.isinf(torch.tensor(65520.0).half().item()), "what the limit is about"
