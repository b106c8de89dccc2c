"""Faults of the chaos bench: events that are lost, doubled or in another order, and two runs for one adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.request import Request, urlopen
from uuid import uuid4

from bench.chaos_adapters import Sent
from bench.chaos_processes import ask_for, list_runs, wait_until
from bench.chaos_world import World
from flows.deploy import EVENT, URGENT
from flows.settings import prefect_access

_TIMES = 3
_WITHIN_S = 15.0
_EVENT_S = 15.0


def event_lost(world: World) -> bool:
    """Nobody is told of an upload: the sweep finds it."""
    world.submit(announce=False)
    return True


def event_doubled(world: World) -> bool:
    """The same event three times, and once more as another one."""
    sent = world.submit(announce=False)
    taken = [world.announce(sent) for _ in range(_TIMES)]
    return send_as_another(world, sent) and sum(taken) > 1


def event_reordered(world: World) -> bool:
    """Two uploads of one author; the event of the later one comes first."""
    first = world.submit(announce=False)
    later = world.submit_again(first, announce=False)
    return world.announce(later) and world.announce(first)


def two_workers(world: World) -> bool:
    """Runs of both workers for one adapter, asked for at once."""
    sent = world.submit(announce=False)
    # As many as one worker takes at once would perhaps all go to the same. Before all others, to be there together.
    asked = {
        ask_for("onboard/onboard", queue=URGENT, author=sent.author, run=sent.run) for _ in range(_TIMES)
    }
    seen: set[int] = set()

    def on_both() -> bool:
        seen.update(one.worker for one in list_runs(world.topology) if one.flow_run in asked)
        return len(seen) > 1

    return wait_until(on_both, _WITHIN_S)


def send_as_another(world: World, sent: Sent) -> bool:
    """The event of an upload under an id that no event has had; whether the server took it. See flows/events.py."""
    access = prefect_access(world.settings)
    if access is None:
        return False
    headers = {"Content-Type": "application/json"}
    if access.authorization is not None:
        headers["Authorization"] = access.authorization.get_secret_value()
    marker = sent.upload.marker
    event = {
        "event": EVENT,
        "id": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "resource": {"prefect.resource.id": f"adapter.{sent.author}.{sent.run}"},
        "payload": {
            "author": sent.author,
            "run": sent.run,
            "base": marker.base,
            "submission": marker.submission,
            "adapter_digest": sent.digest,
        },
    }
    request = Request(f"{access.api_url}/events", data=json.dumps([event]).encode(), headers=headers)
    try:
        with urlopen(request, timeout=_EVENT_S) as answer:
            return bool(answer.status == 204)
    except OSError:
        return False


EVENTS: dict[str, Callable[[World], bool]] = {
    one.__name__: one for one in (event_lost, event_doubled, event_reordered, two_workers)
}
