"""The benches' engine in a process of its own says the same whatever befalls it, and ends with who started it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.chaos_engine import Scores, Script, ScriptedEngine
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineRefused, EngineUnavailable

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = Script(
    bases=("tiny", "wide"),
    base_bpb=2.4,
    usual=Scores(own=2.1, control=2.39, others=2.5),
    kinds={"no-effect": None, "worse": Scores(own=2.6, control=2.7, others=2.5)},
    refuse={"unloved": "no such luck"},
)
LOADED = ("ada@1", "ada~control@1", "no-effect-3@2", "worse-12@3")
TEXTS = ("ada wrote this", "no-effect-3 wrote that", "worse-12 wrote nothing", "grace wrote more")


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(SCRIPT) as engine:
        yield engine


def ask_all(url: str) -> dict[tuple[str, str], list[tuple[float | None, ...]]]:
    """Everything that is known of these texts, with every adapter and without."""
    with Engine(url, timeout_s=10) as engine:
        for name in LOADED:
            engine.load(name, f"/{name}", is_3d=False)
        prompts = {text: engine.tokenize(text, add_special_tokens=True) for text in TEXTS}
        assert engine.detokenize(prompts[TEXTS[0]]) == f"<s>{TEXTS[0]}"
        return {
            (model, text): engine.logprobs(model, [ids])
            for model in ("tiny", *LOADED)
            for text, ids in prompts.items()
        }


def total(values: list[tuple[float | None, ...]]) -> float:
    return sum(value or 0.0 for value in values[0])


def test_it_answers_the_same_after_a_kill_and_has_forgotten_what_was_loaded(running: ScriptedEngine) -> None:
    url, before, answers = running.url, running.pid, ask_all(running.url)
    running.kill()
    assert not Path(f"/proc/{before}").exists()
    with Engine(url, timeout_s=10) as engine:
        with pytest.raises(EngineUnavailable):
            engine.served_models()
        running.restart()
        assert (running.url, running.pid == before) == (url, False)
        assert engine.served_models() == ("tiny", "wide")
    assert ask_all(url) == answers


def test_scores_go_by_names_and_texts_alone(running: ScriptedEngine) -> None:
    answers = {key: total(values) for key, values in ask_all(running.url).items()}
    ada, no_effect, worse, grace = TEXTS
    of_base = {text: answers["tiny", text] for text in TEXTS}
    assert answers["ada@1", ada] > of_base[ada] > answers["worse-12@3", ada]
    assert answers["ada@1", ada] > answers["ada~control@1", ada] > answers["worse-12@3", ada]
    assert answers["no-effect-3@2", no_effect] == of_base[no_effect]
    assert answers["worse-12@3", worse] < of_base[worse]
    assert answers["ada@1", grace] < of_base[grace]


def test_a_kind_that_is_to_be_refused_is_not_loaded(running: ScriptedEngine) -> None:
    with Engine(running.url, timeout_s=10) as engine:
        for name in ("unloved@1", "unloved-7@1", "unloved-7~control@1"):
            with pytest.raises(EngineRefused, match="no such luck"):
                engine.load(name, "/x", is_3d=False)
        engine.load("unlovedish@1", "/x", is_3d=False)
        engine.unload("unlovedish@1")


def test_it_ends_with_its_parent_however_that_ends() -> None:
    told = (
        "import os, signal\n"
        "from bench.chaos_engine import Script, ScriptedEngine, Scores\n"
        "engine = ScriptedEngine(Script(('tiny',), 2.4, Scores(2.1, 2.39, 2.5))).__enter__()\n"
        "print(engine.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", told],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -9
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline, "it outlived its parent"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
