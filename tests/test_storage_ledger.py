import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from store_builders import (
    DIGEST,
    OTHER_DIGEST,
    Clock,
    lose_next_answer,
    make_step,
    make_submission,
    memory_store,
    with_faults,
)

from storage.claims import LedgerHandle, list_ledgers, open_ledger, read_ledger
from storage.documents import utc_now
from storage.errors import (
    ClaimHeld,
    ClaimLost,
    InvalidDocument,
    InvalidName,
    LedgerBusy,
    ObjectNotFound,
    StoreUnavailable,
)
from storage.keys import ledger_key
from storage.ledger import TERMINAL, Outcome, StepKind
from storage.s3 import S3Store

KEY = ledger_key("ada", DIGEST)


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(store: S3Store, clock: Clock | None = None, **more: Any) -> LedgerHandle:
    submission = more.pop("submission", make_submission())
    return open_ledger(store, "ada", DIGEST, more.pop("base", "tiny"), submission, now=clock or Clock())


def test_a_ledger_is_created_once_and_found_again(store: S3Store) -> None:
    first = opened(store)
    assert first.key == KEY
    assert opened(store).document == first.document == read_ledger(store, "ada", DIGEST)[0]
    assert first.document.submissions == (make_submission(),)
    assert (first.document.claim, first.document.steps, first.document.verdict) == (None, (), None)
    with pytest.raises(ObjectNotFound, match=OTHER_DIGEST):
        read_ledger(store, "ada", OTHER_DIGEST)
    with pytest.raises(InvalidName):
        read_ledger(store, "ada", "short")


def test_two_creators_at_once_share_one_ledger(store: S3Store) -> None:
    real_get = store._client.get_object
    other: list[LedgerHandle] = []

    def get(**given: Any) -> Any:
        if not other:
            other.append(opened(store, submission=make_submission(1)))
            raise ClientError({"Error": {"Code": "NoSuchKey"}, "ResponseMetadata": {}}, "GetObject")
        return real_get(**given)

    late = opened(with_faults(store, get_object=get), submission=make_submission(2))
    assert late.document.submissions == (make_submission(1), make_submission(2))


def test_the_base_follows_the_latest_submission(store: S3Store) -> None:
    """A mistyped base is put right by submitting again; an old event does not bring it back."""
    opened(store, base="tinny", submission=make_submission(1))
    assert opened(store, base="tiny", submission=make_submission(2)).document.base == "tiny"
    for second in (0, 1):
        assert opened(store, base="tinny", submission=make_submission(second)).document.base == "tiny"
    assert len(read_ledger(store, "ada", DIGEST)[0].submissions) == 3


def test_a_claim_by_a_clock_that_is_ahead_counts_for_minutes_after_the_last_word(store: S3Store) -> None:
    """A run that was killed while its clock was an hour ahead kept its adapter for an hour."""
    now = utc_now()
    ahead = open_ledger(store, "ada", DIGEST, "tiny", make_submission(), now=lambda: now + timedelta(hours=1))
    ahead.claim("w1", 60)

    def take(seconds: float) -> LedgerHandle:
        moment = now + timedelta(seconds=seconds)
        other = open_ledger(store, "ada", DIGEST, "tiny", make_submission(), now=lambda: moment)
        other.claim("w2", 60)
        return other

    for early in (0, 590):
        with pytest.raises(ClaimHeld, match="w1 works on this adapter"):
            take(early)
    assert take(610).document.claim is not None
    with pytest.raises(ClaimLost):
        ahead.append(make_step())


def test_one_holder_works_and_others_hear_who_and_until_when(store: S3Store, clock: Clock) -> None:
    mine, other = opened(store, clock), opened(store, clock)
    mine.claim("w1", 60)
    with pytest.raises(
        ClaimHeld, match=f"{KEY}: w1 works on this adapter and claims it until 2026-03-01T12:01:00Z"
    ):
        other.claim("w2", 60)
    clock.pass_seconds(59)
    with pytest.raises(ClaimHeld):
        other.claim("w2", 60)
    mine.renew(60)
    clock.pass_seconds(59)
    with pytest.raises(ClaimHeld) as caught:
        other.claim("w2", 60)
    assert (caught.value.holder, caught.value.expires_at.minute) == ("w1", 1)
    mine.release()
    assert read_ledger(store, "ada", DIGEST)[0].claim is None
    other.claim("w2", 60)


def test_a_claim_that_ran_out_is_taken_over_and_its_old_holder_shut_out(store: S3Store, clock: Clock) -> None:
    mine, other = opened(store, clock), opened(store, clock)
    mine.claim("w1", 60)
    mine.append(make_step(n=1))
    clock.pass_seconds(60)
    other.claim("w2", 60)
    for refused in (lambda: mine.append(make_step(n=2)), lambda: mine.renew(60)):
        with pytest.raises(ClaimLost, match=f"{KEY}: expected the claim of w1, found w2") as caught:
            refused()
        assert caught.value.found == "w2"
    mine.release()
    other.append(make_step(n=3))
    ledger = read_ledger(store, "ada", DIGEST)[0]
    assert [step.result["n"] for step in ledger.steps] == [1, 3]
    assert ledger.claim is not None
    assert ledger.claim.holder == "w2"


def test_a_claim_that_ran_out_but_was_not_taken_still_counts(store: S3Store, clock: Clock) -> None:
    mine = opened(store, clock)
    mine.claim("w1", 60)
    clock.pass_seconds(3600)
    mine.append(make_step(n=1))
    mine.renew(60)
    with pytest.raises(ClaimHeld):
        opened(store, clock).claim("w2", 60)


def test_nothing_is_written_without_a_claim(store: S3Store) -> None:
    mine = opened(store)
    for refused in (
        lambda: mine.append(make_step()),
        lambda: mine.renew(60),
        lambda: mine.keep_claim(60).__enter__(),
    ):
        with pytest.raises(ClaimLost, match="found no claim"):
            refused()
    mine.claim("w1", 60)
    mine.release()
    with pytest.raises(ClaimLost):
        mine.append(make_step())
    assert read_ledger(store, "ada", DIGEST)[0].steps == ()


def test_steps_are_only_ever_added(store: S3Store, clock: Clock) -> None:
    mine = opened(store, clock)
    mine.claim("w1", 60)
    steps = [
        make_step(StepKind.INSPECTED),
        make_step(StepKind.CONVERTED),
        make_step(StepKind.INSPECTED, attempt=2),
    ]
    for step in steps:
        assert mine.append(step) == step
        opened(store, clock, submission=make_submission(len(mine.document.steps)))
    ledger = read_ledger(store, "ada", DIGEST)[0]
    assert list(ledger.steps) == steps == list(mine.document.steps)
    assert len(ledger.submissions) == 4
    assert mine.document.submissions[:3] == ledger.submissions[:3]


def test_only_a_terminal_outcome_of_the_same_kind_and_key_finishes_a_step(store: S3Store) -> None:
    mine = opened(store)
    mine.claim("w1", 60)
    key, other = "0123456789abcdef", "fedcba9876543210"
    for attempt, outcome in enumerate([Outcome.STOPPED, Outcome.WAITING], start=1):
        mine.append(make_step(StepKind.CHECKED, outcome, step_key=key, attempt=attempt))
    assert mine.finished(StepKind.CHECKED, key) is None
    assert mine.next_attempt(StepKind.CHECKED, key) == 3
    done = mine.append(make_step(StepKind.CHECKED, Outcome.DONE, step_key=key, attempt=3))
    mine.append(make_step(StepKind.CHECKED, Outcome.STOPPED, step_key=key, attempt=4))
    assert mine.finished(StepKind.CHECKED, key) == done
    forced = mine.append(make_step(StepKind.CHECKED, Outcome.QUARANTINED, step_key=key, attempt=5))
    assert mine.finished(StepKind.CHECKED, key) == forced
    assert mine.finished(StepKind.CHECKED, other) is None
    assert mine.finished(StepKind.STAGED, key) is None
    assert mine.next_attempt(StepKind.CHECKED, other) == mine.next_attempt(StepKind.STAGED, key) == 1
    assert {outcome for outcome in Outcome if outcome not in TERMINAL} == {Outcome.WAITING, Outcome.STOPPED}


def test_the_verdict_is_the_last_terminal_verdict_step(store: S3Store) -> None:
    """A later stop must not un-ready anyone."""
    mine = opened(store)
    mine.claim("w1", 60)
    mine.append(make_step(StepKind.INSPECTED, Outcome.QUARANTINED))
    assert mine.document.verdict is None
    for attempt, outcome in enumerate([Outcome.READY, Outcome.STOPPED, Outcome.WAITING], start=1):
        mine.append(make_step(StepKind.VERDICT, outcome, attempt=attempt))
    ledger = read_ledger(store, "ada", DIGEST)[0]
    assert ledger.verdict == ledger.steps[1]
    assert ledger.verdict is not None
    assert ledger.verdict.outcome is Outcome.READY
    last = mine.append(make_step(StepKind.VERDICT, Outcome.INCONCLUSIVE, attempt=4))
    assert read_ledger(store, "ada", DIGEST)[0].verdict == last


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_step_whose_answer_got_lost_is_written_once(store: S3Store, overtaken: bool) -> None:
    """boto3 repeats a put whose answer got lost, and the store then refuses what it has already taken."""
    mine = opened(store)
    mine.claim("w1", 60)
    if overtaken:
        real_put = store._client.put_object
        put_before: list[bool] = []

        def put(**given: Any) -> Any:
            """Carry the first put out, let another worker write on top, and say the condition failed."""
            answer = real_put(**given)
            if put_before:
                return answer
            put_before.append(True)
            opened(store, submission=make_submission(9))
            refusal: Any = {"Error": {"Code": "PreconditionFailed"}, "ResponseMetadata": {"RetryAttempts": 1}}
            raise ClientError(refusal, "PutObject")

        mine._store = with_faults(store, put_object=put)
    else:
        lose_next_answer(store)
    mine.append(make_step(n=1))
    mine.append(make_step(n=2))
    ledger = read_ledger(store, "ada", DIGEST)[0]
    assert [step.result["n"] for step in ledger.steps] == [1, 2]
    assert len(ledger.submissions) == (2 if overtaken else 1)


def test_a_ledger_that_never_stands_still_is_an_error(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr("storage.claims._WRITES", 7)
    mine = opened(store)
    real_put = store._client.put_object

    def overtaken(**given: Any) -> Any:
        store.put(KEY, store.get(KEY).body + b" ")
        return real_put(**given)

    mine._store = with_faults(store, put_object=overtaken)
    with pytest.raises(LedgerBusy, match=f"{KEY}: expected to write within 7 attempts"):
        mine.claim("w1", 60)


def test_claims_are_kept_alive_in_the_background(store: S3Store) -> None:
    mine = opened(store)
    clock = Clock()
    mine._now = clock
    mine.claim("w1", 0.3)
    with mine.keep_claim(0.3):
        for _ in range(3):
            before = _expiry(store)
            clock.pass_seconds(10)
            _until_renewed(store, before)
            mine.append(make_step(at=clock.time.isoformat()))
    after = _expiry(store)
    clock.pass_seconds(10)
    time.sleep(0.3)
    assert _expiry(store) == after
    assert len(read_ledger(store, "ada", DIGEST)[0].steps) == 3


def test_a_claim_lost_in_the_background_stops_the_next_append(store: S3Store) -> None:
    clock = Clock()
    mine, other = opened(store, clock), opened(store, clock)
    mine.claim("w1", 60)
    with mine.keep_claim(60):
        clock.pass_seconds(61)
        other.claim("w2", 60)
        with pytest.raises(ClaimLost, match="found w2"):
            mine.append(make_step())


def test_a_store_that_is_down_for_a_moment_does_not_end_the_keeping(store: S3Store) -> None:
    clock = Clock()
    mine = opened(store, clock)
    mine.claim("w1", 0.3)
    tried: list[int] = []

    def put(**_: Any) -> None:
        tried.append(1)
        raise EndpointConnectionError(endpoint_url="http://x")

    with mine.keep_claim(0.3):
        mine._store = with_faults(store, put_object=put)
        clock.pass_seconds(10)
        _until(lambda: len(tried) >= 2)
        with pytest.raises(StoreUnavailable):
            mine.append(make_step())
        before = _expiry(store)
        mine._store = store
        _until_renewed(store, before)
    mine.append(make_step())


def test_ledgers_are_listed_without_what_else_lies_there(store: S3Store) -> None:
    opened(store)
    open_ledger(store, "bob", OTHER_DIGEST, "tiny", make_submission())
    store.put("ledger/ada/_author.json", b"{}")
    found = list(list_ledgers(store))
    assert [info.key for info in found] == [KEY, ledger_key("bob", OTHER_DIGEST)]
    assert found[0].etag == read_ledger(store, "ada", DIGEST)[1]


def test_a_ledger_under_the_wrong_key_is_refused(store: S3Store) -> None:
    opened(store)
    wrong = ledger_key("bob", DIGEST)
    store.put(wrong, store.get(KEY).body)
    with pytest.raises(InvalidDocument, match=f"{re.escape(wrong)}: .*it is the ledger of ada"):
        read_ledger(store, "bob", DIGEST)


def _expiry(store: S3Store) -> datetime:
    claim = read_ledger(store, "ada", DIGEST)[0].claim
    assert claim is not None
    return claim.expires_at


def _until_renewed(store: S3Store, before: datetime) -> None:
    _until(lambda: _expiry(store) > before)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)
