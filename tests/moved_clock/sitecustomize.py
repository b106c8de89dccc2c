"""For Python under libfaketime, found by PYTHONPATH: `time.sleep` as it would be by `select`.

libfaketime 0.9.10 takes every absolute time of clock_nanosleep for one of the clock that it moves, also where it leaves
that clock alone; Python sleeps until a time of the monotonic one, and would be told that it is invalid.
"""

import select
import time


def sleep(seconds: float, /) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select.select((), (), (), float(seconds))


time.sleep = sleep
