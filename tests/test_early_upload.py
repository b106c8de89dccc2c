"""What is sent while it is checked: nothing shows before the check has passed, nothing is sent twice, nothing stays."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from pipeline_builders import Desk
from store_builders import with_faults

import flows.onboard
import tasks.validation
from storage.errors import StoreUnavailable
from storage.ledger import StepKind
from storage.s3 import S3Store
from tasks.lora.checks import CheckReport

PART = 1_009
_WAIT_S = 60


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.multipart.PART", PART)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", PART)


class Sending:
    """The store of a desk, with every part that is sent, by key and number."""

    def __init__(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[str, int]] = []
        self.fails = False
        self.is_slow = False
        self._lock = threading.Lock()
        self._real = desk.store._client.upload_part
        self.store = with_faults(desk.store, upload_part=self._send)
        monkeypatch.setattr(flows.onboard, "open_store", lambda settings: self.store)

    def _send(self, **given: Any) -> Any:
        if self.fails and threading.current_thread().name == "transfer":
            raise EndpointConnectionError(endpoint_url="http://nowhere")
        with self._lock:
            if self.is_slow:
                time.sleep(0.05)
            if given["Key"].startswith(("serving/", "control/")):
                self.sent.append((given["Key"], given["PartNumber"]))
            return self._real(**given)


def pending(store: S3Store) -> set[str]:
    return {one.key.partition("/")[0] for one in store.list_pending("")}


def parts_of(store: S3Store) -> int:
    """How many parts the store has of uploads that are not completed."""
    return sum(
        len(store._client.list_parts(Bucket=store.bucket, Key=one.key, UploadId=one.upload_id)["Parts"])
        for one in store.list_pending("")
    )


def during_check(monkeypatch: pytest.MonkeyPatch, look: Callable[[], bool | None]) -> None:
    """Have the check pause until this is true, and fail where it is None."""
    real = tasks.validation.check_conversion

    def check(*args: Any, **options: Any) -> CheckReport:
        report = real(*args, **options)
        pause = threading.Event()
        for _ in range(100 * _WAIT_S):
            seen = look()
            if seen is None:
                failed = (
                    replace(one, passed=False, where="layer 1 expert 2") if one.name == "deltas" else one
                    for one in report.checks
                )
                return replace(report, checks=tuple(failed))
            if seen:
                return report
            pause.wait(0.01)
        raise AssertionError("it never came so far")

    monkeypatch.setattr(tasks.validation, "check_conversion", check)


def is_all_sent(desk: Desk, sending: Sending) -> bool:
    """Whether the adapter is in the store to the last part, as far as can be told from outside."""
    sizes = [
        path.stat().st_size
        for path in desk.settings.work_path.glob("served/*/*/*/*")
        if path.stat().st_size > PART
    ]
    assert len(sizes) == 2, "an adapter and its control"
    assert len(set(sizes)) == 1, "of one size, so that either tells the number of parts"
    return parts_of(desk.store) == -(-sizes[0] // PART)


def test_nothing_shows_before_the_check_has_passed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = Sending(desk, monkeypatch)
    seen: list[list[str]] = []

    def look() -> bool:
        if not is_all_sent(desk, sending):
            return False
        seen.append([*desk.keys("serving/"), *desk.keys("control/")])
        assert pending(desk.store) == {"serving"}
        return True

    during_check(monkeypatch, look)
    assert desk.ready("ash").name == "Ready"
    assert seen == [[]]
    assert len(sending.sent) == len(set(sending.sent)) > 10 and parts_of(desk.store) == 0
    names = {key.rpartition("/")[2] for key in desk.keys("serving/")}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "manifest.json"}


def test_what_is_refused_leaves_no_part(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = Sending(desk, monkeypatch)
    during_check(monkeypatch, lambda: None if sending.sent else False)
    assert desk.ready("ash").name == "Quarantined: delta_mismatch"
    assert sending.sent and pending(desk.store) == set()
    assert desk.keys("serving/") == desk.keys("control/") == []


def test_a_run_that_stops_leaves_its_parts_to_the_next(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = Sending(desk, monkeypatch)
    sending.is_slow = True

    def stop() -> bool:
        if len(sending.sent) < 5:
            return False
        raise StoreUnavailable("get", "k", "it is down")

    with monkeypatch.context() as patch:
        during_check(patch, stop)
        assert desk.ready("ash").name == "Stopped: store_unavailable"
    first = list(sending.sent)
    sending.is_slow = False
    assert "serving" in pending(desk.store) and desk.keys("serving/") == []
    assert desk.run("ash").name == "Ready"
    assert len(first) >= 5 and len(sending.sent) == len(set(sending.sent)) > len(first)
    assert pending(desk.store) == set()


def test_what_cannot_be_sent_early_is_no_fault_of_the_check(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = Sending(desk, monkeypatch)
    sending.fails = True

    def mended() -> bool:
        alive = any(thread.name == "early upload" for thread in threading.enumerate())
        if not alive:
            sending.fails = False
        return not alive

    during_check(monkeypatch, mended)
    assert desk.ready("ash").name == "Ready"
    assert len(sending.sent) == len(set(sending.sent)) > 10 and pending(desk.store) == set()
    assert [step.kind for step in desk.ledger("ash").steps].count(StepKind.STAGED) == 1


def test_nothing_is_sent_before_the_packing_is_decided(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other reading may win; its bytes would be others."""
    sending = Sending(desk, monkeypatch)
    at_check: list[int] = []
    during_check(monkeypatch, lambda: at_check.append(len(sending.sent)) is None)
    desk.engine.adapters = lambda name, path: 2.39 if "~control@" in name else 2.1
    assert desk.ready("birch", lora_B_layout=None).name == "Ready"
    assert at_check == [0, 0] and sending.sent


def test_small_adapters_need_none_of_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.multipart.PART", 16 << 20)
    sending = Sending(desk, monkeypatch)
    assert desk.ready("ash").name == "Ready" and sending.sent == []
