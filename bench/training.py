"""Adapters trained for real on tiny Qwen3-MoE bases, under either packing and either orientation.

Letters: E experts, r rank. PEFT 0.21.2 holds one expert parameter's factors as lora_A `(E * r, in)`, expert slowest,
and lora_B `(out, E * r)`, expert fastest. The other encodings are trained as such: the grouped reading of lora_B
replaces PEFT's own in the forward, and the swapped orientation is what PEFT takes for parameters stored (E, in, out).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import cycle, islice
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from torch.nn import Linear, ModuleDict
from transformers import PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM

from demo.base import Batch, encode_units, plan_batches, train_tokenizer
from demo.texts import write_author, write_general
from tasks.lora.layouts import Orientation, Packing

# In the order in which PEFT nests them: the inner one is stored under `experts.base_layer`.
EXPERT_PARAMETERS = {"base_layer.": "gate_up_proj", "": "down_proj"}
_BASE_TEXTS = 800
_BASE_STEPS = 60
_BASE_LEARNING_RATE = 4e-3
_AUTHOR_TEXTS = 240
_ADAPTER = "default"


class Optimizer(StrEnum):
    """What moves the factors."""

    ADAMW = "AdamW"
    SGD = "SGD"


class Routing(StrEnum):
    """Whether the tokens are shared by all experts or taken by a few."""

    FLAT = "flat"
    SKEWED = "skewed"


class Start(StrEnum):
    """What the stored lora_B holds before the first step.

    zero: PEFT's start. random: the in-side factor of a trainer that keeps its factors standard and writes them
    swapped. block diagonal: zero, with rank 2r of which gate uses the first half and up the second, as PEFT fuses
    per-expert files.
    """

    ZERO = "zero"
    RANDOM = "random"
    BLOCK_DIAGONAL = "block diagonal"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a base is made of; `inter` is one expert's intermediate size."""

    experts: int
    hidden: int = 64
    inter: int = 40
    layers: int = 3
    routing: Routing = Routing.FLAT


@dataclass(frozen=True, slots=True)
class Run:
    """One training. steps: after which a checkpoint is taken. held_back: never looked at while tuning."""

    setting: str
    sizes: Sizes
    rank: int
    packing: Packing
    orientation: Orientation
    steps: tuple[int, ...]
    seed: int
    held_back: bool
    optimizer: Optimizer = Optimizer.ADAMW
    learning_rate: float = 5e-3
    batch: int = 8
    start: Start = Start.ZERO


@dataclass(frozen=True, slots=True)
class StoredPair:
    """One stacked pair as a file holds it: a `(E * r, x)`, b `(y, E * r)`."""

    layer: int
    parameter: str
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run would have saved after `step` optimiser steps."""

    step: int
    pairs: tuple[StoredPair, ...]


def train_run(run: Run) -> Iterator[Checkpoint]:
    """Yield the checkpoints of one run, in its own packing and orientation, float32."""
    torch.manual_seed(run.seed)
    model = _wrap(run)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = (
        torch.optim.AdamW(parameters, lr=run.learning_rate)
        if run.optimizer is Optimizer.ADAMW
        else torch.optim.SGD(parameters, lr=run.learning_rate)
    )
    for step, batch in enumerate(_batches(run), start=1):
        model(input_ids=batch.ids, labels=batch.labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in run.steps:
            yield Checkpoint(step, tuple(_stored_pairs(model, run)))


def _batches(run: Run) -> Iterator[Batch]:
    tokenizer = _tokenizer()
    texts = [unit.text for unit in write_author(f"bench-{run.seed}", _AUTHOR_TEXTS, 0).training]
    units = encode_units(tokenizer, texts)
    planned = plan_batches(units, run.batch, tokenizer.pad_token_id, random.Random(run.seed))
    return islice(cycle(planned), run.steps[-1])


def _wrap(run: Run) -> PeftModel:
    model = copy.deepcopy(_base(run.sizes))
    swapped = run.orientation is Orientation.SWAPPED and run.start is not Start.RANDOM
    # PEFT 0.18.1 took every expert parameter for (E, in, out); 0.21.2 takes those of a module that says so.
    # Only the shapes of the new factors depend on it, so the module says so just while they are made.
    experts = [layer.mlp.experts for layer in model.model.layers]
    for module in experts:
        module.is_transposed = swapped
    rank = 2 * run.rank if run.start is Start.BLOCK_DIAGONAL else run.rank
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_parameters=[f"mlp.experts.{name}" for name in EXPERT_PARAMETERS.values()],
    )
    wrapped = get_peft_model(model, config)
    for module in experts:
        module.is_transposed = False
    for module in wrapped.modules():
        if isinstance(module, ParamWrapper):
            if run.packing is Packing.GROUPED_BY_EXPERT:
                module.__class__ = _GroupedParamWrapper
            if run.start is Start.BLOCK_DIAGONAL and module.parameter_name == "gate_up_proj":
                mask = _diagonal_blocks(run, rank)
                _weight(module.lora_B).register_hook(mask.mul)  # type: ignore[no-untyped-call]
    return wrapped


class _GroupedParamWrapper(ParamWrapper):
    """PEFT's wrapper, reading column e * r + j of lora_B as component j of expert e."""

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """The two factors of each expert's delta, and the scaling."""
        a, b = _weight(self.lora_A), _weight(self.lora_B)
        each_a = a.reshape(self.num_experts, -1, a.shape[1])
        each_b = b.reshape(b.shape[0], self.num_experts, -1).permute(1, 0, 2)
        scaling: float = self.scaling[adapter_name]
        if self._did_swap_in_out_features:
            return each_b, each_a, scaling
        return each_a.transpose(1, 2), each_b.transpose(1, 2), scaling


def _weight(factors: ModuleDict) -> Tensor:
    return cast(Linear, factors[_ADAPTER]).weight


def _diagonal_blocks(run: Run, rank: int) -> Tensor:
    """`(2 * inter, E * rank)`: one where gate's rows meet the first half of the components, or up's the second."""
    components = torch.arange(rank).repeat_interleave(run.sizes.experts)
    if run.packing is Packing.GROUPED_BY_EXPERT:
        components = torch.arange(rank).repeat(run.sizes.experts)
    of_up = torch.arange(2 * run.sizes.inter) >= run.sizes.inter
    return (of_up[:, None] == (components >= rank // 2)[None, :]).float()


def _stored_pairs(model: PeftModel, run: Run) -> Iterator[StoredPair]:
    state = get_peft_model_state_dict(model)
    for layer in range(run.sizes.layers):
        for wrapper, parameter in EXPERT_PARAMETERS.items():
            stem = f"base_model.model.model.layers.{layer}.mlp.experts.{wrapper}"
            a, b = (state[f"{stem}lora_{factor}.weight"].detach().clone() for factor in "AB")
            if run.start is Start.RANDOM:
                a, b = swap_factors(a, b, run.sizes.experts, run.packing)
            yield StoredPair(layer, parameter, a, b)


def swap_factors(a: Tensor, b: Tensor, experts: int, packing: Packing) -> tuple[Tensor, Tensor]:
    """A standard pair as one who stores the transposed product writes it; the packing stays."""
    each_a = a.reshape(experts, -1, a.shape[1])
    each_b = split_columns(b, experts, packing)
    return each_b.transpose(1, 2).reshape(len(a), -1), join_columns(each_a.transpose(1, 2), packing)


def split_columns(b: Tensor, experts: int, packing: Packing) -> Tensor:
    """`(E, y, r)` from a stored lora_B `(y, E * r)`."""
    if packing is Packing.RANK_MAJOR:
        return b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    return b.reshape(b.shape[0], experts, -1).permute(1, 0, 2)


def join_columns(each: Tensor, packing: Packing) -> Tensor:
    """The inverse of `split_columns`."""
    order = (1, 2, 0) if packing is Packing.RANK_MAJOR else (1, 0, 2)
    return each.permute(order).reshape(each.shape[1], -1)


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(write_general(_BASE_TEXTS))


@cache
def _base(sizes: Sizes) -> Qwen3MoeForCausalLM:
    """A base trained for a moment on the general texts, so that its experts differ and gradients mean something."""
    tokenizer = _tokenizer()
    torch.manual_seed(sizes.experts)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden,
        intermediate_size=112,
        num_hidden_layers=sizes.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,  # type: ignore[call-arg]
        num_experts=sizes.experts,
        num_experts_per_tok=2,
        moe_intermediate_size=sizes.inter,
        norm_topk_prob=True,
        router_aux_loss_coef=0.02,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config)
    routers = [layer.mlp.gate.weight for layer in model.model.layers]
    for router in routers:
        torch.nn.init.normal_(router, std=config.initializer_range)
    units = encode_units(tokenizer, write_general(_BASE_TEXTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_BASE_LEARNING_RATE)
    batches = plan_batches(units, 8, tokenizer.pad_token_id, random.Random(sizes.experts))
    for batch in islice(cycle(batches), _BASE_STEPS):
        result = model(input_ids=batch.ids, labels=batch.labels, output_router_logits=True)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if sizes.routing is Routing.SKEWED:
        with torch.no_grad():
            for router in routers:
                router.mul_(torch.logspace(0.6, -0.9, sizes.experts)[torch.randperm(sizes.experts)][:, None])
    return model
