"""Files that any tool copied into the store, without a marker: taken up once settled, whole and of a known base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from lora_builders import Logical, attention, encode, save_adapter, short_id
from pipeline_builders import BASE, Desk, add_tiny_base
from store_builders import failing, memory_store, submit_directory, with_faults

import tasks.intake
from storage.bases import read_base, register_base
from storage.documents import put_document, utc_now
from storage.errors import BaseUndecided, UploadChanged, UploadIncomplete
from storage.keys import begun_key, marker_key, upload_file_key
from storage.s3 import S3Store
from storage.settled import adopt_upload
from storage.uploads import read_upload
from tasks.inbox import PendingUpload, UploadState, list_pending
from tasks.intake import AdapterWaits
from tasks.sweeping import list_due

pytestmark = pytest.mark.real

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GOOD = encode(Logical()) | attention()
SETTLE = 600


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        add_tiny_base(empty)
        yield empty


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter"), GOOD, base_model_name_or_path=BASE)


def copy(
    store: S3Store, folder: Path, others: Mapping[str, bytes] = MappingProxyType({}), run: str = "run-1"
) -> None:
    """Put a folder's files one by one, as a tool does that knows nothing of us."""
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    for name, body in (files | dict(others)).items():
        store.put(upload_file_key("ada", run, name), body)


def later(hours: int = 1) -> datetime:
    return utc_now() + timedelta(hours=hours)


def listed(store: S3Store, change: Callable[[dict[str, Any]], object]) -> S3Store:
    """The store, in whose listings each object is changed so."""
    real = store._client.list_objects_v2

    def pages(**given: Any) -> Any:
        page = real(**given)
        for item in page.get("Contents", ()):
            change(item)
        return page

    return with_faults(store, list_objects_v2=pages)


def aged(store: S3Store) -> S3Store:
    """The store with files that have been there for hours when their marker is put."""

    def age(item: dict[str, Any]) -> None:
        if not item["Key"].endswith("_READY.json"):
            item["LastModified"] -= timedelta(hours=2)

    return listed(store, age)


def adopt(store: S3Store, now: datetime | None = None) -> bool:
    return adopt_upload(store, "ada", "run-1", settle_s=SETTLE, now=now or later())


def pending(store: S3Store, now: datetime | None = None) -> list[PendingUpload]:
    return list_pending(store, now=now or later(), settle_s=SETTLE)


def states(store: S3Store, now: datetime | None = None) -> list[str]:
    return [one.state.value for one in pending(store, now)]


def due(store: S3Store, now: datetime | None = None) -> list[tuple[str, str, str]]:
    return [
        (one.key, one.submission, one.why)
        for one in list_due(store, now=now or later(), grace_s=60, settle_s=SETTLE).due
    ]


def test_copied_files_are_taken_to_a_verdict(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.heldout("ada")
    folder = desk.adapter("ada", base_model_name_or_path=BASE)
    copy(
        desk.store,
        folder,
        {"optimizer.pt": b"the trainer's own", "checkpoint-5/adapter_config.json": b"{}"},
    )
    assert states(desk.store, utc_now()) == ["settling"] and due(desk.store, utc_now()) == []
    state = desk.run("ada")
    assert state.name == "Waiting: incomplete_upload" and "600 s after a change" in (state.message or "")
    assert desk.store.head(marker_key("ada", "run-1")) is None, "not before they are settled"

    [(key, submission, why)] = due(desk.store)
    assert (submission, why) == ("", "its files are settled, and have no marker")
    assert states(desk.store) == ["new"] and pending(desk.store)[0].base == BASE
    monkeypatch.setattr(tasks.intake, "utc_now", later)
    assert desk.run("ada").name == "Ready"

    upload = desk.submitted["ada"] = read_upload(desk.store, "ada", "run-1")
    lines = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()} {name}\n" for name in (CONFIG, WEIGHTS)
    )
    assert upload.adapter_digest == hashlib.sha256(lines.encode()).hexdigest()
    assert upload.marker.adopted and [file.name for file in upload.marker.files] == [CONFIG, WEIGHTS]
    assert key == f"ada/run-1/{upload.marker.submission}"
    assert desk.ledger("ada").submissions[0].submission == upload.marker.submission
    assert pending(desk.store) == [] and due(desk.store) == []


def with_alias(store: S3Store, alias: str) -> None:
    base = read_base(store, BASE)
    register_base(store, base.config, base.document.model_copy(update={"aliases": (alias,)}))


@pytest.mark.parametrize(
    ("training", "config", "found"),
    [
        (BASE, "Org/Other", BASE),
        ("Org/Tiny", "Org/Other", BASE),
        (None, "Org/Tiny", BASE),
        (None, BASE, BASE),
        ("Org/Other", BASE, "'Org/Other' in training.json"),
        (None, "Org/Other", "'Org/Other' in adapter_config.json"),
        (None, None, "no base in adapter_config.json"),
        (None, 7, "no base in adapter_config.json"),
    ],
)
def test_the_base_is_what_the_files_name(
    store: S3Store, tmp_path: Path, training: str | None, config: Any, found: str
) -> None:
    """The trainer's own statement goes before PEFT's, by registered names and aliases alone: a guess is no base."""
    with_alias(store, "Org/Tiny")
    statement = {} if training is None else {"training.json": json.dumps({"base": training}).encode()}
    copy(store, save_adapter(tmp_path, GOOD, base_model_name_or_path=config), statement)
    if found == BASE:
        assert adopt(store) and read_upload(store, "ada", "run-1").marker.base == BASE
        return
    with pytest.raises(BaseUndecided, match=found):
        adopt(store)


def test_an_unknown_base_waits_and_says_the_ways_out(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(store, save_adapter(tmp_path, GOOD, base_model_name_or_path="Org/Tiny"))
    [one] = pending(store)
    assert (one.state, one.code, one.flow_run) == (UploadState.WAITING, "unknown_base", None)
    for fact in (
        "ada/run-1",
        "'Org/Tiny'",
        "--alias 'Org/Tiny'",
        'training.json with "base"',
        "roster submit",
    ):
        assert fact in str(one.reason)
    assert due(store) == [], "a run would only say the same"
    monkeypatch.setattr(tasks.intake, "utc_now", later)
    with pytest.raises(AdapterWaits, match="Org/Tiny") as caught:
        tasks.intake.intake.fn(store, "ada", "run-1", SETTLE)
    assert caught.value.code.value == "unknown_base"
    with_alias(store, "Org/Tiny")
    assert len(due(store)) == 1


def name_a_shard_that_is_not_there(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    save_adapter(folder, GOOD, shards=2)
    (folder / "adapter_model-00002-of-00002.safetensors").unlink()


def cut(name: str, to: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:to])

    return spoil


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "fact"),
    [
        (drop(CONFIG), f"{CONFIG} is not there"),
        (drop(WEIGHTS), "there is no weight file"),
        (cut(CONFIG, 20), f"{CONFIG} is no JSON object"),
        (cut(WEIGHTS, 0), f"{WEIGHTS} has no readable header in its 0 bytes"),
        (cut(WEIGHTS, 5), f"{WEIGHTS} has no readable header in its 5 bytes"),
        (cut(WEIGHTS, 400), f"{WEIGHTS} has no readable header in its 400 bytes"),
        (cut(WEIGHTS, -1), f"{WEIGHTS} should have "),
        (name_a_shard_that_is_not_there, "adapter_model-00002-of-00002.safetensors, which its index names"),
    ],
    ids=short_id,
)
def test_half_an_adapter_is_not_taken_however_long_it_lies_there(
    store: S3Store, tmp_path: Path, adapter: Path, spoil: Callable[[Path], None], fact: str
) -> None:
    """Config before weights, some files, files cut short: PrimeIntellect-ai/prime-rl #2391, predibase/lorax #14."""
    folder = save_adapter(tmp_path, GOOD, base_model_name_or_path=BASE)
    spoil(folder)
    copy(store, folder)
    [one] = pending(store, later(hours=999))
    assert (one.state, one.code) == (UploadState.INCOMPLETE, "incomplete_upload")
    assert fact in str(one.reason) and due(store) == []
    with pytest.raises(UploadIncomplete, match=fact):
        adopt(store)
    assert store.head(marker_key("ada", "run-1")) is None
    for found in list(store.list_objects("uploads/")):
        store.delete(found.key)
    copy(store, adapter)
    assert adopt(store) and states(store) == ["new"]


def test_long_headers_and_shards_are_whole_adapters(store: S3Store, tmp_path: Path) -> None:
    """Thousands of per-expert tensors have a header that is longer than what is read at first."""
    import torch

    many = {
        f"model.layers.0.mlp.experts.{n}.down_proj.lora_A.weight": torch.full((1, 1), n) for n in range(900)
    }
    copy(store, save_adapter(tmp_path, many, shards=2, base_model_name_or_path=BASE))
    length = int.from_bytes(
        (tmp_path / "adapter_model-00001-of-00002.safetensors").read_bytes()[:8], "little"
    )
    copy(store, save_adapter(tmp_path / "one", many, base_model_name_or_path=BASE), run="run-2")
    assert length < (1 << 16) < int.from_bytes((tmp_path / "one" / WEIGHTS).read_bytes()[:8], "little")
    assert states(store) == ["new", "new"]


def test_an_adapter_in_folders_alone_is_named_as_such(store: S3Store, adapter: Path) -> None:
    for path in adapter.iterdir():
        store.put(f"uploads/ada/run-1/checkpoint-500/{path.name}", path.read_bytes())
    [one] = pending(store)
    assert one.state is UploadState.INCOMPLETE and "its folders (checkpoint-500) are not looked into" in str(
        one.reason
    )


def test_files_under_a_name_that_cannot_be_one_get_a_run_that_says_so(store: S3Store) -> None:
    store.put(f"uploads/Some One/run-1/{CONFIG}", b"{}")
    store.put("uploads/Some One/notes.txt", b"no adapter's")
    assert states(store, utc_now()) == ["settling"]
    [(key, _, why)] = due(store)
    assert key.startswith("Some One/run-1/") and why == "its name is none that we take"
    assert states(store) == ["unreadable"]


def test_files_copied_over_an_adopted_upload_are_a_new_submission(
    store: S3Store, tmp_path: Path, adapter: Path
) -> None:
    copy(store, adapter)
    assert adopt(aged(store)) and not adopt(aged(store)), "once"
    first = read_upload(store, "ada", "run-1")
    copy(store, adapter)
    assert not adopt(store), "the same bytes again are nothing new"
    assert pending(store)[0].submission == first.marker.submission
    copy(store, save_adapter(tmp_path, encode(Logical(seed=1)) | attention(), base_model_name_or_path=BASE))
    assert states(store, utc_now()) == ["settling"]
    with pytest.raises(UploadIncomplete, match="600 s after a change"):
        adopt(store, utc_now())
    [(key, submission, _)] = due(store)
    assert submission == "" and first.marker.submission not in key
    assert adopt(store)
    second = read_upload(store, "ada", "run-1")
    assert second.adapter_digest != first.adapter_digest
    assert second.marker.submission > first.marker.submission and key.endswith(second.marker.submission)


def test_a_deletion_is_no_new_submission(store: S3Store, adapter: Path) -> None:
    copy(store, adapter)
    adopt(aged(store))
    store.delete(upload_file_key("ada", "run-1", WEIGHTS))
    assert not adopt(aged(store)), "its marker stands"
    [one] = pending(aged(store))
    assert one.state is UploadState.INCOMPLETE and "is listed, but not there" in str(one.reason)


def before_the_marker(store: S3Store, then: Callable[[], object]) -> S3Store:
    """The store, in which something happens just before a marker is put for the first time."""
    real: Callable[..., Any] = store._client.put_object
    done: list[bool] = []

    def put(**given: Any) -> Any:
        if given["Key"].endswith("_READY.json") and not done:
            done.append(True)
            then()
        return real(**given)

    return with_faults(store, put_object=put)


@pytest.mark.parametrize("again", [False, True], ids=["first", "copied over"])
def test_a_marker_that_comes_from_the_trainer_meanwhile_wins(
    store: S3Store, tmp_path: Path, adapter: Path, again: bool
) -> None:
    copy(store, adapter)
    if again:
        adopt(store)
        copy(store, save_adapter(tmp_path / "other", encode(Logical(seed=1)), base_model_name_or_path=BASE))
    busy = before_the_marker(store, lambda: submit_directory(store, adapter))
    assert not adopt(busy)
    assert not read_upload(store, "ada", "run-1").marker.adopted


def test_a_trainers_marker_replaces_one_that_was_written_for_it_meanwhile(
    store: S3Store, adapter: Path
) -> None:
    """The sweep had read the files before the trainer began, and puts its marker when the trainer took its own away."""
    copy(store, adapter)
    real, done = store._client.put_object, []

    def put(**call: Any) -> Any:
        answer = real(**call)
        if not done and call["Key"].endswith(WEIGHTS):
            done.append(put_document(store, marker_key("ada", "run-1"), ours))
        return answer

    assert adopt(store)
    ours = read_upload(store, "ada", "run-1").marker
    marker = submit_directory(with_faults(store, put_object=put), adapter)
    assert done and ours.adopted and not marker.adopted
    assert read_upload(store, "ada", "run-1").marker == marker


def test_a_file_that_changes_while_it_is_adopted_takes_the_marker_back(store: S3Store, adapter: Path) -> None:
    copy(store, adapter)
    key = upload_file_key("ada", "run-1", CONFIG)
    other = (adapter / CONFIG).read_bytes() + b"\n"
    with pytest.raises(UploadChanged, match="ada/run-1: one of its files was replaced"):
        adopt(before_the_marker(store, lambda: store.put(key, other)))
    assert store.head(marker_key("ada", "run-1")) is None
    assert adopt(store)
    listed = {file.name: file.sha256 for file in read_upload(store, "ada", "run-1").marker.files}
    assert listed[CONFIG] == hashlib.sha256(other).hexdigest()


def test_a_submission_that_begins_while_its_files_are_adopted_takes_the_marker_back(
    store: S3Store, adapter: Path
) -> None:
    copy(store, adapter)
    with pytest.raises(UploadChanged, match="ada/run-1: one of its files was replaced"):
        adopt(before_the_marker(store, lambda: store.put(begun_key("ada", "run-1"), b"")))
    assert store.head(marker_key("ada", "run-1")) is None


def test_what_a_broken_off_submission_leaves_is_not_taken_for_copied_files(
    store: S3Store, tmp_path: Path, adapter: Path
) -> None:
    """The new config beside the old weights, which are long there: a whole adapter that nobody trained."""
    submit_directory(store, adapter)
    other = save_adapter(
        tmp_path, encode(Logical(seed=1)) | attention(), base_model_name_or_path=BASE, lora_alpha=9
    )
    real = store._client.put_object

    def put(**call: Any) -> Any:
        if call["Key"].endswith(WEIGHTS):
            raise OSError("line cut")
        return real(**call)

    with pytest.raises(OSError, match="line cut"):
        submit_directory(with_faults(store, put_object=put), other)
    [one] = pending(store)
    assert one.state is UploadState.INCOMPLETE and "a submission was begun at" in str(one.reason)
    with pytest.raises(UploadIncomplete, match="repeat it, or delete _SUBMITTING"):
        adopt(store)
    submit_directory(store, other)
    assert states(store) == ["new"] and store.head("uploads/ada/run-1/_SUBMITTING") is None


def test_an_etag_is_the_same_with_and_without_quotes(store: S3Store, adapter: Path) -> None:
    """Listings and answers differ in it, and one of a file in parts is no digest: jschneier/django-storages #276."""
    copy(store, adapter)
    adopt(store)

    def change(item: dict[str, Any]) -> None:
        item |= {"ETag": item["ETag"].strip('"'), "LastModified": later(hours=2)}

    assert not adopt(listed(store, change), later(hours=9))


def test_a_store_that_lists_etags_without_quotes_is_asked_with_them(store: S3Store, adapter: Path) -> None:
    """A condition of RFC 9110 has them; one without is refused for ever by a store that compares it as it is."""
    copy(store, adapter)
    real, wanted = store._client.get_object, []

    def get(**given: Any) -> Any:
        wanted.append(given.get("IfMatch", '""'))
        return real(**given)

    def change(item: dict[str, Any]) -> None:
        item["ETag"] = item["ETag"].strip('"')

    assert adopt(with_faults(listed(store, change), get_object=get))
    assert len(set(wanted)) > 2 and all(etag[0] + etag[-1] == '""' for etag in wanted)


def test_a_store_that_fails_while_files_are_adopted_is_no_fault_of_theirs(
    store: S3Store, adapter: Path
) -> None:
    from botocore.exceptions import EndpointConnectionError

    from storage.errors import StoreUnavailable

    copy(store, adapter)
    down = with_faults(store, get_object=failing(EndpointConnectionError(endpoint_url="http://x")))
    with pytest.raises(StoreUnavailable):
        adopt(down)
    with pytest.raises(StoreUnavailable):
        pending(down)
