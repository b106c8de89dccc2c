"""Whether a conversion has the deltas of its source, by random probes: no delta is ever made.

For each pair, k random inputs X (in, k) and k random weightings of the outputs W (k, out) give the probed delta
scaling * (W·B)(A·X), a matrix of k by k numbers, from the source and from the output. What is true of deltas shows in
it with a probability that is known (probe_bound.py), at the cost of reading both files once.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from tasks.lora.config import read_adapter_config
from tasks.lora.delta_errors import ErrorTally, ProjectionErrors, describe_part
from tasks.lora.factors import list_parts
from tasks.lora.family import TensorClass
from tasks.lora.files import AdapterFiles
from tasks.lora.parallel import count_threads, map_parts
from tasks.lora.probe_bound import bound_miss
from tasks.lora.probe_part import THRESHOLD, PartFindings, PartProber
from tasks.lora.probe_products import PROBES, Probes
from tasks.lora.rearrange import one_thread
from tasks.lora.served_factors import ServedFactors
from tasks.lora.served_rounding import find_rounding
from tasks.lora.source_factors import SourceFactors
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat
from tasks.lora.tensors import open_tensors
from tasks.lora.write import Progress

PROBED_DAMAGE = 1e-3
"""The damage of one expert's delta, relative to it in the Frobenius norm, that the stated probability is about."""


@dataclass(frozen=True, slots=True)
class ProbeFindings:
    """What the probes found.

    pairs: those compared: of experts, and of every module that the engine has. differing: (where, relative error),
    the worst 64. errors: by projection. nonfinite, nonzero: output tensors with NaN or infinity, and with numbers where
    the source has none. unshared: parameters whose projections do not share A. left_out: parts that could not be
    compared, as tensors are missing or have other shapes. trained: class to layer to (pairs that moved, pairs).
    exchanged: layers, or single experts, whose gate and up match each other's source. probes: k. miss_probability: an
    upper bound for a damage of PROBED_DAMAGE of one pair.
    """

    pairs: int
    differing: tuple[tuple[str, float], ...]
    errors: tuple[ProjectionErrors, ...]
    nonfinite: tuple[str, ...]
    unshared: tuple[str, ...]
    nonzero: tuple[str, ...]
    left_out: tuple[str, ...]
    trained: Mapping[TensorClass, Mapping[int, tuple[int, int]]]
    exchanged: tuple[str, ...]
    probes: int
    seed: int
    miss_probability: float


def probe_deltas(
    source: AdapterFiles,
    converted: AdapterFiles,
    layout: AdapterLayout,
    format: TargetFormat,
    *,
    seed: int | None = None,
    progress: Progress | None = None,
) -> ProbeFindings:
    """Return what random probes find when the output's deltas are held against the source's.

    seed: of the probes; None takes a fresh one, so that nobody can make a file that pleases it. progress: told
    (parts done, parts). Raises CorruptFile if a file shrank, and like read_adapter_config for the output's config.
    """
    seed = secrets.randbits(63) if seed is None else seed
    config = read_adapter_config(converted.directory, label=layout.label)
    parts = list(list_parts(layout))
    with open_tensors(source) as old, open_tensors(converted) as new, one_thread():
        rounding = find_rounding(layout, format)
        prober = PartProber(
            SourceFactors(old, layout, rounding),
            ServedFactors(new, converted, config, layout, format),
            Probes(seed, parts),
            block_diagonal=layout.block_diagonal,
            rounded=None if rounding is None else (rounding, SourceFactors(old, layout)),
        )
        found: list[PartFindings] = []
        for one in map_parts(prober.probe, parts, count_threads(layout)):
            found.append(one)
            if progress is not None:
                progress(len(found), len(parts))
    tally = ErrorTally()
    trained: dict[TensorClass, dict[int, tuple[int, int]]] = {}
    for one in found:
        for errors in one.errors:
            tally.add(one.part, errors)
        if one.moved[1]:
            layers = trained.setdefault(one.part.kind, {})
            moved, pairs = layers.get(one.part.layer, (0, 0))
            layers[one.part.layer] = (moved + one.moved[0], pairs + one.moved[1])
    return ProbeFindings(
        pairs=tally.pairs,
        differing=tally.list_differing(),
        errors=tally.list_errors(),
        nonfinite=tuple(dict.fromkeys(name for one in found for name in one.nonfinite)),
        unshared=tuple(describe_part(one.part) for one in found if one.apart),
        nonzero=tuple(dict.fromkeys(name for one in found for name in one.nonzero)),
        left_out=tuple(describe_part(one.part) for one in found if one.left_out),
        trained=trained,
        exchanged=tuple(name for one in found for name in one.exchanged),
        probes=PROBES,
        seed=seed,
        miss_probability=bound_miss(PROBES, damage=PROBED_DAMAGE, threshold=THRESHOLD),
    )
