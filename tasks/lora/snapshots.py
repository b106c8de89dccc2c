"""What each class of the engine serves, kept in this repository, for checks where no engine has told it.

One file for each release of vLLM, `served/vllm-<version>.json`: for each class, the names of its wrapped modules with
`{layer}` for a layer's number. An entry is made from what a running engine published (`engine.json`), or, where the
class cannot be run, written by hand from its source; `origin` says which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict, Field

from tasks.lora.resolve import ServedModules

_FOLDER = "served"
_LAYER = re.compile(r"(?<=\blayers\.)[0-9]+(?=\.)")
_HOLE = "{layer}"

_GATED = 3
"""The projections of an expert that has a gate."""


class StackedExperts(StrEnum):
    """When a class takes stacked experts: as it is, or with the engine's mixed format only."""

    NATIVE = "native"
    MIXED = "mixed"


class SnapshotEntry(BaseModel):
    """One class. `expert_projections` and `stacked`: what it takes with the settings that an adapter's form needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    origin: str
    modules: tuple[str, ...]
    ineffective: tuple[str, ...]
    packed: dict[str, tuple[str, ...]]
    expert_modules: tuple[str, ...]
    expert_projections: tuple[str, ...] = Field(min_length=2)
    stacked: StackedExperts | None


class Snapshots(BaseModel):
    """One file: the classes of one vLLM release."""

    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True, validate_by_name=True)

    schema_: int = Field(default=1, alias="schema", ge=1, le=1)
    vllm: str
    classes: dict[str, SnapshotEntry]


def load_snapshot(architecture: str, version: str, *, layers: int, experts: int) -> ServedModules | None:
    """Return what a class of this vLLM release serves of a base with so many layers and routed experts.

    None where no file or no entry tells it.
    """
    snapshots = read_snapshots(version)
    entry = snapshots.classes.get(architecture) if snapshots else None
    if entry is None:
        return None
    return ServedModules(
        origin=f"snapshot of vLLM {version}, {entry.origin}",
        architecture=architecture,
        modules=frozenset(_expand(entry.modules, layers)),
        ineffective=frozenset(_expand(entry.ineffective, layers)),
        packed=tuple(sorted(entry.packed.items())),
        expert_modules=tuple((name, experts) for name in _expand(entry.expert_modules, layers)),
        projections=entry.expert_projections,
        stacked=entry.stacked is not None,
    )


@cache
def read_snapshots(version: str) -> Snapshots | None:
    """Return the file of a vLLM release, None without one."""
    path = files("tasks.lora") / _FOLDER / f"vllm-{version}.json"
    return Snapshots.model_validate_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def snapshot_entry(served: ServedModules, *, native_3d: bool, origin: str) -> SnapshotEntry:
    """Return the entry of a class from what an engine that runs it published, the same for any number of layers.

    native_3d: the class takes stacked experts as it is. Raises ValueError where the engine did not tell the names of
    single experts: a native class does so with the mixed format only.
    """
    if not served.projections:
        raise ValueError(
            f"{served.architecture}: the engine names no projections of single experts; start it with "
            "--enable-mixed-moe-lora-format and make the snapshot from that."
        )
    mixed = StackedExperts.MIXED if len(served.projections) == _GATED else None
    return SnapshotEntry(
        origin=origin,
        modules=_mask(served.modules),
        ineffective=_mask(served.ineffective),
        packed=dict(sorted(served.packed)),
        expert_modules=_mask(name for name, _ in served.expert_modules),
        expert_projections=served.projections,
        stacked=StackedExperts.NATIVE if native_3d else mixed,
    )


def merge_entries(kept: SnapshotEntry, found: SnapshotEntry) -> SnapshotEntry:
    """Return what either of two entries of a class has: which modules a class has can depend on the base's sizes.

    The first one's origin stays. Raises ValueError where they take experts otherwise.
    """
    for name in ("expert_projections", "stacked"):
        old, new = getattr(kept, name), getattr(found, name)
        if old != new:
            raise ValueError(f"{name} of a class: {old} is kept, {new} was found; remove the old entry.")
    return SnapshotEntry(
        origin=kept.origin,
        modules=_mask({*kept.modules, *found.modules}),
        ineffective=_mask({*kept.ineffective, *found.ineffective}),
        packed=dict(sorted((kept.packed | found.packed).items())),
        expert_modules=_mask({*kept.expert_modules, *found.expert_modules}),
        expert_projections=kept.expert_projections,
        stacked=kept.stacked,
    )


def format_snapshots(version: str, classes: Mapping[str, SnapshotEntry]) -> str:
    """Return the text of a release's file: sorted, so that the same entries give the same bytes."""
    snapshots = Snapshots(vllm=version, classes=dict(sorted(classes.items())))
    return snapshots.model_dump_json(indent=1) + "\n"


def _mask(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({_LAYER.sub(_HOLE, name) for name in names}))


def _expand(templates: Iterable[str], layers: int) -> tuple[str, ...]:
    return tuple(
        name
        for template in templates
        for name in (
            [template.replace(_HOLE, str(layer)) for layer in range(layers)]
            if _HOLE in template
            else [template]
        )
    )
