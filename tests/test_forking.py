"""The fork server and what asks it for forks, with a stand-in for the flow run; test_forking_real.py has real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from supervised_builders import wait_for

from flows import fork_request
from flows.embedded_config import EmbeddedConfig
from flows.embedded_plan import plan_children, port_names, store_service
from flows.processes import read_start_ticks

pytestmark = pytest.mark.real

CLIENT = Path(fork_request.__file__)
ROOT = Path(__file__).resolve().parent.parent
# A server whose forks do what the environment says that they were asked with.
SERVER = """
import os, signal, subprocess, sys, time
from pathlib import Path
import flows.fork_server
flows.fork_server._GRACE_S = 1.0
server, us = flows.fork_server.ForkServer(), os.getpid()
worker = os.fork()
if worker == 0:
    server.close()
    flows.fork_server.end_with(us)
    time.sleep(600)
print(server.address, worker, flush=True)
request = server.serve(worker)
if request is None:
    server.end()
    print("the end", flush=True)
    sys.exit(0)
for number, output in enumerate(request.outputs, start=1):
    os.dup2(output, number)
told = request.environment
if told["PLAY"] == "tell":
    print("at work in", request.folder, "for", told["WHOM"], flush=True)
    sys.exit(7)
if told["PLAY"] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if told["PLAY"] == "stop":
    signal.signal(signal.SIGTERM, lambda *_: (Path(told["FILE"] + ".stopped").touch(), time.sleep(0.1), sys.exit(0)))
if told["PLAY"] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen(["sleep", "600"])
Path(told["FILE"] + ".part").write_text(f"{os.getpid()} {below.pid}")
Path(told["FILE"] + ".part").rename(told["FILE"])
time.sleep(600)
"""


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[str]
    address: str
    worker: int

    def ask(self, folder: Path, **told: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(CLIENT), self.address],
            env={"PATH": os.environ["PATH"], **told},
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, folder: Path, play: str) -> tuple[subprocess.Popen[str], list[int]]:
        """Who asked, and the pids of the run and of what that has started."""
        asker = self.ask(folder, PLAY=play, FILE=str(folder / play))
        wait_for((folder / play).exists)
        return asker, [int(pid) for pid in (folder / play).read_text().split()]


def start() -> Served:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    address, worker = process.stdout.readline().split()
    return Served(process, address, int(worker))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = start()
    yield served
    os.kill(served.worker, signal.SIGKILL)
    assert served.process.wait(10) == 0


@pytest.fixture
def another() -> Iterator[Served]:
    served = start()
    yield served
    served.process.kill()
    served.process.wait()


def have_ended(*pids: int) -> bool:
    return all(read_start_ticks(pid) is None for pid in pids)


def test_a_fork_has_the_place_of_the_process_that_asked(served: Served, tmp_path: Path) -> None:
    asker = served.ask(tmp_path, PLAY="tell", WHOM="author-17")
    said, _ = asker.communicate(timeout=10)
    assert (said, asker.returncode) == (f"at work in {tmp_path} for author-17\n", 7)


def test_the_worker_sees_by_which_signal_a_run_ended(served: Served, tmp_path: Path) -> None:
    assert served.ask(tmp_path, PLAY="die").wait(10) == -signal.SIGKILL


def test_cancelling_stops_the_run_once_and_what_it_started(served: Served, tmp_path: Path) -> None:
    """Prefect ends the process that it has started; the run is told, and its children do not stay."""
    asker, pids = served.begin(tmp_path, "stop")
    asker.send_signal(signal.SIGTERM)
    asker.send_signal(signal.SIGINT)
    assert asker.wait(10) == 0
    assert (tmp_path / "stop.stopped").exists()
    wait_for(lambda: have_ended(*pids))


def test_a_run_ends_with_a_killed_asker(served: Served, tmp_path: Path) -> None:
    asker, pids = served.begin(tmp_path, "deaf")
    asker.kill()
    asker.wait()
    wait_for(lambda: have_ended(*pids))


def test_all_runs_end_with_the_worker(another: Served, tmp_path: Path) -> None:
    runs = [another.begin(tmp_path, play) for play in ("stop", "deaf")]
    os.kill(another.worker, signal.SIGKILL)
    assert another.process.wait(10) == 0
    wait_for(lambda: have_ended(*(pid for _, pids in runs for pid in pids)))
    assert (tmp_path / "stop.stopped").exists()
    assert all(asker.wait(10) in {0, -signal.SIGTERM} for asker, _ in runs)


def test_worker_and_runs_end_with_a_killed_server(another: Served, tmp_path: Path) -> None:
    asker, pids = another.begin(tmp_path, "stop")
    another.process.kill()
    assert asker.wait(10) == -signal.SIGTERM
    wait_for(lambda: have_ended(another.worker, pids[0]))
    os.kill(pids[1], signal.SIGKILL)  # under the supervisor, its guard ends what a run has started


def test_without_a_server_the_run_starts_by_itself(tmp_path: Path) -> None:
    stub = tmp_path / "prefect"
    stub.mkdir()
    (stub / "__init__.py").touch()
    (stub / "engine.py").write_text("import sys; print('by itself'); sys.exit(5)")
    ran = subprocess.run(
        [sys.executable, "-I", "-S", str(CLIENT), "nobody-listens-here"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    assert (ran.stdout, ran.returncode) == ("by itself\n", 5)


# The worker


def test_only_this_worker_starts_its_runs_by_forks() -> None:
    """Nothing of it is in pool or deployment; a deployment that names a command keeps it."""
    from prefect.client.schemas.objects import FlowRun
    from prefect.workers.base import BaseWorker
    from prefect.workers.process import ProcessWorker

    from flows.fork_worker import make_worker

    worker = make_worker("ask for a fork", pool="gpu", name="w", limit=2)
    assert (worker.type, worker.name) == ("process", "w")
    assert BaseWorker.get_worker_class_from_type("process") is ProcessWorker
    run = FlowRun.model_construct(id="r", name="n", flow_id="f", deployment_id=None, tags=[], labels={})
    for own, expected in ((None, "ask for a fork"), ("python -m own", "python -m own")):
        configuration = worker.job_configuration(command=own)
        configuration.prepare_for_flow_run(run)
        assert configuration.command == expected


LATE = """
import os, sys
import flows.forking as forking
late, forking.LATE = forking.LATE, ()
forking.import_flows()
before, threads = set(sys.modules), len(os.listdir("/proc/self/task"))
print(*(name for name in late if name in before))
forking.LATE = late
forking.import_flows()
print(len(set(sys.modules) - before), len(os.listdir("/proc/self/task")) - threads)
"""


def test_what_every_run_imports_late_is_there_before_the_fork() -> None:
    """Each of them brings something that the flows do not; none of them starts a thread."""
    ran = subprocess.run([sys.executable, "-c", LATE], cwd=ROOT, capture_output=True, text=True, check=True)
    already, counts = ran.stdout.splitlines()
    modules, threads = map(int, counts.split())
    assert (already, threads) == ("", 0)
    assert modules > 60


@pytest.mark.parametrize(("warm", "module"), [(True, "flows.forking"), (False, "prefect")])
def test_the_embedded_services_start_it(tmp_path: Path, warm: bool, module: str) -> None:
    config = EmbeddedConfig(home=tmp_path, engine_python=tmp_path, warm_worker=warm)
    ports = {name: 20_000 + number for number, name in enumerate(port_names(config))}
    store = store_service(config, ports, "access", "secret")
    worker = plan_children(config, ports, store, {}, "worker-1")[-1]
    assert (worker.name, worker.argv[1:3]) == ("worker", ("-m", module))
    assert {"--pool", "gpu", "--limit", "2", "--name", "worker-1"} < set(worker.argv)


# The server's transactions

CONFLICT = """
import sys
from sqlalchemy import create_engine
import flows.prefect_server as server
if sys.argv[2] == "turns":
    server.take_turns()
engine = create_engine(f"sqlite:///{sys.argv[1]}", connect_args={"timeout": 0.2, "isolation_level": None})
with engine.connect() as one, engine.connect() as two:
    one.exec_driver_sql("PRAGMA journal_mode = WAL")
    one.exec_driver_sql("CREATE TABLE t (n)")
    one.exec_driver_sql("BEGIN DEFERRED")
    print(one.exec_driver_sql("SELECT count(*) FROM t").scalar())
    for step, connection in ((1, two), (2, one)):
        try:
            connection.exec_driver_sql(f"INSERT INTO t VALUES ({step})")
            print(step, "wrote")
        except Exception as error:
            print(step, error.orig)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("as it is", ["0", "1 wrote", "2 database is locked"]),
        ("turns", ["0", "1 database is locked", "2 wrote"]),
    ],
)
def test_a_transaction_that_has_read_may_write(tmp_path: Path, how: str, said: list[str]) -> None:
    """prefect#10188, #17473: who has read cannot write once another has. With turns the other waits, here in vain."""
    ran = subprocess.run(
        [sys.executable, "-c", CONFLICT, str(tmp_path / "db"), how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split("\n")[:-1] == said
