"""What only a real server can show: conditions under contention, large files, refused credentials."""

import hashlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from lora_builders import Logical, attention, encode, save_adapter
from pipeline_builders import BASE, add_tiny_base
from store_builders import (
    DIGEST,
    SeaweedFS,
    make_adapter_directory,
    make_step,
    make_submission,
    start_seaweedfs,
)

from storage.claims import open_ledger, read_ledger
from storage.digests import FileDigest
from storage.documents import utc_now
from storage.errors import ClaimHeld, ObjectNotFound, PreconditionFailed, StoreUnavailable, UploadIncomplete
from storage.keys import upload_file_key
from storage.ledger import SubmissionRef
from storage.s3 import S3Store
from storage.settled import adopt_upload
from storage.submit import submit_upload
from storage.trust import probe_store
from storage.uploads import download_upload, read_upload

pytestmark = pytest.mark.real

WRITERS = 16


@pytest.fixture
def store(server: SeaweedFS, request: pytest.FixtureRequest) -> S3Store:
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    return server.open(f"bucket-{name}")


def at_once(work: Callable[[int], object]) -> list[object]:
    """Run the work of every writer at the same moment and return what each returned."""
    barrier = threading.Barrier(WRITERS)

    def start(writer: int) -> object:
        barrier.wait()
        return work(writer)

    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(start, range(WRITERS)))


def test_the_store_is_trusted(store: S3Store) -> None:
    store.ensure_bucket()
    probe_store(store)
    assert list(store.list_objects("")) == []


def test_a_bucket_with_a_dot_is_reached_by_its_path(server: SeaweedFS, tmp_path: Path) -> None:
    """As a part of the host name it is another host: minio/minio #6071, awslabs/aws-sdk-rust #1138."""
    dotted = server.open("roster.authors.v2")
    dotted.ensure_bucket()
    probe_store(dotted)
    large = tmp_path / "large"
    large.write_bytes(random.Random(7).randbytes(20 << 20))  # in parts
    key, digest = "uploads/ash/run 1+2/a~b.bin", hashlib.sha256(large.read_bytes()).hexdigest()
    sent = dotted.upload_file(large, key, sha256=digest)
    assert [(one.key, one.etag) for one in dotted.list_objects("uploads/")] == [(key, sent.etag)]
    assert dotted.download_file(key, tmp_path / "back", if_match=sent.etag).sha256 == digest


def test_one_of_many_creators_and_swappers_wins(store: S3Store) -> None:
    def put(**condition: object) -> Callable[[int], object]:
        def attempt(writer: int) -> bool:
            try:
                store.put("k", f"{condition} {writer}".encode(), **condition)  # type: ignore[arg-type]
            except PreconditionFailed:
                return False
            return True

        return attempt

    assert sum(map(bool, at_once(put(if_none_match=True)))) == 1
    for _ in range(2):
        etag = store.get("k").info.etag
        assert sum(map(bool, at_once(put(if_match=etag)))) == 1


def test_many_workers_claim_one_adapter_and_one_gets_it(store: S3Store) -> None:
    def claim(writer: int) -> str | None:
        handle = open_ledger(store, "ada", DIGEST, "tiny", make_submission())
        try:
            handle.claim(f"w{writer}", 60)
        except ClaimHeld as error:
            return error.holder
        handle.append(make_step(worker=f"w{writer}"))
        return None

    heard = at_once(claim)
    ledger = read_ledger(store, "ada", DIGEST)[0]
    assert ledger.claim is not None
    assert heard.count(None) == 1
    assert {holder for holder in heard if holder} == {ledger.claim.holder}
    assert [step.worker for step in ledger.steps] == [ledger.claim.holder]
    assert len(ledger.submissions) == 1


def test_no_step_and_no_submission_is_lost_among_many_writers(store: S3Store) -> None:
    steps_each = 3

    def work(writer: int) -> None:
        submission = SubmissionRef(run=f"run-{writer}", submission=f"2026-03-01T10:00:{writer:02d}Z-0a1b2c3d")
        handle = open_ledger(store, "ada", DIGEST, "tiny", submission)
        for number in range(steps_each):
            while True:
                try:
                    handle.claim(f"w{writer}", 60)
                    break
                except ClaimHeld:
                    time.sleep(random.uniform(0, 0.05))
            handle.append(make_step(worker=f"w{writer}", attempt=number + 1))
            handle.release()

    at_once(work)
    ledger = read_ledger(store, "ada", DIGEST)[0]
    expected = {(f"w{writer}", number + 1) for writer in range(WRITERS) for number in range(steps_each)}
    assert {(step.worker, step.attempt) for step in ledger.steps} == expected
    assert len(ledger.steps) == WRITERS * steps_each
    assert {ref.run for ref in ledger.submissions} == {f"run-{writer}" for writer in range(WRITERS)}
    assert ledger.claim is None


def test_a_large_adapter_goes_up_and_down_verified(store: S3Store, tmp_path: Path) -> None:
    source = make_adapter_directory(tmp_path / "source")
    weights = source / "adapter_model.safetensors"
    noise = random.Random(11)
    with weights.open("wb") as file:
        for _ in range(200):
            file.write(noise.randbytes(1 << 20))
    seen: list[int] = []
    marker = submit_upload(
        store, source, "ada", "run-1", "tiny", training=None, progress=lambda done, total: seen.append(done)
    )
    assert sum(file.bytes for file in marker.files) == seen[-1] > 200 << 20
    upload = read_upload(store, "ada", "run-1")
    assert "-" in next(f.etag for f in upload.files if f.digest.name == weights.name), (
        "sent in parts, so no digest"
    )
    files = download_upload(store, upload, tmp_path / "target")
    expected = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert FileDigest(weights.name, 200 << 20, expected) in files


def test_listings_go_on_past_a_thousand_keys(store: S3Store) -> None:
    keys = [f"ledger/a{number:04d}/x é+.json" for number in range(2_001)]
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda key: store.put(key, b"{}"), keys))
    assert [info.key for info in store.list_objects("ledger/")] == keys
    assert list(store.list_folders("ledger/")) == [key.split("/")[1] for key in keys]
    listed = next(iter(store.list_objects("ledger/")))
    assert listed == store.head(listed.key), "both describe an object alike, so that ETags may be compared"


def test_credentials_that_are_refused_are_named(server: SeaweedFS) -> None:
    for access_key, secret_key, fact in [
        (server.access_key, "wrong", "secret key does not belong"),
        ("nobody", "wrong", "does not know the access key"),
    ]:
        store = S3Store.open(
            endpoint=server.endpoint,
            bucket="bucket-x",
            region="us-east-1",
            access_key=access_key,
            secret_key=secret_key,
        )
        with pytest.raises(StoreUnavailable, match=f"get k: .*{server.endpoint} answered .*{fact}"):
            store.get("k")


def test_a_missing_bucket_and_a_missing_key_are_told_apart(server: SeaweedFS, store: S3Store) -> None:
    with pytest.raises(ObjectNotFound):
        store.get("k")
    elsewhere = S3Store(store._client, "no-such-bucket")
    with pytest.raises(StoreUnavailable, match="NoSuchBucket: the bucket does not exist"):
        elsewhere.get("k")


def test_a_server_that_is_gone_is_unavailable_after_some_tries(tmp_path: Path) -> None:
    with start_seaweedfs(tmp_path) as server:
        store = server.open("bucket-1")
        store.put("k", b"kept")
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"put k: .*{server.endpoint}.*Is it up"):
        store.put("k", b"more", if_match='"x"')
    assert time.monotonic() - started < 60
    with start_seaweedfs(tmp_path) as server:
        assert server.open("bucket-1").get("k").body == b"kept"


def test_copied_files_are_adopted_under_a_real_stores_conditions(store: S3Store, tmp_path: Path) -> None:
    """Ranges, ETags and times as a server gives them: of many who adopt one upload, the marker is written once.

    Who lost finds their very bytes there, and counts them as their own: a lost answer looks no different.
    """
    add_tiny_base(store)
    folder = save_adapter(tmp_path, encode(Logical()) | attention(), base_model_name_or_path=BASE)
    for path in sorted(folder.iterdir()):
        store.put(upload_file_key("ada", "run-1", path.name), path.read_bytes())
    store.put(upload_file_key("ada", "run-1", "empty.safetensors"), b"")

    def adopt(_: object = None) -> bool:
        return adopt_upload(store, "ada", "run-1", settle_s=1, now=utc_now() + timedelta(hours=1))

    with pytest.raises(UploadIncomplete, match=r"empty.safetensors has no readable header in its 0 bytes"):
        adopt()
    store.delete(upload_file_key("ada", "run-1", "empty.safetensors"))
    answers: list[int] = []
    store._client.meta.events.register(
        "after-call.s3.PutObject", lambda http_response, **_: answers.append(http_response.status_code)
    )
    assert any(at_once(adopt)) and answers.count(200) == 1 < len(answers)
    first = read_upload(store, "ada", "run-1").marker
    assert first.adopted and not adopt()
    time.sleep(1.1)
    key = upload_file_key("ada", "run-1", "adapter_config.json")
    store.put(key, store.get(key).body + b"\n")
    assert adopt() and read_upload(store, "ada", "run-1").marker.submission > first.submission
