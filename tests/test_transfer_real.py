"""A real store: an upload that is killed in the middle, and gone on with; parts that nobody sees."""

import hashlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fault_proxy import FaultKind, FaultProxy
from store_builders import SeaweedFS

from storage.errors import PreconditionFailed
from storage.multipart import PART
from storage.s3 import S3Store

pytestmark = pytest.mark.real

CONTENT = random.Random(8).randbytes(5 * PART + 1_000_003)
SHA = hashlib.sha256(CONTENT).hexdigest()
KEY = "serving/ash/digest/adapter_model.safetensors"
_WAIT_S = 60
_UPLOAD = """
import sys
from pathlib import Path
from storage.s3 import S3Store

endpoint, bucket, access_key, secret_key, path, key, sha256 = sys.argv[1:]
store = S3Store.open(
    endpoint=endpoint, bucket=bucket, region="us-east-1", access_key=access_key, secret_key=secret_key
)
store.upload_file(Path(path), key, sha256=sha256)
"""


@pytest.fixture
def honest(server: SeaweedFS, request: pytest.FixtureRequest) -> S3Store:
    return server.open(f"bucket-{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}")


@pytest.fixture
def proxy(server: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(server.endpoint, silent_s=_WAIT_S) as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


def list_parts(store: S3Store) -> dict[int, int]:
    """The sizes of the parts that the store has of the one upload that is not completed."""
    [pending] = store.list_pending("")
    page = store._client.list_parts(Bucket=store.bucket, Key=KEY, UploadId=pending.upload_id)
    return {one["PartNumber"]: one["Size"] for one in page.get("Parts", ())}


def test_an_upload_that_was_killed_is_gone_on_with(
    server: SeaweedFS, honest: S3Store, proxy: FaultProxy, file: Path
) -> None:
    """Killed while its fifth part is on the line, and without a word to the store: as by the kernel."""
    proxy.one(FaultKind.TIMEOUT, method="PUT", key_part="partNumber=5")
    keys = [server.access_key, server.secret_key]
    command = [sys.executable, "-c", _UPLOAD, proxy.endpoint, honest.bucket, *keys, str(file), KEY, SHA]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + _WAIT_S
        while not (proxy.met[FaultKind.TIMEOUT] and len(list_parts(honest)) == 5):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert honest.head(KEY) is None and list(honest.list_objects("")) == [], "nobody sees a part of it"
    assert list(honest.list_folders("serving/")) == []
    assert sorted(list_parts(honest)) == [1, 2, 3, 4, 6]

    sent: list[int] = []
    store = replace(server, endpoint=proxy.endpoint).open(honest.bucket)
    store._client.meta.events.register(
        "before-call.s3.UploadPart", lambda params, **_: sent.append(params["body"].getbuffer().nbytes)
    )
    stored = store.upload_file(file, KEY, sha256=SHA)
    assert sent == [PART], "only what was missing"
    assert (stored.bytes, stored.sha256) == (len(CONTENT), SHA)
    assert honest.digest_object(KEY, if_match=stored.etag) == SHA and honest.list_pending("") == []


def test_parts_of_another_content_are_taken_away_by_a_real_store(honest: S3Store, file: Path) -> None:
    file.write_bytes(CONTENT[::-1])
    other = hashlib.sha256(file.read_bytes()).hexdigest()
    sent = honest.send_parts(file, KEY, sha256=other, is_stopped=lambda: False)
    assert sent is not None and list(list_parts(honest)) == [1, 2, 3, 4, 5, 6]
    file.write_bytes(CONTENT)
    stored = honest.upload_file(file, KEY, sha256=SHA)
    assert honest.digest_object(KEY, if_match=stored.etag) == SHA and honest.list_pending("") == []


def test_the_same_file_sent_again_is_the_same_object_to_readers(honest: S3Store, file: Path) -> None:
    """Its ETag follows from its parts, and these from its size: nobody's download is broken off by it."""
    first = honest.upload_file(file, KEY, sha256=SHA)
    assert honest.upload_file(file, KEY, sha256=SHA).etag == first.etag
    got = honest.download_file(KEY, file.with_name("back"), if_match=first.etag)
    assert got.sha256 == SHA


def test_a_file_replaced_during_its_download_is_not_mixed(honest: S3Store, file: Path) -> None:
    first = honest.upload_file(file, KEY, sha256=SHA)
    other = file.with_name("other")
    other.write_bytes(CONTENT[::-1])
    digest = hashlib.sha256(other.read_bytes()).hexdigest()
    received: list[int] = []
    lock = threading.Lock()

    def tell(count: int) -> None:
        with lock:  # nobody goes on before it is replaced
            received.append(count)
            if len(received) == 2:
                honest.upload_file(other, KEY, sha256=digest)

    target = file.parent / "folder"
    target.mkdir()
    with pytest.raises(PreconditionFailed):
        honest.download_file(KEY, target / "back", if_match=first.etag, received=tell)
    assert list(target.iterdir()) == []
    second = honest.head(KEY)
    assert second is not None
    assert honest.download_file(KEY, target / "back", if_match=second.etag).sha256 == digest
