"""From held-out texts to a verdict, through the scripted engine."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from scripted_scorer import BadValue, ScriptedScorer

from tasks.bpb.heldout import Unit
from tasks.bpb.measure import Subject, measure, prepare_units
from tasks.bpb.rulings import Code, Outcome, Thresholds
from tasks.bpb.verdict import Verdict, decide
from tasks.bpb.wording import ControlKind

UNITS = tuple(
    Unit(f"u{number:02}", " ".join(f"{word * (number + 3)} é" for word in (17, 291, 4003, 55)) * 13)
    for number in range(24)
)
QUALITY = {"/ann": 2.1, "/ann-other-packing": 2.39, "/bob": 2.46, "/liar": 2.39, "/liar-other-packing": 2.1}


def judge(own: str, *, bos: bool = False, **script: object) -> Verdict:
    scorer = ScriptedScorer(
        {"base": 2.4},
        adapters=lambda name, path: QUALITY[path],
        max_len=128,
        bos=bos,
        spread=0.3,
        flavour=0.05,
        **script,  # type: ignore[arg-type]
    )
    subjects = (
        Subject("base", "base", None, False),
        Subject("own", "own@1", own, False),
        Subject("control", "own~control@2", f"{own}-other-packing", False),
        Subject("wrong:bob", "bob@3", "/bob", False),
    )
    measurement = measure(scorer, prepare_units(scorer, UNITS), subjects, lambda label, done, total: None)
    return decide(
        measurement,
        opponents_available=True,
        thresholds=Thresholds(),
        control_kind=ControlKind.OTHER_PACKING,
    )


@pytest.mark.parametrize("bos", [False, True])
def test_a_good_adapter_is_ready(bos: bool) -> None:
    verdict = judge("/ann", bos=bos)
    assert (verdict.outcome, verdict.codes) == (Outcome.READY, ())
    left_out = 0 if bos else len(UNITS)
    assert verdict.byte_count == sum(len(unit.text.encode()) for unit in UNITS) - left_out


def test_an_adapter_that_lies_about_its_packing_is_not() -> None:
    verdict = judge("/liar")
    assert (verdict.outcome, verdict.code) == (Outcome.QUARANTINED, Code.CONTROL_NOT_WORSE)
    assert verdict.reason.startswith("read with the other packing it scores 2.")
    assert verdict.reason.endswith("the declared packing is wrong")


@pytest.mark.real
def test_a_base_that_adapters_contaminate_stops_the_run() -> None:
    """vllm#42008: base output is wrong once an adapter was used."""
    assert judge("/ann", drift=0.02).code is Code.ENGINE_DRIFT


def test_texts_on_which_the_adapter_breaks_do_not_drop_out_in_silence() -> None:
    """ainode#186: an adapter of NaN recorded as a success."""
    verdict = judge("/ann", bad=[BadValue("bob@3", 9, float("nan"), marker="é51 é")])
    assert (verdict.outcome, verdict.units) == (Outcome.READY, 23)
    broken = [BadValue("bob@3", 9, float("nan"), marker=marker) for marker in ("é51 é", "é68 é", "é85 é")]
    assert judge("/ann", bad=broken).code is Code.TOO_LITTLE_TEXT
    own = judge("/ann", bad=[BadValue("own@1", 9, float("nan"), marker="é51 é")])
    assert (own.outcome, own.code) == (Outcome.INCONCLUSIVE, Code.TOO_LITTLE_TEXT)
    assert own.reason.startswith("own gave no usable score for 1 of 24 units (")


def test_the_documentation_names_every_code_and_threshold() -> None:
    page = (Path(__file__).parent.parent / "docs" / "bpb.md").read_text("utf-8")
    missing = [
        name for name in (*Code, *(field.name for field in fields(Thresholds))) if f"`{name}`" not in page
    ]
    assert missing == []
