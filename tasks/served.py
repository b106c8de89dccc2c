"""What serves an adapter's base, in the words of the layouts: told by its engine, else kept in this repository."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roster.serving_engine import VERIFIED_VLLM, EngineInfo
from tasks.lora.base import BaseConfig
from tasks.lora.resolve import NOT_APPLIED, ServedModules, describe_unresolved, find_unresolved
from tasks.lora.snapshots import load_snapshot

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class EngineGap:
    """A setting of a running engine for which it leaves an adapter's keys unused. advice: what to do, one phrase."""

    setting: str
    expected: str
    found: str
    advice: str


def served_by_engine(info: EngineInfo) -> ServedModules:
    """What a running engine published; of one that is spread over a pipeline, what its first stage has."""
    return ServedModules(
        origin=f"engine {info.engine_id}, vLLM {info.vllm_version}",
        architecture=info.architecture,
        modules=frozenset(info.lora_modules),
        ineffective=frozenset(info.ineffective_modules),
        packed=tuple(sorted(info.packed_modules.items())),
        expert_modules=tuple(sorted(info.expert_modules.items())),
        projections=info.expert_projections,
        stacked=info.stacked_experts,
    )


def served_by_snapshot(base: BaseConfig) -> ServedModules | None:
    """What this repository keeps of the class that serves a base; None where it keeps nothing."""
    return load_snapshot(base.served.architecture, VERIFIED_VLLM, layers=base.layers, experts=base.experts)


def list_witnesses(info: EngineInfo | None, base: BaseConfig) -> tuple[ServedModules, ...]:
    """Who tells where an adapter's keys lead: the base's running engine, if it has one, then this repository.

    What the engine leaves unused and the class could serve is a setting of the engine's (`find_engine_gap`), not a
    fault of the adapter; so one witness is enough.
    """
    told = (served_by_engine(info),) if info and _tells_all(info) else ()
    kept = served_by_snapshot(base)
    return told if kept is None else (*told, kept)


def find_engine_gap(names: Sequence[str], info: EngineInfo, base: BaseConfig) -> EngineGap | None:
    """What about a running engine keeps it from serving keys that it could serve; None where it serves them all.

    Such keys are those that lead nowhere on this engine, and somewhere on the class that this repository keeps for the
    base. Keys that lead nowhere on either are the adapter's own fault, and not looked for here. An engine of the base's
    class whose experts or layers are not the base's serves another model, whether it has the keys or not.
    """
    kept = served_by_snapshot(base)
    if kept is None or not _tells_all(info):
        return None
    if info.architecture == kept.architecture and _is_of_another_model(info, base):
        expected = _describe_experts(base.sparse_layers, {base.experts})
        found = _describe_experts(_list_layers(info.expert_modules), {*info.expert_modules.values()})
        advice = "Point the base at the engine that serves it, or restart that one with the base's weights"
        return EngineGap("the model", expected, found, advice)
    missing = find_unresolved(names, served_by_engine(info), base.family)
    lost = {one.name for one in find_unresolved([one.name for one in missing], kept, base.family)}
    unused = [one for one in missing if one.name not in lost]
    if not unused:
        return None
    found = describe_unresolved(unused, len(names))
    if info.architecture != kept.architecture:
        advice = "Serve the base with the class that its config.json names"
        return EngineGap("the model's class", kept.architecture, f"{info.architecture}: {found}", advice)
    if info.vllm_version != VERIFIED_VLLM:
        advice = f"Serve it with vLLM {VERIFIED_VLLM}, or look at what the other release calls its modules"
        return EngineGap("vLLM", VERIFIED_VLLM, f"{info.vllm_version}: {found}", advice)
    idle = [one for one in unused if one.why == NOT_APPLIED]
    if idle:
        found = describe_unresolved(idle, len(names))
        advice = "Serve the base where they are applied (docs/engine.md, ineffective_modules), or train without them"
        return EngineGap("ineffective_modules", "none that the adapter has", found, advice)
    advice = "Restart it without that setting, or with all modules that adapters are trained on"
    return EngineGap("--lora-target-modules", "every module that the adapter has", found, advice)


def _is_of_another_model(info: EngineInfo, base: BaseConfig) -> bool:
    """Whether experts are wrapped that the base does not have, or nothing is where its last ones are.

    Some layers alone can be left out by --lora-target-modules, which takes full names, too.
    """
    layers, counts = _list_layers(info.expert_modules), {*info.expert_modules.values()}
    if not layers:
        return False
    beyond = counts != {base.experts} or not set(layers) <= set(base.sparse_layers)
    return beyond or max(_list_layers(info.lora_modules)) < base.sparse_layers[-1]


def _list_layers(modules: Iterable[str]) -> list[int]:
    found = (_LAYER.search(name) for name in modules)
    return sorted({int(match[1]) for match in found if match})


def _describe_experts(layers: Sequence[int], counts: set[int]) -> str:
    """One phrase: how many experts, and in which layers, those without a gap between them as a range."""
    first = [layer for layer in layers if layer - 1 not in layers]
    last = [layer for layer in layers if layer + 1 not in layers]
    ranges = [str(a) if a == b else f"{a} to {b}" for a, b in zip(first, last, strict=True)]
    return f"{' or '.join(map(str, sorted(counts)))} experts in each of the layers {', '.join(ranges)}"


def _tells_all(info: EngineInfo) -> bool:
    return info.pipeline_parallel_size == 1
