"""Bits per unit for the base, an adapter, its control and wrong adapters, in one run on one set of units.

The rules. A change that can move a score raises METHOD_VERSION.

1. A unit is tokenised whole, prompt and text each by itself, without special tokens.
2. Exactly one BOS token stands first iff the tokenizer puts one there. Without BOS and without prompt, the
   first token of the text is left out with its bytes, and with the tokens that complete its last character.
3. Prompts condition and are not scored.
4. Longer units are cut into windows over token ids, `max_model_len - 1` ids long, begun every `stride` ids;
   each token is scored once, in the first window that holds it.
5. bits of a unit = -sum of log2 p over its scored tokens, from the engine's log-probabilities (nats).
6. bytes of a unit = UTF-8 bytes of exactly the scored text.
7. A unit without text to score is left out before scoring. A value that is missing, not finite, at or below
   -9999 (what HTTP makes of minus infinity) or above 0 voids its unit; a unit void for one subject is void
   for all.
8. The order is base, own, control, wrong ones by label, base again; each adapter is loaded before its turn
   and unloaded after it. All subjects are sent the same prompts in the same calls.
9. At the end of each turn its first prompt is asked again, by itself, and with it what came back unusable. A prompt
   that is answered in two ways (usable and not, or further apart than asking.REPEAT_LIMIT) voids the run: the answers
   depend on the order of the requests. So does a unit that only one of base and base again could not score.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tasks.bpb.asking import Answer, Prompt, ask, ask_again
from tasks.bpb.engine_errors import EngineError
from tasks.bpb.errors import EngineUnsteady, HeldoutUnusable, MeasurementVoid, SubjectsInvalid
from tasks.bpb.heldout import Unit, check_unique
from tasks.bpb.protocol import (
    BosRule,
    Encoded,
    Scorer,
    Unscorable,
    Window,
    encode_unit,
    find_bos,
    plan_windows,
)

METHOD_VERSION = "1"

BASE = "base"
OWN = "own"
CONTROL = "control"
WRONG_PREFIX = "wrong:"
BASE_AGAIN = "base_again"
AHEAD = "ahead"
"""An adapter that is scored between base and own to show that the engine bears it; its scores are not kept."""

# Prompts handed to the engine at once: enough for several requests side by side, few enough to see progress.
_PROMPTS_PER_CALL = 256

# (subject's label, prompts done, prompts of this subject)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PreparedUnit:
    """One unit ready to score: token ids, the windows over them, the bytes of the scored text."""

    id: str
    ids: tuple[int, ...]
    windows: tuple[Window, ...]
    byte_count: int


@dataclass(frozen=True, slots=True)
class VoidedUnit:
    """A unit left out and why; `subject` is the label whose scores voided it, None before scoring."""

    id: str
    reason: str
    subject: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """All units of one run, with what their preparation depended on. `window` and `stride` are in tokens."""

    units: tuple[PreparedUnit, ...]
    voided: tuple[VoidedUnit, ...]
    window: int
    stride: int
    bos_rule: BosRule


@dataclass(frozen=True, slots=True)
class Subject:
    """What is scored: base, own, control or wrong:<author>; `path` is None for what is served already."""

    label: str
    model_name: str
    path: str | None
    is_3d: bool


@dataclass(frozen=True, slots=True)
class SubjectScores:
    """Bits for each prepared unit, in order, nan where the unit is void; `voided` says why."""

    bits: tuple[float, ...]
    voided: tuple[VoidedUnit, ...]


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """A scored unit and its bytes."""

    id: str
    byte_count: int


@dataclass(frozen=True, slots=True)
class SubjectBits:
    """Bits per unit of one subject, in the order of the measurement's units."""

    label: str
    bits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The units that every subject could score, and their bits. `tokens` counts those sent to the engine."""

    units: tuple[UnitBytes, ...]
    voided: tuple[VoidedUnit, ...]
    scores: tuple[SubjectBits, ...]
    tokens: int
    seconds: float


def prepare_units(scorer: Scorer, units: Sequence[Unit], *, stride: int | None = None) -> Prepared:
    """The units tokenised and cut into windows; `stride` is half the window unless given.

    Raises:
        HeldoutUnusable: no unit can be scored.
        DuplicateUnit: an id occurs twice.
        TokenizerUnsupported: the tokenizer puts more than a BOS before a text.
        WindowInvalid: the engine's max_model_len is too short for the stride.
    """
    check_unique(units)
    window = scorer.max_model_len() - 1
    stride = window // 2 if stride is None else stride
    bos = find_bos(scorer)
    prepared: list[PreparedUnit] = []
    voided: list[VoidedUnit] = []
    for unit in units:
        match encode_unit(scorer, unit, bos):
            case Unscorable(reason):
                voided.append(VoidedUnit(unit.id, reason))
            case Encoded(ids, scored_from, byte_count):
                windows = plan_windows(ids, scored_from, max_len=window, stride=stride)
                prepared.append(PreparedUnit(unit.id, ids, windows, byte_count))
    if not prepared:
        raise HeldoutUnusable(len(units), tuple(f"{unit.id}: {unit.reason}" for unit in voided))
    bos_rule = BosRule.FIRST_TOKEN_LEFT_OUT if bos is None else BosRule.ONE_BOS
    return Prepared(tuple(prepared), tuple(voided), window, stride, bos_rule)


def score_subject(
    scorer: Scorer, model_name: str, prepared: Prepared, *, label: str, progress: Progress
) -> SubjectScores:
    """Bits per unit of one model that is served now.

    Raises:
        MeasurementVoid: the engine answered with another number of prompts than it was sent.
        EngineUnsteady: it answered a prompt in two ways (rule 9).
    """
    places = [(index, window) for index, unit in enumerate(prepared.units) for window in unit.windows]
    prompts = [_prompt(prepared.units[index], window) for index, window in places]
    answers: list[Answer] = []
    for start in range(0, len(prompts), _PROMPTS_PER_CALL):
        batch = prompts[start : start + _PROMPTS_PER_CALL]
        answers += ask(scorer, model_name, batch)
        progress(label, start + len(batch), len(prompts))
    ask_again(scorer, model_name, prompts, answers)
    nats: list[list[float]] = [[] for _ in prepared.units]
    reasons: dict[int, str] = {}
    for (index, _), answer in zip(places, answers, strict=True):
        nats[index].append(answer.nats)
        if answer.problem is not None:
            reasons.setdefault(index, answer.problem)
    bits = (
        math.nan if index in reasons else math.fsum(values) / math.log(2) for index, values in enumerate(nats)
    )
    voided = (VoidedUnit(prepared.units[index].id, reasons[index], label) for index in sorted(reasons))
    return SubjectScores(tuple(bits), tuple(voided))


def score_aside(scorer: Scorer, prepared: Prepared, subject: Subject, progress: Progress) -> SubjectScores:
    """Bits per unit of an adapter that is no part of a measurement: whatever they are, they decide nothing.

    It is loaded before and unloaded after, like those that are.

    Raises:
        MeasurementVoid, EngineUnsteady: as score_subject.
    """
    with served(scorer, subject):
        return score_subject(scorer, subject.model_name, prepared, label=subject.label, progress=progress)


def measure(
    scorer: Scorer,
    prepared: Prepared,
    subjects: Sequence[Subject],
    progress: Progress,
    *,
    ahead: Subject | None = None,
) -> Measurement:
    """The bits of all subjects on the units that none of them voided; base is scored first and again last.

    `subjects` holds base, own, at most one control and any number of wrong:<author>, in any order;
    `base_again` is added here. `ahead`, labelled AHEAD, goes between base and own. Whatever interrupts the run, the
    adapter that was loaded is unloaded.

    Raises:
        SubjectsInvalid: base or own is missing, a label or a model name occurs twice, or a label is unknown.
        MeasurementVoid: the base has not one usable unit, or the engine lost count of the prompts.
        EngineUnsteady: the engine answers one prompt in two ways (rule 9).
    """
    started = time.perf_counter()
    ordered = _in_order(subjects)
    void: dict[str, VoidedUnit] = {}
    columns: list[SubjectBits] = []
    of_base: tuple[VoidedUnit, ...] = ()
    for subject in (ordered[0], *([ahead] if ahead else []), *ordered[1:]):
        with served(scorer, subject):
            scores = score_subject(
                scorer, subject.model_name, prepared, label=subject.label, progress=progress
            )
        if subject.label in (BASE, BASE_AGAIN) and len(scores.voided) == len(prepared.units):
            raise MeasurementVoid(subject.model_name, len(prepared.units), scores.voided[0].reason)
        if subject.label == AHEAD:
            continue
        if subject.label == BASE:
            of_base = scores.voided
        elif subject.label == BASE_AGAIN:
            _require_same_voids(subject.model_name, of_base, scores.voided)
        for unit in scores.voided:
            void.setdefault(unit.id, unit)
        columns.append(SubjectBits(subject.label, scores.bits))
    kept = [index for index, unit in enumerate(prepared.units) if unit.id not in void]
    windows = [window for unit in prepared.units for window in unit.windows]
    sent = sum(window.end - window.begin for window in (*windows, windows[0]))
    return Measurement(
        units=tuple(UnitBytes(prepared.units[index].id, prepared.units[index].byte_count) for index in kept),
        voided=prepared.voided + tuple(void[unit.id] for unit in prepared.units if unit.id in void),
        scores=tuple(
            SubjectBits(column.label, tuple(column.bits[index] for index in kept)) for column in columns
        ),
        tokens=sent * (len(ordered) + (ahead is not None)),
        seconds=time.perf_counter() - started,
    )


def _prompt(unit: PreparedUnit, window: Window) -> Prompt:
    """One window of a unit, with its share of the unit's bytes."""
    of_unit = sum(one.end - one.first_scored for one in unit.windows)
    byte_count = unit.byte_count * (window.end - window.first_scored) / of_unit
    return Prompt(unit.id, unit.ids[window.begin : window.end], window, byte_count)


def _require_same_voids(
    model_name: str, first: tuple[VoidedUnit, ...], again: tuple[VoidedUnit, ...]
) -> None:
    """Return if the base could not score the same units both times."""
    before, after = ({unit.id: unit.reason for unit in voided} for voided in (first, again))
    for unit in before.keys() ^ after.keys():
        raise EngineUnsteady(model_name, unit, before.get(unit, "a score"), after.get(unit, "a score"))


def _in_order(subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    labels = tuple(subject.label for subject in subjects)
    fixed = (BASE, OWN, CONTROL)
    if any(label not in fixed and not label.startswith(WRONG_PREFIX) for label in labels):
        raise SubjectsInvalid(labels, "a label is unknown")
    if BASE not in labels or OWN not in labels:
        raise SubjectsInvalid(labels, "base or own is missing")
    if len(set(labels)) < len(labels) or len({subject.model_name for subject in subjects}) < len(subjects):
        raise SubjectsInvalid(labels, "a label or a model name occurs twice")
    by_label = {subject.label: subject for subject in subjects}
    order = [label for label in fixed if label in by_label] + sorted(set(labels) - set(fixed))
    base = by_label[BASE]
    again = Subject(BASE_AGAIN, base.model_name, base.path, base.is_3d)
    return (*(by_label[label] for label in order), again)


@contextmanager
def served(scorer: Scorer, subject: Subject) -> Iterator[None]:
    """Keep the subject's adapter loaded for as long as the block runs; one without a path is served already."""
    if subject.path is None:
        yield
        return
    try:
        scorer.load(subject.model_name, subject.path, is_3d=subject.is_3d)
        yield
    except BaseException as cause:
        _unload_after(scorer, subject.model_name, cause)
        raise
    scorer.unload(subject.model_name)


def _unload_after(scorer: Scorer, model_name: str, cause: BaseException) -> None:
    try:
        if model_name in scorer.served_models():
            scorer.unload(model_name)
    except EngineError as second:
        # The caller raises the first error: it is the one to act on, this one mostly says again what it said.
        cause.add_note(f"{model_name} could not be unloaded either: {second!r}")
