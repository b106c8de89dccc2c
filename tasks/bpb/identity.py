"""The two ids that say which scores may be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tasks.bpb.heldout import UnitKind
from tasks.bpb.measure import METHOD_VERSION
from tasks.bpb.protocol import BosRule


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What of an engine can move a score. `flags` are (name, value) pairs; their order does not matter."""

    version: str
    dtype: str
    quantization: str | None
    flags: tuple[tuple[str, str], ...]


def measure_id(
    *,
    heldout_sha256s: Sequence[str],
    unit_kind: UnitKind,
    window: int,
    stride: int,
    bos_rule: BosRule,
    base_weights_digest: str,
) -> str:
    """16 hex digits that two measurements share iff they score the same text on the same base in one way.

    The order of the held-out sets does not matter. METHOD_VERSION is part of it.
    """
    return _short_hash(
        {
            "heldout": sorted(heldout_sha256s),
            "unit_kind": unit_kind.value,
            "window": window,
            "stride": stride,
            "bos_rule": bos_rule.value,
            "method": METHOD_VERSION,
            "base_weights": base_weights_digest,
        }
    )


def engine_id(facts: EngineFacts) -> str:
    """16 hex digits that two engines share iff their version, dtype, quantization and flags are equal."""
    return _short_hash(asdict(facts) | {"flags": sorted(facts.flags)})


def _short_hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
