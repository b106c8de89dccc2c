"""Adapters large enough to tell their packing, on the desk of a pipeline; and what was found out about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lora_builders import Logical, encode, save_adapter
from pipeline_builders import CONTROL_BPB, OWN_BPB, Desk
from safetensors.torch import load_file
from structured_builders import EXPERTS, RANK

from roster.catalog import open_catalog
from roster.serving import Manifest
from roster.story import tell
from storage.documents import read_document
from storage.ledger import Step, StepKind
from storage.policy import PackingName
from tasks.policy import set_policy

BOTH = ("gate_up_proj", "down_proj")
READING = [StepKind.INSPECTED, StepKind.CONVERTED, StepKind.CHECKED]
JUDGING = [StepKind.STAGED, StepKind.OPPONENTS, StepKind.SCORED, StepKind.VERDICT]


def plant(desk: Desk, author: str, logical: Logical, packing: str | dict[str, str], **config: Any) -> Path:
    """An uploaded adapter of this author, with his held-out text."""
    folder = save_adapter(
        desk.folder / "trained" / author, encode(logical, packing=packing), r=RANK, **config
    )
    desk.heldout(author)
    desk.submit(author, folder)
    return folder


def holds(path: str, logical: Logical) -> bool:
    """Whether the adapter in this directory is the one that was meant: by names and numbers alone."""
    made = load_file(Path(path) / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.{}.mlp.experts.{}.{}.lora_B.weight"
    for (layer, parameter), b in logical.b.items():
        for expert in range(EXPERTS):
            gate, up = b[expert].chunk(2)
            parts = (
                {"gate_proj": gate, "up_proj": up}
                if parameter == "gate_up_proj"
                else {"down_proj": b[expert]}
            )
            if not all(torch.equal(made[prefix.format(layer, expert, n)], part) for n, part in parts.items()):
                return False
    return True


def score_truly(desk: Desk, logical: Logical) -> None:
    """The engine predicts well with the right factors, whatever the adapter is called."""
    desk.engine.adapters = lambda name, path: OWN_BPB if holds(path, logical) else CONTROL_BPB


def packing_of(step: Step) -> dict[str, Any]:
    packing: Any = step.result["packing"]
    assert isinstance(packing, dict)
    return packing


def decided(desk: Desk, author: str) -> dict[str, tuple[str, str]]:
    """(packing, decided by) of each parameter, which the ledger and the manifest agree about."""
    inspected = [step for step in desk.ledger(author).steps if step.kind is StepKind.INSPECTED][-1]
    verdict: Any = desk.ledger(author).verdict
    key = f"serving/{author}/{verdict.result['output_digest']}/manifest.json"
    manifest, _ = read_document(desk.store, key, Manifest)
    assert json.loads(manifest.layout.model_dump_json())["packing"] == packing_of(inspected)
    return {name: (one["value"], one["decided_by"]) for name, one in packing_of(inspected).items()}


def story(desk: Desk, author: str) -> str:
    desk.sync()
    with open_catalog(desk.settings.catalog_path) as reader:
        return "\n".join(tell(reader.show(author)))


def say(desk: Desk, packing: PackingName, **more: Any) -> None:
    set_policy(desk.store, packing, why="our trainer is known", set_by="mara", **more)
