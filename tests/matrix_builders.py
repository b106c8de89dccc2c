"""A roster that a matrix is measured of: served adapters, their ledgers and texts, and an engine that knows hands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pipeline_builders import BASE, EXAMPLES, add_tiny_base, engine_of
from scripted_scorer import ScriptedScorer

import tasks.matrix_engine
import tasks.matrix_plan
from flows.connect import job_limits
from flows.settings import Settings
from roster.serving import Manifest, Roster, RosterAuthor, RosterBase, RosterEngine, RosterVerdict
from storage.digests import sha256_file
from storage.documents import put_document, utc_now
from storage.heldout import register_heldout
from storage.keys import ledger_key, manifest_key, roster_key, serving_prefix, training_key
from storage.ledger import Ledger, Outcome, Step, StepKind, SubmissionRef
from storage.s3 import S3Store
from tasks.job import JobLimits
from tasks.matrix import fill_matrix
from tasks.matrix_plan import Plan, plan_matrix

TOKENS, SECONDS = 4_000, 2.5
"""What a ledger says that its scoring took."""


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


class Hands(ScriptedScorer):
    """An engine whose bits per byte depend on who wrote a text, which its first word says.

    `bpb`: (model's author, None for the base; the text's writer) → bits per byte; anything else has `other`.
    """

    def __init__(self, bpb: Mapping[tuple[str | None, str], float], *, other: float = 2.5) -> None:
        super().__init__({BASE: 2.4}, adapters=lambda name, path: 0.0, max_len=512, bos=True, flavour=0.05)
        self.bpb, self.other = dict(bpb), other

    def logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float | None, ...]]:
        author = None if model == self.base else model.partition("@")[0]
        values = []
        for prompt in prompts:
            writer = self.detokenize(prompt).removeprefix("<s>").partition(" ")[0]
            mean = self.bpb.get((author, writer), self.other)
            if model == self.base:
                self.models[self.base] = mean
            else:
                self._loaded[model] = mean
            values += super().logprobs(model, [prompt])
            self.calls.pop()
        self.calls.append(("logprobs", model))
        return values

    def continue_prompts(
        self, model: str, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[tuple[int, ...]]:
        """Every author writes his name and on; the seed and the prompt decide the rest."""
        author = model.partition("@")[0]
        self.calls.append(("continue", model))
        texts = [f" {author} wrote on {seed} {len(prompt)}."[:max_tokens] for prompt in prompts]
        return [self.tokenize(text, add_special_tokens=False) for text in texts]


@dataclass
class Bench:
    """A store with a roster, and the engine that scores it."""

    store: S3Store
    folder: Path
    engine: Hands
    said: list[str] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)

    @property
    def limits(self) -> JobLimits:
        settings = Settings(
            home=self.folder / "home",
            store_endpoint="http://127.0.0.1:9",
            engine_timeout_s=120,
            engine_wait_s=60,
        )
        return job_limits(settings)

    def heldout(self, author: str, name: str = "main", *, units: int = 5, writer: str | None = None) -> str:
        lines = (
            json.dumps({"id": f"u{n}", "text": f"{writer or author} wrote {'abcdefgh'[n]} number {n * n}."})
            for n in range(units)
        )
        file = self.folder / f"{author}-{name}.jsonl"
        file.write_text("\n".join(lines))
        return register_heldout(self.store, author, name, file).ref

    def serve(self, *authors: str, **heldout: tuple[str, ...]) -> None:
        """Put these authors into the roster, each with an adapter, a ledger and, unless given, a text of its own."""
        served = {}
        for author in authors:
            weights = self.folder / author
            weights.mkdir(exist_ok=True)
            weights.joinpath("adapter_model.safetensors").write_text(f"weights of {author}")
            refs = heldout.get(author) or (self.heldout(author),)
            served[author] = self.stage(author, weights, refs, digest(f"output {author}"))
        self.publish(served)

    def publish(self, served: Mapping[str, str]) -> None:
        """Make the roster of these authors, by output digests."""
        authors = {}
        for author, output in served.items():
            authors[author] = RosterAuthor(
                output_digest=output,
                uri=f"s3://adapters/{author}",
                format="per-expert",
                is_3d_lora_weight=False,
                rank=3,
                verdict=RosterVerdict(
                    own=2.1, base=2.4, margin=0.3, interval=(0.2, 0.4), measured_at="2026-11-20T12:00:00Z"
                ),
                stale=False,
            )
        entry = RosterBase(
            served_model=BASE, engine=RosterEngine(max_lora_rank=8, max_loras=4, flags=()), authors=authors
        )
        roster = Roster(version=1, generated_at="2026-11-20T12:00:00Z", bases={BASE: entry})
        put_document(self.store, roster_key(), roster)

    def stage(self, author: str, directory: Path, refs: tuple[str, ...], output: str) -> str:
        """Put a converted adapter with its manifest and its ledger into the store; its output digest."""
        prefix = serving_prefix(author, output)
        files = [sha256_file(path) for path in sorted(directory.iterdir())]
        for file in files:
            self.store.upload_file(directory / file.name, prefix + file.name, sha256=file.sha256)
        example = json.loads((EXAMPLES / "manifest.json").read_bytes())
        told = {
            "author": author,
            "run": "run-1",
            "base": BASE,
            "adapter_digest": digest(f"adapter {author}"),
            "output_digest": output,
            "rank": 3,
            "max_lora_rank": 8,
            "files": [{"name": one.name, "bytes": one.bytes, "sha256": one.sha256} for one in files],
        }
        put_document(self.store, manifest_key(prefix), Manifest.model_validate(example | told))
        step = Step(
            kind=StepKind.SCORED,
            step_key="0" * 16,
            attempt=1,
            code_version="1",
            inputs={"own": output},
            outcome=Outcome.DONE,
            result={
                "engine_id": engine_of().engine_id,
                "heldout": list(refs),
                "tokens": TOKENS,
                "seconds": SECONDS,
            },
            started_at=utc_now(),
            finished_at=utc_now(),
            worker="w",
            flow_run=None,
        )
        ledger = Ledger(
            author=author,
            adapter_digest=digest(f"adapter {author}"),
            base=BASE,
            submissions=(SubmissionRef(run="run-1", submission="2026-11-20T12:00:00Z-00000000"),),
            steps=(step,),
        )
        put_document(self.store, ledger_key(author, ledger.adapter_digest), ledger)
        return output

    def state_authors(self, author: str, *authors: str) -> None:
        """What the author's trainer says: whom its adapter serves."""
        body = json.dumps({"schema": 1, "authors": authors}).encode()
        self.store.put(training_key(author, "run-1"), body)

    def plan(self, **options: object) -> Plan:
        return plan_matrix(self.store, BASE, self.limits, **options)  # type: ignore[arg-type]

    def measure(self, plan: Plan | None = None, progress: Callable[[int, int], None] | None = None):  # type: ignore[no-untyped-def]
        return fill_matrix(
            self.store,
            plan or self.plan(),
            self.limits,
            say=self.said.append,
            progress=progress or (lambda done, total: None),
        )

    def loaded(self) -> list[str]:
        """The authors whose adapters were loaded, in order."""
        return [name.partition("@")[0] for call, name in self.engine.calls if call == "load"]

    def stored(self, prefix: str = "matrices/") -> list[str]:
        return [found.key for found in self.store.list_objects(prefix)]


def own_is_best(*authors: str, own: float = 2.0) -> dict[tuple[str | None, str], float]:
    """Each author's adapter fits its author's text best, the others' worse by amounts that are all different."""
    bpb: dict[tuple[str | None, str], float] = {}
    for y, author in enumerate(authors):
        bpb[None, author] = 2.4 + 0.01 * y
        for x, writer in enumerate(authors):
            bpb[author, writer] = own if x == y else 2.2 + 0.03 * y + 0.007 * x
    return bpb


def make_bench(store: S3Store, folder: Path, patch: pytest.MonkeyPatch) -> Bench:
    """A bench of an empty roster: the engine and its lease are scripted, all else is as it is."""
    add_tiny_base(store)
    bench = Bench(store, folder, Hands({}))

    @contextmanager
    def leased(url: str, base: str, **waits: float) -> Iterator[Hands]:
        bench.leases.append(base)
        yield bench.engine

    @contextmanager
    def client(url: str, **waits: float) -> Iterator[Hands]:
        yield bench.engine

    patch.setattr(tasks.matrix_engine, "leased_engine_at", leased)
    patch.setattr(tasks.matrix_plan, "Engine", client)
    return bench
