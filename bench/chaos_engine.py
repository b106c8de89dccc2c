"""A scripted engine in a process of its own, which can be killed and started again as a real one can.

It is vLLM's HTTP routes with answers that the names of adapters and the texts alone decide (tests/scripted_server.py):
so it says the same before and after, but has forgotten what was loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Self

_ROOT = Path(__file__).resolve().parent.parent
_TESTS = _ROOT / "tests"
_TRIES = 20  # its port may be a client's for a moment
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Scores:
    """Mean bits per byte on one author's text: of the own adapter, its control, and any other author's."""

    own: float
    control: float
    others: float


@dataclass(frozen=True, slots=True)
class Script:
    """What an engine says.

    An author is named for a kind, or for a kind and what follows a last hyphen: `no-effect`, `no-effect-17`.
    usual: the scores for all other authors. kinds: kind → its scores, None for exactly what the base has.
    refuse: kind → the message with which its authors' adapters are not loaded.
    """

    bases: tuple[str, ...]
    base_bpb: float
    usual: Scores
    kinds: Mapping[str, Scores | None] = field(default_factory=dict)
    refuse: Mapping[str, str] = field(default_factory=dict)

    def score(self, name: str, author: str) -> float | None:
        """Mean bits per byte of an adapter, by the name it was loaded under, on an author's text."""
        scores = self.kinds.get(self._kind(author), self.usual)
        if scores is None:
            return None
        if name.startswith(f"{author}~control@"):
            return scores.control
        return scores.own if name.startswith(f"{author}@") else scores.others

    def _kind(self, author: str) -> str:
        return author if author in self.kinds else author.rpartition("-")[0]


def script_uploads(uploads: Any, pipeline: Any) -> Script:
    """The script for tests/refuse_builders.py's uploads and bases, scored as tests/pipeline_builders.py scores.

    Both modules come from `bench.tiny_world.kept_with_tests`.
    """
    kinds: dict[str, Scores | None] = {}
    for kind, one in uploads.UPLOADS.items():
        own, control = one.scores or (0.0, 0.0)
        kinds[kind] = Scores(own, control, one.others) if one.scores else None
    return Script(
        bases=tuple(uploads.BASES),
        base_bpb=pipeline.BASE_BPB,
        usual=Scores(pipeline.OWN_BPB, pipeline.CONTROL_BPB, pipeline.OTHER_BPB),
        kinds=kinds,
        refuse={kind: one.refused for kind, one in uploads.UPLOADS.items() if one.refused},
    )


class ScriptedEngine:
    """Runs the script at `url`, one port of loopback, while entered as a context manager; it ends with its parent."""

    def __init__(self, script: Script) -> None:
        self._told = json.dumps(asdict(script)).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Where it listens, for as long as this object is used."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Of its present process, or the last one."""
        assert self._process is not None, "it was never started"
        return self._process.pid

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL, and return when it is gone; requests in flight end as they do when an engine dies."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()

    def restart(self) -> None:
        """Kill it if it runs, and return when another process answers at the same address."""
        self.kill()
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "bench.chaos_engine", str(self._port)),
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal is for the bench, which still needs it then.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        # The pipe stays open: its end tells the engine that its parent is gone.
        self._process.stdin.write(self._told + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            message = f"the scripted engine ended with {self._process.wait()}"
            raise RuntimeError(message)
        self._port = int(line)


def main(arguments: list[str]) -> int:
    """Serve the script that stdin begins with, at the port that is the one argument, until stdin ends."""
    told = json.loads(sys.stdin.readline())
    kinds = {kind: scores and Scores(**scores) for kind, scores in told["kinds"].items()}
    told |= {"bases": tuple(told["bases"]), "usual": Scores(**told["usual"]), "kinds": kinds}
    script = Script(**told)
    # Not by bench.tiny_world, which brings all of Prefect: an engine that was killed is to be back in a moment.
    sys.path.append(str(_TESTS))
    server = import_module("scripted_server").ScriptedServer
    # An adapter is called author@…, its control author~control@…
    refuse = {f"{kind}{after}": text for kind, text in script.refuse.items() for after in ("@", "-")}
    with _listen(
        lambda: server(script.bases, script.base_bpb, script.score, refuse, int(arguments[0]))
    ) as engine:
        print(engine.url.rpartition(":")[2], flush=True)
        sys.stdin.read()
    return 0


def _listen(make: Callable[[], Any]) -> Any:
    for _ in range(_TRIES):
        try:
            return make()
        except OSError:
            time.sleep(_PAUSE_S)
    return make()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
