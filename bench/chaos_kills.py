"""Faults of the chaos bench: SIGKILL for a process of each kind; services are started again after a moment.

None waits for the pipeline to get over it. What docker would start again by itself is started again too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.chaos_processes import ask_for, call_off, find_asking, kill, list_runs, restart, revive, wait_until
from bench.chaos_world import World
from bench.tiny_world import kept_with_tests

_AT_WORK_S = 15.0  # until a run is at work
_HEALTHY_S = 60.0  # until a worker that was started again is
_SYNC_S = 20.0  # until a sync that was asked for is
_CHANCE_S = 1.5  # until a sync asks the store for what was chosen
_ENGINE = "engine-cpu"
_OF_A_SYNC = ("list-type=2&prefix=ledger", "roster/current.json", "roster/", "ledger/")


def kill_flow(world: World) -> bool:
    """A run that holds an adapter."""
    pids: list[int] = []

    def found() -> bool:
        pids[:] = sorted(world.run_pids().values())
        return bool(pids)

    if not wait_until(found, _AT_WORK_S):
        return False
    ours = {one.pid for one in list_runs(world.topology)}
    pid = world.rng.choice(pids)
    return pid in ours and kill(world, pid)


def kill_worker(world: World) -> bool:
    """A worker: as its machine ends, or the process alone that asks for runs, or the one alone that forks them.

    With the first its runs end at the same moment, with the others they are told to stop. The other worker goes on, so
    that this one is not waited for.
    """
    workers = world.topology.instances["worker"]
    number = world.rng.randrange(len(workers))
    if not wait_until(workers[number].is_healthy, _HEALTHY_S):
        return False
    how = world.rng.choice(("machine", "asks", "forks"))
    for run in list_runs(world.topology):
        if run.worker == number:
            world.note_killed(run.pid)
    main = workers[number].main
    if how == "machine":
        world.topology.kill("worker", number)
        happened = True
    elif how == "forks":
        happened = kill(world, main)
    else:
        asking = find_asking(main)
        happened = asking is not None and kill(world, asking)
    pause(world)
    workers[number].stop()
    workers[number].start()
    return happened


def kill_engine(world: World) -> bool:
    """The scripted engine, which then has forgotten what was loaded; one time in five vLLM, where it runs too."""
    if _ENGINE in world.topology.instances and world.rng.random() < 0.2:
        return _kill_service(world, _ENGINE)
    world.engine.kill()
    pause(world)
    world.engine.restart()
    return True


def kill_sync(world: World) -> bool:
    """The run of a sync: at one of its requests to the store, which is not carried out, or at any moment."""
    flow_run = ask_for("sync/sync")
    killed: list[int] = []

    def kill_it(body: bytes = b"") -> None:
        killed.extend(
            one.pid for one in list_runs(world.topology) if one.flow_run == flow_run and kill(world, one.pid)
        )

    key_part = world.rng.choice((*_OF_A_SYNC, None))
    moment = world.rng.uniform(0, _CHANCE_S)
    if flow_run is None or not wait_until(
        lambda: any(one.flow_run == flow_run for one in list_runs(world.topology)), _SYNC_S
    ):
        call_off(flow_run)
        return False
    if key_part is None:
        time.sleep(moment)
    else:
        reset = kept_with_tests("fault_proxy").FaultKind.RESET
        trap = world.proxy.one(reset, key_part=key_part, when_met=kill_it)
        wait_until(lambda: killed, _CHANCE_S)
        world.proxy.withdraw(trap)
    if not killed:
        kill_it()
    return bool(killed)


def kill_server(world: World) -> bool:
    """Prefect's API."""
    return _kill_service(world, "prefect")


def kill_services(world: World) -> bool:
    """Prefect's background half."""
    return _kill_service(world, "services")


def kill_store(world: World) -> bool:
    """The object store."""
    return _kill_service(world, "store")


def kill_postgres(world: World) -> bool:
    """The database of Prefect."""
    return _kill_service(world, "postgres")


def kill_redis(world: World) -> bool:
    """Where Prefect keeps events and leases."""
    return _kill_service(world, "redis")


def pause(world: World) -> None:
    """The time that something stays dead."""
    time.sleep(world.rng.uniform(0.2, 3))


def _kill_service(world: World, name: str) -> bool:
    happened = bool(world.topology.pids(name))
    world.topology.kill(name)
    pause(world)
    restart(world, name)
    revive(world)
    return happened


KILLS: dict[str, Callable[[World], bool]] = {
    one.__name__: one
    for one in (
        kill_flow,
        kill_worker,
        kill_server,
        kill_services,
        kill_engine,
        kill_store,
        kill_sync,
        kill_postgres,
        kill_redis,
    )
}
