"""The capacity plan of a base: what slots and registered adapters take, what fits, and what to set."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from roster.capacity import (
    PINNED_PER_BYTE,
    WARMED_RANK,
    Fit,
    Layout,
    Memory,
    Sizes,
    fit,
    host_elements,
    left_bytes,
    slot_elements,
    weight_elements,
)
from roster.costs import REFERENCE_SLOT_BYTES, Cost, Residency, compare_published, list_costs
from roster.errors import PlanImpossible
from roster.serving import LEGAL_MAX_LORA_RANKS, EngineFlag
from roster.serving_engine import EngineInfo
from tasks.capacity_known import Known, Wishes
from tasks.capacity_warnings import Warned, list_warnings
from tasks.lora.base import BaseConfig
from tasks.planning import list_wrapped

POINTS = (0, 1, 2, 4, 8, 16)
"""The numbers of slots that a plan shows the memory of."""

_VLLM_RANK = 16
"""vLLM's default max_lora_rank."""

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class SlotsMemory(BaseModel):
    """What so many slots take on each accelerator, and leave of it where its memory is known."""

    model_config = ConfigDict(frozen=True)

    max_loras: int
    slots_bytes: int
    left_bytes: int | None


class CapacityPlan(BaseModel):
    """What a base's adapters cost a server. Bytes of slots and weights are each accelerator's, those of adapters the
    whole host's. `fit` is null where no memory was given, `published` where it was not measured at this shape.
    """

    model_config = ConfigDict(frozen=True)

    base: str
    architecture: str
    dtype: str
    max_lora_rank: int
    adapter_rank: int
    adapters: int | None
    layout: Layout
    slot_bytes: int
    slot_experts_bytes: int
    weight_bytes: int
    adapter_bytes: int
    adapter_pinned_bytes: int
    slots: tuple[SlotsMemory, ...]
    fit: Fit | None
    arguments: tuple[str, ...]
    costs: tuple[Cost, ...]
    published: tuple[Residency, ...] | None
    warnings: tuple[Warned, ...]


def plan_capacity(base: BaseConfig, known: Known, wishes: Wishes) -> CapacityPlan:
    """The plan for a base.

    Raises PlanImpossible for what vLLM would not start with or what does not fit, InvalidBaseConfig.
    """
    mixed = _is_mixed(known)
    wrapped = list_wrapped(base, mixed=mixed)
    layout = _layout(known.engine, wishes)
    dtype = _dtype(base, known, wishes)
    rank, adapter_rank = _ranks(known, wishes)
    width = _ELEMENT_BYTES[dtype]
    weights = wishes.weight_bytes
    if weights is None:
        weights = -(-weight_elements(wrapped.shapes) * width // layout.tp)
    sizes = Sizes(
        slot_bytes=width * slot_elements(wrapped.shapes, rank, layout),
        weight_bytes=weights,
        adapter_bytes=width * layout.tp * host_elements(wrapped.shapes, adapter_rank, layout),
        warmed_bytes=int(
            PINNED_PER_BYTE * width * layout.tp * host_elements(wrapped.shapes, WARMED_RANK, layout)
        ),
    )
    adapters = wishes.adapters or (len(known.served.authors) if known.served else None)
    found = fit(sizes, wishes.memory, adapters) if wishes.memory and adapters else None
    of_reference = (
        layout == Layout() and 2 * slot_elements(wrapped.shapes, 16, layout) == REFERENCE_SLOT_BYTES
    )
    return CapacityPlan(
        base=base.label,
        architecture=base.served.architecture,
        dtype=dtype,
        max_lora_rank=rank,
        adapter_rank=adapter_rank,
        adapters=adapters,
        layout=layout,
        slot_bytes=sizes.slot_bytes,
        slot_experts_bytes=width * slot_elements(wrapped.experts, rank, layout),
        weight_bytes=weights,
        adapter_bytes=sizes.adapter_bytes,
        adapter_pinned_bytes=sizes.pinned_bytes,
        slots=tuple(_slots(sizes, wishes.memory)),
        fit=found,
        arguments=_arguments(rank, layout, found, wishes.memory, mixed=mixed),
        costs=tuple(list_costs(sizes.adapter_bytes)),
        published=tuple(compare_published()) if of_reference else None,
        warnings=tuple(list_warnings(known, wishes, sizes, found, adapters, wrapped.uncounted)),
    )


def _is_mixed(known: Known) -> bool:
    asked = known.served is not None and EngineFlag.MIXED_MOE_LORA_FORMAT in known.served.engine.flags
    return asked or (known.engine is not None and known.engine.mixed_moe_lora_format)


def _layout(engine: EngineInfo | None, wishes: Wishes) -> Layout:
    """As asked, else as the engine runs."""
    tp = engine.tensor_parallel_size if engine and wishes.tp is None else wishes.tp or 1
    ep = engine.expert_parallel if engine and wishes.ep is None else bool(wishes.ep)
    full = (
        engine.fully_sharded_loras if engine and wishes.fully_sharded is None else bool(wishes.fully_sharded)
    )
    return Layout(tp, ep=ep, fully_sharded=full)


def _dtype(base: BaseConfig, known: Known, wishes: Wishes) -> str:
    """As asked, else as the engine runs, else as it is registered, else what vLLM takes of itself on a GPU.

    That is bfloat16 for float32 and where config.json says nothing.
    Source: vllm/config/model.py, _resolve_auto_dtype, vLLM 0.32.0.
    """
    of_config = "bfloat16" if base.dtype in {None, "float32"} else base.dtype
    said = (
        wishes.dtype,
        known.engine.lora_dtype if known.engine else None,
        known.document.engine.dtype if known.document else None,
        of_config,
    )
    dtype = next(one for one in said if one is not None and one != "auto")
    if dtype not in _ELEMENT_BYTES:
        known_dtypes = ", ".join(_ELEMENT_BYTES)
        raise PlanImpossible(
            f"{base.label}: expected one of {known_dtypes} as the dtype, found {dtype}: say --dtype."
        )
    return dtype


def _ranks(known: Known, wishes: Wishes) -> tuple[int, int]:
    """max_lora_rank, and the largest rank of an adapter that lies in the host's memory."""
    if wishes.max_lora_rank is not None and wishes.max_lora_rank not in LEGAL_MAX_LORA_RANKS:
        legal = ", ".join(map(str, LEGAL_MAX_LORA_RANKS))
        raise PlanImpossible(f"vLLM takes no --max-lora-rank {wishes.max_lora_rank}: choose one of {legal}.")
    ranks = [author.rank for author in known.served.authors.values()] if known.served else []
    said = (
        wishes.max_lora_rank,
        known.served.engine.max_lora_rank if known.served else None,
        known.engine.max_lora_rank if known.engine else None,
    )
    rank = next((one for one in said if one is not None), _VLLM_RANK)
    if ranks and max(ranks) > rank:
        raise PlanImpossible(
            f"An adapter of rank {max(ranks)} is served: no slot of --max-lora-rank {rank} takes it."
        )
    return rank, max(ranks, default=rank)


def _slots(sizes: Sizes, memory: Memory | None) -> Iterator[SlotsMemory]:
    for count in POINTS:
        left = None if memory is None else left_bytes(sizes, memory, count)
        yield SlotsMemory(max_loras=count, slots_bytes=count * sizes.slot_bytes, left_bytes=left)


def _arguments(
    rank: int, layout: Layout, found: Fit | None, memory: Memory | None, *, mixed: bool
) -> tuple[str, ...]:
    """Source: vllm/engine/arg_utils.py, vLLM 0.32.0."""
    fitted = (
        ("--max-loras", str(found.max_loras), "--max-cpu-loras", str(found.max_cpu_loras)) if found else ()
    )
    return (
        *("--enable-lora", "--max-lora-rank", str(rank), *fitted),
        *(("--gpu-memory-utilization", f"{memory.utilization:g}") if memory else ()),
        *(("--tensor-parallel-size", str(layout.tp)) if layout.tp > 1 else ()),
        *(("--enable-expert-parallel",) if layout.ep else ()),
        *(("--fully-sharded-loras",) if layout.fully_sharded else ()),
        *(("--enable-mixed-moe-lora-format",) if mixed else ()),
    )
