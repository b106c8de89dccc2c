"""Checking a conversion: what was made of one adapter directory, against the directory itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import CycloptsError
from cyclopts.types import ExistingDirectory

from flows.cli.convert import Packing, forced_packing, read_named_base
from flows.cli.output import AsJson, emit, note, say, table

if TYPE_CHECKING:
    from tasks.directories import ReferenceFolders


def check(
    source: ExistingDirectory,
    destination: ExistingDirectory,
    /,
    *,
    base: str,
    depth: Literal["quick", "standard", "full"] = "standard",
    device: Literal["cpu", "cuda"] | None = None,
    merged: ExistingDirectory | None = None,
    weights: ExistingDirectory | None = None,
    packing: Packing = "auto",
    json: AsJson = False,
) -> int:
    """Check a conversion: that what will be served is what was trained, each check by name and with its numbers.

    Ends with 1 when a check fails. Most checks are about the execution: that the output is the source as it was read.
    That it was read as the trainer meant is shown by evidence (roster inspect), by the trainer's own merged checkpoint
    and by the scores.

    ```
    roster check trained/ash serving/ash --base models/tiny
    roster check trained/ash serving/ash --base models/tiny --depth full
    ```

    Parameters
    ----------
    source:
        The directory that the trainer saved.
    destination:
        What `roster convert` made of it.
    base:
        The base's config.json, a directory that holds one, or the name of a registered base, whose policy then counts.
    depth:
        quick: headers, config, and random probes of every delta. standard: every number too, bit for bit. full: every
        delta too, materialised, with the distribution of its errors.
    device:
        Where a full check makes the deltas; cpu if left out.
    merged:
        The trainer's own merged checkpoint, to compare with: a directory of safetensors.
    weights:
        The weights of the base that it was merged into; goes with --merged.
    packing:
        The reading that was forced at conversion, if one was.
    """
    from flows.cli.progress import part_progress
    from tasks.directories import check_directories
    from tasks.records import check_record

    if device is not None and depth != "full":
        raise _misuse("--device is where a full check makes the deltas: give --depth full too.")
    reference = _find_reference(merged, weights)
    with part_progress("checking") as progress:
        report = check_directories(
            source,
            destination,
            read_named_base(base),
            packing=forced_packing(packing),
            depth=depth,
            device=device or "cpu",
            reference=reference,
            progress=progress,
        )
    document = check_record(report)
    emit(document, as_json=json, show=lambda: _show(document))
    return 0 if report.passed else 1


def _find_reference(merged: Path | None, weights: Path | None) -> ReferenceFolders | None:
    if merged is None and weights is None:
        return None
    if merged is None or weights is None:
        raise _misuse("--merged and --weights go together: one is the other with the adapter in it.")
    from tasks.directories import ReferenceFolders

    return ReferenceFolders(merged, weights)


def _misuse(message: str) -> CycloptsError:
    return CycloptsError(msg=message, command_chain=("check",))


def _show(document: Mapping[str, Any]) -> None:
    from tasks.checklist import CHECK_COLUMNS, ERROR_COLUMNS, check_rows, closing_lines, error_rows

    table(CHECK_COLUMNS, check_rows(document, passed="ok", failed="FAILED"), empty="nothing was checked")
    errors = error_rows(document)
    if errors:
        say("")
        table(ERROR_COLUMNS, errors, empty="")
    say("")
    *lines, proof = closing_lines(document)
    for line in lines:
        note(line) if line.startswith("note: ") else say(line)
    say(proof)
