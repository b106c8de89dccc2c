"""Looking at, converting and checking one adapter directory, without any server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flows.cli.output import OUT, AsJson, emit, note, table

if TYPE_CHECKING:
    from tasks.lora.check import CheckReport

Packing = Literal["auto", "rank_major", "grouped_by_expert"]


def inspect(
    directory: Path, *, base: Path, packing: Packing = "auto", header_only: bool = False, json: AsJson = False
) -> int:
    """Say what an adapter is: family, orientation, packing with every piece of evidence, coverage, problems.

    Parameters
    ----------
    directory:
        adapter_config.json and adapter_model.safetensors; a training.json beside them is read too.
    base:
        The base's config.json, or a directory holding one.
    packing:
        Force a reading instead of deciding from evidence.
    header_only:
        Read no tensor data: quick, but trained fractions and digests stay unknown.
    """
    from tasks.directories import inspect_directory

    found = inspect_directory(directory, base, packing=_forced(packing), header_only=header_only)
    emit(found, as_json=json, show=lambda: _show_inspection(found))
    return 0


def convert(
    source: Path,
    destination: Path,
    *,
    base: Path,
    packing: Packing = "auto",
    format: Literal["per-expert"] = "per-expert",
    json: AsJson = False,
) -> int:
    """Convert one adapter directory to what vLLM serves. The destination appears whole or not at all.

    Parameters
    ----------
    source:
        The directory that the trainer saved.
    destination:
        A directory that does not exist yet.
    base:
        The base's config.json, or a directory holding one.
    packing:
        Force a reading instead of deciding from evidence.
    format:
        per-expert: one pair of factors for each expert and projection; every vLLM with MoE LoRA takes it.
    """
    from flows.cli.progress import byte_progress
    from tasks.directories import convert_directory

    with byte_progress("converting") as progress:
        made = convert_directory(source, destination, base, packing=_forced(packing), progress=progress)

    def show() -> None:
        _show_inspection(made)
        note(f"wrote {destination}: {made['pairs']} pairs, output digest {made['output_digest'][:16]}")

    emit(made, as_json=json, show=show)
    return 0


def check(
    source: Path, destination: Path, *, base: Path, packing: Packing = "auto", json: AsJson = False
) -> int:
    """Check a conversion: bit-exact round trip, complete coverage, finite and trained factors.

    Ends with 1 when a check fails. This proves that the conversion was carried out as decided; that the decision is
    right is shown by the evidence (roster inspect) and by the scores.

    Parameters
    ----------
    source:
        The directory that the trainer saved.
    destination:
        What `roster convert` made of it.
    base:
        The base's config.json, or a directory holding one.
    packing:
        The reading that was forced at conversion, if one was.
    """
    from tasks.directories import check_directories
    from tasks.validation import check_records

    report = check_directories(source, destination, base, packing=_forced(packing))
    document = {"passed": report.passed, "checks": check_records(report)}
    emit(document, as_json=json, show=lambda: _show_report(report))
    return 0 if report.passed else 1


def _forced(packing: Packing) -> str | None:
    return None if packing == "auto" else packing


def _show_inspection(found: dict[str, Any]) -> None:
    OUT.print(
        f"{found['family']}: {found['layers']} layers, {found['experts']} experts, "
        f"orientation {found['orientation']}, {found['pairs']} pairs when converted",
        highlight=False,
    )
    rows = [
        (
            parameter,
            decision["value"],
            decision["decided_by"],
            evidence["source"],
            evidence["says"],
            evidence["strength"],
            evidence["detail"],
        )
        for parameter, decision in found["packing"].items()
        for evidence in decision["evidence"] or [{"source": "-", "says": "-", "strength": "-", "detail": ""}]
    ]
    table(
        "Packing",
        ["parameter", "value", "decided by", "evidence", "says", "strength", "detail"],
        rows,
        empty="no stacked experts",
    )
    ranks = found["ranks"]
    classes = [
        (name, c["keys"], ranks.get(name), c["trained_fraction"]) for name, c in found["classes"].items()
    ]
    table("Factors", ["class", "keys", "rank", "trained fraction"], classes, empty="no factors")
    for warning in found.get("warnings", []):
        note(f"warning: {warning}")


def _show_report(report: CheckReport) -> None:
    rows = [("ok" if c.passed else "FAILED", c.name, c.detail) for c in report.checks]
    table("Checks", ["", "check", "found"], rows, empty="nothing was checked")
