"""adapter_config.json and the base's config.json, read without trust."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora_builders import EXPERTS, LABEL, base_fields, config_fields, make_base, short_id
from synthetic_builders import RENAMED, RENAMED_FIELDS, UNGATED, read_base_of
from transformers import Qwen3MoeConfig

from tasks.lora.base import read_base_config
from tasks.lora.config import (
    AdapterConfig,
    list_config_warnings,
    read_adapter_config,
    smallest_max_lora_rank,
)
from tasks.lora.errors import (
    AdapterError,
    CorruptFile,
    InvalidBaseConfig,
    InvalidConfig,
    MissingConfig,
    RankUnsupported,
    UnknownFamily,
    UnsupportedConfig,
)
from tasks.lora.family import ServedClass, size_of
from tasks.lora.files import MAX_CONFIG_BYTES

HIDDEN, HEADS, KV_HEADS = (
    size_of(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
)
HEAD_DIM = size_of("head_dim")
EXPERT_COUNT = size_of("num_experts", "num_local_experts")
INTERMEDIATE, MOE_INTERMEDIATE = size_of("intermediate_size"), size_of("moe_intermediate_size")


def read(folder: Path, **fields: Any) -> AdapterConfig:
    (folder / "adapter_config.json").write_text(json.dumps(config_fields(**fields)), "utf-8")
    return read_adapter_config(folder, label=LABEL)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(MissingConfig, match=r"found no such file; expected adapter_config.json"):
        read_adapter_config(tmp_path, label=LABEL)


def test_real_peft_config_is_read_without_warnings(tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]
    ).save_pretrained(tmp_path)
    config = read_adapter_config(tmp_path, label=LABEL)
    assert (config.r, config.lora_alpha, config.target_parameters) == (8, 16, ["mlp.experts.down_proj"])
    assert list_config_warnings(config) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("bias", "lora_only"),
        ("peft_type", "LOHA"),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [1, 2]),
        ("trainable_token_indices", [0]),
        ("megatron_config", {"x": 1}),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "loftq"),
    ],
)
def test_features_that_would_be_lost_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        read(tmp_path, **{field: value})
    assert caught.value.where == f"adapter_config.json: {field}"
    assert str(value) in caught.value.found


@pytest.mark.parametrize(
    ("field", "value"),
    [("init_lora_weights", "gaussian"), ("init_lora_weights", False), ("peft_type", "lora")],
)
def test_harmless_values_pass(tmp_path: Path, field: str, value: Any) -> None:
    read(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("r", 0, "0"),
        ("r", 2.5, "2.5"),
        ("r", True, "True"),
        ("r", "16", "'16'"),
        ("lora_alpha", 0, "0"),
        ("lora_alpha", -1, "-1"),
        ("lora_alpha", None, "None"),
        ("use_rslora", "yes", "'yes'"),
        ("target_parameters", "all", "'all'"),
        ("rank_pattern", {"q_proj": 0}, "0"),
        ("rank_pattern", {"q_proj": 2.5}, "2.5"),
        ("rank_pattern", {"q_proj": None}, "None"),
        ("rank_pattern", {"q_proj": 10**400}, "1000"),
        ("lora_alpha", 10**400, "1000"),
        ("lora_alpha", 1e300, r"1e\+300"),
        ("rank_pattern", ["q_proj"], r"\['q_proj'\]"),
        ("rank_pattern", {"q_(proj": 3}, r"'q_\(proj'"),
        ("alpha_pattern", {"q_proj": 0}, "0"),
        ("alpha_pattern", {"q_proj": "7"}, "'7'"),
        # What would take years to match against a name of sixty characters.
        ("alpha_pattern", {r"(\w+)*x": 3}, r"'\(.*\)\*x'"),
        ("alpha_pattern", {".*a.*b.*c.*d.*e": 3}, r"'\.\*a"),
        ("unsloth_fused_expert_lora", [], r"\[\]"),
    ],
)
def test_wrong_types_are_named(tmp_path: Path, field: str, value: Any, found: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"{LABEL}: adapter_config.json: {field}.*: found {found}"):
        read(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[]", r"found \[\]"),
        (b'{"r": 8, "r": 16, "lora_alpha": 1}', "'r' twice"),
        (b'{"r": 8, "lora_alpha": NaN}', "NaN"),
        (b'{"r": 8, "lora_alpha": 1e999}', "inf"),
        (b'{"lora_alpha": 1}', "adapter_config.json: r: found nothing"),
        (b'{"r": ' + b"9" * 5000 + b"}", "adapter_config.json"),
        (b"\xff", "not UTF-8"),
        (b"[" * 50_000, "nesting too deep"),
        (b'{"r": 8, "lora_alpha": 1, "bias": "\\udc00"}', "half of a surrogate pair"),
    ],
    ids=short_id,
)
def test_broken_json_is_named(tmp_path: Path, data: bytes, found: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(data)
    with pytest.raises(InvalidConfig, match=found):
        read_adapter_config(tmp_path, label=LABEL)


def test_huge_config_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "adapter_config.json").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(CorruptFile, match=r"at most 16000000 bytes"):
        read_adapter_config(tmp_path, label=LABEL)


@pytest.mark.parametrize(("rank", "smallest"), [(1, 1), (4, 8), (16, 16), (48, 64), (257, 320), (512, 512)])
def test_smallest_legal_max_lora_rank(tmp_path: Path, rank: int, smallest: int) -> None:
    assert smallest_max_lora_rank(read(tmp_path, r=rank).r) == smallest


def test_rank_above_the_engines(tmp_path: Path) -> None:
    with pytest.raises(RankUnsupported, match=r"adapter_config.json: r: found 513; expected at most 512"):
        read(tmp_path, r=513)


def test_unknown_fields_are_warned_of_if_they_say_something(tmp_path: Path) -> None:
    """peft#2275: new PEFT versions add fields all the time."""
    nothing = [None, False, [], {}, ""]
    empty = {f"future_{number}": value for number, value in enumerate(nothing * 4)}
    config = read(tmp_path, **empty, future_power="on", lora_dropout=0.1)
    warnings = list_config_warnings(config)
    assert len(warnings) == 2
    assert "future_power" in warnings[0]
    assert "lora_dropout 0.1" in warnings[1]


def test_base_as_transformers_writes_it(tmp_path: Path) -> None:
    """5.24 writes num_local_experts where earlier versions wrote num_experts."""
    Qwen3MoeConfig(
        hidden_size=24,
        moe_intermediate_size=10,
        num_hidden_layers=5,
        num_experts=6,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=100,
    ).save_pretrained(tmp_path)
    base = read_base_config(tmp_path, label="tiny")
    assert (base.size(HIDDEN), base.size(MOE_INTERMEDIATE), base.experts, base.layers) == (24, 10, 6, 5)
    assert base.sparse_layers == (1,)
    assert (base.size(HEADS * HEAD_DIM), base.size(KV_HEADS * HEAD_DIM), base.vocab) == (48, 16, 100)
    assert read_base_config(tmp_path / "config.json", label="tiny") == base


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": None, "num_experts": EXPERTS},
        {"num_experts": EXPERTS},
        {"decoder_sparse_step": None, "mlp_only_layers": None},
        {"architectures": ["Qwen3MoeForCausalLM"]},
    ],
)
def test_spellings_of_one_base(changes: dict[str, Any]) -> None:
    assert make_base(**changes) == make_base()


def test_sizes_may_sit_in_text_config() -> None:
    fields = base_fields()
    nested = {"model_type": fields.pop("model_type"), "text_config": fields}
    assert read_base_config(json.dumps(nested).encode(), label="tiny-base") == make_base()


def test_the_text_part_counts() -> None:
    """What the whole says beside it is of other parts, or left over."""
    base = read_base_of(RENAMED, **RENAMED_FIELDS, architectures=["MadeRenamedForConditionalGeneration"])
    text = base_fields(**RENAMED_FIELDS, model_type="made_renamed_text")
    wrong = {"hidden_size": 1, "num_experts": 9, "num_hidden_layers": 7, "layer_types": ["full_attention"]}
    named: dict[str, Any] = {"model_type": "siglip", "architectures": [base.served.architecture]}
    for outer in ({"model_type": "made_renamed"}, named, {}):
        assert read_base_of(RENAMED, whole=outer | wrong | {"text_config": text}) == base
    # What only the whole has counts too.
    del text["vocab_size"]
    outer = {"model_type": "made_renamed", "vocab_size": base.vocab, "text_config": text}
    assert read_base_of(RENAMED, whole=outer) == base


def test_the_model_type_of_the_whole_goes_first() -> None:
    text = base_fields(**RENAMED_FIELDS, model_type="made_ungated")
    whole = {"model_type": "made_renamed", "text_config": text}
    assert read_base_of(RENAMED, UNGATED, whole=whole).family is RENAMED


TEXT, WHOLE = RENAMED.served


@pytest.mark.parametrize(
    ("architectures", "nested", "expected"),
    [
        ("missing", False, TEXT),
        ("missing", True, WHOLE),
        (None, False, TEXT),
        (None, True, WHOLE),
        ([], False, TEXT),
        ([], True, WHOLE),
        ([WHOLE.architecture], False, WHOLE),
        ([WHOLE.architecture], True, WHOLE),
        ([TEXT.architecture, "Another"], True, TEXT),
    ],
)
def test_class_that_serves(architectures: Any, nested: bool, expected: ServedClass) -> None:
    fields = base_fields(**RENAMED_FIELDS, model_type="made_renamed")
    whole = {"model_type": "made_renamed", "text_config": fields} if nested else fields
    if architectures != "missing":
        whole = whole | {"architectures": architectures}
    assert read_base_of(RENAMED, whole=whole).served is expected


@pytest.mark.parametrize("named", [None, []])
def test_a_whole_that_no_row_knows_must_name_its_class(named: object) -> None:
    """The engine would not take the class of the text inside for it, but look for one of its own."""
    text = base_fields(**RENAMED_FIELDS, model_type="made_renamed_text")
    whole = {"model_type": "siglip", "text_config": text, "architectures": named}
    with pytest.raises(UnknownFamily) as caught:
        read_base_of(RENAMED, whole=whole)
    assert (caught.value.adapter, caught.value.where) == ("tiny-base", "config.json: architectures")
    assert caught.value.found == "none in a 'siglip'" and WHOLE.architecture in caught.value.expected


def test_class_that_no_row_knows() -> None:
    with pytest.raises(UnknownFamily) as caught:
        read_base_of(RENAMED, **RENAMED_FIELDS, architectures=["MadeRenamedForImages"])
    error = caught.value
    assert (error.adapter, error.where) == ("tiny-base", "config.json: architectures")
    assert error.found == "'MadeRenamedForImages'"
    assert error.expected == (
        "one of MadeRenamedForCausalLM, MadeRenamedForConditionalGeneration, which serve made_renamed"
    )


@pytest.mark.parametrize(
    ("changes", "where", "found"),
    [
        ({"architectures": "Qwen3MoeForCausalLM"}, "architectures", "'Qwen3MoeForCausalLM'"),
        ({"architectures": [None]}, "architectures", "[None]"),
        ({"architectures": {}}, "architectures", "{}"),
        ({"text_config": ["hidden_size"]}, "text_config", "['hidden_size']"),
    ],
)
def test_parts_of_another_kind(changes: dict[str, Any], where: str, found: str) -> None:
    with pytest.raises(InvalidBaseConfig) as caught:
        make_base(**changes)
    error = caught.value
    assert (error.adapter, error.where, error.found) == ("tiny-base", f"config.json: {where}", found)
    assert error.expected and error.advice


def test_a_size_may_stand_in_every_entry_of_an_object() -> None:
    size = size_of("global_head_dim", "per_layer_config.*.head_dim")
    attention = replace(RENAMED.modules[1], out_size=size)
    family = replace(RENAMED, modules=(attention,))
    entries = {"1": {"head_dim": 9}, "4": {"head_dim": 9, "other": "x"}, "5": {}, "6": None}
    fields = RENAMED_FIELDS | {"global_head_dim": None}
    assert read_base_of(family, **fields, per_layer_config=entries).size(size) == 9
    assert read_base_of(family, **fields | {"global_head_dim": 9}, per_layer_config=entries).size(size) == 9
    with pytest.raises(InvalidBaseConfig, match=r"per_layer_config\.5\.head_dim: found '9'"):
        read_base_of(family, **fields, per_layer_config=entries | {"5": {"head_dim": "9"}})
    with pytest.raises(InvalidBaseConfig) as caught:
        read_base_of(family, **fields, per_layer_config=entries | {"5": {"head_dim": 8}})
    assert caught.value.where == "config.json: global_head_dim or per_layer_config.*.head_dim"
    assert '"per_layer_config.5.head_dim": 8' in caught.value.found
    assert (
        read_base_of(family, **fields, per_layer_config=[9]).numbers == read_base_of(family, **fields).numbers
    )


def test_sizes_are_sums_of_products() -> None:
    base = read_base_of(RENAMED, **RENAMED_FIELDS)
    heads, wide, inter = size_of("num_attention_heads"), size_of("global_head_dim"), MOE_INTERMEDIATE
    assert base.size(2 * heads * wide + inter) == 2 * 3 * 9 + 7
    assert base.size(heads * (HEAD_DIM + wide)) == 3 * (5 + 9)
    assert str(2 * heads * wide + EXPERT_COUNT) == (
        "2 * num_attention_heads * global_head_dim + num_experts or num_local_experts"
    )
    with pytest.raises(InvalidBaseConfig, match=r"config\.json: v_head_dim: found nothing"):
        base.size(heads * size_of("v_head_dim"))


def test_head_dim_is_derived_as_upstream_does() -> None:
    assert make_base(head_dim=None, hidden_size=12).size(HEAD_DIM) == 4
    with pytest.raises(InvalidBaseConfig, match=r"head_dim: found nothing; .*3 heads do not divide 10"):
        make_base(head_dim=None)


@pytest.mark.parametrize(
    ("changes", "where", "found"),
    [
        ({"hidden_size": None}, "hidden_size", "nothing"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size", "0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers", "'2'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "1000000000"),
        ({"num_attention_heads": True}, "num_attention_heads", "True"),
        ({"num_local_experts": None}, "num_experts or num_local_experts", "nothing"),
        ({"num_experts": 8}, "num_experts or num_local_experts", '"num_experts": 8'),
        ({"num_local_experts": 1}, "num_experts or num_local_experts", "1"),
        ({"mlp_only_layers": [0, 1]}, "decoder_sparse_step and mlp_only_layers", "none"),
        ({"mlp_only_layers": "01"}, "mlp_only_layers", "'01'"),
    ],
)
def test_base_config_faults_are_named(changes: dict[str, Any], where: str, found: str) -> None:
    with pytest.raises(InvalidBaseConfig) as caught:
        make_base(**changes)
    assert (caught.value.adapter, caught.value.where) == ("tiny-base", f"config.json: {where}")
    assert found in caught.value.found


def test_size_that_only_some_adapters_need(tmp_path: Path) -> None:
    base = make_base(intermediate_size=None)
    with pytest.raises(InvalidBaseConfig, match=r"config\.json: intermediate_size: found nothing"):
        base.size(INTERMEDIATE)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe_text", None, 7])
def test_unknown_family(model_type: Any) -> None:
    with pytest.raises(
        UnknownFamily, match=r"tiny-base: config.json: model_type: found .*expected one of .*qwen3_moe"
    ):
        make_base(model_type=model_type)


@pytest.mark.parametrize(("data", "found"), [(b"{", "no JSON"), (b"[]", "list"), (b'{"a":1,"a":1}', "twice")])
def test_broken_base_config(data: bytes, found: str) -> None:
    with pytest.raises(InvalidBaseConfig, match=found):
        read_base_config(data, label="tiny-base")


def test_base_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no such file"):
        read_base_config(tmp_path, label="tiny-base")
