"""What /proc says about processes, and ending those that carry a mark in their environment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_POLL_S = 0.02


def read_start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it is gone or a zombie.

    A pid with its start time names one process: pids are used again.
    Source: proc_pid_stat(5), fields 3 and 22.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if after_name[0] in (b"Z", b"X") else int(after_name[19])


def is_same_process(pid: int, start_ticks: int) -> bool:
    """Whether the process that had this pid and start time still runs."""
    return read_start_ticks(pid) == start_ticks


def list_marked(variable: str, beginning: str) -> list[int]:
    """The pids whose environment at exec held `variable` with a value of this beginning.

    A child inherits the mark, whatever it does to its parent, group or session. Processes of other users are
    not seen.
    """
    mark = f"{variable}={beginning}".encode()
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and any(item.startswith(mark) for item in _read_environment(entry))
    ]


def end_marked(variable: str, beginning: str, *, within_s: float) -> list[int]:
    """SIGKILL for every marked process until none is left; the pids that were killed.

    Raises:
        TimeoutError: some still run after `within_s` seconds (a process in uninterruptible sleep).
    """
    killed: set[int] = set()
    deadline = time.monotonic() + within_s
    while marked := list_marked(variable, beginning):
        if time.monotonic() > deadline:
            message = f"processes {marked} do not end on SIGKILL; look at them with `ps -o pid,stat,cmd`"
            raise TimeoutError(message)
        for pid in marked:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        time.sleep(_POLL_S)
    return sorted(killed)


def read_environment(pid: int) -> dict[str, str]:
    """The environment that the process was started with.

    Raises:
        OSError: the process has ended, or is another user's.
    """
    items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(item).partition("=") for item in items if item)
    return {name: value for name, _, value in pairs}


def _read_environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
