"""Materialised deltas on a GPU find what they find on the processor. Skipped without one (bench/gpu_check.sh)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from delta_builders import CASES, change, convert
from lora_builders import BIT_FOR_BIT, EXPERTS, expert_name

from tasks.lora.deltas import compare_deltas
from tasks.lora.target import TargetFormat

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.mark.parametrize("case", CASES)
def test_right_conversions_differ_nowhere_on_a_gpu(tmp_path: Path, case: str) -> None:
    made = CASES[case](tmp_path / "source")
    for format in TargetFormat:
        output = convert(made, tmp_path / format, format)
        found = compare_deltas(made.found.files, output, made.found.layout, format, device="cuda")
        assert found.device == "cuda"
        assert found.differing == () and found.left_out == ()
        rounding = 0.0 if format in BIT_FOR_BIT else 3 * 2**-8
        assert all(one.largest < 1e-6 + rounding for one in found.errors)


def test_damage_has_the_same_errors_on_both_devices(tmp_path: Path) -> None:
    """A thousandth of one delta is far below what TF32 would let through; gate and up are exchanged in one expert."""
    made = CASES["rank_major"](tmp_path / "source")
    convert(made, tmp_path / "made", TargetFormat.PER_EXPERT)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[expert_name(0, 2, "down_proj", "B")] *= 1.0 + 2.0**-17
        tensors[expert_name(1, 3, "down_proj", "A")][0, 0] = torch.nan
        gate, up = (expert_name(1, 1, name, "B") for name in ("gate_proj", "up_proj"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]

    output = change(tmp_path / "made", edit)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        cpu, cuda = (
            compare_deltas(
                made.found.files, output, made.found.layout, TargetFormat.PER_EXPERT, device=device
            )
            for device in ("cpu", "cuda")
        )
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert dict(cuda.differing) == pytest.approx(dict(cpu.differing), rel=1e-3)
    assert len(cuda.differing) == 4 and EXPERTS == 4
    assert cuda.exchanged == cpu.exchanged == ("layer 1 expert 1",)
