"""A background service of the Prefect server that is gone must not go unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from flows.prefect_services import ServiceEnded, Startable, run_together


class Forever:
    cancelled = False

    async def start(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled = True
            raise


class Failing:
    async def start(self) -> None:
        await asyncio.sleep(0)
        raise TimeoutError("no database")


class Ending:
    async def start(self) -> None:
        await asyncio.sleep(0)


def run(*services: Startable) -> Sequence[BaseException]:
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(run_together(services))
    return raised.value.exceptions


def test_a_service_that_fails_ends_the_others() -> None:
    """Prefect 3.9.1's Service.running keeps the failed task and goes on: the triggers were gone without a word."""
    others = Forever(), Forever()
    [error] = run(others[0], Failing(), others[1])
    assert isinstance(error, TimeoutError) and str(error) == "no database"
    assert all(other.cancelled for other in others)


def test_so_does_one_that_just_ends() -> None:
    [error] = run(Forever(), Ending())
    assert isinstance(error, ServiceEnded) and error.name == "Ending"
    assert "Ending of the Prefect server ended without an error" in str(error)
