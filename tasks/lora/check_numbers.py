"""Checks of a conversion by what was found among the numbers of both files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tasks.lora.checks import CheckName, CheckResult, Trained
from tasks.lora.family import TensorClass
from tasks.lora.files import AdapterFiles
from tasks.lora.overflow import MOST_OVERFLOWS, find_range
from tasks.lora.rebuild import Findings
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat

if TYPE_CHECKING:
    from tasks.lora.deltas import DeltaFindings
    from tasks.lora.probes import ProbeFindings

_SHOWN = 4


def check_gate_up(layout: AdapterLayout, exchanged: Sequence[str]) -> CheckResult:
    """Return whether nowhere in the output gate and up stand in each other's place. exchanged: where they do."""
    count = len(exchanged)
    fused = [parameter for parameter in layout.family.parameters if len(parameter.projections) > 1]
    detail = "gate is the source's gate, up its up" if fused else "this family has no gate"
    if count:
        detail = f"gate and up exchanged in {_list_some(exchanged)}"
    return CheckResult(
        CheckName.GATE_UP, not count, detail, (("exchanged", count),), exchanged[0] if count else ""
    )


def check_finite(tensors: Sequence[str], values: int | None) -> CheckResult:
    """Return whether no tensor has NaN or infinite values. tensors: those that do. values: how many, if counted."""
    count = len(tensors)
    detail = "no NaN, no infinity"
    if count:
        many = "" if values is None else f"{values} "
        detail = f"{many}NaN or infinite values in {count} tensors"
    figures = (() if values is None else (("nonfinite", values),)) + (("tensors", count),)
    return CheckResult(CheckName.FINITE, not count, detail, figures, tensors[0] if count else "")


def check_range(findings: Findings, layout: AdapterLayout, format: TargetFormat) -> CheckResult:
    """Return whether factors and deltas stay finite in the type that the engine computes in."""
    served, count = find_range(layout, format), len(findings.overflows)
    detail, where, peak = f"all within {served}", "", 0.0
    if count:
        where, expert, peak = max(findings.overflows, key=lambda overflow: overflow[2])
        whose = f" of expert {expert}" if expert >= 0 else ""
        many = f"the first {count}" if count == MOST_OVERFLOWS else count
        detail = f"{peak:.4g}{whose} in a factor or its delta, the largest of {many} outside {served}"
    return CheckResult(
        CheckName.IN_RANGE, not count, detail, (("overflows", count), ("largest", peak)), where
    )


def check_trained(trained: Trained) -> CheckResult:
    """Return whether any routed expert moved; of each class the share of pairs that did, and layers where none did."""
    totals = {
        kind: (sum(moved for moved, _ in layers.values()), sum(pairs for _, pairs in layers.values()))
        for kind, layers in trained.items()
    }
    figures = tuple((kind.value, moved / pairs) for kind, (moved, pairs) in totals.items() if pairs)
    still = tuple(_list_still(trained))
    detail = ", ".join(f"{name} {fraction:.4g}" for name, fraction in figures) or "nothing to look at"
    detail = f"pairs that moved: {detail}"
    if still:
        detail += f"; none in {_list_some([f'layer {layer} of {kind}' for kind, layer in still])}"
    moved, _ = totals.get(TensorClass.ROUTED_EXPERTS, (0, 0))
    return CheckResult(CheckName.TRAINED, moved > 0, detail, (*figures, ("still_layers", len(still))))


def _list_still(trained: Trained) -> Iterator[tuple[str, int]]:
    for kind, layers in trained.items():
        yield from ((kind.value, layer) for layer, (moved, _) in layers.items() if not moved)


def check_shared_a(unshared: Sequence[str]) -> CheckResult:
    """Return whether projections that share A in the source do in the output. unshared: where they do not."""
    count = len(unshared)
    detail = (
        f"{count} parameters whose projections have different A"
        if count
        else "projections of one parameter share A"
    )
    where = unshared[0] if count else ""
    return CheckResult(CheckName.SHARED_A, not count, detail, (("differing", count),), where)


def check_zeros(nonzero: Sequence[str], layout: AdapterLayout) -> CheckResult:
    """Return whether the output has zeros where the source has nothing. nonzero: the tensors that have not."""
    count = len(nonzero)
    detail = (
        f"{', '.join(layout.absent)} not trained: zeros"
        if layout.absent
        else "nothing but what the source has"
    )
    if count:
        detail = f"{count} tensors with numbers that the source does not have"
    where = nonzero[0] if count else ""
    return CheckResult(CheckName.ZEROS, not count, detail, (("nonzero", count),), where)


def check_probes(found: ProbeFindings) -> CheckResult:
    """Return whether every delta answers random probes as the source's does."""
    detail = f"{found.pairs} deltas probed with {found.probes} x {found.probes} random vectors: none differs"
    figures = (("probes", found.probes), ("miss_probability", found.miss_probability))
    return _check_deltas(found, detail, figures)


def check_deltas(found: DeltaFindings) -> CheckResult:
    """Return whether every delta, materialised, is the source's."""
    detail = f"{found.pairs} deltas materialised on {found.device}: none differs"
    return _check_deltas(found, detail, (("tolerance", found.tolerance),))


def _check_deltas(
    found: ProbeFindings | DeltaFindings, detail: str, more: tuple[tuple[str, float], ...]
) -> CheckResult:
    differing = sum(one.differing for one in found.errors)
    worst = max(found.errors, key=lambda one: one.largest, default=None)
    where = found.left_out[0] if found.left_out else ""
    if differing:
        where, error = found.differing[0]
        detail = (
            f"{differing} of {found.pairs} deltas that differ, the most by {error:.3g} of its norm: {where}"
        )
    elif where:
        detail = (
            f"{len(found.left_out)} parts could not be compared, as tensors are missing or of other shapes"
        )
    elif worst is not None and worst.largest:
        detail += f"; the largest relative error is {worst.largest:.2g}, of {worst.worst} {worst.projection}"
    figures = (
        ("pairs", found.pairs),
        ("differing", differing),
        ("left_out", len(found.left_out)),
        ("largest_error", worst.largest if worst is not None else 0.0),
        *more,
    )
    return CheckResult(CheckName.DELTAS, not where, detail, figures, where)


def check_round_trip(source: AdapterFiles, findings: Findings) -> CheckResult:
    """Return whether every tensor of the source is found again in the output, bit for bit."""
    compared, total, differing = findings.compared, len(source.tensors), len(findings.differing)
    passed = compared == total and not differing
    detail = f"{compared - differing} of {total} source tensors found again bit for bit"
    where = findings.differing[0] if differing else ""
    figures = (("tensors", total), ("compared", compared), ("differing", differing))
    return CheckResult(CheckName.ROUND_TRIP, passed, detail, figures, where)


def _list_some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
