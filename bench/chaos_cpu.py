"""A base that vLLM itself serves on the CPU, and trained adapters for it, with how each must end.

For whoever runs `start_topology(folder, engine=cpu.model)` of tests/topology_builders.py, in this order:

    cpu = prepare()        # before the topology: some minutes of training the first time, seconds later
    register(store, cpu, engine_url(topology))
    upload = put(store, cpu.adapters[0])        # one by one; then announce_upload(settings, upload), or a sweep

`topology.kill(SERVICE)` and `topology.restart(SERVICE)` end and start the engine. It takes 20 to 40 seconds, on busy
cores two minutes, to be healthy again; then it has forgotten what was loaded, but is the engine that was measured.
The adapter in whose turn it died rests for eleven minutes unless `roster retry --failed` is run, others for one; and an
adapter in whose own turn it died three times is refused, as it should be: `count_deaths` tells before a kill.
No adapter's outcome or code depends on which others are ready. Scores are those of floating-point numbers: they agree
between runs to about 1e-6 bits per byte, not to the last bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from demo.__main__ import CACHE
from demo.material import DemoAuthor, Material, build_material
from flows.ports import LOOPBACK
from storage.heldout import register_heldout
from storage.ledger import Ledger, StepKind
from storage.s3 import S3Store
from storage.uploads import Upload
from tasks.poison import DEATH
from tasks.submission import add_base, submit_adapter

SERVICE, PORT = "engine-cpu", 8000
_WEIGHTS = "adapter_model.safetensors"
_SHORT_UNITS = 3
_SET = "main"


@dataclass(frozen=True, slots=True)
class CpuAdapter:
    """An adapter as its trainer left it, its author's text, and how it must end."""

    author: str
    folder: Path
    heldout: Path
    outcome: str
    code: str | None


@dataclass(frozen=True, slots=True)
class CpuBase:
    """The folder with the model, the name it is served by, and adapters for it: six are ready in the end."""

    model: Path
    base: str
    adapters: tuple[CpuAdapter, ...]


def prepare(folder: Path = CACHE, *, say: Callable[[str], None] = lambda line: None) -> CpuBase:
    """The demo's base and authors under `folder`, trained now if they are not there, and more that are made of these.

    Raises:
        MaterialError: a training process ended badly.
    """
    material = build_material(folder, say)
    honest = [author for author in material.authors if not author.lies]
    ready = [CpuAdapter(one.name, one.adapter_dir, one.heldout_file, "ready", None) for one in honest]
    # What its marker says is found to be untrue by its tensors, before an engine sees it.
    lying = [
        CpuAdapter(one.name, one.adapter_dir, one.heldout_file, "quarantined", "layout_conflict")
        for one in material.authors
        if one.lies
    ]
    adapters = (*ready, *lying, _negated(material, honest[1]), _short(material, honest[2]))
    return CpuBase(material.base_dir, material.base_name, adapters)


def engine_url(topology: Any) -> str:
    """Where a topology's engine listens."""
    return f"http://{LOOPBACK}:{topology.plan.ports[SERVICE, PORT]}"


def register(store: S3Store, cpu: CpuBase, url: str) -> None:
    """Register the base, with the digest of its weights, as served at `url`."""
    add_base(
        store,
        cpu.base,
        config=cpu.model,
        weights=cpu.model,
        engine_url=url,
        served_model=cpu.base,
        aliases=(),
        progress=lambda done, total: None,
    )


def put(store: S3Store, cpu: CpuBase, adapter: CpuAdapter, *, run: str = "run-1") -> Upload:
    """Put an author's text and adapter into the store; no event is sent."""
    register_heldout(store, adapter.author, _SET, adapter.heldout)
    return submit_adapter(
        store,
        adapter.folder,
        author=adapter.author,
        base=cpu.base,
        run=run,
        trainer=None,
        reference=None,
        heldout=(),
        progress=lambda done, total: None,
    )


def count_deaths(ledger: Ledger) -> int:
    """How often an engine died while this ledger's adapter was scored."""
    return sum(step.kind is StepKind.SCORED and DEATH in step.result for step in ledger.steps)


def _negated(material: Material, author: DemoAuthor) -> CpuAdapter:
    """An adapter that does the opposite of what was trained: worse than the base, and than the same misread."""
    folder = _place(material, "negated") / "adapter"
    if not folder.exists():
        building = folder.with_name("building")
        shutil.rmtree(building, ignore_errors=True)
        shutil.copytree(author.adapter_dir, building)
        tensors = load_file(author.adapter_dir / _WEIGHTS)
        negated = {name: -one if ".lora_B." in name else one for name, one in tensors.items()}
        save_file(negated, building / _WEIGHTS, metadata={"format": "pt"})
        building.rename(folder)
    return CpuAdapter("hazel", folder, author.heldout_file, "quarantined", "control_not_worse")


def _short(material: Material, author: DemoAuthor) -> CpuAdapter:
    """A good adapter whose author gave too little text to tell."""
    text = _place(material, "short") / "heldout.jsonl"
    lines = author.heldout_file.read_text("utf-8").splitlines()[:_SHORT_UNITS]
    text.write_text("\n".join(lines) + "\n", "utf-8")
    return CpuAdapter("ivy", author.adapter_dir, text, "inconclusive", "too_little_text")


def _place(material: Material, name: str) -> Path:
    place = material.base_dir.parent / "chaos" / name
    place.mkdir(parents=True, exist_ok=True)
    return place
