"""The format slots: the blocks of the per-expert target under one name each, in the numbers that the engine holds.

vLLM turns every factor of a per-expert file into its LoRA dtype and multiplies B by the module's scaling there. An
output in this format holds the results, so that the engine has nothing left to do but copy. docs/slots.md describes it.
Source: vLLM 0.32 lora/lora_model.py (from_lora_tensors), lora/lora_weights.py (optimize).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tasks.lora.base import BaseConfig
from tasks.lora.blocks import PlannedBlock, list_expert_blocks, list_module_blocks, pairs_of
from tasks.lora.errors import InvalidBaseConfig
from tasks.lora.family import ExpertParameter
from tasks.lora.files import AdapterFiles
from tasks.lora.header import TensorGroup
from tasks.lora.names import Factor, format_served_expert_keys, format_served_slots_key
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import find_served_scaling

# Source: vLLM 0.32 config/model.py, _STR_DTYPE_TO_TORCH_DTYPE.
_ENGINE_DTYPES = {"half": "F16", "float16": "F16", "bfloat16": "BF16", "float": "F32", "float32": "F32"}
# By what the base's config says. Source: as above, _resolve_auto_dtype: float32 is served as bfloat16.
_CONFIG_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "BF16"}


def find_served_dtype(base: BaseConfig) -> str:
    """Return the dtype in which the engine holds adapters of a base: F16, BF16 or F32.

    That is what the base is served in: as the operator says, else as its config.json does; bfloat16 where neither does.
    Raises InvalidBaseConfig for a word of the operator's that the engine does not know.
    """
    stated = base.engine_dtype
    if stated is None or stated == "auto":
        return _CONFIG_DTYPES.get(base.dtype or "", "BF16")
    if stated not in _ENGINE_DTYPES:
        known = ", ".join(["auto", *_ENGINE_DTYPES])
        raise InvalidBaseConfig(
            base.label,
            "engine.dtype of base.json",
            f"one of {known}",
            repr(stated)[:200],
            "Write what the engine's --dtype is.",
        )
    return _ENGINE_DTYPES[stated]


def list_slots_blocks(
    layout: AdapterLayout, layer: int, parameter: ExpertParameter, *, displaced: bool
) -> Iterator[PlannedBlock]:
    """Yield for each factor and projection of a parameter one tensor: A (E, r, in), B (E, out, r).

    displaced: as in `list_expert_blocks`. Raises like `find_served_dtype`.
    """
    experts, dtype = layout.base.experts, find_served_dtype(layout.base)
    pairs = {name: pair for pair in pairs_of(layout, layer, parameter) for name in pair.projections}
    blocks = list_expert_blocks(layout, layer, parameter, displaced=displaced)
    for block, (factor, projection) in zip(blocks, product(Factor, parameter.projections), strict=True):
        name = format_served_slots_key(layer, projection, factor, layout.base)
        group, scaling = TensorGroup((name,), dtype, (experts, *block.group.shape)), 1.0
        if factor is Factor.B and projection in pairs:
            pair = pairs[projection]
            scaling = find_served_scaling(pair.scale.scaling, layout.rank_of(pair))
        yield replace(block, group=group, scaling=scaling)


def list_slots_module_blocks(layout: AdapterLayout, layer: int) -> Iterator[PlannedBlock]:
    """Yield the other factors of a layer, each under every name that the engine gives it, cast and scaled likewise."""
    dtype = find_served_dtype(layout.base)
    scales = {module.entry.name: module.scale for module in layout.modules if module.key.factor is Factor.B}
    for block in list_module_blocks(layout, layer):
        scale = scales.get(block.pieces[0].sources[0].name)
        scaling = 1.0 if scale is None else find_served_scaling(scale.scaling, scale.rank)
        yield replace(block, group=replace(block.group, dtype=dtype), scaling=scaling)


def list_engine_names(files: AdapterFiles, base: BaseConfig) -> list[str]:
    """Return the names by which the engine looks for what a converted adapter holds.

    Those of its tensors; in the format slots a tensor of all experts of a projection stands for each of theirs.
    """
    if not files.is_slots:
        return [entry.name for entry in files.tensors]
    experts: dict[str, list[str]] = {}
    for layer in base.sparse_layers:
        for parameter in base.family.parameters:
            for factor, projection in product(Factor, parameter.projections):
                name = format_served_slots_key(layer, projection, factor, base)
                experts[name] = format_served_expert_keys(layer, projection, factor, base)
    return [name for entry in files.tensors for name in experts.get(entry.name, [entry.name])]
