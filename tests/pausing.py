"""Makes a conversion stop half way until it is told to go on, in whatever process it runs: the tests then kill that.

`pauses_in` gives the environment for it. Python imports the module sitecustomize by itself at its start; the one
written here listens for the opening of the file that a conversion writes. A process stops once at most: it converts the
adapter and its control.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

HOOK = """
import os
import sys
import time

FOLDER = {folder!r}
STOPPED = []


def pause(event, arguments):
    if event != "open" or STOPPED or not str(arguments[0]).endswith(".partial/adapter_model.safetensors"):
        return
    taken = os.path.join(FOLDER, str(os.getpid()))
    try:
        os.rename(os.path.join(FOLDER, "armed"), taken)
    except FileNotFoundError:
        return
    STOPPED.append(taken)
    while os.path.exists(taken):
        time.sleep(0.05)


sys.addaudithook(pause)
"""


@dataclass(frozen=True)
class Pauses:
    """The folder in which conversions and tests meet: `armed` stops the next one, which then has its pid there."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder / "site")}

    def arm(self) -> None:
        (self.folder / "armed").touch()

    def taken(self, within_s: float = 90) -> int:
        """The pid of the process that stopped."""
        deadline = time.monotonic() + within_s
        while (self.folder / "armed").exists():
            assert time.monotonic() < deadline, "no conversion began"
            time.sleep(0.05)
        [newest] = [path for path in self.folder.iterdir() if path.name.isdigit() and not self._known(path)]
        (self.folder / "known" / newest.name).touch()
        return int(newest.name)

    def go_on(self, pid: int) -> None:
        (self.folder / str(pid)).unlink()

    def _known(self, path: Path) -> bool:
        return (self.folder / "known" / path.name).exists()


def pauses_in(folder: Path) -> Pauses:
    (folder / "known").mkdir(parents=True)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(HOOK.format(folder=str(folder)))
    return Pauses(folder)
