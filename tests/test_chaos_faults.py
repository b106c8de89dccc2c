"""The faults of the chaos bench, each on the smallest thing that it can be done to: it does what it says, no more."""

from __future__ import annotations

import http.client
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from fault_proxy import FaultKind, FaultProxy
from ledger_builders import digest, step, submission
from loopback_server import LoopbackServer
from topology_instances import clock_environment, has_faketime, set_clock

import bench.chaos_boundaries
import bench.chaos_limits
from bench.chaos_boundaries import BOUNDARIES, Traps
from bench.chaos_faults import CLASSES, NAMES
from bench.chaos_limits import full_disk
from bench.chaos_processes import RunProcess
from bench.chaos_store import count_faults, plan_faults
from bench.chaos_world import World
from flows.processes import read_start_ticks
from storage.errors import ObjectNotFound
from storage.ledger import Ledger, StepKind

DIGEST = digest("adapter")
KEY = f"ledger/ada/{DIGEST}.json"


class Kept(BaseHTTPRequestHandler):
    """A store that keeps what is put, but for keys in `refused`."""

    objects: dict[str, bytes]
    refused: set[str]

    def do_PUT(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        key = self.path.removeprefix("/roster/")
        if key not in self.refused:
            self.objects[key] = sent
        self.send_response(412 if key in self.refused else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Scene:
    """A store behind a proxy, and a process that stands for a run."""

    def __init__(self, handler: type[Kept], proxy: FaultProxy, run: subprocess.Popen[str]) -> None:
        self.objects, self.refused, self.run = handler.objects, handler.refused, run
        self.killed: list[int] = []
        self.world = cast(
            World,
            SimpleNamespace(
                proxy=proxy,
                store=SimpleNamespace(get=self.get),
                topology=SimpleNamespace(
                    instances={"worker": [SimpleNamespace(main=run.pid, runs=True)]},
                ),
                rng=random.Random(1),
                note_killed=self.killed.append,
            ),
        )
        self._host = urlsplit(proxy.endpoint).netloc

    def get(self, key: str) -> Any:
        if key not in self.objects:
            raise ObjectNotFound(key)
        return SimpleNamespace(body=self.objects[key], info=SimpleNamespace(etag='"1"'))

    def put(self, *kinds: str, holder: int | None = None) -> int | None:
        """Put the ledger with these steps, claimed by the run; the answer's status, None for none."""
        body = ledger(*kinds, holder=holder or self.run.pid)
        with closing(http.client.HTTPConnection(self._host, timeout=5)) as line, suppress(ConnectionError):
            line.request("PUT", f"/roster/{KEY}", body)
            return line.getresponse().status
        return None

    @property
    def steps(self) -> list[StepKind]:
        return [step.kind for step in Ledger.model_validate_json(self.objects[KEY]).steps]

    @property
    def is_alive(self) -> bool:
        return read_start_ticks(self.run.pid) is not None


def ledger(*kinds: str, holder: int) -> bytes:
    steps = [step(kind, "done", {}, minute=minute) for minute, kind in enumerate(kinds)]
    document = {
        "schema": 1,
        "author": "ada",
        "adapter_digest": DIGEST,
        "base": "tiny",
        "submissions": [{"run": "run-1", "submission": submission(1)}],
        "claim": {"holder": f"here:{holder} some-run 12345678", "expires_at": "2026-11-20T12:00:00Z"},
        "steps": steps,
        "verdict": None,
    }
    return Ledger.model_validate(document).model_dump_json(by_alias=True).encode()


# It writes a file of the size that it is told, and says how that went.
PROGRAM = """
import sys
import time
print("here", flush=True)
for line in sys.stdin:
    try:
        with open("written", "wb") as file:
            file.write(bytes(int(line)))
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    handler = type("Handler", (Kept,), {"objects": {}, "refused": set()})
    with (
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as run,
        LoopbackServer(handler) as server,
        FaultProxy(server.url) as proxy,
    ):
        assert run.stdout is not None and run.stdout.readline() == "here\n"
        for module in (bench.chaos_boundaries, bench.chaos_limits):
            monkeypatch.setattr(module, "list_runs", lambda topology: [RunProcess(run.pid, "some-run", 0)])
        yield Scene(handler, proxy, run)
        run.kill()


def test_there_are_classes_of_all_that_can_happen() -> None:
    assert {name for name in CLASSES if name.startswith("kill_")} == {
        f"kill_{what}"
        for what in ("flow", "worker", "server", "services", "engine", "store", "sync", "postgres", "redis")
    }
    assert len(BOUNDARIES) == 2 * len(StepKind)
    assert {f"s3_{kind.value}" for kind in FaultKind} <= set(NAMES)
    assert {
        "event_lost",
        "event_doubled",
        "event_reordered",
        "two_workers",
        "disk_full",
        "clock_jump",
    } <= set(CLASSES)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("boundary_converted_before", [StepKind.INSPECTED]),
        ("boundary_converted_after", [StepKind.INSPECTED, StepKind.CONVERTED]),
    ],
)
def test_a_run_dies_before_or_after_the_store_has_its_step(
    scene: Scene, name: str, stored: list[StepKind]
) -> None:
    traps = Traps(scene.world)
    traps.keep([name])
    assert scene.put("inspected") == 200, "another step"
    assert scene.put("inspected", "converted", holder=1) == 200, "nobody of ours"
    scene.objects[KEY] = ledger("inspected", holder=scene.run.pid)
    assert scene.is_alive and traps.armed == {name}
    assert scene.put("inspected", "converted") is None
    assert not scene.is_alive and scene.killed == [scene.run.pid]
    assert scene.steps == stored
    assert traps.killed == {name: 1} and not traps.armed
    assert scene.put("inspected", "converted") == 200, "once"


def test_a_claim_that_is_renewed_is_no_boundary(scene: Scene) -> None:
    scene.objects[KEY] = ledger("inspected", "converted", holder=scene.run.pid)
    traps = Traps(scene.world)
    traps.keep(["boundary_converted_before", "boundary_converted_after"])
    assert scene.put("inspected", "converted") == 200
    assert scene.is_alive and not traps.killed


def test_after_means_that_the_store_has_taken_it(scene: Scene) -> None:
    scene.refused.add(KEY)
    traps = Traps(scene.world)
    traps.keep(["boundary_inspected_after"])
    assert scene.put("inspected") == 412 and scene.is_alive, "lost a race: it is told, and tries again"
    scene.refused.clear()
    assert scene.put("inspected") is None and not scene.is_alive
    assert scene.steps == [StepKind.INSPECTED]


def test_a_trap_that_is_not_wanted_any_more_catches_nobody(scene: Scene) -> None:
    traps = Traps(scene.world)
    traps.keep(["boundary_inspected_before", "boundary_scored_after"])
    traps.keep(["boundary_scored_after"])
    assert scene.put("inspected") == 200 and scene.is_alive
    assert traps.armed == {"boundary_scored_after"}


def test_a_full_disk_takes_small_files_alone_until_there_is_room(scene: Scene) -> None:
    def write(size: int) -> str:
        assert scene.run.stdin is not None and scene.run.stdout is not None
        scene.run.stdin.write(f"{size}\n")
        scene.run.stdin.flush()
        return scene.run.stdout.readline().strip()

    assert write(100_000) == "written"
    with full_disk(scene.world):
        assert [write(1_000), write(100_000), write(1_000)] == ["written", "File too large", "written"]
    assert write(100_000) == "written"


def test_the_stores_faults_come_by_themselves_and_when_asked_for(scene: Scene) -> None:
    plan = plan_faults(seed=7, limit=3)
    assert set(plan.rate) == set(FaultKind) and plan.limit == 3
    scene.world.proxy.start_faults(type(plan)(7, {FaultKind.UNAVAILABLE: 1}, 2))
    assert [scene.put("inspected") for _ in range(3)] == [503, 503, 200]
    assert count_faults(scene.world)["s3_unavailable"] == 2


@pytest.mark.real
@pytest.mark.skipif(not has_faketime(), reason="not installed here: libfaketime (apt-get install faketime)")
def test_a_moved_clock_is_seen_soon_and_by_forks_and_nothing_takes_longer(tmp_path: Path) -> None:
    """libfaketime 0.9.10 alone lets `time.sleep` fail in Python 3.11 and later (tests/moved_clock)."""
    clock = tmp_path / "clock"
    program = """
import datetime, os, sys, threading, time
def look():
    begun = time.monotonic()
    time.sleep(0.2)
    threading.Event().wait(0.2)
    print(time.time(), datetime.datetime.now(datetime.UTC).timestamp(), time.monotonic() - begun, flush=True)
for line in sys.stdin:
    look()
    if os.fork() == 0:
        look()
        os._exit(0)
    os.wait()
"""
    command = [sys.executable, "-c", program]
    env = clock_environment(clock)
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for seconds in (0, 3_600, -600, 0):
            set_clock(clock, seconds)
            deadline = time.monotonic() + 10
            while True:  # it looks at the file now and then
                process.stdin.write("look\n")
                process.stdin.flush()
                rows = [list(map(float, process.stdout.readline().split())) for _ in range(2)]
                assert all(0.4 <= took < 2 for *_, took in rows)
                if all(abs(seen - time.time() - seconds) < 3 for *both, _ in rows for seen in both):
                    break
                assert time.monotonic() < deadline, (seconds, rows, time.time())
        process.stdin.close()
    assert process.returncode == 0
