"""A stacked adapter saved again with a true marker of its packing, its weights untouched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.lora.errors import PackingUndecided, UnsupportedSourceFormat
from tasks.lora.files import CONFIG_NAME, INDEX_NAME, AdapterFiles, read_config_bytes
from tasks.lora.layouts import Packing
from tasks.lora.packing import PackingDecision
from tasks.lora.sources import AdapterLayout, SourceForm
from tasks.lora.strict_json import parse_strict_json
from tasks.lora.write import Progress, staged_folder, sync_path, write_file

_FLAT, _NESTED = "lora_B_layout", "unsloth_fused_expert_lora"
_MIXED = "mixed"


def require_decided(layout: AdapterLayout) -> None:
    """Return if the layout of a stacked adapter is known well enough to be written down.

    Raises UnsupportedSourceFormat for adapters that have no packing, PackingUndecided for one that is assumed.
    """
    if layout.form is not SourceForm.STACKED:
        raise UnsupportedSourceFormat(
            layout.label,
            CONFIG_NAME,
            "stacked experts, whose packing a marker can state",
            f"{layout.form} tensors, which have one reading only",
            "There is nothing to migrate: other tools read it as it is.",
        )
    for decision in layout.packing:
        if decision.undecided:
            raise PackingUndecided(
                layout.label,
                f"the packing of {decision.parameter}",
                "a statement, or tensors that tell",
                "neither, so that a marker would be a guess",
                "Force it with --packing, or state lora_B_layout in a training.json beside it.",
            )


def stamp_adapter(
    source: AdapterFiles, layout: AdapterLayout, destination: Path, progress: Progress | None = None
) -> None:
    """Copy the adapter to `destination`, which appears whole or not at all, with a marker that states its packing.

    Weights are copied byte for byte; the config keeps every field but the markers. progress: called with bytes done
    and bytes in all. Raises like `require_decided`, DestinationExists, and OSError from the disk.
    """
    require_decided(layout)
    config = format_stamped_config(read_config_bytes(source.directory, label=source.label), layout.packing)
    total, done = sum(file.bytes for file in source.weights), 0
    with staged_folder(destination) as folder:
        for file in source.weights:
            shutil.copyfile(file.path, folder / file.name)
            sync_path(folder / file.name)
            done += file.bytes
            if progress is not None:
                progress(done, total)
        if (source.directory / INDEX_NAME).exists():
            write_file(folder / INDEX_NAME, (source.directory / INDEX_NAME).read_bytes())
        write_file(folder / CONFIG_NAME, config)


def format_stamped_config(config: bytes, decisions: Sequence[PackingDecision]) -> bytes:
    """Return an adapter_config.json with the markers of these decisions in place of any it had.

    As unsloth_zoo >= 2026.9.6 writes them (temporary_patches/moe_utils.py, write_fused_expert_lora_layout): one
    for each parameter, "mixed" where its layers differ, and a flat one only where all are alike.
    """
    fields: Any = parse_strict_json(config)
    for holder in (fields, fields.get("auto_mapping")):
        if isinstance(holder, dict):
            holder.pop(_FLAT, None)
            holder.pop(_NESTED, None)
    values = {decision.parameter: decision.value or _MIXED for decision in decisions}
    marker: dict[str, object] = {
        "lora_A_layout": Packing.GROUPED_BY_EXPERT,
        "parameters": {name: {_FLAT: value} for name, value in values.items()},
    }
    alike = set(values.values())
    if len(alike) == 1 and _MIXED not in alike:
        fields[_FLAT] = marker[_FLAT] = alike.pop()
    fields[_NESTED] = marker
    return (json.dumps(fields, indent=2) + "\n").encode("utf-8")
