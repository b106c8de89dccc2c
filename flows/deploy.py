"""Registers work pool, deployments, trigger and schedules with the Prefect server: `python -m flows.deploy`.

Idempotent: running it again updates what is there. Entry points are module paths, so a worker may start in any
directory; nothing is copied to it.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import cast

from flows.settings import connect_prefect, load_settings

POOL = "gpu"
# Syncs and sweeps go before waiting adapters: else the roster of a long backlog would be published at its end.
URGENT = "urgent"
EVENT = "adapter.trained"


def deploy() -> list[str]:
    """Register everything; returns the deployments' names."""
    connect_prefect(load_settings())
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.deployments.runner import RunnerDeployment
    from prefect.events import DeploymentEventTrigger
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.schedules import Interval
    from prefect.types.entrypoint import EntrypointType

    from flows.matrix import matrix
    from flows.onboard import onboard
    from flows.sweep import sweep
    from flows.sync import sync

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
    deployments = [
        onboard.to_deployment(
            name="onboard",
            triggers=[trained],
            description="One adapter from upload to verdict.",
            entrypoint_type=EntrypointType.MODULE_PATH,
        ),
        sync.to_deployment(
            name="sync",
            work_queue_name=URGENT,
            schedule=Interval(timedelta(minutes=10)),
            concurrency_limit=1,
            description="Ledger to catalog and roster; one at a time.",
            entrypoint_type=EntrypointType.MODULE_PATH,
        ),
        sweep.to_deployment(
            name="sweep",
            work_queue_name=URGENT,
            schedule=Interval(timedelta(minutes=1)),
            # One that comes while another is at work is not kept: kept ones would take the worker's every turn,
            # before all adapters, and none would get on.
            concurrency_limit=ConcurrencyLimitConfig(
                limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW
            ),
            description="Finds uploads that no event started, and those whose wait is over.",
            entrypoint_type=EntrypointType.MODULE_PATH,
        ),
        matrix.to_deployment(
            name="matrix",
            concurrency_limit=1,
            description="The served adapters of a base on each other's held-out text; on demand.",
            entrypoint_type=EntrypointType.MODULE_PATH,
        ),
    ]
    names = []
    for deployment in cast(list[RunnerDeployment], deployments):
        deployment.apply(work_pool_name=POOL)
        names.append(f"{deployment.flow_name}/{deployment.name}")
    return names


if __name__ == "__main__":
    print("deployed:", ", ".join(deploy()))
