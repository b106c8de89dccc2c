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
from safetensors.torch import save, save_file

from tasks.lora.errors import (
    AdapterError,
    AmbiguousWeights,
    CorruptFile,
    EmptyAdapter,
    EscapingPath,
    MissingWeights,
    PickleRefused,
    UnsupportedDtype,
)
from tasks.lora.files import open_adapter
from tasks.lora.header import ITEM_BYTES, TensorGroup, TensorSpec, format_header, parse_header
from tasks.lora.tensors import bits, open_tensors

WEIGHTS = "adapter_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


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
    with safe_open(files.weights[0].path, "pt") as reference, open_tensors(files) as reader:
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
            st.lists(st.integers(1, 5), max_size=3),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda item: item[0],
    )
)
def test_parsing_undoes_formatting(items: list[tuple[str, str, list[int], int]]) -> None:
    groups = [
        TensorGroup(tuple(f"{name}{number}" for number in range(count)), dtype, tuple(shape))
        for name, dtype, shape, count in items
    ]
    specs = [TensorSpec(name, group.dtype, group.shape) for group in groups for name in group.names]
    start = format_header(groups)
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


@pytest.mark.parametrize("length", [640, 1152, 640 + 65536])
def test_headers_whose_length_looks_like_a_pickle_are_read(tmp_path: Path, length: int) -> None:
    """The length is little-endian: these begin with the first bytes of pickles, 80 02 and 80 04."""
    header = json.dumps({"x": tensor(0, 16)}).encode()
    data = file_of(header.ljust(length), bytes(16))
    assert data[:2] in (b"\x80\x02", b"\x80\x04")
    assert len(open_adapter(write(tmp_path / "a", data), label=LABEL).tensors) == 1


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


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], parts: int = 3) -> dict[str, str]:
    """Spread the tensors over files, every third one to the same; return the index's map of them."""
    folder.mkdir(exist_ok=True)
    names = [f"adapter_model-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]
    places = {name: names[number % parts] for number, name in enumerate(tensors)}
    for shard in names:
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, folder / shard)
    write_index(folder, places)
    return places


def write_index(folder: Path, places: Any) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
    (folder / INDEX).write_text(text, "utf-8")


def test_shards_are_read_as_their_index_says(tmp_path: Path) -> None:
    tensors = encode(Logical()) | attention()
    places = save_shards(tmp_path / "a", tensors)
    files = open_adapter(tmp_path / "a", label=LABEL)
    assert files.weights_name == INDEX
    assert {entry.name: files.weights[entry.file].name for entry in files.tensors} == places
    assert sum(item.bytes for item in files.weights) == sum(
        path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors")
    )
    with open_tensors(files) as reader:
        for entry in files.tensors:
            assert torch.equal(reader.read_tensor(entry), tensors[entry.name]), entry.name
    assert files.stray == ()


def test_a_shard_that_shrinks_is_named_when_it_is_read(tmp_path: Path) -> None:
    save_shards(tmp_path / "a", encode(Logical()))
    files = open_adapter(tmp_path / "a", label=LABEL)
    last = files.tensors[-1]
    weights = files.weights[last.file].path
    weights.write_bytes(weights.read_bytes()[: last.end - 1])
    with open_tensors(files) as reader, pytest.raises(CorruptFile) as caught:
        reader.read_tensor(last)
    assert (caught.value.where, caught.value.found) == (last.name, f"the file's end at {last.end - 1}")


FIRST, SECOND = (f"adapter_model-0000{part}-of-00002.safetensors" for part in (1, 2))


@pytest.mark.parametrize(
    ("change", "error", "where", "expected", "found"),
    [
        (
            lambda f: (f / SECOND).unlink(),
            MissingWeights,
            SECOND,
            f"every file that {INDEX} names",
            "no such file",
        ),
        (lambda f: (f / INDEX).unlink(), MissingWeights, "", INDEX, f"{FIRST} without it"),
        (
            lambda f: save_file({"x": torch.ones(2)}, f / WEIGHTS),
            AmbiguousWeights,
            WEIGHTS,
            f"no weights but {FIRST}, {SECOND}",
            "more weights",
        ),
        (
            lambda f: save_file({"x": torch.ones(2)}, f / "adapter_model-00003-of-00003.safetensors"),
            AmbiguousWeights,
            "adapter_model-00003-of-00003.safetensors",
            f"no weights but {FIRST}, {SECOND}",
            "more weights",
        ),
        (
            lambda f: save_file({"b": torch.ones(2), "c": torch.ones(2)}, f / SECOND),
            CorruptFile,
            f"{SECOND}: c",
            f"no such tensor, as {INDEX} says",
            "it in this file",
        ),
        (
            lambda f: save_file({"b": torch.ones(2), "a": torch.ones(2)}, f / SECOND),
            CorruptFile,
            f"{SECOND}: a",
            f"it in {FIRST}, as {INDEX} says",
            "it in this file",
        ),
        (
            lambda f: write_index(f, {"a": SECOND, "b": FIRST}),
            CorruptFile,
            f"{FIRST}: a",
            f"it in {SECOND}, as {INDEX} says",
            "it in this file",
        ),
        (
            lambda f: write_index(f, {"a": FIRST, "b": SECOND, "c": SECOND}),
            CorruptFile,
            f"{SECOND}: c",
            f"the tensor, as {INDEX} says",
            "no such tensor",
        ),
        (lambda f: write_index(f, {}), EmptyAdapter, INDEX, "at least one tensor", "none"),
        (lambda f: write_index(f, ["a"]), CorruptFile, INDEX, "weight_map: {tensor: file}", "dictionary"),
        (lambda f: write_index(f, {"a": 3}), CorruptFile, INDEX, "weight_map: {tensor: file}", "string"),
        (lambda f: (f / INDEX).write_text('{"a":1,"a":2}'), CorruptFile, INDEX, "strict JSON", "'a' twice"),
        (
            lambda f: (f / INDEX).write_text("[]"),
            CorruptFile,
            INDEX,
            "weight_map: {tensor: file}",
            "dictionary",
        ),
        (
            lambda f: write_index(f, {"a": "/etc/hostname"}),
            EscapingPath,
            INDEX,
            "names of files beside the index",
            "'/etc/hostname'",
        ),
        (
            lambda f: write_index(f, {"a": "../b.safetensors"}),
            EscapingPath,
            INDEX,
            "names of files beside the index",
            "'../b.safetensors'",
        ),
        (
            lambda f: write_index(f, {"a": "..\\b.safetensors"}),
            EscapingPath,
            INDEX,
            "names of files beside the index",
            "b.safetensors",
        ),
        (
            lambda f: write_index(f, {"a": ".."}),
            EscapingPath,
            INDEX,
            "names of files beside the index",
            "'..'",
        ),
        (
            lambda f: write_index(f, {"a": "model-1.bin"}),
            PickleRefused,
            f"{INDEX}: model-1.bin",
            "names of safetensors files",
            "pickled weights",
        ),
        (
            lambda f: write_index(f, {"a": "adapter_config.json"}),
            CorruptFile,
            INDEX,
            "names of .safetensors files",
            "'adapter_config.json'",
        ),
        (
            lambda f: ((f / SECOND).unlink(), (f / SECOND).symlink_to("/etc/hostname")),
            EscapingPath,
            SECOND,
            "a regular file inside",
            "a link to /etc/hostname",
        ),
        # LlamaFactory#327: a Git LFS pointer among the shards.
        (
            lambda f: (f / SECOND).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
            CorruptFile,
            SECOND,
            "safetensors",
            "a Git LFS pointer",
        ),
        (
            lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-1]),
            CorruptFile,
            SECOND,
            "bytes, as its header says",
            "bytes",
        ),
        (lambda f: save_file({}, f / SECOND), EmptyAdapter, SECOND, "at least one tensor", "none"),
    ],
)
def test_shards_that_do_not_agree_with_their_index(
    tmp_path: Path,
    change: Callable[[Path], object],
    error: type[AdapterError],
    where: str,
    expected: str,
    found: str,
) -> None:
    folder = tmp_path / "a"
    save_shards(folder, {"a": torch.arange(3.0), "b": torch.arange(5.0)}, parts=2)
    open_adapter(folder, label=LABEL)
    change(folder)
    with pytest.raises(error) as caught:
        open_adapter(folder, label=LABEL)
    assert caught.value.where == (where or "its folder")
    assert expected in caught.value.expected and found in caught.value.found
    message = str(caught.value)
    assert message.startswith(f"{LABEL}: {caught.value.where}: found ") and caught.value.advice in message
    assert caught.value.advice


def test_pickled_shards_are_pickles(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_model-00001-of-00002.bin").write_bytes(b"x")
    with pytest.raises(PickleRefused, match=r"-00002\.bin: found pickled weights only"):
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
