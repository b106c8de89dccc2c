"""Backup and restore: whole or said, resumable after a kill, and nothing half served meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_builders import Roster
from store_builders import memory_store, with_faults
from upkeep_builders import (
    Killed,
    check_servable,
    contents,
    digest,
    dying,
    publish,
    put_adapter,
    put_author,
    put_roster,
    served_entry,
)

from storage.digests import sha256_file
from storage.keys import RESTORING
from storage.ledger import Outcome
from storage.s3 import S3Store
from tasks.backup import back_up
from tasks.backup_format import read_backup
from tasks.lifecycle_errors import BackupDamaged, BackupRefused, RestoreRefused
from tasks.purging import purge_author
from tasks.restore import Restored, restore

pytestmark = pytest.mark.real


@pytest.fixture
def store() -> Iterator[S3Store]:
    """A bucket with two authors, one of whom is on hold, and an object whose sha256 stands beside it."""
    with memory_store() as full:
        put_author(full, "ada")
        put_adapter(full, "bert", "first", Outcome.READY)
        full.put("ledger/bert/_author.json", json.dumps(HELD).encode())
        publish(full)
        full.put("_probe/1", b"a probe that somebody makes just now")
        yield full


HELD = {
    "schema": 1,
    "author": "bert",
    "events": [
        {
            "act": "hold",
            "base": None,
            "adapter_digest": None,
            "who": "mara",
            "at": "2026-03-01T12:00:00Z",
            "why": "asked to",
        }
    ],
}


def empty_bucket(store: S3Store) -> S3Store:
    """Another bucket of the same server."""
    other = S3Store(store._client, "restored")
    other.ensure_bucket()
    return other


def wanted(store: S3Store) -> dict[str, bytes]:
    return {key: body for key, body in contents(store).items() if not key.startswith(("_probe/", "uploads/"))}


def test_what_was_backed_up_comes_back_byte_for_byte(store: S3Store, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"weights of some size" * 99)
    store.upload_file(file, "serving/ada/with/weights", sha256=sha256_file(file).sha256)
    done = back_up(store, tmp_path / "saved", with_uploads=False)
    assert (done.info.objects, done.copied, done.info.missing, done.info.damaged) == (
        len(wanted(store)),
    ) * 2 + ((), ())
    other = empty_bucket(store)
    put = restore(other, tmp_path / "saved", into_existing=False)
    assert contents(other) == wanted(store) and (put.put, put.same, put.kept) == (done.info.objects, 0, ())
    noted = other.head("serving/ada/with/weights")
    assert noted is not None and noted.sha256 == sha256_file(file).sha256
    again = restore(other, tmp_path / "saved", into_existing=True)
    assert (again.put, again.same, again.kept) == (0, done.info.objects, ())
    with pytest.raises(BackupRefused, match="expected a new folder, found a whole backup"):
        back_up(store, tmp_path / "saved", with_uploads=False)
    everything = back_up(store, tmp_path / "all", with_uploads=True).info.objects
    assert everything == done.info.objects + 3


def test_a_backup_that_is_killed_goes_on(store: S3Store, tmp_path: Path) -> None:
    """Each process copies some objects more before it is killed; none is copied twice but those under way."""
    folder, fetched, kills = tmp_path / "saved", 0, 0
    real = store._client.get_object
    while True:
        left = 6

        def get(*args: object, **more: object) -> object:
            nonlocal left, fetched
            left -= 1
            if left < 0:
                raise Killed
            fetched += 1
            return real(*args, **more)

        try:
            back_up(with_faults(store, get_object=get), folder, with_uploads=False)
        except Killed:
            kills += 1
            with pytest.raises(
                BackupRefused, match=r"found one that was broken off\. Finish it: `roster backup"
            ):
                read_backup(folder)
            journal = folder / "objects.part.jsonl"
            journal.write_bytes(journal.read_bytes()[:-9])  # its last line torn
            continue
        break
    objects = len(wanted(store))
    assert 2 <= kills < objects and objects < fetched < 3 * objects
    other = empty_bucket(store)
    restore(other, folder, into_existing=False)
    assert contents(other) == wanted(store)
    assert not list(folder.glob("objects/*.incoming"))


@pytest.mark.real
def test_a_restore_that_is_killed_after_every_single_change_goes_on(store: S3Store, tmp_path: Path) -> None:
    back_up(store, tmp_path / "saved", with_uploads=True)
    other, kills = empty_bucket(store), 0
    while True:
        try:
            restore(dying(other, after=3), tmp_path / "saved", into_existing=False)
        except Killed:
            kills += 1
            check_servable(other)
            keys = set(contents(other))
            if "roster/current.json" in keys:
                assert len(keys - {RESTORING}) == len(contents(store)) - 1
            if any(key.startswith("ledger/bert/") for key in keys):
                assert "ledger/bert/_author.json" in keys, "a held author's adapter before the hold"
            continue
        break
    assert kills >= 6
    assert contents(other) == {key: body for key, body in contents(store).items() if key != "_probe/1"}


def test_a_bucket_in_use_is_left_as_it_is(store: S3Store, tmp_path: Path) -> None:
    back_up(store, tmp_path / "saved", with_uploads=False)
    other = empty_bucket(store)
    other.put("policy.json", b"{}")
    other.put("ledger/bert/_author.json", b"another record")
    with pytest.raises(
        RestoreRefused, match=r"bucket restored: .* found 2 objects, such as ledger/bert/_author.json"
    ):
        restore(other, tmp_path / "saved", into_existing=False)
    assert len(contents(other)) == 2
    done = restore(other, tmp_path / "saved", into_existing=True)
    assert done.kept == ("ledger/bert/_author.json",)
    assert contents(other) == wanted(store) | {
        "policy.json": b"{}",
        "ledger/bert/_author.json": b"another record",
    }


def test_what_comes_while_a_restore_runs_is_not_written_over(store: S3Store, tmp_path: Path) -> None:
    """A restore lists the bucket when it begins, and may run for hours beside a trainer who submits."""
    key, file = "uploads/ada/run-1/weights", tmp_path / "weights"
    file.write_bytes(b"weights of the backup")
    store.upload_file(file, key, sha256=sha256_file(file).sha256)
    back_up(store, tmp_path / "saved", with_uploads=True)
    other = empty_bucket(store)
    real = other._client.put_object

    def put(**call: object) -> object:
        if call["Key"] == RESTORING:
            real(Bucket=other.bucket, Key=key, Body=b"newer weights")
        return real(**call)

    done = restore(with_faults(other, put_object=put), tmp_path / "saved", into_existing=False)
    assert done.kept == (key,) and other.get(key).body == b"newer weights"


def test_who_was_purged_since_is_named(store: S3Store, tmp_path: Path) -> None:
    back_up(store, tmp_path / "saved", with_uploads=False)
    purge_author(store, "ada", who="m", why="asked to", sync=lambda: publish(store), say=lambda line: None)
    store.put(RESTORING, b"the mark of another restore")
    done = restore(store, tmp_path / "saved", into_existing=True)
    assert done.purged == ("ada",) and done.put > 0
    assert store.head(RESTORING) is not None, "that restore goes on by its own mark"


def test_a_backup_that_others_made_up_writes_nowhere_else(store: S3Store, tmp_path: Path) -> None:
    """The list's own digest proves nothing against somebody who writes both."""
    folder = tmp_path / "saved"
    back_up(store, folder, with_uploads=False)
    (tmp_path / "private").write_text("not theirs to publish")
    first, *rest = (folder / "objects.jsonl").read_text().splitlines()
    line = json.loads(first) | {"key": "uploads/x/y/z", "sha256": "../../private"}
    body = "\n".join([json.dumps(line), *rest]) + "\n"
    (folder / "objects.jsonl").write_text(body)
    info = json.loads((folder / "backup.json").read_text())
    info["list_sha256"] = sha256_file(folder / "objects.jsonl").sha256
    (folder / "backup.json").write_text(json.dumps(info))
    other = empty_bucket(store)
    with pytest.raises(BackupRefused, match=r"expected a whole backup, found objects.jsonl: .*sha256"):
        restore(other, folder, into_existing=False)
    assert contents(other) == {}


@pytest.mark.parametrize("how", ["bytes", "gone", "list", "no last word"])
def test_a_damaged_backup_is_told(store: S3Store, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "saved"
    back_up(store, folder, with_uploads=False)
    _, saved = read_backup(folder)
    [roster] = [one for one in saved if one.key == "roster/current.json"]
    path = folder / "objects" / roster.sha256[:2] / roster.sha256
    other = empty_bucket(store)

    def again() -> Restored:
        return restore(other, folder, into_existing=False)

    if how in ("bytes", "gone"):
        path.write_bytes(b"other bytes") if how == "bytes" else path.unlink()
        with pytest.raises(
            BackupDamaged, match=rf"expected .*{roster.sha256} for roster/current.json, found"
        ):
            again()
        assert "roster/current.json" not in contents(other)
        path.write_bytes(store.get("roster/current.json").body)
        again()
        assert contents(other) == wanted(store)
        return
    if how == "list":
        (folder / "objects.jsonl").write_text("")
    else:
        (folder / "backup.json").unlink()
    with pytest.raises(BackupRefused, match=r"expected a whole backup, found (a list with sha256|none)"):
        again()
    assert contents(other) == {}


def test_what_changes_while_it_is_copied_is_copied_as_it_ends(store: S3Store, tmp_path: Path) -> None:
    """An adapter that replaces another meanwhile: the backup's roster never names what the backup lacks."""
    old = digest("ada first output")
    new = digest("ada second output")
    real = store._client.get_object
    moved = False

    def get(**call: str) -> object:
        nonlocal moved
        answer = real(**call)
        if call["Key"] == "roster/current.json" and not moved:
            moved = True
            put_adapter(store, "ada", "second", Outcome.READY)
            put_roster(store, {"ada": served_entry("ada", new)})
            for found in list(store.list_objects(f"serving/ada/{old}/")):
                store.delete(found.key)
        return answer

    done = back_up(with_faults(store, get_object=get), tmp_path / "saved", with_uploads=False)
    assert moved and done.info.missing == ()
    other = empty_bucket(store)
    restore(other, tmp_path / "saved", into_existing=False)
    check_servable(other)
    assert new in contents(other)["roster/current.json"].decode()


def test_a_store_that_lacks_something_is_backed_up_and_told(store: S3Store, tmp_path: Path) -> None:
    missing = f"serving/ada/{digest('ada first output')}/manifest.json"
    store.delete(missing)
    path = tmp_path / "weights"
    path.write_bytes(b"other bytes than were noted")
    store.upload_file(path, "serving/ada/x/weights", sha256="0" * 64)
    info = back_up(store, tmp_path / "saved", with_uploads=False).info
    assert (info.missing, info.damaged) == ((missing,), ("serving/ada/x/weights",))
    assert info.objects == len(wanted(store))


def test_the_commands_say_how_much(
    store: S3Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = [store]
    monkeypatch.setattr("flows.connect.open_store", lambda settings: at[0])
    monkeypatch.chdir(tmp_path)
    roster = Roster(capsys, tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("not ours")
    ran = roster("backup", "other")
    assert ran.code == 2 and "other: expected a new or empty folder, found file" in ran.err
    count = len(wanted(store))
    ran = roster("backup", "saved")
    assert (
        ran.code == 0
        and f"saved: {count} objects, " in ran.out
        and f"({count} objects copied now)" in ran.out
    )
    ran = roster("restore", "saved")
    assert ran.code == 2 and "expected an empty one to restore into" in ran.err
    at[0] = empty_bucket(store)
    at[0].put("ledger/bert/_author.json", b"{}")
    ran = roster("restore", "saved", "--into-existing", "--json")
    assert ran.code == 1 and ran.document["kept"] == ["ledger/bert/_author.json"]
    assert ran.document["put"] == count - 1
    assert roster("restore", "nowhere").code == 2
