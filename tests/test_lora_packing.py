"""Deciding the packing from statements: order, contradictions, and every piece of evidence listed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lora_builders import LABEL, config_fields

from tasks.lora.config import parse_adapter_config
from tasks.lora.errors import AdapterError, InvalidConfig, LayoutConflict, PackingUndecided
from tasks.lora.families import FAMILIES
from tasks.lora.layouts import Packing
from tasks.lora.packing import PackingDecision, decide_packing
from tasks.lora.trainers import TrainingStatement

GROUPED, RANK_MAJOR = Packing.GROUPED_BY_EXPERT, Packing.RANK_MAJOR
UNSLOTH = {"auto_mapping": {"base_model_class": "Qwen3MoeForCausalLM", "unsloth_fixed": True}}
FULL_PATHS = [
    f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")
]


def decide(
    parameter: str = "down_proj",
    *,
    forced: Packing | None = None,
    training: TrainingStatement | None = None,
    **config: Any,
) -> PackingDecision:
    fields = {name: value for name, value in config_fields(**config).items() if value is not None}
    return decide_packing(
        parameter,
        family=FAMILIES[0],
        config=parse_adapter_config(json.dumps(fields).encode(), label=LABEL),
        forced=forced,
        training=training,
        adapter=LABEL,
    )


def trainer(name: str, version: str | None = None) -> TrainingStatement:
    return TrainingStatement(name, version)


def marker(**parameters: str) -> dict[str, Any]:
    """As unsloth_zoo 2026.9.6 nests it, temporary_patches/moe_utils.py."""
    return {
        "lora_A_layout": "grouped_by_expert",
        "parameters": {
            name: {"lora_B_layout": value, "num_experts": 4} for name, value in parameters.items()
        },
    }


def test_nothing_said_is_provisional() -> None:
    found = decide()
    assert (found.parameter, found.value, found.decided_by) == ("down_proj", RANK_MAJOR, "provisional")
    assert [(item.source, item.says, item.strength) for item in found.evidence] == [
        ("provisional", RANK_MAJOR, "prior")
    ]


@pytest.mark.parametrize(
    ("config", "detail"),
    [
        ({"lora_B_layout": "grouped_by_expert"}, "lora_B_layout"),
        (
            {"unsloth_fused_expert_lora": marker(down_proj="grouped_by_expert")},
            "unsloth_fused_expert_lora.parameters.down_proj.lora_B_layout",
        ),
        (
            {"unsloth_fused_expert_lora": {"lora_B_layout": "grouped_by_expert"}},
            "unsloth_fused_expert_lora.lora_B_layout",
        ),
        ({"auto_mapping": {"lora_B_layout": "grouped_by_expert"}}, "auto_mapping.lora_B_layout"),
        (
            {"auto_mapping": {"unsloth_fused_expert_lora": marker(down_proj="grouped_by_expert")}},
            "auto_mapping.unsloth_fused_expert_lora.parameters.down_proj.lora_B_layout",
        ),
        (
            {
                "lora_B_layout": "mixed",
                "unsloth_fused_expert_lora": marker(down_proj="grouped_by_expert", gate_up_proj="rank_major"),
            },
            "unsloth_fused_expert_lora.parameters.down_proj.lora_B_layout",
        ),
    ],
)
def test_marker_wherever_it_stands(config: dict[str, Any], detail: str) -> None:
    found = decide(**config)
    assert (found.value, found.decided_by) == (GROUPED, "marker")
    assert (found.evidence[0].strength, found.evidence[0].detail) == ("explicit", detail)


def test_marker_speaks_for_one_parameter() -> None:
    config = {"unsloth_fused_expert_lora": marker(down_proj="grouped_by_expert", gate_up_proj="rank_major")}
    assert decide("down_proj", **config).value is GROUPED
    assert decide("gate_up_proj", **config).value is RANK_MAJOR


@pytest.mark.parametrize(
    ("training", "value", "strength"),
    [
        (TrainingStatement(layout="grouped_by_expert"), GROUPED, "explicit"),
        (TrainingStatement(layouts=(("down_proj", "grouped_by_expert"),)), GROUPED, "explicit"),
        (
            TrainingStatement(layout="rank_major", layouts=(("down_proj", "grouped_by_expert"),)),
            GROUPED,
            "explicit",
        ),
        (trainer("unsloth_zoo", "2026.9.5"), GROUPED, "derived"),
        (trainer("unsloth-zoo", "2026.8.17"), GROUPED, "derived"),
        (trainer("Unsloth_Zoo", "2025.12.1.post1"), GROUPED, "derived"),
        (trainer("unsloth_zoo", "2026.9.6"), RANK_MAJOR, "default"),
        (trainer("unsloth_zoo", "2026.10.1"), RANK_MAJOR, "default"),
        (trainer("peft", "0.18.1"), RANK_MAJOR, "derived"),
        (trainer("peft"), RANK_MAJOR, "derived"),
        (trainer("megatron-bridge", "0.4"), GROUPED, "derived"),
        (trainer("nemo-automodel"), RANK_MAJOR, "derived"),
        (trainer("SkyRL"), RANK_MAJOR, "derived"),
    ],
)
def test_training_statement(training: TrainingStatement, value: Packing, strength: str) -> None:
    found = decide(training=training)
    assert (found.value, found.decided_by, found.evidence[0].strength) == (value, "training", strength)


@pytest.mark.parametrize(
    "training", [trainer("mystery", "1.0"), trainer("unsloth_zoo"), trainer("unsloth_zoo", "git")]
)
def test_unknown_trainer_says_nothing(training: TrainingStatement) -> None:
    assert decide(training=training).decided_by == "provisional"


@pytest.mark.parametrize(
    ("config", "value"),
    [
        (UNSLOTH, GROUPED),
        ({"peft_version": None, "target_parameters": FULL_PATHS}, GROUPED),
    ],
    ids=["unsloth", "megatron-bridge"],
)
def test_fingerprints(config: dict[str, Any], value: Packing) -> None:
    found = decide(**config)
    assert (found.value, found.decided_by, found.evidence[0].strength) == (
        value,
        "fingerprint",
        "circumstantial",
    )


@pytest.mark.parametrize(
    "config",
    [
        {**UNSLOTH, "target_parameters": None},
        {"target_parameters": FULL_PATHS},
        {"peft_version": None},
        {"auto_mapping": {"unsloth_fixed": False}},
    ],
)
def test_half_a_fingerprint_is_none(config: dict[str, Any]) -> None:
    assert decide(**config).decided_by == "provisional"


def test_marker_silences_the_fingerprint() -> None:
    """unsloth_zoo from 2026.9.6 on leaves both; its marker is the newer fact."""
    found = decide(**UNSLOTH, lora_B_layout="rank_major")
    assert (found.value, found.decided_by, len(found.evidence)) == (RANK_MAJOR, "marker", 1)


def test_training_beats_a_fingerprint_that_stays_listed() -> None:
    found = decide(**UNSLOTH, training=trainer("peft", "0.21.2"))
    assert (found.value, found.decided_by) == (RANK_MAJOR, "training")
    assert [(item.source, item.says) for item in found.overruled] == [("fingerprint", GROUPED)]


def test_force_beats_everything_that_stays_listed() -> None:
    found = decide(
        forced=GROUPED, lora_B_layout="rank_major", training=TrainingStatement("peft", "0.21.2", "rank_major")
    )
    assert (found.value, found.decided_by) == (GROUPED, "forced")
    assert [(item.source, item.says, item.strength) for item in found.evidence] == [
        ("forced", GROUPED, "forced"),
        ("marker", RANK_MAJOR, "explicit"),
        ("training", RANK_MAJOR, "explicit"),
        ("training", RANK_MAJOR, "derived"),
    ]


@pytest.mark.parametrize(
    ("config", "training", "found"),
    [
        (
            {"lora_B_layout": "rank_major"},
            TrainingStatement(layout="grouped_by_expert"),
            "training.json: lora_B_layout says grouped_by_expert",
        ),
        (
            {
                "lora_B_layout": "rank_major",
                "unsloth_fused_expert_lora": marker(down_proj="grouped_by_expert"),
            },
            None,
            "lora_B_layout says rank_major",
        ),
        # An old adapter saved again through 2026.9.6 to 2026.9.9 is stamped rank_major over grouped data.
        (
            {"lora_B_layout": "rank_major", **UNSLOTH},
            trainer("unsloth_zoo", "2026.8.17"),
            "training.json: unsloth_zoo 2026.8.17",
        ),
        ({"lora_B_layout": "grouped_by_expert"}, trainer("peft", "0.21.2"), "training.json: peft 0.21.2"),
        ({}, TrainingStatement("peft", "0.21.2", "grouped_by_expert"), "training.json: peft 0.21.2"),
    ],
)
def test_contradictions_stop_the_adapter(
    config: dict[str, Any], training: TrainingStatement | None, found: str
) -> None:
    with pytest.raises(LayoutConflict) as caught:
        decide(training=training, **config)
    assert caught.value.where == "the packing of down_proj"
    assert found in caught.value.found
    assert decide(training=training, forced=RANK_MAJOR, **config).value is RANK_MAJOR


def test_setting_of_a_new_unsloth_zoo_is_no_contradiction() -> None:
    """From 2026.9.6 on an environment variable may choose the old packing; the marker then says so."""
    found = decide(lora_B_layout="grouped_by_expert", training=trainer("unsloth_zoo", "2026.9.6"))
    assert (found.value, found.decided_by) == (GROUPED, "marker")
    assert [item.strength for item in found.overruled] == ["default"]


@pytest.mark.parametrize(
    ("config", "error", "where"),
    [
        ({"lora_B_layout": "mixed"}, PackingUndecided, "adapter_config.json: lora_B_layout"),
        (
            {"lora_B_layout": "rank_major", "unsloth_fused_expert_lora": marker(down_proj="mixed")},
            PackingUndecided,
            "adapter_config.json: unsloth_fused_expert_lora.parameters.down_proj.lora_B_layout",
        ),
        # A summary that names one packing cannot speak against a "mixed" that nothing resolves.
        (
            {"lora_B_layout": "rank_major", "unsloth_fused_expert_lora": {"lora_B_layout": "mixed"}},
            PackingUndecided,
            "adapter_config.json: unsloth_fused_expert_lora.lora_B_layout",
        ),
        (
            {
                "lora_B_layout": "rank_major",
                "auto_mapping": {"unsloth_fused_expert_lora": marker(down_proj="mixed")},
            },
            PackingUndecided,
            "adapter_config.json: auto_mapping.unsloth_fused_expert_lora.parameters.down_proj.lora_B_layout",
        ),
        (
            {
                "unsloth_fused_expert_lora": {"lora_B_layout": "mixed"} | marker(gate_up_proj="rank_major"),
                "lora_B_layout": "rank_major",
            },
            PackingUndecided,
            "adapter_config.json: unsloth_fused_expert_lora.lora_B_layout",
        ),
        ({"lora_B_layout": "striped"}, InvalidConfig, "adapter_config.json: lora_B_layout"),
    ],
)
def test_useless_statements_are_refused(
    config: dict[str, Any], error: type[AdapterError], where: str
) -> None:
    with pytest.raises(error) as caught:
        decide(**config)
    assert caught.value.where == where
    assert "rank_major or grouped_by_expert" in caught.value.expected


def test_unknown_packing_in_training_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"training.json: lora_B_layout: found 'striped'"):
        decide(training=TrainingStatement(layout="striped"))
