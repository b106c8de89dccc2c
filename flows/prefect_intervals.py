"""What Prefect's server does at intervals goes on after a clock was wrong.

Whoever has done such a task writes down in Redis when it is next due, by his own clock. Was that an hour ahead, the
task is due in an hour; it counts as planned until then, whoever is started anew: no schedule, no lease that ends, no
automation that waits for silence. Here such a task is due at once.

Source: docket/worker.py (`_schedule_all_automatic_perpetual_tasks`), docket/dependencies/_perpetual.py, 0.27;
prefect/server/services/perpetual_services.py, 3.9.1.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docket import Docket
    from docket.execution import TaskFunction

_LOOK_S = 5.0
# Clocks of several machines differ by less.
_SLACK = timedelta(seconds=30)


class Intervals:
    """A service beside Prefect's own: every few seconds it looks for tasks that a wrong clock has put off."""

    def __init__(self, docket: Docket, functions: Sequence[TaskFunction]) -> None:
        """Keep what is to be done at intervals, each with a `Perpetual` of docket's among its parameters."""
        self._docket, self._functions = docket, functions

    async def start(self) -> None:
        """Look, for ever."""
        from redis.exceptions import RedisError

        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                for name in await put_right(self._docket, self._functions, datetime.now(UTC)):
                    print(f"{name} was put off by a wrong clock; it is due now", file=sys.stderr, flush=True)
            except RedisError:
                continue  # docket's own loop tells of it


async def put_right(docket: Docket, functions: Sequence[TaskFunction], now: datetime) -> list[str]:
    """Make due now what is planned later than its interval allows; the names of these tasks.

    Raises:
        redis.exceptions.RedisError: Redis does not answer.
    """
    from docket import Perpetual
    from docket.dependencies import get_single_dependency_parameter_of_type
    from docket.execution import ExecutionState

    found = []
    for function in functions:
        name = function.__name__
        perpetual = get_single_dependency_parameter_of_type(function, Perpetual)
        planned = await docket.get_execution(name)
        if perpetual is None or planned is None or planned.state is not ExecutionState.SCHEDULED:
            continue
        if planned.when > now + perpetual.every + _SLACK:
            await docket.replace(function, when=now, key=name)()
            found.append(name)
    return found
