"""Taking in uploads as people leave them: several saves in one, names that collide, a trainer's other files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lora_builders import Logical, attention, encode, make_base, save_adapter, short_id
from pipeline_builders import Desk
from safetensors.torch import save_file
from store_builders import memory_store, submit_directory

from storage.documents import encode_document, utc_now
from storage.keys import marker_key, upload_file_key
from storage.ledger import Outcome
from storage.s3 import S3Store
from storage.uploads import UploadedFile, UploadMarker, download_upload, read_upload
from tasks.intake import AdapterWaits, IntakeRefused, take_in
from tasks.lora.errors import AdapterError, AmbiguousWeights, MisspeltFile, PickleRefused
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.outcomes import Code, rule
from tasks.sweeping import list_due

LABEL = "ada/run-1"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GOOD = encode(Logical()) | attention()


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


def keys(store: S3Store) -> list[str]:
    return [found.key for found in store.list_objects("")]


def list_more(store: S3Store, marker: UploadMarker, files: dict[str, bytes]) -> None:
    """Put files beside an upload, and a marker that lists them too, as another program than ours may."""
    listed = list(marker.files)
    for name, data in files.items():
        if "/" not in name:
            store.put(upload_file_key("ada", "run-1", name), data)
        listed.append(UploadedFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
    key = marker_key("ada", "run-1")
    store.put(key, encode_document(key, marker.model_copy(update={"files": tuple(listed)})))


def look(store: S3Store, folder: Path) -> Inspection:
    """The adapter of the upload, downloaded and read as the flow does it."""
    download_upload(store, take_in(store, "ada", "run-1").upload, folder)
    return inspect_adapter(folder, make_base(), label=LABEL)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({f"checkpoint-500/{CONFIG}": b"{}", f"checkpoint-500/{WEIGHTS}": b"x"}, "lies in a folder"),
        ({WEIGHTS.upper(): b"x"}, "differ in nothing but case or Unicode form"),
        ({f"../run-2/{CONFIG}": b"x", "training.json": b"not even JSON"}, "lies in a folder"),
    ],
    ids=["checkpoints", "case", "escape"],
)
def test_an_ambiguous_upload_is_quarantined_on_the_record(
    desk: Desk, files: dict[str, bytes], found: str
) -> None:
    desk.heldout("ada")
    upload = desk.submit("ada", desk.adapter("ada"))
    list_more(desk.store, upload.marker, files)
    desk.submitted["ada"] = read_upload(desk.store, "ada", "run-1")
    state = desk.run("ada")
    assert state.name == "Quarantined: ambiguous_upload"
    verdict = desk.ledger("ada").verdict
    assert verdict is not None and verdict.outcome is Outcome.QUARANTINED
    reason = str(verdict.result["reason"])
    assert reason.startswith(f"{LABEL}: ") and found in reason and reason.endswith("and submit that.")
    assert desk.keys("serving/") == [] and desk.keys("control/") == []
    assert list_due(desk.store, now=utc_now() + timedelta(days=1), grace_s=60, settle_s=600).due == [], (
        "it is final"
    )


def test_names_that_collide_are_mended_by_submitting_again(desk: Desk) -> None:
    """The files that collide may be none of the adapter's own: its digest, and so its ledger, stays the same."""
    desk.heldout("ada")
    upload = desk.submit("ada", desk.adapter("ada"))
    list_more(desk.store, upload.marker, {"caf\u00e9.md": b"x", "cafe\u0301.md": b"y"})
    assert desk.run("ada").name == "Quarantined: ambiguous_upload"
    desk.submit("ada", desk.adapter("ada"), run="run-2")
    assert desk.run("ada", "run-2").name == "Ready"
    assert [step.outcome for step in desk.ledger("ada").steps[:3]] == [
        *(Outcome.QUARANTINED, Outcome.QUARANTINED),
        Outcome.DONE,
    ]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"schema": 1}', "author: Field required"),
        (b"", "Invalid JSON"),
    ],
)
def test_an_upload_whose_marker_cannot_be_read_is_refused_as_damaged(
    store: S3Store, tmp_path: Path, data: bytes, found: str
) -> None:
    """It is the author who has to correct it; `internal` would call it a fault of ours."""
    submit_directory(store, save_adapter(tmp_path / "source", GOOD))
    store.put(marker_key("ada", "run-1"), data)
    before = keys(store)
    with pytest.raises(IntakeRefused, match=rf"uploads/ada/run-1/_READY.json: .*{found}") as caught:
        take_in(store, "ada", "run-1")
    assert caught.value.code == "corrupt_or_partial"
    message = str(caught.value)
    assert message.startswith(f"{LABEL}: ") and message.endswith(". Correct it and write it again.")
    assert ".." not in message.replace("no '..'", "") and keys(store) == before


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"authors": ["Ada"]}', "authors.0: Value error, author 'Ada': expected 1 to 64"),
        (b"<html>404</html>", "Invalid JSON"),
    ],
)
def test_a_statement_that_cannot_be_read_is_on_the_record_and_mended_by_submitting_again(
    desk: Desk, data: bytes, found: str
) -> None:
    """Its author asks `roster why`, which knows only what has a ledger."""
    desk.heldout("ada")
    folder = desk.adapter("ada")
    list_more(desk.store, desk.submit("ada", folder).marker, {"training.json": data})
    assert desk.run("ada").name == "Quarantined: corrupt_or_partial"
    verdict = desk.ledger("ada").verdict
    assert verdict is not None and verdict.result["where"] == "training.json"
    reason = str(verdict.result["reason"])
    assert reason.startswith(f"{LABEL}: training.json: found {found}"[:40]) and found in reason
    assert "expected what a trainer may state" in reason and "Correct it" in reason
    assert list_due(desk.store, now=utc_now() + timedelta(days=1), grace_s=60, settle_s=600).due == [], (
        "it is final"
    )
    desk.submit("ada", folder, run="run-2")
    assert desk.run("ada", "run-2").name == "Ready"


def test_an_upload_that_no_upload_can_be_called_is_refused(store: S3Store) -> None:
    """Whatever an event says: another program may send it."""
    with pytest.raises(IntakeRefused, match=r"Ada B/run-1: author 'Ada B': expected 1 to 64") as caught:
        take_in(store, "Ada B", "run-1")
    assert caught.value.code == "ambiguous_upload"


def test_files_that_are_listed_and_not_there_yet_are_waited_for(store: S3Store, tmp_path: Path) -> None:
    """Still uploading and wrong for good are two things: this one ends by itself."""
    marker = submit_directory(store, save_adapter(tmp_path / "source", GOOD))
    list_more(store, marker, {"late.md": b"words"})
    store.delete(upload_file_key("ada", "run-1", "late.md"))
    with pytest.raises(AdapterWaits, match=r"ada/run-1 waits: .*late\.md is listed, but not there") as caught:
        take_in(store, "ada", "run-1")
    assert caught.value.code is Code.INCOMPLETE_UPLOAD
    store.put(upload_file_key("ada", "run-1", "late.md"), b"words")
    take_in(store, "ada", "run-1")


def test_a_trainers_other_files_are_neither_fetched_nor_part_of_the_adapter(
    store: S3Store, tmp_path: Path
) -> None:
    source = save_adapter(tmp_path / "source", GOOD)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "training_args.bin"):
        (source / name).write_bytes(b"{}")
    save_adapter(source / "checkpoint-500", encode(Logical(seed=1)))
    submit_directory(store, source)
    found = look(store, tmp_path / "taken")
    assert sorted(path.name for path in (tmp_path / "taken").iterdir()) == [CONFIG, WEIGHTS]
    assert (found.pairs, found.files.stray) == (24, ())
    digest = read_upload(store, "ada", "run-1").adapter_digest
    submit_directory(store, save_adapter(tmp_path / "plain", GOOD), run="run-2")
    assert read_upload(store, "ada", "run-2").adapter_digest == digest


def beside_a_shard(folder: Path) -> None:
    save_file(encode(Logical(seed=1)), folder / "adapter_model-00001-of-00002.safetensors")


def beside_an_earlier_step(folder: Path) -> None:
    save_file(encode(Logical(seed=1)), folder / "adapter_model_step_500.safetensors")


def config_in_other_letters(folder: Path) -> None:
    (folder / CONFIG).rename(folder / "Adapter_Config.json")


def pickle_alone(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"x": torch.ones(3)}, folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("spoil", "error", "code"),
    [
        (beside_a_shard, AmbiguousWeights, "ambiguous_upload"),
        (beside_an_earlier_step, AmbiguousWeights, "ambiguous_upload"),
        (config_in_other_letters, MisspeltFile, "ambiguous_upload"),
        (pickle_alone, PickleRefused, "pickle_refused"),
    ],
    ids=short_id,
)
def test_what_is_wrong_with_an_uploads_own_files_is_known_under_its_digest(
    store: S3Store, tmp_path: Path, spoil: Callable[[Path], None], error: type[AdapterError], code: str
) -> None:
    """The files that make it ambiguous are the adapter's own, so they are fetched, judged and on the record."""
    source = save_adapter(tmp_path / "source", GOOD)
    submit_directory(store, source, run="good")
    spoil(source)
    submit_directory(store, source)
    with pytest.raises(error, match=rf"^{LABEL}: ") as caught:
        look(store, tmp_path / "taken")
    assert rule(caught.value).code.value == code
    taken = {name: read_upload(store, "ada", name).adapter_digest for name in ("good", "run-1")}
    assert taken["good"] != taken["run-1"]
