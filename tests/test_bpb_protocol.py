"""Windows over token ids, the BOS rule, and the bytes that the scored tokens stand for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_scorer import BOS_ID, EOS_ID, ScriptedScorer

from tasks.bpb.errors import TokenizerUnsupported, WindowInvalid
from tasks.bpb.heldout import Unit
from tasks.bpb.protocol import Encoded, Scorer, Unscorable, Window, encode_unit, find_bos, plan_windows


class MergingTokenizer(ScriptedScorer):
    """A tokenizer scripted by hand: a list of (token text, id), decoded with U+FFFD for broken characters."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__({"base": 2.0})
        self.pieces = tuple(pieces)

    def tokenize(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(range(len(self.pieces)))

    def detokenize(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[id] for id in ids).decode(errors="replace")


class OddTokenizer(ScriptedScorer):
    """Puts given ids around a text, whatever was asked for."""

    def __init__(self, *, before: tuple[int, ...], without: tuple[int, ...] = ()) -> None:
        super().__init__({"base": 2.0})
        self.before = before
        self.without = without

    def tokenize(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        ids = super().tokenize(text, add_special_tokens=False)
        return (self.before if add_special_tokens else self.without) + ids


def test_scripted_scorer_is_a_scorer() -> None:
    scorer: Scorer = ScriptedScorer({"base": 2.0})
    assert scorer.served_models() == ("base",)


# --- windows ---


@given(
    length=st.integers(0, 90),
    scored_from=st.integers(1, 40),
    max_len=st.integers(2, 20),
    data=st.data(),
)
def test_each_token_is_scored_once_with_enough_context(
    length: int, scored_from: int, max_len: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, max_len - 1))
    windows = plan_windows(range(length), scored_from, max_len=max_len, stride=stride)
    for position in range(length):
        holders = [w for w in windows if w.first_scored <= position < w.end]
        assert len(holders) == (1 if position >= scored_from else 0)
        for window in holders:
            context = position - window.begin
            assert context >= 1
            assert window.begin == 0 or context >= max_len - stride
    for window in windows:
        assert 0 <= window.begin < window.first_scored < window.end <= length
        assert window.end - window.begin <= max_len


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, []),
        (1, []),
        (7, [(0, 7, 1)]),
        (8, [(0, 8, 1)]),
        (9, [(0, 8, 1), (4, 9, 8)]),
        (17, [(0, 8, 1), (4, 12, 8), (8, 16, 12), (12, 17, 16)]),
    ],
)
def test_documents_around_the_window_length(length: int, expected: list[tuple[int, int, int]]) -> None:
    """lm-evaluation-harness#2880, vllm#22761: documents of the context's length and one more."""
    windows = plan_windows(range(length), 1, max_len=8, stride=4)
    assert [(w.begin, w.end, w.first_scored) for w in windows] == expected


def test_a_long_prompt_costs_no_windows_of_its_own() -> None:
    windows = plan_windows(range(23), 20, max_len=8, stride=4)
    assert windows == (Window(16, 23, 20),)


@pytest.mark.parametrize(("max_len", "stride", "scored_from"), [(8, 0, 1), (8, 8, 1), (1, 1, 1), (8, 4, 0)])
def test_tokens_without_context_are_refused(max_len: int, stride: int, scored_from: int) -> None:
    with pytest.raises(WindowInvalid) as caught:
        plan_windows(range(5), scored_from, max_len=max_len, stride=stride)
    message = str(caught.value)
    assert f"stride {stride}" in message
    assert f"window {max_len}" in message
    assert "max_model_len" in message
    assert (caught.value.max_len, caught.value.stride, caught.value.scored_from) == (
        max_len,
        stride,
        scored_from,
    )


# --- BOS ---


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_bos_is_what_the_tokenizer_puts_first(bos: bool, eos: bool) -> None:
    scorer = ScriptedScorer({"base": 2.0}, bos=bos, eos=eos)
    assert find_bos(scorer) == (BOS_ID if bos else None)


@pytest.mark.parametrize(
    "scorer",
    [
        pytest.param(OddTokenizer(before=(BOS_ID, BOS_ID)), id="two BOS"),
        pytest.param(OddTokenizer(before=(BOS_ID, EOS_ID)), id="two different tokens"),
        pytest.param(
            OddTokenizer(before=(BOS_ID, BOS_ID), without=(BOS_ID,)), id="BOS even without special tokens"
        ),
        pytest.param(OddTokenizer(before=(1,), without=(2,)), id="another text"),
    ],
)
def test_other_tokenizers_are_refused(scorer: ScriptedScorer) -> None:
    with pytest.raises(TokenizerUnsupported) as caught:
        find_bos(scorer)
    assert str(list(caught.value.with_special)) in str(caught.value)
    assert str(list(caught.value.without_special)) in str(caught.value)
    assert "at most one BOS" in str(caught.value)


def test_text_that_begins_with_bos_gets_exactly_one_more() -> None:
    """lm-evaluation-harness#3333, trl#3853: two BOS, or the text's own one swallowed."""
    scorer = ScriptedScorer({"base": 2.0}, bos=True, eos=True)
    encoded = encode_unit(scorer, Unit("u", "<s>ab"), BOS_ID)
    assert encoded == Encoded((BOS_ID, BOS_ID, ord("a"), ord("b")), 1, 5)


def test_with_bos_every_token_of_the_text_is_scored() -> None:
    scorer = ScriptedScorer({"base": 2.0}, bos=True)
    assert encode_unit(scorer, Unit("u", "né\r\n"), BOS_ID) == Encoded(
        (BOS_ID, 110, 0xC3, 0xA9, 13, 10), 1, 5
    )


def test_without_bos_the_first_token_and_its_bytes_are_left_out() -> None:
    scorer = MergingTokenizer([b"The", b" caf", b"\xc3\xa9"])
    assert encode_unit(scorer, Unit("u", "The café"), None) == Encoded((0, 1, 2), 1, 6)


@pytest.mark.parametrize(
    ("text", "pieces", "scored_from", "byte_count"),
    [
        ("éa", [b"\xc3\xa9", b"a"], 1, 1),
        ("éab", [b"\xc3", b"\xa9", b"ab"], 2, 2),
        ("\N{GRINNING FACE}ab", [b"\xf0", b"\x9f", b"\x98", b"\x80", b"ab"], 4, 2),
        ("a\N{GRINNING FACE}b", [b"a\xf0\x9f", b"\x98\x80", b"b"], 2, 1),
        ("\r\nab", [b"\r\n", b"ab"], 1, 2),
        ("ab", [b"", b"ab"], 1, 2),
    ],
)
def test_left_out_tokens_end_with_a_whole_character(
    text: str, pieces: list[bytes], scored_from: int, byte_count: int
) -> None:
    encoded = encode_unit(MergingTokenizer(pieces), Unit("u", text), None)
    assert encoded == Encoded(tuple(range(len(pieces))), scored_from, byte_count)


@pytest.mark.parametrize(
    ("text", "pieces", "says"),
    [
        ("a", [b"a"], "has 1 tokens"),
        ("Ab", [b"a", b"b"], "the text of its first token cannot be told"),
        ("\ufffda", [b"\xef", b"\xbf", b"\xbd", b"a"], "cannot be told"),
        ("\N{GRINNING FACE}", [b"\xf0\x9f", b"\x98\x80"], "cannot be told"),
        ("ab", [b"ab", b""], "has no text after its first token"),
    ],
)
def test_units_whose_bytes_cannot_be_told_are_void(text: str, pieces: list[bytes], says: str) -> None:
    encoded = encode_unit(MergingTokenizer(pieces), Unit("u", text), None)
    assert isinstance(encoded, Unscorable)
    assert says in encoded.reason


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(
    ("text", "says"), [("", "has no text"), ("a\ud800b", "UTF-8 cannot hold, at 1: surrogates not allowed")]
)
def test_texts_that_are_no_text_are_void(text: str, says: str, bos: bool) -> None:
    scorer = ScriptedScorer({"base": 2.0}, bos=bos)
    encoded = encode_unit(scorer, Unit("u", text, "prompt"), find_bos(scorer))
    assert isinstance(encoded, Unscorable)
    assert says in encoded.reason


@pytest.mark.parametrize("bos", [False, True])
def test_prompts_condition_and_are_not_scored(bos: bool) -> None:
    scorer = ScriptedScorer({"base": 2.0}, bos=bos)
    encoded = encode_unit(scorer, Unit("u", "é!", "Say: "), find_bos(scorer))
    ids = ((BOS_ID,) if bos else ()) + tuple(b"Say: ") + (0xC3, 0xA9, ord("!"))
    assert encoded == Encoded(ids, len(ids) - 3, 3)


def test_an_empty_prompt_is_no_prompt() -> None:
    scorer = ScriptedScorer({"base": 2.0})
    assert encode_unit(scorer, Unit("u", "ab", ""), None) == encode_unit(scorer, Unit("u", "ab"), None)
