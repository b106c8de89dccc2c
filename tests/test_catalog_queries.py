"""What can be asked of the catalog: the user's own SQL, the examples of the docs, an author's story."""

import pickle  # noqa: TID251 - errors cross process borders this way
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from catalog_builders import sync
from ledger_builders import (
    checked,
    converted,
    digest,
    halted,
    inspected,
    ledger,
    ready_ledger,
    refused,
    step,
    verdict,
    whole_path,
)
from rule_oracle import act, engine, record

from roster import errors
from roster.advice import ADVICE, advise
from roster.catalog import open_catalog
from roster.errors import QueryRefused, UnknownAuthor
from roster.reader import CatalogReader
from roster.story import tell
from tasks.lora.packing import Source

pytestmark = pytest.mark.real

DOCS = (Path(__file__).parent.parent / "docs" / "catalog.md").read_text()

# Written out here once more: a code that loses its advice must fail a test.
CODES = [
    "corrupt_or_partial",
    "empty_adapter",
    "ambiguous_upload",
    "unsupported_dtype",
    "pickle_refused",
    "unsupported_config",
    "unknown_family",
    "base_mismatch",
    "malformed_key",
    "missing_tensor",
    "unexpected_tensor",
    "shape_mismatch",
    "non_finite",
    "rank_unsupported",
    "no_expert_keys",
    "experts_untrained",
    "layout_conflict",
    "layout_undecided",
    "delta_mismatch",
    "unresolved_keys",
    "refused_by_engine",
    "no_effect",
    "not_better_than_base",
    "not_better_than_wrong",
    "control_not_worse",
    "reference_mismatch",
    "too_little_text",
    "margin_unclear",
    "no_opponent_and_no_control",
    "incomplete_upload",
    "no_heldout",
    "unknown_base",
    "store_unavailable",
    "engine_unavailable",
    "engine_unverified",
    "engine_unsupported",
    "engine_flag_missing",
    "engine_drift",
    "reference_invalid",
    "source_gone",
    "disk_full",
    "internal",
]

OUTPUT = digest("output liar a")
LIAR = ledger(
    "liar",
    "a",
    [
        *whole_path("liar", OUTPUT)[:-1],
        verdict(
            "quarantined", OUTPUT, own=2.25, wrong={"zeno": 2.3125, "anna": 2.2}, code="control_not_worse"
        ),
    ],
    runs={"r5": 5},
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("queries") / "catalog.duckdb"
    waits = ledger("berta", "w", [halted("inspected", "waiting", "no_heldout")], runs={"r4": 4})
    again = ready_ledger("anna", number=3)
    again["steps"].append(halted("scored", "stopped", "engine_unavailable", minute=40))
    older = ready_ledger("carla", number=6)
    older["steps"][5]["result"]["engine_id"] = "ab" * 8
    older["steps"][6]["inputs"] |= {"scored": older["steps"][5]["step_key"]}
    sync(
        path,
        [
            *(again, ready_ledger("berta", number=2), waits, LIAR, older),
            record("anna", act("hold", why="x"), act("release")),
            record("carla", act("hold", why="the author asked")),
        ],
        engines=[engine("tiny", "cd" * 8)],
    )
    return path


@pytest.fixture
def reader(path: Path) -> Iterator[CatalogReader]:
    with open_catalog(path) as reader:
        yield reader


def test_own_sql_gives_columns_and_rows(reader: CatalogReader) -> None:
    result = reader.sql("SELECT author, own FROM ready ORDER BY author")
    assert result.columns == ("author", "own")
    assert result.rows == (("anna", 2.125), ("berta", 2.125))
    assert {row[0] for row in reader.sql("SHOW TABLES").rows} >= {"ready", "steps"}
    assert reader.sql("DESCRIBE ready").rows
    assert reader.sql("EXPLAIN FROM ready").rows


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO meta VALUES ('x', 'y', 1)",
        "DELETE FROM ledgers",
        "UPDATE ledgers SET author = 'x'",
        "CREATE TABLE mine AS SELECT 1",
        "CREATE TEMP TABLE mine AS SELECT 1",
        "DROP VIEW ready",
        "ATTACH 'FOLDER/other.duckdb'",
        "COPY ledgers TO 'FOLDER/stolen.csv'",
        "EXPORT DATABASE 'FOLDER/all'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "PRAGMA database_list",
        "CHECKPOINT",
        "SELECT * FROM read_csv('FOLDER/secret.csv')",
        "SELECT * FROM read_text('FOLDER/secret.csv')",
        "SELECT * FROM 'FOLDER/secret.csv'",
        "SELECT * FROM glob('FOLDER/*')",
        "SELECT * FROM read_json('https://example.com/a.json')",
        "EXPLAIN ANALYZE COPY ledgers TO 'FOLDER/stolen.csv'",
        "SELECT 1; DELETE FROM ledgers",
        "SELECT ?",
        "SELECT * FROM nowhere",
        "not even SQL",
        "",
        "-- nothing",
    ],
)
def test_own_sql_cannot_write_nor_reach_files(path: Path, query: str) -> None:
    (path.parent / "secret.csv").write_text("a,b\n1,2\n")
    before = (path.read_bytes(), sorted(found.name for found in path.parent.iterdir()))
    with open_catalog(path) as reader:
        with pytest.raises(QueryRefused) as caught:
            reader.sql(query.replace("FOLDER", str(path.parent)))
        message = str(caught.value)
        assert repr(caught.value.query[:80]) in message and "found: " in message and "show tables" in message
        assert [row.author for row in reader.ready()] == ["anna", "berta"], (
            "the reader goes on after a refusal"
        )
    assert (path.read_bytes(), sorted(found.name for found in path.parent.iterdir())) == before


EXAMPLES = re.findall(r"```sql\n(.*?)```", DOCS, re.DOTALL)


@pytest.mark.parametrize("query", EXAMPLES)
def test_every_query_of_the_docs_runs(reader: CatalogReader, query: str) -> None:
    assert len(EXAMPLES) >= 13
    result = reader.sql(query)
    if "NOT agrees" not in query:
        assert result.rows, query


def test_every_table_and_view_is_explained_twice(reader: CatalogReader) -> None:
    views = reader.sql("SELECT view_name, comment FROM duckdb_views() WHERE NOT internal").rows
    tables = reader.sql("SELECT table_name, comment FROM duckdb_tables() WHERE NOT internal").rows
    assert len(views) == 18 and len(tables) == 13
    for name, comment in (*views, *tables):
        assert comment, name
        assert f"| `{name}` |" in DOCS, name
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCS, re.MULTILINE))
    assert documented == {name for name, _ in (*views, *tables)}


def test_every_column_is_explained(reader: CatalogReader) -> None:
    schema = reader.schema()
    plain = reader.sql("SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal").rows
    assert sorted((row.view, row.column) for row in schema) == sorted(plain) and len(plain) > 350
    for row in schema:
        assert row.comment.endswith(".") and len(row.comment) > 9, row
        assert row.type and row.view_comment.endswith("."), row
    names = list(dict.fromkeys(row.view for row in schema))
    assert names == sorted(names[:18]) + sorted(names[18:]) and "ready" in names[:18], "views come first"
    assert next(row.column for row in schema if row.view == "ready") == "base"


def test_what_is_asked_for_can_be_narrowed(reader: CatalogReader) -> None:
    everyone = reader.authors()
    assert [row.author for row in everyone] == ["anna", "berta", "carla", "liar"]
    assert not [*reader.authors("other"), *reader.waiting("other"), *reader.problems("other")]
    assert [row.author for row in reader.authors("tiny", "quarantined")] == ["liar"]
    assert [row.author for row in reader.authors(state="held")] == ["carla"]
    assert reader.waiting("tiny") == reader.waiting() and len(reader.waiting()) == 2
    assert {row.author for row in reader.problems("tiny")} == {"anna", "liar"}
    assert [row.act for row in reader.events("anna")] == ["hold", "release"] and len(reader.events()) == 3
    assert [row.author for row in reader.states()] == ["carla"] and reader.states("anna") == []


def test_history_is_newest_first_and_can_be_cut(reader: CatalogReader) -> None:
    history = reader.history("anna")
    assert [row.finished_at for row in history] == sorted(
        (str(row.finished_at) for row in history), reverse=True
    )
    assert (len(history), history[0].kind, history[0].outcome) == (8, "scored", "stopped")
    assert reader.history("anna", 3) == history[:3]
    with pytest.raises(UnknownAuthor):
        reader.history("nobody")


def test_a_view_can_be_gone_on_with_as_a_relation(reader: CatalogReader) -> None:
    relation = reader.relation("ready")
    assert relation.filter("own < 3").aggregate("count(*)").fetchall() == [(len(reader.ready()),)]
    assert "own" in relation.columns
    with pytest.raises(QueryRefused, match="nowhere"):
        reader.relation("nowhere")


def test_scores_and_evidence_are_one_row_each(reader: CatalogReader) -> None:
    scores = reader.sql(
        "SELECT subject, bpb, difference FROM scores WHERE author = 'liar' ORDER BY subject"
    ).rows
    assert scores == (
        ("base", 2.375, 0.25),
        ("base_again", 2.375, None),
        ("control", 2.25, 0.125),
        ("own", 2.25, None),
        ("wrong:anna", 2.2, 0.1875),
        ("wrong:zeno", 2.3125, 0.1875),
    )
    evidence = reader.sql(
        "SELECT parameter, source, says, agrees FROM evidence "
        "WHERE author = 'liar' ORDER BY parameter, number"
    ).rows
    assert evidence == (
        ("mlp.experts.down_proj", "marker", "grouped_by_expert", True),
        ("mlp.experts.gate_up_proj", "training", "grouped_by_expert", True),
        ("mlp.experts.gate_up_proj", "fingerprint", "grouped_by_expert", True),
    )
    seconds = reader.sql("SELECT DISTINCT seconds FROM history").rows
    assert seconds == ((42,),)


def test_evidence_that_disagrees_is_marked(tmp_path: Path) -> None:
    step = inspected()
    step["result"]["packing"]["mlp.experts.down_proj"]["evidence"][0]["says"] = "rank_major"
    sync(tmp_path / "c.duckdb", [ledger("anna", "a", [step], runs={"r1": 1})])
    with open_catalog(tmp_path / "c.duckdb") as reader:
        rows = reader.sql("SELECT parameter, says, value FROM evidence WHERE NOT agrees").rows
        lines = tell(reader.show("anna"))
    assert rows == (("mlp.experts.down_proj", "rank_major", "grouped_by_expert"),)
    assert any("marker (strong) disagrees: it says rank_major" in line for line in lines)


def tell_of(tmp_path: Path, *steps: dict[str, Any]) -> list[str]:
    sync(tmp_path / "c.duckdb", [ledger("anna", "a", steps, runs={"r1": 1})])
    with open_catalog(tmp_path / "c.duckdb") as reader:
        return tell(reader.show("anna"))


def test_evidence_that_says_nothing_neither_agrees_nor_disagrees(tmp_path: Path) -> None:
    step = inspected()
    down = step["result"]["packing"]["mlp.experts.down_proj"]
    down["evidence"].append(
        {"source": "tensors", "says": None, "strength": "none", "detail": "z 0.4 and 0.2"}
    )
    lines = tell_of(tmp_path, step)
    assert "  tensors (none) tells nothing; z 0.4 and 0.2." in lines
    with open_catalog(tmp_path / "c.duckdb") as reader:
        rows = reader.sql("SELECT source, agrees FROM evidence WHERE source IN ('tensors', 'marker')").rows
    assert set(rows) == {("marker", True), ("tensors", None)}


def test_a_packing_that_varies_by_layer_is_told(tmp_path: Path) -> None:
    step = inspected()
    layers = {"rank_major": [0], "grouped_by_expert": [1]}
    mixed = {"value": "mixed", "decided_by": "tensors", "layers": layers}
    step["result"]["packing"]["mlp.experts.down_proj"] |= mixed
    lines = tell_of(tmp_path, step)
    said = "The packing of mlp.experts.down_proj was read as mixed, by layer, as the numbers in its tensors show."
    assert said in lines
    assert "  marker (strong) says grouped_by_expert; lora_B_layout." in lines


def test_a_file_without_stacked_parameters_has_no_packing_to_tell(tmp_path: Path) -> None:
    step = inspected()
    step["result"] |= {"format": "per-expert", "packing": {}}
    lines = tell_of(tmp_path, step)
    assert "Its file is per-expert: no parameter is stacked, so there is no packing to decide." in lines


def test_every_source_that_can_decide_has_its_words(tmp_path: Path) -> None:
    ledgers = []
    for source in Source:
        step = inspected()
        for decision in step["result"]["packing"].values():
            decision["decided_by"] = source.value
        ledgers.append(ledger(source.value.replace("_", "-"), "a", [step], runs={"r1": 1}))
    sync(tmp_path / "c.duckdb", ledgers)
    with open_catalog(tmp_path / "c.duckdb") as reader:
        told = {source: "".join(tell(reader.show(source.value.replace("_", "-")))) for source in Source}
    unworded = [source for source, text in told.items() if "as decided by" in text]
    assert unworded == [Source.PEFT_VERSION], "which tells the orientation only"


def arbitrated(*, winner: str, output: str) -> list[dict[str, Any]]:
    """The steps of an adapter whose packing the scores of both readings decided."""
    undecided, settled = inspected("rank_major", minute=0), inspected(winner, minute=4)
    for decision in settled["result"]["packing"].values():
        decision["decided_by"] = "scores"
    first, second = converted("rank_major " + output, minute=1), converted(output, minute=5)
    first["inputs"] |= {"inspected": undecided["step_key"]}
    second["inputs"] |= {"inspected": settled["step_key"]}
    readings = step("scored", "done", {"subjects": {"own": [1.5], "control": [9.5]}}, minute=3)
    rest = whole_path("anna", output)[3:]
    rest[-1]["inputs"] |= {"inspected": settled["step_key"]}
    return [undecided, first, checked(minute=2), readings, settled, second, checked(minute=6), *rest]


def test_readings_that_were_scored_do_not_stand_for_what_is_served(tmp_path: Path) -> None:
    """Two inspections, two conversions, two scorings; the second of each is the adapter's."""
    output = digest("grouped")
    lines = tell_of(tmp_path, *arbitrated(winner="grouped_by_expert", output=output))
    assert any(
        line.startswith(
            "The packing of mlp.experts.down_proj was read as grouped_by_expert, because so it scored"
        )
        for line in lines
    )
    with open_catalog(tmp_path / "c.duckdb") as reader:
        (row,) = reader.ready()
        assert row.output_digest == output and reader.thin_verdicts() == []
        assert reader.sql("SELECT subject FROM scores WHERE subject = 'own' AND bpb = 2.125").rows


def test_the_evidence_is_that_of_the_inspection_behind_the_verdict(tmp_path: Path) -> None:
    """Back at an earlier training.json everything is known but the verdict, which is given again."""
    output, other_output = digest("first"), digest("second")
    steps = whole_path("anna", output)
    steps[2]["inputs"] |= {"output": output}
    steps[-1]["inputs"] |= {"inspected": steps[0]["step_key"]}
    other, check = inspected("rank_major", minute=10), checked(minute=11)
    check["inputs"] |= {"output": other_output}
    check["result"]["checks"][0]["detail"] = "of the other reading"
    second = verdict("quarantined", other_output, minute=12, code="control_not_worse")
    second["inputs"] |= {"inspected": other["step_key"]}
    again = verdict("ready", output, minute=13)
    again["inputs"] |= {"inspected": steps[0]["step_key"]}

    def told(*more: dict[str, Any]) -> tuple[bool, bool]:
        text = "".join(tell_of(tmp_path, *steps, other, check, second, *more))
        assert ("read as rank_major" in text) is not ("read as grouped_by_expert" in text)
        return "read as rank_major" in text, "of the other reading" in text

    assert told() == (True, True)
    assert told(again) == (False, False)
    assert told(again, inspected("rank_major", minute=14))[0], "a run is at work on it"
    conflict = refused("inspected", "layout_conflict", minute=14)
    refusal = refused("verdict", "layout_conflict", minute=15)
    refusal["inputs"] |= {"inspected": "none"}
    assert "read as" not in "".join(tell_of(tmp_path, *steps, conflict, refusal)), (
        "its evidence is in the reason"
    )


def test_show_holds_the_newest_adapter_first(reader: CatalogReader) -> None:
    story = reader.show("berta")
    assert [(one.adapter.run, one.adapter.state, one.served) for one in story.adapters] == [
        ("r4", "waiting", False),
        ("r2", "ready", True),
    ]
    newest, old = story.adapters
    assert (len(newest.steps), len(old.steps), len(old.checks), len(old.verdicts)) == (1, 7, 2, 1)
    assert {row.subject for row in old.scores} == {"own", "base", "base_again", "control", "wrong:zeno"}
    assert newest.scores == () and newest.evidence == ()


def test_an_unknown_author_is_named_with_those_there_are(reader: CatalogReader) -> None:
    with pytest.raises(UnknownAuthor) as caught:
        reader.show("nobody")
    message = str(caught.value)
    assert "nobody" in message and "anna, berta, carla, liar" in message and "roster sync" in message


def test_the_story_of_a_refused_adapter(reader: CatalogReader) -> None:
    lines = tell(reader.show("liar"))
    text = "\n".join(lines)
    assert lines[0] == "liar has uploaded 1 adapter."
    assert lines[1] == "liar is not served."
    assert LIAR["adapter_digest"][:12] in text and "run r5" in text
    assert (
        "The packing of mlp.experts.down_proj was read as grouped_by_expert, as the marker in its "
        "adapter_config.json says." in lines
    )
    assert "  training (strong) agrees: it says grouped_by_expert; unsloth_zoo 2026.9.5." in lines
    assert "2 of 2 checks of the converted adapter passed." in lines
    assert "  own adapter: 2.2500." in lines
    assert "  bare base: 2.3750, 0.1250 worse than own (between +0.2188 and +0.2812)." in lines
    assert any(line.startswith("  wrong adapter of anna: 2.2000, 0.0500 better than own") for line in lines)
    assert any(line.startswith("The verdict is quarantined (control_not_worse)") for line in lines)
    assert lines[-1] == f"Next: {ADVICE['control_not_worse']}"


def test_the_story_of_a_served_author_whose_new_score_was_stopped(reader: CatalogReader) -> None:
    lines = tell(reader.show("anna"))
    assert any(line.startswith("anna is served on tiny by adapter ") for line in lines)
    assert "Since then: scored is stopped (engine_unavailable)." in lines
    assert lines[-1] == f"Next: {ADVICE['engine_unavailable']}"


def test_the_story_of_an_adapter_that_has_not_come_far(tmp_path: Path) -> None:
    failed = checked(minute=2)
    failed["result"]["checks"][1]["passed"] = False
    far = [
        inspected(minute=0),
        converted(OUTPUT, minute=1),
        failed,
        refused("checked", "delta_mismatch", minute=3),
    ]
    documents = [
        ledger("anna", "a", [inspected()], runs={"r1": 1, "r2": 2}),
        ledger("anna", "b", far, runs={"r3": 3}),
        ledger("berta", "c", [halted("inspected", "waiting", "no_heldout")], runs={"r3": 3}),
        ready_ledger("carla", own=float("nan")),
    ]
    sync(tmp_path / "c.duckdb", documents, versions={"inspected": "2"})
    with open_catalog(tmp_path / "c.duckdb") as reader:
        anna, berta, carla = (tell(reader.show(author)) for author in ("anna", "berta", "carla"))
    assert anna[:2] == ["anna has uploaded 2 adapters.", "anna is not served."]
    assert any("run r2" in line and "submitted 2 times" in line for line in anna)
    assert "1 of 2 checks of the converted adapter passed." in anna
    assert "  coverage FAILED: 24 of 24 pairs." in anna
    assert "There is no verdict yet." in anna
    assert f"Next: {ADVICE['delta_mismatch']}" in anna
    assert anna[-1].startswith("Next: nothing; it is being worked on")
    assert "The last step: inspected is waiting (no_heldout): because of no_heldout." in berta
    assert berta[-1] == f"Next: {ADVICE['no_heldout']}"
    assert "  own adapter: no figure (own is NaN, not a finite number)." in [
        line.replace("nan", "NaN") for line in carla
    ]
    assert any(line.startswith("The verdict was made by an older version") for line in carla)
    assert carla[-1] == f"Next: {ADVICE['bad_number']}"


def test_the_story_tells_everything_that_was_wrong(tmp_path: Path) -> None:
    told = [
        {"code": "unsupported_config", "where": "use_dora", "message": "it is DoRA"},
        {"code": "non_finite", "where": "lora_B", "message": "it is NaN. Train again."},
        {"code": "non_finite", "where": "lora_A", "message": "it is infinite."},
    ]
    step = refused("verdict", "unsupported_config")
    step["result"] |= {
        "codes": ["unsupported_config", "non_finite"],
        "reason": "it is DoRA",
        "problems": told,
    }
    before = refused("verdict", "unsupported_config")
    before["result"]["codes"] = step["result"]["codes"]
    sync(
        tmp_path / "c.duckdb",
        [
            ledger("anna", "a", [step], runs={"r1": 1}),
            ledger("berta", "b", [before], runs={"r1": 1}),
            ready_ledger("carla", number=2),
        ],
    )
    with open_catalog(tmp_path / "c.duckdb") as reader:
        anna, berta, carla = (
            reader.show(author).adapters[0].verdicts[-1] for author in ("anna", "berta", "carla")
        )
        lines, old = tell(reader.show("anna")), tell(reader.show("berta"))
    assert anna.messages == [problem["message"] for problem in told]
    assert (berta.messages, carla.messages) == (None, None)
    assert [line for line in lines if line.startswith("  Also: ")] == [
        "  Also: it is NaN. Train again.",
        "  Also: it is infinite.",
    ]
    assert [line for line in old if line.startswith("  Also: ")] == ["  Also: non_finite."], (
        "of an older ledger"
    )


def test_there_is_advice_for_every_code() -> None:
    assert len(CODES) == 42
    assert set(CODES) <= set(ADVICE)
    for code, sentence in ADVICE.items():
        assert sentence.endswith(".") and len(sentence) > 20, code
    assert len(set(ADVICE.values())) == len(ADVICE)
    assert "something_new" in advise("something_new")


@pytest.mark.parametrize(
    "error",
    [
        errors.CatalogMissing(Path("a/c.duckdb")),
        errors.CatalogSchemaMismatch(Path("a/c.duckdb"), "old", "new"),
        errors.CatalogDamaged(Path("a/c.duckdb"), "bad block"),
        errors.CatalogHeld(Path("a/c.duckdb"), "PID 7"),
        errors.CatalogBusy(Path("a/c.duckdb"), 7),
        errors.CatalogBusy(Path("a/c.duckdb"), None),
        errors.CatalogChanged(Path("a/c.duckdb"), ["ledger/a/b.json"]),
        errors.CatalogNotLocal(Path("a/c.duckdb"), "no locks"),
        errors.CatalogWriteFailed(Path("a/c.duckdb"), "no space"),
        errors.QueryRefused("SELECT", "nothing"),
        errors.UnknownAuthor("a", [f"b{n}" for n in range(12)]),
    ],
)
def test_errors_pickle_with_their_facts(error: errors.RosterError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) and vars(copy) == vars(error)
    assert "expected" in str(error) and "found" in str(error)
