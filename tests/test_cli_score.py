"""`roster score`: the BPB check of directories outside the pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_builders import Ran, Roster
from engine_builders import Reply, ScriptedEngine
from lora_builders import Logical, attention, base_fields, encode, save_adapter
from reference_builders import one_thread, save_base, state
from reference_builders import save_adapter as save_by_peft
from safetensors.torch import load_file
from scripted_scorer import ScriptedScorer
from store_builders import memory_store

from roster.serving_engine import EngineInfo
from storage.bases import BaseDocument, BaseEngine, TargetFormat, register_base
from storage.documents import put_document
from storage.keys import engine_key
from storage.s3 import S3Store
from tasks.bpb.heldout import UnitKind
from tasks.bpb.identity import measure_id
from tasks.bpb.measure import prepare_units, score_subject
from tasks.bpb.protocol import BosRule
from tasks.bpb.reference_files import ExpertPacking, read_units_file
from tasks.bpb.reference_model import ReferenceModel

pytestmark = pytest.mark.real  # models are real

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
QUALITY = {"own": 2.1, "control": 2.39, "wrong": 2.5}
DIGEST = "5" * 64
URL = "http://127.0.0.1:9"


@dataclass
class Desk:
    """Adapters, a base and held-out text, and a scripted engine in the place of whatever would score."""

    folder: Path
    roster: Roster
    quality: dict[str, float] = field(default_factory=lambda: dict(QUALITY))
    script: dict[str, Any] = field(default_factory=dict)
    loaded: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    opened: list[tuple[object, ...]] = field(default_factory=list)

    def adapter(self, name: str, seed: int, *, marked: bool = True) -> Path:
        marker = {"lora_B_layout": "rank_major"} if marked else {}
        return save_adapter(self.folder / name, {**encode(Logical(seed=seed)), **attention()}, **marker)

    def bits(self, name: str, path: str) -> float:
        role = "control" if "~control@" in name else "own" if name.startswith("~score:ash@") else "wrong"
        self.loaded[name] = load_file(Path(path) / "adapter_model.safetensors")
        return self.quality[role]

    @contextmanager
    def open_scorer(self, *arguments: object) -> Iterator[tuple[ScriptedScorer, str]]:
        self.opened.append(arguments)
        yield (
            ScriptedScorer(
                {"tiny": 2.4}, adapters=self.bits, max_len=512, bos=True, flavour=0.01, **self.script
            ),
            "tiny",
        )

    def score(self, *more: str | Path, base: str = "models/tiny") -> Ran:
        arguments = (
            self.folder / "ash",
            *more,
            "--base",
            base,
            "--heldout",
            self.folder / "ash.jsonl",
            "--json",
        )
        return self.roster("score", *arguments)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Desk:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text(json.dumps(base_fields()))
    units = ({"id": f"u{n}", "text": f"Ash wrote text number {n}. " + chr(97 + n) * 330} for n in range(24))
    (tmp_path / "ash.jsonl").write_text("".join(json.dumps(unit) + "\n" for unit in units))
    desk = Desk(tmp_path, Roster(capsys, tmp_path / "home"))
    desk.adapter("ash", seed=3)
    monkeypatch.setattr("flows.cli.score.open_scorer", desk.open_scorer)
    return desk


def left(desk: Desk) -> list[Path]:
    return list((desk.folder / "temporary").rglob("*"))


def test_a_good_adapter_would_be_ready_with_every_figure(desk: Desk) -> None:
    desk.adapter("birch", seed=4)
    desk.adapter("elsewhere/birch", seed=5)
    ran = desk.score("birch", "elsewhere/birch")
    assert (ran.code, ran.document["outcome"], ran.document["would_be"]) == (0, "ready", None)
    found = ran.document
    assert found["own"] == pytest.approx(2.1, rel=0.01) and found["base"] == pytest.approx(2.4, rel=0.01)
    assert found["base_again"] == found["base"] and found["control"] == pytest.approx(2.39, rel=0.01)
    assert sorted(found["wrong"]) == ["birch", "birch-3"]
    assert sorted(found["differences"]) == ["base", "control", "wrong:birch", "wrong:birch-3"]
    assert all(value["lower"] <= value["mean"] <= value["upper"] for value in found["differences"].values())
    assert found["directories"] == {
        "own": str(desk.folder / "ash"),
        "wrong:birch": "birch",
        "wrong:birch-3": "elsewhere/birch",
    }
    assert found["control_kind"] == "other_packing" and found["thresholds"]["min_units"] == 20
    assert (found["units"], found["scored_by"], found["measure_id"]) == (24, "auto", None)
    assert found["tokens"] > 24 * 330 * 6 and left(desk) == []


def test_what_is_loaded_is_the_adapter_its_other_reading_and_the_others(desk: Desk) -> None:
    desk.adapter("birch", seed=4)
    assert desk.score("birch").code == 0
    own, control, wrong = desk.loaded.values()
    assert [name.partition("@")[0] for name in desk.loaded] == [
        "~score:ash",
        "~score:ash~control",
        "~score:2-birch",
    ]
    key = "base_model.model.model.layers.{}.mlp.experts.1.down_proj.lora_B.weight"
    logical, other = Logical(seed=3), Logical(seed=4)
    layer, parameter = next(place for place in logical.b if place[1] == "down_proj")
    name = key.format(layer)
    assert torch.equal(own[name], logical.b[layer, parameter][1])
    assert torch.equal(wrong[name], other.b[layer, parameter][1])
    experts, _, rank = logical.b[layer, parameter].shape
    stored = torch.stack(
        [logical.b[layer, parameter][j % experts, :, j // experts] for j in range(experts * rank)], 1
    )
    assert torch.equal(control[name], stored[:, rank : 2 * rank]) and not torch.equal(
        control[name], own[name]
    )


@pytest.mark.parametrize(
    ("quality", "code", "outcome", "codes"),
    [
        ({"own": 2.45}, 1, "quarantined", ["control_not_worse", "not_better_than_base"]),
        ({"wrong": 2.0}, 1, "quarantined", ["not_better_than_wrong"]),
        ({"own": 2.39, "control": 2.1}, 1, "quarantined", ["control_not_worse"]),
    ],
)
def test_a_bad_one_says_why(
    desk: Desk, quality: dict[str, float], code: int, outcome: str, codes: list[str]
) -> None:
    desk.adapter("birch", seed=4)
    desk.quality |= quality
    ran = desk.score("birch")
    assert (ran.code, ran.document["outcome"], ran.document["codes"]) == (code, outcome, codes)
    if quality.get("control"):
        assert "read with the other packing it scores 2." in ran.document["reason"]


def test_too_little_text_and_a_base_that_drifts(desk: Desk) -> None:
    lines = (desk.folder / "ash.jsonl").read_text().splitlines()
    (desk.folder / "ash.jsonl").write_text("\n".join(lines[:7]))
    ran = desk.score()
    assert (ran.code, ran.document["outcome"], ran.document["codes"]) == (
        1,
        "inconclusive",
        ["too_little_text"],
    )
    (desk.folder / "ash.jsonl").write_text("\n".join(lines))
    desk.script = {"drift": 0.02}
    ran = desk.score()
    assert (ran.code, ran.document["outcome"], ran.document["codes"]) == (3, "stopped", ["engine_drift"])


def test_where_nothing_tells_the_packing_the_control_is_the_other_reading(desk: Desk) -> None:
    desk.adapter("ash", seed=3, marked=False)
    ran = desk.score()
    assert ran.code == 0 and any("is provisional" in warning for warning in ran.document["warnings"])
    assert "warning: ash: the packing of " in ran.err
    own, control = desk.loaded.values()
    logical = Logical(seed=3)
    place = next(place for place in logical.b if place[1] == "down_proj")
    name = f"base_model.model.model.layers.{place[0]}.mlp.experts.2.down_proj.lora_B.weight"
    assert torch.equal(own[name], logical.b[place][2]) and not torch.equal(control[name], own[name])


def test_a_converted_directory_is_scored_as_it_is(desk: Desk) -> None:
    """One tensor for each expert has no other packing: each expert then gets the factor of the one before it."""
    shutil.move(desk.folder / "ash", desk.folder / "trained")
    assert desk.roster("convert", "trained", "ash", "--base", "models/tiny").code == 0
    ran = desk.score()
    assert (ran.code, ran.document["control_kind"]) == (0, "displaced_experts")
    own, control = desk.loaded.values()
    given = load_file(desk.folder / "ash" / "adapter_model.safetensors")
    assert own.keys() == given.keys() and all(torch.equal(own[name], given[name]) for name in given)
    stem = next(name for name in given if ".experts.2." in name and ".lora_B." in name)
    assert torch.equal(control[stem], given[stem.replace(".experts.2.", ".experts.1.")])


def test_for_people(desk: Desk) -> None:
    desk.adapter("birch", seed=4)
    ran = desk.roster("score", "ash", "birch", "--base", "models/tiny", "--heldout", "ash.jsonl")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert " ".join(lines[0].split()) == "subject bits per byte worse than own by interval what"
    assert [line.split()[0] for line in lines[1:6]] == ["base", "own", "control", "wrong:birch", "base_again"]
    assert lines[3].endswith("other_packing") and lines[4].rstrip().endswith("birch")
    assert lines[-1].startswith("ready: own scores 2.")


def test_for_people_who_explore(desk: Desk) -> None:
    arguments = ("--base", "models/tiny", "--heldout", "ash.jsonl", "--engine", "reference")
    ran = desk.roster("score", "ash", *arguments)
    *_, ruling, caution = ran.out.splitlines()
    assert ran.code == 0 and ruling.startswith("would be ready: own scores 2.")
    assert caution.startswith(
        "never ready: the reference scorer shows what the trainer's program makes of it"
    )
    desk.quality["own"] = 2.45
    ran = desk.roster("score", "ash", *arguments)
    assert ran.code == 0
    assert ran.out.splitlines()[-2].startswith(
        "would be quarantined (control_not_worse, not_better_than_base): "
    )


def test_a_directory_that_is_no_adapter_is_refused_before_anything_is_opened(desk: Desk) -> None:
    (desk.folder / "empty").mkdir()
    ran = desk.score("empty")
    assert (ran.code, ran.document["refused"]["code"]) == (1, "corrupt_or_partial")
    assert "empty: " in ran.err and desk.opened == [] and left(desk) == []


def test_text_that_is_no_held_out_set_is_wrong_usage(desk: Desk) -> None:
    (desk.folder / "ash.jsonl").write_text('{"id": "1"}\n')
    ran = desk.score()
    assert ran.code == 2 and "ash.jsonl, line 1: expected " in ran.err and desk.opened == []


def test_an_engine_is_auto_reference_or_an_address(desk: Desk) -> None:
    ran = desk.score("--engine", "vllm")
    assert ran.code == 2 and "expected auto, reference, or an address" in ran.err


@contextmanager
def registered(url: str | None, weights: Path | None = None) -> Iterator[S3Store]:
    document = BaseDocument(
        base="tiny",
        served_model="tiny",
        weights_digest=DIGEST,
        weights=None if weights is None else str(weights),
        engine=BaseEngine(url=url),
        target_format=TargetFormat.PER_EXPERT,
    )
    with memory_store() as store:
        register_base(store, json.dumps(base_fields()).encode(), document)
        yield store


def test_the_measure_of_a_registered_base_is_comparable(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    with registered(URL) as store:
        monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
        found = desk.score(base="tiny").document
    assert found["measure_id"] == measure_id(
        heldout_sha256s=[read_units_file("x", desk.folder / "ash.jsonl").sha256],
        unit_kind=UnitKind.TEXT,
        window=511,
        stride=255,
        bos_rule=BosRule.ONE_BOS,
        base_weights_digest=DIGEST,
    )
    assert (found["window"], found["stride"]) == (511, 255)


# What scores.


@pytest.fixture
def real_desk(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """The same, with the engines that there really are."""
    monkeypatch.undo()
    monkeypatch.chdir(desk.folder)
    monkeypatch.setenv("ROSTER_HOME", str(desk.folder / "home"))
    with one_thread():
        yield desk


def test_auto_needs_an_engine_that_is_registered(real_desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = real_desk.score()
    assert ran.code == 3 and "base models/tiny: expected the address of a vLLM server" in ran.err
    with registered(None) as store:
        monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
        ran = real_desk.score(base="tiny")
    assert ran.code == 3 and "base tiny: expected the address of a vLLM server" in ran.err


def test_auto_asks_what_the_engine_can_do_before_it_waits_for_it(
    real_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = EngineInfo.model_validate_json((EXAMPLES / "engine.json").read_text())
    with registered(URL) as store:
        monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
        assert "engines/tiny.json" in real_desk.score(base="tiny").err, "an engine that has told nothing"
        unfit = info.model_copy(update={"served_model": ("tiny",), "prefix_caching": True})
        put_document(store, engine_key("tiny"), unfit)
        ran = real_desk.score(base="tiny")
    assert ran.code == 3 and "--no-enable-prefix-caching: expected given, found missing" in ran.err


def test_auto_holds_the_lease_and_an_address_does_not(
    real_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases: list[str] = []

    @contextmanager
    def lease(base: str, wait_s: float) -> Iterator[None]:
        leases.append(base)
        yield

    monkeypatch.setattr("tasks.engines.engine_lease", lease)
    info = EngineInfo.model_validate_json((EXAMPLES / "engine.json").read_text())
    left_over = "~score:ash@0123456789abcdef"
    models = {
        "object": "list",
        "data": [
            {"id": "tiny", "root": "/m", "max_model_len": 64},
            {"id": left_over, "root": "/x", "parent": "tiny"},
        ],
    }
    script = {
        "GET /health": [Reply()],
        "GET /v1/models": [Reply(body=models)],
        "POST /v1/unload_lora_adapter": [Reply()],
        "POST /tokenize": [Reply(503, {"error": {"message": "the script ends here"}})],
    }
    with ScriptedEngine(script) as server, registered(server.url) as store:
        monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
        put_document(store, engine_key("tiny"), info.model_copy(update={"served_model": ("tiny",)}))
        for engine, held in (("auto", 1), (server.url, 2)):
            ran = real_desk.score("--engine", engine, base="tiny")
            assert ran.code == 3 and "HTTP 503" in ran.err, ran.err
            assert leases == ["tiny"] * held, "the registered engine's address is that engine"
        ran = real_desk.score("--engine", server.url)
        assert ran.code == 3 and "nobody's lease is held" in ran.err and leases == ["tiny"] * 2
        forgotten = [body for route, body in server.requests if route == "POST /v1/unload_lora_adapter"]
        assert forgotten == [{"lora_name": left_over}] * 3, "what a killed command left"


def test_the_reference_scorer_gives_the_figures_of_the_trainers_side(
    real_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On what the conversion made; never ready, whatever the figures, and the command has done what it was asked to."""
    base, trained = real_desk.folder / "base", real_desk.folder / "ash"
    shutil.rmtree(trained)
    save_base(base, bos=True)
    save_by_peft(base, trained)
    state(trained, lora_B_layout="rank_major")
    lines = [json.dumps({"id": str(n), "text": f"Text {n}."}) for n in range(21)]
    (real_desk.folder / "ash.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("ROSTER_MIN_BYTES", "100")
    with registered(None, weights=base) as store:
        monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
        store.put("bases/tiny/config.json", (base / "config.json").read_bytes())
        ran = real_desk.score("--engine", "reference", base="tiny")
    found = ran.document
    assert (ran.code, found["outcome"], found["scored_by"]) == (0, None, "reference")
    assert found["would_be"] in {"ready", "quarantined", "inconclusive"}, "its numbers are random"

    units = read_units_file("x", real_desk.folder / "ash.jsonl").heldout.units
    for packing, label in ((ExpertPacking.RANK_MAJOR, "own"), (ExpertPacking.GROUPED_BY_EXPERT, "control")):
        model = ReferenceModel(base, packing=packing)
        model.load(label, str(real_desk.folder / "ash"), is_3d=False)
        prepared = prepare_units(model, units)
        bits = score_subject(model, label, prepared, label=label, progress=lambda *_: None).bits
        assert found[label] == pytest.approx(sum(bits) / sum(u.byte_count for u in prepared.units), rel=1e-6)
    assert found["own"] != pytest.approx(found["control"], rel=1e-3)


def test_the_reference_scorer_needs_the_weights(real_desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    with registered(None) as store:
        monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
        ran = real_desk.score("--engine", "reference", base="tiny")
    assert ran.code == 2 and "the folder of the base's weights: register it with --weights" in ran.err
