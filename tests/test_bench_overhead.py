"""The figures of the overhead and overlap benches from made-up runs, and a reduced run of both."""

from __future__ import annotations

import pytest

import bench.overhead
import bench.overlap
from bench.overhead import split
from bench.overlap import Measured, compare
from bench.sized_world import Ended

BEGUN = 1_800_000_000.0
STEPS = {"inspected": 4.0, "converted": 8.0, "checked": 2.0, "staged": 3.0, "scored": 8.0}


def ended(started: float, wall: float, **changes: float) -> Ended:
    """A run that began so many seconds after BEGUN; first step after 0.5 s, verdict 0.25 s before its end."""
    return Ended(
        taken=BEGUN + started - 1.5,
        started=BEGUN + started,
        ended=BEGUN + started + wall,
        first_step=BEGUN + started + 0.5,
        steps=STEPS | {"opponents": 0.125, "verdict": 0.0625} | changes,
        verdict=BEGUN + started + wall - 0.25,
    )


def test_the_parts_add_up_to_all_but_the_work() -> None:
    parts = split(ended(0.0, 26.25))
    assert parts == {
        "take_up": 0.5,
        "opponents": 0.125,
        "verdict": 0.0625,
        "between_steps": 0.3125,
        "afterwards": 0.25,
    }
    assert sum(parts.values()) == 26.25 - 25.0


@pytest.mark.parametrize(("late", "ratio", "passes"), [(9.5, 1.4, True), (9.75, 1.39, False)])
def test_two_at_once_are_held_against_one_after_the_other(late: float, ratio: float, passes: bool) -> None:
    """The second begins 0.5 s after the first, and its score waits for the other's."""
    one_by_one = [ended(0.0, 24.5), ended(24.5, 24.5)]
    overlapped = [ended(0.0, 25.0), ended(0.5, 25.0 + late, scored=16.0)]
    streams = (
        [ended(24.5 * turn, 24.5) for turn in range(3)],
        [ended(12.25 * turn, 24.5) for turn in range(3)],
    )
    figures = compare(Measured([one_by_one], streams[0]), Measured([overlapped], streams[1]))
    assert (figures["one_after_the_other_s"], figures["overlapped_s"]) == (49.0, 25.5 + late)
    assert (figures["ratio"], figures["passed"]) == (ratio, passes)
    assert (figures["convert_s"], figures["score_s"]) == (8.0, 8.0)
    assert figures["ratio_at_best"] == round(49.0 / (24.5 + 8.0), 3)
    assert (figures["stream_adapters"], figures["stream_ratio"]) == (3, 1.5)
    assert (figures["stream_one_slot_s"], figures["stream_two_slots_s"]) == (24.5, 16.333)


@pytest.mark.real
def test_both_benches_at_a_small_size() -> None:
    small = ["--layers", "3", "--experts", "5", "--turns", "1"]
    overhead = bench.overhead.run([*small, "--kind", "long_lived_runner"])
    assert overhead["adapters"] == 1
    assert overhead["runner_overhead_s"] == pytest.approx(sum(overhead["parts"].values()), abs=0.01)
    assert all(seconds > 0 for seconds in overhead["parts"].values())
    bench.overhead.show(overhead)
    overlap = bench.overlap.run([*small, "--stream", "3"])
    assert overlap["score_s"] >= overlap["convert_s"] > 0
    assert overlap["one_after_the_other_s"] > 2 * overlap["score_s"]
    assert set(overlap["slots"]) == {"1", "2"}
    bench.overlap.show(overlap)
