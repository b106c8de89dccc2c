"""Python's collector of cyclic garbage, out of the way of code that makes many objects and no cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no cyclic garbage meanwhile.

    Ten thousand new objects make it look at every object of the process again and again: 0.17 s each time where torch
    is loaded. Where two threads are in here at once, the first to leave ends it for both, which costs time only.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
