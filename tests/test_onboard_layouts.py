"""How the layout is decided in the whole flow: by statements, tensors, a policy, the scores of both readings."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import Logical, encode, save_adapter
from pipeline_builders import BASE, CONTROL_BPB, OWN_BPB, Desk, add_tiny_base
from safetensors.torch import load_file
from structured_builders import EXPERTS, RANK, SIZES, blank, trained

from roster.catalog import open_catalog
from roster.serving import Manifest
from roster.story import tell
from storage.bases import BaseDocument, TargetFormat
from storage.documents import put_document, read_document
from storage.keys import base_document_key, engine_key
from storage.ledger import Outcome, Step, StepKind
from storage.policy import PackingName
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.page import render_page
from tasks.policy import drop_policy, set_policy

BOTH = ("gate_up_proj", "down_proj")
PACKINGS: tuple[PackingName, ...] = ("rank_major", "grouped_by_expert")
READING = [StepKind.INSPECTED, StepKind.CONVERTED, StepKind.CHECKED]
JUDGING = [StepKind.STAGED, StepKind.OPPONENTS, StepKind.SCORED, StepKind.VERDICT]


@pytest.fixture
def grove(desk: Desk) -> Desk:
    """The desk with a base whose adapters are large enough to tell their packing."""
    add_tiny_base(desk.store, **SIZES)
    return desk


def plant(desk: Desk, author: str, logical: Logical, packing: str | dict[str, str], **config: Any) -> Path:
    """An uploaded adapter of this author, with his held-out text."""
    folder = save_adapter(
        desk.folder / "trained" / author, encode(logical, packing=packing), r=RANK, **config
    )
    desk.heldout(author)
    desk.submit(author, folder)
    return folder


def holds(path: str, logical: Logical) -> bool:
    """Whether the adapter in this directory is the one that was meant: by names and numbers alone."""
    made = load_file(Path(path) / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.{}.mlp.experts.{}.{}.lora_B.weight"
    for (layer, parameter), b in logical.b.items():
        for expert in range(EXPERTS):
            gate, up = b[expert].chunk(2)
            parts = (
                {"gate_proj": gate, "up_proj": up}
                if parameter == "gate_up_proj"
                else {"down_proj": b[expert]}
            )
            if not all(torch.equal(made[prefix.format(layer, expert, n)], part) for n, part in parts.items()):
                return False
    return True


def score_truly(desk: Desk, logical: Logical) -> None:
    """The engine predicts well with the right factors, whatever the adapter is called."""
    desk.engine.adapters = lambda name, path: OWN_BPB if holds(path, logical) else CONTROL_BPB


def packing_of(step: Step) -> dict[str, Any]:
    packing: Any = step.result["packing"]
    assert isinstance(packing, dict)
    return packing


def decided(desk: Desk, author: str) -> dict[str, tuple[str, str]]:
    """(packing, decided by) of each parameter, which the ledger and the manifest agree about."""
    inspected = [step for step in desk.ledger(author).steps if step.kind is StepKind.INSPECTED][-1]
    verdict: Any = desk.ledger(author).verdict
    key = f"serving/{author}/{verdict.result['output_digest']}/manifest.json"
    manifest, _ = read_document(desk.store, key, Manifest)
    assert json.loads(manifest.layout.model_dump_json())["packing"] == packing_of(inspected)
    return {name: (one["value"], one["decided_by"]) for name, one in packing_of(inspected).items()}


def story(desk: Desk, author: str) -> str:
    desk.sync()
    with open_catalog(desk.settings.catalog_path) as reader:
        return "\n".join(tell(reader.show(author)))


def test_a_false_marker_is_told_by_the_tensors(grove: Desk) -> None:
    """An adapter trained grouped, saved again by an unsloth_zoo that stamps what it did not write."""
    plant(grove, "birch", trained(1, *BOTH), "grouped_by_expert", lora_B_layout="rank_major")
    assert grove.run("birch").name == "Quarantined: layout_conflict"
    (refused, verdict) = grove.ledger("birch").steps
    reason = str(refused.result["reason"])
    assert re.search(r"z -?\d+(\.\d)? as rank_major, \d+(\.\d)? as grouped_by_expert", reason), reason
    assert "birch/run-1" in reason and "lora_B_layout" in reason and f"{3} tensors" in reason
    assert verdict.result["reason"] == reason and grove.engine.calls == []


def test_without_a_marker_the_tensors_decide(grove: Desk) -> None:
    logical = trained(2, *BOTH)
    plant(grove, "alder", logical, "grouped_by_expert")
    score_truly(grove, logical)
    assert grove.run("alder").name == "Ready"
    assert decided(grove, "alder") == dict.fromkeys(BOTH, ("grouped_by_expert", "tensors"))
    assert [step.kind for step in grove.ledger("alder").steps] == [*READING, *JUDGING]


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
    logical, layer = blank(33), (1, "down_proj")
    plain, learnt = logical.b[layer], trained(33, "down_proj").b[layer]
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


def test_a_marker_that_says_mixed_leaves_each_layer_to_its_tensor(grove: Desk) -> None:
    logical = trained(8, *BOTH)
    tensors = encode(logical)
    grouped = encode(logical, packing="grouped_by_expert")
    tensors |= {name: value for name, value in grouped.items() if ".1.mlp.experts.lora_" in name}
    marker = {
        "lora_B_layout": "mixed",
        "parameters": {
            "gate_up_proj": {"lora_B_layout": "rank_major"},
            "down_proj": {"lora_B_layout": "mixed"},
        },
    }
    folder = save_adapter(
        grove.folder / "trained" / "larch", tensors, r=RANK, unsloth_fused_expert_lora=marker
    )
    grove.heldout("larch")
    grove.submit("larch", folder)
    score_truly(grove, logical)
    assert grove.run("larch").name == "Ready"
    assert decided(grove, "larch")["down_proj"] == ("mixed", "tensors")
    (inspected, *_) = grove.ledger("larch").steps
    assert packing_of(inspected)["down_proj"]["layers"] == {"rank_major": [0, 2], "grouped_by_expert": [1]}


def say(desk: Desk, packing: PackingName, **more: Any) -> None:
    set_policy(desk.store, packing, why="our trainer is known", set_by="mara", **more)


def test_a_policy_speaks_for_adapters_that_say_nothing(grove: Desk) -> None:
    logical = blank(9)
    say(grove, "rank_major")
    say(grove, "grouped_by_expert", base=BASE)
    plant(grove, "maple", logical, "grouped_by_expert")
    score_truly(grove, logical)
    assert grove.run("maple").name == "Ready", "the base's own policy goes before the bucket's"
    assert decided(grove, "maple") == dict.fromkeys(BOTH, ("grouped_by_expert", "policy"))
    steps = grove.ledger("maple").steps
    assert [step.kind for step in steps] == [*READING, *JUDGING], "no reading had to be scored"
    evidence = packing_of(steps[0])["down_proj"]["evidence"]
    assert [item["detail"] for item in evidence if item["source"] == "policy"] == ["bases/tiny/policy.json"]
    drop_policy(grove.store, BASE)
    assert grove.run("maple").name == "Quarantined: control_not_worse", (
        "now the bucket's applies, which is wrong"
    )


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


def test_a_policy_that_the_tensors_contradict_stops_the_adapter(grove: Desk) -> None:
    say(grove, "rank_major")
    plant(grove, "oak", trained(10, *BOTH), "grouped_by_expert")
    assert grove.run("oak").name == "Quarantined: layout_conflict"
    reason = str(grove.ledger("oak").steps[0].result["reason"])
    assert "policy.json" in reason and re.search(r"z -?\d", reason)


def test_a_marker_goes_before_a_policy(grove: Desk) -> None:
    logical = blank(11)
    say(grove, "rank_major")
    plant(grove, "rowan", logical, "grouped_by_expert", lora_B_layout="grouped_by_expert")
    score_truly(grove, logical)
    assert grove.run("rowan").name == "Ready"
    assert decided(grove, "rowan") == dict.fromkeys(BOTH, ("grouped_by_expert", "marker"))
    evidence = packing_of(grove.ledger("rowan").steps[0])["down_proj"]["evidence"]
    assert ("policy", "rank_major") in [(item["source"], item["says"]) for item in evidence]


def test_a_policy_that_cannot_be_read_is_not_passed_over(grove: Desk) -> None:
    plant(grove, "yew", blank(12), "rank_major")
    grove.store.put("policy.json", b'{"schema": 1, "lora_B_layout": "columns"}')
    state = grove.run("yew")
    assert state.name == "Refused: internal" and "policy.json" in str(state.message)


def serve_stacked(desk: Desk, *, mixed: bool) -> None:
    document, _ = read_document(desk.store, base_document_key(BASE), BaseDocument)
    put_document(
        desk.store,
        base_document_key(BASE),
        document.model_copy(update={"target_format": TargetFormat.STACKED}),
    )
    info = json.loads(desk.store.get(engine_key(BASE)).body) | {"mixed_moe_lora_format": mixed}
    desk.store.put(engine_key(BASE), json.dumps(info).encode())


def test_a_base_may_be_served_stacked_beside_what_was_per_expert(desk: Desk) -> None:
    desk.ready("alder")
    desk.sync()
    serve_stacked(desk, mixed=True)
    assert desk.ready("birch").name == "Ready"
    verdict: Any = desk.ledger("birch").verdict
    assert set(verdict.result["wrong"]) == {"alder"}
    names = {name for call, name in desk.engine.calls if call == "load"}
    assert desk.engine.stacked == {name for name in names if name.startswith("birch")}
    assert len(desk.engine.stacked) == 2, "the adapter and its control"
    served = desk.sync().roster
    assert served is not None
    birch = served.bases[BASE].authors["birch"]
    assert (birch.format.value, birch.is_3d_lora_weight) == ("stacked", True)
    assert served.bases[BASE].engine.flags == ("enable_mixed_moe_lora_format",)


def test_stacked_adapters_need_an_engine_that_mixes_formats(desk: Desk) -> None:
    serve_stacked(desk, mixed=False)
    state = desk.ready("birch")
    assert state.name == "Stopped: engine_flag_missing"
    assert "--enable-mixed-moe-lora-format: expected given, found missing" in str(state.message)
    assert desk.engine.calls == [], "nothing was loaded"
    assert desk.ledger("birch").steps[-1].outcome is Outcome.STOPPED


def test_a_converted_adapter_may_be_submitted_itself(desk: Desk) -> None:
    """Per-expert in, per-expert out: the same bytes, no packing, and the other control."""
    desk.ready("alder")
    verdict: Any = desk.ledger("alder").verdict
    output = verdict.result["output_digest"]
    folder = desk.settings.work_path / "served" / BASE / "alder" / output
    desk.heldout("birch")
    desk.submit("birch", folder)
    assert desk.run("birch").name == "Ready"
    inspected, converted, *_ = desk.ledger("birch").steps
    assert packing_of(inspected) == {} and inspected.result["format"] == "per-expert"
    assert converted.result["output_digest"] == output
    control: Any = converted.result["control"]
    assert control["kind"] == "displaced_experts"
    assert "no parameter is stacked, so there is no packing to decide" in story(desk, "birch")
