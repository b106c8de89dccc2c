"""Fixtures that several files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_builders import memory_store


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A real Prefect server for flows that run in this process; it takes seconds to start."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def desk(prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A pipeline on one desk: see pipeline_builders.Desk."""
    from pipeline_builders import make_desk

    with memory_store() as store:
        yield make_desk(store, tmp_path, monkeypatch)
