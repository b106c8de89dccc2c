"""A trainer's own scores of held-out sets, by the rules of `tasks.bpb.measure`, as a submission takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from tasks.bpb.errors import HeldoutUnusable
from tasks.bpb.heldout import HeldoutUnits, merge_sets, unit_kind
from tasks.bpb.identity import measure_id
from tasks.bpb.measure import BASE, OWN, Prepared, prepare_units, score_subject
from tasks.bpb.protocol import Scorer
from tasks.bpb.reference_files import HeldoutFile


class SetScore(BaseModel):
    """One held-out set: bits per UTF-8 byte without and with the adapter, over the same units and bytes."""

    model_config = ConfigDict(frozen=True)

    own_bpb: float = Field(allow_inf_nan=False)
    base_bpb: float = Field(allow_inf_nan=False)
    units: int
    bytes: int


class ReferenceScores(BaseModel):
    """What `roster submit --reference` takes: the scores by set, and the measure that they were taken by."""

    model_config = ConfigDict(frozen=True)

    measure_id: str
    heldout: dict[str, SetScore]


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The units of all sets, ready to score, and what a subject costs.

    counts: how many of the prepared units each set has, in the order of the sets. tokens, windows: of one subject.
    """

    names: tuple[str, ...]
    prepared: Prepared
    counts: tuple[int, ...]
    tokens: int
    windows: int


def plan_reference(scorer: Scorer, files: Sequence[HeldoutFile], *, stride: int | None) -> ReferencePlan:
    """The sets tokenised and cut into windows together, as the pipeline does it; no weights are needed.

    Raises:
        HeldoutUnusable: a set has no unit that can be scored.
        DuplicateUnit, TokenizerUnsupported, WindowInvalid: see `prepare_units`.
    """
    sets = [file.heldout for file in files]
    prepared = prepare_units(scorer, merge_sets(sets), stride=stride)
    windows = [window for unit in prepared.units for window in unit.windows]
    return ReferencePlan(
        names=tuple(one.name for one in sets),
        prepared=prepared,
        counts=tuple(_count(one, prepared, alone=len(sets) == 1) for one in sets),
        tokens=sum(window.end - window.begin for window in windows),
        windows=len(windows),
    )


def score_reference(
    scorer: Scorer,
    plan: ReferencePlan,
    files: Sequence[HeldoutFile],
    *,
    base: str,
    adapter: str,
    weights_digest: str,
) -> ReferenceScores:
    """Both scores of every set. base: the scorer's name of it. adapter: the directory, loaded and unloaded here.

    Raises:
        HeldoutUnusable: not one unit of a set got a finite score from both.
        AdapterNotRead, PackingUnstated: the adapter cannot be loaded; nothing is scored then.
    """
    scorer.load(OWN, adapter, is_3d=False)
    try:
        own = score_subject(scorer, OWN, plan.prepared, label=OWN, progress=_silent).bits
    finally:
        scorer.unload(OWN)
    bare = score_subject(scorer, base, plan.prepared, label=BASE, progress=_silent).bits
    scores: dict[str, SetScore] = {}
    first = 0
    for name, count in zip(plan.names, plan.counts, strict=True):
        scores[name] = _score_set(name, plan.prepared, own, bare, range(first, first + count))
        first += count
    units = merge_sets([file.heldout for file in files])
    identity = measure_id(
        heldout_sha256s=[file.sha256 for file in files],
        unit_kind=unit_kind(units),
        window=plan.prepared.window,
        stride=plan.prepared.stride,
        bos_rule=plan.prepared.bos_rule,
        base_weights_digest=weights_digest,
    )
    return ReferenceScores(measure_id=identity, heldout=scores)


def _silent(label: str, done: int, total: int) -> None:
    """Nothing: the scorer itself tells of every window."""


def _count(one: HeldoutUnits, prepared: Prepared, *, alone: bool) -> int:
    """How many units of a set were prepared; ids are those of `merge_sets`."""
    ids = {unit.id if alone else f"{one.name}:{unit.id}" for unit in one.units}
    count = sum(unit.id in ids for unit in prepared.units)
    if count == 0:
        reasons = (f"{unit.id}: {unit.reason}" for unit in prepared.voided if unit.id in ids)
        raise HeldoutUnusable(len(ids), tuple(reasons))
    return count


def _score_set(
    name: str, prepared: Prepared, own: Sequence[float], bare: Sequence[float], members: range
) -> SetScore:
    """Sums over the units that both could score: one void for either is void for both."""
    kept = [index for index in members if math.isfinite(own[index]) and math.isfinite(bare[index])]
    if not kept:
        reason = f"{name}: no unit has a finite score with and without the adapter"
        raise HeldoutUnusable(len(members), (reason,))
    total = sum(prepared.units[index].byte_count for index in kept)
    return SetScore(
        own_bpb=math.fsum(own[index] for index in kept) / total,
        base_bpb=math.fsum(bare[index] for index in kept) / total,
        units=len(kept),
        bytes=total,
    )
