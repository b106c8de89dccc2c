from __future__ import annotations

import os
import pickle  # noqa: TID251 - errors cross process borders this way
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervised_builders import DEAF_ORPHAN, ENVIRONMENT, alive, child, python, shell, wait_for

from flows.processes import read_start_ticks
from flows.supervisor import MARK_VARIABLE, ChildFailedError, ChildSpec, ChildUnfitError, Supervisor

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
Build = Callable[..., Supervisor]
Driver = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Every test, however it goes, must leave nothing running."""
    yield str(tmp_path)
    assert alive(f"{tmp_path}") == []


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def build(mark: str, lines: list[str]) -> Build:
    def supervisor(*specs: ChildSpec, window_s: float = 60, backoff_s: float = 0.05) -> Supervisor:
        return Supervisor(
            specs, announce=lines.append, mark=mark, window_s=window_s, first_backoff_s=backoff_s
        )

    return supervisor


def run_for(supervisor: Supervisor, condition: Callable[[], object]) -> None:
    """Supervise until the condition holds (looked at whenever the supervisor waits)."""

    class Stop(threading.Event):
        def is_set(self) -> bool:
            return bool(condition())

    supervisor.run_until(Stop())


def started(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_children_start_together_but_after_those_they_wait_for(
    tmp_path: Path, build: Build, mark: str, lines: list[str]
) -> None:
    # Each of the first two is ready only once the other runs: one after the other, they would never be.
    one = child("one", tmp_path, *shell("touch one; sleep 600"), ready=(tmp_path / "two").exists)
    two = child("two", tmp_path, *shell("touch two; sleep 600"), ready=(tmp_path / "one").exists)
    setup = child("setup", tmp_path, *shell("sleep 0.3; touch done"), after=("one", "two"), one_shot=True)
    last = child(
        "last", tmp_path, *shell("ls > seen; sleep 600"), after=("setup",), ready=(tmp_path / "seen").exists
    )
    supervisor = build(one, two, setup, last)
    assert supervisor.start(threading.Event())
    assert {"one", "two", "done"} <= set((tmp_path / "seen").read_text().split())
    assert len(alive(mark)) >= 6  # three guards and their children; the one-shot is over
    # The terminal's Ctrl-C goes to its foreground group: it is for the supervisor to act on.
    assert os.getsid(0) not in {os.getsid(pid) for pid in alive(mark)}
    assert [line.partition(" in ")[0] for line in lines if "ready" in line or "done" in line][-2:] == [
        "setup: done",
        "last: ready",
    ]
    supervisor.stop()


def test_children_stop_before_those_they_waited_for(tmp_path: Path, build: Build) -> None:
    said = "trap 'sleep {1}; echo {0} >> order; exit' TERM; touch {0}; while :; do sleep 0.05; done"
    base = child(
        "base", tmp_path, *shell(said.format("base", 0)), ready=(tmp_path / "base").exists, stop_grace_s=5
    )
    user = child(
        "user",
        tmp_path,
        *shell(said.format("user", 0.3)),
        ready=(tmp_path / "user").exists,
        stop_grace_s=5,
        after=("base",),
    )
    supervisor = build(base, user)
    assert supervisor.start(threading.Event())
    supervisor.stop()
    assert (tmp_path / "order").read_text().split() == ["user", "base"]


def test_a_child_that_dies_is_restarted(tmp_path: Path, build: Build, lines: list[str]) -> None:
    runs = tmp_path / "runs"
    script = "echo run >> runs; [ $(wc -l < runs) -ge 3 ] || exit 4; sleep 600"
    supervisor = build(child("moody", tmp_path, *shell(script), ready=lambda: started(runs) >= 3, restarts=2))
    assert supervisor.start(threading.Event())
    supervisor.stop()
    assert started(runs) == 3
    assert "moody: ended with exit status 4; restart 2 of at most 2 in 0.1 s" in lines


def test_giving_up_names_child_status_log_and_its_end_and_stops_everything(
    tmp_path: Path, build: Build, mark: str
) -> None:
    runs = tmp_path / "runs"
    script = "echo run >> runs; seq 1 99; echo 'the disk is on fire'; sleep 0.2; exit 7"
    bystander = child("bystander", tmp_path)
    supervisor = build(bystander, child("doomed", tmp_path, *shell(script), restarts=2, ready=runs.exists))
    assert supervisor.start(threading.Event())
    assert len(alive(mark)) >= 3
    with pytest.raises(ChildFailedError) as caught:
        run_for(supervisor, lambda: False)
    assert alive(mark) == []
    assert started(runs) == 3
    message = str(caught.value)
    assert message.startswith(
        f"doomed: ended with exit status 7, 3 times. The last lines of {tmp_path / 'doomed.log'}"
    )
    assert message.endswith("98\n99\nthe disk is on fire")
    assert len(message.splitlines()) == 21  # the tail, not all hundred lines
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.name, copy.status, copy.failures, copy.log) == (
        "doomed",
        "ended with exit status 7",
        3,
        tmp_path / "doomed.log",
    )
    assert str(copy) == message
    # The first failure's log, often the telling one, is kept beside the last.
    assert (tmp_path / "doomed.log.2").read_text().endswith("the disk is on fire\n")


def test_failures_are_counted_over_a_window(tmp_path: Path, build: Build) -> None:
    runs = tmp_path / "runs"
    weary = child("weary", tmp_path, *shell("echo run >> runs; sleep 0.3; exit 1"), restarts=1)
    run_for(build(weary, window_s=0.2), lambda: started(runs) >= 4)
    with pytest.raises(ChildFailedError, match="2 times"):
        run_for(build(weary, window_s=60), lambda: False)


def test_a_signal_is_named(tmp_path: Path, build: Build) -> None:
    with pytest.raises(ChildFailedError, match="hit: ended with signal SIGSEGV"):
        build(child("hit", tmp_path, *shell("kill -SEGV $$"), ready=lambda: False)).start(threading.Event())


def test_a_command_that_does_not_exist_is_named(tmp_path: Path, build: Build) -> None:
    spec = child("absent", tmp_path, "no-such-program", ready=lambda: False)
    with pytest.raises(
        ChildFailedError, match=r"exit status 127(.|\n)*cannot run no-such-program: No such file"
    ):
        build(spec).start(threading.Event())


def test_a_child_that_is_never_ready_fails(tmp_path: Path, build: Build) -> None:
    spec = child(
        "mute", tmp_path, *shell("echo loading; sleep 600"), ready=lambda: False, ready_timeout_s=0.4
    )
    with pytest.raises(ChildFailedError, match=r"mute: was not ready within 0 s(.|\n)*loading"):
        build(spec).start(threading.Event())


def test_an_unfit_child_is_not_restarted(tmp_path: Path, build: Build) -> None:
    def ready() -> bool:
        raise ChildUnfitError("the plugin did not load")

    spec = child("hollow", tmp_path, *shell("echo run >> runs; sleep 600"), ready=ready, restarts=5)
    with pytest.raises(ChildFailedError, match="hollow: the plugin did not load"):
        build(spec).start(threading.Event())
    assert started(tmp_path / "runs") <= 1


def test_a_failed_one_shot_keeps_the_rest_from_starting(tmp_path: Path, build: Build) -> None:
    setup = child("setup", tmp_path, *shell("echo no such pool; exit 5"), one_shot=True)
    later = child("later", tmp_path, *shell("touch later; sleep 600"), after=("setup",))
    with pytest.raises(ChildFailedError, match=r"setup: ended with exit status 5(.|\n)*no such pool"):
        build(setup, later).start(threading.Event())
    assert not (tmp_path / "later").exists()


def test_a_stop_while_starting_stops_everything(tmp_path: Path, build: Build, mark: str) -> None:
    stop = threading.Event()

    def never_ready() -> bool:
        stop.set()
        return False

    supervisor = build(child("ready", tmp_path), child("slow", tmp_path, ready=never_ready))
    assert not supervisor.start(stop)
    assert alive(mark) == []


def test_stop_ends_deaf_orphans_in_other_sessions(tmp_path: Path, build: Build, mark: str) -> None:
    orphan = tmp_path / "orphan"
    supervisor = build(child("parent", tmp_path, *python(DEAF_ORPHAN, str(orphan)), ready=orphan.exists))
    assert supervisor.start(threading.Event())
    pid = int(orphan.read_text())
    assert os.getsid(pid) not in {os.getsid(other) for other in alive(mark) if other != pid}
    supervisor.stop()
    assert read_start_ticks(pid) is None


def test_a_dead_child_takes_its_descendants_along(tmp_path: Path, build: Build) -> None:
    orphan = tmp_path / "orphan"
    dies = DEAF_ORPHAN.replace("os.wait()\ntime.sleep(600)", "os.wait()\ntime.sleep(0.3)")
    assert dies != DEAF_ORPHAN
    supervisor = build(child("parent", tmp_path, *python(dies, str(orphan)), restarts=1, ready=orphan.exists))
    assert supervisor.start(threading.Event())
    first = int(orphan.read_text())
    orphan.unlink()
    run_for(supervisor, orphan.exists)
    assert read_start_ticks(first) is None


def test_a_killed_guard_leaves_nothing_behind(
    tmp_path: Path, build: Build, mark: str, lines: list[str]
) -> None:
    orphan = tmp_path / "orphan"
    spec = child("parent", tmp_path, *python(DEAF_ORPHAN, str(orphan)), restarts=1, ready=orphan.exists)
    supervisor = build(spec)
    assert supervisor.start(threading.Event())
    first = int(orphan.read_text())
    orphan.unlink()
    guard = next(pid for pid in alive(mark) if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(guard, signal.SIGKILL)
    run_for(supervisor, orphan.exists)
    assert read_start_ticks(first) is None
    assert f"ended process {first}, left behind by parent, whose guard was killed" in lines


def test_what_an_earlier_run_left_is_ended_first(
    tmp_path: Path, build: Build, mark: str, lines: list[str]
) -> None:
    left = subprocess.Popen(["sleep", "600"], env={**ENVIRONMENT, MARK_VARIABLE: f"{mark};gone;"})
    strangers = subprocess.Popen(["sleep", "600"], env={**ENVIRONMENT, MARK_VARIABLE: f"{mark}-other;gone;"})
    supervisor = build(child("new", tmp_path))
    assert supervisor.start(threading.Event())
    assert left.wait(5) == -signal.SIGKILL
    assert strangers.poll() is None
    strangers.kill()
    strangers.wait()
    supervisor.stop()
    assert f"ended process {left.pid}, left behind by an earlier run" in lines


DRIVER = """
import os, sys, threading
from pathlib import Path
from supervised_builders import DEAF_ORPHAN, child, python, shell, wait_for
from flows.supervisor import Supervisor

folder = Path(sys.argv[1])
specs = (
    child("deaf", folder, *python(DEAF_ORPHAN, str(folder / "orphan")), ready=(folder / "orphan").exists),
    child("mask", folder, *shell("grep SigIgn /proc/self/status > m; mv m mask; sleep 600")),
)
supervisor = Supervisor(specs, announce=lambda line: None, mark=str(folder))
supervisor.start(threading.Event())
wait_for((folder / "mask").exists)
(folder / "up").touch()
supervisor.run_until(threading.Event())
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    running: list[subprocess.Popen[bytes]] = []

    def start(*wrapper: str) -> subprocess.Popen[bytes]:
        (tmp_path / "driver.py").write_text(DRIVER)
        process = subprocess.Popen(
            [*wrapper, sys.executable, str(tmp_path / "driver.py"), str(tmp_path)],
            env={**ENVIRONMENT, "PYTHONPATH": f"{HERE}:{HERE.parent}"},
            stderr=subprocess.PIPE,
        )
        running.append(process)
        wait_for((tmp_path / "up").exists)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_the_supervisor(
    tmp_path: Path, mark: str, driver: Driver, number: signal.Signals
) -> None:
    """Ctrl-C unwinds the supervisor; the others kill it where it stands, and the guards must notice."""
    process = driver()
    orphan = int((tmp_path / "orphan").read_text())
    assert orphan in alive(mark)
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert (b"KeyboardInterrupt" in error) == (number == signal.SIGINT)
    wait_for(lambda: not alive(mark))
    assert read_start_ticks(orphan) is None


def test_children_do_not_inherit_ignored_signals(tmp_path: Path, driver: Driver) -> None:
    """A process that a script starts with `&` or nohup ignores signals, and so would everything below it."""
    process = driver("sh", "-c", "trap '' INT QUIT HUP TERM; exec \"$@\"", "sh")
    ignored = int((tmp_path / "mask").read_text().split()[1], 16)
    ours = int(Path(f"/proc/{process.pid}/status").read_text().partition("SigIgn:")[2].split()[0], 16)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        assert ours & 1 << number - 1
        assert not ignored & 1 << number - 1


def test_held_files_stay_open_in_guards_but_not_in_children(tmp_path: Path, mark: str) -> None:
    reader, writer = os.pipe()
    spec = child(
        "one", tmp_path, *shell("ls /proc/self/fd > fds; sleep 600"), ready=(tmp_path / "fds").exists
    )
    supervisor = Supervisor([spec], announce=lambda line: None, mark=mark, hold=(writer,))
    assert supervisor.start(threading.Event())
    os.close(writer)
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)  # no end of file yet: the guard holds the other end
    assert str(writer) not in (tmp_path / "fds").read_text().split()
    supervisor.stop()
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_second_interrupt_gives_up_the_grace(tmp_path: Path, mark: str) -> None:
    orphan = tmp_path / "orphan"
    patient = child("p", tmp_path, *python(DEAF_ORPHAN, str(orphan)), ready=orphan.exists, stop_grace_s=300)
    supervisor = Supervisor([patient], announce=lambda line: None, mark=mark)
    assert supervisor.start(threading.Event())
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    began = time.monotonic()
    supervisor.stop()
    timer.join()
    assert 0.5 <= time.monotonic() - began < 10


@pytest.mark.parametrize("after", [("later",), ("itself",), ("nobody",)])
def test_a_name_to_wait_for_must_be_an_earlier_child(
    tmp_path: Path, build: Build, after: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=f"itself: .*{after[0]}.*earlier"):
        build(child("itself", tmp_path, after=after), child("later", tmp_path))


def test_names_are_unique(tmp_path: Path, build: Build) -> None:
    with pytest.raises(ValueError, match="twin: names must be unique"):
        build(child("twin", tmp_path), child("twin", tmp_path))
