"""Checks of a conversion by headers, config and layout: no tensor's numbers are asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from tasks.lora.checks import CheckName, CheckResult
from tasks.lora.config import AdapterConfig
from tasks.lora.expected import ServedModule
from tasks.lora.family import TensorClass
from tasks.lora.files import CONFIG_NAME, AdapterFiles
from tasks.lora.header import TensorSpec
from tasks.lora.layouts import Packing
from tasks.lora.names import find_module, format_key, format_served_module_keys
from tasks.lora.packing import PackingDecision, Source
from tasks.lora.resolve import (
    ServedModules,
    count_classes,
    describe_unresolved,
    describe_witnesses,
    find_lost,
)
from tasks.lora.served_scaling import ServedScaling
from tasks.lora.slots import list_engine_names
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat

# An alpha can miss the one number that gives a scaling exactly by the last bit or two of a float64.
_LAST_BITS = 2.0**-51
_SHOWN = 4


def check_coverage(output: AdapterFiles, layout: AdapterLayout, specs: Sequence[TensorSpec]) -> CheckResult:
    """Return whether the output holds exactly the tensors that it must, of their shapes and dtypes."""
    expected = {spec.name: (spec.dtype, spec.shape) for spec in specs}
    found = {entry.name: (entry.dtype, entry.shape) for entry in output.tensors}
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    wrong = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    others = {
        name: module.key.kind
        for module in layout.modules
        for name in format_served_module_keys(module.key, layout.base)
    }
    # Where experts share a tensor, it holds a factor of several pairs.
    routed = len(expected) - len(others)
    pairs = layout.expert_pairs * (routed - len(set(missing) - others.keys())) // routed
    classes = Counter(kind.value for name, kind in others.items() if name in found)
    classes[TensorClass.ROUTED_EXPERTS.value] = routed - len(set(missing) - others.keys())
    faults = [*missing, *extra, *wrong]
    detail = f"{layout.expert_pairs} expert pairs and {len(others)} other tensors, each once"
    if faults:
        detail = (
            f"{len(missing)} tensors missing, {len(extra)} too many, {len(wrong)} of another shape or dtype"
        )
    figures = (
        ("pairs", pairs),
        ("pairs_expected", layout.expert_pairs),
        *((f"{kind}_tensors", count) for kind, count in sorted(classes.items())),
        ("missing", len(missing)),
        ("extra", len(extra)),
        ("wrong", len(wrong)),
    )
    return CheckResult(CheckName.COVERAGE, not faults, detail, figures, faults[0] if faults else "")


def check_size(output: AdapterFiles, specs: Sequence[TensorSpec]) -> CheckResult:
    """Return whether one weight file holds as many bytes as the base's sizes give."""
    expected = sum(spec.data_bytes for spec in specs)
    found = sum(entry.end - entry.begin for entry in output.tensors)
    files = len(output.weights)
    detail = f"{found} bytes of data, {expected} expected" + (f", in {files} files" if files > 1 else "")
    figures = (
        ("bytes", found),
        ("expected", expected),
        ("file_bytes", sum(weights.bytes for weights in output.weights)),
        ("files", files),
    )
    return CheckResult(CheckName.SIZE, found == expected and files == 1, detail, figures)


def check_config(
    config: AdapterConfig, layout: AdapterLayout, format: TargetFormat, modules: Sequence[ServedModule]
) -> CheckResult:
    """Return whether the output's config targets every module that the weights hold, and no marker of it is false.

    modules: what `list_served` gives.
    """
    aimed = set(config.target_modules or ()) if not isinstance(config.target_modules, str) else set()
    # A router is trained as a parameter of its module: mlp.gate.weight.
    aimed |= {name.removesuffix(".weight").rpartition(".")[2] for name in config.target_parameters or ()}
    held = _list_targets(layout, format, modules)
    faults = [f"{name} is not targeted" for name in sorted(held - aimed)]
    # Tensors of single experts have no packing, and those of slots but one.
    wanted = Packing.RANK_MAJOR.value if format is TargetFormat.STACKED else None
    stated = set(_list_markers(config)) or {None}
    faults += [f"a marker says {value or 'no packing'}, not {wanted}" for value in stated if value != wanted]
    detail = "; ".join(faults[:_SHOWN]) or f"targets {', '.join(sorted(held))}"
    where = CONFIG_NAME if faults else ""
    return CheckResult(
        CheckName.CONFIG, not faults, detail, (("targets", len(held)), ("faults", len(faults))), where
    )


def _list_targets(layout: AdapterLayout, format: TargetFormat, modules: Sequence[ServedModule]) -> set[str]:
    """Return the last component of every module that has factors; parameters as PEFT names them."""
    if format is not TargetFormat.STACKED:
        return {module.name.rpartition(".")[2] for module in modules}
    names = [parameter.name for parameter in layout.family.parameters]
    for module in layout.modules:
        first, *others = format_served_module_keys(module.key, layout.base)
        # A router is a parameter in transformers, under a name that is not always the engine's.
        is_parameter = find_module(module.key, layout.base).parameter is not None
        names += (
            _last(name)
            for name in (format_key(module.key, layout.family) if is_parameter else first, *others)
        )
    return set(names)


def _last(name: str) -> str:
    """Return the last component of the module whose factor has this name."""
    return name.rsplit(".", 3)[1]


def _list_markers(config: AdapterConfig) -> Iterator[str | None]:
    marker = config.unsloth_fused_expert_lora
    said = [config.lora_B_layout]
    if marker is not None:
        said += [marker.lora_B_layout, *(one.lora_B_layout for one in marker.parameters.values())]
    yield from (value for value in said if value is not None)


def check_scaling(config: AdapterConfig, modules: Sequence[ServedModule]) -> CheckResult:
    """Return whether the engine gives every module the rank that its factors have and the trainer's scaling.

    modules: what `list_served` gives.
    """
    served = ServedScaling(config)
    differing: list[tuple[ServedModule, int, float]] = []
    largest = 0.0
    for module in modules:
        rank, scaling = served.of(module.name)
        largest = max(largest, abs(scaling - module.scaling) / abs(module.scaling))
        if rank != module.rank or not math.isclose(scaling, module.scaling, rel_tol=_LAST_BITS):
            differing.append((module, rank, scaling))
    module, rank, scaling = differing[0] if differing else (modules[0], *served.of(modules[0].name))
    detail = f"scaling {scaling:g} at rank {rank}, source {module.scaling:g} at rank {module.rank}"
    if not differing:
        detail = f"as trained: {_describe_scalings(modules)}"
    figures = (
        ("scaling", scaling),
        ("expected", module.scaling),
        ("modules", len(modules)),
        ("differing", len(differing)),
        ("largest_relative_difference", largest),
    )
    return CheckResult(CheckName.SCALING, not differing, detail, figures, module.name if differing else "")


def _describe_scalings(modules: Sequence[ServedModule]) -> str:
    """Return which scalings there are at which rank, and of how many modules, the most frequent first."""
    counts = Counter((module.scaling, module.rank) for module in modules).most_common()
    said = [f"{scaling:g} at rank {rank} ({count} modules)" for (scaling, rank), count in counts[:_SHOWN]]
    more = len(counts) - _SHOWN
    return ", ".join(said) + (f" and {more} others" if more > 0 else "")


def check_layout(layout: AdapterLayout) -> CheckResult:
    """Return whether no tensor of the source, and not all together, contradict the packing that was read.

    What tensors say is the inspection's evidence: each layer's tensor by itself, and all of a parameter pooled.
    """
    counts: Counter[str] = Counter()
    said: list[str] = []
    against: list[tuple[str, str]] = []
    for decision in layout.packing:
        own = Counter(
            "silent" if says is None else "agree" if says is decision.at(layer) else "disagree"
            for layer, says in decision.told
        )
        layers = sum(1 for pair in layout.pairs if pair.parameter == decision.parameter)
        own["silent"] = layers - own["agree"] - own["disagree"]
        counts.update(own)
        if not decision.undecided:  # else both readings are scored, and the winner is checked again
            against += _list_contradictions(decision)
        said.append(
            f"{decision.parameter} {decision.value or 'mixed'} by {decision.decided_by}, tensors of {layers} layers: "
            f"{own['agree']} agree, {own['disagree']} disagree, {own['silent']} silent"
        )
    detail = "; ".join(said) or "no parameter is stacked: there is no packing to read"
    if against:
        detail = f"{against[0][1]} ({detail})"
    figures = tuple((name, counts[name]) for name in ("agree", "disagree", "silent"))
    return CheckResult(CheckName.LAYOUT, not against, detail, figures, against[0][0] if against else "")


def _list_contradictions(decision: PackingDecision) -> Iterator[tuple[str, str]]:
    """Yield (where, what is said) of tensors that decisively name another packing than they were read in."""
    for layer, says in decision.told:
        if says is not None and says is not decision.at(layer):
            yield (
                f"layer {layer} {decision.parameter}",
                f"layer {layer}'s tensor is {says}, read as {says.other}",
            )
    for item in decision.evidence:
        if item.source is Source.TENSORS and decision.value is not None and item.says is decision.value.other:
            yield f"the packing of {decision.parameter}", f"the tensors say {item.says}: {item.detail}"


def check_resolves(
    output: AdapterFiles, layout: AdapterLayout, served: Sequence[ServedModules]
) -> CheckResult:
    """Return whether every key leads to a module of the engine, as far as anything is known of that."""
    family = layout.family
    names = list_engine_names(output, layout.base)
    lost = find_lost(names, served, family) if served else ()
    faults = {one.name for one in lost}
    reached = count_classes((name for name in names if name not in faults), family)
    figures = (*reached, ("unresolved", len(lost)))
    if lost:
        detail, where = describe_unresolved(lost, len(names)), lost[0].name
    elif served:
        detail, where = f"{len(names)} keys lead to modules of {describe_witnesses(served)}", ""
    else:
        detail, where = f"nothing is known of {layout.base.served.architecture}: left to the engine", ""
    return CheckResult(CheckName.RESOLVES, not lost, detail, figures, where)
