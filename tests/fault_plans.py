"""What a fault proxy does to which request: chosen by a seed or named, counted and bounded."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import unquote

_LISTINGS = 256  # list requests of which earlier answers are kept
_KEPT = 4  # earlier answers of each


class FaultKind(StrEnum):
    """What can happen to a request on its way to a store and back."""

    UNAVAILABLE = "unavailable"  # 503 ServiceUnavailable
    SLOW_DOWN = "slow_down"  # 503 SlowDown
    TIMEOUT = "timeout"  # no answer, until the client goes or `silent_s` have passed
    RESET = "reset"  # the connection is reset
    TRUNCATED = "truncated"  # part of the body, then the end of the connection
    SLOW_BODY = "slow_body"  # part of the body, the rest after `pause_s`
    WRONG_ETAG = "wrong_etag"  # another ETag, in answer to GET and HEAD of an object
    STALE_LISTING = "stale_listing"  # what the same list request was answered earlier
    REFUSED_CONDITION = "refused_condition"  # 412, to a put with a condition


ANSWERED = {
    FaultKind.UNAVAILABLE: (503, "ServiceUnavailable"),
    FaultKind.SLOW_DOWN: (503, "SlowDown"),
    FaultKind.REFUSED_CONDITION: (412, "PreconditionFailed"),
}
MAY_BE_CARRIED_OUT = (FaultKind.TIMEOUT, FaultKind.RESET, FaultKind.REFUSED_CONDITION)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """`rate`: the share of the requests a kind applies to that are met by it; at most `limit` of each kind.

    What meets a request follows from the seed, the request and how often it was made before, not from what other
    threads ask meanwhile.
    """

    seed: int
    rate: Mapping[FaultKind, float]
    limit: int


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that a request is to meet. `carried_out`: the store is asked all the same, its answer is lost.

    `share`: how much of a body comes before it is cut or held up. `fits`, `when_met`: see `FaultProxy.one`.
    """

    kind: FaultKind
    carried_out: bool
    share: float
    method: str | None = None
    key_part: str = ""
    is_planned: bool = False
    fits: Callable[[bytes], bool] | None = None
    when_met: Callable[[bytes], None] | None = None

    def takes(self, request: Request) -> bool:
        """Whether this request is one that is meant, whatever its body is."""
        fits = self.method in (None, request.method) and self.key_part in request.readable
        return fits and request.may_meet(self.kind)


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks, as far as it decides what may happen to it."""

    method: str
    path: str
    is_conditional: bool

    @property
    def readable(self) -> str:
        return unquote(self.path)

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.path

    def may_meet(self, kind: FaultKind) -> bool:
        match kind:
            case FaultKind.WRONG_ETAG:
                return self.method in ("GET", "HEAD") and "?" not in self.path
            case FaultKind.STALE_LISTING:
                return self.is_listing
            case FaultKind.REFUSED_CONDITION:
                return self.method == "PUT" and self.is_conditional
            case _:
                return True


@dataclass
class Faults:
    """Which request meets what; threads share it."""

    met: Counter[FaultKind] = field(default_factory=Counter)
    plan: FaultPlan | None = None
    _singles: list[Fault] = field(default_factory=list)
    _unmet: list[Fault] = field(default_factory=list)  # these, and those that a request has just been given
    _begun: Counter[FaultKind] = field(default_factory=Counter)
    _asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    _listings: dict[str, deque[bytes]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, request: Request, body: Callable[[], bytes]) -> Fault | None:
        """What this request is to meet; it is counted by `is_met`, or given back by `is_missed`."""
        with self._lock:
            meant = [fault for fault in self._singles if fault.takes(request)]
        for fault in meant:
            # Without the lock: whoever looks at the body may take time, and no other request is to wait for that.
            if (fault.fits is None or fault.fits(body())) and self._take(fault):
                return fault
        with self._lock:
            if self.plan is None:
                return None
            self._asked[request.method, request.path] += 1
            times = self._asked[request.method, request.path]
            # The address differs from run to run, the path does not.
            chance = random.Random(f"{self.plan.seed} {request.method} {request.path} {times}")
            for kind in FaultKind:
                wanted = chance.random() < self.plan.rate.get(kind, 0.0)
                carried_out = chance.random() < 0.5
                share = chance.choice((0.0, 0.5))
                if wanted and request.may_meet(kind) and self._begun[kind] < self.plan.limit:
                    self._begun[kind] += 1
                    return Fault(kind, carried_out and kind in MAY_BE_CARRIED_OUT, share, is_planned=True)
            return None

    def _take(self, fault: Fault) -> bool:
        """Whether no other request has been given it meanwhile."""
        with self._lock:
            there = fault in self._singles
            if there:
                self._singles.remove(fault)
            return there

    def is_met(self, fault: Fault) -> None:
        """It really happened."""
        with self._lock:
            self.met[fault.kind] += 1
            if fault in self._unmet:
                self._unmet.remove(fault)

    def is_missed(self, fault: Fault) -> None:
        """The answer had no body to cut, no ETag to change, or there is no earlier listing: the next one then."""
        with self._lock:
            if fault.is_planned:
                self._begun[fault.kind] -= 1
            elif fault in self._unmet:
                self._singles.insert(0, fault)

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._singles.append(fault)
            self._unmet.append(fault)

    def withdraw(self, fault: Fault) -> None:
        """No request is given it any more."""
        with self._lock:
            for faults in (self._singles, self._unmet):
                if fault in faults:
                    faults.remove(fault)

    def begin(self, plan: FaultPlan) -> None:
        with self._lock:
            self.plan = plan
            self._begun.clear()
            self._asked.clear()

    def end(self) -> None:
        with self._lock:
            self.plan = None
            self._singles.clear()
            self._unmet.clear()

    def earlier_listing(self, request: Request, now: bytes) -> bytes | None:
        """Note what a list request is answered now, and return the oldest other answer that is known."""
        with self._lock:
            if request.path not in self._listings and len(self._listings) == _LISTINGS:
                del self._listings[next(iter(self._listings))]
            known = self._listings.setdefault(request.path, deque(maxlen=_KEPT))
            if now not in known:
                known.append(now)
            return next((body for body in known if body != now), None)
