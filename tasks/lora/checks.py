"""The checks of a conversion by name, what each found, what each proves, and the error of one that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from tasks.lora.errors import (
    AdapterError,
    DeltaMismatch,
    ExpertsUntrained,
    LayoutConflict,
    MissingTensor,
    NonFinite,
    RoundTripMismatch,
    UnresolvedKeys,
)
from tasks.lora.family import TensorClass
from tasks.lora.problems import Problems

if TYPE_CHECKING:
    from tasks.lora.delta_errors import ProjectionErrors

Trained = Mapping[TensorClass, Mapping[int, tuple[int, int]]]
"""By class and layer: how many (A, B) pairs have a delta that can differ from zero, and how many there are."""


class Depth(StrEnum):
    """How much is looked at.

    quick: headers, config, and random probes of all factors. standard: every number too, bit for bit. full: every
    delta too, materialised.
    """

    QUICK = "quick"
    STANDARD = "standard"
    FULL = "full"


class CheckName(StrEnum):
    """What is checked, in the order in which a failure is reported."""

    COVERAGE = "coverage"
    SIZE = "size"
    CONFIG = "config"
    SCALING = "scaling"
    GATE_UP = "gate_up"
    FINITE = "finite"
    IN_RANGE = "in_range"
    TRAINED = "trained"
    SHARED_A = "shared_a"
    ZEROS = "zeros"
    LAYOUT = "layout"
    DELTAS = "deltas"
    ROUND_TRIP = "round_trip"
    MERGED = "merged"
    RESOLVES = "resolves"


class Proof(StrEnum):
    """What a check is about.

    execution: that the output is the source as it was read, which the two files alone can tell. reading: that it was
    read as the trainer meant it, which only something outside our reading can tell. adapter: that what was trained is
    there and can be served. engine: that the engine will use all of it.
    """

    EXECUTION = "execution"
    READING = "reading"
    ADAPTER = "adapter"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class _Rule:
    """A check's subject, what it expects, and the error of a failure."""

    about: Proof
    expected: str
    error: type[AdapterError]


_RULES: dict[CheckName, _Rule] = {
    CheckName.COVERAGE: _Rule(
        Proof.EXECUTION, "every layer, expert, projection and factor exactly once", MissingTensor
    ),
    CheckName.SIZE: _Rule(
        Proof.EXECUTION, "one weight file, as many bytes as the base's sizes give", RoundTripMismatch
    ),
    CheckName.CONFIG: _Rule(Proof.EXECUTION, "a config that names what the weights hold", DeltaMismatch),
    CheckName.SCALING: _Rule(Proof.EXECUTION, "the scaling that the trainer applied", DeltaMismatch),
    CheckName.GATE_UP: _Rule(Proof.EXECUTION, "gate from the source's gate, up from its up", DeltaMismatch),
    CheckName.FINITE: _Rule(Proof.ADAPTER, "finite values", NonFinite),
    CheckName.IN_RANGE: _Rule(
        Proof.ADAPTER, "factors and deltas that are finite as they are served", NonFinite
    ),
    CheckName.TRAINED: _Rule(Proof.ADAPTER, "routed experts that moved", ExpertsUntrained),
    CheckName.SHARED_A: _Rule(Proof.EXECUTION, "one A for all projections of a parameter", DeltaMismatch),
    CheckName.ZEROS: _Rule(Proof.EXECUTION, "zeros where the source has nothing", DeltaMismatch),
    CheckName.LAYOUT: _Rule(
        Proof.READING, "tensors of every layer that do not contradict their packing", LayoutConflict
    ),
    CheckName.DELTAS: _Rule(Proof.EXECUTION, "the deltas of the source as it was read", DeltaMismatch),
    CheckName.ROUND_TRIP: _Rule(
        Proof.EXECUTION, "every number of the source, bit for bit", RoundTripMismatch
    ),
    CheckName.MERGED: _Rule(
        Proof.READING, "the deltas that the trainer merged into its own checkpoint", DeltaMismatch
    ),
    CheckName.RESOLVES: _Rule(Proof.ENGINE, "keys that lead to modules of the engine", UnresolvedKeys),
}
_ORDER = {name: place for place, name in enumerate(CheckName)}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check. detail: one line. figures: (name, number). where: the first place that failed, or "".

    error: the error of the failure, None for the one that failures of this check usually are.
    """

    name: CheckName
    passed: bool
    detail: str
    figures: tuple[tuple[str, float], ...]
    where: str = ""
    error: type[AdapterError] | None = None

    @property
    def about(self) -> Proof:
        """What this check is about."""
        return _RULES[self.name].about


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """How the random probes were drawn. miss_probability: of a damage of one delta by `damage` of its norm or more.

    The same seed draws the same probes of the same adapter.
    """

    probes: int
    seed: int
    damage: float
    miss_probability: float


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All checks of one conversion; each was made, whether or not another failed.

    device: where deltas were materialised. trained: see `Trained`. errors: of each projection, the distribution of the
    relative errors of its deltas. notes: what else is to be known, such as why a reference could not be compared.
    """

    adapter: str
    checks: tuple[CheckResult, ...]
    depth: Depth
    device: str
    trained: Trained
    errors: tuple[ProjectionErrors, ...]
    probes: ProbeRun
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def not_made(self) -> tuple[CheckName, ...]:
        """The checks that this report knows nothing of."""
        made = {check.name for check in self.checks}
        return tuple(name for name in CheckName if name not in made)

    def adding(self, result: CheckResult) -> CheckReport:
        """Return the report with one more check at its place in the order."""
        checks = sorted([*self.checks, result], key=lambda check: _ORDER[check.name])
        return replace(self, checks=tuple(checks))

    def noting(self, note: str) -> CheckReport:
        """Return the report with one more note."""
        return replace(self, notes=(*self.notes, note))


def find_failure(report: CheckReport) -> AdapterError | None:
    """Return the error of the first failed check, those of others on it; None if there is none."""
    problems = Problems()
    for check in report.checks:
        if not check.passed:
            rule = _RULES[check.name]
            where = check.where or f"check {check.name}"
            problems.add(
                (check.error or rule.error)(report.adapter, where, rule.expected, check.detail), check.name
            )
    return problems.merge() if problems else None


def raise_for(report: CheckReport) -> None:
    """Raise what `find_failure` returns; return if that is nothing."""
    error = find_failure(report)
    if error is not None:
        raise error


def describe_proof(report: CheckReport) -> str:
    """Return what the report shows and what it does not, in two or three sentences."""
    failed = {
        about: [one.name.value for one in report.checks if not one.passed and one.about is about]
        for about in Proof
    }
    made = {check.name for check in report.checks}
    said = []
    if failed[Proof.EXECUTION]:
        said.append(f"The output is not the source as it was read ({', '.join(failed[Proof.EXECUTION])}).")
    elif report.depth is Depth.QUICK:
        said.append(
            "Execution: the output is the source as it was read, as far as headers, config and probes tell."
        )
    else:
        said.append("Execution: the output is the source as it was read, to the last bit.")
    if failed[Proof.READING]:
        said.append(
            f"That it was read as the trainer meant is contradicted ({', '.join(failed[Proof.READING])})."
        )
    elif CheckName.MERGED in made:
        said.append("Reading: the trainer's own merged checkpoint agrees with it.")
    else:
        said.append(
            "Reading: no file of ours can prove that it is what the trainer meant; the evidence (roster inspect) and "
            "the scores have to."
        )
    said += [f"The adapter itself fails: {', '.join(names)}." for names in [failed[Proof.ADAPTER]] if names]
    said += ["The engine would not use all of it (resolves)." for names in [failed[Proof.ENGINE]] if names]
    return " ".join(said)
