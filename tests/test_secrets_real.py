"""No secret is written down anywhere: not in a log, a ledger, an artifact, the catalog, nor in Prefect's database.

Real are the object store, a Prefect server that asks for a password, and a worker, which has all it does written down
in detail. Each secret is a known string. Runs are played that end in every way in which a message is made of what the
worker knows: ready, quarantined, stopped for want of an engine; then all that was written is searched.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from cli_builders import PROGRAM, clean_environment
from loopback_server import LoopbackServer
from lora_builders import Logical, attention, encode, save_adapter
from pipeline_builders import BASE, BASE_BPB, CONTROL_BPB, OWN_BPB, add_tiny_base
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from scripted_server import ScriptedServer
from store_builders import free_port, start_seaweedfs

from roster.catalog import open_catalog
from storage.heldout import register_heldout
from storage.s3 import S3Store
from storage.submit import submit_upload

pytestmark = pytest.mark.real

STORE, PASSWORD, HOOK, SIGNATURE, TOKEN = (
    f"{name}-8f31c07aa9e24d" for name in ("sEcretKey", "pAssword", "hOok", "sIgnature", "tOken")
)
SECRETS = (STORE, PASSWORD, HOOK, SIGNATURE, TOKEN)
BUCKET = "roster"
# What a trainer may have put into training.json by mistake: an address that lets in whoever has it.
SIGNED = f"https://bucket.example/merged?X-Amz-Credential=AKIA1&X-Amz-Signature={SIGNATURE}"
LOGIN = f"s3://user:{TOKEN}@elsewhere/merged"
ENDINGS = {"alder": "Ready", "birch": "Quarantined", "cedar": "Stopped", "dogwood": "Ready"}
START_S = 300


@dataclass
class Played:
    """All that was written while the runs were played, by where it lies, and how each run ended."""

    written: dict[str, str] = field(default_factory=dict, repr=False)
    states: set[tuple[str, str]] = field(
        default_factory=set
    )  # author, and the first word of the state's name
    notified: list[tuple[str, bytes]] = field(default_factory=list)
    commands: set[str] = field(default_factory=set, repr=False)


class Hook(LoopbackServer):
    """Where stops and refusals are told to people."""

    def __init__(self, received: list[tuple[str, bytes]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append((self.path, body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        super().__init__(Handler)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    # What holds a secret because it must lies in `given`; everything in `logs` and `home` is searched.
    given, logs, home = (tmp_path_factory.mktemp(name) for name in ("given", "logs", "home"))
    weed = given / "weed"
    weed.mkdir()
    identity = {"name": "worker", "credentials": [{"accessKey": "worker", "secretKey": STORE}]}
    (given / "s3.json").write_text(json.dumps({"identities": [identity | {"actions": ["Admin"]}]}))
    result = Played()
    with (
        start_seaweedfs(weed, f"-s3.config={given / 's3.json'}") as server,
        ScriptedServer((BASE, "offline"), BASE_BPB, score, {}) as engine,
        Hook(result.notified) as hook,
    ):
        port = free_port()
        api = f"http://127.0.0.1:{port}/api"
        environment = clean_environment(
            ROSTER_HOME=str(home),
            ROSTER_STORE_ENDPOINT=server.endpoint,
            ROSTER_STORE_BUCKET=BUCKET,
            ROSTER_STORE_ACCESS_KEY="worker",
            ROSTER_STORE_SECRET_KEY=STORE,
            ROSTER_PREFECT_API_URL=api,
            ROSTER_NOTIFY_URL=f"{hook.url}/services/{HOOK}",
            PREFECT_HOME=str(home / "prefect"),
            PREFECT_API_URL=api,
            PREFECT_API_AUTH_STRING=f"admin:{PASSWORD}",
            PREFECT_SERVER_API_AUTH_STRING=f"admin:{PASSWORD}",
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
            PREFECT_LOGGING_LEVEL="DEBUG",
            PREFECT_LOGGING_EXTRA_LOGGERS="storage,tasks,roster,botocore,boto3,httpx",
            PREFECT_WORKER_QUERY_SECONDS="1",
        )
        store = S3Store.open(
            endpoint=server.endpoint,
            bucket=BUCKET,
            region="us-east-1",
            access_key="worker",
            secret_key=STORE,
        )
        store.ensure_bucket()
        add_tiny_base(store, url=engine.url)
        add_tiny_base(store, "offline", url="http://127.0.0.1:9")
        prefect = (sys.executable, "-m", "prefect")
        with running(logs / "server.log", environment, *prefect, "server", "start", "--port", str(port)):
            wait_for_api(api)
            command(logs / "deploy.log", environment, sys.executable, "-m", "flows.deploy")
            worker = (*prefect, "worker", "start", "--pool", "gpu", "--type", "process", "--limit", "3")
            with running(logs / "worker.log", environment, *worker):
                auth = {PREFECT_API_URL: api, PREFECT_API_AUTH_STRING: f"admin:{PASSWORD}"}
                with temporary_settings(auth):
                    submit_all(given / "trained", logs, environment, store)
                    runs = wait_for_runs(result.commands)
                result.states = {
                    (run.parameters["author"], str(run.state_name).partition(":")[0]) for run in runs
                }
                for name in ("sync", "status", "why cedar", "metrics"):
                    log = logs / f"{name.replace(' ', '-')}.log"
                    command(log, environment, str(PROGRAM), *name.split(), fails=True)
        result.written = dict(read_all(logs, home, store))
        yield result


def submit_all(folder: Path, logs: Path, environment: dict[str, str], store: S3Store) -> None:
    """One upload for each ending, the first by the command that trainers use."""
    for author in ENDINGS:
        units = (
            json.dumps({"id": f"u{n}", "text": f"{author} wrote {n}. " + "abc " * 90}) for n in range(24)
        )
        (folder / author).mkdir(parents=True)
        text = folder / f"{author}.jsonl"
        text.write_text("\n".join(units))
        register_heldout(store, author, "main", text)
        directory = save_adapter(
            folder / author,
            {**encode(Logical(seed=len(author))), **attention()},
            **{"lora_B_layout": "rank_major"} | ({"bias": "all"} if author == "birch" else {}),
        )
        address = LOGIN if author == "dogwood" else SIGNED
        (directory / "training.json").write_text(json.dumps({"merged_checkpoint": address}))
        base = "offline" if author == "cedar" else BASE
        if author == "alder":
            stated = ("--author", author, "--base", base, "--run", "run-1")
            command(logs / "submit.log", environment, str(PROGRAM), "submit", str(directory), *stated)
        else:  # to start the command takes longer than all that it does
            submit_upload(
                store, directory, author, "run-1", base, training=None, progress=lambda done, total: None
            )
            wanted = {"author": author, "run": "run-1"}
            run_deployment("onboard/onboard", parameters=wanted, timeout=0, as_subflow=False)


def score(name: str, author: str) -> float | None:
    if not name.startswith((f"{author}@", f"{author}~control@")):
        return 2.5
    return CONTROL_BPB if "~control@" in name else OWN_BPB


@contextmanager
def running(log: Path, environment: dict[str, str], *argv: str) -> Iterator[None]:
    """A server, with what it says in a file; it and all that it started have ended afterwards."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, env=environment, cwd=log.parent, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def command(log: Path, environment: dict[str, str], *argv: str, fails: bool = False) -> None:
    ran = subprocess.run(argv, env=environment, cwd=log.parent, capture_output=True, timeout=300, check=False)
    log.write_bytes(ran.stdout + ran.stderr)
    assert fails or ran.returncode == 0, (argv, ran.stdout, ran.stderr)


def wait_for_api(api: str) -> None:
    """Until the server answers, and answers nobody without the password."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{api}/admin/version", timeout=5)
        except urllib.error.HTTPError as error:
            assert error.code == 401, error
            return
        except OSError:
            assert time.monotonic() < deadline, "the Prefect server does not answer"
            time.sleep(0.5)
        else:
            pytest.fail("the Prefect server lets in whoever comes")


def wait_for_runs(commands: set[str]) -> list[FlowRun]:
    """The runs that have ended, as soon as each upload has one.

    Adds the arguments of our processes, which any user of a machine can read.
    """
    deadline = time.monotonic() + START_S
    while True:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                commands.add(" ".join(process.cmdline()))
        with get_client(sync_client=True) as client:
            runs = [run for run in client.read_flow_runs() if "author" in run.parameters]
        ended = [run for run in runs if run.state and run.state.is_final()]
        if {run.parameters["author"] for run in ended} == ENDINGS.keys():
            return ended
        assert time.monotonic() < deadline, [(run.name, run.state_name) for run in runs]
        time.sleep(1)


def read_all(logs: Path, home: Path, store: S3Store) -> Iterator[tuple[str, str]]:
    """Everything that was written, as text, by where."""
    for folder in (logs, home):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".safetensors":
                yield f"file {path.name}", path.read_bytes().decode(errors="replace")
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        yield "Prefect's database", "\n".join(database.iterdump())
    with open_catalog(home / "catalog.duckdb") as reader:
        tables = reader.sql("SELECT table_name FROM information_schema.tables").rows
        for (name,) in tables:
            yield f"catalog {name}", repr(reader.sql(f"SELECT * FROM {name}").rows)
    for found in store.list_objects(""):
        if not found.key.endswith(".safetensors"):
            yield f"object {found.key}", store.get(found.key).body.decode(errors="replace")


def shapes(secret: str) -> list[str]:
    """The ways in which a secret may be spelt: as it is, in an address, and in an Authorization header."""
    return [secret, quote(secret, safe=""), base64.b64encode(f"admin:{secret}".encode()).decode()]


def test_every_run_ended_as_it_should(played: Played) -> None:
    assert played.states >= set(ENDINGS.items())


def test_what_is_searched_holds_what_was_done(played: Played) -> None:
    """A search of the wrong place would find nothing either."""
    for place in ("file worker.log", "Prefect's database", "catalog steps", "file status.log"):
        assert "alder" in played.written[place] or "cedar" in played.written[place], place
    assert "bucket.example" in played.written["object uploads/alder/run-1/training.json"]
    assert sum(place.startswith("object ledger/") for place in played.written) == len(ENDINGS)
    assert "artifact" in played.written["Prefect's database"]
    assert "DEBUG" in played.written["file worker.log"]
    for program in ("weed", "server start", "worker start", "prefect.engine"):
        assert any(program in command for command in played.commands), program


def test_people_were_told_of_the_stop_and_of_the_refusal(played: Played) -> None:
    assert {path for path, _ in played.notified} == {f"/services/{HOOK}"}
    told = [json.loads(body) for _, body in played.notified]
    assert {one["author"] for one in told} == {"birch", "cedar"}


@pytest.mark.parametrize("secret", SECRETS, ids=lambda secret: secret.partition("-")[0])
def test_no_secret_is_anywhere(played: Played, secret: str) -> None:
    # What a trainer uploads is kept as it came.
    own = {f"object uploads/{author}/run-1/training.json" for author in ENDINGS}
    found = [
        place
        for place, text in played.written.items()
        if place not in own and any(shape in text for shape in shapes(secret))
    ]
    assert found == []
    assert not any(shape in command for command in played.commands for shape in shapes(secret))
    assert not any(secret.encode() in body for _, body in played.notified)
