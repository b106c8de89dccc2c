"""Proof that a conversion was executed right, from the files alone.

What most checks prove is the *execution*: the output holds exactly the source's numbers, each where the decided
layout says. Whether the layout was *read* right is another matter, settled by evidence from outside (packing.py, the
trainer's merged checkpoint) and by the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tasks.lora.check_headers import (
    check_config,
    check_coverage,
    check_layout,
    check_resolves,
    check_scaling,
    check_size,
)
from tasks.lora.check_numbers import (
    check_deltas,
    check_finite,
    check_gate_up,
    check_probes,
    check_range,
    check_round_trip,
    check_shared_a,
    check_trained,
    check_zeros,
)
from tasks.lora.checks import CheckReport, Depth, ProbeRun
from tasks.lora.config import read_adapter_config
from tasks.lora.deltas import compare_deltas
from tasks.lora.errors import DeviceMissing
from tasks.lora.expected import list_expected, list_served
from tasks.lora.files import AdapterFiles, open_adapter
from tasks.lora.probes import PROBED_DAMAGE, probe_deltas
from tasks.lora.rebuild import compare_adapters
from tasks.lora.resolve import ServedModules
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat
from tasks.lora.write import Progress


def check_conversion(
    source: AdapterFiles,
    converted: Path,
    layout: AdapterLayout,
    format: TargetFormat = TargetFormat.PER_EXPERT,
    served: Sequence[ServedModules] = (),
    *,
    depth: Depth = Depth.STANDARD,
    device: str = "cpu",
    seed: int | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Return the result of every check on the adapter in the folder `converted` that belongs to the depth.

    source, layout: what it was converted from. format: what it was converted to. served: what is known of the engine,
    the best witness first; a key has to lead somewhere for one of them. device: cpu or cuda, where a full check
    materialises deltas. seed: of the probes; a fresh one that nobody can foresee without it. progress: called with what
    is done and what there is in all, for each pass over the files anew. Memory: a few times the largest stacked factor.
    Raises like open_adapter and read_adapter_config where the converted folder cannot be read, and DeviceMissing.
    """
    device = device if depth is Depth.FULL else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceMissing(device)
    output = open_adapter(converted, label=layout.label)
    config = read_adapter_config(converted, label=layout.label)
    expected = list(list_expected(layout, format))
    modules = list(list_served(layout, format))
    probed = probe_deltas(source, output, layout, format, seed=seed, progress=progress)
    results = [
        check_coverage(output, layout, expected),
        check_size(output, expected),
        check_config(config, layout, format, modules),
        check_scaling(config, modules),
        check_layout(layout),
        check_resolves(output, layout, served),
    ]
    trained, errors, exchanged = probed.trained, probed.errors, probed.exchanged
    if depth is Depth.FULL:
        deltas = compare_deltas(source, output, layout, format, device=device, progress=progress)
        errors, exchanged = deltas.errors, deltas.exchanged
        results.append(check_deltas(deltas))
    else:
        results.append(check_probes(probed))
    results.append(check_gate_up(layout, exchanged))
    if depth is Depth.QUICK:
        results += [
            check_finite(probed.nonfinite, None),
            check_shared_a(probed.unshared),
            check_zeros(probed.nonzero, layout),
        ]
    else:
        findings = compare_adapters(source, output, layout, format, expected, progress)
        trained = findings.trained
        results += [
            check_finite(
                [name for name, _ in findings.nonfinite], sum(count for _, count in findings.nonfinite)
            ),
            check_range(findings, layout, format),
            check_shared_a(findings.unshared),
            check_zeros(findings.nonzero, layout),
            check_round_trip(source, findings),
        ]
    results.append(check_trained(trained))
    run = ProbeRun(probed.probes, probed.seed, PROBED_DAMAGE, probed.miss_probability)
    report = CheckReport(layout.label, (), depth, device, trained, errors, run)
    for result in results:
        report = report.adding(result)
    return report
