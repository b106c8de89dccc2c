"""What the flow records and shows of checks and of ablation scores, and how deep it looks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pipeline_builders import BASE_BPB, OWN_BPB, Desk, OnLoad

import tasks.validation
from storage.ledger import Outcome, Step, StepKind
from tasks.bpb.engine_errors import EngineRefused
from tasks.lora.checks import CheckName, CheckReport
from tasks.page import render_page

pytestmark = pytest.mark.real


def step_of(desk: Desk, author: str, kind: StepKind) -> Step:
    return next(step for step in reversed(desk.ledger(author).steps) if step.kind is kind)


def page_of(desk: Desk, author: str, checked: Step | None) -> str:
    ledger = desk.ledger(author)
    return render_page(
        f"{author}/run-1", ledger, step_of(desk, author, StepKind.INSPECTED), checked, ledger.steps[-1]
    )


def test_every_check_with_its_numbers_is_in_the_ledger_and_on_the_page(desk: Desk) -> None:
    assert desk.ready("elm").name == "Ready"
    checked = step_of(desk, "elm", StepKind.CHECKED)
    record: Any = checked.result
    assert (record["passed"], record["depth"], record["device"]) == (True, "standard", "cpu")
    assert record["not_made"] == ["merged"]
    assert [one["name"] for one in record["checks"]] == [name for name in CheckName if name != "merged"]
    assert all(one["about"] and one["figures"] for one in record["checks"])
    assert record["trained"]["routed_experts"]["1"] == {"moved": 12, "pairs": 12}
    assert {one["projection"] for one in record["errors"]} >= {"gate_proj", "up_proj", "down_proj"}
    assert record["probes"]["miss_probability"] < 1e-6
    page = page_of(desk, "elm", checked)
    assert "| ✓ | round_trip | execution | 28 of 28 source tensors found again bit for bit |" in page
    assert "not made at depth standard: merged" in page
    assert record["proof"] in page


def test_a_failed_check_leaves_all_of_them_behind(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tasks.validation.check_conversion

    def damaged(*args: Any, **options: Any) -> CheckReport:
        report = real(*args, **options)
        checks = (
            replace(one, passed=False, where="layer 1 expert 2 up_proj") if one.name == "deltas" else one
            for one in report.checks
        )
        return replace(report, checks=tuple(checks))

    monkeypatch.setattr(tasks.validation, "check_conversion", damaged)
    assert desk.ready("elm").name == "Quarantined: delta_mismatch"
    checked, verdict = desk.ledger("elm").steps[-2:]
    assert (checked.kind, checked.outcome) == (StepKind.CHECKED, Outcome.QUARANTINED)
    assert str(checked.result["reason"]).startswith("elm/run-1: layer 1 expert 2 up_proj: found ")
    results: Any = checked.result["checks"]
    assert [one["name"] for one in results if not one["passed"]] == ["deltas"]
    assert verdict.result["code"] == "delta_mismatch"
    page = page_of(desk, "elm", None)
    assert "| ✗ | deltas | execution |" in page and "| ✓ | coverage | execution |" in page
    assert "The output is not the source as it was read (deltas)." in page


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_the_depth_is_an_operators_choice(desk: Desk, depth: str) -> None:
    desk.settings.check_depth = depth  # type: ignore[assignment]
    assert desk.ready("elm").name == "Ready"
    record: Any = step_of(desk, "elm", StepKind.CHECKED).result
    assert record["depth"] == depth
    assert ("round_trip" in record["not_made"]) is (depth == "quick")
    assert ("| gate_proj | 8 | 0 |" in page_of(desk, "elm", step_of(desk, "elm", StepKind.CHECKED))) is (
        depth == "full"
    )


def test_ablations_explain_a_verdict_and_decide_nothing(desk: Desk) -> None:
    """Both score far worse than the base, which for the adapter itself would be a quarantine."""
    desk.settings.ablation = True
    assert desk.ready("elm").name == "Ready"
    scored: Any = step_of(desk, "elm", StepKind.SCORED).result
    assert set(scored["ablation"]) == {"experts_only", "attention_only"}
    assert "experts_only" not in scored["subjects"], "no part of the measurement that is judged"
    for one in scored["ablation"].values():
        assert (one["units"], one["refused"]) == (24, None)
        assert one["bpb"] > BASE_BPB > OWN_BPB
    verdict: Any = desk.ledger("elm").steps[-1].result
    assert verdict["ablation"] == scored["ablation"]
    assert set(verdict["differences"]) == {"base", "control"}
    [note] = [note for note in verdict["notes"] if note.startswith("attention only: ")]
    assert note.endswith(
        f"{scored['ablation']['attention_only']['bpb']:.4f} bits per byte over 24 units; decides nothing"
    )
    assert f"| (experts only) | {scored['ablation']['experts_only']['bpb']:.4f} |" in page_of(
        desk, "elm", None
    )
    loaded = [name for call, name in desk.engine.calls if call == "load"]
    assert [name.partition("@")[0] for name in loaded] == [
        "elm",
        "elm~control",
        "elm~experts_only",
        "elm~attention_only",
    ]
    work = desk.settings.work_path
    assert [path.name for path in (work / "served").glob("*/*/*")] == [verdict["output_digest"]]


def test_an_ablation_that_the_engine_refuses_is_no_fault_of_the_adapter(desk: Desk) -> None:
    desk.settings.ablation = True
    desk.engine.on_load = OnLoad(
        "elm~experts_only@", lambda name: EngineRefused(name, "x", 400, "no such thing")
    )
    assert desk.ready("elm").name == "Ready"
    verdict: Any = desk.ledger("elm").steps[-1].result
    assert verdict["ablation"]["experts_only"]["bpb"] is None
    assert any("experts only: not scored: " in note and "no such thing" in note for note in verdict["notes"])
    assert verdict["ablation"]["attention_only"]["bpb"] is not None
