"""A process that has the flows imported, and forks itself for each flow run, which saves the seconds of importing.

`prefork.py serve SOCKET` is that process. `prefork.py run SOCKET` is what Prefect's process worker starts, in place of
`python -m prefect.engine`: it hands the run's environment, folder and output to the server and ends as the run ended.
"""

import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

SIZE = 1 << 20


def run(path: str) -> int:
    """The exit status of the flow run that this process's environment names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SIZE)
        server.connect(path)
        told = json.dumps({"env": dict(os.environ), "cwd": str(Path.cwd())}).encode()
        socket.send_fds(server, [told], [1, 2])
        return int(server.recv(16) or b"1")


def serve(path: str) -> int:
    """Fork for every request, for ever. Everything that a flow run imports is imported before the first.

    In a fork: its exit status.
    """
    from prefect._internal import metrics  # noqa: F401

    import flows.onboard
    import flows.sweep
    import flows.sync  # noqa: F401

    # Nobody waits for those that watch; their own children are waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        while True:
            request, _ = listener.accept()
            if os.fork() == 0:
                return _run_forked(request)
            request.close()


def _run_forked(request: socket.socket) -> int:
    """Run one flow run in a child of its own, and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told, outputs, _, _ = socket.recv_fds(request, SIZE, 2)
    child = os.fork()
    if child == 0:
        request.close()
        _become(json.loads(told), outputs)
        runpy.run_module("prefect.engine", run_name="__main__")
        return 0
    _, status = os.waitpid(child, 0)
    with suppress(BrokenPipeError):  # the worker has ended whom it would have told
        request.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(told: dict[str, Any], outputs: list[int]) -> None:
    """Take the place of the process that the worker started."""
    from prefect.context import refresh_global_settings_context

    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(told["env"])
    os.chdir(told["cwd"])
    refresh_global_settings_context()
    sys.argv = ["prefect.engine"]


if __name__ == "__main__":
    sys.exit(run(sys.argv[2]) if sys.argv[1] == "run" else serve(sys.argv[2]))
