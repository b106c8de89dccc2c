"""The merged checkpoint that an upload names, from where it may be read to what it decides in the flow."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from cli_builders import Roster
from lora_builders import LABEL, Logical, attention, base_fields, encode, look, save_adapter
from merged_builders import Tensors, base_weights, merge, save
from pipeline_builders import BASE, Desk
from store_builders import memory_store

from storage.bases import read_base, register_base
from storage.ledger import StepKind
from storage.s3 import S3Store
from storage.training import Training, parse_training
from tasks.disk import RunDisk
from tasks.errors import SourceGone
from tasks.lora.checks import CheckName, CheckResult
from tasks.lora.errors import LayoutConflict, MergedMismatch, ReferenceInvalid
from tasks.merged_reference import MergedReference, Uncompared, check_merged, find_merged, merged_check

pytestmark = pytest.mark.real

BASE_WEIGHTS = base_weights()
PREFIX = "uploads/ash/run-3/merged"


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as made:
        yield made


def put(store: S3Store, prefix: str, weights: Tensors, folder: Path) -> None:
    store.put(f"{prefix}/model.safetensors", (save(folder, weights) / "model.safetensors").read_bytes())
    store.put(f"{prefix}/tokenizer.json", b"{}")
    store.put(f"{prefix}/older/model.safetensors", b"another save")


def make_job(
    store: S3Store, tmp_path: Path, uri: str | None, *, weights: str | None = "", root: Path | None = None
) -> Any:
    """What of a job is looked at. weights: where the base's are said to lie; they are written where that is ""."""
    folder = tmp_path / "base"
    if weights == "":
        weights = str(folder if folder.is_dir() else save(folder, BASE_WEIGHTS))
    return SimpleNamespace(
        store=store,
        label=LABEL,
        upload=SimpleNamespace(training=Training(merged_checkpoint=uri)),
        base=SimpleNamespace(name="tiny", document=SimpleNamespace(weights=weights)),
        limits=SimpleNamespace(merged_root=root),
        disk=RunDisk(tmp_path / "work"),
        log=logging.getLogger("test"),
        progress=lambda what, unit: lambda done, total: None,
    )


def trained() -> tuple[Tensors, Tensors]:
    """An adapter, and the base with it merged in."""
    logical = Logical()
    return encode(logical) | attention(), merge(BASE_WEIGHTS, logical, attention())


@pytest.mark.parametrize("uri", [f"s3://{{bucket}}/{PREFIX}/", PREFIX])
def test_a_merge_in_the_stores_bucket_is_fetched_compared_and_removed(
    store: S3Store, tmp_path: Path, uri: str
) -> None:
    tensors, merged = trained()
    put(store, PREFIX, merged, tmp_path / "merged")
    found = look(tmp_path / "adapter", tensors)
    job = make_job(store, tmp_path, uri.format(bucket=store.bucket))
    reference = find_merged(job)
    assert isinstance(reference, MergedReference)
    assert [one.key for one in reference.objects] == [f"{PREFIX}/model.safetensors"]
    result = check_merged(job, found.files, found.layout, reference)
    assert isinstance(result, CheckResult)
    assert (result.name, result.passed, result.error) == (CheckName.MERGED, True, None)
    assert result.detail.startswith("34 weights are base + delta in float32, ")
    assert not (job.disk.folder() / "merged").exists()

    store.put(f"{PREFIX}/model.safetensors", b"x")
    with pytest.raises(SourceGone, match=r"merged/model\.safetensors"):
        check_merged(job, found.files, found.layout, reference)
    again = find_merged(job)
    assert isinstance(again, MergedReference) and again.digest != reference.digest, "it is compared anew"
    with pytest.raises(ReferenceInvalid, match="a safetensors file that can be read"):
        check_merged(job, found.files, found.layout, again)
    assert not (job.disk.folder() / "merged").exists()


@pytest.mark.parametrize("form", ["{path}", "file://{path}"])
def test_a_folder_is_read_where_the_setting_allows_it(store: S3Store, tmp_path: Path, form: str) -> None:
    tensors, merged = trained()
    path = save(tmp_path / "merges" / "ash 3", merged)
    found = look(tmp_path / "adapter", tensors)
    uri = form.format(path=str(path).replace(" ", "%20") if form.startswith("file") else path)
    job = make_job(store, tmp_path, uri, root=tmp_path / "merges")
    reference = find_merged(job)
    assert isinstance(reference, MergedReference) and reference.directory == path
    result = check_merged(job, found.files, found.layout, reference)
    assert isinstance(result, CheckResult) and result.passed
    assert (path / "model.safetensors").is_file(), "not ours to remove"


def test_an_upload_that_names_none_is_not_asked_for_anything(store: S3Store, tmp_path: Path) -> None:
    assert find_merged(make_job(store, tmp_path, None, weights=None)) is None
    job = make_job(store, tmp_path, None)
    job.upload.training = None
    assert find_merged(job) is None


@pytest.mark.parametrize(
    ("uri", "settings", "why"),
    [
        ("s3://elsewhere/merged/", {}, "expected s3://"),
        ("https://example.com/merged", {}, "expected s3://"),
        ("hf://ash/merged", {}, "expected s3://"),
        ("ash/Qwen3-merged", {}, "expected s3://"),
        ("file://host/merges/a", {"root": Path("/merges")}, "expected s3://"),
        (PREFIX, {}, "no *.safetensors are there"),
        (PREFIX, {"weights": None}, "registered without its weights (`roster base add … --weights DIR`)"),
        (PREFIX, {"weights": "/nowhere"}, "has its weights on another machine"),
        ("/merges/a", {}, "ROSTER_MERGED_ROOT, which is not set"),
        ("/merges/../etc", {"root": Path("/merges")}, "not under ROSTER_MERGED_ROOT"),
        ("/mergesque/a", {"root": Path("/merges")}, "not under ROSTER_MERGED_ROOT"),
        ("/merges/nothing", {"root": Path("/merges")}, "no *.safetensors are there"),
        ("s3://[merged", {"root": Path("/merges")}, "it is no address"),
        ("file:///merges/%00", {"root": Path("/merges")}, "it is no address"),
        (f"{PREFIX}\0", {}, "characters that no address has"),
        ("/merges/a\nb", {"root": Path("/merges")}, "characters that no address has"),
    ],
)
def test_what_may_not_or_cannot_be_read_is_said_and_never_fetched(
    store: S3Store, tmp_path: Path, uri: str, settings: dict[str, Any], why: str
) -> None:
    found = find_merged(make_job(store, tmp_path, uri, **settings))
    assert isinstance(found, Uncompared)
    assert found.reason.startswith(f"merged_checkpoint {uri!r} was not compared: ") and why in found.reason


def test_links_do_not_lead_out_of_the_allowed_folder(store: S3Store, tmp_path: Path) -> None:
    secret = save(tmp_path / "secret", BASE_WEIGHTS)
    root = tmp_path / "merges"
    (root / "b").mkdir(parents=True)
    (root / "a").symlink_to(secret)
    (root / "b" / "model.safetensors").symlink_to(secret / "model.safetensors")
    for name, why in (("a", "not under"), ("b", "a link that leads elsewhere")):
        found = find_merged(make_job(store, tmp_path, str(root / name), root=root))
        assert isinstance(found, Uncompared) and why in found.reason


def test_a_path_that_the_system_cannot_look_at_is_said(store: S3Store, tmp_path: Path) -> None:
    root = tmp_path / "merges"
    (root / "c").mkdir(parents=True)
    os.mkfifo(root / "c" / "model.safetensors")
    for name, why in (("a" * 256, "on this machine (File name too long)"), ("c", "or no file")):
        found = find_merged(make_job(store, tmp_path, str(root / name), root=root))
        assert isinstance(found, Uncompared) and why in found.reason


# --- what the check says ---


def test_a_failure_names_the_worst_the_count_and_the_error(tmp_path: Path) -> None:
    tensors, merged = trained()
    base, found = save(tmp_path / "base", BASE_WEIGHTS), look(tmp_path / "adapter", tensors)
    other = merge(BASE_WEIGHTS, Logical(seed=9), attention())
    result = merged_check(found.files, found.layout, save(tmp_path / "other", other), base)
    assert isinstance(result, CheckResult)
    assert (result.passed, result.error) == (False, MergedMismatch)
    assert "expert" in result.where and result.where in result.detail
    assert result.detail.startswith("24 of 34 weights are not base + delta; the worst, layer ")
    figures = dict(result.figures)
    assert (figures["matrices"], figures["differing"], figures["other_packing"]) == (34, 24, 0)
    assert figures["largest"] > 1 and figures["equal"] < 0.5

    misread = look(tmp_path / "misread", tensors, packing="grouped_by_expert")
    result = merged_check(misread.files, misread.layout, save(tmp_path / "merged", merged), base)
    assert isinstance(result, CheckResult)
    assert (result.passed, result.error, result.where) == (False, LayoutConflict, "layer 0 gate_up_proj")
    assert result.detail == "layer 0 gate_up_proj and 3 more: the merge is that of the other packing"
    error = MergedMismatch(
        LABEL, "layer 0 expert 3 up_proj", "the trainer's own merged checkpoint", "24 of 34"
    )
    assert "merge the uploaded files again with the program that trained them" in str(error)


def test_a_base_that_cannot_be_read_is_not_laid_to_the_merge(tmp_path: Path) -> None:
    tensors, merged = trained()
    found = look(tmp_path / "adapter", tensors)
    base = save(tmp_path / "base", BASE_WEIGHTS) / "model.safetensors"
    base.write_bytes(base.read_bytes()[:-9])
    with pytest.raises(ReferenceInvalid) as caught:
        merged_check(found.files, found.layout, save(tmp_path / "m", merged), base.parent)
    assert caught.value.where == "the base's weights: model.safetensors"
    assert "roster base add" in caught.value.advice


def test_a_quantised_merge_is_not_compared(tmp_path: Path) -> None:
    tensors, merged = trained()
    found = look(tmp_path / "adapter", tensors)
    packed = {name: value.to(torch.uint8) for name, value in merged.items()}
    result = merged_check(
        found.files, found.layout, save(tmp_path / "m", packed), save(tmp_path / "base", BASE_WEIGHTS)
    )
    assert isinstance(result, Uncompared) and "found U8, as of a quantised model" in result.reason


# --- the page and the command ---

PAGE = (Path(__file__).parent.parent / "docs" / "references.md").read_text("utf-8")


def test_the_pages_training_json_is_one() -> None:
    [example] = re.findall(r"```json\n(.+?)```", PAGE, re.DOTALL)
    stated, warnings = parse_training("training.json", example.encode())
    assert warnings == () and stated.reference is not None
    assert stated.merged_checkpoint == "s3://roster/uploads/ash/run-3/merged/"
    assert stated.reference.heldout["ash/main"].units == 48


def test_the_pages_command_compares_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors, merged = trained()
    save_adapter(Path("trained/ash"), tensors, lora_B_layout="rank_major")
    (save(Path("models/tiny"), BASE_WEIGHTS) / "config.json").write_text(json.dumps(base_fields()))
    save(Path("merged/ash"), merged)
    roster = Roster(capsys, tmp_path)
    assert roster("convert", "trained/ash", "converted/ash", "--base", "models/tiny").code == 0
    [command] = re.findall(r"^roster check .+$", PAGE, re.MULTILINE)
    ran = roster.line(f"{command} --json")
    assert ran.code == 0
    assert [one["passed"] for one in ran.document["checks"] if one["name"] == "merged"] == [True]

    for folder, code, says in (
        ("merged/other", 1, "24 of 34 weights are not base + delta"),
        ("models/tiny", 3, "34 of them equal to the base's"),
    ):
        if folder == "merged/other":
            save(Path(folder), merge(BASE_WEIGHTS, Logical(seed=4), attention()))
        ran = roster.line(command.replace("merged/ash", folder))
        assert ran.code == code and says in " ".join((ran.out + ran.err).split())


# --- in the flow ---


def give_weights(desk: Desk) -> None:
    known = read_base(desk.store, BASE)
    stated = known.document.model_copy(update={"weights": str(save(desk.folder / "base", BASE_WEIGHTS))})
    register_base(desk.store, known.config, stated)


def submit(
    desk: Desk, author: str, merged: Tensors | None, *, packing: str = "rank_major", **stated: Any
) -> None:
    """An adapter whose training.json names a merge in the bucket; `stated` overrides what its config says."""
    folder = desk.adapter(author, packing=packing, **stated)
    uri = f"s3://{desk.store.bucket}/merges/{author}"
    if merged is not None:
        put(desk.store, f"merges/{author}", merged, desk.folder / "merges" / author)
    (folder / "training.json").write_text(json.dumps({"merged_checkpoint": uri}))
    desk.heldout(author)
    desk.submit(author, folder)


def own_merge(author: str) -> Tensors:
    return merge(BASE_WEIGHTS, Logical(seed=crc32(author.encode())), attention())


def merged_of(desk: Desk, author: str) -> dict[str, Any]:
    step = next(step for step in desk.ledger(author).steps if step.kind is StepKind.CHECKED)
    checks: Any = step.result["checks"]
    return next((one for one in checks if one["name"] == "merged"), {})


def test_the_flow_compares_the_merge_before_it_stages_anything(desk: Desk) -> None:
    give_weights(desk)
    submit(desk, "fir", own_merge("fir"), packing="grouped_by_expert")
    assert desk.run("fir").name == "Ready"
    assert merged_of(desk, "fir")["passed"] is True

    submit(desk, "ash", own_merge("ash"), packing="rank_major", lora_B_layout="grouped_by_expert")
    assert desk.run("ash").name == "Quarantined: layout_conflict"
    assert merged_of(desk, "ash")["passed"] is False
    submit(desk, "oak", own_merge("fir"))
    state = desk.run("oak")
    assert state.name == "Quarantined: delta_mismatch" and "24 of 34 weights" in (state.message or "")
    assert desk.keys("serving/ash/") == desk.keys("serving/oak/") == []


def test_a_merge_that_is_the_base_stops_and_is_never_held_against_the_adapter(desk: Desk) -> None:
    give_weights(desk)
    submit(desk, "fir", BASE_WEIGHTS)
    state = desk.run("fir")
    assert state.name == "Stopped: reference_invalid"
    assert "34 of them equal to the base's" in (state.message or "")
    assert desk.ledger("fir").verdict is None
    put(desk.store, "merges/fir", own_merge("fir"), desk.folder / "again")
    assert desk.run("fir").name == "Ready", "merged again, with the same adapter"


@pytest.mark.real
def test_a_merge_that_cannot_be_read_is_noted_and_the_scores_decide(desk: Desk) -> None:
    give_weights(desk)
    submit(desk, "fir", None)
    assert desk.run("fir").name == "Ready"
    assert merged_of(desk, "fir") == {}
    step = next(step for step in desk.ledger("fir").steps if step.kind is StepKind.CHECKED)
    assert "no *.safetensors are there" in json.dumps(step.result)


def test_the_trainers_scores_count_in_the_verdict(desk: Desk) -> None:
    assert desk.ready("fir").name == "Ready"
    measured: Any = desk.ledger("fir").verdict
    own, base = measured.result["own"], measured.result["base"]
    assert base - own > 0.2 and measured.result["reference"] == {}

    def run(own_gap: float, base_gap: float) -> Any:
        score = {
            "own_bpb": own + own_gap,
            "base_bpb": base + base_gap,
            "units": 24,
            "bytes": measured.result["bytes"],
        }
        stated = {"measure_id": "0" * 16, "heldout": {"fir/main": score}}
        folder = desk.adapter("fir")
        (folder / "training.json").write_text(json.dumps({"reference": stated}))
        desk.submit("fir", folder)
        return desk.run("fir")

    assert run(0.0005, -0.0005).name == "Ready"
    verdict: Any = desk.ledger("fir").verdict
    assert verdict.result["reference"] == {
        "fir/main": {
            "own": own + 0.0005,
            "base": base - 0.0005,
            "own_here": pytest.approx(own, abs=1e-12),
            "base_here": pytest.approx(base, abs=1e-12),
        }
    }
    assert verdict.result["thresholds"]["reference_tolerance"] == 1e-3
    assert any("another measure_id" in note for note in verdict.result["notes"])
    state = run(0.038, 0.0)
    assert state.name == "Quarantined: reference_mismatch" and "what is served is not what" in state.message
    assert run(0.0, 0.01).name == "Stopped: reference_invalid"
