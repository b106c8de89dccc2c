"""The mutations are real, what should name them does, and a check that is blind is seen to be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from lora_builders import BIT_FOR_BIT

from bench import mutation_correct, mutation_trial
from bench.mutation_adapters import Form, Host, Style, find_differences, load_base, prepare_host, write_source
from bench.mutation_files import FILES
from bench.mutation_kinds import Damage
from bench.mutation_moves import MOVES
from bench.mutation_numbers import NUMBERS
from bench.mutation_output import measure_damage, read_output
from bench.mutation_trial import HOSTS, Counts, KindCount, damage_host, damage_planned, list_failures
from tasks.lora.checks import Depth
from tasks.lora.convert import convert_adapter
from tasks.lora.inspect import inspect_adapter
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.plan import plan_control, plan_conversion
from tasks.lora.target import TargetFormat

pytestmark = pytest.mark.real  # the bench in small
RESULT = Path(__file__).resolve().parent.parent / "bench" / "results" / "mutations.json"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_host(folder: Path, *, stacked: bool = False) -> Host:
    style = Style(
        Form.PER_EXPERT if stacked else Form.STACKED,
        Packing.GROUPED_BY_EXPERT,
        Orientation.SWAPPED,
        patterns=True,
        rslora=True,
    )
    format = TargetFormat.STACKED if stacked else TargetFormat.PER_EXPERT
    return prepare_host(folder / "host", "host", load_base("gpt_oss"), style, format, 5)


@pytest.mark.parametrize("stacked", [False, True], ids=["per-expert", "stacked"])
def test_some_damages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: bool) -> None:
    """Every eighth kind, other ones of each target; all of them are in the bench."""
    for table in (MOVES, NUMBERS, FILES):
        name = next(name for name, value in vars(mutation_trial).items() if value is table)
        monkeypatch.setattr(mutation_trial, name, table[4 * stacked :: 8])
    host, counts = make_host(tmp_path, stacked=stacked), Counts()
    damage_host(host, tmp_path, 3, counts)
    assert (counts.missed, counts.quick_missed, counts.unexpected) == ([], [], [])
    assert len(counts.kinds) > 8
    assert len({name for kind in counts.kinds.values() for name in kind.by}) > 3
    assert {path.name for path in tmp_path.iterdir()} == {"host"}


@pytest.mark.real
def test_every_damage_is_named(tmp_path: Path) -> None:
    counts = damage_planned(HOSTS[2], tmp_path, 3)
    assert (counts.missed, counts.quick_missed, counts.unexpected) == ([], [], [])
    assert len(counts.kinds) > 70
    named = {name for kind in counts.kinds.values() for name in kind.by}
    assert {"coverage", "scaling", "finite", "trained", "corrupt_or_partial"} <= named


def test_kinds_are_many_distinct_and_each_applies_somewhere() -> None:
    kinds = [damage.kind for damage in (*MOVES, *NUMBERS, *FILES)]
    assert len(kinds) == len(set(kinds)) > 80
    assert len({planned.family for planned in HOSTS}) > 3
    saved = json.loads(RESULT.read_text("utf-8"))
    assert saved["passed"] and saved["families"] >= 3
    assert saved["mutations"] == saved["caught"] and not saved["false_alarms"]
    assert saved["correct_conversions"] >= 200
    assert {kind for kind, row in saved["table"].items() if row["part"] == "output"} == set(kinds)


def test_a_damage_that_nothing_names_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, counts = make_host(tmp_path), Counts()
    monkeypatch.setattr(mutation_trial, "list_failures", lambda *args: [])
    monkeypatch.setattr(mutation_trial, "NUMBERS", ())
    monkeypatch.setattr(mutation_trial, "MOVES", MOVES[:3])
    monkeypatch.setattr(mutation_trial, "FILES", FILES[-1:])
    damage_host(host, tmp_path, 3, counts)
    tried = sum(kind.trials for kind in counts.kinds.values())
    assert len(counts.missed) == len(counts.quick_missed) == tried == 4
    assert "half a config: host" in counts.missed


def test_what_names_a_damage_is_counted() -> None:
    counts = Counts()
    kind = counts.kinds.setdefault("a bit", KindCount("output", ("round_trip",)))
    counts.add(kind, "first", ["size", "round_trip"], 0.5, ["deltas"])
    counts.add(kind, "second", ["size"], 1e-6, [])
    counts.add(kind, "third", [], 0.5, [])
    assert (kind.trials, kind.caught, kind.quick_due, kind.quick_caught) == (3, 2, 2, 1)
    assert (dict(kind.by), dict(kind.by_quick)) == ({"size": 2}, {"deltas": 1})
    assert counts.unexpected == ["second: size"]
    assert (counts.missed, counts.quick_missed) == (["third"], ["third, 0.5"])
    both = Counts()
    both.merge(counts)
    both.merge(counts)
    assert (both.kinds["a bit"].trials, both.missed) == (6, ["third", "third"])


def test_the_size_of_a_damage_is_that_of_the_worst_delta(tmp_path: Path) -> None:
    host = make_host(tmp_path)
    output = host.output.copy()
    assert measure_damage(host.output, output) == 0
    name = next(name for name in output.tensors if ".experts.2." in name and "lora_B" in name)
    output.tensors[name].mul_(1.25)
    assert measure_damage(host.output, output) == pytest.approx(0.25)
    output.tensors[name][0, 0] = float("nan")
    assert measure_damage(host.output, output) == float("inf")
    del output.tensors[name]
    assert measure_damage(host.output, output) == float("inf")


def test_an_undamaged_output_passes_at_every_depth(tmp_path: Path) -> None:
    host = make_host(tmp_path)
    for depth in Depth:
        assert list_failures(tmp_path / "host" / "again", host.found, host.format, depth) == []


def test_correct_conversions_are_correct_and_raise_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encodings = ((Packing.GROUPED_BY_EXPERT, Orientation.STANDARD),)
    monkeypatch.setattr(mutation_correct, "_ENCODINGS", encodings)
    counts = mutation_correct.convert_random("mixtral", tmp_path, 1)
    assert (counts.correct, counts.incorrect, counts.false_alarms) == (6, [], [])


@pytest.mark.parametrize("format", BIT_FOR_BIT)
def test_a_conversion_that_is_wrong_is_not_taken_for_correct(tmp_path: Path, format: TargetFormat) -> None:
    """The arithmetic of the bench sees what the control is made of, and a scaling that is off."""
    base, style = load_base("qwen3_moe"), Style(packing=Packing.GROUPED_BY_EXPERT)
    meaning = write_source(tmp_path / "source", base, style, 2)
    found = inspect_adapter(tmp_path / "source", base, label="source")
    for name, plan in (("own", plan_conversion), ("control", plan_control)):
        convert_adapter(found.files, plan(found.layout, format), tmp_path / name)
    own, control = (read_output(tmp_path / name, base, format) for name in ("own", "control"))
    assert not list(find_differences(own, meaning, style.scaling_of))
    assert len(list(find_differences(control, meaning, style.scaling_of))) == len(list(own.places()))
    assert list(find_differences(own, meaning, replace(style, rslora=True).scaling_of))


def test_a_damage_changes_what_it_says(tmp_path: Path) -> None:
    """One of a kind, by hand: gate and up of one expert, and nothing else."""
    host = make_host(tmp_path)
    [damage] = [one for one in MOVES if one.kind == "gate and up exchanged in one expert"]
    output = host.output.copy()
    assert isinstance(damage, Damage) and damage.change(output, host, Random(1))
    changed = {
        name for name, tensor in output.tensors.items() if not torch.equal(tensor, host.output.tensors[name])
    }
    assert {name.split(".experts.")[1][2:] for name in changed} == {
        "w1.lora_B.weight",
        "w3.lora_B.weight",
    }
    assert len({name.split(".w")[0] for name in changed}) == 1
    first, second = sorted(changed)
    assert torch.equal(output.tensors[first], host.output.tensors[second])


@pytest.mark.real
def test_decisions_about_trained_adapters_are_named(tmp_path: Path) -> None:
    """All kinds on one family: what the other two give is in the bench's results."""
    from bench.mutation_training import train_world
    from bench.mutations import try_world

    counts = try_world(train_world("qwen3_moe", seed=3), tmp_path, 3)
    assert (counts.missed, counts.unexpected, counts.false_alarms, counts.incorrect) == ([], [], [], [])
    assert len(counts.kinds) > 30 and counts.correct > 20
