"""Fields of adapter_config.json that the conversion does not read: which may hold something, and which may not.

Whatever is not known to be harmless is refused: a field that nobody here knows may change what the factors mean, and
the engine would pass it over without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tasks.lora.errors import UnsupportedConfig
from tasks.lora.files import CONFIG_NAME

# Features that change what the factors mean.
# Source: PEFT 0.17.0 to 0.21.2 tuners/lora/config.py; vLLM 0.32 lora/peft_helper.py; ms-swift swift/tuners/lora.py
# (the last three).
REFUSED_FIELDS = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "megatron_config",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "use_qa_lora",
    "use_merged_linear",
    "enable_lora",
)

# PEFT's own, which say how training went or what it aimed at. The details of an init are among them, since the init
# itself is looked at, and so are the layers that were aimed at, since the tensors tell.
# Source: PEFT 0.17.0 to 0.21.2 config.py and tuners/lora/config.py.
HARMLESS_FIELDS = frozenset(
    (
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)

# Other programs', which bear on the optimiser or on the types of training alone: a warning says that they were ignored.
# Source: ms-swift swift/tuners/lora.py, peft.py and utils.py (LoRA+, the factors' dtype, its name for the method); PEFT
# 0.2.0 tuners/lora.py (merging in evaluation). Megatron-Bridge, NeMo AutoModel, SkyRL, prime-rl and Axolotl write
# PEFT's fields alone, and unsloth_zoo no others but its marker.
FOREIGN_FIELDS = frozenset(("lora_dtype", "lorap_emb_lr", "lorap_lr_ratio", "merge_weights", "swift_type"))

_KNOWN = HARMLESS_FIELDS | FOREIGN_FIELDS | frozenset(REFUSED_FIELDS)
_SAYS_NOTHING: tuple[object, ...] = (None, False, [], {}, "")
_SHOWN, _LETTERS = 5, 60
_UNKNOWN_ADVICE = (
    "If the program that wrote it says that it bears on training alone, take it out of the config and submit again; "
    "else train without it."
)


def list_field_refusals(fields: Mapping[str, object], label: str) -> Iterator[UnsupportedConfig]:
    """Yield an error for each field whose feature would be lost, and one for all fields that are not known.

    fields: those that the conversion does not read. null, false, 0 and what is empty say nothing.
    """
    for name in REFUSED_FIELDS:
        if fields.get(name) not in _SAYS_NOTHING:
            yield UnsupportedConfig(label, f"{CONFIG_NAME}: {name}", "nothing", repr(fields[name])[:200])
    unknown = [
        name for name, value in sorted(fields.items()) if name not in _KNOWN and value not in _SAYS_NOTHING
    ]
    if unknown:
        shown = unknown[:_SHOWN]
        names = ", ".join(_cut(name) for name in shown)
        if len(unknown) > _SHOWN:
            names += f" and {len(unknown) - _SHOWN} more"
        values = ", ".join(repr(fields[name])[:_LETTERS] for name in shown)
        expected = "fields that PEFT 0.17 to 0.21 writes, or nothing in others"
        yield UnsupportedConfig(label, f"{CONFIG_NAME}: {names}", expected, values, _UNKNOWN_ADVICE)


def list_foreign(fields: Mapping[str, object]) -> list[str]:
    """Return the fields of other programs that hold something and are ignored."""
    return sorted(name for name in FOREIGN_FIELDS if fields.get(name) not in _SAYS_NOTHING)


def _cut(name: str) -> str:
    """A name as a message shows it: short, and of printable letters."""
    shown = name if len(name) <= _LETTERS else f"{name[:_LETTERS]}…"
    return shown if shown.isprintable() and shown.strip() else ascii(shown)
