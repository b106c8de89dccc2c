"""The whole flow with a store in memory and a scripted engine: every way an adapter's run can end.

What Prefect itself has a hand in is run by Prefect (`prefect_desk`), in the real tier.
"""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import Logical, attention, base_fields, encode, save_adapter
from pipeline_builders import (
    BASE,
    CONTROL_BPB,
    OWN_BPB,
    Desk,
    OnLoad,
    add_tiny_base,
    spoil_by_removing_a_factor,
)
from prefect.client.orchestration import get_client

from roster.catalog import open_catalog
from roster.serving import Manifest, Roster
from roster.story import tell
from storage.claims import open_ledger
from storage.documents import read_document, utc_now
from storage.errors import StoreUnavailable
from storage.keys import roster_key
from storage.ledger import Outcome, StepKind, SubmissionRef
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.job import STEP_VERSIONS
from tasks.submission import add_base
from tasks.sweeping import list_due


@pytest.mark.real
def test_an_honest_adapter_becomes_ready(prefect_desk: Desk) -> None:
    state = prefect_desk.ready("alder")
    assert state.name == "Ready"
    ledger = prefect_desk.ledger("alder")
    assert [step.kind for step in ledger.steps] == list(StepKind)
    assert ledger.claim is None
    assert ledger.verdict is not None and ledger.verdict.outcome is Outcome.READY
    record: Any = ledger.verdict.result
    assert record["own"] < record["control"] < record["base"] + 0.1
    assert "no opponent yet" in " ".join(record["notes"])
    output = record["output_digest"]
    manifest, _ = read_document(prefect_desk.store, f"serving/alder/{output}/manifest.json", Manifest)
    assert manifest.adapter_digest == prefect_desk.submitted["alder"].adapter_digest
    assert {key.rsplit("/", 1)[1] for key in prefect_desk.keys(f"serving/alder/{output}/")} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    }
    assert prefect_desk.keys("control/") == [], "the control is taken away after the verdict"
    with get_client(sync_client=True) as client:
        # The server may know runs of this name by tests of other files.
        run = ledger.steps[-1].flow_run
        (page,) = (page for page in client.read_artifacts() if str(page.flow_run_id) == run)
    text = str(page.data)
    own = f"| own | {record['own']:.4f} |"
    for expected in ("# alder/run-1 — ready", "## Checks", "round_trip", own, "| control |", "| marker |"):
        assert expected in text


@pytest.mark.real
def test_an_adapter_that_says_nothing_is_scored_both_ways_first(prefect_desk: Desk) -> None:
    """The way round by itself; what is decided on it: test_onboard_readings.py."""
    prefect_desk.engine.adapters = lambda name, path: CONTROL_BPB if "~control@" in name else OWN_BPB
    assert prefect_desk.ready("birch", lora_B_layout=None).name == "Ready"
    kinds = [step.kind for step in prefect_desk.ledger("birch").steps]
    reading = [StepKind.INSPECTED, StepKind.CONVERTED, StepKind.CHECKED]
    assert kinds == [*reading, StepKind.SCORED, *list(StepKind)]


def test_a_base_may_be_named_by_its_alias_and_keeps_it(desk: Desk) -> None:
    config = desk.folder / "config.json"
    config.write_text(json.dumps(base_fields()))
    more: Any = {"weights": None, "served_model": BASE, "progress": lambda done, total: None}
    add_base(desk.store, BASE, config=config, engine_url="http://127.0.0.1:9", aliases=("Org/Tiny",), **more)
    again = add_base(desk.store, BASE, config=config, engine_url="http://127.0.0.1:8", aliases=(), **more)
    assert again.document.aliases == ("Org/Tiny",), "another address takes nothing else away"
    upload = desk.submit("alder", desk.adapter("alder"), base="Org/Tiny")
    assert upload.marker.base == BASE


def test_a_rerun_with_nothing_changed_does_no_work_and_says_so(desk: Desk) -> None:
    desk.ready("alder")
    before, calls = desk.ledger("alder"), len(desk.engine.calls)
    shutil.rmtree(desk.settings.work_path)
    state = desk.run("alder")
    assert state.name == "Ready"
    assert "nothing to do" in (state.message or "")
    assert desk.ledger("alder").steps == before.steps
    assert len(desk.engine.calls) == calls
    assert not desk.settings.work_path.exists(), "not even the upload was downloaded"


def test_force_does_every_step_again(desk: Desk) -> None:
    desk.ready("alder")
    desk.run("alder", force=True)
    attempts = [step.attempt for step in desk.ledger("alder").steps]
    assert attempts == [1] * 7 + [2] * 7


@pytest.mark.real
def test_opponents_are_met_by_a_second_scoring(desk: Desk) -> None:
    desk.ready("alder")
    desk.sync()
    desk.ready("birch")
    birch: Any = desk.ledger("birch").verdict
    assert set(birch.result["wrong"]) == {"alder"}
    queued = desk.submit("cedar", desk.adapter("cedar"))
    assert desk.sync().thin == (), "an upload that no run has begun with is still to come"
    desk.store.delete(f"uploads/cedar/{queued.marker.run}/_READY.json")
    thin = desk.sync().thin
    assert [(row.author, row.opponents, row.wanted) for row in thin] == [("alder", 0, 1)]
    before = len(desk.ledger("alder").steps)
    assert desk.run("alder", rescore=True).name == "Ready"
    alder = desk.ledger("alder")
    again = [step.kind for step in alder.steps[before:]]
    assert again == [StepKind.OPPONENTS, StepKind.SCORED, StepKind.VERDICT]
    assert alder.verdict is not None
    record: Any = alder.verdict.result
    assert set(record["wrong"]) == {"birch"} and record["margin"] > 0.1
    assert desk.sync().thin == ()


def test_a_wrong_reading_is_unmasked_by_the_control(desk: Desk) -> None:
    """The declared packing is false: what scores like the base is own, and the control scores well."""
    desk.engine.adapters = lambda name, path: 2.1 if "~control@" in name else 2.401
    state = desk.ready("gorse", lora_B_layout="grouped_by_expert")
    assert state.name == "Quarantined: control_not_worse"
    verdict = desk.ledger("gorse").verdict
    assert verdict is not None and "declared packing is wrong" in str(verdict.result["reason"])
    desk.sync()
    with open_catalog(desk.settings.catalog_path) as reader:
        assert reader.ready() == []
        assert any("control" in sentence for sentence in tell(reader.show("gorse")))


def test_catalog_and_roster_say_the_same(desk: Desk) -> None:
    for author in ("alder", "birch"):
        desk.ready(author)
        desk.sync()
    roster, _ = read_document(desk.store, roster_key(), Roster)
    with open_catalog(desk.settings.catalog_path) as reader:
        rows = {row.author: row.output_digest for row in reader.ready()}
    assert {author: entry.output_digest for author, entry in roster.bases[BASE].authors.items()} == rows
    assert set(rows) == {"alder", "birch"} and roster.version == 2


def no_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def truncated(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])


def other_base(folder: Path) -> None:
    tensors = {**encode(Logical(hidden=12)), **attention()}
    save_adapter(folder, tensors)


def not_a_number(folder: Path, **config: Any) -> None:
    logical = Logical()
    logical.b[0, "down_proj"][1, 2, 0] = torch.nan
    save_adapter(folder, {**encode(logical), **attention()}, **config)


def dora_not_a_number(folder: Path) -> None:
    not_a_number(folder, use_dora=True)


@pytest.mark.parametrize(
    ("spoil", "codes", "says"),
    [
        (no_config, ["corrupt_or_partial"], "adapter_config.json"),
        (truncated, ["corrupt_or_partial"], "adapter_model.safetensors"),
        (other_base, ["base_mismatch"], "layers.0.mlp.experts"),
        (spoil_by_removing_a_factor, ["missing_tensor"], "layers.1.mlp.experts.lora_B"),
        (not_a_number, ["non_finite"], "layers.0.mlp.experts.lora_B"),
        (dora_not_a_number, ["unsupported_config", "non_finite"], "use_dora"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_bad_adapters_are_refused_clearly(desk: Desk, spoil: Any, codes: list[str], says: str) -> None:
    folder = desk.adapter("birch")
    spoil(folder)
    desk.heldout("birch")
    desk.submit("birch", folder)
    assert desk.run("birch").name == f"Quarantined: {codes[0]}"
    verdict = desk.ledger("birch").verdict
    assert verdict is not None and verdict.outcome is Outcome.QUARANTINED
    assert (verdict.result["code"], verdict.result["codes"]) == (codes[0], codes)
    reason = str(verdict.result["reason"])
    assert says in reason and "birch/run-1" in reason
    assert desk.keys("serving/") == [] and desk.keys("control/") == []
    assert not (desk.settings.work_path / "served").exists(), "no half-written output"
    assert desk.run("birch").message.count("nothing to do") == 1


def test_missing_heldout_text_waits_and_is_taken_again(desk: Desk) -> None:
    upload = desk.submit("cedar", desk.adapter("cedar"))
    assert desk.run("cedar").name == "Waiting: no_heldout"
    ledger = desk.ledger("cedar")
    assert ledger.verdict is None and ledger.claim is None
    assert "roster heldout add cedar" in str(ledger.steps[-1].result["reason"])
    later = utc_now() + timedelta(minutes=5)
    assert list_due(desk.store, now=later, grace_s=60, settle_s=600).due == [], "its wait is not over"
    desk.heldout("cedar")
    (due,) = list_due(desk.store, now=later, grace_s=60, settle_s=600).due
    assert due.key == f"cedar/run-1/{upload.marker.submission}/1", "a key of its own for each try"
    assert desk.run("cedar").name == "Ready"
    assert list_due(desk.store, now=later, grace_s=60, settle_s=600).due == []


def test_a_damaged_document_of_the_operators_is_a_stop_that_ends_by_itself(desk: Desk) -> None:
    """As a refusal it would have been left to people for ever: the upload is in order."""
    desk.heldout("cedar")
    desk.submit("cedar", desk.adapter("cedar"))
    key = "heldout/cedar/main.jsonl"
    whole = desk.store.get(key).body
    desk.store.put(key, b"no json\n")
    state = desk.run("cedar")
    assert state.name == "Stopped: internal" and state.is_failed() and key in (state.message or "")
    ledger = desk.ledger("cedar")
    assert ledger.steps[-1].outcome is Outcome.STOPPED and ledger.verdict is None and ledger.claim is None
    assert "Correct it" in str(ledger.steps[-1].result["reason"])
    assert list_due(desk.store, now=utc_now(), grace_s=0, settle_s=600).due == [], "not at once"
    desk.store.put(key, whole)
    [due] = list_due(desk.store, now=utc_now() + timedelta(minutes=5), grace_s=0, settle_s=600).due
    assert due.why == "it was stopped"
    assert desk.run("cedar").name == "Ready"


def test_an_unknown_base_waits(desk: Desk) -> None:
    desk.heldout("cedar")
    desk.submit("cedar", desk.adapter("cedar"), base="small")
    assert desk.run("cedar").name == "Waiting: unknown_base"
    assert "roster base add small" in str(desk.ledger("cedar").steps[-1].result["reason"])
    add_tiny_base(desk.store, "small")
    desk.engine.models = {"small": 2.4}
    desk.engine.base = "small"
    assert desk.run("cedar").name == "Ready"


@pytest.mark.real
def test_an_upload_without_marker_waits(prefect_desk: Desk) -> None:
    state = prefect_desk.run("nobody")
    assert state.name == "Waiting: incomplete_upload"
    assert prefect_desk.keys("ledger/") == []


@pytest.mark.real
def test_a_dead_engine_stops_the_run_and_a_retry_repeats_only_the_score(prefect_desk: Desk) -> None:
    prefect_desk.engine.on_logprobs = {
        BASE: EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", "refused")
    }
    assert prefect_desk.ready("elm").name == "Stopped: engine_unavailable"
    ledger = prefect_desk.ledger("elm")
    assert ledger.verdict is None and ledger.steps[-1].outcome is Outcome.STOPPED
    before = len(ledger.steps)
    prefect_desk.engine.on_logprobs = {}
    shutil.rmtree(prefect_desk.settings.work_path)  # another worker, with an empty home
    assert prefect_desk.run("elm").name == "Ready"
    assert [step.kind for step in prefect_desk.ledger("elm").steps[before:]] == [
        StepKind.SCORED,
        StepKind.VERDICT,
    ]


def test_a_stopped_rescore_does_not_unready(desk: Desk) -> None:
    desk.ready("elm")
    desk.engine.on_logprobs = {
        BASE: EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", "refused")
    }
    assert desk.run("elm", rescore=True).name == "Stopped: engine_unavailable"
    verdict = desk.ledger("elm").verdict
    assert verdict is not None and verdict.outcome is Outcome.READY
    desk.engine.on_logprobs = {}
    assert desk.run("elm").name == "Ready"
    ledger = desk.ledger("elm")
    assert ledger.steps[-1] == ledger.verdict, "else it would look stopped for ever"
    later = utc_now() + timedelta(days=1)
    assert list_due(desk.store, now=later, grace_s=0, settle_s=600).due == []


@pytest.mark.real
def test_a_verdict_is_renewed_when_the_steps_behind_it_are(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer code that finds the same: the scores stand, the verdict is given again, and nothing is stale."""
    desk.ready("elm")
    newer = {**STEP_VERSIONS, StepKind.INSPECTED: "next"}
    for module in ("job", "cataloguing"):
        monkeypatch.setattr(f"tasks.{module}.STEP_VERSIONS", newer)
    for expected in (True, False):
        desk.sync()
        with open_catalog(desk.settings.catalog_path) as reader:
            (adapter,) = (one.adapter for one in reader.show("elm").adapters)
        assert (adapter.state, adapter.stale) == ("ready", expected)
        assert desk.run("elm").name == "Ready"
    again = [step.kind for step in desk.ledger("elm").steps[7:]]
    assert again == [*list(StepKind)[:4], StepKind.VERDICT]


def test_a_drifting_engine_stops_the_run_and_its_scores_are_not_kept(desk: Desk) -> None:
    desk.engine.drift = 0.1
    assert desk.ready("elm").name == "Stopped: engine_drift"
    desk.engine.drift = 0.0
    assert desk.run("elm").name == "Ready"


def test_an_engine_that_never_said_what_it_is_gives_no_verdict(desk: Desk) -> None:
    desk.store.delete(f"engines/{BASE}.json")
    assert desk.ready("elm").name == "Stopped: engine_unverified"
    assert desk.engine.calls == []


def test_two_runs_of_one_adapter_do_not_work_at_once(desk: Desk) -> None:
    desk.heldout("oak")
    upload = desk.submit("oak", desk.adapter("oak"))
    marker = upload.marker
    ref = {"run": marker.run, "submission": marker.submission}
    other = open_ledger(desk.store, "oak", upload.adapter_digest, BASE, SubmissionRef(**ref))
    other.claim("another worker", 60)
    state = desk.run("oak")
    assert state.name == "Elsewhere" and "another worker" in (state.message or "")
    assert desk.ledger("oak").steps == ()
    assert list_due(desk.store, now=utc_now(), grace_s=0, settle_s=600).due == []
    other.release()
    (due,) = list_due(desk.store, now=utc_now(), grace_s=0, settle_s=600).due
    assert due.why == "its run died"


@pytest.mark.real
def test_a_run_that_lost_its_claim_writes_nothing_more(prefect_desk: Desk) -> None:
    """It stalled past its claim's time, and another run took over."""

    def take_over(_: str) -> None:
        key = prefect_desk.keys("ledger/")[0]
        ledger = json.loads(prefect_desk.store.get(key).body)
        ledger["claim"]["holder"] = "another worker"
        prefect_desk.store.put(key, json.dumps(ledger).encode())
        (converted,) = (step for step in ledger["steps"] if step["kind"] == "converted")
        control = converted["result"]["control"]["output_digest"]
        prefect_desk.store.put(f"control/oak/{control}/adapter_config.json", b"{}")

    prefect_desk.engine.on_load = OnLoad("oak@", take_over)
    state = prefect_desk.ready("oak")
    assert state.name == "Elsewhere" and "another worker" in (state.message or "")
    ledger = prefect_desk.ledger("oak")
    assert ledger.steps[-1].kind is StepKind.OPPONENTS and ledger.verdict is None
    assert ledger.claim is not None and ledger.claim.holder == "another worker"
    assert len(prefect_desk.keys("control/")) == 1, "and takes nothing away that the other works with"


def break_inspection(patch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    patch.setattr("tasks.conversion.inspect_adapter", broken)


def test_unknown_errors_stop_the_run_on_the_record_and_surface(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_inspection(monkeypatch)
    with pytest.raises(ZeroDivisionError, match="nobody foresaw this"):
        desk.ready("yew")
    last = desk.ledger("yew").steps[-1]
    assert (last.outcome, last.result["code"]) == (Outcome.STOPPED, "internal")


@pytest.mark.real
def test_prefect_shows_unknown_errors_as_failures(
    prefect_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_inspection(monkeypatch)
    state = prefect_desk.ready("yew")
    assert state.is_failed() and "nobody foresaw this" in (state.message or "")
    last = prefect_desk.ledger("yew").steps[-1]
    assert (last.outcome, last.result["code"]) == (Outcome.STOPPED, "internal")


def test_a_full_disk_is_told_apart(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tasks.conversion.convert_adapter", full)
    state = desk.ready("yew")
    assert state.name == "Stopped: disk_full" and "No space left" in str(state.message)
    last = desk.ledger("yew").steps[-1]
    assert (last.kind, last.result["code"]) == (StepKind.CONVERTED, "disk_full")


def test_changed_training_json_is_new_work(desk: Desk) -> None:
    """The same bytes, submitted again with another statement about their packing, are decided anew."""
    folder = desk.adapter("alder", lora_B_layout=None)
    (folder / "training.json").write_text(json.dumps({"lora_B_layout": "rank_major"}))
    desk.heldout("alder")
    desk.submit("alder", folder)
    assert desk.run("alder").name == "Ready"
    first = desk.ledger("alder")
    (folder / "training.json").write_text(json.dumps({"lora_B_layout": "grouped_by_expert"}))
    desk.submit("alder", folder, run="run-2")
    desk.run("alder", "run-2")
    ledger = desk.ledger("alder")
    assert len(ledger.submissions) == 2
    outputs = [s.result["output_digest"] for s in ledger.steps if s.kind is StepKind.CONVERTED]
    assert len(first.steps) == 7 and len(outputs) == 2 and outputs[0] != outputs[1]
    packing: Any = [s for s in ledger.steps if s.kind is StepKind.INSPECTED][-1].result["packing"]
    assert {decision["decided_by"] for decision in packing.values()} == {"training"}


def test_a_ready_adapter_is_not_carried_over_to_another_base(desk: Desk) -> None:
    desk.ready("alder")
    add_tiny_base(desk.store, "small")
    desk.submit("alder", desk.folder / "trained" / "alder", run="run-2", base="small")
    state = desk.run("alder", "run-2")
    assert state.name == "Refused: base_mismatch" and "ready for base tiny" in (state.message or "")
    assert desk.ledger("alder").base == BASE


def test_a_mistyped_base_is_mended_by_submitting_again(desk: Desk) -> None:
    add_tiny_base(desk.store, "wide", hidden_size=12)
    desk.heldout("alder")
    folder = desk.adapter("alder")
    desk.submit("alder", folder, base="wide")
    assert desk.run("alder").name == "Quarantined: base_mismatch"
    desk.submit("alder", folder)
    assert desk.run("alder").name == "Ready"


def test_the_store_going_away_is_a_stop(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("upload", "serving/x", "connection refused")

    monkeypatch.setattr("tasks.publication.put_directory", gone)
    assert desk.ready("yew").name == "Stopped: store_unavailable"
