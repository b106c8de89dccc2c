"""A converted adapter without most of itself: its routed experts alone, or its attention alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from tasks.lora.family import Family, TensorClass
from tasks.lora.files import CONFIG_NAME, SLOTS_METADATA, AdapterFiles, read_config_bytes
from tasks.lora.header import PLAIN_METADATA, TensorEntry, TensorGroup, format_header
from tasks.lora.resolve import classify_name
from tasks.lora.tensors import TensorReader, open_tensors
from tasks.lora.write import HELD_BLOCKS, WrittenFile, staged_folder, write_file, write_safetensors

_NUMBER = re.compile(r"\.\d+")


class Ablation(StrEnum):
    """What is left of the adapter."""

    EXPERTS_ONLY = "experts_only"
    ATTENTION_ONLY = "attention_only"

    @property
    def kept(self) -> TensorClass:
        """The class of tensors that is left."""
        return TensorClass.ROUTED_EXPERTS if self is Ablation.EXPERTS_ONLY else TensorClass.ATTENTION


def list_ablations(converted: AdapterFiles, family: Family) -> tuple[Ablation, ...]:
    """Return what can be made of an adapter: something has to be left, and something has to be taken away."""
    counts = {ablation: len(_list_kept(converted, family, ablation)) for ablation in Ablation}
    return tuple(ablation for ablation, count in counts.items() if 0 < count < len(converted.tensors))


def ablate_adapter(
    converted: AdapterFiles, family: Family, ablation: Ablation, destination: Path
) -> tuple[WrittenFile, ...]:
    """Write what is left of a converted adapter to `destination`, which appears whole or not at all.

    Its tensors are those of the adapter, byte for byte and in their order; so is its config, which the engine reads for
    ranks and scalings alone. Memory: a few of its largest tensors. Raises DestinationExists, CorruptFile if a file
    shrank meanwhile, and OSError from the disk.
    """
    kept = _list_kept(converted, family, ablation)
    groups = (TensorGroup((entry.name,), entry.dtype, entry.shape) for entry in kept)
    header = format_header(groups, SLOTS_METADATA if converted.is_slots else PLAIN_METADATA)
    total = len(header) + sum(entry.end - entry.begin for entry in kept)
    with staged_folder(destination) as folder, open_tensors(converted) as reader:
        weights = write_safetensors(folder / converted.weights_name, header, _read_all(reader, kept), total)
        config = write_file(
            folder / CONFIG_NAME, read_config_bytes(converted.directory, label=converted.label)
        )
    return config, weights


def _list_kept(converted: AdapterFiles, family: Family, ablation: Ablation) -> list[TensorEntry]:
    # Names that differ in their numbers alone are of one class; an output has tens of thousands of them.
    kinds: dict[str, TensorClass | None] = {}
    kept = []
    for entry in converted.tensors:
        alike = _NUMBER.sub(".0", entry.name)
        if alike not in kinds:
            kinds[alike] = classify_name(alike, family)
        if kinds[alike] is ablation.kept:
            kept.append(entry)
    return kept


def _read_all(reader: TensorReader, entries: list[TensorEntry]) -> Iterator[memoryview]:
    """Yield each tensor's bytes, in memory that is left alone while HELD_BLOCKS tensors are held."""
    size = max(entry.end - entry.begin for entry in entries)
    memories = [memoryview(bytearray(size)) for _ in range(HELD_BLOCKS + 1)]
    for number, entry in enumerate(entries):
        block = memories[number % len(memories)][: entry.end - entry.begin]
        reader.read_into(entry, block)
        yield block
