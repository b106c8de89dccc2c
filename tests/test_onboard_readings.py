"""Where nothing tells the packing, in the whole flow: the scores of both readings decide, or the adapter stops."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest
import torch
from grove_builders import BOTH, JUDGING, READING, decided, holds, plant, say, score_truly, story
from lora_builders import Separate, encode, save_adapter, stack_blocks
from pipeline_builders import BASE, CONTROL_BPB, OWN_BPB, Desk
from structured_builders import EXPERTS, HIDDEN, INTER, LAYERS, blank, trained

from storage.keys import engine_key
from storage.ledger import StepKind
from storage.policy import PackingName
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.page import render_page
from tasks.policy import drop_policy

pytestmark = pytest.mark.real  # whole runs, several scorings each: more time than the fast tests have

PACKINGS: tuple[PackingName, ...] = ("rank_major", "grouped_by_expert")


@pytest.mark.parametrize("truth", PACKINGS)
def test_where_nothing_tells_the_better_reading_is_the_adapter(grove: Desk, truth: str) -> None:
    logical = blank(3)
    plant(grove, "cedar", logical, truth)
    score_truly(grove, logical)
    assert grove.run("cedar").name == "Ready"
    ledger = grove.ledger("cedar")
    assert [step.kind for step in ledger.steps] == [*READING, StepKind.SCORED, *READING, *JUDGING]
    assert decided(grove, "cedar") == dict.fromkeys(BOTH, (truth, "scores"))
    settled: Any = ledger.steps[4].result
    assert (
        settled["readings"]["bpb"][truth]
        < 2.2
        < min(value for name, value in settled["readings"]["bpb"].items() if name != truth)
    )
    evidence = [item for one in settled["packing"].values() for item in one["evidence"]]
    (said,) = {item["detail"] for item in evidence if item["source"] == "scores"}
    assert re.search(rf"{truth} 2\.\d{{4}} .*bits per byte \(base 2\.\d{{4}}, 24 units\)", said), said
    verdict: Any = ledger.verdict
    page = render_page("cedar/run-1", ledger, ledger.steps[4], ledger.steps[6], verdict)
    assert f"| {truth} | scores | scores | {truth} |" in page and "| scored (readings) | 1 |" in page
    assert holds(str(next(grove.settings.work_path.glob("served/*/cedar/*"))), logical), "the other is gone"
    assert verdict.result["control"] > verdict.result["own"] + 0.1
    assert "the control is the reading that lost" in verdict.result["notes"][-1]
    assert [key.split("/")[2] for key in grove.keys("serving/cedar/")] == [
        verdict.result["output_digest"]
    ] * 3
    assert f"read as {truth}, because so it scored better on the held-out text" in story(grove, "cedar")

    shutil.rmtree(grove.settings.work_path)
    calls = len(grove.engine.calls)
    assert "nothing to do" in (grove.run("cedar").message or "") and len(grove.engine.calls) == calls
    assert grove.run("cedar", rescore=True).name == "Ready"
    again = [step.kind for step in grove.ledger("cedar").steps[len(ledger.steps) :]]
    assert again == [StepKind.OPPONENTS, StepKind.SCORED, StepKind.VERDICT], "its reading is settled"

    before = len(grove.ledger("cedar").steps)
    say(grove, truth)
    assert grove.run("cedar").name == "Ready"
    again = [step.kind for step in grove.ledger("cedar").steps[before:]]
    assert again == [*READING, StepKind.STAGED, StepKind.VERDICT], "the same bytes: the scores stand"
    assert f"read as {truth}, as the operator's policy says" in story(grove, "cedar")


@pytest.mark.parametrize("says", PACKINGS)
def test_a_single_tensor_that_tells_is_no_obstacle_to_scoring_both_readings(
    grove: Desk, says: PackingName
) -> None:
    """One layer tells its packing, all together do not; a reading against that layer cannot win."""
    logical, layer = blank(38), (1, "down_proj")
    plain, learnt = logical.b[layer], trained(38, "down_proj").b[layer]
    logical.b[layer] = 0.4 * plain + 0.6 * learnt * plain.norm() / learnt.norm()
    plant(grove, "osier", logical, says)
    score_truly(grove, logical)
    assert grove.run("osier").name == "Ready"
    assert decided(grove, "osier") == dict.fromkeys(BOTH, (says, "scores"))
    grove.engine.adapters = lambda name, path: CONTROL_BPB if holds(path, logical) else OWN_BPB
    assert grove.run("osier", force=True).name == "Quarantined: layout_conflict"
    assert (
        f"expected {'rank_major' if says == 'grouped_by_expert' else 'grouped_by_expert'} in every layer (scores)"
        in str(grove.ledger("osier").steps[-1].result["reason"])
    )


def test_the_engine_has_to_take_both_readings(grove: Desk) -> None:
    """As PEFT saves per-expert files again: read right it is served at rank 3, read wrongly its gate_up has rank 6."""
    sizes: Any = {"experts": EXPERTS, "hidden": HIDDEN, "inter": INTER, "layers": tuple(range(LAYERS))}
    meant, generator = Separate(**sizes), torch.Generator().manual_seed(15)
    for factors in (meant.a, meant.b):
        factors |= {key: torch.randn(factor.shape, generator=generator) for key, factor in factors.items()}
    doubled = {"rank_pattern": {"gate_up_proj": 6}, "alpha_pattern": {"gate_up_proj": 12}}
    folder = save_adapter(grove.folder / "trained" / "sorb", encode(stack_blocks(meant)), **doubled)
    grove.heldout("sorb")
    grove.submit("sorb", folder)
    info = json.loads(grove.store.get(engine_key(BASE)).body) | {"max_lora_rank": 4}
    grove.store.put(engine_key(BASE), json.dumps(info).encode())
    state = grove.run("sorb")
    converted: Any = grove.ledger("sorb").steps[1].result
    assert (converted["rank"], converted["control"]["rank"]) == (3, 6)
    assert state.name == "Stopped: engine_flag_missing"
    assert "--max-lora-rank: expected at least 6, found 4" in str(state.message)


def test_a_better_reading_that_is_worse_than_the_base_ends_as_any_adapter_would(grove: Desk) -> None:
    logical = blank(14)
    plant(grove, "thuja", logical, "grouped_by_expert")
    grove.engine.adapters = lambda name, path: 2.6 if holds(path, logical) else 2.9
    assert grove.run("thuja").name == "Quarantined: not_better_than_base"
    assert decided(grove, "thuja") == dict.fromkeys(BOTH, ("grouped_by_expert", "scores"))


def test_readings_that_score_alike_leave_it_undecided(grove: Desk) -> None:
    plant(grove, "elm", blank(4), "rank_major")
    grove.engine.adapters = lambda name, path: OWN_BPB
    assert grove.run("elm").name == "Quarantined: layout_undecided"
    ledger = grove.ledger("elm")
    assert [step.kind for step in ledger.steps] == [
        *READING,
        StepKind.SCORED,
        StepKind.INSPECTED,
        StepKind.VERDICT,
    ]
    reason = str(ledger.steps[-1].result["reason"])
    for fact in (
        "elm/run-1",
        "gate_up_proj and down_proj",
        "rank_major 2.",
        "grouped_by_expert 2.",
        "all of it on one side, beyond 0.00",
    ):
        assert fact in reason
    for advice in ("lora_B_layout in training.json", "roster policy set", "roster convert --packing"):
        assert advice in reason
    assert grove.keys("serving/") == [] and grove.keys("control/") == []


def test_too_little_text_cannot_decide_between_readings(grove: Desk) -> None:
    logical = blank(5)
    plant(grove, "fir", logical, "rank_major")
    grove.heldout("fir", units=4)
    score_truly(grove, logical)
    state = grove.run("fir")
    assert state.name == "Inconclusive: too_little_text"
    assert "nothing but scores can tell the packing of gate_up_proj and down_proj, and 4 units" in str(
        state.message
    )


def test_a_run_that_stops_between_two_readings_goes_on_there(grove: Desk) -> None:
    logical = blank(6)
    plant(grove, "hazel", logical, "grouped_by_expert")
    score_truly(grove, logical)
    grove.engine.on_logprobs = {
        BASE: EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", "refused")
    }
    assert grove.run("hazel").name == "Stopped: engine_unavailable"
    assert [step.kind for step in grove.ledger("hazel").steps] == [*READING, StepKind.SCORED]
    grove.engine.on_logprobs = {}
    shutil.rmtree(grove.settings.work_path)  # another worker, with an empty home
    assert grove.run("hazel").name == "Ready"
    done = [step.kind for step in grove.ledger("hazel").steps[4:]]
    assert done == [StepKind.SCORED, *READING, *JUDGING]


def test_what_is_decided_stays_decided_in_both_readings(grove: Desk) -> None:
    """The tensors tell one parameter; the scores are asked of the other alone."""
    logical = trained(7, "gate_up_proj")
    packing = {"gate_up_proj": "grouped_by_expert", "down_proj": "grouped_by_expert"}
    plant(grove, "holly", logical, packing)
    score_truly(grove, logical)
    assert grove.run("holly").name == "Ready"
    assert decided(grove, "holly") == {
        "gate_up_proj": ("grouped_by_expert", "tensors"),
        "down_proj": ("grouped_by_expert", "scores"),
    }


def test_a_policy_that_is_taken_away_leaves_no_trace_in_the_verdict(grove: Desk) -> None:
    """Back at what was found without it, everything is known; the story must not be the policy's."""
    logical = blank(13)
    plant(grove, "plum", logical, "grouped_by_expert")
    grove.engine.adapters = lambda name, path: OWN_BPB
    assert grove.run("plum").name == "Quarantined: layout_undecided"
    score_truly(grove, logical)
    say(grove, "grouped_by_expert")
    assert grove.run("plum").name == "Ready"
    assert "read as grouped_by_expert, as the operator's policy says" in story(grove, "plum")
    before = len(grove.ledger("plum").steps)
    drop_policy(grove.store, None)
    assert grove.run("plum").name == "Quarantined: layout_undecided"
    assert [step.kind for step in grove.ledger("plum").steps[before:]] == [StepKind.VERDICT]
    told = story(grove, "plum")
    assert "read as rank_major, for the time being" in told and "policy says" not in told
