"""Plugin `adapter_roster_slots`: vLLM loads adapters of the format `slots`, whose experts lie as its slots hold them.

vLLM makes a tensor of each expert's factor, and stacks thousands of them for each layer; here the stacked tensors are
views of the mapped file (`slots_file`). An adapter is of this format if its folder has `adapter_slots.safetensors`;
any other is left to vLLM. It comes the same way as all others, by `/v1/load_lora_adapter`, `--lora-modules` or a
resolver, and vLLM's own code does all but two steps:

1. `WorkerLoRAManager._load_adapter` notes for which manager it loads.
2. `LoRAModel.from_local_checkpoint` makes the stacked factors what vLLM would have packed (`PackedLoRALayerWeights`),
   and has vLLM's `from_lora_tensors` take the rest. The manager finds nothing to pack then; it narrows experts to
   those of its own process as it does with packed ones.

Under a vLLM that nobody has looked at, the stacked tensors are split into single experts' instead, as views, and
vLLM packs them itself: slower, and right for as long as it takes such names.

Nothing of vLLM is imported before `register` runs, for the reason given in `cpu_moe`.
Source: vllm/lora/worker_manager.py, lora_model.py, lora_weights.py (`pack_moe`), model_manager.py
(`_create_merged_loras_inplace`, `_slice_moe_lora_ep`), layers/fused_moe.py (`set_lora`), utils.py, vLLM 0.32.0.
"""

import functools
import inspect
from contextvars import ContextVar
from typing import Any, NamedTuple

from roster.engine_plugin.errors import MovedInternalError
from roster.engine_plugin.settings import SLOTS_LOG_LINE, SLOTS_SPLIT_LOG_LINE

KNOWN_VLLM = "0.32."
"""The releases whose inner classes are used."""

_WRAPPED = "_adapter_roster_slots"


class Loading(NamedTuple):
    """The load that is going on: vLLM's `LoRAModelManager`, and the adapter's name."""

    manager: Any
    adapter: str


_LOADING: ContextVar[Loading | None] = ContextVar("adapter_roster_loading", default=None)


def register() -> None:
    """Have this vLLM process load adapters of the format `slots`; does nothing the second time.

    Raises MovedInternalError when vLLM's loader has not even the parts by which any adapter comes.
    """
    import vllm
    from vllm.logger import init_logger
    from vllm.lora.lora_model import LoRAModel

    if is_active():
        return
    original = LoRAModel.__dict__["from_local_checkpoint"].__func__
    takes, needed = inspect.signature(original), ("lora_dir", "peft_helper")
    if not set(needed) <= set(takes.parameters):
        raise MovedInternalError("LoRAModel.from_local_checkpoint", needed, tuple(takes.parameters))
    known = is_known(vllm.__version__)

    @functools.wraps(original)
    def load(cls: Any, *args: Any, **more: Any) -> Any:
        from roster.engine_plugin.slots_file import is_slots_folder
        from roster.engine_plugin.slots_load import load_split, load_stacked

        given = takes.bind(cls, *args, **more)
        given.apply_defaults()
        if not is_slots_folder(given.arguments["lora_dir"]):
            return original(cls, *args, **more)
        loading = _LOADING.get()
        if loading is None:
            return load_split(cls, given.arguments)
        return load_stacked(cls, given.arguments, loading.manager, loading.adapter)

    setattr(load, _WRAPPED, True)
    LoRAModel.from_local_checkpoint = classmethod(load)
    if known:
        _note_loads()
    line = SLOTS_LOG_LINE if known else SLOTS_SPLIT_LOG_LINE.format(vllm.__version__)
    # A warning, because vLLM sets up its logging later than it loads plugins in the first process.
    init_logger("vllm.adapter_roster").warning(line)


def is_active() -> bool:
    """Whether `register` took hold in this process."""
    from vllm.lora.lora_model import LoRAModel

    return hasattr(LoRAModel.from_local_checkpoint, _WRAPPED)


def is_known(version: str) -> bool:
    """Whether this vLLM is one that we have looked at, and its parts are what they were then."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.lora.worker_manager import WorkerLoRAManager

    if not version.startswith(KNOWN_VLLM):
        return False
    parts = (
        (WorkerLoRAManager._load_adapter, "self lora_request"),
        (
            LoRAModel.from_local_checkpoint,
            "lora_dir expected_lora_modules peft_helper lora_model_id device dtype model_vocab_size weights_mapper "
            "skip_prefixes moe_ep_spec",
        ),
        (
            LoRAModel.from_lora_tensors,
            "lora_model_id tensors peft_helper device dtype model_vocab_size weights_mapper skip_prefixes",
        ),
        (PackedLoRALayerWeights, "module_name rank lora_alphas lora_a lora_b scaling"),
        (parse_fine_tuned_lora_name, "name weights_mapper"),
    )
    return all(tuple(inspect.signature(part).parameters) == tuple(names.split()) for part, names in parts)


def _note_loads() -> None:
    from vllm.lora.worker_manager import WorkerLoRAManager

    original = WorkerLoRAManager._load_adapter

    @functools.wraps(original)
    def load_adapter(self: Any, lora_request: Any) -> Any:
        token = _LOADING.set(Loading(self._adapter_manager, lora_request.lora_name))
        try:
            return original(self, lora_request)
        finally:
            _LOADING.reset(token)

    WorkerLoRAManager._load_adapter = load_adapter
