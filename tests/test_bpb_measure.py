"""Bits per unit through a scripted engine: by hand, against a plain loop, with all that can go wrong."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from scripted_scorer import BadValue, ScriptedScorer

from tasks.bpb.asking import REPEAT_LIMIT
from tasks.bpb.engine_errors import EngineRefused, EngineUnavailable
from tasks.bpb.errors import (
    DuplicateUnit,
    EngineUnsteady,
    HeldoutUnusable,
    MeasurementVoid,
    SubjectsInvalid,
    WindowInvalid,
)
from tasks.bpb.heldout import HeldoutUnits, Unit, UnitKind, merge_sets, unit_kind
from tasks.bpb.measure import AHEAD, Measurement, Prepared, Subject, measure, prepare_units
from tasks.bpb.protocol import BosRule

TEXTS = (
    "The weather turned at noon.\r\nNo one said so, but everyone looked up.",
    "Café, thé, 雨 and \N{GRINNING FACE}: four kinds of bytes.",
    "short",
    "A longer text " * 11,
)
UNITS = tuple(Unit(f"u{number}", text) for number, text in enumerate(TEXTS))
# More windows than go to the engine in one call, if the context is 5 tokens.
LONG = tuple(Unit(f"{unit.id}.{copy}", unit.text) for unit in UNITS for copy in range(4))
MODELS = {"base": 2.4, "own@1": 2.1, "own~control@2": 2.38, "bob@3": 2.5}
SUBJECTS = (
    Subject("base", "base", None, False),
    Subject("own", "own@1", "/served/own", False),
    Subject("control", "own~control@2", "/served/control", False),
    Subject("wrong:bob", "bob@3", "/served/bob", False),
)


class HandScorer(ScriptedScorer):
    """Three tokens of known text and known probability."""

    pieces = ("The", " caf", "é")

    def tokenize(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        ids = (10, 11, 12) if text == "The café" else (13,)
        return ((9,) if self.bos and add_special_tokens else ()) + ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[id - 10] for id in ids)

    def logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float | None, ...]]:
        probability = {10: 1 / 4, 11: 1 / 8, 12: 1 / 32}
        return [(None, *(math.log(probability[id]) for id in prompt[1:])) for prompt in prompts]


def no_progress(label: str, done: int, total: int) -> None:
    pass


def measured(scorer: ScriptedScorer, subjects: Sequence[Subject] = SUBJECTS) -> Measurement:
    return measure(scorer, prepare_units(scorer, UNITS), subjects, no_progress)


def bits(measurement: Measurement, label: str) -> tuple[float, ...]:
    return next(column.bits for column in measurement.scores if column.label == label)


# --- by hand ---


@pytest.mark.parametrize(
    ("bos", "expected_bits", "expected_bytes", "rule"),
    [
        # 2 + 3 + 5 bits over T h e space c a f é(2)
        (True, 10.0, 9, BosRule.ONE_BOS),
        # the first token conditions only: 3 + 5 bits over space c a f é(2)
        (False, 8.0, 6, BosRule.FIRST_TOKEN_LEFT_OUT),
    ],
)
def test_three_tokens_by_hand(bos: bool, expected_bits: float, expected_bytes: int, rule: BosRule) -> None:
    """vllm#15420, llama.cpp#1303: what becomes of the first token."""
    scorer = HandScorer({"base": 0.0, "own@1": 0.0}, bos=bos)
    prepared = prepare_units(scorer, [Unit("u", "The café")])
    result = measure(scorer, prepared, SUBJECTS[:2], no_progress)
    assert prepared.bos_rule is rule
    assert [(unit.id, unit.byte_count) for unit in result.units] == [("u", expected_bytes)]
    assert bits(result, "own") == pytest.approx([expected_bits], abs=1e-12)


@pytest.mark.parametrize(("text", "byte_count"), [("aé", 3), ("a\N{GRINNING FACE}", 5), ("a\r\n", 3)])
def test_bits_are_per_utf8_byte(text: str, byte_count: int) -> None:
    """lm-evaluation-harness#242: a missed ln 2; characters instead of bytes."""
    scorer = ScriptedScorer(MODELS, bos=True)
    prepared = prepare_units(scorer, [Unit("u", text)])
    assert prepared.units[0].byte_count == byte_count == len(text.encode())
    assert bits(measure(scorer, prepared, SUBJECTS, no_progress), "own") == pytest.approx([2.1 * byte_count])


# --- against a plain loop ---


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("max_len", "stride"), [(400, None), (64, None), (64, 62), (9, 1), (3, 1)])
def test_totals_do_not_depend_on_the_windows(bos: bool, max_len: int, stride: int | None) -> None:
    """The scripted model looks at no context, so any cut must give the sum over the bytes themselves."""
    scorer = ScriptedScorer(MODELS, max_len=max_len, bos=bos, spread=0.4, flavour=0.2)
    prepared = prepare_units(scorer, UNITS, stride=stride)
    result = measure(scorer, prepared, SUBJECTS, no_progress)
    for label, model in (("base", "base"), ("own", "own@1"), ("wrong:bob", "bob@3")):
        alone = ScriptedScorer(MODELS, max_len=1000, spread=0.4, flavour=0.2)
        if model != "base":
            alone.load(model, "", is_3d=False)
        scored = [text.encode() if bos else text[1:].encode() for text in TEXTS]
        whole = alone.logprobs(model, [(0, *text) for text in scored])
        expected = [-sum(value for value in values if value is not None) / math.log(2) for values in whole]
        assert bits(result, label) == pytest.approx(expected, rel=1e-12)
    windows = sum(len(unit.windows) for unit in prepared.units)
    assert (windows > len(TEXTS)) == (max_len < 400)
    *once, again = scorer.prompts["own@1"]
    assert len(once) == windows and again == once[0], "each window once, and the first one again"
    assert result.tokens == 5 * sum(len(prompt) for prompt in scorer.prompts["own@1"])
    assert bits(result, "own") != bits(result, "base")


def test_window_is_one_less_than_the_context_and_stride_half_of_it() -> None:
    prepared = prepare_units(ScriptedScorer(MODELS, max_len=64), UNITS)
    assert (prepared.window, prepared.stride) == (63, 31)


def test_prompts_are_sent_but_not_scored() -> None:
    scorer = ScriptedScorer(MODELS, bos=True)
    prepared = prepare_units(scorer, [Unit("u", "thé", "Say: ")])
    result = measure(scorer, prepared, SUBJECTS, no_progress)
    assert bits(result, "own") == pytest.approx([4 * 2.1])
    assert set(scorer.prompts["own@1"]) == {(256, *b"Say: ", *"thé".encode())}


# --- order, loading and unloading ---


def test_base_first_and_last_each_adapter_for_its_turn_only() -> None:
    scorer = ScriptedScorer(MODELS)
    labels = tuple(column.label for column in measured(scorer, SUBJECTS[::-1]).scores)
    assert labels == ("base", "own", "control", "wrong:bob", "base_again")
    base = [("logprobs", "base")] * 2
    expected = [*base]
    for name in ("own@1", "own~control@2", "bob@3"):
        expected += [("load", name), *[("logprobs", name)] * 2, ("unload", name)]
    assert scorer.calls == [*expected, *base]
    assert scorer.served_models() == ("base",)


def test_one_that_goes_ahead_is_scored_after_the_base_and_not_kept() -> None:
    scorer = ScriptedScorer(MODELS | {"cy@4": 2.2})
    ahead = Subject(AHEAD, "cy@4", "/served/cy", False)
    prepared = prepare_units(scorer, UNITS)
    result = measure(scorer, prepared, SUBJECTS, no_progress, ahead=ahead)
    loads = [name for call, name in scorer.calls if call == "load"]
    assert loads == ["cy@4", "own@1", "own~control@2", "bob@3"]
    assert scorer.calls[:2] == [("logprobs", "base")] * 2 and scorer.calls.count(("logprobs", "cy@4")) == 2
    without = measured(ScriptedScorer(MODELS))
    assert (result.units, result.scores) == (without.units, without.scores)
    assert result.tokens == without.tokens * 6 // 5


def test_order_of_subjects_and_a_second_run_change_nothing() -> None:
    first = measured(ScriptedScorer(MODELS, spread=0.3, flavour=0.1))
    second = measured(ScriptedScorer(MODELS, spread=0.3, flavour=0.1), SUBJECTS[::-1])
    assert dataclasses.replace(first, seconds=0.0) == dataclasses.replace(second, seconds=0.0)


def test_all_subjects_see_the_same_batches() -> None:
    """vllm#11778: log-probabilities depend on the batch, so own and wrong must not differ in it."""
    scorer = ScriptedScorer(MODELS, max_len=5)
    measure(scorer, prepare_units(scorer, LONG), SUBJECTS, no_progress)
    assert scorer.prompts["own@1"] == scorer.prompts["bob@3"]
    assert scorer.calls.count(("logprobs", "own@1")) == scorer.calls.count(("logprobs", "bob@3")) > 1


def test_progress_counts_the_prompts_of_each_subject() -> None:
    scorer = ScriptedScorer(MODELS, max_len=5)
    prepared = prepare_units(scorer, LONG)
    seen: list[tuple[str, int, int]] = []
    measure(scorer, prepared, SUBJECTS, lambda label, done, total: seen.append((label, done, total)))
    total = sum(len(unit.windows) for unit in prepared.units)
    assert 512 < total < 768
    assert [done for label, done, _ in seen if label == "own"] == [256, 512, total]
    assert {count for _, _, count in seen} == {total}


GONE = EngineUnavailable("http://engine", "POST /v1/completions", "no answer")
REFUSED = EngineRefused("bob@3", "/served/bob", 400, "rank 64 is too high")


@pytest.mark.parametrize("error", [GONE, KeyboardInterrupt()])
def test_whatever_interrupts_the_adapter_is_unloaded(error: BaseException) -> None:
    scorer = ScriptedScorer(MODELS, on_logprobs={"own@1": error})
    with pytest.raises(type(error)) as caught:
        measured(scorer)
    assert caught.value is error
    assert scorer.calls[-1] == ("unload", "own@1")
    assert scorer.served_models() == ("base",)


def test_a_refused_adapter_is_not_unloaded() -> None:
    scorer = ScriptedScorer(MODELS, on_load={"bob@3": REFUSED})
    with pytest.raises(EngineRefused, match="rank 64"):
        measured(scorer)
    assert ("unload", "bob@3") not in scorer.calls


def test_the_first_error_is_the_one_raised_when_the_engine_is_gone() -> None:
    class Dead(ScriptedScorer):
        def served_models(self) -> tuple[str, ...]:
            raise GONE

    scorer = Dead(MODELS, on_logprobs={"own@1": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt) as caught:
        measured(scorer)
    assert caught.value.__notes__ == [f"own@1 could not be unloaded either: {GONE!r}"]


# --- void units ---


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "token 5 has no value"),
        (math.nan, "token 5 has the value nan"),
        (-math.inf, "token 5 has the value -inf"),
        (-9999.0, "token 5 has the value -9999.0"),
        (0.5, "token 5 has the value 0.5"),
    ],
)
def test_a_bad_value_voids_the_unit_for_all(value: float | None, says: str) -> None:
    """vllm#10234, #3251: minus infinity, NaN and a missing value; never averaged."""
    scorer = ScriptedScorer(MODELS, max_len=400, bad=[BadValue("bob@3", 5, value, marker="weather")])
    result = measured(scorer)
    assert [unit.id for unit in result.units] == ["u1", "u2", "u3"]
    assert [(unit.id, unit.subject, unit.reason) for unit in result.voided] == [("u0", "wrong:bob", says)]
    assert all(len(column.bits) == 3 and all(map(math.isfinite, column.bits)) for column in result.scores)
    clean = measured(ScriptedScorer(MODELS, max_len=400))
    assert bits(result, "own") == bits(clean, "own")[1:]


# --- one answer to one prompt ---


class Moody(ScriptedScorer):
    """Adds to the answers of `model` in its calls of these numbers, from 0: nats, or a value that is none."""

    def __init__(self, model: str, calls: Sequence[int], value: float, **more: Any) -> None:
        super().__init__(MODELS, **more)
        self.model, self.moody, self.value, self.count = model, calls, value, 0

    def logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float | None, ...]]:
        answers = super().logprobs(model, prompts)
        if model != self.model:
            return answers
        self.count += 1
        if self.count - 1 not in self.moody:
            return answers
        return [(None, *(v and v + self.value for v in values[1:])) for values in answers]


@pytest.mark.parametrize("model", ["base", "own@1", "own~control@2", "bob@3"])
def test_an_answer_that_depends_on_the_order_of_requests_voids_the_run(model: str) -> None:
    """vllm#42019, #42245: the same text first and last; here one and a half times the limit."""
    nats = 1.5 * REPEAT_LIMIT * math.log(2)
    with pytest.raises(EngineUnsteady) as caught:
        measured(Moody(model, [0], -nats, max_len=400))
    assert (caught.value.model, caught.value.unit) == (model, "u0")
    message = str(caught.value)
    first, again = (float(found) for found in re.findall(r"([0-9.]+) bits", message))
    assert first - again == pytest.approx(1.5 * REPEAT_LIMIT * len(TEXTS[0][1:].encode()))
    assert "--no-enable-prefix-caching" in message


def test_rounding_that_depends_on_the_batch_does_not() -> None:
    nats = 0.9 * REPEAT_LIMIT * math.log(2)
    assert len(measured(Moody("own@1", [0], -nats)).units) == 4


@pytest.mark.parametrize("model", ["base", "own@1", "bob@3"])
@pytest.mark.parametrize("call", [0, 1])
def test_a_value_that_comes_and_goes_voids_the_run(model: str, call: int) -> None:
    """What is no number both times is a fact about the text (rule 7), what is none by chance is the engine's fault."""
    with pytest.raises(EngineUnsteady, match="has the value nan"):
        measured(Moody(model, [call], math.nan))


def test_a_unit_that_the_base_could_not_score_the_second_time_voids_the_run() -> None:
    with pytest.raises(EngineUnsteady, match=r"base: unit u2: .* first a score, and asked again token 1"):
        measured(Late("base", marker="short"))


class Late(ScriptedScorer):
    """Nothing but nan for texts with this marker once an adapter has been scored."""

    def __init__(self, model: str, marker: str) -> None:
        super().__init__(MODELS)
        self.late = BadValue(model, 1, math.nan, marker)

    def unload(self, name: str) -> None:
        super().unload(name)
        self.bad = (self.late,)


def test_few_of_many_unusable_answers_are_asked_for_again() -> None:
    scorer = ScriptedScorer(MODELS, bad=[BadValue("own@1", 1, math.nan)])
    measure(
        scorer, prepare_units(scorer, [Unit(f"u{n}", TEXTS[0]) for n in range(40)]), SUBJECTS, no_progress
    )
    assert len(scorer.prompts["own@1"]) == len(scorer.prompts["bob@3"]) + 15


def test_a_value_for_the_first_token_voids_the_unit() -> None:
    scorer = ScriptedScorer(MODELS, bad=[BadValue("own@1", 0, -1.0, marker="short")])
    assert [unit.reason for unit in measured(scorer).voided] == [
        "token 0 has the value -1.0, although nothing stands before it"
    ]


def test_a_short_list_voids_the_unit() -> None:
    class Short(ScriptedScorer):
        def logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float | None, ...]]:
            answers = super().logprobs(model, prompts)
            return [answer[:-1] if model == "own@1" and len(answer) == 5 else answer for answer in answers]

    assert [(unit.id, unit.reason) for unit in measured(Short(MODELS)).voided] == [
        ("u2", "4 values came back for 5 tokens")
    ]


def test_an_adapter_of_nothing_but_nan_leaves_no_unit() -> None:
    result = measured(ScriptedScorer(MODELS, bad=[BadValue("own@1", 1, math.nan)]))
    assert result.units == ()
    assert {unit.subject for unit in result.voided} == {"own"}


def test_a_base_of_nothing_but_nan_is_the_engines_fault() -> None:
    scorer = ScriptedScorer(MODELS, bad=[BadValue("base", 1, math.nan)])
    with pytest.raises(MeasurementVoid) as caught:
        measured(scorer)
    assert (caught.value.model, caught.value.units) == ("base", 4)
    message = str(caught.value)
    assert "base" in message
    assert "finite log-probability" in message
    assert "token 1 has the value nan" in message
    assert "restart the engine" in message


def test_a_lost_prompt_is_the_engines_fault() -> None:
    scorer = ScriptedScorer(MODELS, short=["own@1"])
    with pytest.raises(MeasurementVoid, match="prompts were sent and"):
        measured(scorer)
    assert scorer.served_models() == ("base",)


def test_texts_without_anything_to_score_are_counted() -> None:
    """lm-evaluation-harness, llm-loss-validator#82: zero bytes."""
    scorer = ScriptedScorer(MODELS, bos=True)
    prepared = prepare_units(scorer, [*UNITS, Unit("empty", "")])
    result = measure(scorer, prepared, SUBJECTS, no_progress)
    assert len(result.units) == 4
    assert [(unit.id, unit.subject) for unit in result.voided] == [("empty", None)]


def test_no_text_at_all_is_unusable() -> None:
    with pytest.raises(HeldoutUnusable) as caught:
        prepare_units(ScriptedScorer(MODELS), [Unit("one", ""), Unit("two", "x")])
    assert caught.value.units == 2
    message = str(caught.value)
    assert "one: has no text" in message
    assert "two: has 1 tokens" in message
    assert "Register a held-out set" in message


def test_a_context_too_short_for_any_window_is_refused() -> None:
    with pytest.raises(WindowInvalid):
        prepare_units(ScriptedScorer(MODELS, max_len=2), UNITS)


# --- subjects and units that do not fit ---


@pytest.mark.parametrize(
    ("subjects", "problem"),
    [
        (SUBJECTS[1:], "base or own is missing"),
        (SUBJECTS[:1], "base or own is missing"),
        ((*SUBJECTS, SUBJECTS[3]), "occurs twice"),
        ((*SUBJECTS, Subject("wrong:eve", "bob@3", "/x", False)), "occurs twice"),
        ((*SUBJECTS, Subject("base_again", "other", None, False)), "a label is unknown"),
    ],
)
def test_subjects_that_do_not_fit_are_refused(subjects: tuple[Subject, ...], problem: str) -> None:
    scorer = ScriptedScorer(MODELS)
    with pytest.raises(SubjectsInvalid, match=problem) as caught:
        measured(scorer, subjects)
    assert caught.value.labels == tuple(subject.label for subject in subjects)
    assert "expected base, own, at most one control" in str(caught.value)
    assert scorer.calls == []


def test_a_unit_id_that_occurs_twice_is_refused() -> None:
    with pytest.raises(DuplicateUnit, match=r"'u1' occurs twice.*Give the units different ids"):
        prepare_units(ScriptedScorer(MODELS), [*UNITS, Unit("u1", "another")])


def test_several_sets_keep_their_ids_apart() -> None:
    one = HeldoutUnits("ann/letters", (Unit("1", "a"), Unit("2", "b", "p")))
    two = HeldoutUnits("ann/notes", (Unit("1", "c"),))
    assert merge_sets([one]) == one.units
    assert [unit.id for unit in merge_sets([one, two])] == ["ann/letters:1", "ann/letters:2", "ann/notes:1"]
    assert merge_sets([one, two])[1] == Unit("ann/letters:2", "b", "p")
    with pytest.raises(DuplicateUnit):
        merge_sets([HeldoutUnits("ann/x", (Unit("1", "a"), Unit("1", "b")))])


def test_unit_kind_tells_texts_from_prompted_texts() -> None:
    plain, prompted = Unit("1", "a"), Unit("2", "b", "p")
    assert unit_kind([plain, Unit("3", "c", "")]) is UnitKind.TEXT
    assert unit_kind([prompted]) is UnitKind.PROMPT_AND_TEXT
    assert unit_kind([plain, prompted]) is UnitKind.MIXED


def test_prepared_is_plain_frozen_data() -> None:
    prepared = prepare_units(ScriptedScorer(MODELS), UNITS)
    assert isinstance(prepared, Prepared)
    assert hash(prepared) == hash(prepare_units(ScriptedScorer(MODELS), UNITS))
