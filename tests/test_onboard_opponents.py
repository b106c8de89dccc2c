"""Which wrong adapters the flow lets an adapter meet, and what it writes down of them; a scripted engine.

Three authors are served; each test sends an author of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pipeline_builders import BASE, CONTROL_BPB, OWN_BPB, Desk, OnLoad, make_desk, publish_engine
from store_builders import memory_store

from roster.serving import Roster
from roster.serving_engine import EngineInfo
from storage.documents import put_document, read_document
from storage.keys import base_document_key, engine_key, newest_matrix_key, roster_key
from storage.ledger import Step, StepKind
from storage.matrices import MatrixAdapter, MatrixDocument, MatrixShare, MatrixText, write_matrix
from tasks.bpb.engine_errors import EngineRefused
from tasks.opponents import candidate_name, recorded_opponents

pytestmark = pytest.mark.real  # whole runs, several scorings each: more time than the fast tests have

SERVED = ("alder", "birch", "cedar")


@pytest.fixture(scope="module")
def grove(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with memory_store() as store, pytest.MonkeyPatch.context() as patch:
        desk = make_desk(store, tmp_path_factory.mktemp("grove"), patch, prefect=False)
        for author in SERVED:
            assert desk.ready(author).name == "Ready"
        assert desk.sync().published
        yield desk


@pytest.fixture
def desk(grove: Desk) -> Iterator[Desk]:
    """The same for each test: base, roster and engine, no matrix."""
    kept = {
        key: grove.store.get(key).body for key in (base_document_key(BASE), roster_key(), engine_key(BASE))
    }
    adapters, most = grove.engine.adapters, grove.settings.max_opponents
    yield grove
    grove.engine.adapters, grove.settings.max_opponents = adapters, most
    grove.engine.on_load = {}
    for key, body in kept.items():
        grove.store.put(key, body)
    grove.store.delete(newest_matrix_key(BASE))


def send(
    desk: Desk, author: str, *, run: str = "run-1", seed: int | None = None, **training: Any
) -> str | None:
    folder = desk.adapter(author, seed=seed)
    if training:
        (folder / "training.json").write_text(json.dumps(training))
    desk.heldout(author)
    desk.submit(author, folder, run=run)
    return desk.run(author, run).name


def choices(desk: Desk, author: str) -> list[Step]:
    return [step for step in desk.ledger(author).steps if step.kind is StepKind.OPPONENTS]


def chosen(desk: Desk, author: str) -> dict[str, Any]:
    record: Any = choices(desk, author)[-1].result["opponents"]
    return {one["author"]: one for one in record}


def met(desk: Desk, author: str) -> set[str]:
    """The wrong adapters of its verdict: those that were scored."""
    verdict: Any = desk.ledger(author).verdict
    return set(verdict.result["wrong"])


def score_as(desk: Desk, own: str, others: Mapping[str, float], *, bpb: float = OWN_BPB) -> None:
    def bits(name: str, path: str) -> float:
        author = name.partition("@")[0]
        return CONTROL_BPB if author.endswith("~control") else bpb if author == own else others[author]

    desk.engine.adapters = bits


def put_matrix(desk: Desk, own: str, bpb: Mapping[str, float | None]) -> MatrixDocument:
    """A matrix of the whole roster, in which `own` took 2.0 bits per byte on its own text."""
    share = MatrixShare(right=1, total=1, share=1.0, interval=(0.2, 1.0))
    text = MatrixText(
        ref=f"{own}/main",
        text="1f" * 32,
        owners=(own,),
        units=24,
        bytes=9000,
        base_bpb=2.4,
        bpb={own: 2.0, **bpb},
        right=share,
    )
    matrix = MatrixDocument(
        base=BASE,
        space="0123456789abcdef",
        matrix_id="fedcba9876543210",
        engine_id="0011223344556677",
        sample=None,
        whole=True,
        adapters=tuple(
            MatrixAdapter(author=author, output_digest=f"{n:064x}") for n, author in enumerate((own, *bpb))
        ),
        texts=(text,),
        sets=share,
        units=share,
        misattributed=(),
        choices=4.0,
        pairs=(),
        generated=None,
        left_out=(),
        cells=5,
        tokens=1000,
        seconds=2.5,
        measured_at="2026-11-20T12:30:00Z",
        tool_version="0",
    )
    write_matrix(desk.store, matrix, "<svg/>")
    return matrix


def serve_only(desk: Desk, *authors: str) -> None:
    roster, _ = read_document(desk.store, roster_key(), Roster)
    served = roster.bases[BASE]
    kept = {name: entry for name, entry in served.authors.items() if name in authors}
    assert len(kept) == len(authors)
    one_base = {BASE: served.model_copy(update={"authors": kept})}
    put_document(desk.store, roster_key(), roster.model_copy(update={"bases": one_base}))


def test_the_hardest_of_the_newest_matrix_is_met_and_one_at_random(desk: Desk) -> None:
    desk.settings.max_opponents = 2
    for author, hardest in (("dogwood", "birch"), ("elder", "cedar")):
        put_matrix(
            desk,
            author,
            {"alder": 2.9, "birch": 2.25, "cedar": 2.8} | {hardest: 2.125, "gone": 2.0, "void": None},
        )
        assert send(desk, author) == "Ready"
        found = chosen(desk, author)
        assert set(found) == met(desk, author) and len(found) == 2 and hardest in found
        assert found.pop(hardest) | {"adapter_digest": "", "output_digest": ""} == {
            "author": hardest,
            "adapter_digest": "",
            "output_digest": "",
            "why": "hardest",
            "known": {
                "author": hardest,
                "margin": 0.125,
                "source": "matrix",
                "measured_at": "2026-11-20T12:30:00Z",
            },
        }
        (other,) = found.values()
        assert (other["why"], other["known"]) == ("random", None)
        (step,) = choices(desk, author)
        assert (step.result["available"], step.result["known"]) == (3, 4)
        assert [one.author for one in recorded_opponents(step)] == [hardest, other["author"]]


def test_without_a_matrix_the_authors_earlier_scores_tell_the_hardest(desk: Desk) -> None:
    """Of an earlier adapter of his, and of this one; what was scored last counts."""
    score_as(desk, "fir", {"alder": 2.9, "birch": 2.4, "cedar": 2.7})
    assert send(desk, "fir", seed=1) == "Ready" and met(desk, "fir") == {*SERVED}
    assert {one["why"] for one in chosen(desk, "fir").values()} == {"random"}, "nothing was known"
    first = desk.ledger("fir").verdict

    desk.settings.max_opponents = 2
    assert send(desk, "fir", run="run-2", seed=2) == "Ready"
    found = chosen(desk, "fir")["birch"]
    assert found["why"] == "hardest" and found["known"]["source"] == "scores"
    record: Any = first.result if first else {}
    assert found["known"]["margin"] == pytest.approx(record["wrong"]["birch"] - record["own"], abs=1e-12)
    assert found["known"]["margin"] == pytest.approx(0.3, abs=0.02)
    assert choices(desk, "fir")[-1].result["known"] == 3

    (other,) = chosen(desk, "fir").keys() - {"birch"}
    score_as(desk, "fir", {"alder": 2.3, "birch": 2.9, "cedar": 2.3})
    desk.run("fir", "run-2", rescore=True)
    score_as(desk, "fir", {"alder": 2.5, "birch": 2.5, "cedar": 2.5})
    desk.run("fir", "run-2", rescore=True)
    assert [one for one, told in chosen(desk, "fir").items() if told["why"] == "hardest"] == [other], (
        "birch was hard once, and is not any more"
    )


def test_scores_on_other_weights_tell_nothing(desk: Desk) -> None:
    assert send(desk, "holly") == "Ready" and choices(desk, "holly")[0].result["known"] == 0
    desk.run("holly", rescore=True)
    assert choices(desk, "holly")[-1].result["known"] == 3
    base = json.loads(desk.store.get(base_document_key(BASE)).body)
    desk.store.put(base_document_key(BASE), json.dumps(base | {"weights_digest": "5a" * 32}).encode())
    assert desk.run("holly").name == "Ready" and choices(desk, "holly")[-1].result["known"] == 0


def test_scores_of_an_adapter_that_learnt_nothing_tell_nothing(desk: Desk) -> None:
    """Its margins are below all others, and would have mild opponents taken for the hardest."""
    score_as(desk, "linden", {"alder": 2.42, "birch": 2.5, "cedar": 2.6}, bpb=2.45)
    assert str(send(desk, "linden")).startswith("Quarantined") and met(desk, "linden") == {*SERVED}
    desk.run("linden", rescore=True)
    assert choices(desk, "linden")[-1].result["known"] == 0


def test_a_choice_stands_whatever_becomes_known_later(desk: Desk) -> None:
    desk.settings.max_opponents = 2
    put_matrix(desk, "gorse", {"alder": 2.1, "birch": 2.5})
    desk.engine.on_load = OnLoad("gorse@", lambda name: TimeoutError("no answer"))
    folder = desk.adapter("gorse")
    desk.heldout("gorse")
    desk.submit("gorse", folder)
    with pytest.raises(TimeoutError):
        desk.run("gorse")
    desk.engine.on_load = {}
    put_matrix(desk, "gorse", {"alder": 2.5, "birch": 2.1})
    assert desk.run("gorse").name == "Ready"
    assert len(choices(desk, "gorse")) == 1 and "alder" in met(desk, "gorse")
    desk.run("gorse", rescore=True)
    assert chosen(desk, "gorse")["birch"]["why"] == "hardest", "a second scoring looks again"


def test_a_matrix_that_cannot_be_read_stops_nobody(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.store.put(newest_matrix_key(BASE), b'{"schema": 1, "texts": 3}')
    assert send(desk, "hazel") == "Ready" and met(desk, "hazel") == {*SERVED}
    assert "newest.json" in caplog.text and "tells nothing of opponents" in caplog.text


def test_no_author_of_an_adapter_is_its_opponent_nor_it_theirs(desk: Desk) -> None:
    """training.json's `authors`: on the text of one of them, his own adapter may well be the better one."""
    assert send(desk, "ivy", authors=["ivy", "birch"]) == "Ready"
    assert met(desk, "ivy") == {"alder", "cedar"}
    assert choices(desk, "ivy")[0].inputs["authors"] == "birch ivy"
    assert "ivy" not in {row.author for row in desk.sync().thin}, "it would be scored again for ever"
    serve_only(desk, *SERVED, "ivy")
    assert send(desk, "juniper") == "Ready" and met(desk, "juniper") == {*SERVED, "ivy"}
    assert desk.run("birch", rescore=True).name == "Ready"
    assert met(desk, "birch") == {"alder", "cedar"}, "ivy's serves birch too"

    (desk.folder / "trained" / "ivy" / "training.json").write_text('{"authors": ["ivy", "cedar"]}')
    desk.submit("ivy", desk.folder / "trained" / "ivy", run="run-2")
    assert desk.run("ivy", "run-2").name == "Ready"
    assert met(desk, "ivy") >= {"alder", "birch"} and "cedar" not in met(desk, "ivy"), "chosen anew"


def test_the_same_weights_under_another_config_are_no_opponent(desk: Desk) -> None:
    """Who uploads another's adapter with a word changed in its config must not have the other quarantined."""
    score_as(desk, "copycat", {"alder": 2.101, "birch": 2.5, "cedar": 2.5})
    alder = json.loads((desk.folder / "trained" / "alder" / "adapter_config.json").read_text())
    folder = desk.adapter("alder", **alder | {"base_model_name_or_path": "renamed"})
    desk.heldout("copycat")
    upload = desk.submit("copycat", folder)
    assert upload.adapter_digest != desk.submitted["alder"].adapter_digest
    assert desk.run("copycat").name == "Ready" and "alder" not in met(desk, "copycat")


def test_an_opponent_that_the_engine_refuses_is_passed_over_until_there_is_another_engine(desk: Desk) -> None:
    """It was found good once; that this engine does not take it must not stop all who would meet it, for ever."""

    def refuse(name: str) -> EngineRefused:
        return EngineRefused(name, "/x", 500, "Call to add_lora method failed: ")

    desk.engine.on_load = OnLoad("cedar@", refuse)
    assert send(desk, "larch") == "Stopped: internal"
    stop = desk.ledger("larch").steps[-1]
    cedar = chosen(desk, "larch")["cedar"]
    assert (
        stop.result["where"] == candidate_name("cedar", cedar["output_digest"]) in str(stop.result["reason"])
    )
    assert desk.run("larch").name == "Ready" and "cedar" not in met(desk, "larch")
    assert met(desk, "larch") >= {"alder", "birch"}
    assert len(choices(desk, "larch")) == 2

    desk.engine.on_load = {}
    info, _ = read_document(desk.store, engine_key(BASE), EngineInfo)
    publish_engine(desk.store, info.model_copy(update={"dtype": "bfloat16"}))
    assert desk.run("larch", rescore=True).name == "Ready" and "cedar" in met(desk, "larch")
