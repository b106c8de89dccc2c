"""Tiny bases of several families with authors' adapters, all trained for real by PEFT, as decisions are tried on."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from demo.base import encode_units, plan_batches, train_tokenizer
from demo.texts import write_author, write_general
from tasks.bpb.heldout import Unit
from tasks.lora.base import BaseConfig, read_base_config

EXPERTS, RANK, ALPHA = 8, 8, 16
AUTHORS = ("ash", "elm", "oak")

_TEXTS, _STEPS, _LEARNING_RATE = 800, 100, 4e-3
_AUTHOR_TEXTS, _AUTHOR_STEPS, _AUTHOR_LEARNING_RATE = 360, 60, 1e-2
_HELDOUT_TEXTS = 48
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "router_aux_loss_coef": 0.02,
    "dtype": "float32",
}
# The first one's gate_up is square, and so is its stacked lora_A, as in the published model.
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 32, "intermediate_size": 112},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 40},
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": 40, "sliding_window": 64},
}
FAMILIES = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class Author:
    """What one author trained: the tensors as PEFT saves them (rank-major, standard), and texts held back."""

    name: str
    tensors: Mapping[str, Tensor]
    heldout: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class World:
    """A base and its authors. config: the base's config.json."""

    family: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: bytes
    base: BaseConfig
    authors: tuple[Author, ...]


def train_world(family: str, *, seed: int) -> World:
    """Train a base for a moment, and on it an adapter for each author: all experts, attention lightly."""
    tokenizer = _tokenizer()
    torch.manual_seed(seed + 1)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **_SIZES,
        **_FAMILIES[family],
    )
    model = _train_base(config, tokenizer, seed)
    authors = tuple(_train_author(model, tokenizer, name) for name in AUTHORS)
    body = config.to_json_string(use_diff=False).encode()
    return World(family, model, tokenizer, body, read_base_config(body, label=family), authors)


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(write_general(_TEXTS))


def _train_base(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02 if "embed" not in name else 0.05)
            elif "bias" in name or "sinks" in name:
                parameter.zero_()
    units = encode_units(tokenizer, write_general(_TEXTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    batches = plan_batches(units, 8, tokenizer.pad_token_id, random.Random(seed))
    model.train()
    for batch in islice(cycle(batches), _STEPS):
        result = model(input_ids=batch.ids, labels=batch.labels, output_router_logits=True)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.train(False)
    return model


def _train_author(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Author:
    torch.manual_seed(sum(name.encode()))
    texts = write_author(name, _AUTHOR_TEXTS, _HELDOUT_TEXTS)
    model = get_peft_model(
        copy.deepcopy(base),
        LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=list(_ATTENTION),
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    trained = [(key, value) for key, value in model.named_parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [value for key, value in trained if ".experts." in key], "lr": _AUTHOR_LEARNING_RATE},
            {"params": [value for key, value in trained if ".experts." not in key], "lr": 2e-4},
        ],
        weight_decay=0.0,
    )
    units = encode_units(tokenizer, [unit.text for unit in texts.training])
    batches = plan_batches(units, 8, tokenizer.pad_token_id, random.Random(name))
    for batch in islice(cycle(batches), _AUTHOR_STEPS):
        model(input_ids=batch.ids, labels=batch.labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = get_peft_model_state_dict(model)
    tensors = {key: value.detach().clone() for key, value in state.items()}
    return Author(name, tensors, tuple(Unit(unit.id, unit.text) for unit in texts.heldout))
