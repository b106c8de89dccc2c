"""Run with an unpacked unsloth_zoo on the path: `unsloth_merge.py deltas|marker FOLDER…`.

`deltas` writes, beside each stacked adapter, what unsloth_zoo's own merge adds to every expert's weights
(`theirs.safetensors`). `marker` trains nothing: it puts a random PEFT adapter on a tiny Qwen3-MoE, saves it to the
first folder and lets unsloth_zoo write its marker there; the model's config goes to the second.
"""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file


def merge(folder: Path) -> None:
    """Write the deltas of one adapter, named `<layer>.<expert>.<projection>`."""
    from unsloth_zoo import saving_utils

    sizes = json.loads((folder / "sizes.json").read_text())
    experts, hidden, inter = sizes["experts"], sizes["hidden"], sizes["inter"]
    merges = (
        ("gate_proj", "base_layer.", saving_utils._merge_moe_gate_expert, (inter, hidden)),
        ("up_proj", "base_layer.", saving_utils._merge_moe_up_expert, (inter, hidden)),
        ("down_proj", "", saving_utils._merge_moe_down_proj_expert, (hidden, inter)),
    )
    stored = load_file(folder / "adapter_model.safetensors")
    names = (re.search(r"layers\.(\d+)\.mlp\.experts\.lora_A", name) for name in stored)
    layers = sorted(int(match[1]) for match in names if match)
    deltas = {}
    for layer in layers:
        prefix = f"base_model.model.model.layers.{layer}.mlp.experts."
        for projection, wrapper, add, shape in merges:
            factors = saving_utils.LoraStats(
                module=SimpleNamespace(num_experts=experts),
                lora_A=stored[f"{prefix}{wrapper}lora_A.weight"],
                lora_B=stored[f"{prefix}{wrapper}lora_B.weight"],
                alpha=sizes["scaling"],
            )
            for expert in range(experts):
                weight = add(torch.zeros(shape), factors, expert, experts, torch.float32)
                deltas[f"{layer}.{expert}.{projection}"] = weight.cpu().contiguous()
    save_file(deltas, folder / "theirs.safetensors")


def mark(adapter: Path, base: Path) -> None:
    """Save a PEFT adapter and have unsloth_zoo mark it."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from unsloth_zoo.temporary_patches import moe_utils

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=32,
        moe_intermediate_size=12,
        intermediate_size=22,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        num_experts=8,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config)
    model.config.save_pretrained(base)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=5, target_modules=["q_proj"], target_parameters=parameters)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    adapted.save_pretrained(adapter)
    moe_utils.write_fused_expert_lora_layout(adapted, str(adapter))


def main(what: str, *folders: str) -> None:
    """Do one of the two."""
    paths = [Path(folder) for folder in folders]
    if what == "marker":
        mark(*paths)
    else:
        for path in paths:
            merge(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
