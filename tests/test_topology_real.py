"""The services of docker-compose.yml run together as they stand there, two workers among them; each bears a restart.

Real are Postgres, Redis, the object store, both halves of the Prefect server, its triggers and the workers; the engine
is a scripted server. Everything happens while the services run; what is asserted is what was seen of it.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import pytest
import redis
from cli_builders import Ran, run_program
from compose_builders import COMPOSE
from lora_builders import Logical, attention, encode, save_adapter
from pipeline_builders import BASE, BASE_BPB, CONTROL_BPB, OTHER_BPB, OWN_BPB, add_tiny_base
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from scripted_server import ScriptedServer
from topology_builders import Topology, TopologyFailed, start_topology
from topology_instances import MARK, missing_programs

from flows.events import announce_upload
from flows.processes import list_marked
from flows.settings import Settings
from roster.serving import Roster
from storage.claims import list_ledgers
from storage.documents import read_document
from storage.heldout import register_heldout
from storage.keys import roster_key
from storage.ledger import Ledger, Outcome, Step, StepKind
from storage.s3 import S3Store
from tasks.submission import submit_adapter

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        bool(missing_programs()),
        reason=f"not installed here: {', '.join(missing_programs())} (apt-get install postgresql redis-server)",
    ),
]

BY_PROGRAM = "by-program"
TOGETHER = (BY_PROGRAM, "ash", "birch", "cedar", "dill", "elm")
SCORE_S = 0.3  # how long the engine takes for each adapter on each text
WITHIN_S = 120
VARIABLES = {"ROSTER_MAX_OPPONENTS": "1", "ROSTER_SYNC_WINDOW_SECONDS": "1", "ROSTER_MAX_DROP": "1"}


class Scores:
    """What the scripted engine says, slowly; and whose text it was asked about, one after another."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._known: set[tuple[str, str]] = set()

    def __call__(self, name: str, author: str) -> float:
        if not self.texts or self.texts[-1] != author:
            self.texts.append(author)
        if (name, author) not in self._known:
            self._known.add((name, author))
            time.sleep(SCORE_S)
        if "~control@" in name:
            return CONTROL_BPB
        return OWN_BPB if name.startswith(f"{author}@") else OTHER_BPB


@dataclass
class Scene:
    """The services, and what was seen: filled by `play`, looked at by the tests."""

    topology: Topology
    store: S3Store
    scores: Scores
    submitted: Ran | None = None
    refused: dict[str, int] = field(default_factory=dict)
    held: list[list[UUID]] = field(default_factory=list)  # whose leases Redis had, at each look
    limit: UUID | None = None
    texts: list[str] = field(default_factory=list)
    runs: dict[str, list[UUID]] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    rosters: list[Roster] = field(default_factory=list)
    restarted: dict[str, str] = field(
        default_factory=dict
    )  # author → the service that was started anew before
    pids: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    left: tuple[list[int], list[int]] | None = None

    def adapter(self, author: str) -> Path:
        """Its held-out text is registered too."""
        folder = self.topology.folder / "trained" / author
        folder.parent.mkdir(exist_ok=True)
        text = folder.with_suffix(".jsonl")
        lines = (
            json.dumps({"id": f"u{n}", "text": f"{author} wrote text {n}. " + chr(97 + n % 26) * 330})
            for n in range(24)
        )
        text.write_text("\n".join(lines) + "\n", "utf-8")
        register_heldout(self.store, author, "main", text)
        logical = Logical(seed=sum(author.encode()))
        return save_adapter(folder, {**encode(logical), **attention()}, lora_B_layout="rank_major")

    def submit(self, author: str) -> None:
        """As `roster submit` does."""
        upload = submit_adapter(
            self.store,
            self.adapter(author),
            author=author,
            base=BASE,
            run="run-1",
            trainer=None,
            reference=None,
            heldout=(),
            progress=lambda done, total: None,
        )
        assert announce_upload(Settings(prefect_api_url=self.topology.api_url), upload)

    def read_ledgers(self) -> dict[str, Ledger]:
        found = (read_document(self.store, one.key, Ledger)[0] for one in list_ledgers(self.store))
        return {ledger.author: ledger for ledger in found}

    def wait_for_verdicts(self, *authors: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while True:
            known = self.read_ledgers()
            if all(author in known and known[author].verdict is not None for author in authors):
                return
            assert time.monotonic() < deadline, (authors, known, self.topology.log("worker")[-3000:])
            time.sleep(0.3)

    def read_roster(self) -> Roster:
        return read_document(self.store, roster_key(), Roster)[0]

    def wait_for_roster(self, *authors: str) -> Roster:
        deadline = time.monotonic() + WITHIN_S
        while True:
            if self.store.head(roster_key()) is not None:
                roster = self.read_roster()
                if BASE in roster.bases and set(authors) <= set(roster.bases[BASE].authors):
                    return roster
            assert time.monotonic() < deadline, self.topology.log("worker")[-3000:]
            time.sleep(0.3)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scores, begun = Scores(), time.monotonic()
    with (
        pytest.MonkeyPatch.context() as patch,
        ScriptedServer((BASE,), BASE_BPB, scores, {}) as engine,
    ):
        with start_topology(tmp_path_factory.mktemp("topology"), variables=VARIABLES) as topology:
            patch.setenv("PREFECT_API_AUTH_STRING", topology.auth)
            settings = {PREFECT_API_URL: topology.api_url, PREFECT_API_AUTH_STRING: topology.auth}
            with temporary_settings(settings):
                scene = Scene(topology, topology.store.open("roster"), scores)
                scene.seconds["up"] = time.monotonic() - begun
                add_tiny_base(scene.store, url=engine.url)
                play(scene)
        scene.left = topology.leftovers()
    print(scene.seconds)
    yield scene


def play(scene: Scene) -> None:
    """All that is done with the running services."""
    begun, topology = time.monotonic(), scene.topology
    for name, auth in (("none", None), ("wrong", "admin:guess"), ("right", topology.auth)):
        scene.refused[name] = ask(f"{topology.api_url}/work_pools/filter", auth)
    watching = threading.Event()
    watcher = threading.Thread(target=watch_leases, args=(scene, watching))
    watcher.start()
    try:
        for author in TOGETHER[1:]:
            scene.submit(author)
        scene.submitted = run_program(
            *("submit", scene.adapter(BY_PROGRAM), "--author", BY_PROGRAM, "--base", BASE, "--run", "run-1"),
            "--json",
            cwd=topology.folder,
            **{
                name: text
                for name, text in topology.environment.items()
                if name.startswith(("ROSTER_", "PREFECT_"))
            },
        )
        scene.wait_for_verdicts(*TOGETHER)
        scene.rosters.append(scene.wait_for_roster(*TOGETHER))
    finally:
        watching.set()
        watcher.join()
    scene.ledgers = scene.read_ledgers()
    scene.texts = list(scene.scores.texts)
    scene.seconds["together"] = time.monotonic() - begun
    with get_client(sync_client=True) as client:
        scene.limit = client.read_global_concurrency_limit_by_name(f"engine-{BASE}").id
        for run in client.read_flow_runs(limit=200):
            scene.runs.setdefault(str(run.parameters.get("author")), []).append(run.id)
    for service in topology.long_running:
        for index in range(len(topology.instances[service])):
            restart(scene, service, index)
    scene.logs = [topology.log("worker", index) for index in range(len(topology.homes))]


def restart(scene: Scene, service: str, index: int) -> None:
    """Start it anew, and have an adapter go through everything."""
    begun, author = time.monotonic(), f"after-{service}-{index}"
    before = scene.topology.pids(service)
    scene.topology.restart(service, index)
    scene.pids[author] = (before, scene.topology.pids(service))
    between = time.monotonic()
    scene.submit(author)
    scene.wait_for_verdicts(author)
    scene.rosters.append(scene.wait_for_roster(author))
    scene.restarted[author] = service
    scene.seconds[service] = between - begun
    scene.seconds[author] = time.monotonic() - between


def ask(url: str, auth: str | None) -> int:
    """The status of an answer to a client with this auth string."""
    headers = {"Content-Type": "application/json"}
    if auth is not None:
        headers["Authorization"] = f"Basic {b64encode(auth.encode()).decode()}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, b"{}", headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def watch_leases(scene: Scene, end: threading.Event) -> None:
    """Look into Redis, where the leases of engines lie, until told to end."""
    client = redis.from_url(scene.topology.redis_url)
    while not end.wait(0.05):
        leases = [client.get(key) for key in client.scan_iter("prefect:concurrency:lease:*", count=1000)]
        scene.held.append(
            [UUID(one) for lease in leases if lease for one in json.loads(lease)["resource_ids"]]
        )
    client.close()


def scored(ledger: Ledger) -> Step:
    [step] = [step for step in ledger.steps if step.kind is StepKind.SCORED]
    return step


def worker_of(scene: Scene, author: str) -> int:
    """The number of the worker that started the run of an author's adapter."""
    steps = scene.ledgers[author].steps
    [run] = {step.flow_run for step in steps}
    [number] = [number for number, log in enumerate(scene.logs) if f"/runs/flow-run/{run}" in log]
    return number


def test_a_client_without_the_auth_string_is_refused(scene: Scene) -> None:
    assert scene.refused == {"none": 401, "wrong": 401, "right": 200}


def test_what_the_program_submits_becomes_ready_and_is_published(scene: Scene) -> None:
    assert scene.submitted is not None and scene.submitted.code == 0, scene.submitted
    assert scene.submitted.document["event_sent"] is True
    assert {ledger.verdict.outcome for ledger in scene.ledgers.values() if ledger.verdict} == {Outcome.READY}
    assert set(scene.ledgers) == set(TOGETHER)
    assert set(scene.rosters[0].bases[BASE].authors) == set(TOGETHER)


def test_both_workers_have_a_home_of_their_own_and_get_work(scene: Scene) -> None:
    assert len(set(scene.topology.homes)) == 2
    assert {worker_of(scene, author) for author in TOGETHER} == {0, 1}


def test_an_engines_lease_lies_in_redis_and_only_one_holds_it(scene: Scene) -> None:
    """prefect#17415: leases in a server's memory are lost with it, and their slots stay taken."""
    looks = Counter(
        sum(one == scene.limit for one in limits) for limits in scene.held
    )  # others are those of deployments
    assert set(looks) == {0, 1} and looks[1] > 5


def test_two_workers_never_score_at_once_on_one_engine(scene: Scene) -> None:
    assert sorted(scene.texts) == sorted(TOGETHER), "each author's text in one piece"
    steps = {author: scored(scene.ledgers[author]) for author in TOGETHER}
    overlapping = [
        (one, other)
        for one in TOGETHER
        for other in TOGETHER
        if worker_of(scene, one) < worker_of(scene, other)
        and steps[one].started_at < steps[other].finished_at
        and steps[other].started_at < steps[one].finished_at
    ]
    assert overlapping, "both wanted to at the same time: else nothing was shown"


def test_every_service_bears_a_restart(scene: Scene) -> None:
    topology = scene.topology
    assert set(scene.restarted.values()) == set(topology.long_running)
    assert set(topology.long_running) == {"postgres", "redis", "store", "prefect", "services", "worker"}
    for before, after in scene.pids.values():
        assert len(before) == len(after) and len(set(before) - set(after)) == 1, "one other process"
    served = set(scene.rosters[-1].bases[BASE].authors)
    assert served == {*TOGETHER, *scene.restarted}
    versions = [roster.version for roster in scene.rosters]
    assert versions == sorted(versions)


def test_nothing_is_left_running_or_listening(scene: Scene) -> None:
    assert scene.left == ([], [])


def test_nothing_is_left_when_a_service_does_not_come_up(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    upgrade = '"prefect", "server", "database", "upgrade", "-y"'
    text = COMPOSE.read_text("utf-8")
    assert text.count(upgrade) == 1
    broken.write_text(text.replace(upgrade, '"python", "-c", "raise SystemExit(\'no such luck\')"'), "utf-8")
    with (
        pytest.raises(TopologyFailed, match=r"migrate ended with 1:\nno such luck"),
        start_topology(tmp_path, file=broken),
    ):
        pytest.fail("it came up")
    assert list_marked(MARK, str(tmp_path)) == []
    assert not (tmp_path / "prefect-0.log").exists(), "what waits for it was not started"
