"""A verdict as the ledger and `--json` write it; Prefect is not imported for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Any

from storage.documents import format_time
from tasks.bpb.measure import BASE, BASE_AGAIN, CONTROL, OWN, WRONG_PREFIX
from tasks.bpb.verdict import METHOD, Verdict
from tasks.bpb.verdict_sets import SetVerdict, SubjectBpb


def verdict_record(verdict: Verdict, output_digest: str, measured_at: datetime) -> dict[str, Any]:
    """A verdict as the ledger writes it; figures in bits per byte, over all units and for each held-out set."""
    return {
        "code": verdict.code.value if verdict.code else None,
        "codes": [code.value for code in verdict.codes],
        "reason": verdict.reason,
        "output_digest": output_digest,
        **_scores(verdict.bpb),
        "margin": verdict.margin,
        "interval": list(verdict.interval) if verdict.interval else None,
        "differences": {
            one.label: {"mean": one.mean, "lower": one.lower, "upper": one.upper, "ceiling": one.ceiling}
            for one in verdict.differences
        },
        "noise": verdict.noise,
        "sets": {one.name: _set_record(one) for one in verdict.sets},
        "reference": {
            one.name: {
                "own": one.reference_own,
                "base": one.reference_base,
                "own_here": one.own,
                "base_here": one.base,
            }
            for one in verdict.agreements
        },
        "units": verdict.units,
        "bytes": verdict.byte_count,
        "thresholds": asdict(verdict.thresholds),
        "comparisons": verdict.comparisons,
        "method": METHOD,
        "measured_at": format_time(measured_at),
        "notes": list(verdict.notes),
    }


def _set_record(one: SetVerdict) -> dict[str, Any]:
    figures = one.figures
    return {
        "outcome": one.ruling.outcome.value,
        "code": one.ruling.code.value if one.ruling.code else None,
        "codes": [code.value for code in one.ruling.codes],
        "reason": one.ruling.reason,
        **_scores(figures.bpb),
        "margin": figures.margin,
        "interval": list(figures.interval) if figures.interval else None,
        "noise": figures.noise,
        "units": figures.units,
        "bytes": figures.byte_count,
    }


def _scores(subjects: Iterable[SubjectBpb]) -> dict[str, Any]:
    bpb = {one.label: one.bpb for one in subjects}
    wrong = {
        label.removeprefix(WRONG_PREFIX): value
        for label, value in bpb.items()
        if label.startswith(WRONG_PREFIX)
    }
    return {
        "own": bpb.get(OWN),
        "base": bpb.get(BASE),
        "base_again": bpb.get(BASE_AGAIN),
        "control": bpb.get(CONTROL),
        "wrong": wrong,
    }
