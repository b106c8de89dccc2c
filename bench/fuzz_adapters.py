"""Valid tiny adapters, file by file in memory: what the fuzzer changes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from storage.keys import MARKER_FILE, TRAINING_FILE
from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.config import AdapterConfig
from tasks.lora.files import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from tasks.lora.names import CubeKey, ExpertKey, Factor, ModuleKey, StackedKey, format_key

RANK, ALPHA = 3, 6

# Tiny configs of real models, one for each family, kept with the tests.
_CONFIGS = Path(__file__).resolve().parent.parent / "tests" / "golden" / "families"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link to a path, absolute or beside it."""

    target: str


class Node(StrEnum):
    """What can stand in a file's place besides a link."""

    FOLDER = "folder"
    PIPE = "pipe"


Entry = bytes | Link | Node


@dataclass(slots=True)
class Upload:
    """An adapter's folder with what else is read about it: its base's config.json and the operator's policy."""

    name: str
    files: dict[str, Entry]
    base: bytes
    policy: bytes = b""
    kinds: list[str] = field(default_factory=list)

    def copy(self) -> Upload:
        """Return one of its own to change."""
        return Upload(self.name, dict(self.files), self.base, self.policy)


class Form(StrEnum):
    """How a trainer stores the routed experts."""

    STACKED = "stacked"
    SWAPPED = "swapped"
    PER_EXPERT = "per-expert"
    CUBE = "3-d"
    SHARED_CUBE = "3-d, shared"


@cache
def list_uploads() -> tuple[Upload, ...]:
    """Return the valid adapters: every family in one form in turn, one family in all of them, some in shards."""
    names = sorted(path.stem for path in _CONFIGS.glob("*.json"))
    forms = list(Form)
    found: list[Upload] = []
    for place, name in enumerate(names):
        config: dict[str, Any] = json.loads((_CONFIGS / f"{name}.json").read_text("utf-8"))["config"]
        base = read_base_config(json.dumps(config).encode(), label=name)
        plain = base.family.stored.value == "out_in"
        # What the trainer that its training.json names writes for this family.
        packing = "grouped_by_expert" if base.family.patched_by_unsloth else "rank_major"
        chosen = forms if name == "qwen3_moe" else [Form.STACKED, forms[1 + place % 4]]
        for form in chosen:
            if form is Form.SWAPPED and not plain:
                continue
            dtype = (torch.float32, torch.bfloat16, torch.float16)[len(found) % 3]
            tensors = {key: tensor.to(dtype) for key, tensor in _make_tensors(base, form, len(found)).items()}
            files = _save(tensors, shards=1 + 2 * (len(found) % 4 == 3))
            files[CONFIG_NAME] = _encode(_config(form, packing))
            if len(found) % 2:
                files[TRAINING_FILE] = _encode(_training(packing))
                files[MARKER_FILE] = _encode(_marker(files))
            found.append(
                Upload(f"{name} {form}", dict(files), json.dumps(config).encode(), _encode(_policy()))
            )
    return tuple(found)


def _make_tensors(base: BaseConfig, form: Form, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    family, tensors = base.family, Tensors()

    def add(key: Any, *shape: int) -> None:
        tensors[format_key(key, family)] = torch.randn(shape, generator=generator)

    for layer in base.sparse_layers:
        for parameter in family.parameters:
            inside, out = base.size(parameter.in_size), base.size(parameter.out_size)
            if form in (Form.STACKED, Form.SWAPPED):
                turned = (form is Form.SWAPPED) != (family.stored.value != "out_in")
                first, second = (out, inside) if turned else (inside, out)
                add(StackedKey(layer, parameter.name, Factor.A), base.experts * RANK, first)
                add(StackedKey(layer, parameter.name, Factor.B), second, base.experts * RANK)
                continue
            for projection in parameter.projections:
                rows = out // len(parameter.projections)
                if form is Form.PER_EXPERT:
                    for expert in range(base.experts):
                        add(ExpertKey(layer, expert, projection, Factor.A), RANK, inside)
                        add(ExpertKey(layer, expert, projection, Factor.B), rows, RANK)
                    continue
                shared = 1 if form is Form.SHARED_CUBE and projection != "down_proj" else base.experts
                add(CubeKey(layer, projection, Factor.A), shared, RANK, inside)
                add(CubeKey(layer, projection, Factor.B), base.experts, rows, RANK)
    for module in family.modules[:: 2 + seed % 3]:
        for layer in range(base.layers):
            if base.has(layer, module.layers):
                inside, out = base.size(module.in_size), base.size(module.out_size)
                add(ModuleKey(layer, module.sources[0], module.kind, Factor.A), RANK, inside)
                add(ModuleKey(layer, module.sources[0], module.kind, Factor.B), out, RANK)
    return tensors


def _save(tensors: Tensors, shards: int) -> dict[str, Entry]:
    if shards == 1:
        return {WEIGHTS_NAME: save(tensors, metadata={"format": "pt"})}
    files: dict[str, Entry] = {}
    places: dict[str, str] = {}
    for number in range(shards):
        name = f"adapter_model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::shards]}
        files[name] = save(part, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    return files | {INDEX_NAME: _encode({"metadata": {"total_size": 0}, "weight_map": places})}


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()


def _config(form: Form, packing: str) -> dict[str, Any]:
    known = {
        name: item.default for name, item in AdapterConfig.model_fields.items() if not item.is_required()
    }
    stacked = form in (Form.STACKED, Form.SWAPPED)
    return known | {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "rank_pattern": {r".*\.experts\.gate_up_proj": RANK},
        "alpha_pattern": {"experts.down_proj": ALPHA},
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if stacked else None,
        "lora_B_layout": packing if form is Form.SWAPPED else None,
    }


def _training(packing: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "trainer": {"name": "unsloth_zoo", "version": "2026.8.17"},
        "peft_version": "0.21.2",
        "base": "tiny",
        "lora_B_layout": {"gate_up_proj": packing, "down_proj": packing},
        "intended_targets": ["routed_experts", "attention"],
        "heldout": ["ada/letters"],
        "authors": ["ada"],
        "reference": {
            "measure_id": "b5bb9d8014a0f9b1",
            "heldout": {"ada/letters": {"own_bpb": 1.31, "base_bpb": 2.04, "units": 24, "bytes": 9120}},
        },
        "merged_checkpoint": None,
    }


def _marker(files: dict[str, Entry]) -> dict[str, Any]:
    return {
        "schema": 1,
        "submitted_at": "2026-03-01T10:00:00Z",
        "submission": "2026-03-01T10:00:00Z-5f0c21ab",
        "author": "ada",
        "run": "letters-7",
        "base": "tiny",
        "files": [
            {"name": name, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
            for name, body in files.items()
            if isinstance(body, bytes)
        ],
    }


def _policy() -> dict[str, Any]:
    return {
        "schema": 1,
        "lora_B_layout": {"gate_up_proj": "grouped_by_expert", "down_proj": "rank_major"},
        "why": "all of our trainers do",
        "set_by": "mara",
        "set_at": "2026-11-20T09:00:00Z",
    }
