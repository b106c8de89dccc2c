"""The gates of an engine, against a scripted engine that is sound or has one fault."""

from __future__ import annotations

import math
from typing import Any

import pytest
from gate_builders import ATTENTION, BOTH, EXPERTS, SLOTS, PlayedEngine, Workbench, setting

from storage.qualifications import EngineCheck
from tasks.bpb.engine_errors import EngineRefused, EngineUnavailable, EngineUnsupported
from tasks.engine_gates import _Gates, _Together, run_gates
from tasks.gate_adapters import MOST_ADAPTERS
from tasks.lora.target import TargetFormat

pytestmark = pytest.mark.real

COMPANY = ("two_adapters", "slots_full", "evicted")


def ask(engine: PlayedEngine, **changes: Any) -> dict[str, EngineCheck]:
    engine.bench = Workbench()
    found = run_gates(engine, setting(**changes), engine.bench, lambda line: None)
    assert len({check.name for check in found}) == len(found)
    assert engine.loaded == {}, "nothing stays loaded"
    return {check.name: check for check in found}


def failed(checks: dict[str, EngineCheck]) -> set[str]:
    return {name for name, check in checks.items() if not check.passed}


def test_a_sound_engine_passes_and_every_figure_is_told() -> None:
    engine = PlayedEngine()
    checks = ask(engine)
    assert list(checks) == [
        "loads",
        "repeatable",
        "applied_routed_experts",
        "applied_attention",
        "told_apart",
        *COMPANY,
        "base_untouched",
    ]
    assert failed(checks) == set()
    assert checks["loads"].figures == {"adapters": 5, "slots": SLOTS}
    for name in COMPANY:
        assert set(checks[name].figures) == {"adapters", "base", "tolerance"}
        assert checks[name].figures["tolerance"] == 1e-4
    assert checks["told_apart"].figures["nearest"] > 0.5, "a mix-up would be plain"


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        # What stock vLLM does on a CPU: slot -1 of a base row indexes the table from its end.
        ({"leaks": True}, {"slots_full"}),
        ({"mixes": True}, set(COMPANY)),
        ({"forgets": True}, {"evicted"}),
        ({"spoils": True}, {"base_untouched"}),
        ({"dead": (EXPERTS,)}, {"applied_routed_experts", "told_apart"}),
        ({"dead": (ATTENTION,)}, {"applied_attention", "told_apart"}),
        ({"serial": True}, {"two_adapters", "slots_full"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_fault_fails_the_gates_that_it_belongs_to(fault: dict[str, Any], names: set[str]) -> None:
    checks = ask(PlayedEngine(**fault), length=80)
    # Among more adapters than slots it is left to chance whether all slots are busy when the base's rows come.
    assert failed(checks) - ({"evicted"} if "leaks" in fault else set()) == names
    for name in names & {"slots_full", "evicted", "base_untouched"}:
        if not fault.get("serial"):
            assert checks[name].figures.get("base", 0) > 0.05 or checks[name].figures["adapters"] > 0.05
            assert "0.0001 is allowed" in checks[name].found
    if fault.get("serial"):
        assert "the engine answered one after another" in checks["slots_full"].found


@pytest.mark.parametrize("seen_in", [("first",), ("second",), ("first", "second")])
def test_a_mixed_batch_must_be_seen_in_both_orders(
    monkeypatch: pytest.MonkeyPatch, seen_in: tuple[str, ...]
) -> None:
    real = _Gates._ask_together

    def ask_together(gates: _Gates, models: Any, order: list[str], held: int) -> _Together:
        found = real(gates, models, order, 1)
        found.seen = ("first" if order[0] == "tiny" else "second") in seen_in
        return found

    monkeypatch.setattr(_Gates, "_ask_together", ask_together)
    checks = ask(PlayedEngine())
    assert failed(checks) == (set() if len(seen_in) == 2 else {"two_adapters", "slots_full"})


class _Silent(PlayedEngine):
    def _value(self, key: str | None, left: int, right: int) -> float:
        return math.nan


def test_answers_that_are_no_numbers_pass_no_comparison() -> None:
    names = {"applied_routed_experts", "applied_attention", "told_apart", *COMPANY, "base_untouched"}
    assert failed(ask(_Silent())) == names


def test_the_base_and_the_adapters_have_figures_of_their_own() -> None:
    leaks = ask(PlayedEngine(leaks=True))["slots_full"].figures
    assert leaks["base"] > 0.05 and leaks["adapters"] < 1e-4
    mixes = ask(PlayedEngine(mixes=True))["slots_full"].figures
    assert mixes["adapters"] > 0.05 and mixes["base"] < 1e-4


def test_an_adapter_that_is_not_plain_is_made_stronger() -> None:
    engine = PlayedEngine(weak=0.02)
    checks = ask(engine)
    assert failed(checks) == set()
    assert checks["applied_attention"].figures["strength"] == 8
    assert "strength 8" in checks["applied_attention"].found
    assert failed(ask(PlayedEngine(weak=1e-6))) >= {"applied_routed_experts", "applied_attention"}


def test_the_tolerance_follows_the_noise_and_noise_has_a_limit() -> None:
    checks = ask(PlayedEngine(noise=2e-4))
    assert failed(checks) == set()
    assert checks["repeatable"].figures["noise"] == pytest.approx(2e-4)
    assert checks["slots_full"].figures["tolerance"] == pytest.approx(8e-4)
    assert "repeatable" in failed(ask(PlayedEngine(noise=2e-3)))
    assert failed(ask(PlayedEngine(noise=0.02), dtype="bfloat16")) == set()
    assert ask(PlayedEngine(), dtype="bfloat16")["slots_full"].figures["tolerance"] == 0.05
    # A dtype that nobody has measured is not trusted more than the coarsest.
    assert ask(PlayedEngine(), dtype="float8")["slots_full"].figures["tolerance"] == 0.05


def test_noise_that_comes_late_does_not_make_what_was_plain_too_weak() -> None:
    """Adapters on all classes are made last, and may round more than those that were tried for their strength."""
    checks = ask(PlayedEngine(weak=0.28, late_noise=0.02), dtype="bfloat16")
    assert failed(checks) == set()
    assert checks["applied_attention"].figures["plain"] == pytest.approx(0.32)
    assert checks["applied_attention"].figures["strength"] == 8, "0.28 would have been plain at first"


def test_both_forms_are_asked_where_the_engine_takes_both() -> None:
    engine = PlayedEngine()
    checks = ask(engine, classes={TargetFormat.PER_EXPERT: BOTH, TargetFormat.STACKED: BOTH})
    assert {"applied_routed_experts_per_expert", "applied_routed_experts_stacked"} <= set(checks)
    assert failed(checks) == set()
    assert len(engine.stacked) == 2, "an adapter of the experts alone, and one of all"
    assert engine.bench is not None
    mixtures = [recipe for recipe in engine.bench.made.values() if len(recipe.strengths) == 2]
    assert {recipe.format for recipe in mixtures} == {TargetFormat.PER_EXPERT, TargetFormat.STACKED}
    assert len({recipe.rank for recipe in engine.bench.made.values()}) > 1


@pytest.mark.parametrize(
    ("slots", "cached", "made"), [(1, 1, 4), (1, 5, 6), (4, 4, 6), (64, 64, MOST_ADAPTERS)]
)
def test_slots_are_filled_and_overfilled_up_to_a_limit(slots: int, cached: int, made: int) -> None:
    checks = ask(PlayedEngine(slots=slots), slots=slots, cached=cached)
    assert failed(checks) == set()
    assert checks["loads"].figures == {"adapters": made, "slots": slots}
    assert ("no more than 18 are" in checks["loads"].found) == (slots == 64)
    assert ("none had to give way" in checks["evicted"].found) == (slots == 64)
    assert checks["slots_full"].found.startswith(f"{min(slots, made)} adapters on {slots} slots and the base")


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize(
    "error",
    [
        EngineRefused("~qualify@x", "/made/0", 400, "no such module"),
        EngineUnsupported("~qualify@x", "no LoRA", "this vLLM has none", "Use a newer one"),
    ],
)
def test_a_refused_adapter_fails_the_first_gate_and_the_rest_are_not_made(
    number: int, error: Exception
) -> None:
    checks = ask(PlayedEngine(refuses={number: error}))
    assert list(checks) == ["loads"]
    assert not checks["loads"].passed and str(error) in checks["loads"].found
    assert checks["loads"].figures["adapters"] == number


def test_what_a_killed_run_left_is_unloaded_first_and_nothing_else_is() -> None:
    engine = PlayedEngine(loaded={"~qualify@dead-3": "/gone", "ash@0123456789abcdef": "/served/ash"})
    engine.bench = Workbench()
    run_gates(engine, setting(), engine.bench, lambda line: None)
    assert engine.calls[0] == ("unload", "~qualify@dead-3")
    assert list(engine.loaded) == ["ash@0123456789abcdef"]


@pytest.mark.parametrize("at", [9, 22])
@pytest.mark.parametrize("error", [EngineUnavailable("http://e", "POST", "gone"), KeyboardInterrupt()])
def test_whatever_ends_it_nothing_stays_loaded(at: int, error: BaseException) -> None:
    engine = PlayedEngine(fails_at={at: error})
    engine.bench = Workbench()
    with pytest.raises(type(error)):
        run_gates(engine, setting(), engine.bench, lambda line: None)
    assert engine.loaded == {} and any(call == "unload" for call, _ in engine.calls)


def test_of_two_errors_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PlayedEngine(fails_at={9: EngineUnavailable("http://e", "POST /v1/completions", "HTTP 500")})

    def unload(name: str) -> None:
        raise EngineUnavailable("http://e", "POST /v1/unload_lora_adapter", "no connection")

    monkeypatch.setattr(engine, "unload", unload)
    engine.bench = Workbench()
    with pytest.raises(EngineUnavailable, match="HTTP 500") as caught:
        run_gates(engine, setting(), engine.bench, lambda line: None)
    assert "could not be unloaded either" in caught.value.__notes__[0]
