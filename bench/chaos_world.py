"""The world that the chaos bench disturbs: running services, a proxy before the store, and the adapters sent so far."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.chaos_adapters import FIRST_RUN, SECOND_RUN, TRAINED, Sent, draw_kinds, put_adapter
from flows.events import announce_upload
from flows.processes import read_start_ticks
from flows.settings import Settings
from storage.claims import list_ledgers, read_ledger
from storage.documents import read_document, utc_now
from storage.errors import ObjectNotFound, StoreUnavailable
from storage.ledger import Ledger, Outcome
from storage.s3 import S3Store

if TYPE_CHECKING:
    from bench.chaos_cpu import CpuBase

_PATIENCE_S = 60.0  # with a store that was just started again
_APART_S = 1.1  # submissions are told apart by seconds
_T = TypeVar("_T")


@dataclass(slots=True)
class World:
    """What the faults are done to. Use it from the thread that opened the topology.

    topology: tests/topology_builders.py's. proxy: tests/fault_proxy.py's, between workers and store. store: straight
    to the store. engine: the scripted engine (bench/chaos_engine.py). settings: for `announce_upload`. trained: the
    adapters for vLLM, where it runs.
    """

    folder: Path  # where adapters are made
    topology: Any
    proxy: Any
    store: S3Store
    engine: Any
    rng: random.Random
    settings: Settings
    trained: CpuBase | None = None
    sent: list[Sent] = field(default_factory=list)
    killed: set[tuple[int, int]] = field(
        default_factory=set
    )  # pids with their start ticks, of runs that were killed
    _kinds: Iterator[str] | None = None
    _settled: set[tuple[str, str]] = field(default_factory=set)  # (author, digest)

    def submit(self, *, announce: bool = True) -> Sent:
        """Put the next adapter into the store and, if wished, send its event."""
        if self._kinds is None:
            self._kinds = draw_kinds(random.Random(self.rng.random()))
        return self.put(next(self._kinds), len(self.sent), announce=announce)

    def submit_again(self, first: Sent, *, announce: bool = True) -> Sent:
        """Put another adapter of the same author and kind, submitted later, into the store; see `submit`."""
        time.sleep(_APART_S)
        return self.put(first.kind, first.number, announce=announce, run=SECOND_RUN)

    def submit_trained(self) -> Sent | None:
        """Put the next adapter for vLLM into the store and send its event; None where none is left."""
        number = sum(one.kind == TRAINED for one in self.sent)
        if self.trained is None or number == len(self.trained.adapters):
            return None
        return self.put_trained(self.trained, number)

    def put_trained(self, trained: CpuBase, number: int) -> Sent:
        """Put this adapter for vLLM into the store and send its event."""
        from bench.chaos_cpu import put  # brings what trains

        adapter = trained.adapters[number]
        upload = patiently(lambda: put(self.store, trained, adapter))
        return self._sent(Sent(adapter.author, FIRST_RUN, TRAINED, upload), announce=True)

    def announce(self, sent: Sent) -> bool:
        """Send the event of an upload; whether the server took it."""
        return announce_upload(self.settings, sent.upload)

    def open_adapters(self) -> list[Sent]:
        """Those that have no verdict as yet, and do not wait for what never comes."""
        for one in self.sent:
            if (one.author, one.digest) not in self._settled and self._is_settled(one):
                self._settled.add((one.author, one.digest))
        return [one for one in self.sent if (one.author, one.digest) not in self._settled]

    def look_again(self) -> None:
        """Forget which had their endings: some are judged a second time."""
        self._settled.clear()

    def read_ledger(self, sent: Sent) -> Ledger | None:
        """The ledger of an upload's adapter; None if there is none yet."""

        def read() -> Ledger | None:
            try:
                return read_ledger(self.store, sent.author, sent.digest)[0]
            except ObjectNotFound:
                return None

        return patiently(read)

    def read_ledgers(self) -> list[Ledger]:
        """Every ledger there is."""
        return patiently(
            lambda: [read_document(self.store, one.key, Ledger)[0] for one in list_ledgers(self.store)]
        )

    def run_pids(self) -> dict[str, int]:
        """The living processes of runs at work, by the author whose ledger's claim names them."""
        found = {}
        for one in self.open_adapters():
            ledger = self.read_ledger(one)
            pid = None if ledger is None else holder_pid(ledger)
            if pid is not None and read_start_ticks(pid) is not None:
                found[one.author] = pid
        return found

    def note_killed(self, pid: int) -> None:
        """Remember a process that is about to be killed: at the end it must be gone."""
        ticks = read_start_ticks(pid)
        if ticks is not None:
            self.killed.add((pid, ticks))

    def put(self, kind: str, number: int, *, announce: bool = True, run: str = FIRST_RUN) -> Sent:
        """Put this very adapter into the store; see `submit`."""
        folder = self.folder / "trained"
        sent = patiently(lambda: put_adapter(self.store, folder, kind, number, run=run))
        return self._sent(sent, announce=announce)

    def _sent(self, sent: Sent, *, announce: bool) -> Sent:
        self.sent.append(sent)
        if announce:
            self.announce(sent)
        return sent

    def _is_settled(self, sent: Sent) -> bool:
        ledger = self.read_ledger(sent)
        return ledger is not None and is_settled(ledger)


def is_settled(ledger: Ledger) -> bool:
    """Whether nothing is left to be done: it has its verdict, or its last step waits, and nobody is at work on it.

    The claim of a run that was killed with its last words stays, and has run out.
    """
    waits = bool(ledger.steps) and ledger.steps[-1].outcome is Outcome.WAITING
    is_held = ledger.claim is not None and ledger.claim.expires_at > utc_now()
    return not is_held and (ledger.verdict is not None or waits)


def holder_pid(ledger: Ledger) -> int | None:
    """The process that a ledger's claim names, on this machine; None without a claim."""
    if ledger.claim is None:
        return None
    name = ledger.claim.holder.split(" ")[0].rpartition(":")[2]
    return int(name) if name.isdigit() else None


def patiently(ask: Callable[[], _T]) -> _T:
    """What `ask` returns, asked again for a minute while the store is not there.

    Raises:
        StoreUnavailable: it was not there for so long.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ask()
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
