"""A small parent for one child: whatever happens, the child and everything it started end.

Run as a script, by path, on the standard library alone (`python -I -S guard.py PARENT GRACE ARGV…`): so it
starts in 30 ms, takes 10 MB and cannot be broken by what its child breaks. The guard is a child subreaper: a
process can leave its parent, its group and its session, but not the guard's tree. When the child ends, when
the guard is told to stop (SIGTERM, SIGINT, SIGHUP; a second one means at once), or when the supervisor dies,
even by SIGKILL, the whole tree gets SIGTERM, `GRACE` seconds, then SIGKILL until nothing is left. If the
guard itself is killed, the kernel kills the child.

Source: prctl(2), PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CANNOT_RUN = 127
SIGNAL_STATUS = 128  # a child ended by signal N is reported as exit status 128 + N, as shells do
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HANDLED = (*STOP_SIGNALS, signal.SIGCHLD)
# A shell's `&` and nohup leave these ignored, and an ignored signal stays ignored across exec.
RESET = (*HANDLED, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ)
_POLL_S = 0.05


def run_guarded(parent: int, grace_s: float, argv: Sequence[str]) -> int:
    """The exit status of `argv` after its whole tree has ended (128 + N when signal N ended it).

    `parent` is the pid that must be our parent still: it guards the moment between fork and prctl.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    if os.getppid() != parent:
        return SIGNAL_STATUS + signal.SIGTERM
    child = _fork_child(argv)
    status = _wait_for_end_or_stop(child)
    return _end_tree(child, status, grace_s)


def _fork_child(argv: Sequence[str]) -> int:
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        if os.getppid() != guard:
            os._exit(SIGNAL_STATUS + signal.SIGKILL)
        # The supervisor's lock on its home comes in as an open file: the guard keeps it, the child must not.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.execvp(argv[0], tuple(argv))
    except OSError as error:
        print(f"cannot run {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(CANNOT_RUN)


def _wait_for_end_or_stop(child: int) -> int | None:
    """The child's exit status, or None when asked to stop first."""
    while True:
        # A timeout, not a plain wait: a SIGCHLD merged with another must not be missed.
        received = signal.sigtimedwait(HANDLED, 1.0)
        status = _reap(child)
        if status is not None:
            return status
        if received is not None and received.si_signo in STOP_SIGNALS:
            return None


def _end_tree(child: int, status: int | None, grace_s: float) -> int:
    for pid in list_descendants(os.getpid()):
        _kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while True:
        reaped = _reap(child)
        status = reaped if reaped is not None else status
        living = list_descendants(os.getpid())
        if not living:
            return SIGNAL_STATUS + signal.SIGTERM if status is None else status
        if time.monotonic() >= deadline:
            for pid in living:
                _kill(pid, signal.SIGKILL)
        received = signal.sigtimedwait(HANDLED, _POLL_S)
        if received is not None and received.si_signo in STOP_SIGNALS:
            deadline = time.monotonic()


def _reap(child: int) -> int | None:
    """Collect every ended process; the status of `child` if it was among them."""
    status = None
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            code = os.waitstatus_to_exitcode(wait_status)
            status = code if code >= 0 else SIGNAL_STATUS - code


def list_descendants(root: int) -> list[int]:
    """The pids below `root`, from one look at /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            children.setdefault(_read_parent(entry.name), []).append(int(entry.name))
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _read_parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123 - pathlib would double the start time
            # The name, in brackets, may hold spaces and brackets; after it come the state and the parent.
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended while we looked


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended while we looked


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}) failed: {os.strerror(number)}; embedded services need Linux")


if __name__ == "__main__":
    sys.exit(run_guarded(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
