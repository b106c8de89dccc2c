"""What is written of an adapter in the ledger and with `--json`: inspections, conversions, checks; and what is stated.

Pure translation between the parts. Neither Prefect, torch nor the store's client is imported for it, so that the
commands on one directory start at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from storage.digests import FileDigest, directory_digest
from tasks.lora.checks import describe_proof
from tasks.lora.layouts import Packing
from tasks.lora.packing import Evidence, PackingDecision, PolicyStatement
from tasks.lora.target import TargetFormat
from tasks.lora.trainers import TrainingStatement

if TYPE_CHECKING:
    from storage.policy import Policy
    from storage.training import Training
    from tasks.lora.checks import CheckReport
    from tasks.lora.convert import ConvertedFiles
    from tasks.lora.family import ServedClass
    from tasks.lora.inspect import Inspection
    from tasks.lora.write import WrittenFile

_MIXED = "mixed"
"""What stands for the packing of a parameter whose layers differ; `layers` beside it says which has which."""


def training_statement(training: Training | None) -> TrainingStatement | None:
    """What a training.json says about the layout and what was to be trained, None without one."""
    if training is None:
        return None
    said = training.lora_b_layout
    return TrainingStatement(
        trainer_name=training.trainer.name if training.trainer else None,
        trainer_version=training.trainer.version if training.trainer else None,
        layout=said if isinstance(said, str) else None,
        layouts=tuple(said.items()) if isinstance(said, dict) else (),
        peft_version=training.peft_version,
        intended=training.intended_targets,
    )


def policy_statement(policy: Policy | None) -> PolicyStatement | None:
    """What an operator's policy says about the layout, None without one."""
    if policy is None:
        return None
    said = policy.document.lora_b_layout
    return PolicyStatement(
        layout=said if isinstance(said, str) else None,
        layouts=tuple(said.items()) if isinstance(said, dict) else (),
        where=policy.key,
    )


def inspection_record(found: Inspection) -> dict[str, Any]:
    """An inspection. `undecided` names the parameters whose packing nothing tells: both readings have to be scored."""
    return {
        "family": found.family,
        "base": found.base,
        "layers": found.layers,
        "experts": found.experts,
        "ranks": {kind.value: rank for kind, rank in found.ranks},
        "orientation": found.orientation.value,
        "packing": {decision.parameter: _decision_record(decision) for decision in found.packing},
        "undecided": [decision.parameter for decision in found.packing if decision.undecided],
        "pairs": found.pairs,
        "format": str(found.format),
        "classes": {
            summary.name.value: {"keys": summary.keys, "trained_fraction": summary.trained_fraction}
            for summary in found.classes
        },
        "warnings": list(found.warnings),
    }


def conversion_record(made: ConvertedFiles, served: ServedClass) -> dict[str, Any]:
    """A conversion. `needs_mixed_format`: the engine has to be started with --enable-mixed-moe-lora-format for it.

    `minimum_vllm`: the first release that serves this form of this class right, and the report of before; None where
    nothing is known.
    """
    stacked = made.format is TargetFormat.STACKED
    return {
        "output_digest": written_digest(made.files),
        "format": made.format.value,
        "rank": made.rank,
        "max_lora_rank": made.max_lora_rank,
        "is_3d_lora_weight": stacked,
        "needs_mixed_format": stacked != served.native_3d,
        "minimum_vllm": _minimum_record(made.format, served),
        "dtype": made.dtype,
        "pairs": made.pairs,
        "files": file_records(made.files),
    }


def _minimum_record(format: TargetFormat, served: ServedClass) -> dict[str, str] | None:
    one = served.minimum_of(format.value)
    return None if one is None else {"version": one.version, "report": one.report}


def file_records(files: Iterable[WrittenFile]) -> list[dict[str, Any]]:
    """Written files, each with its size and sha256."""
    return [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in files]


def written_digest(files: Iterable[WrittenFile]) -> str:
    """The digest of a converted directory, of the files that were or would be written to it."""
    return directory_digest(FileDigest(file.name, file.bytes, file.sha256) for file in files)


def check_record(report: CheckReport) -> dict[str, Any]:
    """A report: every check with its numbers, what was not looked at, and how the numbers came about.

    None stands for a number that is not finite, as where the output has NaN and the source has not.
    """
    return {
        "passed": report.passed,
        "depth": report.depth.value,
        "device": report.device,
        "not_made": [name.value for name in report.not_made],
        "checks": [
            {
                "name": result.name.value,
                "about": result.about.value,
                "passed": result.passed,
                "detail": result.detail,
                "where": result.where or None,
                "figures": {name: _finite(value) for name, value in result.figures},
            }
            for result in report.checks
        ],
        "trained": {
            kind.value: {
                str(layer): {"moved": moved, "pairs": pairs} for layer, (moved, pairs) in layers.items()
            }
            for kind, layers in report.trained.items()
        },
        "errors": [{name: _finite(value) for name, value in asdict(one).items()} for one in report.errors],
        "probes": asdict(report.probes),
        "notes": list(report.notes),
        "proof": describe_proof(report),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _decision_record(decision: PackingDecision) -> dict[str, Any]:
    record: dict[str, Any] = {
        "value": decision.value.value if decision.value else _MIXED,
        "decided_by": decision.decided_by.value,
        "evidence": [_evidence_record(item) for item in decision.evidence],
    }
    if decision.value is None:
        record["layers"] = {packing.value: list(decision.layers_of(packing)) for packing in Packing}
    return record


def _evidence_record(item: Evidence) -> dict[str, Any]:
    return {
        "source": item.source.value,
        "says": item.says.value if item.says else None,
        "strength": item.strength.value,
        "detail": item.detail,
    }
