"""Faults of the engine, injected: none makes an adapter ready, none has a good one quarantined.

Once through a scripted server behind vLLM's routes, whose client is the real one, and once through a scripted scorer.
The adapter is a good one throughout, and without a fault it is ready.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from faulty_server import (
    COMPLETIONS,
    DEAD,
    LOAD,
    OUT_OF_MEMORY,
    Change,
    Fault,
    FaultyServer,
    cut_short,
    drops,
    forgets_a_choice,
    hangs,
    moved,
    positions,
    says,
    value_at_7,
)
from moto.s3.models import s3_backends
from pipeline_builders import BASE, BASE_BPB, Desk, make_desk, score_by_name
from scripted_scorer import BadValue, ScriptedScorer
from store_builders import memory_store

import flows.onboard
import tasks.scoring
from storage.documents import utc_now
from storage.keys import engine_key
from storage.ledger import Outcome, Step, StepKind
from tasks import poison
from tasks.bpb import engine as engine_module
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.opponents import candidate_name
from tasks.poison import DEATH
from tasks.sweeping import list_due

pytestmark = pytest.mark.real  # no server is real here, but the runs take half a minute
GOOD, OTHER = "birch", "alder"
UNIT = "number 5."  # in one held-out text of 24
NAN = "Out of range float values are not JSON compliant: nan"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Desk, FaultyServer]]:
    """A desk whose engine is the faulty server, with an adapter that is ready, and one more that is its opponent."""
    with (
        memory_store() as store,
        FaultyServer() as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        desk = make_desk(store, tmp_path_factory.mktemp("faults"), patch, prefect=False)
        patch.setattr(tasks.scoring, "leased_engine", server.leased)
        patch.setattr(engine_module, "_HEALTH_PAUSE_S", 0.01)
        shorter = desk.settings.model_copy(update={"min_bytes": 1_000})
        patch.setattr(flows.onboard, "load_settings", lambda: shorter)
        submit(desk, OTHER)
        assert desk.run(OTHER).name == "Ready"
        desk.sync()
        submit(desk, GOOD)
        assert desk.run(GOOD).name == "Ready"
        yield desk, server


def own_fault(change: Change, route: str = COMPLETIONS, **more: Any) -> Fault:
    return Fault(route, f"{GOOD}@", change, **more)


def base_fault(change: Change, **more: Any) -> Fault:
    return Fault(COMPLETIONS, BASE, change, **more)


OURS = "Stopped: engine_unavailable"
DRIFT = "Stopped: engine_drift"
UNCLEAR = "Inconclusive: too_little_text"
REFUSES = "Call to add_lora method failed: "
FAULTS: dict[str, tuple[Fault, str]] = {
    "out of memory while it scores": (own_fault(says(500, OUT_OF_MEMORY)), OURS),
    # vLLM answers a load with its exception's text, and lives on: as it does where an adapter cannot be read.
    "out of memory while it loads": (own_fault(says(500, REFUSES + OUT_OF_MEMORY), LOAD), OURS),
    "the connection drops": (own_fault(drops), OURS),
    "it hangs": (own_fault(hangs), OURS),
    "it forgot the adapter": (own_fault(says(404, f"The model `{GOOD}` does not exist.")), OURS),
    "it dies while it loads": (own_fault(says(500, REFUSES), LOAD, kills=True), OURS),
    "None in the middle": (
        own_fault(positions(lambda entries: [*entries[:7], None, *entries[8:]], UNIT)),
        OURS,
    ),
    "a short list": (own_fault(positions(lambda entries: entries[:-1], UNIT)), OURS),
    "other tokens": (
        own_fault(positions(lambda entries: [*entries[:7], {"9": {"logprob": -1.0}}, *entries[8:]])),
        OURS,
    ),
    "a prompt without an answer": (own_fault(forgets_a_choice), OURS),
    "an answer of another form": (own_fault(cut_short), OURS),
    "nothing but nan": (own_fault(says(400, NAN)), UNCLEAR),
    "nan for one text": (own_fault(says(400, NAN), marker=UNIT), UNCLEAR),
    # The request is refused, then of its prompts one by one this one; it passes when it is asked again.
    "nan for one text, once": (own_fault(says(400, NAN), marker=UNIT, times=2), DRIFT),
    "-9999 in one text": (own_fault(positions(value_at_7(-9999.0), UNIT)), UNCLEAR),
    "-9999 in one text, once": (own_fault(positions(value_at_7(-9999.0), UNIT), times=1), DRIFT),
    "the base has nothing but nan": (base_fault(says(400, NAN)), OURS),
    "the base has nan the second time": (base_fault(says(400, NAN), after=1, marker=UNIT), DRIFT),
    "the base drifts": (base_fault(positions(moved(0.01)), after=2), DRIFT),
    "the first answer of an adapter is off": (own_fault(positions(moved(0.1)), times=1), DRIFT),
}


@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_of_the_server_is_taken_for_the_adapters(
    played: tuple[Desk, FaultyServer], name: str
) -> None:
    desk, server = played
    fault, expected = FAULTS[name]
    before = desk.ledger(GOOD)
    with injected(server, fault):
        state = desk.run(GOOD, rescore=True)
    assert (state.name, fault.met > 0) == (expected, True)
    now = desk.ledger(GOOD)
    if expected != UNCLEAR:
        assert now.verdict == before.verdict
        assert (now.steps[-1].kind, now.steps[-1].outcome) == (StepKind.SCORED, Outcome.STOPPED)


@contextmanager
def injected(server: FaultyServer, *faults: Fault) -> Iterator[None]:
    """Faults for as long as the block runs; then another process."""
    server.faults = list(faults)
    yield
    server.faults = []
    server.restart()


def test_a_load_that_fails_on_an_engine_whose_base_is_dead_too_is_no_refusal(
    played: tuple[Desk, FaultyServer],
) -> None:
    """And once that is over the adapter is ready, with nothing of it left on the engine."""
    desk, server = played
    with injected(server, own_fault(says(500, REFUSES), LOAD), base_fault(says(500, DEAD), after=2)):
        assert desk.run(GOOD, rescore=True).name == OURS
    assert desk.run(GOOD, rescore=True).name == "Ready"
    assert server.loaded == {}


def test_an_engine_that_is_well_may_refuse(played: tuple[Desk, FaultyServer]) -> None:
    """The other side: the same message from one whose base answers is about the adapter."""
    desk, server = played
    with injected(server, own_fault(says(500, REFUSES), LOAD)):
        assert desk.run(GOOD, rescore=True).name == "Quarantined: refused_by_engine"


def test_a_text_that_another_adapter_cannot_score_is_left_out(played: tuple[Desk, FaultyServer]) -> None:
    """Rule 7: what no request changes is a fact about that adapter and this text; here the control's, one of 24."""
    desk, server = played
    with injected(server, Fault(COMPLETIONS, f"{GOOD}~control@", positions(value_at_7(-9999.0), UNIT))):
        assert desk.run(GOOD, rescore=True).name == "Ready"
    verdict: Any = desk.ledger(GOOD).verdict
    assert verdict.result["units"] == 23 and any("left out" in note for note in verdict.result["notes"])


# --- the same through a scripted scorer ---


class Forgetful(ScriptedScorer):
    """Its first call for an adapter is answered otherwise than the others."""

    def logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float | None, ...]]:
        first = model not in self.prompts
        answers = super().logprobs(model, prompts)
        if model == self.base or not first:
            return answers
        return [(None, *(value and value + 0.1 for value in values[1:])) for values in answers]


def gone(reason: str) -> EngineUnavailable:
    return EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", reason)


def script(**faults: Any) -> Callable[[str], ScriptedScorer]:
    """A scorer for an adapter of this name; with `at_7`, every text (or that one) has this value there."""
    kind = faults.pop("kind", ScriptedScorer)

    def make(own: str) -> ScriptedScorer:
        more = dict(faults)
        if "at_7" in more:
            more["bad"] = [BadValue(own, 7, more.pop("at_7"), more.pop("marker", ""))]
        if "raises" in more:
            more["on_logprobs"] = {own: more.pop("raises")}
        if more.pop("short", False):
            more["short"] = [own]
        by_name = score_by_name(lambda: GOOD)
        made: ScriptedScorer = kind(
            {BASE: BASE_BPB}, adapters=by_name, max_len=512, bos=True, flavour=0.01, **more
        )
        return made

    return make


SCRIPTS: dict[str, tuple[Callable[[str], ScriptedScorer], str]] = {
    "none": (script(), "Ready"),
    "out of memory": (script(raises=gone(f"HTTP 500: {OUT_OF_MEMORY}")), OURS),
    "a dead connection": (script(raises=gone("ReadError")), OURS),
    "None in the middle": (script(at_7=None), UNCLEAR),
    "nan in the middle": (script(at_7=math.nan), UNCLEAR),
    "-9999": (script(at_7=-9999.0), UNCLEAR),
    "None in one text": (script(at_7=None, marker=UNIT), UNCLEAR),
    "nan in one text": (script(at_7=math.nan, marker=UNIT), UNCLEAR),
    "a short list": (script(short=True), OURS),
    "base drift": (script(drift=0.02), DRIFT),
    "order dependence": (script(kind=Forgetful), DRIFT),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_fault_of_a_scripted_scorer_is_taken_for_the_adapters(
    played: tuple[Desk, FaultyServer], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    desk, _ = played
    make, expected = SCRIPTS[name]
    (manifest,) = (key for key in desk.keys(f"serving/{GOOD}/") if key.endswith("manifest.json"))
    scorer = make(candidate_name(GOOD, manifest.split("/")[2]))

    @contextmanager
    def leased(job: object, offer: object) -> Iterator[ScriptedScorer]:
        yield scorer

    monkeypatch.setattr(tasks.scoring, "leased_engine", leased)
    assert desk.run(GOOD, rescore=True).name == expected


# --- adapters that kill engines ---


def start_again(desk: Desk, server: FaultyServer) -> None:
    """What the supervisor does: a new process, which publishes itself, later than the last."""
    server.restart()
    buckets: Any = next(iter(s3_backends.values()))["global"].buckets
    buckets[desk.store.bucket].keys[engine_key(BASE)].last_modified += timedelta(minutes=1)


def killer(server: FaultyServer, *names: str, message: str = DEAD, route: str = COMPLETIONS) -> None:
    server.faults = [Fault(route, f"{name}@", says(500, message), kills=True) for name in names]


def scored_steps(desk: Desk, author: str) -> list[Step]:
    return [step for step in desk.ledger(author).steps if step.kind is StepKind.SCORED]


def submit(desk: Desk, author: str) -> None:
    desk.heldout(author, length=40)
    desk.submit(author, desk.adapter(author))


@pytest.mark.parametrize(
    ("author", "route", "lingers"), [("cedar", COMPLETIONS, False), ("dogwood", LOAD, True)]
)
def test_an_adapter_that_kills_two_engines_which_a_ready_one_survived_is_refused(
    played: tuple[Desk, FaultyServer], author: str, route: str, lingers: bool
) -> None:
    """An adapter that passes every check before the engine, and ends the engine's process (vllm#41384, #52194)."""
    desk, server = played
    server.deaths, server.lingers = 0, lingers
    submit(desk, author)
    killer(server, author, route=route)
    for proven in (False, True):
        assert desk.run(author).name == OURS
        step = scored_steps(desk, author)[-1]
        death: Any = step.result[DEATH]
        assert death["model"].startswith(f"{author}@")
        assert (death["survivor"] or "").startswith(f"{OTHER}@" if proven else "")
        assert (death["survivor"] is not None) == proven
        assert "its supervisor starts it again" in str(step.result["reason"]).lower()
        assert desk.ledger(author).verdict is None
        start_again(desk, server)
    assert desk.run(author).name == "Quarantined: refused_by_engine"
    assert server.deaths == 3, "the first proves nothing, since nobody had gone first"
    reason = str(desk.ledger(author).verdict.result["reason"])  # type: ignore[union-attr]
    assert "two engines died of it" in reason and f"{OTHER}@" in reason and f"{author}/run-1" in reason
    start_again(desk, server)
    server.lingers = False


def test_engines_that_a_ready_adapter_does_not_survive_either_prove_nothing(
    played: tuple[Desk, FaultyServer],
) -> None:
    desk, server = played
    submit(desk, "elm")
    killer(server, "elm", OTHER)
    for _ in range(5):
        assert desk.run("elm").name == OURS
        start_again(desk, server)
    deaths: list[Any] = [step.result[DEATH] for step in scored_steps(desk, "elm")]
    assert [death["model"].split("@")[0] for death in deaths] == ["elm", OTHER, "elm", "elm", "elm"]
    assert all(death["survivor"] is None for death in deaths), (
        "the one that fell itself does not go first again"
    )
    assert "nothing tells whose fault it is" in str(scored_steps(desk, "elm")[-1].result["reason"])
    server.faults = []
    assert desk.run("elm").name == "Ready", "the engines were at fault"


def test_deaths_of_one_process_count_once(played: tuple[Desk, FaultyServer]) -> None:
    """What looks like a death may be a network: a new process publishes itself anew."""
    desk, server = played
    submit(desk, "fir")
    killer(server, "fir")
    for _ in range(3):
        assert desk.run("fir").name == OURS
        server.restart()
    start_again(desk, server)
    assert desk.run("fir").name == "Quarantined: refused_by_engine"
    start_again(desk, server)


def test_an_engine_short_of_memory_is_no_evidence(played: tuple[Desk, FaultyServer]) -> None:
    desk, server = played
    submit(desk, "gorse")
    killer(server, "gorse", message=OUT_OF_MEMORY)
    for _ in range(2):
        assert desk.run("gorse").name == OURS
        start_again(desk, server)
    assert not any(DEATH in step.result for step in scored_steps(desk, "gorse"))


def test_only_a_ready_adapter_of_its_size_goes_first(
    played: tuple[Desk, FaultyServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller one proves nothing: the engine may have had no room for this one."""
    desk, server = played
    submit(desk, "hazel")
    killer(server, "hazel")
    monkeypatch.setattr(poison, "_LEAST_SHARE", 1.5)
    for _ in range(3):
        assert desk.run("hazel").name == OURS
        start_again(desk, server)
    deaths: list[Any] = [step.result[DEATH] for step in scored_steps(desk, "hazel")]
    assert [death["survivor"] for death in deaths] == [None] * 3
    later = utc_now() + timedelta(minutes=10)
    assert not [
        one for one in list_due(desk.store, now=later, grace_s=0, settle_s=600).due if one.author == "hazel"
    ]
    later += timedelta(minutes=5)
    assert [
        one.author
        for one in list_due(desk.store, now=later, grace_s=0, settle_s=600).due
        if one.author == "hazel"
    ]


def test_an_opponent_that_kills_engines_is_passed_over(played: tuple[Desk, FaultyServer]) -> None:
    desk, server = played
    submit(desk, "iris")
    server.faults = [Fault(COMPLETIONS, f"{OTHER}@", says(500, DEAD), kills=True)]
    for _ in range(2):
        assert desk.run("iris").name == OURS
        start_again(desk, server)
    assert desk.run("iris").name == "Ready"
    verdict: Any = desk.ledger("iris").verdict
    assert verdict.result["wrong"] == {}
    server.faults = []
