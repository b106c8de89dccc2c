"""Router LoRA that takes effect, and LoRA on the gates of shared experts.

The module of a layer's experts holds the router a second time, and computes with that reference. vLLM 0.32.0 means
to put the LoRA-wrapped router there as well; but by then the experts' module is wrapped itself, and the reference
lands on the wrapper, where nothing reads it. The shared expert of Qwen2-MoE and Qwen3-Next holds its gate
(`shared_expert_gate`) as `expert_gate`; under that name vLLM does not look for it. So an adapter's factors of either
are loaded without a word and change nothing, on every device.

Source: vllm/lora/model_manager.py (`_create_lora_modules`, "rewire the alias attribute"), vllm/lora/utils.py
(`get_supported_lora_modules`), vllm/model_executor/layers/fused_moe/runner/moe_runner.py (`_forward_impl`),
vllm/model_executor/models/qwen2_moe.py (`Qwen2MoeMLP`), vLLM 0.32.0.
"""

from typing import Any


def connect_routers(manager: Any) -> None:
    """Let all that computes with a linear layer of this `LoRAModelManager`'s model compute with its wrapper."""
    from vllm.model_executor.layers.linear import LinearBase

    wrappers = {
        id(wrapper.base_layer): wrapper
        for wrapper in manager.modules.values()
        if isinstance(wrapper.base_layer, LinearBase)
    }
    for holder in list(manager.model.modules()):
        for name, layer in list(holder.named_children()):
            wrapper = wrappers.get(id(layer))
            if wrapper is not None and wrapper is not holder:
                setattr(holder, name, wrapper)
