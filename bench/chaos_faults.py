"""Every class of faults that the chaos bench knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.chaos_boundaries import BOUNDARIES
from bench.chaos_events import EVENTS
from bench.chaos_kills import KILLS
from bench.chaos_limits import LIMITS
from bench.chaos_store import KINDS
from bench.chaos_world import World

CLASSES: Mapping[str, Callable[[World], bool]] = KILLS | BOUNDARIES | EVENTS | LIMITS
"""Each does one fault to the running world, and returns whether it really happened."""

NAMES = (*CLASSES, *KINDS)
"""All classes; those of the store happen to whatever request goes by (bench/chaos_store.py)."""
