"""The services of docker-compose.yml as processes of this machine: same commands, settings, order and health checks.

Only what a container brings is put in its place: images become the programs that are installed here, the services'
addresses become free ports on loopback, volumes become folders. Scripted engines of a test are no part of it.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from compose_builders import COMPLETED, COMPOSE, HEALTHY, Service, find_addresses, read_services
from store_builders import SeaweedFS
from topology_instances import (
    MARK,
    STORE_PARTS,
    Instance,
    Plan,
    make_postgres,
    postgres_folder,
    set_clock,
)

from demo.authors import BASE_NAME
from flows.ports import GRPC_OFFSET, LOOPBACK, pick_ports
from flows.processes import list_marked

# What a tiny model needs: the context of the demo's base is 512, compose's default 2048.
ENGINE = {
    "ENGINE_BASE": BASE_NAME,
    "ENGINE_MAX_MODEL_LEN": "256",
    "ENGINE_KV_CACHE_BYTES": str(1 << 26),
    "ENGINE_MAX_LORAS": "2",
    "ENGINE_MAX_LORA_RANK": "8",
    "ENGINE_MAX_CPU_LORAS": "8",
}
_STORE_PORT = 8333
_FOREIGN = ("postgres", "redis", "store")  # they run no image of ours, and keep all the data
_START_S = 300.0  # a fifth of it where nothing else runs
_STARTS = 3  # of a service that ends while it is waited for
_CHECK_S = 0.3  # a check by Python takes as much time from what it waits for
_TAIL = 3_000


class TopologyFailed(Exception):
    """A service did not come up, or ended: the end of its log tells why."""


@dataclass(frozen=True)
class Topology:
    """The running services. Use it from the thread that made it: what another thread starts ends with that thread.

    environment: for `roster`, `flows.deploy` and Prefect's client in a test. homes: the workers'.
    """

    services: Mapping[str, Service]
    instances: Mapping[str, list[Instance]]
    plan: Plan
    environment: dict[str, str]
    ends: list[float] = field(default_factory=list)  # the time at which taking it down began

    @property
    def folder(self) -> Path:
        return self.plan.folder

    @property
    def homes(self) -> list[Path]:
        return [Path(one.env["ROSTER_HOME"]) for one in self.instances["worker"]]

    @property
    def api_url(self) -> str:
        return self.environment["PREFECT_API_URL"]

    @property
    def auth(self) -> str:
        return self.environment["PREFECT_API_AUTH_STRING"]

    @property
    def store(self) -> SeaweedFS:
        """The store itself, whatever stands between it and the workers."""
        [instance] = self.instances["store"]
        assert instance.guard is not None
        told = instance.env
        endpoint = f"http://{LOOPBACK}:{self.plan.ports['store', _STORE_PORT]}"
        return SeaweedFS(endpoint, told["AWS_ACCESS_KEY_ID"], told["AWS_SECRET_ACCESS_KEY"], instance.guard)

    @property
    def redis_url(self) -> str:
        """Where the server keeps its events and leases."""
        told = self.instances["prefect"][0].env
        names = ("PASSWORD", "HOST", "PORT", "DB")
        password, host, port, number = (told[f"PREFECT_REDIS_MESSAGING_{name}"] for name in names)
        return f"redis://:{password}@{host}:{port}/{number}"

    @property
    def long_running(self) -> list[str]:
        """The services that are to run all the time, in the order in which they were started."""
        return [name for name in self.instances if _runs_on(self.services[name])]

    def pids(self, service: str) -> list[int]:
        """What is process 1 of each instance that runs; `flows.guard.list_descendants` tells what is below."""
        return [one.main for one in self.instances[service] if one.runs]

    def kill(self, service: str, index: int = 0) -> None:
        """SIGKILL for all processes of this instance; nothing but `restart` starts it again."""
        self.instances[service][index].kill()

    def restart(self, service: str, index: int = 0) -> None:
        """Stop it as docker does, if it runs; start it again; return when it is healthy.

        Raises:
            TopologyFailed: it ended again, or was not healthy in time.
        """
        instance = self.instances[service][index]
        instance.stop()
        instance.start()
        deadline = time.monotonic() + _START_S
        while not instance.is_healthy():
            _require_hope(instance, deadline)
            time.sleep(_CHECK_S)

    def is_healthy(self, service: str) -> bool:
        """Whether all its instances run and pass the health check of docker-compose.yml, if there is one."""
        return all(one.is_healthy() for one in self.instances[service])

    def log(self, service: str, index: int | None = None) -> str:
        """What its instances, or one of them, have written since the topology came up."""
        chosen = self.instances[service] if index is None else [self.instances[service][index]]
        return "".join(one.log.read_text("utf-8", errors="replace") for one in chosen if one.log.exists())

    def clock(self, service: str, index: int = 0) -> Path:
        """The file that moves the clock of a service named in `faketime`: "+3600" and "-60" are seconds."""
        return Path(self.instances[service][index].env["FAKETIME_TIMESTAMP_FILE"])

    def move_clock(self, service: str, seconds: int, index: int = 0) -> None:
        """Have a service named in `faketime` see a clock that is so many seconds ahead, from the next second on."""
        set_clock(self.clock(service, index), seconds)

    def leftovers(self) -> tuple[list[int], list[int]]:
        """The processes of ours that run, and the ports of ours that somebody listens on who began before the end.

        A port that is free again may be the next one that a test beside this one picks.
        """
        # Postgres writes over its environment; but it stands in its data.
        pids = set(list_marked(MARK, str(self.plan.folder))) | set(_list_inside(self.plan.postgres))
        plan = self.plan
        ports = {*plan.ports.values(), *plan.further_ports.values(), *plan.store_ports.values()}
        ended = self.ends[0] if self.ends else math.inf
        listening = {port for port, began in _list_listeners() if began is None or began < ended}
        return sorted(pids), sorted(ports & listening)


@contextmanager
def start_topology(
    folder: Path,
    *,
    workers: int = 2,
    store_endpoint: Callable[[str], str] | None = None,
    faketime: Sequence[str] = (),
    engine: Path | None = None,
    variables: Mapping[str, str] | None = None,
    file: Path = COMPOSE,
) -> Iterator[Topology]:
    """The services without a profile, with `engine` those of the profile cpu too, for as long as the block runs.

    workers: how many, each with a home of its own. store_endpoint: what the workers are given for the store's own
    endpoint. faketime: the services whose clock can be moved. engine: the folder with the model it serves, under the
    demo's base's name.
    variables: settings to add to those of the services that run our image.

    Raises:
        TopologyFailed: a service did not come up. As after any error, nothing is left running.
    """
    told = {name: secrets.token_hex(16) for name in re.findall(r"\$\{(\w+):\?", file.read_text("utf-8"))}
    told |= ENGINE | ({"ENGINE_MODEL_DIR": str(engine)} if engine else {})
    services = read_services(told.get, profiles=("cpu",) if engine else (), file=file)
    addresses = sorted(find_addresses(services))
    further = [
        ("worker", port, number)
        for name, port in addresses
        if name == "worker"
        for number in range(1, workers)
    ]
    wanted = [*addresses, *further]
    picked = pick_ports([*STORE_PARTS, *map(str, wanted)], {})
    ports = {address: picked[str(address)] for address in addresses}
    ports["store", _STORE_PORT] = picked["s3"]
    with postgres_folder() as postgres:
        plan = Plan(
            services=services,
            ports=ports,
            further_ports={address: picked[str(address)] for address in further},
            store_ports={part: picked[part] for part in STORE_PARTS},
            folder=folder,
            postgres=postgres,
            clocks=frozenset(faketime),
        )
        instances = {
            name: [
                plan.instance(name, number, _more(name, plan, variables or {}, store_endpoint))
                for number in range(workers if name == "worker" else 1)
            ]
            for name in _in_order(services)
        }
        environment = plan.instance("deploy", 9, {}).env
        topology = Topology(services, instances, plan, environment)
        make_postgres(plan, instances["postgres"][0])
        try:
            _bring_up(topology)
            yield topology
        finally:
            _take_down(topology)


def _more(
    name: str, plan: Plan, variables: Mapping[str, str], store_endpoint: Callable[[str], str] | None
) -> dict[str, str]:
    if name in _FOREIGN or name.startswith("engine"):
        return {}
    more = dict(variables)
    if name == "worker" and store_endpoint is not None:
        more["ROSTER_STORE_ENDPOINT"] = store_endpoint(
            f"http://{LOOPBACK}:{plan.ports['store', _STORE_PORT]}"
        )
    return more


def _in_order(services: Mapping[str, Service]) -> list[str]:
    """The services, each after those that it waits for."""
    ordered: list[str] = []
    while len(ordered) < len(services):
        ordered += [
            name for name, one in services.items() if name not in ordered and set(one.after) <= set(ordered)
        ]
    return ordered


def _runs_on(service: Service) -> bool:
    return service.restart != "no"


def _bring_up(topology: Topology) -> None:
    """Start every service when those that it waits for are as its conditions say, and wait until all are."""
    waiting = list(topology.instances)
    as_wished: set[str] = set()
    deadline = time.monotonic() + _START_S
    while len(as_wished) < len(topology.instances):
        for name in list(waiting):
            after = topology.services[name].after
            if all(
                other in as_wished or (how not in (HEALTHY, COMPLETED) and other not in waiting)
                for other, how in after.items()
            ):
                waiting.remove(name)
                for instance in topology.instances[name]:
                    instance.start()
        for name in topology.instances:
            if name not in waiting and name not in as_wished and _is_as_wished(topology, name, deadline):
                as_wished.add(name)
                break  # what waited for it starts now, before the next check takes its time
        else:
            time.sleep(_CHECK_S)


def _is_as_wished(topology: Topology, name: str, deadline: float) -> bool:
    if _runs_on(topology.services[name]):
        if topology.is_healthy(name):
            return True
    elif all(one.guard is not None and one.guard.poll() == 0 for one in topology.instances[name]):
        return True
    for instance in topology.instances[name]:
        _require_hope(instance, deadline)
    return False


def _require_hope(instance: Instance, deadline: float) -> None:
    """Return if it may yet be as it should; what runs all the time is started again some times, as docker does it."""
    status = instance.guard.poll() if instance.guard is not None else None
    on = _runs_on(instance.service)
    if status is not None and on and instance.starts < _STARTS and time.monotonic() < deadline:
        instance.start()
    elif (status is not None and (on or status != 0)) or time.monotonic() > deadline:
        how = "was not healthy in time" if status is None else f"ended with {status}"
        raise TopologyFailed(f"{instance.service.name} {how}:\n{instance.log.read_text()[-_TAIL:]}")


def _take_down(topology: Topology) -> None:
    """End everything; Postgres is told to, so that nothing of it stays in shared memory."""
    topology.ends.append(time.time())
    for name in reversed(list(topology.instances)):
        for instance in topology.instances[name]:
            if name == "postgres":
                instance.stop()
            instance.kill()
    for part, port in topology.plan.store_ports.items():
        with suppress(FileNotFoundError):
            Path(f"/tmp/seaweedfs-{part}-grpc-{port + GRPC_OFFSET}.sock").unlink()


def _list_listeners() -> Iterator[tuple[int, float | None]]:
    """The ports that are listened on, and when the process that does so was started; None if nobody can tell."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            began = None
            with suppress(psutil.Error):
                began = psutil.Process(connection.pid).create_time() if connection.pid else None
            yield connection.laddr.port, began


def _list_inside(folder: Path) -> list[int]:
    """The processes whose working folder lies in this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if (entry / "cwd").readlink().is_relative_to(folder):
                    found.append(int(entry.name))
    return found
