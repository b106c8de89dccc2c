"""`prefect server services start`, but a service that ends, ends them all: `python -m flows.prefect_services`.

Prefect starts each service as a task and never looks at it again. One that fails, at its start for instance because
the database did not answer in time, is then missing without a word, while the process and its sign of life go on: with
the triggers gone no upload starts a run, with the actions gone no automation acts. Here the process ends with the
error, and whoever keeps it running starts it again.

Beside them runs what keeps their intervals after a clock was wrong (flows/prefect_intervals.py).

Source: prefect/server/services/base.py (`Service.running`), prefect/cli/_server_utils.py (`_run_all_services`), 3.9.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol


class Startable(Protocol):
    """A service as Prefect makes them: `start` is to run for ever."""

    async def start(self) -> None:
        """Run."""


class ServiceEnded(Exception):
    """A service of the Prefect server came to its end, which it never should."""

    def __init__(self, name: str) -> None:
        """Keep the service's name."""
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        """Say what ended."""
        return f"{self.name} of the Prefect server ended without an error; all services end, to be started again."


async def run_together(services: Sequence[Startable]) -> None:
    """Run the services until it is cancelled, or until one of them fails or ends: then the others are cancelled.

    Raises:
        ExceptionGroup: of what the failed ones raised, or of a ServiceEnded.
    """
    async with asyncio.TaskGroup() as group:
        for service in services:
            group.create_task(_run_for_ever(service))


async def _run_for_ever(service: Startable) -> None:
    await service.start()
    raise ServiceEnded(type(service).__name__)


async def _run_all() -> None:
    from docket import Docket
    from prefect.server.api.background_workers import background_worker
    from prefect.server.services.base import Service
    from prefect.server.services.perpetual_services import get_enabled_perpetual_services
    from prefect.settings.context import get_current_settings

    from flows.prefect_intervals import Intervals

    url = get_current_settings().server.docket.url
    async with (
        Docket(name="prefect", url=url, execution_ttl=timedelta(0)) as docket,
        background_worker(docket, ephemeral=False, webserver_only=False),
    ):
        intervals = Intervals(docket, [one.function for one in get_enabled_perpetual_services()])
        await run_together([*(service() for service in Service.enabled_services()), intervals])


def main() -> None:
    """Run Prefect's background services until SIGTERM or SIGINT, or until one of them fails."""
    asyncio.run(_run_all())


if __name__ == "__main__":
    main()
