"""Scores are log-probabilities of the model itself: logits in their place are no measurement (vllm#42259)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from scripted_scorer import ScriptedScorer

from tasks.bpb.errors import MeasurementVoid
from tasks.bpb.heldout import Unit
from tasks.bpb.measure import Subject, measure, prepare_units

SUBJECTS = (Subject("base", "base", None, False), Subject("own", "own@1", "/own", False))
UNITS = tuple(Unit(f"u{number}", f"Text number {number} of an author.") for number in range(4))


class Logits(ScriptedScorer):
    """What `--logprobs-mode raw_logits` gives: each position's log-probability and what all its logits share.

    Source: vllm/v1/worker/gpu_model_runner.py, `_get_prompt_logprobs_dict`, vLLM 0.32.0.
    """

    def logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float | None, ...]]:
        answers = super().logprobs(model, prompts)
        return [
            (None, *(shift(place, value) for place, value in enumerate(values[1:]))) for values in answers
        ]


def shift(place: int, logprob: float | None) -> float:
    assert logprob is not None
    return logprob + 9.0 * math.sin(1.0 + place)


def test_logits_in_place_of_log_probabilities_are_the_engines_fault() -> None:
    models = {"base": 2.4, "own@1": 2.1}
    told = Logits(models).logprobs("base", [tuple(UNITS[0].text.encode())])[0][1:]
    assert 0 < sum(value is not None and value < 0 for value in told) < len(told), (
        "many would pass by themselves"
    )
    with pytest.raises(MeasurementVoid) as caught:
        engine = Logits(models)
        measure(engine, prepare_units(engine, UNITS), SUBJECTS, lambda label, done, total: None)
    assert "base" in str(caught.value) and "has the value " in str(caught.value)
