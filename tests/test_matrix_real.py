"""The matrix on the real vLLM: six trained authors of one alphabet on the demo's base, told apart by their own text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_builders import RunningEngine, running_engine
from matrix_builders import Bench, Hands
from pipeline_builders import BASE, publish_engine
from store_builders import memory_store

from demo.__main__ import CACHE
from demo.material import build_material
from roster.serving_engine import EngineInfo
from storage.bases import BaseDocument, BaseEngine, TargetFormat, register_base
from storage.heldout import register_heldout
from storage.matrices import MatrixDocument, read_newest_matrix
from tasks.bpb.engine import Engine
from tasks.directories import KnownBase, convert_directory
from tasks.lora.base import read_base_config
from tasks.matrix import fill_matrix
from tasks.matrix_generation import Generation, describe_generation

pytestmark = pytest.mark.real


@dataclass
class Trained:
    """A roster of trained authors on a running engine, and what the matrix says of it."""

    bench: Bench
    engine: RunningEngine
    authors: tuple[str, ...]
    document: MatrixDocument


@pytest.fixture(scope="module")
def trained(prefect_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("matrix")
    material = build_material(CACHE, lambda line: None)
    authors = [author for author in material.authors if not author.lies]
    config = (material.base_dir / "config.json").read_bytes()
    flags = {"max_model_len": 512, "max_loras": 4, "max_lora_rank": 8, "max_cpu_loras": 8}
    with memory_store() as store, running_engine(material.base_dir, folder, **flags) as engine:
        bench = Bench(store, folder, Hands({}))
        document = BaseDocument(
            base=BASE,
            served_model=BASE,
            weights_digest=None,
            engine=BaseEngine(url=engine.url),
            target_format=TargetFormat.PER_EXPERT,
        )
        register_base(store, config, document)
        publish_engine(store, EngineInfo.model_validate_json(engine.engine_json.read_bytes()))
        known = KnownBase(read_base_config(config, label="demo"))
        served = {}
        for author in authors:
            made = folder / "converted" / author.name
            convert_directory(
                author.adapter_dir, made, known, packing=None, format="per-expert", progress=None
            )
            lines = "".join(
                f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.name}\n"
                for path in sorted(made.iterdir())
            )
            ref = register_heldout(store, author.name, "main", author.heldout_file).ref
            served[author.name] = bench.stage(
                author.name, made, (ref,), hashlib.sha256(lines.encode()).hexdigest()
            )
        bench.publish(served)
        plan = bench.plan()
        print(plan.describe_cost())
        generation = Generation(seeds=3)
        print(describe_generation(plan, generation))
        found = fill_matrix(
            store, plan, bench.limits, generation=generation, say=print, progress=lambda done, total: None
        )
        print(f"{found.tokens} tokens in {found.seconds} s: {found.tokens / found.seconds:.0f} tokens/s")
        yield Trained(bench, engine, tuple(served), found)


def test_every_text_is_attributed_to_its_author(trained: Trained) -> None:
    found = trained.document
    assert len(trained.authors) == 6 and found.choices == 6
    print(found.sets, found.units, sep="\n")
    assert (found.sets.right, found.sets.total) == (6, 6) and found.misattributed == ()
    for text in found.texts:
        [owner] = text.owners
        assert min(text.bpb, key=lambda author: text.bpb[author] or 0.0) == owner
        assert all(text.bpb[owner] < bpb for author, bpb in text.bpb.items() if author != owner)
        assert text.bpb[owner] < text.base_bpb
        print(text.ref, {author: round(bpb, 4) for author, bpb in text.bpb.items()}, round(text.base_bpb, 4))


def test_single_units_are_attributed(trained: Trained) -> None:
    units = trained.document.units
    assert units.total == 6 * 64 and units.share is not None and units.interval is not None
    assert units.share >= 0.95
    assert 0.9 < units.interval[0] < units.share <= units.interval[1]


def test_what_adapters_write_is_attributed_to_them(trained: Trained) -> None:
    found = trained.document.generated
    assert found is not None and found.right.share is not None
    print(found)
    assert found.right.total >= 120
    assert found.right.share > 0.9
    assert set(found.per_author) == set(trained.authors)


def test_the_engine_is_left_as_it_was_and_nothing_is_measured_twice(trained: Trained) -> None:
    with Engine(trained.engine.url, timeout_s=30) as engine:
        assert engine.served_models() == (BASE,)
    assert trained.bench.plan().pending == ()
    again = trained.bench.measure()
    assert again.texts == trained.document.texts and again.units == trained.document.units
    assert read_newest_matrix(trained.bench.store, BASE) == again
    hardest = again.list_margins(trained.authors[0])
    assert len(hardest) == 5 and hardest[0].margin > 0
    assert [one.margin for one in hardest] == sorted(one.margin for one in hardest)


def test_a_sample_attributes_among_fewer(trained: Trained, tmp_path: Path) -> None:
    plan = trained.bench.plan(sample=2)
    assert plan.pending == () and len(plan.cells) == 6 * 4
    found = trained.bench.measure(plan)
    assert found.choices == 3 and found.sets.right == 6
