"""What a vLLM server is told to serve the roster's authors: its arguments, and the adapters that it loads at start."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from roster.serving import EngineFlag, RosterBase


class EnvironmentVariable(NamedTuple):
    """A variable to set where a server is started."""

    name: str
    value: str


MOST_KEPT_ADVISED = 16
"""Adapters to keep in the host's memory, unasked: each takes its own size there (`roster plan` says how much)."""

RUNTIME_UPDATES = EnvironmentVariable("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
"""Without it vLLM neither asks a resolver nor takes adapters while it runs. Source: vllm/envs.py, vLLM 0.32.0."""

CACHE_DIR = "/var/cache/adapter-roster"
"""Where a server with our plugin keeps the adapters it has fetched, unless another folder is chosen."""

_FLAGS = {EngineFlag.MIXED_MOE_LORA_FORMAT: "--enable-mixed-moe-lora-format"}


class LoraModule(BaseModel):
    """An adapter that a server loads at its start, as `--lora-modules` takes it; `path` as the server sees it.

    Source: vllm/entrypoints/openai/models/protocol.py (`LoRAModulePath`), vLLM 0.32.0.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    path: str
    base_model_name: str
    is_3d_lora_weight: bool


def served_path(root: PurePosixPath, author: str, output_digest: str) -> PurePosixPath:
    """Where an author's adapter lies below a folder that is laid out as the store's `serving/` is."""
    return root / author / output_digest


def list_modules(base: RosterBase, root: PurePosixPath) -> tuple[LoraModule, ...]:
    """The adapters of a base, by author. `root`: the folder, as the server sees it, that holds what `serving/` does."""
    return tuple(
        LoraModule(
            name=author,
            path=str(served_path(root, author, entry.output_digest)),
            base_model_name=base.served_model,
            is_3d_lora_weight=entry.is_3d_lora_weight,
        )
        for author, entry in sorted(base.authors.items())
    )


def plan_arguments(
    base: RosterBase,
    modules: Sequence[LoraModule],
    *,
    max_loras: int | None = None,
    max_cpu_loras: int | None = None,
) -> tuple[str, ...]:
    """The arguments with which a server can serve all authors of a base; `modules` are loaded at its start.

    `max_loras`: slots on the accelerator, the roster's advice if None. `max_cpu_loras`: adapters kept in the host's
    memory; if None as many as there are authors, up to MOST_KEPT_ADVISED, since vLLM's own default keeps none besides
    the slots, and reads the disk for each swap. It is never below the slots, which vLLM refuses.
    Source: vllm/config/lora.py, vllm/entrypoints/launchers/cli_args.py, vLLM 0.32.0.
    """
    slots = base.engine.max_loras if max_loras is None else max_loras
    kept = min(len(base.authors), MOST_KEPT_ADVISED) if max_cpu_loras is None else max_cpu_loras
    return (
        *("--served-model-name", base.served_model),
        *("--enable-lora", "--max-lora-rank", str(base.engine.max_lora_rank)),
        *("--max-loras", str(slots), "--max-cpu-loras", str(max(slots, kept))),
        *(_FLAGS[flag] for flag in base.engine.flags),
        *(("--lora-modules", *(module.model_dump_json() for module in modules)) if modules else ()),
    )


def plan_environment(
    base: str, *, endpoint: str | None, bucket: str, region: str, addressing: str
) -> tuple[EnvironmentVariable, ...]:
    """What makes a server with our plugin serve the authors of a base by name; the store's keys are set besides.

    `endpoint`: the store's address as the server reaches it, None for Amazon's own.
    """
    return (
        RUNTIME_UPDATES,
        EnvironmentVariable("ADAPTER_ROSTER_ENGINE_BASE", base),
        EnvironmentVariable("ADAPTER_ROSTER_CACHE_DIR", CACHE_DIR),
        *((EnvironmentVariable("ADAPTER_ROSTER_STORE_ENDPOINT", endpoint),) if endpoint else ()),
        EnvironmentVariable("ADAPTER_ROSTER_STORE_BUCKET", bucket),
        EnvironmentVariable("ADAPTER_ROSTER_STORE_REGION", region),
        EnvironmentVariable("ADAPTER_ROSTER_STORE_ADDRESSING_STYLE", addressing),
    )
