"""What operators' acts, stale verdicts and changed engines do to who is served: by hand, and against a plain loop."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from catalog_builders import NOON, sync
from ledger_builders import (
    STEP_VERSIONS,
    Document,
    base_text,
    digest,
    halted,
    inspected,
    key_of,
    ledger,
    ready_ledger,
    refused,
    step,
    verdict,
    whole_path,
)
from rule_oracle import act, engine, expected, in_force, record

from roster.catalog import open_catalog
from roster.incoming import LedgerText
from roster.rows import ProblemRow, StateRow
from roster.serving import build_roster
from storage.author_record import AuthorRecord, find_standing

pytestmark = pytest.mark.real

OLD_ENGINE, NEW_ENGINE, OTHER_ENGINE = ("ab" * 8, "cd" * 8, "ef" * 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.duckdb"


def name(document: Document) -> str:
    return str(document["adapter_digest"])


def found(path: Path) -> dict[tuple[str, str], tuple[str, bool]]:
    with open_catalog(path) as reader:
        rows = reader.ready()
        afresh = reader.sql("SELECT * FROM rule ORDER BY base, author").rows
        assert reader.sql("SELECT * FROM ready ORDER BY base, author").rows == afresh, "ready is the rule"
        made = build_roster(rows, reader.bases(), previous=None, generated_at=NOON)
    listed = {(author, base) for base, group in made.bases.items() for author in group.authors}
    assert listed == {(row.author, row.base) for row in rows}, "roster/current.json is ready"
    return {(row.author, row.base): (row.adapter_digest, row.stale) for row in rows}


def measured(document: Document, engine_id: str | None) -> Document:
    """The same adapter, its latest verdict measured on this engine."""
    scored, judged = document["steps"][5], document["steps"][6]
    scored = {**scored, "result": {**scored["result"], "engine_id": engine_id, "seconds": 7.5}}
    judged = {**judged, "inputs": {**judged["inputs"], "scored": scored["step_key"]}}
    return {**document, "steps": [*document["steps"][:5], scored, judged]}


FIRST, SECOND = ready_ledger("anna", "first", number=2), ready_ledger("anna", "second", number=5)
ELSEWHERE = ready_ledger("anna", "elsewhere", number=9, base="other")
REFUSED = ledger("anna", "third", [inspected(), refused("verdict", "no_effect", minute=6)], runs={"r7": 7})

ACTS: dict[str, tuple[list[Document], list[Document]]] = {
    "nothing": ([], [SECOND, ELSEWHERE]),
    "held": ([act("hold", why="x")], []),
    "held on one base": ([act("hold", base="tiny", why="x")], [ELSEWHERE]),
    "released": ([act("hold", why="x"), act("release")], [SECOND, ELSEWHERE]),
    "released on one base": ([act("hold", why="x"), act("release", base="other")], [ELSEWHERE]),
    "held again": ([act("hold", why="x"), act("release"), act("hold", why="y")], []),
    "retired": ([act("retire", why="x")], []),
    "retired and released": ([act("retire", why="x"), act("release")], [SECOND, ELSEWHERE]),
    "pinned to the older": ([act("pin", base="tiny", adapter=name(FIRST))], [FIRST, ELSEWHERE]),
    "unpinned": (
        [act("pin", base="tiny", adapter=name(FIRST)), act("unpin", base="tiny")],
        [SECOND, ELSEWHERE],
    ),
    "unpinned elsewhere": (
        [act("pin", base="tiny", adapter=name(FIRST)), act("unpin", base="other")],
        [FIRST, ELSEWHERE],
    ),
    "pinned twice": (
        [act("pin", base="tiny", adapter=name(FIRST)), act("pin", base="tiny", adapter=name(SECOND))],
        [SECOND, ELSEWHERE],
    ),
    "pinned and held": (
        [act("pin", base="tiny", adapter=name(FIRST)), act("hold", base="tiny", why="x")],
        [ELSEWHERE],
    ),
    "pinned, held, released": (
        [act("pin", base="tiny", adapter=name(FIRST)), act("hold", why="x"), act("release")],
        [FIRST, ELSEWHERE],
    ),
    "pinned to a refused one": ([act("pin", base="tiny", adapter=name(REFUSED))], [ELSEWHERE]),
    "pinned to one of another base": ([act("pin", base="tiny", adapter=name(ELSEWHERE))], [ELSEWHERE]),
    "pinned to nothing known": ([act("pin", base="other", adapter=digest("gone"))], [SECOND]),
    "purged": ([act("pin", base="tiny", adapter=name(FIRST)), act("purge", why="x")], []),
    "purged and released": (
        [
            act("hold", why="x"),
            act("pin", base="tiny", adapter=name(FIRST)),
            act("purge", why="x"),
            act("release"),
        ],
        [SECOND, ELSEWHERE],
    ),
}


def test_what_acts_come_to(path: Path) -> None:
    documents, records = [], []
    wanted: dict[tuple[str, str], tuple[str, bool]] = {}
    for number, (events, served) in enumerate(ACTS.values()):
        author = f"author-{number}"
        documents += [{**one, "author": author} for one in (FIRST, SECOND, ELSEWHERE, REFUSED)]
        records += [record(author, *events)] if events else []
        wanted |= {(author, one["base"]): (name(one), False) for one in served}
    sync(path, [*documents, *records], bases=[base_text("tiny"), base_text("other")])
    assert found(path) == wanted
    numbers = {label: f"author-{number}" for number, label in enumerate(ACTS)}
    with open_catalog(path) as reader:
        problems = reader.problems()
        rows = {(row.author, row.base): row for row in reader.authors()}
        retired = reader.authors(state="retired")
        told = reader.events(numbers["pinned and held"])
    held = rows[numbers["held on one base"], "tiny"]
    assert (held.state, held.held, held.held_why, held.retired, held.is_ready) == (
        "held",
        True,
        "x",
        False,
        False,
    )
    other = rows[numbers["held on one base"], "other"]
    assert (other.state, other.held, other.held_why) == ("ready", False, None)
    assert rows[numbers["pinned to the older"], "tiny"].pinned_digest == name(FIRST)
    assert {row.author for row in retired} == {numbers["retired"], numbers["purged"]}
    assert [(row.act, row.base, row.adapter_digest, row.who, row.why) for row in told] == [
        ("pin", "tiny", name(FIRST), "olga", ""),
        ("hold", "tiny", None, "olga", "x"),
    ]
    pins = [row for row in problems if row.code == "pin_not_ready"]
    assert {(row.author, row.base, row.adapter_digest) for row in pins} == {
        (numbers["pinned to a refused one"], "tiny", name(REFUSED)),
        (numbers["pinned to one of another base"], "tiny", name(ELSEWHERE)),
        (numbers["pinned to nothing known"], "other", digest("gone")),
    }
    assert "whose state is quarantined" in reason_of(pins, numbers["pinned to a refused one"])
    assert "has not uploaded for tiny" in reason_of(pins, numbers["pinned to one of another base"])
    quarantined = {row.author for row in problems if row.problem == "quarantined"}
    assert numbers["held"] in quarantined and numbers["nothing"] in quarantined
    assert not quarantined & {numbers["retired"], numbers["purged"]}, "nobody need look at the retired"


def reason_of(rows: Sequence[ProblemRow], author: str) -> str:
    return "".join(str(row.reason) for row in rows if row.author == author)


def test_nothing_of_the_retired_is_waited_for(path: Path) -> None:
    steps = [halted("inspected", "waiting", "no_heldout")]
    waits = [ledger(author, "w", steps, runs={"r1": 1}) for author in ("anna", "berta")]
    sync(path, [*waits, record("anna", act("retire", why="x")), record("zoe", act("hold", why="y"))])
    with open_catalog(path) as reader:
        assert [row.author for row in reader.waiting()] == ["berta"]
        states = reader.states()
    assert states == [
        StateRow("anna", "tiny", False, True, None, "retire", "x", "olga", "2026-11-21T13:00:00Z"),
        StateRow("zoe", None, True, False, None, "hold", "y", "olga", "2026-11-21T13:00:00Z"),
    ]


def purged(document: Document) -> Document:
    """The ledger as a purge leaves it: what happened and when, and nothing that can be served."""
    steps = [
        {**one, "step_key": "0" * 16, "inputs": {"purged": "2026-11-22T00:00:00Z"}, "result": {"codes": []}}
        for one in document["steps"]
    ]
    return {**document, "steps": steps, "verdict": None}


def test_a_purged_adapter_is_never_ready_again(path: Path) -> None:
    again = purged(SECOND)
    again["steps"] = [*again["steps"], *whole_path("anna", digest("output once more"))]
    documents = [purged(FIRST), purged(REFUSED), {**again, "author": "berta"}]
    records = [record(author, act("purge", why="x"), act("release")) for author in ("anna", "berta")]
    sync(path, [*documents, *records])
    assert found(path) == {("berta", "tiny"): (name(SECOND), False)}, "the same bytes, judged once more"
    with open_catalog(path) as reader:
        assert {(row.author, row.state) for row in reader.authors()} == {
            ("anna", "purged"),
            ("berta", "ready"),
        }
        assert reader.problems() == []
        assert len(reader.history("anna")) == len(FIRST["steps"]) + len(REFUSED["steps"])
        assert reader.show("anna").adapters[0].verdicts == ()


BROKEN: dict[str, tuple[str | Document, str]] = {
    "no-json": ("{", "not JSON"),
    "other-schema": ({"schema": 2}, "schema is 2"),
    "unknown-act": ({"events": [act("banish")]}, "act that is not known"),
    "pin-of-nothing": ({"events": [act("pin", base="tiny")]}, "adapter digest"),
    "nobody": ({"events": [{**act("hold"), "who": None}]}, "lacks who"),
    "no-list": ({"events": {"hold": 1}}, "not a list"),
    "another": ({"author": "anna"}, "is about anna"),
}


def test_an_author_whose_record_cannot_be_read_is_held(path: Path) -> None:
    records = []
    for author, (broken, _) in BROKEN.items():
        good = record(author, act("hold", why="x"), act("release"))
        body = broken if isinstance(broken, str) else json.dumps({**json.loads(good.body), **broken})
        records.append(LedgerText(good.key, good.etag, body))
    documents = [{**FIRST, "author": author} for author in BROKEN]
    sync(path, [*documents, *records, SECOND])
    assert set(found(path)) == {("anna", "tiny")}
    with open_catalog(path) as reader:
        held = {row.author: row for row in reader.states()}
        unreadable = {row.reason for row in reader.problems() if row.problem == "unreadable"}
    assert {author: row.act for author, row in held.items()} == dict.fromkeys(BROKEN, "unreadable")
    for author, (_, fault) in BROKEN.items():
        assert held[author].held and fault in held[author].why
        assert any(
            f"ledger/{author}/_author.json" in str(reason) and fault in str(reason) for reason in unreadable
        )
    sync(path, [], removed=[one.key for one in records])
    assert len(found(path)) == 1 + len(BROKEN), "records that are gone hold nobody"


def test_a_stale_verdict_is_not_served_when_asked_for(path: Path) -> None:
    newer = {**SECOND, "steps": [{**one, "code_version": "0"} for one in SECOND["steps"]]}
    alone = {**newer, "author": "berta"}
    sync(path, [FIRST, newer, alone])
    assert found(path) == {("anna", "tiny"): (name(SECOND), True), ("berta", "tiny"): (name(SECOND), True)}
    sync(path, [], serve_stale=False)
    assert found(path) == {("anna", "tiny"): (name(FIRST), False)}, "the older one still stands"
    with open_catalog(path) as reader:
        problems = {(row.author, row.problem, row.code, row.served_instead) for row in reader.problems()}
        berta = reader.authors(state="unservable")
    assert problems == {
        ("anna", "unservable", "stale", name(FIRST)),
        ("berta", "unservable", "stale", None),
    }
    assert [row.author for row in berta] == ["berta"]
    sync(path, [record("anna", act("pin", base="tiny", adapter=name(SECOND)))], serve_stale=False)
    assert found(path) == {}, "a pin does not overrule it"


# https://github.com/vllm-project/vllm/pull/31534: vLLM itself changed how it reads stacked adapters, so that one judged
# on an older vLLM is scrambled on a newer: same bytes, another engine.
def test_a_verdict_of_another_engine_is_stale(path: Path) -> None:
    anna, berta = measured(FIRST, OLD_ENGINE), measured(ready_ledger("berta"), NEW_ENGINE)
    unknown = measured(ready_ledger("carla"), None)
    refusal = ledger(
        "dora", "a", [*anna["steps"], refused("verdict", "unresolved_keys", minute=9)], runs={"r1": 1}
    )
    documents = [anna, berta, unknown, refusal, measured(ELSEWHERE, OLD_ENGINE)]
    bases = [base_text("tiny"), base_text("other")]
    everyone = {("anna", "tiny"), ("berta", "tiny"), ("carla", "tiny"), ("anna", "other")}
    sync(path, documents, bases=bases)
    assert {place for place, (_, stale) in found(path).items() if not stale} == everyone, "no engine is known"
    sync(path, [], bases=bases, engines=[engine("tiny", NEW_ENGINE)])
    assert {place for place, (_, stale) in found(path).items() if stale} == {("anna", "tiny")}
    with open_catalog(path) as reader:
        stale = [(row.author, row.kind, row.recorded, row.current) for row in reader.stale()]
        assert reader.show("anna").adapters[1].adapter.engine_id == OLD_ENGINE
        assert reader.sql("SELECT engine_id, vllm_version FROM engines").rows == ((NEW_ENGINE, "0.32.0"),)
    assert stale == [("anna", "engine", OLD_ENGINE, NEW_ENGINE)]
    sync(path, [], bases=bases, engines=[engine("tiny", NEW_ENGINE)], serve_stale=False)
    assert set(found(path)) == everyone - {("anna", "tiny")}
    again = {**anna, "steps": [*anna["steps"], *scored_again(anna, NEW_ENGINE)]}
    sync(path, [again], bases=bases, engines=[engine("tiny", NEW_ENGINE)], serve_stale=False)
    assert set(found(path)) == everyone, "scored on the new engine it is back"
    report = sync(path, [], bases=bases, engines=[engine("tiny", None)], serve_stale=False)
    assert [text for text in report.unreadable if "engines/tiny.json" in text and "no engine.json" in text]


def scored_again(document: Document, engine_id: str) -> list[Document]:
    scored = step("scored", "done", {"engine_id": engine_id, "seconds": 2.5}, minute=15)
    judged = verdict("ready", document["steps"][6]["result"]["output_digest"], minute=16)
    judged["inputs"] |= {"scored": scored["step_key"]}
    return [scored, judged]


def test_what_an_author_has_cost(path: Path) -> None:
    twice = measured(FIRST, OLD_ENGINE)
    twice["steps"] += scored_again(twice, NEW_ENGINE)
    waits = ledger("anna", "w", [halted("inspected", "waiting", "no_heldout")], runs={"r8": 8, "r2": 3})
    sync(path, [twice, waits, ledger("berta", "n", [], runs={"r1": 1})])
    with open_catalog(path) as reader:
        anna, berta = reader.times()
        assert reader.times("berta", "tiny") == [berta] and reader.times("anna", "other") == []
    assert (anna.runs, anna.steps, anna.seconds, anna.engine_seconds) == (2, 10, 10 * 42, 7.5 + 2.5)
    assert (anna.first_submission_at, anna.ready_at) == ("2026-11-01T00:02:07Z", "2026-11-20T12:06:49Z")
    assert anna.seconds_to_ready == 19 * 86400 + 12 * 3600 + 4 * 60 + 42
    assert (berta.runs, berta.steps, berta.seconds, berta.engine_seconds) == (1, 0, 0, 0)
    assert (berta.ready_at, berta.seconds_to_ready) == (None, None)


def random_adapter(chance: random.Random, author: str, number: int) -> Document:
    """Return an adapter that was ready once, and met with something since."""
    output = digest(f"{author} {number}")
    steps: list[Document] = whole_path(author, output)
    for one in steps:
        one["code_version"] = chance.choice("1" * 25 + "2")
    steps[5]["result"]["engine_id"] = chance.choice([OLD_ENGINE, NEW_ENGINE, NEW_ENGINE, None])
    more: list[list[Document]] = [
        [],
        [],
        [verdict("quarantined", output, minute=20, code="no_effect")],
        [verdict("inconclusive", output, minute=20, code="margin_unclear")],
        [halted("scored", "stopped", "engine_drift", minute=20)],
        scored_again({"steps": steps}, chance.choice([OLD_ENGINE, NEW_ENGINE])),
    ]
    steps += chance.choice(more)
    for one in steps:
        if one["kind"] == "verdict" and "scored" not in one["inputs"] and chance.random() < 0.8:
            one["inputs"] |= {"scored": steps[5]["step_key"]}
    runs = {f"r{time}": time for time in chance.sample(range(1, 50), chance.randint(1, 3))}
    made = ledger(
        author, str(number), steps, runs=runs, base=chance.choice(["tiny", "tiny", "other", "unheard-of"])
    )
    return purged(made) if chance.random() < 0.1 else made


def random_acts(chance: random.Random, adapters: Sequence[Document]) -> list[Document]:
    acts: list[Any] = [
        lambda base: act("hold", base=base, why="x"),
        lambda base: act("release", base=base),
        lambda base: act("release", base=base),
        lambda base: act("retire", base=base, why="x"),
        lambda base: act("unpin", base=base),
        lambda _: act("purge", why="x"),
        lambda _: act("pin", base=(one := chance.choice(adapters))["base"], adapter=name(one)),
        lambda _: act("pin", base=(one := chance.choice(adapters))["base"], adapter=name(one)),
        lambda _: act("pin", base="tiny", adapter=digest("gone")),
    ]
    count = chance.choice([0, 0, 0, 1, 1, 2, 4, 7])
    return [chance.choice(acts)(chance.choice([None, "tiny", "other"])) for _ in range(count)]


@pytest.mark.parametrize("seed", [2, 11])
def test_random_histories_and_acts_against_a_plain_loop(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    documents: list[Document] = []
    events: dict[str, list[Document]] = {}
    for author in (f"author-{number}" for number in range(90)):
        adapters = [random_adapter(chance, author, number) for number in range(chance.randint(1, 3))]
        documents += adapters
        events[author] = random_acts(chance, adapters)
    told: Mapping[str, str] = {"tiny": NEW_ENGINE, "other": OTHER_ENGINE}
    bases, engines = [base_text(base) for base in told], [engine(*one) for one in told.items()]
    # What was done comes in two syncs: first half of it, then all, as it was appended.
    early = [record(author, *done[: len(done) // 2]) for author, done in events.items() if done]
    sync(path, [*documents[::2], *early], bases=bases, engines=engines)
    late = [record(author, *done) for author, done in events.items() if done]
    sync(path, [*documents[1::2], *late], bases=bases, engines=engines)
    wanted = expected(documents, ("tiny", "other"), STEP_VERSIONS, events=events, engines=told)
    assert found(path) == wanted
    assert wanted != expected(documents, ("tiny", "other"), STEP_VERSIONS, engines=told), (
        "the acts do something"
    )
    assert {flag for _, flag in wanted.values()} == {True, False}
    check_standing(path, documents, events)
    sync(path, [], bases=bases, engines=engines, serve_stale=False)
    fresh = expected(
        documents, ("tiny", "other"), STEP_VERSIONS, events=events, engines=told, serve_stale=False
    )
    assert found(path) == fresh and 5 < len(fresh) < len(wanted)
    sync(path, [], bases=bases, serve_stale=False, removed=[one.key for one in late] + [key_of(documents[0])])
    assert found(path) == expected(documents[1:], ("tiny", "other"), STEP_VERSIONS, serve_stale=False)


def check_standing(path: Path, documents: Sequence[Document], events: Mapping[str, list[Document]]) -> None:
    """The catalog, the plain loop, and what the sweep goes by, agree on what is in force."""
    with open_catalog(path) as reader:
        states = {(row.author, row.base): row for row in reader.states()}
        authors = {(row.author, row.base): row for row in reader.authors()}
        pins = {(row.author, row.base) for row in reader.problems() if row.code == "pin_not_ready"}
    nobody = StateRow("", None, False, False, None, "", "", None, None)
    lost = set()
    for author, base in {(one["author"], one["base"]) for one in documents}:
        force, row = in_force(events[author], base), states.get((author, base), nobody)
        assert (row.held, row.retired, row.pinned_digest) == (force.held, force.retired, force.pinned), (
            author,
            base,
        )
        kept = AuthorRecord.model_validate_json(
            json.dumps({"schema": 1, "author": author, "events": events[author]})
        )
        standing = find_standing(kept, base)
        assert (standing.held is not None, standing.retired is not None) == (force.held, force.retired)
        assert (standing.pinned.adapter_digest if standing.pinned else None) == force.pinned
        shown = authors[author, base]
        assert (shown.held, shown.retired, shown.pinned_digest) == (force.held, force.retired, force.pinned)
        if force.pinned and not (force.held or force.retired or shown.is_ready):
            lost.add((author, base))
    assert lost <= pins and all(not in_force(events[str(author)], str(base)).held for author, base in pins)
