"""The fuzzer tells what is strange, and what it found stays mended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lora_builders import Logical, config_fields, encode, make_base, save_adapter

from bench import fuzz, fuzz_trial
from bench.fuzz_adapters import Form, list_uploads
from bench.fuzz_trial import Outcome, try_input
from storage.documents import decode_document
from storage.errors import InvalidDocument
from storage.policy import PolicyDocument
from storage.training import parse_training
from storage.uploads import UploadMarker
from tasks.directories import KnownBase, adapter_digest, convert_directory, inspect_directory
from tasks.lora.base import read_base_config
from tasks.lora.config import parse_adapter_config
from tasks.lora.errors import (
    AdapterError,
    CorruptFile,
    DestinationExists,
    EscapingPath,
    InvalidBaseConfig,
    InvalidConfig,
    UnreadableName,
)
from tasks.lora.files import WEIGHTS_NAME, open_adapter
from tasks.lora.header import parse_header
from tasks.lora.patterns import PatternTable, compile_key

pytestmark = pytest.mark.real  # the bench in small

BASE = KnownBase(make_base())


def try_some(folder: Path, seeds: range, limit: float = 20.0) -> list[Outcome]:
    return [try_input(seed, folder, limit, adapters=4) for seed in seeds]


def test_nothing_strange_comes_of_wrong_adapters(tmp_path: Path) -> None:
    outcomes = try_some(tmp_path, range(50))
    assert [(one.seed, one.strange, one.leftovers) for one in outcomes if one.strange or one.leftovers] == []
    assert sum(one.converted == 2 for one in outcomes) > 3
    assert len({code for one in outcomes for code in one.codes}) > 20
    assert not list(tmp_path.iterdir())


def test_an_input_is_its_seed(tmp_path: Path) -> None:
    first, again = (try_some(tmp_path, range(40, 44)) for _ in range(2))
    assert [(one.kinds, one.codes) for one in first] == [(one.kinds, one.codes) for one in again]
    assert len({(*one.kinds, *one.codes) for one in first}) > 2


def _raise_key_error(*args: object, **options: object) -> None:
    raise KeyError("lora_A")


def _leave_something(source: Path, destination: Path, *args: object, **options: object) -> None:
    (destination.parent / ".output.partial").mkdir()
    raise CorruptFile("a", "b", "c", "d")


def _hang(*args: object, **options: object) -> None:
    time.sleep(20)


def _say_what_nobody_can_write(*args: object, **options: object) -> None:
    raise CorruptFile("a", "\udcff", "c", "d")


@pytest.mark.parametrize(
    ("name", "fault", "told"),
    [
        ("inspect_directory", _raise_key_error, "KeyError in "),
        ("inspect_directory", _say_what_nobody_can_write, "cannot be written down"),
        ("convert_directory", _hang, "not done in 0.3 s: test_bench_fuzz.py"),
        ("convert_directory", _leave_something, ".output.partial"),
    ],
)
def test_faults_of_the_product_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., None], told: str
) -> None:
    monkeypatch.setattr(fuzz_trial, name, fault)
    monkeypatch.setattr(fuzz_trial, "change_upload", lambda *args: None)
    counts = fuzz.Counts()
    for outcome in try_some(tmp_path, range(1), limit=0.3 if fault is _hang else 20.0):
        counts.add(outcome)
    assert told in "".join(counts.strange + counts.left)
    assert counts.successes == 0


def test_valid_adapters_are_valid_and_of_every_form(tmp_path: Path) -> None:
    for number, upload in enumerate(list_uploads()):
        (folder := tmp_path / str(number)).mkdir()
        for name, body in upload.files.items():
            assert isinstance(body, bytes)
            (folder / name).write_bytes(body)
        base = KnownBase(read_base_config(upload.base, label="base"))
        inspect_directory(folder, base, packing=None, header_only=True)
    names = [upload.name for upload in list_uploads()]
    assert len(names) == len(set(names)) > 30
    assert {name.partition(" ")[2] for name in names} == {form.value for form in Form}


@pytest.mark.real
def test_bench_runs_in_processes_of_its_own() -> None:
    figures = fuzz.run(["--inputs", "30", "--seed", "7000"])
    assert figures["passed"] and figures["inputs"] == 30
    assert figures["successes"] + figures["clean_errors"] == 30


# What it found


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "ash", encode(Logical()))


def look(adapter: Path) -> dict[str, Any]:
    return inspect_directory(adapter, BASE, packing="rank_major", header_only=False)


@pytest.mark.parametrize("name", ["adapter_model.bin", "training.json", "notes.txt", WEIGHTS_NAME])
@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("nowhere", "a link that leads nowhere (No such file or directory)"),
        ("self", "a link that leads nowhere (it leads to itself)"),
        ("x" * 300, "a link that leads nowhere (File name too long)"),
        ("/etc/passwd", "a link to /etc/passwd"),
        ("pipe", "a folder or a device"),
    ],
)
def test_files_beside_the_adapter_that_are_none(adapter: Path, name: str, target: str, found: str) -> None:
    """A pipe made it wait for ever, a loop was a RuntimeError, and a conversion was left behind."""
    path = adapter / name
    path.unlink(missing_ok=True)
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(name if target == "self" else target)
    with pytest.raises(EscapingPath) as caught:
        convert_directory(
            adapter, adapter.parent / "out", BASE, packing="rank_major", format="per-expert", progress=None
        )
    assert str(caught.value).startswith(
        f"ash: {name}: found {found}; expected a regular file inside its folder."
    )
    assert [path.name for path in adapter.parent.iterdir()] == ["ash"]


def test_folders_and_dot_files_are_no_part_of_an_adapter(adapter: Path) -> None:
    """They are never uploaded; a folder of that name was an IsADirectoryError."""
    digest = adapter_digest(adapter)
    (adapter / "adapter_model.bin").mkdir()
    (adapter / ".cache.safetensors").write_bytes(b"half of a download")
    (adapter / ".lock").symlink_to("nowhere")
    found = look(adapter)
    assert found["adapter_digest"] == digest
    assert any("adapter_model.bin" in warning for warning in found["warnings"])


@pytest.mark.parametrize("name", [b"\xff.bin", b"caf\xe9.safetensors", b"notes\xff"])
def test_names_that_are_no_text(adapter: Path, name: bytes) -> None:
    (adapter / os.fsdecode(name)).write_bytes(b"")
    with pytest.raises(UnreadableName) as caught:
        look(adapter)
    assert str(caught.value) == (
        f"ash: {os.fsdecode(name)!a}: found bytes that are not; expected file names in UTF-8. "
        "Rename the file or take it out of the folder."
    )


def test_links_are_not_taken_for_an_empty_destination(adapter: Path) -> None:
    """Renaming a folder to a link fails, after all was written."""
    (adapter.parent / "empty").mkdir()
    for target in ("nowhere", "empty"):
        (destination := adapter.parent / f"to-{target}").symlink_to(target)
        with pytest.raises(DestinationExists):
            convert_directory(
                adapter, destination, BASE, packing="rank_major", format="stacked", progress=None
            )
        assert destination.is_symlink()


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("x{99999999999}", "a regular expression, which this is not: the repetition number is too large"),
        ("(" * 3000 + "a" + ")" * 3000, "a pattern that is not nested too deep to be real"),
        (".?" * 40 + "x", "a pattern that matches in at most 1000000 ways"),
        ("(.|.)" * 30 + "x", "a pattern that matches in at most 1000000 ways"),
        ("proj|" * 3000, "a pattern of at most 10000 characters, where this has 15000"),
    ],
    ids=range(5),
)
def test_patterns_that_python_cannot_compile_or_match(field: str, key: str, found: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{field}.*{found}") as caught:
        parse_adapter_config(json.dumps(config_fields(**{field: {key: 3}})).encode(), label="ash")
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(
    "key",
    [
        rf"layers\.({'|'.join(map(str, range(94)))})\.(self_attn|mlp\.experts)\.(q|k|v|o|gate|up|down)_proj",
        r".*\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj",
        r"(?:model\.)?layers\.[0-9]+\.(?:[qkvo]|(?:gate|up|down))_proj",
    ],
)
def test_patterns_that_people_write_are_taken(key: str) -> None:
    compile_key(key)
    assert PatternTable({key: 3}).find("model.layers.7.none_of_these") == {}


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_times_that_utc_does_not_have(moment: str) -> None:
    policy = {"schema": 1, "lora_B_layout": "rank_major", "why": "x", "set_by": "mara", "set_at": moment}
    with pytest.raises(InvalidDocument, match=r"set_at: .*a time before the year 1 or after 9999"):
        decode_document("policy.json", json.dumps(policy).encode(), PolicyDocument)


def test_refusals_of_documents_stay_short() -> None:
    marker = {"author": "a" * 50_000, "run": "b" * 50_000, "c" * 50_000: 1}
    with pytest.raises(InvalidDocument) as caught:
        decode_document("_READY.json", json.dumps(marker).encode(), UploadMarker)
    assert 100 < len(str(caught.value)) < 2_000
    _, warnings = parse_training("training.json", json.dumps({f"{n}" * 200: 1 for n in range(999)}).encode())
    assert len(warnings) == 21 and sum(map(len, warnings)) < 10_000
    assert warnings[-1] == "training.json: 979 more keys that we do not know, ignored"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"hidden_size": 10**4000}, "hidden_size"),
        ({"head_dim": 2**31}, "head_dim"),
        ({"num_local_experts": 10**9}, "num_local_experts"),
    ],
)
def test_sizes_beyond_any_model(changes: dict[str, Any], where: str) -> None:
    """Python prints no number of more than 4,300 digits, which a product of two soon has."""
    with pytest.raises(InvalidBaseConfig, match="at most") as caught:
        make_base(**changes)
    assert where in caught.value.where
    assert len(str(caught.value)) < 1_000


def test_names_longer_than_any_modules() -> None:
    """Hundreds of thousands of characters took seconds to explain."""
    header = json.dumps({"x" * 5000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    with pytest.raises(CorruptFile, match="found one of 5000; expected a name of at most 4096 characters"):
        parse_header(header, file_bytes=len(header) + 12, adapter="ash", where=WEIGHTS_NAME)


def test_a_config_that_leads_nowhere(adapter: Path) -> None:
    (adapter / "adapter_config.json").unlink()
    (adapter / "adapter_config.json").symlink_to("x" * 300)
    with pytest.raises(AdapterError, match=r"adapter_config\.json: found a link that leads nowhere"):
        open_adapter(adapter, label="ash")
