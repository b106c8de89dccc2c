"""A converted adapter's experts alone and its attention alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_builders import LABEL, PREFIX, Logical, attention, encode, find_weights, load, look

from tasks.lora.ablate import Ablation, ablate_adapter, list_ablations
from tasks.lora.convert import convert_adapter
from tasks.lora.errors import DestinationExists
from tasks.lora.files import AdapterFiles, open_adapter
from tasks.lora.plan import plan_conversion
from tasks.lora.target import TargetFormat


def convert(tmp_path: Path, tensors: dict[str, torch.Tensor], format: TargetFormat) -> AdapterFiles:
    found = look(tmp_path / "source", tensors)
    convert_adapter(found.files, plan_conversion(found.layout, format), tmp_path / "made")
    return open_adapter(tmp_path / "made", label=LABEL)


@pytest.mark.parametrize("format", TargetFormat)
def test_each_keeps_its_class_byte_for_byte_and_nothing_else(tmp_path: Path, format: TargetFormat) -> None:
    """With bfloat16 attention among float32 experts: dtypes stay apart, and in their order."""
    tensors = encode(Logical()) | attention(dtype=torch.bfloat16)
    found = look(tmp_path / "source", tensors)
    made = convert(tmp_path / "one", tensors, format)
    whole = load(made.directory)
    assert list_ablations(made, found.layout.family) == (Ablation.EXPERTS_ONLY, Ablation.ATTENTION_ONLY)
    for ablation, part in ((Ablation.EXPERTS_ONLY, ".experts."), (Ablation.ATTENTION_ONLY, ".self_attn.")):
        config, weights = ablate_adapter(made, found.layout.family, ablation, tmp_path / ablation)
        left = load(tmp_path / ablation)
        assert left.keys() == {name for name in whole if part in name} != set()
        assert all(torch.equal(left[name], whole[name]) for name in left)
        assert [entry.name for entry in open_adapter(tmp_path / ablation, label=LABEL).tensors] == [
            entry.name for entry in made.tensors if part in entry.name
        ]
        written = tmp_path / ablation / "adapter_config.json"
        assert written.read_bytes() == (made.directory / "adapter_config.json").read_bytes()
        assert (config.bytes, weights.bytes) == (
            written.stat().st_size,
            find_weights(tmp_path / ablation).stat().st_size,
        )


def test_an_adapter_of_one_class_has_none(tmp_path: Path) -> None:
    tensors = encode(Logical())
    found = look(tmp_path / "source", tensors)
    assert (
        list_ablations(convert(tmp_path / "one", tensors, TargetFormat.PER_EXPERT), found.layout.family) == ()
    )
    router = {name: tensor for name, tensor in attention().items() if ".mlp.gate." in name}
    with_router = convert(tmp_path / "two", tensors | router, TargetFormat.PER_EXPERT)
    assert list_ablations(with_router, found.layout.family) == (Ablation.EXPERTS_ONLY,)


def test_what_is_there_already_is_left_alone(tmp_path: Path) -> None:
    tensors = encode(Logical()) | attention()
    made = convert(tmp_path, tensors, TargetFormat.PER_EXPERT)
    family = look(tmp_path / "again", tensors).layout.family
    with pytest.raises(DestinationExists):
        ablate_adapter(made, family, Ablation.EXPERTS_ONLY, tmp_path / "source")
    assert f"{PREFIX}.0.mlp.experts.lora_A.weight" in load(tmp_path / "source")
