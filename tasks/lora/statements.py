"""What is said about a parameter's packing, before any number is looked at.

What a statement proves is the *reading*, never the execution. It is gathered from the operator, the marker in the
config, the upload's training.json, the operator's policy, and the traces that a program left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tasks.lora.config import AdapterConfig, AutoMapping
from tasks.lora.errors import InvalidConfig
from tasks.lora.family import Family
from tasks.lora.files import CONFIG_NAME
from tasks.lora.layouts import Packing
from tasks.lora.packing import Evidence, PolicyStatement, Source, Strength
from tasks.lora.trainers import TrainingStatement, find_fingerprint, find_rule

_MIXED = "mixed"
_TRAINING_NAME = "training.json"
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Statements:
    """What is said of one parameter.

    evidence: strongest first. mixed: the marker that says the parameter's layers differ, or None. priors: what
    most of the world writes.
    """

    evidence: tuple[Evidence, ...]
    mixed: str | None
    priors: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class _Marker:
    """One field. own: it speaks of this parameter, not of all together."""

    where: str
    said: str
    own: bool


def list_statements(
    parameter: str,
    *,
    family: Family,
    config: AdapterConfig,
    forced: Packing | None,
    training: TrainingStatement | None,
    policy: PolicyStatement | None,
    adapter: str,
) -> Statements:
    """Return every statement about one stacked parameter. Raises InvalidConfig for a packing of unknown name."""
    markers = _list_markers(parameter, config)
    evidence: list[Evidence] = []
    if forced is not None:
        evidence.append(Evidence(Source.FORCED, forced, Strength.FORCED, "given by the operator"))
    evidence += (_weigh_marker(marker, adapter) for marker in markers)
    if training is not None:
        evidence += _read_training(parameter, training, family, adapter)
    if policy is not None:
        said = dict(policy.layouts).get(parameter, policy.layout)
        if said is not None:
            says = _parse_packing(said, policy.where, adapter)
            evidence.append(Evidence(Source.POLICY, says, Strength.RULE, policy.where))
    if not markers:
        fingerprint = find_fingerprint(config, family)
        if fingerprint is not None:
            packing, detail = fingerprint
            evidence.append(Evidence(Source.FINGERPRINT, packing, Strength.CIRCUMSTANTIAL, detail))
    version = config.peft_version or (training.peft_version if training is not None else None)
    return Statements(tuple(evidence), _find_mixed(markers), tuple(_list_priors(version)))


def _list_markers(parameter: str, config: AdapterConfig) -> list[_Marker]:
    """The parameter's own first, as unsloth_zoo >= 2026.9.6 nests them."""
    places: list[tuple[str, AdapterConfig | AutoMapping]] = [("", config)]
    if config.auto_mapping is not None:
        places.append(("auto_mapping.", config.auto_mapping))
    found: list[_Marker] = []
    for place, holder in places:
        nested = holder.unsloth_fused_expert_lora
        if nested is not None:
            where = f"{place}unsloth_fused_expert_lora."
            detail = nested.parameters.get(parameter)
            if detail is not None and detail.lora_B_layout is not None:
                said = detail.lora_B_layout
                found.append(_Marker(f"{where}parameters.{parameter}.lora_B_layout", said, own=True))
            if nested.lora_B_layout is not None:
                found.append(_Marker(f"{where}lora_B_layout", nested.lora_B_layout, own=False))
        if holder.lora_B_layout is not None:
            found.append(_Marker(f"{place}lora_B_layout", holder.lora_B_layout, own=False))
    return found


def _find_mixed(markers: list[_Marker]) -> str | None:
    """A summary may say "mixed" where the parameter's own field names a packing: the parameters then differ.

    Source: unsloth_zoo 2026.9.6 temporary_patches/moe_utils.py fused_expert_lora_layout, which writes "mixed" of
    one parameter whose layers differ, and no summary then.
    """
    own = [marker for marker in markers if marker.own]
    return next((marker.where for marker in own or markers if marker.said == _MIXED), None)


def _weigh_marker(marker: _Marker, adapter: str) -> Evidence:
    if marker.said != _MIXED:
        says = _parse_packing(marker.said, f"{CONFIG_NAME}: {marker.where}", adapter)
        return Evidence(Source.MARKER, says, Strength.EXPLICIT, marker.where)
    if marker.own:
        detail = f"{marker.where}: mixed, so this parameter's layers differ"
        return Evidence(Source.MARKER, None, Strength.EXPLICIT, detail)
    detail = f"{marker.where}: mixed, of all parameters together"
    return Evidence(Source.MARKER, None, Strength.NONE, detail)


def _read_training(
    parameter: str, training: TrainingStatement, family: Family, adapter: str
) -> Iterator[Evidence]:
    said = dict(training.layouts).get(parameter, training.layout)
    if said is not None:
        where = f"{_TRAINING_NAME}: lora_B_layout"
        packing = _parse_packing(said, where, adapter)
        yield Evidence(Source.TRAINING, packing, Strength.EXPLICIT, where)
    rule = find_rule(training, family)
    if rule is not None:
        strength = Strength.DEFAULT if rule.can_be_changed else Strength.DERIVED
        detail = f"{_TRAINING_NAME}: {training.trainer_name} {training.trainer_version or ''}".rstrip()
        yield Evidence(Source.TRAINING, rule.packing, strength, f"{detail}: {rule.fact}")


def _list_priors(version: str | None) -> Iterator[Evidence]:
    if version is not None:
        detail = (
            f"peft_version {version[:_SHOWN]}: every PEFT by itself packs rank-major, but unsloth_zoo up to 2026.9.5 "
            "trained grouped by expert on top of it and left the same version; it bears on the orientation only"
        )
        yield Evidence(Source.PEFT_VERSION, Packing.RANK_MAJOR, Strength.PRIOR, detail)


def _parse_packing(said: str, where: str, adapter: str) -> Packing:
    if said not in tuple(Packing):
        advice = (
            "" if where.startswith(CONFIG_NAME) else "Correct it, or take it out: then nothing is stated."
        )
        raise InvalidConfig(adapter, where, " or ".join(Packing), repr(said)[:200], advice)
    return Packing(said)
