"""Run with one version of PEFT on the path: `producer_peft.py FOLDER VARIANT…`.

Trains each variant for real, saves it to FOLDER/VARIANT/adapter and writes beside it `theirs.safetensors`: this
PEFT's own logits, those of its merge, and what it adds to every weight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from producer_builders import SHAPES, VARIANTS, Variant, build_model, make_tokens, read_logits
from safetensors.torch import save_file

STEPS, ALPHA = 24, 5
Deltas = Callable[[PeftModel], dict[str, torch.Tensor]]


def train(variant: Variant) -> PeftModel:
    shape = SHAPES[variant.shape]
    torch.manual_seed(1)
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=ALPHA,
        task_type="CAUSAL_LM",  # without it PEFT writes its own auto_mapping over unsloth_zoo's
        target_modules=list(variant.modules),
        target_parameters=list(variant.parameters) or None,
        **variant.settings,
    )
    adapted = get_peft_model(build_model(shape, variant.dtype), config, autocast_adapter_dtype=False)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    adapted.train()
    for step in range(STEPS):
        tokens = make_tokens(4, 20, step)
        adapted(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted.eval()


def list_lora_layers(adapted: PeftModel) -> dict[str, LoraLayer]:
    """Each by the name of what it adapts: a linear module, or a parameter of a module."""
    layers = {}
    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            parameter = getattr(module, "parameter_name", "")
            place = name.removeprefix("base_model.model.").replace(".base_layer", "")
            layers[f"{place}.{parameter}" if parameter not in ("", "weight") else place] = module
    return layers


def split_expert_deltas(name: str, delta: torch.Tensor) -> dict[str, torch.Tensor]:
    """A stacked parameter's delta (E, out, in) as one for each expert's projection."""
    experts, _, parameter = name.rpartition(".")
    parts = (
        {"down_proj": delta}
        if parameter == "down_proj"
        else dict(zip(("gate_proj", "up_proj"), delta.chunk(2, 1), strict=True))
    )
    return {
        f"{experts}.{expert}.{part}": value[expert]
        for part, value in parts.items()
        for expert in range(len(value))
    }


def list_peft_deltas(adapted: PeftModel) -> dict[str, torch.Tensor]:
    """What PEFT's own merge adds to each weight, by the name of the module or of the expert's projection."""
    deltas: dict[str, torch.Tensor] = {}
    for name, layer in list_lora_layers(adapted).items():
        delta = layer.get_delta_weight("default").detach()
        deltas |= split_expert_deltas(name, delta) if delta.dim() == 3 else {name: delta}
    return deltas


def record(adapted: PeftModel, folder: Path, list_deltas: Deltas, *, merge: bool) -> None:
    """Save the adapter, and what its producer makes of it."""
    adapted.save_pretrained(folder / "adapter")
    adapted.base_model.model.config.save_pretrained(folder / "base")
    theirs = {"logits": read_logits(adapted)}
    adapted = adapted.float()
    theirs["float_logits"] = read_logits(adapted)
    with adapted.disable_adapter():
        theirs["base_logits"] = read_logits(adapted)
    theirs |= {f"delta.{name}": delta for name, delta in list_deltas(adapted).items()}
    if merge:
        theirs["merged_logits"] = read_logits(adapted.merge_and_unload())
    save_file({name: value.contiguous() for name, value in theirs.items()}, folder / "theirs.safetensors")


def main(folder: str, *names: str) -> None:
    for name in names:
        record(train(VARIANTS[name]), Path(folder, name), list_peft_deltas, merge=True)
    print(peft.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
