"""Which wrong adapters an adapter is measured against: half the hardest known ones, the rest at random."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Why(StrEnum):
    """Why an opponent was chosen: it is among the hardest that are known, or at random."""

    HARDEST = "hardest"
    RANDOM = "random"


class KnownFrom(StrEnum):
    """What told how hard an opponent is: a matrix of the whole roster, or an earlier score of the same author."""

    MATRIX = "matrix"
    SCORES = "scores"


@dataclass(frozen=True, slots=True)
class Served:
    """An adapter that is served and could serve as a wrong one."""

    author: str
    output_digest: str


@dataclass(frozen=True, slots=True)
class Known:
    """How hard an author's adapter was when it was scored last: the smaller its margin, the harder.

    The margin is the bits per byte that it took beyond this author's own adapter of then, on this author's text.
    """

    author: str
    margin: float
    source: KnownFrom
    measured_at: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """An adapter's digest as uploaded, and what decides whether it is a wrong one for another.

    `digests`: all that no other adapter has if its bytes are others: of the upload, of the converted directory, of the
    converted weights alone. `authors`: whom it was trained for, the one it is submitted under among them.
    """

    adapter_digest: str
    digests: frozenset[str]
    authors: frozenset[str]


@dataclass(frozen=True, slots=True)
class Opponent:
    """A wrong adapter that was chosen, and why; `known` is what was known of one of the hardest."""

    author: str
    adapter_digest: str
    output_digest: str
    why: Why
    known: Known | None


def choose_opponents(
    served: Iterable[Served],
    look_up: Callable[[Served], Candidate | None],
    *,
    own: Candidate,
    exclusions: Sequence[tuple[str, str]],
    known: Iterable[Known],
    k: int,
) -> tuple[Opponent, ...]:
    """Up to `k` opponents, one of an author: half of them (rounded down) the hardest known, the rest at random.

    Random is a hash of own's and the other's digest: the same for the same adapter, whatever order `served` has and
    whatever else is served. The hardest are those of the smallest margin in `known`, which has an author once; where
    fewer are known, random ones take their place.

    Never an adapter that serves an author whom own serves, or one whom `exclusions` pair with such an author. Never one
    with a digest of own's or of another chosen one's: equal bytes under two names would be own against own.

    `look_up` tells more of an adapter, None if it cannot be used. It is asked for as few as possible, once for each.
    """
    barred = own.authors | {other for pair in exclusions if own.authors & {*pair} for other in pair}
    order = sorted(served, key=lambda one: _rank(own.adapter_digest, one))
    margins = {one.author: one for one in known if math.isfinite(one.margin)}
    hardest = sorted(
        (one for one in order if one.author in margins), key=lambda one: margins[one.author].margin
    )
    digests = own.digests
    seen: set[Served] = set()
    chosen: dict[str, Opponent] = {}
    for queue, most, why in ((hardest, k // 2, Why.HARDEST), (order, k, Why.RANDOM)):
        for one in queue:
            if len(chosen) >= most:
                break
            if one in seen or one.author in barred or one.author in chosen:
                continue
            seen.add(one)
            found = look_up(one)
            if found is None or found.authors & barred or found.digests & digests:
                continue
            digests |= found.digests
            of_hardest = margins[one.author] if why is Why.HARDEST else None
            chosen[one.author] = Opponent(
                one.author, found.adapter_digest, one.output_digest, why, of_hardest
            )
    return tuple(chosen.values())


def _rank(adapter_digest: str, one: Served) -> tuple[str, str]:
    mixed = hashlib.sha256((adapter_digest + one.output_digest).encode()).hexdigest()
    return mixed, one.author
