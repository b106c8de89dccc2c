"""Deciding the packing: statements, tensors and the operator's word, weighed by the rules of tasks/lora/decide.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from lora_builders import FAMILY, LABEL, config_fields

from tasks.lora.config import parse_adapter_config
from tasks.lora.correlation import PooledScore, Reading, TensorScore
from tasks.lora.decide import RANK_1, PackedTensor, decide_packing
from tasks.lora.errors import AdapterError, LayoutConflict, PackingUndecided
from tasks.lora.layouts import Packing
from tasks.lora.packing import PackingDecision, PolicyStatement, ScoresStatement
from tasks.lora.statements import list_statements
from tasks.lora.trainers import TrainingStatement

G, R = Packing.GROUPED_BY_EXPERT, Packing.RANK_MAJOR
UNREAD, ABSTAIN = "unread", "abstain"
Verdict = Packing | str

# (z as rank_major, z as grouped_by_expert) of a tensor that says so.
Z = {R: (41.5, -2.25), G: (-1.5, 57.25), ABSTAIN: (1.25, -0.75)}

UNSLOTH = {"auto_mapping": {"base_model_class": "Qwen3MoeForCausalLM", "unsloth_fixed": True}}
OLD_UNSLOTH = TrainingStatement("unsloth_zoo", "2026.8.17")
NEW_UNSLOTH = TrainingStatement("unsloth_zoo", "2026.9.6")
PEFT = TrainingStatement("peft", "0.21.2")
MIXED = {"unsloth_fused_expert_lora": {"parameters": {"down_proj": {"lora_B_layout": "mixed"}}}}


def name_of(layer: int) -> str:
    return f"base_model.model.model.layers.{layer}.mlp.experts.lora_B.weight"


def score(layer: int, says: Verdict) -> TensorScore:
    """A tensor that says so; its numbers are made up, since the rules look at its word and messages at its z."""
    likeness = dict(zip((R, G), Z[says], strict=True))
    readings = tuple((packing, Reading(99, z, 0.0, True, 0.0, 0.0, 0.0)) for packing, z in likeness.items())
    word = says if isinstance(says, Packing) else None
    return TensorScore(layer, "down_proj", readings, None, 0, word, "all of it")


def pooled(says: Verdict, layers: Iterable[TensorScore]) -> PooledScore:
    scores = tuple(layers)
    decision = says if isinstance(says, Packing) else None
    return PooledScore(
        says=decision,
        rank_major=Z[says][0] * 3,
        grouped=Z[says][1] * 3,
        tensors=len(scores),
        outliers=tuple(item for item in scores if item.says not in (None, decision)),
        by_layer=tuple((item.layer, item.says) for item in scores),
        detail="what was measured",
    )


def decide(
    tensors: Verdict = ABSTAIN,
    *,
    layers: tuple[Verdict, ...] | None = None,
    same: str | None = None,
    forced: Packing | None = None,
    training: TrainingStatement | None = None,
    policy: Packing | None = None,
    scores: Packing | None = None,
    provisional: Packing = R,
    **config: Any,
) -> PackingDecision:
    """tensors: what all say together. layers: what each says, by default the same, in three layers."""
    fields = {key: value for key, value in config_fields(**config).items() if value is not None}
    statements = list_statements(
        "down_proj",
        family=FAMILY,
        config=parse_adapter_config(json.dumps(fields).encode(), label=LABEL),
        forced=forced,
        training=training,
        policy=None if policy is None else PolicyStatement(policy, (), "policy.json"),
        adapter=LABEL,
    )
    each = [score(layer, says) for layer, says in enumerate(layers or (tensors,) * 3) if says != UNREAD]
    read = tensors != UNREAD and same is None
    return decide_packing(
        "down_proj",
        statements,
        [
            PackedTensor(layer, name_of(layer), same, each[layer] if read else None)
            for layer in range(len(each) or 3)
        ],
        pooled(tensors, each) if read else None,
        None if scores is None else ScoresStatement((("down_proj", scores),), "both readings scored"),
        provisional=provisional,
        adapter=LABEL,
    )


SAYS_R, SAYS_G = {"lora_B_layout": "rank_major"}, {"lora_B_layout": "grouped_by_expert"}
EXPLICIT_R, EXPLICIT_G = TrainingStatement(layout="rank_major"), TrainingStatement(layout="grouped_by_expert")

# What is given, what the tensors say, and what must come of it: a packing and who decided, or None: a conflict.
TABLE: list[tuple[dict[str, Any], dict[Verdict, tuple[Packing, str] | None]]] = [
    # 5, 6: nothing is stated.
    ({}, {R: (R, "tensors"), G: (G, "tensors"), ABSTAIN: (R, "provisional"), UNREAD: (R, "provisional")}),
    (
        {"scores": G},
        {R: (R, "tensors"), G: (G, "tensors"), ABSTAIN: (G, "scores"), UNREAD: (G, "scores")},
    ),
    # 3, 4: one statement, whatever it is.
    (SAYS_R, {R: (R, "marker"), G: None, ABSTAIN: (R, "marker"), UNREAD: (R, "marker")}),
    (SAYS_G, {R: None, G: (G, "marker"), ABSTAIN: (G, "marker"), UNREAD: (G, "marker")}),
    (
        {"training": EXPLICIT_G},
        {R: None, G: (G, "training"), ABSTAIN: (G, "training"), UNREAD: (G, "training")},
    ),
    (
        {"training": OLD_UNSLOTH},
        {R: None, G: (G, "training"), ABSTAIN: (G, "training"), UNREAD: (G, "training")},
    ),
    (
        {"training": NEW_UNSLOTH},
        {R: (R, "training"), G: None, ABSTAIN: (R, "training"), UNREAD: (R, "training")},
    ),
    ({"policy": G}, {R: None, G: (G, "policy"), ABSTAIN: (G, "policy"), UNREAD: (G, "policy")}),
    ({"policy": R}, {R: (R, "policy"), G: None, ABSTAIN: (R, "policy"), UNREAD: (R, "policy")}),
    (UNSLOTH, {R: None, G: (G, "fingerprint"), ABSTAIN: (G, "fingerprint"), UNREAD: (G, "fingerprint")}),
    ({"policy": R, "scores": G}, {R: (R, "policy"), G: None, ABSTAIN: (R, "policy")}),
    # 3: the strongest wins over weaker kinds, which stay listed.
    ({**UNSLOTH, "training": PEFT}, {R: (R, "training"), G: None, ABSTAIN: (R, "training")}),
    ({**UNSLOTH, "policy": R}, {R: (R, "policy"), G: None, ABSTAIN: (R, "policy"), UNREAD: (R, "policy")}),
    (
        {**SAYS_G, "training": NEW_UNSLOTH},  # from 2026.9.6 on an environment variable may have chosen it
        {R: None, G: (G, "marker"), ABSTAIN: (G, "marker"), UNREAD: (G, "marker")},
    ),
    ({**SAYS_R, "policy": G}, {R: (R, "marker"), G: None, ABSTAIN: (R, "marker"), UNREAD: (R, "marker")}),
    # 2: statements about this adapter that contradict each other.
    ({**SAYS_R, "training": EXPLICIT_G}, {R: (R, "marker"), G: None, ABSTAIN: None, UNREAD: None}),
    ({**SAYS_R, "training": OLD_UNSLOTH}, {R: (R, "marker"), G: None, ABSTAIN: None, UNREAD: None}),
    ({**SAYS_G, "training": PEFT}, {R: None, G: (G, "marker"), ABSTAIN: None, UNREAD: None}),
    (
        {"training": TrainingStatement("peft", "0.21.2", "grouped_by_expert")},
        {R: None, G: (G, "training"), ABSTAIN: None, UNREAD: None},
    ),
    (
        {**SAYS_R, "unsloth_fused_expert_lora": {"lora_B_layout": "grouped_by_expert"}},
        {R: None, G: (G, "marker"), ABSTAIN: None, UNREAD: None},
    ),
]
CASES = [(given, tensors, expected) for given, row in TABLE for tensors, expected in row.items()]


@pytest.mark.parametrize(("given", "tensors", "expected"), CASES)
def test_rules(given: dict[str, Any], tensors: Verdict, expected: tuple[Packing, str] | None) -> None:
    if expected is None:
        with pytest.raises(LayoutConflict) as caught:
            decide(tensors, **given)
        assert (caught.value.adapter, caught.value.where) == (LABEL, "the packing of down_proj")
        assert "force" in caught.value.advice
        return
    found = decide(tensors, **given)
    assert (found.value, found.decided_by) == expected
    assert found.undecided is (expected[1] == "provisional")
    assert found.by_layer == ()


@pytest.mark.parametrize("forced", Packing)
@pytest.mark.parametrize(("given", "tensors"), [(given, tensors) for given, tensors, _ in CASES])
def test_force_beats_everything_that_stays_listed(
    given: dict[str, Any], tensors: Verdict, forced: Packing
) -> None:
    found = decide(tensors, forced=forced, **given)
    assert (found.value, found.decided_by, found.undecided) == (forced, "forced", False)
    listed = [item.source for item in found.evidence]
    assert listed[0] == "forced"
    assert ("tensors" in listed) is (tensors != UNREAD)
    assert ("policy" in listed) is ("policy" in given)
    assert ("scores" in listed) is ("scores" in given)
    assert ("training" in listed) is ("training" in given)
    assert {item.says for item in found.overruled} <= {forced.other}
    assert (tensors == forced.other) is any(item.source == "tensors" for item in found.overruled)


def test_no_decision_goes_against_decisive_tensors() -> None:
    """Every combination of four statements, unless one is forced: decided with the tensors, or refused."""
    words: tuple[Packing | None, ...] = (None, R, G)
    decided = refused = 0
    for marker, training, policy, tensors in product(words, words, words, Packing):
        config = {} if marker is None else {"lora_B_layout": marker.value}
        stated = None if training is None else TrainingStatement(layout=training)
        try:
            found = decide(tensors, training=stated, policy=policy, **config)
        except LayoutConflict:
            refused += 1
            assert tensors.other in (marker, training, policy)
        else:
            decided += 1
            assert found.value is tensors
    assert (decided, refused) == (28, 26)


def test_evidence_is_listed_with_its_weight() -> None:
    found = decide(ABSTAIN, **SAYS_G, training=NEW_UNSLOTH, policy=R)
    assert [(item.source, item.says, item.strength) for item in found.evidence] == [
        ("marker", G, "explicit"),
        ("training", R, "default"),
        ("policy", R, "rule"),
        ("tensors", None, "none"),
        ("peft_version", R, "prior"),
    ]
    assert [item.source for item in found.overruled] == ["training", "policy"]
    measured = decide(G).evidence[0]
    assert (measured.source, measured.says, measured.strength) == ("tensors", G, "measured")
    assert measured.detail == "what was measured"
    assert [item.source for item in decide(UNREAD).evidence] == ["peft_version", "provisional"]


@pytest.mark.parametrize(
    ("given", "tensors", "expected", "found"),
    [
        # An old adapter saved again through unsloth_zoo 2026.9.6 to 2026.9.9 is stamped rank_major over grouped data.
        (
            SAYS_R,
            G,
            "tensors that are rank_major, as marker says (lora_B_layout)",
            "tensors that are grouped_by_expert: z -4.5 as rank_major, 171.8 as grouped_by_expert, "
            "pooled over 3 tensors",
        ),
        (
            {"policy": R},
            G,
            "tensors that are rank_major, as policy says (policy.json)",
            "tensors that are grouped_by_expert: z -4.5 as rank_major, 171.8 as grouped_by_expert, "
            "pooled over 3 tensors",
        ),
        (
            {**SAYS_R, "training": OLD_UNSLOTH},
            ABSTAIN,
            "statements that agree (lora_B_layout says rank_major)",
            "training.json: unsloth_zoo 2026.8.17: versions up to 2026.9.5 group by expert in the families they "
            "patch says grouped_by_expert; the tensors say neither (z 3.8 as rank_major, -2.2 as grouped_by_expert, "
            "3 tensors)",
        ),
        (
            {**SAYS_R, "training": EXPLICIT_G},
            UNREAD,
            "statements that agree (lora_B_layout says rank_major)",
            "training.json: lora_B_layout says grouped_by_expert; the tensors were not read",
        ),
    ],
)
def test_conflicts_give_their_numbers(
    given: dict[str, Any], tensors: Verdict, expected: str, found: str
) -> None:
    with pytest.raises(LayoutConflict) as caught:
        decide(tensors, **given)
    assert (caught.value.expected, caught.value.found) == (expected, found)
    assert "trained it" in caught.value.advice and "force" in caught.value.advice
    assert "roster migrate --packing" in caught.value.advice, "what can be done about it in the pipeline"


@pytest.mark.parametrize(
    ("given", "tensors", "layers", "settled"),
    [
        ({}, G, (G, R, G), "grouped_by_expert in every layer (tensors)"),
        (SAYS_G, G, (G, R, G), "grouped_by_expert in every layer (marker)"),
        # All together abstain, but one says the other packing than the statement.
        (SAYS_G, ABSTAIN, (ABSTAIN, R, ABSTAIN), "grouped_by_expert in every layer (marker)"),
        ({"scores": G}, ABSTAIN, (ABSTAIN, R, ABSTAIN), "grouped_by_expert in every layer (scores)"),
        # Nothing is stated, all together abstain, and single tensors contradict each other.
        ({}, ABSTAIN, (G, R, ABSTAIN), "grouped_by_expert in every layer"),
    ],
)
def test_outlier_is_named(
    given: dict[str, Any], tensors: Verdict, layers: tuple[Verdict, ...], settled: str
) -> None:
    """One layer in the other packing: plain in that tensor alone, and too little to show in the pool."""
    with pytest.raises(LayoutConflict) as caught:
        decide(tensors, layers=layers, **given)
    error = caught.value
    assert (error.adapter, error.where, error.expected) == (LABEL, name_of(1), settled)
    assert error.found == (
        "a tensor that is rank_major: z 41.5 as rank_major, -2.2 as grouped_by_expert; such tensors: 1 of 3"
    )
    assert "force a packing" in error.advice
    forced = decide(tensors, layers=layers, forced=G, **given)
    assert forced.value is G
    if tensors is G:  # a forced packing leaves it listed
        [listed] = forced.overruled
        assert (listed.source, listed.says, listed.strength) == ("tensors", R, "measured")
        assert listed.detail == "of layer 1 by itself: z 41.5 as rank_major, -2.2 as grouped_by_expert"


@pytest.mark.parametrize("says", Packing)
def test_few_decisive_tensors_that_agree_leave_it_open(says: Packing) -> None:
    """They are no pool, so both readings are scored; what is provisional is nobody's word to contradict."""
    for reading in Packing:
        found = decide(ABSTAIN, layers=(ABSTAIN, says, ABSTAIN), provisional=reading)
        assert (found.value, found.decided_by, found.undecided) == (reading, "provisional", True)


def test_mixed_layers_are_what_their_own_tensors_say() -> None:
    found = decide(ABSTAIN, layers=(G, R, G), **MIXED)
    assert (found.value, found.decided_by, found.undecided) == (None, "tensors", False)
    assert found.by_layer == ((0, G), (1, R), (2, G))
    assert [found.at(layer) for layer in range(3)] == [G, R, G]
    assert (found.layers_of(G), found.layers_of(R)) == ((0, 2), (1,))
    with pytest.raises(KeyError):
        found.at(3)
    assert [(item.source, item.says, item.strength) for item in found.evidence] == [
        ("marker", None, "explicit"),
        ("tensors", None, "none"),
        ("peft_version", R, "prior"),
    ]
    stated = decide(ABSTAIN, layers=(G, R, G), **MIXED, training=PEFT)
    assert stated.by_layer == found.by_layer
    assert [item.source for item in stated.overruled] == ["training"]


def test_mixed_layers_may_turn_out_alike() -> None:
    found = decide(G, **MIXED)
    assert (found.value, found.decided_by, found.by_layer) == (G, "tensors", ())


def test_mixed_may_be_forced() -> None:
    found = decide(ABSTAIN, layers=(G, R, ABSTAIN), forced=R, **MIXED)
    assert (found.value, found.decided_by) == (R, "forced")


@pytest.mark.parametrize(
    ("tensors", "layers", "found", "advice"),
    [
        (
            ABSTAIN,
            (G, ABSTAIN, R),
            f"'mixed', and in {name_of(1)} z 1.2 as rank_major, -0.8 as grouped_by_expert",
            "force",
        ),
        (UNREAD, None, "'mixed', and no tensor was read", "not by its header alone"),
    ],
)
def test_mixed_that_no_tensor_resolves(
    tensors: Verdict, layers: tuple[Verdict, ...] | None, found: str, advice: str
) -> None:
    with pytest.raises(PackingUndecided) as caught:
        decide(tensors, layers=layers, **MIXED)
    error: AdapterError = caught.value
    assert error.adapter == LABEL
    where = "adapter_config.json: unsloth_fused_expert_lora.parameters.down_proj.lora_B_layout"
    assert (error.where, error.found) == (where, found)
    assert "rank_major or grouped_by_expert" in error.expected
    assert advice in error.advice


@pytest.mark.parametrize(
    ("given", "value", "by"),
    [
        ({}, R, "provisional"),
        (SAYS_G, G, "marker"),
        ({**SAYS_R, "training": EXPLICIT_G}, R, "marker"),
        (MIXED, R, "provisional"),
        ({"forced": G}, G, "forced"),
    ],
)
@pytest.mark.parametrize("tensors", [ABSTAIN, UNREAD])
def test_rank_1_discriminates_nothing(
    given: dict[str, Any], value: Packing, by: str, tensors: Verdict
) -> None:
    """Both packings are one: nothing can be in conflict, and there is nothing for scores to decide."""
    found = decide(tensors, same=RANK_1, **given)
    assert (found.value, found.decided_by, found.undecided) == (value, by, False)
    [tensor] = [item for item in found.evidence if item.source == "tensors"]
    assert (tensor.says, tensor.strength) == (None, "none")
    assert tensor.detail == "not discriminating: rank 1, so both packings are one and the same"


def test_layers_that_discriminate_nothing_count_for_nothing() -> None:
    """Layers of rank 1, or that hold zeros only, beside others: the others decide, alone and when mixed."""
    others = [
        PackedTensor(layer, name_of(layer), None, score(layer, says)) for layer, says in ((1, G), (2, R))
    ]
    tensors = [PackedTensor(0, name_of(0), "only zeros"), *others]
    mixed = list_statements(
        "down_proj",
        family=FAMILY,
        config=parse_adapter_config(json.dumps(config_fields(**MIXED)).encode(), label=LABEL),
        forced=None,
        training=None,
        policy=None,
        adapter=LABEL,
    )
    found = decide_packing(
        "down_proj",
        mixed,
        tensors,
        pooled(ABSTAIN, [score(1, G), score(2, R)]),
        None,
        provisional=R,
        adapter=LABEL,
    )
    assert found.by_layer == ((0, R), (1, G), (2, R))
