"""A catalog in a temporary folder, and how tests fill it."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ledger_builders import STEP_VERSIONS, Document, base_text, text

from roster.catalog import Catalog
from roster.incoming import BaseText, EngineText, LedgerText, SyncReport

NOON = "2026-11-20T12:00:00Z"
TINY = (base_text("tiny"),)


def sync(
    path: Path,
    documents: Sequence[Document | LedgerText],
    *,
    bases: Sequence[BaseText] = TINY,
    engines: Sequence[EngineText] = (),
    removed: Sequence[str] = (),
    versions: dict[str, str] | None = None,
    max_opponents: int = 3,
    serve_stale: bool = True,
    synced_at: str = NOON,
) -> SyncReport:
    """Return the report of a sync that takes these documents in, as the pipeline does it."""
    catalog = Catalog(path)
    return catalog.apply(
        [document if isinstance(document, LedgerText) else text(document) for document in documents],
        bases,
        engines,
        known=catalog.known_etags(),
        removed=removed,
        step_versions=STEP_VERSIONS if versions is None else versions,
        max_opponents=max_opponents,
        serve_stale=serve_stale,
        synced_at=synced_at,
    )


def python(program: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start a Python process that can import the tests' builders; its stdin and stdout are pipes."""
    here = str(Path(__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{here!r}]\n{program}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
