"""The sweep marks what died unseen: runs that Prefect would show as at work for ever.

The automation of flows/automations.py marks a run whose heartbeat falls silent. Where the server lost the event that it
counts from (Redis, Postgres or the services killed at that moment, or their clock ahead for a while), nobody does.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Crashed

from flows.asking import ONBOARD, SWEEP, SYNC, Log
from storage.claims import is_held, list_records
from storage.documents import read_document
from storage.errors import InvalidDocument, ObjectNotFound
from storage.keys import is_author, parse_ledger_key
from storage.ledger import Ledger
from storage.s3 import S3Store

_PATIENCES = 10
"""So many times the automation's patience, 15 minutes where nothing else is set: what it can see, it has marked."""
_PATIENCES_WITH_BRIEF = 2
"""For syncs and sweeps, which take seconds: while one that died has its deployment's slot, no other begins."""
_AT_ONCE = 50


def mark_dead(store: S3Store, dead_after_s: int, log: Log) -> int:
    """Mark what was to begin long ago and never did, and what began long ago; how many there were.

    Of what began: every sync and sweep, which take seconds, and runs of `onboard` that hold no adapter. A matrix may
    take hours.

    A mark decides nothing: should such a run be alive, it goes on, and ends as it would have.

    Raises:
        StoreUnavailable, StoreNotTrusted: who holds which adapter cannot be told.
    """
    now = datetime.now(UTC)
    marked = 0
    with get_client(sync_client=True) as client:
        onboard, *brief = (client.read_deployment_by_name(name).id for name in (ONBOARD, SYNC, SWEEP))
        for run in _read_begun(client):
            patiences = _PATIENCES_WITH_BRIEF if run.deployment_id in brief else _PATIENCES
            if run.state is None or run.state.timestamp >= now - patiences * timedelta(seconds=dead_after_s):
                continue
            if not run.state.is_running():
                why = "and never began: its worker died"
            elif run.deployment_id in brief:
                why = "and none takes as long: it died"
            elif run.deployment_id == onboard and not _holds(store, run, now):
                why = "and holds no adapter: it died"
            else:
                continue
            since = f"{run.state.name} since {run.state.timestamp:%H:%M:%S} UTC"
            client.set_flow_run_state(run.id, Crashed(message=f"{since}, {why}. The sweep has found it."))
            log.warning("run %s, %s, %s; it is marked as Crashed", run.name, since, why)
            marked += 1
    return marked


def _read_begun(client: SyncPrefectClient) -> list[FlowRun]:
    """The oldest runs of deployments that are pending or running."""
    wanted = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING])),
        deployment_id=FlowRunFilterDeploymentId(is_null_=False),
    )
    oldest = FlowRunSort.EXPECTED_START_TIME_ASC
    return client.read_flow_runs(flow_run_filter=wanted, sort=oldest, limit=_AT_ONCE)


def _holds(store: S3Store, run: FlowRun, now: datetime) -> bool:
    """Whether this run of `onboard` has the claim on one of its author's adapters, or nobody can tell."""
    author = str(run.parameters.get("author", ""))
    if not is_author(author):
        return False
    for found in list_records(store, author):
        if parse_ledger_key(found.key) is None:
            continue
        try:
            ledger, _ = read_document(store, found.key, Ledger)
        except ObjectNotFound:
            continue
        except InvalidDocument:
            return True
        claim = ledger.claim
        if claim is not None and str(run.id) in claim.holder.split() and is_held(store, ledger, now):
            return True
    return False
