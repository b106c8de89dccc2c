"""One part of an adapter probed: a stacked parameter of a layer, or a module; source and output held together.

The sums over inputs and outputs are taken in float32, in whatever order the storage makes cheap; what they cannot
decide is looked at again in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tasks.lora.delta_errors import PairErrors, name_exchanged
from tasks.lora.factors import Lines, Part, Room, has_same_bits
from tasks.lora.names import Factor
from tasks.lora.probe_products import PROBES, ProbedFactor, ProbedPair, Probes, judge, multiply_probes
from tasks.lora.served_factors import ServedFactors
from tasks.lora.served_rounding import ServedRounding
from tasks.lora.source_factors import SourceFactors

# Relative to what the components of a delta come to if none cancels another. Sums of a few thousand float32 products
# differ by about 5e-7 with their order.
_EQUAL = 2e-6
_DIFFERENT = 1e-4
# Where components cancel more than this, float32 is not trusted with what is left.
_CANCELLING = 4.0
# Below, the sums may have been too small for float32.
_SMALL = 1e-25
# In float64: relative to the source's probed delta, and to the components.
_EXACT = 1e-9
_EXACT_COMPONENTS = 1e-13
# Of a bound that holds for deltas, where only their probes are known: how much longer these can be by chance.
_CHANCE = 4.0
# Between the A of two projections that share it.
_SHARED = 1e-5

THRESHOLD = 2 * _EQUAL * _CANCELLING
"""No larger difference than this share of the source's probed delta is taken for equal.

Twice what is compared, since rounding can hide as much again. Deltas whose components cancel a hundred million times
over are another matter: float64 does not hold them either.
"""


@dataclass(slots=True)
class PartFindings:
    """What one part shows; see ProbeFindings.

    left_out: nothing could be compared. apart: projections that share A in the source do not in the output. moved:
    (pairs that moved, pairs) of those that the source has.
    """

    part: Part
    left_out: bool = False
    errors: list[PairErrors] = field(default_factory=list)
    nonfinite: list[str] = field(default_factory=list)
    nonzero: list[str] = field(default_factory=list)
    apart: bool = False
    moved: tuple[int, int] = (0, 0)
    exchanged: list[str] = field(default_factory=list)


class PartProber:
    """Source and output, and the probes that both are held to."""

    def __init__(
        self,
        source: SourceFactors,
        served: ServedFactors,
        probes: Probes,
        *,
        block_diagonal: bool,
        rounded: tuple[ServedRounding, SourceFactors] | None = None,
    ) -> None:
        """block_diagonal: the source's projections have components of their own in a tensor that they share.

        rounded: where the output holds other numbers than the trainer's: `source` is as they should be then, and here
        is what was done to the trainer's, and those.
        """
        self._source = source
        self._served = served
        self._probes = probes
        self._block_diagonal = block_diagonal
        self._rounded = rounded
        self._rooms = threading.local()

    def probe(self, part: Part) -> PartFindings:
        """Return what a part shows. Raises CorruptFile if a file shrank."""
        found = PartFindings(part)
        if not self._served.has(part):
            found.left_out = True
            return found
        old, new = self._probe_source(part, self._source), self._probe_served(part)
        for projection, copies in new.items():
            for copy, pair in enumerate(copies):
                self._note_nonfinite(found, projection, copy, pair)
                found.errors.append(self._compare(part, projection, copy, old.get(projection), pair))
                if projection in old:
                    moved = pair.moved()
                    found.moved = (found.moved[0] + int(moved.sum()), found.moved[1] + len(moved))
                    continue
                # A of a stacked parameter is there if any of its projections is.
                factors = (pair.a, pair.b) if not old or len(pair.a.names) > 1 else (pair.b,)
                for factor in factors:
                    found.nonzero += factor.names_where((factor.values != 0).flatten(1).any(dim=1))
        if len(old) == len(new) == 2:
            self._note_shared(found, old, new)
            self._note_exchanged(found, old, new)
        if self._rounded is not None:
            rounding, exact = self._rounded
            trained = self._probe_source(part, exact)
            found.errors = [
                self._hold_to_trained(part, one, rounding, trained[one.projection], new)
                if one.projection in trained
                else one
                for one in found.errors
            ]
        return found

    def _hold_to_trained(
        self,
        part: Part,
        one: PairErrors,
        rounding: ServedRounding,
        old: ProbedPair,
        new: Mapping[str, list[ProbedPair]],
    ) -> PairErrors:
        """Return the errors against the trainer's own deltas; rounding must explain them."""
        judged = judge(old, new[one.projection][one.copy])
        a, b = (factor.values.norm(dim=2) for factor in (old.a, old.b))
        scaling = float(old.scaling)
        # What is true of lines is true of probed ones, but for chance and the length of a probe.
        sizes = (PROBES * part.in_size, PROBES * part.out_size)
        limit = _CHANCE * rounding.bound(a, scaling * b, sizes, scaling) + _EQUAL * judged.components
        beyond = (judged.difference > limit) & limit.isfinite()
        return replace(one, errors=judged.errors, differing=one.differing | beyond)

    def _probe_source(self, part: Part, source: SourceFactors) -> dict[str, ProbedPair]:
        room = self._own_room()
        a, b = (self._multiply(source.read(part, factor, room), part, factor) for factor in Factor)
        return {
            projection: ProbedPair(a[projection], b[projection], torch.tensor([scaling], dtype=torch.float64))
            for projection, scaling in source.scalings(part).items()
        }

    def _probe_served(self, part: Part) -> dict[str, list[ProbedPair]]:
        room = self._own_room()
        a, b = (
            [
                self._multiply(lines, part, factor)
                for lines in _list_copies(self._served.read(part, factor, room))
            ]
            for factor in Factor
        )
        return {
            projection: [
                ProbedPair(one[projection], two[projection], scaling)
                for one, two, scaling in zip(a, b, scalings, strict=True)
            ]
            for projection, scalings in self._served.scalings(part).items()
        }

    def _own_room(self) -> Room:
        """Return the memory of this thread: what it holds is multiplied before the next read."""
        if not hasattr(self._rooms, "room"):
            self._rooms.room = Room()
        room: Room = self._rooms.room
        return room

    def _multiply(self, read: Mapping[str, Lines], part: Part, factor: Factor) -> dict[str, ProbedFactor]:
        """Return each projection's factor times its probes; what two of them share is multiplied once."""
        done: dict[tuple[object, ...], torch.Tensor] = {}
        found: dict[str, ProbedFactor] = {}
        for projection, lines in read.items():
            values = _as_lines(lines.values, factor)
            key = (values.data_ptr(), values.shape, values.stride())
            if key not in done:
                done[key] = multiply_probes(values, self._probes.of(factor, values.shape[2]))
            found[projection] = ProbedFactor(done[key], lines.names)
        return found

    def _compare(
        self, part: Part, projection: str, copy: int, old: ProbedPair | None, new: ProbedPair
    ) -> PairErrors:
        judged = judge(old, new)
        components = judged.components
        # What has become NaN or infinite is neither equal nor different yet.
        trusted = (components == 0) | (components > _SMALL)
        equal = (
            (judged.difference <= _EQUAL * components) & (components <= _CANCELLING * judged.norm) & trusted
        )
        differs = (judged.difference > _DIFFERENT * components) & trusted
        undecided = (~(equal | differs)).nonzero().flatten().tolist()
        if undecided:
            exact = self._compare_exactly(part, projection, copy, undecided)
            for expert, (error, differs_there) in zip(undecided, exact, strict=True):
                judged.errors[expert], differs[expert] = error, differs_there
        return PairErrors(projection, copy, judged.errors, differs)

    def _compare_exactly(
        self, part: Part, projection: str, copy: int, experts: Sequence[int]
    ) -> Iterator[tuple[float, bool]]:
        """Yield of single experts the relative error and whether the deltas differ, in float64.

        Where nothing can be computed, as source and output hold the same NaN or infinity, they do not.
        """
        source = [self._source.read(part, factor).get(projection) for factor in Factor]
        served = [self._served.read(part, factor)[projection][copy] for factor in Factor]
        applied = torch.tensor([self._source.scalings(part).get(projection, 0.0)], dtype=torch.float64)
        scalings = self._served.scalings(part)[projection][copy]
        for expert in experts:
            scaling = scalings[expert : expert + 1]
            new = self._probe_exactly(served[0], served[1], expert, scaling)
            if source[0] is None or source[1] is None:
                judged = judge(None, new)
            else:
                judged = judge(self._probe_exactly(source[0], source[1], expert, applied), new)
            limit = _EXACT * judged.norm + _EXACT_COMPONENTS * judged.components
            equal = bool(limit.isfinite() & (judged.difference <= limit))
            if not bool(limit.isfinite()) and bool((scaling - applied).abs() <= _EXACT * applied):
                equal = all(
                    old is not None and has_same_bits(old.values[expert], new_lines.values[expert])
                    for old, new_lines in zip(source, served, strict=True)
                )
            yield 0.0 if equal and not bool(limit.isfinite()) else float(judged.errors), not equal

    def _probe_exactly(self, a: Lines, b: Lines, expert: int, scaling: torch.Tensor) -> ProbedPair:
        factors = []
        for lines, factor in ((a, Factor.A), (b, Factor.B)):
            # Copies of one shape on both sides, so that equal numbers give equal sums.
            values = _as_lines(lines.values[expert : expert + 1], factor).double().contiguous()
            probes = self._probes.of(factor, values.shape[2]).double()
            factors.append(ProbedFactor(values @ probes, lines.names))
        return ProbedPair(factors[0], factors[1], scaling)

    def _note_nonfinite(self, found: PartFindings, projection: str, copy: int, pair: ProbedPair) -> None:
        for probed, factor in ((pair.a, Factor.A), (pair.b, Factor.B)):
            suspects = ~probed.values.isfinite().flatten(1).all(dim=1)
            if bool(suspects.any()):  # which a sum of finite numbers can be, too
                values = self._served.read(found.part, factor)[projection][copy].values
                found.nonfinite += probed.names_where(suspects & ~values.isfinite().flatten(1).all(dim=1))

    def _note_shared(
        self, found: PartFindings, old: Mapping[str, ProbedPair], new: Mapping[str, list[ProbedPair]]
    ) -> None:
        first, second = (pair.a.names for pair in old.values())
        if first != second or self._block_diagonal:
            return
        one, two = (copies[0].a.values for copies in new.values())
        if one.shape != two.shape:
            found.apart = True
            return
        limit = _SHARED * torch.maximum(one.norm(), two.norm())
        # Where anything is not finite, nothing is near: then it is the same, or apart.
        near = bool(limit.isfinite()) and bool((one - two).norm() <= limit)
        found.apart = not near and not torch.equal(one.nan_to_num(), two.nan_to_num())

    def _note_exchanged(
        self, found: PartFindings, old: Mapping[str, ProbedPair], new: Mapping[str, list[ProbedPair]]
    ) -> None:
        """Note where each of two projections has the other's deltas."""
        exchanged = torch.stack([one.differing for one in found.errors]).all(dim=0)
        if not bool(exchanged.any()):
            return
        first, second = found.part.projections
        for mine, other in ((first, second), (second, first)):
            judged = judge(old[other], new[mine][0])
            exchanged &= judged.components.isfinite() & (judged.difference <= _DIFFERENT * judged.components)
        found.exchanged += name_exchanged(found.part, exchanged)


def _list_copies(read: Mapping[str, Sequence[Lines]]) -> list[dict[str, Lines]]:
    """Return by copy what is read by projection."""
    return [dict(zip(read, copy, strict=True)) for copy in zip(*read.values(), strict=True)]


def _as_lines(values: torch.Tensor, factor: Factor) -> torch.Tensor:
    """Return (E, r, in) or (E, r, out)."""
    return values if factor is Factor.A else values.transpose(1, 2)
