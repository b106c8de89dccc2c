"""The choice of wrong adapters."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping

import pytest

from tasks.bpb.opponents import Candidate, Known, KnownFrom, Opponent, Served, Why, choose_opponents

SERVED = tuple(Served(f"author-{n}", f"output{n}") for n in range(1, 9))
WHEN = "2026-11-20T12:30:00Z"


def candidate(one: Served, *more: str, digests: Iterable[str] = ()) -> Candidate:
    """As the store would tell of it; `more` are the authors it serves besides."""
    uploaded = one.output_digest.replace("output", "adapter")
    known = frozenset({uploaded, one.output_digest, f"weights of {one.output_digest}", *digests})
    return Candidate(uploaded, known, frozenset({one.author, *more}))


class Store:
    """What the store tells of each served adapter, and what it was asked."""

    def __init__(self, told: Mapping[Served, Candidate | None]) -> None:
        self.told = told
        self.asked: list[Served] = []

    def __call__(self, one: Served) -> Candidate | None:
        self.asked.append(one)
        return self.told.get(one, candidate(one))


def knowledge(**margins: float) -> list[Known]:
    return [Known(f"author-{name[1:]}", margin, KnownFrom.MATRIX, WHEN) for name, margin in margins.items()]


def choose(
    served: Iterable[Served] = SERVED,
    *,
    adapter_digest: str = "adapter-own",
    authors: Iterable[str] = ("ann",),
    told: Mapping[Served, Candidate | None] | None = None,
    exclusions: tuple[tuple[str, str], ...] = (),
    known: Iterable[Known] = (),
    k: int = 3,
) -> tuple[Opponent, ...]:
    own = Candidate(
        adapter_digest, frozenset({adapter_digest, "output-own", "weights-own"}), frozenset(authors)
    )
    return choose_opponents(served, Store(told or {}), own=own, exclusions=exclusions, known=known, k=k)


def names(chosen: Iterable[Opponent]) -> set[str]:
    return {one.author for one in chosen}


def test_the_choice_depends_on_the_adapter_and_not_on_the_order() -> None:
    shuffled = tuple(random.Random(2).sample(SERVED, len(SERVED)))
    known = knowledge(a3=0.3, a5=0.1, a8=0.2)
    assert choose(shuffled, known=random.Random(3).sample(known, 3)) == choose(known=known)
    assert len(choose()) == 3
    assert len({choose(adapter_digest=f"other{n}") for n in range(8)}) > 3


def test_random_ones_are_those_of_the_smallest_hash() -> None:
    """Written out, since a choice that changes by itself would have every adapter scored against others."""
    hashes = {
        hashlib.sha256(f"adapter-own{one.output_digest}".encode()).hexdigest(): one.author for one in SERVED
    }
    assert [one.author for one in choose(k=8)] == [hashes[found] for found in sorted(hashes)]


def test_random_opponents_are_spread_evenly() -> None:
    met = dict.fromkeys((one.author for one in SERVED), 0)
    for n in range(400):
        for name in names(choose(adapter_digest=f"adapter of {n}", k=2)):
            met[name] += 1
    assert all(60 < count < 140 for count in met.values()), "100 each is even; 60 and 140 are 4.6 sigmas away"


def test_an_adapter_that_is_added_displaces_at_most_one() -> None:
    assert len(names(choose(SERVED[:-1])) - names(choose())) <= 1


@pytest.mark.parametrize("k", [0, 1, 8, 20])
def test_at_most_k_and_at_most_what_is_there(k: int) -> None:
    assert len(choose(k=k)) == min(k, len(SERVED))
    assert len(choose(k=k, known=knowledge(a1=0.1, a2=0.2, a3=0.3, a4=0.4, a5=0.5))) == min(k, len(SERVED))


def test_no_candidate_no_opponent() -> None:
    assert choose(()) == ()
    assert choose((), known=knowledge(a1=0.1)) == (), "what is known but not served is nobody's opponent"


@pytest.mark.parametrize(
    ("k", "hardest"),
    [(1, []), (2, ["5"]), (3, ["5"]), (4, ["5", "8"]), (5, ["5", "8"]), (8, ["5", "8", "3"])],
)
def test_half_are_the_hardest_known(k: int, hardest: list[str]) -> None:
    known = knowledge(a3=0.3, a5=-0.1, a8=0.2)
    chosen = choose(known=known, k=k)
    assert [one.author for one in chosen if one.why is Why.HARDEST] == [f"author-{n}" for n in hardest]
    assert {one.author: one.known for one in chosen if one.why is Why.HARDEST} == {
        one.author: one for one in known if one.author[-1] in hardest
    }
    others = [one for one in chosen if one.why is Why.RANDOM]
    assert all(one.known is None for one in others)
    order = [one.author for one in choose(k=8)]
    left = [author for author in order if author[-1] not in hardest]
    assert [one.author for one in others] == left[: k - len(hardest)], "the rest as if nothing were known"


def test_the_hardest_are_other_ones_than_chance_would_take() -> None:
    """Without knowledge author-5 is met by few; known to be hard, by all."""
    digests = [f"adapter of {n}" for n in range(40)]
    known = knowledge(a5=0.01, a1=0.5, a2=0.6)
    by_chance = sum("author-5" in names(choose(adapter_digest=one, k=2)) for one in digests)
    assert 2 < by_chance < 20
    assert all("author-5" in names(choose(adapter_digest=one, k=2, known=known)) for one in digests)


def test_of_equally_hard_ones_the_hash_decides() -> None:
    known = knowledge(**{f"a{n}": 0.25 for n in range(1, 9)})
    found = {choose(adapter_digest=f"other{n}", known=known, k=2)[0].author for n in range(12)}
    assert len(found) > 3


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), float("-inf")])
def test_a_margin_that_is_no_number_tells_nothing(margin: float) -> None:
    assert choose(known=knowledge(a3=margin), k=8) == choose(k=8)


@pytest.mark.parametrize(
    ("barred", "told"),
    [
        pytest.param(Served("ann", "output-x"), {}, id="same author"),
        *(
            pytest.param(Served("bob", "output-x"), {"digests": [digest]}, id=f"same {digest}")
            for digest in ("adapter-own", "output-own", "weights-own")
        ),
    ],
)
@pytest.mark.parametrize("margin", [None, -1.0])
def test_own_is_never_its_own_opponent(
    barred: Served, told: dict[str, list[str]], margin: float | None
) -> None:
    known = [] if margin is None else [Known(barred.author, margin, KnownFrom.SCORES, WHEN)]
    as_told = {barred: candidate(barred, **told)}
    assert names(choose((*SERVED, barred), told=as_told, known=known, k=20)) == names(choose(k=20))
    assert choose((barred,), told=as_told, known=known) == ()


@pytest.mark.parametrize("known", [[], knowledge(a2=-1.0)], ids=["unknown", "hardest"])
@pytest.mark.parametrize("pair", [("ann", "author-2"), ("author-2", "ann")])
def test_pen_names_are_never_each_others_opponent(pair: tuple[str, str], known: list[Known]) -> None:
    chosen = choose(exclusions=(pair, ("author-4", "author-5")), known=known, k=20)
    assert names(chosen) == {f"author-{n}" for n in (1, 3, 4, 5, 6, 7, 8)}


def test_nobody_whom_the_adapter_serves_is_its_opponent() -> None:
    """An adapter of two authors is judged on both authors' texts; each one's own adapter may well beat it there."""
    chosen = choose(authors=("ann", "author-3"), exclusions=(("author-3", "author-6"),), k=20)
    assert names(chosen) == {f"author-{n}" for n in (1, 2, 4, 5, 7, 8)}, "nor his pen name"


def test_nobody_who_serves_this_author_too_is_his_opponent() -> None:
    shared, pen = SERVED[3], SERVED[6]
    told = {shared: candidate(shared, "ann"), pen: candidate(pen, "anna")}
    assert shared.author not in names(choose(told=told, k=20))
    assert pen.author in names(choose(told=told, k=20))
    assert pen.author not in names(choose(told=told, exclusions=(("anna", "ann"),), k=20))
    both = choose(authors=("ann", "bob"), told={shared: candidate(shared, "bob")}, k=20)
    assert shared.author not in names(both), "two adapters that share one author"


def test_one_opponent_per_author_and_per_content() -> None:
    again, copycat = Served("author-3", "output-new"), Served("copycat", "output-copied")
    told = {copycat: candidate(copycat, digests=["weights of output5"])}
    chosen = choose((*SERVED, again, copycat), told=told, k=20)
    assert len(chosen) == len(SERVED) == len(names(chosen))
    assert len({one.output_digest for one in chosen}) == len(chosen)


def test_what_cannot_be_used_is_replaced() -> None:
    first, second, third = (Served(one.author, one.output_digest) for one in choose(k=3))
    known = [Known(first.author, 0.1, KnownFrom.SCORES, WHEN)]
    assert [one.author for one in choose(told={first: None}, k=2, known=known)] == [
        second.author,
        third.author,
    ]


def test_few_are_looked_up_and_each_once() -> None:
    served = tuple(Served(f"author-{n}", f"output{n}") for n in range(1000))
    gone = served[7]
    store = Store({gone: None})
    own = Candidate("adapter-own", frozenset({"adapter-own"}), frozenset({"ann"}))
    known = [Known(one.author, n / 10, KnownFrom.MATRIX, WHEN) for n, one in enumerate(served[7:10])]
    chosen = choose_opponents(served, store, own=own, exclusions=(), known=known, k=4)
    assert len(store.asked) == 5 and store.asked[0] == gone
    assert [one.author for one in chosen[:2]] == ["author-8", "author-9"]
    everybody = choose_opponents(served, store, own=own, exclusions=(), known=known, k=2000)
    assert len(everybody) == 999 and store.asked[5:].count(gone) == 1
