"""Telling how far a long piece of work has come."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Is called with the bytes done and the bytes in total, from any thread."""


class Tally:
    """Counts the bytes that several threads have done, and passes the count on."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done = 0
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Add these bytes to the count."""
        with self._lock:
            self._done += count
            self._progress(self._done, self._total)
