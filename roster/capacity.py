"""What keeping adapters costs a vLLM server: bytes for each slot and each registered adapter, and how many fit.

A slot is room on the accelerator for one adapter, allocated at start for every wrapped module, whatever the adapters'
own ranks. A registered adapter lies in the memory of the host, ready to be copied into a slot.
Source: vllm/lora/layers/{base_linear,column_parallel_linear,row_parallel_linear,vocab_parallel_embedding,
logits_processor,fused_moe}.py (`create_lora_weights`), vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from roster.errors import PlanImpossible

GPU_UTILIZATION = 0.92
"""vLLM's default gpu_memory_utilization."""

SLOT_SHARE = 0.5
"""How much of what the weights leave may go to slots; the rest is for the KV cache and for computing. Our choice."""

HOST_SHARE = 0.8
"""How much of the host's memory may hold registered adapters. Our choice."""

PINNED_PER_BYTE = 1.69 / 1.55
"""Pinned host memory taken for each byte of a registered adapter, measured at the 30B shape with vLLM 0.32."""


WARMED_RANK = 16
"""What the warm-up leaves pinned, as a registered adapter of this rank: 1.7 GiB at the 30B shape with vLLM 0.32.

Its adapter has rank 8 whatever max_lora_rank is (vllm/v1/worker/lora_model_runner_mixin.py), and stays twice.
"""


class Split(Enum):
    """How tensor parallelism divides a wrapped linear layer: its outputs, its input, or not at all."""

    OUTPUTS = "outputs"
    INPUT = "input"
    NOT = "not"


@dataclass(frozen=True, slots=True)
class Output:
    """One slice of a layer's outputs. least: the share that no process goes below, as a whole head of keys."""

    size: int
    least: int = 1


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A wrapped linear layer, embedding or output head. Each output has a pair of factors of its own."""

    in_size: int
    outputs: tuple[Output, ...]
    split: Split


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A wrapped experts module. first_slices: of its first projection. fused: its slices share one pair of factors."""

    experts: int
    hidden: int
    intermediate: int
    first_slices: int
    fused: bool


Shape = LinearShape | ExpertsShape


@dataclass(frozen=True, slots=True)
class Layout:
    """How a server spreads one model over `tp` processes. ep: each holds whole experts instead of parts of all."""

    tp: int = 1
    ep: bool = False
    fully_sharded: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """What a server has: bytes of each accelerator, the share vLLM may use, and the whole host's memory if known.

    unified: accelerator and host share one memory, so that the host has what vLLM does not use.
    """

    gpu_bytes: int
    utilization: float
    host_bytes: int | None
    unified: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one base takes: a slot and the weights on each accelerator, a registered adapter in the whole host.

    warmed_bytes: what the warm-up leaves pinned in the host's memory.
    """

    slot_bytes: int
    weight_bytes: int
    adapter_bytes: int
    warmed_bytes: int

    @property
    def pinned_bytes(self) -> int:
        """What a registered adapter takes in pinned memory, as it lies where there is an accelerator."""
        return int(self.adapter_bytes * PINNED_PER_BYTE)


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits: settings for vLLM, and the bytes that they take on each accelerator and in the host's memory.

    left_bytes: of each accelerator, for the KV cache, for computing and for graphs.
    """

    max_loras: int
    max_cpu_loras: int
    slots_bytes: int
    host_bytes: int
    left_bytes: int


def slot_elements(shapes: Sequence[Shape], max_lora_rank: int, layout: Layout) -> int:
    """The numbers that one slot holds in the first process of `layout`, which has the most of them.

    Raises PlanImpossible where vLLM refuses the combination, or a size does not divide.
    """
    if layout.ep and layout.fully_sharded:
        raise PlanImpossible(
            "vLLM refuses expert parallelism with fully sharded LoRA: leave one of them out."
        )
    return sum(_elements(shape, max_lora_rank, layout) for shape in shapes)


def host_elements(shapes: Sequence[Shape], rank: int, layout: Layout) -> int:
    """The numbers of one registered adapter on all these modules, in each process: undivided but for experts."""
    tp = layout.tp if layout.ep else 1
    return sum(
        _elements(shape, rank, Layout(tp, ep=True) if isinstance(shape, ExpertsShape) else Layout())
        for shape in shapes
    )


def weight_elements(shapes: Sequence[Shape]) -> int:
    """The numbers in the base's own weights of these modules: all of a model but its norms and biases."""
    return sum(
        shape.experts * (shape.first_slices + 1) * shape.hidden * shape.intermediate
        if isinstance(shape, ExpertsShape)
        else shape.in_size * sum(output.size for output in shape.outputs)
        for shape in shapes
    )


def left_bytes(sizes: Sizes, memory: Memory, max_loras: int) -> int:
    """What so many slots leave of each accelerator beside the weights; below zero where they do not fit.

    In unified memory what the warm-up leaves pinned is taken from it, too.
    """
    warmed = sizes.warmed_bytes if memory.unified and max_loras else 0
    used = sizes.weight_bytes + warmed + max_loras * sizes.slot_bytes
    return int(memory.gpu_bytes * memory.utilization) - used


def fit(sizes: Sizes, memory: Memory, adapters: int) -> Fit:
    """How many of `adapters` fit; where the host's memory is not known, all of them are registered.

    Raises PlanImpossible where not even one slot fits, or not even one registered adapter.
    """
    free = left_bytes(sizes, memory, 1) + sizes.slot_bytes
    slots = min(adapters, int(max(free, 0) * SLOT_SHARE) // sizes.slot_bytes)
    if slots < 1:
        raise PlanImpossible(
            f"Not one slot of {gib(sizes.slot_bytes)} fits: of {gib(memory.gpu_bytes)}, {memory.utilization:.0%} are "
            f"used, the weights take {gib(sizes.weight_bytes)}, and half of the rest may go to slots. Use more "
            "accelerators (--tp), more memory, or a smaller --max-lora-rank."
        )
    host = _host_bytes(memory)
    registered = adapters if host is None else min(adapters, int(host * HOST_SHARE) // sizes.pinned_bytes)
    if registered < 1:
        raise PlanImpossible(
            f"Not one adapter of {gib(sizes.pinned_bytes)} fits into {HOST_SHARE:.0%} of {gib(host or 0)}: use more "
            "host memory."
        )
    slots = min(slots, registered)
    return Fit(
        max_loras=slots,
        max_cpu_loras=registered,
        slots_bytes=slots * sizes.slot_bytes,
        host_bytes=registered * sizes.pinned_bytes,
        left_bytes=left_bytes(sizes, memory, slots),
    )


def _host_bytes(memory: Memory) -> int | None:
    if memory.host_bytes is None and memory.unified:
        return int(memory.gpu_bytes * (1 - memory.utilization))
    return memory.host_bytes


def gib(count: int) -> str:
    """Bytes as text in GiB."""
    return f"{count / 2**30:.2f} GiB"


def _elements(shape: Shape, rank: int, layout: Layout) -> int:
    if isinstance(shape, ExpertsShape):
        return _expert_elements(shape, rank, layout)
    tp = layout.tp if shape.split is not Split.NOT else 1
    first_rank, in_size, shared = rank, shape.in_size, 1
    if shape.split is Split.INPUT:
        in_size = _divide(in_size, tp)
        shared = tp if layout.fully_sharded else 1
    elif layout.fully_sharded:
        first_rank = _divide(rank, tp)
    total = 0
    for output in shape.outputs:
        out = _share(output, tp) if shape.split is Split.OUTPUTS else _divide(output.size, shared)
        total += first_rank * in_size + rank * out
    return total


def _expert_elements(shape: ExpertsShape, rank: int, layout: Layout) -> int:
    experts = -(-shape.experts // layout.tp) if layout.ep else shape.experts
    tp = 1 if layout.ep else layout.tp
    inner = _divide(shape.intermediate, tp)
    full = tp if layout.fully_sharded else 1
    pairs = 1 if shape.fused else shape.first_slices
    first = pairs * _divide(rank, full) * shape.hidden + rank * shape.first_slices * inner
    second = rank * inner + rank * _divide(shape.hidden, full)
    return experts * (first + second)


def _share(output: Output, tp: int) -> int:
    return output.least if output.size // tp < output.least else _divide(output.size, tp)


def _divide(size: int, parts: int) -> int:
    if size % parts:
        raise PlanImpossible(f"A size or rank of {size} does not divide by --tp {parts}: choose another.")
    return size // parts
