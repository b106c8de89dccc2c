"""What an engine must show before its scores are trusted: that it applies each adapter, and to its own rows alone.

Asked over the same door as all scores. What an adapter or the base answers when it is asked alone is the reference;
then the same prompts are asked in mixed company. No answer may move by more than the engine's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations

from storage.qualifications import EngineCheck
from tasks.gate_adapters import MOST_ADAPTERS, GateAdapters, NotLoaded, Resident
from tasks.gate_parts import Answers, GateEngine, GateSetting, Make, Say, find_gap, rounding_of, say_nats
from tasks.lora.family import TensorClass

_HELD_TOKENS = 32
_HELD_TRIES = 3


def run_gates(engine: GateEngine, setting: GateSetting, make: Make, say: Say) -> tuple[EngineCheck, ...]:
    """Every check of an engine, in order; after one that leaves nothing to go on with, the rest are not made.

    Whatever happens, what was loaded here is unloaded. Takes seconds, for a large base as for a small one: the
    prompts are a few dozen tokens.

    Raises:
        EngineUnavailable, EngineProtocolError: it does not answer, or not what it was asked for.
    """
    adapters = GateAdapters(engine, setting, make, say)
    with adapters.tidied():
        return tuple(_Gates(adapters, setting, say).run())


@dataclass(slots=True)
class _Together:
    """What came of asking several at once: the largest distance from their answers alone, adapters' and base's.

    seen: rounds in which every model was answered while all were still generating.
    """

    adapters: float = 0.0
    base: float = 0.0
    seen: int = 0


@dataclass(frozen=True, slots=True)
class _Gates:
    adapters: GateAdapters
    setting: GateSetting
    say: Say

    def run(self) -> Iterator[EngineCheck]:
        self.adapters.forget_leftovers()
        self.say("asking the base alone")
        base = self.adapters.ask_alone(self.setting.model)
        try:
            singles = self.adapters.make_singles(base)
            residents = [*self.adapters.make_mixtures(singles), *singles]
        except NotLoaded as refused:
            yield EngineCheck(name="loads", passed=False, found=str(refused.error), figures=self._counts())
            return
        yield EngineCheck(name="loads", passed=True, found=self._describe_loads(), figures=self._counts())
        yield self._check_repeatable()
        yield from (self._check_applied(base, single) for single in singles)
        yield self._check_told_apart(base, residents)
        pair, full = residents[:2], residents[: self.setting.slots]
        yield self._check_together("two_adapters", "two adapters and the base", base, pair)
        yield self._check_together(
            "slots_full", f"{len(full)} adapters on {self.setting.slots} slots and the base", base, full
        )
        yield self._check_evicted(base, residents)
        yield self._check_untouched(base)

    def _ask_together(self, models: Mapping[str, Answers], order: Sequence[str], held: int) -> _Together:
        """Ask all in this order, each generating so many tokens; meanwhile ask each once more, one after another."""
        found = _Together()

        def take(model: str, answers: Answers) -> None:
            moved = find_gap(answers, models[model])
            if model == self.setting.model:
                found.base = max(found.base, moved)
            else:
                found.adapters = max(found.adapters, moved)

        with ThreadPoolExecutor(len(order)) as pool:
            busy = {model: pool.submit(self.adapters.ask, model, held) for model in order}
            for model in order:
                take(model, self.adapters.ask(model))
            found.seen += not any(one.done() for one in busy.values())
            for model, one in busy.items():
                take(model, one.result())
        return found

    def _check_together(
        self, name: str, whom: str, base: Answers, residents: Sequence[Resident]
    ) -> EngineCheck:
        """In both orders. More adapters than slots cannot be in one batch; then only the answers count."""
        models = {self.setting.model: base} | {one.name: one.alone for one in residents}
        fit = len(residents) <= self.setting.slots
        worst, orders = _Together(), (list(models), list(reversed(models)))
        for order in orders:
            held, room = _HELD_TOKENS, self.setting.length - max(map(len, self.adapters.prompts)) - 1
            for _ in range(_HELD_TRIES):
                found = self._ask_together(models, order, max(1, min(held, room)))
                worst.adapters = max(worst.adapters, found.adapters)
                worst.base = max(worst.base, found.base)
                worst.seen += found.seen
                held *= 4
                if found.seen or not fit:
                    break
        self.say(f"{name}: answers moved by up to {max(worst.adapters, worst.base):.3g} nats")
        said = f"{whom}, asked at once in both orders"
        if fit and worst.seen < len(orders):
            return EngineCheck(
                name=name,
                passed=False,
                found=f"{said}: the engine answered one after another, so that nothing of a mixed batch was seen",
                figures=self._figures(adapters=worst.adapters, base=worst.base),
            )
        return self._compare(name, said, adapters=worst.adapters, base=worst.base)

    def _check_evicted(self, base: Answers, residents: Sequence[Resident]) -> EngineCheck:
        """All adapters at once, more than the slots hold, and then each alone again."""
        models = {self.setting.model: base} | {one.name: one.alone for one in residents}
        found = self._ask_together(models, list(models), 1)
        for one in residents:
            found.adapters = max(found.adapters, find_gap(self.adapters.ask(one.name), one.alone))
        found.base = max(found.base, find_gap(self.adapters.ask(self.setting.model), base))
        self.say(f"evicted: answers moved by up to {max(found.adapters, found.base):.3g} nats")
        said = f"{len(residents)} adapters on {self.setting.slots} slots, asked at once and then one by one"
        if len(residents) <= self.setting.slots:
            said += f"; none had to give way, as no more than {MOST_ADAPTERS} are loaded here"
        return self._compare("evicted", said, adapters=found.adapters, base=found.base)

    def _check_untouched(self, base: Answers) -> EngineCheck:
        self.adapters.unload_all()
        moved = find_gap(self.adapters.ask(self.setting.model), base)
        return self._compare(
            "base_untouched", "the base after all of this, against the base at first", base=moved
        )

    def _compare(self, name: str, said: str, **moved: float) -> EngineCheck:
        worst = max(moved.values())
        return EngineCheck(
            name=name,
            passed=worst <= self.adapters.tolerance,
            found=f"{said}: {say_nats(worst)} off at most; {self.adapters.tolerance:.2g} is allowed",
            figures=self._figures(**moved, tolerance=self.adapters.tolerance),
        )

    def _check_repeatable(self) -> EngineCheck:
        most = rounding_of(self.setting.dtype).most
        return EngineCheck(
            name="repeatable",
            passed=self.adapters.noise <= most,
            found=f"the same prompts asked together and one by one: {say_nats(self.adapters.noise)} off at most; up to "
            f"{most:.2g} is rounding in {self.setting.dtype}",
            figures=self._figures(noise=self.adapters.noise, most=most, tolerance=self.adapters.tolerance),
        )

    def _check_applied(self, base: Answers, single: Resident) -> EngineCheck:
        effect = find_gap(single.alone, base)
        [(kind, strength)] = single.recipe.strengths.items()
        stacked = kind is TensorClass.ROUTED_EXPERTS and len(self.setting.classes) > 1
        return EngineCheck(
            name=f"applied_{kind}" + (f"_{single.recipe.format.replace('-', '_')}" if stacked else ""),
            passed=self.adapters.plain <= effect < math.inf,
            found=f"an adapter on {kind} alone ({single.recipe.format}, strength {strength:g}) changes the base's "
            f"answers by {say_nats(effect)} at most; at least {self.adapters.plain:.2g} is plain",
            figures=self._figures(effect=effect, plain=self.adapters.plain, strength=strength),
        )

    def _check_told_apart(self, base: Answers, residents: Sequence[Resident]) -> EngineCheck:
        """Without it the comparisons below would prove nothing."""
        answers = [base, *(one.alone for one in residents)]
        nearest = min(find_gap(one, other) for one, other in combinations(answers, 2))
        return EngineCheck(
            name="told_apart",
            passed=self.adapters.plain <= nearest < math.inf,
            found=f"of {len(answers)} models any two differ by {say_nats(nearest)} or more; at least "
            f"{self.adapters.plain:.2g} is plain",
            figures=self._figures(nearest=nearest, plain=self.adapters.plain),
        )

    def _counts(self) -> dict[str, float]:
        return {"adapters": float(len(self.adapters.loaded)), "slots": float(self.setting.slots)}

    def _describe_loads(self) -> str:
        said = f"{len(self.adapters.loaded)} adapters load"
        if self.setting.slots > MOST_ADAPTERS - 2:
            said += f"; of {self.setting.slots} slots no more than {MOST_ADAPTERS} are filled here"
        for format, classes in self.setting.classes.items():
            said += f"; {format} on {', '.join(classes)}"
        return said

    @staticmethod
    def _figures(**values: float) -> dict[str, float]:
        """JSON has no word for what is not finite; `found` says it."""
        return {name: value for name, value in values.items() if math.isfinite(value)}
