"""Which wrong adapters an adapter is measured against."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """An adapter that is ready and could serve as a wrong one."""

    author: str
    adapter_digest: str
    output_digest: str


def choose_opponents(
    candidates: Sequence[Candidate],
    *,
    author: str,
    adapter_digest: str,
    output_digest: str,
    exclusions: Sequence[tuple[str, str]],
    k: int,
) -> tuple[Candidate, ...]:
    """Up to `k` opponents, at most one per author; the candidates' order does not matter.

    Never one of the same author or of an author excluded with this one (in either order), never one whose
    bytes, as uploaded or as converted, are this adapter's or another chosen one's: equal bytes under two
    names would be own against own.
    """
    barred = {author}
    barred.update(other for pair in exclusions if author in pair for other in pair)
    digests = {adapter_digest, output_digest}
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda candidate: _rank(adapter_digest, candidate)):
        own_digests = {candidate.adapter_digest, candidate.output_digest}
        if len(chosen) >= k or candidate.author in barred or digests & own_digests:
            continue
        chosen.append(candidate)
        barred.add(candidate.author)
        digests |= own_digests
    return tuple(chosen)


def _rank(adapter_digest: str, candidate: Candidate) -> tuple[str, str]:
    mixed = hashlib.sha256((adapter_digest + candidate.adapter_digest).encode()).hexdigest()
    return mixed, candidate.author
