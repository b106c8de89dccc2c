"""The `roster` command, in process against a store in memory; as a real program where that matters."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import catalog_builders
import ledger_builders
import pytest
import torch
from cli_builders import PROGRAM, Ran, Roster, clean_environment, run_in_terminal, run_program
from lora_builders import Logical, attention, base_fields, encode, find_weights, save_adapter, short_id
from safetensors.torch import save_file
from scripted_scorer import ScriptedScorer
from store_builders import failing, memory_store, with_faults

import flows.cli.progress
from flows.cli.errors import explain
from flows.embedded import EmbeddedFailedError, StopTimedOutError
from flows.embedded_plan import StoreProgramMissingError
from flows.overview import PrefectView
from flows.ports import NoFreePortError
from flows.services import (
    SERVICES_FILE,
    HomeBusyError,
    HomeLock,
    PrefectService,
    Services,
    StateUnreadableError,
    StoreService,
    engine_json_path,
    this_process,
    utc_now,
    write_document,
)
from flows.supervisor import ChildFailedError
from flows.up import EngineIncomplete
from roster.serving_engine import EngineInfo
from storage.bases import read_base
from storage.errors import StoreUnavailable
from storage.qualifications import Qualification
from storage.s3 import S3Store
from storage.uploads import read_upload
from tasks.matrix_plan import Plan
from tasks.qualification import ServedBase

DOCS = Path(__file__).parent.parent / "docs" / "cli.md"
INSPECT_KEYS = {
    *("family", "base", "layers", "experts", "ranks", "orientation", "packing", "pairs", "format"),
    *("classes", "adapter_digest", "output_digest"),
}
COMMANDS = (
    *("submit", "base add", "heldout add", "inspect", "convert", "check", "ready", "show", "why", "sql"),
    *("status", "up", "down", "sync", "rebuild", "policy set", "policy show", "policy clear"),
    *("migrate", "qualify", "score", "matrix", "rejudge", "retry", "recheck", "metrics"),
    *("history", "waiting", "report", "export", "push", "plan", "hold", "release", "retire", "pin", "unpin"),
    *("purge", "gc", "backup", "restore"),
)
EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
EXPLAIN_THEMSELVES = (
    *("ready", "show", "why", "history", "waiting", "status", "down", "sync", "rebuild", "policy show"),
    *("release", "unpin"),
)


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as store:
        yield store


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a trained adapter, its base, its held-out text; no settings, a home of its own."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("ROSTER_", "PREFECT_API")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ROSTER_HOME", str(tmp_path / "home"))
    tensors = {**encode(Logical(seed=3)), **attention()}
    save_adapter(tmp_path / "trained" / "ash", tensors, lora_B_layout="rank_major")
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(base_fields()))
    save_file({"weight": torch.arange(6.0)}, model / "model.safetensors")
    (tmp_path / "heldout").mkdir()
    units = ({"id": f"u{n}", "text": f"text number {n} of ash"} for n in range(25))
    (tmp_path / "heldout" / "ash.jsonl").write_text("".join(json.dumps(unit) + "\n" for unit in units))
    return tmp_path


@pytest.fixture
def offline(desk: Path, capsys: pytest.CaptureFixture[str]) -> Roster:
    """The command where no store is known."""
    return Roster(capsys, desk / "home")


@pytest.fixture
def roster(offline: Roster, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> Roster:
    """The command with the store in memory."""
    monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
    monkeypatch.setattr("flows.connect.open_store_hurried", lambda settings: store)
    monkeypatch.setattr("flows.up.open_store", lambda settings: store)
    return offline


def keys(store: S3Store, prefix: str = "") -> list[str]:
    return [found.key for found in store.list_objects(prefix)]


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def digest_of(directory: Path) -> str:
    """The contract's words as a loop: sha256 over the lines `<sha256> <file name>`, sorted by name."""
    lines = ""
    for name in ("adapter_config.json", find_weights(directory).name):
        lines += f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()} {name}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


# inspect, convert, check


def test_inspect_tells_all_of_the_contract(offline: Roster, desk: Path) -> None:
    found = offline("inspect", "trained/ash", "--base", "models/tiny", "--json").document
    assert set(found) >= INSPECT_KEYS
    assert (found["family"], found["layers"], found["experts"], found["pairs"]) == ("qwen3_moe", 2, 4, 24)
    assert (found["orientation"], found["format"]) == ("standard", "stacked")
    assert found["adapter_digest"] == digest_of(desk / "trained" / "ash")
    assert set(found["packing"]) == {"gate_up_proj", "down_proj"}
    for decision in found["packing"].values():
        assert set(decision) == {"value", "decided_by", "evidence"}
        assert all(set(item) == {"source", "says", "strength", "detail"} for item in decision["evidence"])
    assert found["classes"]["routed_experts"] == {"keys": 8, "trained_fraction": 1.0}
    assert found["ranks"] == {"routed_experts": 3, "router": 3, "attention": 3}


def test_inspecting_headers_alone_leaves_digests_open(offline: Roster) -> None:
    found = offline("inspect", "trained/ash", "--base", "models/tiny", "--header-only", "--json").document
    assert found["adapter_digest"] is None
    assert found["output_digest"] is None
    assert found["classes"]["routed_experts"] == {"keys": 8, "trained_fraction": None}


@pytest.mark.real
def test_headers_alone_wait_for_no_heavy_library(desk: Path) -> None:
    """They have to answer while somebody waits: half a second for the largest adapter there is."""
    script = """
import sys
from flows.cli.app import run
heavy = {"torch", "numpy", "prefect", "boto3", "duckdb", "httpx", "pydantic_settings"}
inspect = ["inspect", "trained/ash", "--base", "models/tiny"]
for command in (["--help"], [*inspect, "--header-only"], inspect):
    print(run(command), sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=desk, capture_output=True, text=True, check=True)
    found = [line for line in ran.stderr.splitlines() if line.startswith("0 [")]
    assert found == ["0 []", "0 []", "0 ['numpy', 'torch']"], ran.stderr


def test_inspect_for_people_keeps_every_line_whole(offline: Roster) -> None:
    ran = offline("inspect", "trained/ash", "--base", "models/tiny", "--packing", "grouped_by_expert")
    assert (
        "qwen3_moe: 2 layers, 4 experts, stacked, orientation standard, 24 pairs when converted\n" in ran.out
    )
    assert "gate_up_proj: packing grouped_by_expert, decided by forced\n" in ran.out
    assert re.search(r"^  forced \(forced\) says grouped_by_expert: \S.*$", ran.out, re.MULTILINE)
    assert re.search(r"^routed_experts +8 +3 +1\.0 *$", ran.out, re.MULTILINE)


def test_the_current_directory_has_a_name(
    offline: Roster, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (desk / "trained" / "ash" / "adapter_config.json").unlink()
    monkeypatch.chdir(desk / "trained" / "ash")
    assert offline("inspect", ".", "--base", "../../models/tiny").err.startswith("roster: ash: ")


def test_what_training_json_does_not_know_is_told(offline: Roster, desk: Path) -> None:
    (desk / "trained" / "ash" / "training.json").write_text('{"lora_layout": "grouped_by_expert"}')
    ran = offline("inspect", "trained/ash", "--base", "models/tiny", "--json")
    warnings = ran.document["warnings"]
    assert any("training.json: lora_layout is no key we know, ignored" in warning for warning in warnings)
    assert ran.document["packing"]["down_proj"]["decided_by"] == "marker"


def test_convert_then_check(offline: Roster, desk: Path) -> None:
    found = offline("inspect", "trained/ash", "--base", "models/tiny", "--json").document
    made = offline("convert", "trained/ash", "serving/ash", "--base", "models/tiny", "--json").document
    assert set(made) >= INSPECT_KEYS
    assert found["output_digest"] == made["output_digest"], "inspect says what convert will write"
    assert made["format"] == "per-expert"
    assert made["adapter_digest"] == digest_of(desk / "trained" / "ash")
    assert made["output_digest"] == digest_of(desk / "serving" / "ash")
    passed = offline("check", "trained/ash", "serving/ash", "--base", "models/tiny", "--json")
    assert (passed.code, passed.document["passed"]) == (0, True)
    assert {check["name"] for check in passed.document["checks"]} >= {"coverage", "round_trip"}

    again = offline("convert", "trained/ash", "serving/ash", "--base", "models/tiny", "--json")
    assert again.code == 2
    assert "serving/ash exists and is not empty. Remove it or name another folder" in again.document["error"]


def test_check_fails_on_another_reading(offline: Roster) -> None:
    forced = ("--base", "models/tiny", "--packing", "grouped_by_expert")
    assert offline("convert", "trained/ash", "serving/ash", *forced).code == 0
    assert offline("check", "trained/ash", "serving/ash", *forced).code == 0
    ran = offline("check", "trained/ash", "serving/ash", "--base", "models/tiny")
    assert ran.code == 1
    assert re.search(r"^FAILED +round_trip ", ran.out, re.MULTILINE)


def test_a_stacked_adapter_is_made_and_checked_as_what_it_is(offline: Roster, desk: Path) -> None:
    to = ("stacked/ash", "--base", "models/tiny")
    made = offline("convert", "trained/ash", *to, "--format", "stacked", "--json").document
    assert (made["format"], made["is_3d_lora_weight"], made["needs_mixed_format"]) == ("stacked", True, True)
    assert made["output_digest"] == digest_of(desk / "stacked" / "ash")
    assert offline("check", "trained/ash", *to, "--json").document["passed"] is True
    found = offline("inspect", *to, "--json").document
    assert found["format"] == "stacked"
    assert {one["decided_by"] for one in found["packing"].values()} == {"marker"}
    offline("convert", "stacked/ash", "serving/ash", "--base", "models/tiny")
    straight = offline("inspect", "trained/ash", "--base", "models/tiny", "--json").document
    assert straight["output_digest"] == digest_of(desk / "serving" / "ash"), "the same adapter by another way"


def test_slots_are_made_and_checked_as_what_they_are(offline: Roster, desk: Path) -> None:
    to = ("slots/ash", "--base", "models/tiny")
    made = offline("convert", "trained/ash", *to, "--format", "slots", "--json").document
    assert (made["format"], made["is_3d_lora_weight"], made["needs_mixed_format"]) == ("slots", False, False)
    assert made["dtype"] == "BF16" and made["minimum_vllm"] is not None
    assert made["output_digest"] == digest_of(desk / "slots" / "ash")
    assert {file["name"] for file in made["files"]} == {"adapter_config.json", "adapter_slots.safetensors"}
    passed = offline("check", "trained/ash", *to, "--depth", "full", "--json")
    assert (passed.code, passed.document["passed"]) == (0, True)
    resolves = next(one for one in passed.document["checks"] if one["name"] == "resolves")
    assert resolves["figures"]["unresolved"] == 0
    ran = offline("inspect", *to)
    assert ran.code != 0 and "adapter_slots.safetensors, which a conversion writes" in ran.err


def test_base_add_keeps_the_engines_dtype_until_another_is_given(roster: Roster, store: S3Store) -> None:
    def registered(*options: str) -> str | None:
        assert roster("base", "add", "tiny", "--config", "models/tiny", *options).code == 0
        return read_base(store, "tiny").document.engine.dtype

    assert registered() is None
    assert registered("--engine-dtype", "float16") == "float16"
    assert registered("--target-format", "slots") == "float16"
    assert registered("--engine-dtype", "auto") == "auto"


def test_slots_of_a_registered_base_are_in_its_engines_dtype(roster: Roster, desk: Path) -> None:
    roster("base", "add", "tiny", "--config", "models/tiny", "--engine-dtype", "float16")
    made = roster("convert", "trained/ash", "slots/ash", "--base", "tiny", "--format", "slots", "--json")
    assert made.document["dtype"] == "F16"
    assert roster("check", "trained/ash", "slots/ash", "--base", "tiny").code == 0


def test_what_nothing_tells_is_said_to_be_open(offline: Roster, desk: Path) -> None:
    save_adapter(desk / "trained" / "ash", {**encode(Logical(seed=3)), **attention()})
    found = offline("inspect", "trained/ash", "--base", "models/tiny", "--json").document
    assert found["undecided"] == ["gate_up_proj", "down_proj"]
    for decision in found["packing"].values():
        assert (decision["value"], decision["decided_by"]) == ("rank_major", "provisional")
    out = offline("inspect", "trained/ash", "--base", "models/tiny").out
    assert re.search(r"^  tensors \(none\) tells nothing: \S", out, re.MULTILINE)


def test_a_per_expert_adapter_has_no_packing(offline: Roster, desk: Path) -> None:
    offline("convert", "trained/ash", "serving/ash", "--base", "models/tiny")
    found = offline("inspect", "serving/ash", "--base", "models/tiny", "--json").document
    assert (found["format"], found["packing"], found["undecided"]) == ("per-expert", {}, [])
    assert found["orientation"] == "standard" and found["output_digest"] == found["adapter_digest"]


def test_a_check_reads_as_one_table(offline: Roster) -> None:
    offline("convert", "trained/ash", "serving/ash", "--base", "models/tiny")
    ran = offline("check", "trained/ash", "serving/ash", "--base", "models/tiny", "--depth", "full")
    assert ran.code == 0
    assert re.match(r"result +check +about +found +numbers *$", ran.out.splitlines()[0])
    assert re.search(
        r"^ok +round_trip +execution +28 of 28 source tensors found again bit for bit ", ran.out, re.MULTILINE
    )
    assert re.search(
        r"^projection +deltas +differing +median error +99 % +largest +worst *$", ran.out, re.MULTILINE
    )
    assert re.search(r"^down_proj +8 +0 +\S+ +\S+ +\S+ +(layer \d expert \d|-) *$", ran.out, re.MULTILINE)
    assert "not made at depth full: merged\n" in ran.out
    assert (
        ran.out.rstrip()
        .splitlines()[-1]
        .startswith("Execution: the output is the source as it was read, to the last bit. ")
    )
    assert "\x1b" not in ran.out, "piped output has no colours"


def test_check_says_what_a_quick_one_leaves_out(offline: Roster) -> None:
    offline("convert", "trained/ash", "serving/ash", "--base", "models/tiny")
    quick = ("check", "trained/ash", "serving/ash", "--base", "models/tiny", "--depth", "quick")
    found = offline(*quick, "--json").document
    assert (found["passed"], found["depth"], found["not_made"]) == (
        True,
        "quick",
        ["in_range", "round_trip", "merged"],
    )
    assert not {"in_range", "round_trip"} & {one["name"] for one in found["checks"]}
    out = offline(*quick).out
    assert re.search(
        r"^probes: seed \d+; a damage of one delta by 0\.001 of its norm or more would have been missed with a "
        r"probability of at most \S+$",
        out,
        re.MULTILINE,
    )


def test_check_wants_what_belongs_together(offline: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    offline("convert", "trained/ash", "serving/ash", "--base", "models/tiny")
    check = ("check", "trained/ash", "serving/ash", "--base", "models/tiny")
    for options, said in (
        (("--device", "cpu"), "give --depth full too"),
        (("--merged", "models/tiny"), "--merged and --weights go together"),
        (("--weights", "models/tiny"), "--merged and --weights go together"),
    ):
        ran = offline(*check, *options)
        assert ran.code == 2
        assert said in ran.err and ran.err.endswith("See: roster check --help\n")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = offline(*check, "--depth", "full", "--device", "cuda", "--json")
    assert (ran.code, "torch sees no cuda device here" in ran.document["error"]) == (2, True)


def test_check_names_the_directory_that_is_at_fault(offline: Roster, desk: Path) -> None:
    offline("convert", "trained/ash", "serving/ash", "--base", "models/tiny")
    cut_short(desk / "serving" / "ash")
    ran = offline("check", "trained/ash", "serving/ash", "--base", "models/tiny")
    assert ran.code == 1
    assert ran.err.startswith("roster: serving/ash: adapter_model.safetensors: found ")


def test_a_registered_base_is_found_by_name(roster: Roster) -> None:
    assert roster("base", "add", "tiny", "--config", "models/tiny").code == 0
    found = roster("inspect", "trained/ash", "--base", "tiny", "--json").document
    assert (found["base"], found["pairs"]) == ("tiny", 24)


def test_the_policy_of_a_registered_base_counts_as_in_the_pipeline(
    roster: Roster, store: S3Store, desk: Path
) -> None:
    save_adapter(desk / "trained" / "ash", {**encode(Logical(seed=3)), **attention()})
    roster("base", "add", "tiny", "--config", "models/tiny")
    roster("policy", "set", "grouped_by_expert", "--base", "tiny", "--why", "our trainer is old")
    for base, expected in (
        ("tiny", ("grouped_by_expert", "policy")),
        ("models/tiny", ("rank_major", "provisional")),
    ):
        packing = roster("inspect", "trained/ash", "--base", base, "--json").document["packing"]
        assert {(one["value"], one["decided_by"]) for one in packing.values()} == {expected}
    roster("convert", "trained/ash", "serving/ash", "--base", "tiny")
    assert roster("check", "trained/ash", "serving/ash", "--base", "tiny").code == 0
    assert roster("check", "trained/ash", "serving/ash", "--base", "models/tiny").code == 1


def cut_short(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def without_config(adapter: Path) -> None:
    (adapter / "adapter_config.json").unlink()


def without_a_factor(adapter: Path) -> None:
    tensors = encode(Logical(seed=3))
    del tensors["base_model.model.model.layers.1.mlp.experts.lora_B.weight"]
    save_adapter(adapter, tensors)


def with_nan(adapter: Path) -> None:
    tensors = encode(Logical(seed=3))
    tensors["base_model.model.model.layers.1.mlp.experts.lora_A.weight"][5, 2] = float("nan")
    save_adapter(adapter, tensors)


def of_another_base(adapter: Path) -> None:
    (adapter.parent.parent / "models" / "tiny" / "config.json").write_text(
        json.dumps(base_fields(hidden_size=12))
    )


@pytest.mark.parametrize("command", ["inspect", "convert"])
@pytest.mark.parametrize(
    ("spoil", "code", "facts"),
    [
        (without_config, "corrupt_or_partial", ["adapter_config.json", "no such file", "whole folder"]),
        (
            cut_short,
            "corrupt_or_partial",
            ["adapter_model.safetensors", r"found \d+ bytes; expected \d+ bytes", "cut short", "again"],
        ),
        (of_another_base, "base_mismatch", ["lora_A", "10", "12", r"trained on another base model\?"]),
        (without_a_factor, "missing_tensor", [r"layers\.1\.mlp\.experts", "lora_B", "Upload"]),
        (with_nan, "non_finite", [r"layers\.1\.mlp\.experts\.lora_A", "1 ", "NaN", "train again"]),
    ],
    ids=short_id,
)
def test_a_bad_adapter_is_refused_and_nothing_is_written(
    offline: Roster, desk: Path, command: str, spoil: Callable[[Path], None], code: str, facts: list[str]
) -> None:
    spoil(desk / "trained" / "ash")
    before = everything(desk)
    destination = ["serving/ash"] if command == "convert" else []
    ran = offline(command, "trained/ash", *destination, "--base", "models/tiny", "--json")
    assert ran.code == 1
    refused = ran.document["refused"]
    assert set(refused) == {"code", "message", "where", "all"}
    assert (refused["code"], refused["all"]) == (code, [code])
    assert refused["message"].startswith("ash: ")
    for fact in facts:
        assert re.search(fact, refused["message"]), (fact, refused["message"])
    assert ran.err == f"roster: {refused['message']}\n"
    assert everything(desk) == before


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_all_that_is_wrong_is_told_a_line_each(offline: Roster, desk: Path, command: str) -> None:
    tensors = encode(Logical(seed=3)) | {
        f"base_model.model.lm_head.lora_{factor}.weight": torch.ones(3, 7) for factor in "AB"
    }
    tensors["base_model.model.model.layers.1.mlp.experts.lora_A.weight"][5, 2] = float("nan")
    save_adapter(desk / "trained" / "ash", tensors, bias="all", use_dora=True, lora_B_layout="rank_major")
    destination = ["serving/ash"] if command == "convert" else []
    arguments = (command, "trained/ash", *destination, "--base", "models/tiny")
    ran = offline(*arguments, "--json")
    refused = ran.document["refused"]
    assert (ran.code, refused["code"]) == (1, "unsupported_config")
    assert (refused["where"], refused["all"]) == (
        "adapter_config.json: bias",
        ["unsupported_config", "non_finite"],
    )
    shown = offline(*arguments)
    assert (shown.code, shown.out, shown.err) == (1, "", ran.err)
    lines = shown.err.splitlines()
    assert lines[0] == f"roster: {refused['message']}"
    places = [
        "adapter_config.json: bias",
        "adapter_config.json: use_dora",
        "lm_head",
        "layers.1.mlp.experts.lora_A",
    ]
    assert len(lines) == len(places)
    for line, place in zip(lines, places, strict=True):
        assert re.fullmatch(rf"roster: ash: \S*{place}\S*: found .+; expected .+\. .+\.", line), line
    assert "(the first of 2)" in lines[2]


@pytest.mark.parametrize(
    ("named", "facts"),
    [
        ("heldout/ash.jsonl", ["heldout/ash.jsonl", "JSON", "config.json"]),
        ("trained/ash", ["trained/ash/config.json", "no such file"]),
        ("models/nosuch", ["models/nosuch: expected a base's config.json, found no such file"]),
        ("nosuch", ["nosuch: expected a base's config.json or a registered base", "`roster up`"]),
    ],
)
def test_a_base_that_is_none_is_wrong_usage(offline: Roster, named: str, facts: list[str]) -> None:
    ran = offline("convert", "trained/ash", "serving/ash", "--base", named, "--json")
    assert ran.code == 2
    assert all(fact in ran.document["error"] for fact in facts), ran.err
    assert not Path("serving").exists()


def test_an_unregistered_name_lists_those_that_are(roster: Roster) -> None:
    roster("base", "add", "tiny", "--config", "models/tiny")
    ran = roster("inspect", "trained/ash", "--base", "tinny")
    assert ran.code == 2
    assert "base 'tinny': expected a registered base, found: tiny." in ran.err


def test_a_destination_that_cannot_be_written(offline: Roster) -> None:
    ran = offline("convert", "trained/ash", "/proc/ash", "--base", "models/tiny", "--json")
    assert ran.code == 2
    assert "/proc/" in ran.document["error"] and "No such file or directory" in ran.document["error"]


# base add, heldout add, submit


def test_base_add_knows_the_base_by_config_and_weights(roster: Roster, store: S3Store) -> None:
    bare = roster("base", "add", "tiny", "--config", "models/tiny/config.json", "--json").document
    whole = roster("base", "add", "tiny", "--config", "models/tiny", "--weights", "models/tiny", "--json")
    assert set(whole.document) == {"base", "digest"}
    assert bare["digest"] != whole.document["digest"]
    assert keys(store) == ["bases/tiny/base.json", "bases/tiny/config.json"]
    assert read_base(store, "tiny").document.weights == str(Path("models/tiny").resolve())
    again = roster("base", "add", "tiny", "--config", "models/tiny")
    assert "without its weights: trainers' merged checkpoints are not compared" in again.err
    assert read_base(store, "tiny").document.weights is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Tiny/Base", "--config", "models/tiny"], "base 'Tiny/Base': expected 1 to 64 characters"),
        (["tiny", "--config", "models/nosuch"], '"models/nosuch" does not exist'),
        (["tiny", "--config", "heldout/ash.jsonl"], "base tiny: config.json: found no JSON"),
        (["tiny", "--config", "models/tiny", "--weights", "heldout"], "heldout: expected the base's weights"),
        (
            ["tiny", "--config", "models/tiny", "--engine-url", "localhost:8000"],
            "such as http://127.0.0.1:8000",
        ),
    ],
)
def test_base_add_refuses_before_it_writes(
    roster: Roster, store: S3Store, arguments: list[str], said: str
) -> None:
    ran = roster("base", "add", *arguments, "--json")
    assert ran.code == 2
    assert said in ran.document["error"]
    assert keys(store) == []


def test_base_add_says_when_two_bases_share_an_engine(roster: Roster) -> None:
    url, other = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
    for name, at in (("tiny", url), ("apart", other), ("tiny", url)):
        assert (
            "is the engine of"
            not in roster("base", "add", name, "--config", "models/tiny", "--engine-url", at).err
        )
    ran = roster("base", "add", "twin", "--config", "models/tiny", "--engine-url", url)
    assert ran.code == 0 and f"{url} is the engine of base tiny too" in ran.err


def test_base_add_keeps_the_target_format_until_another_is_given(roster: Roster, store: S3Store) -> None:
    def registered(*options: str) -> str:
        assert roster("base", "add", "tiny", "--config", "models/tiny", *options).code == 0
        return read_base(store, "tiny").document.target_format.value

    assert registered() == "per-expert"
    assert registered("--target-format", "stacked") == "stacked"
    assert registered("--engine-url", "http://127.0.0.1:8000") == "stacked"
    assert registered("--target-format", "per-expert") == "per-expert"
    assert registered("--target-format", "slots") == "slots"
    ran = roster("base", "add", "tiny", "--config", "models/tiny", "--target-format", "3-d")
    assert ran.code == 2 and '"stacked"' in ran.err


def test_heldout_add_counts_and_warns(roster: Roster, store: S3Store, desk: Path) -> None:
    file = desk / "heldout" / "ash.jsonl"
    assert roster("heldout", "add", "ash", "main", file, "--json").document == {
        "heldout": "ash/main",
        "units": 25,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    file.write_text("".join(f'{{"id": "{n}", "text": "some text", "txet": "x"}}\n' for n in range(9)))
    ran = roster("heldout", "add", "ash", "main", file)
    assert "line 1: txet is no key we know, ignored" in ran.err
    assert ran.err.count("no key we know") == 5
    assert "and 4 more like these" in ran.err


@pytest.mark.parametrize(
    ("author", "body", "said"),
    [
        (
            "ash",
            b'{"id": "1", "text": "a"}\n{"id": "2"}\n',
            "line 2: not a document we can use: text: Field required",
        ),
        ("ash", b"", "it holds no units"),
        ("Ash", b'{"id": "1", "text": "a"}\n', "author 'Ash': expected 1 to 64 characters"),
    ],
)
def test_heldout_add_refuses_before_it_writes(
    roster: Roster, store: S3Store, desk: Path, author: str, body: bytes, said: str
) -> None:
    (desk / "bad.jsonl").write_bytes(body)
    ran = roster("heldout", "add", author, "main", "bad.jsonl", "--json")
    assert ran.code == 2
    assert said in ran.document["error"]
    assert keys(store) == []


def test_submit_uploads_and_says_what_it_uploaded(roster: Roster, store: S3Store, desk: Path) -> None:
    roster("base", "add", "tiny", "--config", "models/tiny")
    options = ("--run", "run-3", "--trainer", "unsloth_zoo==2026.8.17", "--heldout", "ash/main")
    ran = roster("submit", "trained/ash", "--author", "ash", "--base", "tiny", *options, "--json")
    upload = read_upload(store, "ash", "run-3")
    assert ran.document == {
        "author": "ash",
        "run": "run-3",
        "submission": upload.marker.submission,
        "adapter_digest": digest_of(desk / "trained" / "ash"),
        "event_sent": False,
    }
    assert ran.err == (
        "warning: the event was not sent: ROSTER_PREFECT_API_URL is not set; "
        "the sweep finds the upload within a minute\n"
    )
    assert upload.training is not None and upload.training.trainer is not None
    assert (upload.training.trainer.name, upload.training.trainer.version) == ("unsloth_zoo", "2026.8.17")
    assert upload.training.heldout == ("ash/main",)


def test_submit_for_an_unknown_base_says_that_it_will_wait(
    roster: Roster, store: S3Store, desk: Path
) -> None:
    (desk / "trained" / "ash" / "training.json").write_text('{"trainr": {"name": "peft"}}')
    roster("base", "add", "tiny", "--config", "models/tiny")
    ran = roster("submit", "trained/ash", "--author", "ash", "--base", "tinny")
    assert ran.code == 0
    assert "base tinny is not registered (there is: tiny); the adapter waits until it is" in ran.err
    assert "training.json: trainr is no key we know, ignored" in ran.err
    assert any(key.endswith("_READY.json") for key in keys(store, "uploads/ash/"))


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--author", "ash/../../ledger"], ["author 'ash/../../ledger'", "a-z 0-9 . _ -"]),
        (["--author", ".."], ["author '..'", "no '..'"]),
        (["--author", "a..b"], ["author 'a..b'", "no '..'", "Try 'a.b'"]),
        (["--author", "Ash"], ["author 'Ash'", "Try 'ash'"]),
        (["--author", "tiny"], ["author 'tiny'", "base tiny"]),
        (["--author", "ash", "--run", ""], ["run ''"]),
        (["--author", "ash", "--run", "run/3"], ["run 'run/3'", "Try 'run-3'"]),
        (["--author", "ash", "--trainer", "unsloth_zoo 2026.8.17"], ["trainer", "unsloth_zoo==2026.8.17"]),
        (["--author", "ash", "--trainer", ""], ["trainer ''"]),
        (["--author", "ash", "--heldout", "main"], ["held-out set 'main'", "<author>/<name>"]),
        (["--author", "ash", "--reference", "heldout/ash.jsonl"], ["heldout/ash.jsonl", "not a document"]),
        (["--author", "ash", "--reference", "nosuch.json"], ["nosuch.json", "does not exist"]),
    ],
    ids=short_id,
)
def test_submit_refuses_before_it_uploads(
    roster: Roster, store: S3Store, options: list[str], facts: list[str]
) -> None:
    roster("base", "add", "tiny", "--config", "models/tiny")
    ran = roster("submit", "trained/ash", "--base", "tiny", *options, "--json")
    assert ran.code == 2
    assert all(fact in ran.document["error"] for fact in facts), ran.err
    assert keys(store, "uploads/") == []


def test_submit_needs_a_directory_with_an_adapter(roster: Roster, store: S3Store) -> None:
    ran = roster("submit", "heldout", "--author", "ash", "--base", "tiny")
    assert ran.code == 2
    assert "expected adapter_config.json and adapter_model.safetensors, found ash.jsonl" in ran.err
    ran = roster("submit", "nosuch", "--author", "ash", "--base", "tiny")
    assert (ran.code, keys(store)) == (2, [])
    assert '"nosuch" does not exist' in ran.err


# policy


def test_a_policy_is_set_shown_and_cleared(roster: Roster, store: S3Store) -> None:
    roster("base", "add", "tiny", "--config", "models/tiny")
    assert roster("policy", "show", "--json").document == {"policies": []}
    assert "no policy is set" in roster("policy", "show").out
    why = "our trainer is old"
    made = roster("policy", "set", "grouped_by_expert", "--base", "tiny", "--why", why, "--json").document
    assert set(made) == {"base", "schema", "lora_B_layout", "why", "set_by", "set_at"}
    assert (made["base"], made["lora_B_layout"], made["why"]) == ("tiny", "grouped_by_expert", why)
    assert re.fullmatch(r"[^@\s]+", made["set_by"]), "a user, no machine"
    roster("policy", "set", "rank_major", "--parameter", "down_proj", "--why", "it was mended")
    assert roster("policy", "show", "--json").document["policies"][1] == made
    shown = roster("policy", "show").out
    assert re.search(r"^every base +down_proj rank_major .* it was mended *$", shown, re.MULTILINE)
    assert re.search(r"^base tiny +grouped_by_expert ", shown, re.MULTILINE)
    assert roster("policy", "clear", "--base", "tiny", "--json").document == {"base": "tiny", "cleared": True}
    assert roster("policy", "clear", "--base", "tiny").err == "base tiny: there was no policy\n"
    assert keys(store, "bases/tiny/policy") == [] and keys(store, "policy") == ["policy.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rank_major"], "--why"),
        (["rank_major", "--why", " "], "a reason that tells others later"),
        (["columns", "--why", "x"], '"grouped_by_expert"'),
        (
            ["rank_major", "--why", "x", "--base", "tinny"],
            "base 'tinny': expected a registered base, found: tiny",
        ),
        (["rank_major", "--why", "x", "--parameter", "up"], "one of down_proj, gate_up_proj"),
    ],
    ids=short_id,
)
def test_a_policy_is_refused_before_it_is_written(
    roster: Roster, store: S3Store, arguments: list[str], said: str
) -> None:
    roster("base", "add", "tiny", "--config", "models/tiny")
    ran = roster("policy", "set", *arguments, "--json")
    assert ran.code == 2
    assert said in ran.document["error"]
    assert not any("policy" in key for key in keys(store))


# ready, show, why, sql, status; more of the queries: tests/test_cli_query.py


def write_catalog(home: Path) -> None:
    """ash is served; rue is refused; oak waits for its held-out text."""
    home.mkdir(exist_ok=True)
    waiting = [ledger_builders.halted("inspected", "waiting", "no_heldout")]
    refused = [ledger_builders.inspected(), ledger_builders.refused("checked", "non_finite", minute=1)]
    catalog_builders.sync(
        home / "catalog.duckdb",
        [
            ledger_builders.ready_ledger("ash"),
            ledger_builders.ledger("oak", "a", waiting, runs={"r1": 2}),
            ledger_builders.ledger("rue", "a", refused, runs={"r1": 3}),
        ],
    )


def test_ready(offline: Roster) -> None:
    write_catalog(offline.home)
    document = offline("ready", "--json").document
    assert set(document) == {"synced_at", "ready"}
    (row,) = document["ready"]
    assert (row["author"], row["base"], row["own"], row["base_bpb"]) == ("ash", "tiny", 2.125, 2.375)
    ran = offline("ready")
    assert re.search(r"^ash +tiny +2\.1250 +2\.3750 +\+0\.1875 +1 ", ran.out, re.MULTILINE)
    assert f"as of the sync at {catalog_builders.NOON}" in ran.err
    ran = offline("ready", "--base", "tinny", "--json")
    assert ran.code == 2
    assert "base 'tinny': expected a registered base, found: tiny" in ran.document["error"]


def test_show_and_why(offline: Roster) -> None:
    write_catalog(offline.home)
    document = offline("show", "ash", "--json").document
    assert document["author"] == "ash"
    assert document["adapters"][0]["served"] is True
    ran = offline("show", "ash")
    assert "ash/r1 on tiny: ready, served\n" in ran.out
    assert "mlp.experts.gate_up_proj: packing grouped_by_expert, decided by training\n" in ran.out
    assert re.search(r"^  control +2\.2500 +\+0\.1250", ran.out, re.MULTILINE)
    ran = offline("show", "rue")
    assert "rue/r1 on tiny: quarantined (non_finite), not served\n  it is non_finite\n" in ran.out

    story = offline("why", "rue", "--json").document
    assert set(story) == {"author", "story"}
    assert any("non_finite" in sentence for sentence in story["story"])
    assert offline("why", "rue").out.splitlines() == story["story"]


@pytest.mark.parametrize("command", ["show", "why"])
def test_an_unknown_author_is_told_whom_there_is(offline: Roster, command: str) -> None:
    write_catalog(offline.home)
    ran = offline(command, "Asch", "--json")
    assert ran.code == 2
    assert "author Asch: expected one of the catalog's authors" in ran.document["error"]
    assert "ash, oak, rue" in ran.document["error"]
    assert ran.document["error"].endswith("Did you mean ash?")
    assert "Did you mean" not in offline(command, "zzzzzz").err


def test_sql_loses_nothing_on_its_way_to_json(offline: Roster) -> None:
    write_catalog(offline.home)
    query = (
        "SELECT 1 AS a, 2 AS a, 3 AS a_1, 'nan'::DOUBLE AS n, 1.5::DECIMAL(9, 2) AS d, "
        "DATE '2026-03-01' AS day, [1, 2] AS list, {'x': 'inf'::DOUBLE} AS struct, 'é' AS text"
    )
    document = offline("sql", query, "--json").document
    assert document["columns"] == ["a", "a_2", "a_1", "n", "d", "day", "list", "struct", "text"]
    (row,) = document["rows"]
    assert list(row.values()) == [1, 2, 3, None, 1.5, "2026-03-01", [1, 2], {"x": None}, "é"]


def test_text_is_shown_as_it_is_and_commands_no_terminal(offline: Roster) -> None:
    """Names of tensors and reasons come from strangers; brackets, colons and escapes in them are text."""
    write_catalog(offline.home)
    ran = offline("sql", "SELECT '[bold]x[/bold] :smile: [/foo]' AS t, chr(27) || '[2J' AS e")
    assert ran.code == 0
    assert "[bold]x[/bold] :smile: [/foo]" in ran.out
    assert r"\x1b[2J" in ran.out and "\x1b" not in ran.out


@pytest.mark.parametrize(
    "query", ["DROP TABLE ledgers", "SELECT 1; SELECT 2", "SELECT nosuch FROM ready", ""]
)
def test_sql_refuses_anything_but_one_question(offline: Roster, query: str) -> None:
    write_catalog(offline.home)
    ran = offline("sql", query, "--json")
    assert ran.code == 2
    assert "expected one reading statement" in ran.document["error"]
    assert "show tables" in ran.document["error"]


@pytest.mark.parametrize(
    "command", [["ready"], ["show", "ash"], ["why", "ash"], ["sql", "SELECT 1"]], ids=short_id
)
def test_without_a_catalog_queries_say_how_to_get_one(offline: Roster, command: list[str]) -> None:
    ran = offline(*command, "--json")
    assert ran.code == 3
    assert "expected a file, found none; run `roster sync`" in ran.document["error"]
    offline.home.mkdir()
    (offline.home / "catalog.duckdb").write_bytes(b"no database" * 1000)
    ran = offline(*command, "--json")
    assert ran.code == 3
    assert "run `roster rebuild`" in ran.document["error"]


STATUS_KEYS = {
    *(
        "home",
        "services",
        "untested",
        "store",
        "catalog_fault",
        "synced_at",
        "ready",
        "in_progress",
        "waiting",
    ),
    *(
        "problems",
        "store_fault",
        "prefect",
        "prefect_fault",
        "pool_paused",
        "queues",
        "workers",
        "runs",
        "leases",
    ),
    *("uploads", "engines", "restarts", "next"),
}


def test_status(offline: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = offline("status", "--json")
    assert (nothing.code, set(nothing.document)) == (0, STATUS_KEYS)
    assert (nothing.document["services"], nothing.document["synced_at"]) == (None, None)
    assert "start them with: roster up" in offline("status").out

    write_catalog(offline.home)
    document = offline("status", "--json").document
    assert (document["ready"], document["synced_at"]) == (1, catalog_builders.NOON)
    assert [row["author"] for row in document["waiting"]] == ["oak"]
    assert [row["author"] for row in document["problems"]] == ["rue"]
    ran = offline("status")
    assert "1 ready, 0 on their way" in ran.out
    assert "  oak/r1: waiting (no_heldout): because of no_heldout\n" in ran.out
    assert "  rue/r1: quarantined (non_finite): it is non_finite\n" in ran.out

    monkeypatch.setattr("flows.standing._look_at_store", lambda *_: (None, None))
    monkeypatch.setenv("ROSTER_STORE_ENDPOINT", "http://store:9000")
    assert "store: http://store:9000, Prefect: none (as set)\n" in offline("status").out


def running_services() -> Services:
    return Services(
        pid=this_process().pid,
        start_ticks=this_process().start_ticks,
        started_at=utc_now(),
        store=StoreService(endpoint="http://s", bucket="b", access_key="a", secret_key="s", region="r"),
        prefect=PrefectService(api_url="http://p/api", ui_url="http://p"),
        engines={"tiny": "http://127.0.0.1:8000"},
        logs={},
    )


def test_status_names_what_nobody_verified_of_an_engine(
    offline: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for look in ("_look_at_store", "_look_at_prefect"):  # nobody is at their addresses: tests/test_status.py
        monkeypatch.setattr(f"flows.standing.{look}", lambda *_: (None, None))
    engine_json = engine_json_path(offline.home, "tiny")
    write_document(offline.home / SERVICES_FILE, running_services())
    info = EngineInfo.model_validate_json((EXAMPLES / "engine.json").read_text())
    write_document(engine_json, info)
    assert offline("status", "--json").document["untested"] == {}
    assert "not verified" not in offline("status").out
    write_document(engine_json, info.model_copy(update={"device": "cuda", "tensor_parallel_size": 2}))
    assert offline("status", "--json").document["untested"] == {
        "tiny": ["device cuda", "tensor parallelism over 2 processes"]
    }
    said = "engine of tiny: not verified by anybody: device cuda, tensor parallelism over 2 processes\n"
    assert said in offline("status").out


def test_status_speaks_even_when_the_catalog_is_damaged(offline: Roster) -> None:
    lock = HomeLock.take(offline.home)
    (offline.home / "catalog.duckdb").write_bytes(b"no database" * 1000)
    ran = offline("status")
    lock.release()
    assert ran.code == 3
    assert f"are starting or stopping, process {os.getpid()}\n" in ran.out
    assert "run `roster rebuild`" in ran.out


# sync, rebuild


SYNC_KEYS = {
    *("added", "changed", "removed", "total", "rebuilt", "unreadable", "roster_version", "published"),
}


def put_ledgers(store: S3Store, *authors: str) -> None:
    for author in authors:
        document = ledger_builders.ready_ledger(author)
        store.put(ledger_builders.key_of(document), json.dumps(document).encode())


def test_sync_and_rebuild(roster: Roster, store: S3Store) -> None:
    roster("base", "add", "tiny", "--config", "models/tiny")
    put_ledgers(store, "ash", "oak", "rue", "yew")
    first = roster("sync", "--json").document
    assert set(first) == SYNC_KEYS
    assert (first["added"], first["roster_version"], first["published"]) == (4, 1, True)
    again = roster("sync", "--json").document
    assert (again["added"], again["changed"], again["published"]) == (0, 0, False)
    ran = roster("rebuild")
    assert "the catalog was built anew: a rebuild was asked for" in ran.err
    assert "4 in all; roster version 1, unchanged" in ran.err
    assert [row["author"] for row in roster("ready", "--json").document["ready"]] == [
        "ash",
        "oak",
        "rue",
        "yew",
    ]


def test_a_sync_that_would_drop_many_asks_first(roster: Roster, store: S3Store) -> None:
    roster("base", "add", "tiny", "--config", "models/tiny")
    authors = ("ash", "elm", "fir", "oak", "rue", "yew")
    put_ledgers(store, *authors)
    assert roster("sync").code == 0
    for author in authors[:5]:
        store.delete(ledger_builders.key_of(ledger_builders.ready_ledger(author)))
    ran = roster("sync", "--json")
    assert ran.code == 3
    assert "roster sync --allow-drop" in ran.document["error"]
    assert roster("sync", "--allow-drop", "--json").document["published"] is True


# up, down


def test_up_wants_both_halves_of_an_engine(offline: Roster) -> None:
    for half in (["--base", "tiny"], ["--weights", "models/tiny"]):
        ran = offline("up", *half)
        assert ran.code == 2
        assert "Missing argument" in ran.err
    assert not offline.home.exists()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--base", "tiny", "--weights", "models/tiny"], 3, "run ./run setup"),
        (["--base", "tiny", "--weights", "models/nosuch"], 2, "does not exist"),
        (["--base", "tiny", "--max-loras", "-3"], 2, "--max-loras"),
        (["--max-lora-rank", "7"], 2, "--max-lora-rank"),
    ],
)
def test_up_starts_nothing_that_cannot_work(
    offline: Roster, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, said: str
) -> None:
    monkeypatch.setenv("ROSTER_ENGINE_PYTHON", "/nosuch/python")
    ran = offline("up", *options, "--json")
    assert ran.code == code
    assert said in ran.document["error"]
    assert not offline.home.exists()


@pytest.mark.parametrize(
    ("base", "weights", "code", "said"),
    [
        ("Tiny/Base", "models/tiny", 2, "base 'Tiny/Base'"),
        ("tiny", "trained/ash", 2, "base tiny: trained/ash/config.json: found no such file"),
    ],
)
def test_up_looks_at_the_base_before_it_starts_anything(
    offline: Roster, monkeypatch: pytest.MonkeyPatch, base: str, weights: str, code: int, said: str
) -> None:
    monkeypatch.setenv("ROSTER_ENGINE_PYTHON", sys.executable)
    ran = offline("up", "--base", base, "--weights", weights)
    assert ran.code == code
    assert said in ran.err
    assert not offline.home.exists()


def test_up_where_something_runs_names_it(offline: Roster) -> None:
    lock = HomeLock.take(offline.home)
    ran = offline("up", "--json")
    lock.release()
    assert ran.code == 3
    assert f"run already, as process {os.getpid()}" in ran.document["error"]


def test_down_with_nothing_running(offline: Roster) -> None:
    assert offline("down", "--json").document == {"stopped": False}
    assert offline("down").err == "nothing was running\n"


def test_damaged_state_does_not_keep_down_and_queries_from_working(offline: Roster) -> None:
    write_catalog(offline.home)
    (offline.home / SERVICES_FILE).write_text("{")
    assert offline("down").code == 0
    assert offline("ready").code == 0
    ran = offline("status", "--json")
    assert ran.code == 3
    assert "services.json does not hold what the embedded services wrote there" in ran.document["error"]


# Errors and exit codes


@pytest.mark.parametrize(
    "error",
    [
        HomeBusyError(Path("/home"), 7, ()),
        EmbeddedFailedError(3, Path("/log"), "worker: ended"),
        StopTimedOutError(Path("/home"), 7, 90.0),
        StateUnreadableError(Path("/home/kept.json"), "broken"),
        ChildFailedError("worker", "ended", 3, Path("/log"), "tail"),
        EngineIncomplete("and the engine's environment"),
        NoFreePortError("s3"),
        StoreProgramMissingError(Path("/python")),
        StoreUnavailable("put", "some/key", "no answer"),
        OSError(28, "No space left on device", "serving/ash"),
    ],
    ids=short_id,
)
def test_what_is_unavailable_ends_with_three(error: Exception) -> None:
    explained = explain(error)
    assert explained is not None
    assert explained.exit_code == 3
    assert explained.document == {"error": explained.message}
    assert explained.message.startswith(str(error)) or "serving/ash: No space left" in explained.message


def test_an_error_nobody_foresaw_is_not_explained_away() -> None:
    assert explain(ZeroDivisionError("ours")) is None


@pytest.mark.parametrize(
    "command", [["sync"], ["rebuild"], ["submit", "trained/ash", "--author", "ash", "--base", "b"]]
)
def test_no_store_is_known(offline: Roster, command: list[str]) -> None:
    ran = offline(*command, "--json")
    assert ran.code == 3
    assert "no object store is known" in ran.document["error"]
    assert "`roster up`" in ran.document["error"]


def test_a_store_that_is_down(roster: Roster, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    down = with_faults(store, list_objects_v2=failing(StoreUnavailable("list", "ledger/", "no answer")))
    monkeypatch.setattr("flows.connect.open_store", lambda settings: down)
    ran = roster("sync", "--json")
    assert ran.code == 3
    assert "list ledger/: the object store did not do it: no answer" in ran.document["error"]


def test_a_setting_that_is_wrong_is_named(offline: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSTER_FLOOR_BPB", "a little")
    ran = offline("status", "--json")
    assert ran.code == 2
    assert ran.document["error"].startswith("ROSTER_FLOOR_BPB=a little: ")
    assert "valid number" in ran.document["error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], 'Unknown command "nosuch"'),
        (["ready", "--bse", "x"], "Did you mean --base?"),
        (["submit"], "requires an argument"),
        (
            ["convert", "trained/ash", "x", "--base", "models/tiny", "--packing", "columns"],
            '"grouped_by_expert"',
        ),
        (["why"], "requires an argument"),
    ],
    ids=short_id,
)
def test_wrong_usage_is_one_line_that_leads_to_help(offline: Roster, arguments: list[str], said: str) -> None:
    ran = offline(*arguments, "--json")
    assert ran.code == 2
    assert said in ran.document["error"]
    assert ran.err == f"roster: {ran.document['error']}\n"
    assert re.search(r"See: roster( \w+)? --help$", ran.document["error"])


# Stopped half way


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_conversion_that_is_stopped_leaves_nothing(desk: Path, number: signal.Signals) -> None:
    """The program itself, stopped by a real signal in the middle of writing."""
    script = f"""
import contextlib, signal, sys
import flows.cli.progress
from flows.cli.app import main
@contextlib.contextmanager
def stopping(title):
    yield lambda done, total: signal.raise_signal({int(number)})
flows.cli.progress.byte_progress = stopping
sys.argv = ["roster", "convert", "trained/ash", "serving/ash", "--base", "models/tiny"]
main()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=desk, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 130
    assert ran.stderr == "roster: stopped\n"
    assert everything(desk / "serving") == set()


def test_an_upload_that_is_stopped_has_no_marker(
    roster: Roster, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping:
        def __init__(self, title: str) -> None:
            pass

        def __enter__(self) -> Callable[[int, int], None]:
            return lambda done, total: signal.raise_signal(signal.SIGINT)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(flows.cli.progress, "byte_progress", Stopping)
    ran = roster("submit", "trained/ash", "--author", "ash", "--base", "tiny", "--run", "r1")
    assert ran.code == 130
    assert "without its marker nothing of it is looked at; submit it again" in ran.err
    assert not any(key.endswith("_READY.json") for key in keys(store))


# The program in a pipe and in a terminal


def test_the_program_in_a_pipe(desk: Path) -> None:
    without_config(desk / "trained" / "ash")
    ran = run_program("inspect", "trained/ash", "--base", "models/tiny", "--json", cwd=desk)
    assert ran.code == 1
    assert ran.document["refused"]["code"] == "corrupt_or_partial"
    assert ran.err == f"roster: {ran.document['refused']['message']}\n"
    assert "\x1b" not in ran.out + ran.err
    assert not (desk / "home").exists()


@pytest.mark.real
def test_tables_are_whole_in_a_pipe_and_fit_a_terminal(desk: Path) -> None:
    home = desk / "home"
    author = "an-author-with-a-rather-long-name-of-sixty-characters-in-all"
    home.mkdir()
    ledgers = [ledger_builders.ready_ledger(name) for name in ("ash", author)]
    catalog_builders.sync(home / "catalog.duckdb", ledgers)
    piped = run_program("ready", cwd=desk, ROSTER_HOME=str(home))
    assert re.search(
        rf"^{author} +tiny +2\.1250 +2\.3750 +\+0\.1875 +1 +[0-9a-f]{{12}} *$", piped.out, re.MULTILINE
    )
    assert "\x1b" not in piped.out

    code, shown = run_in_terminal("ready", cwd=desk, columns=80, ROSTER_HOME=str(home))
    assert code == 0
    assert "\x1b[1m" in shown
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert max(map(len, lines)) <= 80
    assert re.match(r"author +base +own BPB +base BPB +margin +wrongs +output", lines[0])
    assert any(re.match(r"ash +tiny +2\.1250 +2\.3750 +\+0\.1875 +1 +[0-9a-f]{12}", line) for line in lines)

    query = "SELECT * FROM verdicts WHERE author = 'ash'"
    _, wide = run_in_terminal("sql", query, cwd=desk, columns=80, ROSTER_HOME=str(home))
    (row,) = json.loads(run_program("sql", query, "--json", cwd=desk, ROSTER_HOME=str(home)).out)["rows"]
    shown_words = wide.split()
    assert all(
        word in shown_words for value in row.values() if value is not None for word in str(value).split()
    )


def test_a_reader_that_goes_away_is_no_failure(desk: Path) -> None:
    home = desk / "home"
    write_catalog(home)
    for form in ("", "--json"):
        ask = f"'{PROGRAM}' sql \"SELECT repeat('ash', 900) AS n FROM range(99)\" {form}"
        query = f"{ask} | head -c 10; echo ${{PIPESTATUS[0]}}"  # four times what a pipe holds
        ran = subprocess.run(
            ["bash", "-c", query],
            env=clean_environment(ROSTER_HOME=str(home)),
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout[10:] == "0\n"
        assert ran.stderr == ""


def test_a_fault_of_ours_is_shown_whole_and_is_no_refusal(desk: Path) -> None:
    script = "import sys, flows.cli.app as app; app.run = lambda arguments: 1 / 0; app.main()"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 3
    assert "ZeroDivisionError" in ran.stderr
    assert "please report it" in ran.stderr


# Help and documentation


def examples() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def test_every_command_has_an_example_in_the_documentation() -> None:
    begun = {command for command in COMMANDS for line in examples() if line.startswith(f"roster {command}")}
    assert begun == set(COMMANDS)


def test_the_documentation_shows_every_command_that_there_is(offline: Roster) -> None:
    shown = set(re.findall(r"^│ ([a-z]+) ", offline("--help").out, re.MULTILINE))
    assert shown == {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(offline: Roster, command: str) -> None:
    ran = offline(*command.split(), "--help")
    assert ran.code == 0
    assert f"Usage: roster {command}" in ran.out
    assert "--json" in ran.out
    if command not in EXPLAIN_THEMSELVES:
        text = " ".join(ran.out.split())  # help is folded at the width of the terminal
        assert any(line in text for line in examples() if line.startswith(f"roster {command} "))


@pytest.mark.real
def test_every_example_of_the_documentation_runs(
    roster: Roster, store: S3Store, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the starting and stopping of servers is left to the real services (tests/test_cli_real.py)."""
    put_ledgers(store, "ash")
    started: list[Any] = []

    def start(config: Any, **_: object) -> Services:
        started.append(config)
        return running_services()

    def measure(store: S3Store, base: ServedBase, limits: object, **_: object) -> Qualification:
        assert base.url == "http://127.0.0.1:8000", "as the example before it registers it"
        return Qualification.model_validate_json((EXAMPLES / "qualification.json").read_bytes())

    @contextmanager
    def open_scorer(*_: object) -> Iterator[tuple[ScriptedScorer, str]]:
        bits = lambda name, path: 2.39 if "~control@" in name else 2.1  # noqa: E731
        yield ScriptedScorer({"tiny": 2.4}, adapters=bits), "tiny"

    monkeypatch.setattr("flows.embedded.start_detached", start)
    monkeypatch.setattr("tasks.qualification.qualify_engine", measure)
    monkeypatch.setattr("flows.cli.score.open_scorer", open_scorer)
    nothing = Plan(None, None, "", (), (), frozenset(), None, True, False, (), frozenset(), ())  # type: ignore[arg-type]
    monkeypatch.setattr("tasks.matrix_plan.plan_matrix", lambda *_, **__: nothing)
    monkeypatch.setenv("ROSTER_MIN_BYTES", "100")
    monkeypatch.setenv("ROSTER_ENGINE_PYTHON", sys.executable)

    @contextmanager
    def prefect(*_: object) -> Iterator[PrefectView]:
        """No worker and nothing to retry; with a real server: tests/test_retry_real.py."""
        yield PrefectView(None, False, (), {}, (), (), (), 0, False, ())

    monkeypatch.setattr("flows.cli.retry._prefect", prefect)
    monkeypatch.setattr("flows.retrying.plan_failed", lambda *_, **__: [])
    monkeypatch.setattr("flows.retrying.plan_named", lambda *_, **__: [])
    monkeypatch.setattr("flows.rechecking.plan_recheck", lambda *_, **__: [])
    monkeypatch.setattr("tasks.bpb.engine.Engine.list_adapters", lambda engine: ())
    monkeypatch.setattr("tasks.bpb.engine.Engine.served_models", lambda engine: ("tiny",))
    roster("base", "add", "tiny", "--config", "models/tiny")
    roster("sync")
    of_ash = ledger_builders.ready_ledger("ash")["adapter_digest"]
    served = ledger_builders.digest("output ash a")
    store.put(f"serving/ash/{served}/manifest.json", (EXAMPLES / "manifest.json").read_bytes())
    for line in examples():
        ran: Ran = roster.line(line.replace("DIGEST", of_ash))
        assert ran.code == 0, (line, ran.err)
        assert ran.out or ran.err
    assert [engine.base for config in started for engine in config.engines] == ["tiny"]
    assert (desk / "serving" / "ash" / "adapter_model.safetensors").is_file()
    assert any(key.endswith("_READY.json") for key in keys(store, "uploads/ash/"))
    assert "heldout/ash/main.jsonl" in keys(store)
