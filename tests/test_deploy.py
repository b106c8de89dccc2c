"""What is registered with the Prefect server: the automation that marks dead runs, and which versions go together."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from uuid import uuid4

import prefect
import pytest
from loopback_server import LoopbackServer
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import ValidationError

from flows.automations import silent_runs
from flows.settings import Settings
from flows.versions import ServerUnfit, check_versions, require_versions

OURS, OTHERS = uuid4(), uuid4()
OWN = prefect.__version__
BEAT = "heartbeat"


@pytest.fixture(scope="module")
def trigger() -> EventTrigger:
    """As the server reads what is sent to it."""
    sent = silent_runs([uuid4(), OURS], 90).model_dump(mode="json")
    return EventTrigger.model_validate(sent["trigger"])


def told(event: str, deployment: object = OURS) -> ReceivedEvent:
    related = {
        "prefect.resource.id": f"prefect.deployment.{deployment}",
        "prefect.resource.role": "deployment",
    }
    flow = {"prefect.resource.id": f"prefect.flow.{uuid4()}", "prefect.resource.role": "flow"}
    return ReceivedEvent.model_validate(
        {
            "occurred": "2026-01-01T00:00:00Z",
            "event": f"prefect.flow-run.{event}",
            "resource": {"prefect.resource.id": f"prefect.flow-run.{uuid4()}"},
            "related": [flow, related],
            "id": uuid4(),
        }
    )


NAMED = "Ready|Quarantined: no_effect|Inconclusive: too_little_text|Waiting: no_heldout|Stopped: disk_full"
PLAIN = "Refused: base_mismatch|Elsewhere|Superseded|Completed|Failed|Crashed|Cancelled|Retrying"


@pytest.mark.parametrize("state", f"{NAMED}|{PLAIN}".split("|"))
def test_every_end_of_a_run_ends_its_silence(trigger: EventTrigger, state: str) -> None:
    """prefect#18653, prefect#16459: runs called crashed that were none. Our states have names of their own."""
    event = told(state)
    assert trigger.covers(event) and trigger.expects(event.event) and not trigger.starts_after(event.event)


@pytest.mark.parametrize("event", [BEAT, "Cancelling", "Submitting"])
def test_silence_is_counted_from_a_heartbeat_and_from_what_a_worker_has_to_do(
    trigger: EventTrigger, event: str
) -> None:
    """It may be dead as well: the run would stay Cancelling, or Submitting, for ever."""
    assert trigger.covers(told(event)) and trigger.starts_after(told(event).event)
    assert trigger.within.total_seconds() == 90


@pytest.mark.parametrize(
    "event", ["Scheduled", "Pending", "Running", "AwaitingRetry", "AwaitingConcurrencySlot"]
)
def test_a_run_that_waits_is_not_called_dead(trigger: EventTrigger, event: str) -> None:
    assert not trigger.starts_after(told(event).event)


def test_other_peoples_runs_on_the_same_server_are_left_alone(trigger: EventTrigger) -> None:
    """Theirs may beat every three minutes, which is Prefect's default."""
    assert not trigger.covers(told(BEAT, OTHERS))


def test_nobody_is_called_dead_between_two_heartbeats() -> None:
    assert Settings(dead_after_seconds=40).dead_after_seconds == 40
    with pytest.raises(ValidationError, match="dead_after_seconds"):
        Settings(dead_after_seconds=30)


class Stub(LoopbackServer):
    """A Prefect server of which there is nothing but its version."""

    def __init__(self, version: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.endswith("/admin/version")
                content = json.dumps(version if found else "Not Found").encode()
                self.send_response(200 if found else 404)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                pass

        super().__init__(Handler)


def checked(version: str) -> str | None:
    with Stub(version) as server, temporary_settings({PREFECT_API_URL: f"{server.url}/api"}):
        return check_versions()


@pytest.mark.parametrize("version", [OWN, f"{OWN.partition('.')[0]}.99.0", f"{OWN}.post1"])
def test_a_server_as_new_as_the_client_is_taken(version: str) -> None:
    assert checked(version) is None


@pytest.mark.parametrize(
    ("version", "newer"), [("3.6.9", "client"), ("2.20.1", "client"), ("4.0.0", "server")]
)
def test_a_server_that_does_not_go_with_the_client_is_refused(version: str, newer: str) -> None:
    """prefect#16183, prefect#17989, prefect#21261: a newer client sends what an older server does not take."""
    said = checked(version)
    assert said is not None
    for fact in (
        f"expected version {OWN}",
        f"found {version}",
        f"The {newer} is newer",
        f"prefect=={OWN}",
        "/api",
    ):
        assert fact in said


def test_what_is_no_version_is_no_server() -> None:
    said = checked("<html>")
    assert said is not None and "'<html>'" in said and "PREFECT_API_URL" in said


def test_nothing_is_registered_with_an_older_server() -> None:
    with (
        Stub("3.6.9") as server,
        temporary_settings({PREFECT_API_URL: f"{server.url}/api"}),
        pytest.raises(ServerUnfit, match=r"found 3\.6\.9"),
    ):
        require_versions()
