"""The BPB check on plain directories: the first is own, the others are wrong adapters, the control is made here.

The same conversion, measurement and rules as in the pipeline, without store and ledger. Nothing is served by it: the
checks of the conversion, the evidence of the layout and the engine's qualification are no part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from storage.bases import BaseDocument
from storage.documents import utc_now
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.bpb.heldout import merge_sets, unit_kind
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
from tasks.bpb.protocol import Scorer
from tasks.bpb.reference_files import HeldoutFile
from tasks.bpb.rulings import Thresholds
from tasks.bpb.verdict import decide
from tasks.bpb.wording import ControlKind
from tasks.directories import KnownBase
from tasks.engine_fit import EngineNeeds, needs_of_record
from tasks.lora.convert import convert_adapter
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.plan import ConversionPlan, PlanKind, plan_control, plan_conversion, require_served
from tasks.lora.target import TargetFormat
from tasks.records import conversion_record, policy_statement, training_statement, written_digest
from tasks.training_file import read_training
from tasks.verdict_record import verdict_record

_CANDIDATE = "~score"
"""How the engine's names of these adapters begin: no author's can."""


class ScoredBy(StrEnum):
    """What scores. Only an engine's verdict can say ready: vLLM is what serves."""

    AUTO = "auto"
    URL = "url"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Scored:
    """What is scored: own first, then its control, then the wrong ones, each in a directory of the served form.

    directories: label → what was given for it. needs: what the engine must be able to do for them.
    """

    subjects: tuple[Subject, ...]
    directories: Mapping[str, str]
    control_kind: ControlKind
    output_digest: str
    needs: tuple[EngineNeeds, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Converted:
    path: Path
    digest: str
    record: dict[str, Any]


def served_format(base: KnownBase, document: BaseDocument | None, scored_by: ScoredBy) -> TargetFormat:
    """The form in which the adapters are scored: what the base is registered with, else its class's own.

    PEFT reads the stacked form of every family whose modules the engine calls as transformers does.
    """
    if scored_by is ScoredBy.REFERENCE:
        return TargetFormat.STACKED
    if document is not None:
        return TargetFormat(document.target_format.value)
    return TargetFormat.STACKED if base.config.served.native_3d else TargetFormat.PER_EXPERT


def convert_scored(
    directories: Sequence[Path], base: KnownBase, format: TargetFormat, work: Path, *, scored_by: ScoredBy
) -> Scored:
    """Every adapter converted into `work`, and the first one's control beside it.

    Raises:
        AdapterError: one of the directories is no adapter of this base, or cannot be served in this format.
    """
    own, *wrong = directories
    if scored_by is not ScoredBy.REFERENCE:
        require_served(base.config, format, own.resolve().name)
    found = _read(own, base)
    made = _write(found, plan_conversion(found.layout, format), work / "own")
    plan, kind = _plan_control(own, found, base, format)
    control = _write(found, plan, work / "control")
    is_3d = format is TargetFormat.STACKED
    subjects = [
        _subject(OWN, found.label, made, is_3d),
        _subject(CONTROL, f"{found.label}~control", control, is_3d),
    ]
    named = {OWN: str(own)}
    needs = [_needs(found.label, made, control)]
    warnings = [f"{found.label}: {warning}" for warning in found.warnings]
    for number, directory in enumerate(wrong, start=2):
        other = _read(directory, base)
        label = WRONG_PREFIX + (
            other.label if WRONG_PREFIX + other.label not in named else f"{other.label}-{number}"
        )
        converted = _write(other, plan_conversion(other.layout, format), work / f"wrong-{number}")
        subjects.append(_subject(label, f"{number}-{other.label}", converted, is_3d))
        named[label] = str(directory)
        needs.append(_needs(other.label, converted, converted))
        warnings += (f"{other.label}: {warning}" for warning in other.warnings)
    return Scored(tuple(subjects), named, ControlKind(kind.value), made.digest, tuple(needs), tuple(warnings))


def score_directories(
    scorer: Scorer,
    scored: Scored,
    files: Sequence[HeldoutFile],
    *,
    served_model: str,
    scored_by: ScoredBy,
    weights_digest: str | None,
    thresholds: Thresholds,
    stride: int | None,
    progress: Progress,
) -> dict[str, Any]:
    """What `roster score --json` prints: the verdict as the ledger would hold it, and what it was reached on.

    `outcome` is null where the reference scorer scored; `would_be` then says what an engine with these scores would
    have given. `measure_id` is null where the base's weights are not known by digest.

    Raises:
        HeldoutUnusable, WindowInvalid, MeasurementVoid, …: see `tasks.bpb.measure`; what the scorer raises.
    """
    units = merge_sets([file.heldout for file in files])
    prepared = prepare_units(scorer, units, stride=stride)
    base = Subject(BASE, served_model, None, False)
    measured = measure(scorer, prepared, (base, *scored.subjects), progress)
    verdict = decide(
        measured,
        opponents_available=False,
        thresholds=thresholds,
        heldout=[file.heldout.name for file in files],
        control_kind=scored.control_kind,
    )
    outcome = verdict.outcome.value
    is_reference = scored_by is ScoredBy.REFERENCE
    identity = None
    if weights_digest is not None:
        identity = measure_id(
            heldout_sha256s=[file.sha256 for file in files],
            unit_kind=unit_kind(units),
            window=prepared.window,
            stride=prepared.stride,
            bos_rule=prepared.bos_rule,
            base_weights_digest=weights_digest,
        )
    return {
        "outcome": None if is_reference else outcome,
        "would_be": outcome if is_reference else None,
        **verdict_record(verdict, scored.output_digest, utc_now()),
        "scored_by": scored_by.value,
        "measure_id": identity,
        "control_kind": scored.control_kind.value,
        "directories": dict(scored.directories),
        "heldout": [file.heldout.name for file in files],
        "warnings": list(scored.warnings),
        **_costs(prepared, measured),
    }


@contextmanager
def engine_at(url: str, *, timeout_s: float) -> Iterator[Engine]:
    """A client of the server at this address, without its lease: whoever else scores on it meanwhile disturbs.

    Raises:
        EngineUnavailable: it does not answer.
    """
    with Engine(url, timeout_s=timeout_s) as engine:
        if not engine.is_healthy():
            raise EngineUnavailable(url, "GET /health", "no healthy answer")
        yield engine


def forget_candidates(engine: Engine) -> None:
    """Have the engine forget what a killed command left loaded: it refuses a name that it has from another path."""
    for name in engine.served_models():
        if name.startswith(f"{_CANDIDATE}:"):
            engine.unload(name)


def _read(directory: Path, base: KnownBase, provisional: Packing = Packing.RANK_MAJOR) -> Inspection:
    label = directory.resolve().name
    training, _ = read_training(directory, label=label)
    return inspect_adapter(
        directory,
        base.config,
        label=label,
        training=training_statement(training),
        policy=policy_statement(base.policy),
        provisional=provisional,
    )


def _plan_control(
    directory: Path, found: Inspection, base: KnownBase, format: TargetFormat
) -> tuple[ConversionPlan, PlanKind]:
    """The control; where nothing tells the packing, the other reading of what nothing tells, as in the pipeline."""
    if found.undecided:
        other = _read(directory, base, Packing.RANK_MAJOR.other)
        return plan_conversion(other.layout, format), PlanKind.OTHER_PACKING
    plan = plan_control(found.layout, format)
    return plan, plan.kind


def _write(found: Inspection, plan: ConversionPlan, path: Path) -> _Converted:
    made = convert_adapter(found.files, plan, path, None)
    return _Converted(path, written_digest(made.files), conversion_record(made, found.layout.base.served))


def _subject(label: str, name: str, made: _Converted, is_3d: bool) -> Subject:
    return Subject(label, f"{_CANDIDATE}:{name}@{made.digest[:16]}", str(made.path), is_3d)


def _needs(label: str, made: _Converted, control: _Converted) -> EngineNeeds:
    return needs_of_record(label, made.record | {"control": control.record})


def _costs(prepared: Prepared, measured: Measurement) -> dict[str, Any]:
    return {
        "window": prepared.window,
        "stride": prepared.stride,
        "voided": [{"id": one.id, "reason": one.reason, "subject": one.subject} for one in measured.voided],
        "tokens": measured.tokens,
        "seconds": round(measured.seconds, 3),
    }
