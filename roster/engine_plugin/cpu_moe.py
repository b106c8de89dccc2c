"""Plugin `adapter_roster_cpu_moe`: expert LoRA for mixture-of-experts models on vLLM's CPU build.

Stock vLLM picks Triton experts for every unquantized MoE layer as soon as LoRA is on, whatever the device, and
dies at the first forward on a CPU. This plugin puts `CpuLoraExperts` there, and a Punica wrapper without two faults
of the stock one (`cpu_punica`); and it corrects the choice of experts of some routers (`cpu_routing`).

Nothing of vLLM is imported before `register` runs: vLLM only logs a plugin that fails to import, but lets an error
raised by its `register` stop the process.

Source: vllm/plugins/__init__.py (`load_plugins_by_group`, `load_general_plugins`), vLLM 0.32.0.
"""

import inspect

from roster.engine_plugin.errors import MovedInternalError, UnpinnedVllmError
from roster.engine_plugin.settings import CPU_MOE_LOG_LINE, PINNED_VLLM

CONTEXT_FIELDS = (
    "w13_lora_a_stacked",
    "w13_lora_b_stacked",
    "w2_lora_a_stacked",
    "w2_lora_b_stacked",
    "adapter_enabled",
    "punica_wrapper",
    "enable_moe_shared_loras",
)
"""What `CpuLoraExperts` reads of vLLM's `MoELoRAContext`."""


def register() -> None:
    """Give this vLLM process CPU expert LoRA, or stop it; does nothing on other devices and the second time.

    Raises UnpinnedVllmError when vLLM is not the pinned version, MovedInternalError when a part of it that we build
    on has another shape, ImportError when such a part is gone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or is_active():
        return
    import vllm
    from vllm.logger import init_logger

    if vllm.__version__ != PINNED_VLLM:
        raise UnpinnedVllmError(vllm.__version__, PINNED_VLLM)
    check_internals()

    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms.cpu import CpuPlatform

    from roster.engine_plugin.cpu_experts import CpuLoraMoeMethod
    from roster.engine_plugin.cpu_punica import CpuPunicaWrapper
    from roster.engine_plugin.cpu_routing import correct_routers

    wrapper_path = f"{CpuPunicaWrapper.__module__}.{CpuPunicaWrapper.__qualname__}"
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: wrapper_path)
    UnquantizedFusedMoEMethod.register_oot(CpuLoraMoeMethod)
    correct_routers()
    # A warning, because vLLM sets up its logging later than it loads plugins in the first process.
    init_logger("vllm.adapter_roster").warning(CPU_MOE_LOG_LINE)


def is_active() -> bool:
    """Whether `register` took hold in this process."""
    from vllm.model_executor.custom_op import op_registry_oot

    method = op_registry_oot.get("UnquantizedFusedMoEMethod")
    return method is not None and method.__module__ == "roster.engine_plugin.cpu_experts"


def check_internals() -> None:
    """Raise MovedInternalError unless the parts of vLLM that we override or call look as they did when measured."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    experts = modular_kernel.FusedMoEExpertsModular
    methods = (
        (
            experts,
            "apply",
            "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map "
            "a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input",
        ),
        (
            experts,
            "workspace_shapes",
            "self M N K topk global_num_experts local_num_experts expert_tokens_meta activation",
        ),
        (CPURouter, "_compute_routing", "self hidden_states router_logits indices_type input_ids"),
        (PunicaWrapperCPU, "add_shrink", "self y x lora_a_stacked scale kwargs"),
        (
            PunicaWrapperCPU,
            "add_expand",
            "self y x lora_b_stacked output_slices offset_start add_inputs kwargs",
        ),
        (PunicaWrapperCPU, "add_lora_embedding", "self y x lora_b_stacked add_inputs kwargs"),
        (PunicaWrapperCPU, "add_lora_logits", "self y x lora_a_stacked lora_b_stacked scale buffer kwargs"),
        (PunicaWrapperCPU, "update_metadata", "self mapping lora_index_to_id max_loras vocab_size kwargs"),
    )
    for owner, name, parameters in methods:
        expected = tuple(parameters.split())
        found = tuple(inspect.signature(getattr(owner, name)).parameters) if hasattr(owner, name) else ()
        if found != expected:
            raise MovedInternalError(f"{owner.__name__}.{name}", expected, found)
    fields = set(MoELoRAContext.__dataclass_fields__)
    if not fields.issuperset(CONTEXT_FIELDS):
        raise MovedInternalError("MoELoRAContext", CONTEXT_FIELDS, tuple(sorted(fields)))
