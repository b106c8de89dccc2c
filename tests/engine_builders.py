"""Builders for the engine's tests: scripts in the engine's environment, a real server, and one that plays faults."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from loopback_server import LoopbackServer

from roster.serving_engine import engine_command, engine_environment
from tasks.bpb.engine import Engine

REPOSITORY = Path(__file__).resolve().parents[1]


def engine_python() -> Path:
    """The interpreter of the engine's environment, beside the repository's root files."""
    python = REPOSITORY / ".venv-engine" / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{python} does not exist: run ./run setup")
    return python


def run_in_engine(
    *arguments: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the engine's interpreter with these arguments to its end, in-process engine settings and one thread."""
    settings = {
        "PYTHONPATH": str(REPOSITORY / "tests"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    return subprocess.run(
        [engine_python(), *arguments],
        env={**os.environ, **settings, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def json_from_engine(*arguments: str | Path, env: dict[str, str] | None = None) -> Any:
    """The JSON that a script in the engine's environment prints as its last line."""
    done = run_in_engine(*arguments, env=env)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True, slots=True)
class RunningEngine:
    url: str
    process: subprocess.Popen[bytes]
    engine_json: Path
    log: Path


@contextmanager
def running_engine(
    model: Path, directory: Path, *, more: tuple[str, ...] = (), **flags: int
) -> Iterator[RunningEngine]:
    """A real vLLM server for `model`, started as the product starts it, gone at the end with all its children.

    `more`: arguments that the product does not give.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = engine_command(
        engine_python(), model, "tiny", port, kv_cache_memory_bytes=1 << 26, **{"max_model_len": 128, **flags}
    )
    engine_json, log = directory / "engine.json", directory / "engine.log"
    environment = {**os.environ, **engine_environment(threads=1, engine_json=engine_json)}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            (*command, *more),
            env=environment,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            cwd=directory,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        with Engine(url, timeout_s=5) as engine:
            deadline = time.monotonic() + 180
            while not engine.is_healthy():
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.3)
        yield RunningEngine(url, process, engine_json, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a scripted server; `reset` drops the connection instead."""

    status: int = 200
    body: Any = field(default_factory=dict)
    delay_s: float = 0.0
    reset: bool = False


class ScriptedEngine(LoopbackServer):
    """A server on loopback that plays back replies per "METHOD /path", the last of each again and again."""

    def __init__(self, script: dict[str, list[Reply]]) -> None:
        self.script = {route: list(replies) for route, replies in script.items()}
        self.requests: list[tuple[str, Any]] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self, "GET")

            def do_POST(self) -> None:
                outer.answer(self, "POST")

            def log_message(self, *arguments: object) -> None:
                pass

        super().__init__(Handler)

    def answer(self, handler: BaseHTTPRequestHandler, method: str) -> None:
        raw = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        route = f"{method} {handler.path}"
        with self._lock:
            self.requests.append((route, json.loads(raw) if raw else None))
            replies = self.script.get(route, [Reply(404, {"detail": "Not Found"})])
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if reply.reset:
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.close_connection = True
            handler.connection.close()
            return
        time.sleep(reply.delay_s)
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        try:
            handler.send_response(reply.status)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
        except BrokenPipeError:
            pass
