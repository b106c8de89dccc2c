import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_builders import DIGEST, OTHER_DIGEST, memory_store

from storage.bases import (
    BaseDocument,
    BaseEngine,
    TargetFormat,
    find_base,
    list_bases,
    read_base,
    register_base,
    weights_digest,
)
from storage.errors import InvalidDocument, InvalidName, NoWeights, UnknownBase
from storage.s3 import S3Store

CONFIG = b'{"model_type": "qwen3_moe",\n  "num_experts": 4}\n'


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


def document(**changes: Any) -> BaseDocument:
    values: dict[str, Any] = {
        "base": "tiny",
        "served_model": "tiny",
        "weights_digest": DIGEST,
        "engine": BaseEngine(url="http://127.0.0.1:8000"),
        "target_format": TargetFormat.PER_EXPERT,
    }
    return BaseDocument(**(values | changes))


def test_a_registered_base_is_read_back(store: S3Store) -> None:
    registered = register_base(store, CONFIG, document(aliases=("Org/Tiny",), exclusions=(("ada", "bob"),)))
    assert read_base(store, "tiny") == registered
    assert registered.config == CONFIG == store.get("bases/tiny/config.json").body
    assert registered.document.aliases == ("Org/Tiny",)
    lines = f"{hashlib.sha256(CONFIG).hexdigest()} config.json\n{DIGEST} weights\n"
    assert registered.digest == hashlib.sha256(lines.encode()).hexdigest()


def test_the_digest_sees_config_and_weights_but_no_addresses(store: S3Store) -> None:
    first = register_base(store, CONFIG, document())
    moved = document(
        engine=BaseEngine(url="http://elsewhere", dtype="bfloat16"), aliases=("x",), served_model="y"
    )
    assert register_base(store, CONFIG, moved).digest == first.digest
    others = [
        register_base(store, CONFIG + b" ", document()),
        register_base(store, CONFIG, document(weights_digest=OTHER_DIGEST)),
        register_base(store, CONFIG, document(weights_digest=None)),
    ]
    assert len({first.digest, *(base.digest for base in others)}) == 4
    assert read_base(store, "tiny") == others[-1]


def test_a_base_is_found_by_its_aliases_too(store: S3Store) -> None:
    registered = register_base(store, CONFIG, document(aliases=("Org/Tiny",)))
    assert find_base(store, "tiny") == find_base(store, "Org/Tiny") == registered
    assert find_base(store, "Org/Other") is None


def test_an_unknown_base_is_named_with_the_known_ones(store: S3Store) -> None:
    with pytest.raises(
        UnknownBase, match=r"base 'tiny': .* found: none. Register it with `roster base add tiny`"
    ):
        read_base(store, "tiny")
    for name in ["zebra", "apple"]:
        register_base(store, CONFIG, document(base=name))
    assert list_bases(store) == ("apple", "zebra")
    with pytest.raises(UnknownBase) as caught:
        read_base(store, "tiny")
    assert caught.value.known == ("apple", "zebra")
    with pytest.raises(InvalidName):
        read_base(store, "Org/Tiny")


@pytest.mark.parametrize(("config", "fact"), [(b"{", "expected JSON"), (b"[1]", "a JSON object, found list")])
def test_a_config_that_is_none_is_refused_and_not_written(store: S3Store, config: bytes, fact: str) -> None:
    with pytest.raises(InvalidDocument, match=f"bases/tiny/config.json: .*{fact}"):
        register_base(store, config, document())
    assert list(store.list_objects("")) == []


def test_a_base_document_of_another_base_is_refused(store: S3Store) -> None:
    register_base(store, CONFIG, document())
    store.put("bases/other/config.json", CONFIG)
    store.put("bases/other/base.json", store.get("bases/tiny/base.json").body)
    with pytest.raises(InvalidDocument, match=r"bases/other/base.json: .* it describes base tiny"):
        read_base(store, "other")


def test_weights_are_known_by_their_files(tmp_path: Path) -> None:
    for number in (2, 1):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes([number]) * 1_500_000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    seen: list[tuple[int, int]] = []
    digest = weights_digest(tmp_path, lambda *done: seen.append(done))

    script = "sha256sum model-*.safetensors | sed 's/  / /' | sha256sum"
    expected = subprocess.run(
        script, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert digest == expected.split()[0]
    assert [total for _, total in seen] == [3_000_000] * len(seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == 3_000_000


def test_pickled_weights_count_where_there_are_no_others(tmp_path: Path) -> None:
    with pytest.raises(NoWeights, match=f"{tmp_path}: expected the base's weights"):
        weights_digest(tmp_path, lambda *_: None)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    line = f"{hashlib.sha256(b'pickle').hexdigest()} pytorch_model.bin\n"
    assert weights_digest(tmp_path, lambda *_: None) == hashlib.sha256(line.encode()).hexdigest()


def test_target_formats_are_those_that_are_converted_to(store: S3Store) -> None:
    written = [json.loads(document(target_format=f).model_dump_json())["target_format"] for f in TargetFormat]
    assert written == ["per-expert", "stacked", "slots"]
    register_base(store, CONFIG, document())
    body = store.get("bases/tiny/base.json").body.replace(b'"per-expert"', b'"3-d"')
    store.put("bases/tiny/base.json", body)
    with pytest.raises(
        InvalidDocument, match="target_format: Input should be 'per-expert', 'stacked' or 'slots'"
    ):
        read_base(store, "tiny")
