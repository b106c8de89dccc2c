"""How far a long step has come, as log lines: at most one each ten seconds, none for a short one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

EVERY_S = 10.0


class Counted(StrEnum):
    """What is counted."""

    BYTES = "bytes"
    NUMBERS = "numbers"
    PARTS = "parts"
    PROMPTS = "prompts"


class ProgressLines:
    """Called with what is done and what there is in all, from any thread; writes a line when one is due.

    what: the adapter and what is done with it. The time that is left is reckoned from what this object has seen, and
    begins anew where the count does.
    """

    def __init__(
        self,
        log: logging.Logger | logging.LoggerAdapter[Any],
        what: str,
        unit: Counted,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._what, self._unit, self._clock = log, what, unit, clock
        self._lock = threading.Lock()
        self._started = self._told = clock()
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        """Note that so much is done of so much in all."""
        with self._lock:
            now = self._clock()
            if done < self._done:
                self._started = now
            self._done = done
            if now - self._told < EVERY_S or done >= total:
                return
            self._told = now
            line = f"{self._what}: {_amounts(done, total, self._unit)} ({done / total:.0%})"
            if done > 0 and now > self._started:
                line += f", about {_duration((now - self._started) / done * (total - done))} left"
        self._log.info("%s", line)


def _amounts(done: int, total: int, unit: Counted) -> str:
    if unit is Counted.BYTES:
        return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
    return f"{done:,} of {total:,} {unit.value}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5_400 else f"{seconds / 3_600:.1f} h"
