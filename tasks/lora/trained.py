"""What of an adapter was trained, once its packing is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.lora.errors import ExpertsUntrained
from tasks.lora.family import TensorClass
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.sources import AdapterLayout, SourceForm
from tasks.lora.survey import Flags, PairSurvey, Survey


@dataclass(frozen=True, slots=True)
class Trained:
    """class_fractions: the share of pairs, in each class, whose delta can differ from zero."""

    class_fractions: tuple[tuple[TensorClass, float], ...]
    warnings: tuple[str, ...]


def find_trained(survey: Survey, layout: AdapterLayout, *, weights_name: str) -> Trained:
    """Return what was trained: a projection of an expert is, if one of its components is nonzero in A and B.

    Raises ExpertsUntrained where no routed expert was.
    """
    projections: dict[str, list[bool]] = {}
    for item in survey.pairs:
        inner, outer = _split_pair(item, layout)
        for projection, share in zip(item.pair.projections, outer, strict=True):
            projections.setdefault(projection, []).extend((inner[0] & share).any(axis=1).tolist())
    routed = [expert for experts in projections.values() for expert in experts]
    if not any(routed):
        raise ExpertsUntrained(
            layout.label, weights_name, "routed experts that moved", f"all {len(routed)} deltas zero"
        )
    warnings = [
        f"no expert's {projection} was trained: all its deltas are zero"
        for projection, experts in projections.items()
        if not any(experts)
    ]
    classes = {TensorClass.ROUTED_EXPERTS: routed}
    for kind, moved in survey.modules:
        classes.setdefault(kind, []).append(moved)
    fractions = tuple((kind, sum(pairs) / len(pairs)) for kind, pairs in classes.items())
    warnings += [f"no {kind} factor was trained" for kind, share in fractions if share == 0]
    return Trained(fractions, tuple(warnings))


def is_block_diagonal(survey: Survey, layout: AdapterLayout) -> bool:
    """Return whether the stacked pairs of several projections hold each one's factors in components of its own.

    PEFT saves per-expert files again like that: the first half of the components is gate's, the second up's, the
    rest of B exactly zero. Source: PEFT 0.21.2 utils/transformers_weight_conversion.py.
    """
    if layout.form is not SourceForm.STACKED:
        return False
    found: list[Flags] = []
    for item in survey.pairs:
        shares = len(item.pair.projections)
        if shares == 1:
            continue
        if item.pair.rank % shares:
            return False
        _, outer = _split_pair(item, layout)
        blocks = outer.reshape(shares, layout.base.experts, shares, -1)
        found.append(np.logical_or.reduce(blocks, axis=(1, 3)))
    return bool(found) and np.array_equal(np.logical_or.reduce(found), np.eye(len(found[0]), dtype=bool))


def _split_pair(item: PairSurvey, layout: AdapterLayout) -> tuple[Flags, Flags]:
    """Return the delta's A and B as (shares, experts, components)."""
    experts = layout.base.experts
    a, b = (flags.reshape(len(flags), experts, -1) for flags in (item.a, item.b))
    if (
        layout.form is SourceForm.STACKED
        and layout.packing_of(item.pair.parameter, item.pair.layer) is Packing.RANK_MAJOR
    ):
        b = item.b.reshape(len(item.b), -1, experts).transpose(0, 2, 1)
    return (a, b) if layout.orientation is Orientation.STANDARD else (b, a)
