"""Faults of the chaos bench, done to the services of docker-compose.yml as they run; the adapters end as they should.

One of each way to work: a process that is found and killed, a boundary of a step, a full disk, two workers, events in
another order, and clocks that jump. `./run bench chaos` does all of them, many times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import redis
from fault_proxy import FaultProxy
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Submitting
from refuse_builders import prepare
from topology_builders import Topology, start_topology
from topology_instances import has_faketime, missing_programs

from bench.chaos import VARIABLES
from bench.chaos_adapters import expected
from bench.chaos_calm import scripted_engine
from bench.chaos_drive import settle
from bench.chaos_faults import CLASSES
from bench.chaos_processes import wait_until
from bench.chaos_world import World
from bench.prefect_runs import read_run
from flows.settings import Settings
from tasks.intake import RESCORED

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        bool(missing_programs()) or not has_faketime(),
        reason="not installed here: apt-get install postgresql redis-server faketime",
    ),
]

FAULTS = (
    "boundary_converted_after",
    "boundary_verdict_before",
    "two_workers",
    "disk_full",
    "kill_sync",
    "event_reordered",
)
TRIES = 3
AHEAD_S = 3_600
WITHIN_S = 240


@dataclass
class Scene:
    """What was done and seen: filled by `play`, looked at by the tests."""

    world: World
    happened: dict[str, bool] = field(default_factory=dict)
    worker_was_ahead: bool = False
    services_were_ahead: bool = False
    due_in_s: float = 0.0
    left: list[str] = field(default_factory=list)
    taken: str = ""  # the state of a run that its worker never started


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    proxies: list[FaultProxy] = []

    def before(store: str) -> str:
        if not proxies:
            proxies.append(FaultProxy(store, silent_s=4, pause_s=1).__enter__())
        return proxies[0].endpoint

    folder = tmp_path_factory.mktemp("faults")
    services = start_topology(
        folder, variables=VARIABLES, store_endpoint=before, faketime=("worker", "services")
    )
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            scripted_engine() as engine,
            services as topology,
            temporary_settings({PREFECT_API_URL: topology.api_url, PREFECT_API_AUTH_STRING: topology.auth}),
        ):
            patch.setenv("PREFECT_API_AUTH_STRING", topology.auth)
            store = topology.store.open("roster")
            prepare(store, engine.url)
            settings = Settings(prefect_api_url=topology.api_url)
            scene = Scene(World(folder, topology, proxies[0], store, engine, random.Random(3), settings))
            play(scene, topology)
            yield scene
    finally:
        for proxy in proxies:
            proxy.__exit__(None, None, None)


def play(scene: Scene, topology: Topology) -> None:
    world = scene.world
    taken = take_and_die()
    for name in FAULTS:
        # Whoever is to come to a boundary may take too long.
        scene.happened[name] = any(CLASSES[name](world) for _ in range(TRIES))
    topology.move_clock("worker", AHEAD_S, 0)
    scene.worker_was_ahead = wait_until(lambda: has_line_ahead(topology.log("worker", 0)), 30)
    topology.move_clock("worker", 0, 0)
    topology.move_clock("services", AHEAD_S)
    scene.services_were_ahead = wait_until(lambda: last_due_in_s(topology) > AHEAD_S, 30)
    topology.move_clock("services", 0)
    wait_until(lambda: last_due_in_s(topology) < 600, 30)
    scene.due_in_s = last_due_in_s(topology)
    scene.left = settle(world, WITHIN_S)
    scene.taken = read_run(taken).state_name or ""


def take_and_die() -> UUID:
    """A run that a worker has taken, which died before it had started it."""
    later = datetime.now(UTC) + timedelta(days=1)
    run = run_deployment(
        "matrix/matrix", parameters={"base": "tiny"}, scheduled_time=later, timeout=0, as_subflow=False
    )
    assert isinstance(run, FlowRun)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Submitting(), force=True)
    return run.id


def has_line_ahead(log: str) -> bool:
    """Whether a worker's last line was written at a time about an hour from now."""
    now = datetime.now()
    for line in log.splitlines()[-20:]:
        try:
            told = datetime.combine(now, datetime.strptime(line[:8], "%H:%M:%S").time())
        except ValueError:
            continue
        if timedelta(minutes=50) < (told - now) % timedelta(days=1) < timedelta(minutes=70):
            return True
    return False


def last_due_in_s(topology: Topology) -> float:
    """In how many seconds the scheduler of Prefect's server is due, which looks every minute."""
    url = topology.instances["services"][0].env["PREFECT_SERVER_DOCKET_URL"]
    client: Any = redis.from_url(url)
    with client:
        due = client.zscore("prefect:queue", "schedule_deployments")
    return 0.0 if due is None else float(due) - time.time()


def test_each_fault_happens(scene: Scene) -> None:
    assert scene.happened == dict.fromkeys(FAULTS, True)


def test_the_clocks_that_were_moved_are_seen_by_the_services(scene: Scene) -> None:
    assert scene.worker_was_ahead and scene.services_were_ahead


def test_schedules_go_on_when_the_clock_is_right_again(scene: Scene) -> None:
    """They stood still for as long as the clock had been ahead: flows/prefect_intervals.py."""
    assert scene.due_in_s < 600


def test_every_adapter_ends_as_it_should(scene: Scene) -> None:
    assert scene.left == []
    ledgers = {one.label: scene.world.read_ledger(one) for one in scene.world.sent}
    found = {
        label: (str(ledger.verdict.outcome), ledger.verdict.result.get("code"))
        for label, ledger in ledgers.items()
        if ledger is not None and ledger.verdict is not None
    }
    meant = {one.label: expected(one.kind) for one in scene.world.sent if expected(one.kind)[0] != "waiting"}
    assert found == meant
    assert len(found) >= len(FAULTS) - 1


def test_what_a_killed_run_had_found_is_not_done_again(scene: Scene) -> None:
    for one in scene.world.sent:
        ledger = scene.world.read_ledger(one)
        assert ledger is not None
        done = [(step.kind, step.step_key) for step in ledger.steps if step.outcome != "stopped"]
        # Whoever met too few opponents is scored again when there are more.
        once = [step for step in done if step[0] not in RESCORED]
        assert len(once) == len(set(once)), (one.label, done)


def test_a_run_whose_worker_died_before_it_began_is_called_dead(scene: Scene) -> None:
    """It stayed Submitting for ever, and so did the slot of a run that is one at a time for five minutes."""
    assert scene.taken == "Crashed"
