"""Under which names a running vLLM finds the factors of an adapter, and where it finds them for nothing.

vLLM takes `base_model.model.` and `.lora_A.weight` off a tensor's name, renames the rest with the model class's
`hf_to_vllm_mapper`, and later asks for each wrapped module's factors by that module's own full name, or, where the
class packs several of a checkpoint's modules into it, by theirs. What nobody asks for is dropped without a word.

Source: vllm/lora/utils.py (`parse_fine_tuned_lora_name`, `process_packed_modules_mapping`),
vllm/lora/model_manager.py (`_register_packed_modules`, `_create_merged_loras_inplace`, `_stack_moe_lora_weights`,
`_convert_3d_to_2d_moe_lora`, `activate_adapter`), vllm/lora/worker_manager.py (`_load_adapter`), vLLM 0.32.0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_FIRST = ".lora_A.weight"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How the routed experts of a model are addressed; see `EngineInfo`."""

    modules: dict[str, int]
    projections: tuple[str, ...]
    stacked: bool


def list_packed(manager: Any) -> dict[str, tuple[str, ...]]:
    """Last component of a wrapped module -> those of the parts by which it is addressed; experts left out."""
    experts = _list_experts(manager)
    return {
        _last(name): tuple(_last(part) for part in parts)
        for name, parts in sorted(manager.packed_modules.items())
        if name in manager.modules and name not in experts
    }


def list_experts(manager: Any) -> ExpertNames:
    """How the routed experts of this `LoRAModelManager`'s model are addressed."""
    experts = _list_experts(manager)
    modules: dict[str, int] = {}
    projections: dict[str, None] = {}
    for name, module in experts.items():
        parts = [part.removeprefix(f"{name}.").split(".") for part in manager.packed_modules.get(name, ())]
        numbered = [part for part in parts if len(part) == 2 and part[0].isdecimal()]
        projections |= dict.fromkeys(projection for _, projection in numbered)
        modules[name] = len({number for number, _ in numbered}) or module.global_num_experts
    # Mixed mode splits stacked factors into gate and up; of experts without a gate it makes nonsense.
    stacked = manager._is_3d_moe_model or (
        manager._enable_mixed_moe_lora_format and not manager._is_non_gated_moe
    )
    return ExpertNames(modules, tuple(projections), bool(experts) and stacked)


def list_ineffective(manager: Any) -> tuple[str, ...]:
    """The wrapped modules on which an adapter's factors change nothing, sorted.

    1. An adapter cannot name them: the class's mapper makes another name of theirs, or vLLM skips it.
    2. Something calls the layer itself, beside its wrapper (`routers` should have left nothing of the kind).
    3. The layer's weight is read, and the layer not called: the up-projection of latent attention (MLA), whose
       weight is folded into others; routers that are fused with the gate of shared experts; convolutions.
    """
    bypassed = {id(layer) for layer in _list_bypassed(manager)}
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    renames = None if mapper is None else mapper.get_rename_mapper()
    skipped = tuple(getattr(manager.model, "lora_skip_prefixes", None) or ())
    experts = list_experts(manager)
    return tuple(
        sorted(
            name
            for name, module in manager.modules.items()
            if id(module.base_layer) in bypassed
            or _is_convolution(module.base_layer)
            or any(_is_lost(address, renames, skipped) for address in _list_addresses(manager, name, experts))
        )
    )


def _list_addresses(manager: Any, name: str, experts: ExpertNames) -> list[str]:
    """The names by which a wrapped module is addressed; of experts, those of the first one stand for all."""
    parts = list(manager.packed_modules.get(name, ()))
    if name not in experts.modules:
        return parts or [name]
    stacked = [name, f"{name}.base_layer"] if experts.stacked else []
    return [part for part in parts if part.startswith(f"{name}.0.")] + stacked


def _is_lost(address: str, renames: Any, skipped: tuple[str, ...]) -> bool:
    """Whether a tensor of this name does not get there: vLLM skips it, or takes it for another module's."""
    tensor = address + _FIRST
    if any(f".{prefix}" in tensor or tensor.startswith(prefix) for prefix in skipped):
        return True
    return renames is not None and renames.map_name(tensor) != tensor


def _list_bypassed(manager: Any) -> Iterator[Any]:
    """The layers that compute without their wrapper."""
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.model_executor.layers.linear import LinearBase

    wrapped = {id(module.base_layer) for module in manager.modules.values()}
    for module in manager.model.modules():
        if not isinstance(module, BaseLayerWithLoRA):
            held = (layer for layer in module._modules.values() if isinstance(layer, LinearBase))
            yield from (layer for layer in held if id(layer) in wrapped)
        if isinstance(module, MLAAttention):
            yield _unwrap(module.kv_b_proj)
        if isinstance(module, MoERunner) and module._fse_fuse_gate:
            yield from (_unwrap(module.gate), _unwrap(module.shared_expert_gate))


def _is_convolution(layer: Any) -> bool:
    """Whether a wrapped linear layer only holds the weight of a convolution, which has a third axis."""
    return getattr(getattr(layer, "weight", None), "ndim", 0) > 2


def _unwrap(module: Any) -> Any:
    return getattr(module, "base_layer", module)


def _list_experts(manager: Any) -> dict[str, Any]:
    from vllm.lora.layers import FusedMoEWithLoRA

    return {name: m for name, m in sorted(manager.modules.items()) if isinstance(m, FusedMoEWithLoRA)}


def _last(name: str) -> str:
    return name.rpartition(".")[2]
