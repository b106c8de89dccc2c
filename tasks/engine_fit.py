"""Whether a running engine can serve the adapters that are to be loaded on it, by what it says of itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roster.serving import TORCH_DTYPES, AdapterFormat, Manifest, MinimumVllm, smallest_max_lora_rank
from roster.serving_engine import SLOTS_VERSION, EngineInfo
from tasks.errors import EngineTooOld, EngineUnfit

_RESTART = "Restart it with that setting"


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """What one adapter asks of the engine that loads it. label: how messages name the adapter.

    dtype: of the file's tensors, as safetensors calls it ("BF16"); it matters for the format `slots` alone.
    """

    label: str
    format: AdapterFormat
    rank: int
    mixed_format: bool
    minimum: MinimumVllm | None
    dtype: str = ""


def needs_of_record(label: str, made: Mapping[str, Any]) -> EngineNeeds:
    """Return the needs of what a converted step made, of which records of earlier code give no minimum.

    The rank is the larger one of the adapter and its control: two readings may differ in it.
    """
    minimum = made.get("minimum_vllm")
    return EngineNeeds(
        label,
        AdapterFormat(made["format"]),
        max(int(made["rank"]), int(made["control"]["rank"])),
        bool(made["needs_mixed_format"]),
        None if minimum is None else MinimumVllm.model_validate(minimum),
        str(made["dtype"]),
    )


def needs_of_manifest(manifest: Manifest) -> EngineNeeds:
    """Return the needs of an adapter that is staged."""
    return EngineNeeds(
        f"{manifest.author}/{manifest.run}",
        manifest.format,
        manifest.rank,
        manifest.needs_mixed_format,
        manifest.minimum_vllm,
        manifest.dtype,
    )


def check_engine(info: EngineInfo, base: str, served_model: str, needs: Sequence[EngineNeeds]) -> None:
    """Return if an engine can serve these adapters of a base, and give scores that stand.

    Raises:
        EngineUnfit: a setting is not what an adapter or the check needs; the message names it, or the other format.
        EngineTooOld: its vLLM is older than the first release that serves one of these adapters right.
        RankNotServeable: no vLLM takes that rank; conversion refuses such adapters.
    """
    settings = (
        ("--enable-lora", "on", "on" if info.enable_lora else "off"),
        ("--no-enable-prefix-caching", "given", "missing" if info.prefix_caching else "given"),
        (
            "--served-model-name",
            served_model,
            served_model if served_model in info.served_model else ", ".join(info.served_model),
        ),
    )
    for setting, expected, found in settings:
        if expected != found:
            raise EngineUnfit(base, setting, expected, found, _RESTART)
    if info.device == "cpu" and not info.cpu_moe_plugin:
        raise EngineUnfit(base, "the plugin for expert LoRA on CPU", "active", "not loaded", _RESTART)
    for one in needs:
        _check_version(info, base, one)
    for one in needs:
        if one.mixed_format and not info.mixed_moe_lora_format:
            raise _lacks_mixed_format(base, one)
        if one.format is AdapterFormat.SLOTS:
            _check_slots(info, base, one)
    largest = max(needs, key=lambda one: one.rank)
    if info.max_lora_rank < largest.rank:
        legal = smallest_max_lora_rank(largest.label, largest.rank)
        advice = f"{largest.label} needs it. Restart it with --max-lora-rank {legal}"
        raise EngineUnfit(
            base, "--max-lora-rank", f"at least {largest.rank}", str(info.max_lora_rank), advice
        )


def is_older(version: str, minimum: str) -> bool:
    """Return whether a vLLM version is older than a release.

    What follows the numbers counts for a candidate of that very release only ("0.31.0rc1" is older than "0.31.0"). A
    version that does not begin with a release's numbers, such as a build's hash, is taken for older.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(a|b|rc|\.?dev)?", version)
    wanted = tuple(int(part) for part in minimum.split("."))
    if found is None:
        return True
    numbers = tuple(int(part or 0) for part in found.groups()[:3])
    return numbers < wanted or (numbers == wanted and found.group(4) is not None)


def _check_version(info: EngineInfo, base: str, needs: EngineNeeds) -> None:
    minimum = needs.minimum
    if minimum is not None and is_older(info.vllm_version, minimum.version):
        adapter = f"{needs.label} ({needs.format})"
        raise EngineTooOld(base, adapter, minimum.version, info.vllm_version, minimum.report)


def _check_slots(info: EngineInfo, base: str, needs: EngineNeeds) -> None:
    other = f"have the adapters of this base converted to {AdapterFormat.PER_EXPERT}"
    if info.slots_version != SLOTS_VERSION:
        found = "not loaded" if info.slots_version is None else f"version {info.slots_version}"
        advice = (
            f"{needs.label} is {needs.format}, which no vLLM takes by itself. Install this release of adapter-roster "
            f"in the engine's environment (docs/serving.md) and restart it, or {other}"
        )
        setting = "the plugin for the format slots"
        raise EngineUnfit(base, setting, f"version {SLOTS_VERSION}", found, advice)
    dtype = TORCH_DTYPES.get(needs.dtype, needs.dtype)
    if info.lora_dtype != dtype:
        advice = f"{needs.label} holds {dtype}. Restart it with --lora-dtype {dtype}, or {other}"
        raise EngineUnfit(base, "--lora-dtype", dtype, info.lora_dtype, advice)


def _lacks_mixed_format(base: str, needs: EngineNeeds) -> EngineUnfit:
    other = AdapterFormat.PER_EXPERT if needs.format is AdapterFormat.STACKED else AdapterFormat.STACKED
    advice = (
        f"{needs.label} is {needs.format}, which this model class takes in mixed mode only. {_RESTART}, or have the "
        f"adapters of this base converted to {other} (`roster base add {base} --config … --target-format {other}`)"
    )
    return EngineUnfit(base, "--enable-mixed-moe-lora-format", "given", "missing", advice)
