"""Child processes kept together: started by dependency, restarted a bounded number of times, all ended.

Every child runs under a guard (`flows/guard.py`), which ends the child's whole tree, whatever happens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from flows import guard
from flows.processes import end_marked

# Carried by every process below a supervisor; the value is `<mark>;<child name>;`.
MARK_VARIABLE = "ROSTER_SUPERVISED"
KEPT_LOGS = 3  # earlier logs of a child: name.log.1 is the one before the current
_TAIL_BYTES = 8_192
_EXPLAINED_BYTES = 262_144  # a traceback's cause may stand far above its last lines
_TAIL_LINES = 20
_POLL_S = 0.1
_PROGRESS_S = 5.0
_LONGEST_BACKOFF_S = 30.0
_GUARD_MARGIN_S = 10.0  # how long past its grace a guard may take before it is ended too


class ChildFailedError(Exception):
    """A child ended, or was not ready in time, more often than allowed; everything was stopped."""

    def __init__(self, name: str, status: str, failures: int, log: Path, tail: str) -> None:
        """Keep the facts: the last `status` in words, the number of failures, the log and its last lines."""
        self.name = name
        self.status = status
        self.failures = failures
        self.log = log
        self.tail = tail
        super().__init__(name, status, failures, log, tail)

    def __str__(self) -> str:
        """Name the child, how it ended, the end of its log and where to read on."""
        times = "" if self.failures == 1 else f", {self.failures} times"
        tail = self.tail or "(its log is empty)"
        return f"{self.name}: {self.status}{times}. The last lines of {self.log}:\n{tail}"


class ChildUnfitError(Exception):
    """Raised by a child's `ready`: it runs, but not as it must; restarting would not help."""


def _say_nothing(log: str) -> str:
    return ""


def _count_nothing(name: str, status: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child. Names are unique in a supervisor; `log` gets stdout and stderr, fresh at every start."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    ready: Callable[[], bool]  # asked often, must answer within a second or two; may raise ChildUnfitError
    ready_timeout_s: float
    restarts: int  # within the supervisor's window
    stop_grace_s: float  # between SIGTERM and SIGKILL
    after: tuple[str, ...] = ()  # the names that must be ready first; they are stopped later than this child
    one_shot: bool = False  # ready when it has ended with status 0; `ready` is not asked
    # A one-shot: ready however it ended, and done again when one of `after` had to be started again.
    may_fail: bool = False
    explain: Callable[[str], str] = _say_nothing  # what its log tells of a failure


class _State(Enum):
    WAITING = auto()
    STARTING = auto()
    READY = auto()
    BACKING_OFF = auto()


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    state: _State = _State.WAITING
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    told_at: float = 0.0
    start_again_at: float = 0.0
    again: bool = False  # once it is ready it is to be done again
    failures: deque[float] = field(default_factory=deque)

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Starts children, watches them, ends them.

    Use it from one thread, which must live as long as the children: the kernel tells the guards of the end of
    the thread that started them.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        announce: Callable[[str], None],
        mark: str,
        restarted: Callable[[str, str], None] = _count_nothing,
        hold: Sequence[int] = (),
        window_s: float = 600.0,
        first_backoff_s: float = 1.0,
    ) -> None:
        """Nothing starts yet.

        `announce` gets one line of progress at a time. `mark` is text that no other running supervisor uses,
        and that the next one for the same purpose uses again: what still carries it at the start is ended.
        `restarted` is told the name of each child that will be started again, and how it ended.
        `hold` are file descriptors that stay open until the last child has ended (a lock). Failures older
        than `window_s` seconds are forgotten; the wait before a restart doubles from `first_backoff_s`.

        Raises:
            ValueError: two children of one name, or a name in `after` that is not an earlier child.
        """
        known: set[str] = set()
        for spec in specs:
            if spec.name in known or not known.issuperset(spec.after):
                message = f"{spec.name}: names must be unique, and `after`={spec.after} name earlier children"
                raise ValueError(message)
            known.add(spec.name)
        self._children = {spec.name: _Child(spec) for spec in specs}
        self._announce = announce
        self._mark = mark
        self._restarted = restarted
        self._hold = tuple(hold)
        self._window_s = window_s
        self._first_backoff_s = first_backoff_s

    def start(self, stop: threading.Event) -> bool:
        """True once every child is ready; False, with everything stopped, if `stop` was set first.

        Children that do not wait for each other start at the same time.

        Raises:
            ChildFailedError: a child failed too often; everything was stopped.
        """
        self._end_left_behind(f"{self._mark};", "an earlier run")
        try:
            while not stop.is_set():
                self._tick()
                if all(child.state is _State.READY for child in self._children.values()):
                    return True
                stop.wait(_POLL_S)
        except BaseException:
            self.stop()
            raise
        self.stop()
        return False

    def run_until(self, stop: threading.Event) -> None:
        """Watch the children, and restart those that end, until `stop` is set; then everything is stopped.

        Raises:
            ChildFailedError: a child failed too often; everything was stopped.
        """
        try:
            while not stop.is_set():
                self._tick()
                stop.wait(_POLL_S)
        finally:
            self.stop()

    def stop(self) -> None:
        """End every child and all its descendants, those that others waited for last.

        A Ctrl-C meanwhile gives up the rest of their grace.
        """
        asked: dict[str, float] = {}
        while True:
            try:
                if self._stop_step(asked):
                    return
            except KeyboardInterrupt:
                for name in asked:
                    self._signal(self._children[name], signal.SIGTERM)

    def _stop_step(self, asked: dict[str, float]) -> bool:
        running = {name: child for name, child in self._children.items() if child.runs}
        needed = {other for child in running.values() for other in child.spec.after}
        for name, child in running.items():
            if name not in asked and name not in needed:
                self._announce(f"{name}: stopping")
                asked[name] = time.monotonic()
                self._signal(child, signal.SIGTERM)
            elif name in asked and time.monotonic() - asked[name] > child.spec.stop_grace_s + _GUARD_MARGIN_S:
                self._announce(f"{name}: its guard does not end; killing it")
                self._signal(child, signal.SIGKILL)
        for name, child in self._children.items():
            if child.process is not None and not child.runs:
                self._clean_up_after(child)
                child.process = None
                child.state = _State.WAITING
                if name in asked:
                    self._announce(f"{name}: stopped in {time.monotonic() - asked[name]:.1f} s")
        if running:
            time.sleep(_POLL_S / 2)
        return not running

    def _tick(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.state is _State.WAITING:
                if all(self._children[name].state is _State.READY for name in child.spec.after):
                    self._spawn(child)
            elif child.state is _State.BACKING_OFF:
                if now >= child.start_again_at:
                    self._spawn(child)
            elif child.state is _State.STARTING:
                self._watch_start(child)
            elif child.again:
                child.state = _State.WAITING
            elif not child.spec.one_shot and not child.runs:
                self._fail(child, f"ended with {_describe(child)}")

    def _spawn(self, child: _Child) -> None:
        spec = child.spec
        rotate_log(spec.log)
        grace = str(spec.stop_grace_s)
        with spec.log.open("wb") as log:
            child.process = subprocess.Popen(
                (sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), grace, *spec.argv),
                env={**spec.env, MARK_VARIABLE: self._mark_of(spec)},
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor alone
                pass_fds=self._hold,
            )
        child.again = False
        child.started_at = child.told_at = time.monotonic()
        child.state = _State.STARTING
        self._announce(f"{spec.name}: starting")

    def _watch_start(self, child: _Child) -> None:
        spec = child.spec
        now = time.monotonic()
        took = now - child.started_at
        if not child.runs:
            if spec.one_shot and child.process is not None and child.process.returncode == 0:
                child.state = _State.READY
                self._announce(f"{spec.name}: done in {took:.1f} s")
            else:
                self._fail(child, f"ended with {_describe(child)}")
        elif not spec.one_shot and self._is_ready(child):
            child.state = _State.READY
            self._announce(f"{spec.name}: ready in {time.monotonic() - child.started_at:.1f} s")
        elif took > spec.ready_timeout_s:
            self._end(child)
            self._fail(child, f"was not ready within {spec.ready_timeout_s:.0f} s")
        elif now - child.told_at >= _PROGRESS_S:
            child.told_at = now
            self._announce(f"{spec.name}: still starting after {took:.0f} s")

    def _is_ready(self, child: _Child) -> bool:
        try:
            return child.spec.ready()
        except ChildUnfitError as unfit:
            spec = child.spec
            raise ChildFailedError(spec.name, str(unfit), 1, spec.log, _tell_end(spec)) from unfit

    def _fail(self, child: _Child, status: str) -> None:
        spec = child.spec
        self._clean_up_after(child)
        child.process = None
        if spec.may_fail:
            self._pass_over(child, ChildFailedError(spec.name, status, 1, spec.log, _tell_end(spec)))
            return
        now = time.monotonic()
        child.failures.append(now)
        while now - child.failures[0] > self._window_s:
            child.failures.popleft()
        count = len(child.failures)
        if count > spec.restarts:
            raise ChildFailedError(spec.name, status, count, spec.log, _tell_end(spec))
        wait_s = min(self._first_backoff_s * 2 ** (count - 1), _LONGEST_BACKOFF_S)
        child.state = _State.BACKING_OFF
        child.start_again_at = now + wait_s
        for other in self._children.values():
            if other.spec.may_fail and spec.name in other.spec.after:
                other.again = True
        self._announce(f"{spec.name}: {status}; restart {count} of at most {spec.restarts} in {wait_s:.1f} s")
        self._restarted(spec.name, status)

    def _pass_over(self, child: _Child, failure: ChildFailedError) -> None:
        for line in str(failure).splitlines():
            self._announce(line)
        self._announce(f"{child.spec.name}: everything else goes on")
        child.state = _State.READY

    def _end(self, child: _Child) -> None:
        self._signal(child, signal.SIGTERM)
        deadline = time.monotonic() + child.spec.stop_grace_s + _GUARD_MARGIN_S
        while child.runs:
            if time.monotonic() > deadline:
                self._signal(child, signal.SIGKILL)
            time.sleep(_POLL_S / 2)

    def _signal(self, child: _Child, number: int) -> None:
        if child.process is not None and child.runs:
            child.process.send_signal(number)

    def _clean_up_after(self, child: _Child) -> None:
        # A guard leaves nothing behind, unless it was itself killed: its child then died with it, but the
        # child's children may live on anywhere. Only their environment still tells whose they are.
        if child.process is not None and (child.process.returncode or 0) < 0:
            self._end_left_behind(self._mark_of(child.spec), f"{child.spec.name}, whose guard was killed")

    def _end_left_behind(self, mark: str, whose: str) -> None:
        for pid in end_marked(MARK_VARIABLE, mark, within_s=_GUARD_MARGIN_S):
            self._announce(f"ended process {pid}, left behind by {whose}")

    def _mark_of(self, spec: ChildSpec) -> str:
        return f"{self._mark};{spec.name};"


def _tell_end(spec: ChildSpec) -> str:
    """The last lines of a child's log, and what the log tells; empty if there is none."""
    if not spec.log.exists():
        return ""
    with spec.log.open("rb") as stream:
        stream.seek(max(0, spec.log.stat().st_size - _EXPLAINED_BYTES))
        text = stream.read().decode(errors="replace")
    tail = "\n".join(text[-_TAIL_BYTES:].splitlines()[-_TAIL_LINES:])
    return "\n".join(part for part in (tail, spec.explain(text)) if part)


def rotate_log(log: Path) -> None:
    """Make way for a fresh log; the `KEPT_LOGS` before it are kept as name.log.1 (the newest) and so on."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for number in range(KEPT_LOGS, 0, -1):
        source = log.with_name(f"{log.name}.{number - 1}") if number > 1 else log
        if source.exists():
            source.replace(log.with_name(f"{log.name}.{number}"))


def _describe(child: _Child) -> str:
    code = child.process.returncode if child.process is not None else None
    if code is None:
        return "no status"
    number = -code if code < 0 else code - guard.SIGNAL_STATUS
    if number in signal.valid_signals():
        return f"signal {signal.Signals(number).name}"
    return f"exit status {code}"
