"""What a worker starts in place of a flow run's interpreter: it has the run forked off one that is warm.

Run as a script, by path, on the standard library alone (`python -I -S fork_request.py ADDRESS`): so it starts in 20 ms
and takes 10 MB. The server at ADDRESS (flows/fork_server.py) reads environment and working folder from this process,
gets its output, and is told when it is to stop; the run ends with this process, and this process as the run ended.
Where no server answers, it becomes an interpreter that imports everything itself.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import FrameType

FORKED = b"forked"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(address: str) -> int:
    """The exit status of the flow run that this process's environment names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            server.connect(f"\0{address}")
            socket.send_fds(server, [b"run"], [1, 2])
            _pass_signals_on(server)
            forked = server.recv(len(FORKED)) == FORKED
        except OSError:
            forked = False
        if not forked:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, "-m", "prefect.engine"])
        try:
            ended = int(server.recv(16) or -signal.SIGTERM)
        except ConnectionResetError:
            ended = -signal.SIGTERM
    if ended < 0:
        # The worker tells by the signal what became of the run.
        if -ended not in {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    return ended


def _pass_signals_on(server: socket.socket) -> None:
    def pass_on(number: int, frame: FrameType | None) -> None:
        try:
            server.send(b"stop")
        except OSError:
            return  # the server has ended, and with it the run

    for number in SIGNALS:
        signal.signal(number, pass_on)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
