"""The reference scorer against a real vLLM: the same measure, the same figures, for the base and for an adapter."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_builders import Roster
from engine_builders import RunningEngine, running_engine
from lora_builders import unpack_wheel
from reference_builders import CONTEXT, one_thread, save_adapter, save_base, state

from storage.training import Reference
from tasks.bpb.engine import Engine
from tasks.bpb.heldout import Unit
from tasks.bpb.measure import Prepared, prepare_units, score_subject
from tasks.bpb.reference import main
from tasks.bpb.reference_files import ExpertPacking
from tasks.bpb.reference_model import ReferenceModel
from tasks.directories import KnownBase, convert_directory
from tasks.lora.base import read_base_config

pytestmark = pytest.mark.real

PROSE = "Höre, mein Herz: 30 €, 雪 und ein 🦊; "
TEXTS = [Unit(f"t{n}", PROSE[n:] + "abcdefghij"[n % 7 :] * (n % 5 + 1)) for n in range(12)]
EDGES = [Unit(f"e{n}", "x" * n) for n in (CONTEXT - 2, CONTEXT - 1, CONTEXT, 3 * CONTEXT)]
SPECIAL = [Unit("bos", "<s>again and again"), Unit("inside", "a <s> b </s> c"), Unit("empty", "")]
ANSWERS = [Unit(f"a{n}", f"The answer is {n * n}.", f"What is {n} times {n}? é ") for n in range(9)]
KINDS = {"text": TEXTS + EDGES + SPECIAL, "prompt_and_text": ANSWERS}


@dataclass(frozen=True)
class World:
    folder: Path
    base: Path
    trained: Path
    served: Path
    server: RunningEngine


@pytest.fixture(scope="module", params=[False, True], ids=["without-bos", "with-bos"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    base, trained, served = folder / "base", folder / "trained", folder / "served"
    with one_thread():
        save_base(base, bos=request.param)
        save_adapter(base, trained)
        known = KnownBase(read_base_config(base, label="tiny"))
        convert_directory(trained, served, known, packing="rank_major", format="per-expert", progress=None)
        limits = {"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4, "max_model_len": CONTEXT}
        with running_engine(base, folder, **limits) as server:
            yield World(folder, base, trained, served, server)


def silent(label: str, done: int, total: int) -> None:
    pass


def bpb(bits: tuple[float, ...], prepared: Prepared) -> float:
    return math.fsum(bits) / sum(unit.byte_count for unit in prepared.units)


@pytest.mark.parametrize("kind", list(KINDS))
def test_both_scorers_cut_the_same_windows_and_give_the_same_bits(world: World, kind: str) -> None:
    model = ReferenceModel(world.base, name="tiny", device="cpu", packing=ExpertPacking.RANK_MAJOR)
    with Engine(world.server.url, timeout_s=60) as engine:
        prepared = prepare_units(engine, KINDS[kind])
        assert prepare_units(model, KINDS[kind]) == prepared, (
            "tokens, windows, bytes, what is left out and why"
        )
        assert (prepared.voided != ()) == (kind == "text")
        engine.load("own", str(world.served), is_3d=False)
        model.load("own", str(world.trained), is_3d=False)
        figures = {}
        for name in ("tiny", "own"):
            theirs = score_subject(engine, name, prepared, label=name, progress=silent).bits
            ours = score_subject(model, name, prepared, label=name, progress=silent).bits
            furthest = max(
                abs(one - other) / unit.byte_count
                for one, other, unit in zip(ours, theirs, prepared.units, strict=True)
            )
            assert furthest < 1e-4, "bits per byte, on every single unit"
            assert abs(bpb(ours, prepared) - bpb(theirs, prepared)) < 1e-4
            figures[name] = ours
        engine.unload("own")
    apart = zip(figures["own"], figures["tiny"], prepared.units, strict=True)
    assert max(abs(one - other) / unit.byte_count for one, other, unit in apart) > 0.1, (
        "the adapter does something"
    )


def test_the_command_gives_the_figures_of_roster_score(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine by its address, the reference scorer in its place, and the command on the trainer's side."""
    monkeypatch.setenv("ROSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROSTER_MIN_BYTES", "100")
    state(world.trained, lora_B_layout="rank_major")
    path = tmp_path / "ann" / "main.jsonl"
    path.parent.mkdir()
    units = [*TEXTS, *ANSWERS]
    lines = [{"id": u.id, "text": u.text} | ({"prompt": u.prompt} if u.prompt else {}) for u in units]
    path.write_text("\n".join(map(json.dumps, lines)))
    roster = Roster(capsys, tmp_path / "home")
    found = {}
    for engine in (world.server.url, "reference"):
        ran = roster(
            "score", world.trained, "--base", world.base, "--heldout", path, "--engine", engine, "--json"
        )
        assert ran.code in {0, 1}, ran.err
        found[engine] = ran.document
    by_engine, by_reference = found.values()
    assert by_engine["outcome"] == by_reference["would_be"] and by_engine["codes"] == by_reference["codes"]
    for figure in ("base", "own", "control", "base_again"):
        assert abs(by_engine[figure] - by_reference[figure]) < 1e-4
    assert by_engine["units"] == by_reference["units"] == len(units)
    assert abs(by_engine["control"] - by_engine["own"]) > 1e-3
    with Engine(world.server.url, timeout_s=60) as engine_left:
        assert engine_left.served_models() == ("tiny",), "everything is unloaded"

    out = tmp_path / "reference.json"
    assert main([str(world.base), str(world.trained), str(path), "--out", str(out), "--device", "cpu"]) == 0
    scores = Reference.model_validate_json(out.read_text()).heldout["ann/main"]
    assert abs(scores.own_bpb - by_engine["own"]) < 1e-4 and abs(scores.base_bpb - by_engine["base"]) < 1e-4
    assert (scores.units, scores.bytes) == (by_engine["units"], by_engine["bytes"])


PACKAGES = (
    ("lm_eval", "0.4.13"),
    ("sacrebleu", "2.6.0"),
    ("portalocker", "4.4.2"),
    ("tabulate", "0.10.0"),
    ("lxml", "6.1.3"),
)
"""lm-evaluation-harness and what it wants beside what is installed here."""


def test_bits_per_byte_are_those_of_lm_evaluation_harness(tmp_path: Path) -> None:
    """Its own loading, tokens and log-likelihoods under its own formula, of every text that fits one window.

    Longer texts it cuts without overlap, so that tokens have less before them; that is another measure. A space at the
    end of a prompt it moves to the text.
    """
    packages = [str(unpack_wheel(name, version, tmp_path / "packages")) for name, version in PACKAGES]
    short = [unit for unit in TEXTS if len(unit.text.encode()) < CONTEXT - 1]
    assert len(short) >= 5
    texts = [*short, Unit("full", "x" * (CONTEXT - 2))]
    answers = [Unit(u.id, " " + u.text, (u.prompt or "").rstrip()) for u in ANSWERS]
    with one_thread():
        save_base(tmp_path / "base", bos=True)
        save_adapter(tmp_path / "base", tmp_path / "own")
        figures = []
        for adapter in (None, tmp_path / "own"):
            task = {
                "base": str(tmp_path / "base"),
                "adapter": None if adapter is None else str(adapter),
                "max_length": CONTEXT,
                "texts": [unit.text for unit in texts],
                "answers": [(unit.prompt, unit.text) for unit in answers],
            }
            (tmp_path / "task.json").write_text(json.dumps(task))
            done = subprocess.run(
                [sys.executable, Path(__file__).with_name("producer_lm_eval.py"), tmp_path / "task.json"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(packages), "HF_HUB_OFFLINE": "1"},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            said = json.loads(done.stdout.splitlines()[-1])
            model = ReferenceModel(tmp_path / "base", device="cpu", packing=ExpertPacking.RANK_MAJOR)
            if adapter is not None:
                model.load("own", str(adapter), is_3d=False)
            for name, units in (("texts", texts), ("answers", answers)):
                prepared = prepare_units(model, units)
                assert len(prepared.units) == len(units)
                assert all(len(unit.windows) == 1 for unit in prepared.units)
                subject = "base" if adapter is None else "own"
                bits = score_subject(model, subject, prepared, label=subject, progress=silent).bits
                theirs = [-value / math.log(2) for value in said[name]["loglikelihoods"]]
                assert bits == pytest.approx(theirs, rel=1e-6)
                assert bpb(bits, prepared) == pytest.approx(said[name]["bpb"], abs=1e-5)
                figures.append(said[name]["bpb"])
        assert len({round(figure, 3) for figure in figures}) == 4, "two adapters, two kinds, four figures"
