"""What the programs that write adapters are known to do: by name and version, and by their traces."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tasks.lora.config import AdapterConfig
from tasks.lora.families import Family
from tasks.lora.layouts import Packing


@dataclass(frozen=True, slots=True)
class TrainingStatement:
    """What an upload says about its own training, as it was written down.

    layout: one packing's name for every parameter. layouts: (parameter, name), which go before it.
    """

    trainer_name: str | None = None
    trainer_version: str | None = None
    layout: str | None = None
    layouts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TrainerRule:
    """Which packing a program writes. can_be_changed: a setting of the program itself could change it."""

    packing: Packing
    fact: str
    can_be_changed: bool = False


# Source: unsloth_zoo 2026.9.5 and 2026.9.6, temporary_patches/moe_utils.py (the forward of the families it
# patches; lora_B_layout and UNSLOTH_MOE_LORA_B_LAYOUT); PEFT 0.17 to 0.21.2, tuners/lora/layer.py
# ParamWrapper; Megatron-Bridge save_hf_adapter; NeMo AutoModel, SkyRL, Axolotl and ms-swift, read only.
_LAST_GROUPED_UNSLOTH_ZOO = (2026, 9, 5)
_OLD_UNSLOTH_ZOO = TrainerRule(
    Packing.GROUPED_BY_EXPERT, "versions up to 2026.9.5 group by expert in the families they patch"
)
_UNPATCHED_UNSLOTH_ZOO = TrainerRule(
    Packing.RANK_MAJOR, "versions up to 2026.9.5 leave this family to PEFT, which packs rank-major"
)
_NEW_UNSLOTH_ZOO = TrainerRule(
    Packing.RANK_MAJOR, "versions from 2026.9.6 pack rank-major unless told otherwise", can_be_changed=True
)
_RULES = {
    "peft": TrainerRule(Packing.RANK_MAJOR, "every version packs rank-major"),
    "megatron_bridge": TrainerRule(Packing.GROUPED_BY_EXPERT, "its exporter groups by expert"),
    "nemo_automodel": TrainerRule(Packing.RANK_MAJOR, "its stacked files are rank-major"),
    "skyrl": TrainerRule(Packing.RANK_MAJOR, "it trains through PEFT"),
    "axolotl": TrainerRule(Packing.RANK_MAJOR, "it trains through PEFT"),
    "ms_swift": TrainerRule(Packing.RANK_MAJOR, "its stacked files come from PEFT"),
}


def find_rule(training: TrainingStatement, family: Family) -> TrainerRule | None:
    """Return what is known of the program that trained, or None for an unknown name or version."""
    name = (training.trainer_name or "").lower().replace("-", "_")
    if name != "unsloth_zoo":
        return _RULES.get(name)
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", training.trainer_version or "")
    if version is None:
        return None
    if tuple(map(int, version.groups())) > _LAST_GROUPED_UNSLOTH_ZOO:
        return _NEW_UNSLOTH_ZOO
    return _OLD_UNSLOTH_ZOO if family.patched_by_unsloth else _UNPATCHED_UNSLOTH_ZOO


def find_fingerprint(config: AdapterConfig, family: Family) -> tuple[Packing, str] | None:
    """Return the packing that the traces in a config without a marker point to, and the traces, or None."""
    parameters = config.target_parameters or []
    if not parameters:
        return None
    mapping = config.auto_mapping
    if mapping is not None and mapping.unsloth_fixed and family.patched_by_unsloth:
        return (
            Packing.GROUPED_BY_EXPERT,
            "auto_mapping.unsloth_fixed beside target_parameters and no marker: "
            "an unsloth_zoo up to 2026.9.5, which groups by expert in this family",
        )
    if config.peft_version is None and all(re.search(r"layers\.\d+\.", name) for name in parameters):
        return (
            Packing.GROUPED_BY_EXPERT,
            "no peft_version and target_parameters that list every layer: "
            "Megatron-Bridge, which groups by expert",
        )
    return None
