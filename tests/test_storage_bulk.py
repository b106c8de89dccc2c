"""Many objects read by another library: it answers as our own client does, and what it cannot do that one does."""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from boto3.session import Session
from obstore.exceptions import GenericError
from store_builders import FaultInjector, SeaweedFS, failing, memory_store

from storage.bulk import BulkReader
from storage.errors import ObjectNotFound, StoreUnavailable
from storage.s3 import S3Store

SESSION = Session("key", "secret", region_name="us-east-1")


@pytest.fixture
def store(server: SeaweedFS, request: pytest.FixtureRequest) -> S3Store:
    return server.open(f"bucket-{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}")


@pytest.mark.real
def test_it_answers_as_our_own_client_does_without_it(store: S3Store) -> None:
    bodies = {f"ledger/ada/{number}.json": bytes([number]) * (number * 9001) for number in range(1, 4)}
    for key, body in {
        **bodies,
        "ledger/ada/a b+c%20d.txt": b"odd",
        "ledger/adamant/1.json": b"other",
    }.items():
        store.put(key, body)
    boom = failing(AssertionError("our own client was asked"))
    deaf = S3Store(
        FaultInjector(store._client, {"get_object": boom, "list_objects_v2": boom}),
        store.bucket,
        store.session,
    )
    reader = BulkReader(deaf)
    for key, body in bodies.items():
        assert reader.get(key) == store.get(key) and reader.get(key).body == body
    assert list(reader.list_objects("ledger/ada/")) == list(store.list_objects("ledger/ada/"))
    assert len(list(reader.list_objects("ledger/ada/"))) == 4
    assert list(reader.list_objects("ledger/nobody/")) == []
    with pytest.raises(AssertionError, match="our own client was asked"):
        reader.get("ledger/ada/none.json")  # it alone tells what is missing


@pytest.mark.real
def test_what_is_missing_or_refused_is_told_as_ever(server: SeaweedFS, store: S3Store) -> None:
    with pytest.raises(ObjectNotFound):
        BulkReader(store).get("k")
    elsewhere = BulkReader(S3Store(store._client, "no-such-bucket", store.session))
    with pytest.raises(StoreUnavailable, match="NoSuchBucket: the bucket does not exist"):
        elsewhere.get("k")
    stranger = S3Store.open(
        endpoint=server.endpoint,
        bucket=store.bucket,
        region="us-east-1",
        access_key=server.access_key,
        secret_key="guessed",
    )
    with pytest.raises(StoreUnavailable, match="the secret key does not belong to the access key"):
        BulkReader(stranger).get("k")
    with pytest.raises(StoreUnavailable, match="the secret key does not belong to the access key"):
        list(BulkReader(stranger).list_objects("ledger/"))


@pytest.mark.real
def test_listings_go_on_past_a_page(store: S3Store) -> None:
    wanted = [f"many/{number:04d}" for number in range(1001)]
    for key in wanted:
        store.put(key, b"x")
    assert [found.key for found in BulkReader(store).list_objects("many/")] == wanted


class Failing:
    """Object_store's client in its place: it can do nothing, and counts how often it was asked."""

    asked = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def get(self, key: str) -> Any:
        type(self).asked += 1
        raise GenericError("no route to host")

    def list(self, prefix: str, *, chunk_size: int) -> Any:
        return SimpleNamespace(collect=lambda: self.get(prefix))


def test_one_that_fails_again_and_again_is_not_asked_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.bulk.NativeStore", Failing)
    with memory_store() as store:
        store.put("ledger/ada/1.json", b"kept")
        reader = BulkReader(S3Store(store._client, store.bucket, SESSION))
        for _ in range(5):
            assert reader.get("ledger/ada/1.json").body == b"kept"
            assert [found.key for found in reader.list_objects("ledger/ada/")] == ["ledger/ada/1.json"]
    assert Failing.asked == 3


def test_without_what_it_would_be_opened_by_our_own_client_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.bulk.NativeStore", Failing)
    before = Failing.asked
    with memory_store() as store:
        store.put("ledger/ada/1.json", b"kept")
        for session in (None, Session()):
            monkeypatch.setattr(Session, "get_credentials", lambda self: None)
            reader = BulkReader(S3Store(store._client, store.bucket, session))
            assert reader.get("ledger/ada/1.json").body == b"kept"
    assert Failing.asked == before
