import subprocess
from pathlib import Path

import pytest
from store_builders import make_adapter_directory

from storage.digests import FileDigest, directory_digest, is_adapter_file, sha256_file, step_key


def test_file_and_directory_digests_agree_with_sha256sum(tmp_path: Path) -> None:
    directory = make_adapter_directory(tmp_path)
    names = sorted(path.name for path in directory.iterdir())
    files = [sha256_file(directory / name) for name in reversed(names)]
    lines = ""
    for name in names:
        printed = subprocess.run(
            ["sha256sum", name], cwd=directory, capture_output=True, text=True, check=True
        ).stdout
        lines += f"{printed.split()[0]} {name}\n"
    total = subprocess.run(["sha256sum"], input=lines, capture_output=True, text=True, check=True).stdout

    assert directory_digest(files) == total.split()[0]
    assert {file.name: file.bytes for file in files} == {n: (directory / n).stat().st_size for n in names}


def test_a_directory_digest_sees_names_and_bytes_but_not_order() -> None:
    one, two = FileDigest("a", 1, "11" * 32), FileDigest("b", 2, "22" * 32)
    swapped = [FileDigest("a", 2, "22" * 32), FileDigest("b", 1, "11" * 32)]
    assert directory_digest([one, two]) == directory_digest([two, one])
    assert len({directory_digest(files) for files in [[one, two], [one], swapped]}) == 3


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("adapter_config.json", True),
        ("adapter_model.safetensors", True),
        ("adapter_model-00001-of-00002.safetensors", True),
        ("adapter_model.safetensors.index.json", True),
        ("ADAPTER_MODEL.SAFETENSORS", True),
        ("adapter_model.bin", True),
        ("adapter_model.pt", True),
        ("training.json", False),
        ("training_args.bin", False),
        ("optimizer.pt", False),
        ("tokenizer.json", False),
        ("README.md", False),
    ],
)
def test_which_files_are_the_adapters_own(name: str, own: bool) -> None:
    assert is_adapter_file(name) is own


def test_a_step_key_changes_with_every_part_and_not_with_their_order() -> None:
    parts = {"adapter_digest": "a", "base_digest": "b", "code_version": "1"}
    key = step_key(parts)
    assert len(key) == 16
    assert set(key) <= set("0123456789abcdef")
    assert step_key(dict(reversed(parts.items()))) == key
    changed = [step_key(parts | {name: value + "x"}) for name, value in parts.items()]
    assert len({key, *changed, step_key(parts | {"more": ""})}) == 5
    assert step_key({"a": "1,b", "c": ""}) != step_key({"a": "1", "b": "c"})
