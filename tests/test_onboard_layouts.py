"""How the layout is decided in the whole flow: by statements, tensors and a policy; and what is served stacked."""

from __future__ import annotations

import re
from typing import Any

import pytest
from grove_builders import BOTH, JUDGING, READING, decided, packing_of, plant, say, score_truly, story
from lora_builders import encode, save_adapter
from pipeline_builders import BASE, Desk, publish_engine
from structured_builders import RANK, blank, trained

from roster.serving_engine import EngineInfo
from storage.bases import BaseDocument, TargetFormat
from storage.documents import put_document, read_document
from storage.keys import base_document_key, engine_key
from storage.ledger import Outcome, StepKind
from tasks.policy import drop_policy

pytestmark = pytest.mark.real  # whole runs, several scorings each: more time than the fast tests have


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
    assert state.name == "Stopped: internal" and "policy.json" in str(state.message)


def serve_stacked(desk: Desk, *, mixed: bool) -> None:
    document, _ = read_document(desk.store, base_document_key(BASE), BaseDocument)
    put_document(
        desk.store,
        base_document_key(BASE),
        document.model_copy(update={"target_format": TargetFormat.STACKED}),
    )
    info, _ = read_document(desk.store, engine_key(BASE), EngineInfo)
    changes = {"mixed_moe_lora_format": mixed, "stacked_experts": mixed}
    publish_engine(desk.store, info.model_copy(update=changes))


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


def serve_slots(desk: Desk, dtype: str) -> None:
    """The base in slots, and an engine with the plugin; both of a dtype."""
    document, _ = read_document(desk.store, base_document_key(BASE), BaseDocument)
    engine = document.engine.model_copy(update={"dtype": dtype})
    changes: dict[str, object] = {"target_format": TargetFormat.SLOTS, "engine": engine}
    put_document(desk.store, base_document_key(BASE), document.model_copy(update=changes))
    info, _ = read_document(desk.store, engine_key(BASE), EngineInfo)
    publish_engine(
        desk.store, info.model_copy(update={"slots_version": 1, "dtype": dtype, "lora_dtype": dtype})
    )


def test_a_base_may_be_served_in_slots_and_a_change_of_dtype_converts_again(desk: Desk) -> None:
    """The dtype is no part of the base's digest, and of the other forms nothing."""
    desk.ready("alder")
    desk.sync()
    made = []
    for dtype in ("float16", "bfloat16"):
        serve_slots(desk, dtype)
        assert desk.ready("birch").name == "Ready"
        converted = next(
            step for step in reversed(desk.ledger("birch").steps) if step.kind is StepKind.CONVERTED
        )
        made.append(converted.result)
        assert converted.inputs["dtype"] == made[-1]["dtype"] == {"float16": "F16"}.get(dtype, "BF16")
        assert (made[-1]["format"], made[-1]["is_3d_lora_weight"]) == ("slots", False)
    assert made[0]["output_digest"] != made[1]["output_digest"]
    names = {file["name"] for file in made[0]["files"]}
    assert names == {"adapter_config.json", "adapter_slots.safetensors"}
    keys = [found.key for found in desk.store.list_objects("serving/birch/")]
    assert sum(key.endswith("/adapter_slots.safetensors") for key in keys) >= 2
    assert desk.engine.stacked == set()
    first = next(step for step in desk.ledger("alder").steps if step.kind is StepKind.CONVERTED)
    assert "dtype" not in first.inputs
    verdict: Any = desk.ledger("birch").verdict
    assert set(verdict.result["wrong"]) == {"alder"}, "loaded as what it is: per expert"


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
