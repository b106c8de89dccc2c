"""The id that says which scores may be compared; the engine's own is part of engine.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from tasks.bpb.heldout import UnitKind
from tasks.bpb.measure import METHOD_VERSION
from tasks.bpb.protocol import BosRule


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
    content = {
        "heldout": sorted(heldout_sha256s),
        "unit_kind": unit_kind.value,
        "window": window,
        "stride": stride,
        "bos_rule": bos_rule.value,
        "method": METHOD_VERSION,
        "base_weights": base_weights_digest,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
