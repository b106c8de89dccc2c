"""What is said of a packing: where the marker stands, what trainers and their traces stand for, and its strength."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import FAMILY, LABEL, config_fields, unpack_wheel

from tasks.lora.config import parse_adapter_config
from tasks.lora.errors import AdapterError, InvalidConfig
from tasks.lora.family import StoredAs
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.packing import PolicyStatement
from tasks.lora.statements import Statements, list_statements
from tasks.lora.trainers import TrainingStatement, orientation_by_peft

GROUPED, RANK_MAJOR = Packing.GROUPED_BY_EXPERT, Packing.RANK_MAJOR
UNSLOTH = {"auto_mapping": {"base_model_class": "Qwen3MoeForCausalLM", "unsloth_fixed": True}}
FULL_PATHS = [
    f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")
]


def said(
    parameter: str = "down_proj",
    *,
    forced: Packing | None = None,
    training: TrainingStatement | None = None,
    policy: PolicyStatement | None = None,
    **config: Any,
) -> Statements:
    fields = {name: value for name, value in config_fields(**config).items() if value is not None}
    return list_statements(
        parameter,
        family=FAMILY,
        config=parse_adapter_config(json.dumps(fields).encode(), label=LABEL),
        forced=forced,
        training=training,
        policy=policy,
        adapter=LABEL,
    )


def facts(found: Statements) -> list[tuple[str, str | None, str]]:
    return [(item.source, item.says, item.strength) for item in found.evidence]


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


def test_nothing_said() -> None:
    found = said()
    assert (found.evidence, found.mixed) == ((), None)


def test_peft_version_is_a_prior_that_says_what_it_does_not_prove() -> None:
    [prior] = said(peft_version="0.18.1").priors
    assert (prior.source, prior.says, prior.strength) == ("peft_version", RANK_MAJOR, "prior")
    assert "0.18.1" in prior.detail
    assert "unsloth_zoo up to 2026.9.5 trained grouped by expert on top of it" in prior.detail
    assert said(peft_version=None).priors == ()
    [stated] = said(peft_version=None, training=TrainingStatement(peft_version="0.19.0")).priors
    assert "0.19.0" in stated.detail


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
    found = said(**config)
    assert facts(found)[0] == ("marker", GROUPED, "explicit")
    assert found.evidence[0].detail == detail
    assert found.mixed is None


def test_marker_speaks_for_one_parameter() -> None:
    config = {"unsloth_fused_expert_lora": marker(down_proj="grouped_by_expert", gate_up_proj="rank_major")}
    assert facts(said("down_proj", **config)) == [("marker", GROUPED, "explicit")]
    assert facts(said("gate_up_proj", **config)) == [("marker", RANK_MAJOR, "explicit")]


OWN_FIELD = "unsloth_fused_expert_lora.parameters.down_proj.lora_B_layout"


@pytest.mark.parametrize(
    ("config", "mixed", "listed"),
    [
        # unsloth_zoo from 2026.9.6 on: a parameter whose layers differ, and then no summary.
        ({"unsloth_fused_expert_lora": marker(down_proj="mixed")}, OWN_FIELD, [(None, "explicit")]),
        ({"unsloth_fused_expert_lora": marker(gate_up_proj="mixed")}, None, []),
        (
            {"auto_mapping": {"unsloth_fused_expert_lora": marker(down_proj="mixed")}},
            f"auto_mapping.{OWN_FIELD}",
            [(None, "explicit")],
        ),
        ({"lora_B_layout": "mixed"}, "lora_B_layout", [(None, "none")]),
        # A summary that names one packing cannot speak against a "mixed" that nothing resolves.
        (
            {"lora_B_layout": "rank_major", "unsloth_fused_expert_lora": marker(down_proj="mixed")},
            OWN_FIELD,
            [(None, "explicit"), (RANK_MAJOR, "explicit")],
        ),
        (
            {"lora_B_layout": "rank_major", "unsloth_fused_expert_lora": {"lora_B_layout": "mixed"}},
            "unsloth_fused_expert_lora.lora_B_layout",
            [(None, "none"), (RANK_MAJOR, "explicit")],
        ),
        (
            {
                "lora_B_layout": "rank_major",
                "auto_mapping": {"unsloth_fused_expert_lora": marker(down_proj="mixed")},
            },
            f"auto_mapping.{OWN_FIELD}",
            [(RANK_MAJOR, "explicit"), (None, "explicit")],
        ),
        # "mixed" of all together, resolved for this one.
        (
            {"lora_B_layout": "mixed", "unsloth_fused_expert_lora": marker(down_proj="rank_major")},
            None,
            [(RANK_MAJOR, "explicit"), (None, "none")],
        ),
    ],
)
def test_mixed(config: dict[str, Any], mixed: str | None, listed: list[tuple[str | None, str]]) -> None:
    found = said(**config)
    assert found.mixed == mixed
    assert [(item.says, item.strength) for item in found.evidence] == listed
    assert all("mixed" in item.detail for item in found.evidence if item.says is None)


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
        (trainer("prime-rl"), RANK_MAJOR, "derived"),
    ],
)
def test_training_statement(training: TrainingStatement, value: Packing, strength: str) -> None:
    assert facts(said(training=training)) == [("training", value, strength)]


def test_setting_that_could_have_changed_it_is_named() -> None:
    [found] = said(training=trainer("unsloth_zoo", "2026.9.6")).evidence
    assert "UNSLOTH_MOE_LORA_B_LAYOUT" in found.detail


@pytest.mark.parametrize(
    "training", [trainer("mystery", "1.0"), trainer("unsloth_zoo"), trainer("unsloth_zoo", "git")]
)
def test_unknown_trainer_says_nothing(training: TrainingStatement) -> None:
    assert said(training=training).evidence == ()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (PolicyStatement("grouped_by_expert", (), "policy.json"), [("policy", GROUPED, "rule")]),
        (
            PolicyStatement("rank_major", (("down_proj", "grouped_by_expert"),), "bases/b/policy.json"),
            [("policy", GROUPED, "rule")],
        ),
        (PolicyStatement(None, (("gate_up_proj", "grouped_by_expert"),), "policy.json"), []),
    ],
)
def test_policy(policy: PolicyStatement, expected: list[tuple[str, str, str]]) -> None:
    found = said(policy=policy)
    assert facts(found) == expected
    assert all(item.detail == policy.where for item in found.evidence)


@pytest.mark.parametrize(
    "config",
    [UNSLOTH, {"peft_version": None, "target_parameters": FULL_PATHS}],
    ids=["unsloth", "megatron-bridge"],
)
def test_fingerprints(config: dict[str, Any]) -> None:
    assert facts(said(**config)) == [("fingerprint", GROUPED, "circumstantial")]


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
    assert said(**config).evidence == ()


def test_marker_silences_the_fingerprint() -> None:
    """unsloth_zoo from 2026.9.6 on leaves both; its marker is the newer fact."""
    assert facts(said(**UNSLOTH, lora_B_layout="rank_major")) == [("marker", RANK_MAJOR, "explicit")]


def test_order_is_that_of_strength() -> None:
    found = said(
        forced=GROUPED,
        training=TrainingStatement("peft", "0.21.2", "rank_major"),
        policy=PolicyStatement("grouped_by_expert", (), "policy.json"),
        **UNSLOTH,
    )
    assert facts(found) == [
        ("forced", GROUPED, "forced"),
        ("training", RANK_MAJOR, "explicit"),
        ("training", RANK_MAJOR, "derived"),
        ("policy", GROUPED, "rule"),
        ("fingerprint", GROUPED, "circumstantial"),
    ]
    marked = said(forced=GROUPED, training=TrainingStatement(layout="rank_major"), lora_B_layout="rank_major")
    assert [item.source for item in marked.evidence] == ["forced", "marker", "training"]


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"lora_B_layout": "striped"}, "adapter_config.json: lora_B_layout"),
        ({"training": TrainingStatement(layout="striped")}, "training.json: lora_B_layout"),
        ({"policy": PolicyStatement("striped", (), "policy.json")}, "policy.json"),
    ],
)
def test_unknown_packing_is_refused(given: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        said(**given)
    error: AdapterError = caught.value
    assert (error.adapter, error.where, error.expected, error.found) == (
        LABEL,
        where,
        "rank_major or grouped_by_expert",
        "'striped'",
    )
    # A marker came with its numbers; what people write down they can correct.
    assert error.advice.startswith("Save the" if "lora_B_layout" in given else "Correct it")


SWAPPED, STANDARD = Orientation.SWAPPED, Orientation.STANDARD


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.17.0", SWAPPED),
        ("0.18.0", SWAPPED),
        ("0.18.1", SWAPPED),
        ("0.18.2.dev0@4f5c1a0", SWAPPED),
        ("0.19.0rc1", SWAPPED),
        ("0.19.0", SWAPPED),
        ("0.19.0.post1", SWAPPED),
        ("0.19.1", STANDARD),
        ("0.19.1+cu128", STANDARD),
        ("0.19.2.dev0@UNKNOWN", STANDARD),
        ("0.20.0", STANDARD),
        ("0.20.0rc0", STANDARD),
        ("0.21.2", STANDARD),
        ("0.21", STANDARD),
        # The change fell between 0.19.0 and 0.19.1: a build from there may be either.
        ("0.19.1.dev0@4f5c1a0", None),
        ("0.19.1rc1", None),
        # Before stacked parameters could be trained at all, and after what was measured.
        ("0.16.9", None),
        ("0.22.0", None),
        ("0.22.0.dev0", None),
        ("1.0", None),
        ("main", None),
        ("0.19.x", None),
        ("", None),
        (None, None),
    ],
)
def test_orientation_by_peft(version: str | None, expected: Orientation | None) -> None:
    """PEFT 0.17.0 to 0.18.1 and 0.19.0 take a parameter's two sizes the other way round (Automodel#3592)."""
    assert orientation_by_peft(version, StoredAs.OUT_IN) is expected


@pytest.mark.parametrize(
    ("version", "marked", "unmarked"),
    [
        ("0.17.0", STANDARD, STANDARD),
        ("0.18.1", STANDARD, STANDARD),
        # From 0.19.0 on PEFT asks for a mark that not every transformers sets.
        ("0.18.2.dev0@4f5c1a0", None, STANDARD),
        ("0.19.0.dev0", None, STANDARD),
        ("0.19.0", None, STANDARD),
        ("0.19.1.dev0", None, None),
        ("0.19.1", None, SWAPPED),
        ("0.21.2", None, SWAPPED),
        ("0.16.9", None, None),
        ("0.22.0", None, None),
        (None, None, None),
    ],
)
def test_orientation_by_peft_of_parameters_stored_in_out(
    version: str | None, marked: Orientation | None, unmarked: Orientation | None
) -> None:
    found = [orientation_by_peft(version, stored) for stored in (StoredAs.IN_OUT, StoredAs.UNMARKED_IN_OUT)]
    assert found == [marked, unmarked]


def write_parameters() -> list[Any]:
    """The version of the PEFT that is imported, and by way of storing what it trains: the delta, and A and B."""
    import peft

    written = {}
    for stored in StoredAs:
        model, experts = torch.nn.Module(), torch.nn.Module()
        shape = (4, 7, 5) if stored is StoredAs.OUT_IN else (4, 5, 7)
        experts.weight = torch.nn.Parameter(torch.zeros(shape))
        if stored is StoredAs.IN_OUT:
            experts.is_transposed = True
        model.experts = experts
        config = peft.LoraConfig(r=3, lora_alpha=3, target_modules=[], target_parameters=["experts.weight"])
        wrapped = peft.get_peft_model(model, config).base_model.model.experts
        factors = [wrapped.lora_A["default"].weight, wrapped.lora_B["default"].weight]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for factor in factors:
                factor.copy_(torch.randn(factor.shape, generator=generator))
        tensors = (wrapped.get_delta_weight("default"), *factors)
        written[stored.value] = [tensor.tolist() for tensor in tensors]
    return [peft.__version__, written]


def check_orientations(version: str, written: dict[str, list[Any]]) -> None:
    """Hold what a PEFT trained against what `orientation_by_peft` says of it, which is nothing where a mark counts."""
    found_in = {}
    for stored in StoredAs:
        delta, a, b = map(torch.tensor, written[stored.value])
        if stored is not StoredAs.OUT_IN:
            delta = delta.transpose(1, 2)  # (experts, out, in)
        products = torch.stack([b[:, e::4] @ a[3 * e : 3 * e + 3] for e in range(4)])
        orientation = STANDARD if products.shape == delta.shape else SWAPPED
        found = products if orientation is STANDARD else products.transpose(1, 2)
        assert torch.allclose(found, delta, atol=1e-5) and found.any(), stored
        found_in[stored] = orientation
    marked, unmarked = found_in[StoredAs.IN_OUT], found_in[StoredAs.UNMARKED_IN_OUT]
    certain = found_in | {StoredAs.IN_OUT: marked if marked is unmarked else None}
    assert {stored: orientation_by_peft(version, stored) for stored in StoredAs} == certain


@pytest.mark.filterwarnings("ignore")
def test_orientations_are_what_peft_writes() -> None:
    """peft#3112: every way of storing a parameter, trained by the PEFT that is installed."""
    check_orientations(*write_parameters())


@pytest.mark.real
@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "0.19.1"])
def test_orientations_are_what_an_older_peft_writes(tmp_path: Path, version: str) -> None:
    package = unpack_wheel("peft", version, tmp_path)
    script = "import json, test_lora_statements as here; print(json.dumps(here.write_parameters()))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ran, written = json.loads(done.stdout.splitlines()[-1])
    assert ran == version
    check_orientations(ran, written)
