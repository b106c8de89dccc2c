"""What a vLLM says when it is the one that has to change: another setting or another release, not another adapter.

vLLM answers a load that it cannot carry out with its exception's text, and dies at start with a traceback. Some of
these messages come with every adapter, however good; they are known here by what they say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_MIXED_FORMAT = (
    "Start it with --enable-mixed-moe-lora-format (vLLM 0.22 or newer), or have the adapters of this base served "
    "{other} (`roster base add … --target-format {other}`; a single directory: `roster convert … --format {other}`)"
)


class Lack(StrEnum):
    """What the engine lacks: a setting that it can be started with, or the ability."""

    SETTING = "setting"
    ABILITY = "ability"


@dataclass(frozen=True, slots=True)
class EngineFault:
    """One fault of an engine. says: a regular expression that its message matches. advice: what to do, one phrase."""

    says: str
    lack: Lack
    cause: str
    advice: str


FAULTS = (
    # Source: vllm/lora/model_manager.py `_validate_moe_lora_format`, vLLM 0.32.0; vllm-project/vllm#42242.
    EngineFault(
        says=r"contains fused 3D MoE weights",
        lack=Lack.SETTING,
        cause="this model class takes stacked expert adapters in mixed mode only",
        advice=_MIXED_FORMAT.format(other="per-expert"),
    ),
    # The names that are expected have no single expert: a class that takes stacked experts as they are.
    # Source: vllm/lora/lora_model.py `check_unexpected_modules`, vLLM 0.32.0; vllm-project/vllm#38520, #40005.
    EngineFault(
        says=r"expected target modules in (?:(?!'experts\.\d)(?! but received ).)*'experts'"
        r"(?:(?!'experts\.\d)(?! but received ).)* but received .*\.experts\.\d+\.",
        lack=Lack.SETTING,
        cause="this model class takes per-expert adapters in mixed mode only",
        advice=_MIXED_FORMAT.format(other="stacked"),
    ),
    # Of the format `slots`. Source: roster/engine_plugin/slots_layout.py; vllm/lora/lora_model.py
    # `from_local_checkpoint` ("doesn't contain tensors"), which our plugin is wrapped around, vLLM 0.32.0.
    EngineFault(
        says=r"is not loaded: experts per projection: expected .*--enable-moe-shared-loras",
        lack=Lack.SETTING,
        cause="it was started for adapters that share factors between experts, and takes no others",
        advice="Start it without --enable-moe-shared-loras",
    ),
    EngineFault(
        says=r"is not loaded: experts per projection: expected",
        lack=Lack.SETTING,
        cause="this model class takes adapters in the format slots in mixed mode only",
        advice=_MIXED_FORMAT.format(other="stacked"),
    ),
    EngineFault(
        says=r"is not loaded: the LoRA dtype: expected",
        lack=Lack.SETTING,
        cause="its LoRA dtype is another than this adapter's, which was converted for one",
        advice="Start it with the --lora-dtype that the message names",
    ),
    EngineFault(
        says=r"doesn't contain tensors",
        lack=Lack.ABILITY,
        cause="it finds no weights that it knows; of the format slots it knows nothing without our plugin",
        advice="Install adapter-roster in its environment, and let VLLM_PLUGINS name adapter_roster_slots if it is set",
    ),
    # Source: vllm/lora/peft_helper.py `validate_legal`, vLLM 0.32.0; vllm-project/vllm#2847.
    EngineFault(
        says=r"LoRA rank \d+ is greater than max_lora_rank",
        lack=Lack.SETTING,
        cause="its --max-lora-rank is below this adapter's rank",
        advice="Start it with the max_lora_rank of this base in roster/current.json, or of the adapter's manifest",
    ),
    # Source: vllm/v1/worker/lora_model_runner_mixin.py, vLLM 0.32.0.
    EngineFault(
        says=r"LoRA is not enabled",
        lack=Lack.SETTING,
        cause="it was started without LoRA",
        advice="Start it with --enable-lora",
    ),
    # Source: vllm-project/vllm-omni#5169, vllm-project/vllm#47088; before vLLM 0.32.
    EngineFault(
        says=r"isinstance\(lora_a, list\)",
        lack=Lack.ABILITY,
        cause="this vLLM takes no stacked expert adapters for this model class, and fails only once they are loaded",
        advice=_MIXED_FORMAT.format(other="per-expert"),
    ),
    # Source: vllm-project/vllm#43254, #53470, #53482 (Gemma4), #46247 (GraniteMoe), #31923 (NemotronH); #47058
    # ended it in 0.25.
    EngineFault(
        says=r"get_expert_mapping'? must be implemented",
        lack=Lack.ABILITY,
        cause="this vLLM cannot apply LoRA to the experts of this model class, with any adapter",
        advice="Use vLLM 0.25 or newer, which finds the experts of every class by itself",
    ),
    # Source: vllm/v1/worker/lora_model_runner_mixin.py, vLLM 0.32.0; vllm-project/vllm#32736, #20650.
    EngineFault(
        says=r"does not support LoRA yet|Model \w+ does not support LoRA",
        lack=Lack.ABILITY,
        cause="this vLLM has no LoRA for this model class, with any adapter",
        advice="Use a newer vLLM; docs/families.md has the first release for each class",
    ),
    # Source: vllm-project/vllm-omni#5169.
    EngineFault(
        says=r"model_config\.architectures must be defined",
        lack=Lack.ABILITY,
        cause="this vLLM does not find the model class in a nested config, with any adapter",
        advice="Name the class under `architectures` in the base's config.json, or use a newer vLLM",
    ),
)


# Source: torch and its CPU allocator, CUDA, cuBLAS and the C library as vLLM 0.32.0 passes their messages on;
# vllm-project/vllm#5907, #14239, #38830, #52054.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|can.t allocate memory|cannot allocate memory|MemoryError|bad_alloc|_ALLOC_FAILED",
    re.IGNORECASE,
)
_ENGINE_ILL = re.compile(
    r"EngineCore encountered an issue|EngineDeadError|(?:CUDA|HIP|NCCL) error|No space left on device"
    r"|Too many open files|Permission denied|Input/output error"
)


def is_out_of_memory(message: str) -> bool:
    """Whether an engine says that its memory, or its device's, did not suffice."""
    return _OUT_OF_MEMORY.search(message) is not None


def is_engine_ill(message: str) -> bool:
    """Whether an engine says that it, or the machine under it, cannot work now, whatever it was asked."""
    return is_out_of_memory(message) or _ENGINE_ILL.search(message) is not None


@dataclass(frozen=True, slots=True)
class FoundFault:
    """A fault, and the line of the text that gave it away."""

    fault: EngineFault
    line: str


def find_fault(text: str) -> FoundFault | None:
    """Return the first known fault of an engine in an answer or a log, None where there is none."""
    for fault in FAULTS:
        found = re.search(fault.says, text)
        if found is not None:
            begin = text.rfind("\n", 0, found.start()) + 1
            end = text.find("\n", found.end())
            return FoundFault(fault, text[begin : end if end >= 0 else len(text)].strip())
    return None


def explain_log(text: str) -> str:
    """Return what an engine's log says of its end, for whoever started it; empty where it says nothing known."""
    found = find_fault(text)
    if found is None:
        return ""
    return f"Its log says: {found.line}\nThat is: {found.fault.cause}. {found.fault.advice}."
