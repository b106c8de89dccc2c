"""Router LoRA that takes effect.

The module of a layer's experts holds the router a second time, and computes with that reference. vLLM 0.32.0 means
to put the LoRA-wrapped router there as well; but by then the experts' module is wrapped itself, and the reference
lands on the wrapper, where nothing reads it. So an adapter's router factors are loaded without a word and change
nothing, on every device.

Source: vllm/lora/model_manager.py (`_create_lora_modules`, "rewire the alias attribute"),
vllm/model_executor/layers/fused_moe/runner/moe_runner.py (`_forward_impl`), vLLM 0.32.0.
"""

from typing import Any


def connect_routers(manager: Any) -> None:
    """Let the experts of this `LoRAModelManager`'s model compute with their wrapped routers, where they do not."""
    from vllm.lora.layers import FusedMoEWithLoRA

    wrappers = {id(module.base_layer): module for module in manager.modules.values()}
    for module in manager.modules.values():
        if isinstance(module, FusedMoEWithLoRA):
            wrapped = wrappers.get(id(module.base_layer.gate))
            if wrapped is not None:
                module.base_layer.gate = wrapped
