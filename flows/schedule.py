"""A schedule whose next runs were used up before their time.

Prefect plans an hour ahead. A worker whose clock is ahead for a moment takes what is planned for later, and of runs
that are one at a time all but one are cancelled with it: none would come for up to an hour.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment

_EACH = timedelta(minutes=1)
_MOST = 2 * _EACH


def fill_gap() -> bool:
    """Ask for the next run of this run's deployment if none is planned for the next two minutes; whether that was so.

    Counted from when this run was planned, as no clock can be trusted here. Where the schedule is paused nothing is
    asked for.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None or run.expected_start_time is None:
        return False
    planned = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[run.deployment_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
    )
    first = FlowRunSort.EXPECTED_START_TIME_ASC
    with get_client(sync_client=True) as client:
        for following in client.read_flow_runs(flow_run_filter=planned, sort=first, limit=1):
            begins = following.expected_start_time
            if begins is not None and begins - run.expected_start_time <= _MOST:
                return False
        deployment = client.read_deployment(run.deployment_id)
    if deployment.paused or not any(schedule.active for schedule in deployment.schedules):
        return False
    begins = run.expected_start_time + _EACH
    key = f"{deployment.name}-{begins:%Y%m%dT%H%M%S}"
    run_deployment(deployment.id, timeout=0, as_subflow=False, idempotency_key=key, scheduled_time=begins)
    return True
