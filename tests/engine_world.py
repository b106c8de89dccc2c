"""Builds, inside the engine's environment, a tiny random Qwen3-MoE, adapters for it, and their merged references.

Run as a script, `engine_world.py DIR` writes `DIR/base`, `DIR/<adapter>` for each of `ADAPTERS`, and two broken
adapters, and prints reference log-probabilities. No two sizes are equal and none is 1, so that an exchanged axis
cannot go unseen.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, HEADS, HEAD_DIM = 3, 4, 2, 40, 24, 4, 32
ALPHA = 5.0
ATTENTION = {
    "q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "k_proj": (2 * HEAD_DIM, HIDDEN),
    "v_proj": (2 * HEAD_DIM, HIDDEN),
    "o_proj": (HIDDEN, HEADS * HEAD_DIM),
}
EXPERT = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
ROUTER = {"gate": (EXPERTS, HIDDEN)}


@dataclass(frozen=True)
class Adapter:
    """Which parts are adapted, at which rank, with random factors from `seed`."""

    seed: int
    attention: bool = True
    experts: bool = True
    router: bool = False
    rank: int = 3


ADAPTERS = {
    "experts-1": Adapter(11),
    "experts-2": Adapter(12, router=True),
    "attention": Adapter(13, experts=False),
    "experts-3": Adapter(14, rank=8),
    "experts-4": Adapter(15, attention=False),
}


def build_base(directory: Path) -> Qwen3MoeForCausalLM:
    """A random model of three sparse layers, saved with a byte-level tokenizer; the same at each call."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=len(fast),
        hidden_size=HIDDEN,
        intermediate_size=56,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    return model


def adapter_factors(name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module path → `(A (rank, in), B (out, rank))` of one adapter, all values random and large enough to matter."""
    adapter = ADAPTERS[name]
    generator = torch.Generator().manual_seed(adapter.seed)
    factors = {}
    for layer in range(LAYERS):
        shapes = {}
        if adapter.attention:
            shapes |= {f"self_attn.{name}": shape for name, shape in ATTENTION.items()}
        if adapter.experts:
            shapes |= {
                f"mlp.experts.{e}.{name}": shape for e in range(EXPERTS) for name, shape in EXPERT.items()
            }
        if adapter.router:
            shapes |= {f"mlp.{name}": shape for name, shape in ROUTER.items()}
        for path, (rows, columns) in shapes.items():
            factor_a = torch.randn(adapter.rank, columns, generator=generator) / columns**0.5
            factor_b = 0.3 * torch.randn(rows, adapter.rank, generator=generator)
            factors[f"model.layers.{layer}.{path}"] = (factor_a, factor_b)
    return factors


def save_adapter(name: str, directory: Path) -> None:
    """Write one adapter as vLLM's per-expert files."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, (factor_a, factor_b) in adapter_factors(name).items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = factor_a
        tensors[f"base_model.model.{path}.lora_B.weight"] = factor_b
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": ADAPTERS[name].rank,
        "lora_alpha": ALPHA,
        "target_modules": [*ATTENTION, *EXPERT, *ROUTER],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


def merged(base_directory: Path, name: str | None, *, without: str | None = None) -> Qwen3MoeForCausalLM:
    """The base with an adapter's deltas added to its weights in float32, but for paths that contain `without`."""
    model = Qwen3MoeForCausalLM.from_pretrained(base_directory, dtype=torch.float32).eval()
    if name is None:
        return model
    with torch.no_grad():
        for path, (factor_a, factor_b) in adapter_factors(name).items():
            if without is not None and without in path:
                continue
            delta = (ALPHA / ADAPTERS[name].rank) * (factor_b @ factor_a)
            if ".experts." not in path:
                model.get_submodule(path).weight.add_(delta)
                continue
            module, expert, projection = path.rsplit(".", 2)
            stacked = model.get_submodule(module)
            if projection == "down_proj":
                stacked.down_proj[int(expert)].add_(delta)
            else:
                start = 0 if projection == "gate_proj" else INTERMEDIATE
                stacked.gate_up_proj[int(expert), start : start + INTERMEDIATE].add_(delta)
    return model


@torch.no_grad()
def token_logprobs(model: Qwen3MoeForCausalLM, ids: list[int]) -> list[float]:
    """log p of each token but the first, given those before it, in nats."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def prompts() -> list[list[int]]:
    """Prompts of different lengths for the tests over HTTP, all of the byte-level alphabet."""
    return [[(7 * i * i + 31 * row) % 250 for i in range(19 + 5 * row)] for row in range(6)]


def build(directory: Path) -> None:
    """Write the base and every adapter under `directory`."""
    build_base(directory / "base")
    for name in ADAPTERS:
        save_adapter(name, directory / name)


def save_broken(directory: Path) -> None:
    """Write two adapters with a fault: one lacks an expert, one holds a nan."""
    for name in ("lacking", "nan"):
        save_adapter("experts-4", directory / name)
        file = directory / name / "adapter_model.safetensors"
        tensors = load_file(file)
        if name == "lacking":
            tensors = {key: tensor for key, tensor in tensors.items() if "layers.1.mlp.experts.2." not in key}
        else:
            tensors["base_model.model.model.layers.2.mlp.experts.1.down_proj.lora_B.weight"][5, 1] = torch.nan
        save_file(tensors, file)


def main(directory: Path) -> None:
    """Build everything the tests over HTTP need; print the merged models' log-probabilities of `prompts`."""
    build(directory)
    save_broken(directory)
    references = {}
    for name in (None, *ADAPTERS):
        model = merged(directory / "base", name)
        references[name or "base"] = [token_logprobs(model, ids) for ids in prompts()]
    print(json.dumps({"prompts": prompts(), "references": references}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
