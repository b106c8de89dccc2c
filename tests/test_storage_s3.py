import hashlib
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError
from botocore.response import StreamingBody
from store_builders import failing, lose_next_answer, memory_store, with_faults
from urllib3.exceptions import ProtocolError, SSLError

from storage.errors import ObjectNotFound, PreconditionFailed, StorageError, StoreNotTrusted, StoreUnavailable
from storage.s3 import S3Store
from storage.trust import probe_store


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


def answer(code: str, status: int) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "so it said"}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "Any",
    )


def test_an_object_comes_back_as_it_was_put(store: S3Store) -> None:
    etag = store.put("a/b é+%.json", b"\x00bytes\xff")
    found = store.get("a/b é+%.json")
    assert found.body == b"\x00bytes\xff"
    assert found.info == store.head("a/b é+%.json")
    assert (found.info.etag, found.info.bytes, found.info.sha256) == (etag, 7, None)
    assert [info.key for info in store.list_objects("a/")] == ["a/b é+%.json"]
    assert store.uri("a/b") == "s3://adapters/a/b"

    store.delete("a/b é+%.json")
    store.delete("a/b é+%.json")
    assert store.head("a/b é+%.json") is None
    with pytest.raises(ObjectNotFound, match="expected an object in the store, found none"):
        store.get("a/b é+%.json")


def test_conditions_hold(store: S3Store) -> None:
    first = store.put("k", b"1", if_none_match=True)
    with pytest.raises(PreconditionFailed, match="k: expected the object as it was read"):
        store.put("k", b"2", if_none_match=True)
    second = store.put("k", b"2", if_match=first)
    with pytest.raises(PreconditionFailed):
        store.put("k", b"3", if_match=first)
    with pytest.raises(PreconditionFailed):
        store.put("gone", b"3", if_match=second)
    assert store.get("k").body == b"2"


@pytest.mark.parametrize("condition", ["new", "swap"])
def test_a_put_whose_answer_got_lost_counts_as_done(store: S3Store, condition: str) -> None:
    arguments: dict[str, Any] = {"if_none_match": True}
    if condition == "swap":
        arguments = {"if_match": store.put("k", b"before")}
    lose_next_answer(store)
    etag = store.put("k", b"after", **arguments)
    assert store.head("k").etag == etag  # type: ignore[union-attr]
    assert store.get("k").body == b"after"


def test_a_repeated_put_is_refused_if_the_object_is_someone_elses(store: S3Store) -> None:
    store.put("k", b"theirs")
    lose_next_answer(store)
    with pytest.raises(PreconditionFailed):
        store.put("k", b"ours", if_none_match=True)
    assert store.get("k").body == b"theirs"


def test_listings_go_on_past_the_first_page(store: S3Store) -> None:
    """Clients that stop at the first page: ente-io/ente #13105, among others. Pages are of seven here."""
    keys = [f"ledger/a{number:02d}/x.json" for number in range(23)]
    for key in keys:
        store.put(key, b"")
    real_list = store._client.list_objects_v2
    paged = with_faults(store, list_objects_v2=lambda **given: real_list(**given, MaxKeys=7))
    assert [info.key for info in paged.list_objects("ledger/")] == keys
    assert list(paged.list_folders("ledger/")) == [key.split("/")[1] for key in keys]
    assert list(paged.list_objects("nothing/")) == []


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ({"IsTruncated": True}, "not how to ask for it"),
        ({"IsTruncated": True, "NextContinuationToken": "same"}, "leads back to one already read"),
    ],
)
@pytest.mark.timeout(30)
def test_a_listing_that_never_ends_is_an_error(store: S3Store, page: dict[str, Any], found: str) -> None:
    """Truncated without a token, which loops for ever: InsForge/InsForge #1959."""
    broken = with_faults(store, list_objects_v2=lambda **_: page)
    with pytest.raises(StoreNotTrusted, match=f"listing ledger/ must come to an end; found: .*{found}"):
        list(broken.list_objects("ledger/"))


@pytest.mark.parametrize(
    ("error", "kind", "facts"),
    [
        (answer("ExpiredToken", 400), StoreUnavailable, ["ExpiredToken", "have expired: renew them"]),
        (answer("SlowDown", 503), StoreUnavailable, ["SlowDown", "overloaded", "try again later"]),
        (answer("InvalidAccessKeyId", 403), StoreUnavailable, ["does not know the access key"]),
        (answer("SignatureDoesNotMatch", 403), StoreUnavailable, ["secret key does not belong", "check"]),
        (answer("AccessDenied", 403), StoreUnavailable, ["give them read and write access"]),
        (answer("NoSuchBucket", 404), StoreUnavailable, ["bucket does not exist", "create it"]),
        (answer("InternalError", 500), StoreUnavailable, ["InternalError: so it said"]),
        (answer("NotImplemented", 501), StoreNotTrusted, ["NotImplemented", "Use a store that honours"]),
        (
            EndpointConnectionError(endpoint_url="http://nowhere"),
            StoreUnavailable,
            ["http://nowhere", "Is it up"],
        ),
        (ReadTimeoutError(endpoint_url="http://slow"), StoreUnavailable, ["http://slow", "Is it up"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_faults_say_what_is_wrong_and_what_to_do(
    store: S3Store, error: Exception, kind: type[StorageError], facts: list[str], tmp_path: Path
) -> None:
    """Expired credentials and throttling are the store's fault, never the adapter's."""
    names = ["get_object", "put_object", "head_object", "delete_object", "list_objects_v2"]
    broken = with_faults(store, **{name: failing(error) for name in names})
    file = tmp_path / "file"
    file.write_bytes(b"x")
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: broken.get("some/key"),
        "put": lambda: broken.put("some/key", b"x", if_match='"etag"'),
        "head": lambda: broken.head("some/key"),
        "delete": lambda: broken.delete("some/key"),
        "list": lambda: list(broken.list_objects("some/key")),
        "upload": lambda: broken.upload_file(file, "some/key", sha256="0"),
        "download": lambda: broken.download_file("some/key", file, if_match='"etag"'),
    }
    for operation, call in calls.items():
        with pytest.raises(kind) as caught:
            call()
        message = str(caught.value)
        for fact in [*facts, operation, "some/key"]:
            assert fact in message
    assert file.read_bytes() == b"x"


def test_probe_accepts_a_store_that_keeps_conditions_and_leaves_nothing(store: S3Store) -> None:
    probe_store(store)
    assert list(store.list_objects("")) == []


@pytest.mark.parametrize(
    ("dropped", "probe"),
    [("IfNoneMatch", "an If-None-Match put over an object"), ("IfMatch", "a put with a stale If-Match")],
)
def test_probe_refuses_a_store_that_ignores_conditions(store: S3Store, dropped: str, probe: str) -> None:
    """Servers that let 16 of 16 writers win exist; a ledger there would lose steps."""
    real_put = store._client.put_object
    deaf = with_faults(
        store, put_object=lambda **given: real_put(**{k: v for k, v in given.items() if k != dropped})
    )
    with pytest.raises(StoreNotTrusted, match=rf"{probe} must be refused; found: it was accepted") as caught:
        probe_store(deaf)
    assert caught.value.endpoint.startswith("https://s3")
    assert list(store.list_objects("")) == []


def test_probe_refuses_a_store_that_refuses_everything_conditional(store: S3Store) -> None:
    real_put = store._client.put_object

    def put(**given: Any) -> Any:
        if given.keys() & {"IfMatch", "IfNoneMatch"}:
            raise answer("PreconditionFailed", 412)
        return real_put(**given)

    with pytest.raises(StoreNotTrusted, match="a put whose condition holds must be accepted"):
        probe_store(with_faults(store, put_object=put))


def test_checksum_headers_are_left_out_for_custom_endpoints() -> None:
    """Stores refuse the checksums that boto3 adds since 1.36: boto/boto3 #4392."""
    arguments: dict[str, Any] = {
        "bucket": "b.with.dots",
        "region": "eu-west-1",
        "access_key": "k",
        "secret_key": "s",
    }
    custom = S3Store.open(endpoint="http://store:9000", **arguments)._client.meta.config
    assert custom.request_checksum_calculation == "when_required"
    assert custom.response_checksum_validation == "when_required"
    assert custom.s3 == {"addressing_style": "path"}
    amazon = S3Store.open(endpoint=None, addressing_style="virtual", **arguments)._client.meta.config
    assert amazon.request_checksum_calculation == "when_supported"
    assert amazon.s3 == {"addressing_style": "virtual"}


def test_a_file_goes_up_and_down_whole_and_verified(store: S3Store, tmp_path: Path) -> None:
    content = random.Random(5).randbytes(3_000_017)
    source, target = tmp_path / "source.bin", tmp_path / "target.bin"
    source.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    sent: list[int] = []

    stored = store.upload_file(source, "files/x", sha256=digest, sent=sent.append)
    assert (stored.bytes, stored.sha256, sum(sent)) == (3_000_017, digest, 3_000_017)
    got = store.download_file("files/x", target, if_match=stored.etag)
    assert target.read_bytes() == content
    assert (got.name, got.bytes, got.sha256) == ("target.bin", 3_000_017, digest)


def test_an_upload_that_someone_else_overwrote_is_noticed(store: S3Store, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"ours")
    real_put = store._client.put_object

    def upload(**given: Any) -> None:
        real_put(**given)
        store.put("k", b"them")

    with pytest.raises(StoreUnavailable, match="sent 4 bytes with sha256 00, it now holds 4 bytes"):
        with_faults(store, put_object=upload).upload_file(file, "k", sha256="00")


def truncating(store: S3Store, times: int) -> S3Store:
    """Return the store with a line that breaks off half way, so many times."""
    left = [times]
    real_get = store._client.get_object

    def get(**given: Any) -> Any:
        response = real_get(**given)
        if left[0]:
            left[0] -= 1
            body = response["Body"].read()
            response["Body"] = StreamingBody(io.BytesIO(body[: len(body) // 2]), len(body))
        return response

    return with_faults(store, get_object=get)


def test_a_transfer_that_breaks_off_once_is_asked_for_again(store: S3Store, tmp_path: Path) -> None:
    content = random.Random(6).randbytes(2_500_000)
    etag = store.put("k", content)
    got = truncating(store, 1).download_file("k", tmp_path / "file", if_match=etag)
    assert (tmp_path / "file").read_bytes() == content
    assert got.sha256 == hashlib.sha256(content).hexdigest()
    assert truncating(store, 1).get("k").body == content


def test_a_transfer_that_breaks_off_twice_leaves_no_file(store: S3Store, tmp_path: Path) -> None:
    etag = store.put("k", b"0123456789")
    with pytest.raises(StoreUnavailable, match="download k"):
        truncating(store, 2).download_file("k", tmp_path / "file", if_match=etag)
    with pytest.raises(StoreUnavailable, match="get k"):
        truncating(store, 2).get("k")
    assert list(tmp_path.iterdir()) == []


def test_a_download_is_of_the_object_that_was_meant(store: S3Store, tmp_path: Path) -> None:
    etag = store.put("k", b"old")
    store.put("k", b"new")
    with pytest.raises(PreconditionFailed):
        store.download_file("k", tmp_path / "file", if_match=etag)
    store.delete("k")
    with pytest.raises((ObjectNotFound, PreconditionFailed)):
        store.download_file("k", tmp_path / "file", if_match=etag)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_disk_is_its_own_error_and_leaves_no_file(store: S3Store, tmp_path: Path) -> None:
    etag = store.put("k", b"bytes")
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        store.download_file("k", tmp_path / "taken", if_match=etag)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


class _Line(io.BytesIO):
    """What is read of an answer until the line does something that botocore has no word for."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def read(self, size: int | None = -1) -> bytes:
        raise self.error


@pytest.mark.parametrize("error", [SSLError("record overflow"), ProtocolError("reset")])
def test_what_breaks_while_a_body_is_read_is_the_stores_fault(
    store: S3Store, tmp_path: Path, error: Exception
) -> None:
    """Errors of a body come through botocore as urllib3's own, of TLS to this day: boto/boto3 #2902."""
    etag = store.put("k", b"0123456789")
    real_get = store._client.get_object

    def get(**given: Any) -> Any:
        return real_get(**given) | {"Body": StreamingBody(_Line(error), 10)}

    broken = with_faults(store, get_object=get)
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: broken.get("k"),
        "get ": lambda: broken.read_start("k", 3, if_match=etag),
        "digest": lambda: broken.digest_object("k", if_match=etag),
        "download": lambda: broken.download_file("k", tmp_path / "file", if_match=etag),
    }
    for name, call in calls.items():
        with pytest.raises(StoreUnavailable, match=rf"{name.strip()} k: .*{error}.*Is it up"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_that_does_not_hold_is_asked_again(store: S3Store) -> None:
    """409 is of a write that may have failed; 412 may be of one's own, sent again: aws/aws-sdk-java-v2 #6580."""
    real_put, refusals = store._client.put_object, [True, False, True]

    def put(**given: Any) -> Any:
        if refusals:
            if refusals.pop():  # done, and refused on the way when it was sent again
                real_put(**given)
                raise answer("PreconditionFailed", 412)
            raise answer("ConditionalRequestConflict", 409)
        return real_put(**given)

    refusing = with_faults(store, put_object=put)
    etag = refusing.put("k", b"first", if_none_match=True)
    assert store.get("k").info.etag == etag and len(refusals) == 2
    assert refusing.put("k", b"second", if_match=etag) == store.get("k").info.etag and not refusals
    assert store.get("k").body == b"second"


def test_a_listing_that_lost_its_body_is_not_an_empty_one(store: S3Store) -> None:
    """botocore makes an empty listing of it, and everything seems to be gone."""
    store.put("k", b"x")
    lost: list[int] = [0]

    def lose(response_dict: Any, **_: Any) -> None:
        if lost[0]:
            lost[0] -= 1
            response_dict["headers"]["content-length"] = str(len(response_dict["body"]))
            response_dict["body"] = b""

    events = store._client.meta.events
    events.register_first("before-parse.s3.ListObjectsV2", lose)
    try:
        lost[0] = 1
        assert [found.key for found in store.list_objects("")] == ["k"] and lost == [0]
        lost[0] = 2
        with pytest.raises(StoreUnavailable, match=r"list : .* 0 of \d+ bytes came"):
            list(store.list_objects(""))
    finally:
        events.unregister("before-parse.s3.ListObjectsV2", lose)
