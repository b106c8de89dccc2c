"""Stores, uploads and ledgers for tests: moto in memory, SeaweedFS for real, and one fault injector."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moto import mock_aws
from moto.s3.models import S3Backend

from storage.ledger import Outcome, Step, StepKind, SubmissionRef
from storage.s3 import S3Store
from storage.submit import submit_upload
from storage.uploads import UploadMarker

DIGEST = "ab" * 32
OTHER_DIGEST = "cd" * 32
_SEAWEEDFS_PORTS = ("master", "volume", "filer", "s3", "admin")


@contextmanager
def memory_store() -> Iterator[S3Store]:
    """Yield an empty bucket in memory; it keeps conditions, but not among threads."""
    with mock_aws(), patch.object(S3Backend, "urls", _addresses()):
        store = _memory_client()
        store.ensure_bucket()
        yield store


@cache
def _addresses() -> dict[str, Callable[..., Any]]:
    """Return what moto answers for S3, which it would work out anew for every request by reloading a module."""
    return S3Backend("us-east-1", "123456789012").urls


@cache
def _memory_client() -> S3Store:
    """Return the client of all memory stores: making one takes longer than most tests.

    Without what others would open it by: it is boto3 itself that goes to the memory.
    """
    opened = S3Store.open(
        endpoint=None, bucket="adapters", region="us-east-1", access_key="key", secret_key="secret"
    )
    return S3Store(opened._client, opened.bucket)


class FaultInjector:
    """A boto3 client whose named calls go to the given functions, and all others to the real client."""

    def __init__(self, client: Any, faults: dict[str, Callable[..., Any]]) -> None:
        self._client = client
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return self._faults.get(name) or getattr(self._client, name)


def with_faults(store: S3Store, **faults: Callable[..., Any]) -> S3Store:
    """Return the same bucket behind a client with injected faults."""
    return S3Store(FaultInjector(store._client, faults), store.bucket)


def failing(error: Exception) -> Callable[..., None]:
    """Return a call that does nothing but raise this error."""

    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


def lose_next_answer(store: S3Store) -> None:
    """Let the next put be carried out but its answer be lost, so that boto3 sends it once more."""
    lost: list[bool] = []

    def once(**_: Any) -> int | None:
        if lost:
            return None
        lost.append(True)
        return 0

    store._client.meta.events.register_first("needs-retry.s3.PutObject", once)


@dataclass(frozen=True, slots=True)
class SeaweedFS:
    """A running SeaweedFS server on the loopback address."""

    endpoint: str
    access_key: str
    secret_key: str
    process: subprocess.Popen[bytes]

    def open(self, bucket: str) -> S3Store:
        """Return a bucket of this server, created if need be."""
        store = S3Store.open(
            endpoint=self.endpoint,
            bucket=bucket,
            region="us-east-1",
            access_key=self.access_key,
            secret_key=self.secret_key,
        )
        store.ensure_bucket()
        return store


@contextmanager
def start_seaweedfs(directory: Path, *flags: str) -> Iterator[SeaweedFS]:
    """Yield a SeaweedFS server that keeps its data in a directory; it is stopped on leaving."""
    ports = _free_ports(2 * len(_SEAWEEDFS_PORTS))
    command = [
        str(Path(sys.executable).parent / "weed"),
        "mini",
        f"-dir={directory}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-filer.localSocket=filer.sock",
        "-s3.localSocket=s3.sock",
        *flags,
    ]
    for name, port, grpc in zip(_SEAWEEDFS_PORTS, ports[::2], ports[1::2], strict=True):
        command += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
    environment = {
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "HOME": str(directory),
    }
    endpoint = f"http://127.0.0.1:{ports[2 * _SEAWEEDFS_PORTS.index('s3')]}"
    with (directory / "weed.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_for(endpoint, process, directory / "weed.log")
        yield SeaweedFS(endpoint, "test-key", "test-secret", process)
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for name, grpc in zip(_SEAWEEDFS_PORTS, ports[1::2], strict=True):
            Path(f"/tmp/seaweedfs-{name}-grpc-{grpc}.sock").unlink(missing_ok=True)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    return _free_ports(1)[0]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_for(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(endpoint, timeout=1).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"SeaweedFS did not come up:\n{log.read_text()[-2000:]}")


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.time = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time

    def pass_seconds(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


def make_adapter_directory(directory: Path, *, seed: int = 7) -> Path:
    """Return a directory with the files of an adapter and of its trainer; the bytes mean nothing."""
    directory.mkdir(parents=True, exist_ok=True)
    noise = random.Random(seed)
    (directory / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 5}\n')
    (directory / "adapter_model.safetensors").write_bytes(noise.randbytes(70_001))
    (directory / "optimizer.pt").write_bytes(noise.randbytes(311))
    (directory / "README.md").write_text("An adapter for tests.\n")
    return directory


def submit_directory(
    store: S3Store, directory: Path, author: str = "ada", run: str = "run-1", **more: Any
) -> UploadMarker:
    """Submit a directory for the base `tiny`."""
    arguments: dict[str, Any] = {"training": None, "progress": lambda done, total: None} | more
    return submit_upload(store, directory, author, run, "tiny", **arguments)


def make_submission(second: int = 0, run: str = "run-1") -> SubmissionRef:
    """Return a submission made at that second; a later second compares higher."""
    return SubmissionRef(run=run, submission=f"2026-03-01T10:00:{second:02d}Z-0a1b2c3d")


def make_step(
    kind: StepKind = StepKind.INSPECTED,
    outcome: Outcome = Outcome.DONE,
    *,
    step_key: str = "0123456789abcdef",
    attempt: int = 1,
    worker: str = "worker-1",
    **result: Any,
) -> Step:
    """Return a step with this result."""
    return Step(
        kind=kind,
        step_key=step_key,
        attempt=attempt,
        code_version="1",
        inputs={"adapter_digest": DIGEST},
        outcome=outcome,
        result=result,
        started_at=datetime(2026, 3, 1, 12, 0, 1, tzinfo=UTC),
        finished_at=datetime(2026, 3, 1, 12, 0, 9, tzinfo=UTC),
        worker=worker,
        flow_run=None,
    )
