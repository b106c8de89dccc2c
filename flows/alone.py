"""Runs that are one at a time hold their deployment's slot for a minute, renewed while they live.

Prefect's engine renews it for five minutes, which cannot be set. Killed with its worker, such a run would keep the next
ones out for as long, and it is a sweep that finds what else was killed.
Source: prefect/flow_engine.py and prefect/concurrency/_leases.py, Prefect 3.9.1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from threading import Event, Thread
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

_LEASE_S = 60  # the least that Prefect's server takes
# The engine renews for its five minutes when the run begins, just before or just after we do.
_AGAIN_S = 2
_EACH_S = 20


@contextmanager
def held_briefly() -> Iterator[None]:
    """Hold the slot of the run's deployment in this way for as long as the block runs; nothing where it has none."""
    lease = _lease_of_run()
    if lease is None:
        yield
        return
    done = Event()
    thread = Thread(target=_renew, args=(lease, done), name="deployment slot", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _lease_of_run() -> UUID | None:
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    return run.state.state_details.deployment_concurrency_lease_id if run is not None and run.state else None


def _renew(lease: UUID, done: Event) -> None:
    pauses = chain([_AGAIN_S], repeat(_EACH_S))
    with get_client(sync_client=True) as client:
        while not done.is_set():
            try:
                client.renew_concurrency_lease(lease, _LEASE_S)
            except Exception as error:  # noqa: BLE001 - of whatever kind: a server that is down, a lease that is gone
                # The next time may do; where the lease is gone, the engine ends the run.
                logging.getLogger(__name__).debug("the deployment's slot was not renewed: %s", error)
            done.wait(next(pauses))
