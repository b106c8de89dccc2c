"""The format slots: the numbers that vLLM holds. The oracle casts and scales a per-expert output in plain torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_builders import CASES, change, change_config
from family_inventories import load_inventory, stacked_adapter
from lora_builders import (
    ALPHA,
    EXPERTS,
    HIDDEN,
    INTER,
    LABEL,
    LAYERS,
    PREFIX,
    RANK,
    Logical,
    Separate,
    attention,
    base_fields,
    encode,
    encode_cubes,
    encode_experts,
    load,
    look,
    make_base,
)
from safetensors import safe_open
from safetensors.torch import save_file

from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.check import check_conversion
from tasks.lora.checks import CheckName, CheckReport, Depth
from tasks.lora.convert import convert_adapter, digest_adapter
from tasks.lora.errors import AmbiguousWeights, CorruptFile, InvalidBaseConfig, MissingWeights, NonFinite
from tasks.lora.files import SLOTS_NAME, open_adapter
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.plan import PlanKind, plan_control, plan_conversion
from tasks.lora.served_rounding import ServedRounding
from tasks.lora.slots import find_served_dtype
from tasks.lora.target import TargetFormat

Tensors = dict[str, torch.Tensor]
SLOTS = TargetFormat.SLOTS
THREE_RANKS = {"gate_proj": 2, "up_proj": 3, "down_proj": 5}
GATE, DOWN = (f"{PREFIX}.1.mlp.experts.{name}" for name in ("gate_proj", "down_proj"))


def spell_slots(
    experts: Tensors, scaling_of: Callable[[str], float], dtype: torch.dtype, count: int = EXPERTS
) -> Tensors:
    """What vLLM makes of a per-expert file: each tensor cast, B scaled in its new dtype, then experts stacked."""
    held: Tensors = {}
    for name, tensor in experts.items():
        value = tensor.clone().to(dtype)
        if "lora_B" in name:
            value *= scaling_of(name)
        held[name] = value
    slots: Tensors = {}
    for name in held:
        front, dot, rest = name.partition(".experts.")
        number, _, module = rest.partition(".")
        if not dot:
            slots[name] = held[name]
        elif number == "0":
            each = [held[f"{front}.experts.{expert}.{module}"] for expert in range(count)]
            slots[f"{front}.experts.{module}"] = torch.stack(each)
    return slots


def assert_same_bytes(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        width = torch.int32 if tensor.dtype is torch.float32 else torch.int16
        assert torch.equal(found[name].view(width), tensor.view(width)), name


def convert(found: Inspection, folder: Path) -> Path:
    convert_adapter(found.files, plan_conversion(found.layout, SLOTS), folder)
    return folder


def check(found: Inspection, folder: Path, depth: Depth = Depth.STANDARD) -> CheckReport:
    return check_conversion(found.files, folder, found.layout, SLOTS, depth=depth, seed=7)


def failed(report: CheckReport) -> list[str]:
    return [one.name.value for one in report.checks if not one.passed]


def served_in(engine: str | None, **fields: Any) -> BaseConfig:
    """A tiny base that its operator serves in a dtype."""
    config = json.dumps(base_fields(**fields)).encode()
    return read_base_config(config, label="tiny-base", engine_dtype=engine)


def seven_thirds(name: str) -> float:
    return 7 / 3


def by_projection(name: str) -> float:
    """An alpha of 5 for all but down, at three ranks; of the router and the attention another rank."""
    rank = next((rank for projection, rank in THREE_RANKS.items() if projection in name), RANK)
    return (11 if "down_proj" in name else 5) / rank


PATTERNS: dict[str, Any] = {
    "r": RANK,
    "lora_alpha": 5,
    "rank_pattern": THREE_RANKS,
    "alpha_pattern": {"down_proj": 11},
}


def separate() -> Separate:
    return Separate(ranks=THREE_RANKS)


@pytest.mark.parametrize(
    ("tensors", "config", "scaling_of", "served", "engine"),
    [
        (encode(Logical()) | attention(), {"lora_alpha": 7}, seven_thirds, "bfloat16", None),
        (encode(Logical()) | attention(), {"lora_alpha": 7}, seven_thirds, "float16", None),
        (encode(Logical()) | attention(), {"lora_alpha": 7}, seven_thirds, "float32", "float32"),
        (
            encode(Logical(dtype=torch.bfloat16), orientation="swapped") | attention(dtype=torch.float16),
            {"lora_alpha": 7, "use_rslora": True},
            lambda name: 7 / 3**0.5,
            "float16",
            "half",
        ),
        (encode_experts(separate()) | attention(), PATTERNS, by_projection, "bfloat16", "auto"),
        (
            encode_cubes(
                Separate(ranks=THREE_RANKS, shared=(("up_proj", "A"), ("down_proj", "B"))), numbered=False
            ),
            PATTERNS,
            by_projection,
            "bfloat16",
            "bfloat16",
        ),
    ],
    ids=["bf16", "f16", "f32", "mixed to f16", "ranks", "shared"],
)
def test_numbers_are_those_that_the_engine_would_hold(
    tmp_path: Path,
    tensors: Tensors,
    config: dict[str, Any],
    scaling_of: Callable[[str], float],
    served: str,
    engine: str | None,
) -> None:
    """Bit for bit, at scalings that are no powers of two, where the order of the two roundings shows."""
    found = look(tmp_path / "source", tensors, served_in(engine, dtype=served), **config)
    plain = plan_conversion(found.layout, TargetFormat.PER_EXPERT)
    convert_adapter(found.files, plain, tmp_path / "experts")
    experts, dtype = load(tmp_path / "experts"), getattr(torch, served)
    expected = spell_slots(experts, scaling_of, dtype)
    other = spell_slots({name: t.double() for name, t in experts.items()}, scaling_of, torch.float64)
    rounded_once = {name: tensor.to(dtype) for name, tensor in other.items()}
    if dtype is not torch.float32 and engine != "half":  # which has more bits than these numbers
        assert any(not torch.equal(rounded_once[name], expected[name]) for name in expected)

    plan = plan_conversion(found.layout, SLOTS)
    made = convert_adapter(found.files, plan, tmp_path / "made")
    assert_same_bytes(load(tmp_path / "made"), expected)
    assert made.files == digest_adapter(found.files, plan)
    assert [file.name for file in made.files] == ["adapter_config.json", SLOTS_NAME]
    assert (made.format, made.pairs, made.rank) == (SLOTS, plain.pairs, plain.rank)
    assert made.dtype == {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[served]
    with safe_open(tmp_path / "made" / SLOTS_NAME, "pt") as file:
        assert file.metadata() == {"format": "adapter-roster slots", "version": "1"}
    order = [tensor.name for tensor in plan.tensors]
    numbered = (name.replace(".experts.0.", ".experts.") for name in experts if ".experts.1." not in name)
    assert sorted(order) == sorted(expected) and len(order) == len(set(numbered) & set(order))
    for depth in Depth:
        assert failed(check(found, tmp_path / "made", depth)) == []


def test_experts_without_a_gate_have_four_tensors(tmp_path: Path) -> None:
    inventory = load_inventory("nemotron_h")
    base = read_base_config(inventory.encoded, label="nemotron")
    tensors = stacked_adapter(inventory, without=("mixer.gate",))
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    found = look(tmp_path / "source", tensors, base, lora_alpha=7)
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "experts")
    made = load(convert(found, tmp_path / "made"))
    assert_same_bytes(
        made, spell_slots(load(tmp_path / "experts"), seven_thirds, torch.bfloat16, base.experts)
    )
    assert sum(".experts." in name for name in made) == 4 * len(base.sparse_layers)
    assert failed(check(found, tmp_path / "made", Depth.FULL)) == []


def test_what_needs_no_rounding_is_only_moved(tmp_path: Path) -> None:
    found = look(tmp_path / "source", encode(Logical(dtype=torch.bfloat16)), lora_alpha=RANK)
    plan = plan_conversion(found.layout, SLOTS)
    assert not any(block.is_rounded for block in plan.blocks)
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "experts")
    made = load(convert(found, tmp_path / "made"))
    assert_same_bytes(made, spell_slots(load(tmp_path / "experts"), lambda name: 1, torch.bfloat16))
    scaled = look(tmp_path / "scaled", encode(Logical(dtype=torch.bfloat16)))
    blocks = plan_conversion(scaled.layout, SLOTS).blocks
    assert [block.is_rounded for block in blocks] == ["lora_B" in block.group.names[0] for block in blocks]


def test_every_scaling_of_the_config_is_one(tmp_path: Path) -> None:
    found = look(tmp_path / "source", encode_experts(separate()) | attention(), **PATTERNS)
    config = json.loads((convert(found, tmp_path / "made") / "adapter_config.json").read_text("utf-8"))
    assert config["alpha_pattern"] == config["rank_pattern"] and len(config["rank_pattern"]) > 1
    assert config["lora_alpha"] == config["r"] == THREE_RANKS["gate_proj"]
    assert "lora_B_layout" not in config and "target_parameters" not in config
    assert {"gate_proj", "up_proj", "down_proj", "q_proj", "gate"} <= set(config["target_modules"])


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"interleaved"}))  # whose names are another family's
def test_controls_give_every_trained_expert_another_delta(tmp_path: Path, case: str) -> None:
    made = CASES[case](tmp_path / "source")
    plan = plan_control(made.found.layout, SLOTS)
    convert_adapter(made.found.files, plan, tmp_path / "control")
    tensors, right = load(tmp_path / "control"), load(convert(made.found, tmp_path / "made"))
    for layer, projection in {(layer, projection) for layer, projection, _ in made.deltas}:
        names = [f"{PREFIX}.{layer}.mlp.experts.{projection}.lora_{factor}.weight" for factor in "AB"]
        if plan.kind is PlanKind.DISPLACED_EXPERTS:
            moved = [torch.equal(tensors[name], right[name].roll(1, 0)) for name in names]
            kept = [torch.equal(tensors[name], right[name]) for name in names]
            # What all experts share stays as it is wherever it is moved to.
            assert all(map(any, zip(moved, kept, strict=True))) and not all(kept)
            continue
        found, wanted = ([each[name].double() for name in names] for each in (tensors, right))
        for expert in range(EXPERTS):
            assert not torch.equal(found[1][expert] @ found[0][expert], wanted[1][expert] @ wanted[0][expert])
    assert failed(check(made.found, tmp_path / "control")) == ["deltas", "round_trip"]


# The dtype that is served


@pytest.mark.parametrize(
    ("config", "engine", "expected"),
    [
        ("bfloat16", None, "BF16"),
        ("float16", "auto", "F16"),
        ("float32", None, "BF16"),
        (None, None, "BF16"),
        ("float32", "float32", "F32"),
        ("bfloat16", "half", "F16"),
        (None, "float", "F32"),
    ],
)
def test_the_served_dtype_is_the_engines_word_else_the_configs(
    config: str | None, engine: str | None, expected: str
) -> None:
    """vLLM's auto serves a float32 checkpoint in bfloat16 (config/model.py)."""
    assert find_served_dtype(served_in(engine, dtype=config)) == expected


def test_a_dtype_that_the_engine_does_not_know_is_refused(tmp_path: Path) -> None:
    found = look(tmp_path / "source", encode(Logical()), served_in("float8"))
    with pytest.raises(InvalidBaseConfig, match=r"tiny-base: engine.dtype of base.json: found 'float8'"):
        plan_conversion(found.layout, SLOTS)
    plan_conversion(found.layout, TargetFormat.PER_EXPERT)


@pytest.mark.parametrize(
    ("value", "alpha", "found_value"),
    [(70_000.0, RANK, "7e+04"), (40_000.0, ALPHA, "8e+04")],
    ids=["the cast", "the scaling"],
)
def test_a_number_that_is_not_finite_any_more_refuses_the_adapter(
    tmp_path: Path, value: float, alpha: int, found_value: str
) -> None:
    logical = Logical()
    logical.b[1, "down_proj"][2, HIDDEN - 1, 1] = -value
    found = look(tmp_path / "source", encode(logical), make_base(dtype="float16"), lora_alpha=alpha)
    with pytest.raises(NonFinite) as caught:
        convert(found, tmp_path / "made")
    error = caught.value
    assert (error.adapter, error.where) == (LABEL, f"{PREFIX}.1.mlp.experts.lora_B.weight")
    assert error.expected == "factors that are finite as they are served, in float16, up to 65504"
    assert error.found == f"{found_value}, with its scaling" and "dtype of a wider range" in error.advice
    assert not (tmp_path / "made").exists()
    # The other formats leave the numbers alone; the check refuses them for the same reason.
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "experts")
    report = check_conversion(found.files, tmp_path / "experts", found.layout)
    assert failed(report) == ["in_range"]
    whole = look(tmp_path / "wide", encode(logical), make_base(dtype="bfloat16"), lora_alpha=alpha)
    assert failed(check(whole, convert(whole, tmp_path / "wider"))) == []


def test_a_delta_that_overflows_in_the_served_dtype_is_named(tmp_path: Path) -> None:
    """The operator's dtype counts, not the config's: each factor is inside, their product is not."""
    logical = Logical()
    logical.a[1, "down_proj"][2] *= 9000
    logical.b[1, "down_proj"][2] *= 9000
    for engine, failures in (("float16", ["in_range"]), (None, [])):
        found = look(tmp_path / str(engine), encode(logical), served_in(engine, dtype="bfloat16"))
        assert failed(check(found, convert(found, tmp_path / f"made-{engine}"))) == failures


# Damage


@pytest.fixture
def found(tmp_path: Path) -> Inspection:
    tensors = encode(Logical(), packing="grouped_by_expert") | attention()
    return look(tmp_path / "source", tensors, packing="grouped_by_expert", lora_alpha=7)


def alter(name: str, edit: Callable[[torch.Tensor], Any]) -> Callable[[Tensors], None]:
    def change_one(tensors: Tensors) -> None:
        edit(tensors[name])

    return change_one


def exchange_experts(tensors: Tensors) -> None:
    b = tensors[f"{DOWN}.lora_B.weight"]
    b[[0, 3]] = b[[3, 0]]


def exchange_gate_and_up(tensors: Tensors) -> None:
    names = [f"{PREFIX}.1.mlp.experts.{name}.lora_B.weight" for name in ("gate_proj", "up_proj")]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


def leave_unscaled(tensors: Tensors) -> None:
    b = tensors[f"{DOWN}.lora_B.weight"]
    b.copy_(b / (7 / 3))


def round_once(tensors: Tensors) -> None:
    """Scaled before the cast, which is nearer to the truth, and not what vLLM holds."""
    exact = Logical().b[1, "down_proj"].double() * 7 / 3
    assert not torch.equal(exact.bfloat16(), tensors[f"{DOWN}.lora_B.weight"])
    tensors[f"{DOWN}.lora_B.weight"] = exact.bfloat16()


def cast_all(tensors: Tensors) -> None:
    tensors.update({name: tensor.half() for name, tensor in tensors.items()})


def drop_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".1.mlp.experts." in name]:
        del tensors[name]


def flip(tensors: Tensors) -> None:
    tensors[f"{GATE}.lora_A.weight"].view(torch.int16)[2, 1, 4] ^= 1


def number_experts(tensors: Tensors) -> None:
    name = f"{GATE}.lora_A.weight"
    stacked = tensors.pop(name)
    for expert in range(EXPERTS):
        tensors[name.replace("experts.", f"experts.{expert}.")] = stacked[expert].clone()


@pytest.mark.parametrize(
    ("edit", "quick", "more"),
    [
        (
            alter(f"{GATE}.lora_A.weight", lambda a: a[2, 1, 4].add_(1)),
            ["deltas", "shared_a"],
            ["round_trip"],
        ),
        (flip, ["deltas", "shared_a"], ["round_trip"]),
        (alter(f"{DOWN}.lora_B.weight", lambda b: b[1].mul_(1.01)), ["deltas"], ["round_trip"]),
        (exchange_experts, ["deltas"], ["round_trip"]),
        (exchange_gate_and_up, ["gate_up", "deltas"], ["round_trip"]),
        (leave_unscaled, ["deltas"], ["round_trip"]),
        (round_once, ["deltas"], ["round_trip"]),
        (alter(f"{PREFIX}.0.self_attn.q_proj.lora_B.weight", lambda b: b.neg_()), ["deltas"], ["round_trip"]),
        (
            alter(f"{DOWN}.lora_A.weight", lambda a: a[0, 0, 0].fill_(torch.nan)),
            ["finite", "deltas"],
            ["round_trip"],
        ),
        (cast_all, ["coverage"], ["trained", "round_trip"]),  # float16 holds these numbers too
        (drop_layer, ["coverage", "size", "deltas"], ["round_trip"]),
        (number_experts, ["coverage", "deltas"], ["round_trip"]),
    ],
    ids=[
        "one number",
        "one bit",
        "one percent of one expert",
        "two experts exchanged",
        "gate and up exchanged",
        "B unscaled",
        "rounded once",
        "another module",
        "NaN",
        "another dtype",
        "a layer missing",
        "numbered experts",
    ],
)
def test_damage_is_found_at_every_depth(
    found: Inspection, tmp_path: Path, edit: Callable[[Tensors], Any], quick: list[str], more: list[str]
) -> None:
    folder = convert(found, tmp_path / "made")
    change(folder, lambda tensors: None)
    for depth in Depth:
        assert failed(check(found, folder, depth)) == [], "in another order it is the same"
    change(folder, edit)
    assert sorted(failed(check(found, folder, Depth.QUICK))) == sorted(quick)
    for depth in (Depth.STANDARD, Depth.FULL):
        assert sorted(failed(check(found, folder, depth))) == sorted([*quick, *more])


def test_a_scaling_in_the_config_is_found(found: Inspection, tmp_path: Path) -> None:
    """The engine would apply it once more."""
    folder = convert(found, tmp_path / "made")
    change_config(folder, lora_alpha=7)
    assert failed(check(found, folder, Depth.QUICK)) == ["scaling", "deltas"]
    change_config(folder, lora_alpha=RANK, target_modules=["q_proj"])
    assert failed(check(found, folder)) == ["config"]


def test_the_errors_that_are_told_are_those_of_the_trainers_own_deltas(
    found: Inspection, tmp_path: Path
) -> None:
    folder = convert(found, tmp_path / "made")
    made, logical = load(folder), Logical()
    for depth, tolerance in ((Depth.QUICK, 0.7), (Depth.FULL, 1e-4)):
        report = check(found, folder, depth)
        [errors] = [one for one in report.errors if one.projection == "down_proj"]
        largest = 0.0
        for layer in range(LAYERS):
            for e in range(EXPERTS):
                a, b = (
                    made[f"{PREFIX}.{layer}.mlp.experts.down_proj.lora_{f}.weight"][e].double() for f in "AB"
                )
                wanted = (
                    7
                    / 3
                    * logical.b[layer, "down_proj"][e].double()
                    @ logical.a[layer, "down_proj"][e].double()
                )
                largest = max(largest, float((b @ a - wanted).norm() / wanted.norm()))
        assert errors.largest == pytest.approx(largest, rel=tolerance)
        assert 1e-4 < errors.largest < 3 * 2**-8


def test_what_rounding_cannot_explain_is_found_even_where_it_was_expected(
    found: Inspection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The served delta is held to the trainer's own, not only to the source as it should have been rounded."""
    right = ServedRounding.round

    def forget(self: ServedRounding, values: torch.Tensor, scaling: float) -> torch.Tensor:
        return right(self, values, 1.0)

    def unscale(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in exact.items()})

    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "experts")
    exact = spell_slots(load(tmp_path / "experts"), lambda name: 1, torch.float32)
    folder = convert(found, tmp_path / "made")
    change(folder, unscale)
    monkeypatch.setattr(ServedRounding, "round", forget)
    assert failed(check(found, folder, Depth.QUICK)) == failed(check(found, folder, Depth.FULL)) == ["deltas"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-6], ids=["plain", "below the smallest normal of float16"])
def test_no_rounding_is_beyond_its_bound(dtype: torch.dtype, size: float) -> None:
    """Of deltas of random factors, at a scaling that rounds again; and it is no more than a few times too wide."""
    generator = torch.Generator().manual_seed(3)
    rounding = ServedRounding(dtype)
    a = size * torch.randn(EXPERTS, RANK, HIDDEN, generator=generator)
    b = size * torch.randn(EXPERTS, INTER, RANK, generator=generator)
    served = rounding.round(b, 7 / 3).double() @ rounding.round(a, 1.0).double()
    wanted = (7 / 3) * b.double() @ a.double()
    bound = rounding.bound(a.double().norm(dim=2), 7 / 3 * b.double().norm(dim=1), (HIDDEN, INTER), 7 / 3)
    error = (served - wanted).flatten(1).norm(dim=1)
    assert bool((error <= bound).all()) and bool((bound <= 20 * error).all())


# Files


def test_a_folder_of_slots_is_opened_and_no_other(found: Inspection, tmp_path: Path) -> None:
    folder = convert(found, tmp_path / "made")
    opened = open_adapter(folder, label=LABEL)
    assert opened.is_slots and opened.weights_name == SLOTS_NAME and opened.stray == ()
    assert not found.files.is_slots
    both = tmp_path / "both"
    shutil.copytree(folder, both)
    shutil.copy(tmp_path / "source" / "adapter_model.safetensors", both)
    with pytest.raises(AmbiguousWeights, match=r"adapter_slots\.safetensors: found more weights"):
        open_adapter(both, label=LABEL)
    save_file(load(folder), folder / SLOTS_NAME, metadata={"format": "pt"})
    with pytest.raises(CorruptFile, match=r'adapter_slots\.safetensors: found {"format": "pt"}'):
        open_adapter(folder, label=LABEL)


def test_slots_are_no_source(found: Inspection, tmp_path: Path) -> None:
    """They would read as a 3-d source, of other numbers than the trainer's."""
    folder = convert(found, tmp_path / "made")
    with pytest.raises(MissingWeights, match=r"adapter_slots\.safetensors, which a conversion writes"):
        inspect_adapter(folder, make_base(), label=LABEL)


def test_every_check_is_made(found: Inspection, tmp_path: Path) -> None:
    report = check(found, convert(found, tmp_path / "made"))
    assert set(report.not_made) == {CheckName.MERGED}
    assert dict(next(one for one in report.checks if one.name is CheckName.COVERAGE).figures)["pairs"] == (
        LAYERS * EXPERTS * 3
    )
