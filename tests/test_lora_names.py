"""Tensor names: parsing and formatting are inverses, and what is not understood is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_builders import FAMILY, LABEL
from synthetic_builders import (
    INTERLEAVED,
    RENAMED,
    RENAMED_FIELDS,
    UNGATED,
    UNGATED_FIELDS,
    read_base_of,
)

from tasks.lora.errors import (
    AdapterError,
    CollidingNames,
    MalformedKey,
    UnexpectedTensor,
    UnsupportedConfig,
)
from tasks.lora.families import FAMILIES
from tasks.lora.family import Family, LayerKind, TensorClass
from tasks.lora.names import (
    CubeKey,
    ExpertKey,
    Factor,
    ModuleKey,
    ParsedKey,
    StackedKey,
    find_module,
    format_key,
    format_parameter,
    format_served_expert_keys,
    format_served_key,
    format_served_parameter,
    parse_key,
    parse_names,
)
from tasks.lora.problems import Problems

LAYER = "base_model.model.model.layers"

numbers = st.integers(min_value=0, max_value=999_999)
factors = st.sampled_from(Factor)
projections = st.sampled_from([name for item in FAMILY.parameters for name in item.projections])
keys = st.one_of(
    st.builds(StackedKey, numbers, st.sampled_from([item.name for item in FAMILY.parameters]), factors),
    st.builds(ExpertKey, numbers, numbers, projections, factors),
    st.builds(CubeKey, numbers, projections, factors),
    st.builds(
        lambda layer, module, factor: ModuleKey(layer, module.sources[0], module.kind, factor),
        numbers,
        st.sampled_from(FAMILY.modules),
        factors,
    ),
)


@given(keys)
def test_parsing_undoes_formatting(key: ParsedKey) -> None:
    assert parse_key(format_key(key, FAMILY), FAMILY, LABEL) == key


@given(keys, st.sampled_from(["default", "author_17", "weight", "0", "lora_A"]), st.data())
def test_what_trainers_leave_in_a_name_changes_nothing(
    key: ParsedKey, held: str, data: st.DataObject
) -> None:
    """torch.compile's segment anywhere, PEFT's adapter name before the end, the prefix missing: in any mixture."""
    parts = format_key(key, FAMILY).split(".")
    if data.draw(st.booleans(), "adapter name"):
        parts.insert(-1, held)
    if data.draw(st.booleans(), "no prefix"):
        del parts[:2]
    for place in sorted(data.draw(st.sets(st.integers(0, len(parts)), max_size=3), "compiled"), reverse=True):
        parts.insert(place, "_orig_mod")
    assert parse_key(".".join(parts), FAMILY, LABEL) == key


@given(
    st.text(max_size=80)
    | st.from_regex(r"base_model\.model\.model\.layers\.[0-9]+\.[a-z_.]+\.lora_[AB]\.weight")
)
def test_whatever_is_parsed_is_formatted_back(text: str) -> None:
    """A name in PEFT's spelling has one meaning: what would be written is what was read."""
    try:
        key = parse_key(text, FAMILY, LABEL)
    except AdapterError:
        return
    assert format_key(key, FAMILY) == text


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (
            f"{LAYER}.3.mlp.experts.base_layer.lora_A.weight",
            StackedKey(3, "gate_up_proj", Factor.A),
        ),
        (f"{LAYER}.3.mlp.experts.lora_B.weight", StackedKey(3, "down_proj", Factor.B)),
        (
            f"{LAYER}.47.mlp.experts.127.up_proj.lora_B.weight",
            ExpertKey(47, 127, "up_proj", Factor.B),
        ),
        (f"{LAYER}.2.mlp.experts.gate_proj.lora_A.weight", CubeKey(2, "gate_proj", Factor.A)),
        (f"{LAYER}.2.mlp.experts.up_proj.lora_B.weight", CubeKey(2, "up_proj", Factor.B)),
        (
            f"{LAYER}.0.self_attn.q_proj.lora_A.weight",
            ModuleKey(0, "layers.{layer}.self_attn.q_proj", TensorClass.ATTENTION, Factor.A),
        ),
        (
            f"{LAYER}.0.mlp.gate.lora_A.weight",
            ModuleKey(0, "layers.{layer}.mlp.gate", TensorClass.ROUTER, Factor.A),
        ),
        (
            f"{LAYER}.0.mlp.gate_proj.lora_A.weight",
            ModuleKey(0, "layers.{layer}.mlp.gate_proj", TensorClass.OTHER, Factor.A),
        ),
    ],
)
def test_names_as_programs_write_them(key: str, expected: ParsedKey) -> None:
    assert parse_key(key, FAMILY, LABEL) == expected
    assert format_key(expected, FAMILY) == key


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        # Tinker: w1 is the gate, w3 the up and w2 the down projection.
        (f"{LAYER}.0.mlp.experts.w1.lora_A.weight", CubeKey(0, "gate_proj", Factor.A)),
        (f"{LAYER}.0.mlp.experts.w3.lora_B.weight", CubeKey(0, "up_proj", Factor.B)),
        (f"{LAYER}.0.mlp.experts.w2.lora_A.weight", CubeKey(0, "down_proj", Factor.A)),
        ("model.layers.0.mlp.experts.lora_A.weight", StackedKey(0, "down_proj", Factor.A)),
        (
            f"{LAYER}.0.mlp.experts.base_layer.lora_A.default.weight",
            StackedKey(0, "gate_up_proj", Factor.A),
        ),
        (
            "base_model.model._orig_mod.model.layers.0._orig_mod.mlp.experts.lora_B.weight",
            StackedKey(0, "down_proj", Factor.B),
        ),
        (
            "_orig_mod.model.layers.0.mlp.experts.7.up_proj.lora_B.best.weight",
            ExpertKey(0, 7, "up_proj", Factor.B),
        ),
        (f"{LAYER}.0.mlp.experts.5.w3.lora_A.weight", ExpertKey(0, 5, "up_proj", Factor.A)),
    ],
)
def test_other_spellings_are_understood(key: str, expected: ParsedKey) -> None:
    assert parse_key(key, FAMILY, LABEL) == expected
    assert format_key(expected, FAMILY) != key


RENAMED_BASE = read_base_of(RENAMED, **RENAMED_FIELDS, architectures=["MadeRenamedForConditionalGeneration"])
WHOLE = "base_model.model.language_model.model.layers"
TEXT_BASE = read_base_of(RENAMED, **RENAMED_FIELDS)
UNGATED_BASE = read_base_of(UNGATED, **UNGATED_FIELDS)


@pytest.mark.parametrize(
    "decoder", ["model.language_model.", "model.", "language_model.model."], ids=["trainer", "text", "engine"]
)
@pytest.mark.parametrize(
    ("path", "expected", "served"),
    [
        (
            "1.mlp.experts.base_layer",
            StackedKey(1, "gate_up_proj", Factor.B),
            "1.block_sparse_moe.experts.base_layer",
        ),
        ("1.block_sparse_moe.experts", StackedKey(1, "down_proj", Factor.B), "1.block_sparse_moe.experts"),
        ("2.mlp.experts.3.up_proj", ExpertKey(2, 3, "up_proj", Factor.B), "2.block_sparse_moe.experts.3.w3"),
        ("2.mlp.experts.3.w1", ExpertKey(2, 3, "gate_proj", Factor.B), "2.block_sparse_moe.experts.3.w1"),
        (
            "2.block_sparse_moe.experts.0.w2",
            ExpertKey(2, 0, "down_proj", Factor.B),
            "2.block_sparse_moe.experts.0.w2",
        ),
        (
            "1.moe.gate",
            ModuleKey(1, "layers.{layer}.mlp.gate", TensorClass.ROUTER, Factor.B),
            "1.block_sparse_moe.gate",
        ),
        (
            "1.shared_mlp.up_proj",
            ModuleKey(1, "layers.{layer}.mlp.shared_expert.up_proj", TensorClass.SHARED_EXPERTS, Factor.B),
            "1.shared_mlp.up_proj",
        ),
        (
            "0.self_attn.q_proj",
            ModuleKey(0, "layers.{layer}.self_attn.q_proj", TensorClass.ATTENTION, Factor.B),
            "0.self_attn.q_proj",
        ),
    ],
)
def test_names_of_trainers_become_the_engines(
    decoder: str, path: str, expected: ParsedKey, served: str
) -> None:
    """vllm#34186, vllm#39278: the same factor under every name, written as the class that serves it takes it."""
    key = parse_key(f"base_model.model.{decoder}layers.{path}.lora_B.weight", RENAMED, LABEL)
    assert key == expected and not isinstance(key, CubeKey)
    assert format_served_key(key, RENAMED_BASE) == f"{WHOLE}.{served}.lora_B.weight"
    assert format_served_key(key, TEXT_BASE) == f"{LAYER}.{served}.lora_B.weight"


@pytest.mark.parametrize(
    "path", ["1.moe.experts", "1.moe.experts.base_layer", "1.moe.experts.w1", "1.mlp.router"]
)
def test_names_that_no_template_spells(path: str) -> None:
    """An older template of one module says nothing of others."""
    with pytest.raises(UnexpectedTensor):
        parse_key(f"{LAYER}.{path}.lora_B.weight", RENAMED, LABEL)


def test_one_factor_under_two_decoders_is_refused() -> None:
    names = [f"base_model.model.{decoder}layers.1.mlp.gate.lora_A.weight" for decoder in RENAMED.decoders]
    problems = Problems()
    parse_names(names, RENAMED, LABEL, problems)
    error = problems.merge()
    assert isinstance(error, CollidingNames)
    assert (error.where, error.found) == (names[1], f"also {names[0]}")


def test_projections_without_a_gate() -> None:
    """unsloth#4476, vllm#47088: up and down only, each a parameter of its own."""
    layer = "base_model.model.backbone.layers.1.mixer.experts"
    found = [
        parse_key(f"{layer}.{path}lora_A.weight", UNGATED, LABEL)
        for path in ("base_layer.", "", "2.up_proj.", "w1.", "down_proj.")
    ]
    assert found == [
        StackedKey(1, "up_proj", Factor.A),
        StackedKey(1, "down_proj", Factor.A),
        ExpertKey(1, 2, "up_proj", Factor.A),
        CubeKey(1, "up_proj", Factor.A),
        CubeKey(1, "down_proj", Factor.A),
    ]
    served = f"{LAYER}.1.mixer.experts"
    assert [format_served_key(key, UNGATED_BASE) for key in found if not isinstance(key, CubeKey)] == [
        f"{served}.base_layer.lora_A.weight",
        f"{served}.lora_A.weight",
        f"{served}.2.up_proj.lora_A.weight",
    ]
    with pytest.raises(UnexpectedTensor):
        parse_key(f"{layer}.2.gate_proj.lora_A.weight", UNGATED, LABEL)


def test_names_of_all_experts_are_those_of_each() -> None:
    for base in (RENAMED_BASE, TEXT_BASE, UNGATED_BASE):
        for parameter in base.family.parameters:
            for projection in parameter.projections:
                assert format_served_expert_keys(1, projection, Factor.A, base) == [
                    format_served_key(ExpertKey(1, expert, projection, Factor.A), base) for expert in range(4)
                ]


def test_row_of_a_module_is_that_of_its_layer() -> None:
    template = "layers.{layer}.self_attn.q_proj"
    found = [
        find_module(ModuleKey(layer, template, TensorClass.ATTENTION, Factor.A), RENAMED_BASE).layers
        for layer in range(3)
    ]
    sliding, full = LayerKind.SLIDING_ATTENTION, LayerKind.FULL_ATTENTION
    assert found == [sliding, full, sliding]
    router = ModuleKey(0, "layers.{layer}.mlp.gate", TensorClass.ROUTER, Factor.A)
    with pytest.raises(ValueError, match=r"tiny-base: layer 0 has no layers\.\{layer\}\.mlp\.gate"):
        find_module(router, RENAMED_BASE)


def test_names_of_parameters() -> None:
    assert format_parameter(2, "down_proj", RENAMED) == "model.language_model.layers.2.mlp.experts.down_proj"
    assert format_served_parameter(2, "down_proj", RENAMED_BASE) == (
        "language_model.model.layers.2.block_sparse_moe.experts.down_proj"
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_name_of_a_family_has_two_meanings(family: Family) -> None:
    meanings: dict[str, set[str]] = {}
    for parameter in family.parameters:
        for spelt in (parameter.projections, parameter.served, parameter.numbered):
            for name, projection in zip(spelt, parameter.projections, strict=True):
                meanings.setdefault(name, set()).add(projection)
    for module in family.modules:
        for template in {*module.sources, module.served}:
            meanings.setdefault(template, set()).add(module.sources[0])
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}


@given(st.data())
def test_parsing_undoes_formatting_in_every_family(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from([*FAMILIES, INTERLEAVED, UNGATED, RENAMED]))
    layer, factor = data.draw(numbers), data.draw(factors)
    parameter = data.draw(st.sampled_from(family.parameters))
    projection = data.draw(st.sampled_from(parameter.projections))
    module = data.draw(st.sampled_from(family.modules))
    for key in (
        StackedKey(layer, parameter.name, factor),
        ExpertKey(layer, data.draw(numbers), projection, factor),
        CubeKey(layer, projection, factor),
        ModuleKey(layer, module.sources[0], module.kind, factor),
    ):
        assert parse_key(format_key(key, family), family, LABEL) == key


def test_names_keep_their_order() -> None:
    names = [f"{LAYER}.{layer}.mlp.experts.lora_{factor}.weight" for layer in (10, 2) for factor in "BA"]
    assert parse_names(names, FAMILY, LABEL, Problems()) == tuple(
        StackedKey(layer, "down_proj", Factor(factor)) for layer in (10, 2) for factor in "BA"
    )


@pytest.mark.parametrize(
    ("names", "where", "expected", "found"),
    [
        (
            (f"{LAYER}.0.mlp.experts.lora_A.weight", f"{LAYER}.0.mlp.experts.lora_A.default.weight"),
            f"{LAYER}.0.mlp.experts.lora_A.default.weight",
            f"one name of {LAYER}.0.mlp.experts.lora_A.weight",
            f"also {LAYER}.0.mlp.experts.lora_A.weight",
        ),
        (
            ("model.layers.0.mlp.gate.lora_B.weight", f"{LAYER}._orig_mod.0.mlp.gate.lora_B.weight"),
            f"{LAYER}._orig_mod.0.mlp.gate.lora_B.weight",
            f"one name of {LAYER}.0.mlp.gate.lora_B.weight",
            "also model.layers.0.mlp.gate.lora_B.weight",
        ),
        (
            (f"{LAYER}.0.mlp.experts.w1.lora_A.weight", f"{LAYER}.0.mlp.experts.gate_proj.lora_A.weight"),
            f"{LAYER}.0.mlp.experts.gate_proj.lora_A.weight",
            f"one name of {LAYER}.0.mlp.experts.gate_proj.lora_A.weight",
            f"also {LAYER}.0.mlp.experts.w1.lora_A.weight",
        ),
        # Two adapters of one PEFT model, dumped together.
        (
            (f"{LAYER}.0.mlp.experts.lora_A.default.weight", f"{LAYER}.1.mlp.experts.lora_A.other.weight"),
            f"{LAYER}.1.mlp.experts.lora_A.other.weight",
            "one adapter, 'default'",
            "a factor of the adapter 'other'",
        ),
    ],
)
def test_names_that_become_one_are_refused(
    names: tuple[str, str], where: str, expected: str, found: str
) -> None:
    problems = Problems()
    assert parse_names(names, FAMILY, LABEL, problems)[0] is not None
    error = problems.merge()
    assert isinstance(error, CollidingNames) and error.others == ()
    assert (error.adapter, error.where, error.expected, error.found) == (LABEL, where, expected, found)
    assert str(error) == f"{LABEL}: {where}: found {found}; expected {expected}. {error.advice}"
    assert "save the one that is meant" in error.advice


@pytest.mark.parametrize(
    ("key", "error", "found"),
    [
        # vLLM skips every key with base_layer in it, so a misspelt one would be lost without a word.
        (f"{LAYER}.0.mlp.expertz.base_layer.lora_A.weight", UnexpectedTensor, "no module of this family"),
        (f"{LAYER}.0.mlp.shared_expert.up_proj.lora_A.weight", UnexpectedTensor, "no module of this family"),
        (f"{LAYER}.0.mlp.experts.0.w4.lora_A.weight", UnexpectedTensor, "no module of this family"),
        (f"{LAYER}.00.mlp.experts.lora_A.weight", UnexpectedTensor, "no module of this family"),
        (
            "base_model.model.model.language_model.layers.0.mlp.experts.lora_A.weight",
            UnexpectedTensor,
            "no module",
        ),
        (f"{LAYER}.0.mlp.experts.w4.lora_A.weight", UnexpectedTensor, "no module of this family"),
        (f"{LAYER}.0.mlp.w1.lora_A.weight", UnexpectedTensor, "no module of this family"),
        ("layers.0.mlp.experts.lora_A.weight", UnexpectedTensor, "no module of this family"),
        (f"{LAYER}.0.mlp.experts.lora_A.two.names.weight", MalformedKey, "'names.weight'"),
        (f"{LAYER}.0.mlp.experts.lora_C.weight", MalformedKey, "'lora_C.weight'"),
        (f"{LAYER}.0.mlp.experts.gate_up_proj", MalformedKey, "'experts.gate_up_proj'"),
        # vllm#6983: DoRA by its keys alone, whatever the config says.
        (f"{LAYER}.0.self_attn.q_proj.lora_magnitude_vector.weight", UnsupportedConfig, "DoRA"),
        (f"{LAYER}.0.self_attn.q_proj.lora_magnitude_vector.default.weight", UnsupportedConfig, "DoRA"),
        (f"{LAYER}.0.self_attn.q_proj.lora_B.bias", UnsupportedConfig, "bias"),
        ("model.layers.0.self_attn.q_proj.lora_B.default.bias", UnsupportedConfig, "bias"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", UnsupportedConfig, "embedding"),
        # Automodel#2022, #3462: vLLM's prompt log-probabilities leave lm_head's LoRA out.
        ("base_model.model.lm_head.lora_A.weight", UnsupportedConfig, "lm_head"),
        ("base_model.model.lm_head.weight", UnsupportedConfig, "lm_head"),
        ("lm_head.lora_A.default.weight", UnsupportedConfig, "lm_head"),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            UnsupportedConfig,
            "token",
        ),
    ],
)
def test_other_names_are_refused(key: str, error: type[AdapterError], found: str) -> None:
    with pytest.raises(error) as caught:
        parse_key(key, FAMILY, LABEL)
    assert str(caught.value).startswith(f"{LABEL}: {key}: found ")
    assert found in caught.value.found


def test_long_names_are_cut_in_messages() -> None:
    with pytest.raises(MalformedKey) as caught:
        parse_key("x" * 1_000_000, FAMILY, LABEL)
    assert len(str(caught.value)) < 1000
