"""What starts a run, on real services: each upload gets one verdict, the latest one's is served, whatever events do.

Real are the object store, the Prefect server with its automations and two workers, each with a home of its own; the
engines are scripted servers behind vLLM's routes. Every author has a base and an engine of its own, so that nobody is
scored again because of others.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4
from zlib import crc32

import pytest
from cli_builders import clean_environment, run_program
from lora_builders import Logical, attention, encode, save_adapter
from pipeline_builders import BASE_BPB, CONTROL_BPB, OTHER_BPB, OWN_BPB, add_tiny_base
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from scripted_server import ScriptedServer
from supervised_builders import wait_for

import flows.events
from flows.deploy import POOL
from flows.embedded import start_detached, stop_embedded
from flows.embedded_config import EmbeddedConfig
from flows.embedded_health import is_answering
from flows.events import announce_upload
from flows.processes import list_marked
from flows.services import Services
from flows.settings import Settings, base_environment
from flows.supervisor import MARK_VARIABLE
from roster.serving import Roster
from storage.claims import list_ledgers
from storage.documents import read_document
from storage.heldout import register_heldout
from storage.keys import roster_key
from storage.ledger import Ledger, StepKind
from storage.s3 import S3Store
from storage.uploads import Upload, read_upload
from tasks.submission import submit_adapter
from tasks.transfer import read_manifest

pytestmark = pytest.mark.real

DOCS = Path(__file__).parents[1] / "docs" / "trainers.md"
THRICE, TWO_IDS, LATE, REPLACED = "same-event-thrice", "two-event-ids", "late-event", "event-of-the-replaced"
CURL, COPIED, SILENCED, DOWN = "sent-by-curl", "copied-by-a-tool", "automation-disabled", "server-down"
AUTHORS = (THRICE, TWO_IDS, LATE, REPLACED, CURL, COPIED, SILENCED, DOWN)
SETTLE_S, GRACE_S, DEADLINE_S = 5, 20, 240
VARIABLES = {
    "ROSTER_SWEEP_GRACE_SECONDS": str(GRACE_S),
    "ROSTER_SETTLE_SECONDS": str(SETTLE_S),
    "ROSTER_SYNC_WINDOW_SECONDS": "2",
    "ROSTER_MAX_DROP": "1",
}


def base_of(author: str) -> str:
    return f"base-of-{author}"


def score(name: str, author: str) -> float:
    if not name.startswith((f"{author}@", f"{author}~control@")):
        return OTHER_BPB
    return CONTROL_BPB if "~control@" in name else OWN_BPB


def recipe() -> str:
    """The one block of the docs that speaks to the store by curl."""
    blocks = re.findall(r"```sh\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    [block] = [block for block in blocks if "--aws-sigv4" in block]
    return str(block)


@dataclass(frozen=True)
class World:
    """The running services, and what a trainer can do with them."""

    services: Services
    store: S3Store
    settings: Settings
    folder: Path

    def adapter(self, author: str, name: str = "trained") -> Path:
        """An adapter of its own numbers for each name."""
        logical = Logical(seed=crc32(f"{author}/{name}".encode()))
        folder = self.folder / author / name
        return save_adapter(folder, {**encode(logical), **attention()}, lora_B_layout="rank_major")

    def submit(self, author: str, name: str = "trained", run: str = "run-1") -> Upload:
        """As `roster submit` does, but for the event."""
        return submit_adapter(
            self.store,
            self.adapter(author, name),
            author=author,
            base=base_of(author),
            run=run,
            trainer=None,
            reference=None,
            heldout=(),
            progress=lambda done, total: None,
        )

    def announce(self, upload: Upload) -> bool:
        return announce_upload(self.settings, upload)

    @property
    def variables(self) -> dict[str, str]:
        """What a trainer is told of the services."""
        store = self.services.store
        return {
            "ROSTER_STORE_ENDPOINT": store.endpoint,
            "ROSTER_STORE_BUCKET": store.bucket,
            "ROSTER_STORE_REGION": store.region,
            "ROSTER_STORE_ACCESS_KEY": store.access_key,
            "ROSTER_STORE_SECRET_KEY": store.secret_key,
            "ROSTER_PREFECT_API_URL": self.services.prefect.api_url,
        }

    def onboardings(self, author: str) -> list[FlowRun]:
        with get_client(sync_client=True) as client:
            runs = client.read_flow_runs(limit=200)
        return [run for run in runs if run.parameters.get("author") == author]

    def ledgers(self, author: str) -> list[Ledger]:
        found = (read_document(self.store, one.key, Ledger)[0] for one in list_ledgers(self.store))
        return [ledger for ledger in found if ledger.author == author]

    def is_settled(self, author: str, uploads: int = 1) -> bool:
        """Whether so many of the author's uploads have a verdict, and nothing is on its way."""
        judged = [ledger for ledger in self.ledgers(author) if ledger.verdict is not None]
        runs = self.onboardings(author)
        ended = bool(runs) and all(run.state is not None and run.state.is_final() for run in runs)
        return len(judged) >= uploads and ended


@contextmanager
def second_worker(services: Services, home: Path, log: Path) -> Iterator[None]:
    """Another machine's worker: its own home, nothing on its disk."""
    home.mkdir()
    store = services.store
    environment = clean_environment(
        **VARIABLES,
        ROSTER_HOME=str(home),
        ROSTER_STORE_ENDPOINT=store.endpoint,
        ROSTER_STORE_BUCKET=store.bucket,
        ROSTER_STORE_REGION=store.region,
        ROSTER_STORE_ACCESS_KEY=store.access_key,
        ROSTER_STORE_SECRET_KEY=store.secret_key,
        ROSTER_PREFECT_API_URL=services.prefect.api_url,
        PREFECT_API_URL=services.prefect.api_url,
        PREFECT_WORKER_QUERY_SECONDS="1",
        PREFECT_HOME=str(home / "prefect"),
    )
    command = (sys.executable, "-m", "flows.forking", "--pool", POOL, "--name", "second", "--limit", "2")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env=environment, cwd=home, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        wait_for(lambda: "second" in workers_online() or process.poll() is not None, within_s=90)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def workers_online() -> set[str]:
    with get_client(sync_client=True) as client:
        answer = client._client.post(f"/work_pools/{POOL}/workers/filter", json={})
    return {worker["name"] for worker in answer.json() if worker["status"] == "ONLINE"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Everything has been sent, in every way, and every upload has had its runs."""
    folder = tmp_path_factory.mktemp("triggers")
    home = folder / "home"
    home.mkdir()
    config = EmbeddedConfig(home=home, engine_python=Path(sys.executable), worker_limit=2)
    with ExitStack() as stack:
        engines = {
            author: stack.enter_context(ScriptedServer((base_of(author),), BASE_BPB, score, {}))
            for author in AUTHORS
        }
        try:
            services = start_detached(config, environment={**base_environment(), **VARIABLES}, announce=print)
            store = S3Store.open(
                endpoint=services.store.endpoint,
                bucket=services.store.bucket,
                region=services.store.region,
                access_key=services.store.access_key,
                secret_key=services.store.secret_key,
            )
            with temporary_settings({PREFECT_API_URL: services.prefect.api_url}):
                settings = Settings(home=home, prefect_api_url=services.prefect.api_url)
                world = World(services, store, settings, folder / "trainers")
                for author in AUTHORS:
                    prepare(world, author, engines[author].url)
                with second_worker(services, folder / "second", folder / "second.log"):
                    play(world)
                yield world
        finally:
            stop_embedded(home, timeout_s=90)


def prepare(world: World, author: str, engine_url: str) -> None:
    add_tiny_base(world.store, base_of(author), url=engine_url)
    lines = (
        json.dumps({"id": f"u{n}", "text": f"{author} wrote text {n}. " + chr(97 + n % 26) * 330})
        for n in range(24)
    )
    file = world.folder / f"{author}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines) + "\n", "utf-8")
    register_heldout(world.store, author, "main", file)


def play(world: World) -> None:
    """Everything that trainers do, in the order in which it tells most."""
    begun = time.monotonic()
    # Files alone, which have to settle while the rest goes on.
    for path in world.adapter(COPIED).iterdir():
        world.store.put(f"uploads/{COPIED}/run-1/{path.name}", path.read_bytes())
    stated = json.dumps({"base": base_of(COPIED)}).encode()
    world.store.put(f"uploads/{COPIED}/run-1/training.json", stated)

    thrice = world.submit(THRICE)
    assert all([world.announce(thrice) for _ in range(3)])
    twice = world.submit(TWO_IDS)
    assert all([announce_under_new_id(world, twice) for _ in range(2)])
    old = world.submit(LATE, "old", "run-1")
    time.sleep(1)  # submissions of one second have no order
    new = world.submit(LATE, "new", "run-2")
    assert old.marker.submission < new.marker.submission and world.announce(new)
    replaced, newest = world.submit(REPLACED, "old"), world.submit(REPLACED, "new")
    assert world.announce(newest)
    told = {"AUTHOR": CURL, "RUN": "run-1", "BASE": base_of(CURL), "ADAPTER": str(world.adapter(CURL))}
    subprocess.run(("sh", "-c", recipe()), env=clean_environment(**world.variables, **told), check=True)

    wait_for(lambda: world.is_settled(LATE) and world.is_settled(REPLACED), within_s=DEADLINE_S)
    assert world.announce(old) and world.announce(replaced)
    first = (THRICE, TWO_IDS, CURL, REPLACED)
    wait_for(lambda: all(map(world.is_settled, first)), within_s=DEADLINE_S)
    wait_for(lambda: len(world.onboardings(REPLACED)) >= 2, within_s=DEADLINE_S)
    wait_for(lambda: world.is_settled(LATE, 2), within_s=DEADLINE_S)
    print(f"events: {time.monotonic() - begun:.0f} s")

    disable_automation()
    assert world.announce(world.submit(SILENCED))
    kill_prefect(world)
    ran = run_program(
        *("submit", world.adapter(DOWN), "--author", DOWN, "--base", base_of(DOWN), "--run", "run-1"),
        "--json",
        cwd=world.folder,
        **world.variables,
        ROSTER_HOME=str(world.folder / "nowhere"),
    )
    assert (ran.code, ran.document["event_sent"]) == (0, False), ran.err
    assert "the sweep finds the upload" in ran.err
    assert not is_answering(f"{world.services.prefect.api_url}/health"), "it was down all the time"
    wait_for(lambda: is_answering(f"{world.services.prefect.api_url}/health"), within_s=90)
    last = (COPIED, SILENCED, DOWN)
    wait_for(lambda: all(map(world.is_settled, last)), within_s=DEADLINE_S)
    print(f"everything: {time.monotonic() - begun:.0f} s")
    wait_for(lambda: set(served(world)) == set(AUTHORS), within_s=60)


def announce_under_new_id(world: World, upload: Upload) -> bool:
    """Another program's event for the same upload."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows.events, "event_id", lambda *_: uuid4())
        return world.announce(upload)


def disable_automation() -> None:
    with get_client(sync_client=True) as client:
        [automation] = [one for one in client.read_automations() if "adapter.trained" in one.name]
        client.pause_automation(automation.id)


def kill_prefect(world: World) -> None:
    """The server dies; the supervisor will start it again."""
    port = world.services.prefect.api_url.rpartition(":")[2].partition("/")[0]
    for pid in list_marked(MARK_VARIABLE, str(world.settings.home)):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if port.encode() in command:
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_answering(f"{world.services.prefect.api_url}/health"))


def served(world: World) -> dict[str, str]:
    """Each served author with the digest of the adapter that is served."""
    if world.store.head(roster_key()) is None:
        return {}
    roster, _ = read_document(world.store, roster_key(), Roster)
    authors = {author: entry for base in roster.bases.values() for author, entry in base.authors.items()}
    return {
        author: read_manifest(world.store, author, entry.output_digest).adapter_digest
        for author, entry in authors.items()
    }


def states(world: World, author: str) -> list[str]:
    return sorted(run.state_name or "" for run in world.onboardings(author))


def started_by(world: World, author: str) -> list[str]:
    """AUTOMATION for each run that an event started; the sweep's have the flow's own."""
    return [run.created_by.type or "" for run in world.onboardings(author) if run.created_by]


def test_every_upload_has_one_verdict_and_no_step_twice(world: World) -> None:
    """camel-kamelets#1931 (at least once), minio#18272 (out of order), prefect#7237 and #17703 (duplicate runs)."""
    for author in AUTHORS:
        ledgers = world.ledgers(author)
        assert len(ledgers) == (2 if author == LATE else 1), author
        for ledger in ledgers:
            kinds = [step.kind for step in ledger.steps]
            assert len(kinds) == len(set(kinds)), (author, kinds)
            assert ledger.verdict is not None and ledger.verdict.kind is StepKind.VERDICT
            assert (ledger.verdict.outcome.value, ledger.claim) == ("ready", None)


def test_the_same_event_thrice_starts_one_run(world: World) -> None:
    """data-store#1410: three events for one object."""
    assert states(world, THRICE) == ["Ready"] and started_by(world, THRICE) == ["AUTOMATION"]


def test_two_events_of_different_ids_start_two_runs_of_which_one_works(world: World) -> None:
    """prefect#21193: an automation has no idempotency key. The claim decides."""
    assert started_by(world, TWO_IDS) == ["AUTOMATION", "AUTOMATION"]
    assert set(states(world, TWO_IDS)) <= {"Ready", "Elsewhere"} and "Ready" in states(world, TWO_IDS)


def test_each_run_began_on_one_of_two_workers(world: World) -> None:
    """prefect#8880, #18894: they ask for the same runs at the same moment, and the server gives each to one."""
    logs = world.services.logs["worker"].parent.glob("worker.log*")
    embedded = "".join(log.read_text("utf-8") for log in logs)
    second = (world.folder.parent / "second.log").read_text("utf-8")
    for author in AUTHORS:
        for run in world.onboardings(author):
            page = f"/runs/flow-run/{run.id}"
            assert embedded.count(page) + second.count(page) == 1, (author, run.id)
    assert "/runs/flow-run/" in embedded and "/runs/flow-run/" in second


def test_an_event_after_a_newer_submission_rolls_nothing_back(world: World) -> None:
    """minio#18272: events come out of order. Two runs of one author, and one run that was submitted again."""
    now = served(world)
    for author, run in ((LATE, "run-2"), (REPLACED, "run-1")):
        newest = read_upload(world.store, author, run)
        assert now[author] == newest.adapter_digest
    old = read_upload(world.store, LATE, "run-1")
    assert old.adapter_digest != now[LATE] and {ledger.adapter_digest for ledger in world.ledgers(LATE)} == {
        old.adapter_digest,
        now[LATE],
    }
    assert len(started_by(world, REPLACED)) == 2, "the old event did start a run"


def test_the_recipe_of_the_docs_works_as_it_stands(world: World) -> None:
    """Also on any shell; the event it sends starts the run, not the sweep."""
    assert states(world, CURL) == ["Ready"] and started_by(world, CURL) == ["AUTOMATION"]
    upload = read_upload(world.store, CURL, "run-1")
    assert upload.marker.base == base_of(CURL) and len(upload.files) == 2
    assert not [one.key for one in world.store.list_objects(f"uploads/{CURL}/") if "_SUBMITTING" in one.key]


@pytest.mark.parametrize("author", [COPIED, SILENCED, DOWN])
def test_the_sweep_takes_what_no_event_started(world: World, author: str) -> None:
    """minio#8403, #18404: events that are lost. prefect#17126, #19332: automations that do not fire."""
    assert "Ready" in states(world, author)
    assert "AUTOMATION" not in started_by(world, author)


def test_what_was_copied_has_a_marker_now(world: World) -> None:
    upload = read_upload(world.store, COPIED, "run-1")
    assert upload.marker.adopted and upload.marker.base == base_of(COPIED)
