import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_builders import Clock, make_adapter_directory, memory_store, submit_directory, with_faults

from storage.bases import BaseDocument, BaseEngine, TargetFormat, register_base
from storage.errors import (
    InvalidName,
    NameTaken,
    UploadIncomplete,
    UploadRaced,
    UploadRefused,
)
from storage.listing import list_uploads
from storage.s3 import S3Store
from storage.submit import new_submission
from storage.training import Training
from storage.uploads import UploadMarker, read_upload


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


def test_submissions_compare_by_time_and_are_never_equal() -> None:
    clock = Clock()
    first, twin = new_submission(clock()), new_submission(clock())
    clock.pass_seconds(1)
    assert first != twin
    assert max(first, twin) < new_submission(clock())
    assert re.fullmatch(r"2026-03-01T12:00:00Z-[0-9a-f]{8}", first)


@pytest.mark.parametrize(
    ("author", "run", "fact"),
    [("a/b", "run-1", "author 'a/b'"), ("Ada", "run-1", "author 'Ada'"), ("ada", "..", "run '..'")],
)
def test_bad_names_are_refused_before_anything_is_put(
    store: S3Store, tmp_path: Path, author: str, run: str, fact: str
) -> None:
    with pytest.raises(InvalidName, match=re.escape(fact)):
        submit_directory(store, make_adapter_directory(tmp_path), author, run)
    assert list(store.list_objects("")) == []


def test_an_author_may_not_be_taken_for_another(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path)
    submit_directory(store, source, "ann-lee")
    with pytest.raises(
        NameTaken, match=r"author 'ann\.lee': expected a name of its own, found author ann-lee"
    ):
        submit_directory(store, source, "ann.lee")
    submit_directory(store, source, "ann-lee", "run-2")


def test_authors_and_served_bases_have_different_names(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path)
    document = BaseDocument(
        base="tiny",
        aliases=("tiny-alias",),
        served_model="tiny-served",
        weights_digest=None,
        engine=BaseEngine(),
        target_format=TargetFormat.PER_EXPERT,
    )
    register_base(store, b"{}", document)
    for name in ["tiny", "tiny-alias", "tiny-served"]:
        with pytest.raises(
            NameTaken, match=f"author '{name}': .* found base tiny, which is served under that name"
        ):
            submit_directory(store, source, name)
    submit_directory(store, source, "ada")
    with pytest.raises(NameTaken, match=r"base 'ada': .* found author ada"):
        register_base(store, b"{}", document.model_copy(update={"served_model": "ada"}))


def test_a_marker_is_gone_while_its_upload_is_replaced(store: S3Store, tmp_path: Path) -> None:
    """A stale marker would vouch for files that are no longer its own."""
    source = make_adapter_directory(tmp_path)
    submit_directory(store, source)
    real_put = store._client.put_object

    def put(**given: Any) -> Any:
        if "Metadata" in given:
            raise OSError("line cut")
        return real_put(**given)

    broken = with_faults(store, put_object=put)
    with pytest.raises(OSError, match="line cut"):
        submit_directory(broken, source)
    with pytest.raises(UploadIncomplete, match=r"_READY.json is not there yet"):
        read_upload(store, "ada", "run-1")
    assert submit_directory(store, source) == read_upload(store, "ada", "run-1").marker


def test_two_submissions_of_one_run_do_not_both_get_the_marker(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path)
    real_put = store._client.put_object
    winners: list[UploadMarker] = []

    def put(**given: Any) -> Any:
        if "Metadata" in given and not winners:
            winners.append(submit_directory(store, source))
        return real_put(**given)

    with pytest.raises(UploadRaced, match=r"ada/run-1: .* another submission of this run"):
        submit_directory(with_faults(store, put_object=put), source)
    assert read_upload(store, "ada", "run-1").marker == winners[0]


@pytest.mark.parametrize(
    "case", ["no directory", "nothing", "folders", "link", "colliding", "forms", "bytes", "marker"]
)
def test_directories_that_cannot_be_an_adapter_are_refused(store: S3Store, tmp_path: Path, case: str) -> None:
    source = make_adapter_directory(tmp_path / "source")
    match case:
        case "no directory":
            source, fact = tmp_path / "nowhere", "it is not a directory"
        case "nothing":
            (source / "adapter_config.json").unlink()
            (source / "adapter_model.safetensors").unlink()
            fact = (
                "expected adapter_config.json and adapter_model.safetensors, found README.md, optimizer.pt: "
                "name the folder that holds the final adapter"
            )
        case "folders":
            source = tmp_path / "output"
            for number in (500, 1000):
                make_adapter_directory(source / f"checkpoint-{number}")
            fact = "found checkpoint-1000/, checkpoint-500/: name the folder that holds the final adapter"
        case "link":
            (source / "adapter_model.bin").symlink_to("/etc/hostname")
            fact = "adapter_model.bin is a link"
        case "colliding":
            (source / "ADAPTER_CONFIG.json").write_text("{}")
            fact = "'ADAPTER_CONFIG.json' and 'adapter_config.json' differ in nothing but case"
        case "forms":
            (source / "caf\u00e9.md").write_text("x")
            (source / "cafe\u0301.md").write_text("x")
            fact = r"'cafe\\u0301.md' and 'caf\\xe9.md' differ in nothing but case or Unicode form"
        case "bytes":
            Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9.md")).write_text("x")
            fact = r"'caf\\udce9.md' is no name for an uploaded file"
        case _:
            (source / "_READY.json").write_text("{}")
            fact = "'_READY.json' is no name for an uploaded file"
    with pytest.raises(UploadRefused, match=f"{source}: cannot be submitted: .*{fact}"):
        submit_directory(store, source)
    assert list(store.list_objects("")) == []


def test_folders_and_dot_files_stay_behind(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path)
    make_adapter_directory(source / "checkpoint-10", seed=8)
    (source / ".cache").write_text("x")
    marker = submit_directory(store, source)
    assert not any("checkpoint" in info.key or ".cache" in info.key for info in store.list_objects(""))
    assert len(marker.files) == 4


def test_a_file_that_changes_while_it_is_uploaded_gets_no_marker(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path)
    real_put = store._client.put_object

    def put(**given: Any) -> Any:
        done = real_put(**given)
        if "Metadata" in given:
            (source / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 5}\n')
        return done

    with pytest.raises(
        UploadRefused, match=r"adapter_config.json changed while it was uploaded; is training over"
    ):
        submit_directory(with_faults(store, put_object=put), source)
    assert list_uploads(store).ready == ()


def test_a_given_training_takes_the_place_of_the_directorys(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path)
    (source / "training.json").write_text('{"lora_B_layout": "rank_major"}')
    given = Training(heldout=("ada/letters",), lora_B_layout={"down_proj": "grouped_by_expert"})
    before = submit_directory(store, source, run="before")
    marker = submit_directory(store, source, run="run-1", training=given)
    upload = read_upload(store, "ada", "run-1")
    assert (upload.training, upload.warnings) == (given, ())
    assert sum(file.name == "training.json" for file in marker.files) == 1
    assert upload.adapter_digest == read_upload(store, "ada", before.run).adapter_digest
    assert upload.training_digest != read_upload(store, "ada", before.run).training_digest
