"""adapter_config.json and the base's config.json, read without trust."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from time import monotonic
from typing import Any

import peft.tuners.lora.config as lora_config
import pytest
from lora_builders import EXPERTS, LABEL, base_fields, config_fields, make_base, short_id
from synthetic_builders import RENAMED, RENAMED_FIELDS, UNGATED, read_base_of
from transformers import Qwen3MoeConfig

from tasks.lora.base import read_base_config
from tasks.lora.config import (
    AdapterConfig,
    list_config_warnings,
    list_costly_patterns,
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
    [
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", False),
        ("peft_type", "lora"),
        ("peft_type", None),
        ("bias", None),
        ("use_rslora", None),
        ("lora_dropout", None),
        ("rank_pattern", None),
        ("modules_to_save", None),
    ],
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
        # What took a fifth of a second for each of thousands of names: Python cannot look for its end first.
        ("alpha_pattern", {r".*.*.*.*\d!": 3}, r"'\.\*\.\*"),
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
        # Looked for among all names before each, which took four seconds for a tenth of these.
        (b"{" + b"".join(b'"%d":0,' % place for place in range(150_000)) + b'"149999":0}', "'149999' twice"),
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


def test_unknown_fields_are_refused_if_they_say_something(tmp_path: Path) -> None:
    """peft#2275: new PEFT versions add fields all the time."""
    nothing = [None, False, [], {}, ""]
    empty = {f"future_{number}": value for number, value in enumerate(nothing * 4)}
    assert list_config_warnings(read(tmp_path, **empty)) == ()
    with pytest.raises(UnsupportedConfig) as caught:
        read(tmp_path, **empty, future_power="on", another=[1])
    error = caught.value
    assert (error.where, error.others) == ("adapter_config.json: another, future_power", ())
    assert error.found == "[1], 'on'"
    assert error.expected == "fields that PEFT 0.17 to 0.21 writes, or nothing in others"
    assert error.advice.startswith("If the program that wrote it says that it bears on training alone")


def test_very_many_unknown_fields_are_one_short_refusal(tmp_path: Path) -> None:
    more = {f"field_{number:05}{'x' * 500}": "y" * 500 for number in range(995)}
    with pytest.raises(UnsupportedConfig) as caught:
        read(tmp_path, **more, **dict.fromkeys(("\x1b[31m", " ", "a\nb", "A", "B"), 1))
    error = caught.value
    assert error.where == r"adapter_config.json: '\x1b[31m', ' ', A, B, 'a\nb' and 995 more"
    assert error.others == () and len(str(error)) < 1_500 and str(error).isprintable()


@pytest.mark.parametrize(
    "field",
    [("lora_dtype", "float32"), ("lorap_lr_ratio", 16.0), ("lorap_emb_lr", 1e-6), ("swift_type", "LORA")],
)
def test_another_programs_harmless_field_is_told(tmp_path: Path, field: tuple[str, Any]) -> None:
    [warning] = list_config_warnings(read(tmp_path, **dict([field])))
    assert warning == (
        f"adapter_config.json: {field[0]} is another program's, bears on training alone and was ignored"
    )


def test_dropout_beside_stacked_experts_is_told(tmp_path: Path) -> None:
    """ms-swift#9589, Soup#575, peft#2638: PEFT refuses it, so something else may have trained the experts."""
    [warning] = list_config_warnings(read(tmp_path, lora_dropout=0.1))
    assert "lora_dropout 0.1 beside target_parameters" in warning
    assert list_config_warnings(read(tmp_path, lora_dropout=0.1, target_parameters=None)) == ()


# Of each field of PEFT's LoraConfig: a legal value other than its default, and whether an adapter with it is taken.
PEFT_FIELDS: dict[str, tuple[Any, bool]] = {
    "alora_invocation_tokens": ([1], False),
    "alpha_pattern": ({"q_proj": 5}, True),
    "arrow_config": (lora_config.ArrowConfig(), False),
    "auto_mapping": ({"base_model_class": "A", "parent_library": "b", "unsloth_fixed": True}, True),
    "base_model_name_or_path": ("/home/someone/model", True),
    "bias": ("lora_only", False),
    "corda_config": (lora_config.CordaConfig(), True),
    "ensure_weight_tying": (True, True),
    "eva_config": (lora_config.EvaConfig(), True),
    "exclude_modules": (["k_proj"], True),
    "fan_in_fan_out": (True, False),
    "inference_mode": (True, True),
    "init_lora_weights": ("gaussian", True),
    "kasa_config": (lora_config.KasaConfig(), False),
    "layer_replication": ([[0, 2]], False),
    "layers_pattern": ("layers", True),
    "layers_to_transform": ([0], True),
    "loftq_config": ({"loftq_bits": 4}, True),
    "lora_alpha": (5, True),
    "lora_bias": (True, False),
    "lora_dropout": (0.1, True),
    "lora_ga_config": (lora_config.LoraGAConfig(), True),
    "megatron_config": ({"tensor_model_parallel_size": 2}, False),
    "megatron_core": ("megatron.other", True),
    "modules_to_save": (["lm_head"], False),
    "monteclora_config": (lora_config.MontecloraConfig(), False),
    "peft_type": ("LORA", True),
    "peft_version": ("0.18.0", True),
    "qalora_group_size": (8, True),
    "r": (3, True),
    "rank_pattern": ({"q_proj": 5}, True),
    "revision": ("main", True),
    "runtime_config": (lora_config.LoraRuntimeConfig(ephemeral_gpu_offload=True), True),
    "target_modules": ("all-linear", True),
    "target_parameters": (["mlp.experts.down_proj"], True),
    "task_type": ("CAUSAL_LM", True),
    "trainable_token_indices": ([1], False),
    "use_bdlora": (lora_config.BdLoraConfig(target_modules_bd_a=["q_proj"]), False),
    "use_dora": (True, False),
    "use_qalora": (True, False),
    "use_rslora": (True, True),
    "velora_config": (lora_config.VeloraConfig(), False),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("field", PEFT_FIELDS)
def test_every_field_that_peft_writes_is_known(tmp_path: Path, field: str) -> None:
    """textgen#6819, #1979, #2340. Those of 0.17.0 to 0.21.2 are all among the latest's."""
    value, taken = PEFT_FIELDS[field]
    more = {"layers_pattern": {"layers_to_transform": [0]}}.get(field, {})
    lora_config.LoraConfig(**{field: value}, **more).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))
    default = lora_config.LoraConfig().to_dict()
    assert field in ("runtime_config", "loftq_config", "peft_type") or written[field] != default[field]
    if taken:
        assert list_config_warnings(read_adapter_config(tmp_path, label=LABEL)) == ()
    else:
        with pytest.raises(UnsupportedConfig) as caught:
            read_adapter_config(tmp_path, label=LABEL)
        assert caught.value.where == f"adapter_config.json: {field}"


def test_the_fields_of_peft_are_all_there() -> None:
    assert PEFT_FIELDS.keys() == {field.name for field in fields(lora_config.LoraConfig)}


@pytest.mark.parametrize(
    "written",
    [
        # prime-rl, trainer/lora.py: nothing beside what every config here has.
        {"peft_type": "LORA", "bias": "none", "lora_dropout": 0.0, "modules_to_save": None},
        # ms-swift, tuners/lora.py, where LoRA+ is off.
        {
            "enable_lora": None,
            "lora_dtype": None,
            "lorap_emb_lr": None,
            "lorap_lr_ratio": None,
            "model_key_mapping": None,
            "use_merged_linear": False,
            "use_qa_lora": False,
        },
        # NeMo AutoModel, components/checkpoint/addons.py.
        {
            "use_dora": False,
            "target_parameters": ["mlp.experts.gate_up_proj"],
            "base_model_name_or_path": "N/A",
        },
        # Megatron-Bridge, models/conversion/peft_bridge.py.
        {
            "base_model_name_or_path": "",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
            "rank_pattern": {},
            "alpha_pattern": {},
            "use_dora": False,
            "use_rslora": False,
        },
        # unsloth_zoo 2026.9.6, temporary_patches/moe_utils.py.
        {
            "auto_mapping": {"base_model_class": "A", "parent_library": "b", "unsloth_fixed": True},
            "lora_B_layout": "rank_major",
            "unsloth_fused_expert_lora": {
                "lora_A_layout": "grouped_by_expert",
                "lora_B_layout": "rank_major",
                "num_experts": 4,
                "parameters": {"down_proj": {"lora_B_layout": "rank_major", "num_experts": 4}},
            },
        },
    ],
    ids=["prime_rl", "ms_swift", "automodel", "megatron_bridge", "unsloth_zoo"],
)
def test_what_other_programs_write_is_taken(tmp_path: Path, written: dict[str, Any]) -> None:
    assert list_config_warnings(read(tmp_path, task_type="CAUSAL_LM", **written)) == ()


# Patterns that are tried on every module, so that many of them, or a few on many modules, take minutes.


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("count", [(5_001, 3), (300, 900)], ids=["many", "long"])
def test_too_many_patterns_are_refused_before_they_are_compiled(
    tmp_path: Path, field: str, count: tuple[int, int]
) -> None:
    number, length = count
    patterns = {rf"x{place:04}\.{'y' * (length - 7)}": 3 for place in range(number)}
    before = monotonic()
    with pytest.raises(InvalidConfig, match=rf"{field}.*at most 5000 patterns of 250000 characters in all"):
        read(tmp_path, **{field: patterns})
    assert monotonic() - before < 2


def test_plain_keys_are_not_counted(tmp_path: Path) -> None:
    names = {
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj": 3 for layer in (7, 19) for expert in range(128)
    }
    config = read(tmp_path, rank_pattern=names)
    assert config.rank_table.ways == 6, "one for each length of the two numbers"
    assert list(list_costly_patterns(config, 36_864, LABEL)) == []


def test_patterns_that_many_modules_would_try_for_minutes_are_refused(tmp_path: Path) -> None:
    """Each is harmless, and so are all of them on a small adapter."""
    patterns = {rf".*layers.*\.{name}.*proj": 3 for name in "abcdefghij"}
    config = read(tmp_path, alpha_pattern=patterns)
    assert list(list_costly_patterns(config, 100, LABEL)) == []
    [error] = list_costly_patterns(config, 36_864, LABEL)
    assert (error.where, error.found) == ("adapter_config.json: alpha_pattern", f"{10 * (40**3 + 2)} ways")
    assert error.expected == "patterns that match 36864 names in at most 13563 ways each, all together"
    assert error.advice.startswith("Write plain names")


def test_patterns_of_real_size_are_not_costly(tmp_path: Path) -> None:
    """Ranks and alphas that differ by layer and module, as this project writes them, of the largest base."""
    modules = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        r"experts(\.\d+)?\.gate_proj",
        r"experts(\.\d+)?\.up_proj",
    )
    patterns = {rf"model\.layers\.{layer}\.mlp\.{name}": 3 for layer in range(94) for name in modules}
    whole = {r".*\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj": 5}
    config = read(tmp_path, rank_pattern=patterns, alpha_pattern=whole)
    assert list(list_costly_patterns(config, 2 * 94 * 128 * 3, LABEL)) == []


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
