"""`roster status`: what runs, what is on its way, what waits, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flows.cli.output import AsJson, emit, say

if TYPE_CHECKING:
    from flows.findings import Finding
    from flows.overview import PrefectView
    from flows.standing import Standing
    from roster.rows import ProblemRow
    from tasks.engine_health import EngineHealth

_SHOWN = 20  # lines of one kind; --json has them all


def status(*, base: str | None = None, json: AsJson = False) -> int:
    """Say what runs, what is on its way, what waits or needs a person, and what to do next.

    It asks the store, Prefect and the engines, each for a few seconds at most; what does not answer is named, and the
    rest told all the same. It ends with 3 when one of the store, Prefect and the catalog could not be looked at.

    Parameters
    ----------
    base:
        Only the adapters for this base, and its engine; uploads that name no base, and Prefect's runs, are told all.
    """
    from flows.findings import list_findings
    from flows.services import read_untested
    from flows.settings import load_settings
    from flows.standing import look_around

    settings = load_settings()
    standing = look_around(settings, now=datetime.now(UTC))
    if base is not None:
        standing = _narrow(standing, base)
    services = standing.services
    found = read_untested(settings.home, services) if services else {}
    untested = {name: parts for name, parts in found.items() if base in (None, name)}
    findings = list_findings(standing)

    def show() -> None:
        _show_services(standing)
        for base, parts in untested.items():
            say(f"engine of {base}: not verified by anybody: {', '.join(parts)}")
        _show_prefect(standing)
        _show_store(standing)
        _show_catalog(standing)
        _show_findings(findings)

    emit(_document(standing, untested, findings), as_json=json, show=show)
    return 0 if standing.is_whole else 3


def _narrow(standing: Standing, base: str) -> Standing:
    """The same, of one base alone where a thing is of a base.

    Raises:
        UnknownBase: the store knows every base, and not this one.
    """
    from storage.errors import UnknownBase

    store, catalog, prefect = standing.store, standing.catalog, standing.prefect
    if store is not None:
        known = [one.base for one in store.engines]
        if base not in known:
            raise UnknownBase(base, known)
        uploads = tuple(one for one in store.uploads if one.base in (None, base))
        engines = tuple(one for one in store.engines if one.base == base)
        store = replace(store, uploads=uploads, engines=engines)
    if catalog is not None:
        catalog = replace(
            catalog,
            authors=tuple(row for row in catalog.authors if row.base == base),
            waiting=tuple(row for row in catalog.waiting if row.base == base),
            problems=tuple(row for row in catalog.problems if row.base in (None, base)),
        )
    if prefect is not None:
        prefect = replace(prefect, leases=tuple(one for one in prefect.leases if one.base == base))
    return replace(standing, store=store, catalog=catalog, prefect=prefect)


def _document(
    standing: Standing, untested: dict[str, tuple[str, ...]], findings: Sequence[Finding]
) -> dict[str, Any]:
    catalog, prefect, store = standing.catalog, standing.prefect, standing.store
    return {
        "home": str(standing.home),
        "services": list(standing.services.addresses) if standing.services else None,
        "untested": {base: list(parts) for base, parts in untested.items()},
        "store": standing.store_endpoint,
        "catalog_fault": standing.catalog_fault,
        "synced_at": catalog.synced_at if catalog else None,
        "ready": sum(row.is_ready for row in catalog.authors) if catalog else 0,
        "in_progress": [
            asdict(row) for row in (catalog.authors if catalog else ()) if row.newest_state == "in_progress"
        ],
        "waiting": [asdict(row) for row in (catalog.waiting if catalog else ())],
        "problems": [asdict(row) for row in (catalog.problems if catalog else ())],
        "store_fault": standing.store_fault,
        "prefect": standing.prefect_api_url,
        "prefect_fault": standing.prefect_fault,
        "pool_paused": prefect.pool_paused if prefect else None,
        "queues": _told(prefect.queues if prefect else ()),
        "workers": _told(prefect.workers if prefect else ()),
        "runs": _told(prefect.runs if prefect else ()),
        "leases": _told(prefect.leases if prefect else ()),
        "uploads": _told(store.uploads if store else ()),
        "engines": _told(store.engines if store else ()),
        "restarts": {child: one.model_dump(mode="json") for child, one in standing.restarts.items()},
        "next": _told(findings),
    }


def _told(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows for JSON, with times in ISO 8601."""
    return [
        {
            name: value.isoformat(timespec="seconds") if isinstance(value, datetime) else value
            for name, value in asdict(row).items()
        }
        for row in rows
    ]


def _show_services(standing: Standing) -> None:
    if standing.services:
        say(f"running: {', '.join(standing.services.addresses)}")
    elif standing.owner:
        say(
            f"the embedded services of {standing.home} are starting or stopping, process {standing.owner.pid}"
        )
    elif standing.store_endpoint:
        say(f"store: {standing.store_endpoint}, Prefect: {standing.prefect_api_url or 'none'} (as set)")
    else:
        say(f"no embedded services run in {standing.home}; start them with: roster up")


def _show_prefect(standing: Standing) -> None:
    from flows.ages import format_age

    view = standing.prefect
    if view is None:
        if standing.prefect_fault is not None:
            say(standing.prefect_fault)
        return
    say(_describe_pool(standing, view))
    lines = [
        f"{run.author or '?'}/{run.run or '?'}: {run.state} for {format_age(standing.now - run.since)}: {run.url}"
        for run in view.runs
    ]
    _say_each("runs on their way", lines, of=view.on_their_way)
    for lease in view.leases:
        if lease.taken:
            changed = format_age(standing.now - lease.changed_at) if lease.changed_at else "?"
            say(f"engine of {lease.base}: its lease is taken, since {changed}")


def _describe_pool(standing: Standing, view: PrefectView) -> str:
    from flows.ages import format_age

    heard = [worker.last_heartbeat for worker in view.alive if worker.last_heartbeat is not None]
    last = f" (heard {format_age(standing.now - max(heard))} ago)" if heard else ""
    queues = ", ".join(
        f"{queue.name} {queue.depth}{' paused' if queue.paused else ''}" for queue in view.queues
    )
    paused = " paused," if view.pool_paused else ""
    return f"Prefect:{paused} {len(view.alive)} workers alive{last}; due and not begun: {queues or 'nothing'}"


def _show_store(standing: Standing) -> None:
    from flows.ages import format_age

    if standing.store_fault is not None:
        say(standing.store_fault)
    if standing.store is None:
        return
    for engine in standing.store.engines:
        say(f"engine of {engine.base}: {_describe_engine(engine)}")
    lines = [
        f"{one.author}/{one.run}: {one.state}{f' ({one.code})' if one.code else ''}, "
        f"submitted {format_age(standing.now - one.since)} ago{f': {one.reason}' if one.reason else ''}"
        for one in standing.store.uploads
    ]
    _say_each("uploads without a verdict, the oldest first", lines)


def _describe_engine(engine: EngineHealth) -> str:
    if engine.url is None or engine.problem is not None:
        return engine.problem or "no address is registered"
    return f"{engine.url} answers, vLLM {engine.vllm_version or 'unknown'}, qualification: {engine.qualified}"


def _show_catalog(standing: Standing) -> None:
    view = standing.catalog
    if view is None:
        say(str(standing.catalog_fault))
        return
    on_the_way = sum(row.newest_state == "in_progress" for row in view.authors)
    ready = sum(row.is_ready for row in view.authors)
    say(f"{ready} ready, {on_the_way} on their way (sync of {view.synced_at})")
    _say_each("waiting", [f"{w.author}/{w.run}: {w.state} ({w.code}): {w.reason}" for w in view.waiting])
    _say_each("to look at", [_describe_problem(row) for row in view.problems])


def _show_findings(findings: Sequence[Finding]) -> None:
    say(f"what to do next: {'nothing' if not findings else ''}".rstrip())
    for finding in findings:
        say(f"  {finding.says}")
        say(f"    -> {finding.do}")


def _say_each(title: str, lines: Sequence[str], *, of: int | None = None) -> None:
    count = len(lines) if of is None else of
    say(f"{title}: {count or 'nothing'}")
    for line in lines[:_SHOWN]:
        say(f"  {line}")
    if count > _SHOWN:
        say(f"  and {count - _SHOWN} more (--json lists {'them' if count == len(lines) else len(lines)})")


def _describe_problem(row: ProblemRow) -> str:
    adapter = "/".join(part for part in (row.author, row.run) if part)
    return f"{adapter or row.base or 'an object'}: {row.problem} ({row.code}): {row.reason}"
