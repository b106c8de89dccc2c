import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from store_builders import Clock, failing, make_adapter_directory, memory_store, submit_directory, with_faults

import storage.uploads
from storage.documents import encode_document
from storage.errors import (
    InvalidDocument,
    ObjectNotFound,
    StoreUnavailable,
    UploadAmbiguous,
    UploadChanged,
    UploadCorrupt,
    UploadIncomplete,
)
from storage.keys import marker_key, upload_file_key
from storage.listing import list_uploads
from storage.objects import ObjectInfo
from storage.s3 import S3Store
from storage.training import Training, parse_training
from storage.uploads import UploadMarker, download_upload, file_names_fault, read_upload


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


def put_marker(store: S3Store, marker: UploadMarker, **changes: Any) -> None:
    key = marker_key("ada", "run-1")
    store.put(key, encode_document(key, marker.model_copy(update=changes)))


def test_an_upload_arrives_as_it_was_submitted(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path / "source")
    clock = Clock()
    seen: list[tuple[int, int]] = []
    marker = submit_directory(store, source, now=clock, progress=lambda *done: seen.append(done))
    upload = read_upload(store, "ada", "run-1")

    assert upload.marker == marker
    assert (marker.author, marker.run, marker.base, marker.submitted_at) == (
        "ada",
        "run-1",
        "tiny",
        clock.time,
    )
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "optimizer.pt"]
    assert [file.name for file in marker.files] == names
    assert seen[-1] == (sum(file.bytes for file in marker.files),) * 2
    assert upload.training is None
    assert upload.training_digest is None

    lines = ""
    for name in ["adapter_config.json", "adapter_model.safetensors"]:
        lines += f"{hashlib.sha256((source / name).read_bytes()).hexdigest()} {name}\n"
    assert upload.adapter_digest == hashlib.sha256(lines.encode()).hexdigest()

    files = download_upload(store, upload, tmp_path / "target")
    assert [file.name for file in files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == [file.name for file in files]
    for file in files:
        assert (tmp_path / "target" / file.name).read_bytes() == (source / file.name).read_bytes()


def test_only_the_adapters_own_files_are_its_identity(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path)
    submit_directory(store, source, run="run-1")
    (source / "README.md").write_text("other words")
    (source / "optimizer.pt").unlink()
    submit_directory(store, source, run="run-2")
    (source / "adapter_config.json").write_text("{}")
    submit_directory(store, source, run="run-3")
    digests = [read_upload(store, "ada", f"run-{number}").adapter_digest for number in (1, 2, 3)]
    assert digests[0] == digests[1] != digests[2]


def test_uploads_are_listed_by_their_markers(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path)
    submit_directory(store, source, "ada", "run-1")
    submit_directory(store, source, "bob", "run-9")
    store.put("uploads/carl/run-1/adapter_config.json", b"{}")
    store.put("uploads/Ada/run-2/_READY.json", b"{}")
    listing = list_uploads(store)
    assert [(found.author, found.run) for found in listing.ready] == [("ada", "run-1"), ("bob", "run-9")]
    assert listing.ready[0].marker.etag == read_upload(store, "ada", "run-1").marker_etag
    assert [(found.author, found.run) for found in listing.misnamed] == [("Ada", "run-2")]


@pytest.mark.parametrize("missing", ["marker", "file", "size", "training"])
def test_an_upload_that_is_not_all_there_waits(store: S3Store, tmp_path: Path, missing: str) -> None:
    """Markers seen before their data: PrimeIntellect-ai/prime-rl #2391."""
    submit_directory(store, make_adapter_directory(tmp_path), training=Training(peft_version="0.21.2"))
    read_upload(store, "ada", "run-1")
    match missing:
        case "marker":
            store.delete(marker_key("ada", "run-1"))
            fact = "_READY.json is not there yet"
        case "file":
            store.delete(upload_file_key("ada", "run-1", "optimizer.pt"))
            fact = "optimizer.pt is listed, but not there"
        case "size":
            store.put(upload_file_key("ada", "run-1", "adapter_model.safetensors"), b"half")
            fact = "adapter_model.safetensors should have 70001 bytes, found 4"
        case _:
            key = upload_file_key("ada", "run-1", "training.json")
            store.put(key, store.get(key).body.replace(b"0.21.2", b"0.20.2"))
            fact = "training.json is not the one that the marker lists"
    with pytest.raises(UploadIncomplete, match=f"ada/run-1: the upload is not complete: {fact}"):
        read_upload(store, "ada", "run-1")


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("names", "fact"),
    [
        ([CONFIG, "../secret"], "'../secret' lies in a folder"),
        ([CONFIG, "/etc/hostname"], "'/etc/hostname' lies in a folder"),
        # Several checkpoints in one upload, as a plain copy of a trainer's output folder lists them.
        ([CONFIG, WEIGHTS, f"checkpoint-500/{WEIGHTS}"], f"'checkpoint-500/{WEIGHTS}' lies in a folder"),
        ([CONFIG, ".."], "'..' is no name for an uploaded file"),
        ([CONFIG, "a\\b"], r"'a\\b' is no name for an uploaded file"),
        ([CONFIG, "a\nb"], r"'a\nb' is no name for an uploaded file"),
        ([CONFIG, "\u202ebin.a"], r"'\u202ebin.a' is no name for an uploaded file"),
        ([CONFIG, "_READY.json"], "'_READY.json' is no name for an uploaded file"),
        ([CONFIG, "é" * 101], "… is longer than 200 bytes"),
        ([CONFIG, CONFIG], f"'{CONFIG}' is listed twice"),
        (
            [WEIGHTS, "Training.JSON"],
            "'Training.JSON' is training.json in other letters, and would be passed over",
        ),
        ([WEIGHTS, "_ready.json"], "'_ready.json' is _READY.json in other letters"),
        ([WEIGHTS, "Adapter_Model.safetensors"], "differ in nothing but case or Unicode form"),
        ([WEIGHTS, "straße.md", "STRASSE.md"], r"'stra\xdfe.md' and 'STRASSE.md' differ in nothing but"),
        (
            [WEIGHTS, "caf\u00e9.md", "cafe\u0301.md"],
            r"'caf\xe9.md' and 'cafe\u0301.md' differ in nothing but",
        ),
        (
            [WEIGHTS, "CAF\u00c9.md", "cafe\u0301.md"],
            r"'CAF\xc9.md' and 'cafe\u0301.md' differ in nothing but",
        ),
    ],
)
def test_file_names_that_escape_or_collide_have_a_fault(names: list[str], fact: str) -> None:
    """On a disk that ignores case or Unicode forms the second file would take the place of the first."""
    found = file_names_fault(names)
    assert found is not None and fact in found
    assert len(found) < 300


def test_an_upload_of_such_names_is_known_and_never_downloaded(store: S3Store, tmp_path: Path) -> None:
    """It has a digest, by what its marker lists, under which its ledger can say why it is refused."""
    marker = submit_directory(store, make_adapter_directory(tmp_path))
    file = marker.files[1]
    digests = set()
    for other, fault in (
        (f"checkpoint-500/{CONFIG}", f"'checkpoint-500/{CONFIG}' lies in a folder"),
        (CONFIG.upper(), f"'{CONFIG}' and '{CONFIG.upper()}' differ in nothing but case"),
    ):
        store.put(f"uploads/ada/run-1/{other}", b"{}")
        put_marker(store, marker, files=(file, file.model_copy(update={"name": other})))
        upload = read_upload(store, "ada", "run-1")
        with pytest.raises(UploadAmbiguous) as caught:
            download_upload(store, upload, tmp_path / "target")
        assert not (tmp_path / "target").exists()
        message = str(caught.value)
        assert message.startswith(f"ada/run-1: the upload is ambiguous: {fault}")
        assert "Expected one save's files" in message and message.endswith("and submit that.")
        digests.add(upload.adapter_digest)
    assert len(digests) == 2, "a file of the adapter's own that is listed beside it makes it another"


def test_names_that_can_be_told_apart_are_taken(store: S3Store, tmp_path: Path) -> None:
    """Letters of any alphabet, spaces and the longest name there may be: downloaded as they were submitted."""
    source = make_adapter_directory(tmp_path / "source")
    own = ["adapter_model-ä ö.safetensors", "アダプタ.safetensors", "x" * 188 + ".safetensors"]
    for number, name in enumerate(own):
        (source / name).write_bytes(bytes([number]))
    (source / "cafe\u0301 (1).md").write_text("x")
    submit_directory(store, source)
    download_upload(store, read_upload(store, "ada", "run-1"), tmp_path / "target")
    assert {path.name for path in (tmp_path / "target").iterdir()} == {CONFIG, WEIGHTS, *own}
    for name in own:
        assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes()


def test_what_a_trainer_leaves_beside_the_adapter_changes_nothing(store: S3Store, tmp_path: Path) -> None:
    """Tokenizer, optimizer and other checkpoints' folders: the same adapter, none of them fetched."""
    source = make_adapter_directory(tmp_path / "source")
    submit_directory(store, source, run="plain")
    stray = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
    stray += ["vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model", "rng_state_0.pth"]
    for name in stray:
        (source / name).write_text("{}")
    make_adapter_directory(source / "checkpoint-10", seed=8)
    marker = submit_directory(store, source, run="stray")
    assert {file.name for file in marker.files} == {*stray, CONFIG, WEIGHTS, "optimizer.pt", "README.md"}
    plain, full = read_upload(store, "ada", "plain"), read_upload(store, "ada", "stray")
    assert plain.adapter_digest == full.adapter_digest
    download_upload(store, full, tmp_path / "target")
    assert {path.name for path in (tmp_path / "target").iterdir()} == {CONFIG, WEIGHTS}


def test_a_marker_of_another_upload_is_refused(store: S3Store, tmp_path: Path) -> None:
    marker = submit_directory(store, make_adapter_directory(tmp_path))
    put_marker(store, marker, run="run-2")
    with pytest.raises(
        InvalidDocument, match=r"uploads/ada/run-1/_READY.json: .* it is the marker of ada/run-2"
    ):
        read_upload(store, "ada", "run-1")
    put_marker(store, marker, submission="2020-03-01T10:00:00Z-0a1b2c3d")
    with pytest.raises(InvalidDocument, match="does not begin with submitted_at"):
        read_upload(store, "ada", "run-1")
    put_marker(store, marker, files=marker.files[:1])
    with pytest.raises(InvalidDocument, match=r"neither adapter_config.json nor a weight file"):
        read_upload(store, "ada", "run-1")


@pytest.mark.parametrize(
    ("replaced", "file"), [("weights", "adapter_model.safetensors"), ("marker", "_READY.json")]
)
def test_an_upload_overwritten_during_the_download_is_noticed(
    store: S3Store, tmp_path: Path, replaced: str, file: str
) -> None:
    marker = submit_directory(store, make_adapter_directory(tmp_path / "source"))
    upload = read_upload(store, "ada", "run-1")
    if replaced == "weights":
        store.put(upload_file_key("ada", "run-1", file), bytes(70_001))
    else:
        put_marker(store, marker, base="other")
    with pytest.raises(UploadChanged, match=f"ada/run-1: {file} was replaced in the store") as caught:
        download_upload(store, upload, tmp_path / "target")
    assert caught.value.file == file
    assert not (tmp_path / "target" / "adapter_model.safetensors").exists() or replaced == "marker"


def test_bytes_other_than_the_marker_promises_are_corrupt_after_a_second_look(
    store: S3Store, tmp_path: Path
) -> None:
    """ETags are no digests, so only our own sha256 tells."""
    submit_directory(store, make_adapter_directory(tmp_path / "source"))
    key = upload_file_key("ada", "run-1", "adapter_model.safetensors")
    store.put(key, bytes(70_001))
    upload = read_upload(store, "ada", "run-1")
    asked: list[str] = []
    real_get = store._client.get_object

    def get(**given: Any) -> Any:
        asked.append(given["Key"])
        return real_get(**given)

    with pytest.raises(UploadCorrupt) as caught:
        download_upload(with_faults(store, get_object=get), upload, tmp_path / "target")
    assert asked.count(key) == 2
    assert caught.value.file == "adapter_model.safetensors"
    assert caught.value.found == hashlib.sha256(bytes(70_001)).hexdigest()
    assert caught.value.expected == upload.adapter_files[1].digest.sha256
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["adapter_config.json"]


def test_a_file_deleted_after_intake_is_not_found(store: S3Store, tmp_path: Path) -> None:
    submit_directory(store, make_adapter_directory(tmp_path / "source"))
    upload = read_upload(store, "ada", "run-1")
    store.delete(upload_file_key("ada", "run-1", "adapter_config.json"))
    with pytest.raises(ObjectNotFound, match=r"uploads/ada/run-1/adapter_config.json"):
        download_upload(store, upload, tmp_path / "target")


def test_what_a_training_json_leaves_open_may_be_written_as_null() -> None:
    """As a program does that writes out every field it has."""
    stated = json.dumps(dict.fromkeys(Training.model_fields.keys() - {"schema_version", "lora_b_layout"}))
    training, ignored = parse_training("training.json", stated.encode())
    assert training == Training() and ignored == ()
    assert len(json.loads(stated)) == 8


def test_a_training_json_that_goes_while_it_is_read_is_waited_for(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission by another program takes files away while the sweep looks: that run had no code."""
    submit_directory(store, make_adapter_directory(tmp_path), training=Training(peft_version="0.21.2"))
    whole = S3Store.head

    def take_away(self: S3Store, key: str) -> ObjectInfo | None:
        found = whole(self, key)
        if key.endswith("training.json"):
            self.delete(key)
        return found

    monkeypatch.setattr(S3Store, "head", take_away)
    with pytest.raises(UploadIncomplete, match=r"training.json is listed, and was taken away"):
        read_upload(store, "ada", "run-1")


def test_a_training_json_too_large_to_be_one_is_not_read(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.uploads, "_MAX_TRAINING_BYTES", 20)
    submit_directory(store, make_adapter_directory(tmp_path), training=Training(peft_version="0.21.2"))
    upload = read_upload(store, "ada", "run-1")
    assert upload.training is None and upload.training_digest is not None
    assert re.fullmatch(r"\d+ bytes, where at most 20 are read", upload.misstatement or "")


def test_training_statements_travel_and_unknown_keys_warn(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path)
    values = {
        "trainer": {"name": "unsloth_zoo", "version": "2026.8.17", "host": "h"},
        "lora_B_layout": "rank_major",
        "wandb": {"id": 1},
        "reference": {
            "measure_id": "m",
            "heldout": {
                "ada/letters": {"own_bpb": 1.5, "base_bpb": 2, "units": 24, "bytes": 9000, "nats": 1}
            },
        },
    }
    (source / "training.json").write_text(json.dumps(values))
    submit_directory(store, source)
    upload = read_upload(store, "ada", "run-1")

    assert upload.training is not None
    assert upload.training.lora_b_layout == "rank_major"
    assert upload.training.reference is not None
    assert upload.training.reference.heldout["ada/letters"].base_bpb == 2.0
    assert upload.training_digest == hashlib.sha256((source / "training.json").read_bytes()).hexdigest()
    paths = ["trainer.host", "wandb", "reference.heldout.ada/letters.nats"]
    key = "uploads/ada/run-1/training.json"
    assert upload.warnings == tuple(f"{key}: {path} is no key we know, ignored" for path in paths)


def test_a_key_counts_under_its_own_name_or_is_warned_of(store: S3Store, tmp_path: Path) -> None:
    """A field's name in our code is no key of the document: used and warned of as unknown, it would mislead."""
    source = make_adapter_directory(tmp_path)
    (source / "training.json").write_text('{"lora_b_layout": "rank_major", "schema_version": 1}')
    submit_directory(store, source)
    upload = read_upload(store, "ada", "run-1")
    assert upload.training is not None and upload.training.lora_b_layout is None
    assert [line.split()[1] for line in upload.warnings] == ["lora_b_layout", "schema_version"]


def score(**figures: str) -> str:
    """A training.json with a reference, figures as they are written in JSON."""
    fields = {"own_bpb": "2.1", "base_bpb": "2.4", "units": "20", "bytes": "9000"} | figures
    written = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    return f'{{"reference": {{"measure_id": "m", "heldout": {{"ada/main": {{{written}}}}}}}}}'


def test_a_reference_with_real_figures_is_read() -> None:
    training, ignored = parse_training("training.json", score().encode())
    assert training.reference is not None and ignored == ()
    assert training.reference.heldout["ada/main"].own_bpb == 2.1


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("{", "Invalid JSON"),
        ('{"heldout": ["letters"]}', "heldout.0: .*expected <author>/<name>"),
        ('{"authors": ["Ada"]}', "authors.0: .*author 'Ada': expected"),
        ('{"reference": {"heldout": {}}}', "reference.measure_id: Field required"),
        (score(own_bpb="NaN"), "own_bpb: Input should be a finite number"),
        (score(base_bpb="-1"), "base_bpb: Input should be greater than or equal to 0"),
        (score(bytes="0"), "bytes: Input should be greater than or equal to 1"),
        ('{"trainer": {"name": "peft", "name": "unsloth_zoo"}}', "the key 'name' twice"),
    ],
)
def test_a_training_json_that_cannot_be_read_is_refused_at_both_ends(
    store: S3Store, tmp_path: Path, text: str, fact: str
) -> None:
    source = make_adapter_directory(tmp_path)
    marker = submit_directory(store, source)
    (source / "training.json").write_text(text)
    with pytest.raises(InvalidDocument, match=rf"{source}/training.json: .*{fact}"):
        submit_directory(store, source)
    listed = {
        "name": "training.json",
        "bytes": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    store.put(upload_file_key("ada", "run-1", "training.json"), text.encode())
    put_marker(store, marker, files=(*marker.files, marker.files[0].model_copy(update=listed)))
    upload = read_upload(store, "ada", "run-1")
    assert upload.training is None and upload.training_digest == listed["sha256"]
    assert re.search(fact, str(upload.misstatement))


def test_a_store_that_fails_is_not_taken_for_a_bad_upload(store: S3Store, tmp_path: Path) -> None:
    submit_directory(store, make_adapter_directory(tmp_path))
    down = with_faults(store, head_object=failing(EndpointConnectionError(endpoint_url="http://x")))
    with pytest.raises(StoreUnavailable, match="head uploads/ada/run-1/"):
        read_upload(down, "ada", "run-1")
