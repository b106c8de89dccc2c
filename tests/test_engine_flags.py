"""What the running engine must be for an adapter, said before anything is loaded; and which faults are the engine's."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - errors cross process borders this way
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_builders import Reply, ScriptedEngine
from lora_builders import Logical, attention, encode, load, make_base, save_adapter
from pipeline_builders import BASE, EXAMPLES, Desk, OnLoad, publish_engine
from supervised_builders import child, shell

from flows.supervisor import ChildFailedError, Supervisor
from roster.serving import AdapterFormat, Manifest, MinimumVllm
from roster.serving_engine import VERIFIED_VLLM, EngineInfo
from storage.documents import read_document
from storage.keys import engine_key
from storage.ledger import Outcome, StepKind
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineError, EngineFlagMissing, EngineRefused, EngineUnsupported
from tasks.bpb.engine_faults import FAULTS, explain_log, find_fault
from tasks.directories import KnownBase, convert_directory
from tasks.engine_fit import EngineNeeds, check_engine, is_older, needs_of_manifest, needs_of_record
from tasks.errors import EngineTooOld, EngineUnfit
from tasks.lora.convert import ConvertedFiles
from tasks.lora.families import FAMILIES
from tasks.lora.family import MinimumVersion, Proof, ServedClass
from tasks.lora.target import TargetFormat
from tasks.lora.write import WrittenFile
from tasks.outcomes import Code, rule
from tasks.records import conversion_record

pytestmark = pytest.mark.real

Tensors = dict[str, torch.Tensor]
HEALTHY = {"GET /health": [Reply()]}
LOAD = "POST /v1/load_lora_adapter"
PLAIN = EngineNeeds("ada/run-1", AdapterFormat.PER_EXPERT, 8, mixed_format=False, minimum=None)
MIXED = EngineNeeds("bea/run-2", AdapterFormat.STACKED, 8, mixed_format=True, minimum=None)


def engine(**changes: Any) -> EngineInfo:
    info = EngineInfo.model_validate_json((EXAMPLES / "engine.json").read_bytes())
    told = {"served_model": (BASE,), "vllm_version": "0.32.0", "max_lora_rank": 16} | changes
    return info.model_copy(update=told)


def refused(info: EngineInfo, *needs: EngineNeeds) -> Exception:
    with pytest.raises((EngineUnfit, EngineTooOld)) as caught:
        check_engine(info, BASE, BASE, needs)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    return caught.value


def test_an_engine_that_has_everything_is_taken() -> None:
    check_engine(engine(mixed_moe_lora_format=True), BASE, BASE, [PLAIN, MIXED])
    check_engine(engine(mixed_moe_lora_format=False), BASE, BASE, [PLAIN])


# https://github.com/vllm-project/vllm/issues/38520 and https://github.com/vllm-project/vllm/issues/40005
@pytest.mark.parametrize(
    ("format", "other"),
    [(AdapterFormat.STACKED, "per-expert"), (AdapterFormat.PER_EXPERT, "stacked")],
    ids=["stacked for a class of single experts", "per-expert for a class that is stacked by nature"],
)
def test_a_missing_mixed_flag_is_named_and_the_other_format_beside_it(
    format: AdapterFormat, other: str
) -> None:
    needs = EngineNeeds("bea/run-2", format, 8, mixed_format=True, minimum=None)
    error = refused(engine(mixed_moe_lora_format=False), PLAIN, needs)
    said = str(error)
    assert said.startswith(
        "engine of base tiny: --enable-mixed-moe-lora-format: expected given, found missing"
    )
    assert f"bea/run-2 is {format}" in said
    assert f"converted to {other} (`roster base add tiny --config … --target-format {other}`)" in said
    assert rule(error).code is Code.ENGINE_FLAG_MISSING


SLOTS = EngineNeeds("cyd/run-3", AdapterFormat.SLOTS, 8, mixed_format=False, minimum=None, dtype="BF16")


def test_an_adapter_in_slots_needs_the_plugin_and_its_dtype() -> None:
    fits = {"slots_version": 1, "lora_dtype": "bfloat16"}
    check_engine(engine(**fits), BASE, BASE, [PLAIN, SLOTS])
    check_engine(engine(slots_version=None, lora_dtype="float32"), BASE, BASE, [PLAIN])
    for version, found in ((None, "not loaded"), (2, "version 2")):
        said = refused(engine(**fits | {"slots_version": version}), PLAIN, SLOTS)
        assert f"the plugin for the format slots: expected version 1, found {found}" in str(said)
        assert "cyd/run-3 is slots" in str(said) and "restart it, or have the adapters" in str(said)
        assert rule(said).code is Code.ENGINE_FLAG_MISSING
    said = refused(engine(**fits | {"lora_dtype": "float32"}), PLAIN, SLOTS)
    assert "--lora-dtype: expected bfloat16, found float32. cyd/run-3 holds bfloat16" in str(said)
    assert rule(said).code is Code.ENGINE_FLAG_MISSING


def test_an_adapter_in_slots_says_so_in_record_and_manifest() -> None:
    made = {"format": "slots", "rank": 4, "control": {"rank": 5}, "needs_mixed_format": True, "dtype": "F16"}
    assert needs_of_record("cyd/run-3", made) == EngineNeeds(
        "cyd/run-3", AdapterFormat.SLOTS, 5, mixed_format=True, minimum=None, dtype="F16"
    )
    fields = json.loads((EXAMPLES / "manifest.json").read_text()) | {"format": "slots", "dtype": "F16"}
    needs = needs_of_manifest(Manifest.model_validate(fields))
    assert (needs.format, needs.dtype) == (AdapterFormat.SLOTS, "F16")


def conversion_of(served: ServedClass, format: TargetFormat) -> dict[str, Any]:
    files = (WrittenFile("adapter_model.safetensors", 12, "00" * 32),)
    return conversion_record(ConvertedFiles(files, 4, 3, 8, "F32", format), served)


# https://github.com/vllm-project/vllm/issues/40005: a class that is stacked by nature refuses per-expert adapters.
@pytest.mark.parametrize("format", TargetFormat)
@pytest.mark.parametrize("native", [True, False])
def test_flags_and_minimum_come_from_the_served_class(format: TargetFormat, native: bool) -> None:
    minimum = (
        MinimumVersion("per-expert", "0.11.1", "a#1"),
        MinimumVersion("stacked", "0.22.0", "b#2"),
    )
    served = ServedClass("Some", "model.", native, "some.py", Proof.READ, minimum)
    made = conversion_of(served, format)
    stacked = format is TargetFormat.STACKED
    assert made["is_3d_lora_weight"] is stacked
    assert made["needs_mixed_format"] is (stacked != native)
    told = {"version": "0.22.0", "report": "b#2"} if stacked else {"version": "0.11.1", "report": "a#1"}
    assert made["minimum_vllm"] == told
    unknown = ServedClass("Some", "model.", native, "some.py", Proof.READ, minimum[:1])
    assert (conversion_of(unknown, format)["minimum_vllm"] is None) is stacked


def test_every_minimum_of_a_family_has_a_release_and_a_report() -> None:
    rows = [(served, one) for family in FAMILIES for served in family.served for one in served.minimum]
    assert len(rows) > 20
    for served, one in rows:
        assert one.format in set(TargetFormat), served
        assert re.fullmatch(r"0\.\d+\.\d+", one.version) and not is_older(VERIFIED_VLLM, one.version), served
        assert re.fullmatch(r"[\w-]+/[\w-]+#\d+", one.report), served
        made = conversion_of(served, TargetFormat(one.format))
        assert made["minimum_vllm"] == {"version": one.version, "report": one.report}


# https://github.com/vllm-project/vllm/pull/31534: the same bytes, another reading, and not a word from the engine.
def test_a_vllm_that_read_such_adapters_otherwise_is_too_old() -> None:
    minimum = MinimumVllm(version="0.14.0", report="vllm-project/vllm#31534")
    needs = EngineNeeds("bea/run-2", AdapterFormat.STACKED, 8, mixed_format=False, minimum=minimum)
    error = refused(engine(vllm_version="0.13.0"), PLAIN, needs)
    assert isinstance(error, EngineTooOld)
    assert str(error) == (
        "engine of base tiny: vLLM: expected 0.14.0 or newer for bea/run-2 (stacked), found 0.13.0, which refuses it "
        "or serves it wrong (vllm-project/vllm#31534). Upgrade the engine and retry."
    )
    assert rule(error).code is Code.ENGINE_UNSUPPORTED and rule(error).outcome is Outcome.STOPPED
    for version in ("0.14.0", "0.14.0+cpu", "0.32.0"):
        check_engine(engine(vllm_version=version), BASE, BASE, [PLAIN, needs])


@pytest.mark.parametrize(
    ("version", "older"),
    [
        ("0.13.0", True),
        ("0.9.2", True),
        ("0.14.0", False),
        ("0.14.1", False),
        ("0.32.0", False),
        ("1.0", False),
        ("0.14.0rc2", True),
        ("0.14.0.dev3+gabc", True),
        ("0.14.1rc1.dev301+g04c2a8dea", False),
        ("0.14.0+cu129", False),
        ("0.14.0.post1", False),
        ("dev", True),
    ],
)
def test_versions_compare_as_releases(version: str, older: bool) -> None:
    assert is_older(version, "0.14.0") is older


# https://github.com/vllm-project/vllm/issues/2847: the default is 16, and 48 is no legal setting.
@pytest.mark.parametrize(("rank", "limit", "legal"), [(48, 16, 64), (9, 8, 16), (512, 320, 512)])
def test_a_rank_above_the_engines_names_the_smallest_legal_setting(rank: int, limit: int, legal: int) -> None:
    needs = EngineNeeds("bea/run-2", AdapterFormat.PER_EXPERT, rank, mixed_format=False, minimum=None)
    said = str(refused(engine(max_lora_rank=limit), PLAIN, needs, PLAIN))
    assert f"--max-lora-rank: expected at least {rank}, found {limit}. bea/run-2 needs it." in said
    assert said.endswith(f"Restart it with --max-lora-rank {legal}, and retry.")


@pytest.mark.parametrize("module", ["self_attn.q_proj", "mlp.gate"], ids=["attention", "router"])
def test_the_largest_rank_of_any_class_decides(tmp_path: Path, module: str) -> None:
    """Experts of rank 3 beside one module of rank 20: the engine's setting is for all of them."""
    wide = {name: factor for name, factor in attention(rank=20).items() if f"{module}.lora_" in name}
    assert len(wide) == 4
    stated: dict[str, Any] = {"lora_B_layout": "rank_major", "rank_pattern": {module: 20}}
    source = save_adapter(tmp_path / "trained", {**encode(Logical()), **attention(), **wide}, **stated)
    base = KnownBase(make_base())
    made = convert_directory(
        source, tmp_path / "made", base, packing=None, format="per-expert", progress=None
    )
    assert (made["rank"], made["max_lora_rank"]) == (20, 32)
    needs = needs_of_record("fir/run-1", made | {"control": {"rank": 3}})
    said = str(refused(engine(max_lora_rank=16), needs))
    assert "--max-lora-rank: expected at least 20, found 16" in said and "--max-lora-rank 32" in said
    check_engine(engine(max_lora_rank=32), BASE, BASE, [needs])


# https://github.com/vllm-project/vllm/pull/42242: vLLM trusts the declaration, and takes a wrong one without a word.
@pytest.mark.parametrize(("format", "stacked"), [("per-expert", False), ("stacked", True)])
def test_the_declaration_is_what_the_files_are(tmp_path: Path, format: str, stacked: bool) -> None:
    tensors = {**encode(Logical()), **attention()}
    source = save_adapter(tmp_path / "trained", tensors, lora_B_layout="rank_major")
    base = KnownBase(make_base())
    made = convert_directory(source, tmp_path / "made", base, packing=None, format=format, progress=None)
    names = set(load(tmp_path / "made"))
    single = {name for name in names if re.search(r"\.experts\.\d+\.", name)}
    whole = {name for name in names if re.search(r"\.experts\.(base_layer\.)?lora_", name)}
    assert made["is_3d_lora_weight"] is stacked and made["needs_mixed_format"] is stacked
    assert bool(whole) is stacked and bool(single) is not stacked


def test_both_forms_in_one_file_are_refused(desk: Desk) -> None:
    one = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_{}.weight"
    mixed = {one.format("A"): torch.ones(3, 10), one.format("B"): torch.ones(7, 3)}
    tensors = {**encode(Logical()), **attention(), **mixed}
    desk.heldout("fir")
    desk.submit("fir", save_adapter(desk.folder / "trained" / "fir", tensors, lora_B_layout="rank_major"))
    state = desk.run("fir")
    assert state.name == "Quarantined: unexpected_tensor" and desk.engine.calls == []
    verdict = desk.ledger("fir").verdict
    assert verdict is not None and "experts.0.gate_proj" in str(verdict.result["reason"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"enable_lora": False}, "--enable-lora: expected on, found off"),
        ({"prefix_caching": True}, "--no-enable-prefix-caching: expected given, found missing"),
        ({"served_model": ("other",)}, "--served-model-name: expected tiny, found other"),
        ({"cpu_moe_plugin": False}, "the plugin for expert LoRA on CPU: expected active, found not loaded"),
    ],
)
def test_other_settings_are_named(changes: dict[str, Any], says: str) -> None:
    assert f"engine of base tiny: {says}. Restart it with that setting, and retry." in str(
        refused(engine(**changes), PLAIN)
    )


def test_a_manifest_of_before_reads_as_one_without_a_minimum() -> None:
    fields = json.loads((EXAMPLES / "manifest.json").read_text())
    assert needs_of_manifest(Manifest.model_validate(fields)).minimum == MinimumVllm(**fields["minimum_vllm"])
    del fields["minimum_vllm"]
    old = Manifest.model_validate(fields)
    assert old.minimum_vllm is None and needs_of_manifest(old).minimum is None
    assert json.loads(old.model_dump_json())["minimum_vllm"] is None


# Faults of the engine that every adapter meets. The messages are vLLM's own, word for word where it is quoted.
MESSAGES = [
    (
        "LoRA adapter 3 contains fused 3D MoE weights for 'model.layers.0.mlp.experts', but the model uses a 2D MoE "
        "LoRA wrapper. Start the engine with enable_mixed_moe_lora_format=True (--enable-mixed-moe-lora-format) and "
        "set is_3d_lora_weight=True on the LoRA request.",
        EngineFlagMissing,
        "--target-format per-expert",
    ),
    # https://github.com/vllm-project/vllm/issues/38520
    (
        "While loading /adapters/2222, expected target modules in {'qkv_proj', 'experts', 'o_proj'} but received "
        "['model.layers.0.mlp.experts.0.down_proj']. Please verify that the loaded LoRA module is correct",
        EngineFlagMissing,
        "--target-format stacked",
    ),
    # https://github.com/vllm-project/vllm/issues/2847
    ("LoRA rank 48 is greater than max_lora_rank 16.", EngineFlagMissing, "max_lora_rank of this base"),
    # Of the format slots: our plugin's messages, and what vLLM says of such a folder by itself.
    (
        "adapter-roster: bea@2222 is not loaded: experts per projection: expected factors for each expert, found "
        "--enable-moe-shared-loras. Start the server without that.",
        EngineFlagMissing,
        "without --enable-moe-shared-loras",
    ),
    (
        "adapter-roster: bea@2222 is not loaded: experts per projection: expected a server that takes them, found a "
        "model class that takes stacked experts alone, without mixed mode. Start the server with "
        "--enable-mixed-moe-lora-format.",
        EngineFlagMissing,
        "--target-format stacked",
    ),
    (
        "adapter-roster: bea@2222 is not loaded: the LoRA dtype: expected the server's, float32, found bfloat16 in the "
        "file. Start the server with --lora-dtype bfloat16, or convert the adapter for float32.",
        EngineFlagMissing,
        "--lora-dtype",
    ),
    (
        "/adapters/2222 doesn't contain tensors",
        EngineUnsupported,
        "Install adapter-roster in its environment",
    ),
    ("LoRA is not enabled. Use --enable-lora to enable LoRA.", EngineFlagMissing, "--enable-lora"),
    # https://github.com/vllm-project/vllm-omni/issues/5169, https://github.com/vllm-project/vllm/pull/47088
    (
        'File "vllm/lora/layers/fused_moe.py", line 316\n    assert isinstance(lora_a, list)\nAssertionError',
        EngineUnsupported,
        "--enable-mixed-moe-lora-format",
    ),
    # https://github.com/vllm-project/vllm/pull/43254, issues/53470, pull/46247
    (
        "AttributeError: To support LoRA for MoE model, 'get_expert_mapping' must be implemented",
        EngineUnsupported,
        "vLLM 0.25 or newer",
    ),
    # https://github.com/vllm-project/vllm/issues/32736
    ("ValueError: MiniMaxM2ForCausalLM does not support LoRA yet.", EngineUnsupported, "docs/families.md"),
    # https://github.com/vllm-project/vllm-omni/issues/5169
    ("ValueError: model_config.architectures must be defined", EngineUnsupported, "`architectures`"),
]


@pytest.mark.parametrize(("message", "kind", "advice"), MESSAGES, ids=[m[0][-50:] for m in MESSAGES])
@pytest.mark.parametrize("health", [200, 503], ids=["lives", "died of it"])
def test_a_load_refused_for_the_engines_sake_is_not_the_adapters_fault(
    message: str, kind: type[EngineError], advice: str, health: int
) -> None:
    said = f"Call to add_lora method failed: {message}"
    script = {"GET /health": [Reply(health)], LOAD: [Reply(500, {"error": {"message": said, "code": 500}})]}
    with (
        ScriptedEngine(script) as server,
        Engine(server.url, timeout_s=1) as client,
        pytest.raises(kind) as caught,
    ):
        client.load("bea@2222", "/adapters/2222", is_3d=False)
    text = str(caught.value)
    assert text.startswith("bea@2222: expected the engine to load it, found: ") and message in text
    assert advice in text and "not the adapter" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    code = Code.ENGINE_FLAG_MISSING if kind is EngineFlagMissing else Code.ENGINE_UNSUPPORTED
    assert rule(caught.value).code is code and rule(caught.value).outcome is Outcome.STOPPED


def test_every_known_fault_is_met_by_a_message() -> None:
    met = {found.fault.says for message, _, _ in MESSAGES if (found := find_fault(message)) is not None}
    assert met == {fault.says for fault in FAULTS}


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Call to add_lora method failed:",
        # A wrong name, and an expert that the base does not have: those are the adapter's.
        "While loading /a, expected target modules in {'qkv_proj', 'experts', 'o_proj'} but received ['model.foo']. "
        "Please verify that the loaded LoRA module is correct",
        "While loading /a, expected target modules in {'experts.0.up_proj', 'experts', 'experts.1.up_proj'} but "
        "received ['model.layers.0.mlp.experts.2.up_proj']. Please verify that the loaded LoRA module is correct",
        "While loading /a, expected target modules in {'experts', 'experts.0.up_proj'} but received "
        "['model.layers.0.mlp.experts.2.up_proj']. Please verify that the loaded LoRA module is correct",
        "vLLM does not support LoRA bias (lora_bias).",
    ],
)
def test_what_is_the_adapters_own_stays_so(message: str) -> None:
    assert find_fault(message) is None
    script = {**HEALTHY, LOAD: [Reply(500, {"error": {"message": message, "code": 500}})]}
    with (
        ScriptedEngine(script) as server,
        Engine(server.url, timeout_s=1) as client,
        pytest.raises(EngineRefused),
    ):
        client.load("bea@2222", "/adapters/2222", is_3d=False)


def test_a_fault_of_the_engine_stops_the_run_and_marks_nobody(desk: Desk) -> None:
    def cannot(name: str) -> EngineUnsupported:
        return EngineUnsupported(name, "get_expert_mapping must be implemented.", "it cannot", "Upgrade it")

    desk.engine.on_load = OnLoad("fir@", cannot)
    assert desk.ready("fir").name == "Stopped: engine_unsupported"
    assert desk.ledger("fir").verdict is None
    desk.engine.on_load = {}
    assert desk.run("fir").name == "Ready", "after the upgrade"


def test_nothing_is_loaded_on_a_vllm_that_is_too_old(desk: Desk) -> None:
    """The first run's adapter is an opponent of the second's; each names its own minimum."""
    info = json.loads(desk.store.get(engine_key(BASE)).body) | {"vllm_version": "0.11.0"}
    desk.store.put(engine_key(BASE), json.dumps(info).encode())
    state = desk.ready("alder")
    converted = next(step for step in desk.ledger("alder").steps if step.kind is StepKind.CONVERTED)
    minimum: Any = converted.result["minimum_vllm"]
    assert state.name == "Stopped: engine_unsupported"
    assert f"expected {minimum['version']} or newer for alder/run-1 (per-expert), found 0.11.0" in str(
        state.message
    )
    assert minimum["report"] in str(state.message)
    assert desk.engine.calls == []


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def narrowed(tensors: Tensors) -> Tensors:
    name = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"
    return tensors | {name: tensors[name][:, :-2].contiguous()}


# vLLM loads each of these and answers 200: tests/test_silent_real.py shows it, and what it then serves.
@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        # https://github.com/vllm-project/vllm/issues/34186
        (renamed("model.model.", "model.language_model.model."), "unexpected_tensor", "language_model.model"),
        (renamed("layers.1.", "layers.7."), "base_mismatch", "layers.7."),
        (narrowed, "base_mismatch", "layers.1.mlp.experts.base_layer.lora_A"),
        # https://github.com/vllm-project/vllm/issues/41754: the attention alone would still change the output.
        (renamed("mlp.experts.", "experts."), "unexpected_tensor", "layers.0.experts."),
    ],
    ids=["prefix", "layers", "narrow", "experts"],
)
def test_what_vllm_takes_in_silence_never_reaches_it(
    desk: Desk, spoil: Callable[[Tensors], Tensors], code: str, says: str
) -> None:
    tensors = {**encode(Logical()), **attention()}
    folder = save_adapter(desk.folder / "trained" / "fir", spoil(tensors), lora_B_layout="rank_major")
    desk.heldout("fir")
    desk.submit("fir", folder)
    assert desk.run("fir").name == f"Quarantined: {code}"
    verdict = desk.ledger("fir").verdict
    assert verdict is not None and says in str(verdict.result["reason"])
    assert desk.engine.calls == []


# https://github.com/vllm-project/vllm/issues/55193
def test_a_filter_on_the_server_stops_the_run_before_anything_is_loaded(desk: Desk) -> None:
    info = engine()
    kept = tuple(name for name in info.lora_modules if not name.endswith(".experts"))
    publish_engine(
        desk.store,
        info.model_copy(update={"lora_modules": kept, "expert_modules": {}, "expert_projections": ()}),
    )
    state = desk.ready("fir")
    assert state.name == "Stopped: engine_flag_missing"
    assert "--lora-target-modules: expected every module that the adapter has" in str(state.message)
    assert "of routed_experts" in str(state.message)
    assert desk.engine.calls == [] and desk.ledger("fir").verdict is None
    publish_engine(desk.store, info)
    assert desk.run("fir").name == "Ready"


# https://github.com/vllm-project/vllm/issues/31534 and https://github.com/vllm-project/vllm/issues/33424
def test_another_vllm_is_another_measurement(desk: Desk) -> None:
    """The same bytes, read by another vLLM: what one measured is not taken for what the other would."""
    desk.ready("alder")
    before = [step for step in desk.ledger("alder").steps if step.kind is StepKind.SCORED]
    calls = len(desk.engine.calls)
    assert desk.run("alder").name == "Ready" and len(desk.engine.calls) == calls, "nothing to do"
    info, _ = read_document(desk.store, engine_key(BASE), EngineInfo)
    publish_engine(desk.store, info.model_copy(update={"vllm_version": "0.33.0"}))
    assert desk.run("alder").name == "Ready"
    scored = [step for step in desk.ledger("alder").steps if step.kind is StepKind.SCORED]
    assert len(desk.engine.calls) > calls and len(scored) == len(before) + 1
    assert scored[-1].step_key != before[-1].step_key
    assert scored[-1].result["engine_id"] != before[-1].result["engine_id"]
    assert scored[-1].result["measure_id"] == before[-1].result["measure_id"]
    verdict = desk.ledger("alder").verdict
    assert verdict is not None and verdict.inputs["scored"] == scored[-1].step_key


# https://github.com/vllm-project/vllm/issues/31326 and https://github.com/vllm-project/vllm/issues/20149
def test_two_revisions_of_an_author_never_share_a_name_or_a_path(desk: Desk) -> None:
    seen: dict[str, set[str]] = {}

    def bits(name: str, path: str) -> float:
        seen.setdefault(name, set()).add(path)
        return 2.39 if "~control@" in name else 2.1

    desk.engine.adapters = bits
    desk.heldout("alder")
    for run, seed in (("run-1", 5), ("run-2", 6)):
        desk.submit("alder", desk.adapter("alder", seed=seed), run=run)
        assert desk.run("alder", run).name == "Ready"
    own = {name for name in seen if name.startswith("alder@")}
    assert len(own) == 2, "two names for two revisions"
    paths = [path for name in own for path in seen[name]]
    assert len(paths) == len(set(paths)) == 2, "and two paths"
    for name in own:
        (path,) = seen[name]
        assert Path(path).name.startswith(name.removeprefix("alder@")), "both from the bytes"


def test_the_end_of_an_engine_that_died_at_start_leads_to_its_cause(tmp_path: Path) -> None:
    """vLLM prints the cause, and after it the tracebacks of every process that waited for the first."""
    said = "AttributeError: To support LoRA for MoE model, 'get_expert_mapping' must be implemented"
    script = (
        f'echo "ERROR [core.py:1129] {said}"; for n in $(seq 1 99); do echo "  File line $n"; done; exit 1'
    )
    spec = child("engine-tiny", tmp_path, *shell(script), ready=lambda: False, explain=explain_log)
    with pytest.raises(ChildFailedError) as caught:
        Supervisor([spec], announce=lambda line: None, mark=str(tmp_path)).run_until(threading.Event())
    text = str(caught.value)
    assert "File line 99\nIts log says: ERROR [core.py:1129] AttributeError: To support LoRA" in text
    assert text.endswith("Use vLLM 0.25 or newer, which finds the experts of every class by itself.")
