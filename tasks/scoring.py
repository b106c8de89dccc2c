"""Scores: the adapter against base, control and wrong adapters, on the engine of its base."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from prefect import task
from prefect.cache_policies import NO_CACHE

from roster.serving import Manifest
from storage.errors import ObjectNotFound
from storage.ledger import Outcome, Step, StepKind
from tasks.ablation import score_ablations
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineRefused, EngineUnavailable
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
from tasks.bpb.opponents import Opponent
from tasks.conversion import ensure_converted
from tasks.engine_fit import needs_of_manifest, needs_of_record
from tasks.engines import (
    leased_engine,
    published_engine_id,
    require_engine,
    require_same_engine,
)
from tasks.errors import FilesDamaged, OpponentGone, OpponentRefused
from tasks.job import Job, Result, run_step
from tasks.judgement import find_drift
from tasks.lora.ablate import Ablation
from tasks.opponents import candidate_name, control_name, recorded_opponents
from tasks.poison import begin_trial, record_death
from tasks.progress import Counted, ProgressLines
from tasks.publication import offer_control
from tasks.transfer import fetch_served, holds_files, read_manifest, recorded_files
from tasks.validation import require_resolved

READINGS = "readings"
"""The input `for` of a scored step that compares two readings of an adapter, and judges nothing."""


@task(persist_result=False, cache_policy=NO_CACHE)
def score(job: Job, inspected: Step, converted: Step, opponents: Step) -> Step:
    """Bits per unit of every subject, and what they may be compared with."""
    wrong = recorded_opponents(opponents)
    inputs = {"wrong": " ".join(one.output_digest for one in wrong)}
    return _score(job, inspected, converted, wrong, inputs, part_of=StepKind.SCORED)


@task(persist_result=False, cache_policy=NO_CACHE)
def score_readings(job: Job, inspected: Step, converted: Step) -> Step:
    """The same for the two readings of an adapter whose packing nothing tells, own and control; no wrong adapters."""
    return _score(job, inspected, converted, (), {"for": READINGS}, part_of=StepKind.INSPECTED)


def _score(
    job: Job,
    inspected: Step,
    converted: Step,
    wrong: tuple[Opponent, ...],
    more_inputs: dict[str, str],
    *,
    part_of: StepKind,
) -> Step:
    engine_id = published_engine_id(job)
    ablated = job.limits.ablation and part_of is StepKind.SCORED
    control: Any = converted.result["control"]

    def work() -> Result:
        opponents = tuple(_opponent(job, other) for other in wrong)
        own = needs_of_record(job.label, converted.result)
        info = require_engine(job, [own, *map(needs_of_manifest, opponents)])
        units = _units(job)
        subjects = _subjects(job, inspected, converted, opponents)
        own_path, _, *wrong_paths = (Path(subject.path) for subject in subjects if subject.path is not None)
        require_resolved(job, info, own_path, wrong_paths)
        with leased_engine(job, partial(offer_control, job, converted)) as engine:
            require_same_engine(job, engine_id)
            _forget_candidates(job, engine)
            prepared = prepare_units(engine, units, stride=job.limits.score_stride or None)
            own_subject = next(subject for subject in subjects if subject.label == OWN)
            trial = begin_trial(job, engine_id, own_subject, converted)
            try:
                measured = measure(engine, prepared, subjects, _report(job), ahead=trial.ahead)
            except EngineRefused as refused:
                _explain_refusal(job, engine, prepared, converted, refused)
            except EngineUnavailable as gone:
                return record_death(job, engine, gone, trial)
            require_same_engine(job, engine_id)
            record = _record(job, engine_id, units, prepared, measured) | {"untested": list(info.untested)}
            if ablated:
                record["ablation"] = score_ablations(
                    job, engine, prepared, measured, own_subject, _report(job)
                )
        drift = find_drift(job, measured)
        return Result(Outcome.STOPPED, record | drift) if drift else Result(Outcome.DONE, record)

    inputs = {
        "adapter": job.upload.adapter_digest,
        "base": job.base.digest,
        "own": str(converted.result["output_digest"]),
        "control": control["output_digest"],
        "heldout": " ".join(sorted(one.sha256 for one in job.heldout)),
        "engine": engine_id,
        "stride": str(job.limits.score_stride),
    }
    if ablated:
        more_inputs = more_inputs | {"ablation": " ".join(Ablation)}
    return run_step(job, StepKind.SCORED, inputs | more_inputs, work, part_of=part_of)


def _units(job: Job) -> tuple[Unit, ...]:
    return merge_sets(
        [HeldoutUnits(one.ref, tuple(Unit(u.id, u.text, u.prompt) for u in one.units)) for one in job.heldout]
    )


def _opponent(job: Job, chosen: Opponent) -> Manifest:
    """The manifest of a wrong adapter that was chosen.

    Raises:
        OpponentGone: it is not in the store any more.
    """
    try:
        return read_manifest(job.store, chosen.author, chosen.output_digest)
    except ObjectNotFound as error:
        raise OpponentGone(job.label, chosen.author, error.key) from error


def _subjects(
    job: Job, inspected: Step, converted: Step, opponents: tuple[Manifest, ...]
) -> tuple[Subject, ...]:
    """Base, own, control and wrong adapters, each in a directory on this machine that the engine can read."""
    own_path, control_path = ensure_converted(job, inspected, converted)
    own = str(converted.result["output_digest"])
    control: Any = converted.result["control"]
    is_3d = bool(converted.result["is_3d_lora_weight"])
    subjects = [
        Subject(BASE, job.base.document.served_model, None, False),
        Subject(OWN, candidate_name(job.author, own), str(own_path), is_3d),
        Subject(CONTROL, control_name(job.author, control["output_digest"]), str(control_path), is_3d),
    ]
    for other in opponents:
        path = job.served_path(other.author, other.output_digest)
        name = candidate_name(other.author, other.output_digest)
        try:
            fetch_served(job.store, other, job.disk, path, job.progress(f"downloading {name}", Counted.BYTES))
        except ObjectNotFound as error:
            raise OpponentGone(job.label, other.author, error.key) from error
        subjects.append(Subject(WRONG_PREFIX + other.author, name, str(path), other.is_3d_lora_weight))
    return tuple(subjects)


def _forget_candidates(job: Job, engine: Engine) -> None:
    """Have the engine forget what a killed run left loaded; called under the lease, when none of it is in use.

    vLLM refuses a name that it knows from another path, which would look like a refusal of the adapter.
    """
    for name in engine.served_models():
        if "@" in name and name != job.base.document.served_model:
            engine.unload(name)


def _explain_refusal(
    job: Job, engine: Engine, prepared: Prepared, converted: Step, refused: EngineRefused
) -> NoReturn:
    """Raise what a refusal to load means: it is the adapter's own fault only if nothing else is wrong.

    Raises:
        OpponentRefused: it was not this adapter that was refused.
        EngineUnavailable: the engine cannot even score its base any more.
        FilesDamaged: the files here are not those that were converted.
        EngineRefused: as it came.
    """
    own = str(converted.result["output_digest"])
    path = job.converted_path(own)
    if refused.name != candidate_name(job.author, own):
        raise OpponentRefused(job.label, refused.name, refused.message) from refused
    unit = prepared.units[0]
    window = unit.windows[0]
    engine.logprobs(job.base.document.served_model, [unit.ids[window.begin : window.end]])
    if not holds_files(path, recorded_files(converted.result["files"])):
        job.disk.drop(path)
        raise FilesDamaged(job.label, str(path), refused.message) from refused
    raise refused


def _report(job: Job) -> Progress:
    """One log line for each subject when it begins, and others where it takes long."""
    begun: dict[str, ProgressLines] = {}

    def report(label: str, done: int, total: int) -> None:
        if label not in begun:
            begun[label] = job.progress(f"scoring {label}", Counted.PROMPTS)
            job.log.info("%s: scoring %s (%d prompts)", job.label, label, total)
        begun[label](done, total)

    return report


def _record(
    job: Job, engine_id: str, units: tuple[Unit, ...], prepared: Prepared, measured: Measurement
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
        "engine_id": engine_id,
        "heldout": [one.ref for one in job.heldout],
        "units": [{"id": unit.id, "bytes": unit.byte_count} for unit in measured.units],
        "voided": [{"id": one.id, "reason": one.reason, "subject": one.subject} for one in measured.voided],
        "subjects": {column.label: list(column.bits) for column in measured.scores},
        "tokens": measured.tokens,
        "seconds": round(measured.seconds, 3),
    }
