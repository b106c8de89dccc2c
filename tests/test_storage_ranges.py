"""Large objects that come by several requests at once: every byte once, of one version, whole or not at all."""

import hashlib
import io
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from botocore.response import StreamingBody
from store_builders import memory_store, with_faults

from storage.crew import Crew
from storage.errors import PreconditionFailed, StoreUnavailable
from storage.s3 import S3Store

PIECE = 100_003
CONTENT = random.Random(9).randbytes(7 * PIECE + 41)
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    monkeypatch.setattr("storage.ranges.PIECE", PIECE)
    monkeypatch.setattr("storage.ranges._CHUNK", 7_001)
    with memory_store() as empty:
        yield empty


def asking(store: S3Store, change: Callable[[int, dict[str, Any]], None]) -> tuple[S3Store, list[str]]:
    """The store with its answers to downloads changed, by the first byte that is asked for; and what was asked."""
    real, asked, lock = store._client.get_object, [], threading.Lock()

    def get(**given: Any) -> Any:
        with lock:
            asked.append(given.get("Range", "all"))
            answer = real(**given)
        change(int(given.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]), answer)
        return answer

    return with_faults(store, get_object=get), asked


def cut(answer: dict[str, Any], count: int) -> None:
    body = answer["Body"].read()
    answer["Body"] = StreamingBody(io.BytesIO(body[:count]), len(body))


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, len(CONTENT)])
def test_an_object_of_any_size_comes_whole(store: S3Store, tmp_path: Path, size: int) -> None:
    content = CONTENT[:size]
    etag = store.put("k", content)
    counted, asked = asking(store, lambda start, answer: None)
    received: list[int] = []
    got = counted.download_file("k", tmp_path / "file", if_match=etag, received=received.append)
    assert (tmp_path / "file").read_bytes() == content
    assert (got.name, got.bytes, got.sha256) == ("file", size, hashlib.sha256(content).hexdigest())
    assert sum(received) == size and [path.name for path in tmp_path.iterdir()] == ["file"]
    assert len(asked) == max(1 + (size == 0), -(-size // PIECE)), "a small one by one request"


@pytest.mark.parametrize("piece", [0, 3, 7])
def test_a_line_that_breaks_goes_on_where_it_broke(store: S3Store, tmp_path: Path, piece: int) -> None:
    etag = store.put("k", CONTENT)
    start, comes = piece * PIECE, 17
    broken, asked = asking(store, lambda first, answer: cut(answer, comes) if first == start else None)
    received: list[int] = []
    got = broken.download_file("k", tmp_path / "file", if_match=etag, received=received.append)
    assert got.sha256 == SHA and (tmp_path / "file").read_bytes() == CONTENT
    assert sum(received) == len(CONTENT), "no byte is counted twice"
    assert len(asked) == 9
    assert f"bytes={start + comes}-{min(start + PIECE, len(CONTENT)) - 1}" in asked


def test_a_line_that_breaks_twice_in_one_piece_leaves_no_file(store: S3Store, tmp_path: Path) -> None:
    etag = store.put("k", CONTENT)
    broken, _ = asking(
        store, lambda first, answer: cut(answer, 5) if 3 * PIECE <= first < 4 * PIECE else None
    )
    with pytest.raises(StoreUnavailable, match="download k"):
        broken.download_file("k", tmp_path / "file", if_match=etag)
    assert list(tmp_path.iterdir()) == []


def test_bytes_of_two_versions_are_never_mixed(store: S3Store, tmp_path: Path) -> None:
    etag = store.put("k", CONTENT)

    def replace(first: int, answer: dict[str, Any]) -> None:
        if first == 0:  # the first piece has come; the others are asked for after it
            store.put("k", CONTENT[::-1])

    with pytest.raises(PreconditionFailed):
        asking(store, replace)[0].download_file("k", tmp_path / "file", if_match=etag)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("told", [None, f"bytes 0-{PIECE - 1}/{len(CONTENT)}", "bytes 1-2/3"])
def test_other_bytes_than_were_asked_for_are_not_taken(
    store: S3Store, tmp_path: Path, told: str | None
) -> None:
    etag = store.put("k", CONTENT)
    other, _ = asking(store, lambda first, answer: answer.update(ContentRange=told) if first else None)
    with pytest.raises(StoreUnavailable, match=r"download k: .*asked for"):
        other.download_file("k", tmp_path / "file", if_match=etag)
    assert list(tmp_path.iterdir()) == []


def test_an_error_ends_it_at_once_though_others_are_slow(store: S3Store, tmp_path: Path) -> None:
    """Nobody waits for a line that says nothing because another one has failed; what comes later goes nowhere."""
    etag = store.put("k", CONTENT)
    let_go = threading.Event()

    def fail(first: int, answer: dict[str, Any]) -> None:
        if first == 2 * PIECE:
            raise EndpointConnectionError(endpoint_url="http://nowhere")
        if first:
            assert let_go.wait(60)

    received: list[int] = []
    try:
        with pytest.raises(StoreUnavailable, match="http://nowhere"):
            asking(store, fail)[0].download_file(
                "k", tmp_path / "file", if_match=etag, received=received.append
            )
        assert not let_go.is_set() and list(tmp_path.iterdir()) == []
        came = sum(received)
    finally:
        let_go.set()
    for thread in [one for one in threading.enumerate() if one.name == "transfer"]:
        thread.join(30)
    assert list(tmp_path.iterdir()) == [] and sum(received) == came


def test_a_full_disk_is_told_before_the_rest_is_fetched(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etag = store.put("k", CONTENT)
    counted, asked = asking(store, lambda start, answer: None)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        counted.download_file("k", tmp_path / "file", if_match=etag)
    assert len(asked) == 1 and list(tmp_path.iterdir()) == []


def test_results_come_in_order_and_the_first_error_at_once() -> None:
    held = threading.Event()

    def work(piece: int) -> int:
        if piece == 0:
            assert held.wait(30)
        if piece == 5:
            held.set()
        return piece * 11

    with Crew(work, range(7), 3) as crew:
        assert list(crew.results()) == [0, 11, 22, 33, 44, 55, 66]
    with Crew(work, [], 3) as crew:
        assert list(crew.results()) == []

    slow = threading.Event()

    def fail(piece: int) -> int:
        if piece == 0:
            assert slow.wait(30)
        raise ValueError(f"piece {piece}")

    try:
        with Crew(fail, range(2), 2) as crew, pytest.raises(ValueError, match="piece 1"):
            list(crew.results())
        assert not slow.is_set()
    finally:
        slow.set()
