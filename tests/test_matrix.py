"""The matrix through store and (scripted) engine: cells, how a stopped one goes on, what it costs and refuses."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cli_builders import Ran, Roster
from engine_builders import Reply, ScriptedEngine
from lora_builders import base_fields
from matrix_builders import SECONDS, TOKENS, Bench, digest, make_bench, own_is_best
from pipeline_builders import BASE, OnLoad, engine_of, qualify_on_paper
from scripted_scorer import BadValue
from store_builders import memory_store

from flows.matrix import matrix
from storage.bases import BaseDocument, BaseEngine, TargetFormat, register_base
from storage.documents import decode_document, put_document, read_document
from storage.errors import InvalidName
from storage.keys import (
    engine_key,
    manifest_key,
    matrix_cell_key,
    matrix_prefix,
    matrix_samples_key,
    newest_matrix_key,
    serving_prefix,
)
from storage.matrices import MatrixCell, MatrixDocument, MatrixSamples, read_cells, read_newest_matrix
from storage.s3 import S3Store
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineProtocolError, EngineRefused, EngineUnavailable
from tasks.errors import (
    EngineChanged,
    EngineNotQualified,
    EngineUnfit,
    MatrixDrift,
    NobodyServed,
    NoEngine,
    NotServed,
)
from tasks.matrix import fill_matrix
from tasks.matrix_generation import Generation, column_of_samples, describe_generation, generation_cost
from tasks.matrix_plan import Plan, plan_cells
from tasks.matrix_report import matrix_lines, render_matrix

pytestmark = pytest.mark.real

THREE = ("ash", "bay", "cob")


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as store:
        yield store


@pytest.fixture
def bench(store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return make_bench(store, tmp_path, monkeypatch)


@pytest.fixture
def three(bench: Bench) -> Bench:
    bench.serve(*THREE)
    bench.engine.bpb = own_is_best(*THREE)
    return bench


@dataclass
class Measured:
    """What is left of a matrix of three: read once, for all tests that only look."""

    plan: Plan
    document: MatrixDocument
    cells: Mapping[str, MatrixCell]
    newest: MatrixDocument | None
    bodies: dict[str, bytes]
    bench: Bench


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    with memory_store() as store, pytest.MonkeyPatch.context() as patch:
        bench = make_bench(store, tmp_path_factory.mktemp("measured"), patch)
        bench.serve(*THREE)
        bench.engine.bpb = own_is_best(*THREE)
        plan = bench.plan()
        document = bench.measure(plan)
        return Measured(
            plan,
            document,
            read_cells(store, [cell.key for cell in plan.cells]),
            read_newest_matrix(store, BASE),
            {key: store.get(key).body for key in bench.stored()},
            bench,
        )


def figures(document: MatrixDocument) -> object:
    """Everything a matrix says but when and how long."""
    return document.model_copy(update={"measured_at": None, "seconds": 0.0})


def test_every_adapter_and_the_base_are_scored_on_every_text(measured: Measured) -> None:
    plan, document, bench = measured.plan, measured.document, measured.bench
    assert (len(plan.cells), len(plan.pending), plan.sample, plan.whole) == (12, 12, None, True)
    expected = own_is_best(*THREE)
    for text in document.texts:
        [owner] = text.owners
        assert text.ref == f"{owner}/main" and text.units == 5
        assert text.bpb == pytest.approx({author: expected[author, owner] for author in THREE}, rel=0.06)
        assert text.base_bpb == pytest.approx(expected[None, owner], rel=0.06)
    assert (document.sets.right, document.sets.total, document.units.total, document.cells) == (3, 3, 15, 12)
    assert document.choices == 3 and document.misattributed == () and document.left_out == ()
    assert bench.loaded() == list(THREE), "each adapter is loaded once, for all texts"
    assert bench.engine.served_models() == (BASE,) and bench.leases == [BASE] * 6
    assert list((bench.limits.work_path / "runs").glob("*")) == []


def test_the_matrix_and_its_picture_are_stored_and_it_is_the_newest(measured: Measured) -> None:
    document = measured.document
    key = f"{matrix_prefix(BASE, document.space)}{document.matrix_id}"
    stored = decode_document(key, measured.bodies[f"{key}.json"], MatrixDocument)
    assert measured.newest == stored and figures(stored) == figures(document)
    assert measured.bodies[f"{key}.svg"].startswith(b"<svg") and len(measured.bodies) == 12 + 3
    assert matrix_samples_key(BASE, document.space, "ab" * 32).startswith(matrix_prefix(BASE, document.space))


def test_a_cell_holds_the_bits_of_each_unit(measured: Measured) -> None:
    assert len(measured.cells) == 12
    [planned] = [
        cell
        for cell in measured.plan.cells
        if cell.row and cell.row.author == "bay" and cell.column.ref == "ash/main"
    ]
    assert json.loads(measured.bodies[planned.key])["schema"] == 1
    found = measured.cells[planned.key]
    assert found.units == tuple(f"u{n}" for n in range(5)) and found.output_digest == digest("output bay")
    texts = [f"ash wrote {'abcdefgh'[n]} number {n * n}." for n in range(5)]
    assert found.unit_bytes == tuple(len(text) for text in texts)
    assert found.tokens == sum(found.unit_bytes) + 5 + (len(texts[0]) + 1), (
        "bytes, BOS, and the first one again"
    )
    engine = measured.bench.engine
    model = f"bay@{digest('output bay')[:16]}"
    engine._loaded[model] = own_is_best(*THREE)["bay", "ash"]
    by_hand = [sum(engine._bits(model, byte) for byte in text.encode()) for text in texts]
    del engine._loaded[model]
    assert found.bits == pytest.approx(by_hand)
    assert len({round(bits / size, 9) for bits, size in zip(by_hand, found.unit_bytes, strict=True)}) > 1


class Killed(Exception):
    pass


def stop_after(cells: int):  # type: ignore[no-untyped-def]
    left = itertools.count(1)

    def progress(done: int, total: int) -> None:
        if next(left) == cells:
            raise Killed

    return progress


@pytest.mark.real
@pytest.mark.parametrize("cells", [2, 11])
def test_a_killed_matrix_goes_on_at_the_next_cell(three: Bench, measured: Measured, cells: int) -> None:
    plan = three.plan()
    with pytest.raises(Killed):
        three.measure(plan, stop_after(cells))
    assert three.engine.served_models() == (BASE,)
    again = three.plan()
    assert len(again.pending) == 12 - cells and again.pending_tokens < plan.pending_tokens
    told: list[tuple[int, int]] = []
    three.engine.prompts.clear()
    resumed = three.measure(again, lambda done, total: told.append((done, total)))
    assert told[-1] == (again.pending_tokens, again.pending_tokens) and len(told) == 12 - cells
    sent = sum(len(prompt) for prompts in three.engine.prompts.values() for prompt in prompts)
    probe = 2 * min(column.tokens for column in plan.columns)
    assert sent == again.pending_tokens + probe, "nothing is scored twice, but for the probes"
    assert figures(resumed) == figures(measured.document)


@pytest.mark.real
def test_a_finished_matrix_asks_the_engine_for_nothing(three: Bench) -> None:
    first = three.measure()
    three.engine.calls.clear()
    three.leases.clear()
    assert figures(three.measure()) == figures(first)
    assert three.engine.calls == [] and three.leases == []


@pytest.mark.real
def test_one_more_author_costs_one_row_and_one_column(three: Bench) -> None:
    three.measure()
    three.serve(*THREE, "dyer")
    pending = three.plan().pending
    assert len(pending) == 4 + 1 + 3
    assert {(cell.row.author if cell.row else None, cell.column.ref) for cell in pending} == {
        *((author, "dyer/main") for author in (*THREE, None)),
        *(("dyer", f"{author}/main") for author in (*THREE, "dyer")),
    }


@pytest.mark.real
def test_a_text_of_other_words_is_measured_again(three: Bench) -> None:
    three.measure()
    three.heldout("bay", units=4)
    pending = three.plan().pending
    assert {cell.column.ref for cell in pending} == {"bay/main"} and len(pending) == 4


def test_a_sample_is_some_of_the_larger_one_and_always_has_own(bench: Bench) -> None:
    authors = ("ash", "bay", "cob", "dyer", "elm", "fir")
    bench.serve(*authors)
    bench.engine.bpb = own_is_best(*authors)

    plan = bench.plan(sample=2)

    def cells(sample: int | None) -> set[str]:
        return {cell.key for cell in plan_cells(replace(plan, sample=sample))}

    assert cells(1) < cells(2) < cells(4) < cells(5) == cells(None)
    assert cells(2) == {cell.key for cell in plan.cells}
    assert len(plan.cells) == 6 * (1 + 1 + 2)
    document = bench.measure(plan)
    assert all(len(text.bpb) == 3 and text.owners[0] in text.bpb for text in document.texts)
    assert document.choices == 3 and document.sets.right == 6 and document.sample == 2
    assert len(bench.plan().pending) == 7 * 6 - len(plan.cells), (
        "what the sample measured is not measured again"
    )


@pytest.mark.real
def test_a_sample_is_the_newest_only_where_no_whole_one_of_its_space_is(three: Bench) -> None:
    def newest() -> MatrixDocument | None:
        return read_newest_matrix(three.store, BASE)

    sampled = three.measure(three.plan(sample=1))
    assert newest() == sampled.model_copy(update={"measured_at": newest().measured_at})  # type: ignore[union-attr]
    whole = three.measure()
    three.measure(three.plan(sample=1))
    found = newest()
    assert found is not None and found.matrix_id == whole.matrix_id and found.sample is None
    three.store.put(newest_matrix_key(BASE), b"{}")
    three.measure(three.plan(sample=1))
    found = newest()
    assert found is not None and found.matrix_id == sampled.matrix_id


@pytest.mark.real
def test_only_some_authors_are_asked_for(three: Bench) -> None:
    document = three.measure(three.plan(authors=("bay", "cob")))
    assert [adapter.author for adapter in document.adapters] == ["bay", "cob"]
    assert [text.ref for text in document.texts] == ["bay/main", "cob/main"] and not document.whole
    assert read_newest_matrix(three.store, BASE) is None, "the newest is one of the whole roster"


def test_an_adapter_of_two_authors_is_nobodys_wrong_one_among_them(bench: Bench) -> None:
    ash, bay = bench.heldout("ash"), bench.heldout("bay")
    bench.serve("ash", "duo", "cob", duo=(ash, bay))
    bench.state_authors("duo", "ash", "bay")
    bench.engine.bpb = own_is_best("ash", "duo", "cob")
    plan = bench.plan()
    assert plan.kin == {frozenset(("ash", "duo"))}
    assert {column.ref: sorted(column.owners) for column in plan.columns} == {
        "ash/main": ["ash", "duo"],
        "bay/main": ["duo"],
        "cob/main": ["cob"],
    }
    bench.engine.bpb |= {("duo", "bay"): 2.05, ("ash", "bay"): 1.0, ("duo", "ash"): 2.02}
    document = bench.measure(plan)
    assert document.misattributed == (), "ash fits bay's text best, and is kin to its owner"
    pairs = {(pair.ref, pair.owner, pair.other) for pair in document.pairs}
    assert {one for one in pairs if one[0] == "bay/main"} == {("bay/main", "duo", "cob")}
    assert {one for one in pairs if one[0] == "ash/main"} == {
        ("ash/main", one, "cob") for one in ("ash", "duo")
    }


@pytest.mark.real
def test_pen_names_and_equal_bytes_are_kin(three: Bench) -> None:
    config = json.dumps(base_fields()).encode()
    document = BaseDocument(
        base=BASE,
        served_model=BASE,
        weights_digest=None,
        engine=BaseEngine(url="http://127.0.0.1:9"),
        target_format=TargetFormat.PER_EXPERT,
        exclusions=(("ash", "cob"),),
    )
    register_base(three.store, config, document)
    assert three.plan().kin == {frozenset(("ash", "cob"))}
    assert len(three.plan(sample=2).cells) == 3 + (2 + 3 + 2), "kin are not drawn"


@pytest.mark.real
def test_the_hardest_others_of_an_author_are_told(three: Bench) -> None:
    three.engine.bpb |= {("cob", "ash"): 2.04, ("bay", "ash"): 2.3}
    document = three.measure()
    assert document.pairs[0].owner == "ash" and document.pairs[0].other == "cob"
    newest = read_newest_matrix(three.store, BASE)
    assert newest is not None
    margins = newest.list_margins("ash")
    assert [(one.author, one.output_digest, one.ref) for one in margins] == [
        ("cob", digest("output cob"), "ash/main"),
        ("bay", digest("output bay"), "ash/main"),
    ]
    assert margins[0].margin == pytest.approx(0.04, abs=0.05) and margins[0].margin < margins[1].margin
    assert newest.list_margins("nobody") == ()


@pytest.mark.real
def test_a_text_that_another_fits_better_is_named(three: Bench) -> None:
    three.engine.bpb |= {("cob", "ash"): 1.5}
    document = three.measure()
    assert document.misattributed == ("ash/main",) and document.sets.right == 2 and document.units.right == 10
    [line] = [line for line in matrix_lines(document) if "another adapter fits best" in line]
    assert line.endswith("ash/main")
    assert document.pairs[0].taken == 5 and document.pairs[0].margin < 0


@pytest.mark.real
def test_a_void_unit_counts_for_nobody(three: Bench) -> None:
    model = f"bay@{digest('output bay')[:16]}"
    three.engine.bad = (BadValue(model, 4, math.nan, marker="ash wrote c"),)
    document = three.measure()
    assert {text.ref: text.units for text in document.texts} == {"ash/main": 4, "bay/main": 5, "cob/main": 5}
    assert document.units.total == 14


# What the engine does.


@pytest.mark.real
def test_drift_while_it_measures_removes_what_it_measured(three: Bench) -> None:
    three.engine.bpb = {**own_is_best(*THREE)}
    plan = three.plan()

    def moved(done: int, total: int) -> None:
        if done == total:
            three.engine.bpb |= {(None, author): 2.5 for author in THREE}

    with pytest.raises(MatrixDrift) as drift:
        three.measure(plan, moved)
    assert "expected the 2.398" in str(drift.value) and "found 2.497" in str(drift.value)
    assert "removed again" in str(drift.value) and three.stored() == []


@pytest.mark.real
def test_drift_since_the_last_run_asks_for_fresh_cells(three: Bench) -> None:
    with pytest.raises(Killed):
        three.measure(progress=stop_after(4))
    three.engine.bpb |= {(None, author): 2.5 for author in THREE}
    with pytest.raises(MatrixDrift, match="roster matrix --fresh"):
        three.measure()
    document = three.measure(three.plan(fresh=True))
    assert document.cells == 12 and document.texts[0].base_bpb == pytest.approx(2.5, rel=0.06)


@pytest.mark.real
def test_another_engine_ends_it_and_measures_in_its_own_space(three: Bench) -> None:
    other = engine_of().model_copy(update={"max_loras": 3})

    def restarted(done: int, total: int) -> None:
        if len([key for key in three.stored() if "/cells/" in key]) == 5:
            put_document(three.store, engine_key(BASE), other)

    with pytest.raises(EngineChanged):
        three.measure(progress=restarted)
    assert len(three.stored()) == 3, "the base's row was finished; of the adapter at hand nothing stays"
    with pytest.raises(EngineNotQualified):
        three.plan()
    qualify_on_paper(three.store, other)
    assert len(three.plan().pending) == 12


@pytest.mark.real
def test_an_engine_that_goes_away_leaves_what_was_measured(three: Bench) -> None:
    gone = EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", "HTTP 500")
    three.engine.on_logprobs = {f"bay@{digest('output bay')[:16]}": gone}
    with pytest.raises(EngineUnavailable):
        three.measure()
    assert len(three.stored()) == 6
    three.engine.on_logprobs = {}
    assert three.measure().cells == 12


@pytest.mark.real
def test_an_adapter_that_cannot_be_loaded_is_left_out(three: Bench) -> None:
    three.engine.on_load = OnLoad("bay@", lambda name: EngineRefused(name, "/served/bay", 400, "no"))
    document = three.measure()
    assert [adapter.author for adapter in document.adapters] == ["ash", "cob"]
    [left] = document.left_out
    assert left.what == "bay" and "expected the engine to load" in left.why
    assert document.sets.total == 2, "bay's own text has nobody's adapter"
    assert any("bay is left out" in line for line in three.said)


@pytest.mark.real
def test_what_is_gone_or_damaged_is_left_out_and_told(three: Bench) -> None:
    three.store.delete(serving_prefix("ash", digest("output ash")) + "adapter_model.safetensors")
    three.store.put(manifest_key(serving_prefix("bay", digest("output bay"))), b"{}")
    three.store.delete("heldout/cob/main.jsonl")
    plan = three.plan()
    assert dict(plan.left_out).keys() == {"bay", "cob/main"}
    assert {one.what for one in three.measure(plan).left_out} == {"bay", "cob/main", "ash"}


@pytest.mark.real
def test_what_a_killed_run_left_loaded_is_forgotten(three: Bench) -> None:
    three.engine.load("zed@0123456789abcdef", "/elsewhere", is_3d=False)
    three.measure()
    assert three.engine.served_models() == (BASE,)


# What the adapters write themselves.


def generate(bench: Bench, generation: Generation, **options: object) -> MatrixDocument:
    plan = bench.plan(**options)
    return fill_matrix(
        bench.store,
        plan,
        bench.limits,
        generation=generation,
        say=bench.said.append,
        progress=lambda *_: None,
    )


@pytest.mark.real
def test_what_adapters_write_is_attributed_among_all_of_them(three: Bench) -> None:
    """The scripted engine hears whose words come first in a prompt: those of the prompt's own author."""
    three.engine.bpb |= {("cob", "bay"): 1.5}
    document = generate(three, Generation(seeds=2, prompts=3, max_tokens=30, temperature=0.8))
    found = document.generated
    assert found is not None
    assert (found.seeds, found.prompts, found.max_tokens, found.temperature) == (2, 3, 30, 0.8)
    assert found.right.total == 3 * 3 * 2
    assert {author: (one.right, one.total) for author, one in found.per_author.items()} == {
        "ash": (6, 6),
        "bay": (0, 6),
        "cob": (6, 6),
    }
    assert found.right.interval is not None and found.right.interval[0] < 12 / 18 < found.right.interval[1]
    line = next(line for line in matrix_lines(document) if "wrote themselves" in line)
    assert "3 prompts each, 2 seeds, up to 30 tokens at temperature 0.8): 12 of 18 right" in line
    plain = three.measure()
    assert plain.matrix_id != document.matrix_id and plain.generated is None
    assert plain.texts == document.texts, "what was written is no part of the matrix"


@pytest.mark.real
def test_a_continuation_is_scored_after_its_prompt_and_by_its_own_tokens(three: Bench) -> None:
    plan = three.plan()
    generate(three, Generation(seeds=1, prompts=2, max_tokens=30))
    samples = [
        read_document(three.store, key, MatrixSamples)[0] for key in three.stored() if "/samples/" in key
    ]
    one = next(found for found in samples if found.output_digest == digest("output bay"))
    first = one.samples[0]
    assert three.engine.detokenize(first.prompt) == "<s>bay wrote a numb" and first.unit == "bay/main:u0"
    assert three.engine.detokenize(first.ids) == " bay wrote on 0 17." and first.bytes == 19
    column = column_of_samples(plan, next(row for row in plan.rows if row.author == "bay"), one)
    [window] = column.prepared.units[0].windows
    assert (window.first_scored, window.end) == (17, 17 + 19)
    cell = matrix_cell_key(BASE, plan.space, column.text, digest("output ash"))
    assert read_cells(three.store, [cell])[cell].units == ("bay/main:u0#0", "bay/main:u1#0")


def test_the_engine_is_asked_for_the_ids_it_draws() -> None:
    def reply(*ids: tuple[int, ...] | None) -> Reply:
        choices = [{"index": n, "text": "t", "token_ids": one} for n, one in enumerate(ids)]
        return Reply(body={"choices": choices[::-1]})

    script = {"POST /v1/completions": [reply((5, 6), (7,)), reply((5, 6), None), reply((1,)), Reply(404)]}
    asked = {"max_tokens": 3, "temperature": 0.5, "seed": 4}
    with ScriptedEngine(script) as server, Engine(server.url, timeout_s=5) as engine:
        assert engine.continue_prompts("ash@1", [(1, 2), (3,)], **asked) == [(5, 6), (7,)]
        sent = server.requests[0][1]
        assert sent == {"model": "ash@1", "prompt": [[1, 2], [3]], "return_token_ids": True, **asked}
        for expected in ("token_ids of each continuation", "one choice for each of 2 prompts"):
            with pytest.raises(EngineProtocolError, match=expected):
                engine.continue_prompts("ash@1", [(1, 2), (3,)], **asked)
        with pytest.raises(EngineUnavailable, match="does not know ash@1"):
            engine.continue_prompts("ash@1", [(1, 2)], **asked)


@pytest.mark.real
def test_what_was_written_is_not_written_again(three: Bench) -> None:
    generation = Generation(seeds=2, prompts=3, max_tokens=30)
    first = generate(three, generation)
    three.engine.calls.clear()
    again = generate(three, generation)
    assert again.generated == first.generated and three.engine.calls == []
    generate(three, Generation(seeds=3, prompts=3, max_tokens=30))
    assert [call for call, _ in three.engine.calls].count("continue") == 3 * 3


@pytest.mark.real
def test_an_adapter_without_a_short_prompt_writes_nothing(three: Bench) -> None:
    found = generate(three, Generation(seeds=1, prompts=3, max_tokens=510)).generated
    assert found is not None and (found.right.total, found.right.share, found.per_author) == (0, None, {})
    assert "ash: no prompt is short enough for 510 more tokens" in three.said
    three.engine.continue_prompts = lambda model, prompts, **_: [()] * len(prompts)  # type: ignore[method-assign]
    found = generate(three, Generation(seeds=1, prompts=3, max_tokens=30)).generated
    assert found is not None and found.right.total == 0, "nothing was written"


@pytest.mark.real
def test_the_cost_of_writing_is_told_at_most(three: Bench) -> None:
    plan, generation = three.plan(), Generation(seeds=2, prompts=3, max_tokens=30)
    samples, tokens = generation_cost(plan, generation)
    assert (samples, tokens) == (3 * 3 * 2, 3 * 3 * 2 * (17 + 30) * (1 + 1 + 3))
    assert (
        f"and 18 continuations of up to 30 tokens, scored by the adapters and the base: at most {tokens}"
        in (describe_generation(plan, generation))
    )
    assert generation_cost(three.plan(sample=1), generation) == (18, 18 * 47 * (1 + 1 + 2))


# What it costs, and what it refuses.


@pytest.mark.real
def test_the_cost_is_known_before_it_starts(three: Bench) -> None:
    plan = three.plan()
    texts = {
        ref: three.store.get(f"heldout/{ref}.jsonl").body.splitlines() for ref in ("ash/main", "bay/main")
    }
    lengths = [len(json.loads(line)["text"]) + 1 for line in texts["ash/main"]]
    by_hand = sum(lengths) + lengths[0]
    assert plan.columns[0].tokens == by_hand
    assert plan.pending_tokens == 4 * sum(column.tokens for column in plan.columns)
    assert plan.tokens_per_s == TOKENS / SECONDS
    assert plan.pending_seconds == pytest.approx(plan.pending_tokens / 1600)
    assert (
        f"12 to measure: {plan.pending_tokens} tokens, about 1 s at the 1600 tokens/s" in plan.describe_cost()
    )
    assert three.leases == [] and all(call != "logprobs" for call, _ in three.engine.calls)
    other = engine_of().model_copy(update={"max_loras": 3})
    put_document(three.store, engine_key(BASE), other)
    qualify_on_paper(three.store, other)
    assert three.plan().tokens_per_s is None and "is not known" in three.plan().describe_cost()


def test_it_refuses_what_it_cannot_do(bench: Bench) -> None:
    with pytest.raises(NobodyServed, match="base tiny: expected adapters that the roster serves, found none"):
        bench.plan()
    bench.serve("ash", "bay")
    with pytest.raises(
        NotServed, match="zed: expected an author whom the roster serves on base tiny, found only ash"
    ):
        bench.plan(authors=("ash", "zed"))
    put_document(bench.store, engine_key(BASE), engine_of().model_copy(update={"max_lora_rank": 1}))
    with pytest.raises(EngineUnfit, match="--max-lora-rank"):
        bench.plan()
    document = BaseDocument(
        base=BASE,
        served_model=BASE,
        weights_digest=None,
        engine=BaseEngine(),
        target_format=TargetFormat.PER_EXPERT,
    )
    register_base(bench.store, json.dumps(base_fields()).encode(), document)
    with pytest.raises(NoEngine):
        bench.plan()
    with pytest.raises(InvalidName):
        matrix_prefix(BASE, "short")


def test_the_page_has_the_figures_and_the_picture(measured: Measured) -> None:
    page = render_matrix(measured.document)
    assert "held-out sets attributed to their author: 3 of 3 right, 100.0% [43.9%, 100.0%]" in page
    assert "![heatmap](data:image/svg+xml;base64," in page
    assert "| (base) | 2." in page and "| ash/main | ash | bay | +0." in page


# Flow and command.


@pytest.fixture
def settings(three: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("ROSTER_HOME", str(three.folder / "home"))
    monkeypatch.setattr("flows.connect.open_store", lambda settings: three.store)
    monkeypatch.setattr("flows.matrix.open_store", lambda settings: three.store)
    return three


@pytest.mark.real
def test_the_flow_puts_the_page_on_its_run(settings: Bench, prefect_server: None) -> None:
    from prefect.client.orchestration import get_client

    state = matrix(BASE, return_state=True)
    assert state.name == "Measured" and "held-out sets: 3 of 3 right" in str(state.message)
    with get_client(sync_client=True) as client:
        [artifact] = [one for one in client.read_artifacts() if one.key == "matrix-tiny"]
    assert artifact.type == "markdown" and "data:image/svg+xml;base64," in str(artifact.data)
    refused = matrix(BASE, authors=["zed"], return_state=True)
    assert refused.name == "Refused" and "zed: expected an author" in str(refused.message)
    put_document(settings.store, engine_key(BASE), engine_of().model_copy(update={"prefix_caching": True}))
    failed = matrix(BASE, return_state=True)
    assert failed.name == "Stopped: engine_flag_missing" and "--no-enable-prefix-caching" in str(
        failed.message
    )


def run_roster(capture: pytest.CaptureFixture[str], bench: Bench, line: str) -> Ran:
    return Roster(capture, bench.folder / "home").line(f"roster matrix {line}")


def test_the_command_says_the_cost_measures_and_writes_the_picture(
    settings: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = run_roster(capsys, settings, "--base tiny --dry-run --json")
    assert (dry.code, dry.document["pending"], dry.document["tokens_per_s"]) == (0, 12, 1600.0)
    assert settings.stored() == []
    picture = settings.folder / "matrix.svg"
    ran = run_roster(capsys, settings, f"--base tiny --sample 1 --heatmap {picture} --json")
    assert ran.code == 0 and ran.document["sets"]["right"] == 3 and ran.document["cells"] == 9
    assert "9 to measure" in ran.err and picture.read_text().startswith("<svg")
    dry = run_roster(capsys, settings, "--base tiny --generate 2 --dry-run --json")
    assert dry.document["generated"]["samples"] == 3 * 5 * 2


def test_every_example_of_the_page_runs(
    settings: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(settings.folder)
    page = (Path(__file__).parent.parent / "docs" / "matrix.md").read_text("utf-8")
    [block] = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for line in block.splitlines():
        ran = run_roster(capsys, settings, line.removeprefix("roster matrix "))
        assert ran.code == 0, (line, ran.err)
    assert len(block.splitlines()) == 5 and (settings.folder / "matrix.svg").is_file()
    assert "held-out sets attributed to their author: 3 of 3 right" in ran.out
    assert "what the adapters wrote themselves (10 prompts each, 2 seeds" in ran.out
    assert "30 of 30 right" in ran.out


def test_the_command_ends_as_others_do(settings: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_roster(capsys, settings, "--base tiny --authors zed")
    assert ran.code == 2 and "zed: expected an author" in ran.err
    ran = run_roster(capsys, settings, "--base other")
    assert ran.code == 2 and "other" in ran.err
    settings.engine.bpb |= {(None, author): 2.4 for author in THREE}
    with pytest.raises(Killed):
        settings.measure(progress=stop_after(3))
    settings.engine.bpb |= {(None, author): 2.6 for author in THREE}
    ran = run_roster(capsys, settings, "--base tiny")
    assert ran.code == 3 and "the engine drifts" in ran.err
