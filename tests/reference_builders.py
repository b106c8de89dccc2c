"""A tiny random Qwen3-MoE with a byte-level tokenizer, and adapters for it as PEFT saves them.

Nothing of the product is imported here. No two sizes are equal and none is 1, unless a test asks for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS, RANK, ALPHA, HIDDEN, INTER, CONTEXT = 4, 3, 5, 40, 24, 64
ATTENTION = ("q_proj", "v_proj")
PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, and very much slower where others want them too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_base(folder: Path, *, bos: bool, hidden: int = HIDDEN, inter: int = INTER) -> None:
    """Random weights, large enough that predictions differ; every byte is a token, and `<s>` stands first if `bos`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=len(fast),
        hidden_size=hidden,
        intermediate_size=56,
        moe_intermediate_size=inter,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.3,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(config).eval().save_pretrained(folder)
    fast.save_pretrained(folder)


def save_adapter(base: Path, folder: Path, **settings: Any) -> None:
    """Random factors on attention and all experts, as PEFT saves them: rank_major, standard, without a marker."""
    model = AutoModelForCausalLM.from_pretrained(base)
    fields = {"r": RANK, "target_modules": list(ATTENTION), "target_parameters": list(PARAMETERS), **settings}
    adapted = get_peft_model(model, LoraConfig(lora_alpha=ALPHA, task_type="CAUSAL_LM", **fields))
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise / noise.shape[1] ** 0.5 if "lora_A" in name else 0.1 * noise)
    adapted.save_pretrained(folder)


def regroup(folder: Path, *, rank: int = RANK) -> None:
    """Write the same adapter grouped by expert: what stood in column j * E + e comes to column e * r + j."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, b in tensors.items():
        if ".experts." in name and ".lora_B." in name:
            moved = torch.empty_like(b)
            for component in range(rank):
                for expert in range(EXPERTS):
                    moved[:, expert * rank + component] = b[:, component * EXPERTS + expert]
            tensors[name] = moved
    save_file(tensors, path, metadata={"format": "pt"})


def state(folder: Path, **fields: Any) -> None:
    """Set fields of the adapter's config; None removes one."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def read_model(base: Path, adapter: Path | None) -> Any:
    """The model itself, or PEFT's own reading of the adapter in it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()


@torch.no_grad()
def bits_from(model: Any, ids: list[int], first: int, *, limit: int = CONTEXT) -> float:
    """-log2 p of the tokens from `first` on, each predicted in a plain loop from at most all that fit before it."""
    assert len(ids) <= limit
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    total = 0.0
    for position in range(first, len(ids)):
        row = logits[position - 1]
        total -= float(row[ids[position]] - row.logsumexp(0)) / math.log(2)
    return total
