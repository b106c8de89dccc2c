"""Rank, alpha and scaling of each module: what PEFT trained, whatever names the patterns are written for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_builders import LABEL, config_fields, unpack_wheel
from transformers import Qwen3MoeConfig

from tasks.lora.config import AdapterConfig, LoraScale, read_adapter_config, read_scale
from tasks.lora.errors import AlphaUndecided
from tasks.lora.patterns import PatternTable


def read(folder: Path, **fields: Any) -> AdapterConfig:
    (folder / "adapter_config.json").write_text(json.dumps(config_fields(**fields)), "utf-8")
    return read_adapter_config(folder, label=LABEL)


def test_rank_and_alpha_of_one_module(tmp_path: Path) -> None:
    """vllm-omni#6565: rank_pattern and alpha_pattern were dropped, and one global alpha / r applied to all."""
    config = read(tmp_path, r=2, lora_alpha=4, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 16})
    found = {
        name: read_scale(config, f"model.layers.0.self_attn.{name}", stored=rank, adapter=LABEL)
        for name, rank in (("q_proj", 4), ("k_proj", 2))
    }
    assert found == {"q_proj": LoraScale(4, 16, 4.0), "k_proj": LoraScale(2, 4, 2.0)}


@pytest.mark.parametrize("patterns", [False, True], ids=["one rank", "patterns"])
@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
def test_scaling(tmp_path: Path, rslora: bool, patterns: bool) -> None:
    """unsloth-zoo#941: alpha / r, or alpha / sqrt(r), never both; both after the patterns."""
    fields = {"rank_pattern": {"down_proj": 9}, "alpha_pattern": {"down_proj": 15}} if patterns else {}
    config = read(tmp_path, r=4, lora_alpha=6, use_rslora=rslora, **fields)
    rank, alpha = (9, 15) if patterns else (4, 6)
    found = read_scale(config, "model.layers.0.mlp.experts.down_proj", stored=rank, adapter=LABEL)
    root = {4: 2, 9: 3}[rank]
    assert found == LoraScale(rank, alpha, alpha / root if rslora else alpha / rank)


PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
BY_NAME = {
    "target_modules": ["q_proj", "gate", "gate_proj", "up_proj", "down_proj"],
    "target_parameters": None,
}
# What a trainer may write; which of it applies is for PEFT to say.
TRAINED: dict[str, dict[str, Any]] = {
    "plain": {},
    "module names": {
        "rank_pattern": {"experts": 6, "experts.base_layer": 7, "mlp.gate": 8},
        "alpha_pattern": {"experts": 6, "experts.base_layer": 7, "mlp.gate": 8},
    },
    "parameter names": {
        "rank_pattern": {"gate_up_proj": 6, "gate.weight": 2},
        "alpha_pattern": {"experts.down_proj": 7, "mlp.gate.weight": 9},
    },
    "layers": {
        "rank_pattern": {"model.layers.1.mlp.experts.gate_up_proj": 6, "layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {r".*\.0\..*down_proj": 7, "1.mlp.gate.weight": 4, "base_model.model.q_proj": 9},
    },
    "expressions": {
        "rank_pattern": {"^model.layers.1.mlp.experts.gate_up_proj": 6, "^q_proj": 9, "q_proj|v_proj": 4},
        "alpha_pattern": {"down": 6, "": 7, "(experts|attn).(down|v)_proj": 8.5},
    },
    "keys that disagree": {"rank_pattern": {"q_proj": 4, r".*layers\.1\..*proj": 6, ".*_up_proj": 2}},
    "rslora": {"rank_pattern": {"down_proj": 6}, "alpha_pattern": {"gate_up_proj": 7}, "use_rslora": True},
    "one parameter": {"target_parameters": PARAMETERS[:1], "rank_pattern": {"gate_up_proj": 6}},
}
# PEFT 0.19 and later turns the projections into parameters, and sets patterns for gate and up by itself.
TRAINED_BY_NAME: dict[str, dict[str, Any]] = {
    "projections": BY_NAME,
    "projections, rslora": {**BY_NAME, "use_rslora": True},
    "projections, own patterns": {**BY_NAME, "rank_pattern": {"gate_proj": 4, "gate": 8, "gate_up_proj": 2}},
}


def train(folder: Path, fields: dict[str, Any]) -> dict[str, list[float]]:
    """Save a tiny adapter with the PEFT that is installed; return its own rank, alpha and scaling by module."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=20,
        hidden_size=12,
        moe_intermediate_size=7,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        num_experts=4,
        num_experts_per_tok=2,
    )
    targets = {"target_modules": ["q_proj", "v_proj"], "target_parameters": PARAMETERS}
    lora = LoraConfig(r=3, lora_alpha=5, **(targets | fields))
    adapted = get_peft_model(Qwen3MoeForCausalLM(config), lora)
    adapted.save_pretrained(folder)
    found = {}
    for name, module in adapted.named_modules():
        if getattr(module, "lora_A", None):
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            parameter = getattr(module, "parameter_name", "weight")
            found[plain if parameter == "weight" else f"{plain}.{parameter}"] = [
                module.r["default"],
                module.lora_alpha["default"],
                module.scaling["default"],
            ]
    return found


def check_scales(folder: Path, trained: dict[str, list[float]]) -> None:
    config = read_adapter_config(folder, label=LABEL)
    found = {
        name: read_scale(config, name, stored=int(scale[0]), adapter=LABEL) for name, scale in trained.items()
    }
    assert found == {name: LoraScale(int(rank), *rest) for name, (rank, *rest) in trained.items()}
    assert any(".experts." in name for name in found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "distinct"),
    list(zip(TRAINED | TRAINED_BY_NAME, (1, 1, 4, 5, 4, 4, 3, 2, 2, 2, 2), strict=True)),
)
def test_every_module_is_read_as_peft_trained_it(tmp_path: Path, name: str, distinct: int) -> None:
    """distinct: how many different scales PEFT really trained, so that no case is idle."""
    trained = train(tmp_path, (TRAINED | TRAINED_BY_NAME)[name])
    assert len(set(map(tuple, trained.values()))) == distinct
    check_scales(tmp_path, trained)


OLD_PEFT = """
import json, sys, warnings
from pathlib import Path
import peft, test_lora_scales as here
warnings.simplefilter("ignore")
cases = here.TRAINED if peft.__version__ < "0.19" else here.TRAINED | here.TRAINED_BY_NAME
found = {name: here.train(Path(sys.argv[1], name), fields) for name, fields in cases.items()}
print(json.dumps([peft.__version__, found]))
"""


@pytest.mark.real
@pytest.mark.parametrize("version", ["0.18.1", "0.19.0"])
def test_every_module_is_read_as_an_older_peft_trained_it(tmp_path: Path, version: str) -> None:
    package = unpack_wheel("peft", version, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", OLD_PEFT, tmp_path],
        env=os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ran, found = json.loads(done.stdout.splitlines()[-1])
    assert ran == version and found.keys() >= TRAINED.keys()
    for name, trained in found.items():
        check_scales(tmp_path / name, trained)


@pytest.mark.filterwarnings("ignore")
def test_alphas_whose_order_peft_lost_are_refused(tmp_path: Path) -> None:
    """PEFT applies the first key that matches and sorts the keys when it saves: its own reading changes."""
    alphas = {"q_proj": 7, ".*_proj": 9}
    trained = train(tmp_path, {"alpha_pattern": alphas})
    name = "model.layers.0.self_attn.q_proj"
    config = read_adapter_config(tmp_path, label=LABEL)
    assert (trained[name][1], next(iter(config.alpha_table.find(name).values()))) == (7, 9)
    with pytest.raises(AlphaUndecided) as caught:
        read_scale(config, name, stored=3, adapter=LABEL)
    assert str(caught.value) == (
        f"{LABEL}: adapter_config.json: alpha_pattern: found '.*_proj': 9, 'q_proj': 7; expected one alpha for "
        f"{name}. PEFT sorts the keys when it saves: delete those that did not apply in training from the config."
    )
    assert read_scale(config, "model.layers.0.self_attn.v_proj", stored=3, adapter=LABEL).alpha == 9
    # Keys that are not sorted were not saved by PEFT: their order is the writer's.
    assert read_scale(read(tmp_path, alpha_pattern=alphas), name, stored=3, adapter=LABEL).alpha == 7


def test_rank_that_no_key_names_is_not_taken_from_the_shapes(tmp_path: Path) -> None:
    config = read(tmp_path, r=3, rank_pattern={".*_proj": 6, "q_proj": 4})
    name = "model.layers.0.self_attn.q_proj"
    assert [read_scale(config, name, stored=rank, adapter=LABEL).rank for rank in (4, 6, 3)] == [4, 6, 6]
    ordered = read(tmp_path, r=3, rank_pattern={"q_proj": 4, ".*_proj": 6})
    assert read_scale(ordered, name, stored=6, adapter=LABEL).rank == 4


words = st.text("ab_.", min_size=1, max_size=4) | st.sampled_from(
    ["a.b", "layers.1.a", r"\d+", "(a|b)", "^a"]
)


@given(st.lists(words, max_size=8, unique=True), st.text("ab_.1", min_size=1, max_size=8))
def test_keys_match_as_one_expression_after_another_would(keys: list[str], name: str) -> None:
    table = PatternTable({key: place for place, key in enumerate(keys)})
    expected = [key for key in keys if re.match(rf"(.*\.)?({key})$", name)]
    assert list(table.find(name).items()) == [(key, keys.index(key)) for key in expected]


def test_a_key_for_every_expert_is_found_without_trying_all() -> None:
    """unsloth#3981, vllm#29222: a table of 6,144 names must not be scanned 6,144 times (that takes a minute)."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        for layer in range(16)
        for expert in range(128)
        for projection in ("gate", "up", "down")
    ]
    table = PatternTable({name: place for place, name in enumerate(names)})
    assert [table.find(name) for name in names] == [{name: place} for place, name in enumerate(names)]
