"""The worker's disk: what a run uses stays, what nobody uses goes, whoever was killed where."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.disk import RunDisk, trim_folders


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
