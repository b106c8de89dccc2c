"""The worker's disk: what a run uses stays, what nobody uses goes, whoever was killed where."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline_builders import Desk
from store_builders import memory_store

from storage.digests import FileDigest
from storage.ledger import Outcome, StepKind
from storage.s3 import S3Store
from tasks.disk import RESERVE_BYTES, RunDisk, disk_full, trim_folders
from tasks.errors import DiskFull
from tasks.transfer import fetch_directory

Usage = namedtuple("Usage", "total used free")


def made(path: Path, *, age_s: float = 0.0) -> Path:
    path.mkdir(parents=True)
    (path / "weights").write_text(path.name)
    moment = time.time() - age_s
    os.utime(path, (moment, moment))
    return path


def test_nothing_is_made_before_it_is_asked_for(tmp_path: Path) -> None:
    disk = RunDisk(tmp_path / "work")
    assert not disk.hold(tmp_path / "work" / "served" / "x")
    disk.close()
    assert not (tmp_path / "work").exists()


def test_a_runs_own_folder_goes_with_it_and_not_with_another(tmp_path: Path) -> None:
    one, two = RunDisk(tmp_path), RunDisk(tmp_path)
    (one.folder() / "source").write_text("x")
    assert two.folder() != one.folder() and (one.folder() / "source").exists()
    folder = one.folder()
    one.close()
    assert not folder.exists() and two.folder().exists()
    two.close()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_knows_what_it_holds_from_what_it_finds(tmp_path: Path) -> None:
    disk, shared = RunDisk(tmp_path), made(tmp_path / "sources" / "x")
    assert not disk.is_held(shared)
    assert disk.hold(shared) and disk.is_held(shared)
    disk.drop(shared)
    assert not disk.is_held(shared)
    disk.close()


def test_what_is_fetched_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, destination, synced = RunDisk(tmp_path), tmp_path / "served" / "base" / "ash" / "x", []

    def sync(path: Path) -> None:
        assert not destination.exists()
        synced.append(path.name)

    monkeypatch.setattr("tasks.transfer.sync_path", sync)
    with memory_store() as store:
        files = [FileDigest(name, 3, hashlib.sha256(b"abc").hexdigest()) for name in ("config", "weights")]
        for file in files:
            store.put(f"serving/{file.name}", b"abc")
        fetch_directory(store, "serving/", files, disk, destination)
    assert synced[:2] == ["config", "weights"] and len(synced) == 3, "each file, and the folder"
    assert {path.name for path in destination.iterdir()} == {"config", "weights"}
    disk.close()


def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tasks.disk import RunDisk
disk = RunDisk(Path({str(tmp_path)!r}))
(disk.folder() / "half").write_text("x")
print(disk.folder(), flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        alive = RunDisk(tmp_path)
        alive.folder()
        assert (left / "half").exists(), "its process lives"
        process.send_signal(signal.SIGKILL)
        process.wait()
    alive.close()
    later = RunDisk(tmp_path)
    later.folder()
    assert not left.exists()
    later.close()


def test_trimming_keeps_the_last_used_and_whatever_a_run_holds(tmp_path: Path) -> None:
    folders = [made(tmp_path / "served" / str(n), age_s=100.0 - n) for n in range(5)]
    disk = RunDisk(tmp_path)
    assert disk.hold(folders[1])
    moment = time.time() - 1000
    os.utime(folders[1], (moment, moment))  # the oldest of all, but in use
    trim_folders(folders, keep=2)
    assert [folder.exists() for folder in folders] == [False, True, False, True, True]
    disk.close()
    trim_folders(folders, keep=2)
    assert [folder.exists() for folder in folders] == [False, False, False, True, True]


def test_use_counts_as_use(tmp_path: Path) -> None:
    """Opponents that everyone meets are old, and must not be fetched again for every run."""
    old, new = made(tmp_path / "old", age_s=50), made(tmp_path / "new", age_s=5)
    disk = RunDisk(tmp_path)
    assert disk.hold(old)
    disk.close()
    trim_folders([old, new], keep=1)
    assert old.exists() and not new.exists()


def test_the_first_folder_under_a_name_stays(tmp_path: Path) -> None:
    """Two runs that fetch one opponent at once: renaming onto a folder that is not empty fails."""
    disk, target = RunDisk(tmp_path), tmp_path / "served" / "digest"
    disk.share(made(disk.folder() / "first"), target)
    disk.share(made(disk.folder() / "second"), target)
    assert (target / "weights").read_text() == "first"
    assert list(disk.folder().iterdir()) == []
    disk.close()
    assert target.exists()


def test_another_run_that_is_quicker_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, target = RunDisk(tmp_path), tmp_path / "served" / "digest"
    mine = made(disk.folder() / "mine")
    rename = Path.rename

    def late(path: Path, to: Path) -> Path:
        made(target)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", late)
    disk.share(mine, target)
    assert (target / "weights").read_text() == "digest" and not mine.exists()
    disk.close()


def test_a_dropped_folder_stays_while_another_run_uses_it(tmp_path: Path) -> None:
    folder = made(tmp_path / "served" / "control")
    one, two = RunDisk(tmp_path), RunDisk(tmp_path)
    assert one.hold(folder) and two.hold(folder)
    one.drop(folder)
    assert folder.exists()
    two.drop(folder)
    assert not folder.exists()
    one.close()
    two.close()


def disk_of(patch: pytest.MonkeyPatch, free: Callable[[], int]) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free()))


def test_shared_folders_that_nobody_uses_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be fetched again; those of the run itself and of others at work stay."""
    used, old, new = (
        made(tmp_path / "served" / "base" / "author" / name, age_s=age)
        for name, age in (("used", 90), ("old", 80), ("new", 70))
    )
    disk, other = RunDisk(tmp_path), RunDisk(tmp_path)
    assert other.hold(used)
    disk_of(monkeypatch, lambda: RESERVE_BYTES + 1000 - 300 * sum(one.exists() for one in (used, old, new)))
    disk.require(100, "alder/run-1")
    assert new.exists() and old.exists(), "there is room without"
    disk.require(600, "alder/run-1")
    assert used.exists() and not new.exists() and not old.exists()
    disk.require(700, "alder/run-1")
    with pytest.raises(DiskFull):
        disk.require(701, "alder/run-1")
    disk.close()
    other.close()


def test_a_full_disk_stops_the_run_before_anything_is_downloaded(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prefect#10188's kind: what fails half way fails in a hundred ways; what is known beforehand fails in one."""
    desk.heldout("alder")
    upload = desk.submit("alder", desk.adapter("alder"))
    own = sum(file.digest.bytes for file in upload.adapter_files)
    room = [RESERVE_BYTES + 3 * own - 1]
    disk_of(monkeypatch, lambda: room[0])
    downloads: list[str] = []
    download = S3Store.download_file

    def watched(store: S3Store, key: str, path: Path, **more: Any) -> object:
        downloads.append(key)
        return download(store, key, path, **more)

    monkeypatch.setattr(S3Store, "download_file", watched)
    state = desk.run("alder")
    assert state.name == "Stopped: disk_full" and downloads == []
    work = desk.settings.work_path
    needed, free = f"{(RESERVE_BYTES + 3 * own) / 1e9:.2f} GB free", f"{room[0] / 1e9:.2f} GB"
    for fact in ("alder/run-1", needed, f"found {free}", str(work), "all of `work` may go", "ROSTER_HOME"):
        assert fact in str(state.message)
    [last] = desk.ledger("alder").steps
    assert (last.kind, last.outcome, last.result["code"]) == (
        StepKind.INSPECTED,
        Outcome.STOPPED,
        "disk_full",
    )
    assert desk.ledger("alder").claim is None
    assert [path for path in work.rglob("*") if path.is_file()] == []
    room[0] = RESERVE_BYTES + 10 * own
    assert desk.run("alder").name == "Ready" and downloads


def test_a_disk_that_is_full_for_the_conversion_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It filled up after the download: nothing is begun that cannot be ended."""
    desk.heldout("alder")
    desk.submit("alder", desk.adapter("alder"))
    room = iter((10**12,))
    disk_of(monkeypatch, lambda: next(room, RESERVE_BYTES))
    assert desk.run("alder").name == "Stopped: disk_full"
    last = desk.ledger("alder").steps[-1]
    assert (last.kind, last.outcome) == (StepKind.CONVERTED, Outcome.STOPPED)
    assert [path for path in desk.settings.work_path.rglob("*") if path.is_file()] == []


def test_the_systems_own_words_for_a_full_disk_are_known(tmp_path: Path) -> None:
    """No room, and a file beyond what is allowed: both as the kernel says it."""
    with Path("/dev/full").open("wb", buffering=0) as device, pytest.raises(OSError) as no_room:
        device.write(b"x")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "large").open("wb", buffering=0) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
        try:
            with pytest.raises(OSError) as too_large:
                os.posix_fallocate(file.fileno(), 0, 1 << 20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (no_room.value.errno, too_large.value.errno) == (errno.ENOSPC, errno.EFBIG)
    quota = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/elsewhere/file")
    for error, where in (
        (no_room.value, str(tmp_path)),
        (too_large.value, str(tmp_path)),
        (quota, "/elsewhere/file"),
    ):
        said = str(disk_full(error, "alder/run-1", tmp_path))
        for fact in (
            "alder/run-1",
            "expected room",
            f"the disk of {where}",
            os.strerror(error.errno or 0),
            "Make room",
        ):
            assert fact in said
    assert disk_full(OSError(errno.EACCES, "Permission denied"), "alder/run-1", tmp_path) is None
