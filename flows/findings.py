"""What an operator should do next, by how everything stands: one command for each finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from flows.ages import format_age
from flows.deploy import POOL
from flows.overview import LeaseView, PrefectView, RunView
from flows.standing import Standing
from tasks.engine_health import EngineHealth, Qualified
from tasks.inbox import PendingUpload, UploadState
from tasks.outcomes import Code

# What mends itself is given this long before anybody is told.
_PATIENCE = timedelta(minutes=5)
_TRAINERS_PATIENCE = timedelta(hours=1)
# A run claims its adapter within seconds; what nobody holds after this long has died.
_CLAIMED_WITHIN = timedelta(minutes=15)
_LEASE_ENDS_WITHIN = timedelta(minutes=2)
_SYNCED_WITHIN = timedelta(minutes=30)
_RESTARTED_WITHIN = timedelta(hours=1)
_REFUSED = ("quarantined", "inconclusive", "unservable", "unreadable")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not mend itself: what it is, and the command, or the step, that mends it.

    Words in capitals in `do` are for the operator to fill in.
    """

    says: str
    do: str


def list_findings(standing: Standing) -> tuple[Finding, ...]:
    """Every finding, what keeps most from working first; empty if there is nothing to do."""
    return (
        *_of_the_home(standing),
        *_of_prefect(standing),
        *_of_the_store(standing),
        *_of_engines(standing),
        *_of_uploads(standing),
        *_of_the_catalog(standing),
    )


def _of_the_home(standing: Standing) -> Iterator[Finding]:
    if standing.services is None and standing.owner is None and not standing.store_endpoint:
        yield Finding(f"no embedded services run in {standing.home}, and no store is set", "roster up")
    for child, restarts in sorted(standing.restarts.items()):
        age = standing.now - restarts.last_at
        if age < _RESTARTED_WITHIN:
            yield Finding(
                f"{child} had to be started again {format_age(age)} ago ({restarts.last_status}), "
                f"{restarts.count} times in all",
                f"tail -n 50 {standing.home / 'logs' / f'{child}.log.1'}",
            )


def _of_prefect(standing: Standing) -> Iterator[Finding]:
    view = standing.prefect
    if standing.prefect_fault is not None:
        yield Finding(
            standing.prefect_fault, _look_at(standing, "prefect", f"{standing.prefect_api_url}/health")
        )
    if view is None:
        return
    if view.unfit is not None:
        yield Finding(view.unfit, "prefect version")
    if view.pool_paused is None or view.missing:
        lacks = ", ".join(view.missing) or f"the pool {POOL}"
        yield Finding(f"not registered with Prefect: {lacks}", "python -m flows.deploy")
    for name, schedule in view.resting.items():
        says = f"the schedule of {name} is paused: what events lose is not found" if name == "sweep" else ""
        yield Finding(
            says or f"the schedule of {name} is paused",
            f"prefect deployment schedule resume {name}/{name} {schedule}",
        )
    if view.pool_paused:
        yield Finding(f"the pool {POOL} is paused: no run starts", f"prefect work-pool resume {POOL}")
    for queue in view.queues:
        if queue.paused:
            yield Finding(
                f"the queue {queue.name} is paused: {queue.depth} runs wait in it",
                f"prefect work-queue resume {queue.name} --pool {POOL}",
            )
    if view.pool_paused is not None and not view.alive:
        start = f"python -m flows.forking --pool {POOL} --limit 2"
        do = _look_at(standing, "worker", None) if standing.services else start
        yield Finding(_no_worker(standing, view), do)
    for run in view.runs:
        yield from _of_a_run(standing, run)
    for lease in view.leases:
        yield from _of_a_lease(standing, view, lease)


def _no_worker(standing: Standing, view: PrefectView) -> str:
    seen = [worker.last_heartbeat for worker in view.workers if worker.last_heartbeat is not None]
    last = f", the last was heard {format_age(standing.now - max(seen))} ago" if seen else ""
    waiting = sum(queue.depth for queue in view.queues)
    due = [run for run in view.runs if run.due]
    states = sorted({run.state for run in due})
    longest = (
        f" ({', '.join(states)}; the longest for {format_age(standing.now - min(run.since for run in due))})"
        if due
        else ""
    )
    return f"no worker polls the pool {POOL}{last}: {waiting} runs wait{longest}"


def _of_a_run(standing: Standing, run: RunView) -> Iterator[Finding]:
    age = standing.now - run.since
    label = f"run {run.name} of {_label(run.author, run.run)}"
    if run.state == "Pending" and age > _PATIENCE:
        yield Finding(
            f"{label} has been Pending for {format_age(age)}: the worker that took it has died",
            f"prefect flow-run cancel {run.id}",
        )
    elif run.state == "Cancelling" and age > _PATIENCE:
        yield Finding(
            f"{label} has been Cancelling for {format_age(age)}: no worker is left that could end it",
            f"prefect flow-run delete {run.id}",
        )
    elif run.state == "Running" and age > _CLAIMED_WITHIN and run.author and run.run and standing.store:
        held = {
            (upload.author, upload.run)
            for upload in standing.store.uploads
            if upload.state is UploadState.CLAIMED
        }
        if (run.author, run.run) not in held:
            yield Finding(
                f"{label} is shown as Running for {format_age(age)}, but nobody holds its adapter: it has died",
                f"roster retry {run.author}/{run.run}",
            )


def _of_a_lease(standing: Standing, view: PrefectView, lease: LeaseView) -> Iterator[Finding]:
    """A lease whose holder is gone. A run that began after it was taken is not its holder."""
    taken_at = lease.changed_at
    if lease.taken < lease.slots or taken_at is None or standing.now - taken_at < _LEASE_ENDS_WITHIN:
        return
    if view.others_at_work or any(run.at_work and run.since <= taken_at for run in view.runs):
        return
    yield Finding(
        f"the lease of the engine of {lease.base} is taken for {format_age(standing.now - taken_at)}, and no run can "
        "be its holder. Unless a command (roster qualify, score, matrix) is at the engine, free it",
        f"prefect gcl update {lease.name} --active-slots 0",
    )


def _of_the_store(standing: Standing) -> Iterator[Finding]:
    if standing.store_fault is not None:
        url = standing.store_endpoint
        yield Finding(standing.store_fault, _look_at(standing, "store", f"{url}/" if url else None))


def _of_engines(standing: Standing) -> Iterator[Finding]:
    for engine in standing.store.engines if standing.store else ():
        yield from _of_an_engine(standing, engine)


def _of_an_engine(standing: Standing, engine: EngineHealth) -> Iterator[Finding]:
    base = engine.base
    who = f"engine of {base}"
    again = "start it again with our plugins (docs/engine.md)"
    if engine.url is None:
        yield Finding(f"{who}: {engine.problem}", f"roster base add {base} --config DIR --engine-url URL")
    elif not engine.answers:
        yield Finding(
            f"{who}: {engine.problem}",
            _look_at(standing, f"engine-{base}", f"{engine.url.rstrip('/')}/health"),
        )
    elif engine.problem is not None:
        yield Finding(f"{who}: {engine.problem}", again)
    elif engine.qualified is not Qualified.PASSED:
        failed = f": {'; '.join(engine.failures)}" if engine.failures else ""
        says = {
            Qualified.FAILED: f"{who} has failed its qualification{failed}",
            Qualified.NEVER: f"{who} was never qualified: nothing is scored on it",
            Qualified.UNREADABLE: f"{who}: its qualification cannot be read{failed}",
        }[engine.qualified]
        yield Finding(says, f"roster qualify --base {base}")


def _of_uploads(standing: Standing) -> Iterator[Finding]:
    kinds: dict[tuple[UploadState, str], list[PendingUpload]] = {}
    for upload in standing.store.uploads if standing.store else ():
        if _is_overdue(upload, standing.now):
            kinds.setdefault((upload.state, upload.code or ""), []).append(upload)
    for (state, code), uploads in kinds.items():
        first = uploads[0]
        others = f" and {len(uploads) - 1} more" if len(uploads) > 1 else ""
        why = f" ({code})" if code else ""
        reason = f": {first.reason}" if first.reason else ""
        age = format_age(standing.now - first.since)
        says = f"{_label(first.author, first.run)}{others}: {state}{why}, submitted {age} ago{reason}"
        yield Finding(says, _mend(state, code, first, many=len(uploads) > 1))


def _is_overdue(upload: PendingUpload, now: datetime) -> bool:
    """Whether it is time that somebody did something about an upload."""
    age = now - (upload.changed_at or upload.since)
    if upload.state in (UploadState.CLAIMED, UploadState.SETTLING, UploadState.RETIRED):
        return False
    if upload.state in (UploadState.NEW, UploadState.DIED):
        return age > _PATIENCE
    return age > _TRAINERS_PATIENCE if upload.state is UploadState.INCOMPLETE else True


def _mend(state: UploadState, code: str, upload: PendingUpload, *, many: bool) -> str:
    author, run = upload.author, upload.run
    if state is UploadState.WAITING and code == Code.NO_HELDOUT:
        return f"roster heldout add {author} NAME FILE"
    if state is UploadState.WAITING and code == Code.UNKNOWN_BASE:
        return f"roster base add {upload.base or 'BASE'} --config DIR"
    if state is UploadState.STOPPED:
        return f"roster retry --failed --code {code}" if many and code else f"roster retry {author}/{run}"
    if state is UploadState.DIED:
        return f"roster retry {author}/{run}"
    if state is UploadState.NEW:
        return "prefect deployment run sweep/sweep"
    return f"roster submit DIR --author {author} --run {run} --base {upload.base or 'BASE'}"


def _of_the_catalog(standing: Standing) -> Iterator[Finding]:
    view = standing.catalog
    if standing.catalog_missing:
        if standing.store is not None:
            yield Finding("this machine has no catalog yet", "roster sync")
    elif standing.catalog_fault is not None:
        yield Finding(standing.catalog_fault, "roster rebuild")
    if view is None:
        return
    age = standing.now - datetime.fromisoformat(view.synced_at)
    if age > _SYNCED_WITHIN:
        works = standing.prefect is not None and "sync" not in standing.prefect.missing
        do = "prefect deployment run sync/sync" if works else "roster sync"
        yield Finding(f"the catalog was last synced {format_age(age)} ago", do)
    refused = [row for row in view.problems if row.problem in _REFUSED]
    if refused:
        first = refused[0]
        others = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        label = _label(first.author, first.run)
        do = f"roster why {first.author}" if first.author else "roster sql 'SELECT * FROM problems'"
        yield Finding(f"{label}{others}: {first.problem} ({first.code})", do)


def _look_at(standing: Standing, child: str, url: str | None) -> str:
    """The command that shows what is the matter with a service: its log where it runs here, else its address."""
    log = standing.services.logs.get(child) if standing.services else None
    if log is not None:
        return f"tail -n 50 {log}"
    return f"curl -sS -m 5 {url}" if url else "look at its log, on the machine where it runs"


def _label(author: str | None, run: str | None) -> str:
    return "/".join(part for part in (author, run) if part) or "an object"
