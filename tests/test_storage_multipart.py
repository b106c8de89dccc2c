"""Large files that go in parts: on from what is there, of this content only, and unseen until they are whole."""

import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from store_builders import failing, memory_store, with_faults

from storage.errors import StoreUnavailable
from storage.multipart import part_size
from storage.s3 import S3Store

PART = 50_021
CONTENT = random.Random(4).randbytes(3 * PART + 5)
SHA = hashlib.sha256(CONTENT).hexdigest()
KEY = "serving/ada/digest/weights"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    monkeypatch.setattr("storage.multipart.PART", PART)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", PART)
    with memory_store() as empty:
        yield empty


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


def counting(store: S3Store, fail_at: frozenset[int] = frozenset(), **more: Any) -> tuple[S3Store, list[int]]:
    """The store with the numbers of the parts that are sent; some of them cannot be."""
    real, sent, lock = store._client.upload_part, [], threading.Lock()

    def send(**given: Any) -> Any:
        if given["PartNumber"] in fail_at:
            raise EndpointConnectionError(endpoint_url="http://nowhere")
        with lock:
            sent.append(given["PartNumber"])
            return real(**given)

    return with_faults(store, upload_part=send, **more), sent


def begin(store: S3Store, key: str, parts: dict[int, bytes], sha256: str = SHA) -> str:
    """Leave an upload as a killed process does."""
    upload = store._client.create_multipart_upload(Bucket=store.bucket, Key=key, Metadata={"sha256": sha256})
    for number, body in parts.items():
        store._client.upload_part(
            Bucket=store.bucket, Key=key, UploadId=upload["UploadId"], PartNumber=number, Body=body
        )
    return str(upload["UploadId"])


def slices(content: bytes, *numbers: int) -> dict[int, bytes]:
    return {number: content[(number - 1) * PART : number * PART] for number in numbers}


def test_a_large_file_goes_in_parts_with_its_digest(store: S3Store, file: Path) -> None:
    counted, numbers = counting(store)
    sent: list[int] = []
    stored = counted.upload_file(file, KEY, sha256=SHA, sent=sent.append)
    assert (stored.bytes, stored.sha256, sum(sent)) == (len(CONTENT), SHA, len(CONTENT))
    assert store.get(KEY).body == CONTENT and sorted(numbers) == [1, 2, 3, 4]
    assert store.list_pending("") == []


def test_what_was_broken_off_is_gone_on_with(store: S3Store, file: Path) -> None:
    broken, first = counting(store, fail_at=frozenset({3}))
    with pytest.raises(StoreUnavailable, match=f"upload {KEY}: .*http://nowhere"):
        broken.upload_file(file, KEY, sha256=SHA)
    for thread in [one for one in threading.enumerate() if one.name == "transfer"]:
        thread.join(30)
    assert store.head(KEY) is None and [one.key for one in store.list_pending("serving/")] == [KEY]

    again, second = counting(store)
    sent: list[int] = []
    assert again.upload_file(file, KEY, sha256=SHA, sent=sent.append).sha256 == SHA
    assert sorted(first + second) == [1, 2, 3, 4], "no part twice"
    assert first and 3 in second and sum(sent) == len(CONTENT)
    assert store.get(KEY).body == CONTENT and store.list_pending("") == []


def test_of_several_the_one_with_most_is_gone_on_with(store: S3Store, file: Path) -> None:
    begin(store, KEY, slices(CONTENT, 2))
    begin(store, KEY, slices(CONTENT, 1, 4))
    begin(store, KEY + "-of-another", slices(CONTENT, 1, 2, 3))
    counted, numbers = counting(store)
    counted.upload_file(file, KEY, sha256=SHA)
    assert sorted(numbers) == [2, 3] and store.get(KEY).body == CONTENT
    assert sorted(one.key for one in store.list_pending("")) == [KEY, KEY + "-of-another"]


def test_parts_of_another_content_are_taken_away(store: S3Store, file: Path) -> None:
    other = bytearray(CONTENT)
    other[PART + 7] ^= 1
    begin(store, KEY, slices(bytes(other), 1, 2))
    begin(store, KEY, {1: CONTENT[: PART - 1]})  # of another size
    begin(store, KEY, {5: b"more than the file has"})
    counted, numbers = counting(store)
    assert counted.upload_file(file, KEY, sha256=SHA).sha256 == SHA
    assert sorted(numbers) == [1, 2, 3, 4] and store.get(KEY).body == CONTENT
    assert store.list_pending("") == []


def test_an_upload_of_another_file_that_begins_alike_is_noticed(store: S3Store, file: Path) -> None:
    """All parts that it has are in this file too; what it was begun for is known when it is completed."""
    begin(store, KEY, slices(CONTENT, 1), sha256="00" * 32)
    counted, numbers = counting(store)
    assert counted.upload_file(file, KEY, sha256=SHA).sha256 == SHA
    assert sorted(numbers) == [1, 2, 2, 3, 3, 4, 4]
    assert store.head(KEY).sha256 == SHA  # type: ignore[union-attr]


@pytest.mark.parametrize("code", ["AccessDenied", "NotImplemented"])
def test_where_uploads_are_not_listed_everything_is_sent(store: S3Store, file: Path, code: str) -> None:
    begin(store, KEY, slices(CONTENT, 1, 2))

    def deny(**_: Any) -> None:
        raise ClientError({"Error": {"Code": code}}, "ListMultipartUploads")

    counted, numbers = counting(store, list_multipart_uploads=deny)
    assert counted.upload_file(file, KEY, sha256=SHA).sha256 == SHA
    assert sorted(numbers) == [1, 2, 3, 4]


def test_what_somebody_else_completed_meanwhile_counts(store: S3Store, file: Path) -> None:
    upload = begin(store, KEY, slices(CONTENT, 1, 2, 3))
    real = store._client.upload_part

    def too_late(**given: Any) -> Any:
        answer = real(**given)
        tags = {one["PartNumber"]: one["ETag"] for one in parts(store, upload)}
        whole = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in tags.items()]}
        store._client.complete_multipart_upload(
            Bucket=store.bucket, Key=KEY, UploadId=upload, MultipartUpload=whole
        )
        return answer

    late = with_faults(store, upload_part=too_late)
    assert late.upload_file(file, KEY, sha256=SHA).sha256 == SHA and store.get(KEY).body == CONTENT


def parts(store: S3Store, upload: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = store._client.list_parts(Bucket=store.bucket, Key=KEY, UploadId=upload)[
        "Parts"
    ]
    return found


def test_parts_are_seen_by_nobody_before_they_are_completed(store: S3Store, file: Path) -> None:
    sent = store.send_parts(file, KEY, sha256=SHA, is_stopped=lambda: False)
    assert sent is not None and store.head(KEY) is None and list(store.list_objects("")) == []
    assert store.complete_parts(sent).sha256 == SHA and store.get(KEY).body == CONTENT
    gone = failing(ClientError({"Error": {"Code": "NoSuchUpload"}}, "CompleteMultipartUpload"))
    again = with_faults(store, complete_multipart_upload=gone)
    assert again.complete_parts(sent).sha256 == SHA, "done by somebody else, or the answer got lost"
    store.put(KEY, b"of somebody else")
    with pytest.raises(StoreUnavailable, match=f"upload {KEY}: .*NoSuchUpload"):
        again.complete_parts(sent)


def test_a_sending_that_is_stopped_keeps_what_is_there(store: S3Store, file: Path) -> None:
    assert store.send_parts(file, KEY, sha256=SHA, is_stopped=lambda: True) is None
    [pending] = store.list_pending("")
    assert 1 <= len(parts(store, pending.upload_id)) <= 4 and store.head(KEY) is None
    store.abort_upload(pending)
    store.abort_upload(pending)
    assert store.list_pending("") == []


def test_parts_of_a_file_follow_from_its_size() -> None:
    assert part_size(1) == part_size(160 << 30 >> 3) == 16 << 20
    assert -(-(5 << 40) // part_size(5 << 40)) <= 10_000
