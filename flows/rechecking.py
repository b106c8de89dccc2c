"""Taking stale verdicts up again: those that rest on another version of the code, or on another engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flows.asking import list_on_their_way, start_onboard
from flows.retry_errors import CatalogBehind
from flows.retry_subjects import read_judged
from roster.catalog import open_catalog
from roster.rows import AdapterRow, StaleRow
from storage.errors import InvalidDocument, ObjectNotFound
from storage.s3 import S3Store
from tasks.job import STEP_VERSIONS


@dataclass(frozen=True, slots=True)
class Recheck:
    """One adapter whose verdict is stale. `steps`: why, such as `inspected 3 → 4` or `engine <id> → <id>`.

    `left` says why no run is asked for, None if one is; `flow_run` is the one that was.
    """

    author: str
    run: str | None
    base: str
    adapter_digest: str
    verdict: str
    steps: tuple[str, ...]
    left: str | None = None
    flow_run: str | None = None


def plan_recheck(store: S3Store, catalog: Path, *, base: str | None) -> list[Recheck]:
    """Every stale verdict that counts, of this base where one is given: of who is served, and of each newest adapter.

    Raises:
        CatalogBehind: the catalog does not know the versions of the code here.
        RosterError: it cannot be read.
        StoreUnavailable, and what Prefect's client raises.
    """
    with open_catalog(catalog) as reader:
        _check_versions({str(kind): str(version) for kind, version in reader.sql(_VERSIONS).rows})
        stale = [row for row in reader.stale() if base in (None, row.base)]
        counting = {digest for row in reader.authors() for digest in (row.ready_digest, row.newest_digest)}
        behind: dict[tuple[str, str], list[StaleRow]] = {}
        for row in stale:
            if row.adapter_digest in counting:
                behind.setdefault((row.author, row.adapter_digest), []).append(row)
        adapters = {
            (one.author, one.adapter_digest): one
            for author in dict.fromkeys(author for author, _ in behind)
            for one in (story.adapter for story in reader.show(author).adapters)
        }
    busy = {(run.author, run.run) for run in list_on_their_way() if not run.seems_dead}
    return [_plan(store, adapters[key], rows, busy) for key, rows in behind.items()]


def carry_out_recheck(planned: Sequence[Recheck], message: str) -> list[Recheck]:
    """The same with the runs that were asked for; `message` is shown on them in the UI.

    A run does what the newer code asks for and what depends on it; what else is finished it skips.

    Raises:
        prefect.exceptions.ObjectNotFound: the deployment is not registered.
    """
    return [one if one.left else _carry_out(one, message) for one in planned]


_VERSIONS = "SELECT kind, version FROM step_versions"


def _check_versions(synced: dict[str, str]) -> None:
    differing = tuple(
        f"{kind} {synced.get(kind, 'none')}, here {version}"
        for kind, version in STEP_VERSIONS.items()
        if synced.get(kind) != version
    )
    if differing:
        raise CatalogBehind(differing)


def _plan(
    store: S3Store, adapter: AdapterRow, rows: Sequence[StaleRow], busy: set[tuple[str, str]]
) -> Recheck:
    found = Recheck(
        author=adapter.author,
        run=adapter.run,
        base=adapter.base,
        adapter_digest=adapter.adapter_digest,
        verdict=str(adapter.verdict),
        steps=tuple(f"{row.kind} {row.recorded or 'none'} → {row.current}" for row in rows),
    )
    if adapter.run is None:
        return replace(found, left="its ledger names no upload")
    if (adapter.author, adapter.run) in busy:
        return replace(found, left="its run is on its way")
    try:
        upload = read_judged(store, adapter.author, adapter.run)
    except (ObjectNotFound, InvalidDocument) as gone:
        return replace(found, left=f"its upload cannot be read any more: {gone}")
    if upload.adapter_digest != adapter.adapter_digest:
        return replace(found, left=f"{upload.label} holds another adapter by now: submit this one again")
    return found


def _carry_out(planned: Recheck, message: str) -> Recheck:
    engines = [step for step in planned.steps if step.startswith("engine ")]
    versions = "-".join([*STEP_VERSIONS.values(), *engines])
    flow_run = start_onboard(
        planned.author,
        str(planned.run),
        key=f"recheck/{planned.author}/{planned.adapter_digest}/{versions}",
        message=message,
    )
    return replace(planned, flow_run=flow_run)
