from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - errors cross process borders this way
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised_builders import ENVIRONMENT, alive, wait_for

from flows.embedded import (
    EmbeddedFailedError,
    StopTimedOutError,
    run_embedded,
    start_detached,
    stop_embedded,
)
from flows.embedded_config import EmbeddedConfig, EngineSpec, OneShot
from flows.embedded_health import is_answering, is_engine_ready
from flows.embedded_kept import KEPT_FILE, keep
from flows.embedded_plan import StoreProgramMissingError, plan_children, port_names, store_service
from flows.ports import GRPC_OFFSET, NoFreePortError, is_free, pick_ports
from flows.processes import read_start_ticks
from flows.services import (
    LOCK_FILE,
    SERVICES_FILE,
    HomeBusyError,
    HomeLock,
    Owner,
    PrefectService,
    Services,
    StateUnreadableError,
    StoreService,
    is_locked,
    read_owner,
    read_services,
    this_process,
    utc_now,
    write_document,
)
from flows.settings import Settings
from flows.supervisor import ChildUnfitError
from flows.up import embedded_config
from storage.s3 import S3Store
from storage.trust import probe_store

NOTHING = OneShot("nothing", (sys.executable, "-S", "-c", "print('nothing to set up')"))
ENGINE = EngineSpec(
    base="tiny",
    model=Path("/models/tiny"),
    served_name="tiny-base",
    max_model_len=384,
    max_loras=3,
    max_lora_rank=8,
    max_cpu_loras=9,
    kv_cache_memory_bytes=64_000_000,
)


def config_for(
    home: Path, *engines: EngineSpec, one_shots: tuple[OneShot, ...] = (NOTHING,)
) -> EmbeddedConfig:
    python = home / "no-engine-here"
    return EmbeddedConfig(home=home, engine_python=python, engines=engines, one_shots=one_shots)


def services_of(owner: Owner) -> Services:
    return Services(
        pid=owner.pid,
        start_ticks=owner.start_ticks,
        started_at=utc_now(),
        store=StoreService(
            endpoint="http://127.0.0.1:1", bucket="roster", access_key="a", secret_key="s3cret", region="r"
        ),
        prefect=PrefectService(api_url="http://127.0.0.1:2/api", ui_url="http://127.0.0.1:2"),
        engines={"tiny": "http://127.0.0.1:3"},
        logs={"store": Path("/logs/store.log")},
    )


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


# Ports


def test_ports_are_distinct_free_and_kept() -> None:
    names = ("s3", "filer", "prefect")
    first = pick_ports(names, {})
    assert len(set(first.values())) == len(names)
    assert all(is_free(port) and is_free(port + GRPC_OFFSET) for port in first.values())
    assert pick_ports(names, first) == first


@pytest.mark.parametrize("offset", [0, GRPC_OFFSET])
def test_a_port_that_another_took_is_replaced_alone(offset: int) -> None:
    first = pick_ports(("s3", "filer"), {})
    with socket.create_server(("127.0.0.1", first["s3"] + offset)):
        second = pick_ports(("s3", "filer"), first)
    assert second["filer"] == first["filer"]
    assert second["s3"] not in first.values()


def test_no_free_port_says_where_was_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.ports.is_free", lambda port: False)
    with pytest.raises(
        NoFreePortError, match=r"no free port for s3: .*18000 and 22767.*127.0.0.1.*Stop"
    ) as caught:
        pick_ports(("s3",), {})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# What a home keeps


def test_a_home_keeps_credentials_to_itself_and_ports_of_engines_that_pause(tmp_path: Path) -> None:
    first = keep(tmp_path, ("s3", "engine-tiny"))
    assert (tmp_path / KEPT_FILE).stat().st_mode & 0o777 == 0o600
    second = keep(tmp_path, ("s3",))
    assert second == first
    assert len(first.secret_key) >= 32
    assert first.secret_key not in repr(first)
    assert keep(tmp_path / "another", ("s3",)).secret_key != first.secret_key


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / KEPT_FILE).write_text('{"schema": 1, "access_key": "a", "ports": {}}')
    with pytest.raises(
        StateUnreadableError, match=r"kept\.json.*secret_key: Field required.*roster up"
    ) as caught:
        keep(tmp_path, ("s3",))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# services.json and the lock


def test_services_are_those_of_a_living_supervisor(tmp_path: Path) -> None:
    assert read_services(tmp_path) is None
    services = services_of(this_process())
    write_document(tmp_path / SERVICES_FILE, services)
    assert read_services(tmp_path) == services
    assert (tmp_path / SERVICES_FILE).stat().st_mode & 0o777 == 0o600
    stored = json.loads((tmp_path / SERVICES_FILE).read_text())
    assert stored["schema"] == 1
    assert stored["store"]["secret_key"] == "s3cret"
    assert "s3cret" not in repr(services)


@pytest.mark.parametrize("shift", [-1, 1])
def test_another_process_with_the_recorded_pid_is_not_the_supervisor(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], shift: int
) -> None:
    ticks = read_start_ticks(sleeper.pid)
    assert ticks is not None
    stale = Owner(pid=sleeper.pid, start_ticks=ticks + shift)
    write_document(tmp_path / SERVICES_FILE, services_of(stale))
    write_document(tmp_path / LOCK_FILE, stale)
    assert read_services(tmp_path) is None
    assert read_owner(tmp_path) is None
    assert stop_embedded(tmp_path, timeout_s=1) is None
    assert sleeper.poll() is None


def test_a_zombie_is_not_a_supervisor(tmp_path: Path) -> None:
    dead = subprocess.Popen(["sleep", "600"])
    ticks = read_start_ticks(dead.pid)
    assert ticks is not None
    write_document(tmp_path / SERVICES_FILE, services_of(Owner(pid=dead.pid, start_ticks=ticks)))
    assert read_services(tmp_path) is not None
    dead.kill()
    wait_for(lambda: read_services(tmp_path) is None)
    dead.wait()


def test_a_second_start_names_the_first_and_its_addresses(tmp_path: Path) -> None:
    lock = HomeLock.take(tmp_path)
    with pytest.raises(HomeBusyError, match=f"process {os.getpid()}, and are still starting"):
        HomeLock.take(tmp_path)
    write_document(tmp_path / SERVICES_FILE, services_of(this_process()))
    for second in (
        lambda: run_embedded(config_for(tmp_path), threading.Event(), environment={}, announce=print),
        lambda: start_detached(config_for(tmp_path), environment={}, announce=print),
    ):
        with pytest.raises(HomeBusyError) as caught:
            second()
        message = str(pickle.loads(pickle.dumps(caught.value)))
        assert f"{tmp_path}: the embedded services run already, as process {os.getpid()}" in message
        assert "at http://127.0.0.1:2, http://127.0.0.1:1, http://127.0.0.1:3." in message
        assert "roster down" in message
    lock.release()
    HomeLock.take(tmp_path).release()


def test_the_lock_outlives_its_owner_with_what_inherited_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a killed supervisor's children end, the home is theirs: two stores would spoil one folder."""
    script = f"""
import subprocess
from pathlib import Path
from flows.services import HomeLock
lock = HomeLock.take(Path({str(tmp_path)!r}))
print(subprocess.Popen(["sleep", "600"], pass_fds=[lock.fd], stdout=-3, stderr=-3).pid)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    guard = int(ran.stdout)
    try:
        assert is_locked(tmp_path)
        assert read_owner(tmp_path) is None
        with pytest.raises(StopTimedOutError, match="supervisor ended, but a child runs still, 0 s"):
            stop_embedded(tmp_path, timeout_s=0.3)
        monkeypatch.setattr("flows.embedded._PREDECESSOR_S", 0.3)
        said: list[str] = []
        with pytest.raises(HomeBusyError, match="the last run have not ended yet"):
            run_embedded(config_for(tmp_path), threading.Event(), environment={}, announce=said.append)
        assert said == ["waiting for what an earlier run left to end"]
    finally:
        os.kill(guard, signal.SIGKILL)
    wait_for(lambda: not is_locked(tmp_path))


def test_stopping_only_asks_the_owner_and_waits(tmp_path: Path) -> None:
    script = f"""
import signal, sys, threading
from pathlib import Path
from flows.services import HomeLock
lock = HomeLock.take(Path({str(tmp_path)!r}))
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print("up", flush=True)
stop.wait()
lock.release()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    stopped = stop_embedded(tmp_path, timeout_s=10)
    assert stopped is not None
    assert stopped.pid == process.pid
    assert process.wait(5) == 0
    assert stop_embedded(tmp_path, timeout_s=10) is None
    process.stdout.close()


def test_a_stop_that_takes_too_long_says_what_still_runs(tmp_path: Path) -> None:
    deaf = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"], stdout=subprocess.PIPE
    )
    assert deaf.stdout is not None
    deaf.stdout.readline()
    ticks = read_start_ticks(deaf.pid)
    assert ticks is not None
    write_document(tmp_path / LOCK_FILE, Owner(pid=deaf.pid, start_ticks=ticks))
    with pytest.raises(StopTimedOutError) as caught:
        stop_embedded(tmp_path, timeout_s=0.2)
    deaf.kill()
    deaf.communicate()
    message = str(pickle.loads(pickle.dumps(caught.value)))
    assert message.startswith(f"{tmp_path}: the supervisor, process {deaf.pid}, runs still, 0 s after")
    assert "supervisor.log" in message


# The plan


def test_the_plan_waits_in_the_right_order_and_keeps_the_users_own_settings_out(tmp_path: Path) -> None:
    deploy, warm = OneShot("deploy", ("true",)), OneShot("warm", ("true",))
    config = config_for(tmp_path, ENGINE, one_shots=(deploy, warm))
    ports = pick_ports(port_names(config), {})
    store = store_service(config, ports, "key", "secret")
    mine = {
        "PATH": "/bin",
        "PREFECT_API_KEY": "cloud",
        "PREFECT_PROFILE": "cloud",
        "AWS_PROFILE": "work",
        "AWS_SESSION_TOKEN": "token",
        "VLLM_PLUGINS": "none",
        "PYTHONPATH": "/mine",
        "NO_PROXY": "intranet",
        "ROSTER_FLOOR_BPB": "0.01",
    }
    children = {child.name: child for child in plan_children(config, ports, store, mine, "worker-1")}
    assert {name: child.after for name, child in children.items()} == {
        "store": (),
        "prefect": (),
        "engine-tiny": ("store",),
        "deploy": ("store", "prefect"),
        "warm": ("store", "prefect", "deploy"),
        "qualify-tiny": ("store", "prefect", "deploy", "warm", "engine-tiny"),
        "worker": ("store", "prefect", "deploy", "warm", "qualify-tiny"),
    }
    for child in children.values():
        assert not {"PREFECT_API_KEY", "PREFECT_PROFILE", "AWS_PROFILE", "AWS_SESSION_TOKEN"} & set(child.env)
    worker, engine = children["worker"], children["engine-tiny"]
    assert worker.env["ROSTER_FLOOR_BPB"] == "0.01"
    assert worker.env["ROSTER_STORE_SECRET_KEY"] == "secret"
    assert worker.env["PREFECT_API_URL"] == f"http://127.0.0.1:{ports['prefect']}/api"
    # Runs do not ask for tokens of a server that wants none.
    assert worker.env["PREFECT_CLIENT_CSRF_SUPPORT_ENABLED"] == "false"
    assert "PREFECT_SERVER_CSRF_PROTECTION_ENABLED" not in worker.env
    assert worker.env["NO_PROXY"] == "intranet,127.0.0.1,localhost"
    assert not {"VLLM_PLUGINS", "PYTHONPATH"} & set(engine.env)
    assert engine.env["ADAPTER_ROSTER_ENGINE_BASE"] == "tiny"
    assert engine.env["ADAPTER_ROSTER_STORE_SECRET_KEY"] == "secret"
    assert str(ports["engine-tiny"]) in engine.argv
    qualify = children["qualify-tiny"]
    assert qualify.may_fail and not children["deploy"].may_fail
    assert f"http://127.0.0.1:{ports['engine-tiny']}" in qualify.argv and str(ENGINE.model) in qualify.argv
    assert qualify.env["ROSTER_STORE_SECRET_KEY"] == "secret"
    # No secret on a command line, where every user of the machine can read it.
    assert all("secret" not in word for child in children.values() for word in child.argv)


@pytest.mark.parametrize(
    ("family", "target_format", "flags"),
    [
        ("qwen3_moe", "per-expert", 0),
        ("qwen3_moe", "stacked", 1),
        # Its class takes stacked experts as they are, and single ones in mixed mode only (vllm#38520, vllm#40005).
        ("gpt_oss", "per-expert", 1),
        ("gpt_oss", "stacked", 1),
    ],
)
def test_an_engine_takes_both_forms_where_one_is_not_its_own(
    tmp_path: Path, family: str, target_format: str, flags: int
) -> None:
    golden = json.loads((Path(__file__).parent / "golden" / "families" / f"{family}.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(golden["config"]))
    config = embedded_config(
        Settings(home=tmp_path, engine_python=Path(sys.executable)),
        base="tiny",
        weights=tmp_path,
        max_model_len=384,
        max_loras=3,
        max_lora_rank=8,
        target_format=target_format,
    )
    ports = pick_ports(port_names(config), {})
    store = store_service(config, ports, "key", "secret")
    engine = next(c for c in plan_children(config, ports, store, {}, "w") if c.name == "engine-tiny")
    assert engine.argv.count("--enable-mixed-moe-lora-format") == flags


def test_a_relative_home_is_refused() -> None:
    with pytest.raises(ValueError, match=r"absolute path, not \.roster"):
        config_for(Path(".roster"))


def test_a_missing_store_program_is_named(tmp_path: Path) -> None:
    error = StoreProgramMissingError(Path("/venv/bin/python"))
    message = str(pickle.loads(pickle.dumps(error)))
    assert "`weed` is missing from the environment of /venv/bin/python" in message
    assert "./run setup" in message


INFO = json.loads((Path(__file__).parent.parent / "docs" / "examples" / "engine.json").read_text())
PUBLISHED = "INFO adapter-roster: engine.json published\n"
ACTIVE = "INFO adapter-roster: CPU expert LoRA active\n"


@pytest.mark.parametrize(
    ("log", "device", "lacks"),
    [
        (ACTIVE + PUBLISHED, "cpu", None),
        (PUBLISHED, "cuda", None),
        (PUBLISHED, "cpu", "the CPU expert-LoRA plugin did not load: .*CPU expert LoRA active"),
        (ACTIVE, "cpu", "our plugins did not load: .*engine.json published"),
        ("ERROR Failed to load plugin adapter_roster_publish\n", "cpu", "our plugins did not load"),
    ],
)
def test_an_engine_without_our_plugins_is_unfit(
    tmp_path: Path, log: str, device: str, lacks: str | None
) -> None:
    (tmp_path / "log").write_text(log)
    (tmp_path / "engine.json").write_text(json.dumps({**INFO, "device": device}))
    arguments = (tmp_path / "log", tmp_path / "engine.json")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/health"
        server.settimeout(5)
        thread = threading.Thread(target=_answer_once, args=(server,))
        thread.start()
        if lacks is None:
            assert is_engine_ready(url, *arguments)
        else:
            with pytest.raises(ChildUnfitError, match=f"{lacks}(.*run setup)?"):
                is_engine_ready(url, *arguments)
        thread.join()
    assert not is_engine_ready(url, *arguments)  # nothing answers any more


def _answer_once(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


# The real services


def post(url: str, body: object) -> object:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def open_store(services: Services) -> S3Store:
    store = services.store
    return S3Store.open(
        endpoint=store.endpoint,
        bucket=store.bucket,
        region=store.region,
        access_key=store.access_key,
        secret_key=store.secret_key,
    )


FLOW = """
import os, signal, time
from pathlib import Path
from prefect import flow

@flow
def sleep_long():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    here = Path(__file__).parent
    (here / "part").write_text(str(os.getpid()))
    (here / "part").replace(here / "running")
    time.sleep(600)

if __name__ == "__main__":
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.deployments.runner import EntrypointType
    from prefect.exceptions import ObjectAlreadyExists
    from sleeping import sleep_long as flow_by_module
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name="gpu", type="process"))
        except ObjectAlreadyExists:
            pass
    deployment = flow_by_module.to_deployment("long", entrypoint_type=EntrypointType.MODULE_PATH)
    deployment.apply(work_pool_name="gpu")
"""


@pytest.mark.real
def test_the_real_services_start_work_stop_and_start_again(tmp_path: Path) -> None:
    (tmp_path / "sleeping.py").write_text(FLOW)
    home = tmp_path / "home"
    deploy = OneShot("deploy", (sys.executable, str(tmp_path / "sleeping.py")))
    config = config_for(home, one_shots=(deploy,))
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    said: list[str] = []
    first = start_detached(config, environment=environment, announce=said.append)
    try:
        assert any("prefect: ready in" in line for line in said)
        assert first == read_services(home)
        assert is_answering(f"{first.prefect.api_url}/health")
        assert all(log.exists() for log in first.logs.values())
        store = open_store(first)
        probe_store(store)
        store.put("some/key", b"kept over restarts")

        deployment = json.load(
            urllib.request.urlopen(f"{first.prefect.api_url}/deployments/name/sleep-long/long", timeout=10)
        )
        asked = time.monotonic()
        post(
            f"{first.prefect.api_url}/deployments/{deployment['id']}/create_flow_run",
            {"state": {"type": "SCHEDULED"}},
        )
        wait_for((tmp_path / "running").exists, 60)
        print(f"from asking for a run to its first line: {time.monotonic() - asked:.1f} s")
        run = int((tmp_path / "running").read_text())
        assert run in alive(f"{home};worker;")
        assert os.getsid(run) != os.getsid(first.pid)
    finally:
        stopped = stop_embedded(home, timeout_s=90)
    assert stopped is not None
    assert stopped.pid == first.pid
    assert alive(f"{home};") == []
    assert read_start_ticks(run) is None
    assert read_services(home) is None
    assert not (home / SERVICES_FILE).exists()

    # Again, in this process: the same addresses and data; then the supervisor's own stop.
    stop = threading.Event()
    seen: list[Services] = []

    def look(services: Services) -> None:
        seen.append(services)
        assert open_store(services).get("some/key").body == b"kept over restarts"
        stop.set()

    run_embedded(config, stop, environment=environment, announce=said.append, on_ready=look)
    assert seen[0].addresses == first.addresses
    assert seen[0].store == first.store
    assert alive(f"{home};") == []


@pytest.mark.real
def test_giving_up_on_an_engine_leaves_nothing_running(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedFailedError) as caught:
        start_detached(config_for(tmp_path, ENGINE), environment=ENVIRONMENT, announce=print)
    message = str(caught.value)
    assert "engine-tiny: ended with exit status 127, 3 times" in message
    assert f"cannot run {tmp_path / 'no-engine-here'}: No such file or directory" in message
    assert str(tmp_path / "logs" / "supervisor.log") in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    assert alive(f"{tmp_path};") == []
    assert read_services(tmp_path) is None
