"""Faults of the chaos bench: a disk without room, and a clock that jumps."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from bench.chaos_adapters import expected
from bench.chaos_processes import list_runs, wait_until
from bench.chaos_world import World
from storage.ledger import Outcome

_LARGEST_FILE = 2_048  # bytes; an adapter's configuration has fewer, its tensors have more
_FULL_S = 25.0
_JUMPS_S = (3_600, -600)
_JUMPED_S = (3.0, 8.0)
_RENEWED_S = 5.0  # until every claim that was taken meanwhile is renewed by the right clock


def disk_full(world: World) -> bool:
    """No file of a run may become larger than an adapter's smaller ones, until a run has stopped for it."""
    before = set(_stops(world))
    with full_disk(world):
        while expected(world.submit().kind)[0] != "ready":
            pass  # what is refused at once needs no room; every second one is good
        return wait_until(lambda: set(_stops(world)) - before, _FULL_S)


@contextmanager
def full_disk(world: World) -> Iterator[None]:
    """No file of a run on any worker may become larger than an adapter's smaller ones: as if they shared a disk.

    Of runs alone: a worker itself writes a log, which has that size already. They inherit the limit from the process
    that forks them, which writes nothing.
    """
    _limit(world, _LARGEST_FILE)
    try:
        yield
    finally:
        _limit(world, resource.RLIM_INFINITY)


def _limit(world: World, size: int) -> None:
    """Set the soft limit, which may be raised again; twice, for runs that are forked meanwhile."""
    forking = [one.main for one in world.topology.instances["worker"] if one.runs]
    for _ in range(2):
        for pid in (*forking, *(run.pid for run in list_runs(world.topology))):
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def _stops(world: World) -> Iterator[tuple[str, int]]:
    """The adapters without a verdict whose last step stopped for want of room, with the number of their steps."""
    for sent in world.open_adapters():
        ledger = world.read_ledger(sent)
        if ledger is not None and ledger.steps:
            last = ledger.steps[-1]
            if last.outcome is Outcome.STOPPED and last.result.get("code") == "disk_full":
                yield sent.digest, len(ledger.steps)


def clock_jump(world: World) -> bool:
    """The clock of a worker, or of Prefect's background half, jumps ahead or back, and is right again after seconds.

    No run of that worker is to be killed before it is: its claim would then last as long as the clock was ahead.
    """
    places = [("services", 0), *(("worker", n) for n in range(len(world.topology.instances["worker"])))]
    service, number = world.rng.choice(places)
    seconds = world.rng.choice(_JUMPS_S)
    world.topology.move_clock(service, seconds, number)
    try:
        time.sleep(world.rng.uniform(*_JUMPED_S))
    finally:
        world.topology.move_clock(service, 0, number)
    if service == "worker" and seconds > 0:
        time.sleep(_RENEWED_S)
    return bool(world.topology.instances[service][number].runs)


LIMITS: dict[str, Callable[[World], bool]] = {one.__name__: one for one in (disk_full, clock_jump)}
