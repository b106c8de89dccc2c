"""docker-compose.yml with its profile cpu, as it stands there: vLLM serves a tiny base, and is killed while it scores.

Everything is real: Postgres, Redis, the store, Prefect, two workers, vLLM, trained adapters (bench/chaos_cpu.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from cli_builders import Ran, run_program
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from topology_builders import Topology, start_topology
from topology_instances import missing_programs

from bench.chaos_cpu import SERVICE, CpuAdapter, CpuBase, engine_url, prepare, put, register
from flows.events import announce_upload
from flows.settings import Settings
from roster.serving_engine import EngineInfo
from storage.claims import read_ledger
from storage.documents import read_document
from storage.errors import ObjectNotFound
from storage.keys import engine_key
from storage.ledger import Ledger, Outcome, StepKind
from storage.qualifications import Qualification, read_qualification
from storage.s3 import S3Store
from storage.uploads import Upload
from tasks.bpb.engine import Engine

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        bool(missing_programs()),
        reason=f"not installed here: {', '.join(missing_programs())} (apt-get install postgresql redis-server)",
    ),
]

OURS = ("ROSTER_", "PREFECT_")  # how the settings of the command line begin
WITHIN_S = 400
VARIABLES = {
    "ROSTER_CLAIM_SECONDS": "10",
    "ROSTER_SWEEP_GRACE_SECONDS": "0",
    "ROSTER_MAX_OPPONENTS": "1",
    "ROSTER_MAX_DROP": "1",
    "ROSTER_SYNC_WINDOW_SECONDS": "1",
}


@dataclass
class Scene:
    """The services, and what was seen: filled by `play`, looked at by the tests."""

    topology: Topology
    store: S3Store
    cpu: CpuBase
    uploads: dict[str, Upload] = field(default_factory=dict)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    loaded: tuple[str, ...] = ()  # when it was killed
    pids: list[int] = field(default_factory=list)
    infos: list[EngineInfo] = field(default_factory=list)
    qualified: Qualification | None = None
    retried: Ran | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    left: tuple[list[int], list[int]] | None = None

    def submit(self, adapter: CpuAdapter) -> None:
        self.uploads[adapter.author] = upload = put(self.store, self.cpu, adapter)
        assert announce_upload(Settings(prefect_api_url=self.topology.api_url), upload)

    def read(self, author: str) -> Ledger | None:
        try:
            return read_ledger(self.store, author, self.uploads[author].adapter_digest)[0]
        except ObjectNotFound:
            return None

    def note_engine(self) -> None:
        self.infos.append(read_document(self.store, engine_key(self.cpu.base), EngineInfo)[0])
        self.pids += self.topology.pids(SERVICE)

    def wait_until_one_is_loaded(self) -> None:
        deadline = time.monotonic() + WITHIN_S
        with Engine(engine_url(self.topology), timeout_s=10) as engine:
            while not engine.list_adapters():
                assert time.monotonic() < deadline, self.topology.log("worker")[-3000:]
                time.sleep(0.05)
            self.loaded = engine.served_models()

    def wait_for_verdicts(self) -> None:
        deadline = time.monotonic() + WITHIN_S
        while True:
            found = {author: self.read(author) for author in self.uploads}
            self.ledgers = {author: one for author, one in found.items() if one and one.verdict}
            if self.ledgers.keys() == found.keys():
                return
            assert time.monotonic() < deadline, (
                found.keys() - self.ledgers.keys(),
                self.topology.log("worker")[-6000:],
                self.topology.log(SERVICE)[-3000:],
            )
            time.sleep(0.5)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    cpu, begun = prepare(say=print), time.monotonic()
    folder = tmp_path_factory.mktemp("topology")
    with pytest.MonkeyPatch.context() as patch:
        with start_topology(folder, engine=cpu.model, variables=VARIABLES) as topology:
            patch.setenv("PREFECT_API_AUTH_STRING", topology.auth)
            settings = {PREFECT_API_URL: topology.api_url, PREFECT_API_AUTH_STRING: topology.auth}
            with temporary_settings(settings):
                scene = Scene(topology, topology.store.open("roster"), cpu)
                scene.seconds["up"] = time.monotonic() - begun
                play(scene)
        scene.left = topology.leftovers()
    print(scene.seconds)
    yield scene


def play(scene: Scene) -> None:
    """All that is done with the running services."""
    register(scene.store, scene.cpu, engine_url(scene.topology))
    scene.note_engine()
    scene.qualified = read_qualification(scene.store, scene.cpu.base, scene.infos[0].engine_id)
    begun = time.monotonic()
    for adapter in scene.cpu.adapters:
        scene.submit(adapter)
    scene.wait_until_one_is_loaded()
    scene.topology.kill(SERVICE)
    killed = time.monotonic()
    time.sleep(5)
    scene.topology.restart(SERVICE)
    scene.seconds["engine back"] = time.monotonic() - killed
    scene.note_engine()
    # Sweeps would take them up again by themselves: in a minute, but the one in whose turn it died in eleven.
    told = {name: text for name, text in scene.topology.environment.items() if name.startswith(OURS)}
    scene.retried = run_program("retry", "--failed", cwd=scene.topology.folder, **told)
    scene.wait_for_verdicts()
    scene.seconds["verdicts"] = time.monotonic() - begun


def test_the_engine_is_measured_before_anything_is_scored(scene: Scene) -> None:
    assert scene.qualified is not None and scene.qualified.passed
    assert scene.infos[0].cpu_moe_plugin and scene.infos[0].served_model == (scene.cpu.base,)


def test_every_adapter_ends_as_it_must(scene: Scene) -> None:
    ended = {}
    for author, ledger in scene.ledgers.items():
        assert ledger.verdict is not None
        print(author, ledger.verdict.outcome, ledger.verdict.result.get("codes"))
        ended[author] = (ledger.verdict.outcome.value, ledger.verdict.result.get("code"))
    assert ended == {one.author: (one.outcome, one.code) for one in scene.cpu.adapters}
    assert sum(outcome == "ready" for outcome, _ in ended.values()) >= 3


def test_the_engine_was_killed_at_work_and_is_the_same_when_it_is_back(scene: Scene) -> None:
    assert len(scene.loaded) > 1
    assert len(set(scene.pids)) == 2
    first, second = scene.infos
    assert first.engine_id == second.engine_id
    stopped = [
        step.result.get("code")
        for ledger in scene.ledgers.values()
        for step in ledger.steps
        if step.outcome is Outcome.STOPPED
    ]
    assert stopped and set(stopped) == {"engine_unavailable"}
    assert scene.retried is not None and scene.retried.code == 0, scene.retried


def test_an_adapter_has_one_verdict(scene: Scene) -> None:
    for author, ledger in scene.ledgers.items():
        verdicts = [step for step in ledger.steps if step.kind is StepKind.VERDICT]
        assert len({step.outcome for step in verdicts}) == 1, author


def test_nothing_is_left_running_or_listening(scene: Scene) -> None:
    assert scene.left == ([], [])
