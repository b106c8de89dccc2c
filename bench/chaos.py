"""Adapters of all outcomes through the whole pipeline while everything in it is killed, cut off, filled up and misled.

The services are those of docker-compose.yml, natively; the workers reach the store through a proxy that spoils some
answers. Whatever the seed does to them, at the end every adapter has the one verdict, and the converted bytes, of an
undisturbed run; no process is left over; nothing is partial under serving/; no entry of a ledger is lost; and whoever
read the roster, a catalog or serving/ meanwhile never saw a torn state.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bench.chaos_calm import play_undisturbed, scripted_engine
from bench.chaos_drive import Driver, say, settle
from bench.chaos_faults import NAMES
from bench.chaos_judge import Findings, judge
from bench.chaos_processes import list_runs, wait_until
from bench.chaos_watch import CatalogWatch, LedgerWatch, RosterWatch, ServingWatch, Watch, watching
from bench.chaos_world import World
from bench.machine import describe_machine
from bench.prefect_runs import connected
from bench.tiny_world import kept_with_tests
from flows.guard import list_descendants
from flows.processes import is_same_process
from flows.settings import Settings, base_environment, take_environment

if TYPE_CHECKING:
    from bench.chaos_cpu import CpuBase

HELP = "does every adapter end as it should, whatever is killed, cut off or filled up meanwhile?"
RESULT = Path(__file__).resolve().parent / "results" / "chaos.json"
VARIABLES = {
    "ROSTER_CLAIM_SECONDS": "10",
    "ROSTER_SWEEP_GRACE_SECONDS": "0",
    "ROSTER_DEAD_AFTER_SECONDS": "40",
    "ROSTER_MAX_OPPONENTS": "1",
    "ROSTER_SYNC_WINDOW_SECONDS": "1",
    "ROSTER_MAX_DROP": "1",
}
_FAULTS_SHARE = 0.8  # of the minutes; the rest is for the verdicts and for the undisturbed run
_SETTLED_SHARE = 0.9
_QUIET_S = 60.0
_STRAYED_S = 2.0
_SETTLED_S = 120.0  # at the least: a machine that is slow is no fault of what is judged


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures."""
    parser = argparse.ArgumentParser(prog="./run bench chaos [--json]", description=HELP)
    parser.add_argument("--seed", type=int, help="of all that is drawn; another one each time if left out")
    parser.add_argument("--adapters", type=int, default=60, help="how many at the least")
    parser.add_argument("--faults", type=int, default=10, help="how many of each class at the least")
    parser.add_argument("--minutes", type=float, default=45, help="how long all of it may take")
    parser.add_argument("--only", nargs="*", metavar="CLASS", help="these classes of faults; none to look on")
    parser.add_argument(
        "--scripted", action="store_true", help="without vLLM, which scores some adapters else"
    )
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    _require_programs()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    say(f"seed {seed}")
    wanted = {name: options.faults for name in NAMES if options.only is None or name in options.only}
    begun = time.monotonic()
    trained = None if options.scripted else _train()
    figures = _play(seed, options.adapters, wanted, options.minutes * 60, trained)
    figures |= {"seconds": round(time.monotonic() - begun), "machine": describe_machine()}
    figures["passed"] &= figures["seconds"] <= options.minutes * 60
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    out = Console(highlight=False)
    table = Table("class", "faults", "tried", title=f"{figures['adapters']} adapters, seed {figures['seed']}")
    for name, count in figures["faults"].items():
        table.add_row(name, str(count), str(figures["tried"].get(name, 0)))
    out.print(table)
    for name in (
        "outcomes",
        "lost",
        "doubled",
        "differing",
        "partial",
        "orphans",
        "torn",
        "missing",
        "looks",
    ):
        out.print(f"{name}: {figures[name]}")
    out.print(f"{figures['seconds']} s: {'passed' if figures['passed'] else 'FAILED'}")


def _require_programs() -> None:
    """Say what is missing, before anything begins.

    Raises:
        SystemExit: something is.
    """
    instances = kept_with_tests("topology_instances")
    missing = instances.missing_programs() + ([] if instances.has_faketime() else ["faketime"])
    if missing:
        message = (
            f"not installed here: {', '.join(missing)} (apt-get install postgresql redis-server faketime)"
        )
        raise SystemExit(message)


def _train() -> CpuBase:
    from bench.chaos_cpu import prepare  # brings what trains

    return prepare(say=say)


def _play(
    seed: int, adapters: int, wanted: Mapping[str, int], seconds: float, trained: CpuBase | None
) -> dict[str, Any]:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        with _disturbed(Path(folder), seed, trained) as world:
            watches = _watches(world)
            say(f"the services are up after {time.monotonic() - begun:.0f} s")
            with watching(watches):
                driver = Driver(world, wanted, adapters)
                driver.drive(begun + seconds * _FAULTS_SHARE - time.monotonic())
                say(f"no faults any more; missing {driver.missing()}")
                left = begun + seconds * _SETTLED_SHARE - time.monotonic()
                open_ = settle(world, max(_SETTLED_S, left))
                orphans = _list_orphans(world, quiet=not open_)
            say(f"{time.monotonic() - begun:.0f} s: the undisturbed run begins")
            undisturbed = play_undisturbed(world, VARIABLES, say)
            findings = judge(world.store, world.sent, undisturbed, open_=open_)
        orphans += [f"left over: {left}" for left in world.topology.leftovers() if left]
    outcomes = Counter(one.outcome or "none" for one in undisturbed.values())
    return _figures(seed, driver, findings, watches, orphans) | {"outcomes": dict(sorted(outcomes.items()))}


def _figures(
    seed: int, driver: Driver, findings: Findings, watches: Sequence[Watch], orphans: list[str]
) -> dict[str, Any]:
    torn = [f"{watch.name}: {fault}" for watch in watches for fault in watch.faults]
    # An entry that a ledger has lost again is lost, whoever notices.
    findings.lost += [one for one in torn if one.startswith("ledgers: ")]
    missing = driver.missing()
    faulty = any(asdict(findings).values()) or torn or orphans
    return {
        "seed": seed,
        "adapters": len(driver.world.sent),
        "faults": driver.faults(),
        "tried": dict(driver.tried),
        "missing": missing,
        **asdict(findings),
        "orphans": orphans,
        "torn": torn,
        "looks": {f"{watch.name} {number}": watch.looks for number, watch in enumerate(watches)},
        "passed": not faulty and not missing,
    }


@contextmanager
def _disturbed(folder: Path, seed: int, trained: CpuBase | None) -> Iterator[World]:
    """The topology with the proxy, the engine and the bases registered; everything ends with the block."""
    builders, faults = kept_with_tests("topology_builders"), kept_with_tests("fault_proxy")
    proxies: list[Any] = []

    def before(store: str) -> str:
        if not proxies:  # one for all workers
            proxies.append(faults.FaultProxy(store, silent_s=4, pause_s=1).__enter__())
        return str(proxies[0].endpoint)

    environment = base_environment()
    try:
        with (
            scripted_engine() as engine,
            builders.start_topology(
                folder,
                variables=VARIABLES,
                store_endpoint=before,
                faketime=("worker", "services"),
                engine=None if trained is None else trained.model,
            ) as topology,
            connected(topology.api_url, topology.auth),
        ):
            take_environment({**environment, "PREFECT_API_AUTH_STRING": topology.auth})
            store = topology.store.open("roster")
            kept_with_tests("refuse_builders").prepare(store, engine.url)
            settings = Settings(prefect_api_url=topology.api_url)
            if trained is not None:
                from bench.chaos_cpu import engine_url, register

                register(store, trained, engine_url(topology))
            rng = random.Random(seed)
            yield World(folder, topology, proxies[0], store, engine, rng, settings, trained)
    finally:
        take_environment(environment)
        for proxy in proxies:
            proxy.__exit__(None, None, None)


def _watches(world: World) -> list[Watch]:
    store = world.store
    catalogs = [CatalogWatch(home / "catalog.duckdb") for home in world.topology.homes]
    return [LedgerWatch(store), RosterWatch(store), ServingWatch(store), *catalogs]


def _list_orphans(world: World, *, quiet: bool) -> list[str]:
    """Runs that were killed and live, runs at work where all is quiet, and what no service's process 1 is above."""
    found = [f"process {pid} was killed" for pid, ticks in world.killed if is_same_process(pid, ticks)]
    # A sweep or a sync may be at work just now.
    if quiet and not wait_until(lambda: not list_runs(world.topology), _QUIET_S):
        found += [f"process {one.pid} of worker {one.worker}" for one in list_runs(world.topology)]
    strays = _list_strays(world)
    time.sleep(_STRAYED_S)  # what is just being started or ended is none
    return found + [f"process {pid} of no service" for pid in sorted(strays & _list_strays(world))]


def _list_strays(world: World) -> set[int]:
    kept: set[int] = set()
    for instances in world.topology.instances.values():
        for one in instances:
            if one.guard is not None:
                kept |= {one.guard.pid, *list_descendants(one.guard.pid)}
    pids, _ = world.topology.leftovers()
    return set(pids) - kept
