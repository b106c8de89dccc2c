"""A verdict on scores that the ledger has: from a scored step alone, without an engine; Prefect is not imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from storage.ledger import Outcome, Step
from storage.training import Training
from tasks.ablation import ablation_notes, recorded_ablations
from tasks.bpb.agreement import Reference, ReferenceSet
from tasks.bpb.measure import Measurement, SubjectBits, UnitBytes, VoidedUnit
from tasks.bpb.rulings import Thresholds
from tasks.bpb.verdict import decide
from tasks.bpb.wording import ControlKind
from tasks.job import Result
from tasks.readings import scores_statement
from tasks.verdict_record import verdict_record

_SOME, _NONE = "some", "none"


@dataclass(frozen=True, slots=True)
class Scores:
    """What a verdict on scores rests on beside thresholds.

    inspected, scored: finished steps. output_digest: of the adapter as it was scored. are_others_ready: whether there
    were adapters of other authors when its opponents were chosen. training: what the trainer states.
    """

    inspected: Step
    scored: Step
    output_digest: str
    control_kind: ControlKind
    are_others_ready: bool
    training: Training | None

    def inputs(self, thresholds: Thresholds) -> dict[str, str]:
        """What of these the verdict's step key covers."""
        return {
            "scored": self.scored.step_key,
            "thresholds": json.dumps(asdict(thresholds), sort_keys=True),
            "control": self.control_kind.value,
            "others": _SOME if self.are_others_ready else _NONE,
        }


def read_basis(inputs: Mapping[str, str]) -> tuple[ControlKind, bool]:
    """The control and whether others were ready, as a verdict's inputs have them: what `Scores.inputs` wrote."""
    return ControlKind(inputs["control"]), inputs["others"] == _SOME


def judge_scores(scores: Scores, thresholds: Thresholds) -> Result:
    """Ready, quarantined, inconclusive or stopped, with every figure and the thresholds it was decided by."""
    scored = scores.scored
    verdict = decide(
        recorded_measurement(scored),
        opponents_available=scores.are_others_ready,
        thresholds=thresholds,
        heldout=recorded_sets(scored),
        control_kind=scores.control_kind,
        reference=_stated_reference(scores.training, scored),
    )
    record = verdict_record(verdict, scores.output_digest, scored.finished_at)
    ablations = recorded_ablations(scored)
    if ablations:
        record["ablation"] = ablations
        record["notes"] += ablation_notes(scored)
    if scores_statement(scores.inspected) is not None:
        record["notes"].append(
            "scores on this text decided the packing: the control is the reading that lost, and proves nothing more"
        )
    return Result(Outcome(verdict.outcome.value), record)


def recorded_sets(scored: Step) -> tuple[str, ...]:
    """The names of the held-out sets that a scored step scored, in order."""
    record: Any = scored.result
    return tuple(record["heldout"])


def recorded_measurement(scored: Step) -> Measurement:
    """The measurement that a scored step recorded."""
    record: Any = scored.result
    return Measurement(
        units=tuple(UnitBytes(unit["id"], unit["bytes"]) for unit in record["units"]),
        voided=tuple(VoidedUnit(one["id"], one["reason"], one["subject"]) for one in record["voided"]),
        scores=tuple(SubjectBits(label, tuple(bits)) for label, bits in record["subjects"].items()),
        tokens=record["tokens"],
        seconds=record["seconds"],
    )


def _stated_reference(training: Training | None, scored: Step) -> Reference | None:
    """The trainer's own scores as training.json gives them, None without."""
    stated = training.reference if training else None
    if stated is None:
        return None
    record: Any = scored.result
    return Reference(
        sets=tuple(
            ReferenceSet(name, one.own_bpb, one.base_bpb, one.units, one.bytes)
            for name, one in stated.heldout.items()
        ),
        is_same_measure=stated.measure_id == record["measure_id"],
    )
