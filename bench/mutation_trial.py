"""What names a damage: one check of a damaged conversion after another, and how it is counted."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from bench.mutation_adapters import Form, Host, Style, load_base, prepare_host
from bench.mutation_files import FILES
from bench.mutation_kinds import Damage
from bench.mutation_moves import MOVES
from bench.mutation_numbers import NUMBERS
from bench.mutation_output import Output, measure_damage
from tasks.lora.check import check_conversion
from tasks.lora.checks import Depth
from tasks.lora.errors import AdapterError
from tasks.lora.inspect import Inspection
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.target import TargetFormat
from tasks.outcomes import rule
from tasks.served import list_witnesses

# What the probes promise to find; damage below it is for the other depths alone.
PROBED_DAMAGE = 1e-3


@dataclass(slots=True)
class KindCount:
    """What became of one kind. expected: what of at least one should name it. by: what did first, at depth standard.

    quick_due: trials of which depth quick promises to name the damage; quick_caught: those in which it did.
    """

    part: str
    expected: tuple[str, ...]
    trials: int = 0
    caught: int = 0
    quick_due: int = 0
    quick_caught: int = 0
    by: Counter[str] = field(default_factory=Counter)
    by_quick: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Counts:
    """Everything that is counted.

    families: those that were damaged. correct: conversions that add what the source means, by arithmetic apart from the
    product's; incorrect: those that do not. undecided: trained adapters whose
    tensors did not tell the packing. false_alarms: correct ones that something found fault with.
    missed: damage that nothing named; quick_missed: that depth quick should have named. unexpected: that was named by
    nothing that was expected to.
    """

    kinds: dict[str, KindCount] = field(default_factory=dict)
    families: set[str] = field(default_factory=set)
    correct: int = 0
    correct_families: set[str] = field(default_factory=set)
    undecided: int = 0
    incorrect: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    quick_missed: list[str] = field(default_factory=list)

    def merge(self, other: Counts) -> None:
        """Add what another counted."""
        for name, kind in other.kinds.items():
            own = self.kinds.setdefault(name, KindCount(kind.part, kind.expected))
            for count in ("trials", "caught", "quick_due", "quick_caught"):
                setattr(own, count, getattr(own, count) + getattr(kind, count))
            own.by.update(kind.by)
            own.by_quick.update(kind.by_quick)
        self.correct += other.correct
        self.undecided += other.undecided
        self.families |= other.families
        self.correct_families |= other.correct_families
        for faults in ("incorrect", "false_alarms", "missed", "quick_missed", "unexpected"):
            getattr(self, faults).extend(getattr(other, faults))

    def add(self, kind: KindCount, told: str, named: list[str], size: float, quick: list[str] | None) -> None:
        """Count one trial. told: what it was. size: as `measure_damage` gives it. quick: what named it there."""
        kind.trials += 1
        kind.caught += bool(named)
        kind.by.update(named[:1])
        if not named:
            self.missed.append(told)
        elif {*named}.isdisjoint(kind.expected):
            self.unexpected.append(f"{told}: {', '.join(named)}")
        if quick is None:
            return
        kind.by_quick.update(quick[:1])
        kind.quick_caught += bool(quick)
        if size >= PROBED_DAMAGE:
            kind.quick_due += 1
            if not quick:
                self.quick_missed.append(f"{told}, {size:.3g}")


def list_failures(folder: Path, found: Inspection, format: TargetFormat, depth: Depth) -> list[str]:
    """Return the names of the checks that failed, or the code of an error that kept them from being made."""
    witnesses = list_witnesses(None, found.layout.base)
    try:
        report = check_conversion(found.files, folder, found.layout, format, witnesses, depth=depth)
    except AdapterError as error:
        return [rule(error).code.value]
    return [check.name.value for check in report.checks if not check.passed]


@dataclass(frozen=True, slots=True)
class PlannedHost:
    """What a host is made of. changes: to the fields of its family's tiny config.json."""

    family: str
    style: Style
    format: TargetFormat
    changes: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        sizes = "".join(f", {name} {value}" for name, value in self.changes)
        return f"{self.family}{sizes}: {self.style}, to {self.format}"


_GROUPED, _SWAPPED = Packing.GROUPED_BY_EXPERT, Orientation.SWAPPED
_HALF, _BRAIN = torch.float16, torch.bfloat16
_PER_EXPERT, _STACKED = TargetFormat.PER_EXPERT, TargetFormat.STACKED
_SQUARE = (("hidden_size", 12), ("moe_intermediate_size", 12))
_AS_HALF = (("dtype", "float16"),)
# Several families, forms and encodings, both targets; two of them with square sizes.
HOSTS = (
    PlannedHost("qwen3_moe", Style(packing=_GROUPED, orientation=_SWAPPED), _PER_EXPERT),
    PlannedHost("qwen3_moe", Style(rslora=True, dtype=_BRAIN), _STACKED),
    PlannedHost("mixtral", Style(patterns=True, packing=_GROUPED), _PER_EXPERT),
    PlannedHost("mixtral", Style(Form.PER_EXPERT, dtype=_HALF), _PER_EXPERT),
    PlannedHost("mixtral", Style(Form.PER_EXPERT, rslora=True, patterns=True), _STACKED),
    PlannedHost("gpt_oss", Style(packing=_GROUPED, dtype=_HALF), _STACKED, _AS_HALF),
    PlannedHost("gpt_oss", Style(rslora=True, patterns=True, dtype=_HALF), _PER_EXPERT, _AS_HALF),
    PlannedHost("gpt_oss", Style(Form.CUBE), _STACKED),
    PlannedHost("qwen3_moe", Style(attention=False), _PER_EXPERT, _SQUARE),
    PlannedHost("qwen3_moe", Style(orientation=_SWAPPED, attention=False), _STACKED, _SQUARE),
    PlannedHost("nemotron_h", Style(), _PER_EXPERT),
)


def damage_planned(planned: PlannedHost, folder: Path, seed: int) -> Counts:
    """Try every kind of damage that applies to a host; return what named it."""
    base, counts = load_base(planned.family, **dict(planned.changes)), Counts()
    damage_host(
        prepare_host(folder / "host", str(planned), base, planned.style, planned.format, seed),
        folder,
        seed,
        counts,
    )
    return counts


def damage_host(host: Host, folder: Path, seed: int, counts: Counts) -> None:
    """Try every kind of damage that applies to a host, and count what names it."""
    for damage in (*MOVES, *NUMBERS, *FILES):
        _try_damage(damage, host, folder, seed, counts)


def _try_damage(damage: Damage, host: Host, folder: Path, seed: int, counts: Counts) -> None:
    output = host.output.copy()
    if not damage.change(output, host, Random(f"{seed} {host.name} {damage.kind}")):
        return
    size = float("inf") if output.spoil else measure_damage(host.output, output)
    if output.config != host.output.config:
        size = float("inf")
    if not size and _same_bits(output, host.output):
        return  # such as 1.001 times a zero
    damaged = folder / "damaged"
    output.write(damaged)
    try:
        named, quick = (
            list_failures(damaged, host.found, host.format, depth) for depth in (Depth.STANDARD, Depth.QUICK)
        )
    finally:
        shutil.rmtree(damaged)
    kind = counts.kinds.setdefault(damage.kind, KindCount("output", damage.expected))
    counts.families.add(host.found.family)
    counts.add(kind, f"{damage.kind}: {host.name}", named, size, quick)


def _same_bits(one: Output, other: Output) -> bool:
    if list(one.tensors) != list(other.tensors):
        return False
    pairs = ((tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    return all(
        tensor.dtype is old.dtype
        and tensor.shape == old.shape
        and torch.equal(tensor.contiguous().view(torch.uint8), old.contiguous().view(torch.uint8))
        for tensor, old in pairs
    )
