"""What is measured of an engine, where it is kept, and what follows from it. The real engine: test_qualify_real.py."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - errors cross process borders this way
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gate_builders import PlayedEngine
from lora_builders import base_fields
from pipeline_builders import BASE, EXAMPLES, Desk, engine_of, publish_engine, qualify_on_paper
from safetensors.torch import load_file
from store_builders import memory_store
from supervised_builders import child, shell

import tasks.qualification
from flows.cli.app import run
from flows.supervisor import Supervisor
from roster.serving_engine import EngineInfo
from storage.documents import decode_document, encode_document, put_document, read_document
from storage.errors import InvalidDocument, InvalidName, UnknownBase
from storage.keys import engine_key, qualification_key
from storage.qualifications import Qualification, read_qualification
from storage.s3 import S3Store
from tasks.bpb.engine_errors import EngineRefused, EngineUnavailable
from tasks.errors import EngineChanged, EngineNotQualified, EngineUnfit, EngineUnverified, NoEngine
from tasks.lora.base import read_base_config
from tasks.lora.diagnostic import list_sites, write_diagnostic
from tasks.lora.errors import DestinationExists
from tasks.lora.family import TensorClass
from tasks.lora.names import PREFIX
from tasks.lora.resolve import NOT_APPLIED, find_unresolved
from tasks.lora.target import TargetFormat
from tasks.outcomes import Code, rule
from tasks.qualification import QualifyLimits, ServedBase, find_served_base, qualify_engine, summarize
from tasks.roster_sample import choose_sample, compare_sample, score_again
from tasks.served import served_by_engine, served_by_snapshot

pytestmark = pytest.mark.real

EXPERTS, ATTENTION = TensorClass.ROUTED_EXPERTS, TensorClass.ATTENTION
GOLDEN = Path(__file__).parent / "golden" / "families"
URL = "http://127.0.0.1:9"


def base_of(**changes: Any) -> Any:
    return read_base_config(json.dumps(base_fields(**changes)).encode(), label=BASE)


# The adapters that are made


def write(folder: Path, format: TargetFormat, **more: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    base = base_of()
    options = {"rank": 3, "dtype": "F32", "seed": "s", "strengths": {EXPERTS: 1.0, ATTENTION: 1.0}} | more
    write_diagnostic(folder, list_sites(base, format, None), format=format, **options)
    tensors = load_file(folder / "adapter_model.safetensors")
    return tensors, json.loads((folder / "adapter_config.json").read_text())


def test_a_diagnostic_adapter_has_the_names_and_shapes_of_a_served_one(tmp_path: Path) -> None:
    tensors, config = write(tmp_path / "a", TargetFormat.PER_EXPERT)
    fields = base_fields()
    hidden, inter = fields["hidden_size"], fields["moe_intermediate_size"]
    last = fields["num_hidden_layers"] - 1
    front = "base_model.model.model.layers"
    for layer in (0, last):
        for expert in range(fields["num_local_experts"]):
            at = f"{front}.{layer}.mlp.experts.{expert}"
            assert tensors[f"{at}.up_proj.lora_A.weight"].shape == (3, hidden)
            assert tensors[f"{at}.up_proj.lora_B.weight"].shape == (inter, 3)
            assert tensors[f"{at}.down_proj.lora_A.weight"].shape == (3, inter)
            assert tensors[f"{at}.down_proj.lora_B.weight"].shape == (hidden, 3)
        assert tensors[f"{front}.{layer}.self_attn.q_proj.lora_A.weight"].shape == (3, hidden)
    assert len(tensors) == 2 * 2 * (3 * fields["num_local_experts"] + 4)
    assert (config["r"], config["lora_alpha"]) == (3, 3) and "rank_pattern" not in config
    assert all(tensor.unique().numel() == tensor.numel() for tensor in tensors.values())


def test_a_stacked_one_holds_all_experts_in_one_tensor(tmp_path: Path) -> None:
    tensors, config = write(tmp_path / "a", TargetFormat.STACKED, dtype="BF16")
    fields = base_fields()
    experts, hidden, inter = (
        fields[name] for name in ("num_local_experts", "hidden_size", "moe_intermediate_size")
    )
    at = "base_model.model.model.layers.0.mlp.experts"
    shapes = {
        name.removeprefix(f"{at}."): tuple(one.shape) for name, one in tensors.items() if name.startswith(at)
    }
    assert shapes == {
        "base_layer.lora_A.weight": (experts * 3, hidden),
        "base_layer.lora_B.weight": (2 * inter, experts * 3),
        "lora_A.weight": (experts * 3, inter),
        "lora_B.weight": (hidden, experts * 3),
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sorted(config["target_parameters"]) == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def test_the_strength_of_a_class_is_in_its_b_alone_and_the_seed_decides_the_numbers(tmp_path: Path) -> None:
    plain, _ = write(tmp_path / "a", TargetFormat.PER_EXPERT)
    strong, _ = write(tmp_path / "b", TargetFormat.PER_EXPERT, strengths={EXPERTS: 8.0, ATTENTION: 1.0})
    for name, tensor in plain.items():
        is_scaled = ".experts." in name and "lora_B" in name
        assert torch.allclose(strong[name], (8 if is_scaled else 1) * tensor, rtol=1e-6)
    other, _ = write(tmp_path / "c", TargetFormat.PER_EXPERT, seed="t")
    assert not any(torch.equal(other[name], tensor) for name, tensor in plain.items())
    again, _ = write(tmp_path / "d", TargetFormat.PER_EXPERT)
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.items())
    alone, _ = write(tmp_path / "e", TargetFormat.PER_EXPERT, strengths={ATTENTION: 1.0})
    assert alone and all(".self_attn." in name for name in alone)
    with pytest.raises(DestinationExists):
        write(tmp_path / "e", TargetFormat.PER_EXPERT)
    with pytest.raises(ValueError, match="no site of shared_experts"):
        write(tmp_path / "f", TargetFormat.PER_EXPERT, strengths={TensorClass.SHARED_EXPERTS: 1.0})


@pytest.mark.parametrize("family", sorted(path.stem for path in GOLDEN.glob("*.json")))
def test_every_family_has_adapters_whose_keys_its_engine_takes(family: str) -> None:
    config = json.loads((GOLDEN / f"{family}.json").read_text())["config"]
    base = read_base_config(json.dumps(config).encode(), label=family)
    served = served_by_snapshot(base)
    for format in (format for format in TargetFormat if base.served.serves(format)):
        sites = list_sites(base, format, None)
        assert {EXPERTS, ATTENTION} <= {site.kind for site in sites}
        assert {site.layer for site in sites if site.kind is EXPERTS} == {
            base.sparse_layers[0],
            base.sparse_layers[-1],
        }
        if served is not None:
            names = [
                f"{PREFIX}{name}.lora_A.weight"
                for site in sites
                for pair in site.pairs
                for name in pair.names
            ]
            lost = find_unresolved(names, served, base.family)
            assert all(one.why == NOT_APPLIED for one in lost), lost[:3]
            kept = list_sites(base, format, served)
            assert {EXPERTS, ATTENTION} <= {site.kind for site in kept}


def test_what_an_engine_does_not_wrap_is_not_asked_of_it() -> None:
    info = engine_of()
    modules = tuple(name for name in info.lora_modules if not name.endswith(".experts"))
    narrow = info.model_copy(update={"lora_modules": modules, "expert_modules": {}})
    kinds = {site.kind for site in list_sites(base_of(), TargetFormat.PER_EXPERT, served_by_engine(narrow))}
    assert ATTENTION in kinds and EXPERTS not in kinds


# The document


def test_the_documented_example_is_what_is_written() -> None:
    body = (EXAMPLES / "qualification.json").read_bytes()
    assert encode_document("q", decode_document("q", body, Qualification)) == body
    assert qualification_key("tiny", "5c1f0a7be2d94863") == "qualified/tiny/5c1f0a7be2d94863.json"
    with pytest.raises(InvalidName, match="16 hexadecimal"):
        qualification_key("tiny", "../../x")
    with pytest.raises(InvalidDocument, match="surprise"):
        decode_document("q", json.dumps(json.loads(body) | {"surprise": 1}).encode(), Qualification)


# Measuring and storing


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as store:
        yield store


def limits(folder: Path) -> QualifyLimits:
    return QualifyLimits(folder / "work", 1, 1, 200)


def unregistered(url: str = URL) -> ServedBase:
    return ServedBase(BASE, json.dumps(base_fields()).encode(), BASE, url, None)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedEngine:
    engine = PlayedEngine(slots=4)

    @contextmanager
    def leased(url: str, base: str, *, wait_s: float, timeout_s: float) -> Iterator[PlayedEngine]:
        assert (url, base) == (URL, BASE)
        yield engine

    monkeypatch.setattr(tasks.qualification, "leased_engine_at", leased)
    return engine


def test_a_sound_engine_is_qualified_before_its_base_is_registered(
    store: S3Store, tmp_path: Path, played: PlayedEngine
) -> None:
    info = engine_of()
    put_document(store, engine_key(BASE), info)
    lines: list[str] = []
    found = qualify_engine(store, unregistered(), limits(tmp_path), sample=3, say=lines.append)
    assert found.passed and found.failures == () and found.sample == ()
    assert (found.engine_id, found.vllm_version, found.device) == (info.engine_id, "0.32.0", "cpu")
    assert read_qualification(store, BASE, info.engine_id) == found
    assert read_qualification(store, "other", info.engine_id) is None
    assert {"applied_routed_experts", "applied_attention", "applied_router"} <= {
        one.name for one in found.checks
    }
    assert lines and "is qualified: 10 checks passed" in summarize(found)
    assert played.loaded == {} and len(played.calls) == 2 * info.max_cpu_loras + 2
    assert list((tmp_path / "work" / "runs").iterdir()) == [], "no adapter is left on the disk"


def test_a_faulty_engine_is_stored_as_not_passed(
    store: S3Store, tmp_path: Path, played: PlayedEngine
) -> None:
    put_document(store, engine_key(BASE), engine_of())
    played.leaks = True
    found = qualify_engine(store, unregistered(), limits(tmp_path), sample=3, say=lambda line: None)
    assert not found.passed and read_qualification(store, BASE, found.engine_id) == found
    for fact in ("NOT QUALIFIED: slots_full: 4 adapters", "0.0001 is allowed", "roster qualify --base tiny"):
        assert fact in summarize(found)


def test_an_engine_that_wraps_nothing_of_the_base_is_not_qualified(
    store: S3Store, tmp_path: Path, played: PlayedEngine
) -> None:
    nothing = {"lora_modules": ("lm_head",), "expert_modules": {}, "expert_projections": ()}
    put_document(store, engine_key(BASE), engine_of().model_copy(update=nothing))
    found = qualify_engine(store, unregistered(), limits(tmp_path), sample=3, say=lambda line: None)
    assert [(one.name, one.passed) for one in found.checks] == [("loads", False)]
    assert "--lora-target-modules" in found.checks[0].found and played.calls == []


def test_an_engine_that_changed_meanwhile_is_not_judged(
    store: S3Store, tmp_path: Path, played: PlayedEngine
) -> None:
    info = engine_of()
    put_document(store, engine_key(BASE), info)
    other = info.model_copy(update={"max_loras": 2})

    def restart(line: str) -> None:
        put_document(store, engine_key(BASE), other)

    with pytest.raises(EngineChanged, match=f"{info.engine_id} throughout, found {other.engine_id}"):
        qualify_engine(store, unregistered(), limits(tmp_path), sample=0, say=restart)
    assert list(store.list_objects("qualified/")) == []


def test_what_cannot_be_measured_is_said_and_not_stored(
    store: S3Store, tmp_path: Path, played: PlayedEngine
) -> None:
    with pytest.raises(EngineUnverified, match=r"engines/tiny\.json, found nothing"):
        qualify_engine(store, unregistered(), limits(tmp_path), sample=0, say=lambda line: None)
    put_document(store, engine_key(BASE), engine_of().model_copy(update={"prefix_caching": True}))
    with pytest.raises(EngineUnfit, match="--no-enable-prefix-caching"):
        qualify_engine(store, unregistered(), limits(tmp_path), sample=0, say=lambda line: None)
    put_document(store, engine_key(BASE), engine_of())
    played.fails_at = {20: EngineUnavailable(URL, "POST /v1/completions", "nothing")}
    with pytest.raises(EngineUnavailable):
        qualify_engine(store, unregistered(), limits(tmp_path), sample=0, say=lambda line: None)
    assert list(store.list_objects("qualified/")) == [] and played.loaded == {}


def test_a_base_is_what_was_registered_or_what_is_given(tmp_path: Path, desk: Desk) -> None:
    (tmp_path / "config.json").write_text(json.dumps(base_fields()))
    named: dict[str, Any] = {"config": None, "engine_url": None, "served_model": None}
    known = find_served_base(desk.store, BASE, **named)
    assert (known.url, known.model, known.registered is not None) == (URL, BASE, True)
    with pytest.raises(UnknownBase):
        find_served_base(desk.store, "new", **named)
    with pytest.raises(NoEngine):
        find_served_base(desk.store, "new", **named | {"config": tmp_path})
    given = find_served_base(desk.store, "new", config=tmp_path, engine_url="http://e", served_model="m")
    assert (given.url, given.model, given.registered) == ("http://e", "m", None)
    assert given.config == (tmp_path / "config.json").read_bytes()


# What follows from it


def test_nothing_is_scored_on_an_engine_that_is_not_qualified(desk: Desk) -> None:
    info = engine_of()
    other = info.model_copy(update={"vllm_version": "0.33.0"})
    put_document(desk.store, engine_key(BASE), other)
    state = desk.ready("fir")
    assert state.name == "Stopped: engine_unverified" and desk.engine.calls == []
    message = str(state.message)
    for fact in (f"engine of base {BASE}", f"qualification of engine {other.engine_id}", "found none"):
        assert fact in message
    assert f"`roster qualify --base {BASE}`" in message

    bad = {"name": "slots_full", "passed": False, "found": "2.7 nats off", "figures": {}}
    qualify_on_paper(desk.store, other, passed=False, checks=[bad])
    state = desk.run("fir")
    assert state.name == "Stopped: engine_unverified" and desk.engine.calls == []
    assert "found one that failed: slots_full: 2.7 nats off" in str(state.message)

    desk.store.put(qualification_key(BASE, other.engine_id), b"{}")
    state = desk.run("fir")
    assert state.name == "Stopped: engine_unverified" and "cannot be read" in str(state.message)

    qualify_on_paper(desk.store, other)
    assert desk.run("fir").name == "Ready", "the same submission, once the engine has passed"


def test_the_error_keeps_its_facts() -> None:
    error = EngineNotQualified("tiny", "5c1f0a7be2d94863", "none")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and (again.base, again.engine_id, again.found) == (
        "tiny",
        "5c1f0a7be2d94863",
        "none",
    )
    assert rule(error).code is Code.ENGINE_UNVERIFIED


# The sample of the roster


@pytest.fixture
def grown(desk: Desk) -> Desk:
    """A roster of one author, and an engine that is not the one which made him ready."""
    assert desk.ready("alder").name == "Ready"
    desk.sync()
    info, _ = read_document(desk.store, engine_key(BASE), EngineInfo)
    publish_engine(desk.store, info.model_copy(update={"max_loras": 2}))
    return desk


def sample(desk: Desk, tmp_path: Path, *, stride: int = 200, info: EngineInfo | None = None) -> Any:
    registered = find_served_base(
        desk.store, BASE, config=None, engine_url=None, served_model=None
    ).registered
    assert registered is not None
    now, _ = read_document(desk.store, engine_key(BASE), EngineInfo)
    [one] = choose_sample(desk.store, BASE, now.engine_id, 3)
    disk = tasks.qualification.RunDisk(tmp_path / "again")
    scored = score_again(
        desk.store,
        registered,
        desk.engine,
        info or now,
        one,
        disk=disk,
        path=tmp_path / "again" / "served" / one.output_digest,
        model=BASE,
        stride=stride,
        say=lambda line: None,
    )
    disk.close()
    return scored, compare_sample((scored,))


def test_a_served_adapter_keeps_its_scores_on_a_sound_engine_alone(grown: Desk, tmp_path: Path) -> None:
    grown.engine.adapters = lambda name, path: 2.1
    scored, check = sample(grown, tmp_path / "sound")
    assert scored.compared and scored.own[0] == scored.own[1] and scored.base[0] == scored.base[1]
    assert scored.own[0] == pytest.approx(2.1, rel=0.05) and scored.base[0] == pytest.approx(2.4, rel=0.05)
    assert check.passed and check.figures["largest"] == 0
    assert grown.engine.served_models() == (BASE,), "it is unloaded again"
    for off, passed in ((5e-4, True), (2e-3, False), (0.1, False)):
        grown.engine.adapters = lambda name, path, off=off: 2.1 + off  # type: ignore[misc]
        scored, check = sample(grown, tmp_path / f"own-{off}")
        assert scored.own[1] - scored.own[0] == pytest.approx(off, rel=0.05)
        assert check.passed is passed and ("alder is off" in check.found) is not passed
    grown.engine.adapters = lambda name, path: 2.1
    grown.engine.models[BASE] += 2e-3
    assert not sample(grown, tmp_path / "base")[1].passed
    grown.engine.models[BASE] -= 2e-3
    ledger = grown.ledger("alder")
    assert ledger.verdict is not None
    name = f"alder@{str(ledger.verdict.result['output_digest'])[:16]}"
    grown.engine.on_load = {name: EngineRefused(name, "/p", 400, "no such module")}
    scored, check = sample(grown, tmp_path / "refused")
    assert scored.compared and scored.own is None and not check.passed
    assert "no such module" in check.found


def test_what_tells_nothing_of_the_engine_is_not_compared(grown: Desk, tmp_path: Path) -> None:
    calls = len(grown.engine.calls)
    scored, check = sample(grown, tmp_path / "a", stride=100)
    assert not scored.compared and "this would be" in scored.why and check.passed
    assert check.found.startswith("0 of 1")
    narrow = engine_of().model_copy(update={"max_lora_rank": 1})
    scored, _ = sample(grown, tmp_path / "b", info=narrow)
    assert "--max-lora-rank" in scored.why
    grown.store.delete("heldout/alder/main.jsonl")
    scored, _ = sample(grown, tmp_path / "c")
    assert not scored.compared and "alder/main" in scored.why
    assert len(grown.engine.calls) == calls


def test_another_engine_draws_another_sample(store: S3Store) -> None:
    assert choose_sample(store, BASE, "0" * 16, 3) == (), "without a roster"
    roster = json.loads((EXAMPLES / "roster.json").read_bytes())
    base, served = next(iter(roster["bases"].items()))
    one = next(iter(served["authors"].values()))
    served["authors"] = {f"author-{n}": one for n in range(9)}
    store.put("roster/current.json", json.dumps(roster).encode())
    drawn = {choose_sample(store, base, f"{n:016x}", 3) for n in range(5)}
    assert len(drawn) > 1 and all(len(set(one)) == 3 for one in drawn)
    assert choose_sample(store, base, "0" * 16, 3) in drawn
    assert choose_sample(store, "other", "0" * 16, 3) == choose_sample(store, base, "0" * 16, 0) == ()


# The supervisor's child


def watch(tmp_path: Path, *specs: Any, until: str) -> list[str]:
    lines: list[str] = []
    stop = threading.Event()

    def announce(line: str) -> None:
        lines.append(line)
        if until in line:
            stop.set()

    supervisor = Supervisor(specs, announce=announce, mark=str(tmp_path), first_backoff_s=0.05)
    limit = threading.Timer(60, stop.set)
    limit.start()
    try:
        if supervisor.start(stop):
            supervisor.run_until(stop)
    finally:
        limit.cancel()
    return lines


def test_a_failed_qualification_is_told_line_by_line_and_stops_nothing(tmp_path: Path) -> None:
    qualify = child("qualify", tmp_path, *shell("echo NOT QUALIFIED; exit 1"), one_shot=True, may_fail=True)
    worker = child("worker", tmp_path, after=("qualify",))
    lines = watch(tmp_path, qualify, worker, until="worker: ready")
    assert "NOT QUALIFIED" in lines
    assert any(line.startswith("qualify: ended with exit status 1. The last lines of") for line in lines)
    assert "qualify: everything else goes on" in lines


def test_an_engine_that_was_started_again_is_measured_again(tmp_path: Path) -> None:
    script = f"test -e {tmp_path}/died && exec sleep 600; until test -e {tmp_path}/asked; do sleep 0.05; done"
    engine = child("engine", tmp_path, *shell(f"{script}; touch {tmp_path}/died; exit 1"), restarts=1)
    ask = shell(f"touch {tmp_path}/asked; test -e {tmp_path}/died || exit 3")
    qualify = child("qualify", tmp_path, *ask, one_shot=True, may_fail=True, after=("engine",))
    setup = child("setup", tmp_path, *shell("true"), one_shot=True, after=("engine",))
    lines = watch(tmp_path, engine, qualify, setup, until="qualify: done")
    assert sum(line.startswith("engine: ready") for line in lines) == 2
    assert sum(line.startswith("setup: done") for line in lines) == 1, "what may not fail is done once"


# The command


@pytest.mark.parametrize("passed", [True, False])
def test_the_command_says_what_was_found(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passed: bool
) -> None:
    info = engine_of()
    bad = {"name": "slots_full", "passed": passed, "found": "2.7 nats off", "figures": {"base": 2.7}}
    qualify_on_paper(desk.store, info, passed=passed, checks=[bad])
    found = read_qualification(desk.store, BASE, info.engine_id)
    asked: list[int] = []

    def measure(store: S3Store, base: ServedBase, limits: QualifyLimits, *, sample: int, say: Any) -> Any:
        asked.append(sample)
        assert limits.work_path == desk.settings.work_path
        return found

    monkeypatch.setattr("flows.connect.open_store", lambda settings: desk.store)
    monkeypatch.setattr("flows.settings.load_settings", lambda: desk.settings)
    monkeypatch.setattr(tasks.qualification, "qualify_engine", measure)
    assert run(["qualify", "--base", BASE, "--sample", "5"]) == (0 if passed else 1)
    told = capsys.readouterr()
    assert "slots_full" in told.out and "base 2.7" in told.out
    assert ("FAILED" in told.out) is not passed and ("NOT QUALIFIED" in told.err) is not passed
    assert asked == [5]
    assert run(["qualify", "--base", BASE, "--new-only", "--json"]) == (0 if passed else 1)
    assert json.loads(capsys.readouterr().out)["passed"] is passed
    assert asked == ([5] if passed else [5, 3]), "what has passed is not measured again"
    assert run(["qualify", "--base", "nobody"]) == 2
