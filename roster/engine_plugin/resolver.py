"""Plugin `adapter_roster_resolver`: a server answers for `model="<author>"` with what the roster serves at that moment.

Off unless ADAPTER_ROSTER_CACHE_DIR is set. Four methods of vLLM's API server are wrapped:

1. `_check_model`, the first thing every route does with a request: `<author>` becomes `<author>@<16 of the digest>`,
   the name of one adapter's bytes. From there on all is vLLM's own way with adapters it has to look for.
2. `OpenAIServingModels.__init__`: the roster is followed from then on.
3. `load_lora_adapter`, `unload_lora_adapter`: a name whose adapter is here from the cache stays as it is. Scoring loads
   the same bytes under the same name from another folder, and vLLM would refuse; and it unloads all that has an "@".
4. `show_available_models`: authors are listed beside what is loaded.

Nothing of vLLM is imported before `register` runs, for the reason given in `cpu_moe`.
Source: vllm/entrypoints/serve/engine/serving.py, vllm/entrypoints/pooling/base/serving.py (`_check_model`,
`_maybe_get_adapters`), vllm/entrypoints/openai/models/serving.py, vllm/lora/resolver.py, vLLM 0.32.0.
"""

import functools
import inspect
import multiprocessing
from typing import Any

from roster.engine_plugin.errors import MovedInternalError, ResolverSettingsError, UnpinnedVllmError
from roster.engine_plugin.settings import PINNED_VLLM, PluginSettings

_SERVING = "_adapter_roster_serving"
_WRAPPED = "_adapter_roster_resolves"


def register() -> None:
    """Have this vLLM server serve authors by name; does nothing where it is not asked for, and the second time.

    Nothing either in the processes that a server starts: requests are taken in the first one.
    Raises ResolverSettingsError when what it needs is not set, UnpinnedVllmError when vLLM is another release,
    MovedInternalError when a part of it that we build on has another shape, ImportError when such a part is gone.
    """
    settings = PluginSettings()
    if settings.cache_dir is None or multiprocessing.parent_process() is not None:
        return
    import vllm
    from vllm import envs

    if vllm.__version__ != PINNED_VLLM:
        raise UnpinnedVllmError(vllm.__version__, PINNED_VLLM)
    check_settings(
        settings,
        runtime_updating=envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING,
        any_name=envs.VLLM_SKIP_MODEL_NAME_VALIDATION,
        other_server=envs.VLLM_USE_RUST_FRONTEND,
    )
    check_internals()

    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.entrypoints.serve.engine.serving import BaseServing

    if hasattr(OpenAIServingModels.__init__, _WRAPPED):
        return
    _wrap_models(OpenAIServingModels, settings)
    for serving in (BaseServing, PoolingBaseServing):
        _wrap_check(serving)


def check_settings(
    settings: PluginSettings, *, runtime_updating: bool, any_name: bool, other_server: bool
) -> None:
    """Raise ResolverSettingsError unless all is set that serving by name needs, and nothing that would defeat it."""
    needed = {
        "ADAPTER_ROSTER_ENGINE_BASE": settings.engine_base,
        "ADAPTER_ROSTER_STORE_BUCKET": settings.store_bucket,
        "ADAPTER_ROSTER_STORE_REGION": settings.store_region,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1": runtime_updating or None,
    }
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ResolverSettingsError(f"set {', '.join(missing)} as well")
    if any_name:
        raise ResolverSettingsError(
            "unset VLLM_SKIP_MODEL_NAME_VALIDATION: with it the base answers for every author that is not known"
        )
    if other_server:
        raise ResolverSettingsError(
            "unset VLLM_USE_RUST_FRONTEND: that API server knows no plugin of Python's"
        )


def check_internals() -> None:
    """Raise MovedInternalError unless the parts of vLLM that we wrap or call look as they did when tested."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver
    from vllm.v1.engine.async_llm import AsyncLLM

    methods = (
        (BaseServing, "_check_model", "self request"),
        (BaseServing, "_maybe_get_adapters", "self request supports_default_mm_loras"),
        (PoolingBaseServing, "_check_model", "self request"),
        (OpenAIServingModels, "__init__", "self engine_client base_model_paths lora_modules"),
        (OpenAIServingModels, "resolve_lora", "self lora_name"),
        (OpenAIServingModels, "load_lora_adapter", "self request base_model_name"),
        (OpenAIServingModels, "unload_lora_adapter", "self request"),
        (OpenAIServingModels, "show_available_models", "self"),
        (OpenAIServingModels, "is_base_model", "self model_name"),
        (LoRAResolver, "resolve_lora", "self base_model_name lora_name"),
        (AsyncLLM, "remove_lora", "self lora_id"),
    )
    for owner, name, parameters in methods:
        expected = tuple(parameters.split())
        found = tuple(inspect.signature(getattr(owner, name)).parameters) if hasattr(owner, name) else ()
        if found != expected:
            raise MovedInternalError(f"{owner.__name__}.{name}", expected, found)
    fields = ("lora_name", "lora_int_id", "lora_path", "is_3d_lora_weight")
    if not set(fields) <= set(LoRARequest.__struct_fields__):
        raise MovedInternalError("LoRARequest", fields, LoRARequest.__struct_fields__)


def _wrap_models(models_class: Any, settings: PluginSettings) -> None:
    original_init, original_list = models_class.__init__, models_class.show_available_models
    original_load, original_unload = models_class.load_lora_adapter, models_class.unload_lora_adapter

    @functools.wraps(original_init)
    def init(self: Any, engine_client: Any, base_model_paths: Any, **more: Any) -> None:
        original_init(self, engine_client, base_model_paths, **more)
        from roster.engine_plugin.server import follow_roster

        setattr(self, _SERVING, follow_roster(self, settings))

    @functools.wraps(original_load)
    async def load(self: Any, request: Any, base_model_name: str | None = None) -> Any:
        answer = f"Success: LoRA adapter '{request.lora_name}' is loaded from the roster's cache."
        owns = getattr(self, _SERVING).authors.owns
        if owns(request.lora_name):  # in place as well: a name never gets other bytes
            return answer
        found = await original_load(self, request, base_model_name)
        # It may have been loaded for an author while this request waited for its turn, and is refused then.
        return answer if not isinstance(found, str) and owns(request.lora_name) else found

    @functools.wraps(original_unload)
    async def unload(self: Any, request: Any) -> Any:
        if getattr(self, _SERVING).authors.owns(request.lora_name):
            return f"Success: LoRA adapter '{request.lora_name}' stays in the roster's cache."
        return await original_unload(self, request)

    @functools.wraps(original_list)
    async def show(self: Any) -> Any:
        listed = await original_list(self)
        listed.data.extend(getattr(self, _SERVING).list_cards())
        return listed

    setattr(init, _WRAPPED, True)
    models_class.__init__ = init
    models_class.load_lora_adapter, models_class.unload_lora_adapter = load, unload
    models_class.show_available_models = show


def _wrap_check(serving_class: Any) -> None:
    original = serving_class._check_model

    @functools.wraps(original)
    async def check_model(self: Any, request: Any) -> Any:
        serving = getattr(self.models, _SERVING, None)  # a server that only renders has no adapters
        name = request.model
        if serving is None or not name or self.models.is_base_model(name):
            return await original(self, request)
        with serving.as_answers():
            while True:
                request.model = await serving.prepare(name, request)
                found = await original(self, request)
                # Scoring may have loaded the version from its own folder while this request waited for vLLM's lock.
                if request.model == name or not serving.authors.is_from_elsewhere(request.model):
                    return found

    serving_class._check_model = check_model
