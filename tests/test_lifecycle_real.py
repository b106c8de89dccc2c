"""Purge, backup and restore at a real object store, by processes that are killed with SIGKILL at any moment."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from store_builders import SeaweedFS
from upkeep_builders import (
    SECRET,
    check_servable,
    contents,
    digest,
    expire_claims,
    publish,
    put_adapter,
    put_author,
)

from storage.author_record import AuthorAct, read_author_record
from storage.documents import utc_now
from storage.keys import RESTORING
from storage.ledger import Outcome
from storage.s3 import S3Store
from tasks.acts import find_served
from tasks.backup import back_up
from tasks.backup_format import INFO
from tasks.collecting import collect, list_unreferenced
from tasks.lifecycle_errors import BackupRefused, RestoreRefused
from tasks.purging import plan_purge, purge_author
from tasks.restore import restore

pytestmark = pytest.mark.real
CHANCE = random.Random(7)
# Forks of a process without threads. This one may have those of any test before, and a fork would wait for their locks.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


@dataclass(frozen=True, slots=True)
class Place:
    """Where the killed processes find the store; each makes a client of its own."""

    endpoint: str
    access_key: str
    secret_key: str

    def open(self, bucket: str) -> S3Store:
        return S3Store.open(
            endpoint=self.endpoint,
            bucket=bucket,
            region="us-east-1",
            access_key=self.access_key,
            secret_key=self.secret_key,
        )


@pytest.fixture(scope="module")
def place(server: SeaweedFS) -> Place:
    return Place(server.endpoint, server.access_key, server.secret_key)


def killed_until_done(work: Callable[..., None], *arguments: object, look: Callable[[], None]) -> int:
    """Run this in one process after the other, each killed after a moment that grows, and return how many were."""
    with TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        for attempt in range(200):
            child = PROCESSES.Process(target=telling, args=(said, work, *arguments))
            child.start()
            time.sleep(CHANCE.uniform(0, 0.02 * (attempt + 1)))
            child.kill()
            child.join()
            look()
            assert not said.exists(), said.read_text("utf-8")
            if child.exitcode != -signal.SIGKILL:
                assert child.exitcode == 0
                return attempt
    pytest.fail("it never ended")


def telling(said: Path, work: Callable[..., None], *arguments: object) -> None:
    """Do this work; what it ends with, other than a kill, is written down for the test."""
    try:
        work(*arguments)
    except BaseException:
        said.write_text(traceback.format_exc(), "utf-8")
        raise


def purge(place: Place) -> None:
    own = place.open("purge")
    purge_author(own, "ada", who="mara", why="asked to", sync=lambda: publish(own), say=lambda line: None)


def collect_garbage(place: Place) -> None:
    own = place.open("garbage")
    found = list_unreferenced(own, older_than=timedelta(0), now=utc_now() + timedelta(seconds=1))
    assert not collect(own, found, worker="host:1").left


def save(place: Place, folder: Path) -> None:
    """One that was killed after its last word is whole, and refuses to be made again."""
    with suppress_only(BackupRefused, when=(folder / INFO).exists):
        back_up(place.open("backup"), folder, with_uploads=True)


def put_back(place: Place, folder: Path) -> None:
    """One that was killed after it took its mark away is whole; the contents of the store are compared at the end."""
    own = place.open("restored")
    with suppress_only(RestoreRefused, when=lambda: own.head(RESTORING) is None):
        restore(own, folder, into_existing=False)


@contextmanager
def suppress_only(refusal: type[Exception], when: Callable[[], bool]) -> Iterator[None]:
    try:
        yield
    except refusal:
        if not when():
            raise


def test_a_purge_survives_kills(server: SeaweedFS, place: Place) -> None:
    store = server.open("purge")
    for author in ("ada", "bert"):
        put_author(store, author)
    put_adapter(store, "ada", "second", Outcome.QUARANTINED)
    publish(store)
    others = {key: body for key, body in contents(store).items() if "bert" in key}

    kills = killed_until_done(purge, place, look=lambda: check_servable(store))
    assert kills > 3 and plan_purge(store, "ada").is_done and find_served(store, "ada") == ()
    assert [one.act for one in read_author_record(store, "ada").events] == [AuthorAct.PURGE]
    left = contents(store)
    assert {key: left[key] for key in others} == others
    assert not [key for key, body in left.items() if "/ada/" in key and SECRET.encode() in body]


def test_garbage_collection_survives_kills(server: SeaweedFS, place: Place) -> None:
    store = server.open("garbage")
    ready = put_adapter(store, "ada", "ready", Outcome.READY)
    for number in range(5):
        put_adapter(store, "ada", f"refused {number}", Outcome.QUARANTINED)
    publish(store)

    def look() -> None:
        check_servable(store)
        expire_claims(store)

    kills = killed_until_done(collect_garbage, place, look=look)
    assert kills > 3
    assert {key.split("/")[2] for key in contents(store) if key.startswith("serving/")} == {ready}


def test_backup_and_restore_survive_kills(server: SeaweedFS, place: Place, tmp_path: Path) -> None:
    store, target = server.open("backup"), server.open("restored")
    for author in ("ada", "bert", "cleo"):
        put_author(store, author)
    publish(store)
    folder = tmp_path / "saved"

    assert killed_until_done(save, place, folder, look=lambda: None) > 3
    assert killed_until_done(put_back, place, folder, look=lambda: check_servable(target)) > 3
    assert contents(target) == contents(store) and digest("ada first") in "".join(contents(target))
