"""A PEFT adapter written down as other trainers would have written it: same deltas, other bytes.

Letters: E experts, r rank. PEFT 0.21.2 stacks the factors of one expert parameter as lora_A `(E * r, in)`,
expert slowest, and lora_B `(out, E * r)`, expert fastest; delta of expert e = scaling * B_e @ A_e. The other
encodings are written from that definition alone: nothing here is shared with the code that reads them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo.authors import BASE_NAME, TRAINING_FILE, Orientation, Packing, Recipe, Statement

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# In the order in which PEFT nests them: the inner one is stored under `experts.base_layer`.
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")

_A = ".lora_A.weight"
_B = ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class StackedPair:
    """The stacked factors of one expert parameter: `a` (E * r, …), `b` (…, E * r)."""

    a: torch.Tensor
    b: torch.Tensor


def reencode_pair(pair: StackedPair, experts: int, packing: Packing, orientation: Orientation) -> StackedPair:
    """The same deltas in another encoding; `pair` is as PEFT 0.21.2 writes it (rank_major, standard)."""
    rank = pair.a.shape[0] // experts
    a = pair.a.reshape(experts, rank, -1)
    b = pair.b.reshape(-1, rank, experts).permute(2, 0, 1)
    if orientation is Orientation.SWAPPED:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    columns = b.permute(1, 2, 0) if packing is Packing.RANK_MAJOR else b.permute(1, 0, 2)
    return StackedPair(
        a=a.reshape(experts * rank, -1).contiguous(), b=columns.reshape(-1, experts * rank).contiguous()
    )


def write_upload(source: Path, directory: Path, experts: int, recipe: Recipe) -> None:
    """Put the PEFT adapter in `source` into the new `directory`, written as `recipe` says."""
    directory.mkdir(parents=True)
    tensors = _reencode_tensors(load_file(source / WEIGHTS_FILE), experts, recipe)
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    layers = sorted({int(name.split(".layers.")[1].split(".")[0]) for name in tensors})
    _write_json(directory / CONFIG_FILE, _state(config, experts, layers, recipe))
    if recipe.statement is Statement.TRAINING_JSON:
        _write_json(directory / TRAINING_FILE, _training(recipe))


def _reencode_tensors(
    tensors: dict[str, torch.Tensor], experts: int, recipe: Recipe
) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, recipe.dtype)
    written = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for name in tensors:
        stem = name.removesuffix(_A)
        if stem == name or ".mlp.experts" not in name:
            continue
        stacked = StackedPair(a=written[stem + _A], b=written[stem + _B])
        pair = reencode_pair(stacked, experts, recipe.packing, recipe.orientation)
        written[stem + _A], written[stem + _B] = pair.a, pair.b
    return written


def _state(config: dict[str, object], experts: int, layers: list[int], recipe: Recipe) -> dict[str, object]:
    """The adapter_config.json of the producer that `recipe` stands for."""
    stated = config | {"base_model_name_or_path": BASE_NAME, "peft_version": recipe.peft_version}
    # PEFT writes sets in any order; the same training should leave the same bytes.
    for targets in ("target_modules", "target_parameters"):
        stated[targets] = sorted(config[targets])  # type: ignore[call-overload]
    match recipe.statement:
        case Statement.FLAT_MARKER:
            stated["lora_B_layout"] = str(recipe.marked)
        case Statement.NESTED_MARKER:
            stated |= _unsloth_marker(experts, str(recipe.marked))
        case Statement.OLD_UNSLOTH:
            stated["auto_mapping"] = _unsloth_mapping()
        case Statement.MEGATRON_BRIDGE:
            stated = _megatron_bridge_config(config, layers)
    return stated


def _unsloth_mapping() -> dict[str, object]:
    return {
        "base_model_class": "Qwen3MoeForCausalLM",
        "parent_library": "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "unsloth_fixed": True,
    }


def _unsloth_marker(experts: int, layout: str) -> dict[str, object]:
    """Source: unsloth_zoo >= 2026.9.6, adapter_config.json as save_pretrained leaves it."""
    parameter = {"lora_B_layout": layout, "num_experts": experts}
    return {
        "auto_mapping": _unsloth_mapping(),
        "lora_B_layout": layout,
        "unsloth_fused_expert_lora": {
            "lora_A_layout": Packing.GROUPED_BY_EXPERT.value,
            "lora_B_layout": layout,
            "parameters": dict.fromkeys(EXPERT_PARAMETERS, parameter),
        },
    }


def _megatron_bridge_config(config: dict[str, object], layers: list[int]) -> dict[str, object]:
    """The few fields that Megatron-Bridge writes, with every parameter's full path.

    Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/conversion/peft_bridge.py,
    build_adapter_config_dict and _order_target_parameters.
    """
    return {
        "peft_type": "LORA",
        "auto_mapping": None,
        "base_model_name_or_path": BASE_NAME,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": config["lora_alpha"],
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "r": config["r"],
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted(config["target_modules"]),  # type: ignore[call-overload]
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        "target_parameters": [
            f"model.layers.{layer}.mlp.experts.{parameter}"
            for layer in layers
            for parameter in sorted(EXPERT_PARAMETERS)
        ],
    }


def _training(recipe: Recipe) -> dict[str, object]:
    """What a trainer would state beside an adapter whose own files say nothing of its packing."""
    return {
        "schema": 1,
        "trainer": {"name": "unsloth_zoo", "version": "2026.8.17"},
        "peft_version": recipe.peft_version,
        "base": BASE_NAME,
        "intended_targets": ["attention", "routed_experts"],
    }


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
