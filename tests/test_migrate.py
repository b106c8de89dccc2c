"""`roster migrate`: an old adapter saved again so that other tools read what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_builders import Ran, Roster
from lora_builders import Logical, Separate, attention, base_fields, encode, encode_experts, save_adapter
from safetensors.torch import load_file

from tasks.lora.layouts import Packing
from tasks.lora.packing import PackingDecision, Source
from tasks.lora.stamp import format_stamped_config

GROUPED = {"schema": 1, "trainer": {"name": "unsloth_zoo", "version": "2026.8.17"}}


@pytest.fixture
def roster(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Roster:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.json").write_text(json.dumps(base_fields()))
    return Roster(capsys, tmp_path / "home")


def old_adapter(training: dict[str, Any] | None = GROUPED, **more: Any) -> Path:
    """Trained grouped by expert on a PEFT that swaps; nothing in its own files says so."""
    tensors = encode(Logical(), packing="grouped_by_expert", orientation="swapped") | attention()
    folder = save_adapter(Path("old"), tensors, peft_version="0.18.1", **more)
    if training is not None:
        (folder / "training.json").write_text(json.dumps(training))
    return folder


def migrate(roster: Roster, *options: str) -> Ran:
    return roster("migrate", "old", "--base", "base.json", *options, "--json")


def read_config(folder: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(folder, "adapter_config.json").read_text())
    return config


def test_repacked_it_is_what_peft_and_vllm_take_it_for(roster: Roster) -> None:
    """unsloth#6930: a stamped, documented layout, and migration of old adapters."""
    source = old_adapter()
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    ran = migrate(roster)
    assert ran.code == 0 and ran.document["destination"].endswith("/old-migrated")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    found = load_file("old-migrated/adapter_model.safetensors")
    expected = encode(Logical(), packing="rank_major") | attention()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config = read_config("old-migrated")
    assert config["lora_B_layout"] == "rank_major"
    assert sorted(config["target_parameters"])[-2:] == ["mlp.experts.gate_up_proj", "mlp.gate.weight"]
    again = roster("inspect", "old-migrated", "--base", "base.json", "--json").document
    assert {one["decided_by"] for one in again["packing"].values()} == {"marker"}
    assert again["orientation"] == "standard"


def test_stamped_it_keeps_its_weights_and_every_other_field(roster: Roster) -> None:
    lie = {"lora_B_layout": "rank_major"}
    old_adapter(
        auto_mapping={"unsloth_fixed": True, **lie}, unsloth_fused_expert_lora=lie, revision="kept", **lie
    )
    ran = migrate(roster, "--stamp", "--packing", "grouped_by_expert", "--output", "made/stamped")
    assert ran.code == 0
    made = Path("made/stamped/adapter_model.safetensors")
    assert made.read_bytes() == Path("old/adapter_model.safetensors").read_bytes()
    old, new = read_config("old"), read_config("made/stamped")
    assert new.pop("unsloth_fused_expert_lora") == {
        "lora_A_layout": "grouped_by_expert",
        "lora_B_layout": "grouped_by_expert",
        "parameters": {
            "gate_up_proj": {"lora_B_layout": "grouped_by_expert"},
            "down_proj": {"lora_B_layout": "grouped_by_expert"},
        },
    }
    assert new.pop("lora_B_layout") == "grouped_by_expert"
    del old["lora_B_layout"], old["unsloth_fused_expert_lora"], old["auto_mapping"]["lora_B_layout"]
    assert new == old


def test_shards_are_stamped_whole(roster: Roster) -> None:
    source = old_adapter(shards=3)
    assert migrate(roster, "--stamp").code == 0
    weights = sorted(path.name for path in source.iterdir() if "safetensors" in path.name)
    assert len(weights) == 4
    for name in weights:
        assert Path("old-migrated", name).read_bytes() == (source / name).read_bytes()


def test_a_parameter_whose_layers_differ_is_stamped_mixed() -> None:
    layers = ((0, Packing.RANK_MAJOR), (1, Packing.GROUPED_BY_EXPERT))
    decisions = [
        PackingDecision("gate_up_proj", None, Source.TENSORS, (), by_layer=layers),
        PackingDecision("down_proj", Packing.RANK_MAJOR, Source.TENSORS, ()),
    ]
    config = json.loads(format_stamped_config(b'{"r": 3, "lora_B_layout": "rank_major"}', decisions))
    nested = config.pop("unsloth_fused_expert_lora")
    assert config == {"r": 3}, (
        "no flat marker: a converter that asks for one value would read it as rank_major"
    )
    assert nested == {
        "lora_A_layout": "grouped_by_expert",
        "parameters": {
            "gate_up_proj": {"lora_B_layout": "mixed"},
            "down_proj": {"lora_B_layout": "rank_major"},
        },
    }


@pytest.mark.parametrize("options", [(), ("--stamp",), ("--dry-run",)])
def test_what_nothing_tells_is_not_stamped(roster: Roster, options: tuple[str, ...]) -> None:
    old_adapter(training=None)
    ran = migrate(roster, *options)
    assert ran.code == 1
    refused = ran.document["refused"]
    assert refused["code"] == "layout_undecided"
    for fact in (
        "old",
        "the packing of gate_up_proj",
        "a marker would be a guess",
        "Force it with --packing",
    ):
        assert fact in refused["message"]
    assert not Path("old-migrated").exists()


def test_experts_in_tensors_of_their_own_need_none(roster: Roster) -> None:
    save_adapter(Path("old"), encode_experts(Separate()))
    ran = migrate(roster)
    assert ran.code == 1 and "There is nothing to migrate" in ran.document["refused"]["message"]


def test_a_dry_run_writes_nothing(roster: Roster) -> None:
    old_adapter()
    ran = migrate(roster, "--dry-run")
    assert ran.code == 0 and ran.document["written"] is False
    assert sorted(path.name for path in Path().iterdir()) == ["base.json", "old"]
