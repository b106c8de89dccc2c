"""The event that tells Prefect of a new upload. A hint only: the sweep finds whatever it missed.

One plain HTTP request, so that a trainer's machine needs no Prefect.
"""

from __future__ import annotations

import json
import time
from http import HTTPStatus
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import NAMESPACE_URL, UUID, uuid5

from flows.deploy import EVENT
from flows.settings import Settings, prefect_access
from storage.documents import format_time, utc_now
from storage.uploads import Upload

# Longer than a busy server takes, short enough for someone who waits at a prompt.
_SECONDS = 15
# A server under a burst says so and takes the same event a moment later.
_BUSY = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
_PAUSE_S = 0.5


def event_id(author: str, run: str, submission: str) -> UUID:
    """The event's id, the same however often it is sent: Prefect drops repeats."""
    return uuid5(NAMESPACE_URL, f"{author}/{run}/{submission}")


def announce_upload(settings: Settings, upload: Upload) -> bool:
    """Send `adapter.trained` for an upload; False, within seconds, when no Prefect server takes it.

    Source: Prefect 3.9.1 server/api/events.py, POST /events, which answers 204.
    """
    access = prefect_access(settings)
    if access is None:
        return False
    headers = {"Content-Type": "application/json"}
    if access.authorization is not None:
        headers["Authorization"] = access.authorization.get_secret_value()
    url, body = f"{access.api_url.rstrip('/')}/events", _describe(upload)
    deadline = time.monotonic() + _SECONDS
    pause = _PAUSE_S
    while True:
        left = max(deadline - time.monotonic(), _PAUSE_S)
        try:
            with urlopen(Request(url, data=body, headers=headers), timeout=left) as answer:
                return bool(answer.status == HTTPStatus.NO_CONTENT)
        except HTTPError as refused:
            refused.close()
            if refused.code not in _BUSY or time.monotonic() + pause > deadline:
                return False
        except (OSError, HTTPException, ValueError):  # the last: an address that is none
            return False
        time.sleep(pause)
        pause *= 2


def _describe(upload: Upload) -> bytes:
    marker = upload.marker
    event = {
        "event": EVENT,
        "id": str(event_id(marker.author, marker.run, marker.submission)),
        "occurred": format_time(utc_now()),
        "resource": {"prefect.resource.id": f"adapter.{marker.author}.{marker.run}"},
        "payload": {
            "author": marker.author,
            "run": marker.run,
            "base": marker.base,
            "submission": marker.submission,
            "adapter_digest": upload.adapter_digest,
        },
    }
    return json.dumps([event]).encode()
