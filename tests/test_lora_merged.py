"""A merged checkpoint against base + delta: what agrees, what it unmasks, and when it is not to be trusted.

Judged by plain loops (merged_builders.py) and by PEFT's own merge of the families' models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_builders import merged as merge_by_peft
from family_builders import save_adapter as save_by_peft
from family_builders import save_base as save_family
from family_models import FAMILIES
from lora_builders import (
    DOUBLED,
    ENCODINGS,
    EXPERTS,
    LABEL,
    LAYERS,
    PROJECTIONS,
    Logical,
    Separate,
    attention,
    encode,
    encode_alone,
    encode_cubes,
    encode_experts,
    look,
    make_base,
    stack_blocks,
)
from merged_builders import (
    EMBEDDING,
    Tensors,
    base_weights,
    fuse,
    merge,
    save,
    single,
)
from safetensors.torch import load_file, save_file

from tasks.lora.base import read_base_config
from tasks.lora.errors import ReferenceInvalid, WeightsIncomparable
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.merged import MergedFindings, compare_merged, read_otherwise
from tasks.lora.rounding import Factors, compare_matrix
from tasks.lora.weights import INDEX_NAME, open_weights

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MODULES = 5  # attention and router, for each layer
MATRICES = LAYERS * (EXPERTS * len(PROJECTIONS) + MODULES)
EVERY = [f"layer {layer} {name}" for layer in range(LAYERS) for name in ("gate_up_proj", "down_proj")]


def compare(found: Inspection, merged: Path, base: Path, steps: list[Any] | None = None) -> MergedFindings:
    return compare_merged(
        found.files,
        found.layout,
        open_weights(merged, label=LABEL, name="the merged checkpoint"),
        open_weights(base, label=LABEL, name="the base's weights"),
        other=read_otherwise(found.layout),
        progress=None if steps is None else lambda done, total: steps.append((done, total)),
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sized(logical: Logical, size: float = 8.0) -> Logical:
    """The same adapter with deltas of some units in the last place of the base's in bfloat16."""
    for key, b in logical.b.items():
        logical.b[key] = b * size
    return logical


def meet(tmp_path: Path, merged: Tensors, base: Tensors, *, packing: str = "rank_major") -> MergedFindings:
    """Compare a rank-major adapter, read as `packing`, with these checkpoints."""
    found = look(tmp_path / "adapter", encode(sized(Logical())) | attention(), packing=packing)
    return compare(found, save(tmp_path / "merged", merged), save(tmp_path / "base", base))


def right(base: Tensors) -> Tensors:
    return merge(base, sized(Logical()), attention())


def test_the_loop_of_these_tests_moves_every_weight_but_the_embedding() -> None:
    base = base_weights()
    merged = right(base)
    moved = [name for name, weight in base.items() if not torch.equal(weight, merged[name])]
    assert len(moved) == MATRICES == len(base) - 1 and EMBEDDING not in moved


@pytest.mark.parametrize(("packing", "orientation"), ENCODINGS)
def test_every_encoding_read_right_agrees_and_read_wrong_does_not(
    tmp_path: Path, packing: str, orientation: str
) -> None:
    logical, steps = sized(Logical()), []
    tensors = encode(logical, packing=packing, orientation=orientation) | attention()
    base, merged = save(tmp_path / "base", base_weights()), save(tmp_path / "merged", right(base_weights()))
    found = compare(look(tmp_path / "right", tensors, packing=packing), merged, base, steps)
    assert (found.matrices, found.visible, found.many, found.other) == (MATRICES, MATRICES, 0, ())
    assert (found.untouched, found.dtype) == (1, "float32")
    assert found.largest < 1e-6 and found.equal > 0.9
    assert [done for done, _ in steps] == sorted({done for done, _ in steps}), "progress only grows"
    numbers = sum(weight.numel() for name, weight in base_weights().items() if name != EMBEDDING)
    assert steps[-1] == (numbers, numbers)

    other = Packing(packing).other
    misread = compare(look(tmp_path / "wrong", tensors, packing=other), merged, base)
    assert (list(misread.other), misread.many) == (EVERY, 0)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("size", [0.5, 8.0])
def test_rounding_of_the_merges_dtype_is_told_from_another_delta(
    tmp_path: Path, dtype: torch.dtype, size: float
) -> None:
    """Also where every delta is less than one unit in the last place of its weight."""
    base = base_weights(dtype)
    logical = sized(Logical(), size)
    found = look(tmp_path / "adapter", encode(logical))
    wrong = look(tmp_path / "wrong", encode(logical), packing="grouped_by_expert")
    merged, plain = save(tmp_path / "merged", merge(base, logical)), save(tmp_path / "base", base)
    agreed = compare(found, merged, plain)
    assert (agreed.many, agreed.other, agreed.dtype) == (0, (), str(dtype).removeprefix("torch."))
    assert agreed.equal > 0.99
    assert list(compare(wrong, merged, plain).other) == EVERY


def test_a_merge_in_bfloat16_may_be_stored_as_float32(tmp_path: Path) -> None:
    base = base_weights(BF16)
    found = meet(tmp_path, {name: weight.float() for name, weight in right(base).items()}, base)
    assert (found.many, found.dtype) == (0, "bfloat16")


@pytest.mark.parametrize("form", ["per-expert", "3-d", "blocks"])
def test_other_forms_of_source_agree_and_have_no_other_reading(tmp_path: Path, form: str) -> None:
    meant = Separate()
    for key in meant.b:
        meant.b[key] = meant.b[key] / 4096
    blocks = stack_blocks(meant)
    tensors = {"per-expert": encode_experts, "3-d": encode_cubes}.get(form, lambda _: encode(blocks))(meant)
    settings = DOUBLED if form == "blocks" else {}
    found = look(tmp_path / "adapter", tensors, **settings)
    base, merged = base_weights(), merge(base_weights(), blocks)
    assert (read_otherwise(found.layout) is None) == (form != "blocks")
    result = compare(found, save(tmp_path / "merged", merged), save(tmp_path / "base", base))
    assert (result.many, result.matrices, result.untouched) == (0, LAYERS * EXPERTS * 3, 1 + LAYERS * MODULES)
    exchanged = dict(merged)
    exchanged[single(0, 1, "up_proj")], exchanged[single(0, 2, "up_proj")] = (
        merged[single(0, 2, "up_proj")],
        merged[single(0, 1, "up_proj")],
    )
    result = compare(found, save(tmp_path / "exchanged", exchanged), tmp_path / "base")
    assert [where for where, _ in result.differing] == [
        "layer 0 expert 1 up_proj",
        "layer 0 expert 2 up_proj",
    ]


@pytest.mark.parametrize(
    ("base_style", "merged_style"),
    [("single", "fused"), ("fused", "transposed"), ("transposed", "single"), ("fused", "fused")],
)
def test_base_and_merge_may_name_and_turn_their_experts_each_in_its_own_way(
    tmp_path: Path, base_style: str, merged_style: str
) -> None:
    def styled(weights: Tensors, style: str) -> Tensors:
        return weights if style == "single" else fuse(weights, transposed=style == "transposed")

    base = base_weights()
    found = meet(tmp_path, styled(right(base), merged_style), styled(base, base_style))
    assert (found.many, found.other, found.matrices) == (0, (), MATRICES)


@pytest.mark.parametrize("transposed", [True, False])
def test_a_square_parameter_is_turned_as_its_sibling_is(tmp_path: Path, transposed: bool) -> None:
    """in = out for gate_up_proj: by shape alone it could be stored either way."""
    sizes = {"hidden": 14, "inter": 7}
    logical, weights = sized(Logical(**sizes)), base_weights(**sizes)
    base = make_base(hidden_size=14, moe_intermediate_size=7)
    parameter = base.family.parameter_of("gate_proj")
    assert base.size(parameter.in_size) == base.size(parameter.out_size)
    found = look(tmp_path / "adapter", encode(logical), base)
    result = compare(
        found,
        save(tmp_path / "merged", fuse(merge(weights, logical), transposed=transposed)),
        save(tmp_path / "base", fuse(weights, transposed=transposed)),
    )
    assert (result.many, result.other) == (0, ())


@pytest.mark.parametrize("alone", ["gate_up_proj", "down_proj"])
def test_an_untrained_parameter_must_be_as_in_the_base(tmp_path: Path, alone: str) -> None:
    logical = sized(Logical())
    found = look(
        tmp_path / "adapter", encode_alone(logical, alone), target_parameters=[f"mlp.experts.{alone}"]
    )
    base = base_weights()
    whole = merge(base, logical)
    own = "down_proj" if alone == "down_proj" else ("gate_proj", "up_proj")
    only = {
        name: whole[name] if name.split(".")[-2] in own and ".experts." in name else base[name]
        for name in base
    }
    plain = save(tmp_path / "base", base)
    assert compare(found, save(tmp_path / "only", only), plain).many == 0
    with pytest.raises(ReferenceInvalid, match="as the adapter does not change it"):
        compare(found, save(tmp_path / "whole", whole), plain)


def test_one_layers_parameter_in_the_other_packing_is_named(tmp_path: Path) -> None:
    logical, base = sized(Logical()), base_weights()
    tensors = encode(logical)
    name = "base_model.model.model.layers.1.mlp.experts.lora_B.weight"
    tensors[name] = encode(logical, packing="grouped_by_expert")[name]
    found = look(tmp_path / "adapter", tensors)
    result = compare(found, save(tmp_path / "merged", merge(base, logical)), save(tmp_path / "base", base))
    assert (result.other, result.many) == (("layer 1 down_proj",), 0)


def damage_scaling(base: Tensors) -> Tensors:
    return merge(base, sized(Logical()), attention(), scaling=2.1)


def damage_author(base: Tensors) -> Tensors:
    return merge(base, sized(Logical(seed=5)), attention())


def damage_gate_up(base: Tensors) -> Tensors:
    """Gate and up exchanged in one expert, which no file shows."""
    logical = sized(Logical())
    gate, up = logical.b[1, "gate_up_proj"][3].chunk(2)
    logical.b[1, "gate_up_proj"][3] = torch.cat([up, gate])
    return merge(base, logical, attention())


def damage_module(base: Tensors) -> Tensors:
    others = attention()
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
    others[name] = others[name].flip(1)
    return merge(base, sized(Logical()), others)


def damage_nan(base: Tensors) -> Tensors:
    merged = right(base)
    merged[single(0, 2, "down_proj")][1, 1] = torch.nan
    return merged


EXPERTS_MOVED = LAYERS * EXPERTS * len(PROJECTIONS)


@pytest.mark.parametrize(
    ("damage", "many", "worst"),
    [
        (damage_scaling, MATRICES, ""),
        (damage_author, EXPERTS_MOVED, " expert "),
        (damage_gate_up, 2, "layer 1 expert 3 "),
        (damage_module, 1, "layers.1.self_attn.k_proj"),
        (damage_nan, 1, "layer 0 expert 2 down_proj"),
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_another_delta_is_counted_and_the_worst_named(
    tmp_path: Path, damage: Any, many: int, worst: str, dtype: torch.dtype
) -> None:
    base = base_weights(dtype)
    found = meet(tmp_path, damage(base), base)
    assert (found.many, found.other) == (many, ())
    assert worst in found.worst and found.worst in dict(found.differing)
    assert found.largest == max(error for _, error in found.differing) > 0.04


def test_experts_that_were_never_routed_rightly_did_not_change(tmp_path: Path) -> None:
    """Their B is zero; read in the other packing it is spread over all, and the merge still tells."""
    logical, base = sized(Logical()), base_weights()
    for key in logical.b:
        logical.b[key][2] = 0
    merged, plain = save(tmp_path / "merged", merge(base, logical)), save(tmp_path / "base", base)
    found = compare(look(tmp_path / "right", encode(logical)), merged, plain)
    assert (found.many, found.matrices - found.visible) == (0, LAYERS * len(PROJECTIONS))
    wrong = look(tmp_path / "wrong", encode(logical), packing="grouped_by_expert")
    assert list(compare(wrong, merged, plain).other) == EVERY


# --- what is not to be trusted ---


def leave_out(*names: str) -> Any:
    return lambda base: right(base) | {name: base[name] for name in names}


def drop(name: str) -> Any:
    return lambda base: {key: weight for key, weight in right(base).items() if key != name}


ONE = single(1, 2, "up_proj")
ATTENTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("made", "where", "expected", "found"),
    [
        pytest.param(
            lambda base: base,
            "layer 0 expert 0 gate_proj",
            f"every weight changed that the adapter changes, {MATRICES} in all",
            f"{MATRICES} of them equal to the base's",
            id="the base itself",
        ),
        pytest.param(
            leave_out(*(name for name in base_weights() if ".experts." in name)),
            "layer 0 expert 0 gate_proj",
            f"{MATRICES} in all",
            f"{EXPERTS_MOVED} of them equal to the base's",
            id="experts left out without a word (unslothai/unsloth#5410)",
        ),
        pytest.param(
            leave_out(ONE), "layer 1 expert 2 up_proj", "every weight changed", "1 of them", id="one expert"
        ),
        pytest.param(
            leave_out(ATTENTION),
            "layers.0.self_attn.q_proj",
            "every weight changed",
            "1 of them",
            id="a module",
        ),
        pytest.param(
            lambda base: right(base) | {EMBEDDING: base[EMBEDDING] + 1},
            EMBEDDING,
            "the base's weight, as the adapter does not change it",
            "another",
            id="more than the adapter",
        ),
        pytest.param(
            lambda base: right(base) | {EMBEDDING: base[EMBEDDING][:-1]},
            EMBEDDING,
            "the base's weight",
            "another",
            id="a cut vocabulary",
        ),
        pytest.param(
            lambda base: right(base) | {EMBEDDING: base[EMBEDDING].to(torch.float8_e4m3fn)},
            EMBEDDING,
            "the base's weight",
            "another",
            id="a quantised part outside the adapter",
        ),
        pytest.param(drop(ONE), ONE, "one tensor for each expert", "no such tensor", id="an expert missing"),
        pytest.param(
            drop(ATTENTION), "self_attn.q_proj", "its weight", "nothing under", id="a module missing"
        ),
        pytest.param(
            lambda base: right(base) | {ONE: right(base)[ONE].T},
            ONE,
            "shape (7, 10), as its base has it",
            "shape (10, 7)",
            id="another shape",
        ),
        pytest.param(
            lambda base: {EMBEDDING: base[EMBEDDING]},
            "layer 0 gate_up_proj",
            "the tensors of its experts",
            "nothing under a name that is known",
            id="no experts",
        ),
    ],
)
def test_a_merge_that_cannot_be_trusted_is_refused_and_not_the_adapter(
    tmp_path: Path, made: Any, where: str, expected: str, found: str
) -> None:
    base = base_weights()
    with pytest.raises(ReferenceInvalid) as caught:
        meet(tmp_path, made(base), base)
    error = caught.value
    assert error.adapter == LABEL
    assert error.where.startswith("the merged checkpoint: ") and where in error.where
    assert expected in error.expected and found in error.found
    assert "This says nothing against the adapter" in str(error)


def test_a_merge_whose_deltas_all_vanish_in_rounding_shows_nothing(tmp_path: Path) -> None:
    base, logical = base_weights(BF16), sized(Logical(), 1e-6)
    found = look(tmp_path / "adapter", encode(logical))
    merged = merge(base, logical)
    assert all(torch.equal(merged[name], weight) for name, weight in base.items())
    with pytest.raises(ReferenceInvalid, match="found the base; expected a merge that differs from its base"):
        compare(found, save(tmp_path / "merged", merged), save(tmp_path / "base", base))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "its folder: found none"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 40), "that can be read"),
        (lambda folder: _cut(folder / "model.safetensors"), "a safetensors file that can be read"),
        (lambda folder: (folder / INDEX_NAME).write_text("[1"), "strict JSON"),
        (lambda folder: (folder / INDEX_NAME).write_text('{"a": 1}'), "weight_map"),
        (lambda folder: _grow(folder / INDEX_NAME), "found 100000001 bytes; expected at most 100000000"),
        (lambda folder: _index(folder, "../model.safetensors"), "names of safetensors files beside"),
        (lambda folder: _index(folder, "model.bin"), "names of safetensors files beside"),
        (lambda folder: _index(folder, "gone.safetensors"), "a safetensors file that can be read"),
    ],
)
def test_what_cannot_be_read_says_nothing_of_the_adapter(tmp_path: Path, spoil: Any, says: str) -> None:
    found = look(tmp_path / "adapter", encode(sized(Logical())) | attention())
    base, merged = save(tmp_path / "base", base_weights()), save(tmp_path / "m", right(base_weights()))
    spoil(merged)
    with pytest.raises(ReferenceInvalid) as caught:
        compare(found, merged, base)
    assert says in str(caught.value) and str(tmp_path) not in str(caught.value)


def _grow(path: Path) -> None:
    """Without taking room on the disk."""
    path.touch()
    os.truncate(path, 100_000_001)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _index(folder: Path, name: str) -> None:
    places = dict.fromkeys(load_file(folder / "model.safetensors"), name)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": places}))


def test_shards_with_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    base, places = base_weights(), {}
    (tmp_path / "merged").mkdir()
    for number in range(3):
        part = dict(list(right(base).items())[number::3])
        save_file(part, tmp_path / "merged" / f"model-{number}.safetensors")
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
    (tmp_path / "merged" / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found = look(tmp_path / "adapter", encode(sized(Logical())) | attention())
    assert compare(found, tmp_path / "merged", save(tmp_path / "base", base)).many == 0


def test_tensors_of_no_dimension_or_no_numbers_are_compared_like_others(tmp_path: Path) -> None:
    """safetensors slices neither; scales of a quantised part of a model are single numbers, for one."""
    odd = {
        "model.scale": torch.tensor(0.5),
        "model.steps": torch.tensor(3),
        "model.none": torch.zeros(0),
        "model.rows": torch.zeros(3, 0),
    }
    base = base_weights()
    assert meet(tmp_path / "same", right(base) | odd, base | odd).untouched == 1 + len(odd)
    for name in ("model.scale", "model.steps"):
        with pytest.raises(ReferenceInvalid, match=name):
            meet(tmp_path / name, right(base) | odd | {name: odd[name] + 1}, base | odd)


def quantise(weights: Tensors) -> Tensors:
    return {name: weight.to(torch.uint8) if name == ONE else weight for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("base", "merged", "whose", "found"),
    [
        pytest.param(quantise, right, "the base's weights", "U8", id="a quantised base"),
        pytest.param(
            lambda base: base, lambda base: quantise(right(base)), "the merged checkpoint", "U8", id="merge"
        ),
        pytest.param(
            lambda base: {name.replace(".experts.", ".parts."): weight for name, weight in base.items()},
            right,
            "the base's weights",
            "nothing under a name that is known",
            id="other names",
        ),
    ],
)
def test_what_nothing_can_be_compared_with_is_said_to_be_so(
    tmp_path: Path, base: Any, merged: Any, whose: str, found: str
) -> None:
    with pytest.raises(WeightsIncomparable) as caught:
        meet(tmp_path, merged(base_weights()), base(base_weights()))
    assert caught.value.checkpoint == whose and found in caught.value.found
    assert str(caught.value).startswith(f"{whose}: ") and "Only weights as trained" in str(caught.value)


# --- one matrix ---


def chains(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, dtype: torch.dtype
) -> Tensors:
    """What programs make of one merge: in float32, all in the merge's dtype, or with a delta of the base's dtype."""
    exact = scaling * (b.T.float() @ a.float())
    rounded = ((b.to(dtype).T.float() @ a.to(dtype).float()).to(dtype) * scaling).to(dtype)
    return {
        "float32": (base.float() + exact).to(dtype),
        "merge": base.to(dtype) + rounded,
        "base": (base + exact.to(base.dtype)).to(dtype),
    }


@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("factors", [F32, BF16])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_every_way_of_rounding_agrees_and_no_other_delta_does(
    dtype: torch.dtype, factors: torch.dtype, size: float
) -> None:
    generator = torch.Generator().manual_seed(int(1e6 * size))
    base = (0.02 * torch.randn(96, 112, generator=generator)).to(F16 if dtype is F16 else BF16)
    a = torch.randn(6, 112, generator=generator).to(factors)
    b = (size * torch.randn(6, 96, generator=generator)).to(factors)
    for name, merged in chains(base, a, b, 1.7, dtype).items():
        result = compare_matrix(base, merged, Factors(a, b, 1.7))
        assert result.agrees, (name, result)
        wrong = compare_matrix(base, merged, Factors(a, b.roll(1, 0), 1.7))
        assert not wrong.agrees and wrong.error > 0.9, (name, wrong)
        assert not compare_matrix(base, base.to(dtype), Factors(a, b, 1.7)).agrees or size <= 1e-6


def test_a_matrix_left_out_is_told_from_one_that_rounding_hides() -> None:
    base = torch.full((8, 6), 1.0, dtype=BF16)
    a, b = torch.ones(2, 6), torch.full((2, 8), 1e-4)
    hidden = compare_matrix(base, base, Factors(a, b, 1.0))
    assert (hidden.moved, hidden.due, hidden.unchanged, hidden.agrees) == (False, False, False, True)
    left_out = compare_matrix(base, base, Factors(a, b * 1000, 1.0))
    assert (left_out.moved, left_out.due, left_out.unchanged, left_out.agrees) == (False, True, True, False)


# --- PEFT's merge of the families' models, as transformers saves them ---

# transformers saves granitemoe's experts as the linear maps of its version 4, which have no row in families.py.
SAVED = [name for name in FAMILIES if name != "granitemoe"]
FAST = ["mixtral", "gpt_oss"]


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.real) for name in SAVED]
)
def test_a_merge_by_peft_agrees_in_every_way_of_saving_it(tmp_path: Path, name: str) -> None:
    parts = ("routed_experts", "attention")
    save_family(name, tmp_path / "base")
    save_by_peft(name, parts, tmp_path / "adapter")
    model, kinds = merge_by_peft(name, parts), set()
    base = read_base_config(tmp_path / "base", label="its base")
    readings = {
        packing: inspect_adapter(tmp_path / "adapter", base, label=LABEL, forced=packing)
        for packing in Packing
    }
    for original in (True, False):
        model.save_pretrained(tmp_path / f"{original}", save_original_format=original)
        kinds.add(
            any(".experts.0." in name for name in load_file(tmp_path / f"{original}" / "model.safetensors"))
        )
        for packing, found in readings.items():
            result = compare(found, tmp_path / f"{original}", tmp_path / "base")
            every = [f"layer {at} {one.name}" for at in base.sparse_layers for one in base.family.parameters]
            assert (result.many, list(result.other)) == (0, [] if packing is Packing.RANK_MAJOR else every)
            assert result.largest < 1e-6
    assert kinds == {False} if name in ("gpt_oss", "llama4") or "gemma4" in name else kinds == {True, False}
