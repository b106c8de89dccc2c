"""A pipeline on one desk: a store in memory, a scripted engine, the real flow, with or without Prefect around it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from lora_builders import Logical, attention, base_fields, encode, save_adapter
from prefect import Task
from prefect.client.schemas.objects import State
from scripted_scorer import ScriptedScorer

import flows.notify
import flows.onboard
import storage.submit
import tasks.page
import tasks.scoring
from flows.onboard import onboard
from flows.settings import Settings
from roster.serving_engine import EngineInfo
from storage.bases import BaseDocument, BaseEngine, TargetFormat, register_base
from storage.claims import read_ledger
from storage.documents import format_time, put_document
from storage.heldout import register_heldout
from storage.keys import engine_key
from storage.ledger import Ledger
from storage.qualifications import Qualification, write_qualification
from storage.s3 import S3Store
from storage.uploads import Upload
from tasks.cataloguing import Synced, SyncLimits, sync_catalog
from tasks.submission import submit_adapter

BASE = "tiny"
EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
BASE_BPB, OWN_BPB, OTHER_BPB, CONTROL_BPB = 2.4, 2.1, 2.5, 2.39


@dataclass
class Desk:
    """What a test needs to send adapters through the pipeline."""

    store: S3Store
    folder: Path
    settings: Settings
    engine: ScriptedScorer
    flow: Callable[..., object]
    submitted: dict[str, Upload] = field(default_factory=dict)

    def adapter(
        self, author: str, *, seed: int | None = None, packing: str = "rank_major", **config: Any
    ) -> Path:
        """A directory as a trainer leaves it; the seed decides the numbers.

        With a marker, true unless told otherwise: the numbers are random, and tell no packing by themselves.
        """
        logical = Logical(seed=crc32(author.encode()) if seed is None else seed)
        tensors = {**encode(logical, packing=packing), **attention()}
        stated = {"lora_B_layout": packing} | config
        return save_adapter(self.folder / "trained" / author, tensors, **stated)

    def submit(
        self, author: str, directory: Path, *, run: str = "run-1", base: str = BASE, **more: Any
    ) -> Upload:
        options: dict[str, Any] = {"trainer": None, "reference": None, "heldout": ()} | more
        upload = submit_adapter(
            self.store,
            directory,
            author=author,
            base=base,
            run=run,
            progress=lambda done, total: None,
            **options,
        )
        self.submitted[author] = upload
        return upload

    def heldout(self, author: str, *, units: int = 24, length: int = 330) -> None:
        lines = (
            json.dumps(
                {"id": f"u{n}", "text": f"{author} wrote text number {n}. " + chr(97 + n % 26) * length}
            )
            for n in range(units)
        )
        file = self.folder / f"{author}.jsonl"
        file.write_text("\n".join(lines) + "\n")
        register_heldout(self.store, author, "main", file)

    def run(self, author: str, run: str = "run-1", **options: Any) -> State[Any]:
        state = self.flow(author, run, **options)
        assert isinstance(state, State)
        return state

    def ready(self, author: str, **more: Any) -> State[Any]:
        """Everything from a trained adapter to its verdict."""
        self.heldout(author)
        self.submit(author, self.adapter(author, **more))
        return self.run(author)

    def ledger(self, author: str) -> Ledger:
        return read_ledger(self.store, author, self.submitted[author].adapter_digest)[0]

    def sync(self) -> Synced:
        return sync_catalog(self.store, self.settings.catalog_path, SyncLimits(max_opponents=4, max_drop=0.2))

    def keys(self, prefix: str) -> list[str]:
        return [found.key for found in self.store.list_objects(prefix)]


def score_by_name(owner: Callable[[], str]) -> Callable[[str, str], float]:
    """Own adapters score best, controls about like the base, others worse."""

    def bits(name: str, path: str) -> float:
        if "~control@" in name:
            return CONTROL_BPB
        return OWN_BPB if name.startswith(f"{owner()}@") else OTHER_BPB

    return bits


def make_desk(store: S3Store, folder: Path, patch: pytest.MonkeyPatch, *, prefect: bool) -> Desk:
    """A desk whose flow runs use this store and this engine.

    Without `prefect` the flow and its tasks are called as the functions that they are: a third of the time.
    """
    settings = Settings(home=folder / "home", store_endpoint="http://127.0.0.1:9", score_stride=200)
    playing = [""]
    engine = ScriptedScorer(
        {BASE: BASE_BPB}, adapters=score_by_name(lambda: playing[0]), max_len=512, bos=True, flavour=0.01
    )
    desk = Desk(
        store, folder, settings, engine, partial(onboard, return_state=True) if prefect else onboard.fn
    )

    @contextmanager
    def leased(job: Any, offer: object) -> Iterator[ScriptedScorer]:
        playing[0] = job.author
        yield desk.engine

    submissions = count()

    def next_submission(now: datetime) -> str:
        """Those of one second in their order, which is otherwise left to chance."""
        return f"{format_time(now)}-{next(submissions):08x}"

    patch.setattr(storage.submit, "new_submission", next_submission)
    patch.setattr(tasks.scoring, "leased_engine", leased)
    patch.setattr(flows.onboard, "open_store", lambda settings: store)
    patch.setattr(flows.onboard, "load_settings", lambda: settings)
    if not prefect:
        _take_prefect_away(patch)
    add_tiny_base(store)
    return desk


def _take_prefect_away(patch: pytest.MonkeyPatch) -> None:
    for name, value in vars(flows.onboard).copy().items():
        if isinstance(value, Task):
            patch.setattr(flows.onboard, name, value.fn)
    patch.setattr(flows.onboard, "get_run_logger", lambda: logging.getLogger("onboard"))
    patch.setattr(flows.onboard, "request_sync", lambda *_: None)
    patch.setattr(tasks.page, "create_markdown_artifact", lambda *_, **__: None)
    patch.setattr(flows.notify, "emit_event", lambda *_, **__: None)


def add_tiny_base(
    store: S3Store, name: str = BASE, *, url: str = "http://127.0.0.1:9", **changes: Any
) -> None:
    document = BaseDocument(
        base=name,
        served_model=name,
        weights_digest=None,
        engine=BaseEngine(url=url),
        target_format=TargetFormat.PER_EXPERT,
    )
    register_base(store, json.dumps(base_fields(**changes)).encode(), document)
    publish_engine(store, engine_of(name, **changes), name)


def publish_engine(store: S3Store, info: EngineInfo, base: str = BASE) -> None:
    """An engine as a running one publishes itself, and the qualification that it passed."""
    put_document(store, engine_key(base), info)
    qualify_on_paper(store, info, base)


def qualify_on_paper(store: S3Store, info: EngineInfo, base: str = BASE, **changes: Any) -> None:
    """The qualification of an engine without having measured anything."""
    example = json.loads((EXAMPLES / "qualification.json").read_bytes())
    told = {"base": base, "engine_id": info.engine_id, "vllm_version": info.vllm_version}
    write_qualification(store, Qualification.model_validate(example | told | changes))


def engine_of(name: str = BASE, **changes: Any) -> EngineInfo:
    """What an engine says that serves a base of `base_fields`, as the example in the docs for its own sizes."""
    info = EngineInfo.model_validate_json((EXAMPLES / "engine.json").read_bytes())
    sizes = base_fields(**changes)
    first = [module for module in info.lora_modules if ".layers.0." in module]
    outside = [module for module in info.lora_modules if ".layers." not in module]
    layers = [
        module.replace(".0.", f".{layer}.") for layer in range(sizes["num_hidden_layers"]) for module in first
    ]
    experts = {module: sizes["num_local_experts"] for module in layers if module.endswith(".experts")}
    told = {"lora_modules": tuple(sorted(outside + layers)), "expert_modules": experts}
    return info.model_copy(update=told | {"served_model": (name,)})


def spoil_by_removing_a_factor(folder: Path) -> None:
    tensors = {**encode(Logical()), **attention()}
    del tensors["base_model.model.model.layers.1.mlp.experts.lora_B.weight"]
    save_adapter(folder, tensors)


class OnLoad(dict[str, BaseException]):
    """Does something when an adapter whose name begins so is loaded, and raises what that returns, if anything."""

    def __init__(self, start: str, then: Callable[[str], BaseException | None]) -> None:
        super().__init__()
        self.start, self.then = start, then
        self.found: BaseException | None = None

    def __contains__(self, name: object) -> bool:
        self.found = self.then(str(name)) if str(name).startswith(self.start) else None
        return self.found is not None

    def __getitem__(self, name: str) -> BaseException:
        assert self.found is not None
        return self.found
