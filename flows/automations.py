"""What the Prefect server does by itself: it marks a flow run as Crashed that has died together with its worker.

A worker sees its flow runs die, and marks them. Nobody sees the worker's machine go: its runs would stay Running for
ever. So a run sends a heartbeat every 30 seconds, and one that falls silent is marked by this automation; the sweep, or
an operator's Retry, then takes its adapter up again. The mark decides nothing else: the ledger holds what was found,
and a run that was only slow goes on and ends as it would have.

Source: Prefect 3.9.1, server/events/triggers.py (`evaluate`), server/orchestration/core_policy.py
(`HandleFlowTerminalStateTransitions`: a run that has ended is never marked), flow_engine.py (`_send_heartbeats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

SILENT_RUNS = "adapter-roster: a silent run has crashed"
HEARTBEAT_SECONDS = 30
"""How often a run says that it is alive; Prefect takes no smaller number."""

_BEAT = "prefect.flow-run.heartbeat"
_CANCELLING = "prefect.flow-run.Cancelling"
_SUBMITTING = "prefect.flow-run.Submitting"
_ANYTHING = "prefect.flow-run.*"


def silent_runs(deployments: Sequence[UUID], dead_after_s: int) -> AutomationCore:
    """The automation for the runs of these deployments: silence of so many seconds after a heartbeat means Crashed.

    Whatever else is told of a run ends the silence, the name of its last state among it: ours are not Prefect's
    ("Ready", "Quarantined: no_effect"). So does Cancelling, but it begins another: who is to cancel may be dead too. So
    does Submitting: the worker that has taken the run may die before it has started it, and there is no heartbeat yet.
    """
    return AutomationCore(
        name=SILENT_RUNS,
        description="Marks a run as Crashed whose heartbeat has stopped: it died together with its worker.",
        trigger=EventTrigger(
            after={_BEAT, _CANCELLING, _SUBMITTING},
            expect={_ANYTHING},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {
                    "prefect.resource.role": "deployment",
                    "prefect.resource.id": [f"prefect.deployment.{one}" for one in deployments],
                }
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=dead_after_s),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name="Crashed",
                message=f"No heartbeat for {dead_after_s} seconds: the run died together with its worker. "
                "Retry takes it up where the ledger ends; the sweep does so by itself.",
            )
        ],
    )


def register_automation(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    """Have the server keep this automation, in the place of the one of its name; one that was paused stays so."""
    [*known] = client.read_automations_by_name(wanted.name)
    if not known:
        client.create_automation(wanted)
    for one in known[:1]:
        client.update_automation(one.id, wanted.model_copy(update={"enabled": one.enabled}))
    for double in known[1:]:
        client.delete_automation(double.id)
