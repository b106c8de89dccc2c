"""Memory and CPU time of a process with all that it has started, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flows.guard import list_descendants

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tree holds and has used: memory in MiB, each shared page counted once in parts, CPU time in seconds."""

    memory_mib: float
    cpu_s: float
    processes: int


def measure_tree(root: int) -> Usage:
    """Memory of the living processes, CPU time of these and of all that they have waited for."""
    pids = [root, *list_descendants(root)]
    return Usage(
        memory_mib=round(sum(map(_proportional_kib, pids)) / 1024, 1),
        cpu_s=round(sum(map(_cpu_ticks, pids)) / _TICKS, 2),
        processes=len(pids),
    )


def find_child(parent: int, part: str) -> int:
    """The child of `parent` whose command line has this part.

    Raises:
        LookupError: there is none.
    """
    for pid in list_descendants(parent):
        if part in _read(pid, "cmdline").replace("\0", " "):
            return pid
    message = f"process {parent} has no child with {part!r} in its command line"
    raise LookupError(message)


def _proportional_kib(pid: int) -> int:
    lines = _read(pid, "smaps_rollup").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _cpu_ticks(pid: int) -> int:
    # After the name, in brackets: utime, stime, cutime and cstime are fields 14 to 17. Source: proc_pid_stat(5).
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) if fields else 0


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has ended meanwhile
