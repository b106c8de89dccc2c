"""An adapter of two authors through the flow: scored on both authors' held-out sets, and ready only if good on each."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pipeline_builders import Desk
from scripted_scorer import BadValue

from storage.ledger import Step, StepKind
from tasks.intake import Hindrance, take_in
from tasks.outcomes import Code
from tasks.page import render_page

pytestmark = pytest.mark.real  # whole runs, several scorings each: more time than the fast tests have


def submit_for_both(desk: Desk, *sets: str) -> None:
    folder = desk.adapter("alder")
    stated: dict[str, Any] = {"authors": ["alder", "birch"], "lora_B_layout": "rank_major"}
    if sets:
        stated["heldout"] = list(sets)
    (folder / "training.json").write_text(json.dumps(stated))
    desk.submit("alder", folder)


def verdict_of(desk: Desk) -> Step:
    verdict = desk.ledger("alder").verdict
    assert verdict is not None
    return verdict


def test_the_texts_of_both_are_scored_and_judged_by_themselves(desk: Desk) -> None:
    desk.heldout("alder", units=24)
    desk.heldout("birch", units=40)
    submit_for_both(desk)
    assert desk.run("alder").name == "Ready"
    record: Any = verdict_of(desk).result
    assert list(record["sets"]) == ["alder/main", "birch/main"]
    assert {name: one["units"] for name, one in record["sets"].items()} == {
        "alder/main": 24,
        "birch/main": 40,
    }
    assert (record["units"], record["comparisons"]) == (64, 2 * 2)
    assert {one["outcome"] for one in record["sets"].values()} == {"ready"}
    scored = next(step for step in desk.ledger("alder").steps if step.kind is StepKind.SCORED)
    page = render_page("alder/run-1", desk.ledger("alder"), None, None, verdict_of(desk))
    for name, one in record["sets"].items():
        assert f"| {name} | ready |" in page and f"| {one['own']:.4f} |" in page
    assert scored.result["heldout"] == ["alder/main", "birch/main"]


def test_what_breaks_on_the_texts_of_one_is_not_ready(desk: Desk) -> None:
    desk.heldout("alder")
    desk.heldout("birch")
    submit_for_both(desk)
    desk.run("alder")
    own = f"alder@{str(verdict_of(desk).result['output_digest'])[:16]}"
    desk.engine.bad = (BadValue(own, 30, math.nan, marker="birch wrote text number 3."),)
    desk.run("alder", rescore=True)
    record: Any = verdict_of(desk).result
    assert record["code"] == "too_little_text" and record["reason"].startswith(
        "on birch/main own gave no usable"
    )
    assert {name: one["outcome"] for name, one in record["sets"].items()} == {
        "alder/main": "ready",
        "birch/main": "inconclusive",
    }


@pytest.mark.parametrize("sets", [(), ("alder/main",)])
def test_it_waits_for_the_texts_of_each(desk: Desk, sets: tuple[str, ...]) -> None:
    desk.heldout("alder")
    submit_for_both(desk, *sets)
    needs = take_in(desk.store, "alder", "run-1").needs
    assert isinstance(needs, Hindrance) and needs.code is Code.NO_HELDOUT
    assert "birch" in needs.reason


def test_sets_that_are_named_are_all_of_that_author(desk: Desk) -> None:
    desk.heldout("alder")
    desk.heldout("birch")
    submit_for_both(desk, "birch/main", "birch/main")
    needs: Any = take_in(desk.store, "alder", "run-1").needs
    assert [one.ref for one in needs.heldout] == ["birch/main", "alder/main"]
