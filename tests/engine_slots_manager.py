"""Run inside the engine's environment: loads slots through vLLM's own manager where no CPU engine can be started.

Experts without a gate, expert parallelism, a class that renames what a checkpoint holds, and a stage of a pipeline. The
manager and its modules are vLLM's classes with their fields set by hand; what vLLM makes of the per-expert tensors is
the oracle. Argument: a folder. Prints one JSON object.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from slots_builders import stack_experts, write_slots
from torch import nn
from vllm.lora.layers import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.models.utils import WeightsMapper

from roster.engine_plugin import slots_load

EXPERTS, RANK, HIDDEN, INTER, LAYERS = 4, 3, 7, 5, 2
ENGINE, FILE = "language_model.model.layers", "base_model.model.model.language_model.layers"
MAPPER = WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model."})
GATED, UNGATED = ("gate_proj", "down_proj", "up_proj"), ("up_proj", "down_proj")
ALPHA = 5.0


def make_module(ep_rank: int | None) -> FusedMoEWithLoRA:
    """A wrapper of experts over two processes' worth of them, or over one."""
    module = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    nn.Module.__init__(module)
    module.tp_size = 1
    module.moe_config = SimpleNamespace(
        hidden_dim_unpadded=HIDDEN,
        intermediate_size_per_partition_unpadded=INTER,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS if ep_rank is None else EXPERTS // 2,
        moe_parallel_config=SimpleNamespace(use_ep=ep_rank is not None, ep_rank=ep_rank or 0),
    )
    return module


def make_manager(projections: Sequence[str], ep_rank: int | None, layers: int = LAYERS) -> LoRAModelManager:
    manager = LoRAModelManager.__new__(LoRAModelManager)
    names = [f"{ENGINE}.{layer}.mlp.experts" for layer in range(layers)]
    manager.modules = {name: make_module(ep_rank) for name in names}
    manager.packed_modules = {
        name: [f"{name}.{expert}.{one}" for expert in range(EXPERTS) for one in projections] for name in names
    }
    manager.is_pooling_model = manager._enable_moe_shared_loras = manager._enable_mixed_moe_lora_format = (
        False
    )
    manager._is_non_gated_moe = len(projections) < len(GATED)
    manager.lora_config = SimpleNamespace(lora_dtype=torch.bfloat16, max_lora_rank=RANK)
    return manager


def make_tensors(projections: Sequence[str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(17)
    tensors = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for one in projections:
                sizes = (INTER, HIDDEN) if one == "down_proj" else (HIDDEN, INTER)
                module = f"{FILE}.{layer}.mlp.experts.{expert}.{one}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, sizes[0], generator=generator)
                tensors[f"{module}.lora_B.weight"] = torch.randn(sizes[1], RANK, generator=generator)
    return tensors


def compare(folder: Path, projections: Sequence[str], ep_rank: int | None, *, layers: int = LAYERS) -> dict:
    """What vLLM packs of the per-expert tensors, and of the slots."""
    tensors = make_tensors(projections)
    config = {"r": RANK, "lora_alpha": RANK, "target_modules": list(projections)}
    write_slots(folder, stack_experts(tensors, ALPHA, torch.bfloat16), config)
    common = {"device": "cpu", "dtype": torch.bfloat16, "weights_mapper": MAPPER}
    manager = make_manager(projections, ep_rank, layers)
    theirs = LoRAModel.from_lora_tensors(
        1, tensors, PEFTHelper.from_dict(config | {"lora_alpha": ALPHA}), **common
    )
    given = {
        "lora_dir": str(folder),
        "expected_lora_modules": set(projections),
        "peft_helper": PEFTHelper.from_dict(config),
        "lora_model_id": 2,
        "skip_prefixes": None,
        **common,
    }
    with patch.object(slots_load, "get_pp_group", lambda: SimpleNamespace(world_size=LAYERS // layers)):
        ours = slots_load.load_stacked(LoRAModel, given, manager, "ada")
    for made in (theirs, ours):
        manager._create_merged_loras_inplace(made)
    names = list(manager.modules)
    pairs = [
        (a, b)
        for name in names
        for field in ("lora_a", "lora_b")
        for a, b in zip(getattr(theirs.loras[name], field), getattr(ours.loras[name], field), strict=True)
    ]
    return {
        "equal": all(torch.equal(a, b) for a, b in pairs),
        "pairs": len(pairs),
        "experts": sorted({len(b) for _, b in pairs}),
        "left": sorted(set(ours.loras) - set(names)),
    }


def main(folder: Path) -> None:
    said = {
        f"{kind}, {'all experts' if rank is None else f'rank {rank} of 2'}": compare(
            folder / f"{kind}-{rank}", projections, rank
        )
        for kind, projections in (("gated", GATED), ("without a gate", UNGATED))
        for rank in (None, 0, 1)
    }
    said["first stage"] = compare(folder / "stage", GATED, None, layers=1)
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
