"""Fixtures that several files share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_builders import SeaweedFS, memory_store, start_seaweedfs

# A shell that starts the tests in the background has Ctrl-C ignored, and nohup has the hang-up ignored, by them and by
# all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


WHOLLY_REAL = "\npytestmark = pytest.mark.real"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are real as a whole are not even imported by the fast tier, each of whose processes collects all."""
    if config.option.markexpr != "not real" or collection_path.suffix != ".py":
        return None
    return True if WHOLLY_REAL in collection_path.read_text("utf-8") else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-snapshots",
        action="store_true",
        help="write what running engines say of themselves to tasks/lora/served/ instead of comparing it",
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A real object store for the tests of one file."""
    with start_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A real Prefect server for flows that run in this process; it takes seconds to start.

    Without heartbeats, whose thread takes a second to end after each run, and without logs sent to the server.
    """
    from prefect.settings import (
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_LOGGING_TO_API_ENABLED,
        temporary_settings,
    )
    from prefect.testing.utilities import prefect_test_harness

    quiet = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_LOGGING_TO_API_ENABLED: False}
    with prefect_test_harness(server_startup_timeout=120), temporary_settings(quiet):
        yield


@pytest.fixture(scope="module")
def deployed(prefect_server: None) -> None:
    """A real Prefect server that has our deployments, and no worker."""
    import flows.connect
    from flows.deploy import deploy

    with memory_store() as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows.connect, "open_store", lambda settings: store)
        deploy()


@pytest.fixture
def prefect_desk(prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A pipeline on one desk, its flow runs by Prefect: see pipeline_builders.Desk."""
    from pipeline_builders import make_desk

    with memory_store() as store:
        yield make_desk(store, tmp_path, monkeypatch, prefect=True)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The same without Prefect around the flow: for what an adapter's run finds, not for how Prefect shows it."""
    from pipeline_builders import make_desk

    with memory_store() as store:
        yield make_desk(store, tmp_path, monkeypatch, prefect=False)


@pytest.fixture
def grove(desk: object) -> object:
    """The plain desk with a base whose adapters are large enough to tell their packing: see grove_builders."""
    from pipeline_builders import Desk, add_tiny_base
    from structured_builders import SIZES

    assert isinstance(desk, Desk)
    add_tiny_base(desk.store, **SIZES)
    return desk
