"""A real store behind a proxy that spoils its answers: what is asked is done right, or ends in a named error."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultKind, FaultPlan, FaultProxy
from ledger_builders import digest, key_of, ready_ledger
from lora_builders import Logical, attention, encode, save_adapter
from pipeline_builders import BASE, add_tiny_base
from store_builders import (
    DIGEST,
    SeaweedFS,
    make_adapter_directory,
    make_step,
    make_submission,
    submit_directory,
)

from roster.serving import Roster
from storage.author_record import AuthorAct, AuthorEvent, append_author_event, read_author_record
from storage.bulk import BulkReader
from storage.claims import open_ledger, read_ledger
from storage.documents import read_document, utc_now
from storage.errors import (
    ClaimHeld,
    ObjectNotFound,
    PreconditionFailed,
    StoreNotTrusted,
    StoreUnavailable,
    UploadChanged,
)
from storage.keys import (
    base_document_key,
    ledger_key,
    manifest_key,
    marker_key,
    roster_history_key,
    roster_key,
    serving_prefix,
    upload_file_key,
)
from storage.ledger import StepKind
from storage.s3 import S3Store
from storage.settled import adopt_upload
from storage.snapshot import fetch_snapshot
from storage.uploads import download_upload, read_upload
from tasks.cataloguing import SyncLimits, publish_catalog, sync_catalog

pytestmark = pytest.mark.real

LINE = (FaultKind.UNAVAILABLE, FaultKind.SLOW_DOWN, FaultKind.TIMEOUT, FaultKind.RESET)
LARGE = random.Random(3).randbytes(11 << 20)  # in parts, and in ranges
LIMITS = SyncLimits(max_opponents=4, max_drop=1.0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that give up sooner and pause for less; how often they try stays as it is."""
    monkeypatch.setattr("storage.client._READ_SECONDS", 1)
    monkeypatch.setattr("storage.bulk._ANSWER_S", 1)
    monkeypatch.setattr("storage.multipart.PART", 5 << 20)  # no store takes a smaller one
    monkeypatch.setattr("storage.ranges.PIECE", 3 << 20)
    monkeypatch.setattr(
        "botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01
    )


@pytest.fixture
def honest(server: SeaweedFS, request: pytest.FixtureRequest) -> S3Store:
    """The bucket without a proxy before it."""
    return server.open(f"bucket-{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}")


@pytest.fixture
def proxy(server: SeaweedFS) -> Iterator[FaultProxy]:
    with FaultProxy(server.endpoint, silent_s=3, pause_s=0.3) as running:
        yield running


@pytest.fixture
def store(server: SeaweedFS, proxy: FaultProxy, honest: S3Store) -> S3Store:
    return replace(server, endpoint=proxy.endpoint).open(honest.bucket)


@dataclass(frozen=True)
class Call:
    """One thing that is asked of the store: by which request it can be spoilt, and what must have come of it."""

    method: str
    key: str
    do: Callable[[S3Store, Path], Any]
    expected: Any
    has_body: bool = False
    is_conditional: bool = False


def calls(honest: S3Store, path: Path) -> dict[str, Call]:
    """Every call of the store, each with keys of its own, so that all may run at once."""
    body = random.Random(1).randbytes(70_001)
    sha = hashlib.sha256(body).hexdigest()
    keys = ("r/get", "r/many", "r/start", "r/dig", "r/head", "r/down")
    etags = {key: honest.put(key, body) for key in keys}
    etags["w/swap"] = honest.put("w/swap", b"before")
    etags["r/large"] = honest.put("r/large", LARGE)
    for key in ("w/gone", "l/a/1", "l/b/2", "m/a/1", "m/b/2"):
        honest.put(key, b"x")
    (path / "small").write_bytes(body)
    (path / "large").write_bytes(LARGE)
    sums = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in ("small", "large")}

    def download(store: S3Store, folder: Path) -> tuple[str, bytes]:
        got = store.download_file("r/down", folder / "down", if_match=etags["r/down"])
        return got.sha256, (folder / "down").read_bytes()

    def download_large(store: S3Store, folder: Path) -> tuple[str, int, int]:
        received: list[int] = []
        got = store.download_file(
            "r/large", folder / "much", if_match=etags["r/large"], received=received.append
        )
        (folder / "much").unlink()
        return got.sha256, got.bytes, sum(received)

    def upload(name: str) -> Callable[[S3Store, Path], Any]:
        key = f"u/{name}"
        return lambda store, folder: store.upload_file(folder / name, key, sha256=sums[name]).sha256

    return {
        "get": Call("GET", "r/get", lambda s, _: s.get("r/get").body, body, has_body=True),
        "many": Call("GET", "r/many", lambda s, _: BulkReader(s).get("r/many").body, body, has_body=True),
        "few": Call(
            "GET",
            "prefix=m/",
            lambda s, _: [i.key for i in BulkReader(s).list_objects("m/")],
            ["m/a/1", "m/b/2"],
            True,
        ),
        "start": Call(
            "GET",
            "r/start",
            lambda s, _: s.read_start("r/start", 999, if_match=etags["r/start"]),
            body[:999],
            True,
        ),
        "digest": Call(
            "GET", "r/dig", lambda s, _: s.digest_object("r/dig", if_match=etags["r/dig"]), sha, True
        ),
        "download": Call("GET", "r/down", download, (sha, body), has_body=True),
        "ranges": Call("GET", "r/large", download_large, (sums["large"], len(LARGE), len(LARGE)), True),
        "head": Call("HEAD", "r/head", lambda s, _: s.head("r/head").bytes, 70_001),  # type: ignore[union-attr]
        "list": Call(
            "GET", "l/", lambda s, _: [i.key for i in s.list_objects("l/")], ["l/a/1", "l/b/2"], True
        ),
        "folders": Call("GET", "delimiter=/", lambda s, _: list(s.list_folders("l/")), ["a", "b"], True),
        "put": Call("PUT", "w/put", lambda s, _: bool(s.put("w/put", b"put")), True),
        "new": Call(
            "PUT", "w/new", lambda s, _: bool(s.put("w/new", b"new", if_none_match=True)), True, False, True
        ),
        "swap": Call(
            "PUT",
            "w/swap",
            lambda s, _: bool(s.put("w/swap", b"swap", if_match=etags["w/swap"])),
            True,
            False,
            True,
        ),
        "delete": Call("DELETE", "w/gone", lambda s, _: s.delete("w/gone"), None),
        "upload": Call("PUT", "u/small", upload("small"), sums["small"]),
        "begin": Call("POST", "u/large?uploads", upload("large"), sums["large"], has_body=True),
        "part": Call("PUT", "partNumber=2", upload("large"), sums["large"]),
        "end": Call("POST", "u/large?uploadId", upload("large"), sums["large"], has_body=True),
        "find": Call("GET", "uploads", upload("large"), sums["large"], has_body=True),
    }


def check_written(honest: S3Store, *, all_done: bool) -> None:
    """Everything is as before or as it was to be, and nothing in between."""
    after = {"w/put": b"put", "w/new": b"new", "w/swap": b"swap", "u/large": LARGE}
    before = {"w/swap": b"before"}
    for key, body in after.items():
        allowed = {body} if all_done else {body, before.get(key)}
        assert (honest.get(key).body if honest.head(key) else None) in allowed, key
    if all_done:
        assert honest.head("w/gone") is None


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("kind", [*LINE, FaultKind.REFUSED_CONDITION])
def test_a_request_that_fails_once_is_made_again(
    proxy: FaultProxy, store: S3Store, honest: S3Store, tmp_path: Path, kind: FaultKind, carried_out: bool
) -> None:
    met = 0
    for name, call in calls(honest, tmp_path).items():
        if kind is FaultKind.REFUSED_CONDITION and not call.is_conditional:
            continue
        proxy.one(kind, method=call.method, key_part=call.key, carried_out=carried_out)
        met += 1
        assert call.do(store, tmp_path) == call.expected, name
        assert proxy.met[kind] == met, f"{name} met none"
    if kind in LINE:
        check_written(honest, all_done=True)
    assert honest.get("w/new").body == b"new" and honest.get("w/swap").body == b"swap"


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize(
    ("kind", "pause_s"), [(FaultKind.TRUNCATED, 0.0), (FaultKind.SLOW_BODY, 0.3), (FaultKind.SLOW_BODY, 2.5)]
)
def test_a_body_that_comes_short_or_slowly_is_never_taken_for_the_whole(
    server: SeaweedFS, honest: S3Store, tmp_path: Path, kind: FaultKind, pause_s: float, share: float
) -> None:
    """An empty body of a listing used to be an empty listing, and half of one an error of nobody's."""
    with FaultProxy(server.endpoint, pause_s=pause_s) as proxy:
        store = replace(server, endpoint=proxy.endpoint).open(honest.bucket)
        for name, call in calls(honest, tmp_path).items():
            if call.has_body:
                before = proxy.met[kind]
                proxy.one(kind, method=call.method, key_part=call.key, share=share)
                if name == "begin" and kind is FaultKind.TRUNCATED and not share:
                    with pytest.raises(StoreUnavailable, match=r"upload u/large: .* bytes came"):
                        call.do(store, tmp_path)
                else:
                    assert call.do(store, tmp_path) == call.expected, name
                assert proxy.met[kind] == before + 1, f"{name} met none"


@pytest.mark.parametrize("kind", [*LINE, FaultKind.TRUNCATED])
def test_faults_without_end_are_named_and_leave_nothing_half_done(
    proxy: FaultProxy, store: S3Store, honest: S3Store, tmp_path: Path, kind: FaultKind
) -> None:
    asked = calls(honest, tmp_path)
    if kind is FaultKind.TRUNCATED:
        asked = {name: call for name, call in asked.items() if call.has_body}
    files = {path.name for path in tmp_path.iterdir()}
    proxy.start_faults(FaultPlan(3, {kind: 1.0}, 10_000))

    def attempt(name: str) -> str:
        with pytest.raises(StoreUnavailable) as caught:
            asked[name].do(store, tmp_path)
        return str(caught.value)

    with ThreadPoolExecutor(len(asked)) as pool:
        messages = dict(zip(asked, pool.map(attempt, asked), strict=True))
    assert proxy.met[kind] >= 2 * len(asked)
    for name, message in messages.items():
        assert proxy.endpoint in message, name
    assert {path.name for path in tmp_path.iterdir()} == files, "no part of a file stays"
    check_written(honest, all_done=False)
    proxy.stop_faults()
    for name, call in asked.items():
        if name not in ("new", "swap"):  # these may have been done
            assert call.do(store, tmp_path) == call.expected, name


def test_a_refused_download_whose_refusal_breaks_off_is_the_stores_fault(
    server: SeaweedFS, honest: S3Store
) -> None:
    """botocore reads the body of a refusal where it catches nothing, and lets urllib3's own errors through."""
    with FaultProxy(server.endpoint, pause_s=2) as proxy:
        store = replace(server, endpoint=proxy.endpoint).open(honest.bucket)
        proxy.one(FaultKind.SLOW_BODY, key_part="none")
        with pytest.raises(ObjectNotFound):
            store.get("none")
        proxy.start_faults(FaultPlan(1, {FaultKind.SLOW_BODY: 1.0}, 100))
        with pytest.raises(StoreUnavailable, match=r"get none: .*Read timed out"):
            store.get("none")
        assert proxy.met[FaultKind.SLOW_BODY] == 3


def test_a_condition_that_is_always_refused_ends_and_writes_nothing_else(
    proxy: FaultProxy, store: S3Store, honest: S3Store
) -> None:
    proxy.start_faults(FaultPlan(1, {FaultKind.REFUSED_CONDITION: 1.0}, 1000))
    proxy.one(FaultKind.REFUSED_CONDITION)
    with pytest.raises(StoreNotTrusted, match="a put whose condition holds must be accepted; found: refused"):
        for number in range(20):
            store.put(f"k{number}", b"once", if_none_match=True)
    assert {honest.get(found.key).body for found in honest.list_objects("k")} <= {b"once"}
    honest.put("theirs", b"theirs")
    with pytest.raises(PreconditionFailed):
        store.put("theirs", b"ours", if_none_match=True)
    assert honest.get("theirs").body == b"theirs"
    assert proxy.met[FaultKind.REFUSED_CONDITION] > 3


OFTEN = {FaultKind.TIMEOUT: 0.05, FaultKind.REFUSED_CONDITION: 0.6, FaultKind.STALE_LISTING: 1.0}
ALL = {kind: 0.12 for kind in FaultKind} | {FaultKind.TIMEOUT: 0.04}


@pytest.mark.parametrize(
    "kinds", [[kind] for kind in FaultKind if kind is not FaultKind.STALE_LISTING] + [ALL]
)
def test_no_step_claim_or_act_is_lost_or_doubled(
    proxy: FaultProxy, store: S3Store, honest: S3Store, kinds: Any
) -> None:
    """Workers that begin again after an error of the store, as flows do: a step that is there is not made again."""
    workers, steps_each = 4, 5
    rate = kinds if isinstance(kinds, dict) else {kinds[0]: 0.1 if kinds[0] is FaultKind.TIMEOUT else 0.3}
    proxy.start_faults(FaultPlan(11, rate, 60))

    def until_done(work: Callable[[], Any]) -> Any:
        for _ in range(2000):
            with suppress(StoreUnavailable, StoreNotTrusted, ClaimHeld):
                return work()
        raise AssertionError("it never came to an end")

    def work(worker: int) -> None:
        for number in range(steps_each):
            key = f"{worker}{number}".rjust(16, "0")
            event = AuthorEvent(
                act=AuthorAct.HOLD, base=None, adapter_digest=None, who=key, at=utc_now(), why="asked to"
            )

            def once(key: str = key, number: int = number) -> None:
                handle = open_ledger(store, "ada", DIGEST, "tiny", make_submission(worker))
                handle.claim(f"w{worker}", 60)
                if handle.finished(StepKind.INSPECTED, key) is None:
                    handle.append(make_step(step_key=key, worker=f"w{worker}", attempt=number + 1))
                handle.release()

            def act(event: AuthorEvent = event) -> None:
                append_author_event(store, "ada", lambda record: None if event in record.events else event)

            until_done(once)
            until_done(act)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    for kind in rate:
        assert kind is FaultKind.STALE_LISTING or proxy.met[kind] >= 3, f"{kind}: {proxy.met}"
    ledger = read_ledger(honest, "ada", DIGEST)[0]
    expected = sorted(f"{worker}{n}".rjust(16, "0") for worker in range(workers) for n in range(steps_each))
    assert sorted(step.step_key for step in ledger.steps) == expected
    assert len(ledger.submissions) == workers and ledger.claim is None
    assert sorted(event.who for event in read_author_record(honest, "ada").events) == expected


@pytest.mark.parametrize("kind", list(FaultKind))
def test_an_upload_is_submitted_and_fetched_whole_or_not_at_all(
    proxy: FaultProxy, store: S3Store, honest: S3Store, tmp_path: Path, kind: FaultKind
) -> None:
    source = make_adapter_directory(tmp_path / "source")
    proxy.start_faults(FaultPlan(5, {kind: OFTEN.get(kind, 0.25)}, 40))
    for run in range(6):
        with suppress(StoreUnavailable, StoreNotTrusted):
            submit_directory(store, source, run=f"run-{run}")
        with suppress(StoreUnavailable, UploadChanged):
            if honest.head(marker_key("ada", f"run-{run}")) is None:
                continue
            upload = read_upload(store, "ada", f"run-{run}")
            for file in download_upload(store, upload, tmp_path / f"got-{run}"):
                got = tmp_path / f"got-{run}" / file.name
                assert got.read_bytes() == (source / file.name).read_bytes()
        assert not [path for path in tmp_path.rglob("*.part")]
    proxy.stop_faults()
    if kind is FaultKind.STALE_LISTING:
        return  # nothing here is decided by a listing
    assert proxy.met[kind] >= 2, proxy.met
    for run in range(6):
        if honest.head(marker_key("ada", f"run-{run}")):
            download_upload(honest, read_upload(honest, "ada", f"run-{run}"), tmp_path / "whole")
            assert (tmp_path / "whole" / "adapter_model.safetensors").read_bytes() == (
                source / "adapter_model.safetensors"
            ).read_bytes()


@pytest.mark.parametrize("carried_out", [False, True])
def test_markers_are_put_once_whatever_becomes_of_the_answer(
    proxy: FaultProxy, store: S3Store, honest: S3Store, tmp_path: Path, carried_out: bool
) -> None:
    """A refusal of one's own marker used to be somebody else's submission: earth-mover/icechunk #2099 has the like."""
    add_tiny_base(honest)
    proxy.one(FaultKind.REFUSED_CONDITION, key_part="_READY.json", carried_out=carried_out)
    marker = submit_directory(store, make_adapter_directory(tmp_path / "source"))
    assert read_upload(honest, "ada", "run-1").marker == marker
    folder = save_adapter(tmp_path / "copied", encode(Logical()) | attention(), base_model_name_or_path=BASE)
    for path in sorted(folder.iterdir()):
        honest.put(upload_file_key("bo", "run-1", path.name), path.read_bytes())
    proxy.one(FaultKind.REFUSED_CONDITION, key_part="_READY.json", carried_out=carried_out)
    assert adopt_upload(store, "bo", "run-1", settle_s=1, now=utc_now() + timedelta(hours=1))
    assert read_upload(honest, "bo", "run-1").marker.adopted
    assert proxy.met[FaultKind.REFUSED_CONDITION] == 2


def put(store: S3Store, document: dict[str, Any]) -> None:
    """Write a ledger, and the manifest of what it has staged."""
    output = document["verdict"]["result"]["output_digest"]
    store.put(manifest_key(serving_prefix(document["author"], output)), manifest(document))
    store.put(key_of(document), json.dumps(document).encode())


def served(store: S3Store) -> set[str]:
    roster = read_document(store, roster_key(), Roster)[0]
    return {author for base in roster.bases.values() for author in base.authors}


@pytest.mark.parametrize("kind", list(FaultKind))
def test_two_machines_publish_one_roster_after_the_other(
    proxy: FaultProxy, store: S3Store, honest: S3Store, tmp_path: Path, kind: FaultKind
) -> None:
    """Every author stays served from the first roster that names it; versions grow by one, and none is missing."""
    add_tiny_base(honest)
    seen: list[Roster] = []
    names = [f"a{number:02d}" for number in range(6)]
    proxy.start_faults(FaultPlan(17, {kind: OFTEN.get(kind, 0.2)}, 60))
    for number, name in enumerate(names):
        put(honest, ready_ledger(name))
        catalog = tmp_path / f"machine-{number % 2}" / "catalog.duckdb"
        for _ in range(50):
            with suppress(StoreUnavailable, StoreNotTrusted):
                sync_catalog(store, catalog, LIMITS, touched=[key_of(ready_ledger(name))])
                break
        seen.append(read_document(honest, roster_key(), Roster)[0])
        assert served(honest) == set(names[: number + 1])
        with suppress(StoreUnavailable):
            publish_catalog(store, catalog)
            fetch_snapshot(store, tmp_path / "reader.duckdb")
    assert proxy.met[kind] >= 2, proxy.met
    proxy.stop_faults()
    sync_catalog(store, tmp_path / "machine-0" / "catalog.duckdb", LIMITS)
    assert [roster.version for roster in seen] == list(range(1, 7))
    for roster in seen:
        assert read_document(honest, roster_history_key(roster.version), Roster)[0] == roster


def manifest(document: dict[str, Any]) -> bytes:
    """The manifest of what a ledger has staged."""
    output = document["verdict"]["result"]["output_digest"]
    return json.dumps(
        {
            "schema": 1,
            "author": document["author"],
            "run": "r1",
            "base": "tiny",
            "adapter_digest": document["adapter_digest"],
            "output_digest": output,
            "format": "per-expert",
            "rank": 3,
            "max_lora_rank": 8,
            "is_3d_lora_weight": False,
            "needs_mixed_format": False,
            "dtype": "float32",
            "layout": {"orientation": "swapped", "packing": {}},
            "files": [{"name": "adapter_model.safetensors", "bytes": 5, "sha256": digest(output)}],
            "converter_version": "1",
        }
    ).encode()


def test_an_older_listing_takes_nobody_off_the_roster(
    proxy: FaultProxy, store: S3Store, honest: S3Store, tmp_path: Path
) -> None:
    """Of the ledgers, on another machine and in a rebuild; and of the bases, without which nobody is served."""
    here, there = tmp_path / "here" / "catalog.duckdb", tmp_path / "there" / "catalog.duckdb"
    put(honest, ready_ledger("ada"))
    sync_catalog(store, here, LIMITS)  # lists no base, and one ledger
    add_tiny_base(honest)
    for name in ("bo", "cy"):
        put(honest, ready_ledger(name))
    sync_catalog(honest, there, LIMITS)
    first = read_document(honest, roster_key(), Roster)[0]
    assert served(honest) == {"ada", "bo", "cy"}

    def sync(catalog: Path, listing: str, **more: Any) -> None:
        before = proxy.met[FaultKind.STALE_LISTING]
        proxy.one(FaultKind.STALE_LISTING, key_part=f"prefix={listing}")
        sync_catalog(store, catalog, LIMITS, **more)
        assert proxy.met[FaultKind.STALE_LISTING] == before + 1
        assert read_document(honest, roster_key(), Roster)[0] == first, "nothing was published"

    sync(here, "ledger/")
    sync(here, "bases/")
    sync(there, "ledger/", rebuild=True)
    sync(tmp_path / "new" / "catalog.duckdb", "ledger/")

    # One who was judged anew elsewhere: an older listing shows this machine the ledger that it knows.
    put(honest, ready_ledger("bo", "b", number=2))
    list(store.list_objects("ledger/bo/"))
    key = ledger_key("bo", ready_ledger("bo", "b")["adapter_digest"])
    put(honest, ready_ledger("bo", "b", number=2, own=2.0))
    proxy.one(FaultKind.STALE_LISTING, key_part="prefix=ledger/bo/")
    sync_catalog(store, there, LIMITS, touched=[key])
    now = read_document(honest, roster_key(), Roster)[0]
    assert now.bases["tiny"].authors["bo"].verdict.own == 2.0, "a touched ledger is read by its name"
    assert honest.get(base_document_key("tiny"))
