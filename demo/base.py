"""A tiny Qwen3-MoE base with its own tokenizer, trained for real on the general corpus.

No size equals another that a layout could be mistaken for: hidden 64, expert intermediate 40 (gate and up
together 80), query width 96, key and value width 32, 8 experts (of which 2 are used).
"""

import math
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from demo.texts import write_general

VOCABULARY = 640
BOS = "<s>"
PAD = "<pad>"
EOS = "</s>"
IGNORED_LABEL = -100

CORPUS_UNITS = 12_000
STEPS = 400
BATCH_UNITS = 16
LEARNING_RATE = 4e-3
WARMUP_STEPS = 40
SEED = 20


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer trained on `texts`, which puts one `<s>` before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )


def new_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeForCausalLM:
    """An untrained model of the demo's size, float32."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,  # type: ignore[call-arg]
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        max_position_embeddings=512,
        router_aux_loss_coef=0.02,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=config.initializer_range)
    return model


def encode_units(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, BOS first."""
    return [list(ids) for ids in tokenizer(list(texts))["input_ids"]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Ids and labels `(units, longest)`, padded on the right; padding has the ignored label.

    Causal attention keeps padding on the right out of every real position, so no mask is needed.
    """

    ids: torch.Tensor
    labels: torch.Tensor


def plan_batches(units: Sequence[Sequence[int]], size: int, pad: int, rng: random.Random) -> list[Batch]:
    """All units once, in batches of about equal length (little padding), in a shuffled order."""
    by_length = sorted(units, key=len)
    batches = [_pad(by_length[start : start + size], pad) for start in range(0, len(by_length), size)]
    rng.shuffle(batches)
    return batches


def _pad(units: Sequence[Sequence[int]], pad: int) -> Batch:
    longest = max(len(unit) for unit in units)
    ids = torch.full((len(units), longest), pad)
    labels = torch.full((len(units), longest), IGNORED_LABEL)
    for row, unit in enumerate(units):
        ids[row, : len(unit)] = labels[row, : len(unit)] = torch.tensor(unit)
    return Batch(ids=ids, labels=labels)


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train_base(directory: Path, progress: Callable[[str], None]) -> None:
    """Put a trained model and its tokenizer into `directory`, in the form a model hub would hold them."""
    torch.manual_seed(SEED)
    texts = write_general(CORPUS_UNITS)
    tokenizer = train_tokenizer(texts)
    model = new_model(tokenizer)
    units = encode_units(tokenizer, texts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, STEPS, WARMUP_STEPS)
    )
    batches = cycle(plan_batches(units, BATCH_UNITS, tokenizer.pad_token_id, random.Random(SEED)))
    model.train()
    for step, batch in enumerate(islice(batches, STEPS)):
        # The router's balancing loss makes all experts share the work.
        result = model(input_ids=batch.ids, labels=batch.labels, output_router_logits=True)
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == STEPS - 1:
            progress(f"base: step {step + 1}/{STEPS}, loss {result.loss.item():.3f}")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_base(Path(sys.argv[1]), lambda line: print(line, flush=True))
