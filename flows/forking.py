"""The long-lived runner: a worker whose flow runs fork off an interpreter that has imported them.

`python -m flows.forking` imports the flows once, which takes seconds, and forks Prefect's worker; the worker then
starts each flow run by fork_request.py, which asks this process for a fork. One tree, one life: when the worker ends,
so do the runs; when this process ends, even by SIGKILL, so do both. What is imported is what was there at the start:
after an update of the code, start it anew.

Nothing here may touch CUDA or start a thread before the fork: a child could use neither.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import runpy
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from flows import fork_request
from flows.deploy import POOL
from flows.fork_server import ForkServer, Request, end_with
from flows.guard import SIGNAL_STATUS, STOP_SIGNALS
from flows.settings import connect_prefect, load_settings, take_environment

LATE = (
    "anyio._backends._asyncio",
    "numpy.ma",
    "numpy.random",
    "prefect._internal.observers",
    "prefect._internal.pytz",
    "prefect.task_engine",
    "prefect.utilities.visualization",
    "rich._emoji_codes",
    "tasks.lora.survey",
)
"""What the flows do not import, but every run does, when it first needs it; each fork would anew."""


def become(request: Request) -> None:
    """Run, in a fork, the flow run that the asking process was started for; raises SystemExit or what ended it."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, output in enumerate(request.outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    os.chdir(request.folder)
    take_environment(request.environment)
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()
    sys.argv = ["prefect.engine"]
    runpy.run_module("prefect.engine", run_name="__main__")


def import_flows() -> None:
    """Import all that a flow run will ask for, and leave it out of every later search for garbage.

    A search would write to each object, so that no fork could share their memory with the others.
    """
    import prefect.flow_engine  # noqa: F401
    from prefect._internal import metrics  # noqa: F401

    import flows.matrix
    import flows.onboard
    import flows.sweep
    import flows.sync  # noqa: F401
    from storage.s3 import S3Store

    for name in LATE:
        importlib.import_module(name)
    # Nothing is asked of it; what boto3 reads to make a client stays in memory.
    S3Store.open(endpoint="http://127.0.0.1:9", bucket="none", region="none", access_key="", secret_key="")
    gc.collect()
    gc.freeze()


def run_worker(
    address: str, *, pool: str, name: str | None, limit: int, with_healthcheck: bool = False
) -> int:
    """Prefect's worker, until SIGTERM; returns 0.

    Its flow runs are forks of the server at `address`. `with_healthcheck`: as of `prefect worker start`.
    """
    import asyncio

    from flows.fork_worker import make_worker

    command = shlex.join([sys.executable, "-I", "-S", str(Path(fork_request.__file__)), address])

    async def work() -> None:
        # Prefect's own handlers would kill it on the second signal, and whoever ends a whole tree sends two.
        worker = make_worker(command, pool=pool, name=name, limit=limit)
        working = asyncio.ensure_future(worker.start(with_healthcheck=with_healthcheck))
        stopped = asyncio.Event()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await asyncio.wait(
            [working, asyncio.ensure_future(stopped.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        if not working.done():
            working.cancel()
        with suppress(asyncio.CancelledError):
            await working

    asyncio.run(work())
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker and its forks until SIGTERM, SIGINT or SIGHUP; the worker's exit status."""
    parser = argparse.ArgumentParser(prog="python -m flows.forking", description=main.__doc__)
    parser.add_argument("--pool", default=POOL, help="the work pool to take runs from")
    parser.add_argument("--name", help="the worker's name; new each time")
    parser.add_argument("--limit", type=int, default=2, help="flow runs at once")
    parser.add_argument(
        "--with-healthcheck",
        action="store_true",
        help="answer at /health (PREFECT_WORKER_WEBSERVER_HOST, _PORT) whether it still asks for runs",
    )
    options = parser.parse_args(arguments)
    connect_prefect(load_settings())
    import_flows()
    server, us = ForkServer(), os.getpid()
    worker = os.fork()
    if worker == 0:
        server.close()
        end_with(us)
        return run_worker(
            server.address,
            pool=options.pool,
            name=options.name,
            limit=options.limit,
            with_healthcheck=options.with_healthcheck,
        )

    def pass_on(number: int, frame: FrameType | None) -> None:
        if os.getpid() != us:  # a fork that is a moment old
            os._exit(SIGNAL_STATUS + number)
        os.kill(worker, signal.SIGTERM)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    request = server.serve(worker)
    if request is not None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        become(request)
        return 0
    server.end()
    _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else SIGNAL_STATUS - code


if __name__ == "__main__":
    sys.exit(main())
