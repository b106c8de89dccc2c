"""The wrong adapters that an adapter meets: chosen from the roster, by what is known of it, once, and recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from roster.serving import Roster
from storage.claims import read_ledger
from storage.digests import FileDigest
from storage.documents import format_time, read_document
from storage.errors import InvalidDocument, ObjectNotFound
from storage.keys import ledger_prefix, parse_ledger_key, roster_key
from storage.ledger import Ledger, Outcome, Step, StepKind
from storage.matrices import read_newest_matrix
from tasks.bpb.measure import BASE, OWN, WRONG_PREFIX
from tasks.bpb.opponents import Candidate, Known, KnownFrom, Opponent, Served, Why, choose_opponents
from tasks.engines import published_engine_id
from tasks.job import Job, Result, run_step
from tasks.outcomes import Code
from tasks.stored_scores import recorded_measurement
from tasks.transfer import read_manifest, recorded_files

_EARLIER = 8
"""The author's other adapters, the last ones touched, whose scores are looked at; each is a ledger to be read."""


@task(persist_result=False, cache_policy=NO_CACHE)
def choose(job: Job, converted: Step) -> Step:
    """The wrong adapters for this adapter, chosen once and recorded before anything is scored.

    A new matrix or other authors do not change a choice that was made; a second scoring makes another.
    """
    output_digest = str(converted.result["output_digest"])
    stated = job.upload.training.authors if job.upload.training else ()
    own = _candidate(
        job.upload.adapter_digest,
        output_digest,
        recorded_files(converted.result["files"]),
        frozenset({job.author, *stated}),
    )
    exclusions = [pair for pair in job.base.document.exclusions if own.authors & {*pair}]

    def work() -> Result:
        served = _served_elsewhere(job)
        known = _list_known(job)
        chosen = choose_opponents(
            served,
            partial(_look_up, job, _refused(job)),
            own=own,
            exclusions=exclusions,
            known=known,
            k=job.limits.max_opponents,
        )
        for one in chosen:
            job.log.info("%s: opponent %s, %s", job.label, one.author, _say_why(one))
        record = [asdict(one) for one in chosen]
        return Result(Outcome.DONE, {"opponents": record, "available": len(served), "known": len(known)})

    inputs = {
        "adapter": own.adapter_digest,
        "base": job.base.digest,
        "own": output_digest,
        "authors": " ".join(sorted(own.authors)),
        "exclusions": json.dumps(sorted(sorted(pair) for pair in exclusions)),
        "most": str(job.limits.max_opponents),
    }
    return run_step(job, StepKind.OPPONENTS, inputs, work, stands=lambda step: _can_be_met(job, step))


def recorded_opponents(step: Step) -> tuple[Opponent, ...]:
    """The wrong adapters that an opponents step recorded."""
    record: Any = step.result["opponents"]
    return tuple(
        Opponent(
            author=one["author"],
            adapter_digest=one["adapter_digest"],
            output_digest=one["output_digest"],
            why=Why(one["why"]),
            known=one["known"] and Known(**one["known"] | {"source": KnownFrom(one["known"]["source"])}),
        )
        for one in record
    )


def candidate_name(author: str, output_digest: str) -> str:
    """The engine's name of an adapter that is scored: never the same for other bytes."""
    return f"{author}@{output_digest[:16]}"


def control_name(author: str, output_digest: str) -> str:
    """The engine's name of an author's control."""
    return candidate_name(f"{author}~control", output_digest)


def _served_elsewhere(job: Job) -> list[Served]:
    """What the roster serves other authors of this base."""
    try:
        roster, _ = read_document(job.store, roster_key(), Roster)
    except ObjectNotFound:
        return []
    served = roster.bases.get(job.base.name)
    authors = served.authors if served else {}
    return [Served(author, entry.output_digest) for author, entry in authors.items() if author != job.author]


def _look_up(job: Job, refused: frozenset[str], served: Served) -> Candidate | None:
    """What the store has of a served adapter; None for one that cannot be met.

    What is gone, damaged or not taken by the engine is passed over: that is its own trouble, not this adapter's.
    """
    if candidate_name(served.author, served.output_digest) in refused:
        job.log.warning(
            "%s: %s is no opponent: the engine that runs now did not take it", job.label, served.author
        )
        return None
    try:
        manifest = read_manifest(job.store, served.author, served.output_digest)
        ledger, _ = read_ledger(job.store, served.author, manifest.adapter_digest)
    except (ObjectNotFound, InvalidDocument) as error:
        job.log.warning("%s: %s is served but cannot be an opponent: %s", job.label, served.author, error)
        return None
    files = [FileDigest(file.name, file.bytes, file.sha256) for file in manifest.files]
    authors = frozenset({served.author, *_stated_authors(ledger)})
    return _candidate(manifest.adapter_digest, served.output_digest, files, authors)


def _candidate(
    adapter_digest: str, output_digest: str, files: Iterable[FileDigest], authors: frozenset[str]
) -> Candidate:
    """`files` are the converted ones; the weights count by themselves, since the configs of equal ones may differ."""
    weights = {file.sha256 for file in files if file.name.endswith(".safetensors")}
    return Candidate(adapter_digest, frozenset({adapter_digest, output_digest, *weights}), authors)


def _stated_authors(ledger: Ledger) -> list[str]:
    """Whom an adapter serves, as it was when its own opponents were chosen last."""
    choices = (step for step in reversed(ledger.steps) if step.kind is StepKind.OPPONENTS)
    last = next(choices, None)
    return last.inputs.get("authors", "").split() if last else []


def _refused(job: Job) -> frozenset[str]:
    """The names of what stopped this adapter's scoring on the engine that runs now."""
    engine = published_engine_id(job)
    stops = _scorings(job.ledger.document, Outcome.STOPPED)
    return frozenset(str(step.result.get("where")) for step in stops if step.inputs.get("engine") == engine)


def _can_be_met(job: Job, choice: Step) -> bool:
    """Whether no scoring since found one of these opponents gone, or not taken by the engine."""
    names = {candidate_name(one.author, one.output_digest) for one in recorded_opponents(choice)}
    steps = job.ledger.document.steps
    position = steps.index(choice)
    return not any(
        step.result.get("code") == Code.OPPONENT_GONE.value or step.result.get("where") in names
        for step in steps[position + 1 :]
        if step.kind is StepKind.SCORED
    )


def _list_known(job: Job) -> list[Known]:
    """How hard others' adapters are for this author, each once: as the newest matrix says, else the last score."""
    known: dict[str, Known] = {}
    for one in (*_known_from_matrix(job), *_known_from_scores(job)):
        known.setdefault(one.author, one)
    return list(known.values())


def _known_from_matrix(job: Job) -> list[Known]:
    """By the newest matrix of the whole roster; one that cannot be read is no reason to stop."""
    try:
        matrix = read_newest_matrix(job.store, job.base.name)
    except InvalidDocument as error:
        job.log.warning("%s: the newest matrix tells nothing of opponents: %s", job.label, error)
        return []
    if matrix is None:
        return []
    measured_at = format_time(matrix.measured_at)
    return [
        Known(one.author, one.margin, KnownFrom.MATRIX, measured_at)
        for one in matrix.list_margins(job.author)
    ]


def _known_from_scores(job: Job) -> list[Known]:
    """By the scores of this adapter and of the author's others on this base, the newest first."""
    scored = [
        step
        for ledger in _ledgers_of_author(job)
        for step in _scorings(ledger, Outcome.DONE)
        if step.inputs.get("base") == job.base.digest
    ]
    scored.sort(key=lambda step: step.finished_at, reverse=True)
    return [one for step in scored for one in _margins(step)]


def _margins(scored: Step) -> Iterator[Known]:
    """None where own was no better than base: margins over an adapter that learnt nothing do not compare."""
    measured = recorded_measurement(scored)
    size = sum(unit.byte_count for unit in measured.units)
    totals = {column.label: math.fsum(column.bits) for column in measured.scores}
    if not totals[OWN] < totals[BASE]:
        return
    for label, bits in totals.items():
        if label.startswith(WRONG_PREFIX):
            margin = (bits - totals[OWN]) / size
            author = label.removeprefix(WRONG_PREFIX)
            yield Known(author, margin, KnownFrom.SCORES, format_time(scored.finished_at))


def _ledgers_of_author(job: Job) -> Iterator[Ledger]:
    """This adapter's ledger and those of the author's last others; one that cannot be read tells nothing."""
    yield job.ledger.document
    listed = sorted(
        job.store.list_objects(ledger_prefix(job.author)), key=lambda found: found.last_modified, reverse=True
    )
    parsed = (parse_ledger_key(found.key) for found in listed if found.key != job.ledger.key)
    for author, adapter_digest in islice(filter(None, parsed), _EARLIER):
        try:
            yield read_ledger(job.store, author, adapter_digest)[0]
        except (ObjectNotFound, InvalidDocument) as error:
            job.log.warning("%s: an earlier adapter tells nothing of opponents: %s", job.label, error)


def _scorings(ledger: Ledger, outcome: Outcome) -> Iterator[Step]:
    """The newest first."""
    return (
        step for step in reversed(ledger.steps) if (step.kind, step.outcome) == (StepKind.SCORED, outcome)
    )


def _say_why(one: Opponent) -> str:
    if one.known is None:
        return "at random"
    known = one.known
    return f"of the hardest known: {known.margin:+.4f} bits per byte in the {known.source} of {known.measured_at}"
