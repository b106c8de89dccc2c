"""An adapter of the published size: Qwen3-30B-A3B, 48 layers, 128 experts, rank 16, bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from lora_builders import base_fields, config_fields

LAYERS, EXPERTS, RANK, HIDDEN, INTER = 48, 128, 16, 2048, 768
# Below 2^62 in bfloat16 (0x5E80), so that products stay finite, and prime, so that no shift between two places of a
# tensor hides.
MODULUS = 24061
SHAPES = {
    "experts.base_layer.lora_A": (EXPERTS * RANK, HIDDEN),
    "experts.base_layer.lora_B": (2 * INTER, EXPERTS * RANK),
    "experts.lora_A": (EXPERTS * RANK, INTER),
    "experts.lora_B": (HIDDEN, EXPERTS * RANK),
}

# Convert and check in a process of its own, so that its memory is its own.
RUN = """
import json, re, sys, time
from pathlib import Path
from tasks.lora.base import read_base_config
from tasks.lora.check import check_conversion
from tasks.lora.convert import convert_adapter
from tasks.lora.inspect import inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.plan import plan_conversion
from tasks.lora.target import TargetFormat

source, made, format = Path(sys.argv[1]), Path(sys.argv[2]), TargetFormat(sys.argv[3])
seconds, started = {}, time.perf_counter()

def peak_mb():
    # Not ru_maxrss: a new program starts with that of the process it was started from.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

def lap(name):
    global started
    now = time.perf_counter()
    seconds[name], started = round(now - started, 2), now

base = read_base_config(source / "base.json", label="30b")
# The content is a pattern, which looks like some packing by chance: the check of the layout says so.
found = inspect_adapter(source, base, label="author/full", forced=Packing.RANK_MAJOR)
lap("inspect")
plan = plan_conversion(found.layout, format)
lap("plan")
files = convert_adapter(found.files, plan, made)
lap("convert")
convert_peak = peak_mb()
report = check_conversion(found.files, made, found.layout, format)
lap("check")
print(json.dumps({
    "seconds": seconds, "convert_peak_mb": convert_peak,
    "peak_mb": peak_mb(),
    "pairs": files.pairs, "bytes": {file.name: file.bytes for file in files.files},
    "predicted": plan.predicted_bytes,
    "failed": [check.detail for check in report.checks if not check.passed and check.name != "layout"],
}))
"""


def content(layer: int, kind: int, shape: tuple[int, int]) -> npt.NDArray[np.uint16]:
    """Bit patterns that tell every place from its neighbours, its layer and its tensor."""
    ramp = np.arange(shape[0] * shape[1], dtype=np.uint32) * 7 + layer * 977 + kind * 251
    return (ramp % MODULUS + 1).astype(np.uint16).reshape(shape)


def generate(folder: Path) -> None:
    folder.mkdir()
    fields, place = {}, 0
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            end = place + 2 * shape[0] * shape[1]
            fields[f"base_model.model.model.layers.{layer}.mlp.{name}.weight"] = {
                "dtype": "BF16",
                "shape": list(shape),
                "data_offsets": [place, end],
            }
            place = end
    header = json.dumps(fields).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for layer in range(LAYERS):
            for kind, shape in enumerate(SHAPES.values()):
                file.write(content(layer, kind, shape).data)
    (folder / "adapter_config.json").write_text(json.dumps(config_fields(r=RANK, lora_alpha=32)), "utf-8")
    base = base_fields(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTER,
        num_local_experts=EXPERTS,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
    )
    (folder / "base.json").write_text(json.dumps(base), "utf-8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "source"
    generate(folder)
    return folder


def convert(
    source: Path, made: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], dict[str, list[int]], npt.NDArray[np.uint8]]:
    """Convert, check, and return the output's names, where each tensor lies, and its data."""
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(source), str(made), format],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout)
    with capsys.disabled():
        print(f"\nfull size, {format}: {figures['seconds']} s, {figures['peak_mb']} MB")
    assert figures["failed"] == []
    assert figures["pairs"] == 18_432
    assert figures["convert_peak_mb"] < 500
    weights = made / "adapter_model.safetensors"
    assert figures["bytes"]["adapter_model.safetensors"] == figures["predicted"] == weights.stat().st_size
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        pairs = json.loads(file.read(length), object_pairs_hook=list)
    names = [name for name, _ in pairs if name != "__metadata__"]
    offsets = {name: dict(fields)["data_offsets"] for name, fields in pairs if name != "__metadata__"}
    return names, offsets, np.memmap(weights, dtype=np.uint8, mode="r", offset=8 + length)


@pytest.mark.real
def test_full_size_adapter(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly 18,432 pairs, none missing, none twice, bit for bit, in little memory."""
    names, offsets, data = convert(source, tmp_path / "made", "per-expert", capsys)
    assert len(names) == len(set(names)) == 36_864
    assert set(names) == {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{projection}.lora_{factor}.weight"
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for projection in ("gate_proj", "up_proj", "down_proj")
        for factor in "AB"
    }
    for layer in (0, 9, 47):
        for expert in (0, 77, 127):
            _compare(data, offsets, layer, expert)


@pytest.mark.real
def test_full_size_adapter_stays_stacked(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank-major and standard as it is, it comes out as it went in."""
    names, offsets, data = convert(source, tmp_path / "made", "stacked", capsys)
    assert len(names) == len(set(names)) == 4 * LAYERS
    for layer in (0, 9, 47):
        for kind, (name, shape) in enumerate(SHAPES.items()):
            begin, end = offsets[f"base_model.model.model.layers.{layer}.mlp.{name}.weight"]
            assert np.array_equal(data[begin:end].view(np.uint16).reshape(shape), content(layer, kind, shape))


def _compare(data: npt.NDArray[np.uint8], offsets: dict[str, list[int]], layer: int, expert: int) -> None:
    """Every number of one expert, against the formula that made the source."""

    def made(projection: str, factor: str, shape: tuple[int, int]) -> npt.NDArray[np.uint16]:
        name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{projection}.lora_{factor}.weight"
        begin, end = offsets[name]
        return data[begin:end].view(np.uint16).reshape(shape)

    inner_a, inner_b, outer_a, outer_b = (
        content(layer, kind, shape) for kind, shape in enumerate(SHAPES.values())
    )
    rows = [expert * RANK + j for j in range(RANK)]
    columns = [j * EXPERTS + expert for j in range(RANK)]
    for place, projection in enumerate(("gate_proj", "up_proj")):
        assert np.array_equal(made(projection, "A", (RANK, HIDDEN)), inner_a[rows])
        share = inner_b[place * INTER : (place + 1) * INTER, columns]
        assert np.array_equal(made(projection, "B", (INTER, RANK)), share)
    assert np.array_equal(made("down_proj", "A", (RANK, INTER)), outer_a[rows])
    assert np.array_equal(made("down_proj", "B", (HIDDEN, RANK)), outer_b[:, columns])
