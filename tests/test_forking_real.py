"""The long-lived runner under a real Prefect server: what an operator does in the UI works on forked runs too."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import forking_flows
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling
from prefect.types.entrypoint import EntrypointType
from supervised_builders import wait_for

from flows.deploy import POOL, URGENT
from flows.embedded import start_detached, stop_embedded
from flows.embedded_config import EmbeddedConfig
from flows.guard import list_descendants
from flows.processes import read_start_ticks
from flows.services import Services
from flows.settings import base_environment

pytestmark = pytest.mark.real

PATIENCE_S = 120


@dataclass(frozen=True)
class Living:
    services: Services

    def start(self, name: str, folder: Path) -> FlowRun:
        parameters = {"folder": str(folder)}
        asked = run_deployment(f"{name}/{name}", parameters=parameters, timeout=0, as_subflow=False)
        assert isinstance(asked, FlowRun)
        return asked

    def wait_for_state(self, run: FlowRun, *names: str) -> None:
        wait_for(lambda: read(run).state_name in names, within_s=PATIENCE_S)

    def worker(self) -> tuple[int, int]:
        """The server of forks and its worker."""
        for pid in list_descendants(self.services.pid):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"flows.forking" in line and line[1] == b"-m":
                [worker] = [below for below in list_descendants(pid) if is_fork(below)][:1]
                return pid, worker
        raise LookupError("no server of forks")


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    home = tmp_path_factory.mktemp("forking") / "home"
    home.mkdir()
    config = EmbeddedConfig(home=home, engine_python=Path(sys.executable), worker_limit=2)
    environment = {**base_environment(), "PYTHONPATH": str(Path(__file__).parent)}
    try:
        services = start_detached(config, environment=environment, announce=print)
        with temporary_settings({PREFECT_API_URL: services.prefect.api_url}):
            flows = (
                (forking_flows.linger, None),
                (forking_flows.once_more, URGENT),
                (forking_flows.last_words, None),
            )
            for flow, queue in flows:
                deployment = flow.to_deployment(
                    name=flow.name, work_queue_name=queue, entrypoint_type=EntrypointType.MODULE_PATH
                )
                deployment.apply(work_pool_name=POOL)
            yield Living(services)
    finally:
        stop_embedded(home, timeout_s=90)


def is_fork(pid: int) -> bool:
    return b"fork_request" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def read(run: FlowRun) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run.id)


def begin(living: Living, folder: Path) -> tuple[FlowRun, list[int]]:
    """A run that goes on, and the pids of itself, its parent and its child."""
    run = living.start("linger", folder)
    wait_for((folder / "pids").exists, within_s=PATIENCE_S)
    return run, [int(pid) for pid in (folder / "pids").read_text().split()]


def have_ended(*pids: int) -> bool:
    return all(read_start_ticks(pid) is None for pid in pids)


def test_a_run_is_a_fork_that_may_still_use_a_gpu_and_whose_log_reaches_the_server(
    living: Living, tmp_path: Path
) -> None:
    run, [own, parent, below] = begin(living, tmp_path)
    server, _ = living.worker()
    assert parent == server
    # No CUDA before the fork, in which it could not be used: nothing of its driver is mapped or open.
    assert "libcuda" not in Path(f"/proc/{server}/maps").read_text()
    assert not [fd for fd in Path(f"/proc/{server}/fd").iterdir() if "nvidia" in str(fd.readlink())]
    said = f"lingering as one of {run.id}"

    def logged() -> bool:
        with get_client(sync_client=True) as client:
            found = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
        return said in [line.message for line in found]

    wait_for(logged, within_s=PATIENCE_S)
    assert said in living.services.logs["worker"].read_text()

    # Cancel, as in the UI: prefect#20979, #17593: what a run has started went on.
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Cancelling())
    living.wait_for_state(run, "Cancelled")
    wait_for(lambda: have_ended(own, below))
    assert not have_ended(server)


def test_what_a_run_says_last_is_sent_before_its_fork_ends(living: Living, tmp_path: Path) -> None:
    """Logs and events leave by threads, which a fork that ended by os._exit would take along."""
    for number in range(3):
        folder = tmp_path / f"last-{number}"
        run = living.start("last_words", folder)
        living.wait_for_state(run, "Completed")

        def told(run: FlowRun = run, name: str = folder.name) -> bool:
            wanted = {"filter": {"resource": {"id": [f"forking.{name}"]}}}
            with get_client(sync_client=True) as client:
                lines = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
                events = client.request("POST", "/events/filter", json=wanted).json()
            return f"last words from {name}" in [line.message for line in lines] and events["total"] == 1

        wait_for(told, within_s=30)


def test_retry_in_the_ui_repeats_the_run_by_the_urgent_queue(living: Living, tmp_path: Path) -> None:
    run = living.start("once_more", tmp_path)
    living.wait_for_state(run, "Failed")
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
    living.wait_for_state(run, "Completed")
    again = read(run)
    assert (again.run_count, again.work_queue_name) == (2, URGENT)


def test_a_killed_worker_or_server_takes_its_runs_along_and_is_started_anew(
    living: Living, tmp_path: Path
) -> None:
    for which in (1, 0):
        folder = tmp_path / str(which)
        folder.mkdir()
        _, [own, _, below] = begin(living, folder)
        killed = living.worker()[which]
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda pids=(killed, own, below): have_ended(*pids), within_s=30)
    folder = tmp_path / "after"
    folder.mkdir()
    run, _ = begin(living, folder)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Cancelling())
    living.wait_for_state(run, "Cancelled")
