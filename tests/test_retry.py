"""What an operator's retry does about each upload, by its verdict and by what Prefect has of it.

The store and the flow are real; in Prefect's place stands what it would answer. test_retry_real.py has it itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import pytest
from cli_builders import Roster
from ledger_builders import halted, inspected
from pipeline_builders import BASE, Desk, spoil_by_removing_a_factor

import flows.rechecking
import flows.retrying
import tasks.cataloguing
from flows.asking import Asked, OnboardRun
from flows.cli import retry as command
from flows.overview import PrefectView, QueueView, WorkerView
from flows.rechecking import Recheck, carry_out_recheck, plan_recheck
from flows.retry_errors import CatalogBehind, PrefectNeeded, UnknownUpload
from flows.retrying import Retry, Way, carry_out, plan_failed, plan_named
from storage.claims import open_ledger
from storage.keys import marker_key
from storage.ledger import Step, StepKind, SubmissionRef
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.job import STEP_VERSIONS

pytestmark = pytest.mark.real

DOWN = {BASE: EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", "refused")}
WHY = "the engine is back"


@dataclass
class Prefect:
    """What Prefect has, and what was asked of it."""

    on_their_way: list[OnboardRun] = field(default_factory=list)
    failed: list[OnboardRun] = field(default_factory=list)
    by_id: dict[str, OnboardRun] = field(default_factory=dict)
    sent: list[tuple[str, str]] = field(default_factory=list)
    started: list[dict[str, Any]] = field(default_factory=list)
    refuses: str | None = None

    def list_on_their_way(self) -> list[OnboardRun]:
        return self.on_their_way

    def list_failed(self, since: datetime) -> list[OnboardRun]:
        return [run for run in self.failed if run.since >= since]

    def find_runs(self, ids: Iterable[str]) -> dict[str, OnboardRun]:
        return {one: self.by_id[one] for one in ids if one in self.by_id}

    def send_again(self, run: OnboardRun, message: str) -> str | None:
        if self.refuses is None:
            self.sent.append((run.id, message))
        return self.refuses

    def start_onboard(self, author: str, run: str, **more: Any) -> str:
        self.started.append({"author": author, "run": run, **more})
        return f"new-{author}"


@dataclass
class Office:
    """A desk whose runs Prefect knows by the ids that its ledgers name."""

    desk: Desk
    prefect: Prefect
    patch: pytest.MonkeyPatch

    def run(self, author: str) -> OnboardRun:
        """Run the author's adapter as a flow run that has ended by now."""
        flow_run = run_of(author)
        self.patch.setattr("flows.onboard.flow_run", SimpleNamespace(id=flow_run.id))
        state = self.desk.run(author)
        ended = replace(flow_run, state=str(state.name))
        self.prefect.by_id[ended.id] = ended
        return ended

    def submit(self, author: str, *, seed: int | None = None) -> None:
        self.desk.heldout(author)
        self.desk.submit(author, self.desk.adapter(author, seed=seed))

    def stopped(self, author: str) -> OnboardRun:
        """An upload whose run ended at the engine, as its ledger and Prefect tell it; no flow has run."""
        self.desk.submit(author, self.desk.adapter(author))
        flow_run = run_of(author, "Stopped: engine_unavailable")
        upload = self.desk.submitted[author]
        submission = SubmissionRef(run="run-1", submission=upload.marker.submission)
        handle = open_ledger(self.desk.store, author, upload.adapter_digest, BASE, submission)
        handle.claim("a worker", 60)
        for step in (inspected(), halted("scored", "stopped", "engine_unavailable", minute=5)):
            handle.append(Step.model_validate(step | {"flow_run": flow_run.id}))
        handle.release()
        self.prefect.by_id[flow_run.id] = flow_run
        return flow_run

    def stop(self, author: str) -> None:
        """The same by a flow that runs."""
        self.submit(author)
        self.desk.engine.on_logprobs = dict(DOWN)
        assert self.run(author).state == "Stopped: engine_unavailable"
        self.desk.engine.on_logprobs = {}

    def failed(self, **more: Any) -> list[Retry]:
        options: dict[str, Any] = {"codes": (), "base": None, "force": False} | more
        return plan_failed(self.desk.store, now=now(), settle_s=600, **options)

    def named(self, *targets: str, force: bool = False) -> list[Retry]:
        return plan_named(self.desk.store, targets, now=now(), settle_s=600, force=force)


def now() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=1)


def run_of(author: str, state: str = "Running", *, run: str = "run-1") -> OnboardRun:
    return OnboardRun(
        id=str(uuid5(NAMESPACE_URL, author)),
        author=author,
        run=run,
        state=state,
        since=now(),
        is_scheduled=state in {"Scheduled", "AwaitingRetry"},
        has_ended=state not in {"Scheduled", "AwaitingRetry", "Running"},
        seems_dead=False,
    )


def ways(planned: list[Retry]) -> dict[str, str]:
    return {one.subject.author: one.way.value for one in planned}


@pytest.fixture
def office(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Office:
    prefect = Prefect()
    for name in ("list_on_their_way", "list_failed", "find_runs", "send_again", "start_onboard"):
        monkeypatch.setattr(flows.retrying, name, getattr(prefect, name))
    for name in ("list_on_their_way", "start_onboard"):
        monkeypatch.setattr(flows.rechecking, name, getattr(prefect, name))
    return Office(desk, prefect, monkeypatch)


@pytest.mark.real
def test_of_three_stopped_two_bad_one_ready_exactly_the_three_are_retried(office: Office) -> None:
    """PrefectHQ/prefect#10767, #17944: operators want all failed runs again, and nothing else.

    Beside them one that waits, and one that nobody has taken up, which the sweep starts by itself.
    """
    stopped = [office.stopped(author) for author in ("ash", "birch", "cedar")]
    for author in ("dogwood", "elm"):
        office.submit(author)
        spoil_by_removing_a_factor(office.desk.folder / "trained" / author)
        office.desk.submit(author, office.desk.folder / "trained" / author)
        assert office.run(author).state == "Quarantined: missing_tensor"
    office.submit("fir")
    assert office.run("fir").state == "Ready"
    office.desk.submit("gorse", office.desk.adapter("gorse"))
    assert office.run("gorse").state == "Waiting: no_heldout"
    office.submit("hazel")

    planned = office.failed()
    assert ways(planned) == dict.fromkeys(("ash", "birch", "cedar"), "again")
    done = carry_out(planned, WHY)
    assert office.prefect.sent == [(run.id, WHY) for run in stopped] and office.prefect.started == []
    assert [one.flow_run for one in done] == [run.id for run in stopped]

    assert ways(office.failed(codes=("engine_unavailable",), base=BASE)) == ways(planned)
    assert office.failed(codes=("store_unavailable",)) == [] and office.failed(base="another") == []

    judged = office.named("dogwood", "fir/run-1")
    assert ways(judged) == {"dogwood": "left", "fir": "left"}
    assert "quarantined (missing_tensor)" in judged[0].reason and "--force" in judged[0].reason
    assert ways(office.named("gorse", "hazel")) == {"gorse": "again", "hazel": "new_run"}


def test_the_same_request_twice_sends_nothing_twice(office: Office) -> None:
    run = office.stopped("ash")
    for state in ("AwaitingRetry", "Running"):
        office.prefect.on_their_way = [replace(run, state=state, has_ended=False)]
        [again] = office.failed()
        assert again.way is Way.LEFT and f"on its way: {state}" in again.reason
    # A run that Prefect has shown as running for long, although nobody holds its adapter, is sent again itself.
    dead = replace(run, state="Running", has_ended=False, seems_dead=True)
    office.prefect.on_their_way, office.prefect.by_id = [dead], {run.id: dead}
    [again] = office.failed()
    assert (again.way, again.sent) == (Way.AGAIN, dead)


def test_where_prefect_has_no_run_any_more_a_new_one_is_asked_for(office: Office) -> None:
    office.stopped("ash")
    office.prefect.by_id = {}
    steps = len(office.desk.ledger("ash").steps)
    submission = office.desk.submitted["ash"].marker.submission
    [done] = carry_out(office.failed(), WHY)
    assert (done.way, done.flow_run) == (Way.NEW_RUN, "new-ash")
    assert office.prefect.started == [
        {
            "author": "ash",
            "run": "run-1",
            "key": f"retry/ash/run-1/{submission}/{steps}",
            "message": WHY,
            "submission": submission,
            "force": False,
        }
    ]


def test_a_run_that_prefect_will_not_send_is_followed_by_a_new_one(office: Office) -> None:
    office.stopped("ash")
    office.prefect.refuses = "Run is already COMPLETED."
    [done] = carry_out(office.failed(), WHY)
    assert done.way is Way.NEW_RUN and "Run is already COMPLETED." in done.reason
    assert [one["author"] for one in office.prefect.started] == ["ash"]


def test_a_run_that_failed_before_it_had_a_ledger_counts_as_failed(office: Office) -> None:
    """A store that does not answer, a worker without memory: the upload looks as if nobody had taken it up."""
    for author in ("ash", "birch", "cedar"):
        office.submit(author)
    crashed, refused = run_of("ash", "Crashed"), run_of("birch", "Refused: base_mismatch")
    before = replace(run_of("cedar", "Failed"), since=datetime(2020, 1, 1, tzinfo=UTC))
    office.prefect.failed = [crashed, refused, before]
    [retried] = office.failed()
    assert (retried.subject.author, retried.way, retried.sent) == ("ash", Way.AGAIN, crashed)
    office.prefect.failed = [run_of("ash", "Stopped: store_unavailable")]
    assert ways(office.failed(codes=("store_unavailable",))) == {"ash": "again"}


def test_what_a_run_is_at_work_on_is_left_alone(office: Office) -> None:
    office.stopped("ash")
    upload = office.desk.submitted["ash"]
    ref = SubmissionRef(run="run-1", submission=upload.marker.submission)
    open_ledger(office.desk.store, "ash", upload.adapter_digest, BASE, ref).claim("worker-7", 60)
    for force in (False, True):
        [one] = office.named("ash", force=force)
        assert (one.way, one.reason) == (Way.LEFT, "worker-7 is working on it")


def test_force_names_what_it_does_again(office: Office) -> None:
    office.submit("ash")
    assert office.run("ash").state == "Ready"
    [forced] = carry_out(office.named("ash", force=True), WHY)
    assert forced.way is Way.FORCED and forced.does_again == tuple(kind.value for kind in StepKind)
    assert office.prefect.started[0]["force"] is True and office.prefect.sent == []
    office.stopped("birch")
    [forced] = office.failed(force=True)
    assert (forced.way, forced.does_again) == (Way.FORCED, ("inspected",))


def test_an_author_means_the_latest_upload(office: Office) -> None:
    office.stopped("ash")
    office.desk.submit("ash", office.desk.adapter("ash", seed=7), run="run-2")
    [latest] = office.named("ash")
    assert (latest.subject.run, latest.way) == ("run-2", Way.NEW_RUN)
    [first] = office.named("ash/run-1")
    assert (first.subject.run, first.way) == ("run-1", Way.AGAIN)


def test_the_same_bytes_submitted_again_are_retried_under_their_last_name(office: Office) -> None:
    office.stopped("ash")
    office.desk.submit("ash", office.desk.folder / "trained" / "ash", run="run-2")
    office.desk.heldout("ash")
    assert office.desk.run("ash", "run-2").name == "Ready"
    [superseded] = office.named("ash/run-1", force=True)
    assert superseded.way is Way.LEFT and "retry ash/run-2" in superseded.reason


@pytest.mark.parametrize(
    ("target", "near"), [("ahs", "there is ash"), ("ash/run-9", "there is ash/run-1"), ("ash/", "ash")]
)
def test_an_unknown_upload_is_told_with_what_there_is(office: Office, target: str, near: str) -> None:
    office.submit("ash")
    if target == "ash/":
        assert office.named(target)[0].subject.run == "run-1"
        return
    with pytest.raises(UnknownUpload, match=near) as raised:
        office.named(target)
    assert f"found {target}" in str(raised.value)


@pytest.mark.real
def test_a_retry_of_the_same_run_takes_the_object_that_is_there_now(office: Office) -> None:
    """PrefectHQ/prefect#15751, #21727: a run that failed late, its upload replaced, the very run again."""
    office.stop("ash")
    first = office.desk.ledger("ash")
    office.submit("ash", seed=99)
    run = office.run("ash")
    second = office.desk.ledger("ash")
    assert second.adapter_digest != first.adapter_digest
    assert run.state == "Ready" and {step.flow_run for step in second.steps} == {run.id}
    assert [step.kind for step in second.steps] == list(StepKind), "nothing of the earlier bytes was used"


def test_a_failed_step_is_never_taken_for_a_finished_one(office: Office) -> None:
    """PrefectHQ/prefect#15658: a failed result under a fixed key was found again, and the step skipped."""
    office.stop("ash")
    stopped = office.desk.ledger("ash").steps[-1]
    assert office.run("ash").state == "Ready"
    again = office.desk.ledger("ash").steps[-2]
    assert (again.kind, again.step_key, again.attempt) == (StepKind.SCORED, stopped.step_key, 2)


def test_a_sweep_does_not_ask_beside_a_run_that_has_yet_to_begin() -> None:
    asked = Asked(frozenset({"birch/run-1/s"}), frozenset({("ash", "run-1")}), {}, frozenset())
    assert asked.covers("ash", "run-1", "ash/run-1/s/6") and asked.covers("birch", "run-1", "birch/run-1/s")
    assert not asked.covers("birch", "run-1", "birch/run-1/s/6") and not asked.covers("ash", "run-2", "k")


@pytest.mark.real
def test_stale_verdicts_are_judged_anew(office: Office) -> None:
    """PrefectHQ/prefect#16928: after a changed helper nothing is redone by itself; the versions of our steps tell."""
    office.submit("ash")
    office.run("ash")
    office.desk.sync()
    catalog = office.desk.settings.catalog_path
    assert plan_recheck(office.desk.store, catalog, base=None) == []
    newer = MappingProxyType({**STEP_VERSIONS, StepKind.CHECKED: "next"})
    office.patch.setattr(flows.rechecking, "STEP_VERSIONS", newer)
    with pytest.raises(
        CatalogBehind, match=f"checked {STEP_VERSIONS[StepKind.CHECKED]}, here next.*roster sync"
    ):
        plan_recheck(office.desk.store, catalog, base=None)
    office.patch.setattr(tasks.cataloguing, "STEP_VERSIONS", newer)
    office.desk.sync()
    [ash] = carry_out_recheck(plan_recheck(office.desk.store, catalog, base=BASE), WHY)
    assert ash.steps == (f"checked {STEP_VERSIONS[StepKind.CHECKED]} → next",)
    assert (ash.verdict, ash.left, ash.flow_run) == ("ready", None, "new-ash")
    assert office.prefect.started[0].get("force", False) is False, "what did not change is skipped"
    assert plan_recheck(office.desk.store, catalog, base="another") == []
    office.desk.store.delete(marker_key("ash", "run-1"))
    [gone] = carry_out_recheck(plan_recheck(office.desk.store, catalog, base=None), WHY)
    assert gone.left is not None and "upload cannot be read any more" in gone.left
    office.prefect.on_their_way = [run_of("ash", "AwaitingRetry")]
    assert plan_recheck(office.desk.store, catalog, base=None)[0].left == "its run is on its way"
    assert len(office.prefect.started) == 1


def test_each_change_of_engine_asks_for_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict that another engine made stale is taken up again under a key of its own, and once for each change.

    Without the engine in it the key would be that of the recheck for the code's versions, whose run has ended.
    """
    asked: list[str] = []

    def start(*_: str, key: str, message: str) -> str:
        asked.append(key)
        return "new"

    monkeypatch.setattr(flows.rechecking, "start_onboard", start)
    code, first, second = "checked 1 → 2", "engine 0123 → 4567", "engine 4567 → 89ab"
    for steps in ((code,), (first,), (second,), (code, first), (second,)):
        one = Recheck("ash", "run-1", BASE, "d" * 64, "ready", steps)
        assert carry_out_recheck([one], WHY)[0].flow_run == "new"
    assert len(set(asked)) == 3 and asked[2] == asked[4] and asked[1] == asked[3]
    assert all(key.startswith(f"recheck/ash/{'d' * 64}/") for key in asked)
    assert first not in asked[0] and first in asked[1] and second in asked[2]
    monkeypatch.setattr(flows.rechecking, "STEP_VERSIONS", {**STEP_VERSIONS, StepKind.CHECKED: "next"})
    carry_out_recheck([Recheck("ash", "run-1", BASE, "d" * 64, "ready", (second,))], WHY)
    assert asked[5] not in asked[:5], "newer code asks again"


def view(**more: Any) -> PrefectView:
    facts: dict[str, Any] = {
        "unfit": None,
        "pool_paused": False,
        "missing": (),
        "resting": {},
        "workers": (WorkerView("one", True, now()),),
        "queues": (QueueView("default", False, 0, now()),),
        "runs": (),
        "on_their_way": 0,
        "others_at_work": False,
        "leases": (),
    }
    return PrefectView(**(facts | more))


def test_a_retried_run_that_no_worker_will_take_up_is_told() -> None:
    """PrefectHQ/prefect#17484, #16147: a run stays AwaitingRetry, and nothing says that nobody will take it."""
    assert list(command._hindrances(view())) == []
    [alone] = command._hindrances(view(workers=(WorkerView("one", False, now()),)))
    assert "no worker polls the pool gpu" in alone and "AwaitingRetry" in alone and "roster up" in alone
    [paused] = command._hindrances(view(pool_paused=True))
    assert "prefect work-pool resume gpu" in paused
    [resting] = command._hindrances(view(queues=(QueueView("default", True, 3, now()),)))
    assert "prefect work-queue resume default --pool gpu" in resting


def test_without_prefect_the_command_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSTER_HOME", str(tmp_path))
    monkeypatch.setenv("ROSTER_STORE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("ROSTER_PREFECT_API_URL", raising=False)
    roster = Roster(capsys, tmp_path)
    for line in (("retry", "ash"), ("recheck", "--stale")):
        ran = roster(*line, "--json")
        assert ran.code == 3 and "ROSTER_PREFECT_API_URL" in ran.document["error"], ran
    assert roster("retry").code == 2 and roster("retry", "ash", "--failed").code == 2
    assert "no such code: nope" in roster("retry", "--failed", "--code", "nope").err
    assert "named uploads" in roster("retry", "ash", "--base", "tiny").err
    assert roster("recheck").code == 2


def test_what_is_needed_is_named() -> None:
    error = PrefectNeeded("no address of one", "Start it.")
    assert str(error) == "expected a Prefect server with our deployments, found: no address of one. Start it."
