"""Registers pool, deployments, trigger, schedules and automation with the Prefect server: `python -m flows.deploy`.

Idempotent: running it again updates what is there. Entry points are module paths, so a worker may start in any
directory; nothing is copied to it. Before, both ends are looked at: a server that is older than this environment's
Prefect is left alone, and so is everything where the store cannot be trusted with the ledger.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

from flows.settings import SettingsIncomplete, connect_prefect, load_settings

POOL = "gpu"
# Syncs and sweeps go before waiting adapters: else the roster of a long backlog would be published at its end.
URGENT = "urgent"
EVENT = "adapter.trained"
# What a run that is one at a time has to begin, at the least that Prefect takes. One whose worker dies before keeps the
# others out for so long; Prefect's own 300 seconds were as many without a sweep.
_START_S = 60


def deploy() -> list[str]:
    """Register everything; returns the deployments' names.

    Raises:
        SettingsIncomplete: no store is named.
        StoreNotTrusted, StoreUnavailable: see `storage.trust.probe_store`.
        ServerUnfit: the server is of another release than this environment's client can work with.
    """
    settings = load_settings()
    connect_prefect(settings)
    from flows.connect import open_store
    from storage.trust import probe_store

    probe_store(open_store(settings))
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.deployments.runner import RunnerDeployment
    from prefect.events import DeploymentEventTrigger
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.schedules import Interval
    from prefect.types.entrypoint import EntrypointType

    from flows.automations import HEARTBEAT_SECONDS, register_automation, silent_runs
    from flows.matrix import matrix
    from flows.onboard import onboard
    from flows.sweep import sweep
    from flows.sync import sync
    from flows.versions import require_versions

    require_versions()
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        with suppress(ObjectAlreadyExists):
            client.create_work_queue(name=URGENT, work_pool_name=POOL, priority=1)

    trained = DeploymentEventTrigger(
        name=f"{EVENT} starts onboard",
        expect={EVENT},
        match={"prefect.resource.id": "adapter.*"},
        parameters={
            "author": "{{ event.payload.author }}",
            "run": "{{ event.payload.run }}",
            "submission": "{{ event.payload.submission }}",
        },
    )
    # Of every worker: one that was started without it would beat every three minutes, and its runs would look dead.
    jobs: dict[str, Any] = {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}}
    deployments = [
        onboard.to_deployment(
            name="onboard",
            triggers=[trained],
            description="One adapter from upload to verdict.",
            entrypoint_type=EntrypointType.MODULE_PATH,
            job_variables=jobs,
        ),
        sync.to_deployment(
            name="sync",
            work_queue_name=URGENT,
            schedule=Interval(timedelta(seconds=settings.full_sync_seconds)),
            concurrency_limit=ConcurrencyLimitConfig(limit=1, grace_period_seconds=_START_S),
            description="Ledger to catalog and roster; one at a time.",
            entrypoint_type=EntrypointType.MODULE_PATH,
            job_variables=jobs,
        ),
        sweep.to_deployment(
            name="sweep",
            work_queue_name=URGENT,
            schedule=Interval(timedelta(minutes=1)),
            # One that comes while another is at work is not kept: kept ones would take the worker's every turn,
            # before all adapters, and none would get on.
            concurrency_limit=ConcurrencyLimitConfig(
                limit=1,
                collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW,
                grace_period_seconds=_START_S,
            ),
            description="Finds uploads that no event started, and those whose wait is over.",
            entrypoint_type=EntrypointType.MODULE_PATH,
            job_variables=jobs,
        ),
        matrix.to_deployment(
            name="matrix",
            concurrency_limit=ConcurrencyLimitConfig(limit=1, grace_period_seconds=_START_S),
            description="The served adapters of a base on each other's held-out text; on demand.",
            entrypoint_type=EntrypointType.MODULE_PATH,
            job_variables=jobs,
        ),
    ]
    registered = {
        f"{deployment.flow_name}/{deployment.name}": cast(UUID, deployment.apply(work_pool_name=POOL))
        for deployment in cast(list[RunnerDeployment], deployments)
    }
    with get_client(sync_client=True) as client:
        register_automation(client, silent_runs(list(registered.values()), settings.dead_after_seconds))
    return list(registered)


def main() -> int:
    """The exit status of `python -m flows.deploy`: 3 where server or store cannot be used."""
    connect_prefect(load_settings())
    from flows.versions import ServerUnfit
    from storage.errors import StoreNotTrusted, StoreUnavailable

    try:
        print("deployed:", ", ".join(deploy()))
    except (ServerUnfit, SettingsIncomplete, StoreNotTrusted, StoreUnavailable) as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
