"""A lease of an engine outlives the Prefect server that gave it, and ends by itself when its holder is dead."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.embedded_config import EmbeddedConfig
from flows.embedded_plan import PREFECT, plan_children, port_names, store_service
from flows.ports import pick_ports
from flows.settings import base_environment
from flows.supervisor import ChildSpec
from tasks.engines import engine_lease
from tasks.errors import LeaseNotGranted

pytestmark = pytest.mark.real

# A run that takes the engine and tells so; it holds it until it is killed. No other test has a base of this name:
# Prefect keeps, for each name, a connection to the server that it first asked, and this one is gone afterwards.
HOLDER = """
import sys, time
from tasks.engines import engine_lease
with engine_lease("leased", 30):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def serving(child: ChildSpec) -> Iterator[None]:
    """The embedded Prefect server, by its own command and environment; killed at the end, as at 3 a.m."""
    with child.log.open("ab") as log:
        server = subprocess.Popen(child.argv, env=dict(child.env), cwd=child.cwd, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not child.ready():
            assert time.monotonic() < deadline and server.poll() is None, child.log.read_text()
            time.sleep(0.2)
        yield
    finally:
        server.kill()
        server.wait()


@contextmanager
def holding(environment: Mapping[str, str]) -> Iterator[None]:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, env=dict(environment), stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            yield
        finally:
            holder.kill()


def plan_server(home: Path) -> ChildSpec:
    config = EmbeddedConfig(home=home, engine_python=Path(sys.executable))
    ports = pick_ports(port_names(config), {})
    store = store_service(config, ports, "key", "secret")
    planned = plan_children(config, ports, store, base_environment(), "worker-1")
    [child] = [one for one in planned if one.name == PREFECT]
    child.cwd.mkdir(exist_ok=True, parents=True)
    child.log.parent.mkdir(exist_ok=True, parents=True)
    return child


def test_who_waits_for_an_engine_is_told_to_ask_again_soon(tmp_path: Path) -> None:
    """Prefect's own rule is how long leases were held, times who was turned away: the engine stood idle meanwhile."""
    child = plan_server(tmp_path)
    taken = {"name": "engine-busy", "limit": 1, "active_slots": 1, "denied_slots": 100}
    asked = {"names": ["engine-busy"], "slots": 1, "lease_duration": 60}
    with serving(child), httpx.Client(base_url=child.env["PREFECT_API_URL"]) as prefect:
        limits = "/v2/concurrency_limits/"
        prefect.post(limits, json=taken).raise_for_status()
        answers = [prefect.post(f"{limits}increment-with-lease", json=asked) for _ in range(5)]
    assert {answer.status_code for answer in answers} == {httpx.codes.LOCKED}
    assert all(0 < float(answer.headers["Retry-After"]) <= 1.3 for answer in answers)


def test_a_lease_outlives_the_server_and_ends_after_its_holder(tmp_path: Path) -> None:
    """With leases in the server's memory the slot stayed taken for ever: PrefectHQ/prefect#17415."""
    child = plan_server(tmp_path)
    with temporary_settings({PREFECT_API_URL: child.env["PREFECT_API_URL"]}):
        with serving(child), holding(child.env), pytest.raises(LeaseNotGranted), engine_lease("leased", 1):
            pass
        with serving(child):
            begun = time.monotonic()
            with pytest.raises(LeaseNotGranted), engine_lease("leased", 1):
                pass
            with engine_lease("leased", 120):
                waited = time.monotonic() - begun
    # 60 seconds from the last renewal, and the server's look at leases every ten seconds.
    assert 2 < waited < 90, waited
