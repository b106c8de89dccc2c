"""What is known of the packing of a stacked parameter: the evidence, and the decision that it led to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tasks.lora.layouts import Packing


class Source(StrEnum):
    """Whose statement a piece of evidence is, strongest first.

    Any of them but PEFT_VERSION can decide a packing.
    """

    FORCED = "forced"
    MARKER = "marker"
    TRAINING = "training"
    POLICY = "policy"
    FINGERPRINT = "fingerprint"
    TENSORS = "tensors"
    SCORES = "scores"
    PEFT_VERSION = "peft_version"
    PROVISIONAL = "provisional"


class Strength(StrEnum):
    """How much a piece of evidence weighs.

    forced: the operator's word on this adapter. explicit: somebody wrote this packing down for this adapter.
    derived: it follows from the program and version that trained it. default: likewise, but a setting of that
    program could have changed it. rule: the operator's rule for adapters that say nothing themselves.
    circumstantial: it follows from traces that the program left. measured: computed from the numbers
    themselves. prior: what most of the world writes. none: it was looked at, and tells nothing.
    """

    FORCED = "forced"
    EXPLICIT = "explicit"
    DERIVED = "derived"
    DEFAULT = "default"
    RULE = "rule"
    CIRCUMSTANTIAL = "circumstantial"
    MEASURED = "measured"
    PRIOR = "prior"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PolicyStatement:
    """An operator's rule for the adapters of a bucket or a base that say nothing themselves.

    layout: one packing's name for every parameter. layouts: (parameter, name), which go before it.
    where: the document it stands in, for messages.
    """

    layout: str | None
    layouts: tuple[tuple[str, str], ...]
    where: str


@dataclass(frozen=True, slots=True)
class ScoresStatement:
    """What scoring an adapter under both readings showed. says: (parameter, the packing that won)."""

    says: tuple[tuple[str, Packing], ...]
    detail: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """One statement about one parameter.

    says: the packing; None where it names none, because it abstains or because layers differ. detail: where
    it stands, or what was measured.
    """

    source: Source
    says: Packing | None
    strength: Strength
    detail: str


@dataclass(frozen=True, slots=True)
class PackingDecision:
    """The packing of one stacked parameter, what settled it, and every piece of evidence, strongest first.

    value: None where layers differ; by_layer then has (layer, packing) of each. undecided: nothing told;
    `value` is what is converted meanwhile, and scores under both readings have to decide. told: of each layer whose
    tensor was read and can tell, the packing that it names on its own, None where it names none.
    """

    parameter: str
    value: Packing | None
    decided_by: Source
    evidence: tuple[Evidence, ...]
    by_layer: tuple[tuple[int, Packing], ...] = ()
    undecided: bool = False
    told: tuple[tuple[int, Packing | None], ...] = ()

    def at(self, layer: int) -> Packing:
        """Return the packing of one layer. Raises KeyError where layers differ and this is none of them."""
        return self.value if self.value is not None else dict(self.by_layer)[layer]

    def layers_of(self, packing: Packing) -> tuple[int, ...]:
        """Return the layers of a packing where layers differ, else nothing."""
        return tuple(layer for layer, own in self.by_layer if own is packing)

    @property
    def overruled(self) -> tuple[Evidence, ...]:
        """Evidence, priors apart, that names a packing which some layer does not have."""
        values = {self.value} if self.value is not None else {packing for _, packing in self.by_layer}
        return tuple(
            item
            for item in self.evidence
            if item.says is not None and item.strength is not Strength.PRIOR and values != {item.says}
        )
