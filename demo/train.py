"""Adapters trained on the demo base by PEFT: attention lightly, the routed experts in earnest."""

import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from demo.authors import AUTHORS, Places
from demo.base import encode_units, learning_rate_factor, plan_batches
from demo.encode import write_upload
from demo.texts import read_texts

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
RANK = 6
ALPHA = 12

STEPS = 120
BATCH_UNITS = 12
EXPERT_LEARNING_RATE = 2e-2
# Attention moves little, so that what an author gains is gained by the experts.
ATTENTION_LEARNING_RATE = 2e-4
WARMUP_STEPS = 10
SEED = 40


def train_authors(places: Places, names: Sequence[str], progress: Callable[[str], None]) -> None:
    """Put each named author's adapter where its upload lies: trained on its texts, encoded as planned."""
    recipes = {author.name: author.recipe for author in AUTHORS}
    tokenizer = AutoTokenizer.from_pretrained(places.base)
    for name in names:
        with tempfile.TemporaryDirectory() as trained:
            loss = train_adapter(places.base, tokenizer, read_texts(places.texts(name)), Path(trained))
            experts = AutoConfig.from_pretrained(places.base).num_experts
            write_upload(Path(trained), places.adapter(name), experts, recipes[name])
        progress(f"{name}: adapter trained, loss {loss:.3f}; written {recipes[name].label}")


def train_adapter(
    base: Path, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], directory: Path
) -> float:
    """Put an adapter trained on `texts` into `directory` as PEFT saves it; the last batches' mean loss."""
    torch.manual_seed(SEED)
    model = _wrap(base)
    optimizer = torch.optim.AdamW(_parameter_groups(model), betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, STEPS, WARMUP_STEPS)
    )
    units = encode_units(tokenizer, texts)
    batches = cycle(plan_batches(units, BATCH_UNITS, tokenizer.pad_token_id, random.Random(SEED)))
    losses: list[float] = []
    for batch in islice(batches, STEPS):
        loss = model(input_ids=batch.ids, labels=batch.labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(str(directory))
    recent = losses[-10:]
    return sum(recent) / len(recent)


def _wrap(base: Path) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=list(ATTENTION),
        target_parameters=list(EXPERT_PARAMETERS),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _parameter_groups(model: PeftModel) -> list[dict[str, object]]:
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [p for name, p in trained if ".experts." in name], "lr": EXPERT_LEARNING_RATE},
        {"params": [p for name, p in trained if ".experts." not in name], "lr": ATTENTION_LEARNING_RATE},
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_authors(Places(Path(sys.argv[1])), sys.argv[2:], lambda line: print(line, flush=True))
