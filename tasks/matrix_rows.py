"""The adapters of a matrix: what the roster serves on a base, with what their ledgers and trainers tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from roster.serving import Manifest, Roster
from storage.claims import read_ledger
from storage.documents import read_document
from storage.errors import InvalidDocument, ObjectNotFound
from storage.heldout import list_heldout
from storage.keys import roster_key, training_key
from storage.ledger import Ledger, Outcome, StepKind
from storage.s3 import S3Store
from storage.training import parse_training
from tasks.errors import NobodyServed, NotServed
from tasks.transfer import read_manifest

_READERS = 16
_NAMED = 20  # authors that a message lists
_READINGS = "for"  # an input of scored steps that compare readings, and judge nothing


@dataclass(frozen=True, slots=True)
class Row:
    """A served adapter, the held-out sets that are its author's own, and the authors whom it serves.

    `tokens` in `seconds` is what its verdict's scoring took on this engine, 0 in 0 where it was another one.
    """

    author: str
    manifest: Manifest
    refs: tuple[str, ...]
    serves: frozenset[str]
    tokens: int
    seconds: float


def list_served(store: S3Store, base: str, authors: Sequence[str]) -> dict[str, str]:
    """Output digests by author: what the roster serves on a base, of those asked for, or of all if none are.

    Raises:
        NobodyServed: it serves none.
        NotServed: one who is asked for is not among them.
    """
    try:
        roster, _ = read_document(store, roster_key(), Roster)
    except ObjectNotFound:
        raise NobodyServed(base) from None
    entry = roster.bases.get(base)
    served = {author: one.output_digest for author, one in entry.authors.items()} if entry else {}
    if not served:
        raise NobodyServed(base)
    for author in authors:
        if author not in served:
            known = sorted(served)
            raise NotServed(author, base, ", ".join(known[:_NAMED]) + " …" * (len(known) > _NAMED))
    return {author: digest for author, digest in sorted(served.items()) if not authors or author in authors}


def read_rows(
    store: S3Store, served: dict[str, str], engine_id: str, left_out: list[tuple[str, str]]
) -> tuple[Row, ...]:
    """The served adapters with what their ledgers and trainers tell; one that cannot be read is added to `left_out`.

    served: as `list_served` gives it. engine_id: of the engine whose scores count for the rate.

    Raises:
        StoreUnavailable.
    """

    def read(author: str) -> Row | tuple[str, str]:
        try:
            manifest = read_manifest(store, author, served[author])
            ledger, _ = read_ledger(store, author, manifest.adapter_digest)
        except (ObjectNotFound, InvalidDocument) as error:
            return author, f"it is served, but cannot be read: {error}"
        return _row(store, author, manifest, ledger, engine_id)

    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(read, served))
    left_out += (one for one in found if not isinstance(one, Row))
    return tuple(one for one in found if isinstance(one, Row))


def find_kin(rows: Sequence[Row], exclusions: Sequence[tuple[str, str]]) -> frozenset[frozenset[str]]:
    """Pairs that are never each other's wrong ones: pen names, equal bytes, adapters that serve the same author."""
    kin = {frozenset(pair) for pair in exclusions}
    for one, other in combinations(rows, 2):
        digests = {one.manifest.adapter_digest, one.manifest.output_digest}
        same_bytes = digests & {other.manifest.adapter_digest, other.manifest.output_digest}
        if same_bytes or one.serves & other.serves:
            kin.add(frozenset((one.author, other.author)))
    return frozenset(kin)


def _row(store: S3Store, author: str, manifest: Manifest, ledger: Ledger, engine_id: str) -> Row:
    """A row with the sets that its newest scores were taken on, or with all of its author where there are none."""
    digest = manifest.output_digest
    for step in reversed(ledger.steps):
        is_own = step.inputs.get("own") == digest and _READINGS not in step.inputs
        if step.kind is StepKind.SCORED and step.outcome is Outcome.DONE and is_own:
            record: Any = step.result
            here = record["engine_id"] == engine_id
            return Row(
                author,
                manifest,
                tuple(record["heldout"]),
                _serves(store, author, manifest.run),
                record["tokens"] if here else 0,
                record["seconds"] if here else 0.0,
            )
    refs = tuple(f"{author}/{name}" for name in list_heldout(store, author))
    return Row(author, manifest, refs, _serves(store, author, manifest.run), 0, 0.0)


def _serves(store: S3Store, author: str, run: str) -> frozenset[str]:
    """The adapter's author and whom else the trainer names for it, if its training.json is there and can be read."""
    key = training_key(author, run)
    try:
        training, _ = parse_training(key, store.get(key).body)
    except (ObjectNotFound, InvalidDocument):
        return frozenset({author})
    return frozenset({author, *training.authors})
