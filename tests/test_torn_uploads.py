"""Uploads that are torn: half there, half old, replaced or deleted under the reader, and a store that fails meanwhile.

What must never happen: that a half is processed, that an adapter is blamed for the store, that a verdict is lost.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.response import StreamingBody
from pipeline_builders import Desk
from prefect.client.schemas.objects import StateType
from store_builders import FaultInjector, make_adapter_directory, memory_store, submit_directory, with_faults

from storage.documents import utc_now
from storage.keys import marker_key, roster_key, upload_file_key
from storage.ledger import Outcome
from storage.s3 import S3Store
from tasks.at_rest import MEMORY_FILE
from tasks.inbox import list_pending
from tasks.sweeping import list_due

pytestmark = pytest.mark.real

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WEIGHTS_KEY = upload_file_key("ada", "run-1", WEIGHTS)


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


def due(store: S3Store) -> list[str]:
    later = utc_now() + timedelta(hours=2)
    return [one.why for one in list_due(store, now=later, grace_s=60, settle_s=600).due]


def pending(store: S3Store) -> list[tuple[str, str | None]]:
    later = utc_now() + timedelta(hours=2)
    return [(one.state.value, one.code) for one in list_pending(store, now=later, settle_s=600)]


def refuse_once(desk: Desk, patch: pytest.MonkeyPatch, operation: str, fault: Callable[..., Any]) -> None:
    """Let the next request of this kind for the weights be answered by a fault, and all others by the store."""
    real = getattr(desk.store._client, operation)
    met: list[bool] = []

    def call(**given: Any) -> Any:
        if given.get("Key") != WEIGHTS_KEY or met:
            return real(**given)
        met.append(True)
        return fault(real, given)

    patch.setattr(desk.store, "_client", FaultInjector(desk.store._client, {operation: call}))


def answers(code: str, status: int) -> Callable[..., Any]:
    def fault(*_: Any) -> Any:
        response: Any = {
            "Error": {"Code": code, "Message": "x"},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }
        raise ClientError(response, "GetObject")

    return fault


def cut_short(real: Callable[..., Any], given: dict[str, Any]) -> Any:
    answer = real(**given)
    body = answer["Body"].read()
    return answer | {"Body": StreamingBody(io.BytesIO(body[:-50]), len(body))}


def other_bytes(real: Callable[..., Any], given: dict[str, Any]) -> Any:
    answer = real(**given)
    body = answer["Body"].read()
    return answer | {"Body": StreamingBody(io.BytesIO(body[:-1] + b"?"), len(body))}


@pytest.mark.parametrize("fault", [cut_short, other_bytes])
def test_a_transfer_that_goes_wrong_once_leaves_no_trace(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]
) -> None:
    """A body that ends early, or comes with other bytes: boto/s3transfer #333, boto/botocore #3382."""
    desk.heldout("ada")
    desk.submit("ada", desk.adapter("ada"))
    refuse_once(desk, monkeypatch, "get_object", fault)
    assert desk.run("ada").name == "Ready"
    assert all(step.outcome in {Outcome.DONE, Outcome.READY} for step in desk.ledger("ada").steps)


@pytest.mark.parametrize(
    ("operation", "code", "status", "advice"),
    [
        ("get_object", "ExpiredToken", 403, "have expired: renew them"),
        ("get_object", "SlowDown", 503, "overloaded"),
        ("get_object", "AccessDenied", 403, "give them read"),
        ("get_object", "RequestTimeTooSkewed", 403, "clock differs"),
    ],
)
def test_expired_credentials_and_throttling_stop_the_run_and_blame_nobody(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, operation: str, code: str, status: int, advice: str
) -> None:
    """In the middle of a long intake, after the client's own repetitions: boto/s3transfer #333."""
    desk.heldout("ada")
    desk.submit("ada", desk.adapter("ada"))
    refuse_once(desk, monkeypatch, operation, answers(code, status))
    assert desk.run("ada").name == "Stopped: store_unavailable"
    [step] = desk.ledger("ada").steps
    assert step.outcome is Outcome.STOPPED and desk.ledger("ada").verdict is None
    assert code in str(step.result["reason"]) and advice in str(step.result["reason"])
    assert pending(desk.store) == [("stopped", "store_unavailable")] and due(desk.store) == ["it was stopped"]
    assert desk.run("ada").name == "Ready"


def test_a_store_that_is_down_before_there_is_a_ledger_stops_the_run_by_its_name(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.heldout("ada")
    desk.submit("ada", desk.adapter("ada"))

    def down(**_: Any) -> Any:
        raise EndpointConnectionError(endpoint_url="http://127.0.0.1:9")

    working = desk.store._client
    monkeypatch.setattr(desk.store, "_client", FaultInjector(working, {"list_objects_v2": down}))
    state = desk.run("ada")
    assert (state.type, state.name) == (StateType.FAILED, "Stopped: store_unavailable")
    assert "ada/run-1" in (state.message or "") and "127.0.0.1:9" in (state.message or "")
    monkeypatch.setattr(desk.store, "_client", working)
    assert desk.keys("ledger/") == [] and due(desk.store) == ["no run has taken it up"]
    assert desk.run("ada").name == "Ready"


def test_an_upload_replaced_under_the_download_is_taken_in_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of half-written files: PrimeIntellect-ai/prime-rl #2242. Asked for by ETag, the store says 412."""
    desk.heldout("ada")
    desk.submit("ada", desk.adapter("ada"))
    first = desk.submitted["ada"]

    def replace(real: Callable[..., Any], given: dict[str, Any]) -> Any:
        desk.submit("ada", desk.adapter("ada", seed=5))
        return real(**given)

    refuse_once(desk, monkeypatch, "get_object", replace)
    state = desk.run("ada")
    assert state.name == "Waiting: incomplete_upload" and "was replaced in the store" in (state.message or "")
    assert desk.keys("serving/") == []
    assert due(desk.store) == ["no run has taken it up"], "the new one; the old bytes are history"
    assert desk.run("ada").name == "Ready"
    assert desk.ledger("ada").adapter_digest != first.adapter_digest


def test_a_stale_marker_over_other_bytes_is_refused_until_the_right_ones_come(desk: Desk) -> None:
    """A marker of the new save beside files of the one before, of equal sizes: PrimeIntellect-ai/prime-rl #2391."""
    desk.heldout("ada")
    desk.submit("ada", desk.adapter("ada"))
    right = desk.store.get(WEIGHTS_KEY).body
    desk.store.put(WEIGHTS_KEY, right[:-1] + bytes([right[-1] ^ 1]))
    state = desk.run("ada")
    assert state.name == "Quarantined: corrupt_or_partial" and "should have sha256" in (state.message or "")
    verdict = desk.ledger("ada").verdict
    assert verdict is not None and verdict.result["transient"]
    desk.store.put(WEIGHTS_KEY, right)
    assert due(desk.store) == ["its files came anew since they were refused"]
    assert desk.run("ada").name == "Ready"
    assert pending(desk.store) == []


def test_weights_that_come_long_after_config_and_marker_are_waited_for(desk: Desk) -> None:
    """Only the event of the config came, in the other order the weights': snowplow #1695, MaterializeInc #26403."""
    desk.heldout("ada")
    desk.submit("ada", desk.adapter("ada"))
    body = desk.store.get(WEIGHTS_KEY).body
    for partial in (None, body[:400]):
        desk.store.delete(WEIGHTS_KEY) if partial is None else desk.store.put(WEIGHTS_KEY, partial)
        assert desk.run("ada").name == "Waiting: incomplete_upload"
        assert pending(desk.store) == [("incomplete", "incomplete_upload")] and due(desk.store) == []
        assert desk.keys("ledger/") == [], "it has no identity yet, and so no record"
    desk.store.put(WEIGHTS_KEY, body)
    assert due(desk.store) == ["no run has taken it up"]
    assert desk.run("ada").name == "Ready"


def test_a_source_deleted_under_the_reader_is_a_stop_and_no_refusal(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed, then 404 on the second get: PrimeIntellect-ai/prime-rl #2395, where retention took a revision in use."""
    desk.heldout("ada")
    desk.submit("ada", desk.adapter("ada"))
    refuse_once(desk, monkeypatch, "get_object", answers("NoSuchKey", 404))
    assert desk.run("ada").name in {"Stopped: source_gone", "Waiting: incomplete_upload"}
    assert desk.ledger("ada").verdict is None
    assert desk.run("ada").name == "Ready"


def test_a_source_deleted_after_the_verdict_unreadies_nobody(desk: Desk) -> None:
    """Retention removes what was trained: PrimeIntellect-ai/prime-rl #2395. What is served lies elsewhere."""
    desk.ready("ada")
    desk.sync()
    before = desk.store.get(roster_key()).body
    for key in desk.keys("uploads/"):
        desk.store.delete(key)
    assert pending(desk.store) == [] and due(desk.store) == []
    assert desk.run("ada", force=True).name == "Waiting: incomplete_upload"
    desk.sync()
    assert desk.store.get(roster_key()).body == before and desk.keys("serving/")


@pytest.mark.real
def test_a_source_partly_deleted_after_the_verdict_unreadies_nobody(desk: Desk) -> None:
    desk.ready("ada")
    desk.store.delete(WEIGHTS_KEY)
    assert pending(desk.store) == [] and due(desk.store) == []
    assert desk.run("ada", force=True).name == "Waiting: incomplete_upload"
    verdict = desk.ledger("ada").verdict
    assert verdict is not None and verdict.outcome is Outcome.READY


def test_what_a_listing_leaves_out_is_asked_for_by_name(store: S3Store, tmp_path: Path) -> None:
    """A server that lists half and says that this is all: rustfs/rustfs #2931, #3217."""
    submit_directory(store, make_adapter_directory(tmp_path))
    real = store._client.list_objects_v2

    def half(**given: Any) -> Any:
        page = real(**given)
        return page | {
            "Contents": [one for one in page.get("Contents", ()) if not one["Key"].endswith(WEIGHTS)]
        }

    assert pending(with_faults(store, list_objects_v2=half)) == [("new", None)]
    store.delete(WEIGHTS_KEY)
    assert pending(store) == [("incomplete", "incomplete_upload")]


def test_an_upload_between_two_markers_is_no_upload(store: S3Store, tmp_path: Path) -> None:
    """Listed with its marker, which a new submission has taken away since."""
    submit_directory(store, make_adapter_directory(tmp_path))
    real = store._client.get_object

    def take_away(**given: Any) -> Any:
        store.delete(marker_key("ada", "run-1"))
        return real(**given)

    moment = utc_now()
    gone = with_faults(store, get_object=take_away)
    assert [one.state.value for one in list_pending(gone, now=moment, settle_s=600)] == ["settling"]


def listed_later(store: S3Store) -> Callable[..., Any]:
    """Listings in which every file is an hour younger."""
    real = store._client.list_objects_v2

    def pages(**given: Any) -> Any:
        page = real(**given)
        for item in page.get("Contents", ()):
            item["LastModified"] += timedelta(hours=1)
        return page

    return pages


@pytest.mark.real
def test_uploads_at_rest_are_listed_and_not_read(desk: Desk) -> None:
    """Of ten thousand adapters a sweep has to look at those that have changed; each change is one that it sees."""
    desk.ready("ada")
    desk.heldout("bob")
    desk.submit("bob", desk.adapter("bob"))
    asked: list[str] = []
    real = desk.store._client.get_object

    def get(**given: Any) -> Any:
        asked.append(given["Key"])
        return real(**given)

    counted = with_faults(desk.store, get_object=get)
    memory = desk.settings.home / MEMORY_FILE

    def look() -> tuple[list[str], set[str]]:
        asked.clear()
        found = list_pending(counted, now=utc_now(), settle_s=600, memory=memory)
        return sorted(one.author for one in found), {key.split("/")[1] for key in asked}

    assert look() == (["bob"], {"ada", "bob"})
    assert look() == (["bob"], {"bob"}), "ada is at rest"
    memory.write_text("no notes")
    assert look() == (["bob"], {"ada", "bob"}) and look() == (["bob"], {"bob"})
    desk.store.put(f"uploads/ada/run-1/{CONFIG}", desk.store.get(f"uploads/ada/run-1/{CONFIG}").body + b"\n")
    assert look() == (["bob"], {"ada", "bob"}), "a file"
    assert look() == (["bob"], {"bob"})
    younger = with_faults(counted, list_objects_v2=listed_later(desk.store))
    list_pending(younger, now=utc_now(), settle_s=600, memory=memory)
    assert any(key.startswith("uploads/ada") for key in asked), "a file with the same bytes, put anew"
    desk.submit("ada", desk.adapter("ada", seed=5))
    assert look() == (["ada", "bob"], {"ada", "bob"}), "a marker"
    assert desk.run("ada").name == "Ready" and look()[0] == ["bob"]
    desk.run("ada", force=True)
    assert look() == (["bob"], {"ada", "bob"}), "a ledger"
    assert look() == (["bob"], {"bob"})
