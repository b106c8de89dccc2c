"""The event that tells Prefect of a new upload. A hint only: the sweep finds whatever it missed."""

from __future__ import annotations

from uuid import NAMESPACE_URL, UUID, uuid5

from flows.deploy import EVENT
from flows.settings import Settings
from storage.uploads import Upload

# Longer than a busy server takes, short enough for someone who waits at a prompt.
_SECONDS = 15


def event_id(author: str, run: str, submission: str) -> UUID:
    """The event's id, the same however often it is sent: Prefect drops repeats."""
    return uuid5(NAMESPACE_URL, f"{author}/{run}/{submission}")


def announce_upload(settings: Settings, upload: Upload) -> bool:
    """Send `adapter.trained` for an upload; False, within seconds, when the Prefect server does not take it."""
    if not settings.prefect_api_url:
        return False
    import anyio
    from prefect.events import Event, Resource, get_events_client
    from websockets.exceptions import WebSocketException

    marker = upload.marker
    event = Event(
        event=EVENT,
        id=event_id(marker.author, marker.run, marker.submission),
        resource=Resource({"prefect.resource.id": f"adapter.{marker.author}.{marker.run}"}),
        payload={
            "author": marker.author,
            "run": marker.run,
            "base": marker.base,
            "submission": marker.submission,
            "adapter_digest": upload.adapter_digest,
        },
    )

    async def emit() -> None:
        with anyio.fail_after(_SECONDS):
            async with get_events_client(reconnection_attempts=1) as client:
                await client.emit(event)

    try:
        anyio.run(emit)
    except (OSError, WebSocketException):
        return False
    return True
