"""Whether a conversion has the deltas of its source: every delta is made, from both sides, and compared.

Both sides are brought into one shape and multiplied in the same way, in float32, on the processor or on a GPU: equal
factors give equal deltas to the last bit. Norms are added up in float64. What float32 cannot decide, because an
expert's components cancel one another, is multiplied again in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from tasks.lora.config import read_adapter_config
from tasks.lora.delta_errors import ErrorTally, PairErrors, ProjectionErrors, describe_part, name_exchanged
from tasks.lora.factors import Lines, Part, has_same_bits, list_parts
from tasks.lora.files import AdapterFiles
from tasks.lora.names import Factor
from tasks.lora.parallel import count_threads, map_parts
from tasks.lora.rearrange import one_thread
from tasks.lora.served_factors import ServedFactors
from tasks.lora.served_rounding import ServedRounding, find_rounding
from tasks.lora.source_factors import SourceFactors
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat
from tasks.lora.tensors import open_tensors
from tasks.lora.write import Progress

DELTA_TOLERANCE = 1e-6
"""The largest relative error (Frobenius norm) of a delta that is taken for equal; products of float32 differ by about
1e-7 where they are added up in another order, as where the engine's file has components that the source has not."""

# Beyond this, relative to what the components come to if none cancels another, float32 is enough to tell a difference.
_DIFFERENT = 1e-4
# Where components cancel more than this, what float32 loses of them can be more than the tolerance of what is left.
_CANCELLING = 4.0
_EXACT_COMPONENTS = 1e-13
# Of a delta of a smaller norm, float32 may have lost squares that are too small for it.
_SMALL = 1e-10

# Bytes of one side's deltas at a time.
_BATCH_BYTES = {"cpu": 1 << 22, "cuda": 1 << 30}


@dataclass(frozen=True, slots=True)
class DeltaFindings:
    """What comparing every delta found.

    pairs: those compared: of experts, and of every module that the engine has. differing: (where, relative error),
    the worst 64. errors: by projection. exchanged: layers, or single experts, whose gate and up are each other's.
    left_out: parts that could not be compared, as tensors are missing or have other shapes.
    """

    pairs: int
    differing: tuple[tuple[str, float], ...]
    errors: tuple[ProjectionErrors, ...]
    exchanged: tuple[str, ...]
    left_out: tuple[str, ...]
    device: str
    tolerance: float


def compare_deltas(
    source: AdapterFiles,
    converted: AdapterFiles,
    layout: AdapterLayout,
    format: TargetFormat,
    *,
    device: str,
    progress: Progress | None = None,
) -> DeltaFindings:
    """Return what holding every delta of the output against the source's finds.

    device: "cpu" or "cuda". progress: told (parts done, parts). Memory: the factors of one parameter and a few batches
    of deltas. Raises CorruptFile if a file shrank, and like read_adapter_config for the output's config.
    """
    config = read_adapter_config(converted.directory, label=layout.label)
    parts = list(list_parts(layout))
    found: list[_PartFindings] = []
    with open_tensors(source) as old, open_tensors(converted) as new, _plain_float32(), one_thread():
        rounding = find_rounding(layout, format)
        sources = SourceFactors(old, layout, rounding)
        rounded = None if rounding is None else (rounding, SourceFactors(old, layout))
        served = ServedFactors(new, converted, config, layout, format)
        # A GPU is kept busy by one thread.
        threads = count_threads(layout) if device == "cpu" else 1
        compare = partial(_compare_part, sources=sources, served=served, device=device, rounded=rounded)
        for one in map_parts(compare, parts, threads):
            found.append(one)
            if progress is not None:
                progress(len(found), len(parts))
    tally = ErrorTally()
    for one in found:
        for errors in one.errors:
            tally.add(one.part, errors)
    return DeltaFindings(
        pairs=tally.pairs,
        differing=tally.list_differing(),
        errors=tally.list_errors(),
        exchanged=tuple(name for one in found for name in one.exchanged),
        left_out=tuple(describe_part(one.part) for one in found if one.left_out),
        device=device,
        tolerance=DELTA_TOLERANCE,
    )


@contextmanager
def _plain_float32() -> Iterator[None]:
    """Let a GPU multiply float32 as such, not as TF32 with its ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True, slots=True)
class _Factors:
    """A projection of all experts: A (E, r, in), B (E, out, r), scaling (E,) in float64."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: torch.Tensor

    def multiply(self, first: int, out: torch.Tensor) -> None:
        """Fill `out` with the deltas of the experts from `first` on, (count, out, in), in its dtype on its device."""
        own = slice(first, first + len(out))
        # Contiguous on both sides, so that equal numbers give equal products.
        a, b = (values[own].to(out.device, out.dtype).contiguous() for values in (self.a, self.b))
        torch.bmm(b * self.scaling[own].to(out.device, out.dtype).view(-1, 1, 1), a, out=out)

    def components(self, own: slice) -> torch.Tensor:
        """Return the norms that these experts' deltas would have if no component cancelled another, in float64."""
        a, b = self.a[own].double(), self.b[own].double()
        squares = a.square().sum(dim=2) * b.square().sum(dim=1)
        return self.scaling[own].abs() * squares.sum(dim=1).sqrt()


@dataclass(slots=True)
class _PartFindings:
    part: Part
    left_out: bool = False
    errors: list[PairErrors] = field(default_factory=list)
    exchanged: list[str] = field(default_factory=list)


def _compare_part(
    part: Part,
    sources: SourceFactors,
    served: ServedFactors,
    device: str,
    rounded: tuple[ServedRounding, SourceFactors] | None,
) -> _PartFindings:
    """Return what the deltas of a part show.

    rounded: where the output holds other numbers than the trainer's: `sources` is as they should be then, and here is
    what was done to the trainer's, and those.
    """
    if not served.has(part):
        return _PartFindings(part, left_out=True)
    found = _PartFindings(part)
    olds = _read_source(part, sources)
    trained = {} if rounded is None else _read_source(part, rounded[1])
    taken = {factor: served.read(part, factor) for factor in Factor}
    news: dict[str, _Factors] = {}
    for projection, scalings in served.scalings(part).items():
        for copy, scaling in enumerate(scalings):
            new = _join(taken[Factor.A][projection][copy], taken[Factor.B][projection][copy], scaling)
            errors, differs = _compare(olds.get(projection), new, device)
            if rounded is not None and projection in trained:
                errors, beyond = _hold_to_trained(trained[projection], new, rounded[0], device)
                differs |= beyond
            found.errors.append(PairErrors(projection, copy, errors, differs))
            news[projection] = new
    if len(olds) == len(news) == 2:
        differing = torch.stack([one.differing for one in found.errors]).all(dim=0)
        found.exchanged = _find_exchanged(part, olds, news, differing, device)
    return found


def _read_source(part: Part, sources: SourceFactors) -> dict[str, _Factors]:
    stored = {factor: sources.read(part, factor) for factor in Factor}
    return {
        projection: _join(
            stored[Factor.A][projection],
            stored[Factor.B][projection],
            torch.tensor([applied], dtype=torch.float64),
        )
        for projection, applied in sources.scalings(part).items()
    }


def _hold_to_trained(
    old: _Factors, new: _Factors, rounding: ServedRounding, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each expert's relative error against the trainer's own delta, and whether rounding does not explain it."""
    experts, out_size, in_size = len(new.a), new.b.shape[1], new.a.shape[2]
    room = torch.empty(2, 1, out_size, in_size, device=device)
    errors = torch.zeros(experts, dtype=torch.float64)
    beyond = torch.zeros(experts, dtype=torch.bool)
    for expert in range(experts):
        difference, norm = _subtract(old, new, expert, room)
        scaling = float(old.scaling[expert])
        a, b = old.a[expert].double().norm(dim=1), scaling * old.b[expert].double().norm(dim=0)
        limit = rounding.bound(a, b, (in_size, out_size), scaling) + DELTA_TOLERANCE * (a * b).sum()
        errors[expert] = _divide(difference, norm)[0]
        beyond[expert] = bool((difference[0] > limit) & limit.isfinite())
    return errors, beyond


def _join(a: Lines, b: Lines, scaling: torch.Tensor) -> _Factors:
    return _Factors(a.values, b.values, scaling.expand(len(a.values)))


def _compare(old: _Factors | None, new: _Factors, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each expert's relative error, (E,) in float64, and whether its deltas differ."""
    experts, out_size, in_size = len(new.a), new.b.shape[1], new.a.shape[2]
    step = min(experts, max(1, _BATCH_BYTES[torch.device(device).type] // (4 * out_size * in_size)))
    # Made once: memory that the system hands out anew for each batch costs as much as the products.
    room = torch.empty(2, step, out_size, in_size, device=device)
    errors = torch.zeros(experts, dtype=torch.float64)
    differs = torch.zeros(experts, dtype=torch.bool)
    for first in range(0, experts, step):
        own = slice(first, first + step)
        difference, norm = _subtract(old, new, first, room[:, : experts - first])
        errors[own] = _divide(difference, norm)
        components = new.components(own)
        if old is not None:  # a sum, which is NaN if either is
            components += old.components(own)
        small = torch.maximum(difference, norm) < _SMALL
        suspect = (errors[own] > DELTA_TOLERANCE) | small | (components > 2 * _CANCELLING * norm)
        plain = difference.isfinite() & (difference > _DIFFERENT * components) & ~small
        differs[own] = suspect & plain
        # What is left is suspect for what float32 lost, or NaN.
        for place in (suspect & ~plain & (components != 0)).nonzero().flatten().tolist():
            expert = first + place
            whole = float(components[place])
            errors[expert], differs[expert] = _compare_exactly(old, new, expert, whole, device)
    return errors, differs


def _compare_exactly(
    old: _Factors | None, new: _Factors, expert: int, components: float, device: str
) -> tuple[float, bool]:
    """Return the same of one expert, in float64.

    Where nothing can be computed, as source and output hold the same NaN or infinity, they do not differ.
    """
    sizes = (2, 1, new.b.shape[1], new.a.shape[2])
    difference, norm = _subtract(old, new, expert, torch.empty(sizes, dtype=torch.float64, device=device))
    limit = DELTA_TOLERANCE * float(norm) + _EXACT_COMPONENTS * components
    if math.isfinite(limit):
        return float(_divide(difference, norm)), not float(difference) <= limit
    if old is None:
        return math.inf, True
    alike = bool((old.scaling[expert] - new.scaling[expert]).abs() <= DELTA_TOLERANCE * old.scaling[expert])
    factors = ((old.a, new.a), (old.b, new.b))
    if alike and all(has_same_bits(one[expert], two[expert]) for one, two in factors):
        return 0.0, False
    return math.inf, True


def _subtract(
    old: _Factors | None, new: _Factors, first: int, room: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of the differences and of the source's deltas, (count,) in float64.

    room: (2, count, out, in), overwritten; its dtype and device are those of the deltas.
    """
    found, wanted = room
    new.multiply(first, found)
    if old is None:
        return _norm(found), torch.zeros(len(found), dtype=torch.float64)
    old.multiply(first, wanted)
    return _norm(found.sub_(wanted)), _norm(wanted)


def _norm(deltas: torch.Tensor) -> torch.Tensor:
    """Return the norm of each delta: of its rows in its own dtype, of those in float64."""
    rows: torch.Tensor = torch.linalg.vector_norm(deltas, dim=2)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.cpu()


def _divide(difference: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    errors = torch.where(difference == 0, 0.0, difference / norm)
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _find_exchanged(
    part: Part,
    olds: dict[str, _Factors],
    news: dict[str, _Factors],
    differing: torch.Tensor,
    device: str,
) -> list[str]:
    """Return where each of two projections has the other's deltas. differing: (E,), of both."""
    exchanged = differing.clone()
    room = torch.empty(2, 1, part.out_size, part.in_size, device=device)
    first, second = part.projections
    for mine, other in ((first, second), (second, first)):
        for expert in exchanged.nonzero().flatten().tolist():
            difference, norm = _subtract(olds[other], news[mine], expert, room)
            exchanged[expert] = math.isfinite(norm[0]) and bool(difference[0] <= _DIFFERENT * norm[0])
    return name_exchanged(part, exchanged)
