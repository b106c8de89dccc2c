"""Conversion: every encoding of one adapter becomes the same files, and they hold what the adapter means."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
    ALPHA,
    EXPERTS,
    INTER,
    LABEL,
    LAYERS,
    PREFIX,
    RANK,
    Logical,
    Separate,
    attention,
    encode,
    encode_experts,
    expert_name,
    find_weights,
    make_base,
    save_adapter,
    spell_out,
)
from safetensors.torch import load_file

from tasks.lora.base import BaseConfig
from tasks.lora.convert import ConvertedFiles, convert_adapter, digest_adapter
from tasks.lora.errors import CorruptFile, DestinationExists
from tasks.lora.inspect import inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.plan import plan_control, plan_conversion
from tasks.lora.target import TargetFormat

PACKINGS = ("rank_major", "grouped_by_expert")
ENCODINGS = list(itertools.product(PACKINGS, ("standard", "swapped")))


def convert(
    source: Path, destination: Path, base: BaseConfig, forced: str, *, control: bool = False
) -> ConvertedFiles:
    found = inspect_adapter(source, base, label=LABEL, forced=Packing(forced), header_only=True)
    plan = (plan_control if control else plan_conversion)(found.layout)
    return convert_adapter(found.files, plan, destination)


# sha256 of adapter_model.safetensors, as it was when each form was first written. A change of one is a change of
# what is served under old digests: bump the step's version, and say what changed.
GOLDEN = {
    "float32": "bbd17eaf76d33816082d73fe31a59f5ce0febbe2eae60829185360c88cfe4af2",
    "bfloat16": "295149e8bffec81159e1c00ed118c713c80938f9a9b098463ff3cde428aaa4a4",
    "square": "ffc892039d3565d612f79c0325279e6656ee3875c008fc838040b18a6d11e05c",
    "displaced": "83342a2ab3079bd4f55ad39685ad4ebfb6dba4d65e783deddb62e6cc77aa78ee",
}
GOLDEN_CONTROLS = {
    ("rank_major", "standard"): "4768169e101971bb08d82a7a01bdac435accb06f2414e40abb306ee63547cccb",
    ("rank_major", "swapped"): "198df6670a80af905416483103eef88a0463dfe1743febfca914fdd8c5c65bb9",
    ("grouped_by_expert", "standard"): "8c1e258608a3a78efa6f2ba93756fb4f55e05160256618cd8923cb1320bd5ae8",
    ("grouped_by_expert", "swapped"): "92fc30ef5b5aa10f93f9dcf8fd54d7f2fb8e461d529ffcbeeeb57c7af0bf132e",
}


@pytest.mark.parametrize(("packing", "orientation"), ENCODINGS)
def test_golden_bytes(tmp_path: Path, packing: str, orientation: str) -> None:
    def digest(name: str, tensors: dict[str, torch.Tensor], *, control: bool = False, **config: int) -> str:
        source = save_adapter(tmp_path / name, tensors, **config)
        base = make_base()
        if name == "square":
            base = make_base(hidden_size=32, moe_intermediate_size=12, num_local_experts=8)
        return convert(source, tmp_path / f"{name}-made", base, packing, control=control).files[1].sha256

    def stack(**sizes: Any) -> dict[str, torch.Tensor]:
        return encode(Logical(**sizes), packing=packing, orientation=orientation)

    assert digest("float32", stack() | attention()) == GOLDEN["float32"]
    assert digest("bfloat16", stack(dtype=torch.bfloat16) | attention()) == GOLDEN["bfloat16"]
    assert digest("square", stack(rank=4, experts=8, hidden=32, inter=12), r=4) == GOLDEN["square"]
    assert digest("displaced", stack(rank=1), control=True, r=1) == GOLDEN["displaced"]
    assert digest("control", stack() | attention(), control=True) == GOLDEN_CONTROLS[packing, orientation]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_four_encodings_become_identical_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    """Automodel#3592, unsloth#6930: one adapter, four encodings on disk."""
    logical, base = Logical(dtype=dtype), make_base()
    others = attention(dtype=dtype)
    digests = set()
    for packing, orientation in ENCODINGS:
        name = f"{packing}-{orientation}"
        tensors = encode(logical, packing=packing, orientation=orientation) | others
        source = save_adapter(tmp_path / "source" / name, tensors)
        made = convert(source, tmp_path / "made" / name, base, packing)
        digests.add(tuple((file.name, file.bytes, file.sha256) for file in made.files))
    assert len(digests) == 1
    found = load_file(tmp_path / "made" / name / "adapter_model.safetensors")
    expected = spell_out(logical) | others
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


def stored_deltas(
    tensors: dict[str, torch.Tensor], *, experts: int, rank: int, packing: str, orientation: str
) -> dict[tuple[int, int, str], torch.Tensor]:
    """Every expert's delta, summed from the stored numbers as the producers define them."""
    deltas = {}
    for layer, e in itertools.product(range(LAYERS), range(experts)):
        for parameter, wrapper in (("gate_up_proj", "experts.base_layer"), ("down_proj", "experts")):
            stored_a = tensors[f"{PREFIX}.{layer}.mlp.{wrapper}.lora_A.weight"]
            stored_b = tensors[f"{PREFIX}.{layer}.mlp.{wrapper}.lora_B.weight"]
            delta = torch.zeros(stored_b.shape[0], stored_a.shape[1])
            for j in range(rank):
                column = j * experts + e if packing == "rank_major" else e * rank + j
                delta += stored_b[:, column, None] * stored_a[e * rank + j, None, :]
            deltas[layer, e, parameter] = delta.T if orientation == "swapped" else delta
    return deltas


def converted_delta(found: dict[str, torch.Tensor], layer: int, e: int, parameter: str) -> torch.Tensor:
    projections = ("gate_proj", "up_proj") if parameter == "gate_up_proj" else ("down_proj",)
    return torch.cat(
        [
            found[expert_name(layer, e, name, "B")] @ found[expert_name(layer, e, name, "A")]
            for name in projections
        ]
    )


def test_square_factors_as_in_the_published_model(tmp_path: Path) -> None:
    """E * r = H, as Qwen3-30B-A3B at rank 16: two of a layer's four tensors are square in every encoding."""
    logical = Logical(rank=4, experts=8, hidden=32, inter=12)
    base = make_base(hidden_size=32, moe_intermediate_size=12, num_local_experts=8)
    digests = set()
    for packing, orientation in ENCODINGS:
        name = f"{packing}-{orientation}"
        tensors = encode(logical, packing=packing, orientation=orientation)
        assert sum(tensor.shape == (32, 32) for tensor in tensors.values()) == 2 * LAYERS
        source = save_adapter(tmp_path / "source" / name, tensors, r=4)
        assert inspect_adapter(source, base, label=LABEL).orientation == orientation
        digests.add(convert(source, tmp_path / "made" / name, base, packing).files[1].sha256)
        found = load_file(tmp_path / "made" / name / "adapter_model.safetensors")
        expected = stored_deltas(tensors, experts=8, rank=4, packing=packing, orientation=orientation)
        for key, delta in expected.items():
            torch.testing.assert_close(converted_delta(found, *key), delta)
    assert len(digests) == 1


@pytest.mark.parametrize(("packing", "orientation"), ENCODINGS)
def test_wrong_packing_gives_other_deltas(tmp_path: Path, packing: str, orientation: str) -> None:
    """Same shapes, same sizes, another model: this is why the packing has to be proved."""
    logical, base = Logical(), make_base()
    wrong = PACKINGS[1 - PACKINGS.index(packing)]
    source = save_adapter(tmp_path / "source", encode(logical, packing=packing, orientation=orientation))
    convert(source, tmp_path / "wrong", base, wrong)
    found = load_file(tmp_path / "wrong" / "adapter_model.safetensors")
    assert {key: value.shape for key, value in found.items()} == {
        key: value.shape for key, value in spell_out(logical).items()
    }
    for layer, e in itertools.product(logical.layers, range(EXPERTS)):
        right = logical.b[layer, "down_proj"][e] @ logical.a[layer, "down_proj"][e]
        a, b = (found[expert_name(layer, e, "down_proj", factor)] for factor in "AB")
        assert (b @ a - right).norm() > 0.5 * right.norm()


@pytest.mark.parametrize(("packing", "orientation"), ENCODINGS)
def test_deltas_equal_a_plain_loop_over_the_source(tmp_path: Path, packing: str, orientation: str) -> None:
    """The stored tensors are read here number by number, as the producers' own forwards read them."""
    tensors = encode(Logical(), packing=packing, orientation=orientation)
    source = save_adapter(tmp_path / "source", tensors)
    convert(source, tmp_path / "made", make_base(), packing)
    found = load_file(tmp_path / "made" / "adapter_model.safetensors")
    expected = stored_deltas(tensors, experts=EXPERTS, rank=RANK, packing=packing, orientation=orientation)
    for key, delta in expected.items():
        torch.testing.assert_close(converted_delta(found, *key), delta)
        assert not torch.allclose(*delta.chunk(2))


def test_equal_experts_and_rank_are_not_degenerate(tmp_path: Path) -> None:
    """E = r: the packings have equal shapes and equal splits, and still differ."""
    logical, base = Logical(rank=4, experts=4), make_base()
    digests = {}
    for packing in PACKINGS:
        source = save_adapter(tmp_path / packing, encode(logical, packing=packing), r=4)
        for forced in PACKINGS:
            made = convert(source, tmp_path / f"{packing}-{forced}", base, forced)
            digests[packing, forced] = made.files[1].sha256
    assert digests["rank_major", "rank_major"] == digests["grouped_by_expert", "grouped_by_expert"]
    assert digests["rank_major", "grouped_by_expert"] != digests["rank_major", "rank_major"]


@pytest.mark.parametrize(("hidden", "inter"), [(14, 7), (7, 7)], ids=["hidden = 2 * inter", "hidden = inter"])
@pytest.mark.parametrize(("packing", "orientation"), ENCODINGS)
def test_square_projection_is_decided_by_its_sibling(
    tmp_path: Path, hidden: int, inter: int, packing: str, orientation: str
) -> None:
    """vllm#52194: with H = 2I a shape says nothing about gate_up; with H = I nothing about down."""
    logical = Logical(hidden=hidden, inter=inter)
    base = make_base(hidden_size=hidden, moe_intermediate_size=inter)
    source = save_adapter(tmp_path / "source", encode(logical, packing=packing, orientation=orientation))
    convert(source, tmp_path / "made", base, packing)
    found = load_file(tmp_path / "made" / "adapter_model.safetensors")
    for key, tensor in spell_out(logical).items():
        assert torch.equal(found[key], tensor), key


def test_parameters_may_be_packed_differently(tmp_path: Path) -> None:
    logical = Logical()
    mixed = {"gate_up_proj": "grouped_by_expert", "down_proj": "rank_major"}
    source = save_adapter(
        tmp_path / "source",
        encode(logical, packing=mixed),
        unsloth_fused_expert_lora={
            "parameters": {name: {"lora_B_layout": value} for name, value in mixed.items()}
        },
    )
    found = inspect_adapter(source, make_base(), label=LABEL)
    convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    made = load_file(tmp_path / "made" / "adapter_model.safetensors")
    for key, tensor in spell_out(logical).items():
        assert torch.equal(made[key], tensor), key


def test_mixed_dtypes_survive_and_stay_aligned(tmp_path: Path) -> None:
    logical = Logical(dtype=torch.bfloat16, inter=5)
    tensors = encode(logical)
    odd = attention(rank=RANK)
    source = save_adapter(tmp_path / "source", tensors | odd)
    found = inspect_adapter(source, make_base(moe_intermediate_size=5), label=LABEL)
    made = convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "made")
    assert made.dtype == "BF16,F32"
    loaded = load_file(tmp_path / "made" / "adapter_model.safetensors")
    for key, tensor in (spell_out(logical) | odd).items():
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key], tensor), key


def test_only_sparse_layers_are_expected(tmp_path: Path) -> None:
    """A layer without routed experts has an ordinary MLP, whose factors are served as they are."""
    logical = Logical(layers=(1,))
    base = make_base(mlp_only_layers=[0])
    dense = {
        f"{PREFIX}.0.mlp.up_proj.lora_A.weight": torch.randn(RANK, 10),
        f"{PREFIX}.0.mlp.up_proj.lora_B.weight": torch.randn(22, RANK),
    }
    source = save_adapter(tmp_path / "source", encode(logical) | dense)
    made = convert(source, tmp_path / "made", base, "rank_major")
    loaded = load_file(tmp_path / "made" / "adapter_model.safetensors")
    assert made.pairs == EXPERTS * 3
    assert loaded.keys() == (spell_out(logical) | dense).keys()


def test_config_says_what_the_trainer_applied(tmp_path: Path) -> None:
    """With rsLoRA, alpha is the one that acts the same without it."""
    source = save_adapter(
        tmp_path / "source",
        encode(Logical()) | attention(),
        use_rslora=True,
        base_model_name_or_path="Qwen/Qwen3-30B-A3B",
        target_modules="all-linear",
        lora_B_layout="rank_major",
    )
    made = convert(source, tmp_path / "made", make_base(), "rank_major")
    config = json.loads((tmp_path / "made" / "adapter_config.json").read_text("utf-8"))
    assert config.pop("lora_alpha") / RANK == pytest.approx(ALPHA / math.sqrt(RANK), rel=1e-15)
    assert config == {
        "base_model_name_or_path": "Qwen/Qwen3-30B-A3B",
        "bias": "none",
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": [
            "down_proj",
            "gate",
            "gate_proj",
            "k_proj",
            "o_proj",
            "q_proj",
            "up_proj",
            "v_proj",
        ],
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    assert (made.rank, made.max_lora_rank, made.format, made.dtype) == (RANK, 8, "per-expert", "F32")


def test_digests_sizes_and_progress_are_those_of_the_files(tmp_path: Path) -> None:
    source = save_adapter(tmp_path / "source", encode(Logical()) | attention())
    found = inspect_adapter(source, make_base(), label=LABEL)
    plan = plan_conversion(found.layout)
    steps: list[tuple[int, int]] = []
    made = convert_adapter(
        found.files, plan, tmp_path / "made", lambda done, total: steps.append((done, total))
    )
    assert sorted(file.name for file in made.files) == sorted(
        path.name for path in (tmp_path / "made").iterdir()
    )
    for file in made.files:
        data = (tmp_path / "made" / file.name).read_bytes()
        assert (file.bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    weights = (tmp_path / "made" / "adapter_model.safetensors").stat().st_size
    assert plan.predicted_bytes == weights
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1] == (weights, weights)
    assert digest_adapter(found.files, plan) == made.files, "known without writing anything"
    assert digest_adapter(found.files, plan_control(found.layout)) != made.files


class SlowDigest:
    """A sha256 that takes its time before it looks at the data."""

    def __init__(self, data: bytes = b"") -> None:
        self._digest = hashlib.new("sha256", data)

    def update(self, data: bytes) -> None:
        time.sleep(0.003)
        self._digest.update(data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


@pytest.mark.parametrize("format", TargetFormat)
def test_digest_is_that_of_the_file_however_slow_the_hashing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: TargetFormat
) -> None:
    """Blocks are hashed while the next one is made, in memory that is used again."""
    source = save_adapter(tmp_path / "source", encode_experts(Separate()) | attention())
    found = inspect_adapter(source, make_base(), label=LABEL)
    plan = plan_conversion(found.layout, format)
    monkeypatch.setattr("tasks.lora.write.hashlib.sha256", SlowDigest)
    made = convert_adapter(found.files, plan, tmp_path / "made")
    alone = digest_adapter(found.files, plan)
    monkeypatch.undo()
    weights = find_weights(tmp_path / "made").read_bytes()
    assert made.files[1].sha256 == alone[1].sha256 == hashlib.sha256(weights).hexdigest()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSPC], ids=["unsupported", "full"])
def test_full_disk_shows_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A file system that cannot reserve a file's place is written to all the same."""
    source = save_adapter(tmp_path / "source", encode(Logical()))
    found = inspect_adapter(source, make_base(), label=LABEL)
    plan = plan_conversion(found.layout)

    def reserve(descriptor: int, offset: int, size: int) -> None:
        assert (offset, size, os.fstat(descriptor).st_size) == (0, plan.predicted_bytes, 0)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    destination = tmp_path / "out" / "made"
    if code == errno.ENOSPC:
        with pytest.raises(OSError, match="No space left"):
            convert_adapter(found.files, plan, destination)
        assert list((tmp_path / "out").iterdir()) == []
    else:
        made = convert_adapter(found.files, plan, destination)
        assert made.files == digest_adapter(found.files, plan)


class Killed(BaseException):
    """Like KeyboardInterrupt: no Exception."""


@pytest.mark.parametrize("after", [1, 5])
def test_interruption_leaves_nothing(tmp_path: Path, after: int) -> None:
    source = save_adapter(tmp_path / "source", encode(Logical()))
    found = inspect_adapter(source, make_base(), label=LABEL)
    seen = 0

    def kill(done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        assert list((tmp_path / "out").glob(".made.*")), "the unfinished folder lies beside its destination"
        if seen == after:
            raise Killed

    with pytest.raises(Killed):
        convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "out" / "made", kill)
    assert list((tmp_path / "out").iterdir()) == []


def test_source_that_shrinks_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    source = save_adapter(tmp_path / "source", encode(Logical()))
    found = inspect_adapter(source, make_base(), label=LABEL)
    weights = source / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    with pytest.raises(CorruptFile, match=r"author-17/run-3: base_model.*the file's end"):
        convert_adapter(found.files, plan_conversion(found.layout), tmp_path / "out" / "made")
    assert list((tmp_path / "out").iterdir()) == []


def test_existing_destination_is_left_alone(tmp_path: Path) -> None:
    source = save_adapter(tmp_path / "source", encode(Logical()))
    keep = tmp_path / "made" / "keep"
    keep.parent.mkdir()
    keep.write_text("mine")
    with pytest.raises(DestinationExists, match=r"made exists and is not empty"):
        convert(source, tmp_path / "made", make_base(), "rank_major")
    assert [path.name for path in keep.parent.iterdir()] == ["keep"]


def test_source_is_not_changed(tmp_path: Path) -> None:
    """unsloth-zoo#941: scaling or rearranging in place would corrupt what the trainer saved."""
    source = save_adapter(tmp_path / "source", encode(Logical(), orientation="swapped"))
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    convert(source, tmp_path / "made", make_base(), "rank_major")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


@pytest.mark.parametrize(("packing", "orientation"), ENCODINGS)
def test_control_is_the_other_packing(tmp_path: Path, packing: str, orientation: str) -> None:
    """The control of one reading is exactly what the other reading would have made."""
    source = save_adapter(tmp_path / "source", encode(Logical(), packing=packing, orientation=orientation))
    other = PACKINGS[1 - PACKINGS.index(packing)]
    control = convert(source, tmp_path / "control", make_base(), packing, control=True)
    misread = convert(source, tmp_path / "misread", make_base(), other)
    right = convert(source, tmp_path / "right", make_base(), packing)
    assert control.files == misread.files
    assert control.files[1].sha256 != right.files[1].sha256


@pytest.mark.parametrize("orientation", ["standard", "swapped"])
def test_control_at_rank_1_moves_every_expert_on(tmp_path: Path, orientation: str) -> None:
    logical = Logical(rank=1)
    source = save_adapter(tmp_path / "source", encode(logical, orientation=orientation), r=1)
    convert(source, tmp_path / "control", make_base(), "rank_major", control=True)
    found = load_file(tmp_path / "control" / "adapter_model.safetensors")
    for layer, e in itertools.product(range(LAYERS), range(EXPERTS)):
        before = (e + EXPERTS - 1) % EXPERTS
        assert torch.equal(found[expert_name(layer, e, "down_proj", "A")], logical.a[layer, "down_proj"][e])
        assert torch.equal(
            found[expert_name(layer, e, "down_proj", "B")], logical.b[layer, "down_proj"][before]
        )
        assert torch.equal(
            found[expert_name(layer, e, "up_proj", "B")], logical.b[layer, "gate_up_proj"][before][INTER:]
        )
