"""The readings of an adapter whose packing nothing tells, out of what its inspection recorded.

The undecided parameters are taken to share one packing, since one program wrote them all: two readings are scored,
never four. What is decided stays as it is in both.
"""

from __future__ import annotations

from typing import Any

from storage.ledger import Step
from tasks.lora.layouts import Packing
from tasks.lora.packing import ScoresStatement, Source


def undecided_parameters(inspected: Step) -> tuple[str, ...]:
    """The parameters whose packing neither a statement nor the tensors told, nor scores yet."""
    names: Any = inspected.result["undecided"]
    return tuple(names)


def provisional_packing(inspected: Step) -> Packing:
    """The packing under which the undecided parameters, of which there are some, are converted at first."""
    packing: Any = inspected.result["packing"]
    return Packing(packing[undecided_parameters(inspected)[0]]["value"])


def scores_statement(inspected: Step) -> ScoresStatement | None:
    """What scores decided, where this inspection rests on them; None where it does not."""
    packing: Any = inspected.result["packing"]
    decided = {name: one for name, one in packing.items() if one["decided_by"] == Source.SCORES.value}
    if not decided:
        return None
    details = (
        item["detail"]
        for one in decided.values()
        for item in one["evidence"]
        if item["source"] == Source.SCORES.value
    )
    return ScoresStatement(
        tuple((name, Packing(one["value"])) for name, one in decided.items()), next(details)
    )
