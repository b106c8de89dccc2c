"""Adapters that kill engines: told from engines that die by themselves, over several runs.

An engine that dies is ours: the run stops, and is repeated once the supervisor has started another. Only an adapter in
whose turn two engines have died, on each of which a ready adapter had been scored on the same prompts just before, is
refused. What a run saw stands in its stopped step, where the next one finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from roster.serving import Manifest, Roster
from storage.documents import format_time, read_document
from storage.errors import InvalidDocument, ObjectNotFound
from storage.keys import engine_key, roster_key
from storage.ledger import Outcome, Step, StepKind
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.bpb.engine_faults import is_out_of_memory
from tasks.bpb.measure import AHEAD, Subject
from tasks.errors import AdapterKillsEngine, EngineDied
from tasks.job import Job, Result
from tasks.opponents import candidate_name
from tasks.outcomes import refusal
from tasks.transfer import fetch_served, read_manifest, recorded_files

DEATH = "death"
"""Where a stopped scored step tells of an engine that died."""

_ENGINES = 2
# A survivor shows that the engine has room for the adapter too, if it takes about as much.
_LEAST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Death:
    """An engine that died in the turn of `model`.

    engine_started: when that process published itself, as the store has it. survivor: the engine's name of a ready
    adapter that it had scored on the same prompts before, None where none had gone first.
    """

    model: str
    engine_started: str
    survivor: str | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One scoring of the adapter `own`, made so that it tells whose fault it is if the engine dies meanwhile.

    deaths: of engines of this id, in earlier runs. ahead: the ready adapter that is scored before it, if any is.
    """

    own: Subject
    engine_id: str
    engine_started: str
    deaths: tuple[Death, ...]
    ahead: Subject | None


def begin_trial(job: Job, engine_id: str, own: Subject, converted: Step) -> Trial:
    """The trial of an adapter; a ready one goes ahead where an engine of this id has died in its turn before.

    One as large as this adapter or about, that was not itself refused or in its turn when an engine died. None may be
    there.

    Raises:
        StoreUnavailable.
    """
    deaths = tuple(_list_deaths(job, engine_id))
    accused = {death.model for death in deaths}
    ahead = None
    if own.model_name in accused:
        least = _LEAST_SHARE * sum(file.bytes for file in recorded_files(converted.result["files"]))
        ready = (one for one in _list_ready(job) if sum(file.bytes for file in one.files) >= least)
        ahead = next(_fetch_subjects(job, ready, accused | _list_refused(job, engine_id)), None)
    return Trial(own, engine_id, _engine_started(job), deaths, ahead)


def record_death(job: Job, engine: Engine, gone: EngineUnavailable, trial: Trial) -> Result:
    """How a scoring ends whose engine died in an adapter's turn: stopped, with what the next run has to know.

    Raises:
        EngineUnavailable: as it came: the engine died in no adapter's turn, was short of memory, or has not died.
        AdapterKillsEngine: it is this adapter's own turn that engines do not survive.
    """
    model = gone.model
    if model is None or model == job.base.document.served_model or is_out_of_memory(gone.reason):
        raise gone
    if not engine.has_died():
        raise gone
    is_own = model == trial.own.model_name
    survivor = trial.ahead.model_name if trial.ahead and is_own else None
    death = Death(model, trial.engine_started, survivor)
    alike = [one for one in (*trial.deaths, death) if one.model == model]
    proven = {one.engine_started: one.survivor for one in alike if one.survivor is not None}
    if len(proven) >= _ENGINES:
        survivors = ", ".join(dict.fromkeys(proven.values()))
        raise AdapterKillsEngine(job.label, model, survivors, gone.reason) from gone
    error = EngineDied(job.label, model, gone.url, gone.reason, _tell(death, len(alike), is_own=is_own))
    record = refusal(error) | {DEATH: asdict(death)}
    if not is_own and len({one.engine_started for one in alike}) >= _ENGINES:
        record["where"] = model  # the next choice of opponents passes it over
    return Result(Outcome.STOPPED, record)


def _list_refused(job: Job, engine_id: str) -> set[str]:
    """The names of others that an engine of this id did not take, or died of, in runs of this adapter."""
    return {str(step.result.get("where")) for step in _stopped(job, engine_id)}


def _list_deaths(job: Job, engine_id: str) -> list[Death]:
    """The engines of this id that died in runs of this adapter."""
    records: list[Any] = [step.result[DEATH] for step in _stopped(job, engine_id) if DEATH in step.result]
    return [Death(**record) for record in records]


def _stopped(job: Job, engine_id: str) -> Iterator[Step]:
    return (
        step
        for step in job.ledger.document.steps
        if (step.kind, step.outcome) == (StepKind.SCORED, Outcome.STOPPED)
        and step.inputs.get("engine") == engine_id
    )


def _fetch_subjects(job: Job, ready: Iterable[Manifest], accused: set[str]) -> Iterator[Subject]:
    """Ready adapters on this machine's disk, as far as they can be had."""
    for manifest in ready:
        name = candidate_name(manifest.author, manifest.output_digest)
        if name in accused:
            continue
        path = job.served_path(manifest.author, manifest.output_digest)
        try:
            fetch_served(job.store, manifest, job.disk, path)
        except ObjectNotFound as error:
            job.log.warning("%s: %s cannot go ahead: %s", job.label, name, error)
        else:
            yield Subject(AHEAD, name, str(path), manifest.is_3d_lora_weight)


def _engine_started(job: Job) -> str:
    """When the engine of this base published itself, which it does at every start; empty where it has not."""
    info = job.store.head(engine_key(job.base.name))
    return format_time(info.last_modified) if info else ""


def _list_ready(job: Job) -> Iterator[Manifest]:
    """What the roster serves of this base, as far as it can be read."""
    try:
        roster, _ = read_document(job.store, roster_key(), Roster)
    except ObjectNotFound:
        return
    served = roster.bases.get(job.base.name)
    for author, entry in served.authors.items() if served else ():
        try:
            yield read_manifest(job.store, author, entry.output_digest)
        except (ObjectNotFound, InvalidDocument) as error:
            job.log.warning("%s: %s is served but cannot go ahead: %s", job.label, author, error)


def _tell(death: Death, times: int, *, is_own: bool) -> str:
    """What one death proves, and what comes next."""
    if not is_own:
        return "That is not this adapter"
    if death.survivor is not None:
        return (
            f"{death.survivor}, a ready adapter, had been scored on that engine just before. One more engine that "
            "survives a ready adapter and not this one, and this one is refused"
        )
    if times > 1:
        return (
            f"It was so {times} times now, but no ready adapter of this base and about this size could go first, so "
            "nothing tells whose fault it is. Look at the engine's log"
        )
    return "That may be the engine's own trouble. Next time a ready adapter goes first, if there is one of this size"
