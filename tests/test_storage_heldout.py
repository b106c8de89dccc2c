import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_builders import memory_store

from storage.errors import HeldoutMissing, InvalidDocument, InvalidName
from storage.heldout import HeldoutUnit, list_heldout, read_heldout, register_heldout
from storage.s3 import S3Store


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        yield empty


def written(tmp_path: Path, body: bytes) -> Path:
    file = tmp_path / "letters.jsonl"
    file.write_bytes(body)
    return file


def test_a_set_is_kept_byte_for_byte(store: S3Store, tmp_path: Path) -> None:
    body = '{"id": "1", "text": "a\u2028b ☃"}\r\n\n{"id": "2", "prompt": "P:", "text": " x\\n"}'.encode()
    registered = register_heldout(store, "ada", "letters", written(tmp_path, body))
    assert registered.units == (
        HeldoutUnit(id="1", text="a\u2028b ☃"),
        HeldoutUnit(id="2", prompt="P:", text=" x\n"),
    )
    assert registered.sha256 == hashlib.sha256(body).hexdigest()
    assert registered.ref == "ada/letters"
    assert registered.warnings == ()
    assert store.get("heldout/ada/letters.jsonl").body == body
    assert read_heldout(store, "ada", "letters") == registered


def test_sets_are_listed_per_author(store: S3Store, tmp_path: Path) -> None:
    file = written(tmp_path, b'{"id": "1", "text": "t"}\n')
    for author, name in [("ada", "notes"), ("ada", "letters"), ("ada-2", "other")]:
        register_heldout(store, author, name, file)
    assert list_heldout(store, "ada") == ("letters", "notes")
    assert list_heldout(store, "bob") == ()


def test_a_missing_set_is_named_with_those_that_are_there(store: S3Store, tmp_path: Path) -> None:
    register_heldout(store, "ada", "notes", written(tmp_path, b'{"id": "1", "text": "t"}\n'))
    with pytest.raises(HeldoutMissing, match=r"held-out set ada/letters: .* found for ada: notes") as caught:
        read_heldout(store, "ada", "letters")
    assert caught.value.known == ("notes",)


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        (b"", ": .*it holds no units"),
        (b"\n  \n", ": .*it holds no units"),
        (b'{"id": "1", "text": "t"}\n{"id": "2"}\n', ", line 2: .*text: Field required"),
        (b'{"id": "1", "text": "t"}\nnot json\n', ", line 2: .*Invalid JSON"),
        (b'{"id": 1, "text": "t"}\n', ", line 1: .*id: Input should be a valid string"),
        (b'["1", "t"]\n', ", line 1: .*Input should be an object"),
        (b'{"id": "1", "text": ""}\n', ", line 1: .*text is empty"),
        (b'{"id": "1", "text": " \\n"}\n', ", line 1: .*text is empty"),
        (b'{"id": "", "text": "t"}\n', ", line 1: .*id is empty"),
        (b'{"id": "1", "prompt": "", "text": "t"}\n', ", line 1: .*prompt is empty: leave it out"),
        (
            b'{"id": "1", "text": "t"}\n{"id": "1", "text": "u"}\n',
            ", line 2: .*id '1' is used by an earlier line",
        ),
        (b'{"id": "1", "text": "\xe9"}\n', ", line 1: .*not UTF-8"),
        (b'\xef\xbb\xbf{"id": "1", "text": "t"}\n', ", line 1: .*byte order mark"),
        (b'{"id": "1", "text": "\\ud800"}\n', ", line 1: .*Invalid JSON"),
        ('{"id": "1", "text": "t"}\n'.encode("utf-16"), ", line 1: .*not UTF-8"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_nothing_is_kept(
    store: S3Store, tmp_path: Path, body: bytes, fact: str
) -> None:
    file = written(tmp_path, body)
    with pytest.raises(InvalidDocument, match=re.escape(str(file)) + fact):
        register_heldout(store, "ada", "letters", file)
    assert list_heldout(store, "ada") == ()
    store.put("heldout/ada/letters.jsonl", body)
    with pytest.raises(InvalidDocument, match=f"heldout/ada/letters.jsonl{fact}"):
        read_heldout(store, "ada", "letters")


def test_unknown_keys_warn_with_their_line(store: S3Store, tmp_path: Path) -> None:
    body = b'{"id": "1", "text": "t"}\n{"id": "2", "text": "u", "promt": "typo"}\n'
    file = written(tmp_path, body)
    assert register_heldout(store, "ada", "letters", file).warnings == (
        f"{file}, line 2: promt is no key we know, ignored",
    )


def test_names_keep_the_rule(store: S3Store, tmp_path: Path) -> None:
    file = written(tmp_path, b'{"id": "1", "text": "t"}\n')
    with pytest.raises(InvalidName, match="held-out set 'a/b'"):
        register_heldout(store, "ada", "a/b", file)
    with pytest.raises(InvalidName, match="author 'Ada'"):
        register_heldout(store, "Ada", "letters", file)
