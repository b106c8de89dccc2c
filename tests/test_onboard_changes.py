"""The whole flow when engine, opponents, statements or disk change under it; a store in memory, a scripted engine."""

from __future__ import annotations

import json
import shutil
from asyncio import CancelledError
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline_builders import (
    BASE,
    Desk,
    OnLoad,
    add_tiny_base,
    qualify_on_paper,
    spoil_by_removing_a_factor,
)
from store_builders import with_faults

import flows.onboard
import tasks.conversion
from roster.serving_engine import EngineInfo
from storage.claims import LedgerHandle, open_ledger
from storage.documents import read_document
from storage.errors import StoreUnavailable
from storage.ledger import Outcome, StepKind, SubmissionRef
from tasks.bpb.engine_errors import EngineRefused, EngineUnavailable
from tasks.engines import engine_lease
from tasks.errors import LeaseLost, LeaseNotGranted
from tasks.outcomes import Code, rule

pytestmark = pytest.mark.real  # more flow runs on a real Prefect server than the fast tests have time for


@pytest.fixture
def desk(prefect_desk: Desk) -> Desk:
    return prefect_desk


def refusal(name: str) -> EngineRefused:
    return EngineRefused(name, "/x", 500, "Call to add_lora method failed: ")


def test_a_refused_adapter_leaves_no_control_behind(desk: Desk) -> None:
    desk.engine.on_load = OnLoad("fir@", refusal)
    assert desk.ready("fir").name == "Quarantined: refused_by_engine"
    control: Any = next(s for s in desk.ledger("fir").steps if s.kind is StepKind.CONVERTED).result["control"]
    assert desk.keys("control/") == []
    assert not (desk.settings.work_path / "served" / BASE / "fir" / control["output_digest"]).exists()


def test_a_refusal_by_a_dying_engine_is_not_the_adapters(desk: Desk) -> None:
    """vLLM answers 500 for an adapter it cannot read, and while it dies; its health lags behind."""

    def die(name: str) -> EngineRefused:
        gone = EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", "connection reset")
        desk.engine.on_logprobs = {BASE: gone}
        return refusal(name)

    desk.engine.on_load = OnLoad("fir@", die)
    assert desk.ready("fir").name == "Stopped: engine_unavailable"
    assert desk.ledger("fir").verdict is None


def test_a_refusal_of_damaged_files_is_not_the_adapters(desk: Desk) -> None:
    def damage(name: str) -> EngineRefused:
        own = name.removeprefix("fir@")
        (weights,) = desk.settings.work_path.glob(f"served/*/fir/{own}*/adapter_model.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1])
        return refusal(name)

    desk.engine.on_load = OnLoad("fir@", damage)
    assert desk.ready("fir").name == "Stopped: internal"
    assert desk.ledger("fir").verdict is None
    desk.engine.on_load = {}
    assert desk.run("fir").name == "Ready", "fetched again"


def test_what_a_killed_run_left_on_the_engine_is_forgotten_first(desk: Desk) -> None:
    """vLLM refuses a name that it knows from another path: a retry elsewhere would be quarantined for it."""
    desk.heldout("fir")
    desk.submit("fir", desk.adapter("fir"))
    desk.engine.adapters = lambda name, path: 2.1
    desk.engine.load("fir@0123456789abcdef", "/another/home", is_3d=False)
    desk.engine.load("someone~control@0123456789abcdef", "/another/home", is_3d=False)
    desk.engine.calls.clear()
    desk.engine.adapters = lambda name, path: 2.39 if "~control@" in name else 2.1
    assert desk.run("fir").name == "Ready"
    assert {desk.engine.calls[0], desk.engine.calls[1]} == {
        ("unload", "fir@0123456789abcdef"),
        ("unload", "someone~control@0123456789abcdef"),
    }
    assert desk.engine.served_models() == (BASE,)


def test_a_served_adapter_without_manifest_is_no_opponent_and_stops_nobody(desk: Desk) -> None:
    for author in ("alder", "birch"):
        desk.ready(author)
    desk.sync()
    (manifest,) = (key for key in desk.keys("serving/alder/") if key.endswith("manifest.json"))
    desk.store.delete(manifest)
    assert desk.ready("cedar").name == "Ready"
    ledger: Any = desk.ledger("cedar")
    assert set(ledger.verdict.result["wrong"]) == {"birch"}
    (chosen,) = (step.result for step in ledger.steps if step.kind is StepKind.OPPONENTS)
    assert chosen["available"] == 2, "of as many as the roster serves: else it would be scored again for ever"


def test_an_opponent_that_vanished_is_replaced_at_the_next_run(desk: Desk) -> None:
    """Opponents are chosen once; those of an author who was taken away since would stop the adapter for ever."""
    desk.ready("alder")
    desk.sync()
    unavailable = EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", "refused")
    desk.engine.on_logprobs = {BASE: unavailable}
    assert desk.ready("birch").name == "Stopped: engine_unavailable"
    desk.engine.on_logprobs = {}
    for key in desk.keys("serving/alder/"):
        desk.store.delete(key)
    shutil.rmtree(desk.settings.work_path)
    assert desk.run("birch").name == "Stopped: opponent_gone"
    assert desk.run("birch").name == "Ready"
    chosen: Any = [step.result for step in desk.ledger("birch").steps if step.kind is StepKind.OPPONENTS]
    assert [[one["author"] for one in each["opponents"]] for each in chosen] == [["alder"], []]


def test_the_verdict_is_that_of_the_last_submission(desk: Desk) -> None:
    """Back to an earlier training.json: every step is known, but the verdict in the ledger was another's."""
    folder = desk.adapter("alder", lora_B_layout=None)
    rank_major, grouped = (
        json.dumps({"lora_B_layout": said}) for said in ("rank_major", "grouped_by_expert")
    )
    (folder / "training.json").write_text(rank_major)
    desk.heldout("alder")
    desk.submit("alder", folder)
    assert desk.run("alder").name == "Ready"
    (folder / "training.json").write_text(grouped)
    second = desk.submit("alder", folder, run="run-2")
    desk.run("alder", "run-2")
    (folder / "training.json").write_text(rank_major)
    desk.submit("alder", folder, run="run-3")
    assert desk.run("alder", "run-3").name == "Ready"
    ledger = desk.ledger("alder")
    verdicts = [step for step in ledger.steps if step.kind is StepKind.VERDICT]
    outputs = [step.result["output_digest"] for step in verdicts]
    assert outputs[0] == outputs[2] != outputs[1] and ledger.verdict == verdicts[2]
    assert len(ledger.steps) == 7 + 7 + 1, "nothing but the verdict was done again"
    state = desk.run("alder", "run-2")
    assert state.name == "Superseded" and second.marker.submission in (state.message or "")
    assert desk.ledger("alder").steps == ledger.steps and desk.ledger("alder").claim is None


def test_other_thresholds_and_back_again(desk: Desk) -> None:
    desk.ready("alder")
    desk.settings.floor_bpb = 5.0
    assert desk.run("alder").name == "Quarantined: control_not_worse"
    desk.settings.floor_bpb = 0.002
    assert desk.run("alder").name == "Ready"
    verdict = desk.ledger("alder").verdict
    assert verdict is not None and verdict.outcome is Outcome.READY and verdict.attempt == 2


def test_a_base_named_meanwhile_is_not_taken_for_the_one_that_was_scored(desk: Desk) -> None:
    """The ledger follows the last submission's base; a verdict on the earlier one must not count for it."""
    add_tiny_base(desk.store, "small")

    def submit_again(_: str) -> None:
        ref = {"run": "run-2", "submission": "2099-01-01T00:00:00Z-0a1b2c3d"}
        open_ledger(
            desk.store, "alder", desk.submitted["alder"].adapter_digest, "small", SubmissionRef(**ref)
        )

    desk.engine.on_load = OnLoad("alder@", submit_again)
    state = desk.ready("alder")
    assert state.name == "Stopped: internal" and "small" in (state.message or "")
    assert desk.ledger("alder").verdict is None and desk.ledger("alder").base == "small"


@pytest.mark.parametrize("body", [b'{"schema": 1}', b"no json"])
def test_an_engine_json_that_says_nothing_is_a_stop_on_the_record(desk: Desk, body: bytes) -> None:
    desk.store.put(f"engines/{BASE}.json", body)
    assert desk.ready("elm").name == "Stopped: engine_unverified"
    assert desk.ledger("elm").steps[-1].result["code"] == "engine_unverified"


def test_scores_of_two_engines_are_not_one_measurement(desk: Desk) -> None:
    """The engine comes back with other settings while a run scores on it, and has to be qualified anew."""
    key = f"engines/{BASE}.json"

    def restart(_: str) -> None:
        info = json.loads(desk.store.get(key).body)
        desk.store.put(key, json.dumps(info | {"dtype": "bfloat16"}).encode())

    desk.engine.on_load = OnLoad("elm@", restart)
    assert desk.ready("elm").name == "Stopped: engine_drift"
    desk.engine.on_load = {}
    assert desk.run("elm").name == "Stopped: engine_unverified"
    qualify_on_paper(desk.store, read_document(desk.store, key, EngineInfo)[0])
    assert desk.run("elm").name == "Ready"


def test_a_result_that_is_no_json_is_a_stop_on_the_record(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan = [{"name": "x", "passed": True, "detail": "", "figures": {"largest": float("nan")}}]
    monkeypatch.setattr("tasks.validation.check_record", lambda _: {"checks": nan})
    assert desk.ready("elm").is_failed()
    last = desk.ledger("elm").steps[-1]
    assert (last.kind, last.outcome, last.result["code"]) == (StepKind.CHECKED, Outcome.STOPPED, "internal")


@pytest.mark.parametrize("broken", ["storage.claims.LedgerHandle.release", "storage.s3.S3Store.delete"])
def test_cleaning_up_cannot_undo_a_verdict(desk: Desk, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    desk.heldout("elm")
    desk.submit("elm", desk.adapter("elm"))

    def unavailable(*_: Any) -> None:
        raise StoreUnavailable("put", "x", "connection refused")

    monkeypatch.setattr(broken, unavailable)
    assert desk.run("elm").name == "Ready"


def test_a_run_leaves_nothing_but_converted_adapters_on_the_disk(desk: Desk) -> None:
    desk.ready("elm")
    verdict: Any = desk.ledger("elm").verdict
    work = desk.settings.work_path
    assert [path.name for path in (work / "served").glob("*/*/*")] == [verdict.result["output_digest"]]
    assert list((work / "runs").iterdir()) == []
    folder = desk.adapter("birch")
    spoil_by_removing_a_factor(folder)
    desk.heldout("birch")
    desk.submit("birch", folder)
    desk.run("birch")
    assert list((work / "runs").iterdir()) == []


def test_the_disk_is_trimmed_whatever_becomes_of_the_run(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engine down all night, nothing is ever scored; the disk must not fill up."""
    monkeypatch.setattr("tasks.intake._KEPT", 3)
    desk.store.delete(f"engines/{BASE}.json")
    for author in ("alder", "birch", "cedar"):
        assert desk.ready(author).name == "Stopped: engine_unverified"
    kept = list((desk.settings.work_path / "served").glob("*/*/*"))
    assert len(kept) == 3 and sum("cedar" in str(path) for path in kept) == 2


def test_a_retry_on_the_same_worker_fetches_nothing_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.3 GB for each try of an adapter of the published size."""
    fetched: list[str] = []
    real = desk.store._client.get_object

    def get(**call: Any) -> Any:
        if call["Key"].startswith("uploads/") and call["Key"].endswith(".safetensors"):
            fetched.append(call["Key"])
        return real(**call)

    store = with_faults(desk.store, get_object=get)
    monkeypatch.setattr(flows.onboard, "open_store", lambda settings: store)
    sources = desk.settings.work_path / "sources"
    convert_adapter = tasks.conversion.convert_adapter

    def fail(*_: Any) -> Any:
        raise StoreUnavailable("put", "k", "it is down")

    monkeypatch.setattr("tasks.conversion.convert_adapter", fail)
    assert desk.ready("elm").name == "Stopped: store_unavailable"
    digest = desk.ledger("elm").adapter_digest
    assert [path.name for path in sources.iterdir()] == [digest]
    assert desk.run("elm").name == "Stopped: store_unavailable"
    monkeypatch.setattr("tasks.conversion.convert_adapter", convert_adapter)
    assert desk.run("elm").name == "Ready"
    assert fetched == ["uploads/elm/run-1/adapter_model.safetensors"]
    assert list(sources.iterdir()) == [], "nothing reads it any more"


def test_what_a_power_cut_left_of_an_upload_is_fetched_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room was reserved, so the file has its size; its bytes never reached the disk."""
    convert_adapter = tasks.conversion.convert_adapter

    def fail(*_: Any) -> Any:
        raise StoreUnavailable("put", "k", "it is down")

    monkeypatch.setattr("tasks.conversion.convert_adapter", fail)
    assert desk.ready("elm").name == "Stopped: store_unavailable"
    (weights,) = desk.settings.work_path.glob("sources/*/adapter_model.safetensors")
    size = weights.stat().st_size
    weights.write_bytes(bytes(size))
    monkeypatch.setattr("tasks.conversion.convert_adapter", convert_adapter)
    assert desk.run("elm").name == "Ready", "not quarantined for what this disk lost"


def test_a_retry_of_the_same_flow_run_is_another_holder(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    holders: list[str] = []
    claim = LedgerHandle.claim

    def note(self: LedgerHandle, holder: str, seconds: float) -> None:
        holders.append(holder)
        claim(self, holder, seconds)

    monkeypatch.setattr(LedgerHandle, "claim", note)
    monkeypatch.setattr("flows.onboard.flow_run", SimpleNamespace(id="one-and-the-same"))
    desk.ready("elm")
    desk.run("elm")
    assert len(set(holders)) == 2 and all("one-and-the-same" in holder for holder in holders)


def test_exclusions_added_later_choose_opponents_anew(desk: Desk) -> None:
    desk.ready("alder")
    desk.sync()
    desk.ready("birch")
    key = f"bases/{BASE}/base.json"
    document = json.loads(desk.store.get(key).body)
    desk.store.put(key, json.dumps(document | {"exclusions": [["birch", "alder"]]}).encode())
    assert desk.run("birch").name == "Ready"
    verdict: Any = desk.ledger("birch").verdict
    assert verdict.result["wrong"] == {}


def test_one_run_at_a_time_has_the_engine(prefect_server: None) -> None:
    with (
        engine_lease("some-base", 5),
        pytest.raises(LeaseNotGranted) as refused,
        engine_lease("some-base", 1),
    ):
        pass
    assert "some-base" in str(refused.value) and rule(refused.value).code is Code.ENGINE_UNAVAILABLE
    with engine_lease("some-base", 5), pytest.raises(TimeoutError), engine_lease("another", 5):
        raise TimeoutError("what goes wrong inside is not about the lease")


def test_the_first_runs_of_a_new_base_begin_together(prefect_server: None) -> None:
    """Prefect's own way to make a limit looks first: the second of two runs was told that it exists, and failed."""
    at_once = Barrier(4)

    def lease(base: str) -> None:
        at_once.wait(30)
        with engine_lease(base, 60):
            pass

    with ThreadPoolExecutor(at_once.parties) as pool:
        for turn in range(3):
            list(pool.map(lease, [f"new-{turn}"] * at_once.parties))


def test_a_lost_lease_is_a_stop(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect interrupts the thread whose lease it could not renew, with an error that only BaseException catches."""

    @contextmanager
    def lost(*_: Any, **__: Any) -> Iterator[None]:
        yield
        raise CancelledError

    monkeypatch.setattr("tasks.engines.concurrency", lost)
    with pytest.raises(LeaseLost) as error, engine_lease("some-base", 5):
        pass
    assert rule(error.value).outcome is Outcome.STOPPED
