"""The processes that the chaos bench kills: those of flow runs, found below their worker; and what docker would do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from bench.chaos_world import World
from bench.prefect_runs import ask, cancel
from bench.tiny_world import kept_with_tests
from flows.guard import list_descendants
from flows.processes import read_environment, read_start_ticks

_RUN = "PREFECT__FLOW_RUN_ID"
_ASKER = b"fork_request.py"
_GONE_S = 10.0
_TRIES = 4
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RunProcess:
    """The process in which a flow run is at work: a fork of the worker with this number."""

    pid: int
    flow_run: str
    worker: int


def list_runs(topology: Any) -> list[RunProcess]:
    """The flow runs at work on all workers.

    A fork has the pipes of the process that asked for it (flows/fork_request.py), which the run is named to.
    """
    found = []
    for number, instance in enumerate(topology.instances["worker"]):
        below = list_descendants(instance.main) if instance.runs else []
        asked = {}
        for pid in below:
            with suppress(OSError):
                if _ASKER in Path(f"/proc/{pid}/cmdline").read_bytes():
                    asked[_output(pid)] = read_environment(pid).get(_RUN, "")
        for pid in below:
            with suppress(OSError):
                if _ASKER not in Path(f"/proc/{pid}/cmdline").read_bytes() and _output(pid) in asked:
                    found.append(RunProcess(pid, asked[_output(pid)], number))
    return found


def find_asking(main: int) -> int | None:
    """The process that asks Prefect for runs, below the one that forks, which writes to the same log."""
    for pid in list_descendants(main):
        with suppress(OSError):
            if _output(pid) == _output(main):
                return pid
    return None


def kill(world: World, pid: int) -> bool:
    """SIGKILL for a process, and return when it is gone; whether it lived.

    Raises:
        TimeoutError: it is not gone after seconds.
    """
    ticks = read_start_ticks(pid)
    if ticks is None:
        return False
    world.note_killed(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if not wait_until(lambda: read_start_ticks(pid) != ticks, _GONE_S):
        message = f"process {pid} does not end on SIGKILL"
        raise TimeoutError(message)
    return True


def restart(world: World, name: str, number: int = 0) -> None:
    """Start a service anew, again and again as docker does: what it needs may itself be coming up.

    Raises:
        TopologyFailed: it does not come up even so.
    """
    failed = kept_with_tests("topology_builders").TopologyFailed
    for tries_left in reversed(range(_TRIES)):
        try:
            world.topology.restart(name, number)
        except failed:
            if not tries_left:
                raise
        else:
            return


def ask_for(deployment: str, **parameters: str) -> str | None:
    """The id of a run of a deployment that was asked for; None where Prefect cannot take it just now."""
    try:
        return str(ask(deployment, **parameters))
    except Exception:  # noqa: BLE001 - whatever it says while it, its database or Redis has just been killed
        return None


def call_off(flow_run: str | None) -> None:
    """Cancel a run that was asked for in vain, if Prefect can be reached: those that wait keep others waiting."""
    if flow_run is not None:
        with suppress(Exception):  # of whatever kind, as in `ask_for`
            cancel(UUID(flow_run))


def revive(world: World) -> list[str]:
    """Start what has ended by itself and is to run all the time, as docker does; the names of these services.

    Raises:
        TopologyFailed: one does not come up.
    """
    revived = []
    for name in world.topology.long_running:
        for number, instance in enumerate(world.topology.instances[name]):
            if not instance.runs:
                restart(world, name, number)
                revived.append(name)
    return revived


def wait_until(condition: Callable[[], object], within_s: float) -> bool:
    """Whether the condition held before so many seconds were over."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _output(pid: int) -> Path:
    return Path(f"/proc/{pid}/fd/1").readlink()
