"""Runs that died unseen are marked by the sweep; those that hold an adapter, or have just begun, are left alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.states import Pending, Running
from store_builders import DIGEST, make_submission, memory_store

import flows.connect
import flows.tidying
from flows.tidying import mark_dead
from storage.claims import open_ledger
from storage.s3 import S3Store

pytestmark = pytest.mark.real
LOG = logging.getLogger(__name__)


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as store:
        yield store


def begin(deployment: str, state: State, **parameters: str) -> UUID:
    """A run that is in this state, as if a worker had taken it and told no more."""
    later = datetime.now(UTC) + timedelta(days=1)
    run = run_deployment(deployment, parameters=parameters, scheduled_time=later, timeout=0, as_subflow=False)
    assert isinstance(run, FlowRun)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, state, force=True)
    return run.id


def told(run: UUID) -> tuple[str, str]:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run).state
    assert state is not None
    return str(state.name), str(state.message)


def test_what_died_unseen_is_marked_and_nothing_else(
    deployed: None, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis or the services were killed with the event that the automation counts from: it stayed Running for ever."""
    died = begin("onboard/onboard", Running(), author="ash", run="run-1")
    alive = begin("onboard/onboard", Running(), author="ada", run="run-1")
    nameless = begin("onboard/onboard", Running(), author="../ada", run="run-1")
    taken = begin("sweep/sweep", Pending())
    scoring = begin("matrix/matrix", Running(), base="tiny")
    brief = [begin(name, Running()) for name in ("sweep/sweep", "sync/sync")]
    for author, run in (("ada", alive), ("ash", alive)):
        ledger = open_ledger(store, author, DIGEST, "tiny", make_submission())
        ledger.claim(f"w:7 {run} 11111111", 60)
    assert mark_dead(store, 90, LOG) == 0, "they have only just begun"
    monkeypatch.setattr(flows.tidying, "_PATIENCES_WITH_BRIEF", 0)
    assert mark_dead(store, 90, LOG) == 3, "those that keep others out are not waited for as long"
    monkeypatch.setattr(flows.tidying, "_PATIENCES", 0)
    assert mark_dead(store, 90, LOG) == 2
    assert told(alive)[0] == told(scoring)[0] == "Running", "one holds its adapter, the other never holds one"
    assert told(died)[0] == told(nameless)[0] == told(taken)[0] == "Crashed"
    assert "and holds no adapter: it died" in told(died)[1]
    assert "and never began: its worker died" in told(taken)[1]
    for run in brief:
        assert told(run)[0] == "Crashed" and "and none takes as long: it died" in told(run)[1]
    assert mark_dead(store, 90, LOG) == 0


def test_a_claim_that_ran_out_holds_nothing(
    deployed: None, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for patience in ("_PATIENCES", "_PATIENCES_WITH_BRIEF"):
        monkeypatch.setattr(flows.tidying, patience, 0)
    run = begin("onboard/onboard", Running(), author="birch", run="run-1")
    long_ago = datetime.now(UTC) - timedelta(minutes=5)
    ledger = open_ledger(store, "birch", DIGEST, "tiny", make_submission(), now=lambda: long_ago)
    ledger.claim(f"w:7 {run} 11111111", 60)
    mark_dead(store, 90, LOG)
    assert told(run)[0] == "Crashed"
