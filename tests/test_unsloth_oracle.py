"""The real unsloth_zoo as the judge of its own files: what its merge adds must be what our conversion adds.

It is downloaded beside the tests, one folder and one process for each version, and never installed: versions up to
2026.9.5 group by expert, later ones pack rank-major, and a file says neither. Without a package index that has
unsloth_zoo these tests fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lora_builders import LABEL, Logical, base_fields, encode, save_adapter, unpack_wheel
from safetensors.torch import load_file

from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.check import check_conversion
from tasks.lora.config import effective_scaling
from tasks.lora.convert import convert_adapter
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.plan import plan_control, plan_conversion
from tasks.lora.trainers import TrainingStatement

pytestmark = pytest.mark.real

PACKINGS = {"2026.9.5": Packing.GROUPED_BY_EXPERT, "2026.9.6": Packing.RANK_MAJOR}
SCRIPT = Path(__file__).with_name("unsloth_merge.py")
ALPHA = 5


@dataclass(frozen=True)
class Shape:
    experts: int
    rank: int
    hidden: int
    inter: int


# The second has E * r = H, as Qwen3-30B-A3B with rank 16: half of the stored tensors are square.
SHAPES = {"uneven": Shape(4, 3, 10, 7), "square": Shape(8, 4, 32, 12)}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each version's package in a folder of its own."""
    root = tmp_path_factory.mktemp("unsloth_zoo")
    return {version: unpack_wheel("unsloth_zoo", version, root) for version in PACKINGS}


def run_unsloth(package: Path, scratch: Path, *arguments: str | Path, layout: str | None = None) -> None:
    scratch.mkdir(exist_ok=True)
    settings = {
        "PYTHONPATH": str(package),
        "UNSLOTH_ZOO_DISABLE_GPU_INIT": "1",
        "UNSLOTH_MOE_BACKEND": "native_torch",
        "UNSLOTH_COMPILE_LOCATION": str(scratch / "compiled"),
        "HF_HUB_OFFLINE": "1",
    } | ({"UNSLOTH_MOE_LORA_B_LAYOUT": layout} if layout else {})
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UNSLOTH_")}
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=inherited | settings,
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def merged(unpacked: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each version, one folder of adapters `<shape>-<orientation>`, all merged by that version.

    Both versions get the same numbers, and nothing in a file says which packing they are in: only the reader decides.
    """
    roots = {}
    for version, package in unpacked.items():
        root = roots[version] = tmp_path_factory.mktemp("adapters")
        folders = []
        for name, shape in SHAPES.items():
            logical = Logical(rank=shape.rank, experts=shape.experts, hidden=shape.hidden, inter=shape.inter)
            for orientation in Orientation:
                folder = root / f"{name}-{orientation}"
                save_adapter(folder, encode(logical, orientation=orientation), r=shape.rank, lora_alpha=ALPHA)
                sizes = {"experts": shape.experts, "hidden": shape.hidden, "inter": shape.inter}
                (folder / "sizes.json").write_text(json.dumps({**sizes, "scaling": ALPHA / shape.rank}))
                folders.append(folder)
        run_unsloth(package, root / "scratch", "deltas", *folders)
    return roots


def base_of(shape: Shape) -> BaseConfig:
    fields = base_fields(
        hidden_size=shape.hidden, moe_intermediate_size=shape.inter, num_local_experts=shape.experts
    )
    return read_base_config(json.dumps(fields).encode(), label="tiny-base")


def our_deltas(found: Inspection, converted: Path) -> dict[str, torch.Tensor]:
    """What an engine adds to each expert's weight, from the converted files alone."""
    tensors = load_file(converted / "adapter_model.safetensors")
    scaling = effective_scaling(found.layout.config)
    deltas = {}
    for name, a in tensors.items():
        if ".experts." in name and name.endswith(".lora_A.weight"):
            layer, _, _, expert, projection = name.split(".layers.")[1].split(".")[:5]
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            deltas[f"{layer}.{expert}.{projection}"] = scaling * (b @ a)
    return deltas


@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("version", PACKINGS)
def test_our_deltas_are_those_of_its_merge(
    merged: dict[str, Path], tmp_path: Path, version: str, shape: str, orientation: Orientation
) -> None:
    source = merged[version] / f"{shape}-{orientation}"
    found = inspect_adapter(
        source, base_of(SHAPES[shape]), label=LABEL, training=TrainingStatement("unsloth_zoo", version)
    )
    assert found.orientation is orientation
    assert [(item.value, item.decided_by) for item in found.packing] == [(PACKINGS[version], "training")] * 2
    plan = plan_conversion(found.layout)
    convert_adapter(found.files, plan, tmp_path / "made")
    convert_adapter(found.files, plan_control(plan), tmp_path / "control")
    assert check_conversion(found.files, tmp_path / "made", found.layout).passed
    theirs = load_file(source / "theirs.safetensors")
    ours, misread = (our_deltas(found, tmp_path / name) for name in ("made", "control"))
    other = next(name for name in PACKINGS if name != version)
    others = load_file(merged[other] / source.name / "theirs.safetensors")
    assert theirs.keys() == ours.keys()
    assert len(theirs) == found.pairs
    for name, delta in theirs.items():
        size = delta.norm()
        # Early versions returned the base weight, without an error, for files in the standard orientation.
        assert size > 0, name
        torch.testing.assert_close(ours[name], delta, rtol=1e-5, atol=1e-6)
        assert (misread[name] - delta).norm() > 0.1 * size, name
        assert (others[name] - delta).norm() > 0.1 * size, f"{name}: both versions read it alike"


@pytest.mark.parametrize("layout", [None, Packing.GROUPED_BY_EXPERT], ids=str)
def test_its_own_marker_is_read(unpacked: dict[str, Path], tmp_path: Path, layout: Packing | None) -> None:
    """Written by the program itself into what PEFT saved; its environment variable chooses the packing."""
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    run_unsloth(unpacked["2026.9.6"], tmp_path / "scratch", "marker", adapter, base, layout=layout)
    found = inspect_adapter(adapter, read_base_config(base, label="tiny-base"), label=LABEL)
    expected = layout or Packing.RANK_MAJOR
    for decision in found.packing:
        assert (decision.value, decision.decided_by) == (expected, "marker")
        nested = f"unsloth_fused_expert_lora.parameters.{decision.parameter}.lora_B_layout"
        assert [item.detail for item in decision.evidence] == [
            nested,
            "unsloth_fused_expert_lora.lora_B_layout",
            "lora_B_layout",
        ]
    assert found.warnings == ()
