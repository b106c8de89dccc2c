"""Who is told how a run ended: once, in time, without a secret, and never at the cost of the run."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from page_builders import ledger_of, stopped
from pipeline_builders import Desk, OnLoad
from pydantic import SecretStr

import flows.notify
from flows.notify import Notice, find_notice, send_notice
from storage.ledger import Outcome, StepKind
from tasks.bpb.engine_errors import EngineUnavailable

LOG = logging.getLogger("notify")
SECRET = "T0K3N-of-the-hook"
NOTICE = Notice("alder", "run-1", "tiny", "quarantined", "no_effect", "it does nothing", "run-9", "key")


class Hook:
    """A chat's webhook: keeps what was posted, and answers with a status."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.got: list[dict[str, Any]] = []
        self.status = 200
        self.url = SecretStr(f"http://127.0.0.1:{server.server_port}/services/{SECRET}")


@pytest.fixture
def hook() -> Iterator[Hook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            made.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(made.status)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Hook(server)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str], Any]]:
    """The Prefect events that were emitted: name, resource, id."""
    found: list[tuple[str, dict[str, str], Any]] = []
    monkeypatch.setattr(
        flows.notify, "emit_event", lambda name, resource, payload, id: found.append((name, resource, id))
    )
    return found


def test_a_run_tells_of_its_first_stop_of_a_kind_and_of_its_quarantine(
    desk: Desk, hook: Hook, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The desk takes events away; here they are kept. The flow's settings name the hook."""
    desk.settings.notify_url = hook.url
    monkeypatch.setattr(flows.notify, "emit_event", lambda name, *_, **more: events.append(name))
    for reason, times in (("first", 2), ("again", 1)):
        gone = EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", f"{reason} gone")
        desk.engine.on_load = OnLoad("alder@", lambda name, gone=gone: gone)
        if reason == "first":
            desk.ready("alder")
        for _ in range(times if reason == "again" else times - 1):
            desk.run("alder")
    assert [step.outcome for step in desk.ledger("alder").steps].count(Outcome.STOPPED) == 3
    assert [(one["outcome"], one["code"]) for one in hook.got] == [("stopped", "engine_unavailable")]
    desk.engine.on_load = {}
    desk.engine.adapters = lambda name, path: 2.1 if "~control@" in name else 2.401
    desk.run("alder")
    told = hook.got[1]
    assert (told["author"], told["run"], told["base"]) == ("alder", "run-1", "tiny")
    assert (told["outcome"], told["code"]) == ("quarantined", desk.ledger("alder").steps[-1].result["code"])
    assert (
        told["reason"] and told["reason"] in told["text"] and "alder/run-1 (tiny) quarantined" in told["text"]
    )
    desk.run("alder")
    assert len(hook.got) == 2, "a run with nothing to do has nothing to tell"
    assert events == ["adapter.stopped", "adapter.quarantined"]


def test_series_are_of_one_code_and_end_with_any_other_ending() -> None:
    first, again, other = stopped(1), stopped(2), stopped(3, "disk_full")
    done = stopped(4, kind=StepKind.CONVERTED, outcome=Outcome.DONE, result={})
    ready = stopped(5, kind=StepKind.VERDICT, outcome=Outcome.READY, result={})
    back = stopped(6)
    ledger = ledger_of(first, done, again, other, ready, back)

    def told(step: Any) -> bool:
        return find_notice(ledger, "run-1", step, "run-9") is not None

    assert [told(step) for step in (first, again, other, ready, back)] == [True, False, True, True, True]
    waiting = stopped(7, outcome=Outcome.WAITING)
    assert find_notice(ledger_of(waiting), "run-1", waiting, "run-9") is None


def test_one_verdict_has_one_event_whoever_tells_of_it(events: list[Any]) -> None:
    verdict = stopped(1, kind=StepKind.VERDICT, outcome=Outcome.READY, result={})
    for flow_run in ("run-1", "run-2"):
        notice = find_notice(ledger_of(verdict), "run-1", verdict, flow_run)
        assert notice is not None
        send_notice(notice, None, LOG)
    again = stopped(1, kind=StepKind.VERDICT, outcome=Outcome.READY, result={}, attempt=7)
    notice = find_notice(ledger_of(again), "run-1", again, "run-2")
    assert notice is not None
    send_notice(notice, None, LOG)
    assert [name for name, *_ in events] == ["adapter.ready"] * 3
    assert {resource["prefect.resource.id"] for _, resource, _ in events} == {"adapter.alder.run-1"}
    one, same, other = (id for *_, id in events)
    assert one == same != other


def test_ready_is_an_event_and_no_message_for_people(hook: Hook, events: list[Any]) -> None:
    ready = Notice("alder", "run-1", "tiny", "ready", None, "", "run-9", "key")
    send_notice(ready, hook.url, LOG)
    assert len(events) == 1 and hook.got == []


@pytest.mark.parametrize("status", [404, 500])
def test_a_hook_that_does_not_take_it_is_one_line_without_its_address(
    status: int, hook: Hook, events: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    hook.status = status
    send_notice(NOTICE, hook.url, LOG)
    (line,) = caplog.messages
    assert line == f"alder/run-1: ROSTER_NOTIFY_URL was not told: it answered HTTP {status}"
    assert SECRET not in caplog.text and len(hook.got) == 1 and len(events) == 1


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/", "ftp://host/", "not an address ", "http://[bad/", "http://host:port/"]
)
def test_an_address_that_cannot_be_reached_is_never_told(
    url: str, events: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    send_notice(NOTICE, SecretStr(url + SECRET), LOG)
    (line,) = caplog.messages
    assert "ROSTER_NOTIFY_URL was not told" in line and SECRET not in line and "http:" not in line


def test_what_is_posted_is_bounded(hook: Hook, events: list[Any]) -> None:
    long = Notice("alder", "run-1", "tiny", "stopped", "internal", "x" * 100_000, "run-9", "key")
    send_notice(long, hook.url, LOG)
    assert len(json.dumps(hook.got[0])) < 5_000
