"""Proof that a conversion was executed right, from the files alone.

What is proved is the *execution*: the output holds exactly the source's numbers, each where the decided
layout says. Whether the layout was *read* right is another matter, settled by evidence from outside
(packing.py) and by the scores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tasks.lora.config import AdapterConfig, read_adapter_config
from tasks.lora.errors import (
    AdapterError,
    DeltaMismatch,
    ExpertsUntrained,
    MissingTensor,
    NonFinite,
    RoundTripMismatch,
    UnresolvedKeys,
)
from tasks.lora.expected import list_expected, list_expected_modules, list_served
from tasks.lora.family import TensorClass
from tasks.lora.files import AdapterFiles, open_adapter
from tasks.lora.header import TensorSpec
from tasks.lora.overflow import MOST_OVERFLOWS, find_range
from tasks.lora.problems import Problems
from tasks.lora.rebuild import Findings, compare_adapters
from tasks.lora.resolve import (
    ServedModules,
    count_classes,
    describe_unresolved,
    describe_witnesses,
    find_lost,
)
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat

_Patterns = Sequence[tuple[re.Pattern[str], float]]

# An alpha can miss the one number that gives a scaling exactly by the last bit or two of a float64.
_LAST_BITS = 2.0**-51


class CheckName(StrEnum):
    """What is checked, in the order in which a failure is reported."""

    COVERAGE = "coverage"
    SIZE = "size"
    SCALING = "scaling"
    FINITE = "finite"
    IN_RANGE = "in_range"
    TRAINED = "trained"
    SHARED_A = "shared_a"
    ZEROS = "zeros"
    ROUND_TRIP = "round_trip"
    RESOLVES = "resolves"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check. detail: one line. figures: (name, number). where: the first place that failed, or ""."""

    name: CheckName
    passed: bool
    detail: str
    figures: tuple[tuple[str, float], ...]
    where: str = ""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All checks of one conversion; every one was made, whether or not another failed."""

    adapter: str
    checks: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


# (what was expected, the error of a failure)
_FAILURES: dict[CheckName, tuple[str, type[AdapterError]]] = {
    CheckName.COVERAGE: ("every layer, expert, projection and factor exactly once", MissingTensor),
    CheckName.SIZE: ("as many bytes as the base's sizes give", RoundTripMismatch),
    CheckName.SCALING: ("the scaling that the trainer applied", DeltaMismatch),
    CheckName.FINITE: ("finite values", NonFinite),
    CheckName.IN_RANGE: ("factors and deltas that are finite as they are served", NonFinite),
    CheckName.TRAINED: ("routed experts that moved", ExpertsUntrained),
    CheckName.SHARED_A: ("one A for all projections of a parameter", DeltaMismatch),
    CheckName.ZEROS: ("zeros where the source has nothing", DeltaMismatch),
    CheckName.ROUND_TRIP: ("every number of the source, bit for bit", RoundTripMismatch),
    CheckName.RESOLVES: ("keys that lead to modules of the engine", UnresolvedKeys),
}


def check_conversion(
    source: AdapterFiles,
    converted: Path,
    layout: AdapterLayout,
    format: TargetFormat = TargetFormat.PER_EXPERT,
    served: Sequence[ServedModules] = (),
) -> CheckReport:
    """Return the result of every check on the adapter in the folder `converted`.

    source, layout: what it was converted from. format: what it was converted to. served: what is known of the engine,
    the best witness first; a key has to lead somewhere for one of them. Reads all weights whole, one parameter at a
    time. Raises like open_adapter and read_adapter_config where the converted folder cannot be read.
    """
    output = open_adapter(converted, label=layout.label)
    config = read_adapter_config(converted, label=layout.label)
    expected = list(list_expected(layout, format))
    findings = compare_adapters(source, output, layout, format, expected)
    return CheckReport(
        layout.label,
        (
            _check_coverage(output, layout, expected),
            _check_size(output, expected),
            _check_scaling(config, layout, format),
            _check_finite(findings),
            _check_range(findings, layout),
            _check_trained(findings),
            _check_shared_a(findings),
            _check_zeros(findings, layout),
            _check_round_trip(source, findings),
            _check_resolves(output, layout, served),
        ),
    )


def raise_for(report: CheckReport) -> None:
    """Raise the error of the first failed check, those of others on it; return if there is none."""
    problems = Problems()
    for check in report.checks:
        if not check.passed:
            expected, error = _FAILURES[check.name]
            where = check.where or f"check {check.name}"
            problems.add(error(report.adapter, where, expected, check.detail), check.name)
    problems.raise_any()


def _check_coverage(output: AdapterFiles, layout: AdapterLayout, specs: list[TensorSpec]) -> CheckResult:
    expected = {spec.name: (spec.dtype, spec.shape) for spec in specs}
    found = {entry.name: (entry.dtype, entry.shape) for entry in output.tensors}
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    wrong = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    others = {spec.name for spec in list_expected_modules(layout)}
    # Where experts are stacked, each tensor holds a factor of several pairs.
    routed = len(expected) - len(others)
    pairs = layout.expert_pairs * (routed - len(set(missing) - others)) // routed
    faults = [*missing, *extra, *wrong]
    detail = f"{layout.expert_pairs} expert pairs and {len(others)} other tensors, each once"
    if faults:
        detail = (
            f"{len(missing)} tensors missing, {len(extra)} too many, {len(wrong)} of another shape or dtype"
        )
    figures = (
        ("pairs", pairs),
        ("pairs_expected", layout.expert_pairs),
        ("missing", len(missing)),
        ("extra", len(extra)),
        ("wrong", len(wrong)),
    )
    return CheckResult(CheckName.COVERAGE, not faults, detail, figures, faults[0] if faults else "")


def _check_size(output: AdapterFiles, specs: list[TensorSpec]) -> CheckResult:
    expected = sum(spec.data_bytes for spec in specs)
    found = sum(entry.end - entry.begin for entry in output.tensors)
    detail = f"{found} bytes of data, {expected} expected"
    return CheckResult(CheckName.SIZE, found == expected, detail, (("bytes", found), ("expected", expected)))


def _check_scaling(config: AdapterConfig, layout: AdapterLayout, format: TargetFormat) -> CheckResult:
    modules = list(list_served(layout, format))
    ranks, alphas = _compile(config.rank_pattern), _compile(config.alpha_pattern)
    differing = []
    for module in modules:
        rank, scaling = _read_as_engine(module.name, config, ranks, alphas)
        if rank != module.rank or not math.isclose(scaling, module.scaling, rel_tol=_LAST_BITS):
            differing.append((module, rank, scaling))
    module, rank, scaling = (
        differing[0] if differing else (modules[0], *_read_as_engine(modules[0].name, config, ranks, alphas))
    )
    detail = f"scaling {scaling:g} at rank {rank}, source {module.scaling:g} at rank {module.rank}"
    figures = (
        ("scaling", scaling),
        ("expected", module.scaling),
        ("modules", len(modules)),
        ("differing", len(differing)),
    )
    return CheckResult(CheckName.SCALING, not differing, detail, figures, module.name if differing else "")


def _read_as_engine(
    name: str, config: AdapterConfig, ranks: _Patterns, alphas: _Patterns
) -> tuple[int, float]:
    """Return the rank and the scaling that the engine gives a module.

    Source: vLLM 0.32 lora/peft_helper.py, get_rank_and_scaling.
    """
    rank = next((int(value) for pattern, value in ranks if pattern.match(name)), config.r)
    alpha = next((value for pattern, value in alphas if pattern.match(name)), config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _compile(patterns: Mapping[str, float] | None) -> _Patterns:
    return [(re.compile(rf"(.*\.)?({key})$"), value) for key, value in (patterns or {}).items()]


def _check_finite(findings: Findings) -> CheckResult:
    count = sum(number for _, number in findings.nonfinite)
    tensors = len(findings.nonfinite)
    detail = f"{count} NaN or infinite values in {tensors} tensors" if count else "no NaN, no infinity"
    where = findings.nonfinite[0][0] if count else ""
    return CheckResult(
        CheckName.FINITE, not count, detail, (("nonfinite", count), ("tensors", tensors)), where
    )


def _check_range(findings: Findings, layout: AdapterLayout) -> CheckResult:
    served, count = find_range(layout.base.dtype), len(findings.overflows)
    detail, where, peak = f"all within {served}", "", 0.0
    if count:
        where, expert, peak = max(findings.overflows, key=lambda overflow: overflow[2])
        whose = f" of expert {expert}" if expert >= 0 else ""
        many = f"the first {count}" if count == MOST_OVERFLOWS else count
        detail = f"{peak:.4g}{whose} in a factor or its delta, the largest of {many} outside {served}"
    return CheckResult(
        CheckName.IN_RANGE, not count, detail, (("overflows", count), ("largest", peak)), where
    )


def _check_trained(findings: Findings) -> CheckResult:
    figures = tuple(_list_fractions(findings))
    routed = sum(findings.trained.get(TensorClass.ROUTED_EXPERTS, ()))
    detail = ", ".join(f"{name} {fraction:.4g}" for name, fraction in figures) or "nothing to look at"
    return CheckResult(CheckName.TRAINED, routed > 0, f"pairs that moved: {detail}", figures)


def _list_fractions(findings: Findings) -> Iterator[tuple[str, float]]:
    for kind, pairs in findings.trained.items():
        yield kind.value, sum(pairs) / len(pairs)


def _check_shared_a(findings: Findings) -> CheckResult:
    count = len(findings.unshared)
    detail = (
        f"{count} parameters whose projections have different A"
        if count
        else "projections of one parameter share A"
    )
    where = findings.unshared[0] if count else ""
    return CheckResult(CheckName.SHARED_A, not count, detail, (("differing", count),), where)


def _check_zeros(findings: Findings, layout: AdapterLayout) -> CheckResult:
    count = len(findings.nonzero)
    detail = (
        f"{', '.join(layout.absent)} not trained: zeros"
        if layout.absent
        else "nothing but what the source has"
    )
    if count:
        detail = f"{count} tensors with numbers that the source does not have"
    where = findings.nonzero[0] if count else ""
    return CheckResult(CheckName.ZEROS, not count, detail, (("nonzero", count),), where)


def _check_round_trip(source: AdapterFiles, findings: Findings) -> CheckResult:
    compared, total, differing = findings.compared, len(source.tensors), len(findings.differing)
    passed = compared == total and not differing
    detail = f"{compared - differing} of {total} source tensors found again bit for bit"
    where = findings.differing[0] if differing else ""
    figures = (("tensors", total), ("compared", compared), ("differing", differing))
    return CheckResult(CheckName.ROUND_TRIP, passed, detail, figures, where)


def _check_resolves(
    output: AdapterFiles, layout: AdapterLayout, served: Sequence[ServedModules]
) -> CheckResult:
    family = layout.family
    names = [entry.name for entry in output.tensors]
    lost = find_lost(names, served, family) if served else ()
    faults = {one.name for one in lost}
    reached = count_classes((name for name in names if name not in faults), family)
    figures = (*reached, ("unresolved", len(lost)))
    if lost:
        detail, where = describe_unresolved(lost, len(names)), lost[0].name
    elif served:
        detail, where = f"{len(names)} keys lead to modules of {describe_witnesses(served)}", ""
    else:
        detail, where = f"nothing is known of {layout.base.served.architecture}: left to the engine", ""
    return CheckResult(CheckName.RESOLVES, not lost, detail, figures, where)
