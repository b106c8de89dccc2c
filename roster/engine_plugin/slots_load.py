"""A `slots` folder as vLLM's `LoRAModel`; imported inside vLLM, by the plugin `slots`, once an adapter needs it.

Source: see `slots`.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import LinearBase
from vllm.utils.torch_utils import PIN_MEMORY

from roster.engine_plugin.slots_file import open_slots, split_experts
from roster.engine_plugin.slots_layout import EngineView, ExpertsModule, plan_slots


def load_stacked(cls: Any, given: Mapping[str, Any], manager: Any, adapter: str) -> Any:
    """The adapter, its experts' factors as the manager would have packed them.

    `cls` is vLLM's LoRAModel, `given` the arguments of its `from_local_checkpoint`, `manager` the LoRAModelManager.
    Raises SlotsRefused, OSError, and what vLLM's own loader raises.
    """
    file = open_slots(given["lora_dir"], adapter)
    peft, skipped = given["peft_helper"], given["skip_prefixes"] or ()
    names = [name for name in file.shapes if not cls._should_skip_module(name, skipped)]
    plan = plan_slots(file, names, _describe(manager, given))
    file.read_through()
    rest = {name: file.map_tensor(name) for name in plan.others}
    made = cls.from_lora_tensors(
        **{
            name: given[name] for name in inspect.signature(cls.from_lora_tensors).parameters if name in given
        },
        tensors=rest,
    )
    for module, pairs in plan.experts.items():
        local = _find_local(manager.modules[module])
        factors = [tuple(_pin(file.map_tensor(name, local)) for name in pair) for pair in pairs]
        if (
            len(factors) == 2
        ):  # without a gate: vLLM's `pack_moe` names w1 a second time, and nothing reads it
            factors.append(factors[0])
        made.loras[module] = PackedLoRALayerWeights(
            module,
            peft.r,
            [peft.lora_alpha] * len(factors),
            [a for a, _ in factors],
            [b for _, b in factors],
            scaling=[1] * len(factors),
        )
    return made


def load_split(cls: Any, given: Mapping[str, Any]) -> Any:
    """The adapter by way of single experts' tensors, as any vLLM takes them; it does the packing itself.

    Raises SlotsRefused, OSError, and what vLLM's own loader raises.
    """
    file = open_slots(given["lora_dir"], str(given["lora_dir"]))
    file.read_through()
    wanted = inspect.signature(cls.from_lora_tensors).parameters
    tensors = split_experts({name: file.map_tensor(name) for name in file.shapes})
    return cls.from_lora_tensors(**{name: given[name] for name in wanted if name in given}, tensors=tensors)


def _describe(manager: Any, given: Mapping[str, Any]) -> EngineView:
    mapper, peft, expected = given["weights_mapper"], given["peft_helper"], given["expected_lora_modules"]
    experts = {name: one for name, one in manager.modules.items() if isinstance(one, FusedMoEWithLoRA)}
    parents = {part: name for name, parts in manager.packed_modules.items() for part in parts}

    def sizes(module: str) -> tuple[int | None, int | None] | None:
        # vLLM's own rule, which asks for no more than the last part of a name.
        if ".experts." in module or module.rpartition(".")[2] not in expected:
            return None
        layer = getattr(manager.modules.get(parents.get(module, module)), "base_layer", None)
        if not isinstance(layer, LinearBase):
            return None, None
        return layer.input_size, None if module in parents else layer.output_size

    return EngineView(
        experts=tuple(
            _describe_experts(name, module, manager.packed_modules.get(name, ()))
            for name, module in experts.items()
        ),
        stacked_only=any(isinstance(module, FusedMoE3DWithLoRA) for module in experts.values()),
        shared_outer=bool(manager._enable_moe_shared_loras),
        partial=get_pp_group().world_size > 1,
        lora_dtype=str(manager.lora_config.lora_dtype).removeprefix("torch."),
        max_rank=manager.lora_config.max_lora_rank,
        locate=lambda name: str(parse_fine_tuned_lora_name(name, mapper)[0]),
        # The names before the mapping, by which vLLM matches patterns.
        scale=lambda name: peft.get_rank_and_scaling(parse_fine_tuned_lora_name(name)[0]),
        sizes=sizes,
    )


def _describe_experts(name: str, module: Any, parts: tuple[str, ...]) -> ExpertsModule:
    numbered = [part.removeprefix(f"{name}.").partition(".") for part in parts]
    first = tuple(projection for number, _, projection in numbered if number == "0")
    config = module.moe_config
    return ExpertsModule(
        module=name,
        projections=first,
        experts=len(parts) // max(len(first), 1),
        hidden=config.hidden_dim_unpadded,
        intermediate=config.intermediate_size_per_partition_unpadded * module.tp_size,
    )


def _find_local(module: Any) -> slice:
    """The experts that this process computes."""
    if not module.use_ep:
        return slice(None)
    first = module.ep_rank * module.local_num_experts
    return slice(first, first + module.local_num_experts)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in pinned memory where there is an accelerator to copy it to, itself elsewhere.

    vLLM pins packed factors too, but none at all where the first module that an adapter has is a packed one.
    """
    return tensor.pin_memory() if PIN_MEMORY else tensor
