"""A background service of the Prefect server that is gone must not go unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from docket import Docket, Perpetual

from flows.prefect_intervals import put_right
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


SOON, LATER = Perpetual(every=timedelta(seconds=10)), Perpetual(every=timedelta(hours=1))


async def often(perpetual: Perpetual = SOON) -> None:
    pass


async def hourly(perpetual: Perpetual = LATER) -> None:
    pass


async def unplanned(perpetual: Perpetual = SOON) -> None:
    pass


def test_what_a_wrong_clock_has_put_off_is_due_at_once() -> None:
    """Seen with a clock that was an hour ahead for seconds: for that hour there were no schedules and no triggers."""
    now = datetime.now(UTC)

    async def play() -> tuple[list[list[str]], list[float]]:
        async with Docket(name=f"test-{uuid4()}", url="memory://", execution_ttl=timedelta(0)) as docket:
            for function, minutes in ((often, 60), (hourly, 60)):
                await docket.add(function, when=now + timedelta(minutes=minutes), key=function.__name__)()
            found = [await put_right(docket, (often, hourly, unplanned), now) for _ in range(2)]
            planned = [await docket.get_execution(one.__name__) for one in (often, hourly)]
            return found, [(one.when - now).total_seconds() for one in planned if one is not None]

    found, due_in_s = asyncio.run(play())
    assert found == [["often"], []]
    assert due_in_s == pytest.approx([0, 3600], abs=1)
