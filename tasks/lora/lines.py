"""Where each component of each expert stands in the stored tensors, for every form of source.

A line is what component j of expert e contributes: a vector over the inputs (factor A) or the outputs (factor B).
docs/layouts.md shows the encodings.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.lora.header import TensorEntry
from tasks.lora.layouts import Packing
from tasks.lora.names import Factor
from tasks.lora.sources import AdapterLayout, ExpertPair, SourceForm
from tasks.lora.views import View, whole


@dataclass(frozen=True, slots=True)
class Lines:
    """One factor of all experts of a pair, as it is stored.

    sources: tensors of one shape, taken as if they lay one after another. view: (experts, components, positions) over
    them.
    """

    sources: tuple[TensorEntry, ...]
    view: View


def find_lines(layout: AdapterLayout, pair: ExpertPair, factor: Factor) -> Lines:
    """Return where the lines of one factor of the delta are stored."""
    stored = layout.orientation.stored(factor)
    sources = pair.stored(stored)
    experts, rank, shape = layout.base.experts, pair.rank, sources[0].shape
    if layout.form is SourceForm.STACKED:
        if stored is Factor.A:
            return Lines(sources, whole(experts, rank, shape[1]))
        if layout.packing_of(pair.parameter, pair.layer) is Packing.RANK_MAJOR:
            return Lines(sources, whole(shape[0], rank, experts).permute(2, 1, 0))
        return Lines(sources, whole(shape[0], experts, rank).permute(1, 2, 0))
    # One (rank, in) or (out, rank) after another; a first axis of 1 holds what all experts share.
    each = whole(*shape[-2:])
    view = each if stored is Factor.A else each.permute(1, 0)
    step = 0 if shape[:-2] == (1,) else each.size
    return Lines(sources, View(0, (experts, *view.shape), (step, *view.strides)))


def find_projection_lines(layout: AdapterLayout, pair: ExpertPair, projection: str, factor: Factor) -> Lines:
    """Return where the lines of one projection of a pair are stored: its components, and of B its output rows."""
    lines = find_lines(layout, pair, factor)
    components = dict(layout.components_of(pair))[projection]
    view = lines.view.narrow(1, components.start, components.stop)
    if factor is Factor.B:
        count, place = len(pair.projections), pair.projections.index(projection)
        interleaved = layout.family.parameter_of(projection).interleaved
        view = view.share(2, place, count, interleaved=interleaved)
    return Lines(lines.sources, view)
