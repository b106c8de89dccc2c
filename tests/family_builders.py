"""Tiny random models of the families, adapters for them by the real PEFT, and what merged models predict.

Nothing of the product is imported here.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from zlib import crc32

import torch
import transformers
from family_models import BASICS, FAMILIES, VOCAB
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from transformers import PreTrainedModel

RANK, ALPHA = 3, 5


def draw(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Normal random numbers of this shape that depend on the path alone."""
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(crc32(path.encode())))


def build_model(name: str) -> PreTrainedModel:
    """The same random numbers at each call, large enough that predictions differ much from token to token."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**{**BASICS, **family.settings})
    torch.manual_seed(3)
    model: PreTrainedModel = getattr(transformers, family.model)(config).eval().float()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default wants sizes that divide by 4
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = draw(path, parameter)
            # Larger numbers let rounding grow beyond what is asked of the engine.
            weight = 1.5 / noise.shape[-1] ** 0.5 * noise
            parameter.copy_(weight if parameter.dim() > 1 else parameter + 0.1 * noise)
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * draw(path, buffer))
    return model


def adapt(name: str, parts: Collection[str], *, misread: bool = False) -> PeftModel:
    """The model with an adapter on these parts: random factors, the same for a module in each adapter that has it.

    misread: the experts' lora_B as whoever takes them for grouped by expert reads them; PEFT's are rank-major.
    """
    chosen = [FAMILIES[name].parts[part] for part in parts]
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        task_type="CAUSAL_LM",
        target_modules=[module for part in chosen for module in part.modules],
        target_parameters=[parameter for part in chosen for parameter in part.parameters] or None,
    )
    model = build_model(name)
    # Of models whose type it knows PEFT 0.21 takes each module called gate_proj, up_proj or down_proj for the routed
    # experts', as transformers 4 named them: shared experts and dense layers could not be trained.
    model.config.model_type = "unknown"
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    del model.config.model_type
    with torch.no_grad():
        for path, parameter in adapted.named_parameters():
            if "lora_" in path:
                noise = draw(path, parameter)
                parameter.copy_(noise / noise.shape[1] ** 0.5 if "lora_A" in path else 0.3 * noise)
        for module in adapted.modules():
            if misread and isinstance(module, ParamWrapper) and module.num_experts > 1:
                factor = module.lora_B["default"].weight
                factor.copy_(factor.unflatten(1, (-1, RANK)).transpose(1, 2).flatten(1))
    return adapted


def merged(name: str, parts: Collection[str], *, misread: bool = False) -> PreTrainedModel:
    """The model with such an adapter's deltas in its weights, as PEFT merges them; without parts the base."""
    if not parts:
        return build_model(name)
    model: PreTrainedModel = adapt(name, parts, misread=misread).merge_and_unload()
    return model


@torch.no_grad()
def token_logprobs(model: PreTrainedModel, ids: list[int]) -> list[float]:
    """log p of each token but the first, given those before it, in nats."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


def prompts() -> list[list[int]]:
    """Token ids, of which some are longer than the sliding windows."""
    return [[(7 * i * i + 31 * row + 5) % (VOCAB - 3) + 3 for i in range(13 + 8 * row)] for row in range(3)]


def save_base(name: str, folder: Path) -> None:
    """Write the model as transformers saves it, without a tokenizer."""
    build_model(name).save_pretrained(folder)


def save_adapter(name: str, parts: Collection[str], folder: Path) -> None:
    """Write an adapter on these parts as PEFT saves it."""
    adapt(name, parts).save_pretrained(folder)
