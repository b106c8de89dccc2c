"""Run with an unpacked unsloth_zoo, and perhaps a PEFT, on the path: `producer_unsloth.py FOLDER VARIANT…`.

The same adapters as producer_peft.py makes, trained through unsloth_zoo's own forward of Qwen3-MoE's experts; what
they add to the experts' weights is what its own merge says. `VARIANT=ADAPTER` does not train: it loads that adapter
and saves it again, as somebody does who continues with another version.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import peft
import torch
import unsloth_zoo
from peft import PeftModel
from producer_builders import SHAPES, VARIANTS, build_model
from producer_peft import list_lora_layers, record, train
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from unsloth_zoo import saving_utils
from unsloth_zoo.hf_utils import fix_lora_auto_mapping
from unsloth_zoo.temporary_patches.qwen3_moe import patch_qwen3_moe

_MERGES = {
    "gate_up_proj": {
        "gate_proj": saving_utils._merge_moe_gate_expert,
        "up_proj": saving_utils._merge_moe_up_expert,
    },
    "down_proj": {"down_proj": saving_utils._merge_moe_down_proj_expert},
}


def list_unsloth_deltas(adapted: PeftModel) -> dict[str, torch.Tensor]:
    """What unsloth_zoo's merge adds to each expert's projection; linear modules as PEFT merges them."""
    deltas: dict[str, torch.Tensor] = {}
    for name, layer in list_lora_layers(adapted).items():
        experts, _, parameter = name.rpartition(".")
        if not experts.endswith(".experts"):
            deltas[name] = layer.get_delta_weight("default").detach()
            continue
        factors = saving_utils.LoraStats(
            module=SimpleNamespace(num_experts=layer.num_experts),
            lora_A=layer.lora_A["default"].weight.detach(),
            lora_B=layer.lora_B["default"].weight.detach(),
            alpha=layer.scaling["default"],
        )
        _, out, inside = layer.get_param().shape
        for projection, merge in _MERGES[parameter].items():
            zeros = torch.zeros(out // len(_MERGES[parameter]), inside)
            for expert in range(layer.num_experts):
                delta = merge(zeros.clone(), factors, expert, layer.num_experts, torch.float32)
                deltas[f"{experts}.{expert}.{projection}"] = delta.cpu()
    return deltas


def main(folder: str, *names: str) -> None:
    patch_qwen3_moe()
    assert Qwen3MoeExperts.forward.__module__ != Qwen3MoeExperts.__module__, "its forward is not in place"
    for item in names:
        name, _, again = item.partition("=")
        variant = VARIANTS[name.partition("-")[0]]
        if again:
            base = build_model(SHAPES[variant.shape], variant.dtype)
            adapted = PeftModel.from_pretrained(base, again).eval()
        else:
            adapted = train(variant)
        fix_lora_auto_mapping(adapted)
        record(adapted, Path(folder, name), list_unsloth_deltas, merge=False)
    print(peft.__version__, unsloth_zoo.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
