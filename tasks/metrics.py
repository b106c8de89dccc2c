"""The figures that a monitoring system watches, in Prometheus's text form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from roster.rows import OutcomeRow, StepTimeRow
from tasks.inbox import UploadState


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine: whether it answers at its address, and whether it has passed its qualification."""

    base: str
    up: bool
    qualified: bool


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """What the store says: by state the uploads without a verdict and the age of the oldest, in seconds; engines."""

    uploads: Mapping[UploadState, int]
    oldest_s: Mapping[UploadState, float]
    engines: tuple[EngineFigures, ...]
    roster_version: int | None


@dataclass(frozen=True, slots=True)
class CatalogFigures:
    """What this machine's catalog says; `sync_age_s` is how long ago it was last synced, in seconds."""

    outcomes: tuple[OutcomeRow, ...]
    step_times: tuple[StepTimeRow, ...]
    roster_size: Mapping[str, int]
    sync_age_s: float


@dataclass(frozen=True, slots=True)
class PrefectFigures:
    """What Prefect says: workers alive, runs of `onboard` by the name of their state, runs that wait by queue."""

    workers_alive: int
    runs: Mapping[str, int]
    queued: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """All of them. A part that could not be looked at is None, and then none of its figures are told.

    `restarts` counts how often each embedded service had to be started again.
    """

    store: StoreFigures | None
    catalog: CatalogFigures | None
    prefect: PrefectFigures | None
    restarts: Mapping[str, int]


def format_metrics(figures: Figures) -> str:
    """The figures as text for Prometheus, version 0.0.4 of its exposition format.

    Source: prometheus.io/docs/instrumenting/exposition_formats.
    """
    registry = CollectorRegistry()
    registry.register(_Collected(figures))
    return generate_latest(registry).decode()


class _Collected:
    """Figures as prometheus_client wants to collect them."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """Return every family of metrics."""
        figures = self._figures
        looked_at = {
            "store": figures.store is not None,
            "catalog": figures.catalog is not None,
            "prefect": figures.prefect is not None,
        }
        yield _gauge(
            "roster_source_up",
            "Whether this part could be looked at; without it its metrics are missing.",
            ("source",),
            {(name,): float(up) for name, up in looked_at.items()},
        )
        restarts = CounterMetricFamily(
            "roster_service_restarts",
            "How often an embedded service had to be started again.",
            labels=["service"],
        )
        for service, count in figures.restarts.items():
            restarts.add_metric([service], count)
        yield restarts
        if figures.store is not None:
            yield from _of_store(figures.store)
        if figures.catalog is not None:
            yield from _of_catalog(figures.catalog)
        if figures.prefect is not None:
            yield from _of_prefect(figures.prefect)


def _of_store(store: StoreFigures) -> Iterable[Metric]:
    yield _gauge(
        "roster_uploads",
        "Uploads that have no verdict, by what they are at.",
        ("state",),
        {(state,): store.uploads.get(state, 0) for state in UploadState},
    )
    yield _gauge(
        "roster_oldest_unprocessed_upload_seconds",
        "How long ago the oldest upload without a verdict was submitted, by what it is at; 0 where there is none.",
        ("state",),
        {(state,): store.oldest_s.get(state, 0.0) for state in UploadState},
    )
    yield _gauge(
        "roster_engine_up",
        "Whether an engine of this base answers at its address.",
        ("base",),
        {(engine.base,): float(engine.up) for engine in store.engines},
    )
    yield _gauge(
        "roster_engine_qualified",
        "Whether the published engine of this base has passed its qualification.",
        ("base",),
        {(engine.base,): float(engine.qualified) for engine in store.engines},
    )
    if store.roster_version is not None:
        version = "The version of the published roster; it grows with every change."
        yield _gauge("roster_version", version, (), {(): store.roster_version})


def _of_catalog(catalog: CatalogFigures) -> Iterable[Metric]:
    yield _gauge(
        "roster_adapters",
        "Adapters by base, by the outcome of their last step and its code.",
        ("base", "outcome", "code"),
        {(row.base, row.state, row.code): row.adapters for row in catalog.outcomes},
    )
    yield _gauge(
        "roster_size",
        "Authors that are served, by base.",
        ("base",),
        {(base,): size for base, size in catalog.roster_size.items()},
    )
    yield _gauge(
        "roster_sync_age_seconds", "How long ago the catalog was synced.", (), {(): catalog.sync_age_s}
    )
    steps = SummaryMetricFamily(
        "roster_step_seconds", "How long the recorded steps took.", labels=["kind", "outcome"]
    )
    for row in catalog.step_times:
        steps.add_metric([row.kind, row.outcome], count_value=row.steps, sum_value=row.seconds)
    yield steps


def _of_prefect(prefect: PrefectFigures) -> Iterable[Metric]:
    alive = "Workers of our pool that Prefect hears from."
    yield _gauge("roster_workers_alive", alive, (), {(): prefect.workers_alive})
    yield _gauge(
        "roster_runs",
        "Runs of onboard on their way, by the name of their state.",
        ("state",),
        {(state,): count for state, count in prefect.runs.items()},
    )
    yield _gauge(
        "roster_runs_queued",
        "Runs whose time has come and that no worker has begun, by queue.",
        ("queue",),
        {(queue,): count for queue, count in prefect.queued.items()},
    )


def _gauge(
    name: str, says: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, says, labels=list(labels))
    for of, value in values.items():
        family.add_metric(list(of), value)
    return family
