"""Bad uploads beside good ones, through the pipeline as it runs: each bad one has its code, each good one is ready.

Real are the object store, the Prefect server with our deployments, and the worker with its runs, all as `roster up`
starts them. The engine is a scripted server behind vLLM's routes: on a CPU the real one would take half an hour for
these (tests/test_demo_real.py scores on it).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pipeline_builders import BASE_BPB
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_URL, temporary_settings
from refuse_builders import (
    BAD,
    BASES,
    LATE,
    PERFECT,
    REFUSED,
    SCORED,
    UNKNOWN,
    UPLOADS,
    prepare,
    put_unknown,
    put_upload,
    score,
    send,
)
from scripted_server import ScriptedServer
from supervised_builders import wait_for

from flows.embedded import start_detached, stop_embedded
from flows.embedded_config import EmbeddedConfig
from flows.services import Services
from flows.settings import base_environment
from roster.advice import ADVICE
from roster.catalog import open_catalog
from roster.serving import Roster
from storage.claims import list_ledgers
from storage.documents import read_document
from storage.keys import roster_key
from storage.ledger import Ledger
from storage.s3 import S3Store
from tasks.bpb.rulings import Code as ScoreCode
from tasks.outcomes import RULINGS

pytestmark = pytest.mark.real

DEADLINE_S = 900
WORKERS = 3
PAGE = 200
# What no upload can bring about, and where it is tested.
ELSEWHERE = {
    "delta_mismatch": "a fault of the conversion: tests/test_lora_check.py",
    "unresolved_keys": "depends on the engine: tests/test_onboard_resolve.py",
    "reference_mismatch": "needs the trainer's own scores: tests/test_bpb_verdict.py",
    "author_retired": "brought about by an operator: tests/test_lifecycle.py",
}


@dataclass(frozen=True)
class Played:
    """What is left when every upload has had its runs: read once, looked at by every test."""

    store: S3Store
    home: Path
    temporary: Path
    runs: list[FlowRun]
    ledgers: list[Ledger]
    rows: dict[str, tuple[str, str, str]]
    ready: set[str]
    keys: list[str]
    seconds: float

    def states(self, author: str) -> list[str]:
        return [
            run.state.name or "" for run in self.runs if run.state and run.parameters.get("author") == author
        ]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("flow")
    home, temporary = folder / "home", folder / "tmp"
    temporary.mkdir()
    variables = {
        "TMPDIR": str(temporary),
        "ROSTER_SWEEP_GRACE_SECONDS": "0",
        "ROSTER_SWEEP_BATCH": "200",
        "ROSTER_MAX_OPPONENTS": "2",
        "ROSTER_MAX_DROP": "1",
        "ROSTER_SYNC_WINDOW_SECONDS": "30",
    }
    config = EmbeddedConfig(home=home, engine_python=Path(sys.executable), worker_limit=WORKERS)
    home.mkdir()
    with ScriptedServer(tuple(BASES), BASE_BPB, score, REFUSED) as engine:
        try:
            services = start_detached(config, environment={**base_environment(), **variables}, announce=print)
            with temporary_settings({PREFECT_API_URL: services.prefect.api_url}):
                yield play(services, home, temporary, engine.url)
        finally:
            stop_embedded(home, timeout_s=90)


def play(services: Services, home: Path, temporary: Path, engine_url: str) -> Played:
    """Send everything, and wait until every upload has had the runs that it needs."""
    begun = time.monotonic()
    trained = home / "trained"
    trained.mkdir()
    store = S3Store.open(
        endpoint=services.store.endpoint,
        bucket=services.store.bucket,
        region=services.store.region,
        access_key=services.store.access_key,
        secret_key=services.store.secret_key,
    )
    prepare(store, engine_url)
    # One bad after the other beside the good ones, as they come.
    for author, upload in sorted({**PERFECT, **BAD}.items(), key=lambda one: one[0][::-1]):
        put_upload(store, trained, author, upload)
    for author, unknown in UNKNOWN.items():
        put_unknown(store, trained, author, unknown)
    store.put("uploads/No Author/run-1/_READY.json", b"{}")
    for author in (author for author, unknown in UNKNOWN.items() if not unknown.swept):
        ask("onboard/onboard", author=author, run="run-1")
    settle({*PERFECT, *BAD, *UNKNOWN, "No Author"})
    ask("sync/sync", wait_s=120)
    for author, upload in LATE.items():
        put_upload(store, trained, author, upload)
    [first, *_] = PERFECT
    send(store, first, replace(PERFECT[first].make(trained / first), base="wide"), run="run-2")
    settle({*LATE}, (first, "run-2"))
    ask("sync/sync", wait_s=120)
    seconds = time.monotonic() - begun
    with open_catalog(home / "catalog.duckdb") as reader:
        found = reader.sql("SELECT author, state, code, reason FROM adapters").rows
        ready = {row.author for row in reader.ready()}
    rows = {str(author): (str(state), str(code), str(reason)) for author, state, code, reason in found}
    assert len(rows) == len(found), "one adapter each"
    ledgers = [read_document(store, one.key, Ledger)[0] for one in list_ledgers(store)]
    keys = [one.key for one in store.list_objects("")]
    return Played(store, home, temporary, list_runs(), ledgers, rows, ready, keys, seconds)


def ask(deployment: str, *, wait_s: float = 0, **parameters: str) -> None:
    run_deployment(deployment, parameters=parameters, timeout=wait_s, poll_interval=0.5, as_subflow=False)


def settle(authors: set[str], *more: tuple[str, str]) -> None:
    """Sweep until each of these has had a run, and none is on its way."""
    wanted = {(author, "run-1") for author in authors} | set(more)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        ask("sweep/sweep", wait_s=120)
        while any(run.state is None or not run.state.is_final() for run in onboardings(list_runs())):
            assert time.monotonic() < deadline, Counter(run.state_name for run in onboardings(list_runs()))
            time.sleep(2)
        ended = {(run.parameters["author"], run.parameters["run"]) for run in onboardings(list_runs())}
        if wanted <= ended:
            return
        assert time.monotonic() < deadline, wanted - ended


def onboardings(runs: list[FlowRun]) -> list[FlowRun]:
    return [run for run in runs if "author" in run.parameters]


def list_runs() -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        found: list[FlowRun] = []
        while page := client.read_flow_runs(limit=PAGE, offset=len(found)):
            found += page
    return found


def test_no_flow_run_crashed_or_failed_without_a_code(played: Played) -> None:
    states = Counter(run.state_name for run in played.runs)
    print(f"{len(played.runs)} flow runs in {played.seconds:.0f} s: {states}")
    assert len(onboardings(played.runs)) >= len(UPLOADS) + len(UNKNOWN) >= 80
    odd = {"Crashed", "Failed", "TimedOut", "AwaitingRetry"}
    assert not odd & states.keys(), [run.state for run in played.runs if run.state_name in odd]
    assert "Cancelled" not in {run.state_name for run in onboardings(played.runs)}
    assert not [name for name in states if name and name.startswith("Stopped")]


def test_every_good_one_is_ready_and_served(played: Played) -> None:
    assert len(PERFECT) == 20
    assert played.ready == PERFECT.keys()
    assert {author: played.rows[author][0] for author in PERFECT} == dict.fromkeys(PERFECT, "ready")
    roster, _ = read_document(played.store, roster_key(), Roster)
    assert {author for base in roster.bases.values() for author in base.authors} == PERFECT.keys()


def test_every_bad_one_has_its_code_in_the_catalog_and_says_what_to_do(played: Played) -> None:
    bad = {**BAD, **LATE}
    assert len(bad) >= 60
    expected = {author: (upload.outcome, upload.code) for author, upload in bad.items()}
    assert {author: played.rows[author][:2] for author in bad} == expected
    for author, upload in bad.items():
        reason = played.rows[author][2]
        missing = [fact for fact in upload.facts if fact not in reason]
        assert not missing, (author, missing, reason)
        assert upload.code in ADVICE
        named = f"{upload.outcome.capitalize()}: {upload.code}"
        assert set(played.states(author)) == {named}, played.states(author)


def test_every_code_that_an_upload_can_bring_about_is_among_them() -> None:
    ruled = {
        ruling.code.value for ruling in RULINGS.values() if ruling.outcome.value in {"quarantined", "waiting"}
    }
    judged = {code.value for code in ScoreCode if code.value.startswith(("no_effect", "not_", "control_"))}
    met = {upload.code for upload in UPLOADS.values() if upload.code} - {"too_little_text"}
    assert met | {"incomplete_upload"} == (ruled | judged) - ELSEWHERE.keys()


def test_what_no_ledger_can_tell_ends_as_its_run_says(played: Played) -> None:
    for author, unknown in UNKNOWN.items():
        assert set(played.states(author)) == {unknown.state}, author
        assert author not in played.rows
    assert played.states("No Author") == ["Refused: ambiguous_upload"]
    [first, *_] = PERFECT
    assert set(played.states(first)) == {"Ready", "Refused: base_mismatch"}
    for run in played.runs:
        if str(run.state_name).startswith("Refused"):
            message = str(run.state and run.state.message)
            assert any(advice in message for advice in ("Correct it", "Try ", "submit it")), message


def test_a_bad_one_leaves_nothing_in_the_store_but_its_ledger(played: Played) -> None:
    found: dict[str, list[str]] = {}
    for key in played.keys:
        top, owner, *_ = key.split("/")
        if top in {"serving", "control"}:
            found.setdefault(owner, []).append(key)
    staged = {author for author in (*BAD, *LATE) if UPLOADS[author].code in SCORED}
    assert found.keys() <= PERFECT.keys() | staged
    assert not [key for key in played.keys if key.startswith("control/")], (
        "every control went with its verdict"
    )
    tops = {"uploads", "heldout", "bases", "engines", "qualified", "ledger", "serving", "roster"}
    assert {key.split("/")[0] for key in played.keys} <= tops


def test_no_claim_is_left(played: Played) -> None:
    assert len(played.ledgers) == len(UPLOADS)
    assert [ledger.author for ledger in played.ledgers if ledger.claim is not None] == []


def test_no_folder_is_left_on_the_worker(played: Played) -> None:
    """But converted adapters that were scored, which are kept for the next scoring: those of some authors a base."""
    work = played.home / "work"
    assert list((work / "runs").iterdir()) == []
    served = {path.name.removesuffix("~control") for path in work.glob("served/*/*")}
    unscored = {author for author, upload in BAD.items() if upload.code not in SCORED} - {"either-reading"}
    assert served and not served & unscored
    # A sweep or a sync may be at work in a folder of Prefect's just now.
    wait_for(lambda: list(played.temporary.iterdir()) == [], within_s=120)
