"""Flows for test_forking_real.py, by module path as ours are: one goes on, one fails until told, one ends at once."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from prefect import flow, get_run_logger
from prefect.events import emit_event


@flow(persist_result=False)
def linger(folder: str) -> None:
    """Say who we are, start a child, and go on."""
    log = get_run_logger()
    below = subprocess.Popen(["sleep", "600"])
    told = Path(folder) / "part"
    told.write_text(f"{os.getpid()} {os.getppid()} {below.pid}")
    told.rename(Path(folder) / "pids")
    log.info("lingering as one of %s", os.environ["PREFECT__FLOW_RUN_ID"])
    for _ in range(6_000):
        time.sleep(0.1)


@flow(name="once_more", persist_result=False)
def once_more(folder: str) -> None:
    """Fail the first time."""
    first = Path(folder) / "first"
    if not first.exists():
        first.touch()
        raise RuntimeError("the cause is not yet put right")


@flow(name="last_words", persist_result=False)
def last_words(folder: str) -> None:
    """Say something, and be gone."""
    emit_event("forking.last_words", resource={"prefect.resource.id": f"forking.{Path(folder).name}"})
    get_run_logger().info("last words from %s", Path(folder).name)
