"""The published roster as a server follows it: read from the store, kept on disk for when the store is down."""

import logging
from pathlib import Path

from pydantic import ValidationError

from roster.engine_plugin.files import replace_file
from roster.serving import Roster, RosterAuthor
from storage.errors import ObjectNotFound, StorageError
from storage.keys import roster_key
from storage.s3 import S3Store

_LOG = logging.getLogger("vllm.adapter_roster")


class RosterSource:
    """The newest roster that could be read. `refresh` belongs to one thread at a time; the rest asks no one.

    `kept` is the file in which the last one is kept. `is_known_empty`: the store has none, and said so. What went
    wrong is logged once, and again when it ends.
    """

    def __init__(self, store: S3Store, base: str, kept: Path) -> None:
        self._store, self.base, self._kept = store, base, kept
        self._etag: str | None = None
        self._trouble: str | None = None
        self.is_known_empty = False
        self.roster = self._read_kept()

    @property
    def trouble(self) -> str:
        """Why there is no newer roster, in a few words."""
        return self._trouble or "nobody has asked for one"

    def find(self, author: str) -> RosterAuthor | None:
        """What the roster serves of an author on this base; None where it serves nothing."""
        return self.authors().get(author)

    def authors(self) -> dict[str, RosterAuthor]:
        """Every author served on this base."""
        entry = None if self.roster is None else self.roster.bases.get(self.base)
        return {} if entry is None else entry.authors

    def digests(self) -> set[str]:
        """The output digests of all that is served, on any base: servers of several bases may share a cache."""
        bases = {} if self.roster is None else self.roster.bases
        return {author.output_digest for entry in bases.values() for author in entry.authors.values()}

    def explain(self, name: str) -> str:
        """Why nothing is served under a name, in words that end a sentence; there is a roster, or known to be none."""
        if self.roster is None:
            return "nobody has published a roster"
        elsewhere = [base for base, entry in self.roster.bases.items() if name in entry.authors]
        said = f"roster version {self.roster.version} of {self.roster.generated_at} does not name it"
        return f"{said} here, but on {', '.join(elsewhere)}" if elsewhere else said

    def refresh(self) -> None:
        """Read the roster if it is another one; on any failure of the store keep what there is."""
        try:
            info = self._store.head(roster_key())
            self.is_known_empty = info is None and self.roster is None
            if info is None:
                self._note("nobody has published one" if self.roster is None else "it is gone from the store")
                return
            if info.etag == self._etag:
                self._note(None)
                return
            stored = self._store.get(roster_key())
            roster = Roster.model_validate_json(stored.body)
        except ObjectNotFound:
            return  # replaced this very moment: the next look finds it
        except StorageError as error:
            self._note(str(error))
            return
        except ValidationError as error:
            self._note(f"roster/current.json is not one this release can read: {error.errors()[0]['msg']}")
            return
        self._etag = stored.info.etag
        changed = self.roster is None or roster.version != self.roster.version
        self.roster = roster
        self._note(None)
        if changed:
            _LOG.info("adapter-roster: roster version %d, %d authors", roster.version, len(self.authors()))
        try:
            replace_file(self._kept, stored.body.decode())
        except OSError as error:
            _LOG.warning("adapter-roster: %s could not be written: %s", self._kept, error)

    def _read_kept(self) -> Roster | None:
        try:
            return Roster.model_validate_json(self._kept.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            _LOG.warning("adapter-roster: %s is passed over: %s", self._kept, error.errors()[0]["msg"])
            return None

    def _note(self, trouble: str | None) -> None:
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble is None:
            _LOG.warning("adapter-roster: the roster can be read again")
        else:
            version = "none" if self.roster is None else str(self.roster.version)
            _LOG.warning("adapter-roster: no new roster, the last is version %s: %s", version, trouble)
