"""How long something has been so, in words."""

from __future__ import annotations

from datetime import timedelta


def format_age(age: timedelta) -> str:
    """An age in its largest unit, rounded down: `40 s`, `3 min`, `5 h`, `2 d`."""
    seconds = max(0, int(age.total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
