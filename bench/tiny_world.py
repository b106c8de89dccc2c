"""A whole small pipeline for the benches: real store, Prefect and worker, a tiny base, and uploads for it."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.prefect_runs import connected
from flows.connect import open_store
from flows.embedded import start_detached, stop_embedded
from flows.embedded_config import EmbeddedConfig
from flows.services import Services
from flows.settings import Settings, base_environment, load_settings, use_home
from storage.heldout import register_heldout
from storage.s3 import S3Store
from storage.uploads import Upload
from tasks.submission import submit_adapter

BASE = "tiny"
_UNITS = 24
_ROOT = Path(__file__).resolve().parent.parent
_TESTS = _ROOT / "tests"


@dataclass(frozen=True, slots=True)
class World:
    """The services of one home, and what is needed to send adapters to them."""

    home: Path
    services: Services
    settings: Settings
    store: S3Store

    def submit(self, author: str) -> Upload:
        """Put an author's text and adapter, whose numbers the name decides, into the store; no event is sent."""
        builders = kept_with_tests("lora_builders")
        folder = self.home / "trained" / author
        logical = builders.Logical(seed=sum(author.encode()) * 7919 + int(author.rpartition("-")[2]))
        tensors = builders.encode(logical) | builders.attention()
        builders.save_adapter(folder, tensors, lora_B_layout="rank_major")
        file = self.home / "trained" / f"{author}.jsonl"
        file.write_text("".join(_unit(author, number) for number in range(_UNITS)), "utf-8")
        register_heldout(self.store, author, "main", file)
        return submit_adapter(
            self.store,
            folder,
            author=author,
            base=BASE,
            run="run-1",
            trainer=None,
            reference=None,
            heldout=(),
            progress=lambda done, total: None,
        )


@contextmanager
def living(
    *, warm: bool, say: Callable[[str], None], variables: Mapping[str, str], workers: int = 2
) -> Iterator[World]:
    """Start everything in a folder of its own, and end it; `warm` says which kind of worker."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        home = Path(folder) / "home"
        home.mkdir()
        use_home(home)
        config = EmbeddedConfig(
            home=home, engine_python=Path(sys.executable), worker_limit=workers, warm_worker=warm
        )
        try:
            # The distribution does not hold the benches, and one of them has a flow of its own.
            environment = {**base_environment(), "PYTHONPATH": str(_ROOT), **variables}
            services = start_detached(config, environment=environment, announce=lambda line: None)
            settings = load_settings()
            world = World(home, services, settings, open_store(settings))
            say("store, Prefect and worker are ready")
            with connected(services.prefect.api_url):
                yield world
        finally:
            stop_embedded(home, timeout_s=120)


@contextmanager
def scripted_engine(store: S3Store) -> Iterator[None]:
    """Register the tiny base with an engine that answers from a script: whoever's text it is has the best adapter."""
    builders = kept_with_tests("pipeline_builders")

    def score(name: str, author: str) -> float:
        if name.startswith(f"{author}@"):
            return float(builders.OWN_BPB)
        return float(builders.CONTROL_BPB if name.startswith(f"{author}~control@") else builders.OTHER_BPB)

    with kept_with_tests("scripted_server").ScriptedServer((BASE,), builders.BASE_BPB, score, {}) as engine:
        builders.add_tiny_base(store, BASE, url=engine.url)
        yield


def kept_with_tests(module: str) -> Any:
    """A module of the tests' own: builders, and the scripted engine."""
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))
    return importlib.import_module(module)


def _unit(author: str, number: int) -> str:
    text = f"{author} wrote text {number}. " + chr(97 + number % 26) * 330
    return f'{{"id": "u{number}", "text": "{text}"}}\n'
