"""Opening an adapter's folder: a header that describes the file exactly, or a clear refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lora_builders import LABEL, Logical, attention, encode, save_adapter, short_id
from safetensors import safe_open
from safetensors.torch import save

from tasks.lora.errors import (
    AdapterError,
    CorruptFile,
    EmptyAdapter,
    EscapingPath,
    MissingWeights,
    PickleRefused,
    UnsupportedDtype,
    UnsupportedSourceFormat,
)
from tasks.lora.files import open_adapter
from tasks.lora.header import ITEM_BYTES, TensorSpec, format_header, parse_header
from tasks.lora.tensors import bits, open_tensors

WEIGHTS = "adapter_model.safetensors"


def write(folder: Path, data: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS).write_bytes(data)
    return folder


def file_of(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(begin: int, end: int, *, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tensors_are_read_as_safetensors_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = encode(Logical(dtype=dtype)) | attention()
    files = open_adapter(save_adapter(tmp_path / "a", tensors), label=LABEL)
    with safe_open(files.weights, "pt") as reference, open_tensors(files) as reader:
        assert {entry.name for entry in files.tensors} == set(reference.keys())
        for entry in files.tensors:
            expected = reference.get_tensor(entry.name)
            found = reader.read_tensor(entry)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert torch.equal(bits(found), bits(expected))
    begins = [entry.begin for entry in files.tensors]
    assert begins == sorted(begins)


def test_nan_payloads_and_negative_zero_survive(tmp_path: Path) -> None:
    patterns = torch.tensor([[-0.0, float("nan"), float("inf")]]).view(torch.int32)
    patterns[0, 1] ^= 0x1234
    files = open_adapter(write(tmp_path / "a", save({"x": patterns.view(torch.float32)})), label=LABEL)
    with open_tensors(files) as reader:
        assert torch.equal(bits(reader.read_tensor(files.tensors[0])), patterns)


@given(
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=12),
            st.sampled_from(sorted(ITEM_BYTES)),
            st.integers(1, 5),
            st.integers(1, 5),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda item: item[0],
    )
)
def test_parsing_undoes_formatting(items: list[tuple[str, str, int, int]]) -> None:
    specs = [TensorSpec(name, dtype, shape) for name, dtype, *shape in items if name != "__metadata__"]
    if not specs:
        return
    specs = [TensorSpec(spec.name, spec.dtype, tuple(spec.shape)) for spec in specs]
    start = format_header(specs)
    assert len(start) % 8 == 0
    total = len(start) + sum(spec.data_bytes for spec in specs)
    entries = parse_header(start[8:], file_bytes=total, adapter=LABEL, where=WEIGHTS)
    assert [(entry.name, entry.dtype, entry.shape) for entry in entries] == [
        (spec.name, spec.dtype, spec.shape) for spec in specs
    ]
    assert (entries[0].begin, entries[-1].end) == (len(start), total)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """sglang#14022, peft#1599: cut anywhere, in the length, the header or any tensor."""
    whole = save({"x": torch.arange(6.0).reshape(2, 3), "y": torch.arange(4.0)})
    for size in range(len(whole)):
        with pytest.raises(CorruptFile, match=rf"^{LABEL}: {WEIGHTS}: found "):
            open_adapter(write(tmp_path / "a", whole[:size]), label=LABEL)
    open_adapter(write(tmp_path / "a", whole), label=LABEL)


def test_cut_data_may_still_be_uploading(tmp_path: Path) -> None:
    whole = save({"x": torch.arange(6.0)})
    with pytest.raises(CorruptFile, match=r"cut short: the upload may still be under way"):
        open_adapter(write(tmp_path / "a", whole[:-1]), label=LABEL)


GOOD = tensor(0, 16)


@pytest.mark.parametrize(
    ("data", "error", "found"),
    [
        (file_of({"x": GOOD}, bytes(17)), CorruptFile, r"\d+ bytes"),
        (file_of({"x": GOOD}, bytes(16), length=2**62), CorruptFile, "a length of 4611686018427387904"),
        (file_of({"x": GOOD}, bytes(16), length=5_000), CorruptFile, "bytes in all"),
        (file_of({"x": GOOD}, bytes(16), length=3), CorruptFile, "no JSON"),
        (file_of(b"[1]"), CorruptFile, "a JSON list"),
        (file_of(b"\xff\xfe"), CorruptFile, "not UTF-8"),
        (file_of(b"[" * 100_000), CorruptFile, "nesting too deep"),
        (file_of(b'{"x":NaN}'), CorruptFile, "NaN"),
        (file_of(b'{"x":1,"x":2}'), CorruptFile, "'x' twice"),
        (file_of({"__metadata__": {"format": 1}, "x": GOOD}, bytes(16)), CorruptFile, "something else"),
        (file_of({"x": GOOD, "y": tensor(8, 24)}, bytes(24)), CorruptFile, "overlaps"),
        (file_of({"x": GOOD, "y": tensor(20, 24)}, bytes(24)), CorruptFile, "a hole"),
        (file_of({"x": tensor(4, 8)}, bytes(8)), CorruptFile, "a hole"),
        (file_of({"x": tensor(0, 16, shape=[5])}, bytes(16)), CorruptFile, "16 bytes"),
        (file_of({"x": tensor(0, 16, shape=[-4])}, bytes(16)), CorruptFile, "-4"),
        (file_of({"x": tensor(0, 16, shape=[4.0])}, bytes(16)), CorruptFile, "4.0"),
        (file_of({"x": tensor(0, 16, shape=4)}, bytes(16)), CorruptFile, "4"),
        (file_of({"x": tensor(0, 16, shape=[True])}, bytes(16)), CorruptFile, "True"),
        (file_of({"x": tensor(0, 16, shape=[10**4000, 10**4000])}, bytes(16)), CorruptFile, "1000"),
        (file_of({"x": tensor(0, 16, shape=[10**7] * 100_000)}, bytes(16)), CorruptFile, "10000000, 1"),
        (file_of(b'{"x\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'), CorruptFile, "surrogate"),
        (file_of({"x": {**GOOD, "data_offsets": [16, 0]}}, bytes(16)), CorruptFile, r"\[16, 0\]"),
        (file_of({"x": {**GOOD, "data_offsets": [0]}}, bytes(16)), CorruptFile, r"\[0\]"),
        (file_of({"x": {"dtype": "F32", "shape": [4]}}, bytes(16)), CorruptFile, "dtype"),
        (file_of({"x": {**GOOD, "more": 1}}, bytes(16)), CorruptFile, "more"),
        (file_of({"x": 3}), CorruptFile, "3"),
        (file_of({"x": tensor(0, 16, dtype="F64", shape=[2])}, bytes(16)), UnsupportedDtype, "F64"),
        (file_of({"x": tensor(0, 16, dtype="F8_E4M3", shape=[16])}, bytes(16)), UnsupportedDtype, "F8_E4M3"),
        (file_of({"x": tensor(0, 16, dtype="Q4")}, bytes(16)), UnsupportedDtype, "Q4"),
        (file_of({"x": {**GOOD, "dtype": 4}}, bytes(16)), CorruptFile, "4"),
        # DeepSpeed#7900, peft#2892: valid files that hold nothing.
        (file_of({}), EmptyAdapter, "none"),
        (file_of({"__metadata__": {"format": "pt"}}), EmptyAdapter, "none"),
        (file_of({"x": tensor(0, 0, shape=[0])}), EmptyAdapter, r"shape \[0\]"),
        (file_of({"x": tensor(0, 0, shape=[0, 10**30])}), EmptyAdapter, "shape"),
        # LlamaFactory#327, ComfyUI#15687: something else under the right name.
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
            CorruptFile,
            "Git LFS pointer",
        ),
        (b"\n<!DOCTYPE html><html>404</html>", CorruptFile, "a web page"),
        (b"PK\x03\x04" + bytes(100), PickleRefused, "pickled"),
        (b"\x80\x02}q\x00." + bytes(100), PickleRefused, "pickled"),
    ],
    ids=short_id,
)
def test_wrong_files_are_refused(tmp_path: Path, data: bytes, error: type[AdapterError], found: str) -> None:
    with pytest.raises(error, match=found) as caught:
        open_adapter(write(tmp_path / "a", data), label=LABEL)
    assert caught.value.adapter == LABEL
    assert caught.value.where.startswith(WEIGHTS)
    assert caught.value.advice


def test_missing_folder_and_missing_weights(tmp_path: Path) -> None:
    with pytest.raises(MissingWeights, match="no files"):
        open_adapter(tmp_path / "nowhere", label=LABEL)
    (tmp_path / "a" / "checkpoint-500").mkdir(parents=True)
    with pytest.raises(MissingWeights, match="checkpoint-500"):
        open_adapter(tmp_path / "a", label=LABEL)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    """vllm#32045, TensorRT-LLM#13391: unpickling runs whatever the file says."""
    witness = tmp_path / "witness"
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / name).write_bytes(f"cbuiltins\neval\n(S'open({str(witness)!r}, \"w\")'\ntR.".encode())
    with pytest.raises(PickleRefused, match=rf"{name}: found pickled weights only"):
        open_adapter(folder, label=LABEL)
    assert not witness.exists()


def test_pickles_beside_weights_are_listed(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", encode(Logical()))
    for name in ("training_args.bin", "rng_state.pth", "README.md", "training.json"):
        (folder / name).write_bytes(b"x")
    assert open_adapter(folder, label=LABEL).stray == ("rng_state.pth", "training_args.bin")


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors.index.json", "adapter_model-00001-of-00002.safetensors"]
)
def test_shards_are_refused(tmp_path: Path, name: str) -> None:
    folder = save_adapter(tmp_path / "a", encode(Logical()))
    (folder / name).write_bytes(b"{}")
    with pytest.raises(UnsupportedSourceFormat, match=rf"{name}: found weights in several files"):
        open_adapter(folder, label=LABEL)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: path.symlink_to("/etc/hostname"), "a link to /etc/hostname"),
        (lambda path: path.symlink_to("../other"), "leads nowhere"),
        (lambda path: path.mkdir(), "a folder or a device"),
    ],
)
def test_paths_that_escape_are_refused(tmp_path: Path, make: Callable[[Path], None], found: str) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    make(folder / WEIGHTS)
    with pytest.raises(EscapingPath, match=found):
        open_adapter(folder, label=LABEL)


def test_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", encode(Logical()))
    (folder / WEIGHTS).rename(folder / "real")
    (folder / WEIGHTS).symlink_to("real")
    assert len(open_adapter(folder, label=LABEL).tensors) == 8
