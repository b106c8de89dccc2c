"""What the embedded services say of themselves (`<home>/services.json`), and the lock on their home."""

from __future__ import annotations

import fcntl
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.processes import is_same_process, read_start_ticks
from roster.serving_engine import EngineInfo

SERVICES_FILE = "services.json"
LOCK_FILE = "supervisor.lock"
_Document = TypeVar("_Document", bound=BaseModel)


class StateUnreadableError(Exception):
    """A file that the supervisor wrote into its home is no longer what it wrote."""

    def __init__(self, path: Path, problem: str) -> None:
        """Keep the file and what is wrong with it."""
        self.path = path
        self.problem = problem
        super().__init__(path, problem)

    def __str__(self) -> str:
        """Name the file, the problem and the way out."""
        return (
            f"{self.path} does not hold what the embedded services wrote there: {self.problem}. "
            "Stop them with `roster down`, delete the file and start them again with `roster up`."
        )


class HomeBusyError(Exception):
    """Another supervisor runs on this home, or its children have not ended yet."""

    def __init__(self, home: Path, pid: int | None, addresses: tuple[str, ...]) -> None:
        """Keep the home, the pid (None: only what it started still ends) and the addresses it serves."""
        self.home = home
        self.pid = pid
        self.addresses = addresses
        super().__init__(home, pid, addresses)

    def __str__(self) -> str:
        """Name the process, where its services are and what to do."""
        if self.pid is None:
            return f"{self.home}: the services of the last run have not ended yet. Try again in a moment."
        where = f"at {', '.join(self.addresses)}" if self.addresses else "and are still starting"
        return (
            f"{self.home}: the embedded services run already, as process {self.pid}, {where}. "
            "Use them, stop them with `roster down`, or choose another home with ROSTER_HOME."
        )


class _State(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(1, alias="schema")


class Owner(_State):
    """The supervisor of a home; `start_ticks` tells it from a later process with the same pid."""

    pid: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs."""
        return is_same_process(self.pid, self.start_ticks)


class StoreService(BaseModel):
    """Where the object store is and how to enter it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str = Field(repr=False)
    region: str


class PrefectService(BaseModel):
    """Where the Prefect server is: its API, and its pages for people."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_url: str
    ui_url: str


class Services(_State):
    """services.json, there while everything runs: who supervises, since when, and all addresses and logs."""

    pid: int
    start_ticks: int
    started_at: datetime  # UTC, to the second
    store: StoreService
    prefect: PrefectService
    engines: dict[str, str]  # base to the URL of its engine
    logs: dict[str, Path]  # child to its log

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address, for people."""
        return (self.prefect.ui_url, self.store.endpoint, *self.engines.values())

    def engine_log(self, base: str) -> Path | None:
        """The log of the engine of a base; its child is named as in flows/embedded_plan.py."""
        return self.logs.get(f"engine-{base}")


def read_services(home: Path) -> Services | None:
    """The services that run on this home; None if there are none (a dead supervisor's file counts as none).

    Raises:
        StateUnreadableError: services.json is damaged.
    """
    services = read_document(home / SERVICES_FILE, Services)
    return services if services is not None and is_same_process(services.pid, services.start_ticks) else None


def read_untested(home: Path, services: Services) -> dict[str, tuple[str, ...]]:
    """By base, what of its running engine's way of serving nobody has verified; bases without such are left out.

    Raises:
        StateUnreadableError: an engine.json is damaged.
    """
    told = {base: read_document(engine_json_path(home, base), EngineInfo) for base in services.engines}
    return {base: info.untested for base, info in told.items() if info is not None and info.untested}


def engine_json_path(home: Path, base: str) -> Path:
    """Where the embedded engine of a base writes what it says of itself."""
    return home / "engines" / f"{base}.json"


def read_owner(home: Path) -> Owner | None:
    """The supervisor that runs on this home, from its first moment to its last; None if there is none.

    Raises:
        StateUnreadableError: the lock file is damaged.
    """
    owner = read_document(home / LOCK_FILE, Owner)
    return owner if owner is not None and owner.is_alive else None


class HomeLock:
    """The right to supervise a home, held until this process and all who inherited `fd` have ended."""

    def __init__(self, home: Path, fd: int) -> None:
        """Made by `take`."""
        self.home = home
        self.fd = fd

    @classmethod
    def take(cls, home: Path) -> HomeLock:
        """The lock, with this process written down as the owner.

        Raises:
            HomeBusyError: another process holds it.
        """
        home.mkdir(parents=True, exist_ok=True)
        fd = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise busy(home) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, this_process().model_dump_json().encode(), 0)
        return cls(home, fd)

    def release(self) -> None:
        """Close our copy; once every guard has ended, the home is free."""
        os.ftruncate(self.fd, 0)
        os.close(self.fd)


def is_locked(home: Path) -> bool:
    """Whether a supervisor, or anything it started, still runs on this home."""
    path = home / LOCK_FILE
    if not path.exists():
        return False
    with path.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def busy(home: Path) -> HomeBusyError:
    """The error that says who runs on this home."""
    owner = read_owner(home)
    services = read_services(home)
    return HomeBusyError(home, owner.pid if owner else None, services.addresses if services else ())


def this_process() -> Owner:
    """This process, as an owner."""
    pid = os.getpid()
    ticks = read_start_ticks(pid)
    if ticks is None:
        message = f"/proc/{pid}/stat cannot be read; embedded services need Linux with /proc"
        raise OSError(message)
    return Owner(pid=pid, start_ticks=ticks)


def utc_now() -> datetime:
    """Now, in UTC, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


def read_document(path: Path, model: type[_Document]) -> _Document | None:
    """The document in a file of the home; None if there is no such file or it is empty.

    Raises:
        StateUnreadableError: the file holds something else.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    if not text:
        return None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StateUnreadableError(path, f"{where or 'the whole'}: {first['msg']}") from error


def write_document(path: Path, document: BaseModel) -> None:
    """Put the document in place at once, on the disk, readable by its owner alone (it may hold secrets)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    with os.fdopen(fd, "w", encoding="utf-8") as stream:
        stream.write(document.model_dump_json(indent=1) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    Path(name).replace(path)
