"""How everything stands: one look at the home, the store, Prefect, the engines and the catalog, whatever is down."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flows import connect
from flows.embedded_restarts import ChildRestarts, read_restarts
from flows.overview import PrefectSilent, PrefectView, look_at_prefect
from flows.services import Owner, Services, read_owner, read_services
from flows.settings import Settings, SettingsIncomplete
from roster.catalog import open_catalog
from roster.errors import CatalogMissing, RosterError
from roster.rows import AuthorRow, OutcomeRow, ProblemRow, ReadyRow, StepTimeRow, WaitingRow
from roster.serving import Roster
from storage.documents import read_document
from storage.errors import InvalidDocument, ObjectNotFound, StoreNotTrusted, StoreUnavailable
from storage.keys import roster_key
from storage.s3 import S3Store
from tasks.at_rest import MEMORY_FILE
from tasks.engine_health import EngineHealth, look_at_engines
from tasks.inbox import PendingUpload, list_pending

_ENGINE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class StoreView:
    """What the store says: uploads without a verdict, the oldest first, engines, the published roster's version.

    `roster_version` is None where none is published, or none that we understand.
    """

    uploads: tuple[PendingUpload, ...]
    engines: tuple[EngineHealth, ...]
    roster_version: int | None


@dataclass(frozen=True, slots=True)
class CatalogView:
    """What this machine's catalog says, as of `synced_at` (ISO 8601, UTC)."""

    synced_at: str
    authors: tuple[AuthorRow, ...]
    waiting: tuple[WaitingRow, ...]
    problems: tuple[ProblemRow, ...]
    ready: tuple[ReadyRow, ...]
    outcomes: tuple[OutcomeRow, ...]
    step_times: tuple[StepTimeRow, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """All of it at `now`. A view is None where its fault says why, or where nothing of the kind is set up.

    `catalog_missing`: the catalog's fault is only that there is none yet.
    """

    now: datetime
    home: Path
    services: Services | None
    owner: Owner | None
    store_endpoint: str | None
    prefect_api_url: str | None
    restarts: dict[str, ChildRestarts]
    store: StoreView | None
    store_fault: str | None
    prefect: PrefectView | None
    prefect_fault: str | None
    catalog: CatalogView | None
    catalog_fault: str | None
    catalog_missing: bool

    @property
    def is_whole(self) -> bool:
        """Whether everything that is set up could be looked at."""
        silent = self.catalog_fault is not None and not self.catalog_missing
        return not (silent or self.store_fault or self.prefect_fault)


def look_around(settings: Settings, *, now: datetime) -> Standing:
    """How everything stands, within seconds: what does not answer is named, and the rest told all the same.

    Raises:
        StateUnreadableError: a file that the supervisor wrote into the home is damaged.
    """
    services = read_services(settings.home)
    prefect, prefect_fault = _look_at_prefect(settings.prefect_api_url, now)
    store, store_fault = _look_at_store(settings, services, now)
    catalog, catalog_fault = _look_at_catalog(settings.catalog_path)
    return Standing(
        now=now,
        home=settings.home,
        services=services,
        owner=read_owner(settings.home),
        store_endpoint=settings.store_endpoint,
        prefect_api_url=settings.prefect_api_url,
        restarts=read_restarts(settings.home),
        store=store,
        store_fault=store_fault,
        prefect=prefect,
        prefect_fault=prefect_fault,
        catalog=catalog,
        catalog_fault=str(catalog_fault) if catalog_fault else None,
        catalog_missing=isinstance(catalog_fault, CatalogMissing),
    )


def _look_at_prefect(api_url: str | None, now: datetime) -> tuple[PrefectView | None, str | None]:
    if api_url is None:
        return None, None
    try:
        return look_at_prefect(api_url, now=now), None
    except PrefectSilent as silent:
        return None, str(silent)


def _look_at_store(
    settings: Settings, services: Services | None, now: datetime
) -> tuple[StoreView | None, str | None]:
    try:
        store = connect.open_store_hurried(settings)
    except SettingsIncomplete:
        return None, None
    try:
        uploads = list_pending(
            store, now=now, settle_s=settings.settle_seconds, memory=settings.home / MEMORY_FILE
        )
        embedded = services.engines if services else {}
        engines = look_at_engines(store, embedded, timeout_s=_ENGINE_SECONDS)
        return StoreView(tuple(uploads), engines, _roster_version(store)), None
    except (StoreUnavailable, StoreNotTrusted) as error:
        return None, str(error)


def _roster_version(store: S3Store) -> int | None:
    try:
        return read_document(store, roster_key(), Roster)[0].version
    except (InvalidDocument, ObjectNotFound):
        return None


def _look_at_catalog(path: Path) -> tuple[CatalogView | None, RosterError | None]:
    try:
        with open_catalog(path) as reader:
            view = CatalogView(
                synced_at=reader.synced_at(),
                authors=tuple(reader.authors()),
                waiting=tuple(reader.waiting()),
                problems=tuple(reader.problems()),
                ready=tuple(reader.ready()),
                outcomes=tuple(reader.outcomes()),
                step_times=tuple(reader.step_times()),
            )
    except RosterError as error:
        return None, error
    return view, None
