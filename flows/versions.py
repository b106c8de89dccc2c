"""Whether this environment's Prefect and the server's go together."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version
from prefect.client.orchestration import get_client


class ServerUnfit(Exception):
    """The Prefect server is of another release than this environment's client can work with."""

    def __init__(self, reason: str) -> None:
        """Keep what `check_versions` found."""
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        """Repeat it."""
        return self.reason


def check_versions() -> str | None:
    """What is wrong between this environment's Prefect and the server's, and what to do; None if nothing is.

    A server takes older clients of its major version. A newer client sends what it does not know: it is refused with
    422, or ignored without a word (prefect#16183, prefect#17989).

    Raises what Prefect's client raises when the server does not answer.
    """
    with get_client(sync_client=True) as client:
        server, own, url = client.api_version(), client.client_version(), str(client.api_url)
    try:
        fits = Version(server) >= Version(own) and Version(server).major == Version(own).major
    except InvalidVersion:
        return (
            f"Prefect server at {url}: expected a version such as {own}, found {server!r}. Does PREFECT_API_URL lead "
            "to a Prefect server, without a proxy that answers in its place?"
        )
    if fits:
        return None
    newer, older = ("server", "client") if Version(server) > Version(own) else ("client", "server")
    return (
        f"Prefect server at {url}: expected version {own} or a newer one of the same major version, found {server}. "
        f"The {newer} is newer than the {older}: install the same Prefect in both (`prefect=={server}` here, or "
        f"`prefect=={own}` there), as constraints.txt pins it, and start server and workers again."
    )


def require_versions() -> None:
    """Return if client and server go together.

    Raises:
        ServerUnfit: they do not.
    """
    found = check_versions()
    if found is not None:
        raise ServerUnfit(found)
