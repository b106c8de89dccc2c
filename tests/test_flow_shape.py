"""What every flow and task of ours has in common: small plain parameters, nothing persisted, states with names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from page_builders import stopped
from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE

from flows.onboard import final_state
from storage.ledger import Outcome, StepKind

PLAIN = {"string", "boolean", "integer", "number", "null", "array"}
ROOT = Path(__file__).resolve().parent.parent


def modules(package: str) -> list[Any]:
    return [
        importlib.import_module(f"{package}.{path.stem}") for path in sorted((ROOT / package).glob("*.py"))
    ]


def test_no_task_caches_or_keeps_a_result() -> None:
    """PrefectHQ/prefect#15658, #16928, bcgov/lear#3594: keys of inputs fail for objects, and outlive their code."""
    tasks = {
        value for module in modules("tasks") for value in vars(module).values() if isinstance(value, Task)
    }
    assert len(tasks) >= 9
    assert {
        task.name for task in tasks if task.cache_policy is not NO_CACHE and task.cache_policy != NO_CACHE
    } == set()
    assert {task.name for task in tasks if task.persist_result is not False} == set()


def test_flows_take_short_plain_values_and_keep_no_result() -> None:
    """PrefectHQ/prefect#18546, #9847: names go into parameters, bytes and lists of keys into the store."""
    names = ("onboard", "sweep", "sync", "matrix")
    flows = [getattr(importlib.import_module(f"flows.{name}"), name) for name in names]
    for flow in flows:
        assert isinstance(flow, Flow) and flow.persist_result is False, flow.name
        for name, schema in flow.parameters.properties.items():
            forms = [schema, *schema.get("anyOf", ())]
            forms += [form["items"] for form in forms if "items" in form]
            kinds = {form["type"] for form in forms if "type" in form}
            assert kinds and kinds <= PLAIN, (flow.name, name, kinds)
        assert not flow.parameters.definitions, flow.name


@pytest.mark.parametrize(
    ("outcome", "code", "type", "name"),
    [
        (Outcome.READY, None, "COMPLETED", "Ready"),
        (Outcome.QUARANTINED, "no_effect", "COMPLETED", "Quarantined: no_effect"),
        (Outcome.INCONCLUSIVE, "margin_unclear", "COMPLETED", "Inconclusive: margin_unclear"),
        (Outcome.WAITING, "no_heldout", "COMPLETED", "Waiting: no_heldout"),
        (Outcome.STOPPED, "disk_full", "FAILED", "Stopped: disk_full"),
    ],
)
def test_an_ending_is_a_named_state(outcome: Outcome, code: str | None, type: str, name: str) -> None:
    """Only a stop is Failed: that is what the UI offers to retry. However long the reason, the state is short."""
    kind = StepKind.VERDICT if outcome is not Outcome.WAITING else StepKind.INSPECTED
    ending = stopped(1, kind=kind, outcome=outcome, result={"code": code, "reason": "x" * 300_000})
    job = _JobStub()
    state = final_state(job, ending)  # type: ignore[arg-type]
    assert (state.type.value, state.name) == (type, name)
    assert (
        state.message is not None
        and state.message.startswith("alder/run-1: x")
        and len(state.message) < 3_000
    )
    assert state.data is None
    assert job.said == [state.message]


class _JobStub:
    """The part of a job that a state is named from."""

    label, done_here = "alder/run-1", (StepKind.SCORED,)

    def __init__(self) -> None:
        self.said: list[str] = []
        self.log = self

    def info(self, form: str, message: str) -> None:
        self.said.append(message)
