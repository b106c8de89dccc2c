"""Which packing a parameter was trained under, from every statement there is.

What a statement proves is the *reading*, never the execution; the tensors and the scores are asked elsewhere.
Strongest first: the operator, the marker in the config, the upload's training statement, a fingerprint of the
program that wrote the files. Without any of them rank_major is assumed, and called provisional.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tasks.lora.config import AdapterConfig, AutoMapping
from tasks.lora.errors import InvalidConfig, LayoutConflict, PackingUndecided
from tasks.lora.families import Family
from tasks.lora.files import CONFIG_NAME
from tasks.lora.layouts import Packing
from tasks.lora.trainers import TrainingStatement, find_fingerprint, find_rule

MIXED = "mixed"
_TRAINING_NAME = "training.json"
_NAMES = " or ".join(Packing)


class DecidedBy(StrEnum):
    """The kind of evidence that settled a packing."""

    FORCED = "forced"
    MARKER = "marker"
    TRAINING = "training"
    FINGERPRINT = "fingerprint"
    PROVISIONAL = "provisional"


class Strength(StrEnum):
    """How much a piece of evidence weighs.

    forced: the operator's word. explicit: somebody wrote this packing down for this adapter. derived: it
    follows from the program and version that trained it. default: likewise, but a setting of that program
    could have changed it. circumstantial: it follows from traces that the program left. prior: what most of
    the world writes.
    """

    FORCED = "forced"
    EXPLICIT = "explicit"
    DERIVED = "derived"
    DEFAULT = "default"
    CIRCUMSTANTIAL = "circumstantial"
    PRIOR = "prior"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One statement about one parameter. source: whose. says: the packing. detail: where it stands."""

    source: DecidedBy
    says: Packing
    strength: Strength
    detail: str


@dataclass(frozen=True, slots=True)
class PackingDecision:
    """The packing of one stacked parameter, what settled it, and every piece of evidence, strongest first."""

    parameter: str
    value: Packing
    decided_by: DecidedBy
    evidence: tuple[Evidence, ...]

    @property
    def overruled(self) -> tuple[Evidence, ...]:
        """Evidence that says the other packing."""
        return tuple(item for item in self.evidence if item.says is not self.value)


def decide_packing(
    parameter: str,
    *,
    family: Family,
    config: AdapterConfig,
    forced: Packing | None,
    training: TrainingStatement | None,
    adapter: str,
) -> PackingDecision:
    """Return the packing of one stacked parameter.

    The strongest statement wins, and all are listed. Unless the operator forces one, statements that cannot
    both be true stop the adapter: LayoutConflict where two places of the config, or the config and
    training.json, name different packings, or where the marker contradicts a trainer that could not have
    written it; PackingUndecided where a marker says "mixed" of this parameter; InvalidConfig for a packing
    with an unknown name.
    """
    evidence: list[Evidence] = []
    if forced is not None:
        evidence.append(Evidence(DecidedBy.FORCED, forced, Strength.FORCED, "given by the operator"))
    markers = _list_marker_statements(parameter, config)
    if forced is None:
        _refuse_mixed(markers, adapter)
    evidence += [
        Evidence(
            DecidedBy.MARKER,
            _parse_packing(said, f"{CONFIG_NAME}: {where}", adapter),
            Strength.EXPLICIT,
            where,
        )
        for where, said in markers
        if said != MIXED
    ]
    if training is not None:
        evidence += _read_training(parameter, training, family, adapter)
    if forced is None:
        _refuse_contradictions(parameter, evidence, adapter)
    if not markers:
        fingerprint = find_fingerprint(config, family)
        if fingerprint is not None:
            says, detail = fingerprint
            evidence.append(Evidence(DecidedBy.FINGERPRINT, says, Strength.CIRCUMSTANTIAL, detail))
    if not evidence:
        detail = "no statement; most programs write it, and the control guards it"
        evidence.append(Evidence(DecidedBy.PROVISIONAL, Packing.RANK_MAJOR, Strength.PRIOR, detail))
    return PackingDecision(parameter, evidence[0].says, evidence[0].source, tuple(evidence))


def _list_marker_statements(parameter: str, config: AdapterConfig) -> list[tuple[str, str]]:
    """Return (field, what it says), the parameter's own first, as unsloth_zoo >= 2026.9.6 nests them."""
    own, of_all = f"unsloth_fused_expert_lora.parameters.{parameter}.lora_B_layout", "lora_B_layout"
    places: list[tuple[str, AdapterConfig | AutoMapping]] = [("", config)]
    if config.auto_mapping is not None:
        places.append(("auto_mapping.", config.auto_mapping))
    found: list[tuple[str, str | None]] = []
    for place, holder in places:
        marker = holder.unsloth_fused_expert_lora
        if marker is not None:
            detail = marker.parameters.get(parameter)
            found.append((place + own, detail.lora_B_layout if detail is not None else None))
            found.append((f"{place}unsloth_fused_expert_lora.{of_all}", marker.lora_B_layout))
        found.append((place + of_all, holder.lora_B_layout))
    return [(where, said) for where, said in found if said is not None]


def _refuse_mixed(markers: list[tuple[str, str]], adapter: str) -> None:
    """A summary may say "mixed" if the parameter's own field says which; that field itself may not."""
    own = [(where, said) for where, said in markers if ".parameters." in where]
    mixed = [where for where, said in own or markers if said == MIXED]
    if mixed:
        raise PackingUndecided(adapter, f"{CONFIG_NAME}: {mixed[0]}", _NAMES, repr(MIXED))


def _read_training(
    parameter: str, training: TrainingStatement, family: Family, adapter: str
) -> Iterator[Evidence]:
    said = dict(training.layouts).get(parameter, training.layout)
    if said is not None:
        packing = _parse_packing(said, f"{_TRAINING_NAME}: lora_B_layout", adapter)
        yield Evidence(DecidedBy.TRAINING, packing, Strength.EXPLICIT, f"{_TRAINING_NAME}: lora_B_layout")
    rule = find_rule(training, family)
    if rule is not None:
        strength = Strength.DEFAULT if rule.can_be_changed else Strength.DERIVED
        detail = f"{_TRAINING_NAME}: {training.trainer_name} {training.trainer_version or ''}".rstrip()
        yield Evidence(DecidedBy.TRAINING, rule.packing, strength, f"{detail}: {rule.fact}")


def _refuse_contradictions(parameter: str, evidence: list[Evidence], adapter: str) -> None:
    binding = [item for item in evidence if item.strength in (Strength.EXPLICIT, Strength.DERIVED)]
    for item in binding:
        if item.says is not binding[0].says:
            raise LayoutConflict(
                adapter,
                f"the packing of {parameter}",
                f"statements that agree ({binding[0].detail} says {binding[0].says})",
                f"{item.detail} says {item.says}",
            )


def _parse_packing(said: str, where: str, adapter: str) -> Packing:
    if said not in tuple(Packing):
        raise InvalidConfig(adapter, where, _NAMES, repr(said)[:200])
    return Packing(said)
