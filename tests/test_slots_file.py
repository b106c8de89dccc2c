"""Files of the format slots as the plugin reads them, without vLLM: what it takes, and each refusal by name."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - errors cross process borders this way
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from slots_builders import METADATA, SLOTS, Tensors, stack_experts, write_slots

from roster.engine_plugin.slots_file import (
    SlotsFile,
    SlotsRefused,
    is_slots_folder,
    number_expert,
    open_slots,
    split_experts,
)
from roster.engine_plugin.slots_layout import EngineView, ExpertsModule, SlotsPlan, plan_slots

EXPERTS, RANK, HIDDEN, INTER, LAYERS, ALPHA = 4, 3, 7, 5, 2, 5.0
PREFIX, GATED, UNGATED = "base_model.model.", ("gate_proj", "down_proj", "up_proj"), ("up_proj", "down_proj")
QUERY = "model.layers.1.self_attn.q_proj"
Change = Callable[[Tensors], Tensors]


def draw(module: str, in_size: int, out_size: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.randn(RANK, in_size, generator=generator),
        f"{PREFIX}{module}.lora_B.weight": torch.randn(out_size, RANK, generator=generator),
    }


def per_expert(projections: tuple[str, ...] = GATED) -> Tensors:
    tensors = draw(QUERY, HIDDEN, 11, 1)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for number, name in enumerate(projections):
                sizes = (INTER, HIDDEN) if name == "down_proj" else (HIDDEN, INTER)
                seed = 100 * layer + 10 * expert + number + 2
                tensors |= draw(f"model.layers.{layer}.mlp.experts.{expert}.{name}", *sizes, seed)
    return tensors


def save(folder: Path, tensors: Tensors) -> SlotsFile:
    return open_slots(write_slots(folder, tensors, {}), "ada@1")


def view(projections: tuple[str, ...] = GATED) -> EngineView:
    return EngineView(
        experts=tuple(
            ExpertsModule(f"model.layers.{layer}.mlp.experts", projections, EXPERTS, HIDDEN, INTER)
            for layer in range(LAYERS)
        ),
        stacked_only=False,
        shared_outer=False,
        partial=False,
        lora_dtype="float32",
        max_rank=8,
        locate=lambda name: name.removeprefix(PREFIX).rpartition(".lora_")[0],
        scale=lambda name: (RANK, 1.0),
        sizes=lambda module: (HIDDEN, 11) if module == QUERY else None,
    )


STACKED = stack_experts(per_expert(), ALPHA, torch.float32)
FIRST, LAST = (f"{PREFIX}model.layers.{layer}.mlp.experts" for layer in range(LAYERS))


@pytest.mark.parametrize("projections", [GATED, UNGATED], ids=["gated", "without a gate"])
def test_every_tensor_has_its_place_in_packing_order(tmp_path: Path, projections: tuple[str, ...]) -> None:
    file = save(tmp_path / "a", stack_experts(per_expert(projections), ALPHA, torch.float32))
    plan = plan_slots(file, file.shapes, view(projections))
    assert plan == SlotsPlan(
        {
            f"model.layers.{layer}.mlp.experts": tuple(
                (f"{module}.{one}.lora_A.weight", f"{module}.{one}.lora_B.weight") for one in projections
            )
            for layer, module in enumerate((FIRST, LAST))
        },
        (f"{PREFIX}{QUERY}.lora_A.weight", f"{PREFIX}{QUERY}.lora_B.weight"),
    )


def test_tensors_are_the_files_own_and_split_into_experts(tmp_path: Path) -> None:
    """The halves of the loader: views of the file, of all experts or some, and single experts' tensors of them."""
    file = save(tmp_path / "a", STACKED)
    file.read_through()
    mapped = {name: file.map_tensor(name) for name in file.shapes}
    assert all(torch.equal(mapped[name], tensor) for name, tensor in STACKED.items())
    some = file.map_tensor(f"{FIRST}.up_proj.lora_B.weight", slice(1, 3))
    assert torch.equal(some, STACKED[f"{FIRST}.up_proj.lora_B.weight"][1:3])
    split, single = split_experts(mapped), per_expert()
    assert split.keys() == single.keys()
    for name, tensor in single.items():
        assert torch.allclose(split[name], tensor * (ALPHA / RANK if ".lora_B." in name else 1)), name
    assert number_expert(f"{FIRST}.up_proj.lora_B.weight", 2) == f"{FIRST}.2.up_proj.lora_B.weight"


def test_a_folder_is_known_by_the_file_alone(tmp_path: Path) -> None:
    write_slots(tmp_path / "a", STACKED, {})
    assert is_slots_folder(tmp_path / "a") and is_slots_folder(str(tmp_path / "a"))
    (tmp_path / "a" / SLOTS).rename(tmp_path / "a" / "adapter_model.safetensors")
    assert not is_slots_folder(tmp_path / "a") and not is_slots_folder(tmp_path / "b")


def without(*parts: str) -> Change:
    return lambda tensors: {n: t for n, t in tensors.items() if not any(part in n for part in parts)}


def change(name: str, act: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors | {name: act(tensors[name])}


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


GATE, DOWN = f"{LAST}.gate_proj.lora_A.weight", f"{LAST}.down_proj.lora_B.weight"
CHANGES: dict[str, tuple[Change, str]] = {
    "a projection is missing": (without("1.mlp.experts.gate_proj"), r"layers.1.*gate_proj: .* found neither"),
    "a factor is missing": (without(DOWN), r"layers.1.*down_proj: .*lora_B, found .*lora_A"),
    "a layer is missing": (without(FIRST), r"layers.0.*gate_proj: .* found neither"),
    "a layer too many": (
        renamed("layers.1.mlp", "layers.7.mlp"),
        r"layers.7.*none of that name.*another base",
    ),
    "other projections": (renamed("gate_proj", "w1"), r"experts.w1.*none of that name"),
    "an expert fewer": (
        change(DOWN, lambda t: t[1:]),
        r"down_proj.lora_B.weight: expected \(4, 7, 3\), found \(3",
    ),
    "exchanged axes": (change(DOWN, lambda t: t.transpose(1, 2)), r"expected \(4, 7, 3\), found \(4, 3, 7\)"),
    "another size": (
        change(GATE, lambda t: t[..., 1:]),
        r"gate_proj.lora_A.weight: expected \(4, 3, 7\), found",
    ),
    "another rank": (
        change(GATE, lambda t: t[:, 1:]),
        r"gate_proj.lora_A.*rank 3, as adapter_config.*found rank 2",
    ),
    "another attention": (
        change(f"{PREFIX}{QUERY}.lora_B.weight", lambda t: t[1:]),
        r"q_proj.lora_B.weight: expected \(11, 3\), found \(10, 3\)",
    ),
    "half of a pair": (without("q_proj.lora_A"), r"q_proj: expected one tensor lora_A and one lora_B, found"),
    "an unknown module": (renamed("q_proj", "p_proj"), r"p_proj.*a module that the engine takes, found none"),
    "no factor's name": (
        renamed("q_proj.lora_A.weight", "q_proj.bias"),
        r"q_proj.bias: expected a name that",
    ),
    "one axis": (change(f"{PREFIX}{QUERY}.lora_A.weight", torch.flatten), r"q_proj.*expected \(rank, in\)"),
    "mixed dtypes": (change(GATE, torch.Tensor.half), "one dtype, of BF16, F16, F32, found F16, F32"),
    "a dtype of integers": (lambda tensors: {n: t.int() for n, t in tensors.items()}, "found I32"),
    "nothing": (lambda tensors: {}, "one dtype, .* found no tensor"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_as_it_should_be_is_named(tmp_path: Path, name: str) -> None:
    act, says = CHANGES[name]
    with pytest.raises(SlotsRefused, match=says) as caught:
        file = save(tmp_path / "a", act(dict(STACKED)))
        plan_slots(file, file.shapes, view())
    assert str(caught.value).startswith("adapter-roster: ada@1 is not loaded: ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (
            replace(view(), lora_dtype="bfloat16"),
            "the LoRA dtype: expected the server's, bfloat16, found float32",
        ),
        (replace(view(), stacked_only=True), "Start the server with --enable-mixed-moe-lora-format"),
        (replace(view(), shared_outer=True), "--enable-moe-shared-loras. Start the server without that"),
        (replace(view(), max_rank=2), "at most rank 2, found rank 3.*--max-lora-rank"),
        (
            replace(view(), scale=lambda name: (RANK, 2.0)),
            "adapter_config.json: .*expected scaling 1, found scaling 2",
        ),
        (replace(view(), experts=view().experts[:1]), "layers.1.*--lora-target-modules"),
    ],
    ids=["dtype", "stacked only", "shared outer", "rank", "scaling", "filtered"],
)
def test_what_the_engine_lacks_is_named(tmp_path: Path, engine: EngineView, says: str) -> None:
    file = save(tmp_path / "a", STACKED)
    plan_slots(file, file.shapes, view())
    with pytest.raises(SlotsRefused, match=says):
        plan_slots(file, file.shapes, engine)


def test_attention_alone_asks_nothing_of_the_experts(tmp_path: Path) -> None:
    file = save(tmp_path / "a", without("experts")(STACKED))
    engine = replace(view(), stacked_only=True, shared_outer=True)
    assert plan_slots(file, file.shapes, engine) == SlotsPlan({}, tuple(file.shapes))


def test_a_stage_of_a_pipeline_takes_its_own_layers(tmp_path: Path) -> None:
    file = save(tmp_path / "a", STACKED)
    stage = replace(view(), partial=True, experts=view().experts[:1], sizes=lambda module: None)
    plan = plan_slots(file, file.shapes, stage)
    assert list(plan.experts) == ["model.layers.0.mlp.experts"] and plan.others == ()


@pytest.mark.parametrize(
    ("metadata", "found"),
    [(None, "{}"), (METADATA | {"version": "2"}, "'version': '2'"), ({"format": "pt"}, "'format': 'pt'")],
    ids=["none", "version", "format"],
)
def test_another_format_or_version_is_named(
    tmp_path: Path, metadata: dict[str, str] | None, found: str
) -> None:
    write_slots(tmp_path / "a", STACKED, {}, metadata)
    with pytest.raises(SlotsRefused, match=rf"__metadata__: expected .*'version': '1'.* found .*{found}"):
        open_slots(tmp_path / "a", "ada@1")


@pytest.mark.parametrize("keep", [0, 5, 200, -1], ids=["empty", "no length", "half a header", "a byte short"])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_slots(tmp_path / "a", STACKED, {}) / SLOTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SlotsRefused, match="a whole safetensors file"):
        open_slots(tmp_path / "a", "ada@1")


def test_a_file_that_is_cut_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    """Before any page of the mapping is touched, which would end the process."""
    file = save(tmp_path / "a", STACKED)
    with file.path.open("r+b") as handle:
        handle.truncate(file.bytes - 9)
    with pytest.raises(SlotsRefused, match=f"expected {file.bytes} bytes, found {file.bytes - 9} bytes"):
        file.read_through()


def test_two_files_of_weights_are_refused(tmp_path: Path) -> None:
    write_slots(tmp_path / "a", STACKED, {})
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(SlotsRefused, match=r"one file of weights, found .* and adapter_model"):
        open_slots(tmp_path / "a", "ada@1")


def test_the_builder_is_no_copy_of_the_input() -> None:
    """What the oracle makes: other numbers where there is a scaling, the same where there is none."""
    single = per_expert()
    part = f"{FIRST}.2.up_proj.lora_B.weight"
    stacked = STACKED[f"{FIRST}.up_proj.lora_B.weight"]
    assert stacked.shape == (EXPERTS, INTER, RANK) and not torch.equal(stacked[2], single[part])
    assert torch.equal(stacked[2], single[part] * torch.tensor(ALPHA / RANK))
    assert json.dumps(METADATA) == '{"format": "adapter-roster slots", "version": "1"}'
