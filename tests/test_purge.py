"""Purging an author: what goes, what stays, and that neither a kill nor a run nor a server ever sees half of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from pipeline_builders import Desk, OnLoad
from store_builders import make_step, memory_store, with_faults
from upkeep_builders import (
    BASE,
    SECRET,
    SPACE,
    Killed,
    check_servable,
    contents,
    digest,
    dying,
    publish,
    put_adapter,
    put_author,
    put_roster,
    put_staged,
    served_entry,
)

from storage.author_record import AuthorAct, read_author_record
from storage.claims import LedgerHandle, read_ledger
from storage.documents import utc_now
from storage.errors import ClaimLost
from storage.keys import matrix_samples_key
from storage.ledger import Outcome, StepKind
from storage.s3 import S3Store
from tasks.acts import act, find_served
from tasks.lifecycle_errors import RosterNamesAuthor
from tasks.purging import Purged, plan_purge, purge_author

pytestmark = pytest.mark.real


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


def purge(store: S3Store, author: str = "ada", sync: Callable[[], None] | None = None) -> Purged:
    return purge_author(
        store,
        author,
        who="mara",
        why="asked to",
        sync=sync or (lambda: publish(store)),
        say=lambda line: None,
    )


def test_everything_of_the_author_goes_but_the_audit_trail(store: S3Store) -> None:
    put_author(store, "ada")
    put_adapter(store, "ada", "second", Outcome.QUARANTINED)
    put_staged(store, "control", "ada", digest("a control"))
    put_author(store, "bert")
    publish(store)
    before = contents(store)
    assert [one.base for one in find_served(store, "ada")] == ["tiny"]
    plan = plan_purge(store, "ada")
    counts = {part.name: part.objects for part in plan.parts}
    assert counts == {"serving": 6, "control": 3, "uploads": 3, "matrices": 3, "heldout": 1}
    assert (plan.ledgers, plan.served, plan.is_done) == (2, ("tiny",), False)
    assert contents(store) == before, "a plan changes nothing"

    done = purge(store)
    assert {part.name: part.objects for part in done.parts} == counts
    assert (done.ledgers, done.left, done.interrupted) == (2, (), ())
    after = contents(store)
    assert sum(part.objects for part in plan.parts) == len(before) - len(after) + 1, "and the record is new"
    assert not [
        key for key, body in after.items() if SECRET.encode() in body and "bert" not in key and "/ada" in key
    ]
    others = {
        key
        for key in before
        if "ada" not in key and not key.startswith("matrices/") and key != "roster/current.json"
    }
    assert others and all(after[key] == before[key] for key in others)
    assert sum(key.startswith("matrices/") for key in after) == 3, "those of bert"
    assert find_served(store, "ada") == () and find_served(store, "bert")
    ledger, _ = read_ledger(store, "ada", digest("ada second"))
    assert ledger.verdict is None and ledger.submissions and ledger.claim is None
    assert [(step.kind, step.outcome) for step in ledger.steps][-1] == (StepKind.VERDICT, Outcome.QUARANTINED)
    assert ledger.steps[-1].result == {
        "code": "no_effect",
        "codes": ["no_effect"],
        "reason": "it changes nothing",
        "output_digest": digest("ada second output"),
    }
    assert ledger.steps[0].result == {} and set(ledger.steps[0].inputs) == {"purged"}
    [event] = read_author_record(store, "ada").events
    assert (event.act, event.who, event.why, event.base) == (AuthorAct.PURGE, "mara", "asked to", None)
    assert plan_purge(store, "ada").is_done
    assert purge(store).ledgers == 0 and len(read_author_record(store, "ada").events) == 1


def test_what_is_half_sent_goes_too(store: S3Store) -> None:
    """Its parts are of the author's weights, although nobody sees them."""
    for author in ("ada", "bert"):
        put_author(store, author)
        for prefix in ("serving", "control", "uploads"):
            key = f"{prefix}/{author}/x/adapter_model.safetensors"
            begun = store._client.create_multipart_upload(Bucket=store.bucket, Key=key)
            store._client.upload_part(
                Bucket=store.bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"half"
            )
    publish(store)
    purge(store)
    assert {one.key.split("/")[1] for one in store.list_pending("")} == {"bert"}
    assert len(list(store.list_pending(""))) == 3


@pytest.mark.real
def test_killed_after_every_single_change_it_goes_on(store: S3Store) -> None:
    """Each process is killed after one change, and the next goes on from there: every state between is looked at."""
    put_author(store, "ada")
    put_adapter(store, "bert", "first", Outcome.READY)
    publish(store)
    others = {key: body for key, body in contents(store).items() if "bert" in key}
    kills = 0
    while True:
        dead = dying(store, after=1)
        try:
            purge(dead, sync=lambda dead=dead: publish(dead))  # type: ignore[misc]
        except Killed:
            kills += 1
            check_servable(store)
            continue
        break
    # The record, the ledger, the roster (each process writes it), nine files.
    assert kills > 10 and plan_purge(store, "ada").is_done
    assert [one.act for one in read_author_record(store, "ada").events] == [AuthorAct.PURGE]
    left = contents(store)
    assert {key for key in left if "bert" not in key} == {
        "ledger/ada/_author.json",
        f"ledger/ada/{digest('ada first')}.json",
        "roster/current.json",
    }
    assert {key: left[key] for key in others} == others and find_served(store, "bert")
    assert SECRET.encode() not in left[f"ledger/ada/{digest('ada first')}.json"]


def test_nothing_is_removed_while_the_roster_names_the_author(store: S3Store) -> None:
    """As where another machine, whose catalog has not heard of the purge, published again."""
    put_author(store, "ada")
    publish(store)
    stands = store.get("roster/current.json").body
    files = {key for key in contents(store) if not key.startswith("ledger/")}
    with pytest.raises(
        RosterNamesAuthor, match=r"ada: .* found it on tiny .* No adapter was removed.*`roster sync`"
    ):
        purge(store, sync=lambda: None)
    assert files <= set(contents(store)) and store.get("roster/current.json").body == stands


def test_a_run_that_is_at_work_loses_its_claim_and_what_it_wrote(store: S3Store) -> None:
    put_author(store, "ada")
    ledger, etag = read_ledger(store, "ada", digest("ada first"))
    run = LedgerHandle(store, ledger, etag, utc_now)
    run.claim("worker run", 600)
    assert plan_purge(store, "ada").holders == ("worker run",)

    def sync() -> None:
        publish(store)
        with pytest.raises(ClaimLost):
            run.append(make_step(StepKind.STAGED, output_digest=digest("late")))
        put_staged(store, "serving", "ada", digest("late"))  # it was at this when it lost the claim

    done = purge(store, sync=sync)
    assert done.interrupted == ("worker run",) and done.left == ()
    assert [key for key in contents(store) if "ada" in key] == sorted(
        ["ledger/ada/_author.json", f"ledger/ada/{digest('ada first')}.json"]
    )
    with pytest.raises(ClaimLost):
        run.renew(60)
    run.release()
    assert plan_purge(store, "ada").is_done


def test_what_comes_anew_each_time_is_named(store: S3Store) -> None:
    put_author(store, "ada")
    real = store._client.delete_object

    def again(**call: str) -> object:
        answer = real(**call)
        if call["Key"].startswith("uploads/"):
            store.put(call["Key"], b"a copy that runs meanwhile")
        return answer

    done = purge(with_faults(store, delete_object=again), sync=lambda: publish(store))
    assert {key.split("/")[0] for key in done.left} == {"uploads"} and len(done.left) == 3


def test_what_others_wrote_after_the_authors_prompts_goes_too(store: S3Store) -> None:
    """An adapter of several authors is prompted by texts of each: the prompts stand beside what it wrote."""
    output = put_author(store, "ada")
    put_author(store, "ada-2")
    kept = contents(store)
    for name, unit in (("theirs", "ada/main:3"), ("namesake", "ada-2/main:3")):
        sample = {"unit": unit, "seed": 5, "prompt": [7, 11], "ids": [13], "bytes": 2}
        document = json.loads(kept[matrix_samples_key(BASE, SPACE, digest("samples of ada-2"))])
        document["samples"] += [sample]
        store.put(matrix_samples_key(BASE, SPACE, digest(name)), json.dumps(document).encode())
        assert document["output_digest"] != output
    purge(store)
    left = set(contents(store))
    assert matrix_samples_key(BASE, SPACE, digest("theirs")) not in left
    assert matrix_samples_key(BASE, SPACE, digest("namesake")) in left
    assert {key for key in kept if "/ada-2/" in key} == {key for key in left if "/ada-2/" in key} != set()


def test_a_roster_that_another_machine_published_meanwhile_is_mended(store: S3Store) -> None:
    """It had read a ready ledger before the purge, of an author who was not served yet."""
    output = put_author(store, "ada")
    put_roster(store, {})
    real = store._client.delete_object
    late: list[str] = []

    def publish_late(**call: str) -> object:
        if not late:
            late.append(call["Key"])
            put_roster(store, {"ada": served_entry("ada", output)})
        return real(**call)

    done = purge(with_faults(store, delete_object=publish_late), sync=lambda: publish(store))
    assert late and done.left == () and find_served(store, "ada") == ()


def test_a_ledger_that_cannot_be_read_is_told(store: S3Store) -> None:
    put_author(store, "ada")
    store.put(f"ledger/ada/{digest('ada torn')}.json", b'{"schema": 1')
    done = purge(store, sync=lambda: None)
    assert len(done.unreadable) == 1 and digest("ada torn") in done.unreadable[0] and done.ledgers == 1


def test_after_a_release_the_author_begins_anew(desk: Desk) -> None:
    """What was judged before the purge is neither served nor taken for done."""
    assert desk.ready("ash").name == "Ready"
    assert purge(desk.store, "ash", sync=lambda: None).left == () and not desk.keys("serving/ash/")
    act(desk.store, "ash", AuthorAct.RELEASE, base=None, who="mara", why="came back")
    assert desk.sync().roster is None
    desk.heldout("ash")
    desk.submit("ash", desk.folder / "trained" / "ash", run="run-2")
    assert desk.run("ash", "run-2").name == "Ready", "the very same adapter, every step done again"
    verdict = desk.ledger("ash").verdict
    assert verdict is not None
    assert f"serving/ash/{verdict.result['output_digest']}/manifest.json" in desk.keys("serving/ash/")
    old = [step for step in desk.ledger("ash").steps if "purged" in step.inputs]
    assert len(old) == len(desk.ledger("ash").steps) / 2 and all("packing" not in step.result for step in old)


def test_a_purge_in_the_middle_of_scoring_ends_the_run(desk: Desk) -> None:
    desk.heldout("ash")
    desk.submit("ash", desk.adapter("ash"))
    done: list[Purged] = []

    def purge_now(name: str) -> None:
        if not done:
            done.append(purge(desk.store, "ash", sync=lambda: None))
        return None

    desk.engine.on_load = OnLoad("ash@", purge_now)
    state = desk.run("ash")
    assert done and state.name == "Elsewhere" and len(done[0].interrupted) == 1
    assert not desk.keys("serving/ash/") and not desk.keys("uploads/ash/") and not desk.keys("control/ash/")
    assert desk.ledger("ash").verdict is None
    text = json.dumps([step.model_dump(mode="json") for step in desk.ledger("ash").steps])
    assert "lora_B_layout" not in text and "evidence" not in text
