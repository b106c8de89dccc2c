"""The embedded services of one machine: object store, Prefect, worker, engines, as children of one process.

`python -m flows.embedded --config FILE` runs them until SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from flows.embedded_config import EmbeddedConfig
from flows.embedded_kept import keep
from flows.embedded_plan import (
    StoreProgramMissingError,
    engine_urls,
    plan_children,
    port_names,
    prefect_service,
    store_service,
)
from flows.embedded_restarts import count_restart
from flows.ports import NoFreePortError
from flows.services import (
    SERVICES_FILE,
    HomeBusyError,
    HomeLock,
    Owner,
    Services,
    StateUnreadableError,
    busy,
    is_locked,
    read_owner,
    read_services,
    this_process,
    utc_now,
    write_document,
)
from flows.settings import base_environment
from flows.supervisor import ChildFailedError, Supervisor, rotate_log

UNAVAILABLE = 3  # the exit status of `roster` when something it needs is unavailable
SUPERVISOR = "supervisor"
_CONFIG_FILE = "embedded.json"
_PROGRESS_TIME = "%H:%M:%S"
_POLL_S = 0.1
_EXPECTED = (ChildFailedError, HomeBusyError, NoFreePortError, StateUnreadableError, StoreProgramMissingError)
_PREDECESSOR_S = 45.0  # the longest that a killed supervisor's children may take to end


class EmbeddedFailedError(Exception):
    """The services that were to run in the background did not come up; nothing of them is left running."""

    def __init__(self, status: int, log: Path, reason: str) -> None:
        """Keep the supervisor's exit status, its log and what it said."""
        self.status = status
        self.log = log
        self.reason = reason
        super().__init__(status, log, reason)

    def __str__(self) -> str:
        """Repeat the supervisor's reason and name its log."""
        head = f"the embedded services did not start (exit status {self.status}, log {self.log})."
        return f"{head}\n{self.reason}"


class StopTimedOutError(Exception):
    """The services did not end in the time given."""

    def __init__(self, home: Path, pid: int | None, timeout_s: float) -> None:
        """Keep the home, the supervisor's pid (None: it ended, some child did not) and the seconds waited."""
        self.home = home
        self.pid = pid
        self.timeout_s = timeout_s
        super().__init__(home, pid, timeout_s)

    def __str__(self) -> str:
        """Name what still runs, and what to do."""
        what = f"supervisor, process {self.pid}, runs" if self.pid else "supervisor ended, but a child runs"
        return (
            f"{self.home}: the {what} still, {self.timeout_s:.0f} s after being told to stop. Wait and try "
            f"again; its log is {self.home / 'logs' / SUPERVISOR}.log. SIGKILL for the supervisor ends all."
        )


@dataclass(frozen=True, slots=True)
class Stopped:
    """What was ended: the supervisor's pid (None: only its children were left), in how many seconds."""

    pid: int | None
    seconds: float


def run_embedded(
    config: EmbeddedConfig,
    stop: threading.Event,
    *,
    environment: Mapping[str, str],
    announce: Callable[[str], None],
    on_ready: Callable[[Services], None] | None = None,
) -> None:
    """Start everything, write services.json, tell `on_ready`, watch until `stop` is set, then end everything.

    `environment` is what the children's environments are built from. The calling thread must live as long as
    the children.

    Raises:
        HomeBusyError: another supervisor runs on this home.
        ChildFailedError: a child failed too often. As after any exception, nothing is left running.
        StoreProgramMissingError, NoFreePortError, StateUnreadableError: nothing was started.
    """
    lock = _take_lock(config.home, announce)
    services_file = config.home / SERVICES_FILE
    try:
        services_file.unlink(missing_ok=True)
        kept = keep(config.home, port_names(config))
        store = store_service(config, kept.ports, kept.access_key, kept.secret_key)
        owner = this_process()
        worker_name = f"embedded-{owner.pid}-{owner.start_ticks}"
        specs = plan_children(config, kept.ports, store, environment, worker_name)
        services = Services(
            pid=owner.pid,
            start_ticks=owner.start_ticks,
            started_at=utc_now(),
            store=store,
            prefect=prefect_service(kept.ports),
            engines=engine_urls(config, kept.ports),
            logs={SUPERVISOR: config.log_of(SUPERVISOR)} | {spec.name: spec.log for spec in specs},
        )
        supervisor = Supervisor(
            specs,
            announce=announce,
            mark=str(config.home),
            restarted=partial(count_restart, config.home),
            hold=(lock.fd,),
        )
        if supervisor.start(stop):
            try:
                write_document(services_file, services)
                announce("everything is ready")
                if on_ready is not None:
                    on_ready(services)
                supervisor.run_until(stop)
            finally:
                services_file.unlink(missing_ok=True)
                supervisor.stop()
    finally:
        lock.release()


def start_detached(
    config: EmbeddedConfig, *, environment: Mapping[str, str], announce: Callable[[str], None]
) -> Services:
    """Start everything in a process of its own that outlives us, and wait until it is healthy.

    `announce` gets the supervisor's progress. A Ctrl-C meanwhile stops what was started.

    Raises:
        HomeBusyError: a supervisor runs on this home.
        EmbeddedFailedError: it gave up; its reason holds the failing child's last log lines.
    """
    if read_owner(config.home) is not None:
        raise busy(config.home)
    log = config.log_of(SUPERVISOR)
    rotate_log(log)
    config_file = config.home / _CONFIG_FILE
    config_file.write_bytes(TypeAdapter(EmbeddedConfig).dump_json(config, indent=1))
    with log.open("wb") as stream:
        process = subprocess.Popen(
            (sys.executable, "-m", "flows.embedded", "--config", str(config_file)),
            env=environment,
            cwd=config.home,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _wait_until_ready(config, process, log, announce)
    except BaseException:
        process.terminate()
        process.wait()
        raise


def stop_embedded(home: Path, *, timeout_s: float) -> Stopped | None:
    """End the services of this home; None if none run.

    Only the very process that holds the home is told to stop, never another that got its pid.

    Raises:
        StopTimedOutError: something still runs after `timeout_s` seconds.
    """
    started = time.monotonic()
    owner = read_owner(home)
    if owner is None and not is_locked(home):
        return None
    if owner is not None and not _terminate(owner, timeout_s):
        raise StopTimedOutError(home, owner.pid, timeout_s)
    while is_locked(home):
        if time.monotonic() - started > timeout_s:
            raise StopTimedOutError(home, None, timeout_s)
        time.sleep(_POLL_S)
    return Stopped(owner.pid if owner is not None else None, time.monotonic() - started)


def _terminate(owner: Owner, timeout_s: float) -> bool:
    """Tell the owner to stop; whether it ended in time."""
    try:
        handle = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return True
    try:
        if (
            not owner.is_alive
        ):  # asked again: from here on the handle keeps the pid from meaning another process
            return True
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        ended, _, _ = select.select([handle], [], [], timeout_s)
        return bool(ended)
    finally:
        os.close(handle)


def _take_lock(home: Path, announce: Callable[[str], None]) -> HomeLock:
    deadline = time.monotonic() + _PREDECESSOR_S
    told = False
    while True:
        try:
            return HomeLock.take(home)
        except HomeBusyError as held:
            if held.pid is not None or time.monotonic() > deadline:
                raise
        if not told:
            announce("waiting for what an earlier run left to end")
            told = True
        time.sleep(_POLL_S)


def _wait_until_ready(
    config: EmbeddedConfig, process: subprocess.Popen[bytes], log: Path, announce: Callable[[str], None]
) -> Services:
    with log.open(encoding="utf-8", errors="replace") as lines:
        other: list[str] = []
        while True:
            ended = process.poll()
            for line in lines:
                if _is_progress(line):
                    announce(line.rstrip())
                else:
                    other.append(line)
            if ended is not None:
                raise EmbeddedFailedError(ended, log, "".join(other).rstrip())
            services = read_services(config.home)
            if services is not None and services.pid == process.pid:
                return services
            time.sleep(_POLL_S)


def _is_progress(line: str) -> bool:
    try:
        datetime.strptime(line.partition(" ")[0], _PROGRESS_TIME)
    except ValueError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the services that the config file describes, in the foreground, until SIGTERM, SIGHUP or Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m flows.embedded", description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="an EmbeddedConfig as JSON")
    config = TypeAdapter(EmbeddedConfig).validate_json(parser.parse_args(arguments).config.read_bytes())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    try:
        run_embedded(config, stop, environment=base_environment(), announce=_print_progress)
    except _EXPECTED as failure:
        print(failure, file=sys.stderr, flush=True)
        return UNAVAILABLE
    return 0


def _print_progress(line: str) -> None:
    print(f"{time.strftime(_PROGRESS_TIME)} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
