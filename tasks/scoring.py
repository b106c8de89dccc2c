"""Opponents and scores: the adapter against base, control and wrong adapters, on the engine of its base."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from roster.serving import Roster
from roster.serving_engine import EngineInfo
from storage.documents import read_document
from storage.errors import ObjectNotFound
from storage.keys import roster_key
from storage.ledger import Outcome, Step, StepKind
from tasks.bpb.engine_errors import EngineRefused
from tasks.bpb.heldout import HeldoutUnits, Unit, merge_sets, unit_kind
from tasks.bpb.identity import measure_id
from tasks.bpb.measure import (
    BASE,
    CONTROL,
    OWN,
    WRONG_PREFIX,
    Measurement,
    Prepared,
    Progress,
    Subject,
    measure,
    prepare_units,
)
from tasks.bpb.opponents import Candidate, choose_opponents
from tasks.conversion import ensure_converted
from tasks.engines import leased_engine, read_engine_info, require_engine
from tasks.errors import OpponentRefused
from tasks.job import Job, Result, converted_path, run_step
from tasks.judgement import find_drift
from tasks.transfer import fetch_served, read_manifest

# Converted adapters that stay on a worker's disk between runs, for each base.
_KEPT = 16


@task(persist_result=False, cache_policy=NO_CACHE)
def choose(job: Job, converted: Step) -> Step:
    """The wrong adapters for this adapter, chosen once and recorded before anything is scored."""

    def work() -> Result:
        ready = _ready_candidates(job)
        chosen = choose_opponents(
            ready,
            author=job.author,
            adapter_digest=job.upload.adapter_digest,
            output_digest=str(converted.result["output_digest"]),
            exclusions=job.base.document.exclusions,
            k=job.limits.max_opponents,
        )
        available = sum(candidate.author != job.author for candidate in ready)
        return Result(Outcome.DONE, {"opponents": [asdict(one) for one in chosen], "available": available})

    inputs = {
        "adapter": job.upload.adapter_digest,
        "base": job.base.digest,
        "most": str(job.limits.max_opponents),
    }
    return run_step(job, StepKind.OPPONENTS, inputs, work)


@task(persist_result=False, cache_policy=NO_CACHE)
def score(job: Job, converted: Step, opponents: Step) -> Step:
    """Bits per unit of every subject, and what they may be compared with."""
    info = read_engine_info(job)
    wrong = recorded_opponents(opponents)
    control: Any = converted.result["control"]

    def work() -> Result:
        engine_info = require_engine(job, info, _rank(converted))
        units = _units(job)
        subjects = _subjects(job, converted, wrong)
        with leased_engine(job) as engine:
            prepared = prepare_units(engine, units, stride=job.limits.score_stride or None)
            try:
                measured = measure(engine, prepared, subjects, _report(job))
            except EngineRefused as refused:
                if refused.name != subjects[1].model_name:
                    raise OpponentRefused(job.label, refused.name, refused.message) from refused
                raise
            _trim_served(job)
        record = _record(job, engine_info, units, prepared, measured)
        drift = find_drift(job, measured)
        return Result(Outcome.STOPPED, record | drift) if drift else Result(Outcome.DONE, record)

    inputs = {
        "adapter": job.upload.adapter_digest,
        "base": job.base.digest,
        "own": str(converted.result["output_digest"]),
        "control": control["output_digest"],
        "wrong": " ".join(one.output_digest for one in wrong),
        "heldout": " ".join(sorted(one.sha256 for one in job.heldout)),
        "engine": info.engine_id if info else "none",
        "stride": str(job.limits.score_stride),
    }
    return run_step(job, StepKind.SCORED, inputs, work)


def recorded_opponents(step: Step) -> tuple[Candidate, ...]:
    """The wrong adapters that an opponents step recorded."""
    record: Any = step.result["opponents"]
    return tuple(Candidate(**chosen) for chosen in record)


def candidate_name(author: str, output_digest: str) -> str:
    """The engine's name of an adapter that is scored: never the same for other bytes."""
    return f"{author}@{output_digest[:16]}"


def _ready_candidates(job: Job) -> list[Candidate]:
    """The adapters that the roster serves on this base, with the digests of what was uploaded."""
    try:
        roster, _ = read_document(job.store, roster_key(), Roster)
    except ObjectNotFound:
        return []
    served = roster.bases.get(job.base.name)
    return [
        Candidate(
            author,
            read_manifest(job.store, author, entry.output_digest).adapter_digest,
            entry.output_digest,
        )
        for author, entry in (served.authors.items() if served else ())
    ]


def _rank(converted: Step) -> int:
    rank: Any = converted.result["rank"]
    return int(rank)


def _units(job: Job) -> tuple[Unit, ...]:
    return merge_sets(
        [HeldoutUnits(one.ref, tuple(Unit(u.id, u.text, u.prompt) for u in one.units)) for one in job.heldout]
    )


def _subjects(job: Job, converted: Step, wrong: tuple[Candidate, ...]) -> tuple[Subject, ...]:
    """Base, own, control and wrong adapters, each in a directory on this machine that the engine can read."""
    own_path, control_path = ensure_converted(job, converted)
    own = str(converted.result["output_digest"])
    control: Any = converted.result["control"]
    displaced = f"{job.author}~control"
    subjects = [
        Subject(BASE, job.base.document.served_model, None, False),
        Subject(OWN, candidate_name(job.author, own), str(own_path), False),
        Subject(CONTROL, candidate_name(displaced, control["output_digest"]), str(control_path), False),
    ]
    for other in wrong:
        path = converted_path(job.limits.work_path, job.base.name, other.author, other.output_digest)
        fetch_served(job.store, other.author, other.output_digest, path)
        name = candidate_name(other.author, other.output_digest)
        subjects.append(Subject(WRONG_PREFIX + other.author, name, str(path), False))
    return tuple(subjects)


def _report(job: Job) -> Progress:
    """One log line for each subject when it begins."""
    begun: set[str] = set()

    def report(label: str, done: int, total: int) -> None:
        if label not in begun:
            begun.add(label)
            job.log.info("%s: scoring %s (%d prompts)", job.label, label, total)

    return report


def _record(
    job: Job, info: EngineInfo, units: tuple[Unit, ...], prepared: Prepared, measured: Measurement
) -> dict[str, Any]:
    return {
        "measure_id": measure_id(
            heldout_sha256s=[one.sha256 for one in job.heldout],
            unit_kind=unit_kind(units),
            window=prepared.window,
            stride=prepared.stride,
            bos_rule=prepared.bos_rule,
            base_weights_digest=job.base.document.weights_digest or "",
        ),
        "engine_id": info.engine_id,
        "heldout": [one.ref for one in job.heldout],
        "units": [{"id": unit.id, "bytes": unit.byte_count} for unit in measured.units],
        "voided": [{"id": one.id, "reason": one.reason, "subject": one.subject} for one in measured.voided],
        "subjects": {column.label: list(column.bits) for column in measured.scores},
        "tokens": measured.tokens,
        "seconds": round(measured.seconds, 3),
    }


def _trim_served(job: Job) -> None:
    """Keep the converted adapters used last; called under the lease, when the engine knows none of them."""
    served = job.limits.work_path / "served" / job.base.name
    directories = sorted(served.glob("*/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in directories[_KEPT:]:
        shutil.rmtree(path, ignore_errors=True)
