"""`roster status`: what is seen of store, Prefect and engines, and the command that mends what does not mend itself."""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from catalog_builders import NOON
from cli_builders import Roster
from lora_builders import base_fields
from pipeline_builders import add_tiny_base, qualify_on_paper
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate, WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import AwaitingRetry, Completed, Failed, Running
from scripted_server import MAX_LEN, ScriptedServer
from store_builders import memory_store

import flows.overview
import storage.client
from flows.ages import format_age
from flows.cli.app import app
from flows.deploy import POOL
from flows.embedded_restarts import ChildRestarts
from flows.findings import Finding, list_findings
from flows.overview import (
    LeaseView,
    PrefectSilent,
    PrefectView,
    QueueView,
    RunView,
    WorkerView,
    look_at_prefect,
)
from flows.standing import CatalogView, Standing, StoreView
from roster.rows import ProblemRow
from roster.serving_engine import EngineInfo
from storage.documents import put_document
from storage.keys import engine_key
from storage.s3 import S3Store
from tasks.engine_health import EngineHealth, Qualified, look_at_engines
from tasks.inbox import PendingUpload, UploadState

NOW = datetime(2026, 11, 20, 12, 10, tzinfo=UTC)
ENGINE_JSON = Path(__file__).parent.parent / "docs" / "examples" / "engine.json"

WORKER = WorkerView("w1", True, NOW - timedelta(seconds=3))
PREFECT = PrefectView(
    unfit=None,
    pool_paused=False,
    missing=(),
    resting={},
    workers=(WORKER,),
    queues=(QueueView("default", False, 0, NOW), QueueView("urgent", False, 0, NOW)),
    runs=(),
    on_their_way=0,
    others_at_work=False,
    leases=(LeaseView("tiny", "engine-tiny", 0, 1, NOW - timedelta(hours=5)),),
)
ENGINE = EngineHealth(
    base="tiny",
    url="http://127.0.0.1:8000",
    answers=True,
    engine_id="0123456789abcdef",
    vllm_version="0.32.0",
    current=True,
    qualified=Qualified.PASSED,
    failures=(),
    untested=(),
    problem=None,
)
STORE = StoreView(uploads=(), engines=(ENGINE,), roster_version=7)
CATALOG = CatalogView(NOON, (), (), (), (), (), ())
WELL = Standing(
    now=NOW,
    home=Path("/home"),
    services=None,
    owner=None,
    store_endpoint="http://store:9000",
    prefect_api_url="http://prefect:4200/api",
    restarts={},
    store=STORE,
    store_fault=None,
    prefect=PREFECT,
    prefect_fault=None,
    catalog=CATALOG,
    catalog_fault=None,
    catalog_missing=False,
)
RUN = RunView(
    id="f1",
    name="calm-owl",
    author="ash",
    run="run-1",
    state="Running",
    since=NOW - timedelta(minutes=20),
    scheduled=False,
    at_work=True,
    due=False,
    url="http://prefect:4200/runs/flow-run/f1",
)
AWAITING = replace(
    RUN, state="AwaitingRetry", since=NOW - timedelta(minutes=7), scheduled=True, at_work=False, due=True
)
OFFLINE = replace(WORKER, alive=False, last_heartbeat=NOW - timedelta(hours=2))
TAKEN = LeaseView("tiny", "engine-tiny", 1, 1, NOW - timedelta(minutes=10))


def upload(state: UploadState, author: str = "ash", *, age_min: int = 90, **more: Any) -> PendingUpload:
    return PendingUpload(author, "run-1", "s", state, NOW - timedelta(minutes=age_min), base="tiny", **more)


def prefect(**more: Any) -> Standing:
    return replace(WELL, prefect=replace(PREFECT, **more))


def store(*uploads: PendingUpload, **engine: Any) -> Standing:
    return replace(WELL, store=StoreView(uploads, (replace(ENGINE, **engine),), 7))


def catalog(**more: Any) -> Standing:
    return replace(WELL, catalog=replace(CATALOG, **more))


RUE = ProblemRow("rue", "tiny", "d", "r1", "quarantined", "non_finite", "it is non_finite", None, None)
FINDINGS: dict[str, tuple[Standing, str, str]] = {
    "nothing-runs": (
        replace(WELL, store_endpoint=None, store=None, prefect=None, catalog=None, catalog_missing=True),
        "no embedded services run in /home",
        "roster up",
    ),
    "restarted": (
        replace(
            WELL,
            restarts={
                "engine-tiny": ChildRestarts(
                    count=3, last_at=NOW - timedelta(minutes=4), last_status="signal SIGKILL"
                )
            },
        ),
        "engine-tiny had to be started again 4 min ago (signal SIGKILL), 3 times in all",
        "tail -n 50 /home/logs/engine-tiny.log.1",
    ),
    "prefect-silent": (
        replace(WELL, prefect=None, prefect_fault=str(PrefectSilent("http://prefect:4200/api", "nobody"))),
        "Prefect at http://prefect:4200/api: expected an answer within 5 s, found nobody.",
        "curl -sS -m 5 http://prefect:4200/api/health",
    ),
    "server-older": (prefect(unfit="found 3.4.0"), "found 3.4.0", "prefect version"),
    "no-pool": (
        prefect(pool_paused=None, missing=("onboard", "sweep", "sync"), workers=()),
        "not registered with Prefect: onboard, sweep, sync",
        "python -m flows.deploy",
    ),
    "sweep-rests": (
        prefect(resting={"sweep": "5c"}),
        "the schedule of sweep is paused: what events lose is not found",
        "prefect deployment schedule resume sweep/sweep 5c",
    ),
    "pool-paused": (prefect(pool_paused=True), "the pool gpu is paused", "prefect work-pool resume gpu"),
    "queue-paused": (
        prefect(queues=(QueueView("urgent", True, 4, None),)),
        "the queue urgent is paused: 4 runs wait in it",
        "prefect work-queue resume urgent --pool gpu",
    ),
    "no-worker": (
        prefect(workers=(OFFLINE,), runs=(AWAITING,), queues=(QueueView("default", False, 1, None),)),
        "no worker polls the pool gpu, the last was heard 2 h ago: 1 runs wait (AwaitingRetry; the longest for 7 min",
        "python -m flows.forking --pool gpu --limit 2",
    ),
    "pending": (
        prefect(runs=(replace(RUN, state="Pending", since=NOW - timedelta(minutes=6)),)),
        "run calm-owl of ash/run-1 has been Pending for 6 min: the worker that took it has died",
        "prefect flow-run cancel f1",
    ),
    "cancelling": (
        prefect(runs=(replace(RUN, state="Cancelling"),)),
        "has been Cancelling for 20 min",
        "prefect flow-run delete f1",
    ),
    "zombie": (
        prefect(runs=(RUN,)),
        "run calm-owl of ash/run-1 is shown as Running for 20 min, but nobody holds its adapter",
        "roster retry ash/run-1",
    ),
    "lease-stuck": (
        prefect(leases=(TAKEN,)),
        "the lease of the engine of tiny is taken for 10 min, and no run can be its holder",
        "prefect gcl update engine-tiny --active-slots 0",
    ),
    "store-down": (
        replace(WELL, store=None, store_fault="list uploads/: no answer"),
        "list uploads/: no answer",
        "curl -sS -m 5 http://store:9000/",
    ),
    "engine-nowhere": (
        store(url=None, answers=None, problem="no address is registered"),
        "engine of tiny: no address is registered",
        "roster base add tiny --config DIR --engine-url URL",
    ),
    "engine-down": (
        store(answers=False, problem="no healthy engine answers at http://127.0.0.1:8000"),
        "engine of tiny: no healthy engine answers",
        "curl -sS -m 5 http://127.0.0.1:8000/health",
    ),
    "engine-another": (
        store(current=False, problem="serves other, but tiny was published"),
        "engine of tiny: serves other, but tiny was published",
        "start it again with our plugins (docs/engine.md)",
    ),
    "never-qualified": (
        store(qualified=Qualified.NEVER),
        "engine of tiny was never qualified",
        "roster qualify --base tiny",
    ),
    "failed-qualification": (
        store(qualified=Qualified.FAILED, failures=("mixed batch: base rows got an adapter",)),
        "has failed its qualification: mixed batch: base rows got an adapter",
        "roster qualify --base tiny",
    ),
    "no-heldout": (
        store(upload(UploadState.WAITING, code="no_heldout", reason="no held-out set")),
        "ash/run-1: waiting (no_heldout), submitted 1 h ago: no held-out set",
        "roster heldout add ash NAME FILE",
    ),
    "unknown-base": (
        store(upload(UploadState.WAITING, code="unknown_base")),
        "ash/run-1: waiting (unknown_base)",
        "roster base add tiny --config DIR",
    ),
    "one-stopped": (
        store(upload(UploadState.STOPPED, code="disk_full")),
        "ash/run-1: stopped (disk_full)",
        "roster retry ash/run-1",
    ),
    "many-stopped": (
        store(
            *(
                upload(UploadState.STOPPED, author, code="engine_unavailable")
                for author in ("ash", "elm", "fir")
            )
        ),
        "ash/run-1 and 2 more: stopped (engine_unavailable)",
        "roster retry --failed --code engine_unavailable",
    ),
    "died": (store(upload(UploadState.DIED)), "ash/run-1: died", "roster retry ash/run-1"),
    "not-taken-up": (
        store(upload(UploadState.NEW, age_min=6)),
        "ash/run-1: new, submitted 6 min ago",
        "prefect deployment run sweep/sweep",
    ),
    "incomplete": (
        store(upload(UploadState.INCOMPLETE, reason="lacks a.safetensors")),
        "ash/run-1: incomplete, submitted 1 h ago: lacks a.safetensors",
        "roster submit DIR --author ash --run run-1 --base tiny",
    ),
    "no-catalog": (
        replace(WELL, catalog=None, catalog_fault="none", catalog_missing=True),
        "this machine has no catalog yet",
        "roster sync",
    ),
    "damaged-catalog": (replace(WELL, catalog=None, catalog_fault="damaged"), "damaged", "roster rebuild"),
    "old-sync": (
        catalog(synced_at="2026-11-20T09:00:00Z"),
        "the catalog was last synced 3 h ago",
        "prefect deployment run sync/sync",
    ),
    "refused": (catalog(problems=(RUE,)), "rue/r1: quarantined (non_finite)", "roster why rue"),
}


def test_where_all_is_well_there_is_nothing_to_do() -> None:
    assert list_findings(WELL) == ()


@pytest.mark.parametrize(("standing", "says", "do"), FINDINGS.values(), ids=FINDINGS)
def test_each_finding_has_its_command(standing: Standing, says: str, do: str) -> None:
    """AwaitingRetry without a worker: PrefectHQ/prefect#17484, #16147. A Pending run that holds on:
    opsmill/infrahub#9856. A lease that outlives its holder: PrefectHQ/prefect#17415."""
    [finding] = list_findings(standing)
    assert says in finding.says
    assert finding.do == do


@pytest.mark.parametrize(
    "standing",
    [
        pytest.param(prefect(leases=(TAKEN,), runs=(RUN,)), id="its-holder-runs"),
        pytest.param(prefect(leases=(TAKEN,), others_at_work=True), id="matrix-runs"),
        pytest.param(
            prefect(leases=(replace(TAKEN, changed_at=NOW - timedelta(minutes=1)),)), id="just-taken"
        ),
        pytest.param(store(upload(UploadState.CLAIMED)), id="claimed"),
        pytest.param(store(upload(UploadState.SETTLING)), id="settling"),
        pytest.param(store(upload(UploadState.NEW, age_min=1)), id="just-submitted"),
        pytest.param(store(upload(UploadState.INCOMPLETE, age_min=10)), id="still-uploading"),
        pytest.param(prefect(runs=(AWAITING,)), id="a-worker-will-take-it"),
    ],
)
def test_what_mends_itself_is_no_finding(standing: Standing) -> None:
    if standing.prefect and RUN in standing.prefect.runs:
        standing = replace(standing, store=replace(STORE, uploads=(upload(UploadState.CLAIMED),)))
    assert list_findings(standing) == ()


def test_a_run_that_waits_for_a_lease_is_not_taken_for_its_holder() -> None:
    """PrefectHQ/prefect#17415: the very runs that a stuck lease keeps waiting would hide it."""
    late = replace(RUN, since=NOW - timedelta(minutes=9))
    standing = prefect(leases=(TAKEN,), runs=(late,))
    assert [one.do for one in list_findings(standing)] == ["prefect gcl update engine-tiny --active-slots 0"]


def test_the_commands_of_findings_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    (tmp_path / "DIR" / "config.json").write_text(json.dumps(base_fields()))
    (tmp_path / "FILE").write_text("{}")
    ours = [do for _, _, do in FINDINGS.values() if do.startswith("roster ")]
    assert len(ours) > 10
    for do in ours:
        app.parse_args(
            shlex.split(do.replace("URL", "http://e:1"))[1:], exit_on_error=False, print_error=False
        )


def test_ages_read_at_a_glance() -> None:
    ages = [-5, 0, 59, 60, 3_599, 3_600, 86_399, 86_400, 900_000]
    assert [format_age(timedelta(seconds=age)) for age in ages] == [
        *("0 s", "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 d", "10 d"),
    ]


# A real Prefect server


@pytest.fixture
def client(prefect_server: None) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def api_url() -> str:
    url = PREFECT_API_URL.value()
    assert url is not None
    return url


def register(client: SyncPrefectClient, name: str) -> UUID:
    """The id of a deployment of this name in our pool, which is there then."""
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    try:
        return client.read_deployment_by_name(f"{name}/{name}").id
    except ObjectNotFound:
        flow = client.create_flow_from_name(name)
        return client.create_deployment(flow, name, work_pool_name=POOL)


def look() -> PrefectView:
    return look_at_prefect(api_url(), now=datetime.now(UTC) + timedelta(seconds=1))


@pytest.mark.real
def test_a_retried_run_without_a_worker_is_seen(client: SyncPrefectClient) -> None:
    """PrefectHQ/prefect#17484: Retry in the UI leaves the run AwaitingRetry, with no word that nobody will take it."""
    deployment = register(client, "onboard")
    parameters = {"author": "ash", "run": "run-9"}
    run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
    for state in (Running(), Failed(), AwaitingRetry(scheduled_time=datetime.now(UTC))):
        client.set_flow_run_state(run.id, state, force=True)
    try:
        view = look()
        [seen] = [one for one in view.runs if one.id == str(run.id)]
        assert (seen.author, seen.run, seen.state) == ("ash", "run-9", "AwaitingRetry")
        assert (seen.scheduled, seen.due, seen.at_work) == (True, True, False)
        assert seen.url == f"{api_url().removesuffix('/api')}/runs/flow-run/{run.id}"
        assert sum(queue.depth for queue in view.queues) >= 1
        if not view.alive:
            says = [one.says for one in list_findings(replace(WELL, prefect=view, now=datetime.now(UTC)))]
            assert any("no worker polls the pool gpu" in one and "AwaitingRetry" in one for one in says), says

        client.send_worker_heartbeat(POOL, "status-worker", 30)
        assert "status-worker" in [worker.name for worker in look().alive]
    finally:
        client.set_flow_run_state(run.id, Completed(), force=True)
    assert str(run.id) not in [one.id for one in look().runs]


@pytest.mark.real
def test_a_lease_without_a_holder_is_found_and_freed(client: SyncPrefectClient) -> None:
    """PrefectHQ/prefect#17415: the slot is counted in the server's database, its lease was lost with its memory."""
    name = "engine-status-test"
    client.upsert_global_concurrency_limit_by_name(name, 1)
    before = datetime.now(UTC)
    assert client.increment_concurrency_slots(names=[name], slots=1, mode="concurrency").is_success
    [lease] = [one for one in look().leases if one.name == name]
    assert (lease.base, lease.taken, lease.slots) == ("status-test", 1, 1)
    assert lease.changed_at is not None and lease.changed_at >= before - timedelta(seconds=1)

    later = datetime.now(UTC) + timedelta(minutes=30)
    view = replace(PREFECT, leases=(lease,))
    commands = [one.do for one in list_findings(replace(WELL, prefect=view, catalog=None, now=later))]
    assert f"prefect gcl update {name} --active-slots 0" in commands
    client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(active_slots=0))
    assert [one.taken for one in look().leases if one.name == name] == [0]
    client.delete_global_concurrency_limit_by_name(name)


# What does not answer


@pytest.fixture
def deaf() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_what_never_answers_is_named_and_the_rest_told(
    deaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flows.overview, "_SECONDS", 0.2)
    monkeypatch.setattr(flows.overview, "_RETRIES", 0)
    monkeypatch.setattr(storage.client, "_HURRIED_READ_SECONDS", 0.2)
    monkeypatch.setattr(storage.client, "_HURRIED_ATTEMPTS", 1)
    settings = {
        "HOME": str(tmp_path / "home"),
        "STORE_ENDPOINT": deaf,
        "STORE_ACCESS_KEY": "a",
        "STORE_SECRET_KEY": "secret",
        "PREFECT_API_URL": f"{deaf}/api",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"ROSTER_{name}", value)
    roster = Roster(capsys, tmp_path / "home")
    started = time.monotonic()
    ran = roster("status", "--json")
    assert time.monotonic() - started < 8
    assert ran.code == 3
    assert f"Prefect at {deaf}/api: expected an answer" in ran.document["prefect_fault"]
    assert "the object store did not do it" in ran.document["store_fault"]
    assert ran.document["workers"] == []
    commands = [one["do"] for one in ran.document["next"]]
    assert commands == [f"curl -sS -m 5 {deaf}/api/health", f"curl -sS -m 5 {deaf}/"]


# Engines


@pytest.fixture
def bucket() -> Iterator[S3Store]:
    with memory_store() as bucket:
        yield bucket


def look_at(bucket: S3Store, url: str | None) -> EngineHealth:
    [health] = look_at_engines(bucket, {"tiny": url} if url else {}, timeout_s=2)
    return health


def test_an_engine_is_asked_and_compared_with_what_it_published(bucket: S3Store) -> None:
    add_tiny_base(bucket)
    for found in [*bucket.list_objects("engines/"), *bucket.list_objects("qualified/")]:
        bucket.delete(found.key)
    info = EngineInfo.model_validate_json(ENGINE_JSON.read_text())
    info = info.model_copy(update={"served_model": ("tiny",), "max_model_len": MAX_LEN})
    with ScriptedServer(("tiny",), 2.0, lambda *_: None, {}) as server:
        silent = look_at(bucket, server.url)
        assert (silent.answers, silent.engine_id, silent.qualified) == (True, None, Qualified.NEVER)
        assert silent.problem == "engines/tiny.json in the store holds nothing"

        put_document(bucket, engine_key("tiny"), info)
        fresh = look_at(bucket, server.url)
        assert (fresh.engine_id, fresh.current, fresh.qualified) == (info.engine_id, True, Qualified.NEVER)
        qualify_on_paper(bucket, info, "tiny")
        assert look_at(bucket, server.url).qualified is Qualified.PASSED
        assert look_at(bucket, server.url).problem is None

        other = info.model_copy(update={"max_model_len": 4_096})
        put_document(bucket, engine_key("tiny"), other)
        moved = look_at(bucket, server.url)
        assert (moved.current, moved.qualified) == (False, Qualified.NEVER)
        assert moved.problem == f"{server.url} takes {MAX_LEN} tokens, but 4096 was published"
        put_document(bucket, engine_key("tiny"), info.model_copy(update={"served_model": ("big",)}))
        assert look_at(bucket, server.url).problem == f"{server.url} serves tiny, but big was published"
        url = server.url
    gone = look_at(bucket, url)
    assert (gone.answers, gone.current) == (False, None)
    assert gone.problem == f"no healthy engine answers at {url}"


def test_findings_are_shown_with_their_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standing = replace(
        WELL,
        prefect=replace(PREFECT, runs=(AWAITING,), on_their_way=1, workers=()),
        store=StoreView((upload(UploadState.STOPPED, code="disk_full", reason="no room"),), (ENGINE,), 7),
    )
    monkeypatch.setenv("ROSTER_HOME", str(tmp_path))
    monkeypatch.setattr("flows.standing.look_around", lambda settings, now: standing)
    roster = Roster(capsys, tmp_path)
    out = roster("status").out
    assert "Prefect: 0 workers alive; due and not begun: default 0, urgent 0\n" in out
    assert "  ash/run-1: AwaitingRetry for 7 min: http://prefect:4200/runs/flow-run/f1\n" in out
    assert "engine of tiny: http://127.0.0.1:8000 answers, vLLM 0.32.0, qualification: passed\n" in out
    assert "  ash/run-1: stopped (disk_full), submitted 1 h ago: no room\n" in out
    assert out.endswith("    -> roster retry ash/run-1\n")
    document = roster("status", "--json").document
    assert document["runs"][0]["since"] == "2026-11-20T12:03:00+00:00"
    assert document["uploads"][0]["state"] == "stopped"
    assert document["next"] == [{"says": one.says, "do": one.do} for one in findings_of(standing)]


def findings_of(standing: Standing) -> tuple[Finding, ...]:
    findings = list_findings(standing)
    assert len(findings) == 2
    return findings
