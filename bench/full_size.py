"""An adapter of the published size, made of random numbers: what the benches convert."""

from __future__ import annotations

import json
from pathlib import Path

import torch

LAYERS, EXPERTS, RANK, HIDDEN, INTER = 48, 128, 16, 2048, 768

# Source: config.json of Qwen3-30B-A3B; only what bears on an adapter's shapes.
BASE_FIELDS = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTER,
    "intermediate_size": 6144,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_CONFIG_FIELDS = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 32,
    "target_modules": [],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "lora_B_layout": "rank_major",
}


def write_full_size(folder: Path, layers: int = LAYERS, experts: int = EXPERTS) -> None:
    """Write base.json and an adapter, bfloat16, rank_major and standard, without holding it in memory.

    Of the published size, which is 1.26 GB, unless told another number of layers or experts.
    """
    shapes = {
        "experts.base_layer.lora_A": (experts * RANK, HIDDEN),
        "experts.base_layer.lora_B": (2 * INTER, experts * RANK),
        "experts.lora_A": (experts * RANK, INTER),
        "experts.lora_B": (HIDDEN, experts * RANK),
    }
    sizes = {"num_hidden_layers": layers, "num_experts": experts}
    folder.mkdir(parents=True)
    (folder / "base.json").write_text(json.dumps(BASE_FIELDS | sizes))
    (folder / "adapter_config.json").write_text(json.dumps(_CONFIG_FIELDS))
    fields: dict[str, object] = {}
    place = 0
    for layer in range(layers):
        for name, (rows, columns) in shapes.items():
            end = place + 2 * rows * columns
            fields[f"base_model.model.model.layers.{layer}.mlp.{name}.weight"] = {
                "dtype": "BF16",
                "shape": [rows, columns],
                "data_offsets": [place, end],
            }
            place = end
    header = json.dumps(fields).encode()
    generator = torch.Generator().manual_seed(0)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(layers):
            for shape in shapes.values():
                values = torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
                file.write(values.view(torch.uint8).numpy().data)
