"""Observers of the chaos bench: they read store and catalogs all the time, and note whatever must never be seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from roster.catalog import open_catalog
from roster.errors import CatalogMissing, RosterError
from roster.serving import Manifest, Roster
from storage.claims import list_ledgers
from storage.errors import ObjectNotFound, StoreUnavailable
from storage.keys import MANIFEST_FILE, SERVING, manifest_key, parse_staged_key, roster_key, serving_prefix
from storage.ledger import Ledger
from storage.s3 import S3Store


class Watch(Protocol):
    """One observer. `looks`: how often it saw something; `faults`: what must not be, each told once."""

    name: str
    looks: int
    faults: list[str]

    def look(self) -> None:
        """Look once.

        Raises:
            StoreUnavailable: the store does not answer; look again later.
        """


@dataclass(slots=True)
class LedgerWatch:
    """Every version of every ledger that it comes upon has all that an earlier one had."""

    store: S3Store
    name: str = "ledgers"
    looks: int = 0
    faults: list[str] = field(default_factory=list)
    seen: dict[str, Ledger] = field(default_factory=dict)
    _etags: dict[str, str] = field(default_factory=dict)

    def look(self) -> None:
        """Read what has changed since the last look."""
        listed = {one.key: one.etag for one in list_ledgers(self.store)}
        for key in self.seen.keys() - listed.keys():
            if self.store.head(key) is None:
                self.faults.append(f"{key} is gone")
                del self.seen[key]
        for key, etag in listed.items():
            if self._etags.get(key) != etag:
                self._read(key)
        self.looks += 1

    def _read(self, key: str) -> None:
        try:
            found = self.store.get(key)
            ledger = Ledger.model_validate_json(found.body)
        except ObjectNotFound:
            return  # the next look misses it
        except ValidationError as error:
            self.faults.append(f"{key} is torn: {error}")
            return
        if key in self.seen:
            self.faults += [f"{key}: {fault}" for fault in compare_ledgers(self.seen[key], ledger)]
        self.seen[key], self._etags[key] = ledger, found.info.etag


def compare_ledgers(before: Ledger, after: Ledger) -> list[str]:
    """What of an earlier version of a ledger a later one has not, in words."""
    faults = []
    if after.steps[: len(before.steps)] != before.steps:
        kept = set(map(_step_name, after.steps))
        lost = [_step_name(step) for step in before.steps if _step_name(step) not in kept]
        faults.append(f"steps were lost: {', '.join(lost)}" if lost else "steps were changed")
    if not set(before.submissions) <= set(after.submissions):
        faults.append("a submission was lost")
    if before.verdict is not None and after.verdict is None:
        faults.append("the verdict was lost")
    return faults


def _step_name(step: object) -> str:
    told = step.model_dump() if hasattr(step, "model_dump") else {}
    return (
        f"{told.get('kind')} {told.get('step_key')} attempt {told.get('attempt')} by {told.get('flow_run')}"
    )


@dataclass(slots=True)
class RosterWatch:
    """The roster is whole, its version never falls, and whoever is new in it has an adapter that is all there."""

    store: S3Store
    name: str = "roster"
    looks: int = 0
    faults: list[str] = field(default_factory=list)
    newest: Roster | None = None
    _known: set[tuple[str, str]] = field(default_factory=set)

    def look(self) -> None:
        """Read the roster, and the manifest of whoever is new in it."""
        try:
            roster = Roster.model_validate_json(self.store.get(roster_key()).body)
        except ObjectNotFound:
            if self.newest is not None:
                self.faults.append(f"the roster is gone after version {self.newest.version}")
            return
        except ValidationError as error:
            self.faults.append(f"the roster is torn: {error}")
            return
        before, self.newest = self.newest, roster
        self.looks += 1
        if before is not None and roster.version < before.version:
            self.faults.append(f"version {roster.version} of the roster came after {before.version}")
        if before is not None and roster.version == before.version and roster != before:
            self.faults.append(f"version {roster.version} of the roster says two things")
        for base, entry in roster.bases.items():
            for author, served in entry.authors.items():
                if (author, served.output_digest) not in self._known:
                    self._known.add((author, served.output_digest))
                    prefix = serving_prefix(author, served.output_digest)
                    told = f"version {roster.version} of the roster serves {author} from {prefix}"
                    self.faults += [f"{told}: {fault}" for fault in check_prefix(self.store, prefix, base)]


@dataclass(slots=True)
class ServingWatch:
    """Where there is a manifest, there are all the files that it names."""

    store: S3Store
    name: str = "serving"
    looks: int = 0
    faults: list[str] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Look at every manifest that is new."""
        for found in list(self.store.list_objects(SERVING)):
            staged = parse_staged_key(found.key)
            if staged is None:
                self.faults.append(f"{found.key} has no place under {SERVING}")
            elif found.key == manifest_key(staged[2]) and staged[2] not in self._known:
                self._known.add(staged[2])
                self.faults += [f"{staged[2]}: {fault}" for fault in check_prefix(self.store, staged[2])]
        self.looks += 1


def check_prefix(store: S3Store, prefix: str, base: str | None = None) -> list[str]:
    """What is wrong with a converted adapter in the store, in words: nothing, if it is whole and of this base.

    Raises:
        StoreUnavailable.
    """
    try:
        manifest = Manifest.model_validate_json(store.get(manifest_key(prefix)).body)
    except ObjectNotFound:
        return [f"it has no {MANIFEST_FILE}"]
    except ValidationError as error:
        return [f"its {MANIFEST_FILE} is torn: {error}"]
    faults = []
    if serving_prefix(manifest.author, manifest.output_digest) != prefix:
        faults.append(f"its {MANIFEST_FILE} is that of {manifest.author} and {manifest.output_digest}")
    if base not in (None, manifest.base):
        faults.append(f"it is for the base {manifest.base}, not {base}")
    for file in manifest.files:
        found = store.head(prefix + file.name)
        if found is None or found.bytes != file.bytes:
            size = "missing" if found is None else f"of {found.bytes} bytes"
            faults.append(f"{file.name} is {size}, and of {file.bytes} in its {MANIFEST_FILE}")
    return faults


@dataclass(slots=True)
class CatalogWatch:
    """Whoever reads a worker's catalog finds a whole one, in which two questions have answers that agree."""

    path: Path
    name: str = "catalog"
    looks: int = 0
    faults: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Open it anew, and ask."""
        try:
            with open_catalog(self.path) as reader:
                ready = {(row.base, row.author) for row in reader.ready()}
                authors = {(row.base, row.author) for row in reader.authors() if row.is_ready}
        except CatalogMissing:
            if self.looks:
                self.faults.append(f"{self.path} is gone")
            return
        except RosterError as error:
            self.faults.append(f"{self.path}: {type(error).__name__}: {error}")
            return
        self.looks += 1
        if ready != authors:
            self.faults.append(f"{self.path} is torn: {sorted(ready ^ authors)} are ready in one view alone")


@contextmanager
def watching(watches: Sequence[Watch], *, every_s: float = 0.5) -> Iterator[None]:
    """Let each look again and again, in a thread of its own, while the block runs; once more at its end.

    A store that does not answer is looked at again later. An error that nobody foresaw is a fault of what is watched.
    """
    end = threading.Event()

    def go_on(watch: Watch) -> None:
        while True:
            last = end.wait(every_s)
            try:
                watch.look()
            except StoreUnavailable:
                pass
            except Exception as error:  # noqa: BLE001
                watch.faults.append(f"the look at the {watch.name} ended with {error!r}")
            if last:
                return

    threads = [threading.Thread(target=go_on, args=(watch,), name=f"watch {watch.name}") for watch in watches]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()
