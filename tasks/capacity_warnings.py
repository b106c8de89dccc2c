"""What to know before the settings of a capacity plan are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from roster.capacity import Fit, Sizes, gib
from tasks.capacity_known import Known, Wishes

HIGHEST_UNIFIED_UTILIZATION = 0.8
"""Above it engines were reported to hang on a GB10."""


class Warned(BaseModel):
    """Something to know before these settings are used; `code` never changes."""

    model_config = ConfigDict(frozen=True)

    code: str
    text: str


def list_warnings(
    known: Known,
    wishes: Wishes,
    sizes: Sizes,
    found: Fit | None,
    adapters: int | None,
    uncounted: Sequence[str],
) -> Iterator[Warned]:
    """What may go wrong with these settings, in the order of importance."""
    engine, memory = known.engine, wishes.memory
    if engine is not None and not engine.expert_modules:
        yield Warned(
            code="experts_not_wrapped",
            text="the engine that published itself wraps no routed experts. In --lora-target-modules they are called "
            "`experts`: gate_proj, up_proj and down_proj wrap nothing of them. Leave it out, or name `experts`.",
        )
    if memory is not None and adapters is None:
        yield Warned(
            code="adapters_unknown",
            text="nobody is served on this base yet: say with --adapters how many will be, so that they can be fitted.",
        )
    if found is not None and adapters is not None and found.max_loras < adapters:
        yield Warned(
            code="starvation",
            text=f"{adapters} adapters share {found.max_loras} slots: one without a slot waits for as long as the "
            "others are kept busy by overlapping requests, without end. Have a slot for each author who is busy at "
            "the same time, or let each have one request at once, or set --max-num-seqs to no more than --max-loras "
            "(docs/capacity.md).",
        )
    if found is not None and adapters is not None and found.max_cpu_loras < adapters:
        yield Warned(
            code="read_again",
            text=f"the host's memory keeps {found.max_cpu_loras} of {adapters} adapters: the others are read from disk "
            "each time they are asked for, and every request waits meanwhile.",
        )
    if engine is not None and engine.max_cpu_loras < (adapters or 0):
        yield Warned(
            code="engine_keeps_few",
            text=f"the engine that published itself keeps {engine.max_cpu_loras} adapters in the host's memory "
            "(--max-cpu-loras, by default as many as --max-loras): others are read from disk for each swap.",
        )
    if memory is not None and memory.unified:
        yield Warned(
            code="unified_memory",
            text=f"one memory for everything: the warm-up leaves {gib(sizes.warmed_bytes)} pinned, taken from the KV "
            "cache. Size --max-model-len to the longest sequence, and drop the page cache before a big load.",
        )
        if memory.utilization > HIGHEST_UNIFIED_UTILIZATION:
            yield Warned(
                code="unified_hangs",
                text=f"engines were reported to hang above --gpu-memory-utilization {HIGHEST_UNIFIED_UTILIZATION} on a "
                "GB10; 0.65 held.",
            )
    quantized = (known.document is not None and known.document.engine.quantization) or (
        engine is not None and engine.quantization
    )
    if quantized and wishes.weight_bytes is None:
        yield Warned(
            code="quantized",
            text=f"weights are counted unquantized, as {gib(sizes.weight_bytes)}; in {quantized} they take less: say "
            "--weights-memory.",
        )
    if engine is not None and engine.pipeline_parallel_size > 1:
        yield Warned(
            code="pipeline",
            text="the engine spreads its layers over a pipeline: each accelerator has its part of what is told here.",
        )
    if uncounted:
        yield Warned(
            code="uncounted",
            text=f"not counted, since config.json does not tell their sizes: {', '.join(uncounted)}. A slot takes a "
            "little more.",
        )
