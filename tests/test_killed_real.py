"""Runs that are killed, with their worker and without, at the worst moments: nothing is lost, and nothing done twice.

Object store, Prefect server, deployments, automation and worker are those of `roster up`; the worker starts in another
folder than the deployments were registered from. Two things stand in for others: the engine is a scripted server, and a
conversion stops half way where a test asks for that (pausing.py), so that it can be killed there and nowhere else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import pytest
from pausing import Pauses, pauses_in
from pipeline_builders import BASE, BASE_BPB, CONTROL_BPB, OTHER_BPB, OWN_BPB, add_tiny_base
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.events.schemas.automations import Automation
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling, Crashed
from refuse_builders import Upload, perfect, put_upload
from scripted_server import ScriptedServer

from flows.automations import SILENT_RUNS
from flows.embedded import start_detached, stop_embedded
from flows.embedded_config import EmbeddedConfig
from flows.guard import list_descendants
from flows.processes import read_start_ticks
from flows.services import Services
from flows.settings import base_environment
from storage.claims import list_ledgers
from storage.documents import read_document
from storage.ledger import Ledger, Outcome, Step, StepKind
from storage.s3 import S3Store

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parent.parent

DEAD_AFTER_S = 40  # the least that the settings take
HEARTBEAT_S = 30
LEASE_S = 60  # of the engine's slot (tasks/engines.py)
AUTHORS = ("ended", "refused", "slow", "cancelled", "alone", "retried", "swept", "scoring")
WITHIN_S = 150


@dataclass
class Scene:
    """The services, and what happened: filled by `play`, looked at by the tests."""

    services: Services
    store: S3Store
    home: Path
    pauses: Pauses
    asked: dict[str, UUID] = field(default_factory=dict)
    killed: dict[str, str] = field(default_factory=dict)  # author to the worker and pid that its ledger names
    seconds: dict[str, float] = field(default_factory=dict)
    states: dict[str, list[str]] = field(default_factory=dict)
    automations: list[list[Automation]] = field(default_factory=list)
    left_alive: list[int] = field(default_factory=list)
    wiped: bool = False

    def ask(self, author: str) -> None:
        self.asked[author] = ask("onboard/onboard", author=author, run="run-1").id

    def state(self, author: str) -> State:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(self.asked[author]).state
        assert state is not None
        return state

    def set_state(self, author: str, state: State) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(self.asked[author], state)

    def wait(self, author: str, *names: str, within_s: float = WITHIN_S) -> float:
        """The seconds until the run of `author` has a state of one of these names."""
        begun = time.monotonic()
        while self.state(author).name not in names:
            assert time.monotonic() - begun < within_s, (author, names, self.state(author))
            time.sleep(0.3)
        return time.monotonic() - begun

    def ledger(self, author: str) -> Ledger:
        [found] = [one.key for one in list_ledgers(self.store) if one.key.startswith(f"ledger/{author}/")]
        return read_document(self.store, found, Ledger)[0]

    def steps(self, author: str, kind: StepKind) -> list[Step]:
        return [step for step in self.ledger(author).steps if step.kind is kind]

    def stop_half_way(self, author: str) -> int:
        """The pid of the run of `author`, which stands still in the middle of its conversion."""
        self.pauses.arm()
        self.ask(author)
        pid = self.pauses.taken()
        claim = self.ledger(author).claim
        assert claim is not None and claim.holder.split(" ")[0].endswith(f":{pid}"), (author, claim, pid)
        self.killed[author] = claim.holder.split(" ")[0]
        return pid


class Scores:
    """What the scripted engine says; it holds its breath over the author `scoring` until `go_on` is set."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, name: str, author: str) -> float:
        if author == "scoring" and not self.go_on.is_set():
            self.reached.set()
            self.go_on.wait(120)
        if author == "refused":
            return BASE_BPB + (0.2 if "~control@" in name else 0.05)
        if "~control@" in name:
            return CONTROL_BPB
        return OWN_BPB if name.startswith(f"{author}@") else OTHER_BPB


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("killed")
    home, pauses, scores = folder / "home", pauses_in(folder / "pauses"), Scores()
    variables = {
        "ROSTER_DEAD_AFTER_SECONDS": str(DEAD_AFTER_S),
        "ROSTER_CLAIM_SECONDS": "10",
        "ROSTER_SWEEP_GRACE_SECONDS": "0",
        "ROSTER_MAX_OPPONENTS": "1",
        "ROSTER_MAX_DROP": "1",
    }
    config = EmbeddedConfig(home=home, engine_python=Path(sys.executable), worker_limit=len(AUTHORS))
    with ScriptedServer((BASE,), BASE_BPB, scores, {}) as engine:
        try:
            environment = {**base_environment(), **variables, **pauses.environment}
            services = start_detached(config, environment=environment, announce=print)
            with temporary_settings({PREFECT_API_URL: services.prefect.api_url}):
                told = services.store
                store = S3Store.open(
                    endpoint=told.endpoint,
                    bucket=told.bucket,
                    region=told.region,
                    access_key=told.access_key,
                    secret_key=told.secret_key,
                )
                scene = Scene(services, store, home, pauses)
                add_tiny_base(store, url=engine.url)
                (folder / "trained").mkdir()
                for number, author in enumerate(AUTHORS):
                    put_upload(store, folder / "trained", author, Upload("ready", None, perfect(number)))
                play(scene, scores)
                yield scene
        finally:
            scores.go_on.set()
            stop_embedded(home, timeout_s=90)


def play(scene: Scene, scores: Scores) -> None:
    """Every way to be killed, one after another; what takes its time passes at the same time."""
    begun = time.monotonic()
    scene.automations.append(automations())
    pause_sweep()
    # Called dead by mistake: it goes on.
    slow = scene.stop_half_way("slow")
    for author in ("ended", "refused"):
        scene.ask(author)
    scene.set_state("slow", Crashed(message="by mistake"))
    for author, name in (("ended", "Ready"), ("refused", "Quarantined: not_better_than_base")):
        scene.wait(author, name)
    ended = time.monotonic()
    scene.pauses.go_on(slow)
    # Cancelled by an operator.
    cancelled = scene.stop_half_way("cancelled")
    scene.set_state("cancelled", Cancelling())
    scene.seconds["cancel"] = scene.wait("cancelled", "Cancelled", within_s=60)
    if read_start_ticks(cancelled) is not None:
        scene.left_alive.append(cancelled)
    wait_until(lambda: scene.ledger("slow").verdict is not None)
    # Killed while it held the engine's slot; killed half way, without its worker.
    scene.ask("scoring")
    assert scores.reached.wait(60)
    alone = scene.stop_half_way("alone")
    claim = scene.ledger("scoring").claim
    assert claim is not None
    scene.killed["scoring"] = claim.holder.split(" ")[0]
    os.kill(int(scene.killed["scoring"].rpartition(":")[2]), signal.SIGKILL)
    os.kill(alone, signal.SIGKILL)
    holder_killed = time.monotonic()
    scores.go_on.set()
    scene.wait("alone", "Crashed", within_s=60)
    scene.wait("scoring", "Crashed", within_s=60)
    # Killed together with their worker, which cannot tell anybody.
    doomed = [scene.stop_half_way(author) for author in ("retried", "swept")]
    kill_together(workers(scene), doomed)
    both_killed = time.monotonic()
    shutil.rmtree(scene.home / "work")
    scene.wiped = True
    # The operator's Retry of what the worker had marked; the supervisor has started another one meanwhile.
    scene.set_state("alone", AwaitingRetry())
    scene.states["dead"] = [scene.state(author).name or "" for author in ("retried", "swept")]
    for author in ("retried", "swept"):
        scene.wait(author, "Crashed", within_s=DEAD_AFTER_S + 60)
        scene.seconds[f"{author} crashed"] = time.monotonic() - both_killed
        scene.states[author] = [str(scene.state(author).message)]
    scene.set_state("retried", AwaitingRetry())
    scene.wait("alone", "Ready")
    scene.wait("retried", "Ready")
    [first, *_] = sorted(
        scene.steps(author, StepKind.SCORED)[0].finished_at for author in ("alone", "retried")
    )
    scene.seconds["slot"] = first.timestamp() - (time.time() - (time.monotonic() - holder_killed))
    # The sweep takes up the rest: nobody holds it, and it has no verdict.
    run_deployment("sweep/sweep", timeout=60, poll_interval=0.3, as_subflow=False)
    for author in ("swept", "scoring", "cancelled"):
        wait_until(lambda author=author: scene.ledger(author).verdict is not None)
    wait_until(lambda: all(run.state is not None and run.state.is_final() for run in onboardings()))
    asked = {run.id for run in onboardings()}
    # A mark that comes late, as when the automation and the run's own end cross.
    scene.set_state("ended", Crashed(message="by hand"))
    redeploy(scene.home)
    scene.automations.append(automations())
    scene.seconds["silent"] = time.monotonic() - ended
    # Deploying again wakes the sweep, which may have asked for more by now.
    for run in (run for run in onboardings() if run.id in asked):
        scene.states.setdefault(str(run.parameters["author"]), []).append(str(run.state_name))
    scene.seconds["all"] = time.monotonic() - begun
    print(scene.seconds, scene.states)


def ask(deployment: str, **parameters: str) -> FlowRun:
    asked = run_deployment(deployment, parameters=parameters, timeout=0, as_subflow=False)
    assert isinstance(asked, FlowRun)
    return asked


def onboardings() -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        return [run for run in client.read_flow_runs(limit=200) if "author" in run.parameters]


def wait_until(condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def pause_sweep() -> None:
    """It would take up what these tests take up themselves."""
    with get_client(sync_client=True) as client:
        client.pause_deployment(client.read_deployment_by_name("sweep/sweep").id)


def automations() -> list[Automation]:
    with get_client(sync_client=True) as client:
        return client.read_automations_by_name(SILENT_RUNS)


def redeploy(home: Path) -> None:
    """Once more, from another folder, and with another patience."""
    variables = {"ROSTER_HOME": str(home), "ROSTER_DEAD_AFTER_SECONDS": "55"}
    environment = {**base_environment(), **variables, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.deploy"]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def workers(scene: Scene) -> list[int]:
    """The processes that start flow runs and tell of their ends, but for the guard above them."""
    found = []
    for pid in list_descendants(scene.services.pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except FileNotFoundError:
            continue
        if b"--pool" in words and not any(word.endswith(b"guard.py") for word in words):
            found.append(pid)
    return found


def kill_together(workers: list[int], runs: list[int]) -> None:
    """None of them is to see another one's end, and to write it down."""
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    for pid in (*runs, *workers):
        os.kill(pid, signal.SIGKILL)


def test_a_retry_elsewhere_with_an_empty_home_skips_what_was_done(scene: Scene) -> None:
    """prefect#6086, prefect#12977: what a local disk held is made again; prefect#15751: what was done is not."""
    steps = scene.ledger("alone").steps
    assert scene.wiped and [step.kind for step in steps] == list(StepKind), "each step once"
    inspected, *others = steps
    assert inspected.worker == scene.killed["alone"]
    assert (
        scene.killed["alone"] not in {step.worker for step in others}
        and len({step.worker for step in others}) == 1
    )
    assert {step.flow_run for step in steps} == {str(scene.asked["alone"])}, "a Retry is the very run"
    assert scene.states["alone"] == ["Ready"]


def test_runs_that_died_with_their_worker_are_marked_by_the_automation(scene: Scene) -> None:
    """prefect#16746, prefect#18404: they stayed Running for ever."""
    assert scene.states["dead"] == ["Running", "Running"], "nobody was left to mark them"
    for author in ("retried", "swept"):
        # From its last heartbeat, which may have come as long before its end as they lie apart.
        assert DEAD_AFTER_S - HEARTBEAT_S <= scene.seconds[f"{author} crashed"] <= DEAD_AFTER_S + 20
        assert f"No heartbeat for {DEAD_AFTER_S} seconds" in scene.states[author][0]


def test_one_is_then_taken_up_by_the_operators_retry(scene: Scene) -> None:
    ledger = scene.ledger("retried")
    assert [step.kind for step in ledger.steps] == list(StepKind)
    assert {step.flow_run for step in ledger.steps} == {str(scene.asked["retried"])}
    assert scene.states["retried"][1:] == ["Ready"]


def test_the_other_is_taken_up_by_the_sweep(scene: Scene) -> None:
    steps = scene.ledger("swept").steps[: len(StepKind)]
    assert [step.kind for step in steps] == list(StepKind)
    runs = {step.flow_run for step in steps}
    assert len(runs) == 2 and str(scene.asked["swept"]) == steps[0].flow_run
    assert sorted(set(scene.states["swept"][1:])) == ["Crashed", "Ready"]


def test_the_engines_slot_comes_free_by_itself(scene: Scene) -> None:
    """prefect#17415, prefect#9895: slots of killed runs stayed taken."""
    assert scene.killed["scoring"] not in {step.worker for step in scene.steps("scoring", StepKind.SCORED)}
    assert 0 < scene.seconds["slot"] <= LEASE_S + 30, scene.seconds


def test_a_run_that_ended_is_never_marked(scene: Scene) -> None:
    """prefect#18653, prefect#16459. Its last heartbeat is long past, and its state has a name of ours."""
    assert scene.seconds["silent"] > 2 * DEAD_AFTER_S
    # Whoever was judged first is scored again once there are wrong adapters enough.
    assert set(scene.states["ended"]) == {"Ready"}
    assert scene.states["refused"] == ["Quarantined: not_better_than_base"]
    verdict = scene.ledger("ended").verdict
    assert verdict is not None and verdict.outcome is Outcome.READY


def test_a_run_that_was_marked_by_mistake_ends_as_it_would_have(scene: Scene) -> None:
    steps = scene.ledger("slow").steps[: len(StepKind)]
    assert [step.kind for step in steps] == list(StepKind)
    assert {step.flow_run for step in steps} == {str(scene.asked["slow"])}
    assert set(scene.states["slow"]) == {"Ready"}


def test_a_cancelled_run_ends_with_its_processes(scene: Scene) -> None:
    """prefect#20979, prefect#17593: the work went on."""
    assert scene.left_alive == [] and scene.seconds["cancel"] < 60
    assert "Cancelled" in scene.states["cancelled"]


def test_nothing_of_the_killed_is_left_on_the_disk(scene: Scene) -> None:
    # Deploying again woke the sweep, whose runs have folders and claims while they last; what the killed left stays.
    wait_until(lambda: list((scene.home / "work" / "runs").iterdir()) == [])
    wait_until(lambda: all(scene.ledger(author).claim is None for author in AUTHORS))


def test_registering_again_changes_what_is_there(scene: Scene) -> None:
    [[before], [after]] = scene.automations
    assert before.id == after.id and before.enabled and after.enabled
    assert (before.trigger.within.total_seconds(), after.trigger.within.total_seconds()) == (DEAD_AFTER_S, 55)
