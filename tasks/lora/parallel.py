"""The parts of an adapter looked at side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tasks.lora.sources import AdapterLayout

_Part = TypeVar("_Part")
_Found = TypeVar("_Found")

_MOST_THREADS = 4
# What the factors of the parts in hand may come to, in bytes.
_HELD = 1 << 30


def count_threads(layout: AdapterLayout) -> int:
    """Return how many parts are looked at at once: one for each core, up to 4, but fewer of large ones."""
    sizes = (sum(entry.end - entry.begin for entry in (*pair.a, *pair.b)) for pair in layout.pairs)
    largest = max(sizes, default=1)
    # The output has an A for each projection: both sides together hold about three times what the source stores.
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), _HELD // (3 * largest)))


def map_parts(look: Callable[[_Part], _Found], parts: Sequence[_Part], threads: int) -> Iterator[_Found]:
    """Yield what `look` finds in each part, in their order, from that many threads.

    Raises what `look` raises; what has not begun is then left.
    """
    pool = ThreadPoolExecutor(threads)
    try:
        yield from pool.map(look, parts)
    finally:
        pool.shutdown(cancel_futures=True)
