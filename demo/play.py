"""Playing the demo: every author goes in through the `roster` command, and every step is watched in the ledger."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.material import Material
from flows.cli.app import run
from flows.connect import open_store
from flows.settings import Settings
from roster.catalog import open_catalog
from roster.errors import CatalogMissing
from roster.rows import ReadyRow
from storage.claims import list_ledgers
from storage.documents import read_document
from storage.ledger import Ledger, Outcome
from storage.s3 import S3Store

Say = Callable[[str], None]
_POLL_S = 2.0
_DEADLINE_S = 420.0
_HELDOUT = "main"
# Columns of the table when it is not printed to a terminal, which would say how wide it is.
_PIPED_WIDTH = 160
_RUN = "run-1"


class DemoFailedError(Exception):
    """A step of the demo did not go as it must."""


@dataclass(slots=True)
class Played:
    """How the demo ended: who is ready, who is quarantined and why, all scores in bits per byte."""

    ready: list[ReadyRow]
    quarantined: list[tuple[str, str]]
    bpb: dict[str, dict[str, Any]]
    reasons: dict[str, str]
    encodings: dict[str, str]
    decided: dict[str, str]
    liars: set[str] = field(default_factory=set)

    def document(self) -> dict[str, Any]:
        """What `./run demo --json` prints."""
        return {
            "ready": [row.author for row in self.ready],
            "quarantined": [{"author": author, "code": code} for author, code in self.quarantined],
            "bpb": self.bpb,
        }

    def as_expected(self) -> bool:
        """Whether exactly the liars are quarantined and all others are ready."""
        honest = set(self.encodings) - self.liars
        quarantined = {author for author, _ in self.quarantined}
        return quarantined == self.liars and {row.author for row in self.ready} == honest


def play(settings: Settings, material: Material, say: Say, stop: threading.Event) -> Played:
    """Submit every author, wait until each has its verdict and has met its opponents, and read the catalog.

    Raises:
        DemoFailedError: a command failed, or the verdicts did not come in time.
    """
    for author in material.authors:
        _roster("heldout", "add", author.name, _HELDOUT, str(author.heldout_file))
    for author in material.authors:
        named = ("--author", author.name, "--base", material.base_name, "--run", _RUN)
        _roster("submit", str(author.adapter_dir), *named)
    say(
        f"{len(material.authors)} adapters submitted; events start their flows (a worker needs a few seconds each)"
    )
    store = open_store(settings)
    _watch(store, settings.catalog_path, {author.name for author in material.authors}, say, stop)
    return _read(settings.catalog_path, store, material)


def show(played: Played) -> None:
    """Print the BPB table, and the liar with its reason."""
    terminal = Console(highlight=False)
    out = terminal if terminal.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)
    table = Table(
        title="Bits per byte on each author's held-out text (lower is better)", title_justify="left"
    )
    for column in (
        "author",
        "uploaded as",
        "decided by",
        "verdict",
        "own",
        "base",
        "control",
        "wrong adapters",
    ):
        table.add_column(column, overflow="fold")
    codes = dict(played.quarantined)
    for author, encoding in played.encodings.items():
        verdict = f"[red]{codes[author]}[/]" if author in codes else "[green]ready[/]"
        scores = played.bpb.get(author, {})
        figures = [f"{scores[key]:.3f}" if scores.get(key) else "-" for key in ("own", "base", "control")]
        wrong = sorted(scores.get("wrong", {}).values())
        met = f"{len(wrong)}: {wrong[0]:.3f} to {wrong[-1]:.3f}" if wrong else "none"
        table.add_row(author, encoding, played.decided[author] or "-", verdict, *figures, met)
    out.print(table)
    for author, reason in played.reasons.items():
        out.print(f"{author} is quarantined: {reason}", markup=False)


def _roster(*arguments: str) -> None:
    if code := run(list(arguments)):
        message = f"`roster {' '.join(arguments)}` ended with {code}"
        raise DemoFailedError(message)


def _watch(store: S3Store, catalog: Path, authors: set[str], say: Say, stop: threading.Event) -> None:
    """Say every step as the ledger records it, until all is settled."""
    told: dict[str, int] = {}
    seen: dict[str, tuple[str, Ledger]] = {}
    deadline = time.monotonic() + _DEADLINE_S
    while not stop.wait(_POLL_S):
        for found in list_ledgers(store):
            if seen.get(found.key, ("",))[0] != found.etag:
                ledger, etag = read_document(store, found.key, Ledger)
                seen[found.key] = (etag, ledger)
        ledgers = [ledger for _, ledger in seen.values()]
        for ledger in ledgers:
            for step in ledger.steps[told.get(ledger.author, 0) :]:
                took = (step.finished_at - step.started_at).total_seconds()
                say(f"{ledger.author}: {step.kind.value} {_ending(step.result, step.outcome)} ({took:.0f} s)")
            told[ledger.author] = len(ledger.steps)
        if {ledger.author for ledger in ledgers if ledger.verdict} == authors and _is_settled(
            catalog, ledgers
        ):
            return
        if time.monotonic() > deadline:
            late = sorted(authors - {ledger.author for ledger in ledgers if ledger.verdict})
            message = f"no verdict for {', '.join(late) or 'the second scoring'} within {_DEADLINE_S:.0f} s"
            raise DemoFailedError(message)
    message = "stopped"
    raise DemoFailedError(message)


def _ending(result: dict[str, Any], outcome: Outcome) -> str:
    return f"{outcome.value}: {result['code']}" if result.get("code") else outcome.value


def _is_settled(catalog: Path, ledgers: list[Ledger]) -> bool:
    """Whether the roster holds all who are ready, and each has met as many opponents as there are."""
    if any(ledger.claim is not None for ledger in ledgers):
        return False
    ready = {
        ledger.author for ledger in ledgers if ledger.verdict and ledger.verdict.outcome is Outcome.READY
    }
    try:
        with open_catalog(catalog) as reader:
            rows = {row.author: row for row in reader.ready()}
            thin = reader.thin_verdicts()
    except CatalogMissing:
        return False
    verdicts = {ledger.author: ledger.verdict for ledger in ledgers}
    fresh = all(
        verdict is not None and rows[author].own == verdict.result["own"]
        for author, verdict in verdicts.items()
        if author in rows
    )
    return set(rows) == ready and fresh and not thin


def _read(catalog: Path, store: S3Store, material: Material) -> Played:
    with open_catalog(catalog) as reader:
        ready = reader.ready()
        decided = {
            author.name: ", ".join(
                sorted({e.decided_by or "" for e in reader.show(author.name).adapters[0].evidence})
            )
            for author in material.authors
        }
    verdicts = {}
    for found in list_ledgers(store):
        ledger, _ = read_document(store, found.key, Ledger)
        if ledger.verdict is not None:
            verdicts[ledger.author] = ledger.verdict
    bpb: dict[str, dict[str, Any]] = {}
    quarantined, reasons = [], {}
    for author in material.authors:
        verdict = verdicts[author.name]
        record: Any = verdict.result
        if "own" in record:
            bpb[author.name] = {key: record[key] for key in ("own", "base", "wrong", "control")}
        if verdict.outcome is Outcome.QUARANTINED:
            quarantined.append((author.name, record["code"]))
            reasons[author.name] = record["reason"]
    return Played(
        ready=ready,
        quarantined=quarantined,
        bpb=bpb,
        reasons=reasons,
        encodings={author.name: author.encoding for author in material.authors},
        decided=decided,
        liars={author.name for author in material.authors if author.lies},
    )
