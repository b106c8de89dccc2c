"""docs/roles/ on a real SeaweedFS: each role can do its work with its policy, and nothing of what it must not.

The server evaluates the policies themselves, word for word as they stand in the docs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from pipeline_builders import BASE, Desk, engine_of, make_desk, qualify_on_paper
from store_builders import SeaweedFS, start_seaweedfs

import flows.onboard
from flows.connect import verdict_thresholds
from roster.engine_plugin.publish import publish
from roster.engine_plugin.settings import PluginSettings
from roster.serving import Roster
from storage.documents import read_document, utc_now
from storage.errors import StoreUnavailable
from storage.keys import engine_key, marker_key, roster_key, serving_prefix
from storage.ledger import Outcome
from storage.s3 import S3Store
from storage.trust import probe_store
from tasks.cataloguing import SyncLimits, sync_catalog
from tasks.policy import drop_policy, set_policy
from tasks.rejudging import rejudge_adapter
from tasks.sweeping import list_due
from tasks.transfer import read_manifest

pytestmark = pytest.mark.real

BUCKET = "roster"
POLICIES = Path(__file__).parents[1] / "docs" / "roles"
AUTHORS = ("alder", "birch")
ROLES = ("trainer", "worker", "engine", "operator", "reader")
# A trainer of one author: the same policy, narrowed as docs/security.md says.
ONE_AUTHOR = "trainer-of-alder"
SECRETS = {name: f"secret-of-{name}" for name in (*ROLES, ONE_AUTHOR, "owner")}


def policy_of(role: str) -> str:
    if role == ONE_AUTHOR:
        return policy_of("trainer").replace(":::roster/uploads/*", ":::roster/uploads/alder/*")
    return (POLICIES / f"{role}.json").read_text("utf-8")


def identities() -> dict[str, object]:
    """What SeaweedFS is told with -s3.config: the bucket's owner, and one identity for each role."""

    def identity(name: str, **rights: list[str]) -> dict[str, object]:
        return {"name": name, "credentials": [{"accessKey": name, "secretKey": SECRETS[name]}], **rights}

    named = (*ROLES, ONE_AUTHOR)
    return {
        "identities": [
            identity("owner", actions=["Admin"]),
            *(identity(name, policyNames=[name]) for name in named),
        ],
        "policies": [{"name": name, "content": policy_of(name)} for name in named],
    }


@cache
def as_role(server: SeaweedFS, role: str) -> S3Store:
    """The bucket as a role sees it. Making a client takes longer than most of what is done with it here."""
    return S3Store.open(
        endpoint=server.endpoint,
        bucket=BUCKET,
        region="us-east-1",
        access_key=role,
        secret_key=SECRETS[role],
    )


@dataclass
class Bucket:
    """One bucket, and how each role sees it."""

    server: SeaweedFS
    desk: Desk

    def __getitem__(self, role: str) -> S3Store:
        return as_role(self.server, role)

    def as_role(self, role: str) -> Desk:
        return replace(self.desk, store=self[role])

    def keys(self) -> dict[str, str]:
        """One object of each kind, those of an author being birch's."""
        found = [one.key for one in self["owner"].list_objects("")]

        def only(start: str, end: str) -> str:
            [key] = [key for key in found if key.startswith(start) and key.endswith(end)]
            return key

        return {
            "upload": "uploads/birch/run-1/adapter_config.json",
            "marker": marker_key("birch", "run-1"),
            "heldout": "heldout/birch/main.jsonl",
            "base": f"bases/{BASE}/base.json",
            "policy": "policy.json",
            "ledger": only("ledger/birch/", ".json"),
            "serving": only("serving/birch/", ".safetensors"),
            "roster": roster_key(),
            "engine": f"engines/{BASE}.json",
            "qualified": only("qualified/", ".json"),
        }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A base, its engine, an author's text and adapter, its run, the sync: each done by the role whose work it is."""
    folder = tmp_path_factory.mktemp("roles")
    config = folder / "identities.json"
    config.write_text(json.dumps(identities()))
    data = folder / "weed"
    data.mkdir()
    with start_seaweedfs(data, f"-s3.config={config}") as server, pytest.MonkeyPatch.context() as patch:
        as_role(server, "owner").ensure_bucket()
        with pytest.raises(StoreUnavailable, match=f"{engine_key(BASE)}.*AccessDenied"):
            # It registers a base, an operator's work, and then plays the engine, which is none of an operator's.
            make_desk(as_role(server, "operator"), folder, patch, prefect=False)
        bucket = Bucket(server, make_desk(as_role(server, "owner"), folder, patch, prefect=False))
        patch.setattr(flows.onboard, "open_store", lambda settings: bucket["worker"])
        publish(engine_of(), engine_settings(server))
        qualify_on_paper(bucket["operator"], engine_of())
        operator, trainer = bucket.as_role("operator"), bucket.as_role("trainer")
        for author in ("alder", "birch"):
            operator.heldout(author)
            trainer.submit(author, trainer.adapter(author))
        yield bucket


def engine_settings(server: SeaweedFS) -> PluginSettings:
    return PluginSettings.model_validate(
        {
            "engine_base": BASE,
            "store_endpoint": server.endpoint,
            "store_bucket": BUCKET,
            "store_region": "us-east-1",
            "store_access_key": "engine",
            "store_secret_key": SECRETS["engine"],
        }
    )


def test_each_role_does_its_work(played: Bucket, tmp_path: Path) -> None:
    worker, operator, reader = played["worker"], played["operator"], played["reader"]
    probe_store(worker)
    probe_store(operator)
    later = utc_now() + timedelta(hours=1)
    assert {one.author for one in list_due(worker, now=later, grace_s=0, settle_s=1).due} == set(AUTHORS)
    for author in AUTHORS:
        played.as_role("trainer").run(author)
        assert played.as_role("worker").ledger(author).steps[-1].outcome is Outcome.READY
    assert list(worker.list_objects("control/")) == [], "taken away by the worker after the verdict"
    limits = SyncLimits(max_opponents=4, max_drop=0.2)
    assert sync_catalog(worker, tmp_path / "catalog.duckdb", limits).published

    set_policy(operator, "rank_major", why="a test", set_by="ops", base=BASE)
    assert drop_policy(operator, BASE)
    set_policy(operator, "rank_major", why="a test", set_by="ops")
    digest = played.desk.submitted["alder"].adapter_digest
    stricter = replace(verdict_thresholds(played.desk.settings), floor=0.05)
    judged = rejudge_adapter(
        operator, "alder", digest, stricter, dry_run=False, worker="ops", claim_seconds=30
    )
    assert judged.is_recorded, judged

    served = read_document(reader, roster_key(), Roster)[0].bases[BASE].authors
    assert set(served) == set(AUTHORS)
    for author, one in served.items():
        prefix = serving_prefix(author, one.output_digest)
        listed = {found.key.removeprefix(prefix) for found in reader.list_objects(prefix)}
        assert listed == {"adapter_config.json", "adapter_model.safetensors", "manifest.json"}
        assert {file.name for file in read_manifest(reader, author, one.output_digest).files} < listed


def test_a_worker_takes_up_files_that_were_copied_without_a_marker(played: Bucket) -> None:
    played.as_role("operator").heldout("cedar")
    trainer = played.as_role("trainer")
    directory = trainer.adapter("cedar")
    (directory / "training.json").write_text(json.dumps({"base": BASE}))
    for path in directory.iterdir():
        trainer.store.put(f"uploads/cedar/run-1/{path.name}", path.read_bytes())
    played.desk.settings.settle_seconds = 1
    time.sleep(3)  # the store's clock tells seconds
    played.as_role("worker").run("cedar")
    assert played["trainer"].head(marker_key("cedar", "run-1")) is not None
    assert len(list(played["reader"].list_objects("serving/cedar/"))) == 3


def test_a_trainer_of_one_author_submits_for_that_one_alone(played: Bucket) -> None:
    own = played.as_role(ONE_AUTHOR)
    own.submit("alder", own.adapter("alder", seed=5), run="run-2")
    with pytest.raises(StoreUnavailable, match="AccessDenied"):
        own.submit("birch", own.adapter("birch"), run="run-2")
    assert played["owner"].head(marker_key("birch", "run-2")) is None
    assert played["owner"].head(marker_key("birch", "run-1")) is not None


# What each role may do with the objects of `Bucket.keys`, all of them another author's than the narrowed trainer's.
EVERYTHING = {
    *("upload", "marker", "heldout", "base", "policy", "ledger", "serving", "roster", "engine", "qualified")
}
WRITE = {
    "trainer": {"upload", "marker"},
    ONE_AUTHOR: set(),
    "worker": {"marker", "ledger", "serving", "roster"},
    "engine": {"engine"},
    "operator": {"upload", "marker", "heldout", "base", "policy", "ledger", "roster", "qualified"},
    "reader": set(),
}
DELETE = {
    "trainer": {"upload", "marker"},
    ONE_AUTHOR: set(),
    "worker": {"marker"},
    "engine": set(),
    "operator": {"upload", "marker", "policy"},
    "reader": set(),
}
READ = {
    "trainer": {"upload", "marker", "base", "policy"},
    ONE_AUTHOR: {"base", "policy"},
    "worker": EVERYTHING,
    "engine": {"serving", "roster"},
    "operator": EVERYTHING,
    "reader": {"serving", "roster"},
}


@pytest.mark.parametrize("role", WRITE)
def test_a_role_can_do_nothing_else(played: Bucket, role: str) -> None:
    """Every kind of object is tried in every way, so that what the tables do not allow is shown to be refused."""
    owner, store = played["owner"], played[role]
    for kind, key in played.keys().items():
        before = owner.get(key).body
        assert is_allowed(partial(store.get, key)) == (kind in READ[role]), f"get {kind}"
        assert is_allowed(partial(store.put, key, before)) == (kind in WRITE[role]), f"put {kind}"
        assert is_allowed(partial(store.delete, key)) == (kind in DELETE[role]), f"delete {kind}"
        if kind not in WRITE[role]:
            begin = partial(store._client.create_multipart_upload, Bucket=BUCKET, Key=key)
            for attempt in (begin, partial(store.put, f"{key}.new", b"{}"), partial(copy_onto, store, key)):
                assert not is_allowed(attempt), f"{attempt} {kind}"
        if kind not in DELETE[role]:  # the request that deletes many at once answers 200 whatever came of it
            store._client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key}]})
            assert owner.get(key).body == before, f"delete {kind} among many"
        owner.put(key, before)


@pytest.mark.parametrize("role", WRITE)
def test_a_role_lists_what_it_may_know_of(played: Bucket, role: str) -> None:
    def lists(prefix: str) -> bool:
        return is_allowed(partial(list, played[role].list_objects(prefix)))

    everything = {"worker", "operator"}
    for prefix in ("", "u", "ledger/", "heldout/", "engines/", "qualified/"):
        assert lists(prefix) == (role in everything), prefix
    assert lists("uploads/") == lists("bases/") == (role in everything | {"trainer", ONE_AUTHOR})
    assert lists("serving/") == lists("roster/") == (role in everything | {"engine", "reader"})
    assert not is_allowed(partial(played[role]._client.create_bucket, Bucket="another"))


def test_a_key_with_dots_leads_nowhere(played: Bucket) -> None:
    before = [found.key for found in played["owner"].list_objects("")]
    for key in ("uploads/../ledger/birch/x.json", "uploads/x/../../ledger/birch/x.json"):
        with pytest.raises(StoreUnavailable, match="InvalidRequest"):
            played["trainer"].put(key, b"{}")
    assert [found.key for found in played["owner"].list_objects("")] == before


def copy_onto(store: S3Store, key: str) -> None:
    """Copy an object of the role's own, where it has one, else any, onto a key."""
    store._client.copy_object(Bucket=BUCKET, Key=key, CopySource=f"{BUCKET}/uploads/alder/run-1/_READY.json")


def is_allowed(attempt: Callable[[], object]) -> bool:
    """Whether the store does it; any other answer than a refusal of the rights is an error of the test."""
    try:
        attempt()
    except StoreUnavailable as error:
        assert "AccessDenied" in str(error) or " 403" in str(error), error
        return False
    except ClientError as error:
        assert error.response["Error"]["Code"] == "AccessDenied", error
        return False
    return True
