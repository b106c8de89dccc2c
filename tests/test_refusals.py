"""Every way in which an adapter can be refused before it is scored, each by its smallest input.

The table is held against tasks/lora/errors.py: an error without a row fails, as does a row of another code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
    HIDDEN,
    PREFIX,
    RANK,
    Logical,
    Separate,
    attention,
    encode,
    encode_alone,
    encode_experts,
    make_base,
    save_adapter,
    stacked_name,
)
from safetensors.torch import save_file
from synthetic_builders import UNGATED, read_base_of

from storage.ledger import Outcome
from tasks.directories import KnownBase, convert_directory, inspect_directory
from tasks.lora import errors
from tasks.lora.base import BaseConfig
from tasks.lora.errors import AdapterError
from tasks.outcomes import refused_document, rule

Tensors = dict[str, torch.Tensor]

# What no directory of a trainer can bring about.
ELSEWHERE = {
    errors.InvalidBaseConfig: "the operator's own file, refused at registration: tests/test_lora_configs.py",
    errors.RoundTripMismatch: "a fault of the conversion: tests/test_lora_check.py",
    errors.DeltaMismatch: "a fault of the conversion: tests/test_lora_check.py",
    errors.MergedMismatch: "needs the trainer's merged checkpoint: tests/test_lora_merged.py",
    errors.ReferenceInvalid: "the fault of that checkpoint: tests/test_lora_merged.py",
    errors.UnresolvedKeys: "depends on the engine: tests/test_lora_resolve.py",
}
FILE = {"corrupt_or_partial", "empty_adapter", "ambiguous_upload", "unsupported_dtype", "pickle_refused"}
CONFIGS = {"unsupported_config", "unknown_family", "base_mismatch"}
NAMES = {"malformed_key", "missing_tensor", "unexpected_tensor", "shape_mismatch", "rank_unsupported"}
LAYOUT = {"no_expert_keys", "layout_conflict", "layout_undecided", "non_finite", "experts_untrained"}

CONFIG, WEIGHTS, TRAINING = "adapter_config.json", "adapter_model.safetensors", "training.json"
INDEX = f"{WEIGHTS}.index.json"
GATE_UP_A, GATE_UP_B = (stacked_name(0, "gate_up_proj", factor) for factor in "AB")
DOWN_A, DOWN_B = (stacked_name(0, "down_proj", factor) for factor in "AB")
QUERY = f"{PREFIX}.0.self_attn.q_proj"
SAVE_PRETRAINED, TRAIN_WITHOUT = "PEFT's save_pretrained", "Train without it"


@dataclass(frozen=True)
class Refused:
    """One input and what is said of it; every fact is a part of the message.

    files: changes to the folder of a good adapter. tensors: None leaves those of a good one. config: its changes.
    """

    error: type[AdapterError]
    code: str
    where: str
    expected: str
    found: str
    advice: str
    files: Callable[[Path], object] = lambda folder: None
    tensors: Tensors | None = None
    config: dict[str, Any] | None = None
    base: Callable[[], BaseConfig] = make_base
    who: str = "kestrel"


GOOD = encode(Logical())


def with_tensors(**added: torch.Tensor) -> Tensors:
    return GOOD | added


def key(name: str, *shape: int) -> Tensors:
    return GOOD | {name: torch.ones(shape)}


def feature(field: str, value: Any, expected: str = "expected nothing") -> Refused:
    return Refused(
        errors.UnsupportedConfig,
        "unsupported_config",
        f"{CONFIG}: {field}",
        expected,
        f"found {value!r}",
        TRAIN_WITHOUT,
        config={field: value},
    )


def unsupported(name: str, found: str, *shape: int) -> Refused:
    """A tensor beside a good adapter's, whose effect would be lost."""
    return Refused(
        errors.UnsupportedConfig, "unsupported_config", name, "expected", found, "", tensors=key(name, *shape)
    )


def overwrite(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def only_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch witness'\ntR.")


def link_outside(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to("/etc/hostname")


def second_save(name: str) -> Callable[[Path], object]:
    return lambda folder: save_file(GOOD, folder / name)


def ambiguous(name: str) -> Refused:
    return Refused(
        errors.AmbiguousWeights,
        "ambiguous_upload",
        name,
        f"expected no weights but {WEIGHTS}",
        "found more weights",
        "Remove the files that are left over",
        files=second_save(name),
    )


def intend(*classes: str) -> Callable[[Path], object]:
    return overwrite(TRAINING, json.dumps({"intended_targets": classes}).encode())


def only(parts: str) -> Tensors:
    return {name: tensor for name, tensor in (GOOD | attention()).items() if parts in name}


def without(part: str) -> Tensors:
    return {name: tensor for name, tensor in GOOD.items() if part not in name}


def exchanged() -> Tensors:
    """The two pairs under each other's names."""
    inner, outer = "experts.base_layer.lora", "experts.lora"
    return {
        name.replace(inner, outer) if inner in name else name.replace(outer, inner): tensor
        for name, tensor in GOOD.items()
    }


def still() -> Tensors:
    return {name: tensor * 0 if "lora_B" in name else tensor for name, tensor in GOOD.items()}


def nan() -> Tensors:
    changed = GOOD[DOWN_B].clone()
    changed[2, 5] = float("nan")
    return with_tensors(**{DOWN_B: changed})


def square() -> Tensors:
    return encode_alone(Logical(hidden=7), "down_proj")


def shared() -> Tensors:
    stem = f"{PREFIX}.0.mlp.shared_expert.up_proj"
    return {
        f"{stem}.lora_A.weight": torch.rand(RANK, HIDDEN),
        f"{stem}.lora_B.weight": torch.rand(9, RANK),
    }


def ungated() -> Tensors:
    return {
        f"base_model.model.backbone.layers.1.mixer.experts.lora_{factor}.weight": torch.rand(shape)
        for factor, shape in (("A", (12, HIDDEN)), ("B", (7, 12)))
    }


def ungated_base() -> BaseConfig:
    kinds = ["mamba", "moe", "full_attention"]
    return read_base_of(
        UNGATED, n_routed_experts=4, num_hidden_layers=len(kinds), layers_block_type=kinds, architectures=None
    )


MARKER = "unsloth_fused_expert_lora"
TABLE = {
    # file
    "no config": Refused(
        errors.MissingConfig,
        "corrupt_or_partial",
        "its folder",
        f"expected {CONFIG}",
        "found no such file",
        "Upload the whole folder",
        files=lambda folder: (folder / CONFIG).unlink(),
    ),
    "no weights": Refused(
        errors.MissingWeights,
        "corrupt_or_partial",
        "its folder",
        f"expected {WEIGHTS}",
        f"found {CONFIG}",
        "not one above it",
        files=lambda folder: (folder / WEIGHTS).unlink(),
    ),
    "cut short": Refused(
        errors.CorruptFile,
        "corrupt_or_partial",
        WEIGHTS,
        "bytes, as its header says",
        "found ",
        "the upload may still be under way",
        files=cut,
    ),
    "no tensors": Refused(
        errors.EmptyAdapter,
        "empty_adapter",
        WEIGHTS,
        "expected at least one tensor",
        "found none",
        "save the adapter again",
        tensors={},
    ),
    "config that leads out": Refused(
        errors.EscapingPath,
        "ambiguous_upload",
        CONFIG,
        "expected a regular file inside its folder",
        "found a link to /etc/hostname",
        "cp -L",
        files=link_outside,
    ),
    "name that is no text": Refused(
        errors.UnreadableName,
        "ambiguous_upload",
        r"'caf\udce9.md'",
        "expected file names in UTF-8",
        "found bytes that are not",
        "Rename the file",
        files=lambda folder: Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.md")).write_bytes(b"x"),
    ),
    "config in other letters": Refused(
        errors.MisspeltFile,
        "ambiguous_upload",
        "ADAPTER_CONFIG.json",
        f"expected {CONFIG}, in small letters",
        "found a name in other letters",
        "Rename the file",
        files=lambda folder: (folder / CONFIG).rename(folder / CONFIG.upper().replace("JSON", "json")),
    ),
    "statement in other letters": Refused(
        errors.MisspeltFile,
        "ambiguous_upload",
        "Training.json",
        f"expected {TRAINING}, in small letters",
        "found a name in other letters",
        "Rename the file",
        files=overwrite("Training.json", b"{}"),
    ),
    "statement that is no document": Refused(
        errors.CorruptFile,
        "corrupt_or_partial",
        TRAINING,
        "expected what a trainer may state",
        "found Invalid JSON",
        "or take it out",
        files=overwrite(TRAINING, b"<html>"),
    ),
    "statement with two answers": Refused(
        errors.CorruptFile,
        "corrupt_or_partial",
        TRAINING,
        "expected what a trainer may state",
        "found the key 'lora_B_layout' twice",
        "or take it out",
        files=overwrite(TRAINING, b'{"lora_B_layout": "rank_major", "lora_B_layout": "grouped_by_expert"}'),
    ),
    # Several checkpoints in one folder, under names that tools and people give them.
    "shard of another save": ambiguous("adapter_model-00001-of-00002.safetensors"),
    "numbered save": ambiguous("adapter_model_500.safetensors"),
    "save in other letters": ambiguous("Adapter_Model.safetensors"),
    "copied save": ambiguous("adapter_model (1).safetensors"),
    "doubles": Refused(
        errors.UnsupportedDtype,
        "unsupported_dtype",
        DOWN_A,
        "expected F32, F16, BF16",
        "found F64",
        "float32, float16 or bfloat16",
        tensors=with_tensors(**{DOWN_A: GOOD[DOWN_A].double()}),
    ),
    "pickle alone": Refused(
        errors.PickleRefused,
        "pickle_refused",
        "adapter_model.bin",
        f"expected {WEIGHTS}",
        "found pickled weights only",
        "safe_serialization=True",
        files=only_pickle,
    ),
    # safetensors#414, x-flux#64: the name says pickle, whatever lies in it.
    "tensors called a pickle": Refused(
        errors.PickleRefused,
        "pickle_refused",
        "adapter_model.bin",
        f"expected {WEIGHTS}",
        "found pickled weights only",
        "safe_serialization=True",
        files=lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
    ),
    # config
    "no rank": Refused(
        errors.InvalidConfig,
        "unsupported_config",
        f"{CONFIG}: r",
        "expected ",
        "found 'eight'",
        "Save the adapter again",
        config={"r": "eight"},
    ),
    "two alphas": Refused(
        errors.AlphaUndecided,
        "unsupported_config",
        f"{CONFIG}: alpha_pattern",
        "expected one alpha for model.layers.0.self_attn.q_proj",
        "found '.*_proj': 9, 'q_proj': 7",
        "delete those that did not apply",
        tensors=GOOD | attention(),
        config={"alpha_pattern": {".*_proj": 9, "q_proj": 7}},
    ),
    # peft#2275: nobody here knows what it does.
    "field of tomorrow": Refused(
        errors.UnsupportedConfig,
        "unsupported_config",
        f"{CONFIG}: a_field_of_tomorrow",
        "expected fields that PEFT 0.17 to 0.21 writes, or nothing in others",
        "found {'deep': 1}",
        "else train without it",
        config={"a_field_of_tomorrow": {"deep": 1}},
    ),
    # vllm#6983, vllm#47395: DoRA by its config, and by its keys where the config denies it.
    "DoRA by its config": feature("use_dora", True),
    "DoRA by a key": unsupported(f"{QUERY}.lora_magnitude_vector", "DoRA", 15),
    "DoRA by an expert's key": unsupported(
        f"{PREFIX}.0.mlp.experts.lora_magnitude_vector.weight", "DoRA", 10
    ),
    # vllm#9280, vllm#36501, LlamaFactory#7997, Automodel#3462: whole modules, the head, embeddings, new tokens.
    "modules saved whole": feature("modules_to_save", ["lm_head", "embed_tokens"]),
    "whole head": unsupported("base_model.model.lm_head.weight", "lm_head", 50, 10),
    "factors of the head": unsupported("base_model.model.lm_head.lora_A.weight", "lm_head", 3, 10),
    "whole embeddings": unsupported("base_model.model.model.embed_tokens.weight", "embed", 50, 10),
    "factors of the embeddings": unsupported(
        "base_model.model.model.embed_tokens.lora_embedding_A", "embedding", 3, 50
    ),
    "trained tokens": unsupported(
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "token", 2, 10
    ),
    "trained tokens by the config": feature("trainable_token_indices", [7]),
    "bias": unsupported(f"{QUERY}.lora_B.bias", "bias", 15),
    "three dimensions": Refused(
        errors.UnsupportedSourceFormat,
        "unsupported_config",
        DOWN_A,
        "expected 2 dimensions",
        "found shape (4, 3, 7)",
        SAVE_PRETRAINED,
        tensors=with_tensors(**{DOWN_A: GOOD[DOWN_A].reshape(4, 3, 7)}),
    ),
    "base without experts": Refused(
        errors.UnknownFamily,
        "unknown_family",
        "config.json: model_type",
        "expected one of ",
        "found 'llama'",
        "the right base config",
        base=lambda: make_base(model_type="llama"),
        who="tiny-base",
    ),
    "another base": Refused(
        errors.BaseMismatch,
        "base_mismatch",
        GATE_UP_A,
        "expected ",
        "(12, 10)",
        "Was it trained on another base model?",
        base=lambda: make_base(hidden_size=12),
    ),
    # names
    "no factor's name": Refused(
        errors.MalformedKey,
        "malformed_key",
        f"{PREFIX}.0.mlp.experts.lora_C.weight",
        "expected ",
        "found ",
        SAVE_PRETRAINED,
        tensors=key(f"{PREFIX}.0.mlp.experts.lora_C.weight", 3, 7),
    ),
    "one factor twice": Refused(
        errors.CollidingNames,
        "ambiguous_upload",
        DOWN_A,
        f"expected one name of {DOWN_A}",
        f"found also {DOWN_A.replace('lora_A', 'lora_A.default')}",
        "save the one that is meant",
        tensors=key(DOWN_A.replace("lora_A", "lora_A.default"), 12, 7),
    ),
    "one factor missing": Refused(
        errors.MissingTensor,
        "missing_tensor",
        DOWN_B,
        "expected ",
        "found no such tensor",
        "saved whole",
        tensors=without(DOWN_B),
    ),
    "no module's name": Refused(
        errors.UnexpectedTensor,
        "unexpected_tensor",
        f"{PREFIX}.0.mlp.expertz.base_layer.lora_A.weight",
        "expected ",
        "found a name that no module of this family has",
        "dropped without a word",
        tensors=key(f"{PREFIX}.0.mlp.expertz.base_layer.lora_A.weight", 12, 10),
    ),
    "two forms": Refused(
        errors.MixedForms,
        "unexpected_tensor",
        GATE_UP_A,
        "expected per-expert experts throughout",
        "found stacked ones",
        "save the adapter again with one of them",
        tensors=GOOD | encode_experts(Separate()),
    ),
    # unsloth#3405, ms-swift#6173, vllm#47088: the experts were never targeted, whatever the config asks for.
    "no experts": Refused(
        errors.NoExpertKeys,
        "no_expert_keys",
        WEIGHTS,
        f"expected factors of routed experts, since target_modules in {CONFIG} has 'gate_proj', 'up_proj', 'down_proj'",
        "found only attention, router",
        "list them in target_parameters",
        tensors=attention(),
        config={"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"], "target_parameters": None},
    ),
    "no experts, though they were meant": Refused(
        errors.NoExpertKeys,
        "no_expert_keys",
        WEIGHTS,
        "expected factors of routed experts, which intended_targets in training.json name",
        "found only attention, router",
        "list them in target_parameters",
        tensors=attention(),
        files=intend("routed_experts", "attention"),
    ),
    "no attention, though it was meant": Refused(
        errors.IntentUnmet,
        "missing_tensor",
        "training.json: intended_targets",
        "expected tensors of attention and router, as it says",
        "found only routed_experts",
        "did not reach it",
        files=intend("routed_experts", "router", "attention"),
    ),
    "shared experts alone": Refused(
        errors.NoExpertKeys,
        "no_expert_keys",
        WEIGHTS,
        "expected factors of routed experts",
        "found only attention, router, shared_experts",
        "list them in target_parameters",
        tensors=attention() | shared(),
        config={"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"], "target_parameters": None},
        base=lambda: make_base(model_type="qwen2_moe", shared_expert_intermediate_size=9),
    ),
    "another rank in one tensor": Refused(
        errors.ShapeMismatch,
        "shape_mismatch",
        f"{QUERY}.lora_B.weight",
        "expected rank 3",
        "found shape (15, 4)",
        "one and the same save",
        tensors=GOOD | attention() | {f"{QUERY}.lora_B.weight": torch.ones(15, 4)},
    ),
    "rank above all engines'": Refused(
        errors.RankUnsupported,
        "rank_unsupported",
        f"{CONFIG}: r",
        "expected at most 512",
        "found 513",
        "",
        config={"r": 513},
    ),
    # layout and values
    "names exchanged": Refused(
        errors.LayoutConflict,
        "layout_conflict",
        GATE_UP_A,
        "expected ",
        "fit the layer's other parameter",
        "",
        tensors=exchanged(),
    ),
    "square alone": Refused(
        errors.OrientationUndecided,
        "layout_undecided",
        DOWN_A,
        "version of PEFT",
        "in = out = 7",
        "Train gate_up_proj and down_proj together",
        tensors=square(),
        config={"target_parameters": ["mlp.experts.down_proj"], "peft_version": None},
        base=lambda: make_base(hidden_size=7),
    ),
    "pair of either parameter": Refused(
        errors.RoleUndecided,
        "layout_undecided",
        "layers.1.mixer.experts.lora_A.weight",
        "target_parameters that name it",
        "fit up_proj and down_proj",
        "Name the trained parameter",
        tensors=ungated(),
        config={"target_parameters": None},
        base=ungated_base,
    ),
    "mixed, and nothing tells how": Refused(
        errors.PackingUndecided,
        "layout_undecided",
        f"{CONFIG}: {MARKER}.parameters.gate_up_proj.lora_B_layout",
        "expected rank_major or grouped_by_expert",
        "found 'mixed', and in ",
        "force the packing",
        config={MARKER: {"parameters": {"gate_up_proj": {"lora_B_layout": "mixed"}}}},
    ),
    "not a number": Refused(
        errors.NonFinite,
        "non_finite",
        DOWN_B,
        "expected finite values",
        "found 1 NaN or infinite of 120",
        "train again",
        tensors=nan(),
    ),
    "numbers throughout that are none": Refused(
        errors.NonFinite,
        "non_finite",
        GATE_UP_A,
        "expected finite values",
        f"found 120 NaN or infinite of 120; some too in {GATE_UP_B}, {DOWN_A}, {DOWN_B} and 4 more",
        "train again",
        tensors={name: tensor / 0 for name, tensor in GOOD.items()},
    ),
    "experts that never moved": Refused(
        errors.ExpertsUntrained,
        "experts_untrained",
        WEIGHTS,
        "expected routed experts that moved",
        "found all 24 deltas zero",
        "gives them gradients",
        tensors=still(),
    ),
}


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with its size and when it was changed."""
    stats = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {path: (found.st_size, found.st_mtime_ns) for path, found in stats.items()}


@pytest.mark.parametrize("case", TABLE)
def test_what_is_refused_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    row = TABLE[case]
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "uploads" / "kestrel"
    save_adapter(source, GOOD if row.tensors is None else row.tensors, **(row.config or {}))
    row.files(source)
    before = snapshot(tmp_path)

    def inspect() -> dict[str, Any]:
        return inspect_directory(source, KnownBase(row.base()), packing=None, header_only=False)

    def convert() -> dict[str, Any]:
        made, known = tmp_path / "serving" / "kestrel", KnownBase(row.base())
        return convert_directory(source, made, known, packing=None, format="per-expert", progress=None)

    for act in (inspect, convert):
        with pytest.raises(row.error) as caught:
            act()
        ruling, document = rule(caught.value), refused_document(caught.value)["refused"]
        assert (ruling.outcome, ruling.code.value) == (Outcome.QUARANTINED, row.code)
        assert (document["code"], document["all"][0]) == (row.code, row.code)
        assert document.keys() == {"code", "message", "where", "all"}
        assert row.where in document["where"]
        message = document["message"]
        assert message.startswith(f"{row.who}: {document['where']}: found ")
        for fact in (row.expected, row.found, row.advice):
            assert fact in message, (fact, message)
        # Something to do comes last, and it is a sentence.
        advice = caught.value.advice
        assert message.endswith(advice) and advice[0].isupper() and advice[-1] in ".?"
        assert len(message) < 1500 and "\n" not in message and str(tmp_path) not in message
        json.dumps(document, allow_nan=False)
        assert snapshot(tmp_path) == before


def test_every_error_of_an_adapter_has_a_row() -> None:
    kinds = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, AdapterError) and kind is not AdapterError
    }
    assert kinds == {row.error for row in TABLE.values()} | ELSEWHERE.keys()
    assert {row.code for row in TABLE.values()} == FILE | CONFIGS | NAMES | LAYOUT


def test_the_good_adapter_of_the_table_is_taken(tmp_path: Path) -> None:
    """Else every row might be refused for something else."""
    source = save_adapter(tmp_path / "source", GOOD | attention())
    found = inspect_directory(source, KnownBase(make_base()), packing=None, header_only=False)
    assert found["pairs"] == 2 * 4 * 3 and "refused" not in found
    assert RANK == 3
