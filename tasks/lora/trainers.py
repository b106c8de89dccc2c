"""What the programs that write adapters are known to do: by name and version, and by their traces."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tasks.lora.config import AdapterConfig
from tasks.lora.family import Family, StoredAs
from tasks.lora.layouts import Orientation, Packing

_Release = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TrainingStatement:
    """What an upload says about its own training, as it was written down.

    layout: one packing's name for every parameter. layouts: (parameter, name), which go before it.
    peft_version: of the PEFT that the trainer ran on, for files whose config does not give it. intended: the classes of
    tensors that were to be trained, by the names of TensorClass; () where nothing is said.
    """

    trainer_name: str | None = None
    trainer_version: str | None = None
    layout: str | None = None
    layouts: tuple[tuple[str, str], ...] = ()
    peft_version: str | None = None
    intended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainerRule:
    """Which packing a program writes. can_be_changed: a setting of the program itself could change it."""

    packing: Packing
    fact: str
    can_be_changed: bool = False


# Source: unsloth_zoo 2026.9.5 and 2026.9.6, temporary_patches/moe_utils.py (the forward of the families it
# patches; lora_B_layout and UNSLOTH_MOE_LORA_B_LAYOUT); PEFT 0.17 to 0.21.2, tuners/lora/layer.py
# ParamWrapper; Megatron-Bridge save_hf_adapter; NeMo AutoModel, SkyRL, prime-rl, Axolotl and ms-swift, read
# only. A trainer that writes one tensor per expert needs no row: such files have no packing.
_UNSLOTH = "unsloth_zoo"
_LAST_GROUPED_UNSLOTH_ZOO = (2026, 9, 5)
_LAST_UNSLOTH_ZOO_OF_TWO_MINDS = (2026, 9, 7)
_OLD_UNSLOTH_ZOO = TrainerRule(
    Packing.GROUPED_BY_EXPERT, "versions up to 2026.9.5 group by expert in the families they patch"
)
_UNPATCHED_UNSLOTH_ZOO = TrainerRule(
    Packing.RANK_MAJOR, "versions up to 2026.9.5 leave this family to PEFT, which packs rank-major"
)
_NEW_UNSLOTH_ZOO = TrainerRule(
    Packing.RANK_MAJOR,
    "versions from 2026.9.6 pack rank-major unless UNSLOTH_MOE_LORA_B_LAYOUT says otherwise",
    can_be_changed=True,
)
_PEFT_VERSION = re.compile(
    r"(\d+)\.(\d+)(?:\.(\d+))?(?P<unfinished>[.\-_]?(?:a|b|c|rc|dev|alpha|beta|pre)\d*)*(?:\.post\d+)?(?:[+@].*)?"
)
# PEFT's releases that write alike: the first, the last, and how. Source: PEFT tuners/lora/layer.py, ParamWrapper, whose
# in_features are those of (experts, in, out) up to 0.18.1; of 0.19.0, the other way round for what transformers marks
# as transposed; later, for what it does not mark. Run with 0.18.1, 0.19.0, 0.19.1 and 0.21.2, which agree. Whether a
# parameter that is marked today was so for the trainer, no file says: from 0.19.0 on it can be either.
_PEFT_ERAS: tuple[tuple[tuple[_Release, _Release], dict[StoredAs, Orientation | None]], ...] = (
    (
        ((0, 17, 0), (0, 18, 1)),
        {
            StoredAs.OUT_IN: Orientation.SWAPPED,
            StoredAs.IN_OUT: Orientation.STANDARD,
            StoredAs.UNMARKED_IN_OUT: Orientation.STANDARD,
        },
    ),
    (
        ((0, 19, 0), (0, 19, 0)),
        {
            StoredAs.OUT_IN: Orientation.SWAPPED,
            StoredAs.IN_OUT: None,
            StoredAs.UNMARKED_IN_OUT: Orientation.STANDARD,
        },
    ),
    (
        ((0, 19, 1), (0, 21, 999)),
        {
            StoredAs.OUT_IN: Orientation.STANDARD,
            StoredAs.IN_OUT: None,
            StoredAs.UNMARKED_IN_OUT: Orientation.SWAPPED,
        },
    ),
)
_RULES = {
    "peft": TrainerRule(Packing.RANK_MAJOR, "every version packs rank-major"),
    "megatron_bridge": TrainerRule(Packing.GROUPED_BY_EXPERT, "its exporter groups by expert"),
    "nemo_automodel": TrainerRule(Packing.RANK_MAJOR, "its stacked files are rank-major"),
    "skyrl": TrainerRule(Packing.RANK_MAJOR, "it trains through PEFT"),
    "prime_rl": TrainerRule(Packing.RANK_MAJOR, "its stacked files come from PEFT"),
    "axolotl": TrainerRule(Packing.RANK_MAJOR, "it trains through PEFT"),
    "ms_swift": TrainerRule(Packing.RANK_MAJOR, "its stacked files come from PEFT"),
}


def find_rule(training: TrainingStatement, family: Family) -> TrainerRule | None:
    """Return what is known of the program that trained, or None for an unknown name or version."""
    if _trainer(training) != _UNSLOTH:
        return _RULES.get(_trainer(training))
    version = _parse_unsloth_version(training)
    if version is None:
        return None
    if version > _LAST_GROUPED_UNSLOTH_ZOO:
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


def may_train_squares_transposed(config: AdapterConfig, training: TrainingStatement | None) -> bool:
    """Return whether an unsloth_zoo up to 2026.9.7 may have trained this adapter.

    For parameters with in = out it trained the transpose of what it merges, and of what its file says.
    Source: unsloth_zoo 2026.9.5 and 2026.9.6 temporary_patches/moe_utils.py, run; mended in 2026.9.8.
    """
    if training is not None and training.trainer_name is not None:
        version = _parse_unsloth_version(training)
        return _trainer(training) == _UNSLOTH and (
            version is None or version <= _LAST_UNSLOTH_ZOO_OF_TWO_MINDS
        )
    fixed = config.auto_mapping is not None and config.auto_mapping.unsloth_fixed
    return bool(fixed) or config.unsloth_fused_expert_lora is not None


def _trainer(training: TrainingStatement) -> str:
    return (training.trainer_name or "").lower().replace("-", "_")


def _parse_unsloth_version(training: TrainingStatement) -> tuple[int, ...] | None:
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", training.trainer_version or "")
    return None if version is None else tuple(map(int, version.groups()))


def orientation_by_peft(version: str | None, stored: StoredAs) -> Orientation | None:
    """Return how this PEFT writes a parameter that is stored so, or None where that is not known.

    Not known: no version, one before 0.17, which cannot train stacked parameters, one newer than any that was
    measured, builds from between two releases that differ, and releases that go by a mark of transformers which may
    have been missing. A development build counts as what lies on both sides of it; post releases and local builds as
    their release.
    Source: PEFT config.py for versions such as "0.18.2.dev0@<commit>".
    """
    parts = _PEFT_VERSION.fullmatch(version or "")
    if parts is None:
        return None
    release = tuple(int(part or 0) for part in parts.group(1, 2, 3))
    reached = [
        written[stored]
        for (first, _), written in _PEFT_ERAS
        if first < release or (first == release and not parts["unfinished"])
    ]
    left = [written[stored] for (_, last), written in _PEFT_ERAS if release <= last]
    if not reached or not left or reached[-1] is not left[0]:
        return None
    return left[0]
