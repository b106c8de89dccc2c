"""Retry means retry: a person in the Prefect UI, and `roster retry`, send the very run again that failed.

Real are the object store, the Prefect server with its UI, the worker and its flow runs, as `roster up` starts them, and
the browser. The engine is a scripted server behind vLLM's routes; first there is none at its address, which is why
the runs fail, then there is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
from browser import CHROMIUM, FLAGS
from lora_builders import Logical, attention, encode, save_adapter
from pipeline_builders import BASE, BASE_BPB, CONTROL_BPB, OTHER_BPB, OWN_BPB, add_tiny_base
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed
from scripted_server import ScriptedServer

from flows.deploy import POOL
from flows.embedded import start_detached, stop_embedded
from flows.embedded_config import EmbeddedConfig
from flows.ports import pick_ports
from flows.services import Services
from flows.settings import base_environment
from storage.claims import read_ledger
from storage.heldout import register_heldout
from storage.ledger import Ledger
from storage.s3 import S3Store
from storage.uploads import Upload
from tasks.submission import submit_adapter

pytestmark = pytest.mark.real

UNTIL_SCORED = ["inspected", "converted", "checked", "staged", "opponents"]
DEADLINE_S = 180
CLICK_MS = 60_000


@dataclass(frozen=True)
class World:
    """Embedded services, and an engine that starts when it is told to."""

    services: Services
    store: S3Store
    folder: Path
    environment: dict[str, str]

    def submit(self, author: str) -> Upload:
        """An adapter and its text, as a trainer hands them in; its run is asked for by the caller."""
        text = self.folder / f"{author}.jsonl"
        lines = [
            json.dumps({"id": f"u{n}", "text": f"{author} wrote text {n}. " + chr(97 + n % 26) * 330})
            for n in range(24)
        ]
        text.write_text("\n".join(lines) + "\n")
        register_heldout(self.store, author, "main", text)
        tensors = {**encode(Logical(seed=len(author)), packing="rank_major"), **attention()}
        trained = save_adapter(self.folder / author, tensors, lora_B_layout="rank_major")
        return submit_adapter(
            self.store,
            trained,
            author=author,
            base=BASE,
            run="run-1",
            trainer=None,
            reference=None,
            heldout=(),
            progress=lambda done, total: None,
        )

    def onboard(self, author: str) -> FlowRun:
        """A run of `onboard` that has ended."""
        parameters = {"author": author, "run": "run-1"}
        asked = run_deployment("onboard/onboard", parameters=parameters, timeout=0, as_subflow=False)
        return self.wait(cast(FlowRun, asked).id)

    def wait(self, flow_run: UUID, *, times: int = 1) -> FlowRun:
        """This run when it has ended, having been run so many times."""
        deadline = time.monotonic() + DEADLINE_S
        with get_client(sync_client=True) as client:
            while True:
                run = client.read_flow_run(flow_run)
                if run.state is not None and run.state.is_final() and run.run_count >= times:
                    return run
                assert time.monotonic() < deadline, run.state
                time.sleep(0.5)

    def told(self, flow_run: UUID) -> dict[str, str]:
        """What is said on each state that a run has had, the last of each name."""
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(flow_run)
        return {str(state.name): str(state.message) for state in states}

    def ledger(self, upload: Upload) -> Ledger:
        return read_ledger(self.store, upload.marker.author, upload.adapter_digest)[0]

    def roster(self, *arguments: str) -> Any:
        ran = subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments, "--json"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)


def score(name: str, author: str) -> float | None:
    if "~control@" in name:
        return CONTROL_BPB
    return OWN_BPB if name.startswith(f"{author}@") else OTHER_BPB


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("retry")
    home = folder / "home"
    home.mkdir()
    environment = {**base_environment(), "ROSTER_HOME": str(home)}
    config = EmbeddedConfig(home=home, engine_python=Path(sys.executable), worker_limit=2)
    try:
        services = start_detached(config, environment=environment, announce=print)
        with temporary_settings({PREFECT_API_URL: services.prefect.api_url}):
            pause_sweeps()
            store = S3Store.open(
                endpoint=services.store.endpoint,
                bucket=services.store.bucket,
                region=services.store.region,
                access_key=services.store.access_key,
                secret_key=services.store.secret_key,
            )
            yield World(services, store, folder, environment)
    finally:
        stop_embedded(home, timeout_s=90)


def pause_sweeps() -> None:
    """Else the sweep would do what the operator is to do here."""
    named = DeploymentFilter(name=DeploymentFilterName(any_=["sweep"]))
    with get_client(sync_client=True) as client:
        [sweep] = client.read_deployments(deployment_filter=named)
        client.pause_deployment(sweep.id)


@pytest.fixture
def no_engine(world: World) -> int:
    """The port at which the base's engine ought to be, and is not."""
    port = pick_ports(["engine"], {})["engine"]
    add_tiny_base(world.store, url=f"http://127.0.0.1:{port}")
    return port


def start_engine(port: int) -> ScriptedServer:
    return ScriptedServer((BASE,), BASE_BPB, score, {}, port)


def browser() -> str:
    """The browser's path; without one the test is skipped, but never where every test must run."""
    found = shutil.which(CHROMIUM)
    if found is None:
        message = f"no {CHROMIUM} on PATH: nobody clicks Retry here (apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def click_retry(executable: str, url: str, pictures: Path) -> None:
    """What a person does: open the run's page, look, Retry, confirm, wait until the page says that it is ready."""
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        page.goto(url)
        expect(page.get_by_text("Stopped: engine_unavailable").first).to_be_visible(timeout=CLICK_MS)
        page.screenshot(path=pictures / "1-failed.png")
        page.get_by_role("button", name="Retry", exact=True).click(timeout=CLICK_MS)
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible(timeout=CLICK_MS)
        page.screenshot(path=pictures / "2-dialog.png")
        dialog.get_by_role("button", name="Retry", exact=True).click(timeout=CLICK_MS)
        expect(page.get_by_text("Ready", exact=True).first).to_be_visible(timeout=CLICK_MS)
        page.screenshot(path=pictures / "3-ready.png")
        chromium.close()


def test_retry_in_the_ui_does_only_what_was_not_finished(
    world: World, no_engine: int, tmp_path: Path
) -> None:
    executable = browser()
    upload = world.submit("ash")
    failed = world.onboard("ash")
    assert failed.state is not None and failed.state.name == "Stopped: engine_unavailable", failed.state
    before = world.ledger(upload).steps
    assert [step.kind for step in before] == [*UNTIL_SCORED, "scored"]
    print("pictures:", tmp_path)
    with start_engine(no_engine):
        click_retry(executable, f"{world.services.prefect.ui_url}/runs/flow-run/{failed.id}", tmp_path)
        again = world.wait(failed.id, times=2)
    assert again.state is not None and again.state.name == "Ready", again.state
    steps = world.ledger(upload).steps
    assert steps[: len(before)] == before
    assert [(step.kind, step.attempt, step.outcome) for step in steps[len(before) :]] == [
        ("scored", 2, "done"),
        ("verdict", 1, "ready"),
    ]
    assert {step.flow_run for step in steps} == {str(failed.id)}


def set_pool(*, paused: bool) -> None:
    with get_client(sync_client=True) as client:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=paused))


def test_roster_retry_sends_the_very_run_whatever_somebody_made_of_its_state(
    world: World, no_engine: int
) -> None:
    """PrefectHQ/prefect#18303: a state set by hand has no result behind it. #17484: a run stays AwaitingRetry for ever.

    The ledger, not the state, tells that the adapter is not ready; and the command says that no run begins.
    """
    upload = world.submit("elm")
    failed = world.onboard("elm")
    before = world.ledger(upload).steps
    assert [step.kind for step in before] == [*UNTIL_SCORED, "scored"]
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(failed.id, Completed(message="looks fine to me"), force=True)
    world.roster("sync")
    assert "elm" not in [row["author"] for row in world.roster("ready")["ready"]]

    wanted = ("retry", "--failed", "--code", "engine_unavailable")
    [planned] = world.roster(*wanted, "--dry-run")["uploads"]
    assert (planned["author"], planned["way"], planned["state"]) == ("elm", "again", "stopped")
    set_pool(paused=True)
    told = world.roster(*wanted, "--why", "the engine is back")
    assert [(one["way"], one["flow_run"]) for one in told["uploads"]] == [("again", str(failed.id))]
    assert "prefect work-pool resume gpu" in " ".join(told["warnings"])
    [waits] = world.roster(*wanted)["uploads"]
    assert waits["way"] == "left" and "AwaitingRetry" in waits["reason"]

    with start_engine(no_engine):
        set_pool(paused=False)
        again = world.wait(failed.id, times=2)
    assert again.state is not None and again.state.name == "Ready", again.state
    assert "the engine is back" in world.told(failed.id)["AwaitingRetry"]
    steps = world.ledger(upload).steps
    assert steps[: len(before)] == before
    assert [(step.kind, step.attempt) for step in steps[len(before) :]] == [("scored", 2), ("verdict", 1)]
    assert {step.flow_run for step in steps} == {str(failed.id)}
    assert world.roster("retry", "--failed")["uploads"] == []


def test_a_run_that_prefect_has_no_more_is_followed_by_a_new_one_and_force_does_all_again(
    world: World, no_engine: int
) -> None:
    upload = world.submit("oak")
    failed = world.onboard("oak")
    with get_client(sync_client=True) as client:
        client.delete_flow_run(failed.id)
    with start_engine(no_engine):
        [asked] = world.roster("retry", "oak/run-1")["uploads"]
        assert asked["way"] == "new_run" and asked["flow_run"] != str(failed.id)
        new = world.wait(UUID(asked["flow_run"]))
        assert new.state is not None and new.state.name == "Ready", new.state
        before = world.ledger(upload).steps
        [left] = world.roster("retry", "oak")["uploads"]
        assert left["way"] == "left" and "ready" in left["reason"]
        [forced] = world.roster("retry", "oak", "--force")["uploads"]
        assert forced["does_again"] == [*UNTIL_SCORED, "scored", "verdict"]
        done = world.wait(UUID(forced["flow_run"]))
    assert done.state is not None and done.state.name == "Ready", done.state
    steps = world.ledger(upload).steps
    assert [step.kind for step in steps[len(before) :]] == [*UNTIL_SCORED, "scored", "verdict"]
    assert {step.flow_run for step in steps[len(before) :]} == {forced["flow_run"]}
