"""Which catalog a question is asked of: this machine's own, else the snapshot that a sync published in the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.output import note

if TYPE_CHECKING:
    from roster.reader import CatalogReader


def open_for_reading() -> CatalogReader:
    """The catalog of this home; without one, the published snapshot, whose time is said on stderr.

    Raises:
        CatalogMissing: neither is there, or no store is known.
        CatalogSchemaMismatch, CatalogDamaged, CatalogHeld: what is there cannot be read.
        StoreUnavailable: there is no catalog here, the store does not answer, and no snapshot was fetched before.
    """
    from flows.settings import Settings
    from roster.catalog import open_catalog
    from roster.errors import CatalogMissing

    # The bare settings: a catalog that lies here needs no store.
    own = Settings().catalog_path
    try:
        return open_catalog(own)
    except CatalogMissing as missing:
        fetched = _fetch(own)
        if fetched is None:
            raise missing
    reader = open_catalog(fetched)
    note(f"no catalog in {own.parent}: this is the published one, of the sync at {reader.synced_at()}")
    return reader


def _fetch(own: Path) -> Path | None:
    """The published snapshot as a file beside where our own catalog would be; None where there is none."""
    from flows.connect import open_store_hurried
    from flows.settings import SettingsIncomplete, load_settings
    from roster.swap import set_log_aside
    from storage.errors import ObjectNotFound, StoreUnavailable
    from storage.snapshot import fetch_snapshot

    into = own.with_name("published.duckdb")
    try:
        store = open_store_hurried(load_settings())
        into.parent.mkdir(parents=True, exist_ok=True)
        fetch_snapshot(store, into)
    except (SettingsIncomplete, ObjectNotFound):
        return None
    except StoreUnavailable as error:
        if not into.is_file():
            raise
        note(f"{error}; the snapshot that was fetched before stands")
    aside = set_log_aside(into)
    if aside is not None:
        note(f"another program wrote beside {into}: its log was set aside as {aside.name}")
    return into
