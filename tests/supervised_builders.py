"""Tiny children for supervisor tests, and a look at what of them is still alive."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flows.processes import list_marked
from flows.supervisor import MARK_VARIABLE, ChildSpec

ENVIRONMENT = {"PATH": os.environ["PATH"]}
SLEEP = ("sleep", "600")
# A grandchild of the worst kind: orphaned, in a session of its own, deaf to SIGTERM. The child just waits.
DEAF_ORPHAN = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        with open(sys.argv[1] + ".part", "w") as out:
            out.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".part", sys.argv[1])
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(600)
"""


def child(
    name: str,
    folder: Path,
    *argv: str,
    ready: Callable[[], bool] = lambda: True,
    ready_timeout_s: float = 10,
    restarts: int = 0,
    stop_grace_s: float = 0.3,
    after: tuple[str, ...] = (),
    one_shot: bool = False,
    may_fail: bool = False,
    explain: Callable[[str], str] = lambda log: "",
) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=argv or SLEEP,
        env=ENVIRONMENT,
        cwd=folder,
        log=folder / f"{name}.log",
        ready=ready,
        ready_timeout_s=ready_timeout_s,
        restarts=restarts,
        stop_grace_s=stop_grace_s,
        after=after,
        one_shot=one_shot,
        may_fail=may_fail,
        explain=explain,
    )


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def python(script: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", script, *arguments)


def alive(mark: str) -> list[int]:
    return list_marked(MARK_VARIABLE, mark)


def wait_for(condition: Callable[[], object], within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not so after {within_s} s")
        time.sleep(0.02)
