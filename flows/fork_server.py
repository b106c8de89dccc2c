"""A process that forks itself for whoever asks, and ends the forks with those who asked for them.

What a fork then does is its caller's to say (flows/forking.py); who asks is fork_request.py.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from flows import fork_request
from flows.guard import PR_SET_PDEATHSIG, SIGNAL_STATUS
from flows.processes import read_environment

# The time that runs get to write down that they were stopped, after their worker has ended.
_GRACE_S = 5.0
_PEER = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Request:
    """What a fork is to become: the process that asked for it, but for its pid."""

    environment: dict[str, str]
    folder: str
    outputs: tuple[int, int]


@dataclass(eq=False, slots=True)
class _Run:
    """A process that asked, and the fork that it has; pid 0: none yet."""

    connection: socket.socket
    pid: int = 0
    ended: int = -1  # the fork's pidfd, readable when it has ended
    # It was told to stop: a second time would break off what it writes down about that.
    stopping: bool = False


class ForkServer:
    """Forks this process for whoever asks at `address`, for as long as the worker lives.

    Only processes of the same user are answered. Use it from the main thread of a process that has no other.
    """

    def __init__(self) -> None:
        """Listen; nobody is answered yet."""
        self.address = f"adapter-roster-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # In Linux's abstract namespace: no file, whose path could be too long, and which could be left behind.
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._runs: list[_Run] = []

    def serve(self, worker: int) -> Request | None:
        """None once the process `worker`, a child, has ended; in a fork, at once, what it is to become."""
        ended = os.pidfd_open(worker)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(ended, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._admit()
                elif key.fileobj == ended:
                    os.close(ended)
                    self._listener.close()
                    return None
                elif key.fd == key.data.ended:
                    self._report(key.data)
                elif key.data in self._runs and (request := self._hear(key.data)) is not None:
                    os.close(ended)
                    return request

    def end(self) -> None:
        """End the runs that are left: SIGTERM, a few seconds, SIGKILL."""
        for run in list(self._runs):
            if run.pid:
                if run.connection in self._selector.get_map():
                    self._selector.unregister(run.connection)  # nothing that is said there matters any more
                self._stop(run)
            else:
                self._drop(run)
        deadline = time.monotonic() + _GRACE_S
        while self._runs and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if isinstance(key.data, _Run) and key.fd == key.data.ended:
                    self._report(key.data)
        for run in self._runs:
            _signal_group(run.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of what is open, for a child, without a word to anybody."""
        self._selector.close()
        self._listener.close()
        for run in self._runs:
            run.connection.close()
            if run.pid:
                os.close(run.ended)

    def _admit(self) -> None:
        connection, _ = self._listener.accept()
        _, user, _ = _peer(connection)
        if user != os.getuid():
            connection.close()
            return
        run = _Run(connection)
        self._runs.append(run)
        self._selector.register(connection, selectors.EVENT_READ, run)

    def _hear(self, run: _Run) -> Request | None:
        """Fork, tell the run to stop, or end the run of a process that has ended; in a fork, what it is to become."""
        if not run.pid:
            return self._fork(run)
        try:
            told = run.connection.recv(1)
        except ConnectionResetError:
            told = b""
        if told:
            self._stop(run)
        else:
            self._selector.unregister(run.connection)
            _signal_group(run.pid, signal.SIGKILL)
        return None

    def _fork(self, run: _Run) -> Request | None:
        server, request = os.getpid(), None
        try:
            request = _read_request(run.connection)
            pid = os.fork()
        except OSError as error:  # it has ended meanwhile, or there can be no more processes
            print(f"no fork; the run goes on by itself: {error}", file=sys.stderr, flush=True)
            _close_outputs(request)
            self._drop(run)
            return None
        if pid == 0:
            self.close()
            end_with(server)
            return request
        _close_outputs(request)
        run.pid, run.ended = pid, os.pidfd_open(pid)
        self._selector.register(run.ended, selectors.EVENT_READ, run)
        _tell(run, fork_request.FORKED)
        return None

    def _stop(self, run: _Run) -> None:
        if run.pid and not run.stopping:
            run.stopping = True
            os.kill(run.pid, signal.SIGTERM)

    def _report(self, run: _Run) -> None:
        """Tell how a run has ended, and end what it leaves behind."""
        # While it is not waited for, nobody else can get its number.
        _signal_group(run.pid, signal.SIGKILL)
        _, status = os.waitpid(run.pid, 0)
        _tell(run, str(os.waitstatus_to_exitcode(status)).encode())
        self._selector.unregister(run.ended)
        os.close(run.ended)
        self._drop(run)

    def _drop(self, run: _Run) -> None:
        if run.connection in self._selector.get_map():
            self._selector.unregister(run.connection)
        run.connection.close()
        self._runs.remove(run)


def end_with(parent: int) -> None:
    """Lead a group of our own, and get SIGTERM when `parent` ends."""
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(SIGNAL_STATUS + signal.SIGTERM)


def _read_request(connection: socket.socket) -> Request:
    _, outputs, _, _ = socket.recv_fds(connection, 16, 2)
    if len(outputs) != 2:
        message = "the process that asked has ended"
        raise ConnectionResetError(message)
    asker, _, _ = _peer(connection)
    try:
        folder = str(Path(f"/proc/{asker}/cwd").readlink())
        return Request(read_environment(asker), folder, (outputs[0], outputs[1]))
    except OSError:
        for output in outputs:
            os.close(output)
        raise


def _close_outputs(request: Request | None) -> None:
    for output in request.outputs if request is not None else ():
        os.close(output)


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Pid, user and group of the process at the other end. Source: unix(7), SO_PEERCRED."""
    pid, user, group = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user, group


def _tell(run: _Run, message: bytes) -> None:
    try:
        run.connection.send(message)
    except OSError:
        return  # the process that asked has ended


def _signal_group(leader: int, number: int) -> None:
    """Signal a fork that nobody has waited for, and its group, which it leads from its first moment but one."""
    if not leader:
        return
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        os.kill(leader, number)
