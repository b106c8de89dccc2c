"""What operators do about an author: the record, what it comes to, and what runs and sweeps make of it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import httpx
import pytest
from catalog_builders import sync
from cli_builders import Roster
from ledger_builders import base_text, digest, key_of, ready_ledger
from pipeline_builders import BASE, Desk, add_tiny_base
from pydantic import ValidationError
from store_builders import (
    DIGEST,
    make_adapter_directory,
    make_step,
    make_submission,
    memory_store,
    submit_directory,
)
from upkeep_builders import contents, put_roster, put_staged, served_entry

from flows.connect import job_limits
from flows.settings import Settings
from roster.errors import UnknownAuthor
from storage.author_record import (
    AuthorAct,
    AuthorEvent,
    AuthorRecord,
    append_author_event,
    find_standing,
    read_author_record,
)
from storage.claims import open_ledger
from storage.documents import encode_document, read_document
from storage.errors import ClaimLost, InvalidDocument
from storage.keys import author_record_key, ledger_key, parse_author_record_key, parse_ledger_key
from storage.ledger import Ledger, Outcome, StepKind, SubmissionRef
from storage.s3 import S3Store
from tasks.acts import act, find_adapter, find_served, pin
from tasks.cataloguing import SyncLimits, sync_catalog
from tasks.inbox import UploadState, list_pending
from tasks.intake import AdapterBusy, AdapterWaits, Taken, claimed_job, take_in
from tasks.job import Job
from tasks.lifecycle_errors import AdapterNotNamed, PinRefused
from tasks.sweeping import list_due

pytestmark = pytest.mark.real

HOLD, RELEASE, RETIRE = AuthorAct.HOLD, AuthorAct.RELEASE, AuthorAct.RETIRE
PIN, UNPIN, PURGE = AuthorAct.PIN, AuthorAct.UNPIN, AuthorAct.PURGE
Capture = pytest.CaptureFixture[str]
AT = datetime(2026, 3, 1, 12, 0, 7, tzinfo=UTC)


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


def event(act: AuthorAct, base: str | None = None, digest: str | None = None) -> AuthorEvent:
    return AuthorEvent(act=act, base=base, adapter_digest=digest, who="mara", at=AT, why="asked to")


def in_force(*events: AuthorEvent, base: str = "tiny") -> str:
    """What is in force, in letters: h held, r retired, p pinned."""
    found = find_standing(AuthorRecord(author="ada", events=events), base)
    marks = (("h", found.held), ("r", found.retired), ("p", found.pinned))
    return "".join(letter for letter, one in marks if one is not None)


@pytest.mark.parametrize(
    ("events", "tiny", "small"),
    [
        ([(HOLD, None)], "h", "h"),
        ([(HOLD, "tiny")], "h", ""),
        ([(HOLD, None), (RELEASE, "tiny")], "", "h"),
        ([(HOLD, "tiny"), (RETIRE, None), (RELEASE, None)], "", ""),
        ([(HOLD, "tiny"), (RETIRE, None), (RELEASE, "small")], "hr", ""),
        ([(PIN, "tiny"), (HOLD, None), (RELEASE, None)], "p", ""),
        ([(PIN, "tiny"), (UNPIN, "small")], "p", ""),
        ([(PIN, "tiny"), (UNPIN, None)], "", ""),
        ([(PIN, "tiny"), (HOLD, "tiny"), (PURGE, None)], "r", "r"),
        ([(PURGE, None), (RELEASE, None), (HOLD, "small")], "", "h"),
    ],
)
def test_the_acts_count_in_their_order(
    events: list[tuple[AuthorAct, str | None]], tiny: str, small: str
) -> None:
    made = [event(act, base, DIGEST if act is PIN else None) for act, base in events]
    assert (in_force(*made), in_force(*made, base="small")) == (tiny, small)


def test_an_act_that_makes_no_sense_is_refused() -> None:
    whole = {"act": "hold", "base": None, "adapter_digest": None, "who": "mara", "at": AT, "why": "asked to"}
    assert AuthorEvent.model_validate(whole).act is HOLD
    for changes in (
        {"why": " "},
        {"adapter_digest": DIGEST},
        {"act": "pin", "base": "tiny"},
        {"act": "pin", "adapter_digest": DIGEST},
        {"act": "purge", "base": "tiny"},
        {"act": "rename"},
    ):
        with pytest.raises(ValidationError):
            AuthorEvent.model_validate(whole | changes)


def test_a_record_lies_beside_the_ledgers_and_is_none(store: S3Store) -> None:
    key = author_record_key("ada")
    assert (parse_author_record_key(key), parse_ledger_key(key)) == ("ada", None)
    assert parse_author_record_key(f"ledger/ada/{DIGEST}.json") is None
    assert read_author_record(store, "ada").events == () and store.head(key) is None
    store.put(key, json.dumps({"schema": 1, "author": "bert", "events": []}).encode())
    with pytest.raises(InvalidDocument, match="it is the record of bert"):
        read_author_record(store, "ada")


def test_the_example_is_a_record_as_it_is_written() -> None:
    body = (Path(__file__).parent.parent / "docs" / "examples" / "author.json").read_bytes()
    record = AuthorRecord.model_validate_json(body)
    assert encode_document("author.json", record) == body
    standing = find_standing(record, "tiny")
    assert standing.held is None and standing.pinned == record.events[-1]


def test_no_act_of_several_at_once_is_lost(store: S3Store) -> None:
    """Each reads, and a slower one writes in between: the swap must be refused, and the act applied anew."""
    append_author_event(store, "ada", lambda record: event(HOLD))
    asked = 0

    def late(record: AuthorRecord) -> AuthorEvent:
        nonlocal asked
        asked += 1
        if asked == 1:
            append_author_event(store, "ada", lambda record: event(RELEASE, "small"))
        return event(RETIRE)

    append_author_event(store, "ada", late)
    found = read_author_record(store, "ada").events
    assert asked == 2 and [one.act for one in found] == [HOLD, RELEASE, RETIRE]


def test_an_author_whom_nobody_knows_is_no_authors_business(store: S3Store) -> None:
    open_ledger(store, "ada", DIGEST, "tiny", make_submission())
    with pytest.raises(UnknownAuthor, match=r"author aba: .* it has ada"):
        act(store, "aba", HOLD, base=None, who="mara", why="a slip of the hand")
    assert store.head(author_record_key("aba")) is None


def test_a_release_of_nothing_writes_nothing(store: S3Store) -> None:
    add_tiny_base(store)
    open_ledger(store, "ada", DIGEST, "tiny", make_submission())
    assert act(store, "ada", RELEASE, base=None, who="mara", why="").event is None
    act(store, "ada", HOLD, base="tiny", who="mara", why="asked to")
    assert act(store, "ada", UNPIN, base=None, who="mara", why="").event is None
    assert act(store, "ada", RELEASE, base="small", who="mara", why="").event is None
    assert act(store, "ada", RELEASE, base=None, who="mara", why="").event is not None
    assert [one.act for one in read_author_record(store, "ada").events] == [HOLD, RELEASE]


def test_a_pin_takes_the_beginning_of_one_ready_adapter(store: S3Store) -> None:
    digests = ["abcdef012345" + "a" * 52, "abcdef012345" + "b" * 52, "0123456789" + "c" * 54]
    ends = [(Outcome.READY, None), (Outcome.QUARANTINED, "no_effect"), (None, None)]
    for one, (outcome, code) in zip(digests, ends, strict=True):
        ledger = open_ledger(store, "ada", one, "tiny", make_submission())
        ledger.claim("worker", 60)
        ledger.append(make_step(StepKind.STAGED, output_digest=one))
        if outcome is not None:
            ledger.append(make_step(StepKind.VERDICT, outcome, code=code, output_digest=one))
    assert find_adapter(store, "ada", "ABCDEF012345a") == digests[0]
    for named, found in (
        ("abcdef01", "abcdef012345aaaa, abcdef012345bbbb"),
        ("ffffffff", "0123456789cccccc, abcdef012345aaaa, abcdef012345bbbb"),
        ("0123456", "0123456789cccccc"),
    ):
        with pytest.raises(AdapterNotNamed, match=rf"ada: .* begins with {named}, found {found}\. .*history"):
            pin(store, "ada", named, who="mara", why="")
    with pytest.raises(PinRefused, match=r"adapter abcdef012345bbbb: .* verdict quarantined \(no_effect\)"):
        pin(store, "ada", digests[1], who="mara", why="")
    with pytest.raises(PinRefused, match="no verdict yet, its last step is staged done"):
        pin(store, "ada", digests[2], who="mara", why="")
    made = pin(store, "ada", digests[0][:13], who="mara", why="the better one").event
    assert made is not None and (made.base, made.adapter_digest) == ("tiny", digests[0])
    assert find_standing(read_author_record(store, "ada"), "tiny").pinned == made


def test_a_retired_author_is_passed_over_until_released(desk: Desk) -> None:
    desk.heldout("ash")
    desk.submit("ash", desk.adapter("ash"))
    act(desk.store, "ash", RETIRE, base=BASE, who="mara", why="left the programme")
    later = datetime.now(UTC) + timedelta(hours=2)

    def swept() -> list[str]:
        return [one.author for one in list_due(desk.store, now=later, grace_s=60, settle_s=600).due]

    assert swept() == []
    [pending] = list_pending(desk.store, now=later, settle_s=600)
    assert (pending.state, pending.code) == (UploadState.RETIRED, "author_retired")
    state = desk.run("ash")
    assert state.name == "Waiting: author_retired"
    assert f"the retire of mara for base {BASE}" in str(state.message)
    assert "left the programme" in str(state.message) and "roster release ash" in str(state.message)
    assert [step.kind for step in desk.ledger("ash").steps] == [StepKind.INSPECTED] and swept() == []
    assert desk.keys("serving/") == []
    act(desk.store, "ash", RELEASE, base=None, who="mara", why="")
    assert swept() == ["ash"] and desk.run("ash").name == "Ready"


def claimed(desk: Desk, taken: Taken, flow_run: str, seconds: int) -> AbstractContextManager[Job]:
    return claimed_job(
        desk.store,
        taken,
        replace(job_limits(desk.settings), claim_seconds=seconds),
        worker="w",
        flow_run=flow_run,
        force=False,
        rescore=False,
        log=logging.getLogger(__name__),
    )


def test_a_run_notices_a_retirement_that_came_while_it_took_the_upload_in(desk: Desk) -> None:
    desk.heldout("ash")
    desk.submit("ash", desk.adapter("ash"))
    taken = take_in(desk.store, "ash", "run-1")
    assert not hasattr(taken.needs, "code")
    act(desk.store, "ash", RETIRE, base=None, who="mara", why="left the programme")
    with (
        pytest.raises(AdapterWaits, match="the retire of mara for every base"),
        claimed(desk, taken, "run-a", 120),
    ):
        pytest.fail("the block must not be entered")
    assert desk.ledger("ash").claim is None


def test_a_retry_waits_for_the_claim_of_its_own_killed_process(desk: Desk) -> None:
    """It ended as Elsewhere at once, and who had clicked Retry had to wait for the sweep."""
    desk.heldout("ash")
    desk.submit("ash", desk.adapter("ash"))
    taken = take_in(desk.store, "ash", "run-1")
    key = ledger_key("ash", taken.upload.adapter_digest)
    submission = SubmissionRef(run="run-1", submission=taken.upload.marker.submission)
    killed = open_ledger(desk.store, "ash", taken.upload.adapter_digest, BASE, submission)
    killed.claim("w:7 run-a 11111111", 2)
    begun = time.monotonic()
    with pytest.raises(AdapterBusy, match="w:7 run-a 11111111"), claimed(desk, taken, "run-b", 3):
        pytest.fail("another run does not wait")
    assert time.monotonic() - begun < 1
    with claimed(desk, taken, "run-a", 3) as job:
        assert time.monotonic() - begun >= 1
        assert read_document(desk.store, key, Ledger)[0].claim == job.ledger.document.claim
    with pytest.raises(ClaimLost):
        killed.renew(2)


def test_a_retry_leaves_alone_who_was_called_dead_by_mistake(desk: Desk) -> None:
    desk.heldout("ash")
    desk.submit("ash", desk.adapter("ash"))
    taken = take_in(desk.store, "ash", "run-1")
    submission = SubmissionRef(run="run-1", submission=taken.upload.marker.submission)
    alive = open_ledger(desk.store, "ash", taken.upload.adapter_digest, BASE, submission)
    alive.claim("w:7 run-a 11111111", 2)
    with (
        alive.keep_claim(2),
        pytest.raises(AdapterBusy, match="w:7 run-a 11111111"),
        claimed(desk, taken, "run-a", 3),
    ):
        pytest.fail("the block must not be entered")
    alive.renew(2)


def test_held_is_not_served_and_a_pin_decides(store: S3Store, tmp_path: Path) -> None:
    add_tiny_base(store)
    documents = [ready_ledger("ash", name, number=number) for name, number in (("a", 1), ("b", 2))]
    for document in (*documents, ready_ledger("birch")):
        store.put(key_of(document), json.dumps(document).encode())
    first, second = (digest(f"output ash {name}") for name in "ab")
    told = {"who": "mara", "why": "asked to"}

    def served() -> list[str]:
        sync_catalog(store, tmp_path / "catalog.duckdb", SyncLimits(max_opponents=4, max_drop=0.2))
        assert len(find_served(store, "birch")) == 1, "nobody else is touched"
        return [one.output_digest for one in find_served(store, "ash")]

    assert served() == [second]
    pin(store, "ash", documents[0]["adapter_digest"][:9], **told)
    assert served() == [first]
    act(store, "ash", HOLD, base=BASE, **told)
    submit_directory(store, make_adapter_directory(tmp_path / "trained"), author="ash", run="run-3")
    later = datetime.now(UTC) + timedelta(hours=2)
    due = list_due(store, now=later, grace_s=60, settle_s=600).due
    assert [one.run for one in due] == ["run-3"], "a held author's uploads are judged all the same"
    assert served() == []
    act(store, "ash", RELEASE, base=None, **told)
    act(store, "ash", UNPIN, base=None, **told)
    assert served() == [second]


@pytest.fixture
def roster(store: S3Store, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Roster:
    """The command at a store of one author, without a Prefect server."""
    settings = Settings(home=tmp_path, store_endpoint="http://127.0.0.1:9")
    monkeypatch.setenv("ROSTER_HOME", str(tmp_path))
    monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
    monkeypatch.setattr("flows.settings.load_settings", lambda: settings)
    add_tiny_base(store)
    document = ready_ledger("ash")
    store.put(key_of(document), json.dumps(document).encode())
    return Roster(capsys, tmp_path)


def test_the_command_says_what_it_did_and_what_is_served(store: S3Store, roster: Roster) -> None:
    output = digest("output ash a")
    put_roster(store, {"ash": served_entry("ash", output)})
    ran = roster("hold", "ash", "--why", "asked for a pause", "--who", "mara")
    assert ran.code == 0
    assert (
        ran.out == f"ash: held on every base: asked for a pause, by mara\nserved now: {output[:16]} on tiny\n"
    )
    assert "no Prefect server is known here: run `roster sync`" in ran.err
    put_roster(store, {})
    ran = roster("release", "ash", "--base", "small")
    assert ran.code == 0 and ran.out.startswith("ash: released on base small")
    found = roster("release", "ash", "--json").document
    assert found["event"]["act"] == "release" and found["served"] == []
    ran = roster("unpin", "ash")
    assert ran.code == 0 and "nothing is pinned, so there is nothing to unpin" in ran.out and ran.err == ""
    ran = roster("pin", "ash", digest("ash a")[:8])
    assert ran.code == 0 and ran.out.startswith("ash: pinned to adapter ") and " on base tiny" in ran.out
    assert "warning" not in ran.err
    acts = [one.act for one in read_author_record(store, "ash").events]
    assert acts == [HOLD, RELEASE, RELEASE, PIN]


def test_a_pin_under_which_nobody_is_served_warns(store: S3Store, roster: Roster, tmp_path: Path) -> None:
    """Held beforehand; and of a base that is not registered any more, as the catalog tells."""
    pinned = digest("ash a")[:8]
    roster("hold", "ash", "--base", "tiny", "--why", "asked to")
    ran = roster("pin", "ash", pinned)
    held = "ash is on hold on tiny: nobody is served until `roster release ash`"
    assert ran.code == 0 and f"warning: {held}" in ran.err
    sync(tmp_path / "catalog.duckdb", [ready_ledger("ash")], bases=[base_text("other")])
    [first, second] = roster("pin", "ash", pinned, "--json").document["warnings"]
    assert first == held and "base tiny is not registered. Register the base with `roster base add`" in second
    roster("release", "ash")
    assert roster("pin", "ash", pinned, "--json").document["warnings"] == [second]
    assert roster("unpin", "ash", "--json").document["warnings"] == []


def test_an_act_asks_for_a_sync_of_everything(
    roster: Roster, store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of some authors would be merged with an earlier request for others, and the act not be heard of."""
    settings = Settings(
        home=tmp_path, store_endpoint="http://127.0.0.1:9", prefect_api_url="http://127.0.0.1:9/api"
    )
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("flows.settings.load_settings", lambda: settings)
    monkeypatch.setattr("flows.settings.connect_prefect", lambda settings: None)
    deployed = True

    def request(*arguments: object) -> bool:
        asked.append(arguments)
        return deployed

    monkeypatch.setattr("flows.asking.request_sync", request)
    ran = roster("retire", "ash", "--why", "left the programme")
    assert ran.code == 0 and "the roster follows within about 10 s" in ran.err
    assert [arguments[0] for arguments in asked] == [10] and len(asked[0]) == 2, "no author is named"

    def silent(*arguments: object) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr("flows.asking.request_sync", silent)
    ran = roster("release", "ash")
    assert ran.code == 0 and "does not answer (refused): run `roster sync`" in ran.err
    deployed = False
    monkeypatch.setattr("flows.asking.request_sync", request)
    ran = roster("hold", "ash", "--why", "asked to")
    assert ran.code == 0 and "has no deployment to run a sync: run `roster sync`" in ran.err
    assert [one.act for one in read_author_record(store, "ash").events] == [RETIRE, RELEASE, HOLD]


def test_the_command_refuses_what_makes_no_sense(store: S3Store, roster: Roster) -> None:
    assert roster("hold", "ash").code == 2
    ran = roster("retire", "ash", "--why", " ")
    assert ran.code == 2 and "a reason that tells others later" in ran.err
    ran = roster("hold", "asch", "--why", "a slip of the hand")
    assert ran.code == 2 and "author asch" in ran.err and "ash" in ran.err
    ran = roster("hold", "ash", "--base", "tinny", "--why", "it would hold nobody")
    assert ran.code == 2 and "base 'tinny': expected a registered base, found: tiny" in ran.err
    ran = roster("pin", "ash", "0123abcd")
    assert ran.code == 2 and "expected one adapter whose digest begins with 0123abcd, found " in ran.err
    assert read_author_record(store, "ash").events == ()


def test_the_purge_command_asks_first_and_takes_the_author_out_of_the_roster(
    store: S3Store, roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_staged(store, "serving", "ash", digest("output ash a"))
    assert roster("sync").code == 0 and find_served(store, "ash")
    before = contents(store)
    why = ("--why", "the author asked for it")
    found = roster("purge", "ash", *why, "--dry-run", "--json").document
    assert found["parts"]["serving"]["objects"] == 3 and found["served"] == [BASE] and found["ledgers"] == 1
    ran = roster("purge", "ash", *why)
    assert ran.code == 2 and "say --yes where nobody can" in ran.err
    monkeypatch.setattr("sys.stdin", Terminal("ash\n"))
    ran = roster("purge", "ash", *why, "--json")
    assert ran.code == 2 and "roster purge --help" in ran.document["error"], "nothing but JSON on stdout"
    monkeypatch.setattr("sys.stdin", Terminal("asch\n"))
    ran = roster("purge", "ash", *why)
    assert ran.code == 2 and "nothing was done" in ran.err and contents(store) == before
    monkeypatch.setattr("sys.stdin", Terminal("ash\n"))
    ran = roster("purge", "ash", *why)
    assert ran.code == 0 and ran.out.endswith("ash: purged; 3 objects removed, 1 ledgers reduced\n"), ran.err
    assert find_served(store, "ash") == () and not list(store.list_objects("serving/"))
    assert roster("purge", "ash", *why, "--yes", "--json").document["ledgers"] == 0
    ran = roster("why", "ash")
    assert ran.code == 0 and "the author asked for it" in ran.out, ran.out + ran.err
    for command in ("show", "history"):
        assert roster(command, "ash").code == 0


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True
