import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_builders import DIGEST

from storage import keys
from storage.errors import InvalidName

NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True).filter(lambda name: ".." not in name)


@pytest.mark.parametrize("name", ["a", "0", "author-17", "a.b_c-d", "x" * 64])
def test_names_that_keep_the_rule(name: str) -> None:
    assert keys.check_author(name) == keys.check_run(name) == keys.check_base(name) == name


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("Alice", "alice"),
        ("max/power", "max-power"),
        ("../etc/passwd", "etc-passwd"),
        ("a..b", "a.b"),
        ("-dash", "dash"),
        ("José Núñez", "jose-nunez"),
        ("\uff46ull", "full"),
        ("y" * 65, "y" * 64),
        ("tail\n", "tail"),
        ("a\\b", "a-b"),
        ("\u0430lice", None),  # Cyrillic: nobody but its owner can say which letter was meant
        ("ali\u200bce", "ali-ce"),
        ("..", None),
        ("", None),
    ],
)
def test_names_that_break_the_rule_are_refused_with_a_way_out(name: str, suggestion: str | None) -> None:
    for kind, check in [("author", keys.check_author), ("run", keys.check_run), ("base", keys.check_base)]:
        with pytest.raises(InvalidName) as caught:
            check(name)
        assert caught.value.suggestion == suggestion
        message = str(caught.value)
        assert message.startswith(f"{kind} {name!r}: expected 1 to 64 characters out of a-z 0-9 . _ -")
        assert message.endswith("Choose another." if suggestion is None else f"Try {suggestion!r}.")
        if suggestion is not None:
            assert check(suggestion) == suggestion


@given(st.text(max_size=80))
def test_every_suggestion_is_itself_a_name(text: str) -> None:
    try:
        assert keys.check_author(text) == text
    except InvalidName as error:
        if error.suggestion is not None:
            assert keys.check_author(error.suggestion) == error.suggestion


@given(NAMES, NAMES, NAMES)
def test_keys_parse_back_and_only_as_what_they_are(author: str, run: str, name: str) -> None:
    parsers = {
        keys.split_upload_key: (keys.marker_key(author, run), (author, run, "_READY.json")),
        keys.parse_heldout_key: (keys.heldout_key(author, name), (author, name)),
        keys.parse_base_document_key: (keys.base_document_key(name), name),
        keys.parse_ledger_key: (keys.ledger_key(author, DIGEST), (author, DIGEST)),
    }
    for parse, (_, expected) in parsers.items():
        for key, meaning in parsers.values():
            assert parse(key) == (meaning if meaning is expected else None)


def test_keys_are_the_documented_ones() -> None:
    assert keys.upload_file_key("ada", "run-1", "a b.bin") == "uploads/ada/run-1/a b.bin"
    assert keys.marker_key("ada", "run-1") == "uploads/ada/run-1/_READY.json"
    assert keys.training_key("ada", "run-1") == "uploads/ada/run-1/training.json"
    assert keys.heldout_key("ada", "letters") == "heldout/ada/letters.jsonl"
    assert keys.base_config_key("tiny") == "bases/tiny/config.json"
    assert keys.base_document_key("tiny") == "bases/tiny/base.json"
    assert keys.policy_key(None) == "policy.json"
    assert keys.policy_key("tiny") == "bases/tiny/policy.json"
    assert keys.ledger_key("ada", DIGEST) == f"ledger/ada/{DIGEST}.json"
    assert keys.manifest_key(keys.serving_prefix("ada", DIGEST)) == f"serving/ada/{DIGEST}/manifest.json"
    assert keys.control_prefix("ada", DIGEST) == f"control/ada/{DIGEST}/"
    assert keys.roster_key() == "roster/current.json"
    assert keys.engine_key("tiny") == "engines/tiny.json"


@pytest.mark.parametrize(
    "key",
    [
        "ledger/ada/_author.json",
        f"ledger/ada/{DIGEST}",
        f"ledger/ada/{DIGEST.upper()}.json",
        f"ledger/ada/more/{DIGEST}.json",
        f"serving/ada/{DIGEST}.json",
    ],
)
def test_other_keys_are_no_ledgers(key: str) -> None:
    assert keys.parse_ledger_key(key) is None


def test_an_upload_under_a_bad_name_is_told_from_what_is_none() -> None:
    names = keys.split_upload_key("uploads/Ada/run-1/_READY.json")
    assert names == ("Ada", "run-1", "_READY.json") and not keys.is_upload_name(*names[:2])
    assert not keys.is_upload_name("ada", "a..b") and keys.is_upload_name("ada", "run-1")
    assert keys.split_upload_key("uploads/ada/run-1/sub/_READY.json") == ("ada", "run-1", "sub/_READY.json")
    for key in ("uploads/ada/run-1/", "uploads/ada/file", "ledger/ada/run-1/file"):
        assert keys.split_upload_key(key) is None


@pytest.mark.parametrize("digest", ["", "ab", DIGEST.upper(), DIGEST + "0", DIGEST[:-1] + "g", DIGEST + "\n"])
def test_digests_are_64_hexadecimal_characters(digest: str) -> None:
    with pytest.raises(InvalidName, match="expected 64 hexadecimal characters"):
        keys.ledger_key("ada", digest)


def test_authors_that_differ_only_by_punctuation_fold_together() -> None:
    assert len({keys.folded_author(name) for name in ["ann-lee", "ann.lee", "ann_lee", "annlee"]}) == 1
    assert keys.folded_author("ann-lee") != keys.folded_author("ann-lea")


@pytest.mark.parametrize("ref", ["letters", "Ada/letters", "ada/", "ada/../x", "ada/a/b"])
def test_heldout_refs_are_author_slash_name(ref: str) -> None:
    assert keys.parse_heldout_ref("ada/letters") == ("ada", "letters")
    with pytest.raises(InvalidName):
        keys.parse_heldout_ref(ref)
