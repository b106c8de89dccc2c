"""A sample of what the roster serves, scored again on an engine: does it give the scores that made them ready?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roster.serving import Roster
from roster.serving_engine import EngineInfo
from storage.bases import Base
from storage.claims import read_ledger
from storage.documents import read_document
from storage.errors import HeldoutMissing, InvalidDocument, ObjectNotFound
from storage.heldout import HeldoutSet, read_heldout
from storage.keys import parse_heldout_ref, roster_key
from storage.ledger import Ledger, Outcome, Step, StepKind
from storage.qualifications import EngineCheck, SampledScore
from storage.s3 import S3Store
from tasks.bpb.engine_errors import EngineAtFault, EngineRefused
from tasks.bpb.heldout import HeldoutUnits, Unit, merge_sets, unit_kind
from tasks.bpb.identity import measure_id
from tasks.bpb.measure import BASE, OWN, Measurement, Subject, measure, prepare_units
from tasks.bpb.protocol import Scorer
from tasks.disk import RunDisk
from tasks.engine_fit import check_engine, needs_of_manifest
from tasks.errors import EngineTooOld, EngineUnfit
from tasks.stored_scores import recorded_measurement
from tasks.transfer import fetch_served, read_manifest

TOLERANCE = 1e-3
"""Bits per byte: how far scores of the same text may differ between engines."""

_READINGS = "for"  # an input of scored steps that compare readings, and judge nothing


@dataclass(frozen=True, slots=True)
class Sampled:
    """A served adapter that is to be scored again."""

    author: str
    output_digest: str


class _NotComparable(Exception):
    """Why nothing can be told of the engine from an adapter."""


def choose_sample(store: S3Store, base: str, engine_id: str, most: int) -> tuple[Sampled, ...]:
    """At most so many of the adapters that the roster serves on a base; other ones for another engine.

    Raises:
        InvalidDocument, StoreUnavailable: the roster cannot be read.
    """
    try:
        roster, _ = read_document(store, roster_key(), Roster)
    except ObjectNotFound:
        return ()
    served = roster.bases.get(base)
    authors = served.authors if served else {}
    drawn = sorted(authors, key=lambda author: hashlib.sha256(f"{engine_id} {author}".encode()).digest())
    return tuple(Sampled(author, authors[author].output_digest) for author in drawn[:most])


def score_again(
    store: S3Store,
    base: Base,
    engine: Scorer,
    info: EngineInfo,
    sampled: Sampled,
    *,
    disk: RunDisk,
    path: Path,
    model: str,
    stride: int | None,
    say: Callable[[str], None],
) -> SampledScore:
    """Own and base of a served adapter, as its last scores have them and as this engine gives them now.

    path: where the adapter lies on this machine, or will. model: what the engine calls the base. Not compared is one
    whose scores were taken of other text or in another way, or that this engine is not set up for.

    Raises:
        EngineUnavailable, EngineProtocolError, MeasurementVoid, StoreUnavailable.
    """
    author, digest = sampled.author, sampled.output_digest
    try:
        manifest = read_manifest(store, author, digest)
        check_engine(info, base.name, model, [needs_of_manifest(manifest)])
        ledger, _ = read_ledger(store, author, manifest.adapter_digest)
        before = _find_scores(ledger, digest)
        record: Any = before.result
        heldout = [read_heldout(store, *parse_heldout_ref(ref)) for ref in record["heldout"]]
        units = merge_sets([HeldoutUnits(one.ref, _units(one)) for one in heldout])
        prepared = prepare_units(engine, units, stride=stride)
        now = measure_id(
            heldout_sha256s=[one.sha256 for one in heldout],
            unit_kind=unit_kind(units),
            window=prepared.window,
            stride=prepared.stride,
            bos_rule=prepared.bos_rule,
            base_weights_digest=base.document.weights_digest or "",
        )
        if now != record["measure_id"]:
            raise _NotComparable(f"its scores are of measure {record['measure_id']}, this would be {now}")
        fetch_served(store, manifest, disk, path)
    except (
        _NotComparable,
        ObjectNotFound,
        InvalidDocument,
        HeldoutMissing,
        EngineUnfit,
        EngineTooOld,
    ) as why:
        say(f"sample: {author} is not compared: {why}")
        return SampledScore(author=author, output_digest=digest, compared=False, why=str(why))
    say(f"sample: scoring {author} and the base again ({len(prepared.units)} texts)")
    subjects = [
        Subject(BASE, model, None, False),
        Subject(OWN, f"{author}@{digest[:16]}", str(path), manifest.is_3d_lora_weight),
    ]
    try:
        measured = measure(engine, prepared, subjects, lambda label, done, total: None)
    except (EngineRefused, EngineAtFault) as refused:
        return SampledScore(author=author, output_digest=digest, compared=True, why=str(refused))
    old = recorded_measurement(before)
    if {unit.id for unit in old.units}.isdisjoint(unit.id for unit in measured.units):
        none_shared = "not one text is scored now that was scored then"
        return SampledScore(author=author, output_digest=digest, compared=True, why=none_shared)
    return SampledScore(
        author=author,
        output_digest=digest,
        compared=True,
        own=(_bpb(old, OWN, measured), _bpb(measured, OWN, old)),
        base=(_bpb(old, BASE, measured), _bpb(measured, BASE, old)),
    )


def compare_sample(sample: tuple[SampledScore, ...]) -> EngineCheck:
    """Whether every adapter of the sample that can be compared has the scores that it had."""
    compared = [one for one in sample if one.compared]
    moved = {one.author: _moved(one) for one in compared}
    off = [author for author, value in moved.items() if value is None or not value <= TOLERANCE]
    found = f"{len(compared)} of {len(sample)} served adapters compared with their verdicts"
    figures = {"sample": float(len(sample)), "compared": float(len(compared)), "tolerance": TOLERANCE}
    told = [value for value in moved.values() if value is not None]
    if told:
        figures["largest"] = max(told)
        found += f": {max(told):.2g} bits per byte off at most, {TOLERANCE:g} is allowed"
    for one in compared:
        if one.author in off:
            found += f"; {one.author} is off" if one.why is None else f"; {one.author}: {one.why}"
    return EngineCheck(name="roster_sample", passed=not off, found=found, figures=figures)


def _find_scores(ledger: Ledger, output_digest: str) -> Step:
    """The scores behind an adapter's last verdict: the last ones that were finished and judged it."""
    for step in reversed(ledger.steps):
        is_own = step.inputs.get("own") == output_digest and _READINGS not in step.inputs
        if step.kind is StepKind.SCORED and step.outcome is Outcome.DONE and is_own:
            return step
    raise _NotComparable("its ledger holds no finished scores")


def _units(heldout: HeldoutSet) -> tuple[Unit, ...]:
    return tuple(Unit(unit.id, unit.text, unit.prompt) for unit in heldout.units)


def _bpb(of: Measurement, label: str, other: Measurement) -> float:
    """Bits per byte of a subject over the units that both measurements could score."""
    shared = {unit.id for unit in of.units} & {unit.id for unit in other.units}
    [bits] = [column.bits for column in of.scores if column.label == label]
    kept = [(value, unit.byte_count) for value, unit in zip(bits, of.units, strict=True) if unit.id in shared]
    return sum(value for value, _ in kept) / sum(count for _, count in kept)


def _moved(one: SampledScore) -> float | None:
    """The larger one of both distances, None where there is none."""
    if one.own is None or one.base is None:
        return None
    return max(abs(after - before) for before, after in (one.own, one.base))
