"""What vLLM wraps of a base, in the sizes that a capacity plan needs; from config.json and the kept snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roster.capacity import ExpertsShape, LinearShape, Output, Shape, Split
from roster.errors import PlanImpossible
from roster.serving_engine import VERIFIED_VLLM
from tasks.lora.base import BaseConfig
from tasks.lora.family import LinearModule, TensorClass, size_of
from tasks.lora.snapshots import SnapshotEntry, read_snapshots

_LAYER = "{layer}"
_ROWS = frozenset({"o_proj", "down_proj", "out_proj"})
_WHOLE = frozenset({"kv_a_proj_with_mqa", "fused_qkv_a_proj", "shared_expert_gate"})
_KEYS = frozenset({"k_proj", "v_proj"})
_VOCABULARY = frozenset({"lm_head", "embed_tokens"})
_UNEVEN = "in_proj"
"""Begins the names of delta nets' and mamba's inputs, which vLLM cuts into slices that config.json does not tell."""


@dataclass(frozen=True, slots=True)
class WrappedShapes:
    """The shapes of a base's wrapped modules, all layers. uncounted: templates of those without known sizes."""

    shapes: tuple[Shape, ...]
    uncounted: tuple[str, ...]

    @property
    def experts(self) -> tuple[Shape, ...]:
        """Those of routed experts alone."""
        return tuple(shape for shape in self.shapes if isinstance(shape, ExpertsShape))


def list_wrapped(base: BaseConfig, *, mixed: bool = False) -> WrappedShapes:
    """What the class that serves a base wraps for LoRA. mixed: by a server of the mixed format.

    Raises PlanImpossible where this repository keeps no snapshot of the class, InvalidBaseConfig for a missing size.
    """
    snapshots = read_snapshots(VERIFIED_VLLM)
    entry = snapshots.classes.get(base.served.architecture) if snapshots else None
    if entry is None:
        raise PlanImpossible(
            f"{base.label}: nothing is kept of what vLLM {VERIFIED_VLLM} wraps of {base.served.architecture}, so its "
            "slots cannot be computed. Start it once and keep its engine.json (docs/engine.md)."
        )
    shapes: list[Shape] = []
    uncounted = []
    for template in entry.modules:
        found = (
            _vocabulary(template, base)
            if _LAYER not in template
            else _in_layers(template, entry, base, mixed=mixed)
        )
        if found is None:
            uncounted.append(template)
        else:
            shapes += found
    return WrappedShapes(tuple(shapes), tuple(uncounted))


def _vocabulary(template: str, base: BaseConfig) -> list[Shape] | None:
    if template.rpartition(".")[2] not in _VOCABULARY:
        return None
    return [LinearShape(base.size(size_of("hidden_size")), (Output(base.vocab),), Split.NOT)]


def _in_layers(template: str, entry: SnapshotEntry, base: BaseConfig, *, mixed: bool) -> list[Shape] | None:
    """The shapes of one template in the layers that have it; None where the family does not tell its sizes."""
    if template in entry.expert_modules:
        return [_experts(base, mixed=mixed)] * len(base.sparse_layers)
    parent, _, last = template.removeprefix(base.served.decoder).rpartition(".")
    parts = [f"{parent}.{part}" for part in entry.packed.get(last, (last,))]
    if last.startswith(_UNEVEN) or not all(any(_match(base, part)) for part in parts):
        return None
    found: list[Shape] = []
    for layer in range(base.layers):
        modules = [
            next((one for one in _match(base, part) if base.has(layer, one.layers)), None) for part in parts
        ]
        if all(modules) and not _is_packed_away(base, entry, layer, parent, last):
            found.append(_linear(base, last, [one for one in modules if one is not None]))
    return found


def _is_packed_away(base: BaseConfig, entry: SnapshotEntry, layer: int, parent: str, last: str) -> bool:
    """Whether this layer has the module only as a part of another one that is wrapped."""
    packs = [
        parts
        for whole, parts in entry.packed.items()
        if last in parts and f"{base.served.decoder}{parent}.{whole}" in entry.modules
    ]
    return any(
        all(any(base.has(layer, one.layers) for one in _match(base, f"{parent}.{part}")) for part in parts)
        for parts in packs
    )


def _match(base: BaseConfig, served: str) -> Iterator[LinearModule]:
    return (one for one in base.family.modules if served in (one.served, *one.also_served))


def _linear(base: BaseConfig, last: str, modules: list[LinearModule]) -> LinearShape:
    whole = last in _WHOLE or modules[0].kind is TensorClass.ROUTER
    split = Split.NOT if whole else Split.INPUT if last in _ROWS else Split.OUTPUTS
    outputs = tuple(Output(base.size(one.out_size), _least(base, one)) for one in modules)
    return LinearShape(base.size(modules[0].in_size), outputs, split)


def _least(base: BaseConfig, module: LinearModule) -> int:
    """A whole head of keys or values, which vLLM repeats where there are fewer than processes."""
    if module.served.rpartition(".")[2] not in _KEYS:
        return 1
    heads = base.size(size_of("num_key_value_heads"))
    size = base.size(module.out_size)
    return size // heads if size % heads == 0 else 1


def _experts(base: BaseConfig, *, mixed: bool) -> ExpertsShape:
    first = base.family.parameters[0]
    # Experts without a gate have their one first projection alone, in a parameter of its own.
    slices = len(first.projections)
    return ExpertsShape(
        experts=base.experts,
        hidden=base.size(first.in_size),
        intermediate=base.size(first.out_size) // slices,
        first_slices=slices,
        # The mixed format gives every class the experts of one pair of factors for each projection.
        fused=base.served.native_3d and not mixed,
    )
