"""The figures of the scale bench from a made-up backlog: which stretches are compared, and what does not pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.backlog import PARTS, Look, Played, Run
from bench.scale import compare

BEGUN = 1_800_000_000.0
QUIET = {"locked": 0, "busy": 0, "restarts": 0}


def ended(number: int, seconds: float) -> Run:
    return Run(f"author-{number}", "Ready", failed=False, ended=BEGUN + seconds)


def played(each: Callable[[int], float], memory: Callable[[float], float], adapters: int = 300) -> Played:
    """A backlog whose adapter with this number takes `each` seconds; MiB of a part at a second by `memory`."""
    ends = [sum(map(each, range(number + 1))) for number in range(adapters)]
    looks = [
        Look(float(second), dict.fromkeys(PARTS, memory(second))) for second in range(10, int(ends[-1]), 10)
    ]
    runs = tuple(ended(number, end) for number, end in enumerate(ends))
    # Judged once more, when there were opponents: it was through before.
    again = tuple(ended(number, ends[-1] + 50) for number in range(9))
    return Played(BEGUN, adapters, adapters, runs + again, tuple(looks), QUIET)


def test_a_backlog_that_stays_as_it_is_passes() -> None:
    figures = compare(played(lambda number: 2.0, lambda second: 100.0))
    assert (figures["per_adapter_s_first_100"], figures["per_adapter_s_last_100"]) == (2.0, 2.0)
    assert (figures["rss_mb_first"], figures["rss_mb_last"]) == (300.0, 300.0)
    assert figures["wall_s"] == 600.0 and figures["ready"] == 300 and figures["passed"] is True


def test_the_first_fifty_do_not_count() -> None:
    """They are slow; counted, they would let a last hundred pass that is slower than those after them."""
    figures = compare(
        played(lambda number: 4.0 if number < 50 or number >= 200 else 3.0, lambda second: 100.0)
    )
    assert (figures["per_adapter_s_first_100"], figures["per_adapter_s_last_100"]) == (3.0, 4.0)
    assert (figures["steady"], figures["passed"]) == (False, False)


@pytest.mark.parametrize(("last", "passes"), [(2.5, True), (2.6, False)])
def test_a_last_hundred_may_take_a_quarter_more(last: float, passes: bool) -> None:
    figures = compare(played(lambda number: last if number >= 200 else 2.0, lambda second: 100.0))
    assert figures["passed"] is figures["steady"] is passes


def test_memory_is_that_at_the_hundredth_and_at_the_last() -> None:
    figures = compare(played(lambda number: 2.0, lambda second: 100.0 if second <= 200 else 126.0))
    assert (figures["rss_mb_first"], figures["rss_mb_last"]) == (300.0, 378.0)
    assert figures["memory_mib"]["store"] == {"first": 100.0, "last": 126.0}
    assert (figures["steady"], figures["flat"], figures["passed"]) == (True, False, False)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda one: {"adapters": one.adapters + 1},
        lambda one: {"said": QUIET | {"busy": 1}},
        lambda one: {"runs": (*one.runs, Run("author-1", "Crashed", failed=True, ended=None))},
    ],
)
def test_one_that_is_not_ready_or_a_log_that_tells_of_trouble_does_not_pass(
    spoil: Callable[[Played], dict[str, Any]],
) -> None:
    good = played(lambda number: 2.0, lambda second: 100.0)
    fields = {name: getattr(good, name) for name in Played.__dataclass_fields__}
    assert compare(Played(**fields | spoil(good)))["passed"] is False


def test_few_adapters_are_not_compared() -> None:
    figures = compare(played(lambda number: 1.0 + number, lambda second: second, adapters=30))
    assert (
        figures["passed"] is True and figures["per_adapter_s_last_100"] > figures["per_adapter_s_first_100"]
    )
    none = compare(Played(BEGUN, 1, 1, (), (), QUIET))
    assert none["passed"] is False and none["wall_s"] is None
