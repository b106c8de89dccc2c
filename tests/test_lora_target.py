"""The output's adapter_config.json: vLLM and PEFT must find for every name the rank and scaling that are meant."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_builders import json_from_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_builders import (
    BIT_FOR_BIT,
    LABEL,
    Logical,
    attention,
    encode,
    make_base,
    save_adapter,
    unpack_wheel,
)
from peft import PeftConfig, PeftModel
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tasks.lora.convert import convert_adapter
from tasks.lora.inspect import inspect_adapter
from tasks.lora.plan import plan_conversion
from tasks.lora.target import TargetFormat, TargetModule, find_alpha, format_target_config

EXPERTS, HIDDEN, INTER, LAYERS = 4, 12, 7, 3
SIZES = {
    "gate_proj": (HIDDEN, INTER),
    "up_proj": (HIDDEN, INTER),
    "gate_up_proj": (HIDDEN, 2 * INTER),
    "down_proj": (INTER, HIDDEN),
    "self_attn.q_proj": (HIDDEN, 18),
    "self_attn.v_proj": (HIDDEN, 6),
    "mlp.gate": (HIDDEN, EXPERTS),
}
Rule = Callable[[str], tuple[int, float]]


def list_modules(format: TargetFormat, rule: Rule) -> list[TargetModule]:
    """The modules of a tiny adapter in the order of its tensors; the rule gives each its rank and scaling."""
    return [TargetModule(name, *rule(name), parameter) for name, parameter in list_names(format)]


def list_names(format: TargetFormat) -> Iterator[tuple[str, str | None]]:
    for layer in range(LAYERS):
        front = f"model.layers.{layer}"
        if format == "stacked":
            for parameter in ("gate_up_proj", "down_proj"):
                yield f"{front}.mlp.experts.{parameter}", None
        else:
            for projection in ("gate_proj", "up_proj", "down_proj"):
                parameter = "down_proj" if projection == "down_proj" else "gate_up_proj"
                for expert in range(EXPERTS):
                    yield f"{front}.mlp.experts.{expert}.{projection}", f"{front}.mlp.experts.{parameter}"
        yield f"{front}.mlp.gate", f"{front}.mlp.gate.weight"
        yield f"{front}.self_attn.q_proj", None
        yield f"{front}.self_attn.v_proj", None


def write_config(modules: list[TargetModule], format: TargetFormat, base_model: str | None = None) -> Any:
    return json.loads(format_target_config(modules, format=format, base_model=base_model))


def test_plain_config_to_the_byte() -> None:
    """What the engines were given before patterns could be written; B13: nothing that they do not need."""
    modules = list_modules(TargetFormat.PER_EXPERT, lambda name: (3, 2.0))
    written = format_target_config(
        modules, format=TargetFormat.PER_EXPERT, base_model="Qwen/Qwen3-30B-A3B"
    ).decode()
    assert (
        written
        == """{
  "base_model_name_or_path": "Qwen/Qwen3-30B-A3B",
  "bias": "none",
  "lora_alpha": 6,
  "lora_dropout": 0.0,
  "peft_type": "LORA",
  "r": 3,
  "target_modules": [
    "down_proj",
    "gate",
    "gate_proj",
    "q_proj",
    "up_proj",
    "v_proj"
  ],
  "task_type": "CAUSAL_LM",
  "use_rslora": false
}
"""
    )


def test_stacked_config() -> None:
    """With PEFT's names of the parameters, and the packing stated where unsloth_zoo 2026.9.6 and we look for it."""
    written = write_config(list_modules(TargetFormat.STACKED, lambda name: (3, 2.0)), TargetFormat.STACKED)
    assert written == {
        "base_model_name_or_path": None,
        "bias": "none",
        "lora_B_layout": "rank_major",
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": 3,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.gate.weight"],
        "task_type": "CAUSAL_LM",
        "unsloth_fused_expert_lora": {
            "lora_A_layout": "grouped_by_expert",
            "lora_B_layout": "rank_major",
            "parameters": {
                "down_proj": {"lora_B_layout": "rank_major"},
                "gate_up_proj": {"lora_B_layout": "rank_major"},
            },
        },
        "use_rslora": False,
    }
    assert list(written) == sorted(written)
    only = [
        module for module in list_modules(TargetFormat.STACKED, lambda name: (3, 2.0)) if not module.parameter
    ]
    assert write_config(only, TargetFormat.STACKED)["target_modules"] == ["q_proj", "v_proj"]
    assert write_config(only[:2], TargetFormat.STACKED)["target_modules"] == []


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("Qwen/Qwen3-30B-A3B", True),
        ("/home/someone/models/qwen", False),
        ("./qwen", False),
        ("qwen", False),
        ("a/b/c", False),
        ("", False),
        (None, False),
    ],
)
def test_base_is_named_only_where_the_name_means_something(name: str | None, kept: bool) -> None:
    """predibase/lorax#315: a path of the trainer's machine is nothing to load from elsewhere."""
    modules = list_modules(TargetFormat.PER_EXPERT, lambda name: (3, 2.0))
    written = write_config(modules, TargetFormat.PER_EXPERT, name)
    assert written["base_model_name_or_path"] == (name if kept else None)


def is_reachable(scaling: float, rank: int) -> bool:
    """Whether a float divided by the rank is the scaling: tries four to each side of where it would be."""
    alpha = scaling * rank
    for _ in range(4):
        alpha = math.nextafter(alpha, 0)
    for _ in range(9):
        if alpha / rank == scaling:
            return True
        alpha = math.nextafter(alpha, math.inf)
    return False


@pytest.mark.parametrize("alpha", [1, 5, 16, 32, 64, 0.5, 7.3])
def test_written_alpha_gives_the_trainers_scaling(alpha: float) -> None:
    """B18, A13: exactly alpha / r, or alpha / sqrt(r), for every rank that is served, wherever a float does it."""
    unreachable = 0
    for rank in range(1, 513):
        plain = find_alpha(alpha / rank, rank)
        assert plain / rank == alpha / rank
        if alpha == int(alpha):
            assert type(plain) is int and plain == alpha
        else:
            assert len(repr(plain)) <= len(repr(alpha))
        scaling = alpha / math.sqrt(rank)
        found = find_alpha(scaling, rank)
        assert (found / rank == scaling) == is_reachable(scaling, rank)
        assert abs(found / rank - scaling) <= math.ulp(scaling)
        # PEFT doubles rank and alpha of gate and up; no bit of the scaling may change by that.
        assert (2 * found) / (2 * rank) == found / rank
        unreachable += found / rank != scaling
    assert 20 < unreachable < 160


@pytest.mark.parametrize("alpha", [16, 7.3, 0.1])
def test_one_rank_and_alpha_need_no_patterns(alpha: float) -> None:
    """Not even for what PEFT makes of gate and up, whose rank and alpha it doubles itself."""
    for rank in range(1, 65):
        for root in (rank, math.sqrt(rank)):
            modules = list_modules(TargetFormat.PER_EXPERT, lambda name, r=rank, s=alpha / root: (r, s))
            config = write_config(modules, TargetFormat.PER_EXPERT)
            assert not {"rank_pattern", "alpha_pattern"} & config.keys(), rank


# Rules of (rank, scaling); None of them is met by one r and lora_alpha alone.
def by_class(name: str) -> tuple[int, float]:
    last = name.rpartition(".")[2]
    return {"q_proj": (5, 2.0), "gate": (2, 0.5), "down_proj": (4, 2.0), "v_proj": (3, 0.75)}.get(
        last, (3, 2.0)
    )


def by_layer_scaling(name: str) -> tuple[int, float]:
    return 3, 1.5 if "layers.1.mlp.experts" in name else 2.0


def by_layer_rank(name: str) -> tuple[int, float]:
    return (2 if "layers.1." in name else 4), (2.0 if "layers.0." in name else 1.25)


def rslora(name: str) -> tuple[int, float]:
    rank = 5 if "down" in name else 3
    return rank, 7 / math.sqrt(rank)


RULES = [by_class, by_layer_scaling, by_layer_rank, rslora]


def read_as_vllm(config: dict[str, Any], name: str) -> tuple[int, float]:
    """vLLM 0.32's rule (lora/peft_helper.py, get_rank_and_scaling), for names that need no mapping."""
    found = {}
    for field, default in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"])):
        matches = [
            value for key, value in config.get(field, {}).items() if re.match(rf"(.*\.)?({key})$", name)
        ]
        assert len(set(matches)) <= 1, f"{field}: the order of the keys matters for {name}"
        found[field] = matches[0] if matches else default
    return found["rank_pattern"], found["alpha_pattern"] / found["rank_pattern"]


def near(scaling: float) -> Any:
    return pytest.approx(scaling, rel=4e-16, abs=0)


@pytest.mark.parametrize("format", TargetFormat)
@pytest.mark.parametrize("rule", RULES)
def test_vllm_finds_what_is_meant(rule: Rule, format: TargetFormat) -> None:
    modules = list_modules(format, rule)
    config = write_config(modules, format)
    assert "rank_pattern" in config or "alpha_pattern" in config
    for module in modules:
        assert read_as_vllm(config, module.name) == (module.rank, near(module.scaling)), module.name
    assert max(config["r"], *config.get("rank_pattern", {0: 0}).values()) == max(
        item.rank for item in modules
    )


def test_keys_are_as_short_as_is_exact() -> None:
    config = write_config(list_modules(TargetFormat.PER_EXPERT, by_class), TargetFormat.PER_EXPERT)
    assert config["rank_pattern"] == {r"experts(\.\d+)?\.down_proj": 4, r"gate(\.weight)?": 2, "q_proj": 5}
    layers = write_config(list_modules(TargetFormat.STACKED, by_layer_rank), TargetFormat.STACKED)
    assert layers["rank_pattern"] == {
        r"model\.layers\.1\.mlp\.experts\.gate_up_proj": 2,
        r"model\.layers\.1\.mlp\.experts\.down_proj": 2,
        r"model\.layers\.1\.mlp\.gate(\.weight)?": 2,
        r"model\.layers\.1\.self_attn\.q_proj": 2,
        r"model\.layers\.1\.self_attn\.v_proj": 2,
    }
    assert layers["alpha_pattern"][r"model\.layers\.2\.self_attn\.q_proj"] == 5
    dense = [
        TargetModule(
            "model.layers.0.mlp.experts.0.gate_proj", 3, 2.0, "model.layers.0.mlp.experts.gate_up_proj"
        )
    ]
    dense.append(TargetModule("model.layers.1.mlp.gate_proj", 5, 2.0))
    assert write_config(dense, TargetFormat.PER_EXPERT)["rank_pattern"] == {r"mlp\.gate_proj": 5}


scales = st.tuples(st.integers(1, 4), st.sampled_from([0.1, 0.5, 2.0, 7 / math.sqrt(3)]))


@settings(max_examples=40)
@given(st.data(), st.sampled_from(TargetFormat))
def test_any_mixture_is_written_so_that_vllm_finds_it(data: st.DataObject, format: TargetFormat) -> None:
    drawn: dict[str, tuple[int, float]] = {}

    def rule(name: str) -> tuple[int, float]:
        alike = re.sub(r"experts\.\d+", "experts", name)
        if alike not in drawn:
            drawn[alike] = data.draw(scales, alike)
        return drawn[alike]

    modules = list_modules(format, rule)
    config = write_config(modules, format)
    for module in modules:
        assert read_as_vllm(config, module.name) == (module.rank, near(module.scaling)), module.name


def test_experts_of_one_projection_may_not_differ() -> None:
    modules = list_modules(
        TargetFormat.PER_EXPERT, lambda name: (3, 1.0 if ".2.mlp.experts.3.up" in name else 2.0)
    )
    with pytest.raises(
        ValueError, match=r"layers\.2\.mlp\.experts\.3\.up_proj, experts of one projection, differ"
    ):
        format_target_config(modules, format=TargetFormat.PER_EXPERT, base_model=None)


def save_output(folder: Path, modules: list[TargetModule], format: TargetFormat) -> dict[str, torch.Tensor]:
    """An adapter with these modules, its tensors random."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for module in modules:
        inside, out = SIZES[next(size for size in SIZES if module.name.endswith(f".{size}"))]
        count = EXPERTS if format == "stacked" and "experts" in module.name else 1
        name = f"base_model.model.{module.name}"
        if count > 1:
            name = name.replace(".gate_up_proj", ".base_layer").replace(".down_proj", "")
        tensors[f"{name}.lora_A.weight"] = torch.randn(count * module.rank, inside, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, count * module.rank, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = format_target_config(modules, format=format, base_model=None)
    (folder / "adapter_config.json").write_bytes(config)
    return tensors


def load_with_peft(folder: Path) -> PeftModel:
    config = Qwen3MoeConfig(
        vocab_size=20,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTER,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    return PeftModel.from_pretrained(Qwen3MoeForCausalLM(config), folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", BIT_FOR_BIT)
@pytest.mark.parametrize("rule", RULES)
def test_peft_finds_what_is_meant(tmp_path: Path, rule: Rule, format: TargetFormat) -> None:
    """From 0.19 on PEFT makes stacked parameters of per-expert files, with twice the rank for gate and up."""
    modules = list_modules(format, rule)
    tensors = save_output(tmp_path, modules, format)
    expected = {}
    for module in modules:
        name = (module.parameter or module.name).removesuffix(".weight")
        twice = 2 if format == "per-expert" and name.endswith("gate_up_proj") else 1
        expected[name] = (twice * module.rank, near(module.scaling))
    loaded = load_with_peft(tmp_path)
    found = {}
    for name, module in loaded.named_modules():
        if getattr(module, "lora_A", None):
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            parameter = getattr(module, "parameter_name", "weight")
            plain = plain if parameter == "weight" else f"{plain}.{parameter}"
            found[plain] = (module.r["default"], module.scaling["default"])
    assert found == expected
    assert len(set(found.values())) > 1
    state = {name.replace(".default", ""): tensor for name, tensor in loaded.state_dict().items()}
    kept = [name for name in tensors if name in state]
    assert len(kept) == len(tensors) if format == "stacked" else len(kept) == 6 * LAYERS
    assert all(torch.equal(state[name], tensors[name]) for name in kept)


@pytest.mark.filterwarnings("ignore")
def test_gate_and_up_of_larger_rank_in_one_layer_are_for_vllm_alone(tmp_path: Path) -> None:
    """A key for what PEFT makes of them would let vLLM think of a rank that no tensor has; PEFT then refuses."""

    def rule(name: str) -> tuple[int, float]:
        return (5 if ".1.mlp.experts" in name else 3), 2.0

    modules = list_modules(TargetFormat.PER_EXPERT, rule)
    save_output(tmp_path, modules, TargetFormat.PER_EXPERT)
    config = json.loads((tmp_path / "adapter_config.json").read_bytes())
    assert max(config["rank_pattern"].values()) == 5
    with pytest.raises(
        RuntimeError, match=r"layers\.1\.mlp\.experts\.base_layer\.lora_A.*size|size mismatch"
    ):
        load_with_peft(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_config_is_read_by_peft(tmp_path: Path) -> None:
    for format in TargetFormat:
        save_output(tmp_path / format, list_modules(format, by_class), format)
        read = PeftConfig.from_pretrained(tmp_path / format)
        assert (read.r, read.lora_alpha, read.use_rslora, read.rank_pattern["q_proj"]) == (3, 6, False, 5)


OLD_PEFT = """
import json, sys
import peft
read = [peft.PeftConfig.from_pretrained(folder) for folder in sys.argv[1:]]
print(json.dumps([peft.__version__, [[each.r, each.lora_alpha, sorted(each.target_modules)] for each in read]]))
"""


@pytest.mark.real
def test_config_is_read_by_an_older_peft(tmp_path: Path) -> None:
    """B13, unsloth#6819: a config must load in the oldest PEFT that is supported, unknown fields or not."""
    package = unpack_wheel("peft", "0.18.1", tmp_path)
    folders = [tmp_path / format for format in TargetFormat]
    for format, folder in zip(TargetFormat, folders, strict=True):
        save_output(folder, list_modules(format, by_class), format)
    done = subprocess.run(
        [sys.executable, "-c", OLD_PEFT, *folders],
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    per_expert = ["down_proj", "gate", "gate_proj", "q_proj", "up_proj", "v_proj"]
    assert json.loads(done.stdout.splitlines()[-1]) == [
        "0.18.1",
        [[3, 6, per_expert], [3, 6, ["q_proj", "v_proj"]], [3, 6, per_expert]],
    ]


VLLM = """
import json, sys
from vllm.lora.peft_helper import PEFTHelper
found = {}
for folder, names in json.loads(sys.argv[1]).items():
    helper = PEFTHelper.from_local_dir(folder, None)
    found[folder] = {name: helper.get_rank_and_scaling(name) for name in names}
print(json.dumps(found))
"""


@pytest.mark.real
def test_vllm_itself_finds_what_is_meant(tmp_path: Path) -> None:
    asked, expected = {}, {}
    for format in TargetFormat:
        for rule in RULES:
            folder = tmp_path / f"{format} {rule.__name__}"
            modules = list_modules(format, rule)
            save_output(folder, modules, format)
            names = {module.name: module for module in modules}
            if format == "stacked":
                names = {
                    re.sub(
                        r"experts\.gate_up_proj$",
                        "experts.base_layer",
                        re.sub(r"experts\.down_proj$", "experts", name),
                    ): module
                    for name, module in names.items()
                }
            asked[str(folder)] = list(names)
            expected[str(folder)] = {
                name: [module.rank, near(module.scaling)] for name, module in names.items()
            }
    assert json_from_engine("-c", VLLM, json.dumps(asked)) == expected


@pytest.mark.parametrize(
    "spelling",
    ["all-linear", r".*\.(q|k|v|o)_proj", ["q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate"], [], None],
    ids=["all-linear", "expression", "list", "empty", "null"],
)
def test_targets_are_listed_from_the_file_whatever_the_trainer_wrote(tmp_path: Path, spelling: Any) -> None:
    """B15, peft#3229, verl#7288: the keys in the file are the truth; vLLM needs a list of names."""
    source = tmp_path / "source"
    save_adapter(source, encode(Logical()) | attention(), target_modules=spelling)
    found = inspect_adapter(source, make_base(), label=LABEL)
    attention_names = ["k_proj", "o_proj", "q_proj", "v_proj"]
    experts = ["down_proj", "gate", "gate_proj", "up_proj"]
    for format, expected in (("per-expert", sorted(experts + attention_names)), ("stacked", attention_names)):
        convert_adapter(found.files, plan_conversion(found.layout, TargetFormat(format)), tmp_path / format)
        written = json.loads((tmp_path / format / "adapter_config.json").read_bytes())
        assert written["target_modules"] == expected
        assert written.get("target_parameters") == (
            None
            if format == "per-expert"
            else ["mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.gate.weight"]
        )
