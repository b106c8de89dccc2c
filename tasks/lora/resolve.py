"""Whether every key of a converted adapter leads to a module of the engine that will serve it.

vLLM drops a factor that no module asks for, without a word, and then answers as the base model does, or as an
adapter of its attention alone. So each name is looked up here as vLLM will: `base_model.model.` and the factor's
ending come off, and what is left must be a module that is wrapped for LoRA, a part of one that packs its parts, or
a routed expert. vLLM's own renaming (`hf_to_vllm_mapper`) is not followed: an output's names are the engine's own.

Source: vllm/lora/utils.py (`parse_fine_tuned_lora_name`), vllm/lora/lora_model.py (`from_local_checkpoint`),
vllm/lora/model_manager.py (`_register_packed_modules`, `_create_merged_loras_inplace`, `activate_adapter`),
vLLM 0.32.0.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tasks.lora.errors import AdapterError, UnresolvedKeys
from tasks.lora.family import Family, TensorClass
from tasks.lora.names import PREFIX, ModuleKey, parse_key

_FACTOR = re.compile(r"\.lora_[AB]\.weight$")
_EXPERT = re.compile(r"(?P<module>.+)\.(?P<expert>0|[1-9][0-9]*)\.(?P<projection>[^.]+)")
_NUMBER = re.compile(r"\.[1-9][0-9]{0,5}(?=\.)")
_INNER = ".base_layer"

NOT_APPLIED = "loaded by the engine, and not applied"
"""Why a key of an ineffective module leads nowhere."""

_UNKNOWN = "unknown"
"""What stands for the class of a key that the family does not have."""

_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class ServedModules:
    """Where an engine looks for the factors of an adapter. All names are full ones, as the engine has them.

    origin: who says so. modules: what is wrapped for LoRA; on those in `ineffective` factors change nothing.
    packed: last component of a wrapped module, and those of the parts whose factors it takes instead of its own.
    expert_modules: name and number of routed experts. projections: what those of one expert are called, none where
    stacked experts alone are taken. stacked: stacked experts are taken.
    """

    origin: str
    architecture: str
    modules: frozenset[str]
    ineffective: frozenset[str]
    packed: tuple[tuple[str, tuple[str, ...]], ...]
    expert_modules: tuple[tuple[str, int], ...]
    projections: tuple[str, ...]
    stacked: bool

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over everything here but the origin."""
        said = [
            self.architecture,
            *(sorted(self.modules), sorted(self.ineffective), sorted(self.packed)),
            *(sorted(self.expert_modules), self.projections, self.stacked),
        ]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A key whose factor would not take effect. kind: None where the family has no such key. why: one phrase."""

    name: str
    kind: TensorClass | None
    why: str


def find_unresolved(names: Iterable[str], served: ServedModules, family: Family) -> tuple[Unresolved, ...]:
    """Return those of an adapter's keys that lead nowhere on this engine, in their order."""
    look_up = _Lookup(served)
    found = ((name, look_up.explain(name)) for name in names)
    return tuple(Unresolved(name, classify_name(name, family), why) for name, why in found if why)


def find_lost(
    names: Iterable[str], witnesses: Sequence[ServedModules], family: Family
) -> tuple[Unresolved, ...]:
    """Return the keys that lead nowhere for any of the witnesses, with the reason that the first one gives."""
    first, *others = witnesses
    lost = find_unresolved(names, first, family)
    for other in others:
        still = {one.name for one in find_unresolved([one.name for one in lost], other, family)}
        lost = tuple(one for one in lost if one.name in still)
    return lost


def check_resolved(
    adapter: str, names: Sequence[str], witnesses: Sequence[ServedModules], family: Family
) -> None:
    """Return if every key leads somewhere for one of the witnesses.

    Raises UnresolvedKeys with the count of each class and the first of its keys.
    """
    lost = find_lost(names, witnesses, family)
    if lost:
        expected = f"keys that lead to modules of {describe_witnesses(witnesses)}"
        raise UnresolvedKeys(adapter, lost[0].name, expected, describe_unresolved(lost, len(names)))


def describe_witnesses(witnesses: Sequence[ServedModules]) -> str:
    """Return one phrase: whose modules, and who says so."""
    return f"{witnesses[0].architecture} ({'; '.join(one.origin for one in witnesses)})"


def describe_unresolved(unresolved: Sequence[Unresolved], total: int) -> str:
    """Return one phrase: how many of `total` keys lead nowhere, by class, with samples of each class."""
    classes: dict[str, list[Unresolved]] = {}
    for one in unresolved:
        classes.setdefault(one.kind.value if one.kind else _UNKNOWN, []).append(one)
    said = (
        f"{len(group)} of {kind} ({'; '.join(f'{one.name}: {one.why}' for one in group[:_SAMPLES])})"
        for kind, group in classes.items()
    )
    return f"{len(unresolved)} of {total} keys that lead nowhere: {', '.join(said)}"


def count_classes(names: Iterable[str], family: Family) -> tuple[tuple[str, int], ...]:
    """Return each class of these keys with their number, in the order of first appearance."""
    # Names that differ in their numbers alone are of one class; an output has tens of thousands of them.
    alike = Counter(_NUMBER.sub(".0", name) for name in names)
    counts: Counter[str] = Counter()
    for name, count in alike.items():
        kind = classify_name(name, family)
        counts[kind.value if kind else _UNKNOWN] += count
    return tuple(counts.items())


def classify_name(name: str, family: Family) -> TensorClass | None:
    """Return the class of a key, None for one that the family does not have."""
    try:
        key = parse_key(name, family, "")
    except AdapterError:
        return None
    return key.kind if isinstance(key, ModuleKey) else TensorClass.ROUTED_EXPERTS


class _Lookup:
    """The engine's side, arranged for one look at each name."""

    def __init__(self, served: ServedModules) -> None:
        self._served = served
        self._experts = dict(served.expert_modules)
        parts = dict(served.packed)
        self._owners = {
            address: module
            for module in served.modules
            if module not in self._experts
            for address in _list_addresses(module, parts)
        }

    def explain(self, name: str) -> str:
        """Return why a key leads nowhere, or "" where it leads somewhere."""
        if not _FACTOR.search(name):
            return "not the name of a factor"
        module = _FACTOR.sub("", name).replace(PREFIX, "") if name.startswith(PREFIX) else ""
        owner = self._owners.get(module)
        if owner is None:
            return self._explain_expert(module)
        return self._explain_effect(owner)

    def _explain_effect(self, owner: str) -> str:
        return NOT_APPLIED if owner in self._served.ineffective else ""

    def _explain_expert(self, module: str) -> str:
        stacked = module.removesuffix(_INNER)
        if stacked in self._experts:
            return self._explain_effect(stacked) if self._served.stacked else "no stacked experts taken"
        match = _EXPERT.fullmatch(module)
        count = self._experts.get(match["module"]) if match else None
        if match is None or count is None:
            return "no such module"
        if not self._served.projections:
            return "stacked experts alone taken"
        if match["projection"] not in self._served.projections:
            return f"projections are called {', '.join(self._served.projections)}"
        if int(match["expert"]) >= count:
            return f"{count} experts"
        return self._explain_effect(match["module"])


def _list_addresses(module: str, packed: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the names by which an adapter addresses a wrapped module: its parts', or its own."""
    parent, dot, last = module.rpartition(".")
    return [f"{parent}{dot}{part}" for part in packed.get(last, (last,))]
