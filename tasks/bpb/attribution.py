"""Which adapter fits a text best: attribution of held-out sets and single units by bits per byte, over many adapters.

The rules.

1. A unit counts for a set only if every adapter scored on that set (and the base) has a finite figure for it; bits per
   byte of a set are taken over those units alone, so that all adapters are compared on one text.
2. Compared are the set's owners (adapters whose own text it is) and every other adapter scored on it that is nobody's
   kin among them: pen names, equal bytes, and adapters that serve one author are never each other's wrong ones.
3. A set, or a unit, is attributed right if some owner has strictly fewer bits than every other compared adapter; a tie
   is wrong. A set without an owner's scores, without others, or without units is not counted.
4. Intervals are Wilson's for a proportion, two-sided 95 %, and take the units as independent of each other.
5. A margin is another adapter's bits per byte minus the owner's; above 0 the owner fits better.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
_Z = 1.959963984540054  # of the normal distribution, two-sided 95 %


@dataclass(frozen=True, slots=True)
class TextScores:
    """A held-out set with the bits of each unit under the base and each adapter scored on it; nan where void.

    `owners`: the adapters whose own text it is, of which not every one need be scored.
    """

    name: str
    owners: frozenset[str]
    unit_bytes: tuple[int, ...]
    base: tuple[float, ...] | None
    adapters: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Proportion:
    """How many of so many were right, with Wilson's interval; `share` and bounds are nan where there were none."""

    right: int
    total: int
    share: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class TextBpb:
    """Bits per byte on one set over the units that all could score; None where there are none."""

    name: str
    units: int
    byte_count: int
    base: float | None
    adapters: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Pair:
    """An owner and another adapter on the owner's text: the margin in bits per byte, and whose the units are.

    `taken`: how many of `units` the other one fits better than, or as well as, the owner.
    """

    text: str
    owner: str
    other: str
    margin: float
    taken: int
    units: int


@dataclass(frozen=True, slots=True)
class Attribution:
    """What a matrix says. `choices`: the mean number of adapters that a set was attributed among.

    `per_owner`: units by the owner whose text they are; `misattributed`: sets that another adapter fits better than,
    or as well as, every owner. Pairs stand in the order of their margins, the most confusable first.
    """

    texts: tuple[TextBpb, ...]
    sets: Proportion
    units: Proportion
    per_text: Mapping[str, Proportion]
    misattributed: tuple[str, ...]
    pairs: tuple[Pair, ...]
    choices: float


def wilson(right: int, total: int) -> Proportion:
    """A proportion with Wilson's score interval.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    if total == 0:
        return Proportion(right, total, math.nan, math.nan, math.nan)
    share = right / total
    spread = 1 + _Z**2 / total
    centre = (share + _Z**2 / (2 * total)) / spread
    half = _Z * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2)) / spread
    # Rounding must not leave a share of 0 or 1 outside.
    lower, upper = max(0.0, centre - half), min(1.0, centre + half)
    return Proportion(right, total, share, min(lower, share), max(upper, share))


def attribute(texts: Sequence[TextScores], kin: Collection[frozenset[str]]) -> Attribution:
    """Bits per byte of every cell, and whose text each set and each unit is by them.

    kin: pairs of adapters that are never each other's wrong one.
    """
    found = [_attribute_text(text, kin) for text in texts]
    counted = [one for one in found if one.choices]
    units = [one.units for one in counted]
    wrong = tuple(one.bpb.name for one in counted if not one.is_right)
    return Attribution(
        texts=tuple(one.bpb for one in found),
        sets=wilson(len(counted) - len(wrong), len(counted)),
        units=wilson(sum(one.right for one in units), sum(one.total for one in units)),
        per_text={one.bpb.name: one.units for one in counted},
        misattributed=wrong,
        pairs=tuple(
            sorted(
                (pair for one in found for pair in one.pairs),
                key=lambda pair: (pair.margin, pair.text, pair.owner, pair.other),
            )
        ),
        choices=sum(one.choices for one in counted) / len(counted) if counted else math.nan,
    )


@dataclass(frozen=True, slots=True)
class _TextFound:
    """choices: among how many adapters, 0 where the set is not counted."""

    bpb: TextBpb
    is_right: bool
    units: Proportion
    pairs: tuple[Pair, ...]
    choices: int


def _attribute_text(text: TextScores, kin: Collection[frozenset[str]]) -> _TextFound:
    kept = _shared_units(text)
    byte_count = sum(text.unit_bytes[index] for index in kept)

    def bpb_of(bits: tuple[float, ...]) -> float | None:
        return math.fsum(bits[index] for index in kept) / byte_count if byte_count else None

    bpb = TextBpb(
        text.name,
        len(kept),
        byte_count,
        None if text.base is None else bpb_of(text.base),
        {adapter: bpb_of(bits) for adapter, bits in text.adapters.items()},
    )
    owners = sorted(text.owners & text.adapters.keys())
    others = sorted(
        adapter
        for adapter in text.adapters.keys() - text.owners
        if not any(frozenset((adapter, owner)) in kin for owner in text.owners)
    )
    pairs = tuple(
        Pair(
            text.name,
            owner,
            other,
            _margin(bpb, owner, other),
            sum(1 for index in kept if text.adapters[other][index] <= text.adapters[owner][index]),
            len(kept),
        )
        for owner in owners
        for other in others
        if kept
    )
    if not (owners and others and kept):
        return _TextFound(bpb, False, wilson(0, 0), pairs, 0)
    right = sum(
        1
        for index in kept
        if min(text.adapters[owner][index] for owner in owners)
        < min(text.adapters[other][index] for other in others)
    )
    is_right = any(all(pair.margin > 0 for pair in pairs if pair.owner == owner) for owner in owners)
    return _TextFound(bpb, is_right, wilson(right, len(kept)), pairs, len(owners) + len(others))


def _shared_units(text: TextScores) -> tuple[int, ...]:
    """The units, by their places, for which everyone has a finite figure and which have bytes."""
    columns = [*text.adapters.values(), *(() if text.base is None else (text.base,))]
    return tuple(
        index
        for index, count in enumerate(text.unit_bytes)
        if count > 0 and all(math.isfinite(bits[index]) for bits in columns)
    )


def _margin(bpb: TextBpb, owner: str, other: str) -> float:
    own, wrong = bpb.adapters[owner], bpb.adapters[other]
    return math.nan if own is None or wrong is None else wrong - own
