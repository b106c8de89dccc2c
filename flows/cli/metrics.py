"""`roster metrics`: the figures that a monitoring system watches."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.output import AsJson, emit, note, say

if TYPE_CHECKING:
    from flows.standing import CatalogView, Standing, StoreView
    from tasks.metrics import CatalogFigures, Figures, StoreFigures

_READABLE = 0o644  # the collector runs as another user


def metrics(
    *, output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None, json: AsJson = False
) -> int:
    """Print the figures to watch, in Prometheus's text form.

    It ends with 3 when one of the store, Prefect and the catalog could not be looked at: roster_source_up then says
    which, and the figures of the others are there.

    ```
    roster metrics --output roster.prom
    ```

    Parameters
    ----------
    output:
        A file to put them in at once, such as one that node_exporter's textfile collector reads (its name must end
        in .prom), instead of on stdout.
    """
    from flows.settings import load_settings
    from flows.standing import look_around
    from tasks.metrics import format_metrics

    standing = look_around(load_settings(), now=datetime.now(UTC))
    text = format_metrics(_figures(standing))
    if output is not None:
        _replace(output, text)

    def show() -> None:
        if output is None:
            say(text.rstrip("\n"))
        else:
            note(f"written: {output}")

    document = {"output": str(output) if output else None, "metrics": text}
    emit(document, as_json=json, show=show)
    for fault in (standing.store_fault, standing.prefect_fault, standing.catalog_fault):
        if fault is not None:
            note(fault)
    return 0 if standing.is_whole else 3


def _figures(standing: Standing) -> Figures:
    from tasks.metrics import Figures, PrefectFigures

    prefect = standing.prefect
    return Figures(
        store=_store_figures(standing.store, standing.now) if standing.store else None,
        catalog=_catalog_figures(standing.catalog, standing.now) if standing.catalog else None,
        prefect=PrefectFigures(
            workers_alive=len(prefect.alive),
            runs=Counter(run.state for run in prefect.runs),
            queued={queue.name: queue.depth for queue in prefect.queues},
        )
        if prefect
        else None,
        restarts={child: one.count for child, one in standing.restarts.items()},
    )


def _store_figures(view: StoreView, now: datetime) -> StoreFigures:
    from tasks.engine_health import Qualified
    from tasks.metrics import EngineFigures, StoreFigures

    ages = [(upload.state, max(0.0, (now - upload.since).total_seconds())) for upload in view.uploads]
    return StoreFigures(
        uploads=Counter(state for state, _ in ages),
        oldest_s={state: age for state, age in sorted(ages, key=lambda one: one[1])},
        engines=tuple(
            EngineFigures(one.base, bool(one.answers), one.qualified is Qualified.PASSED)
            for one in view.engines
        ),
        roster_version=view.roster_version,
    )


def _catalog_figures(view: CatalogView, now: datetime) -> CatalogFigures:
    from tasks.metrics import CatalogFigures

    synced = datetime.fromisoformat(view.synced_at)
    return CatalogFigures(
        outcomes=view.outcomes,
        step_times=view.step_times,
        roster_size=Counter(row.base for row in view.ready),
        sync_age_s=max(0.0, (now - synced).total_seconds()),
    )


def _replace(path: Path, text: str) -> None:
    """Put the text in place at once: a collector that reads meanwhile finds the old file or the new one, whole."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
        part.chmod(_READABLE)
        part.replace(path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
