"""Keys that the engine of a base would not use, on their way through the pipeline."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lora_builders import Logical, encode, save_adapter
from pipeline_builders import BASE, Desk, publish_engine

import tasks.scoring
from roster.serving_engine import EngineInfo
from storage.ledger import Outcome, Step, StepKind

pytestmark = pytest.mark.real

ENGINE = f"engines/{BASE}.json"


def publish(desk: Desk, **changes: Any) -> dict[str, Any]:
    info: dict[str, Any] = json.loads(desk.store.get(ENGINE).body) | changes
    publish_engine(desk.store, EngineInfo.model_validate(info))
    return info


def narrow(desk: Desk, *left: str) -> None:
    """As if the engine had been started with --lora-target-modules for these."""
    info = json.loads(desk.store.get(ENGINE).body)
    modules = [name for name in info["lora_modules"] if name.endswith(left)]
    counts = {name: count for name, count in info["expert_modules"].items() if name in modules}
    publish(desk, lora_modules=modules, expert_modules=counts)


def last(desk: Desk, kind: StepKind, author: str = "elm") -> Step:
    return next(step for step in reversed(desk.ledger(author).steps) if step.kind is kind)


def resolved(desk: Desk) -> dict[str, Any]:
    checks: Any = last(desk, StepKind.CHECKED).result["checks"]
    [found] = [check for check in checks if check["name"] == "resolves"]
    return dict(found)


def loads(desk: Desk) -> list[str]:
    return [name for call, name in desk.engine.calls if call == "load"]


def test_the_check_says_where_every_key_leads(desk: Desk) -> None:
    assert desk.ready("elm").name == "Ready"
    found = resolved(desk)
    assert found["passed"]
    assert found["figures"] == {"routed_experts": 48, "attention": 16, "router": 4, "unresolved": 0}
    assert "68 keys lead to modules of Qwen3MoeForCausalLM (engine " in found["detail"]
    assert "; snapshot of vLLM 0.32.0" in found["detail"]


def test_without_an_engine_the_snapshot_tells(desk: Desk) -> None:
    desk.store.delete(ENGINE)
    assert desk.ready("elm").name == "Stopped: engine_unverified"
    assert "Qwen3MoeForCausalLM (snapshot of vLLM 0.32.0" in resolved(desk)["detail"]


def test_a_filtered_engine_is_stopped_before_loading_and_not_the_adapters_fault(desk: Desk) -> None:
    """vllm-project/vllm#55193: an engine with --lora-target-modules takes the adapter, and ignores the rest of it."""
    whole = desk.store.get(ENGINE).body
    narrow(desk, "o_proj", "qkv_proj", "gate")
    state = desk.ready("elm")
    assert state.name == "Stopped: engine_flag_missing" and not loads(desk)
    reason = str(last(desk, StepKind.SCORED).result["reason"])
    for fact in (
        BASE,
        "--lora-target-modules",
        "48 of 68 keys",
        "48 of routed_experts",
        "Restart it without",
    ):
        assert fact in reason
    assert last(desk, StepKind.CHECKED).outcome is Outcome.DONE
    desk.store.put(ENGINE, whole)
    assert desk.run("elm").name == "Ready" and loads(desk)
    assert last(desk, StepKind.CHECKED).attempt == 1 and len(kinds(desk, StepKind.CHECKED)) == 2


def kinds(desk: Desk, kind: StepKind) -> list[Step]:
    return [step for step in desk.ledger("elm").steps if step.kind is kind]


def test_keys_that_no_class_has_are_quarantined(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#34186: the engine's class nests the text model, and nothing that is kept says otherwise."""
    monkeypatch.setattr("tasks.served.served_by_snapshot", lambda base: None)
    info = publish(desk)
    nested = [f"language_model.{name}" for name in info["lora_modules"]]
    counts = {f"language_model.{name}": count for name, count in info["expert_modules"].items()}
    publish(desk, lora_modules=nested, expert_modules=counts)
    assert desk.ready("elm").name == "Quarantined: unresolved_keys"
    step = last(desk, StepKind.CHECKED)
    assert step.outcome is Outcome.QUARANTINED and not loads(desk)
    for fact in ("68 of 68 keys", "48 of routed_experts", "16 of attention", "4 of router", "no such module"):
        assert fact in str(step.result["reason"])


def test_an_engine_that_changed_since_the_check_is_asked_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    look: Any = vars(tasks.scoring)["require_engine"]

    def restart(*asked: Any) -> Any:
        narrow(desk, "experts")
        return look(*asked)

    monkeypatch.setattr("tasks.scoring.require_engine", restart)
    assert desk.ready("elm").name == "Stopped: engine_flag_missing"
    assert "16 of attention" in str(last(desk, StepKind.SCORED).result["reason"])


def test_opponents_are_not_beaten_for_want_of_modules(desk: Desk) -> None:
    """An engine that leaves out what only they have would serve them without it, and call that a margin."""
    assert desk.ready("alder").name == "Ready"
    desk.sync()
    narrow(desk, "experts")
    before = len(loads(desk))
    logical = encode(Logical(seed=5))
    desk.heldout("elm")
    desk.submit("elm", save_adapter(desk.folder / "trained" / "elm", logical, lora_B_layout="rank_major"))
    assert desk.run("elm").name == "Stopped: engine_flag_missing" and len(loads(desk)) == before
    step = last(desk, StepKind.SCORED)
    reason = str(step.result["reason"])
    assert (
        "--lora-target-modules" in reason and "16 of attention" in reason and step.outcome is Outcome.STOPPED
    )


def test_scores_of_an_unverified_way_of_serving_say_so(desk: Desk) -> None:
    publish(desk, device="cuda", tensor_parallel_size=2, expert_parallel=True)
    assert desk.ready("elm").name == "Ready"
    assert last(desk, StepKind.SCORED).result["untested"] == [
        "device cuda",
        "tensor parallelism over 2 processes",
        "expert parallelism",
    ]
