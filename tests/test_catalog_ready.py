"""Who is served: the view against a plain loop over the documents, on hand-made and random histories."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from catalog_builders import NOON, sync
from ledger_builders import (
    STEP_VERSIONS,
    Document,
    base_text,
    checked,
    converted,
    digest,
    halted,
    inspected,
    ledger,
    opponents,
    ready_ledger,
    refused,
    staged,
    submission,
    text,
    verdict,
    whole_path,
)
from rule_oracle import expected

from roster.catalog import open_catalog
from roster.incoming import LedgerText
from roster.serving import build_roster


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.duckdb"


def found(path: Path) -> dict[tuple[str, str], tuple[str, bool]]:
    with open_catalog(path) as reader:
        return {(row.author, row.base): (row.adapter_digest, row.stale) for row in reader.ready()}


def name(document: Document) -> str:
    return str(document["adapter_digest"])


def with_steps(document: Document, *more: Document) -> Document:
    return {**document, "steps": [*document["steps"], *more]}


OUTPUT = digest("output anna a")
OLD = ready_ledger("anna", "a", number=3)
REJECTED = ledger(
    "anna", "b", [inspected(), refused("verdict", "control_not_worse", minute=6)], runs={"r9": 9}
)
REFUSED_EARLY = ledger("anna", "b", [refused("inspected", "malformed_key")], runs={"r9": 9})
WAITING = ledger("anna", "b", [halted("inspected", "waiting", "no_heldout")], runs={"r9": 9})
NEWER = ready_ledger("anna", "c", number=12)
STOPPED_AGAIN = with_steps(
    OLD, opponents(["zeno", "yves"], minute=8), halted("scored", "stopped", "engine_drift", minute=9)
)
STOPPED_VERDICT = with_steps(OLD, halted("verdict", "stopped", "reference_invalid", minute=9))
UNCLEAR_AGAIN = with_steps(OLD, verdict("inconclusive", OUTPUT, code="margin_unclear", minute=9))
GOOD_AFTER_BAD = ledger(
    "anna",
    "a",
    [
        *whole_path("anna", OUTPUT)[:-1],
        verdict("quarantined", OUTPUT, code="no_effect", minute=6),
        verdict("ready", OUTPUT, minute=20),
    ],
    runs={"r3": 3},
)
TWICE = ledger("anna", "a", whole_path("anna", OUTPUT), runs={"r20": 20, "r1": 1})
ELSEWHERE = ready_ledger("anna", "d", number=30, base="other")


TRUTH = {
    "alone": ([OLD], [OLD]),
    "newer-quarantined": ([OLD, REJECTED], [OLD]),
    "newer-refused-early": ([OLD, REFUSED_EARLY], [OLD]),
    "newer-waiting": ([OLD, WAITING], [OLD]),
    "newer-ready": ([OLD, NEWER], [NEWER]),
    "three": ([NEWER, OLD, REJECTED], [NEWER]),
    "score-again-stopped": ([STOPPED_AGAIN], [STOPPED_AGAIN]),
    "verdict-again-stopped": ([STOPPED_VERDICT], [STOPPED_VERDICT]),
    "verdict-again-unclear": ([UNCLEAR_AGAIN], []),
    "good-after-bad": ([GOOD_AFTER_BAD], [GOOD_AFTER_BAD]),
    "older-bytes-submitted-again": ([NEWER, TWICE], [TWICE]),
    "two-bases": ([OLD, ELSEWHERE], [OLD, ELSEWHERE]),
    "only-quarantined": ([REJECTED], []),
    "only-waiting": ([WAITING], []),
    "nothing-done": ([ledger("anna", "e", [], runs={"r1": 1})], []),
}


def test_who_is_served(path: Path) -> None:
    cases = {
        author: [[{**one, "author": author} for one in group] for group in groups]
        for author, groups in TRUTH.items()
    }
    documents = [one for uploaded, _ in cases.values() for one in uploaded]
    sync(path, documents, bases=[base_text("tiny"), base_text("other")])
    result = found(path)
    assert result == {
        (author, one["base"]): (name(one), False) for author, (_, served) in cases.items() for one in served
    }
    assert result == expected(documents, ("tiny", "other"), STEP_VERSIONS)
    with open_catalog(path) as reader:
        (row,) = [row for row in reader.ready() if row.author == "older-bytes-submitted-again"]
    assert (row.run, row.submission) == ("r20", submission(20))


def test_what_was_not_served_is_shown_where_it_belongs(path: Path) -> None:
    early = ledger("berta", "x", [refused("converted", "shape_mismatch", minute=1)], runs={"r1": 1})
    mended = ready_ledger("berta", "y", number=2)
    waits = ledger("carla", "w", [halted("inspected", "waiting", "no_heldout")], runs={"r4": 4})
    sync(path, [STOPPED_AGAIN, REJECTED, early, mended, waits])
    with open_catalog(path) as reader:
        problems = {(row.author, row.problem, row.code, row.served_instead) for row in reader.problems()}
        waiting = {(row.author, row.state, row.code, row.verdict) for row in reader.waiting()}
        authors = {row.author: row for row in reader.authors()}
    assert problems == {
        ("anna", "stopped", "engine_drift", name(OLD)),
        ("anna", "quarantined", "control_not_worse", name(OLD)),
    }, "berta's first upload is mended by her second and is no problem any more"
    assert waiting == {("anna", "stopped", "engine_drift", "ready"), ("carla", "waiting", "no_heldout", None)}
    assert (authors["anna"].is_ready, authors["anna"].ready_run, authors["anna"].adapters) == (True, "r3", 2)
    assert (authors["anna"].newest_run, authors["anna"].newest_state) == ("r9", "quarantined")
    assert authors["anna"].newest_code == "control_not_worse"
    assert (authors["carla"].is_ready, authors["carla"].newest_state) == (False, "waiting")


def test_a_step_finished_after_a_stop_ends_the_waiting(path: Path) -> None:
    sync(path, [with_steps(WAITING, inspected(minute=5))])
    with open_catalog(path) as reader:
        assert reader.waiting() == []
        assert reader.show("anna").adapters[0].adapter.state == "in_progress"


def test_stale_is_flagged_and_still_served(path: Path) -> None:
    again = [converted(OUTPUT, minute=1, version="0"), converted(OUTPUT, minute=1, version="1")]
    redone = ledger("berta", "a", whole_path("berta", OUTPUT), runs={"r1": 1})
    redone["steps"][1:2] = again
    after = with_steps(ready_ledger("carla"), converted(OUTPUT, minute=30, version="2"))
    documents = [OLD, redone, after]
    for versions, stale in (
        (STEP_VERSIONS, set()),
        ({**STEP_VERSIONS, "converted": "2"}, {"anna", "berta", "carla"}),
        ({"scored": "1"}, set()),
        ({**STEP_VERSIONS, "verdict": "7"}, {"anna", "berta", "carla"}),
    ):
        sync(path, documents, versions=versions)
        assert {author for (author, _), (_, flag) in found(path).items() if flag} == stale, versions
        assert found(path) == expected(documents, ("tiny",), versions)
    with open_catalog(path) as reader:
        assert {(row.author, row.kind, row.recorded, row.current) for row in reader.stale()} == {
            (author, "verdict", "1", "7") for author in ("anna", "berta", "carla")
        }


# NaN sorts as the greatest value in DuckDB and equals itself; -Infinity would win every comparison of scores.
@pytest.mark.parametrize("figure", [math.nan, -math.inf])
def test_a_verdict_with_a_figure_that_is_no_number_is_not_served(path: Path, figure: float) -> None:
    bad = ready_ledger("anna", "n", number=9, own=figure)
    assert any(word in json.dumps(bad) for word in ("NaN", "Infinity"))
    sync(path, [OLD, bad, ready_ledger("berta", wrong={"anna": figure})])
    assert found(path) == {("anna", "tiny"): (name(OLD), False)}
    with open_catalog(path) as reader:
        stored = reader.sql("SELECT count(*) FROM figures WHERE NOT isfinite(value)").rows
        assert stored == ((0,),)
        rows = reader.sql("SELECT name, value, problem FROM figures WHERE value IS NULL ORDER BY ALL").rows
        assert ("own", None) in {row[:2] for row in rows} and ("wrong:anna", None) in {
            row[:2] for row in rows
        }
        assert all("not a finite number" in str(row[2]) for row in rows)
        best = reader.sql("SELECT author FROM scores WHERE subject = 'own' ORDER BY bpb NULLS LAST").rows
        problems = {(row.author, row.code, row.served_instead) for row in reader.problems()}
    assert best[-1] == ("anna",), "the adapter without a figure comes last"
    assert problems == {("anna", "bad_number", name(OLD)), ("berta", "bad_number", None)}


PLACES = {
    "own": {},
    "base": {},
    "base_again": {},
    "control": {},
    "margin": {},
    "lower": {"interval": ["BAD", 0.25]},
    "upper": {"interval": [0.125, "BAD"]},
    "wrong:zeno": {"wrong": {"zeno": "BAD"}},
}
BAD = ["NaN", "Infinity", "-Infinity", "1e999", '"2.x"', "true"]


def test_any_figure_that_is_no_number_bars_and_is_named(path: Path) -> None:
    """Every place of a figure with everything that JSON can hold there and that is no finite number."""
    documents, wanted = [], {}
    for number, (place, bad) in enumerate(itertools.product(PLACES, BAD)):
        document = ready_ledger(f"bad-{number}")
        document["steps"][-1]["result"] |= PLACES[place] or {place: "BAD"}
        plain = text(document)
        body = plain.body.replace('"BAD"', bad)
        assert body.count(bad) > plain.body.count(bad)
        documents.append(LedgerText(plain.key, plain.etag, body))
        wanted[document["author"]] = f"{place} is {bad.strip(chr(34))}, not a finite number"
    sync(path, [OLD, *documents])
    assert set(found(path)) == {("anna", "tiny")}
    with open_catalog(path) as reader:
        said = {row.author: row.reason for row in reader.problems()}
        assert reader.sql("SELECT count(*) FROM scores WHERE NOT isfinite(bpb)").rows == ((0,),)
        best = reader.sql("SELECT min(own), max(own) FROM ready").rows
    assert said == wanted
    assert best == ((2.125, 2.125),)


UNSERVABLE = [
    (ready_ledger("a1", own=None), "bad_number"),
    (ready_ledger("a2", base="unheard-of"), "base_not_registered"),
    (ledger("a3", "a", [converted(OUTPUT), verdict("ready", OUTPUT)], runs={"r1": 1}), "not_staged"),
    (ledger("a4", "a", [staged("a4", OUTPUT), verdict("ready", OUTPUT)], runs={"r1": 1}), "not_staged"),
    (
        ledger(
            "a5",
            "a",
            [converted(OUTPUT, rank=600, max_lora_rank=512), staged("a5", OUTPUT), verdict("ready", OUTPUT)],
            runs={"r1": 1},
        ),
        "not_serveable",
    ),
]


def test_a_ready_verdict_that_cannot_be_served_is_a_problem(path: Path) -> None:
    sync(path, [OLD, *(document for document, _ in UNSERVABLE)])
    assert set(found(path)) == {("anna", "tiny")}
    with open_catalog(path) as reader:
        problems = [(row.author, row.problem, row.code) for row in reader.problems()]
    assert sorted(problems) == [(document["author"], "unservable", code) for document, code in UNSERVABLE]


# https://github.com/unslothai/unsloth/issues/6930: scrambled experts still beat the wrong adapters; the check decides.
def test_scores_do_not_make_up_for_a_failed_check(path: Path) -> None:
    def about(step: Document, output: str) -> Document:
        return {**step, "inputs": {**step["inputs"], "output": output}}

    failed, passed = refused("checked", "delta_mismatch", minute=30), checked(minute=40)
    own, other = digest("output anna a"), digest("an earlier output")
    histories = {
        "failed": [failed],
        "failed-own": [about(failed, own)],
        "mended": [failed, passed],
        "mended-other": [about(failed, own), about(passed, other)],
        "failed-other": [about(failed, other)],
        "passed-before": [failed, verdict("ready", own, minute=50)],
        "stopped": [halted("checked", "stopped", "disk_full", minute=30)],
    }
    documents = [{**with_steps(OLD, *steps), "author": author} for author, steps in histories.items()]
    steps = OLD["steps"]
    never = {**OLD, "author": "never-passed", "steps": [*steps[:2], {**failed, "step_key": "x"}, *steps[3:]]}
    sync(path, [*documents, never])
    assert {author for author, _ in found(path)} == {"mended", "failed-other", "passed-before", "stopped"}
    with open_catalog(path) as reader:
        reasons = {row.author: str(row.reason) for row in reader.problems() if row.code == "check_failed"}
    assert reasons.keys() == {"failed", "failed-own", "mended-other", "never-passed"}
    assert all("ended as quarantined (delta_mismatch)" in reason for reason in reasons.values())


def random_history(chance: random.Random, author: str, number: int) -> Document:
    """Return an adapter that went through anything that can happen to one, in any order."""
    output = digest(f"{author} {number}")
    happenings: list[Any] = [
        lambda minute: refused("inspected", "layout_conflict", minute=minute),
        lambda minute: refused("checked", "delta_mismatch", minute=minute),
        lambda minute: checked(minute=minute),
        lambda minute: halted("inspected", "waiting", "no_heldout", minute=minute),
        lambda minute: halted("scored", "stopped", "engine_unavailable", minute=minute),
        lambda minute: halted("verdict", "stopped", "reference_invalid", minute=minute),
        lambda minute: opponents(["zeno"], minute=minute),
        lambda minute: converted(output, minute=minute, version=chance.choice("12")),
        lambda minute: verdict("ready", output, minute=minute),
        lambda minute: verdict("ready", output, minute=minute, version="2"),
        lambda minute: verdict("ready", output, minute=minute, own=math.nan),
        lambda minute: verdict("ready", output, minute=minute, wrong={}),
        lambda minute: verdict("ready", digest("another output"), minute=minute),
        lambda minute: verdict("quarantined", output, minute=minute, code="no_effect"),
        lambda minute: verdict("inconclusive", output, minute=minute, code="too_little_text"),
    ]
    steps = [] if chance.random() < 0.2 else whole_path(author, output)[: chance.randint(1, 7)]
    steps += [chance.choice(happenings)(10 + more) for more in range(chance.randint(0, 5))]
    runs = {f"r{time}": time for time in chance.sample(range(1, 50), chance.randint(1, 3))}
    base = chance.choice(["tiny", "tiny", "other", "unheard-of"])
    return ledger(author, str(number), steps, runs=runs, base=base)


@pytest.mark.parametrize("seed", [3, 5, 7])
def test_random_histories_against_a_plain_loop(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    documents = [
        random_history(chance, f"author-{author}", number)
        for author in range(60)
        for number in range(chance.randint(1, 4))
    ]
    bases = [base_text("tiny"), base_text("other")]
    sync(path, documents[::2], bases=bases)
    sync(path, documents[1::2], bases=bases)
    wanted = expected(documents, ("tiny", "other"), STEP_VERSIONS)
    assert found(path) == wanted
    assert 8 < len(wanted) < 100 and any(stale for _, stale in wanted.values()), (
        "the histories prove something"
    )
    with open_catalog(path) as reader:
        made = build_roster(reader.ready(), reader.bases(), previous=None, generated_at=NOON)
        served = {row.author for row in reader.authors() if row.is_ready}
    outputs = {
        (author, base): entry.output_digest
        for base, group in made.bases.items()
        for author, entry in group.authors.items()
    }
    by_name = {name(document): document for document in documents}
    last_ready = {
        place: [
            one for one in by_name[adapter]["steps"] if one["kind"] == "verdict" and one["outcome"] == "ready"
        ][-1]
        for place, (adapter, _) in wanted.items()
    }
    assert outputs == {place: one["result"]["output_digest"] for place, one in last_ready.items()}
    assert served == {author for author, _ in wanted}


def thin(path: Path) -> dict[str, tuple[int, int]]:
    with open_catalog(path) as reader:
        return {row.author: (row.opponents, row.wanted) for row in reader.thin_verdicts()}


def test_thin_verdicts_are_those_with_more_opponents_now(path: Path) -> None:
    first = ready_ledger("anna", wrong={})
    sync(path, [first])
    assert thin(path) == {}, "alone, there is nobody to be scored against"
    second = ready_ledger("berta", wrong={"anna": 2.25})
    sync(path, [second])
    assert thin(path) == {"anna": (0, 1)}
    third = ready_ledger("carla", wrong={"anna": 2.25, "berta": 2.5})
    elsewhere = ready_ledger("dora", base="other", wrong={})
    sync(path, [third, elsewhere], bases=[base_text("tiny"), base_text("other")])
    assert thin(path) == {"anna": (0, 2)}, "berta met one of two, which is half of them"
    sync(path, [], max_opponents=1)
    assert thin(path) == {"anna": (0, 1)}
    sync(path, [], max_opponents=0)
    assert thin(path) == {}


def test_thin_verdicts_know_pen_names_and_equal_bytes(path: Path) -> None:
    same = digest("the same bytes")
    authors = [ready_ledger(author, wrong={}) for author in ("anna", "berta")]
    twins = [
        ledger(author, author, whole_path(author, same, wrong={}), runs={"r1": 1})
        for author in ("carla", "dora")
    ]
    sync(path, [*authors, *twins], bases=[base_text("tiny", exclusions=[["anna", "berta"]])])
    assert thin(path) == {"anna": (0, 2), "berta": (0, 2), "carla": (0, 2), "dora": (0, 2)}
    sync(
        path,
        [],
        bases=[base_text("tiny", exclusions=[["anna", "berta"], ["anna", "anna"], ["carla", "anna"]])],
    )
    assert thin(path) == {"anna": (0, 1), "berta": (0, 2), "carla": (0, 1), "dora": (0, 2)}


def test_a_choice_that_passes_somebody_over_is_not_repeated_for_ever(path: Path) -> None:
    others = [ready_ledger(author, wrong={"x": 2.5, "y": 2.5, "z": 2.5}) for author in ("berta", "carla")]
    chosen = opponents(["berta"], minute=4)
    chosen["result"]["available"] = 2
    anna = ready_ledger("anna", wrong={"berta": 2.5})
    anna["steps"][4] = chosen
    sync(path, [anna, *others])
    assert thin(path) == {}
    sync(path, [ready_ledger("dora", wrong={"x": 2.5, "y": 2.5, "z": 2.5})])
    assert thin(path) == {"anna": (1, 3)}
    stopped = with_steps(anna, opponents(["berta", "carla", "dora"], minute=9))
    sync(path, [stopped])
    assert thin(path) == {"anna": (1, 3)}, "opponents chosen for a score that was not made count for nothing"
