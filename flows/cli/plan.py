"""What serving a base's adapters takes: memory of slots and of registered adapters, and the settings that fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from flows.cli.output import AsJson, emit, note, say, table

if TYPE_CHECKING:
    from tasks.capacity_known import Known
    from tasks.capacity_plan import CapacityPlan

_UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNIFIED_UTILIZATION = 0.65  # what held on a GB10


def _check_size(_: object, size: str | None) -> None:
    if size is not None and (parse_size(size) or 0) < 1:
        raise ValueError(f"expected a size such as 80GiB ({', '.join(_UNITS)}), found {size!r}")


def _check_share(_: object, share: float | None) -> None:
    if share is not None and not 0 < share <= 1:
        raise ValueError("expected a share between 0 and 1")


def _check_count(_: object, count: int | None) -> None:
    if count is not None and count < 1:
        raise ValueError("expected at least 1")


Size = Annotated[str | None, Parameter(validator=_check_size)]
Count = Annotated[int | None, Parameter(validator=_check_count)]
Switch = Annotated[bool | None, Parameter(show_default=False)]


def plan(
    *,
    base: str | None = None,
    gpu_memory: Size = None,
    host_memory: Size = None,
    unified: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    utilization: Annotated[float | None, Parameter(validator=_check_share)] = None,
    weights_memory: Size = None,
    tp: Count = None,
    ep: Switch = None,
    fully_sharded: Switch = None,
    adapters: Count = None,
    max_lora_rank: int | None = None,
    dtype: Literal["float16", "bfloat16", "float32"] | None = None,
    json: AsJson = False,
) -> None:
    """Say what serving a base's adapters takes: bytes of a slot, what fits, what loading costs, settings to paste.

    Slots take memory on the accelerator from the start, whatever the adapters' own ranks; registered adapters take the
    host's. Nothing is measured and no server is asked: sizes are of config.json, and of what the store knows of a
    registered base: who is served, and how its engine runs.

    ```
    roster plan --base tiny --gpu-memory 80GiB --host-memory 256GiB
    roster plan --base models/tiny --gpu-memory 80GiB --adapters 100
    ```

    Parameters
    ----------
    base:
        The base's config.json, a directory that holds one, or the name of a registered base. The registered one if
        left out and there is no other.
    gpu_memory:
        Of each accelerator, such as 80GiB. Without it nothing is fitted.
    host_memory:
        Of the host that the server runs on. Without it every adapter is taken to fit.
    unified:
        Accelerator and host share --gpu-memory, as on a GB10.
    utilization:
        vLLM's --gpu-memory-utilization; 0.92 if left out, 0.65 with --unified.
    weights_memory:
        What the weights take on each accelerator. Computed if left out, as if they were not quantized.
    tp:
        Accelerators that tensor parallelism spreads the model over; as the registered base's engine runs if left out.
    ep:
        Each of them holds whole experts (--enable-expert-parallel).
    fully_sharded:
        vLLM's --fully-sharded-loras.
    adapters:
        How many authors are to be served; as many as are served now if left out.
    max_lora_rank:
        vLLM's --max-lora-rank; what the served adapters need if left out.
    dtype:
        Of the weights and of LoRA; the engine's, or that of config.json, if left out.
    """
    from flows.cli.convert import read_named_base
    from roster.capacity import GPU_UTILIZATION, Memory
    from tasks.capacity_known import Wishes
    from tasks.capacity_plan import plan_capacity

    memory = None
    if gpu_bytes := _bytes(gpu_memory):
        memory = Memory(
            gpu_bytes=gpu_bytes,
            utilization=utilization or (_UNIFIED_UTILIZATION if unified else GPU_UTILIZATION),
            host_bytes=_bytes(host_memory),
            unified=unified,
        )
    wishes = Wishes(
        memory=memory,
        tp=tp,
        ep=ep,
        fully_sharded=fully_sharded,
        adapters=adapters,
        max_lora_rank=max_lora_rank,
        dtype=dtype,
        weight_bytes=_bytes(weights_memory),
    )
    named = base or _only_base()
    found = plan_capacity(read_named_base(named).config, _read_known(named), wishes)
    emit(found.model_dump(mode="json"), as_json=json, show=lambda: _show(found))


def parse_size(text: str) -> int | None:
    """The bytes that a size such as 80GiB or 1.5 TB means; None where it means none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    if match is None or match[2] not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2]])


def _bytes(size: str | None) -> int | None:
    return None if size is None else parse_size(size)


def _only_base() -> str:
    from flows.connect import open_store
    from flows.settings import load_settings
    from roster.errors import PlanImpossible
    from storage.bases import list_bases

    registered = list_bases(open_store(load_settings()))
    if len(registered) != 1:
        found = f"those registered are {', '.join(registered)}" if registered else "none is registered"
        raise PlanImpossible(f"Of which base? Name it, or its config.json, with --base: {found}.")
    return registered[0]


def _read_known(base: str) -> Known:
    from tasks.capacity_known import Known, read_known

    if Path(base).exists():
        return Known()
    from flows.connect import open_store
    from flows.settings import load_settings

    return read_known(open_store(load_settings()), base)


def _show(found: CapacityPlan) -> None:
    from roster.capacity import gib

    layout = found.layout
    spread = f", over {layout.tp} accelerators" if layout.tp > 1 else ""
    how = [
        word for word, on in (("expert parallel", layout.ep), ("fully sharded", layout.fully_sharded)) if on
    ]
    say(f"{found.base}: {found.architecture}, {', '.join([found.dtype + spread, *how])}")
    say(
        f"a slot of max_lora_rank {found.max_lora_rank} takes {gib(found.slot_bytes)} of each accelerator, "
        f"{gib(found.slot_experts_bytes)} of it for experts; the weights take {gib(found.weight_bytes)}"
    )
    say(
        f"a registered adapter of rank {found.adapter_rank} on all modules takes {gib(found.adapter_bytes)} of the "
        f"host's memory, {gib(found.adapter_pinned_bytes)} pinned"
    )
    rows = [
        (one.max_loras, gib(one.slots_bytes), _left(one.left_bytes))
        for one in found.slots
        if one.left_bytes is not None or one.max_loras
    ]
    table(["max_loras", "slots", "left for the KV cache, computing and graphs"], rows, empty="")
    if found.fit is not None:
        say(
            f"for {found.adapters} adapters: {found.fit.max_loras} slots ({gib(found.fit.slots_bytes)}) and "
            f"{found.fit.max_cpu_loras} kept in the host's memory ({gib(found.fit.host_bytes)})"
        )
    say("settings: " + " ".join(found.arguments))
    costs = [(one.what, _seconds(one.best_s, one.usual_s), one.source) for one in found.costs]
    table(["every request waits for a", "seconds", "source"], costs, empty="")
    _show_published(found)
    for warning in found.warnings:
        note(f"warning: {warning.text}")


def _show_published(found: CapacityPlan) -> None:
    if found.published is None:
        return
    columns = ["max_loras", "published: tokens/s", "GiB for the KV cache", "computed from slots", "apart"]
    rows = [
        (one.max_loras, one.published_tokens_per_s, one.published_gib, one.computed_gib, one.gap_gib)
        for one in found.published
    ]
    table(columns, rows, empty="")
    say(
        "what was published for this shape does not follow from its slots, and no explanation was: size by what is "
        "computed, then by what the server's log says is left"
    )


def _left(left: int | None) -> str:
    from roster.capacity import gib

    if left is None:
        return "say --gpu-memory"
    return gib(left) if left > 0 else f"does not fit: {gib(-left)} are missing"


def _seconds(best: float, usual: float) -> str:
    return f"{best:.3g}" if best == usual else f"{best:.3g} to {usual:.3g}"
