"""measure_id: what changes it and what does not. Also: every error survives pickling."""

from __future__ import annotations

import hashlib
import pickle  # noqa: TID251  (Prefect pickles errors, so ours have to bear it)

import pytest

from tasks.bpb.errors import (
    BpbError,
    DuplicateUnit,
    HeldoutUnusable,
    MeasurementVoid,
    SubjectsInvalid,
    ThresholdsInvalid,
    TokenizerUnsupported,
    WindowInvalid,
)
from tasks.bpb.heldout import UnitKind
from tasks.bpb.identity import measure_id
from tasks.bpb.protocol import BosRule


def an_id(
    sets: tuple[str, ...] = ("aa", "bb"),
    kind: UnitKind = UnitKind.TEXT,
    window: int = 511,
    stride: int = 255,
    bos_rule: BosRule = BosRule.ONE_BOS,
    weights: str = "cc",
) -> str:
    return measure_id(
        heldout_sha256s=sets,
        unit_kind=kind,
        window=window,
        stride=stride,
        bos_rule=bos_rule,
        base_weights_digest=weights,
    )


def test_measure_id_is_the_hash_of_what_it_names() -> None:
    text = (
        '{"base_weights": "cc", "bos_rule": "one_bos", "heldout": ["aa", "bb"], "method": "1", "stride": 255'
        ', "unit_kind": "text", "window": 511}'
    )
    assert an_id() == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_each_part_of_measure_id_counts_but_the_order_of_sets() -> None:
    """LlamaFactory#10596: a text scored raw and in a template must never be compared."""
    others = [
        an_id(("aa",)),
        an_id(kind=UnitKind.PROMPT_AND_TEXT),
        an_id(window=510),
        an_id(stride=254),
        an_id(bos_rule=BosRule.FIRST_TOKEN_LEFT_OUT),
        an_id(weights="cd"),
    ]
    assert len({an_id(), *others}) == 7
    assert an_id(("bb", "aa")) == an_id()


@pytest.mark.parametrize(
    "error",
    [
        HeldoutUnusable(3, ("u1: has no text",)),
        DuplicateUnit("u1"),
        TokenizerUnsupported((1, 1, 5), (5,)),
        WindowInvalid(8, 9, 1),
        SubjectsInvalid(("own",), "base or own is missing"),
        MeasurementVoid("base", 40, "token 1 has no value"),
        ThresholdsInvalid("floor", -1.0, "a finite number from 0 to inf"),
    ],
)
def test_errors_survive_pickling(error: BpbError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)
