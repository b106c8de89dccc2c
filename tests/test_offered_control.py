"""The control is in no store, unless an engine that does not see this disk is about to be asked for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from faulty_server import score_by_author
from pipeline_builders import BASE, BASE_BPB, Desk
from scripted_server import Answer, ScriptedServer
from store_builders import with_faults

import flows.onboard
import tasks.scoring
from storage.ledger import StepKind
from storage.s3 import S3Store
from tasks.bpb.engine import Engine


class FarServer(ScriptedServer):
    """An engine of another machine with the resolver plugin: what it is asked for by name it has from the store."""

    def __init__(self, store: S3Store) -> None:
        super().__init__((BASE,), BASE_BPB, score_by_author, {})
        self._store = store
        self.fetched: dict[str, dict[str, str]] = {}

    def _load(self, name: str, path: str) -> Answer:
        return 404, {"error": {"message": f"{path}: no such directory"}}

    def _complete(self, model: str, prompts: Any) -> Answer:
        if "@" in model and model not in self.loaded:
            author, _, digest = model.partition("@")
            root = "control" if author.endswith("~control") else "serving"
            found = self._store.list_objects(f"{root}/{author.removesuffix('~control')}/{digest}")
            files = {one.key: sha256(self._store.get(one.key).body).hexdigest() for one in found}
            if files:
                self.loaded[model] = model
                self.fetched[model] = files
        if isinstance(prompts, str):  # whether it has the name
            return (200, {}) if model in self.loaded else (404, {"error": {"message": "unknown"}})
        return super()._complete(model, prompts)

    @contextmanager
    def leased(self, job: object, offer: Callable[[str], None]) -> Iterator[Engine]:
        """What `leased_engine` gives, without Prefect's lease."""
        with Engine(self.url, timeout_s=30, offer=offer) as engine:
            yield engine


@pytest.fixture
def far(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[FarServer]:
    with FarServer(desk.store) as server:
        monkeypatch.setattr(tasks.scoring, "leased_engine", server.leased)
        yield server


def test_an_engine_that_sees_this_disk_needs_nothing_of_it_in_the_store(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def put(**given: Any) -> Any:
        written.append(given["Key"])
        return real(**given)

    real = desk.store._client.put_object
    monkeypatch.setattr(flows.onboard, "open_store", lambda settings: with_faults(desk.store, put_object=put))
    assert desk.ready("ash").name == "Ready"
    assert ("load", True) in {(call, "~control@" in name) for call, name in desk.engine.calls}
    assert any(key.startswith("serving/") for key in written)
    assert not [key for key in written if key.startswith("control/")]


def test_an_engine_elsewhere_fetches_it_and_it_goes_after_the_verdict(desk: Desk, far: FarServer) -> None:
    assert desk.ready("ash").name == "Ready"
    (converted,) = (step for step in desk.ledger("ash").steps if step.kind is StepKind.CONVERTED)
    control: Any = converted.result["control"]
    [own_name, control_name] = far.fetched
    assert own_name.startswith("ash@")
    assert control_name == f"ash~control@{control['output_digest'][:16]}"
    prefix = f"control/ash/{control['output_digest']}/"
    assert far.fetched[control_name] == {prefix + one["name"]: one["sha256"] for one in control["files"]}
    assert desk.keys("control/") == []


def test_a_store_that_takes_no_control_stops_the_run_and_the_next_one_scores_it(
    desk: Desk, far: FarServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(**given: Any) -> Any:
        if given["Key"].startswith("control/"):
            raise EndpointConnectionError(endpoint_url="http://nowhere")
        return real(**given)

    real = desk.store._client.put_object
    with monkeypatch.context() as patch:
        patch.setattr(flows.onboard, "open_store", lambda settings: with_faults(desk.store, put_object=put))
        assert desk.ready("ash").name == "Stopped: store_unavailable"
    assert desk.ledger("ash").verdict is None and desk.keys("control/") == []
    assert desk.run("ash").name == "Ready"
    assert desk.keys("control/") == [] and [name for name in far.fetched if "~control@" in name]


def test_what_another_machine_had_converted_is_converted_here_once_more(
    desk: Desk, far: FarServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before scoring, taken up by a worker with a disk of its own: the same bytes come of it."""
    with monkeypatch.context() as patch:
        patch.setattr(FarServer, "_complete", lambda *_: (503, {"error": {"message": "starting"}}))
        assert desk.ready("ash").name == "Stopped: engine_unavailable"
    other = desk.settings.model_copy(update={"home": desk.folder / "other"})
    monkeypatch.setattr(flows.onboard, "load_settings", lambda: other)
    assert desk.run("ash").name == "Ready"
    steps = [step.kind for step in desk.ledger("ash").steps]
    assert steps.count(StepKind.CONVERTED) == steps.count(StepKind.STAGED) == 1
