"""The adapters that are loaded to measure an engine, and what they and its base answer when each is asked alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from tasks.bpb.engine_errors import EngineAtFault, EngineError, EngineRefused
from tasks.gate_parts import Answers, GateEngine, GateSetting, Make, Recipe, Say, find_gap, rounding_of
from tasks.lora.family import TensorClass
from tasks.lora.target import TargetFormat

MARK = "~qualify@"
"""How the engine's names of what is loaded here begin; no author's can."""

MOST_ADAPTERS = 18
"""So many adapters are loaded at most: enough to fill 16 slots and to evict some."""

_PROMPTS = 4
_SHORTEST, _LONGER_BY = 7, 6  # tokens
_STRENGTHS = (1.0, 8.0, 64.0)
_RANKS = (8, 3, 5)  # in turns: a slot that held a larger rank must keep nothing of it
_PLAIN = 0.05  # nats: what an adapter must change at least
_MARGIN = 4  # times the tolerance, where that is more
_HEADROOM = 2  # times what is plain: noise that is met later raises that


class NotLoaded(Exception):
    """The engine did not load an adapter."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(slots=True)
class Resident:
    """An adapter that is loaded, and what it answers alone."""

    name: str
    recipe: Recipe
    alone: Answers


@dataclass(slots=True)
class GateAdapters:
    """Loads adapters and asks for answers; `tidied` unloads them. noise: the most that an answer moved by itself."""

    engine: GateEngine
    setting: GateSetting
    make: Make
    say: Say
    noise: float = 0.0
    loaded: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    @contextmanager
    def tidied(self) -> Iterator[None]:
        """Unload at the end what was loaded; of two errors the first is raised."""
        try:
            yield
        except BaseException as cause:
            try:
                self.unload_all()
            except EngineError as second:
                cause.add_note(f"the diagnostic adapters could not be unloaded either: {second!r}")
            raise
        self.unload_all()

    @property
    def tolerance(self) -> float:
        """How far an answer may move, in nats."""
        return max(rounding_of(self.setting.dtype).least, _MARGIN * self.noise)

    @property
    def plain(self) -> float:
        """What an adapter must change at least, in nats."""
        return max(_PLAIN, _MARGIN * self.tolerance)

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of the lower half of the vocabulary, which holds no placeholders of pictures or sound."""
        longest = max(2, self.setting.length // 3)
        lengths = [min(longest, _SHORTEST + _LONGER_BY * row) for row in range(_PROMPTS)]
        ids = max(2, self.setting.vocab // 2)
        return [[(7 * i * i + 31 * row + 5 * i + 3) % ids for i in range(n)] for row, n in enumerate(lengths)]

    def make_singles(self, base: Answers) -> list[Resident]:
        """For each form and class one adapter on that class alone, as strong as it takes to be plain."""
        singles = []
        done: set[TensorClass] = set()
        for format, classes in self.setting.classes.items():
            for kind in classes:
                if kind in done and kind is not TensorClass.ROUTED_EXPERTS:
                    continue  # other modules look the same in both forms
                done.add(kind)
                for strength in _STRENGTHS:
                    single = self._load({kind: strength}, format)
                    effect = find_gap(single.alone, base)
                    if _HEADROOM * self.plain <= effect < math.inf or strength == _STRENGTHS[-1]:
                        break
                    self._unload(single.name)
                self.say(f"{kind} alone, {format}: changes the answers by up to {effect:.3g} nats")
                singles.append(single)
        return singles

    def make_mixtures(self, singles: Sequence[Resident]) -> list[Resident]:
        """Adapters on all classes, in all forms by turns: two at least, and enough to evict some."""
        formats = list(self.setting.classes)
        wanted = max(self.setting.slots + 2, self.setting.cached + 1)
        mixtures = []
        for number in range(max(2, min(wanted, MOST_ADAPTERS) - len(singles))):
            format = formats[number % len(formats)]
            strengths = {
                kind: strength
                for single in singles
                if single.recipe.format is format or TensorClass.ROUTED_EXPERTS not in single.recipe.strengths
                for kind, strength in single.recipe.strengths.items()
            }
            mixtures.append(self._load(strengths, format))
        self.say(f"{len(singles) + len(mixtures)} adapters loaded, {self.setting.slots} slots")
        return mixtures

    def _load(self, strengths: Mapping[TensorClass, float], format: TargetFormat) -> Resident:
        number = next(self.numbers)
        rank = min(self.setting.max_rank, _RANKS[number % len(_RANKS)])
        recipe = Recipe(number, strengths, format, rank)
        made = self.make(recipe)
        try:
            self.engine.load(made.name, made.path, is_3d=made.is_3d)
        except (EngineRefused, EngineAtFault) as error:
            raise NotLoaded(error) from error
        self.loaded.append(made.name)
        return Resident(made.name, recipe, self.ask_alone(made.name))

    def _unload(self, name: str) -> None:
        self.engine.unload(name)
        self.loaded.remove(name)

    def unload_all(self) -> None:
        """Unload what was loaded here."""
        for name in list(self.loaded):
            self._unload(name)

    def forget_leftovers(self) -> None:
        """Unload what a killed run left: its files are gone or will be."""
        for name in self.engine.served_models():
            if name.startswith(MARK):
                self.engine.unload(name)

    def ask_alone(self, model: str) -> Answers:
        """All prompts at once; asked again one by one, the answers move by the engine's own rounding only."""
        answers = self.ask(model)
        again = tuple(self.engine.logprobs(model, [prompt])[0] for prompt in self.prompts)
        moved = find_gap(answers, again)
        # An adapter that is too strong for the engine's dtype is seen by its effect, and made again.
        if math.isfinite(find_gap(answers, answers)):
            self.noise = max(self.noise, moved)
        return answers

    def ask(self, model: str, generate: int = 1) -> Answers:
        """All prompts at once."""
        return tuple(self.engine.logprobs(model, self.prompts, generate=generate))
