"""What starts runs: the event, the sweep, and the keys by which a request made twice starts one run."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline_builders import BASE, add_tiny_base
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Crashed, Failed, Pending, Running, Scheduled
from store_builders import make_adapter_directory, make_step, memory_store, submit_directory

import flows.asking
import flows.connect
import flows.sweep
from flows.asking import Asked, bring_forward, list_asked, request_onboard, request_sync
from flows.events import announce_upload
from flows.settings import Settings
from flows.sweep import sweep
from storage.claims import LedgerHandle, open_ledger
from storage.documents import utc_now
from storage.heldout import register_heldout
from storage.keys import heldout_key, ledger_key, marker_key
from storage.ledger import Outcome, Step, StepKind, SubmissionRef
from storage.s3 import S3Store
from storage.training import Training
from storage.uploads import UploadMarker, read_upload
from tasks.inbox import list_pending
from tasks.sweeping import Due, Swept, list_due

LATER = timedelta(minutes=5)
LOG = logging.getLogger(__name__)


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as store:
        yield store


def due(store: S3Store) -> list[tuple[str, str]]:
    return [
        (one.author, one.why) for one in list_due(store, now=utc_now() + LATER, grace_s=60, settle_s=600).due
    ]


def upload(store: S3Store, folder: Path, author: str, **more: Any) -> UploadMarker:
    seed = sum(author.encode())
    return submit_directory(store, make_adapter_directory(folder / author, seed=seed), author, **more)


def taken_up(store: S3Store, marker: UploadMarker, now: Callable[[], datetime] = utc_now) -> LedgerHandle:
    digest = read_upload(store, marker.author, marker.run).adapter_digest
    ref = SubmissionRef(run=marker.run, submission=marker.submission)
    return open_ledger(store, marker.author, digest, marker.base, ref, now=now)


def record(ledger: LedgerHandle, *steps: Step) -> None:
    ledger.claim("a run", 60)
    for step in steps:
        ledger.append(step)
    ledger.release()


def add_heldout(store: S3Store, folder: Path, author: str) -> None:
    file = folder / f"{author}.jsonl"
    file.write_text(json.dumps({"id": "1", "text": "Some words."}) + "\n")
    register_heldout(store, author, "main", file)


def test_each_upload_without_a_verdict_is_told_with_what_it_is_at(store: S3Store, tmp_path: Path) -> None:
    add_tiny_base(store)
    now = utc_now()
    steps = {
        "stopped": make_step(outcome=Outcome.STOPPED, code="engine_unavailable", reason="it is away"),
        "waiting": make_step(outcome=Outcome.WAITING, code="no_heldout", reason="no text"),
        "died": make_step(StepKind.CONVERTED),
        "ready": judged(),
    }
    for author, step in steps.items():
        record(taken_up(store, upload(store, tmp_path, author)), step)
    claimed = taken_up(store, upload(store, tmp_path, "claimed"))
    claimed.claim("worker-7 run-9", 60)
    upload(store, tmp_path, "new", now=lambda: now - timedelta(minutes=90))
    store.put(marker_key("unreadable", "run-1"), b"done")
    store.put("uploads/settling/run-1/adapter_config.json", b"{}")
    store.delete(f"uploads/incomplete/{upload(store, tmp_path, 'incomplete').run}/adapter_model.safetensors")
    found = {one.author: one for one in list_pending(store, now=now + timedelta(seconds=9), settle_s=600)}
    assert {name: one.state.value for name, one in found.items()} == {
        name: name
        for name in (*steps, "claimed", "new", "unreadable", "settling", "incomplete")
        if name != "ready"
    }
    stopped = found["stopped"]
    assert (stopped.code, stopped.reason, stopped.steps) == ("engine_unavailable", "it is away", 1)
    assert stopped.changed_at == steps["stopped"].finished_at and stopped.base == BASE
    assert found["claimed"].holder == "worker-7 run-9" and found["claimed"].expires_at is not None
    assert next(iter(found)) == "new", "the oldest first"
    after = list_pending(store, now=found["claimed"].expires_at, settle_s=600)
    assert {one.author: one.state for one in after}["claimed"] == "died", (
        "a claim past its time holds nothing"
    )
    said = flows.sweep.describe(list(found.values()), now + timedelta(seconds=9))
    assert said.startswith(
        "8 have no verdict (1 claimed, 1 died, 1 incomplete, 1 new, 1 settling, 1 stopped, "
    )
    assert said.endswith("the oldest, new/run-1, for 1:30:09 (new)")
    assert flows.sweep.describe([], now) == "every upload has its verdict"


def judged(training: str = "none", base: str = BASE) -> Step:
    step = make_step(StepKind.VERDICT, Outcome.READY)
    return step.model_copy(update={"inputs": {"base": base, "training": training}})


def test_what_a_clock_that_was_ahead_has_claimed_is_taken_up_in_minutes(
    store: S3Store, tmp_path: Path
) -> None:
    now = utc_now()
    held = taken_up(store, upload(store, tmp_path, "ahead"), now=lambda: now + timedelta(hours=1))
    held.claim("worker-7 run-9", 60)
    held.append(make_step(StepKind.CONVERTED))
    states = [
        [one.state.value for one in list_pending(store, now=now + timedelta(seconds=after), settle_s=600)]
        for after in (0, 590, 610)
    ]
    assert states == [["claimed"], ["claimed"], ["died"]]


def test_an_upload_that_no_run_took_up_is_due_after_a_while(store: S3Store, tmp_path: Path) -> None:
    marker = upload(store, tmp_path, "ada")
    assert list_due(store, now=utc_now(), grace_s=60, settle_s=600).due == []
    assert due(store) == [("ada", "no run has taken it up")]
    record(taken_up(store, marker), judged())
    assert due(store) == []


def test_a_trainers_clock_that_is_ahead_keeps_no_upload_waiting(store: S3Store, tmp_path: Path) -> None:
    """It told local time as UTC, and was left to an event that never came for as many hours."""
    upload(store, tmp_path, "ada", now=lambda: utc_now() + timedelta(hours=9))
    assert list_due(store, now=utc_now(), grace_s=60, settle_s=600).due == []
    assert due(store) == [("ada", "no run has taken it up")]


def test_one_bad_upload_does_not_stop_the_sweep_for_all(store: S3Store, tmp_path: Path) -> None:
    """A waiting author's held-out text is damaged, another's ledger: the third is still found."""
    add_tiny_base(store)
    bad = upload(store, tmp_path, "bad")
    record(taken_up(store, bad), make_step(outcome=Outcome.WAITING, code="no_heldout"))
    store.put(heldout_key("bad", "main"), b"no json\n")
    worse = upload(store, tmp_path, "worse")
    store.put(ledger_key("worse", read_upload(store, "worse", worse.run).adapter_digest), b"\xff no json")
    upload(store, tmp_path, "zoe")
    assert due(store) == [("bad", "its wait may be over"), ("zoe", "no run has taken it up")]


def test_an_upload_whose_marker_is_no_marker_gets_a_run_that_says_so(store: S3Store, tmp_path: Path) -> None:
    """Another program's marker, one copied with its folder, an author that cannot be one: nobody was ever told."""
    marker = upload(store, tmp_path, "ada")
    store.put(marker_key("ada", "copied"), store.get(marker_key("ada", marker.run)).body)
    store.put(marker_key("bad", "run-1"), b"done")
    store.put("uploads/Some One/run-1/_READY.json", b"{}")
    assert list_due(store, now=utc_now(), grace_s=60, settle_s=600).due == []
    found = {
        f"{one.author}/{one.run}": one
        for one in list_due(store, now=utc_now() + LATER, grace_s=60, settle_s=600).due
    }
    assert found.keys() == {"ada/run-1", "ada/copied", "bad/run-1", "Some One/run-1"}
    assert found["Some One/run-1"].why == "its name is none that we take"
    why = "its marker is none of this upload"
    assert [found[name].why for name in ("ada/copied", "bad/run-1")] == [why, why]
    before = found["bad/run-1"].key
    store.put(marker_key("bad", "run-1"), b"done!")
    again = {one.key for one in list_due(store, now=utc_now() + LATER, grace_s=60, settle_s=600).due}
    assert before not in again and len(again) == 4, "one run for each marker"


@pytest.mark.real
def test_a_wait_for_two_things_says_which_is_missing_now(store: S3Store, tmp_path: Path) -> None:
    """Neither base nor held-out text is there. When the base has come, the ledger must not go on asking for it."""
    marker = upload(store, tmp_path, "ada")
    ledger = taken_up(store, marker)
    record(ledger, make_step(outcome=Outcome.WAITING, code="unknown_base"))
    assert due(store) == []
    add_tiny_base(store)
    assert due(store) == [("ada", "its wait may be over")]
    record(ledger, make_step(outcome=Outcome.WAITING, code="no_heldout", attempt=2))
    assert due(store) == []
    add_heldout(store, tmp_path, "ada")
    assert due(store) == [("ada", "its wait may be over")]


def test_an_upload_whose_files_come_after_its_marker_is_due_when_they_are_there(
    store: S3Store, tmp_path: Path
) -> None:
    """Replication between buckets keeps no order."""
    marker = upload(store, tmp_path, "ada")
    key = f"uploads/ada/{marker.run}/adapter_config.json"
    body = store.get(key).body
    store.delete(key)
    assert due(store) == []
    store.put(key, body)
    assert due(store) == [("ada", "no run has taken it up")]
    # And the same adapter once more, of which a ledger tells already.
    record(taken_up(store, marker), judged())
    again = upload(store, tmp_path, "ada", run="run-2")
    key = f"uploads/ada/{again.run}/adapter_config.json"
    store.delete(key)
    assert due(store) == []
    store.put(key, body)
    assert due(store) == [("ada", "no run has taken it up")]


def test_a_statement_corrected_while_a_run_was_at_it_is_looked_at(store: S3Store, tmp_path: Path) -> None:
    """The second run ended as Elsewhere; when the first is done, nothing else would think of it again."""
    now = utc_now()
    first = upload(store, tmp_path, "ada", now=lambda: now)
    ledger = taken_up(store, first)
    ledger.claim("first run", 60)
    corrected = Training(lora_B_layout="grouped_by_expert")
    second = upload(
        store, tmp_path, "ada", run="run-2", training=corrected, now=lambda: now + timedelta(seconds=1)
    )
    taken_up(store, second)
    ledger.append(judged())
    ledger.release()
    due_now = list_due(store, now=now + LATER, grace_s=60, settle_s=600).due
    assert [(one.run, one.why) for one in due_now] == [
        ("run-2", "it was submitted again while a run was at it")
    ]
    stated = next(file.sha256 for file in second.files if file.name == "training.json")
    record(ledger, judged(stated))
    assert due(store) == [], "and the first submission is history"


def test_a_base_corrected_while_a_run_was_at_it_is_looked_at(store: S3Store, tmp_path: Path) -> None:
    marker = upload(store, tmp_path, "ada")
    record(taken_up(store, marker), judged(base="other"))
    assert due(store) == [("ada", "it was submitted again while a run was at it")]


def states_of(author: str) -> list[str]:
    with get_client(sync_client=True) as client:
        runs = [run for run in client.read_flow_runs() if run.parameters.get("author") == author]
    return [run.state.name or "" for run in sorted(runs, key=lambda run: str(run.created)) if run.state]


def end_run(author: str, state: State[Any]) -> None:
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs():
            if run.parameters.get("author") == author and run.state and not run.state.is_final():
                client.set_flow_run_state(run.id, state, force=True)


@pytest.mark.real
def test_the_same_request_starts_one_run(deployed: None) -> None:
    assert request_onboard("swept-ash", "run-1", key="swept-ash/run-1/s")
    assert request_onboard("swept-ash", "run-1", key="swept-ash/run-1/s")
    assert states_of("swept-ash") == ["Scheduled"]


@pytest.mark.real
def test_one_look_tells_which_requests_have_a_run_on_its_way(
    deployed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep over a long backlog asked for each of them once more, which took longer than the sweeps lie apart."""
    monkeypatch.setattr(flows.asking, "_FIRST_PAUSE", timedelta(0))
    monkeypatch.setattr(flows.asking, "_PAGE", 2)
    keys = [f"swept-oak-{number}/run-1/s" for number in range(5)]
    for key in keys:
        request_onboard(key.split("/")[0], "run-1", key=key)
    end_run("swept-oak-1", Completed())
    end_run("swept-oak-2", Crashed(message="the worker is gone"))
    request_onboard("swept-oak-2", "run-1", key=keys[2])
    assert {key for key in list_asked(()).keys if key.startswith("swept-oak")} == {*keys} - {keys[1]}


@pytest.mark.real
def test_sweeps_do_not_queue_before_the_adapters(deployed: None) -> None:
    """They go first: those that waited for a slow one took every turn of the worker, and no adapter got on."""
    with get_client(sync_client=True) as client:
        kept = {
            name: client.read_deployment_by_name(name).concurrency_options
            for name in ("sweep/sweep", "sync/sync")
        }
    strategies = {name: options and options.collision_strategy.value for name, options in kept.items()}
    assert strategies == {"sweep/sweep": "CANCEL_NEW", "sync/sync": "ENQUEUE"}, "a sync that waits is wanted"
    starts = {options and options.grace_period_seconds for options in kept.values()}
    assert starts == {60}, "one that dies before it begins keeps the others out for so long"


@pytest.mark.real
def test_a_run_that_died_is_followed_by_another_after_a_pause(
    deployed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first step, a run leaves nothing by which the sweep's next key would differ."""
    request_onboard("swept-elm", "run-1", key="swept-elm/run-1/s")
    end_run("swept-elm", Crashed(message="the worker is gone"))
    assert not request_onboard("swept-elm", "run-1", key="swept-elm/run-1/s")
    assert states_of("swept-elm") == ["Crashed"], "not at once"
    monkeypatch.setattr(flows.asking, "_FIRST_PAUSE", timedelta(0))
    assert request_onboard("swept-elm", "run-1", key="swept-elm/run-1/s")
    assert request_onboard("swept-elm", "run-1", key="swept-elm/run-1/s")
    assert states_of("swept-elm") == ["Crashed", "Scheduled"]


@pytest.mark.real
@pytest.mark.parametrize(("begun", "patience"), [(Pending, "_STARTED_WITHIN"), (Running, "_CLAIMED_WITHIN")])
def test_a_run_that_died_with_its_machine_is_followed_by_another(
    deployed: None, monkeypatch: pytest.MonkeyPatch, begun: Callable[[], State[Any]], patience: str
) -> None:
    """Nothing tells Prefect: it shows the run as at work for ever, and the upload was never taken up again."""
    author = f"swept-{begun.__name__.lower()}"
    request_onboard(author, "run-1", key=f"{author}/run-1/s")
    end_run(author, begun())
    assert (
        request_onboard(author, "run-1", key=f"{author}/run-1/s")
        and f"{author}/run-1/s" in list_asked(()).keys
    )
    assert len(states_of(author)) == 1
    monkeypatch.setattr(flows.asking, patience, timedelta(0))
    monkeypatch.setattr(flows.asking, "_FIRST_PAUSE", timedelta(0))
    assert f"{author}/run-1/s" not in list_asked(()).keys
    assert request_onboard(author, "run-1", key=f"{author}/run-1/s", rescore=True)
    assert len(states_of(author)) == 1, "whoever asks for that has not looked who holds it"
    assert request_onboard(author, "run-1", key=f"{author}/run-1/s")
    assert states_of(author)[1:] == ["Scheduled"] and f"{author}/run-1/s" in list_asked(()).keys


@pytest.mark.real
def test_a_run_that_a_clock_ahead_has_put_off_is_brought_forward(deployed: None) -> None:
    """It stood there for an hour, and no other run was asked for: its upload seemed to be on its way."""
    later = datetime.now(UTC) + timedelta(hours=1)
    parameters = {"author": "swept-late", "run": "run-1"}
    run = run_deployment(
        "onboard/onboard", parameters=parameters, scheduled_time=later, timeout=0, as_subflow=False
    )
    asked = list_asked(())
    assert asked.put_off["swept-late", "run-1"] == str(run.id)
    assert not asked.covers("swept-late", "run-1", "key")
    bring_forward(str(run.id))
    asked = list_asked(())
    assert ("swept-late", "run-1") not in asked.put_off and asked.covers("swept-late", "run-1", "key")
    with get_client(sync_client=True) as client:
        begins = client.read_flow_run(run.id).next_scheduled_start_time
    assert begins is not None and begins <= datetime.now(UTC)
    assert states_of("swept-late") == ["Scheduled"]


@pytest.mark.real
def test_a_run_that_refused_its_upload_is_not_repeated(
    deployed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows.asking, "_FIRST_PAUSE", timedelta(0))
    request_onboard("swept-yew", "run-1", key="swept-yew/run-1/s")
    end_run("swept-yew", Failed(name="Refused: ambiguous_upload"))
    assert not request_onboard("swept-yew", "run-1", key="swept-yew/run-1/s")
    assert states_of("swept-yew") == ["Refused: ambiguous_upload"]


@pytest.mark.real
def test_what_became_of_all_keys_is_read_together(deployed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for one by one, each upload that came to nothing made every sweep longer, for ever."""
    monkeypatch.setattr(flows.asking, "_LOOKED_AHEAD", 2)
    keys = {name: f"swept-fir-{name}/run-1/s" for name in ("refused", "failed", "often", "begun", "new")}
    for name in ("refused", "failed", "often", "begun"):
        request_onboard(f"swept-fir-{name}", "run-1", key=keys[name])
    end_run("swept-fir-refused", Failed(name="Refused: ambiguous_upload"))
    end_run("swept-fir-failed", Failed())
    for _ in range(2):
        end_run("swept-fir-often", Failed())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flows.asking, "_FIRST_PAUSE", timedelta(0))
            assert request_onboard("swept-fir-often", "run-1", key=keys["often"])
    end_run("swept-fir-often", Failed())
    asked = list_asked(list(keys.values()))
    assert asked.resting == {keys["refused"], keys["failed"], keys["often"]}
    assert asked.ended == {keys["refused"]: 1, keys["failed"]: 1, keys["often"]: 3}
    assert keys["begun"] in asked.keys
    monkeypatch.setattr(flows.asking, "_FIRST_PAUSE", timedelta(0))
    assert list_asked(list(keys.values())).resting == {keys["refused"]}
    assert request_onboard("swept-fir-often", "run-1", key=keys["often"], ended=3)
    assert states_of("swept-fir-often") == ["Failed", "Failed", "Failed", "Scheduled"]


def test_uploads_that_cannot_be_started_do_not_keep_others_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Refused uploads stay due for ever and are the oldest; the batch is for those that a run can be started for."""
    names = ("refused", "resting", "elsewhere", "new-1", "put-off", "new-2", "new-3")
    listed = [
        Due(name, "run-1", "s", name, "why", datetime(2026, 3, day, tzinfo=UTC))
        for day, name in enumerate(names, start=1)
    ]
    known = Asked(
        frozenset(),
        frozenset({("elsewhere", "run-1")}),
        {"new-1": 2},
        frozenset({"resting"}),
        {("put-off", "run-1"): "its id"},
    )
    asked: list[tuple[str, int]] = []
    brought: list[str] = []

    def request(author: str, run: str, *, ended: int, **_: Any) -> bool:
        asked.append((author, ended))
        return author.startswith("new")

    settings = Settings(home=tmp_path, store_endpoint="http://127.0.0.1:9", sweep_batch=4)
    monkeypatch.setattr(flows.sweep, "bring_forward", brought.append)
    monkeypatch.setattr(flows.sweep, "mark_dead", lambda *_: 0)
    monkeypatch.setattr(flows.sweep, "load_settings", lambda: settings)
    monkeypatch.setattr(flows.sweep, "get_run_logger", lambda: LOG)
    monkeypatch.setattr(flows.sweep, "list_due", lambda *_, **__: Swept(listed, []))
    monkeypatch.setattr(flows.sweep, "list_asked", lambda keys: known if [*keys] == [*names] else None)
    monkeypatch.setattr(flows.sweep, "request_onboard", request)
    state = sweep.fn()
    assert asked == [("refused", 0), ("new-1", 2), ("new-2", 0)] and brought == ["its id"]
    assert "7 uploads were due, 4 runs are on their way" in (state.message or "")


@pytest.mark.parametrize(
    ("first", "asks"),
    [(Scheduled(), 1), (Pending(), 1), (Running(), 2), (Completed(), 2)],
    ids=["scheduled", "pending", "running", "completed"],
)
def test_a_sync_that_has_begun_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, first: State[Any], asks: int
) -> None:
    """With a clock that is behind, the window's sync has begun before this ledger was written."""
    asked: list[tuple[str, datetime]] = []

    def run_deployment(_: str, **options: Any) -> Any:
        asked.append((options["idempotency_key"], options["scheduled_time"]))
        state = first if len(asked) == 1 else Scheduled()
        return FlowRun.model_construct(state=state)

    monkeypatch.setattr(flows.asking, "run_deployment", run_deployment)
    monkeypatch.setattr(flows.asking, "_is_sync_due", lambda before, whole: False)
    before = datetime.now(UTC)
    request_sync(5, LOG)
    assert len(asked) == asks == len(set(asked))
    assert all(before <= when <= before + timedelta(seconds=5.2 * asks) for _, when in asked)


def fake_upload(author: str) -> Any:
    marker = SimpleNamespace(
        author=author, run="run-1", submission="2026-03-01T10:00:00Z-0a1b2c3d", base=BASE
    )
    return SimpleNamespace(marker=marker, adapter_digest="ab" * 32)


@pytest.mark.real
def test_an_event_sent_twice_starts_one_run(deployed: None) -> None:
    settings: Any = SimpleNamespace(prefect_api_url=PREFECT_API_URL.value())
    for _ in range(3):
        assert announce_upload(settings, fake_upload("swept-fir"))
    assert announce_upload(settings, fake_upload("swept-gorse"))
    deadline = time.monotonic() + 30
    while not (states_of("swept-gorse") and states_of("swept-fir")) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)  # the repeats were received before these, and are dealt with side by side
    assert (states_of("swept-fir"), states_of("swept-gorse")) == (["Scheduled"], ["Scheduled"])


def test_an_event_is_given_up_quickly_when_prefect_is_down() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/api"
    settings: Any = SimpleNamespace(prefect_api_url=url)
    begun = time.monotonic()
    with temporary_settings({PREFECT_API_URL: url}):
        assert not announce_upload(settings, fake_upload("swept-ash"))
    assert time.monotonic() - begun < 7


def test_an_event_is_given_up_when_something_else_answers() -> None:
    """A proxy's 502, or a server that is still starting, is no reason for `roster submit` to fail."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class BadGateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(502)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), BadGateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/api"
        settings: Any = SimpleNamespace(prefect_api_url=url)
        with temporary_settings({PREFECT_API_URL: url}):
            assert not announce_upload(settings, fake_upload("swept-ash"))
        server.shutdown()


def test_without_prefect_nothing_is_sent() -> None:
    settings: Any = SimpleNamespace(prefect_api_url=None)
    assert not announce_upload(settings, fake_upload("swept-ash"))
