"""The tiny Qwen3-MoE models and LoRA set-ups that real producers train, one process for each producer version.

Nothing of the product is imported here, nor any producer: the producer scripts and the tests that judge their files
import this and so speak of the same models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS, VOCAB = 3, 50
GATE_UP, DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Shape:
    """Sizes of one tiny model; r is the rank of its adapters."""

    experts: int
    rank: int
    hidden: int
    inter: int


# In "stack" E * r = H, as in Qwen3-30B-A3B at rank 16: lora_A of gate_up and lora_B of down are square. In "gate_up"
# H = 2I and in "down" H = I: there that parameter has in = out, and its file looks the same in both orientations.
SHAPES = {
    "uneven": Shape(8, 4, 20, 11),
    "small": Shape(4, 3, 14, 9),
    "stack": Shape(8, 4, 32, 12),
    "gate_up": Shape(7, 5, 24, 12),
    "down": Shape(6, 5, 22, 22),
}


@dataclass(frozen=True)
class Variant:
    """One adapter. settings: further fields of its LoraConfig; dtype: of the model and of what is saved."""

    shape: str = "uneven"
    modules: tuple[str, ...] = ATTENTION
    parameters: tuple[str, ...] = (GATE_UP, DOWN, ROUTER)
    settings: Mapping[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


# No key of a pattern matches what another one matches: PEFT sorts the keys when it saves, and the first match wins.
VARIANTS = {
    "whole": Variant(),
    "small": Variant("small"),
    "stack": Variant("stack"),
    "square_gate_up": Variant("gate_up"),
    "square_down": Variant("down"),
    "gate_up_only": Variant(parameters=(GATE_UP,)),
    "down_only": Variant(parameters=(DOWN,)),
    "lone_square": Variant("down", parameters=(DOWN,)),
    "patterns": Variant(
        settings={
            "rank_pattern": {"q_proj": 2, "model.layers.1.self_attn.v_proj": 5, "experts.down_proj": 3},
            "alpha_pattern": {"q_proj": 7, "experts.down_proj": 11, "gate.weight": 3},
        }
    ),
    "rslora": Variant(settings={"use_rslora": True}),
    "bf16": Variant(dtype=torch.bfloat16),
    "named_projections": Variant(
        modules=(*ATTENTION, "gate", "gate_proj", "up_proj", "down_proj"), parameters=()
    ),
}


def build_model(shape: Shape, dtype: torch.dtype = torch.float32) -> Qwen3MoeForCausalLM:
    """The same random numbers at each call and in each process."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.inter,
        intermediate_size=26,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        num_experts=shape.experts,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    model.set_experts_implementation("eager")  # the default wants sizes that divide by 4
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model.to(dtype)


def make_tokens(batch: int, length: int, step: int) -> torch.Tensor:
    """Sequences with a rule to learn: each token is the one before plus 7, or plus 12 after an even one."""
    rows = [[(11 * row + 5 * step) % VOCAB] for row in range(batch)]
    for row in rows:
        while len(row) < length:
            row.append((row[-1] + (12 if row[-1] % 2 == 0 else 7)) % VOCAB)
    return torch.tensor(rows)


def read_logits(model: torch.nn.Module) -> torch.Tensor:
    """The model's logits (rows, VOCAB), float32, on tokens that no training step used."""
    with torch.no_grad():
        return model(input_ids=make_tokens(3, 13, step=1000) * 3 % VOCAB).logits.float().flatten(0, 1)
