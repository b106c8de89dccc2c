"""The `roster` command as a test uses it: in this process, or as the real program in a terminal or a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.cli.app import run

PROGRAM = Path(sys.executable).with_name("roster")


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.out.count("\n") == 1, self.out
        document = json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert isinstance(document, dict)
        return document


@dataclass(frozen=True)
class Roster:
    """Runs commands in this process; `home` is their ROSTER_HOME."""

    capture: pytest.CaptureFixture[str]
    home: Path

    def __call__(self, *arguments: str | Path) -> Ran:
        self.capture.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = self.capture.readouterr()
        return Ran(code, captured.out, captured.err)

    def line(self, command: str) -> Ran:
        """Run a line as it stands in the documentation."""
        program, *arguments = shlex.split(command)
        assert program == "roster"
        return self(*arguments)


def run_program(*arguments: str | Path, cwd: Path, **variables: str) -> Ran:
    """Run the installed program with its output in pipes."""
    ran = subprocess.run(
        [str(PROGRAM), *(str(argument) for argument in arguments)],
        cwd=cwd,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def run_in_terminal(*arguments: str | Path, cwd: Path, columns: int, **variables: str) -> tuple[int, str]:
    """Run the installed program in a terminal of that width; its exit code and all it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [str(PROGRAM), *(str(argument) for argument in arguments)],
        cwd=cwd,
        env=clean_environment(TERM="xterm-256color", **variables),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    pieces = []
    with suppress(OSError):  # how Linux says that the last writer has gone
        while piece := os.read(ours, 65536):
            pieces.append(piece)
    os.close(ours)
    return process.wait(60), b"".join(pieces).decode().replace("\r\n", "\n")


def clean_environment(**variables: str) -> dict[str, str]:
    """This environment without what would change how the command speaks or where it looks."""
    dropped = ("ROSTER_", "PREFECT_", "AWS_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, **variables}
