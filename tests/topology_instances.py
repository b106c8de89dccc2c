"""What a service of docker-compose.yml is on this machine: program, settings, folders, one process under a guard."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from compose_builders import Service, move_environment, move_text, name_hosts
from engine_builders import engine_python

from flows import guard
from flows.embedded_plan import find_store_program
from flows.guard import list_descendants
from flows.ports import GRPC_OFFSET, LOOPBACK
from roster.serving_engine import engine_environment

MARK = "ROSTER_TOPOLOGY"  # in the environment of all that a topology starts; the value is its folder
PROGRAMS = ("postgres", "initdb", "pg_isready", "redis-server", "redis-cli")
POSTGRES_USER = "postgres"  # who runs Postgres where the tests are run by root, for whom it does not start
STORE_PARTS = ("master", "volume", "filer", "s3", "admin")
_VERSIONS = Path("/usr/lib/postgresql")
_BIN = Path(sys.executable).parent
_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")  # Debian's faketime
_MOVED_CLOCK = Path(__file__).with_name("moved_clock")
_GUARD_GRACE_S = 5.0
_HEALTH_S = 10.0
_POLL_S = 0.05


def missing_programs() -> list[str]:
    """Which of the programs of Debian's postgresql and redis-server are not installed here."""
    return [name for name in PROGRAMS if find_program(name) is None]


def has_faketime() -> bool:
    """Whether a service's clock can be moved here."""
    return _FAKETIME.exists()


def clock_environment(file: Path) -> dict[str, str]:
    """What makes a Python program see the clock that `file` moves; nothing is moved yet."""
    if not has_faketime():
        raise FileNotFoundError(f"{_FAKETIME} is not there: apt-get install faketime")
    set_clock(file, 0)
    return {
        "LD_PRELOAD": str(_FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",  # seconds; without, every look at the clock reads the file
        # What measures how long something takes is not to jump.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        # Python compiles anew what its cache has another time of, and writes that time into the cache.
        "NO_FAKE_STAT": "1",
        "PYTHONPATH": str(_MOVED_CLOCK),
    }


def set_clock(file: Path, seconds: int) -> None:
    """Move it by so many seconds from the right time; it is never found half written."""
    moved = file.with_suffix(".new")
    moved.write_text(f"{seconds:+d}\n")
    moved.replace(file)


@cache
def find_program(name: str) -> Path | None:
    """Where a program lies: Debian keeps Postgres's outside the PATH, a folder for each version."""
    found = shutil.which(name)
    versions = sorted(_VERSIONS.glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    candidates = [folder / name for folder in versions] + ([Path(found)] if found else [])
    return next((path for path in candidates if path.exists()), None)


def _program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: apt-get install postgresql redis-server")
    return str(found)


@dataclass(slots=True)
class Instance:
    """One container's place: its command here, and the guard that runs it."""

    service: Service
    argv: tuple[str, ...]
    health: tuple[str, ...]
    env: dict[str, str]
    cwd: Path
    log: Path
    guard: subprocess.Popen[bytes] | None = None
    main: int = 0  # the pid of what is process 1 in a container
    starts: int = 0  # since it was asked for, by the topology or by a test

    def start(self) -> None:
        self.cwd.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        with self.log.open("ab") as log:
            self.guard = subprocess.Popen(
                (
                    sys.executable,
                    "-I",
                    "-S",
                    guard.__file__,
                    str(os.getpid()),
                    str(_GUARD_GRACE_S),
                    *self.argv,
                ),
                env=self.env,
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        children = Path(f"/proc/{self.guard.pid}/task/{self.guard.pid}/children")
        while self.guard.poll() is None:
            with suppress(FileNotFoundError, ProcessLookupError):
                if words := children.read_text().split():
                    self.main = int(words[0])
                    return
            time.sleep(0.005)

    @property
    def runs(self) -> bool:
        return self.guard is not None and self.guard.poll() is None

    def is_healthy(self) -> bool:
        """Whether it runs and passes the health check of docker-compose.yml, if it has one."""
        if not self.runs or not self.health:
            return self.runs
        if self.health[0] == "nc":  # which may not be installed here
            return is_listening(int(self.health[-1]))
        try:
            done = subprocess.run(
                self.health, env=self.env, cwd=self.cwd, capture_output=True, timeout=_HEALTH_S, check=False
            )
        except subprocess.TimeoutExpired:  # which docker counts as a failure too
            return False
        return done.returncode == 0

    def stop(self) -> None:
        """As docker stops a container: its signal to process 1, the grace, then SIGKILL for all."""
        self.starts = 0
        if self.guard is None:
            return
        if self.runs:
            number = self.service.stop_signal or ("SIGINT" if self.service.name == "postgres" else "SIGTERM")
            _send(self.main, signal.Signals[number])
            with suppress(subprocess.TimeoutExpired):
                self.guard.wait(self.service.stop_grace_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL for all its processes at once, as the end of a machine."""
        if self.guard is None:
            return
        while self.runs:
            below = list_descendants(self.guard.pid)
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in below:
                    _send(pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.guard.wait(_POLL_S)
        self.guard.wait()
        if "LD_PRELOAD" in self.env:  # of libfaketime, whose first process gives the name
            for name in ("faketime_shm_", "sem.faketime_sem_"):
                Path(f"/dev/shm/{name}{self.guard.pid}").unlink(missing_ok=True)


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything is on this machine. ports: (service, port in the container) → port here.

    further_ports: the same with the number of a second or later instance, which listens elsewhere.
    postgres: the folder of its data, which Postgres's user can reach. clocks: whose clock follows a file.
    """

    services: Mapping[str, Service]
    ports: Mapping[tuple[str, int], int]
    further_ports: Mapping[tuple[str, int, int], int]
    store_ports: Mapping[str, int]
    folder: Path
    postgres: Path
    clocks: frozenset[str]

    def instance(self, name: str, number: int, more: Mapping[str, str]) -> Instance:
        """One instance of a service; `more` goes before its settings."""
        service = self.services[name]
        names = name_hosts(self.services)
        ports = {
            (other, port): self.further_ports.get((other, port, number), here) if other == name else here
            for (other, port), here in self.ports.items()
        }
        cwd = self.postgres if name == "postgres" else self.folder / f"{name}-{number}"
        moved = _Folders({target: self._volume(source, number) for target, source in service.volumes.items()})
        told = {key: moved(text) for key, text in move_environment(service, names, ports).items()} | dict(
            more
        )
        words = [moved(move_text(word, name, names, ports)) for word in service.command]
        env = {
            "PATH": os.pathsep.join((str(_BIN), str(Path(_program("postgres")).parent), os.environ["PATH"])),
            "LANG": "C.UTF-8",
            "HOME": str(cwd),
            "PREFECT_HOME": str(cwd / "prefect"),
            "PYTHONUNBUFFERED": "1",
            "DO_NOT_TRACK": "1",
            MARK: str(self.folder),
            **told,
        }
        for key in ("PREFECT_HOME", "ROSTER_HOME"):
            if not env.get(key, "").startswith(str(self.folder)):
                env[key] = str(cwd / key.partition("_")[0].lower())
        if name in self.clocks:
            env |= clock_environment(self.folder / f"{name}-{number}.clock")
        health = tuple(move_text(word, name, names, ports) for word in service.health)
        if health and health[0] == "nc":
            health = (*health[:-1], str(ports[name, int(health[-1])]))
        argv = [str(_BIN / words[0]), *words[1:]] if words else []
        match name:
            case "postgres":
                argv, env = self._plan_postgres(env)
            case "redis":
                port = str(ports[name, 6379])
                argv = [_program(words[0]), *words[1:], "--bind", LOOPBACK, "--port", port, "--dir", str(cwd)]
                health = tuple(word.replace("redis-cli", f"redis-cli -p {port}") for word in health)
            case "store":
                argv = self._plan_store(words)
            case "prefect":
                argv += ["--port", str(ports[name, 4200])]
            case "engine-cpu":
                argv = [str(engine_python()), *words[1:], f"--port={ports[name, 8000]}"]
                env = engine_environment(threads=1, engine_json=cwd / "engine.json") | env
        return Instance(service, tuple(argv), health, env, cwd, self.folder / f"{name}-{number}.log")

    def _volume(self, source: str, number: int) -> Path:
        if source.startswith((".", "/")):
            return Path(source)
        return self.folder / "volumes" / f"{source}-{number}"

    def _plan_postgres(self, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        port = str(self.ports["postgres", 5432])
        data = str(self.postgres / "data")
        argv = [*as_postgres(), _program("postgres"), "-D", data, "-h", LOOPBACK, "-p", port, "-k", ""]
        return argv, env | {"PGHOST": LOOPBACK, "PGPORT": port}

    def _plan_store(self, words: list[str]) -> list[str]:
        # The last of two equal flags counts. Sockets lie in the folder it runs in; their default is /tmp.
        flags = [f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        flags += ["-master.telemetry=false", "-volume.preStopSeconds=0"]
        flags += [f"-{part}.port={port}" for part, port in self.store_ports.items()]
        flags += [f"-{part}.port.grpc={port + GRPC_OFFSET}" for part, port in self.store_ports.items()]
        flags += [f"-{part}.localSocket={part}.sock" for part in ("filer", "s3")]
        return [str(find_store_program()), *words, *flags]


@dataclass(frozen=True, slots=True)
class _Folders:
    """Volumes' paths in texts, replaced by the folders that stand for them; these are made."""

    folders: Mapping[str, Path]

    def __call__(self, text: str) -> str:
        for target in sorted(self.folders, key=len, reverse=True):
            if target in text:
                self.folders[target].mkdir(parents=True, exist_ok=True)
                text = text.replace(target, str(self.folders[target]))
        return text


def as_postgres() -> list[str]:
    """What goes before a command so that Postgres's own user runs it, where we are root."""
    if os.geteuid() != 0:
        return []
    user = f"--reuid={POSTGRES_USER}", f"--regid={POSTGRES_USER}"
    return ["setpriv", *user, "--clear-groups", "--pdeathsig=keep"]


def make_postgres(plan: Plan, instance: Instance) -> None:
    """An empty cluster with the user and the database that its settings name, as the image makes one."""
    told, folder = instance.env, plan.postgres
    password = folder / "password"
    password.touch(mode=0o600)
    password.write_text(told["POSTGRES_PASSWORD"])
    if os.geteuid() == 0:
        for path in (folder, password):
            shutil.chown(path, POSTGRES_USER)
    user, database, data = (
        told["POSTGRES_USER"],
        told.get("POSTGRES_DB", told["POSTGRES_USER"]),
        folder / "data",
    )
    options = ["--no-sync", "--auth=scram-sha-256", f"--pwfile={password}", f"--username={user}"]
    options += ["--encoding=UTF8", "--locale=C.UTF-8", f"--pgdata={data}"]
    made = [*as_postgres(), _program("initdb"), *options]
    subprocess.run(made, env=told, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    if database != "postgres":
        alone = [*as_postgres(), _program("postgres"), "--single", "-D", str(data), "postgres"]
        statement = f'CREATE DATABASE "{database}";\n'.encode()
        subprocess.run(alone, input=statement, env=told, cwd=folder, check=True, capture_output=True)


@contextmanager
def postgres_folder() -> Iterator[Path]:
    """A folder that Postgres's user can reach, unlike those that pytest makes for root."""
    folder = Path(tempfile.mkdtemp(prefix="roster-postgres-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def is_listening(port: int) -> bool:
    """Whether something takes connections on this port of loopback."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0
