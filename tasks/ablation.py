"""Scores of an adapter's experts alone and of its attention alone: they explain a verdict, and decide nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from storage.ledger import Step
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineRefused
from tasks.bpb.measure import Measurement, Prepared, Progress, Subject, SubjectScores, score_aside
from tasks.job import Job
from tasks.lora.ablate import Ablation, ablate_adapter, list_ablations
from tasks.lora.base import read_base_config
from tasks.lora.family import Family
from tasks.lora.files import AdapterFiles, open_adapter


def score_ablations(
    job: Job, engine: Engine, prepared: Prepared, measured: Measurement, own: Subject, progress: Progress
) -> dict[str, Any]:
    """What is left of the adapter `own` without the rest, scored on the units of its measurement; by name.

    The record of each has its bits per byte, or why the engine refused it, which nobody trained and nobody is blamed
    for. Nothing where the adapter has one class of factors alone.
    """
    if own.path is None:
        return {}
    family = read_base_config(job.base.config, label=f"base {job.base.name}").family
    converted = open_adapter(Path(own.path), label=job.label)
    record: dict[str, Any] = {}
    for ablation in list_ablations(converted, family):
        with _made(job, converted, family, ablation) as path:
            author, _, digest = own.model_name.rpartition("@")
            subject = Subject(ablation.value, f"{author}~{ablation}@{digest}", str(path), own.is_3d)
            try:
                scores = score_aside(engine, prepared, subject, progress)
            except EngineRefused as refused:
                job.log.warning("%s: %s was not scored: %s", job.label, ablation, refused)
                record[ablation.value] = {"bpb": None, "units": 0, "refused": str(refused)}
            else:
                record[ablation.value] = _sum_up(prepared, measured, scores)
    return record


def recorded_ablations(scored: Step) -> dict[str, Any]:
    """The ablations that a scored step recorded, by name."""
    found: Any = scored.result.get("ablation", {})
    return dict(found)


def ablation_notes(scored: Step) -> list[str]:
    """One line for each of them, beside what their class is for."""
    return [
        f"{name.replace('_', ' ')}: {_say(one)}; decides nothing"
        for name, one in recorded_ablations(scored).items()
    ]


def _say(one: Mapping[str, Any]) -> str:
    if one["bpb"] is None:
        return f"not scored: {one['refused'] or 'no unit was left'}"
    return f"{one['bpb']:.4f} bits per byte over {one['units']} units"


@contextmanager
def _made(job: Job, converted: AdapterFiles, family: Family, ablation: Ablation) -> Iterator[Path]:
    """Keep what is left of the adapter beside it, where the engine can read it, for as long as the block runs."""
    fresh = job.disk.folder() / uuid4().hex
    ablate_adapter(converted, family, ablation, fresh)
    path = converted.directory.with_name(f"{converted.directory.name}-{ablation}")
    job.disk.share(fresh, path)
    try:
        yield path
    finally:
        job.disk.drop(path)


def _sum_up(prepared: Prepared, measured: Measurement, scores: SubjectScores) -> dict[str, Any]:
    bits = {unit.id: value for unit, value in zip(prepared.units, scores.bits, strict=True)}
    kept = [unit for unit in measured.units if math.isfinite(bits[unit.id])]
    total = sum(unit.byte_count for unit in kept)
    bpb = math.fsum(bits[unit.id] for unit in kept) / total if total else None
    return {"bpb": bpb, "units": len(kept), "refused": None}
