"""Properties of conversion over all sizes: nothing lost, nothing doubled undeclared, one output for all encodings."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_builders import (
    BIT_FOR_BIT,
    HEAD_DIM,
    HEADS,
    LABEL,
    PREFIX,
    PROJECTIONS,
    Logical,
    Separate,
    config_fields,
    encode,
    encode_alone,
    encode_cubes,
    encode_experts,
    make_base,
    mark,
    save_adapter,
    spell_out,
    stack_blocks,
)

from tasks.lora.base import BaseConfig
from tasks.lora.config import parse_adapter_config
from tasks.lora.convert import digest_adapter
from tasks.lora.files import AdapterFiles
from tasks.lora.header import TensorEntry
from tasks.lora.inspect import inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.packing import PackingDecision, Source
from tasks.lora.plan import ConversionPlan, plan_conversion
from tasks.lora.problems import Problems
from tasks.lora.reading import read_layout
from tasks.lora.sources import AdapterLayout, SourceForm
from tasks.lora.target import TargetFormat
from tasks.lora.views import View, whole

pytestmark = pytest.mark.real

Tensors = dict[str, torch.Tensor]
PACKINGS = [packing.value for packing in Packing]
ORIENTATIONS = ["standard", "swapped"]


@dataclass(frozen=True)
class Sizes:
    experts: int
    hidden: int
    inter: int
    layers: int

    def base(self) -> BaseConfig:
        return make_base(
            num_local_experts=self.experts,
            hidden_size=self.hidden,
            moe_intermediate_size=self.inter,
            num_hidden_layers=self.layers,
        )

    def fields(self) -> dict[str, Any]:
        return {
            "experts": self.experts,
            "hidden": self.hidden,
            "inter": self.inter,
            "layers": tuple(range(self.layers)),
        }


all_sizes = st.builds(Sizes, st.integers(2, 5), st.integers(2, 7), st.integers(2, 6), st.integers(1, 3))
ranks = st.integers(1, 4)
per_parameter = st.fixed_dictionaries(
    {"gate_up_proj": st.sampled_from(PACKINGS), "down_proj": st.sampled_from(PACKINGS)}
)


def number(meant: Logical | Separate) -> None:
    """Make every number of the adapter another whole number, from 1 up."""
    start = 1
    for factors in (meant.a, meant.b):
        for key, tensor in factors.items():
            factors[key] = torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
            start += tensor.numel()


def read(
    tensors: Tensors, base: BaseConfig, packings: Mapping[str, str], *, block_diagonal: bool, **config: Any
) -> AdapterLayout:
    """The layout of an adapter that is nowhere on a disk."""
    entries, place = [], 0
    for name, tensor in tensors.items():
        end = place + 4 * tensor.numel()
        entries.append(TensorEntry(name, "F32", tuple(tensor.shape), place, end))
        place = end
    files = AdapterFiles(LABEL, Path("nowhere"), (), tuple(entries), ())
    fields = config_fields(**{"target_parameters": None, **config})
    problems = Problems()
    layout = read_layout(
        files, parse_adapter_config(json.dumps(fields).encode(), label=LABEL), base, problems
    )
    assert layout is not None and not problems
    decisions = tuple(
        PackingDecision(parameter, Packing(packings[parameter]), Source.FORCED, ())
        for parameter in dict.fromkeys(pair.parameter for pair in layout.pairs)
        if layout.form is SourceForm.STACKED
    )
    return replace(layout, packing=decisions, block_diagonal=block_diagonal)


def list_places(view: View) -> list[int]:
    return [
        view.offset + sum(index * stride for index, stride in zip(indices, view.strides, strict=True))
        for indices in itertools.product(*map(range, view.shape))
    ]


def execute(plan: ConversionPlan, source: Tensors) -> tuple[Tensors, Counter[int]]:
    """Carry a plan out number by number; return the output and how often each number was taken."""
    made: Tensors = {}
    taken: Counter[int] = Counter()
    for block in plan.blocks:
        numbers = [0] * sum(math.prod(tensor.shape) for tensor in block.group.tensors)
        filled: set[int] = set()
        for piece in block.pieces:
            stored = [value for entry in piece.sources for value in source[entry.name].flatten().tolist()]
            places = list_places(piece.place or whole(*piece.view.shape))
            for place, origin in zip(places, list_places(piece.view), strict=True):
                assert place not in filled, "two numbers for one place"
                filled.add(place)
                numbers[place] = stored[origin]
                taken[stored[origin]] += 1
        if block.pieces and block.pieces[0].place is None:
            assert len(filled) == len(numbers)
        for tensor in block.group.tensors:
            count = math.prod(tensor.shape)
            made[tensor.name] = torch.tensor(numbers[:count]).reshape(tensor.shape)
            del numbers[:count]
        assert not numbers
    del taken[0]
    return made, taken


def assert_same(made: Tensors, expected: Tensors) -> None:
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name


def count(*tensors: torch.Tensor) -> Counter[int]:
    return Counter(value for tensor in tensors for value in tensor.flatten().tolist())


@settings(max_examples=35, deadline=None)
@given(all_sizes, ranks, ranks, per_parameter, st.sampled_from(ORIENTATIONS))
def test_every_number_of_a_stacked_source_goes_to_its_place(
    sizes: Sizes, inner: int, outer: int, packings: dict[str, str], orientation: str
) -> None:
    """Each once, but A of gate_up: gate and up share it, so that one tensor per expert needs it twice."""
    logical, other = Logical(rank=inner, **sizes.fields()), Logical(rank=outer, **sizes.fields())
    for key in logical.a:
        if key[1] == "down_proj":
            logical.a[key], logical.b[key] = other.a[key], other.b[key]
    number(logical)
    source = encode(logical, packing=packings, orientation=orientation)
    ranks = {"r": inner, "rank_pattern": {"down_proj": outer}}
    layout = read(source, sizes.base(), packings, block_diagonal=False, **ranks)
    assert layout.orientation == orientation
    shared = count(*(tensor for key, tensor in logical.a.items() if key[1] == "gate_up_proj"))
    once = count(*logical.a.values(), *logical.b.values())
    made, taken = execute(plan_conversion(layout), source)
    assert_same(made, spell_out(logical))
    assert taken == once + shared
    made, taken = execute(plan_conversion(layout, TargetFormat.STACKED), source)
    assert_same(made, encode(logical))
    assert taken == once


@settings(max_examples=20, deadline=None)
@given(all_sizes, ranks, per_parameter, st.sampled_from(ORIENTATIONS))
def test_every_number_of_a_block_diagonal_source_goes_to_its_place(
    sizes: Sizes, rank: int, packings: dict[str, str], orientation: str
) -> None:
    meant = Separate(dict.fromkeys(PROJECTIONS, rank), **sizes.fields())
    number(meant)
    stacked = stack_blocks(meant)
    for factors in (stacked.a, stacked.b):
        factors.update({key: tensor.long() for key, tensor in factors.items()})
    stacked.dtype = torch.int64
    source = encode(stacked, packing=packings, orientation=orientation)
    ranks = {"r": rank, "rank_pattern": {"gate_up_proj": 2 * rank}}
    layout = read(source, sizes.base(), packings, block_diagonal=True, **ranks)
    for format, expected in (
        (TargetFormat.PER_EXPERT, encode_experts(meant)),
        (TargetFormat.STACKED, encode(stacked)),
    ):
        made, taken = execute(plan_conversion(layout, format), source)
        assert_same(made, expected)
        assert taken == count(*meant.a.values(), *meant.b.values())


@settings(max_examples=25, deadline=None)
@given(
    all_sizes,
    st.tuples(ranks, ranks, ranks),
    st.booleans(),
    st.sets(st.tuples(st.sampled_from(PROJECTIONS), st.sampled_from("AB"))),
)
def test_every_number_of_separate_projections_goes_to_its_place(
    sizes: Sizes, each: tuple[int, int, int], cubes: bool, shared: set[tuple[str, str]]
) -> None:
    """Each once, and what all experts share once for every expert."""
    meant = Separate(
        dict(zip(PROJECTIONS, each, strict=True)), **sizes.fields(), shared=tuple(shared) if cubes else ()
    )
    number(meant)
    source = encode_cubes(meant, numbered=False) if cubes else encode_experts(meant)
    named = dict(zip(PROJECTIONS, each, strict=True))
    layout = read(source, sizes.base(), {}, block_diagonal=False, rank_pattern=named, alpha_pattern=named)
    expected_counts: Counter[int] = Counter()
    for factor, factors in (("A", meant.a), ("B", meant.b)):
        for (_, name), tensor in factors.items():
            times = sizes.experts if (name, factor) in meant.shared else 1
            expected_counts.update({value: times for value in tensor.flatten().tolist()})
    stacked = stack_blocks(meant)
    for factors in (stacked.a, stacked.b):
        factors.update({key: tensor.long() for key, tensor in factors.items()})
    stacked.dtype = torch.int64
    for format, expected in (
        (TargetFormat.PER_EXPERT, encode_experts(meant)),
        (TargetFormat.STACKED, encode(stacked)),
    ):
        made, taken = execute(plan_conversion(layout, format), source)
        assert_same(made, expected)
        assert taken == expected_counts


@settings(max_examples=15, deadline=None)
@given(
    all_sizes,
    ranks,
    st.sampled_from(["gate_up_proj", "down_proj"]),
    st.sampled_from(PACKINGS),
    st.sampled_from(ORIENTATIONS),
    st.sampled_from(BIT_FOR_BIT),
)
def test_absent_projections_are_zeros_and_take_nothing(
    sizes: Sizes, rank: int, parameter: str, packing: str, orientation: str, format: TargetFormat
) -> None:
    """The others are as they are."""
    logical = Logical(rank=rank, **sizes.fields())
    number(logical)
    source = encode_alone(logical, parameter, packing=packing, orientation=orientation)
    version = "0.21.2" if orientation == "standard" else "0.18.1"
    layout = read(
        source, sizes.base(), {parameter: packing}, block_diagonal=False, r=rank, peft_version=version
    )
    assert layout.absent == (("down_proj",) if parameter == "gate_up_proj" else ("gate_proj", "up_proj"))
    made, taken = execute(plan_conversion(layout, format), source)
    whole_output = spell_out(logical) if format is TargetFormat.PER_EXPERT else encode(logical)
    assert made.keys() == whole_output.keys()
    inner = ("gate_proj", "up_proj", "base_layer")
    for name, tensor in whole_output.items():
        trained = any(part in name for part in inner) is (parameter == "gate_up_proj")
        assert torch.equal(made[name], tensor if trained else torch.zeros_like(tensor)), name
    assert set(taken) == set(count(*source.values()))


@settings(max_examples=20, deadline=None)
@given(
    all_sizes,
    ranks,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(per_parameter, min_size=4, max_size=4),
    st.integers(0, 3),
)
def test_all_encodings_become_the_same_bytes(
    sizes: Sizes,
    rank: int,
    dtype: torch.dtype,
    other_dtype: torch.dtype,
    packings: list[dict[str, str]],
    seed: int,
) -> None:
    """unsloth#6930, Automodel#3592: each parameter in either packing, each file in either orientation."""
    logical = Logical(rank=rank, dtype=dtype, seed=seed, **sizes.fields())
    others = {
        f"{PREFIX}.0.self_attn.o_proj.lora_A.weight": torch.ones(rank, HEADS * HEAD_DIM).to(other_dtype),
        f"{PREFIX}.0.self_attn.o_proj.lora_B.weight": torch.ones(sizes.hidden, rank).to(other_dtype),
    }
    with TemporaryDirectory() as folder:
        digests = set()
        for place, packing in enumerate(packings):
            orientation = ORIENTATIONS[place % 2]
            tensors = encode(logical, packing=packing, orientation=orientation) | others
            path = save_adapter(Path(folder) / str(place), tensors, r=rank, **mark(**packing))
            found = inspect_adapter(path, sizes.base(), label=LABEL, header_only=True)
            assert found.orientation == orientation
            digests.add(
                tuple(
                    digest_adapter(found.files, plan_conversion(found.layout, format))
                    for format in TargetFormat
                )
            )
    assert len(digests) == 1
